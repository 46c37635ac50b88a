"""Operations and bytes of a call, by the formulas of docs/math.md; softmax beside them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from linattn.arrays import as_size
from linattn.variants import OPS, VARIANTS

__all__ = ["Memory", "flops", "memory"]


def _sizes(least: int = 0, **given: Any) -> list[int]:
    return [as_size(name, value, least) for name, value in given.items()]


def _heads(H: Any, HV: Any) -> tuple[int, int]:
    H, HV = _sizes(1, H=H, HV=H if HV is None else HV)
    if HV % H:
        raise ValueError(f"HV: expected a multiple of H = {H}, got {HV}")
    return H, HV


def _known(op: str) -> None:
    if op != "softmax" and op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)} or softmax, got {op!r}")


def flops(
    op: str,
    T: int,
    K: int,
    V: int,
    *,
    B: int = 1,
    H: int = 1,
    HV: int | None = None,
    mode: Literal["chunk", "recurrent", "parallel"] = "chunk",
    chunk_size: int = 64,
    normalize: bool = True,
) -> int:
    """Multiplications, additions and divisions of a causal forward pass.

    The count is of the sums in docs/math.md: of lower triangles only, with zeros as the start of a
    sum. Exponentials, feature maps and the l2 norm are not counted. A step is ``T=1,
    mode="recurrent"``.

    Parameters
    ----------
    op : str
        An op's name, or ``"softmax"``: each of its weights then counts 2 K for q . k, 2 V for the
        mean, and 3 for the scale, the sum and the division. It has one mode.
    T, K, V : int
        Tokens, key and value dimension.
    B, H, HV : int
        Batch, query/key heads, value heads (as many as H by default).
    mode, chunk_size
        As in the op; the last chunk has the tokens that are left.
    normalize : bool
        Is linear attention divided by its denominators?

    Returns
    -------
    int

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        There is no such op or mode, or a size is too small.

    Examples
    --------
    >>> import linattn
    >>> linattn.flops("gla", 4096, 64, 64) / linattn.flops("softmax", 4096, 64, 64)
    0.05...
    """
    _known(op)
    T, K, V = _sizes(T=T, K=K, V=V)
    (B, chunk_size), (H, HV) = _sizes(1, B=B, chunk_size=chunk_size), _heads(H, HV)
    if mode not in ("chunk", "recurrent", "parallel"):
        raise ValueError(f"mode: expected 'chunk', 'recurrent' or 'parallel', got {mode!r}")
    if op == "softmax":
        pairs = T * (T + 1) // 2
        return B * pairs * (H * (2 * K + 3) + HV * 2 * V)
    if mode == "recurrent":
        return B * T * HV * _token(op, K, V, normalize)
    C = chunk_size if mode == "chunk" else max(T, 1)
    whole, rest = divmod(T, C)
    return B * (
        whole * _chunk(op, C, K, V, H, HV, normalize) + _chunk(op, rest, K, V, H, HV, normalize)
    )


def _token(op: str, K: int, V: int, normalize: bool) -> int:
    """One token and value head of the recurrence."""
    variant = VARIANTS[op]
    count = 2 * K * V + 2 * K * V + V  # write, read, scale
    if variant.decay != "none":
        count += K * V
    if variant.rule == "delta":
        count += 2 * K * V + 2 * V  # predict; the error, times beta
    if variant.normaliser and normalize:
        count += K + 2 * K + 1 + V  # z, its read and scale, the division
    return count


def _chunk(op: str, n: int, K: int, V: int, H: int, HV: int, normalize: bool) -> int:
    """A chunk of n tokens, all heads: scores, solve, read, carry."""
    if not n:
        return 0
    variant = VARIANTS[op]
    delta, decay = variant.rule == "delta", variant.decay
    seen, before = n * (n + 1) // 2, n * (n - 1) // 2  # pairs with j <= i, with j < i
    # scores: P and L. A decay by key fades the keys of each pair, so that no two value heads share
    # scores; a decay by token fades the scores.
    scores = 2 * K * (seen + delta * before)
    count = (HV if decay == "key" else H) * scores
    if decay == "key":
        count += HV * K * before
    elif decay != "none":
        count += HV * (before + before * (1 + delta))  # Gamma, and Gamma times P and L
    # solve: the right side beta (v - S'k), and the rows above
    if delta:
        count += HV * (n * (2 * K * V + 2 * V) + before * (1 + 2 * V))  # L times beta, too
    # read: the state, the chunk, the scale
    count += HV * (n * 2 * K * V + seen * 2 * V + n * V)
    # carry: the keys' products with the values
    count += HV * n * 2 * K * V
    if decay != "none":
        wide = K if decay == "key" else 1
        count += HV * n * wide  # e, the decays from the chunk's start
        count += HV * n * K * (1 + delta)  # q and k (delta) times e
        count += HV * (n - 1) * K  # k times r; the last one's is 1
        count += HV * K * V  # the state
    if variant.normaliser and normalize:
        count += HV * (n * (K + 2 * K + 1 + V) + seen)
    return count


class Memory(NamedTuple):
    """Bytes of a call, from :func:`linattn.memory`.

    Attributes
    ----------
    arrays : int
        q, k, v, o and the op's gates.
    kept : int
        Kept by a decoder after T tokens: the state, or softmax's keys and values.
    weights : int
        All weights at once, T squared of them per head; no kernel needs them.

    Examples
    --------
    The state does not grow with T. The keys and values that softmax attention keeps do:

    >>> import linattn
    >>> [linattn.memory("gla", T, 64, 64).kept for T in (1000, 2000)]
    [16384, 16384]
    >>> [linattn.memory("softmax", T, 64, 64).kept for T in (1000, 2000)]
    [512000, 1024000]
    """

    arrays: int
    kept: int
    weights: int


def memory(
    op: str,
    T: int,
    K: int,
    V: int,
    *,
    B: int = 1,
    H: int = 1,
    HV: int | None = None,
    itemsize: int = 4,
    state_itemsize: int = 4,
    normalize: bool = True,
) -> Memory:
    """The bytes of a forward pass's arrays, and of what a decoder keeps after T tokens.

    Parameters
    ----------
    op : str
        An op's name, or ``"softmax"``.
    T, K, V, B, H, HV : int
        As in :func:`linattn.flops`.
    itemsize : int
        Bytes of a number in q, k, v, o: 2 for float16 and bfloat16. Gates are counted with 4
        (8 beside float64).
    state_itemsize : int
        Bytes of a number in the state: 2 if it is stored in bfloat16, 8 for float64 inputs.
    normalize : bool
        Is linear attention divided? Its state then has z.

    Returns
    -------
    Memory

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        There is no such op, or a size is too small.

    Examples
    --------
    >>> import linattn
    >>> linattn.memory("gla", 4096, 64, 64).kept, linattn.memory("softmax", 4096, 64, 64).kept
    (16384, 2097152)
    """
    _known(op)
    T, K, V = _sizes(T=T, K=K, V=V)
    B, itemsize, state_itemsize = _sizes(1, B=B, itemsize=itemsize, state_itemsize=state_itemsize)
    H, HV = _heads(H, HV)
    arrays = 2 * B * T * (H * K + HV * V) * itemsize
    weights = B * HV * T * T * itemsize
    if op == "softmax":
        return Memory(arrays, B * T * (H * K + HV * V) * itemsize, weights)
    variant, of_gates = VARIANTS[op], max(4, itemsize)
    by_token = {"token": 1, "key": K}.get(variant.decay, 0) + (variant.rule == "delta")
    arrays += of_gates * HV * (B * T * by_token + (variant.decay == "head"))
    z = K if variant.normaliser and normalize else 0
    return Memory(arrays, B * HV * (K * V + z) * state_itemsize, weights)
