"""From functions of one head to an op: the record, the loops over sequences and heads, dtypes."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .elements import GIVEN_AS, l2norm


class Op(NamedTuple):
    """The record of an op. It stands below the op's public function.

    Examples
    --------
    >>> from linattn import reference
    >>> op = reference.OPS["kda"]
    >>> op.decay, op.has_normaliser, op.tokens is reference.kda_tokens
    ('key', False, True)
    """

    tokens: Callable  # one head, token by token
    chunk: Callable  # one head, C tokens at once
    decay: str  # a key of SHARED_AXES: the decay is one number per head, token or key
    default_decay: Callable | None = None  # v -> the decay itself, for a call that gives none
    default_scale: float | None = None  # the factor of the read, likewise; None is K**-0.5
    has_normaliser: bool = False  # the state is (S, z), and the output is divided
    noncausal: Callable | None = None  # one head, every token reads the last state
    adjoint: Callable | None = None  # one head's gradients; None: those in adjoints.py


#: The :class:`Op` of each name, filled where the ops are defined.
OPS: dict[str, Op] = {}

# The axes of [B,T,HV,K] along which all elements share one decay. "none": the decay is 1. "pair" is
# the decay of the first of two states; that of the second is eta.
SHARED_AXES = {"none": (0, 1, 2, 3), "head": (0, 1, 3), "token": (3,), "key": (), "pair": (3,)}

# ---------------------------------------------------------------------------------------------
# Loops.
# ---------------------------------------------------------------------------------------------


def per_head(
    op,
    q,
    k,
    v,
    *gates,
    x=None,
    y=None,
    bonus=None,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    qk_l2norm=False,
    form="recurrent",
    chunk_size=64,
    dtype=np.float64,
):
    """Run an op's one-head functions over the sequences and heads. A gate [HV] is per head. x, y
    and bonus go to the functions by keyword."""
    q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    gates = [cast(gate, working(dtype)) for gate in gates]
    keys = cast_keys(dtype, x=x, y=y, bonus=bonus)
    scale = read_scale(scale, q)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    one_head = by_form(op, form, chunk_size)
    o = np.empty_like(v)
    states = state_arrays(initial_state, state_axes(op), q, v, cu_seqlens)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for n, h, of_qk, of_v in heads(q, v, cu_seqlens):
            gates_h = [gate[h] if is_per_head(gate) else gate[of_v] for gate in gates]
            keys_h = {name: z[of_key(z, of_qk)] for name, z in keys.items()}
            state = state_of(states, n, h)
            o[of_v], state = one_head(q[of_qk], k[of_qk], v[of_v], *gates_h, state, scale, **keys_h)
            keep_state(states, n, h, state)
    return rounded(o, dtype), states[0] if len(states) == 1 else states


def by_form(op, form, chunk_size):
    """The one-head function for a form; the chunk form hands the state from chunk to chunk."""
    if form == "recurrent":
        return op.tokens
    if form not in ("parallel", "chunk"):
        raise ValueError(f'form: expected "recurrent", "parallel" or "chunk", got {form!r}')

    def chunk_by_chunk(q, k, v, *gates_state_scale, **keys):
        *gates, state, scale = gates_state_scale
        T = len(q)
        if T == 0:
            return op.tokens(q, k, v, *gates_state_scale, **keys)
        outputs = []
        C = T if form == "parallel" else chunk_size
        for i in range(0, T, C):
            rows = slice(i, i + C)
            gates_i = [gate if is_constant(gate) else gate[rows] for gate in gates]
            keys_i = {name: z[rows] if z.ndim == 2 else z for name, z in keys.items()}
            *output, state = op.chunk(q[rows], k[rows], v[rows], *gates_i, state, scale, **keys_i)
            outputs.append(output)
        return *map(np.concatenate, zip(*outputs, strict=True)), state

    return chunk_by_chunk


def is_per_head(gate):
    """Whether a gate is [HV], not [B,T,HV] or [B,T,HV,K]."""
    return gate.ndim == 1


def is_constant(gate_h):
    """Whether one head's part of a gate is one number, not [T] or [T,K]."""
    return np.ndim(gate_h) == 0


def heads(q, v, cu_seqlens):
    """For every sequence n and value head h: n, h, the index of q and k, the index of v and o."""
    B, _, HV = v.shape[:3]
    group = HV // q.shape[2] if q.shape[2] else 1
    if cu_seqlens is None:  # all tokens: noncausal, q may have more or fewer than k and v
        sequences = [(b, slice(None)) for b in range(B)]
    else:
        ends = [int(end) for end in cu_seqlens]
        sequences = [(0, slice(start, end)) for start, end in pairwise(ends)]
    for n, (b, tokens) in enumerate(sequences):
        for h in range(HV):
            yield n, h, (b, tokens, h // group), (b, tokens, h)


def cast_keys(dtype, *, bonus=None, **by_token):
    """The arrays of query and key heads that were given: x and y [B,T,H,K], and bonus [H,K]."""
    given = {name: cast(x, dtype) for name, x in by_token.items() if x is not None}
    return given if bonus is None else given | {"bonus": cast(bonus, working(dtype))}


def of_key(x, of_qk):
    """The index of a query and key head in such an array."""
    return of_qk if x.ndim == 4 else of_qk[2]


# The axes of each array of a state, without sequences and heads.
ONE_STATE, WITH_Z, TWO_STATES = ("KV",), ("KV", "K"), ("KV", "KV")


def state_axes(op):
    """Those of an op that is not normalised."""
    return TWO_STATES if op.decay == "pair" else ONE_STATE


def state_arrays(given, axes, q, v, cu_seqlens):
    """S [N,HV,K,V], and z [N,HV,K] or a second state like S: new arrays, zeros if not given."""
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    sizes = {"K": q.shape[3], "V": v.shape[3]}
    arrays = tuple(np.zeros((N, v.shape[2], *map(sizes.get, x)), q.dtype) for x in axes)
    given = given if isinstance(given, (tuple, list)) else () if given is None else (given,)
    for array, x in zip(arrays, given, strict=False):
        array[...] = x
    return arrays


def state_of(states, n, h):
    """Sequence n's state of head h: an array, or a tuple of two."""
    return states[0][n, h] if len(states) == 1 else tuple(x[n, h] for x in states)


def keep_state(states, n, h, state):
    """Put it back."""
    for array, x in zip(states, state if isinstance(state, tuple) else (state,), strict=True):
        array[n, h] = x


def read_scale(scale, q):
    """The factor of the read: scale, or K**-0.5."""
    return q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)


def given_decay(g, alpha, dtype):
    """The decay a from its logarithm g, or alpha, the decay itself."""
    keyword, gate = ("g", g) if alpha is None else ("alpha", alpha)
    to_decay, _ = GIVEN_AS[keyword]
    return to_decay(cast(gate, working(dtype)))


# ---------------------------------------------------------------------------------------------
# Dtypes.
# ---------------------------------------------------------------------------------------------


def working(dtype):
    """The dtype of the state and the sums: float32 for float16 and bfloat16, else dtype itself."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def cast(x, dtype):
    """x rounded to dtype, in the dtype of the sums."""
    return rounded(np.asarray(x), dtype).astype(working(dtype))


def rounded(x, dtype):
    """x in dtype. An overflow makes inf without a warning."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def rounded_like(x, given, work):
    """The naive twin rounds a gate's gradient to the gate's dtype where that is the shorter one."""
    shorter = np.asarray(given).dtype
    is_twin = np.dtype(work) == np.float32
    return rounded(x, shorter) if is_twin and shorter.itemsize < x.dtype.itemsize else x
