"""linattn.compat.fla's functions whose arguments have other names than ours: each against the
recurrence of fla's kernels, written out."""

import inspect
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support.compare import agree
from support.device import imported

from linattn.compat import _fla_rules, fla

# Parameters of fla.ops, fla-core 0.6.0, in order, with their defaults. Those that fla reads from
# **kwargs are keyword-only here.
COMMON = "scale=None, initial_state=None, output_final_state=False"
ONE = COMMON.replace("None", "1.0", 1)
CHUNK = (
    "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, "
    "disable_recompute=False, cp_context=None, lower_bound=None"
)
L2 = "use_qk_l2norm_in_kernel=False"
CPU = "cu_seqlens=None, cu_seqlens_cpu=None"
# fmt: off
SIGNATURES = {
    "chunk_rwkv6": f"r, k, v, w, u, {COMMON}, {CPU}, *, chunk_size=None",
    "fused_recurrent_rwkv6": f"r, k, v, w, u, {COMMON}, reverse=False, cu_seqlens=None",
    "chunk_rwkv7": f"r, w, k, v, a, b, {ONE}, {CHUNK}",
    "fused_recurrent_rwkv7": "r, w, k, v, a, b, scale=None, initial_state=None, "
                             "output_final_state=True, cu_seqlens=None",
    "fused_mul_recurrent_rwkv7": f"r, w, k, v, kk, a, {ONE}, reverse=False, cu_seqlens=None",
    "chunk_dplr_delta_rule": f"q, k, v, a, b, gk, {COMMON}, {CHUNK}",
    "fused_recurrent_dplr_delta_rule":
        f"q, k, v, a, b, gk, {COMMON}, reverse=False, cu_seqlens=None",
    "chunk_iplr_delta_rule": f"q, k, v, a, b, {COMMON}, {CPU}, *, chunk_size=None",
    "fused_recurrent_iplr_delta_rule": f"q, k, v, a, b, {COMMON}, cu_seqlens=None",
    "chunk_comba": f"q, k, v, p, g, beta=None, {COMMON}, {L2}, {CPU}",
    "fused_recurrent_comba": f"q, k, p, v, g, beta=None, {COMMON}, {L2}, cu_seqlens=None",
    "chunk_gated_delta_product":
        f"q, k, v, g, beta, num_householder, {COMMON}, {L2}, {CPU}, cp_context=None",
}
# fmt: on
UNSUPPORTED = {"reverse": True}
NO_EFFECT = {
    "cu_seqlens_cpu": np.array([0, 1]),
    "safe_gate": True,
    "lower_bound": -5.0,
    "disable_recompute": True,
    "chunk_size": 16,
}
functions = pytest.mark.parametrize("name", SIGNATURES)
B, T, H, K, V, R = 2, 37, 2, 6, 5, 2


def inputs(name, rng, B=B, T=T):
    """fla's arguments, by its names."""

    def normal(*shape):
        return rng.standard_normal((B, T, H, *shape))

    x = {"k": normal(K), "v": normal(V)}
    unit = normal(K)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    decay = -rng.exponential(0.3, (B, T, H, K))
    of_unit = unit * rng.uniform(0, 1, (B, T, H, 1))
    if "rwkv6" in name:
        return x | {"r": normal(K), "w": decay, "u": rng.standard_normal((H, K))}
    if "mul" in name:
        return x | {"r": normal(K), "w": decay, "kk": unit, "a": rng.uniform(0, 1, decay.shape)}
    if "rwkv7" in name:
        return x | {"r": normal(K), "w": decay, "a": -unit, "b": of_unit}
    x["q"] = normal(K)
    if "plr" in name:
        gk = {"gk": decay} if "dplr" in name else {}
        return x | {"a": -unit, "b": of_unit} | gk
    x["k"] = unit
    gates = {"g": decay[..., 0], "beta": rng.uniform(0, 1, (B, T, H))}
    if "comba" in name:
        return x | {"p": of_unit} | gates
    parts = {n: np.repeat(x[n], R, axis=1) + 0.1 * normal(1).repeat(R, 1) for n in "kv"}
    return x | parts | gates | {"beta": gates["beta"].repeat(R, 1), "num_householder": R}


def token(name, S, t, x):
    """o before its scale, and S after token t of one head."""
    if "product" in name:
        S = np.exp(x["g"][t]) * S
        for r in range(t * R, t * R + R):
            S = S + np.outer(x["k"][r], x["beta"][r] * (x["v"][r] - S.T @ x["k"][r]))
        return x["q"][t] @ S, S
    x = {n: a[t] if n != "u" else a for n, a in x.items()}
    if "rwkv6" in name:
        own = np.outer(x["k"], x["v"])
        return x["r"] @ (S + x["u"][:, None] * own), np.exp(x["w"])[:, None] * S + own
    if "comba" in name:
        error = x["v"] - S.T @ x["p"]  # before the decay, in both of fla's kernels
        S = np.exp(x["g"]) * S + np.outer(x["k"], x["beta"] * error)
        return x["q"] @ S, S
    a, b = (-x["kk"], x["kk"] * x["a"]) if "mul" in name else (x["a"], x["b"])
    log_decay = x.get("w", x.get("gk", np.zeros(K)))
    S = np.exp(log_decay)[:, None] * S + np.outer(b, a @ S) + np.outer(x["k"], x["v"])
    return x.get("r", x.get("q")) @ S, S


def written_out(name, x, state=None, scale=None, ends=None):
    x = {n: a for n, a in x.items() if n != "num_householder"}
    if scale is None:
        scale = 1.0 if "scale=1.0" in SIGNATURES[name] else K**-0.5
    batch, tokens = x["v"].shape[:2]
    tokens = tokens // R if "product" in name else tokens
    rows = [(b, 0, tokens) for b in range(batch)]
    if ends is not None:
        rows = [(0, start, end) for start, end in pairwise(ends)]
    o, last = np.zeros((batch, tokens, H, V)), np.zeros((len(rows), H, K, V))
    for n, (b, start, end) in enumerate(rows):
        for h in range(H):
            S = np.zeros((K, V)) if state is None else state[n, h]
            of_head = {m: a[h] if m == "u" else a[b, :, h] for m, a in x.items()}
            for t in range(start, end):
                read, S = token(name, S, t, of_head)
                o[b, t, h] = scale * read
            last[n, h] = S
    return o, last


def parameters(name):
    return inspect.signature(getattr(fla, name)).parameters


def test_every_name_is_there():
    assert sorted(_fla_rules.__all__) == sorted(SIGNATURES)


@functions
def test_the_parameters_are_flas(name):
    found = [str(p.replace(annotation=p.empty)) for p in parameters(name).values()]
    kinds = [p.kind for p in parameters(name).values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        found.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    assert ", ".join(found) == SIGNATURES[name]


@functions
def test_it_computes_flas_recurrence(name, rng):
    x = inputs(name, rng)
    function = getattr(fla, name)
    o, final = function(**x, output_final_state=True)
    want, state = written_out(name, x)
    agree(o, want)
    agree(final, state)
    no_state = function(**x)[1] is None
    assert no_state == (parameters(name)["output_final_state"].default is False)
    o, final = function(**x, initial_state=state, scale=0.3, output_final_state=True)
    want, state = written_out(name, x, state, 0.3)
    agree(o, want)
    agree(final, state)


@functions
def test_packed_sequences(name, rng):
    x = inputs(name, rng, B=1)
    ends = np.array([0, 5, 5, T])
    o, final = getattr(fla, name)(**x, cu_seqlens=ends, output_final_state=True)
    want, state = written_out(name, x, ends=ends)
    agree(o, want)
    agree(final, state)


@pytest.mark.parametrize("name", [name for name in SIGNATURES if L2 in SIGNATURES[name]])
def test_the_l2_norm(name, rng):
    """Of q and k, and in comba of p."""
    x = inputs(name, rng)
    x |= {n: 2 * x[n] for n in ("q", "k")}
    normed = {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in "qkp" if n in x}
    agree(
        getattr(fla, name)(**x, use_qk_l2norm_in_kernel=True)[0], written_out(name, x | normed)[0]
    )


def test_what_may_be_left_out(rng):
    x = inputs("chunk_comba", rng)
    ones = x | {"beta": np.ones_like(x["beta"])}
    no_beta = {n: a for n, a in x.items() if n != "beta"}
    agree(fla.chunk_comba(**no_beta)[0], written_out("chunk_comba", ones)[0])
    o, _ = fla.fused_recurrent_comba(**x | {"p": None})
    agree(o, fla.chunk_comba(**x | {"p": x["k"]})[0])
    x = inputs("chunk_gated_delta_product", rng)
    o, _ = fla.chunk_gated_delta_product(**x | {"g": None})
    agree(o, fla.chunk_gated_delta_product(**x | {"g": np.zeros_like(x["g"])})[0])


@functions
def test_what_is_taken_and_what_is_refused(name, rng):
    x, function = inputs(name, rng), getattr(fla, name)
    taken = {what: value for what, value in NO_EFFECT.items() if what in parameters(name)}
    agree(function(**x, **taken)[0], function(**x)[0])
    for what in UNSUPPORTED:
        if what in parameters(name):
            with pytest.raises(ValueError, match=rf"^{what}: not supported"):
                function(**x | {what: UNSUPPORTED[what]})
    if "cp_context" in parameters(name):
        with pytest.raises(TypeError, match=r"^cp_context: expected a context of .*, got .*object"):
            function(**x, cp_context=object())
    with pytest.raises(TypeError, match="head_first"):
        function(**x, head_first=True)
    known = {*x, *UNSUPPORTED, *NO_EFFECT, "scale", "initial_state", "output_final_state"}
    assert set(parameters(name)) <= known | {"cu_seqlens", "cp_context", "use_qk_l2norm_in_kernel"}


RECURRENT = [name for name in SIGNATURES if "recurrent" in name]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_v_of_another_dtype_token_by_token(name, dtype, rng):
    x = {n: a.astype(np.float32) for n, a in inputs(name, rng, T=9).items()}
    short = x | {"v": x["v"].astype(dtype)}
    o, _ = getattr(fla, name)(**short)
    want, _ = getattr(fla, name)(**x | {"v": short["v"].astype(np.float32)})
    assert o.dtype == np.float32
    np.testing.assert_array_equal(o, want)


@functions
def test_pytorchs_tensors_and_their_gradients(name, rng):
    torch = imported("torch")
    x = inputs(name, rng)
    tensors = {
        n: torch.tensor(a, requires_grad=True) if isinstance(a, np.ndarray) else a
        for n, a in x.items()
    }
    o, _ = getattr(fla, name)(**tensors)
    agree(o.detach().numpy(), getattr(fla, name)(**x)[0])
    o.square().sum().backward()
    for n, tensor in tensors.items():
        if n != "num_householder":
            assert tensor.grad.abs().sum() > 0, n
    # along a direction: the slope of the sum
    n = "v"
    step = 1e-6 * rng.standard_normal(x[n].shape)
    up, down = (
        (getattr(fla, name)(**x | {n: x[n] + sign * step})[0] ** 2).sum() for sign in (1, -1)
    )
    np.testing.assert_allclose((tensors[n].grad.numpy() * step).sum(), (up - down) / 2, rtol=1e-6)


@pytest.mark.parametrize("name", ["chunk_rwkv7", "chunk_dplr_delta_rule"])
def test_a_bound_that_no_decay_keeps_is_refused(name, rng):
    with pytest.raises(ValueError, match=r"^lower_bound: expected a number < 0, got 0.5$"):
        getattr(fla, name)(**inputs(name, rng), lower_bound=0.5)
