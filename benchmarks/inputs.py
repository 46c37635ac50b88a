"""The arrays of a case, the same for ours and for every peer, and the calls of linattn on them.

Gates are those of trained models: decays near 1, from exp(-0.002) to exp(-0.3) a token, and beta
and eta about a half; keys that predict have unit norm. q, k, v, x and y are of the case's dtype;
PyTorch's gates and beta are float32. Every array [B,T,...] has its axis of tokens in a step too,
with T = 1.
"""

import inspect
from functools import cache

import numpy as np

import linattn

LAYER, LAYERS = 12, 24  # of lightning attention's slopes
PARTS = ("beta", "eta", "part", "b", "w")  # the kinds of numbers between 0.1 and 0.9


def drawn(case, draw):
    """q, k, v and the gates per token; `draw(kind, *last)` makes an array [B, T, *last]."""
    x = {
        "q": draw("q", case.H, case.D),
        "k": draw("unit k" if case.delta else "k", case.H, case.D),
        "v": draw("v", case.HV, case.values),
    }
    if case.normalised:  # a sum of weights of both signs may be near zero
        x |= {name: abs(x[name]) for name in "qk"}
    if case.variant.decay not in ("none", "head"):
        x["g"] = draw("g", case.HV, *(case.D,) * (case.variant.decay == "key"))
    if case.delta:
        x["beta"] = draw("beta", case.HV)
    if case.variant.decay == "pair":
        x["eta"] = draw("eta", case.HV)
    if case.variant.rule == "dplr":  # y is a part of x, so that I - y x' shrinks
        x["x"] = draw("unit x", case.H, case.D)
        x["y"] = x["x"] * draw("part", case.H, 1)
    return x


def by_head(case):
    """The op's own arguments that are fixed by head: a decay, gamma or slopes; a bonus."""
    if case.variant.rule == "bonus":
        shape = case.H, case.D
        return {"bonus": np.random.default_rng(2).standard_normal(shape).astype(np.float32)}
    if case.variant.decay != "head":
        return {}
    if "gamma" in inspect.signature(getattr(linattn, case.op)).parameters:
        return {"gamma": (1 - 2.0 ** (-5 - np.arange(case.HV))).astype(np.float32)}
    slopes = linattn.lightning_slopes(case.HV, layer=LAYER, layers=LAYERS, rule="transnormer")
    return {"slopes": slopes.astype(np.float32)}


def options(case):
    """Further arguments of ours and of the reference, so that every peer computes the same."""
    if case.variant.rule == "bonus":
        return {"scale": case.D**-0.5}  # as the other ops have it
    if not case.variant.normaliser:
        return {}
    return {"feature_map": "identity", "normalize": "clamp" if case.normalised else False}


def numpy_inputs(case):
    """NumPy's arrays."""

    def draw(*shape):
        return _array(case.B, case.T, case.dtype, *shape)

    x = drawn(case, draw) | by_head(case)
    return in_its_letters(case, x, draw) if case.system else x


def in_its_letters(case, x, draw):
    """The arrays of a composed op: those of its base, and what it has besides or instead."""
    if case.op == "ssd":  # as a new Mamba-2 has them: A from -1 to -16, steps from 0.001 to 0.1
        A = -np.linspace(1, 16, case.HV, dtype=np.float32)
        return {"x": x["v"], "dt": draw("dt", case.HV), "A": A, "B": x["k"], "C": x["q"]}
    if case.op == "comba":
        return x | {"x": x["k"] * draw("part", case.H, 1)}
    if case.op == "precond_gated_delta_rule":
        return x | {"preconditioner": draw("preconditioner", case.H, case.D)}
    assert case.op == "gdn2"
    del x["beta"]
    return x | {"b": draw("b", case.H, case.D), "w": draw("w", case.HV, case.values)}


@cache  # shared by the ops, because T = 4096 of every op would be gigabytes
def _array(B, T, dtype, kind, *last):
    rng, shape = np.random.default_rng(list(kind.encode())), (B, T, *last)
    if kind in PARTS:
        a = rng.uniform(0.1, 0.9, shape)
    elif kind == "g":
        a = -(10 ** rng.uniform(-2.7, -0.5, shape))
    elif kind == "dt":
        a = 10 ** rng.uniform(-3, -1, shape)
    elif kind == "preconditioner":
        a = rng.uniform(0.5, 1.5, shape)
    else:
        a = rng.standard_normal(shape)
        if "unit" in kind:
            a /= np.linalg.norm(a, axis=-1, keepdims=True)
    return a.astype(bfloat16() if dtype == "bfloat16" else dtype)


def bfloat16():
    """NumPy's bfloat16, or None where ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def aligned(shape, dtype=np.float32):
    """Zeros, of 4 bytes each, at an address that is a multiple of 64, where NumPy promises 16."""
    n = 4 * int(np.prod(shape))
    raw = np.zeros(n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n].view(dtype).reshape(shape)


@cache
def gradient(case):
    """The gradient of o that a backward pass starts from."""
    shape = (case.B, case.T, case.HV, case.values)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def torch_dtype(case):
    import torch

    return torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)


def torch_inputs(case, device, seed):
    """PyTorch's tensors: random, never zeros; for a step also a state, float32."""
    import torch

    random = torch.Generator(device).manual_seed(seed)

    def draw(kind, *last):
        shape = (case.B, case.T, *last)
        if kind in ("g", *PARTS):
            a = torch.rand(*shape, generator=random, device=device)
            a = 0.1 + 0.8 * a if kind in PARTS else -(10 ** (-2.7 + 2.2 * a))
            return a.to(torch_dtype(case)) if kind == "part" else a
        a = torch.randn(*shape, generator=random, device=device)
        return (torch.nn.functional.normalize(a, dim=-1) if "unit" in kind else a).to(
            torch_dtype(case)
        )

    x = drawn(case, draw)
    x |= {name: torch.from_numpy(a).to(device) for name, a in by_head(case).items()}
    if case.pass_ == "step":
        x["state"] = torch.randn(*state_shape(case), generator=random, device=device)
    return x


def state_shape(case):
    """[B,HV,K,V], and two of them for a memory and its momentum."""
    return (2,) * (case.variant.decay == "pair") + (case.B, case.HV, case.D, case.values)


def ours(case, x):
    """A function of no arguments that does the case once and returns (o, gradients or state ...).

    Every call writes o to the same array, as a server does, and a step writes its state in place.
    Gradients are new arrays each time. A decay or the delta rule keeps the state bounded; without
    them it grows too slowly to matter. A tensor for o is NaN at first, which shows any element
    that is not written. A composed op takes no array for o.
    """
    if case.system:
        return plain(case.op, x)
    more, op = options(case), getattr(linattn, case.op)
    if case.dtype == "tf32":
        more["allow_tf32"] = True
    if case.pass_ == "step":
        token = {name: a[:, 0] if has_tokens(a) else a for name, a in x.items() if name != "state"}
        state = x.get("state")
        if state is None:
            state = aligned(state_shape(case))
        given = tuple(state) if case.variant.decay == "pair" else state
        step, out = getattr(linattn, f"{case.op}_step"), empty_like(token["v"])
        return lambda: (step(**token, **more, state=given, out=out), state)
    out = empty_like(x["v"])
    if case.pass_ == "forward":
        return lambda: (op(**x, **more, out=out)[0],)
    backward, do = getattr(linattn, f"{case.op}_backward"), gradient(case)

    def both():
        o, _ = op(**x, **more, out=out)
        return (o, *(d for d in backward(do, **x, **more) if d is not None))

    return both


def plain(op, x):
    """A function that calls the op forward and returns (o,), a new array each time."""
    function = getattr(linattn, op)
    return lambda: (function(**x)[0],)


def has_tokens(a):
    """Is it [B,T,HV], [B,T,H,K] and the like? A constant is [HV] or [H,K]."""
    return a.ndim > 2


def empty_like(a):
    return np.empty_like(a) if isinstance(a, np.ndarray) else a.new_full(a.shape, float("nan"))
