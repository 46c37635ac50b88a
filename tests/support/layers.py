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


def by_functions(op, x):
    """y in the dtype of the sums, from the functions one by one. The states move on."""
    x = dict(x)
    state, slots = x.pop("state"), x.get("state_indices")
    HV, K, V = state.shape[1:]
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
    y = getattr(linattn, f"{op}_step")(*rows, state=state, **x)
    y = y.astype(np.float64) if isinstance(y, np.ndarray) else y.double()
    if weight is not None:
        y = y / ((y * y).sum(-1)[..., None] / V + eps) ** 0.5 * weight
    if gate is not None:
        u = gate.astype(np.float64) if isinstance(gate, np.ndarray) else gate.double()
        u = u.reshape(y.shape)
        sigmoid = 1 / (1 + (np.exp(-u) if isinstance(u, np.ndarray) else (-u).exp()))
        y = y * {"silu": u * sigmoid, "sigmoid": sigmoid, None: u}[activation]
    return y.reshape(y.shape[0], -1)
