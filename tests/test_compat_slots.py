"""linattn.compat.fla: slots, decays of values, polynomials, preconditioners and GDN-2.

Each function is compared with its formula, token by token in float64.
"""

from itertools import pairwise

import numpy as np
import pytest
from support.compare import agree
from support.device import imported

import linattn
from linattn.compat import fla

B, T, H, HV, K, V, M = 2, 37, 2, 4, 6, 5, 3


def normal(rng, *shape):
    return rng.standard_normal(shape)


def tensors(x, grad=False):
    torch = imported("torch")
    return {
        name: torch.from_numpy(a).requires_grad_(grad) if isinstance(a, np.ndarray) else a
        for name, a in x.items()
    }


# ---- slots ----


def slots(rng, B=B, T=T, heads=H):
    x = {"q": normal(rng, B, T, heads, K)}
    x |= {name: normal(rng, B, T, H, n) for name, n in (("k", K), ("v", V), ("s", M))}
    return x


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def gsa_by_hand(q, k, v, s, g, scale, state=None):
    """Gated slot attention: K' <- a K' + s k', V <- a V + s v', o = V' softmax(scale K' q)."""
    B, T, heads, _ = q.shape
    o = np.empty((B, T, heads, V))
    keys, values = np.zeros((B, H, M, K)), np.zeros((B, H, M, V))
    if state is not None:
        keys, values = state[0].swapaxes(2, 3).copy(), state[1].copy()
    for b, h in np.ndindex(B, H):
        for t in range(T):
            a = np.exp(g[b, t, h])[:, None]
            keys[b, h] = a * keys[b, h] + np.outer(s[b, t, h], k[b, t, h])
            values[b, h] = a * values[b, h] + np.outer(s[b, t, h], v[b, t, h])
            for i in range(h * heads // H, (h + 1) * heads // H):
                o[b, t, i] = values[b, h].T @ softmax(scale * keys[b, h] @ q[b, t, i])
    return o, (keys.swapaxes(2, 3), values)


def from_scores(s, before=None):
    """What is written and the log decays of scores, by sums of exponentials."""
    sums = np.exp(s).cumsum(1)
    if before is not None:
        sums = sums + np.exp(before)
    earlier = np.concatenate([sums[:, :1] if before is None else np.exp(before), sums[:, :-1]], 1)
    return np.exp(s) / sums, np.log(earlier / sums), np.log(sums[:, -1:])


@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("name", ["chunk_gsa", "fused_recurrent_gsa"])
def test_gated_slots(name, heads, rng):
    x = slots(rng, heads=heads)
    g, function = -rng.exponential(0.3, (B, T, H, M)), getattr(fla, name)
    want, state = gsa_by_hand(**x, g=g, scale=K**-0.5)
    o, found = function(**x, g=g, output_final_state=True)
    agree(o, want)
    for got, exact in zip(found, state, strict=True):
        agree(got, exact)
    assert tuple(function(**x, g=g)[1]) == (None, None)
    want, _ = gsa_by_hand(**x, g=g, scale=0.7, state=state)
    agree(function(**x, g=g, scale=0.7, initial_state=found)[0], want)


@pytest.mark.parametrize("name", ["chunk_gsa", "fused_recurrent_gsa", "chunk_abc"])
def test_slots_without_gates(name, rng):
    x = slots(rng)
    s, g, _ = from_scores(x["s"])
    want, state = gsa_by_hand(**x | {"s": s}, g=g, scale=K**-0.5)
    o, found = getattr(fla, name)(**x, output_final_state=True)
    agree(o, want)
    for got, exact in zip(found, state, strict=True):
        agree(got, exact)


@pytest.mark.parametrize("gated", [True, False])
def test_packed_sequences_of_slots(gated, rng):
    x = slots(rng, B=1)
    if gated:
        x["g"] = -rng.exponential(0.3, (1, T, H, M))
    edges = np.array([0, 5, 5, T])
    o, found = fla.chunk_gsa(**x, cu_seqlens=edges, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(edges)):
        if start == end:
            continue
        alone = {name: a[:, start:end] for name, a in x.items()}
        want, state = fla.chunk_gsa(**alone, output_final_state=True)
        agree(o[:, start:end], want)
        for got, exact in zip(found, state, strict=True):
            agree(got[n : n + 1], exact)


def test_gradients_of_slots(rng):
    """Against finite differences, with and without gates."""
    torch = imported("torch")
    x = {name: a[:1, :5] for name, a in slots(rng).items()}
    g = -rng.exponential(0.3, (1, 5, H, M))
    for given in (x, x | {"g": g}):
        arrays = tensors(given, grad=True)

        def loss(*values, names=tuple(arrays)):
            return fla.chunk_gsa(**dict(zip(names, values, strict=True)))[0]

        assert torch.autograd.gradcheck(loss, tuple(arrays.values()))


def test_slots_that_do_not_fit_are_refused(rng):
    x = slots(rng)
    with pytest.raises(ValueError, match=r"^q: expected HQ, a multiple of H = 2, heads, got 3$"):
        fla.chunk_gsa(**x | {"q": normal(rng, B, T, 3, K)})
    with pytest.raises(TypeError, match=r"^s: expected an array of NumPy's or PyTorch's, got "):
        fla.chunk_gsa(**x | {"s": 1.0})
    with pytest.raises(ValueError, match=r"^reverse: not supported"):
        fla.fused_recurrent_gsa(**x, reverse=True)


# ---- decays of values ----


@pytest.mark.parametrize("v_first", [True, False])
def test_a_decay_of_values(v_first, rng):
    q, k, v = (normal(rng, B, T, H, n) for n in (K, K, V))
    gv = -rng.exponential(0.3, (B, T, H, V))
    S, want = normal(rng, B, H, K, V), np.empty((B, T, H, V))
    state = S.swapaxes(2, 3) if v_first else S
    options = {"gv": gv, "state_v_first": v_first, "output_final_state": True}
    o, last = fla.fused_recurrent_gla(q, k, v, initial_state=state, **options)
    S = S.copy()
    for t in range(T):
        S = S * np.exp(gv[:, t])[:, :, None] + k[:, t][..., None] * v[:, t][:, :, None]
        want[:, t] = K**-0.5 * np.einsum("bhkv,bhk->bhv", S, q[:, t])
    agree(o, want)
    agree(last.swapaxes(2, 3) if v_first else last, S)
    with pytest.raises(ValueError, match=r"^gv: not supported by linattn\.compat\.fla beside gk"):
        fla.fused_recurrent_gla(q, k, v, gk=-abs(k), gv=gv)
    with pytest.raises(TypeError, match=r"^initial_state: expected"):
        fla.fused_recurrent_gla(q, k, v, gv=gv, initial_state=3.0)


# ---- LightNet ----


@pytest.mark.parametrize("name", ["chunk_lightnet", "fused_recurrent_lightnet"])
def test_lightnet(name, rng):
    function = getattr(fla, name)
    q, k, v = (normal(rng, B, T, H, n) for n in (K, K, V))
    written, g, z = from_scores(k)
    want, state = linattn.reference.gla(q, written, v, g)
    o, (S, last) = function(q, k, v, output_final_state=True)
    agree(o, want)
    agree(S, state)
    agree(last, z)
    half = function(q[:, :20], k[:, :20], v[:, :20], output_final_state=True, state_v_first=True)
    rest = q[:, 20:], k[:, 20:], v[:, 20:]
    o, (none, end) = function(*rest, initial_state=half[1], state_v_first=True)
    agree(np.concatenate([half[0], o], 1), want)
    agree(end, z)
    assert none is None
    x = tensors({"q": q, "k": k, "v": v})
    agree(function(**x)[0].numpy(), want)


def test_packed_sequences_of_lightnet(rng):
    q, k, v = (normal(rng, 1, T, H, n) for n in (K, K, V))
    edges = np.array([0, 5, 5, T])
    o, (_, z) = fla.chunk_lightnet(q, k, v, cu_seqlens=edges)
    assert z.shape == (3, 1, H, K) and np.isneginf(z[1]).all()
    for start, end in ((0, 5), (5, T)):
        alone = fla.chunk_lightnet(q[:, start:end], k[:, start:end], v[:, start:end])[0]
        agree(o[:, start:end], alone)


# ---- polynomials ----


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", ["fused_chunk_based", "parallel_based", "parallel_rebased"])
def test_weights_that_are_polynomials(name, normalized, rng):
    q, k, v = (normal(rng, B, T, H, n) for n in (K, K, V))
    rebased = name == "parallel_rebased"
    for given, scale in ((None, K**-0.5), (1.0, 1.0)):
        s = scale * np.einsum("bthk,bshk->bhts", q, k)
        weights = np.tril(s**2 if rebased else 1 + s + s**2 / 2)
        want = np.einsum("bhts,bshv->bthv", weights, v)
        if normalized:
            eps = 1e-5 if rebased else 1e-6
            want = want / (weights.sum(-1) + eps).swapaxes(1, 2)[..., None]
        options = {"use_normalize" if rebased else "use_norm": normalized}
        if rebased:
            options["use_scale"] = given is None
        else:
            options["scale"] = given
        got = getattr(fla, name)(q, k, v, **options)
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
        x = tensors({"q": q, "k": k, "v": v})
        np.testing.assert_allclose(getattr(fla, name)(**x, **options), want, rtol=1e-8, atol=1e-10)
    narrow = [a.astype("float16") for a in (q, k, v)]
    assert getattr(fla, name)(*narrow).dtype == np.float16
    if rebased:
        with pytest.raises(ValueError, match=r"^return_both: not supported"):
            fla.parallel_rebased(q, k, v, return_both=True)


# ---- one chunk ----


def test_one_chunk(rng):
    q, k, v = (normal(rng, B, T, H, n) for n in (K, K, V))
    g = -rng.exponential(0.3, (B, T, H))
    agree(fla.parallel_simple_gla(q, k, v, g)[0], linattn.reference.simple_gla(q, k, v, g)[0])
    zeros = np.zeros_like(g)
    agree(fla.parallel_simple_gla(q, k, v)[0], linattn.reference.simple_gla(q, k, v, zeros)[0])
    agree(fla.parallel_retention(q, k, v)[0], linattn.reference.retention(q, k, v)[0])
    for function in (fla.parallel_simple_gla, fla.parallel_retention):
        with pytest.raises(ValueError, match=r"^output_attentions: not supported"):
            function(q, k, v, output_attentions=True)


# ---- preconditioners ----


def precond_by_hand(q, k, v, g, beta, g_atk, beta_atk, *, l2=True, x=1.5, center=-0.2, eps=1e-6):
    """The delta rule with k times its preconditioner, a head at a time. g is of heads or keys."""
    if l2:
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    S, A = np.zeros((B, HV, K, V)), np.zeros((B, H, K))
    o = np.empty((B, T, HV, V))
    center = np.broadcast_to(center, (H,))
    for b, t in np.ndindex(B, T):
        for h in range(H):
            A[b, h] = np.exp(g_atk[b, t, h]) * A[b, h] + beta_atk[b, t, h] * k[b, t, h] ** 2
        for i in range(HV):
            h = i * H // HV
            r = np.log(A[b, h] + eps) - center[h]
            written = k[b, t, h] * x ** (-r / (1 + abs(r)))
            S[b, i] *= np.exp(np.broadcast_to(g[b, t, i], (K,)))[:, None]
            error = beta[b, t, i] * (v[b, t, i] - S[b, i].T @ k[b, t, h])
            S[b, i] += np.outer(written, error)
            o[b, t, i] = K**-0.5 * S[b, i].T @ q[b, t, h]
    return o, S, A


def precond_inputs(rng, per_key):
    x = {name: normal(rng, B, T, H, K) for name in "qk"} | {"v": normal(rng, B, T, HV, V)}
    x["g"] = -rng.exponential(0.3, (B, T, HV, K) if per_key else (B, T, HV))
    x |= {"beta": rng.random((B, T, HV)), "beta_atk": rng.random((B, T, H))}
    return x | {"g_atk": -rng.exponential(0.3, (B, T, H))}


PRECOND = [
    "chunk_precond_gated_delta_rule",
    "fused_recurrent_precond_gated_delta_rule",
    "chunk_precond_kda",
    "fused_recurrent_precond_kda",
]


@pytest.mark.parametrize("name", PRECOND)
def test_preconditioners(name, rng):
    function = getattr(fla, name)
    x = precond_inputs(rng, name.endswith("kda"))
    found = function(**x, output_final_state=True)
    for got, want in zip(found, precond_by_hand(**x), strict=True):
        agree(got, want)
    assert function(**x)[1:] == (None, None)
    more = {"x": 2.0, "eps": 1e-3, "log_atk_scale": np.array([0.3, -0.4])}
    want = precond_by_hand(**x, x=2.0, eps=1e-3, center=more["log_atk_scale"])
    agree(function(**x, **more)[0], want[0])
    parts = [{k: a[:, cut] for k, a in x.items()} for cut in (slice(20), slice(20, T))]
    o, S, A = function(**parts[0], output_final_state=True)
    then = function(**parts[1], initial_state=S, initial_A_state=A, output_final_state=True)
    agree(np.concatenate([o, then[0]], 1), found[0])
    for got, exact in zip(then[1:], found[1:], strict=True):
        agree(got, exact)
    agree(function(**tensors(x))[0].numpy(), found[0])


def test_preconditioners_token_by_token(rng):
    function = fla.fused_recurrent_precond_gated_delta_rule
    x = precond_inputs(rng, False)
    gk = -rng.exponential(0.3, (B, T, HV, K))
    want = precond_by_hand(**x | {"g": x["g"][..., None] + gk})
    agree(function(**x, gk=gk)[0], want[0])
    g = x.pop("g")
    agree(function(**x)[0], precond_by_hand(**x, g=0 * g)[0])
    want = precond_by_hand(**x, g=g, l2=False)[0]
    agree(function(**x, g=g, use_qk_l2norm_in_kernel=False)[0], want)
    del x["beta"]
    agree(function(**x, g=g)[0], precond_by_hand(**x, g=g, beta=np.ones_like(g))[0])


def test_preconditioners_that_do_not_fit_are_refused(rng):
    x = precond_inputs(rng, True)
    cases = [
        ({"g_atk": None}, TypeError, r"g_atk: expected an array \[B,T,H\]"),
        ({"beta_atk": x["beta"]}, ValueError, r"beta_atk: expected \[B,T,H\] = \(2, 37, 2\), got"),
        ({"use_qk_l2norm_in_kernel": False}, ValueError, "use_qk_l2norm_in_kernel: expected True"),
        ({"return_intermediate_states": True}, ValueError, "return_intermediate_states: not"),
        ({"solve_tril_precision": "ieee"}, ValueError, "solve_tril_precision: not supported"),
        ({"cp_context": object()}, ValueError, "cp_context: not supported"),
    ]
    for wrong, error, said in cases:
        with pytest.raises(error, match=f"^{said}"):
            fla.chunk_precond_kda(**x | wrong)
    x["g"] = x["g"][..., 0]
    with pytest.raises(ValueError, match=r"^cp_context: not supported"):
        fla.chunk_precond_gated_delta_rule(**x, cp_context=object())
    with pytest.raises(ValueError, match=r"^gv: not supported"):
        fla.fused_recurrent_precond_gated_delta_rule(**x, gv=x["v"])


def test_gradients_of_preconditioners(rng):
    torch = imported("torch")
    x = {name: a[:1, :4] for name, a in precond_inputs(rng, False).items()}
    arrays = tensors(x, grad=True)

    def loss(*values):
        given = dict(zip(arrays, values, strict=True))
        return fla.chunk_precond_gated_delta_rule(**given)[0]

    assert torch.autograd.gradcheck(loss, tuple(arrays.values()))


# ---- Gated DeltaNet 2 ----


@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("name", ["chunk_gdn2", "fused_recurrent_gdn2"])
def test_gdn2(name, heads, rng):
    q, k = normal(rng, 2, B, T, H, K)
    v, w = normal(rng, B, T, heads, V), rng.random((B, T, heads, V))
    b, g = rng.random((B, T, heads, K)), -rng.exponential(0.3, (B, T, heads, K))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    S, want = np.zeros((B, heads, K, V)), np.empty((B, T, heads, V))
    for n, t, i in np.ndindex(B, T, heads):
        h = i * H // heads
        S[n, i] *= np.exp(g[n, t, i])[:, None]
        error = w[n, t, i] * v[n, t, i] - S[n, i].T @ (b[n, t, i] * k[n, t, h])
        S[n, i] += np.outer(k[n, t, h], error)
        want[n, t, i] = K**-0.5 * S[n, i].T @ q[n, t, h]
    o, last = getattr(fla, name)(q, k, v, g, b, w, output_final_state=True, state_v_first=True)
    agree(o, want)
    agree(last.swapaxes(2, 3), S)
    raw, A_log = normal(rng, B, T, heads, K), rng.random(heads)
    gate = {"use_gate_in_kernel": True, "A_log": A_log}
    g = -np.exp(A_log)[:, None] * np.log1p(np.exp(raw))
    got = getattr(fla, name)(q, k, v, raw, b, w, **gate)[0]
    agree(got, getattr(fla, name)(q, k, v, g, b, w)[0])
