"""What is measured: the problems, with why each is there, and the calls to make of them."""

from dataclasses import dataclass
from functools import cache

import numpy as np

import linattn

H, K, V, T = 16, 128, 128, 512  # a layer of a model of about 2e9 parameters; one prompt

# Multiplies and adds that the recurrence needs per token and head, in units of K*V: a write and a
# read are 2 each, a decay 1, a prediction 2. Doing more work than that earns nothing.
FLOPS = {
    "linear_attention": 4,
    "retention": 5,
    "lightning_attention": 5,
    "simple_gla": 5,
    "gla": 5,
    "delta_rule": 6,
    "gated_delta_rule": 7,
    "kda": 7,
}
BACKWARD = 3  # forward and backward against the forward

# (T, why) of the plot, and of the ratio that tells whether long sequences cost more per token
LENGTHS = ((128, "short prompt"), (512, "the table's"), (1024, ""), (2048, ""),
           (4096, "rows of [B,T,H,D] far apart: every chunk is fetched from memory"))


# T of one head, to see that a token costs the same however many there are
COST_LENGTHS = tuple(4**n for n in range(4, 11))  # 2^8 to 2^20


@dataclass(frozen=True)
class Case:
    """One problem: an op, a face of it, a length and a dtype."""

    op: str
    face: str = "forward"  # "forward" | "forward+backward" | "step"
    T: int = T
    dtype: str = "float32"
    heads: int = H

    def __str__(self):
        return f"{self.op} {self.face} T={self.T} {self.dtype}"

    @property
    def flops(self):
        faces = BACKWARD if self.face == "forward+backward" else 1
        return faces * FLOPS[self.op] * K * V * self.heads * self.T


def table():
    """The table's cases: eight ops, three faces, float32; forward in bfloat16 where NumPy has it.

    T = 512 is long enough that the first chunk's zero state does not count and short enough that
    everything but the inputs stays in the cache.
    """
    found = [Case(op, face) for face in ("forward", "forward+backward") for op in linattn.OPS]
    found += [Case(op, "step", 1) for op in linattn.OPS]
    if bfloat16() is not None:
        found += [Case(op, "forward", T, "bfloat16") for op in linattn.OPS]
    return found


def bfloat16():
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def inputs(case):
    """Arrays for a case, the same for ours and for every peer: a dict of q, k, v and gates.

    Gates are those of trained models: decays near 1, from exp(-0.002) to exp(-0.3) a token, and
    beta about a half; keys of a delta rule have unit norm.
    """
    delta = case.op in ("delta_rule", "gated_delta_rule", "kda")
    names = ["q", "unit k" if delta else "k", "v"]
    if delta:
        names.append("beta")
    if case.op in ("simple_gla", "gated_delta_rule"):
        names.append("g")
    if case.op in ("gla", "kda"):
        names.append("g per key")
    x = {name.replace("unit ", "").split()[0]: array(name, case.T, case.heads, case.dtype)
         for name in names}
    if case.op == "lightning_attention":
        x["slopes"] = linattn.lightning_slopes(case.heads).astype(np.float32)
    if case.op == "retention":
        x["gamma"] = (1 - 2.0 ** (-5 - np.arange(case.heads) % 8)).astype(np.float32)
    if case.op == "linear_attention":
        x.update(normalize=False, feature_map="identity")  # so that every peer computes the same
    return x


@cache  # the ops share them: T = 4096 of every op would be gigabytes
def array(name, T, heads, dtype):
    """One input array by its name in `inputs`."""
    rng = np.random.default_rng(list(name.encode()))
    shape = (1, T, heads)
    if name == "beta":
        a = rng.uniform(0.1, 0.9, shape)
    elif name.startswith("g"):
        a = -(10 ** rng.uniform(-2.7, -0.5, (*shape, K) if "key" in name else shape))
    else:
        a = rng.standard_normal((*shape, K))
        if "unit" in name:
            a /= np.linalg.norm(a, axis=-1, keepdims=True)
    return a.astype(bfloat16() if dtype == "bfloat16" else dtype)


def aligned(shape):
    """float32 zeros at an address that is a multiple of 64, where NumPy promises 16."""
    n = 4 * int(np.prod(shape))
    raw = np.zeros(n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + n].view(np.float32).reshape(shape)


@cache
def gradient(case):
    """The gradient of o that the backward starts from."""
    shape = (1, case.T, case.heads, V)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def ours(case, x):
    """A function of no arguments that does the case once and returns what it computed.

    Outputs are written where they were the time before, as in a server; the gradients are new
    arrays each time. The state of a step is kept: it stays bounded, as decay or delta rule see to
    it, or grows by what is written, too slowly to matter.
    """
    op = getattr(linattn, case.op)
    if case.face == "step":
        step, state = getattr(linattn, f"{case.op}_step"), linattn.zeros_state(1, case.heads, K, V)
        token = {name: a[:, 0] if name in ("q", "k", "v", "g", "beta") else a
                 for name, a in x.items()}
        out = np.empty_like(token["v"])
        return lambda: step(**token, state=state, out=out)
    out = np.empty_like(x["v"])
    if case.face == "forward":
        return lambda: op(**x, out=out)[0]
    backward, do = getattr(linattn, f"{case.op}_backward"), gradient(case)

    def both():
        o, _ = op(**x, out=out)
        return (o, *(d for d in backward(do, **x) if d is not None))
    return both
