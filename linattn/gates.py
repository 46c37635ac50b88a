"""Gates and betas from a model's projections: functions in front of the ops, with gradients.

The ops take g, the LOG of the decay, and beta as numbers. Models make these from projections x, a
rate A_log per head and a bias dt_bias::

    softplus  g = -exp(A_log) softplus(x + dt_bias)               Mamba-2, Gated DeltaNet, KDA
    bounded   g = lower_bound sigmoid(exp(A_log) (x + dt_bias))   KDA in later models
    rwkv7     g = -exp(-1/2) sigmoid(x)                           RWKV-7
    beta      beta = sigmoid(x), or 2 sigmoid(x)                  the delta rule

Each takes the arrays of NumPy, PyTorch (which records them), CuPy and JAX. Results are float32, and
float64 for float64 x: a decay of bfloat16 numbers loses its digits near 1. ``softplus_backward``
and the like are the gradients for arrays that no library records.

For NumPy, PyTorch and CuPy the core makes each in one pass over x, on the CPU and on a GPU. Other
arrays, and parameters with more than two axes, take the formulas below, in the functions of their
library.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from linattn import _elementwise as elementwise
from linattn import _linattn
from linattn.features import cast, is_array, is_tensor, library_of

__all__ = [
    "GateGradients",
    "beta",
    "beta_backward",
    "bounded",
    "bounded_backward",
    "rwkv7",
    "rwkv7_backward",
    "softplus",
    "softplus_backward",
]

_RWKV7 = -math.exp(-0.5)
_NUMBERS = (np.float64, np.float32, np.float16)  # an element of an array: one token of one head


class GateGradients(NamedTuple):
    """The gradients of a gate, each with the shape and dtype of its input.

    Attributes
    ----------
    dx : array
    dA_log, ddt_bias : array or None
        None for an array that was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> grads = gates.softplus_backward(np.ones((5, 2)), np.zeros((5, 2)), np.zeros(2))
    >>> grads.dx.shape, grads.dA_log.shape, grads.ddt_bias is None
    ((5, 2), (2,), True)
    """

    dx: Any
    dA_log: Any = None
    ddt_bias: Any = None


def softplus(x: Any, A_log: Any, dt_bias: Any = None) -> Any:
    """The log decay g = -exp(A_log) softplus(x + dt_bias) of Mamba-2, Gated DeltaNet and KDA.

    Parameters
    ----------
    x : array [...,HV], or [...,HV,K] for a decay per key
    A_log : array that broadcasts against x
        [HV], and [HV,1] for a decay per key. The log of the rate A.
    dt_bias : array that broadcasts against x, optional
        [HV], and [HV,K] for a decay per key.

    Returns
    -------
    g : array, shape of x
        At most 0. float32, or float64 for float64 x.

    Raises
    ------
    TypeError
        An argument is no array of floating numbers, or one of another library than x.
    ValueError
        A shape does not broadcast to that of x.

    See Also
    --------
    linattn.gated_delta_rule, linattn.kda, linattn.simple_gla : Take g.

    Notes
    -----
    softplus(u) has all digits of small and of large u, and nothing overflows. Other libraries take
    u itself above 20, where float32 sees no difference, and float64 does.

    References
    ----------
    Dao and Gu, 2024, *Transformers are SSMs*, arXiv:2405.21060; Yang et al., 2024, *Gated Delta
    Networks*, arXiv:2412.06464; Kimi Team, 2025, *Kimi Linear*, arXiv:2510.26692.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import gates
    >>> x, A_log = np.zeros((1, 3, 2)), np.log([1.0, 16.0])  # [B,T,HV], [HV]
    >>> np.exp(gates.softplus(x, A_log))[0, 0].round(6)  # decays: 1/2, and its 16th power
    array([5.0e-01, 1.5e-05])

    A decay per key:

    >>> x, dt_bias = np.zeros((1, 3, 2, 4)), np.zeros((2, 4))  # [B,T,HV,K], [HV,K]
    >>> gates.softplus(x, A_log[:, None], dt_bias).shape
    (1, 3, 2, 4)
    """
    if A_log is None:
        _real("A_log", A_log)
    return _made("softplus", -1.0, x, A_log, dt_bias)


def softplus_backward(dg: Any, x: Any, A_log: Any, dt_bias: Any = None) -> GateGradients:
    """The gradients of :func:`softplus`.

    Parameters
    ----------
    dg : array, shape of x
        The gradient of g.
    x, A_log, dt_bias : see :func:`softplus`

    Returns
    -------
    GateGradients

    Raises
    ------
    TypeError, ValueError
        As in :func:`softplus`.

    Examples
    --------
    Through an op and its gate, for NumPy:

    >>> import numpy as np, linattn
    >>> from linattn import gates
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 6, 3))  # one head: [T,K]
    >>> x, A_log = np.linspace(-3, 0, 6), np.zeros(1)
    >>> dg = linattn.simple_gla_backward(do, q, k, v, gates.softplus(x, A_log)).dg
    >>> grads = gates.softplus_backward(dg, x, A_log)
    >>> h = 1e-6
    >>> up, down = (
    ...     (linattn.simple_gla(q, k, v, gates.softplus(x, A_log + s))[0] * do).sum()
    ...     for s in (h, -h)
    ... )
    >>> np.allclose(grads.dA_log, (up - down) / (2 * h))
    True
    """
    if A_log is None:
        _real("A_log", A_log)
    return _differentiated("softplus", -1.0, dg, x, A_log, dt_bias)


def bounded(x: Any, A_log: Any, dt_bias: Any = None, lower_bound: float = -5.0) -> Any:
    """The log decay g = lower_bound sigmoid(exp(A_log) (x + dt_bias)): not below the bound.

    Parameters
    ----------
    x : array [...,HV], or [...,HV,K] for a decay per key
    A_log : array that broadcasts against x, or None
        [HV], and [HV,1] for a decay per key. None is exp(A_log) = 1.
    dt_bias : array that broadcasts against x, optional
        [HV], and [HV,K] for a decay per key.
    lower_bound : float
        Below 0. With -5 no decay is less than 0.0067.

    Returns
    -------
    g : array, shape of x
        From lower_bound to 0. float32, or float64 for float64 x.

    Raises
    ------
    TypeError
        An argument is no array of floating numbers, or one of another library than x.
    ValueError
        A shape does not broadcast to that of x, or lower_bound is not a finite number below 0.

    See Also
    --------
    softplus : Without a bound.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> gates.bounded(np.array([-100.0, 0.0, 100.0]), np.zeros(1)).round(3)
    array([-0. , -2.5, -5. ])
    """
    return _made("bounded", checked_bound(lower_bound), x, A_log, dt_bias)


def bounded_backward(
    dg: Any, x: Any, A_log: Any, dt_bias: Any = None, lower_bound: float = -5.0
) -> GateGradients:
    """The gradients of :func:`bounded`.

    Parameters
    ----------
    dg : array, shape of x
        The gradient of g.
    x, A_log, dt_bias, lower_bound : see :func:`bounded`

    Returns
    -------
    GateGradients

    Raises
    ------
    TypeError, ValueError
        As in :func:`bounded`.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> x, dg = np.array([-1.0, 0.0, 2.0]), np.ones(3)
    >>> grads = gates.bounded_backward(dg, x, None, lower_bound=-4)
    >>> grads.dx[1], grads.dA_log is None  # -4 times the slope of the sigmoid, 1/4
    (np.float64(-1.0), True)
    """
    return _differentiated("bounded", checked_bound(lower_bound), dg, x, A_log, dt_bias)


def rwkv7(x: Any) -> Any:
    """The log decay of RWKV-7, g = -exp(-1/2) sigmoid(x): decays from 0.545 to 1.

    Parameters
    ----------
    x : array
        Of any shape: w before its activation.

    Returns
    -------
    g : array, shape of x
        float32, or float64 for float64 x.

    Raises
    ------
    TypeError
        x is no array of floating numbers.

    References
    ----------
    Peng et al., 2025, *RWKV-7 "Goose" with Expressive Dynamic State Evolution*, arXiv:2503.14456.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> np.exp(gates.rwkv7(np.array([-100.0, 100.0]))).round(4)
    array([1.    , 0.5452])
    """
    return _made("rwkv7", _RWKV7, x)


def rwkv7_backward(dg: Any, x: Any) -> GateGradients:
    """The gradient of :func:`rwkv7`.

    Parameters
    ----------
    dg : array, shape of x
        The gradient of g.
    x : see :func:`rwkv7`

    Returns
    -------
    GateGradients
        With dx alone.

    Raises
    ------
    TypeError, ValueError
        x or dg is no array of floating numbers, or their shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> gates.rwkv7_backward(np.ones(1), np.zeros(1)).dx.round(4)  # -exp(-1/2) / 4
    array([-0.1516])
    """
    return _differentiated("rwkv7", _RWKV7, dg, x)


def beta(x: Any, allow_neg_eigval: bool = False) -> Any:
    """The delta rule's beta = sigmoid(x), or 2 sigmoid(x).

    Parameters
    ----------
    x : array
        Of any shape: beta before its activation.
    allow_neg_eigval : bool
        Twice the sigmoid. I - beta k k' with a unit k has the eigenvalue 1 - beta, which then goes
        down to -1: a state can swap two keys.

    Returns
    -------
    beta : array, shape of x
        float32, or float64 for float64 x.

    Raises
    ------
    TypeError
        x is no array of floating numbers, or allow_neg_eigval no bool.

    References
    ----------
    Grazzi et al., 2024, *Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues*,
    arXiv:2411.12537.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> gates.beta(np.zeros(2)), gates.beta(np.zeros(2), allow_neg_eigval=True)
    (array([0.5, 0.5]), array([1., 1.]))
    """
    return _made("beta", _share(allow_neg_eigval), x)


def beta_backward(dbeta: Any, x: Any, allow_neg_eigval: bool = False) -> GateGradients:
    """The gradient of :func:`beta`.

    Parameters
    ----------
    dbeta : array, shape of x
        The gradient of beta.
    x, allow_neg_eigval : see :func:`beta`

    Returns
    -------
    GateGradients
        With dx alone.

    Raises
    ------
    TypeError, ValueError
        x or dbeta is no array of floating numbers, or their shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import gates
    >>> gates.beta_backward(np.ones(1), np.zeros(1)).dx
    array([0.25])
    """
    return _differentiated("beta", _share(allow_neg_eigval), dbeta, x)


# ---- in one pass, where the core knows the arrays ----

_AXES = 4  # of x; a parameter has one or two


def _has_axes(most: int, x: Any) -> bool:
    return 1 <= len(x.shape) <= most


def _one_pass(x: Any, *others: Any) -> Any:
    """The function that makes a gate of these in one pass: the core's, or PyTorch's way to it.

    None where there is none, and where PyTorch itself has to see the formula.
    """
    if is_tensor(x):
        if not all(other is None or is_tensor(other) for other in others):
            return None
        from linattn import _recorded_gates

        return _recorded_gates.way(x, *others)
    kind = type(x)
    if kind is not np.ndarray and not _is_cupy(x):
        return None
    return _linattn.gate if all(a is None or type(a) is kind for a in others) else None


def _is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and bool(_linattn.CUDA_ARCHS) and type(x) is cupy.ndarray


def _fit(x: Any, *parameters: Any) -> bool:
    return _has_axes(_AXES, x) and all(a is None or _has_axes(2, a) for a in parameters)


def _made(gate: str, factor: float, x: Any, A_log: Any = None, dt_bias: Any = None) -> Any:
    run = _one_pass(x, A_log, dt_bias)
    if run is not None and _fit(x, A_log, dt_bias):
        return run(gate, factor, x, A_log, dt_bias)
    return by_formula(gate, factor, x, A_log, dt_bias)


def _differentiated(
    gate: str, factor: float, d: Any, x: Any, A_log: Any = None, dt_bias: Any = None
) -> GateGradients:
    run = _one_pass(x, A_log, dt_bias, d)
    if run is _linattn.gate and _fit(x, A_log, dt_bias) and _has_axes(_AXES, d):
        return GateGradients(*run(gate, factor, x, A_log, dt_bias, d))
    return gradients_by_formula(gate, factor, x, A_log, dt_bias, d)


# ---- the formulas, for the arrays of every library: csrc/elements.h has them for the core ----


def by_formula(gate: str, factor: float, x: Any, A_log: Any, dt_bias: Any) -> Any:
    """factor exp(A_log) softplus(u) for "softplus", factor sigmoid(exp(A_log) u) for the others."""
    u, A_log = _shifted(x, A_log, dt_bias)
    with _quiet(u):
        if A_log is None:
            return factor * elementwise.sigmoid(u)
        rate = library_of(u).exp(A_log)
        if gate == "softplus":
            return factor * rate * elementwise.softplus(u)
        return factor * elementwise.sigmoid(rate * u)


def gradients_by_formula(
    gate: str, factor: float, x: Any, A_log: Any, dt_bias: Any, d: Any
) -> GateGradients:
    u, rate = _shifted(x, A_log, dt_bias)
    d = _gradient_of(d, u, "dbeta" if gate == "beta" else "dg")
    with _quiet(u):
        rate = 1 if rate is None else library_of(u).exp(rate)
        if gate == "softplus":
            scaled = factor * rate * d
            du, along = scaled * elementwise.sigmoid(u), scaled * elementwise.softplus(u)
        else:
            w = rate * u
            dw = factor * d * elementwise.sigmoid_slope(w)
            du, along = rate * dw, dw * w
    return GateGradients(
        cast(du, x.dtype),
        None if A_log is None else _summed(along, A_log),
        None if dt_bias is None else _summed(du, dt_bias),
    )


def _quiet(u: Any) -> AbstractContextManager[Any]:
    """No warning of an overflow: exp(A_log) may be infinite, and clears the state then."""
    return nullcontext() if is_tensor(u) else np.errstate(over="ignore")


# ---- arguments, and gradients of their shapes ----


def _real(name: str, x: Any) -> Any:
    """x in float32, or in float64 if it is that."""
    if type(x) not in _NUMBERS and not is_array(x):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise TypeError(f"{name}: expected float64, float32, float16 or bfloat16, got {dtype}")
    return x if dtype in ("float64", "float32") else cast(x, library_of(x).float32)


def _shifted(x: Any, A_log: Any, dt_bias: Any) -> tuple[Any, Any]:
    """x + dt_bias, and A_log in its dtype."""
    u = _real("x", x)
    if A_log is not None:
        A_log = _beside(u, "A_log", A_log)
    return (u if dt_bias is None else u + _beside(u, "dt_bias", dt_bias)), A_log


def _beside(u: Any, name: str, a: Any) -> Any:
    """A parameter in the dtype of u, if its shape broadcasts to that of u."""
    wide = _real(name, a)
    if is_tensor(a) is not is_tensor(u):
        raise TypeError(f"{name}: expected an array of x's library, got {type(a).__name__}")
    shape, x_shape = tuple(a.shape), tuple(u.shape)
    behind = x_shape[len(x_shape) - len(shape) :]
    fits = shape == behind or (
        len(shape) <= len(x_shape)
        and all(n in (1, size) for n, size in zip(shape, behind, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to that of x, {x_shape} (for a decay per "
            f"key A_log is [HV,1] and dt_bias [HV,K]), got {shape}"
        )
    return cast(wide, u.dtype)


def _gradient_of(d: Any, u: Any, name: str = "dg") -> Any:
    """The gradient of a result, in the dtype of u."""
    wide = _real(name, d)
    if tuple(d.shape) != tuple(u.shape):
        raise ValueError(f"{name}: expected the shape of x, {tuple(u.shape)}, got {tuple(d.shape)}")
    return cast(wide, u.dtype)


def _summed(d: Any, like: Any) -> Any:
    """d summed over the axes that broadcasting added to like, in float64: T is long."""
    new = len(d.shape) - len(like.shape)
    axes = [i for i, n in enumerate(d.shape) if i < new or like.shape[i - new] != n]
    if axes:
        d = d.sum(tuple(axes), dtype=library_of(d).float64)
    return cast(d.reshape(tuple(like.shape)), like.dtype)


def checked_bound(lower_bound: Any) -> float:
    if isinstance(lower_bound, bool) or not isinstance(
        lower_bound, int | float | np.floating | np.integer
    ):
        raise TypeError(f"lower_bound: expected a number, got {type(lower_bound).__name__}")
    if not -math.inf < lower_bound < 0:
        raise ValueError(f"lower_bound: expected a finite number < 0, got {lower_bound!r}")
    return float(lower_bound)


def _share(allow_neg_eigval: Any) -> int:
    if not isinstance(allow_neg_eigval, bool | np.bool_):
        got = type(allow_neg_eigval).__name__
        raise TypeError(f"allow_neg_eigval: expected True or False, got {got}")
    return 2 if allow_neg_eigval else 1
