"""The arrays of a case, the same for ours and for every peer, and the calls of linattn on them.

Gates are those of trained models: decays near 1, from exp(-0.002) to exp(-0.3) a token, and beta
about a half; keys of a delta rule have unit norm. q, k and v are of the case's dtype; PyTorch's
gates and beta are float32. Every array has an axis of tokens, that of a step too, with T = 1.
"""

import inspect
from functools import cache

import numpy as np

import linattn

LAYER, LAYERS = 12, 24  # of lightning attention's slopes


def drawn(case, draw):
    """q, k, v and the gates per token; `draw(kind, *last)` makes an array [B, T, *last]."""
    x = {
        "q": draw("q", case.H, case.D),
        "k": draw("unit k" if case.delta else "k", case.H, case.D),
        "v": draw("v", case.HV, case.D),
    }
    if case.normalised:  # a sum of weights of both signs may be near zero
        x |= {name: abs(x[name]) for name in "qk"}
    if case.variant.decay in ("token", "key"):
        x["g"] = draw("g", case.HV, *(case.D,) * (case.variant.decay == "key"))
    if case.delta:
        x["beta"] = draw("beta", case.HV)
    return x


def by_head(case):
    """The op's own argument for a decay that is fixed by head: gamma or slopes."""
    if case.variant.decay != "head":
        return {}
    if "gamma" in inspect.signature(getattr(linattn, case.op)).parameters:
        return {"gamma": (1 - 2.0 ** (-5 - np.arange(case.HV))).astype(np.float32)}
    slopes = linattn.lightning_slopes(case.HV, layer=LAYER, layers=LAYERS, rule="transnormer")
    return {"slopes": slopes.astype(np.float32)}


def options(case):
    """Further arguments of ours and of the reference, so that every peer computes the same."""
    if not case.variant.normaliser:
        return {}
    return {"feature_map": "identity", "normalize": "clamp" if case.normalised else False}


def numpy_inputs(case):
    """NumPy's arrays."""
    return drawn(case, lambda *shape: _array(case.B, case.T, case.dtype, *shape)) | by_head(case)


@cache  # shared by the ops, because T = 4096 of every op would be gigabytes
def _array(B, T, dtype, kind, *last):
    rng, shape = np.random.default_rng(list(kind.encode())), (B, T, *last)
    if kind == "beta":
        a = rng.uniform(0.1, 0.9, shape)
    elif kind == "g":
        a = -(10 ** rng.uniform(-2.7, -0.5, shape))
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


def aligned(shape):
    """float32 zeros at an address that is a multiple of 64, where NumPy promises 16."""
    n = 4 * int(np.prod(shape))
    raw = np.zeros(n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n].view(np.float32).reshape(shape)


@cache
def gradient(case):
    """The gradient of o that a backward pass starts from."""
    shape = (case.B, case.T, case.HV, case.D)
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
        if kind in ("g", "beta"):
            a = torch.rand(*shape, generator=random, device=device)
            return 0.1 + 0.8 * a if kind == "beta" else -(10 ** (-2.7 + 2.2 * a))
        a = torch.randn(*shape, generator=random, device=device)
        return (torch.nn.functional.normalize(a, dim=-1) if "unit" in kind else a).to(
            torch_dtype(case)
        )

    x = drawn(case, draw)
    x |= {name: torch.from_numpy(a).to(device) for name, a in by_head(case).items()}
    if case.pass_ == "step":
        x["state"] = torch.randn(case.B, case.HV, case.D, case.D, generator=random, device=device)
    return x


def ours(case, x):
    """A function of no arguments that does the case once and returns (o, gradients or state ...).

    Every call writes o to the same array, as a server does, and a step writes its state in place.
    Gradients are new arrays each time. A decay or the delta rule keeps the state bounded; without
    them it grows too slowly to matter. A tensor for o is NaN at first, which shows any element
    that is not written.
    """
    more, op = options(case), getattr(linattn, case.op)
    if case.dtype == "tf32":
        more["allow_tf32"] = True
    if case.pass_ == "step":
        token = {
            name: a[:, 0] if name in ("q", "k", "v", "g", "beta") else a for name, a in x.items()
        }
        state = token.pop("state", None)
        if state is None:
            state = linattn.zeros_state(case.B, case.HV, case.D, case.D)
        step, out = getattr(linattn, f"{case.op}_step"), empty_like(token["v"])
        return lambda: (step(**token, **more, state=state, out=out), state)
    out = empty_like(x["v"])
    if case.pass_ == "forward":
        return lambda: (op(**x, **more, out=out)[0],)
    backward, do = getattr(linattn, f"{case.op}_backward"), gradient(case)

    def both():
        o, _ = op(**x, **more, out=out)
        return (o, *(d for d in backward(do, **x, **more) if d is not None))

    return both


def empty_like(a):
    return np.empty_like(a) if isinstance(a, np.ndarray) else a.new_full(a.shape, float("nan"))
