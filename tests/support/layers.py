"""Arguments of linattn.layer_step, and the same step by the functions that it puts together."""

import numpy as np

import linattn
from linattn import gates

# The ops with all stages, and some without: no pair of states, nor a decay per head.
OPS = [
    op
    for op, kind in linattn.VARIANTS.items()
    if kind.decay in ("none", "token", "key")
    and kind.rule in ("additive", "delta")
    and not kind.normaliser
]
SIZES = {"N": 3, "H": 2, "HV": 4, "K": 8, "V": 12, "W": 4}


def layer_arguments(op, dtype=np.float64, seed=0, **sizes):
    """All stages, of NumPy arrays."""
    N, H, HV, K, V, W = (SIZES | sizes).values()
    rng = np.random.default_rng(seed)
    real = np.float64 if np.dtype(dtype) == np.float64 else np.float32

    def numbers(*shape, of=dtype):
        return rng.standard_normal(shape).astype(of)

    keys = K if linattn.VARIANTS[op].decay == "key" else 1
    x = {
        "q": numbers(N, H * K),
        "k": numbers(N, H * K),
        "v": numbers(N, HV * V),
        "state": numbers(N, HV, K, V, of=real),
        "q_conv": (numbers(H * K, W), numbers(H * K), numbers(N, H * K, W - 1)),
        "k_conv": (numbers(H * K, W), None, numbers(N, H * K, W - 1)),
        "v_conv": (numbers(HV * V, 1, W), None, numbers(N, HV * V, W - 1)),
        "norm_weight": numbers(V),
        "output_gate": numbers(N, HV * V),
    }
    if linattn.VARIANTS[op].decay in ("token", "key"):
        x |= {
            "g": numbers(N, HV * keys),
            "decay": "softplus",
            "A_log": numbers(HV, of=real),
            "dt_bias": numbers(HV * keys, of=real),
        }
    if linattn.VARIANTS[op].rule == "delta":
        x |= {"beta": numbers(N, HV), "sigmoid_beta": True, "qk_l2norm": True}
    return x


def mamba2_arguments(dtype=np.float64, seed=0, groups=2, **sizes):
    """Those of simple_gla as a layer of Mamba-2 has them, whose state is [N,HV,V,K]."""
    x = layer_arguments("simple_gla", dtype, seed, **sizes)
    rng = np.random.default_rng(seed + 1)
    return x | {
        "state": np.swapaxes(x["state"], 2, 3).copy(),
        "state_v_first": True,
        "weigh": True,
        "skip": rng.standard_normal(x["state"].shape[1]).astype(x["A_log"].dtype),
        "norm_weight": rng.standard_normal(x["v"].shape[1]).astype(dtype),
        "norm_groups": groups,
        "gate_first": True,
    }


# (op, changes of the arguments of mamba2_arguments, error, text). The core refuses them, and so do
# the functions that a tracer sees.
BAD_STAGES = [
    (
        "simple_gla",
        {"norm_groups": 7},
        ValueError,
        r"norm_groups: expected a divisor of HV\*V = 48",
    ),
    ("simple_gla", {"norm_groups": 0}, ValueError, "norm_groups: expected at least 1, got 0"),
    ("simple_gla", {"norm_groups": 2.0}, TypeError, "norm_groups: expected an int or None"),
    ("simple_gla", {"norm_groups": True}, TypeError, "norm_groups: expected an int or None"),
    ("simple_gla", {"norm_weight": np.ones(12)}, ValueError, r"expected \[HV\*V\], got \(12,\)"),
    ("simple_gla", {"norm_eps": -1.0}, ValueError, "norm_eps: expected a finite number >= 0"),
    ("simple_gla", {"gate_first": 1}, TypeError, "gate_first: expected True or False"),
    (
        "simple_gla",
        {"output_gate": np.ones((3, 1))},
        ValueError,
        r"output_gate: expected \[N,HV\*V\]",
    ),
    ("simple_gla", {"weigh": 1}, TypeError, "weigh: expected True or False"),
    ("simple_gla", {"decay": "bounded"}, ValueError, "weigh: expected decay='softplus'"),
    (
        "simple_gla",
        {"decay": None, "A_log": None, "dt_bias": None},
        ValueError,
        "weigh: expected decay",
    ),
    ("simple_gla", {"weight": np.ones((3, 4))}, ValueError, "weigh: expected False beside weight"),
    ("simple_gla", {"skip": np.ones(3)}, ValueError, "skip: expected"),
    ("gla", {}, ValueError, "weigh: expected False, since the writes of gla have no weights"),
    ("gla", {"weigh": False}, TypeError, "no argument of its step is called 'skip'"),
]


def bad_arguments(op, options):
    x = mamba2_arguments() | options
    if op == "gla":
        x |= {name: layer_arguments(op)[name] for name in ("g", "dt_bias")}
    return x


def by_functions(op, x):
    """y in the dtype of the sums, from the functions one by one. The states move on."""
    x = dict(x)
    state, slots = x.pop("state"), x.get("state_indices")
    HV, K, V = state.shape[1:]
    if x.get("state_v_first"):
        K, V = V, K
    by_key = linattn.VARIANTS[op].decay == "key"
    rows = []
    for name in "qkv":
        row, convolution = x.pop(name), x.pop(f"{name}_conv", None)
        if convolution is not None:
            weight, bias, before = convolution
            row = linattn.causal_conv1d_step(
                row,
                weight.reshape(weight.shape[0], -1),
                bias,
                state=before,
                state_indices=slots,
                activation=x.get("conv_activation", "silu"),
            )
        rows.append(row.reshape(row.shape[0], -1, V if name == "v" else K))
    x.pop("conv_activation", None)
    decay, A_log, dt_bias = (x.pop(name, None) for name in ("decay", "A_log", "dt_bias"))
    bound = x.pop("lower_bound", -5.0)
    if by_key:
        x["g"] = x["g"].reshape(-1, HV, K)
        A_log = None if A_log is None else A_log[:, None]
        dt_bias = None if dt_bias is None else dt_bias.reshape(HV, K)
    if x.pop("weigh", False):
        u = wide(x["g"]) if dt_bias is None else wide(x["g"]) + wide(dt_bias)
        x["weight"] = np.logaddexp(0, u) if isinstance(u, np.ndarray) else (1 + u.exp()).log()
    if decay == "softplus":
        x["g"] = gates.softplus(x["g"], A_log, dt_bias)
    elif decay == "bounded":
        x["g"] = gates.bounded(x["g"], A_log, dt_bias, bound)
    elif decay == "rwkv7":
        x["g"] = gates.rwkv7(x["g"])
    negative = x.pop("allow_neg_eigval", False)
    if x.pop("sigmoid_beta", False):
        x["beta"] = gates.beta(x["beta"], negative)
    weight, gate = x.pop("norm_weight", None), x.pop("output_gate", None)
    eps, activation = x.pop("norm_eps", 1e-5), x.pop("output_activation", "silu")
    groups, gate_first = x.pop("norm_groups", None) or HV, x.pop("gate_first", False)
    y = wide(stepped(op, *rows, state=state, **x))
    factor = None if gate is None else activated(wide(gate), activation).reshape(y.shape)
    if factor is not None and gate_first:
        y = y * factor
    if weight is not None:
        o = y.reshape(y.shape[0], groups, -1)
        o = o / ((o * o).sum(-1)[..., None] / o.shape[-1] + eps) ** 0.5
        y = o.reshape(y.shape) * wide(weight).reshape(-1, V)
    if factor is not None and not gate_first:
        y = y * factor
    return y.reshape(y.shape[0], -1)


def wide(x):
    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double()


def activated(u, activation):
    sigmoid = 1 / (1 + (np.exp(-u) if isinstance(u, np.ndarray) else (-u).exp()))
    return {"silu": u * sigmoid, "sigmoid": sigmoid, None: u}[activation]


def stepped(op, q, k, v, weight=None, skip=None, **x):
    """The op's step, of v times the weights, and a part of v beside its read."""
    if weight is None and skip is None:
        return getattr(linattn, f"{op}_step")(q, k, v, **x)
    # A weight is no argument of a step. So that v is not rounded again, all is in float64.
    state = x.pop("state")
    exact, x = wide(state), {n: wide(a) if n == "g" else a for n, a in x.items()}
    u = wide(v) if weight is None else wide(v) * weight[..., None]
    o = getattr(linattn, f"{op}_step")(wide(q), wide(k), u, state=exact, **x)
    state[...] = exact
    scale = x.get("scale", q.shape[-1] ** -0.5)
    return o if skip is None else o + scale * wide(skip)[:, None] * wide(v)
