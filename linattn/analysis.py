"""Looking at ops, and the constants that models give them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from linattn.arrays import as_int
from linattn.features import is_tensor, shape_of
from linattn.variants import ARRAYS, op_named

__all__ = ["implicit_weights", "lightning_slopes"]


def lightning_slopes(
    H: int, *, layer: int = 0, layers: int = 1, rule: str = "minimax"
) -> np.ndarray:
    """The slopes of :func:`lightning_attention` by either published rule, float64 [H].

    Parameters
    ----------
    H : int
        Heads.
    layer, layers : int
        Which layer of how many; deeper layers forget more slowly.
    rule : {"minimax", "transnormer"}
        ``"minimax"`` (Lightning Attention-2, MiniMax-01): ALiBi's slopes 2**(-8 (h+1) / H) (for an
        H that is no power of two, those of the power below and every second of the power above),
        times 1 - layer / (layers - 1) + 1e-5, or times 1 if ``layers`` is 1.
        ``"transnormer"`` (TransNormerLLM): 8 h / H * (1 - layer / layers).

    Returns
    -------
    ndarray [H], float64

    Raises
    ------
    TypeError
        ``H``, ``layer`` or ``layers`` is not an int.
    ValueError
        There is no head, no such layer or no such rule.
    MemoryError
        The memory does not hold H numbers.

    References
    ----------
    Qin et al., 2024, *Lightning Attention-2*, arXiv:2401.04658; MiniMax, 2025, *MiniMax-01*,
    arXiv:2501.08313; Qin et al., 2023, *TransNormerLLM*, arXiv:2307.14995; Press et al., 2022,
    *Train Short, Test Long* (ALiBi), arXiv:2108.12409.

    Examples
    --------
    Slopes of four heads are 2**-2, 2**-4, 2**-6 and 2**-8. Those of deeper layers are smaller:

    >>> import numpy as np, linattn
    >>> slopes = linattn.lightning_slopes(4)
    >>> np.log2(slopes).round().astype(int).tolist()
    [-2, -4, -6, -8]
    >>> deep = linattn.lightning_slopes(4, layer=8, layers=12)
    >>> bool((deep < linattn.lightning_slopes(4, layer=0, layers=12)).all())
    True
    """
    H, layer, layers = as_int("H", H), as_int("layer", layer), as_int("layers", layers)
    if H < 1:
        raise ValueError(f"H: expected at least 1 head, got {H}")
    if not 0 <= layer < layers:
        raise ValueError(f"layer: expected 0 <= layer < layers = {layers}, got {layer}")
    if rule not in ("minimax", "transnormer"):
        raise ValueError(f"rule: expected 'minimax' or 'transnormer', got {rule!r}")
    try:
        if rule == "transnormer":
            return 8 * np.arange(H) / H * (1 - layer / layers)
        return _alibi(H) * (1 - layer / (layers - 1) + 1e-5 if layers > 1 else 1)
    except (MemoryError, ValueError):  # NumPy's, of an array beyond the memory or its addresses
        raise MemoryError(f"H: expected as many heads as fit in memory, got {H}") from None


def _alibi(H: int) -> np.ndarray:
    below = 1 << (H.bit_length() - 1)

    def of_power(n: int) -> np.ndarray:
        return 2.0 ** (-8 * np.arange(1, n + 1) / n)

    return np.concatenate([of_power(below), of_power(2 * below)[::2][: H - below]])


# Where an array has its value heads.
_HEAD_AXES = {x.label: 2 for x in ARRAYS if x.role == "INPUT" and "Th" in x.letters}
_HEAD_AXES |= {"alpha": 2, "gamma": 0, "slopes": 0}


def _weights(op: str, q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
    """The op's output; its warnings come from implicit_weights' own caller."""
    from linattn import ops

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        o, _ = getattr(ops, op)(q, k, v, **arguments)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=3)
    return o


def implicit_weights(
    q: Any,
    k: Any,
    *,
    op: str | Callable[..., Any] = "linear_attention",
    **arguments: Any,
) -> Any:
    """The matrix A [B,HV,T,T] with o = A v: how much each token reads of each other.

    With ``causal=False`` k may have L tokens where q has T; A is then [B,HV,T,L].

    Every op is linear in v, so its weights are what it makes of v = I. Takes memory and time
    quadratic in T: for looking, not for training.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head (A is then [T,T])
        NumPy's, or PyTorch's on any device; A is of the same kind.
    op : str or function
        Which op's weights; linear attention's by default.
    **arguments
        Of the op: gates, beta, feature_map, scale, ... HV is read off them, else it is H.

    Returns
    -------
    array [B,HV,T,T], or [T,T] for one head
        Row i has the weights with which token i reads the tokens j. They are scaled, and divided if
        the op is normalised.

    Raises
    ------
    TypeError
        ``q`` is not an array of NumPy's or PyTorch's, or the op raises it.
    ValueError
        There is no such op, ``q`` is neither [B,T,H,K] nor [T,K], a state or ``out`` is given, or
        the op raises it.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))  # one head: [T,K]
    >>> A = linattn.implicit_weights(q, k, op="retention")
    >>> np.allclose(A @ v, linattn.retention(q, k, v)[0])
    True
    >>> A = linattn.implicit_weights(q, k)  # linear attention's
    >>> np.allclose(A.sum(1), 1), bool(np.triu(A, 1).any())
    (True, False)
    """
    op = op_named(op)
    if not isinstance(q, np.ndarray) and not is_tensor(q):
        raise TypeError(f"q: expected an array of NumPy's or PyTorch's, got {type(q).__name__}")
    if q.ndim not in (2, 4):
        raise ValueError(f"q: expected [B,T,H,K], or [T,K] for one head, got {tuple(q.shape)}")
    for name in ("initial_state", "output_final_state", "out"):
        if name in arguments:
            raise ValueError(f"{name}: the weights are of the tokens alone; got {name}=")
    of_k = shape_of(k) or ()  # the op says what is wrong with another
    T = (of_k if len(of_k) == q.ndim else q.shape)[-2 if q.ndim == 2 else 1]
    identity = _identity(q, T)
    if q.ndim == 2:
        return _weights(op, q, k, identity, arguments)[:, :T]
    HV = q.shape[2]
    for name, axis in _HEAD_AXES.items():
        shape = getattr(arguments.get(name), "shape", ())
        if len(shape) > axis:
            HV = shape[axis]
    shape = (q.shape[0], T, HV, max(T, 1))
    if is_tensor(q):
        v = identity[None, :, None, :].expand(shape)
        return _weights(op, q, k, v, arguments).permute(0, 2, 1, 3)[..., :T].contiguous()
    v = np.broadcast_to(identity[None, :, None, :], shape)
    weights = _weights(op, q, k, v, arguments)
    return np.ascontiguousarray(weights.transpose(0, 2, 1, 3)[..., :T])


def _identity(q: Any, T: int) -> Any:
    """The values e_1 .. e_T [T,T] beside q; [T,1] without tokens, since an op wants V >= 1."""
    if is_tensor(q):
        import torch

        return torch.eye(T, max(T, 1), dtype=q.dtype, device=q.device)
    return np.eye(T, max(T, 1)).astype(q.dtype)
