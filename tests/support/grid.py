"""The grid: every op, mode and dtype over shapes that have broken kernels of this family.

One case is one op, mode, dtype and shape. The full product has millions; each axis value appears
with every (op, mode, dtype), the rest of the shape drawn at random but the same in every run.
"""

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import linattn
from linattn import _linattn, reference, testing
from support import device
from support.problems import KEY_HEADS
from support.variants import KEY_DECAY, NORMALISED, PREDICTS

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
MODES = ("chunk", "recurrent", "parallel")

# Around every tile and chunk: a row of lanes, 16 and 64 tokens, a panel of 64 or 128 columns.
LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1000, 4096)
CHUNKS = (None, 1, 3, 16, 20, 64)
DIMENSIONS = (1, 3, 7, 8, 16, 32, 59, 64, 100, 111, 128, 192, 256)
HEADS = ((1, 1), (2, 2), (1, 2), (2, 4), (1, 4))
BATCHES = (1, 3, 0)

# The acceptance rule compares the largest error with NumPy's largest. On few numbers that is a
# comparison of two accidents, so a case is repeated until the least of its arrays has this many.
POOL = 2048
MOST_REPEATS = 48
# On the host less is enough where an accident has other chances (see RETRIES: not with one key): a
# wide case has few numbers of a gate, and many of the rest.
ENOUGH = 1000
MOST_WORK = 4_000  # as _cost counts it


@dataclass(frozen=True)
class Case:
    op: str
    mode: str
    dtype: type
    T: int
    chunk: int | None
    K: int
    V: int
    H: int
    HV: int
    B: int
    packed: bool = False
    v_first: bool = False
    l2norm: bool = False
    state: bool = True
    x: bool = False

    def __str__(self):
        flags = "".join(
            name for name in ("packed", "v_first", "l2norm", "state", "x") if getattr(self, name)
        )
        return (
            f"{self.op}-{self.mode}-{np.dtype(self.dtype).name}-T{self.T}-C{self.chunk}"
            f"-K{self.K}-V{self.V}-H{self.H}.{self.HV}-B{self.B}-{flags}"
        )


def _cost(case):
    """The reference's work, in tokens of one small head: it goes token by token."""
    tokens = max(case.B, 1) * case.T * case.HV
    quadratic = case.T / 100 if case.mode == "parallel" else 0
    return tokens * (1 + case.K * case.V / 2000 + quadratic)


def cases(seed, limit=12_000):
    """Each axis value with every (op, mode, dtype). A case that costs more than `limit` shrinks
    along its other axes."""
    rng = np.random.default_rng(seed)
    axes = {
        "T": LENGTHS,
        "chunk": CHUNKS,
        "K": DIMENSIONS,
        "V": DIMENSIONS,
        "heads": HEADS,
        "B": BATCHES,
    }
    smaller = (("B", 1), ("heads", (1, 1)), ("K", 16), ("V", 16), ("T", 257), ("T", 65))
    for op, mode, dtype in itertools.product(linattn.OPS, MODES, DTYPES):
        for axis, values in axes.items():
            for value in values:
                drawn = {k: choices[rng.integers(len(choices))] for k, choices in axes.items()}
                drawn[axis] = value
                if axis != "B" and drawn["B"] == 0:
                    drawn["B"] = 1
                flags = {name: bool(rng.integers(2)) for name in ("v_first", "state")}
                flags["packed"] = drawn["B"] == 1 and rng.integers(3) == 0
                flags["l2norm"] = rng.integers(4) == 0
                for name, small in ((None, None), *smaller):
                    if name and name != axis and drawn[name] > small:
                        drawn[name] = small
                    sizes = {k: v for k, v in drawn.items() if k != "heads"}
                    # not drawn: the problems of old stay as they were
                    flags["x"] = op in PREDICTS and (drawn["T"] + drawn["K"] + drawn["V"]) % 3 == 0
                    H, HV = drawn["heads"]
                    case = Case(op, mode, dtype, H=H, HV=HV, **flags, **sizes)
                    if _cost(case) <= limit:
                        yield case
                        break


def taking_turns(*axes, turns):
    """The product of the axes, each row with the next of `turns`: every pair of values occurs."""
    return [
        (*(value for _, value in row), turns[sum(i for i, _ in row) % len(turns)])
        for row in itertools.product(*map(enumerate, axes))
    ]


# A tensor-core kernel has whole tiles of these, and its own edges.
TENSOR_DIMENSIONS = (64, 128, 256)
TENSOR_LENGTHS = (63, 64, 65, 128, 129, 257, 1000)
TENSOR_HEADS = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4))


def tensor_core_cases(seed):
    """bfloat16 at every (op, K, V, T), then float16 at every fourth of these. Each number of heads,
    layout, norm, state and packing occurs several times with each of them, and so does an x of the
    delta rule. The reference uses the chunk form here, because the recurrence would take minutes.
    """
    rng = np.random.default_rng(seed)
    halves = []
    sizes = itertools.product(TENSOR_DIMENSIONS, TENSOR_DIMENSIONS, TENSOR_LENGTHS)
    for i, (K, V, T) in enumerate(sizes):
        for j, op in enumerate(linattn.OPS):
            heads = TENSOR_HEADS if T < 1000 else TENSOR_HEADS[:2]
            H, HV = heads[(i + j) % len(heads)]
            flags = {name: bool(rng.integers(2)) for name in ("packed", "v_first", "state")}
            flags["l2norm"] = rng.integers(3) == 0
            flags["x"] = op in PREDICTS and (i + j) % 5 < 2
            B = 1 if flags["packed"] or T > 200 else int(rng.integers(1, 3))
            yield Case(op, "chunk", ml_dtypes.bfloat16, T, None, K, V, H, HV, B, **flags)
            if (i + j) % 4 == 3:
                halves.append(Case(op, "chunk", np.float16, T, None, K, V, H, HV, B, **flags))
    yield from halves


def inputs_of(case, rng):
    """Keyword arguments for the op, and for its namesake in linattn.reference."""
    cu = None
    if case.packed:
        a, b = np.sort(rng.integers(0, case.T + 1, 2))
        cu = np.array([0, a, a, b, case.T])  # one sequence is empty
    x = testing.make_inputs(
        case.op,
        rng,
        B=case.B,
        T=case.T,
        H=case.H,
        HV=case.HV,
        K=case.K,
        V=case.V,
        dtype=case.dtype,
        initial_state=case.state,
        cu_seqlens=cu,
        x=case.x,
    )
    if case.l2norm:
        x["qk_l2norm"] = True
    return x


def v_first(state):
    """A state or a pair, with S and a second state like it [N,HV,V,K]; z stays as it is."""
    if state is None:
        return None
    if isinstance(state, tuple):
        return tuple(v_first(x) if x.ndim == state[0].ndim else x for x in state)
    return np.ascontiguousarray(np.swapaxes(state, -1, -2))


def for_op(case, x):
    """The reference's arguments as the op takes them."""
    x = dict(x, mode=case.mode, chunk_size=case.chunk)
    if case.v_first:
        x["state_v_first"] = True
        if "initial_state" in x:
            x["initial_state"] = v_first(x["initial_state"])
    return x


def wider(dtype):
    """The dtype that the reference computes in: against float64 it needs more digits than
    float64."""
    return np.longdouble if np.dtype(dtype) == np.float64 else np.float64


def sampled(grid, every, how):
    """The cases of `--grid=how`: all of them, a fixed sample of one in `every`, or few of these."""
    return {"all": grid, "sample": grid[::every], "few": grid[:: every * 5]}[how]


def on_tensor_cores(dtype, K, mode, T=64, tf32=False):
    """Does a GPU's forward pass multiply on tensor cores? Its operands are then rounded to `dtype`,
    or to tf32 where that is allowed for float32. All other passes go token by token, in every mode.
    The answer is yes for some that in fact go token by token and are more exact: those whose chunks
    do not fit the shared memory of a device, and the delta rule with K below 16."""
    halves = dtype in (ml_dtypes.bfloat16, np.float16) and K <= 256
    return (
        (halves or (tf32 and dtype == np.float32 and K <= 128))
        and mode != "recurrent"
        and T > device.FEW_TOKENS
    )


def rounds_products(op, dtype, K, mode, T=64, chunk=None):
    """Does a causal forward pass round its factors to `dtype`?"""
    if device.on_host():
        return bits_multiplied(op, dtype, mode, T, chunk) == 8
    return on_tensor_cores(dtype, K, mode, T)


def bits_multiplied(op, dtype, mode, T=64, chunk=None):
    """How many bits of a number the host's bfloat16 products multiply, in a causal forward pass
    with chunks of up to 64 tokens. 8: one bfloat16 number stands for each number. 16: two do. 0:
    the pass does not use these products, for example with a decay per key or a feature map, which
    linear_attention has by default."""
    isa = _linattn.isa()[0]
    paired = "bf16" in isa or "amx" in isa
    if not (
        paired
        and op not in NORMALISED + KEY_DECAY
        and mode == "chunk"
        and (chunk or 0) <= 64
        and dtype == ml_dtypes.bfloat16
        and T > 0
    ):
        return 0
    return 8 if "bf16" in isa else 16


def gradients_on_tensor_cores(op, dtype, K, V, mode, T=64):
    """Does a GPU's backward pass multiply on tensor cores? It does in bfloat16, and for most ops in
    float16. Others are more exact."""
    kind = linattn.VARIANTS[op]
    in_float16 = kind.rule != "dplr" and kind.decay != "pair"
    halves = dtype == ml_dtypes.bfloat16 or (dtype == np.float16 and in_float16)
    return halves and mode != "recurrent" and T > 0 and 16 <= K <= 256 and V % 8 == 0


def form_of(case, gpu=False):
    """The reference's form of the same algorithm."""
    if gpu and not on_tensor_cores(case.dtype, case.K, case.mode, case.T):
        return {"form": "recurrent"}
    if case.mode == "chunk":
        return {"form": "chunk", "chunk_size": case.chunk or 16}
    return {"form": case.mode}


def parts(name, value):
    """[(name, array)] of an output: a state may be a pair, and None has no entry."""
    if value is None:
        return []
    if isinstance(value, tuple):
        return [(f"{name}[{i}]", x) for i, x in enumerate(value)]
    return [(name, value)]


# The largest error of naive is one sample, and may be small by luck. Before a case fails, naive is
# computed again with its keys in other orders, one after the other: the same sums, rounded in other
# ways. The largest error of all these is the yardstick.
RETRIES = 7
SEEDS = range(1, RETRIES + 1)  # of the orders


def _state_keys(state, order):
    if isinstance(state, tuple):
        return state[0][:, :, order], state[1][:, :, order]
    return None if state is None else state[:, :, order]


def shuffle_keys(x, order):
    """The same problem with its keys in another order."""
    y = dict(x)
    for name in (*KEY_HEADS, "g", "alpha"):
        if name in x and (name in KEY_HEADS or np.ndim(x[name]) == 4):
            y[name] = x[name][..., order]
    for name in ("initial_state", "d_final_state"):
        if name in x:
            y[name] = _state_keys(x[name], order)
    return y


def unshuffle_keys(outputs, order):
    """The outputs {name: value} of a shuffled problem, with the keys in their first order."""
    back = np.argsort(order)
    outputs = dict(outputs)
    for name, value in outputs.items():
        if name in ("final_state", "d_initial_state"):
            outputs[name] = _state_keys(value, back)
        elif value is not None and (name[1:] in KEY_HEADS or (name == "dg" and value.ndim == 4)):
            outputs[name] = value[..., back]
    return outputs


def retried(naive, x, seed):
    """naive(x), a dict {name: output}, computed with shuffled keys."""
    order = np.random.default_rng(seed).permutation(x["q"].shape[-1])
    return unshuffle_keys(naive(shuffle_keys(x, order)), order)


def worse(naive, other, ref):
    """Element by element the one that is further off."""
    with np.errstate(all="ignore"):
        wide = np.result_type(np.float64, ref.dtype)
        a, b, c = (y.astype(wide) for y in (naive, other, ref))
        return np.where(np.abs(b - c) > np.abs(a - c), b, a)


def assert_accurate_retried(out, ref, naive, shuffled, **how):
    """The acceptance rule, with retries before a failure. shuffled: naive with its keys in another
    order, an array for each retry. It is asked only for those that are needed."""
    shuffled = iter(shuffled)
    while True:
        try:
            return testing.assert_accurate(out, ref, naive, **how)
        except AssertionError:
            other = next(shuffled, None)
            if other is None:
                raise
        naive = worse(naive, other, ref)


STATES = ("final_state", "d_initial_state")


class Pool:
    """Outputs of several repeats of a case, put together before they are judged.

    state_dtype: the dtype by which a state or its gradient is judged, and to which naive's is
    rounded. By default it is the dtype that the state is stored in. Tensor cores, and a
    processor's bfloat16 products, sum a state from products of two-byte numbers, so it is no
    better than these. Where two of them stand for each number, it is as good as tf32.
    """

    def __init__(self, state_dtype=None):
        self.state_dtype = state_dtype
        self.arrays = {}
        self.naives = []
        self.shuffled = {}

    def add(self, outs, refs, naive, x):
        """{name: output}, {name: reference}, and naive: a function of the inputs x that gives the
        same."""
        self.naives.append((naive, x))
        naives = naive(x)
        for name in outs:
            triples = [parts(name, y[name]) for y in (outs, refs, naives)]
            assert [n for n, _ in triples[0]] == [n for n, _ in triples[1]], (name, outs, refs)
            for (label, a), (_, b), (_, c) in zip(*triples, strict=True):
                assert a.shape == b.shape, (label, a.shape, b.shape)
                kept = self.arrays.setdefault(label, (a.dtype, [], [], []))
                assert kept[0] == a.dtype
                for i, y in enumerate((a, b, c)):
                    kept[i + 1].append(np.ravel(y))

    def least(self):
        sizes = [sum(map(len, kept[1])) for kept in self.arrays.values()]
        return min(sizes, default=0)

    def judge(self, label, gradient=False, tf32=False):
        for name, (dtype, *stacks) in self.arrays.items():
            out, ref, naive = map(np.concatenate, stacks)
            rounded = self.state_dtype is not None and name.startswith(STATES)
            if rounded:
                dtype, naive = self.state_dtype, naive.astype(self.state_dtype)
            how = {"dtype": dtype, "gradient": gradient, "name": f"{label} {name}", "tf32": tf32}
            again = (np.concatenate([np.ravel(y[name]) for y in self.again(s)]) for s in SEEDS)
            shuffled = (y.astype(dtype) if rounded else y for y in again)
            assert_accurate_retried(out, ref, naive, shuffled, **how)

    def again(self, seed):
        """By repeat, the arrays of naive by their labels, with shuffled keys. They are kept: the
        arrays of a case often need it together."""
        if seed not in self.shuffled:
            self.shuffled[seed] = [
                dict(part for name, y in retried(naive, x, seed).items() for part in parts(name, y))
                for naive, x in self.naives
            ]
        return self.shuffled[seed]


def repeated(case, rng, once, state_dtype=None):
    """Call once(pool) until every array has enough numbers for the rule."""
    pool = Pool(state_dtype)
    sparing = device.on_host() and case.K > 1
    enough, most = (ENOUGH, MOST_WORK) if sparing else (POOL, np.inf)
    for n in range(1, MOST_REPEATS + 1):
        once(pool)
        if case.T * case.B == 0 or pool.least() >= enough or n * _cost(case) >= most:
            break
    return pool


def reference_op(case):
    return getattr(reference, case.op)
