"""Operations and bytes of a call, by the formulas of docs/math.md; softmax beside them."""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any, Literal, NamedTuple

from linattn.arrays import as_size
from linattn.variants import ARRAYS, OPS, VARIANTS, ArrayLine

__all__ = ["Memory", "flops", "memory"]


def _sizes(least: int = 0, **given: Any) -> list[int]:
    return [as_size(name, value, least) for name, value in given.items()]


def _heads(H: Any, HV: Any) -> tuple[int, int]:
    H, HV = _sizes(1, H=H, HV=H if HV is None else HV)
    if HV % H:
        raise ValueError(f"HV: expected a multiple of H = {H}, got {HV}")
    return H, HV


def _known(op: str, x: bool) -> None:
    if op != "softmax" and op not in OPS:
        systems = import_module("linattn.composed").__all__
        more = ", a system: count the op that it calls" if f"{op}_step" in systems else ""
        raise ValueError(f"op: expected one of {', '.join(OPS)} or softmax, got {op!r}{more}")
    if not isinstance(x, bool):
        raise TypeError(f"x: expected a bool, got {type(x).__name__}")
    line = next(line for line in ARRAYS if line.label == "x")
    if x and (op == "softmax" or not line.is_of(VARIANTS[op])):
        raise ValueError(f"x: expected False, for {op} has no x, got True")


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
    x: bool = False,
    passes: Literal["forward", "backward", "both"] = "forward",
) -> int:
    """Multiplications, additions, subtractions and divisions of a causal call.

    The count is of the sums in docs/math.md: of lower triangles only, with zeros as the start of a
    sum. Exponentials, feature maps, the l2 norm and their gradients are not counted, and neither is
    a change of sign. A step is ``T=1, mode="recurrent"``.

    A backward pass computes the forward pass again, without its outputs and without the state that
    its last chunk leaves. Then it has the adjoint, and the sums of dq and dk over the value heads
    that share a query and key head. The gradient of a gate is counted as that of the decay. If T is
    long, the kernels compute states more than twice, to save memory (docs/math.md, section 8): that
    is not counted.

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
        As in the op. ``"parallel"`` is one chunk of T tokens. (Where a token predicts, the CPU's
        kernels cut a chunk after 32 K rows that are written: that is not counted.)
    chunk_size : int, optional
        Tokens per chunk; the last chunk has the tokens that are left. By default 16, as in a call
        on the CPU that names none. The kernels for bfloat16 and those for a GPU take others.
    normalize : bool
        Is linear attention divided by its denominators?
    x : bool
        Does the caller give ``x``, the key that predicts, where it is ``k`` else? An op whose calls
        all give it counts it without being told.
    passes : {"forward", "backward", "both"}
        ``"both"`` is the sum: a forward and a backward pass.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        A size is no int, or ``x`` no bool.
    ValueError
        There is no such op, mode or pass, or a size is too small; the op has no ``x``. A system of
        ``linattn.composed`` is no op: it costs what the op that it calls does, and the
        arithmetic around it.

    Examples
    --------
    >>> import linattn
    >>> linattn.flops("gla", 4096, 64, 64) / linattn.flops("softmax", 4096, 64, 64)
    0.03...
    >>> linattn.flops("gla", 4096, 64, 64, passes="backward") / linattn.flops("gla", 4096, 64, 64)
    2.59...
    """
    _known(op, x)
    T, K, V = _sizes(T=T, K=K, V=V)
    C = CHUNK if chunk_size is None else chunk_size
    (B, C), (H, HV) = _sizes(1, B=B, chunk_size=C), _heads(H, HV)
    if mode not in ("chunk", "recurrent", "parallel"):
        raise ValueError(f"mode: expected 'chunk', 'recurrent' or 'parallel', got {mode!r}")
    if passes not in ("forward", "backward", "both"):
        raise ValueError(f"passes: expected 'forward', 'backward' or 'both', got {passes!r}")
    if mode == "parallel":
        C = max(T, 1)
    c = None if op == "softmax" else _call(op, K, V, H, HV, normalize, x)
    by, count = None if mode == "recurrent" else C, 0
    if passes != "backward":
        count += _softmax(T, K, V, H, HV, False) if c is None else _forward(c, T, by)
    if passes != "forward":
        count += _softmax(T, K, V, H, HV, True) if c is None else _backward(c, T, by)
    return B * count


class _Call(NamedTuple):
    """The facts that the counts below depend on. divides: is there a normaliser? own_x: does the
    caller give x, so that dx is an array of its own?"""

    K: int
    V: int
    H: int
    HV: int
    decay: str
    rule: str
    divides: bool
    own_x: bool

    @property
    def w(self) -> int:
        """The numbers of one decay."""
        return {"none": 0, "key": self.K}.get(self.decay, 1)

    @property
    def delta(self) -> bool:
        """Is an error written, times beta?"""
        return self.rule == "delta"

    @property
    def bonus(self) -> bool:
        """Does a token read before its decay and its write, with a bonus for its own?"""
        return self.rule == "bonus"

    @property
    def pair(self) -> bool:
        """Are there two states, a memory and its momentum?"""
        return self.decay == "pair"

    @property
    def looks(self) -> int:
        """The rows of a token that look at the state: q, and x if the rule predicts."""
        return 1 + (self.rule in ("delta", "dplr"))

    @property
    def writes(self) -> int:
        """The rows of a token that are written: k, and y."""
        return 1 + (self.rule == "dplr")

    @property
    def state(self) -> int:
        """The numbers of what a token's rows meet: S, or M and Y."""
        return (1 + self.pair) * self.K * self.V


def _call(op: str, K: int, V: int, H: int, HV: int, normalize: bool, x: bool) -> _Call:
    row = VARIANTS[op]
    divides, own_x = row.normaliser and normalize, x or row.rule == "dplr"
    return _Call(K, V, H, HV, row.decay, row.rule, divides, own_x)


def _softmax(T: int, K: int, V: int, H: int, HV: int, backward: bool) -> int:
    """A row of the batch."""
    if not backward:
        return T * (T + 1) // 2 * (H * (2 * K + 3) + HV * 2 * V)
    # the weights; dv, dA; A (dA - the row's sum of A dA); dq, dk
    of_pair = H * (2 * K + 3) + HV * 4 * V + (HV - H) + H * (4 + 4 * K)
    return T * (T + 1) // 2 * of_pair + T * H * 2 * K


def _chunks(T: int, C: int) -> list[tuple[int, int]]:
    """(how many, of how many tokens) of a sequence's chunks."""
    whole, rest = divmod(T, C)
    return [(times, n) for times, n in ((whole, C), (1, rest)) if times and n]


def _forward(c: _Call, T: int, C: int | None) -> int:
    """A row of the batch. C None: token by token."""
    if C is None:
        return T * c.HV * (_token_written(c) + _token_read(c))
    return sum(
        times * (_chunk_scored(c, n) + c.HV * (_chunk_carried(c, n) + _chunk_read(c, n)))
        for times, n in _chunks(T, C)
    )


def _backward(c: _Call, T: int, C: int | None) -> int:
    """A row of the batch. C None: token by token."""
    keys = 2 + c.own_x + (c.rule == "dplr")  # dq, dk, dx and dy
    shared = T * (c.HV - c.H) * keys * c.K  # of the value heads that share a head
    if c.decay == "head":
        shared += T * c.HV  # a head's decay has one gradient
    if C is None:
        return shared + T * c.HV * (_token_written(c) + _token_adjoint(c))
    count = sum(
        times * (_chunk_scored(c, n) + c.HV * (_chunk_carried(c, n) + _chunk_adjoint(c, n)))
        for times, n in _chunks(T, C)
    )
    last = T % C or (C if T else 0)  # the state that it leaves is not needed
    return shared + count - (c.HV * _state_carried(c, last) if last else 0)


# ---- token by token: one token and value head ----


def _token_written(c: _Call) -> int:
    """Predict, decay, write; the normaliser's z and its denominator; with a bonus, own."""
    K, V = c.K, c.V
    count = c.writes * 2 * K * V  # write
    if c.decay != "none":
        count += K * V
    if c.pair:
        count += K * V + K * V  # eta Y; a M + Y
    if c.looks == 2:
        count += 2 * K * V  # predict
    if c.delta:
        count += 2 * V  # the error, times beta
    if c.divides:
        count += K + 2 * K + 1  # z, its read and scale
    if c.bonus:
        count += 3 * K  # own
    return count


def _token_read(c: _Call) -> int:
    """Read, scale, division; with a bonus, own v."""
    return 2 * c.K * c.V + c.V + c.divides * c.V + c.bonus * 2 * c.V


def _token_adjoint(c: _Call) -> int:
    """Sections 5 and 16 of docs/math.md, line by line."""
    K, V = c.K, c.V
    count = V  # dnum
    count += 2 * K * V + 2 * K * V  # dq; dS of the read
    if c.pair:
        count += K * V  # dY
    count += c.writes * (2 * K * V + 2 * K * V)  # dk, dU; dy, dp
    if c.delta:
        count += 2 * V + V  # dbeta, dv
    if c.looks == 2:
        count += 2 * K * V + 2 * K * V  # dx and dS of the prediction
    if c.decay != "none":
        count += 2 * K * V + K * V  # da, dS
    if c.pair:
        count += 2 * K * V + K * V  # deta, dY
    if c.bonus:
        count += 2 * V + 2 * V + 9 * K  # dv, down; dq, dk, dbonus
    if c.divides:
        count += V + 2 * K + 2  # dnum / divisor; num . dnum; dden
        count += 2 * K + 2 * K  # dq and dz of the denominator
    return count


# ---- in chunks: a chunk of n tokens ----


def _pairs(n: int) -> tuple[int, int, int]:
    """Of the tokens of a chunk: with j <= i, with j < i, with j < i - 1."""
    return n * (n + 1) // 2, n * (n - 1) // 2, (n - 1) * (n - 2) // 2


def _chunk_scored(c: _Call, n: int) -> int:
    """The bare products of the scores, of all heads. A decay by key fades the keys of each pair, so
    that no two value heads share them."""
    seen, before, _ = _pairs(n)
    count = c.writes * 2 * c.K * (seen + (c.looks - 1) * before) + c.bonus * n * c.K
    return (c.HV if c.decay == "key" else c.H) * count


def _chunk_carried(c: _Call, n: int) -> int:
    """All that leads to a chunk's writes, to its denominators, and to the state that it leaves; of
    one value head."""
    K, V, (seen, before, apart) = c.K, c.V, _pairs(n)
    count = _state_carried(c, n)
    if c.decay == "key":
        count += c.writes * K * before  # rows, faded on; the last ones are k~ and y~
    elif c.pair:
        count += before + 2 * before  # N, G
        count += before + apart  # G times P and L
        count += (n - 1) * 2 * K  # k~; the last one's factors are 1
        count += n + 2 * n  # m, f
    elif c.decay != "none":
        count += before + before * c.looks  # Gamma, and Gamma times P and L
        count += (n - 1) * K  # k~; the last one's factor is 1
    if c.decay != "none":
        count += n * c.w  # e, the decays from the chunk's start
        count += c.looks * n * (1 + c.pair) * K  # q^ and x^
    if c.looks == 2:  # the prediction of the state before, that of the rows above
        count += n * 2 * c.state + c.writes * before * 2 * V
    if c.delta:
        count += n * 2 * V  # the error, beta
    if c.divides:
        count += n * (2 * K + 1) + seen  # denominators
    return count


def _state_carried(c: _Call, n: int) -> int:
    """S <- diag(e_n) S + k~' U, and z."""
    count = c.writes * n * 2 * c.state + c.divides * n * c.K
    return count + _state_decayed(c)


def _state_decayed(c: _Call) -> int:
    """diag(e_n) S; e_n M + f_n Y and m_n Y."""
    if c.pair:
        return 4 * c.K * c.V
    return c.K * c.V if c.decay != "none" else 0


def _chunk_read(c: _Call, n: int) -> int:
    """The state, the chunk, the scale, the division; of one value head."""
    seen, *_ = _pairs(n)
    return n * 2 * c.state + c.writes * seen * 2 * c.V + n * c.V + c.divides * n * c.V


def _chunk_adjoint(c: _Call, n: int) -> int:
    """Sections 6 and 16 of docs/math.md, line by line; of one value head."""
    K, V, (seen, before, _) = c.K, c.V, _pairs(n)
    predicts = c.looks == 2
    count = n * V  # dnum
    # carry and read: dU, dP, dk~, de_n (df_n and dm_n)
    count += c.writes * (n * 2 * c.state + seen * 2 * V)
    count += c.writes * (seen * 2 * V + n * 2 * c.state)
    if c.decay != "none":
        count += (1 + 2 * c.pair) * 2 * K * V
    # solve: dU (dV too), dL; dE, dbeta
    if predicts:
        count += c.writes * (before * 2 * V + before * 2 * V)
    if c.delta:
        count += n * V + n * 2 * V
    # X: dx^ and dq^; dS
    count += c.looks * n * 2 * c.state
    count += c.looks * n * 2 * c.state + _state_decayed(c)
    # the normaliser: dnum / divisor, num . dnum, dden; dq, dP, dz
    if c.divides:
        count += n * V + n * 2 * K + seen * 2 + n * 2
        count += n * 2 * K + seen + n * 2 * K
    if c.decay == "none":
        count += seen * 2 * K + n * K  # dq
        return count + seen * 2 * K + predicts * (before * 4 * K + n * K) + n * K  # dk, dx
    if c.pair:
        return count + _pair_scores_adjoint(c, n)
    return count + _hats_adjoint(c, n) + _scores_adjoint(c, n)


def _hats_adjoint(c: _Call, n: int) -> int:
    """q^, x^ and e. A row that looks before the decay has e_{i-1}, and the first one's is 1."""
    K, w, late = c.K, c.w, c.bonus + (c.rule == "dplr")
    count = c.looks * n * 2 * K  # dq and dx through e
    count += c.looks * n * 2 * K - late * 2 * K  # de
    return count + n * w + (n - 1) * 2 * w  # da of e, and up the recursion of e


def _scores_adjoint(c: _Call, n: int) -> int:
    """P, L and k~ of one decay per key or one number per token."""
    K, looks, (seen, before, apart) = c.K, c.looks, _pairs(n)
    if c.decay == "key":
        count = before * K  # rows, faded on once more
        count += before * K * (looks * 2 + looks * 2 + 2 + 1)  # d; dq and dx; da; d
        count += n * (10 if c.bonus else 5) * K  # the diagonal
        return c.writes * count
    count = before * (1 + 2 * c.delta) + before * looks  # dGamma; dqk, dkk
    count += seen * 2 * K + seen * 2 * K + c.delta * before * 4 * K  # dq, dk, dx
    count += (n - 1) * K + n * K  # dk of k~
    count += (n - 1) * 2 * K  # dGamma of k~
    return count + before * 2 + apart * 2  # da of Gamma, and up its recursion


def _pair_scores_adjoint(c: _Call, n: int) -> int:
    """P, L, k~, q^ and x^ of a memory and its momentum."""
    K, (seen, before, apart) = c.K, _pairs(n)
    count = before + apart * 2 + before + apart  # dG of P and of L; dqk, dkk
    count += seen * 2 * K + seen * 2 * K + before * 4 * K  # dq, dk
    count += (n - 1) * 2 * K + n * 2 * K  # dk of k~
    count += 2 * (n - 1) * 2 * K  # dG and dN of k~
    count += n * 4 * K + 2 * n * 2 * K  # q^: dq; de and df
    count += n * 4 * K + 2 * (n - 1) * 2 * K  # x^: dk; de and df
    count += n + before  # dm and dN
    count += 3 * n + n + 2 * before * 2  # da, deta
    return count + 3 * (n - 1) * 2 + 2 * apart * 2  # up the recursions of e, f and m; of G and N


class Memory(NamedTuple):
    """Bytes of a call, from :func:`linattn.memory`.

    Attributes
    ----------
    arrays : int
        q, k, v, o, the op's gates, and the other arrays of its rule.
    kept : int
        Kept by a decoder after T tokens: the state, or the two of a memory with a momentum, or
        softmax's keys and values.
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
    x: bool = False,
) -> Memory:
    """The bytes of a forward pass's arrays, and of what a decoder keeps after T tokens.

    Parameters
    ----------
    op : str
        An op's name, or ``"softmax"``.
    T, K, V, B, H, HV : int
        As in :func:`linattn.flops`.
    itemsize : int
        Bytes of a number in q, k, v, o, x, y: 2 for float16 and bfloat16. Gates and the bonus are
        counted with 4 (8 beside float64).
    state_itemsize : int
        Bytes of a number in the state: 2 if it is stored in bfloat16, 8 for float64 inputs.
    normalize : bool
        Is linear attention divided? Its state then has z.
    x : bool
        As in :func:`linattn.flops`.

    Returns
    -------
    Memory

    Raises
    ------
    TypeError
        A size is no int, or ``x`` no bool.
    ValueError
        There is no such op, a size is too small, or the op has no ``x``.

    Examples
    --------
    >>> import linattn
    >>> linattn.memory("gla", 4096, 64, 64).kept, linattn.memory("softmax", 4096, 64, 64).kept
    (16384, 2097152)
    """
    _known(op, x)
    T, K, V = _sizes(T=T, K=K, V=V)
    B, itemsize, state_itemsize = _sizes(1, B=B, itemsize=itemsize, state_itemsize=state_itemsize)
    H, HV = _heads(H, HV)
    weights = B * HV * T * T * itemsize
    if op == "softmax":
        kept = B * T * (H * K + HV * V) * itemsize
        return Memory(2 * kept, kept, weights)
    variant = VARIANTS[op]
    sizes = {"B": B, "T": T, "L": T, "H": H, "h": HV, "K": K, "V": V, "N": B}

    def bytes_of(line: ArrayLine) -> int:
        letters = line.letters
        if line.part_of == "DECAY":
            letters = {"head": "h", "key": letters}.get(variant.decay, letters[:3])
        each = {"OF_Q": itemsize, "STORED": state_itemsize}.get(line.dtype, max(4, itemsize))
        return prod(sizes[letter] for letter in letters) * each

    def is_given(line: ArrayLine) -> bool:
        of_pair = line.part_of == "PAIR" and variant.decay == "pair"
        return line.is_needed_by(variant) or of_pair or (line.label == "x" and x)

    arrays = [line for line in ARRAYS if line.gradient and line.role == "INPUT" and is_given(line)]
    states = [line for line in ARRAYS if line.role == "STATE" and line.is_of(variant)]
    o = B * T * HV * V * itemsize
    kept = sum(bytes_of(line) for line in states if normalize or line.part_of != "NORMALISED")
    return Memory(o + sum(map(bytes_of, arrays)), kept, weights)
