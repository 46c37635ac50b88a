"""Systems over the delta rules, each against its own recurrence, token by token as in its paper.

Gradients are compared with central differences, and steps with the sequence.
"""

import numpy as np
import pytest
from support.compare import leaves
from support.composed import BFLOAT16, assert_near, assert_slopes
from support.device import imported

import linattn
from linattn import _linattn, testing

B, T, H, HV, K, V = 2, 11, 2, 4, 5, 3
RUNS = [{"mode": "recurrent"}, {}, {"chunk_size": 4}, {"mode": "parallel"}]
runs = pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values())))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def normed(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


# ---- each system: its arguments, and its recurrence for one head, S [K,V], written out ----


def gated(rng, by_key=False):
    shape = (B, T, HV, K) if by_key else (B, T, HV)
    return {"g": -rng.exponential(0.3, shape), "beta": rng.uniform(0, 1, (B, T, HV))}


def qkv(rng, heads=HV):
    q, k = rng.standard_normal((2, B, T, H, K))
    return {"q": q, "k": unit(k), "v": rng.standard_normal((B, T, heads, V))}


def comba_inputs(rng):
    x = qkv(rng)
    return x | {"x": x["k"] * rng.uniform(0, 1, (B, T, H, 1))} | gated(rng)


def comba(S, q, k, v, x, g, beta):
    return (np.exp(g) * np.eye(K) - beta * np.outer(k, x)) @ S + beta * np.outer(k, v), q


def gdn2_inputs(rng):
    b, w = rng.uniform(0, 1, (B, T, H, K)), rng.uniform(0, 1, (B, T, HV, V))
    return qkv(rng) | {"b": b, "w": w, "g": gated(rng, by_key=True)["g"]}


def gdn2(S, q, k, v, b, w, g):
    decayed = np.exp(g)[:, None] * S
    return (np.eye(K) - np.outer(k, b * k)) @ decayed + np.outer(k, w * v), q


def precond_inputs(rng):
    return qkv(rng) | {"preconditioner": rng.uniform(0.5, 1.5, (B, T, H, K))} | gated(rng)


def precond(S, q, k, v, preconditioner, g, beta):
    S = np.exp(g) * S
    return S + np.outer(preconditioner * k, beta * (v - S.T @ k)), q


def rwkv7_inputs(rng):
    """The authors' a and b: minus a key, and a part of it."""
    x = qkv(rng, heads=H)
    kk, part = unit(rng.standard_normal((B, T, H, K))), rng.uniform(0, 1, (B, T, H, K))
    w = -rng.exponential(0.3, (B, T, H, K))
    return {"r": x["q"], "w": w, "k": x["k"], "v": x["v"], "a": -kk, "b": kk * part}


def rwkv7(S, r, w, k, v, a, b):
    return (np.diag(np.exp(w)) + np.outer(b, a)) @ S + np.outer(k, v), r


def transformers_inputs(rng):
    x = rwkv7_inputs(rng)
    kk, part = -x["a"], -x.pop("b") / x["a"]
    return x | {"a": part, "kk": kk}


def transformers(S, r, w, k, v, a, kk):
    looked_up = S.T @ kk
    return np.exp(w)[:, None] * S + np.outer(k, v) - np.outer(kk * a, looked_up), r


def iplr_inputs(rng):
    x = rwkv7_inputs(rng)
    return qkv(rng) | {"a": x["a"], "b": x["b"]}


def iplr(S, q, k, v, a, b):
    return (np.eye(K) + np.outer(b, a)) @ S + np.outer(k, v), q


SYSTEMS = {
    "comba": ("comba", comba_inputs, comba),
    "gdn2": ("gdn2", gdn2_inputs, gdn2),
    "precond": ("precond_gated_delta_rule", precond_inputs, precond),
    "rwkv7": ("rwkv7", rwkv7_inputs, rwkv7),
    "rwkv7, kk": ("rwkv7", transformers_inputs, transformers),
    "iplr": ("iplr_delta_rule", iplr_inputs, iplr),
}
systems = pytest.mark.parametrize("system", SYSTEMS)
NORMED = ("comba", "gdn2", "precond")  # these take qk_l2norm


def default_scale(name):
    return 1.0 if name == "rwkv7" else K**-0.5


def written_out(system, x, state, scale=None):
    """o and the last state, by the recurrence."""
    name, _, token = SYSTEMS[system]
    scale = default_scale(name) if scale is None else scale
    heads = x["v"].shape[2]
    o, last = np.empty_like(x["v"]), state.copy()
    for b, h in np.ndindex(B, heads):
        S = state[b, h]
        for t in range(T):
            arrays = {
                n: a[b, t, h if a.shape[2] == heads else h // (heads // H)] for n, a in x.items()
            }
            S, query = token(S, **arrays)
            o[b, t, h] = scale * query @ S
        last[b, h] = S
    return o, last


def problem(system, rng):
    name, inputs, _ = SYSTEMS[system]
    x = inputs(rng)
    heads = x["v"].shape[2]
    return name, x, rng.standard_normal((B, heads, K, V))


@systems
@runs
def test_forward(system, run, rng):
    name, x, state = problem(system, rng)
    got = getattr(linattn, name)(**x, initial_state=state, output_final_state=True, **run)
    for one, other in zip(got, written_out(system, x, state), strict=True):
        assert_near(one, other, 1e-12)
    scaled, _ = getattr(linattn, name)(**x, initial_state=state, scale=0.3, **run)
    assert_near(scaled, written_out(system, x, state, 0.3)[0], 1e-12)


@pytest.mark.parametrize("system", NORMED)
def test_the_l2_norm_is_that_of_q_and_k(system, rng):
    name, x, state = problem(system, rng)
    x |= {"q": 3 * x["q"], "k": 2 * x["k"]}
    got, _ = getattr(linattn, name)(**x, initial_state=state, qk_l2norm=True)
    want, _ = written_out(system, x | {n: normed(x[n]) for n in "qk"}, state)
    assert_near(got, want, 1e-12)


@systems
@pytest.mark.parametrize("l2norm", [False, True], ids=["", "l2norm"])
def test_backward(system, l2norm, rng):
    name, x, state = problem(system, rng)
    if l2norm and system not in NORMED:
        pytest.skip(f"{name} has no qk_l2norm")
    options = {"qk_l2norm": True} if l2norm else {}
    do, d_state = rng.standard_normal(x["v"].shape), rng.standard_normal(state.shape)
    given = x | {"initial_state": state}

    def loss():
        o, last = getattr(linattn, name)(**given, output_final_state=True, **options)
        return (do * o).sum() + (d_state * last).sum()

    def gradients(**run):
        call = getattr(linattn, f"{name}_backward")
        return call(do, **given, d_final_state=d_state, **options, **run)

    grads = gradients(mode="recurrent")
    by_name = {
        n: getattr(grads, "d_initial_state" if n == "initial_state" else f"d{n}") for n in given
    }
    assert all(by_name[n].shape == given[n].shape for n in given)
    assert len(leaves(tuple(grads))) == len(given)  # the others are None
    assert_slopes(loss, given, by_name, rng)
    for run in RUNS[1:]:
        for one, other in zip(leaves(tuple(gradients(**run))), leaves(tuple(grads)), strict=True):
            assert_near(one, other, 1e-12)


@systems
def test_steps_are_the_sequence(system, rng):
    name, x, state = problem(system, rng)
    want = written_out(system, x, state)
    state = state.copy()
    o = [
        getattr(linattn, f"{name}_step")(
            **{n: np.ascontiguousarray(a[:, t]) for n, a in x.items()}, state=state
        )
        for t in range(T)
    ]
    assert_near(np.stack(o, 1), want[0], 1e-12)
    assert_near(state, want[1], 1e-12)


@systems
def test_packed_sequences_and_states_by_value(system, rng):
    name, x, state = problem(system, rng)
    one = {n: np.concatenate([a[:1], a[1:]], 1) for n, a in x.items()}  # two sequences in a row
    ends = np.array([0, T, 2 * T])
    call = getattr(linattn, name)
    how = {"cu_seqlens": ends, "state_v_first": True, "output_final_state": True}
    o, last = call(**one, initial_state=state.swapaxes(2, 3).copy(), **how)
    want_o, want = call(**x, initial_state=state, output_final_state=True)
    assert_near(o.reshape(want_o.shape), want_o, 1e-13)
    assert_near(last.swapaxes(2, 3), want, 1e-13)


@systems
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, BFLOAT16], ids=lambda d: np.dtype(d).name
)
def test_shorter_numbers(system, dtype, rng):
    """Within a few roundings of the result from the same arrays in float64."""
    name, x, state = problem(system, rng)
    short = {n: a.astype(dtype) for n, a in x.items()}
    exact, _ = written_out(system, {n: a.astype(np.float64) for n, a in short.items()}, state)
    o, last = getattr(linattn, name)(
        **short, initial_state=state.astype(np.float32), output_final_state=True
    )
    assert o.dtype == dtype and last.dtype == np.float32
    assert_near(o.astype(np.float64), exact, {2: 3e-2, 4: 1e-5}[np.dtype(dtype).itemsize])
    grads = getattr(linattn, f"{name}_backward")(o, **short)
    assert all(y.dtype == dtype for y in leaves(tuple(grads)))


# ---- numbers, and what is refused ----


@pytest.mark.parametrize(
    ("system", "names"),
    [
        ("comba", ["g", "beta"]),
        ("gdn2", ["b", "w", "g"]),
        ("precond", ["preconditioner", "g", "beta"]),
        ("rwkv7", ["w"]),
    ],
)
def test_a_number_stands_for_an_array(system, names, rng):
    name, x, _ = problem(system, rng)
    numbers = dict.fromkeys(names, 0.25) | ({"g": -0.25} if "g" in names else {"w": -0.25})
    numbers = {n: numbers[n] for n in names}
    arrays = {n: np.full(x[n].shape, value) for n, value in numbers.items()}
    call, back = getattr(linattn, name), getattr(linattn, f"{name}_backward")
    assert_near(call(**x | numbers)[0], call(**x | arrays)[0], 1e-14)
    one, other = back(x["v"], **x | numbers), back(x["v"], **x | arrays)
    for n in names:
        got, want = getattr(one, f"d{n}"), getattr(other, f"d{n}")
        assert isinstance(got, float)
        assert abs(got - want.sum()) < 1e-11 * max(1, np.abs(want).sum())


REFUSED = {
    "comba, no x": ("comba", {"x": None}, TypeError, "x: expected [B,T,H,K], got None"),
    "comba, no g": (
        "comba",
        {"g": None},
        TypeError,
        "g: expected the log decay [B,T,HV] (or alpha=",
    ),
    "comba, no beta": ("comba", {"beta": None}, TypeError, "beta: expected [B,T,HV], got None"),
    "gdn2, no b": ("gdn2", {"b": None}, TypeError, "b: expected an array or a number, got None"),
    "gdn2, w of keys": (
        "gdn2",
        {"w": np.ones((B, T, HV, K))},
        ValueError,
        "w: expected [B,T,HV,V] =",
    ),
    "gdn2, a flag": ("gdn2", {"qk_l2norm": 1}, TypeError, "qk_l2norm: expected True or False"),
    "precond, none": (
        "precond",
        {"preconditioner": None},
        TypeError,
        "preconditioner: expected an array or a number, got None",
    ),
    "rwkv7, no w": ("rwkv7", {"w": None}, TypeError, "w: expected an array or a number, got None"),
    "rwkv7, no b": ("rwkv7", {"b": None}, TypeError, "b: expected an array, or kk= in its place"),
    "rwkv7, no a": ("rwkv7, kk", {"a": None}, TypeError, "a: expected an array, got None"),
    "rwkv7, both": (
        "rwkv7",
        {"kk": np.ones((B, T, H, K))},
        TypeError,
        "kk: expected None beside b",
    ),
    "rwkv7, more heads of values": (
        "rwkv7",
        {"v": np.ones((B, T, HV, V))},
        ValueError,
        "v: expected [B,T,H,V] = (2, 11, 2, 3), got (2, 11, 4, 3)",
    ),
    "rwkv7, a short a": (
        "rwkv7",
        {"a": np.ones((B, T, H, K), np.float32)},
        TypeError,
        "a: expected float64 (the dtype of r), got float32",
    ),
    "iplr, no a": ("iplr", {"a": None}, TypeError, "a: expected an array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, rng):
    system, wrong, error, text = REFUSED[case]
    name, x, state = problem(system, rng)
    token = {
        n: a[:, 0] if isinstance(a, np.ndarray) and a.ndim > 2 else a
        for n, a in (x | wrong).items()
    }
    for call, given in (
        (name, x | wrong),
        (f"{name}_backward", {"do": x["v"]} | x | wrong),
        (f"{name}_step", token | {"state": state}),
    ):
        with pytest.raises(error) as caught:
            getattr(linattn, call)(**given)
        if not call.endswith("_step") or "T" not in text:
            assert str(caught.value).startswith(text), (call, str(caught.value))


def test_a_gate_above_one_is_called_by_its_name(rng):
    _, x, _ = problem("rwkv7", rng)
    with pytest.warns(RuntimeWarning, match=r"^w: expected the log decay"):
        linattn.rwkv7(**x | {"w": -x["w"]})


# ---- identities, and the mistakes ----


def test_comba_predicts_before_the_decay(rng):
    """Without a decay it is the delta rule with x; with one it is not the gated delta rule."""
    _, x, _ = problem("comba", rng)
    g = x.pop("g")
    o, _ = linattn.comba(**x, g=0.0)
    assert_near(o, linattn.delta_rule(**x)[0], 1e-13)
    o, _ = linattn.comba(**x, g=g)
    assert np.abs(o - linattn.gated_delta_rule(**x, g=g)[0]).max() > 0.01
    by_alpha, _ = linattn.comba(**x, alpha=np.exp(g))
    assert_near(by_alpha, o, 1e-13)


@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
def test_comba_is_dplr_with_y_beta_k(rng, mode):
    """The other op that predicts before the decay; without a value head that shares its keys."""
    _, x, _ = problem("comba", rng)
    group = x["v"].shape[2] // x["k"].shape[2]
    q, k, p = (x[n].repeat(group, 2) for n in ("q", "k", "x"))
    beta, decay = x["beta"][..., None], x["g"][..., None].repeat(K, -1)
    o, S = linattn.comba(**x, mode=mode, output_final_state=True)
    want, T = linattn.dplr_delta_rule(
        q, k, beta * x["v"], p, beta * k, decay, mode=mode, output_final_state=True
    )
    assert_near(o, want, 1e-13)
    assert_near(S, T, 1e-13)


def test_predicting_before_the_decay_is_for_combas_op_alone(rng):
    """The core's option has no meaning elsewhere, and none without x."""
    x = testing.make_inputs("kda", rng, B=1, T=3, H=1, K=2, V=2)
    with pytest.raises(ValueError, match="predicts_before: kda has no such form"):
        _linattn.forward("kda", **x, x=x["k"], predicts_before=True)
    x = testing.make_inputs("gated_delta_rule", rng, B=1, T=3, H=1, K=2, V=2)
    with pytest.raises(TypeError, match="x: expected"):
        _linattn.forward("gated_delta_rule", **x, predicts_before=True)


def test_gdn2_of_one_gate_is_kda(rng):
    _, x, _ = problem("gdn2", rng)
    gate = rng.uniform(0, 1, (B, T, HV))
    of_keys = gate[:, :, ::2]  # a head of keys has one gate for its value heads
    gate = of_keys.repeat(2, 2)
    b, w = of_keys[..., None].repeat(K, -1), gate[..., None].repeat(V, -1)
    o, _ = linattn.gdn2(**x | {"b": b, "w": w})
    want, _ = linattn.kda(x["q"], x["k"], x["v"], x["g"], gate)
    assert_near(o, want, 1e-13)
    other, _ = linattn.gdn2(**x | {"b": w[..., :1].repeat(K, -1)[:, :, ::2] / 2, "w": w})
    assert np.abs(other - want).max() > 0.01


def test_iplr_is_the_delta_rule(rng):
    _, x, _ = problem("iplr", rng)
    beta = 0.7
    o, _ = linattn.iplr_delta_rule(x["q"], x["k"], beta * x["v"], -beta * x["k"], x["k"])
    assert_near(o, linattn.delta_rule(x["q"], x["k"], x["v"], beta)[0], 1e-13)


def test_rwkv7_has_two_spellings(rng):
    _, x, _ = problem("rwkv7, kk", rng)
    kk, a = x.pop("kk"), x.pop("a")
    o, _ = linattn.rwkv7(**x, a=a, kk=kk)
    assert_near(o, linattn.rwkv7(**x, a=-kk, b=kk * a)[0], 1e-14)
    swapped, _ = linattn.rwkv7(**x, a=kk * a, b=-kk)
    assert np.abs(o - swapped).max() > 0.01


@systems
def test_pytorch_records_it(system, rng):
    torch = imported("torch")
    name, x, state = problem(system, rng)
    x |= {"initial_state": state}
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in x.items()}
    o, last = getattr(linattn, name)(**tensors, output_final_state=True)
    do, d_state = rng.standard_normal(o.shape), rng.standard_normal(state.shape)
    torch.autograd.backward([o, last], [torch.tensor(do), torch.tensor(d_state)])
    grads = getattr(linattn, f"{name}_backward")(do, **x, d_final_state=d_state)
    for n, tensor in tensors.items():
        want = getattr(grads, "d_initial_state" if n == "initial_state" else f"d{n}")
        assert_near(tensor.grad.numpy(), want, 1e-12, n)
    with pytest.raises(ValueError, match=r"requires gradients|detach"):
        getattr(linattn, f"{name}_backward")(torch.tensor(do), **tensors)
