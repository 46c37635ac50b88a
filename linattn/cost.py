"""Operations and bytes of a call, by the formulas of docs/math.md; softmax beside them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from linattn._cost_rules import COUNTS, Counts
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


# The tokens of a chunk where a call names none: CHUNK in csrc/cpu/instance.h.
CHUNK = 16


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
    chunk_size: int | None = None,
    normalize: bool = True,
    passes: Literal["forward", "backward", "both"] = "forward",
) -> int:
    """Multiplications, additions, subtractions and divisions of a causal call.

    The count is of the sums in docs/math.md: of lower triangles only, with zeros as the start of a
    sum. Exponentials, feature maps, the l2 norm and their gradients are not counted, and neither is
    a change of sign. A step is ``T=1, mode="recurrent"``.

    A backward pass computes the forward pass again, without its outputs and without the state that
    its last chunk leaves. Then it has the adjoint, and the sums of dq and dk (and dx and dy) over
    the value heads that share a query and key head. The gradient of a gate is counted as that of
    the decay. If T is long, the kernels compute states more than twice, to save memory
    (docs/math.md, section 8): that is not counted.

    Parameters
    ----------
    op : str
        An op's name, or ``"softmax"``: each of its weights then counts 2 K for q . k, 2 V for the
        mean, and 3 for the scale, the sum and the division. It has one mode. Its backward pass
        computes the weights again.
    T, K, V : int
        Tokens, key and value dimension.
    B, H, HV : int
        Batch, query/key heads, value heads (as many as H by default).
    mode
        As in the op. ``"parallel"`` is one chunk of T tokens. (Under the delta rule, the CPU's
        kernels cut a chunk after 32 K tokens: that is not counted.)
    chunk_size : int, optional
        Tokens per chunk; the last chunk has the tokens that are left. By default 16, as in a call
        on the CPU that names none. The kernels for bfloat16 and those for a GPU take others.
    normalize : bool
        Is linear attention divided by its denominators?
    passes : {"forward", "backward", "both"}
        ``"both"`` is the sum: a forward and a backward pass.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        There is no such op, mode or pass, or a size is too small.

    Examples
    --------
    >>> import linattn
    >>> linattn.flops("gla", 4096, 64, 64) / linattn.flops("softmax", 4096, 64, 64)
    0.03...
    >>> linattn.flops("gla", 4096, 64, 64, passes="backward") / linattn.flops("gla", 4096, 64, 64)
    2.59...
    """
    _known(op)
    T, K, V = _sizes(T=T, K=K, V=V)
    C = CHUNK if chunk_size is None else chunk_size
    (B, C), (H, HV) = _sizes(1, B=B, chunk_size=C), _heads(H, HV)
    if mode not in ("chunk", "recurrent", "parallel"):
        raise ValueError(f"mode: expected 'chunk', 'recurrent' or 'parallel', got {mode!r}")
    if passes not in ("forward", "backward", "both"):
        raise ValueError(f"passes: expected 'forward', 'backward' or 'both', got {passes!r}")
    if mode == "parallel":
        C = max(T, 1)
    count = 0
    if passes != "backward":
        count += _forward(op, T, K, V, H, HV, None if mode == "recurrent" else C, normalize)
    if passes != "forward":
        count += _backward(op, T, K, V, H, HV, None if mode == "recurrent" else C, normalize)
    return B * count


class _Call(NamedTuple):
    """The facts that the counts below depend on. divides: is there a normaliser?"""

    K: int
    V: int
    H: int
    HV: int
    decay: str
    delta: bool
    divides: bool

    @property
    def w(self) -> int:
        """The numbers of one decay."""
        return {"none": 0, "key": self.K}.get(self.decay, 1)


def _call(op: str, K: int, V: int, H: int, HV: int, normalize: bool) -> _Call:
    row = VARIANTS[op]
    return _Call(K, V, H, HV, row.decay, row.rule == "delta", row.normaliser and normalize)


def _counts(op: str, K: int, V: int, n: int) -> Counts | None:
    """Of an op that does the four lines of section 2 of docs/math.md in another way."""
    row = VARIANTS[op]
    count = COUNTS.get(row.rule) or COUNTS.get(row.decay)
    return count(K, V, n) if count else None


def _chunks(T: int, C: int) -> list[tuple[int, int]]:
    """(how many, of how many tokens)."""
    whole, rest = divmod(T, C)
    return [(times, n) for times, n in ((whole, C), (1, rest)) if times and n]


def _forward_of_rules(op: str, T: int, K: int, V: int, H: int, HV: int, C: int | None) -> int:
    count = 0
    for times, n in _chunks(T, C or 1):
        x = _counts(op, K, V, n)
        assert x is not None
        if C is None:
            count += times * HV * (x.token_written + x.token_read)
        else:
            count += times * (H * x.shared + HV * (x.scored + x.carried + x.read))
    return count


def _backward_of_rules(op: str, T: int, K: int, V: int, H: int, HV: int, C: int | None) -> int:
    count = last = 0
    for times, n in _chunks(T, C or 1):
        x = _counts(op, K, V, n)
        assert x is not None
        count += times * n * (HV - H) * x.sums
        if C is None:
            count += times * HV * (x.token_written + x.token_adjoint)
        else:
            count += times * (H * x.shared + HV * (x.scored + x.carried + x.adjoint))
            last = HV * x.state_carried  # the states that the last chunk leaves are not needed
    return count - last


def _forward(
    op: str, T: int, K: int, V: int, H: int, HV: int, C: int | None, normalize: bool
) -> int:
    """A row of the batch. C None: token by token."""
    if op == "softmax":
        return T * (T + 1) // 2 * (H * (2 * K + 3) + HV * 2 * V)
    if _counts(op, K, V, 1):
        return _forward_of_rules(op, T, K, V, H, HV, C)
    c = _call(op, K, V, H, HV, normalize)
    if C is None:
        return T * HV * (_token_written(c) + _token_read(c))
    whole, rest = divmod(T, C)
    return sum(
        times * (_chunk_scored(c, n) + HV * (_chunk_carried(c, n) + _chunk_read(c, n)))
        for times, n in ((whole, C), (1, rest))
        if n
    )


def _backward(
    op: str, T: int, K: int, V: int, H: int, HV: int, C: int | None, normalize: bool
) -> int:
    """A row of the batch. C None: token by token."""
    if op == "softmax":  # the weights; dv, dA; A (dA - the row's sum of A dA); dq, dk
        of_pair = H * (2 * K + 3) + HV * 4 * V + (HV - H) + H * (4 + 4 * K)
        return T * (T + 1) // 2 * of_pair + T * H * 2 * K
    if _counts(op, K, V, 1):
        return _backward_of_rules(op, T, K, V, H, HV, C)
    c = _call(op, K, V, H, HV, normalize)
    shared = T * (HV - H) * 2 * K  # dq and dk of the value heads that share a head
    if c.decay == "head":
        shared += T * HV  # a head's decay has one gradient
    if C is None:
        return shared + T * HV * (_token_written(c) + _token_adjoint(c))
    whole, rest = divmod(T, C)
    count = sum(
        times * (_chunk_scored(c, n) + HV * (_chunk_carried(c, n) + _chunk_adjoint(c, n)))
        for times, n in ((whole, C), (1, rest))
        if n
    )
    last = rest or (C if T else 0)  # the state that it leaves is not needed
    return shared + count - (HV * _state_carried(c, last) if last else 0)


# ---- token by token: one token and value head ----


def _token_written(c: _Call) -> int:
    """Decay, predict, write; the normaliser's z and its denominator."""
    K, V = c.K, c.V
    count = 2 * K * V  # write
    if c.decay != "none":
        count += K * V
    if c.delta:
        count += 2 * K * V + 2 * V  # predict; the error, times beta
    if c.divides:
        count += K + 2 * K + 1  # z, its read and scale
    return count


def _token_read(c: _Call) -> int:
    return 2 * c.K * c.V + c.V + c.divides * c.V  # read, scale, division


def _token_adjoint(c: _Call) -> int:
    """Section 5 of docs/math.md, line by line."""
    K, V = c.K, c.V
    count = V  # dnum
    count += 2 * K * V + 2 * K * V  # dq; dS of the read
    count += 2 * K * V + 2 * K * V  # dk; dU
    if c.delta:
        count += 2 * V + V  # dbeta, dv
        count += 2 * K * V + 2 * K * V  # dk and dS of the prediction
    if c.decay != "none":
        count += 2 * K * V + K * V  # da, dS
    if c.divides:
        count += V + 2 * K + 2  # dnum / divisor; num . dnum; dden
        count += 2 * K + 2 * K  # dq and dz of the denominator
    return count


# ---- in chunks: a chunk of n tokens ----


def _pairs(n: int) -> tuple[int, int]:
    """Of the tokens of a chunk: with j <= i, with j < i."""
    return n * (n + 1) // 2, n * (n - 1) // 2


def _chunk_scored(c: _Call, n: int) -> int:
    """The bare products of the scores, of all heads. A decay by key fades the keys of each pair, so
    that no two value heads share them."""
    seen, before = _pairs(n)
    return (c.HV if c.decay == "key" else c.H) * 2 * c.K * (seen + c.delta * before)


def _chunk_carried(c: _Call, n: int) -> int:
    """All that leads to a chunk's writes, to its denominators, and to the state that it leaves; of
    one value head."""
    K, V, (seen, before) = c.K, c.V, _pairs(n)
    count = _state_carried(c, n)
    if c.decay == "key":
        count += K * before  # keys, faded on; the last row is k~
    elif c.decay != "none":
        count += before + before * (1 + c.delta)  # Gamma, and Gamma times P and L
        count += (n - 1) * K  # k~; the last one's factor is 1
    if c.decay != "none":
        count += n * c.w  # e, the decays from the chunk's start
        count += n * K * (1 + c.delta)  # q^ and k^
    if c.delta:  # the prediction of the state before, that of the rows above, the error, beta
        count += n * (2 * K * V + 2 * V) + before * 2 * V
    if c.divides:
        count += n * (2 * K + 1) + seen  # denominators
    return count


def _state_carried(c: _Call, n: int) -> int:
    """S <- diag(e_n) S + k~' U, and z."""
    decays = c.decay != "none"
    return n * 2 * c.K * c.V + decays * c.K * c.V + c.divides * n * c.K


def _chunk_read(c: _Call, n: int) -> int:
    """The state, the chunk, the scale, the division; of one value head."""
    seen, _ = _pairs(n)
    return n * 2 * c.K * c.V + seen * 2 * c.V + n * c.V + c.divides * n * c.V


def _chunk_adjoint(c: _Call, n: int) -> int:
    """Section 6 of docs/math.md, line by line; of one value head."""
    K, V, w, (seen, before) = c.K, c.V, c.w, _pairs(n)
    decays, both = c.decay != "none", 1 + c.delta
    count = n * V  # dnum
    # carry and read: dU, dP, dk~, de_n
    count += n * 2 * K * V + seen * 2 * V
    count += seen * 2 * V + n * 2 * K * V
    if decays:
        count += 2 * K * V
    # solve: dU, dE, dbeta, dL
    if c.delta:
        count += before * 2 * V + n * V + n * 2 * V + before * 2 * V
    # X: dk^ and dq^; dS
    count += both * n * 2 * K * V
    count += both * n * 2 * K * V + decays * K * V
    # the normaliser: dnum / divisor, num . dnum, dden; dq, dP, dz
    if c.divides:
        count += n * V + n * 2 * K + seen * 2 + n * 2
        count += n * 2 * K + seen + n * 2 * K
    # scores
    if c.decay == "none":
        count += seen * 2 * K + n * K  # dq
        count += seen * 2 * K + c.delta * (before * 4 * K + n * K) + n * K  # dk
        return count
    count += both * n * 2 * K  # dq and dk through e
    count += both * n * 2 * K  # de
    count += n * w + (n - 1) * 2 * w  # da of e, and up the recursion of e
    if c.decay == "key":
        count += before * K  # keys, faded on once more
        count += before * K * (both * 2 + both * 2 + 2 + 1)  # d; dq and dk; da; d
        count += n * 5 * K  # the diagonal
        return count
    count += before * (1 + 2 * c.delta) + before * both  # dGamma; dqk, dkk
    count += seen * 2 * K + seen * 2 * K + c.delta * before * 4 * K  # dq, dk
    count += (n - 1) * K + n * K  # dk of k~
    count += (n - 1) * 2 * K  # dGamma of k~
    count += before * 2 + _pairs(n - 1)[1] * 2  # da of Gamma, and up its recursion
    return count


class Memory(NamedTuple):
    """Bytes of a call, from :func:`linattn.memory`.

    Attributes
    ----------
    arrays : int
        q, k, v, o and the op's gates and keys. A delta rule's x is not counted.
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
    by_token = {"token": 1, "key": K, "pair": 2}.get(variant.decay, 0) + (variant.rule == "delta")
    arrays += of_gates * HV * (B * T * by_token + (variant.decay == "head"))
    if variant.rule == "dplr":  # x and y
        arrays += 2 * B * T * H * K * itemsize
    if variant.rule == "bonus":
        arrays += of_gates * H * K
    second = K if variant.normaliser and normalize else K * V if variant.decay == "pair" else 0
    return Memory(arrays, B * HV * (K * V + second) * state_itemsize, weights)
