"""Feature maps phi: what replaces the softmax's exponential in linear attention.

Softmax attention weighs value j by exp(q_i . k_j); linear attention weighs it by
phi(q_i) . phi(k_j), so that the sum over j can be taken once (Katharopoulos et al., 2020).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from linattn import _linattn

__all__ = ["FEATURE_MAPS", "FeatureMap", "apply_feature_map"]

# The core's numbers, in the order of la_map in csrc/linattn.h.
_CORE = {"identity": 0.0, "elu+1": 1.0, "relu+eps": 2.0, "relu2": 3.0, "exp": 4.0}


@dataclass(frozen=True)
class FeatureMap:
    """A feature map: one of the core's by name, or functions of your own.

    Parameters
    ----------
    name : str
        ``"identity"``, ``"elu+1"`` (x + 1 above zero, exp(x) below), ``"relu+eps"``
        (max(x, 0) + eps), ``"relu2"`` (max(x, 0)**2), ``"exp"``; these run inside the kernels.
        Any other name needs ``forward``.
    eps : float
        Of ``"relu+eps"``, 1e-3 by default.
    forward : callable, optional
        phi itself, from an array [..., K] to an array [..., K'] of the same dtype. It gets the
        caller's own arrays: NumPy's, PyTorch's, ...
    backward : callable, optional
        ``backward(x, dy)`` gives the gradient of x when dy is the gradient of phi(x). Only
        ``linear_attention_backward`` needs it: PyTorch records what ``forward`` does.

    Raises
    ------
    TypeError
        ``name`` is not a string, ``eps`` not a number, ``forward`` or ``backward`` not a function.
    ValueError
        There is no map of that name, ``eps`` is negative or not finite, or ``backward`` is given
        without ``forward``.

    See Also
    --------
    apply_feature_map : phi(x), by itself.
    favor, dpfp : Make maps with more features than K.

    Examples
    --------
    A map from K to 2 K numbers:

    >>> import numpy as np, linattn
    >>> def both_signs(x):
    ...     return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], -1) + 1e-3
    >>> phi = linattn.FeatureMap("both_signs", forward=both_signs)
    >>> x = np.random.default_rng(0).standard_normal((5, 4))  # one head: [T,K]
    >>> _, (S, z) = linattn.linear_attention(x, x, x, feature_map=phi, output_final_state=True)
    >>> S.shape, z.shape
    ((8, 4), (8,))
    """

    name: str
    eps: float = 1e-3
    forward: Callable[[Any], Any] | None = None
    backward: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"feature_map: expected name to be a str, got {type(self.name)}")
        for what in ("forward", "backward"):
            function = getattr(self, what)
            if function is not None and not callable(function):
                raise TypeError(
                    f"feature_map: expected {what} to be callable, got {type(function)}"
                )
        if self.forward is None and self.backward is not None:
            raise ValueError("feature_map: expected forward beside backward, got backward alone")
        if self.forward is None and self.name not in _CORE:
            raise ValueError(
                f"feature_map: expected one of {', '.join(map(repr, _CORE))} or a callable, "
                f"got {self.name!r}"
            )
        if isinstance(self.eps, bool) or not isinstance(
            self.eps, int | float | np.floating | np.integer
        ):
            raise TypeError(f"feature_map: expected eps to be a number, got {type(self.eps)}")
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"feature_map: expected a finite eps >= 0, got {self.eps!r}")

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        if self.name == "relu+eps" and self.forward is None:
            parts.append(f"eps={self.eps}")
        for what in ("forward", "backward"):
            function = getattr(self, what)
            if function is not None:
                parts.append(f"{what}={getattr(function, '__name__', type(function).__name__)}")
        return f"FeatureMap({', '.join(parts)})"

    @property
    def core(self) -> float:
        """The core's number; 0 (identity) for a map that is applied before the core is called."""
        return _CORE[self.name if self.forward is None else "identity"]

    @property
    def may_be_negative(self) -> bool:
        """Is this map known to reach below zero, so that a denominator could too?"""
        return self.forward is None and self.name == "identity"


FEATURE_MAPS: tuple[str, ...] = tuple(_CORE)

FeatureMapLike = str | FeatureMap | Callable[[Any], Any]


def _one(given: object) -> FeatureMap:
    if isinstance(given, FeatureMap):
        return given
    if isinstance(given, str):
        return FeatureMap(given)
    if callable(given):
        return FeatureMap(getattr(given, "__name__", "callable"), forward=given)
    raise TypeError(
        "feature_map: expected a name, a FeatureMap, a callable or a pair of them, "
        f"got {type(given).__name__}"
    )


def feature_maps(given: object) -> tuple[FeatureMap, FeatureMap]:
    """The maps of q and of k: one for both, or a pair."""
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise ValueError(
                f"feature_map: expected one map or a pair (phi_q, phi_k), got {len(given)}"
            )
        return _one(given[0]), _one(given[1])
    return _one(given), _one(given)


# ---- arithmetic on the user's own arrays ----


_NUMPYS = (np.ndarray, np.generic)  # a tuple: torch.compile reads the line that asks


def is_array(x: object) -> bool:
    """Is this an array of some library's? What is in it, the core will say."""
    if isinstance(x, _NUMPYS):
        return isinstance(x, np.ndarray)
    return shape_of(x) is not None and hasattr(x, "dtype") and has_memory(x)


def has_memory(x: object) -> bool:
    """Does this show its memory in a way that the core knows?"""
    return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def shape_of(x: object) -> tuple[Any, ...] | None:
    """x's shape; None if it has none."""
    try:
        shape = x.shape  # type: ignore[attr-defined]
    except Exception:  # what is no array may fail in any way, and so do PyTorch's nested tensors
        return None
    return shape if isinstance(shape, tuple) else None


def cast(x: Any, dtype: Any) -> Any:
    """x in this dtype; x itself if it has it."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def wide(x: Any) -> Any:
    """x in float32 or better."""
    if x.dtype.itemsize >= 4:
        return x
    return x.astype("float32") if hasattr(x, "astype") else x.float()


def l2norm(x: Any) -> Any:
    """x / sqrt(sum x^2 + 1e-6) along the last axis, in float32 or better."""
    y = wide(x)
    return cast(y / ((y * y).sum(-1, keepdims=True) + 1e-6) ** 0.5, x.dtype)


def l2norm_backward(x: Any, dy: Any) -> Any:
    """The gradient of x when dy is that of l2norm(x): r (dy - y y'dy), r the factor."""
    x, dy = wide(x), wide(dy)
    r = 1 / ((x * x).sum(-1, keepdims=True) + 1e-6) ** 0.5
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdims=True))


# ---- maps and options on their way to the core ----

# (map of q, its eps, map of k, its eps, normaliser, eps, causal): one form for the core and for
# PyTorch's operators, whose signatures have lists of floats
CoreFeatures = tuple[float, float, float, float, float, float, float]


def is_tensor(x: Any) -> bool:
    """Is this PyTorch's? It is not imported for the question."""
    if type(x) is np.ndarray or "torch" not in sys.modules:
        return False
    return isinstance(x, sys.modules["torch"].Tensor)


def library_of(x: Any) -> Any:
    """The module with the functions of x's library: torch, numpy, cupy, jax.numpy, ..."""
    if is_tensor(x):
        return sys.modules["torch"]
    if isinstance(x, _NUMPYS):
        return np
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules.get(type(x).__module__.partition(".")[0], np)


def held(dtype: Any, x: Any) -> Any:
    """The dtype as x's library holds it: JAX has no float64 unless it is told to."""
    jax = sys.modules.get("jax")
    return jax.dtypes.canonicalize_dtype(dtype) if jax and isinstance(x, jax.Array) else dtype


def indices_beside(like: Any, x: Any) -> Any:
    """An array of ints that can stand beside `like`."""
    found = np.asarray(x, np.int64)
    if is_tensor(like):
        return library_of(like).as_tensor(found, device=like.device)
    return library_of(like).asarray(found)


def is_recorded(x: Any) -> bool:
    return is_tensor(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def is_traced(x: Any) -> bool:
    """Is torch.compile reading this line? It looks through a cache, and warns of that."""
    return is_tensor(x) and sys.modules["torch"].compiler.is_compiling()


def is_seen(x: Any) -> bool:
    """Does a tracer or a mode of PyTorch's look at the calls of this tensor?"""
    torch = sys.modules["torch"]
    seen: bool = torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())
    return seen or type(x) not in (torch.Tensor, torch.nn.Parameter)


def core_features(
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike],
    normalize: bool | str,
    eps: float,
    causal: bool,
) -> tuple[FeatureMap, FeatureMap, CoreFeatures]:
    """The maps of q and k, and linear attention's options as the core takes them."""
    if isinstance(feature_map, str) and isinstance(normalize, bool | str) and type(eps) is float:
        return _named_features(feature_map, normalize, eps, causal is True or _flag(causal))
    return any_features(feature_map, normalize, eps, causal)


def _flag(causal: object) -> bool:
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal: expected True or False, got {type(causal).__name__}")
    return bool(causal)


def any_features(
    feature_map: object, normalize: object, eps: object, causal: object
) -> tuple[FeatureMap, FeatureMap, CoreFeatures]:
    phi_q, phi_k = feature_maps(feature_map)
    if isinstance(normalize, str):
        if normalize not in ("clamp", "add"):
            raise ValueError(f"normalize: expected a bool, 'clamp' or 'add', got {normalize!r}")
        normaliser = 1.0 if normalize == "clamp" else 2.0
    elif isinstance(normalize, bool | np.bool_):
        normaliser = float(normalize)
        if normalize and (phi_q.may_be_negative or phi_k.may_be_negative):
            raise ValueError(
                "normalize: with feature_map='identity' the denominator may be negative or zero, "
                "and clamping it is wrong; expected False (or 'clamp' to insist), got True"
            )
    else:
        raise TypeError(
            f"normalize: expected a bool, 'clamp' or 'add', got {type(normalize).__name__}"
        )
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating | np.integer):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    try:
        small = float(eps)
    except OverflowError:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}") from None
    of_maps = (phi_q.core, float(phi_q.eps), phi_k.core, float(phi_k.eps))
    core = (*of_maps, normaliser, small, float(_flag(causal)))
    return phi_q, phi_k, core


def finite_eps(eps: Any) -> float:
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating | np.integer):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps!r}")
    return float(eps)


# A step is called for every token; the usual options are worked out once.
_named_features = lru_cache(maxsize=64, typed=True)(any_features)


# The core's maps once more, on arrays of NumPy's and of PyTorch's. exp gets no argument that
# overflows where its result is not used.
_MAPS: dict[str, Callable[[Any, float], Any]] = {
    "identity": lambda x, eps: x,
    "elu+1": lambda x, eps: x.clip(0, None) + _exp(x.clip(None, 0)),  # x + 1, or 0 + exp(x)
    "relu+eps": lambda x, eps: x.clip(0, None) + eps,
    "relu2": lambda x, eps: x.clip(0, None) ** 2,
    "exp": lambda x, eps: _exp(x),
}


def _exp(x: Any) -> Any:
    if is_tensor(x):
        return x.exp()
    with np.errstate(over="ignore"):  # inf, as in the kernels
        return np.exp(x)


def apply_feature_map(x: Any, feature_map: FeatureMapLike = "elu+1") -> Any:
    """phi(x), element by element, as :func:`linattn.linear_attention` computes it in its kernels.

    Parameters
    ----------
    x : array [..., K]
        NumPy's or PyTorch's (which records it), of a floating dtype.
    feature_map : str, FeatureMap or callable
        As in :func:`linattn.linear_attention`; one map, not a pair.

    Returns
    -------
    array [..., K], or [..., K'] if the map is a function that says so; dtype of x
        float16 and bfloat16 are computed in float32, and rounded once.

    Raises
    ------
    TypeError
        x is no array of floating numbers.
    ValueError
        There is no such map.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> linattn.apply_feature_map(np.array([-1.0, 0.0, 2.0]), "elu+1").round(3)
    array([0.368, 1.   , 3.   ])
    """
    phi = _one(feature_map)
    if is_tensor(x):
        real = x.dtype.is_floating_point
    elif isinstance(x, np.ndarray):
        real = x.dtype.kind == "f" or x.dtype.name == "bfloat16"
    else:
        raise TypeError(f"x: expected an array of NumPy's or PyTorch's, got {type(x).__name__}")
    if not real:
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}")
    if phi.forward is not None:
        return apply_map(phi, "x", x)
    return cast(_MAPS[phi.name](wide(x), phi.eps), x.dtype)


def apply_map(phi: FeatureMap, name: str, x: Any) -> Any:
    """phi(x) for a map that is not the core's own."""
    if phi.forward is None:
        return x
    y = phi.forward(x)
    if not is_array(y) or y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"feature_map: expected {phi.name} to give an array [..., K'] for {name} of shape "
            f"{tuple(x.shape)}, got {tuple(y.shape) if is_array(y) else type(y)}"
        )
    if is_recorded(x) and not is_recorded(y):
        raise ValueError(
            f"feature_map: expected PyTorch to record what {phi.name} makes of {name}, which "
            "requires gradients; got a result that requires none"
        )
    return cast(y, x.dtype)


def apply_map_backward(phi: FeatureMap, name: str, x: Any, dy: Any) -> Any:
    """The gradient of x when dy is that of phi(x): was y = phi(x)."""
    if phi.backward is None:
        return dy
    dx = phi.backward(x, dy)
    if not is_array(dx) or dx.shape != x.shape:
        raise ValueError(
            f"feature_map: expected {phi.name}'s backward to give the gradient of {name}, "
            f"shape {tuple(x.shape)}, got {tuple(dx.shape) if is_array(dx) else type(dx)}"
        )
    return cast(dx, x.dtype)


def mapped(
    phi_q: FeatureMap,
    phi_k: FeatureMap,
    q: Any,
    k: Any,
    qk_l2norm: bool,
    written: dict[str, Any],
) -> tuple[Any, Any, Any, Any, bool]:
    """q and k before and after the caller's own maps, and whether the core still has to l2-norm.

    The norm comes before the map, so a map outside the core takes the norm out with it.
    """
    if phi_q.forward is None and phi_k.forward is None:
        return q, k, q, k, qk_l2norm
    for name, x in (("q", q), ("k", k)):
        if not is_array(x):
            raise TypeError(f"{name}: expected an array, got {type(x)}")
    _refuse_shared(written, q, k)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    return q, k, apply_map(phi_q, "q", q), apply_map(phi_k, "k", k), False


def _refuse_shared(written: dict[str, Any], q: Any, k: Any) -> None:
    """What is written may not lie in q or k, also where a map made copies of them."""
    for name, given in written.items():
        for x in given if isinstance(given, tuple | list) else (given,):
            for of, other in (("q", q), ("k", k)):
                if is_array(x) and _share(x, other):
                    raise ValueError(
                        f"{name}: expected memory of its own, got memory shared with {of}"
                    )


def _share(x: Any, y: Any) -> bool:
    try:
        return _linattn.shares_memory(x, y)
    except (TypeError, ValueError):
        return False  # one of them is no array for an op: the core refuses it by its name
