"""docs/from-the-notes.md: its calls and listings run, and each is what a plain loop says."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import linattn
from linattn import reference
from linattn.testing import assert_accurate

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "from-the-notes.md"
if not PAGE.exists():
    pytest.skip("docs/from-the-notes.md: not in a checkout", allow_module_level=True)
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


def run(blocks):
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    return names


# ---- equations ----

rng = np.random.default_rng(0)
T, K, V = 23, 5, 4
q, k = rng.standard_normal((2, T, K)) / 2
v, do = rng.standard_normal((2, T, V))
alpha, beta = rng.uniform(0.5, 1, (2, T))
alphas = rng.uniform(0.5, 1, (T, K))


def phi(x):
    return np.exp(x / 2)


def names_of_the_table():
    """For eval: the calls change S and z alone."""
    arrays = {"q": q, "k": k, "v": v, "do": do, "alpha": alpha, "beta": beta, "alphas": alphas}
    public = {name: getattr(linattn, name) for name in linattn.__all__}
    S, z = linattn.zeros_state(1, 1, K, V, dtype=np.float64, normalized=True)
    return {**public, **arrays, "phi": phi, "reference": reference, "S": S[0, 0], "z": z[0, 0]}


def rows_of(title):
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return rows[1:]  # without the head


CALLS = [call for row in rows_of("Equations") for call in re.findall(r"`([^`]+)`", row[1])]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_runs(call):
    eval(call, names_of_the_table())


def weighted(weight, mask=None):
    """o = A v for weights A_ij of q_i and k_j, causal by default."""
    A = np.array([[weight(x, y) for y in k] for x in q])
    return (np.tril(A) if mask is None else A * mask) @ v


def softmax(mask):
    A = np.where(mask, np.exp(q @ k.T / np.sqrt(K)), 0)
    return A / A.sum(1, keepdims=True) @ v


def normalised(phi_of_x, mask, divisor=lambda den: den):
    A = np.where(mask, phi_of_x(q) @ phi_of_x(k).T, 0)
    return A @ v / divisor(A.sum(1, keepdims=True))


def elu1(x):
    return np.where(x > 0, x + 1, np.exp(x))


def loop(decay, rate=None, unit=False):
    """S <- decay_t * S, then the write; the delta rule with a rate."""
    S, o = np.zeros((K, V)), []
    for t in range(T):
        k_t, q_t = k[t], q[t]
        if unit:
            k_t, q_t = (x / np.sqrt(x @ x + 1e-6) for x in (k_t, q_t))
        S = np.reshape(decay[t], (-1, 1)) * S
        if rate is not None:
            S = (np.eye(K) - rate[t] * np.outer(k_t, k_t)) @ S + rate[t] * np.outer(k_t, v[t])
        else:
            S = S + np.outer(k_t, v[t])
        o.append(q_t @ S)
    return np.array(o)


SEEN, ALL, ONES = np.tri(T, dtype=bool), np.ones((T, T), bool), np.ones(T)
WEIGHTS = np.array([[np.prod(alpha[j + 1 : i + 1]) for j in range(T)] for i in range(T)])
PLAIN = {
    "reference.softmax_attention(q, k, v)": lambda: softmax(SEEN),
    "reference.softmax_attention(q, k, v, causal=False)": lambda: softmax(ALL),
    "attend(q, k, v, causal=False)": lambda: weighted(np.dot, ALL),
    "attend(q, k, v)": lambda: weighted(np.dot),
    "linear_attention(q, k, v, causal=False)": lambda: normalised(elu1, ALL),
    "linear_attention(q, k, v)": lambda: normalised(elu1, SEEN),
    "linear_attention(q, k, v, feature_map=phi)": lambda: normalised(phi, SEEN),
    'linear_attention(q, k, v, feature_map="identity", normalize=False, scale=1, '
    'mode="recurrent")': lambda: loop(ONES),
    'linear_attention(q, k, v, feature_map="identity", normalize=False, scale=1, '
    "chunk_size=16)": lambda: loop(ONES),
    'linear_attention(q, k, v, mode="parallel")': lambda: normalised(elu1, SEEN),
    "retention(q, k, v, gamma=0.9, scale=1)": lambda: loop(0.9 * ONES),
    "retention(q, k, v)": lambda: loop((1 - 2.0**-5) * ONES) / np.sqrt(K),
    "simple_gla(q, k, v, alpha=alpha, scale=1)": lambda: loop(alpha),
    "gla(q, k, v, alpha=alphas, scale=1)": lambda: loop(alphas),
    'implicit_weights(q, k, op="simple_gla", alpha=alpha, scale=1) @ v': lambda: weighted(
        np.dot, np.tril(WEIGHTS)
    ),
    "delta_rule(q, k, v, beta, scale=1)": lambda: loop(ONES, beta),
    "delta_rule(q, k, v, beta, qk_l2norm=True)": lambda: loop(ONES, beta, True) / np.sqrt(K),
    'delta_rule(q, k, v, beta, mode="chunk", scale=1)': lambda: loop(ONES, beta),
    "gated_delta_rule(q, k, v, alpha=alpha, beta=beta, scale=1)": lambda: loop(alpha, beta),
    "kda(q, k, v, alpha=alphas, beta=beta, scale=1)": lambda: loop(alphas, beta),
}


@pytest.mark.parametrize("call", PLAIN)
def test_a_call_is_its_equation(call):
    assert call in CALLS
    found = eval(call, names_of_the_table())
    found = found[0] if isinstance(found, tuple) else found
    np.testing.assert_allclose(found, PLAIN[call](), rtol=1e-9, atol=1e-11)


def test_the_other_calls():
    names = names_of_the_table()
    A = eval("implicit_weights(q, k)", names)
    np.testing.assert_allclose(A @ v, normalised(elu1, SEEN), rtol=1e-9, atol=1e-11)
    over_time = eval('states("linear_attention", q, k, v)', names)
    sums = np.cumsum(elu1(k)[:, :, None] * v[:, None], 0), np.cumsum(elu1(k), 0)
    np.testing.assert_allclose(over_time.S, sums[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(over_time.z, sums[1], rtol=1e-9, atol=1e-11)
    eval("linear_attention_step(q[0], k[0], v[0], state=(S, z))", names)
    np.testing.assert_allclose(names["S"], sums[0][0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(names["z"], sums[1][0], rtol=1e-9, atol=1e-11)


def test_the_divisors():
    """den is scale phi(q)'z, and the numerator has the same scale."""
    for how, divisor in (
        ("clamp", lambda den: np.maximum(den, 4.0 * np.sqrt(K))),
        ("add", lambda den: den + 4.0 * np.sqrt(K)),
    ):
        o, _ = linattn.linear_attention(q, k, v, normalize=how, eps=4.0)
        np.testing.assert_allclose(o, normalised(elu1, SEEN, divisor), rtol=1e-9, atol=1e-11)


# ---- listings and systems ----


def test_the_listings_run():
    run(block for block in BLOCKS if "torch" not in block)


def test_the_layer_runs():
    pytest.importorskip("torch")
    (block,) = (block for block in BLOCKS if "torch" in block)
    layer = run([block])["layer"]
    assert list(layer.state_dict()) == ["W_q.weight", "W_k.weight", "W_v.weight"]


def test_every_system_of_the_page_is_below():
    defined = re.findall(r"^def (\w+)\(", BLOCKS[-1], re.M)
    assert {*defined} - {"later"} == {*SYSTEMS}
    named = re.findall(r"`(\w+)` below", TEXT)
    assert {*named} == {*SYSTEMS}


def plain_retnet(q, k, v):
    """The sum over earlier tokens, by complex numbers."""
    half = q.shape[-1] // 2
    T, H = q.shape[1:3]
    theta = 10000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(T)[:, None, None] * theta).astype(np.result_type(q, np.complex64))
    gamma = (1 - 2.0 ** (-5 - np.arange(H))).astype(q.dtype)
    x, y = ((z[..., :half] + 1j * z[..., half:]) * turn for z in (q, k))
    o = np.zeros_like(v)
    for n in range(T):
        for m in range(n + 1):
            weight = (x[:, n] * y[:, m].conj()).sum(-1).real * gamma ** (n - m)
            o[:, n] += weight[..., None] * v[:, m]
    return o * np.sqrt(1 / q.dtype.type(q.shape[-1]))


def plain_lightning(q, k, v):
    T, H = q.shape[1:3]
    s = 2.0 ** (-8 * np.arange(1, H + 1) / H)  # ALiBi's slopes, for H a power of two
    o = np.zeros_like(v)
    for i in range(T):
        for j in range(i + 1):
            weight = (q[:, i] * k[:, j]).sum(-1) * np.exp(-s * (i - j)).astype(q.dtype)
            o[:, i] += weight[..., None] * v[:, j]
    return o


def plain_rwkv6(r, k, v, log_w, u):
    S, o = np.zeros((*r.shape[:1], *r.shape[2:], v.shape[-1]), r.dtype), np.zeros_like(v)
    for t in range(r.shape[1]):
        write = k[:, t, ..., None] * v[:, t, :, None]
        o[:, t] = (r[:, t, ..., None] * (S + u[..., None] * write)).sum(-2)
        S = np.exp(log_w[:, t])[..., None] * S + write
    return o


def plain_rwkv4(w, u, k, v):
    o = np.zeros_like(v)
    for t in range(k.shape[1]):
        num, den = np.exp(u + k[:, t]) * v[:, t], np.exp(u + k[:, t])
        for i in range(t):
            weight = np.exp(-(t - 1 - i) * w + k[:, i])
            num, den = num + weight * v[:, i], den + weight
        o[:, t] = num / den
    return o


def plain_gsa(q, k, v, log_a):
    """The slots are the rows of two memories, of keys and of values."""
    (B, T, H, K), V, M = q.shape, v.shape[-1], log_a.shape[-1]
    keys, values = np.zeros((B, H, M, K), q.dtype), np.zeros((B, H, M, V), q.dtype)
    o = np.zeros_like(v)
    for t in range(T):
        a = np.exp(log_a[:, t])[..., None]
        keys = a * keys + (1 - a) * k[:, t, :, None]
        values = a * values + (1 - a) * v[:, t, :, None]
        scores = (keys * q[:, t, :, None]).sum(-1, keepdims=True) / np.sqrt(q.dtype.type(K))
        weights = np.exp(scores)
        o[:, t] = (weights * values).sum(-2) / weights.sum(-2)
    return o


def plain_rwkv7(r, log_w, k, v, a, kk):
    S, o = np.zeros((*r.shape[:1], *r.shape[2:], v.shape[-1]), r.dtype), np.zeros_like(v)
    for t in range(r.shape[1]):
        looked_up = (S * kk[:, t, ..., None]).sum(-2)[:, :, None]
        S = np.exp(log_w[:, t])[..., None] * S - (kk * a)[:, t, ..., None] * looked_up
        S = S + k[:, t, ..., None] * v[:, t, :, None]
        o[:, t] = (S * r[:, t, ..., None]).sum(-2)
    return o


def plain_titans(q, k, v, theta, eta, alpha):
    """The paper's S is the step that is taken."""
    M, o = np.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]), q.dtype), np.zeros_like(v)
    S = np.zeros_like(M)
    for t in range(q.shape[1]):
        error = (M * k[:, t, ..., None]).sum(-2) - v[:, t]
        gradient = k[:, t, ..., None] * error[:, :, None]
        S = eta[:, t, :, None, None] * S - theta[:, t, :, None, None] * gradient
        M = (1 - alpha[:, t])[..., None, None] * M + S
        o[:, t] = (M * q[:, t, ..., None]).sum(-2)
    return o


def plain_ttt(q, k, v, theta):
    """W learns from 16 tokens at a time, and a token reads what it and those before it taught."""
    W, o = np.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]), q.dtype), np.zeros_like(v)
    for t in range(q.shape[1]):
        if t % 16 == 0:
            before = W
        error = (before * k[:, t, ..., None]).sum(-2) - v[:, t]
        W = W - theta[:, t, :, None, None] * k[:, t, ..., None] * error[:, :, None]
        o[:, t] = (W * q[:, t, ..., None]).sum(-2)
    return o


def plain_favor(q, k, v, W):
    """The sum over earlier tokens."""

    def features(x):
        y = x / np.sqrt(np.sqrt(x.dtype.type(x.shape[-1])))
        logits = (y[..., None, :] * W).sum(-1)
        return np.exp(logits) * np.exp(-(y * y).sum(-1, keepdims=True) / 2)

    phi_q, phi_k, o = features(q), features(k), np.zeros_like(v)
    for i in range(q.shape[1]):
        weights = (phi_q[:, i : i + 1] * phi_k[:, : i + 1]).sum(-1, keepdims=True)
        o[:, i] = (weights * v[:, : i + 1]).sum(1) / weights.sum(1)
    return o


def _size(*shape, scale=1.0):
    return lambda rng: scale * rng.standard_normal(shape)


def _between(low, high, *shape):
    return lambda rng: rng.uniform(low, high, shape)


def _unit(*shape):
    def made(rng):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return made


QK, VALUES = _size(2, 30, 4, 6), _size(2, 30, 4, 5)
SYSTEMS = {
    "retnet": (plain_retnet, [QK, QK, VALUES]),
    "lightning": (plain_lightning, [QK, QK, VALUES]),
    "rwkv4": (plain_rwkv4, [_between(0, 2, 7), _size(7), _size(2, 30, 7), _size(2, 30, 7)]),
    "gsa": (plain_gsa, [QK, QK, VALUES, _between(-2, 0, 2, 30, 4, 3)]),
}
# the same for the calls that the page spells out beside the functions
CALLED = {
    "rwkv6(r, k, v, u, g=log_w)": (
        plain_rwkv6,
        {
            "r": QK,
            "k": QK,
            "v": VALUES,
            "log_w": _between(-2, 0, 2, 30, 4, 6),
            "u": _size(4, 6),
        },
    ),
    "rwkv7(r, log_w, k, v, a, kk=kk)": (
        plain_rwkv7,
        {
            "r": QK,
            "log_w": _between(-2, 0, 2, 30, 4, 6),
            "k": QK,
            "v": VALUES,
            "a": _between(0, 1, 2, 30, 4, 6),
            "kk": _unit(2, 30, 4, 6),
        },
    ),
    "titans(q, k, v, theta, eta, alpha=1 - alpha, scale=1)": (
        plain_titans,
        {
            "q": QK,
            "k": _unit(2, 30, 4, 6),
            "v": VALUES,
            "theta": _between(0, 1, 2, 30, 4),
            "eta": _between(0, 0.9, 2, 30, 4),
            "alpha": _between(0, 0.5, 2, 30, 4),
        },
    ),
    "titans(q, k, v, theta, alpha=1, batch=16, scale=1)": (
        plain_ttt,
        {"q": QK, "k": _unit(2, 30, 4, 6), "v": VALUES, "theta": _between(0, 0.1, 2, 30, 4)},
    ),
}


@pytest.fixture(scope="module")
def functions():
    return run(BLOCKS[-1:])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_is_its_own_loop(system, dtype, functions):
    plain, makers = SYSTEMS[system]
    rng = np.random.default_rng(0)
    given = [make(rng).astype(dtype) for make in makers]
    wide = np.longdouble if dtype == np.float64 else np.float64
    exact, naive = plain(*(x.astype(wide) for x in given)), plain(*given)
    found = functions[system](*given)
    if not isinstance(found, tuple):
        found, exact, naive = (found,), (exact,), (naive,)
    for x, e, n in zip(found, exact, naive, strict=True):
        assert x.dtype == n.dtype == dtype and np.abs(e).max() > 0.1
        assert_accurate(x, e, n, dtype=dtype, name=system)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("call", CALLED)
def test_a_call_is_the_systems_loop(call, dtype):
    assert f"`{call}`" in TEXT.replace("\n  ", " ")
    plain, makers = CALLED[call]
    rng = np.random.default_rng(0)
    given = {name: make(rng).astype(dtype) for name, make in makers.items()}
    wide = np.longdouble if dtype == np.float64 else np.float64
    exact = plain(**{name: x.astype(wide) for name, x in given.items()})
    o, _ = eval(f"linattn.{call}", {"linattn": linattn, **given})
    assert o.dtype == dtype and np.abs(exact).max() > 0.1
    assert_accurate(o, exact, plain(**given), dtype=dtype, name=call)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_performer_is_its_own_loop(dtype):
    phi, rng = linattn.favor(32, dim=6), np.random.default_rng(0)
    given = [make(rng).astype(dtype) for make in (*(_size(2, 30, 4, 6, scale=0.5),) * 2, VALUES)]
    wide = np.longdouble if dtype == np.float64 else np.float64
    exact = plain_favor(*(x.astype(wide) for x in (*given, phi.projection)))
    naive = plain_favor(*given, phi.projection.astype(dtype))
    o, _ = linattn.linear_attention(*given, feature_map=phi)
    assert_accurate(o, exact, naive, dtype=dtype)


def test_the_state_after_the_last_token(functions):
    """Of the ops that read one token late: it needs one more token, as the page says."""
    later, rng = functions["later"], np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 9, 2, 3))
    g = -rng.exponential(1, k.shape)
    none = np.zeros_like(k[:, :1])
    k1, v1, g1 = (np.concatenate([x, none], 1) for x in (k, v, g))
    how = {"scale": 1, "output_final_state": True}
    _, late = linattn.gla(k1, later(k1), later(v1), g=later(g1), **how)
    _, state = linattn.gla(k, k, v, g=g, **how)
    np.testing.assert_allclose(late, state, rtol=1e-12, atol=1e-12)


# ---- api.md, beside scaled_dot_product_attention ----


def test_a_view_of_another_layout_is_not_copied():
    x = rng.standard_normal((1, 4, 2000, 16)).astype(np.float32)
    view = x.transpose(0, 2, 1, 3)
    uneven = np.repeat(view, 2, -1)[..., ::2]  # its innermost axis has gaps
    out, peaks = np.empty(view.shape, np.float32), []
    for given in (view, uneven):
        tracemalloc.start()
        linattn.linear_attention(given, given, given, out=out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < x.nbytes / 100 and peaks[1] > 2.9 * x.nbytes


def test_layout_scale_and_mask_of_pytorch():
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)  # [B,H,T,D]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for causal in (False, True):
        expected = sdpa(q, k, v, is_causal=causal).transpose(1, 2)
        views = (x.transpose(1, 2).numpy() for x in (q, k, v))
        found = reference.softmax_attention(*views, causal=causal)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-9, atol=1e-12)
    view = q.transpose(1, 2)
    o, _ = linattn.linear_attention(view, view, view)
    assert view.data_ptr() == q.data_ptr() and o.is_contiguous() and o.shape == (2, 9, 4, 8)


# ---- links ----


def test_links_lead_to_files_and_headings():
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, heading = link.partition("#")
        target = DOCS / path
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, link
