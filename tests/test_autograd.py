"""PyTorch records the ops: autograd's gradients are those of op_backward, bit for bit. A call that
cannot be differentiated is an error, and never returns without a gradient."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from support.recorded import (
    SETTINGS,
    SIZES,
    assert_equal,
    by_the_backward_pass,
    gradients,
    inputs,
    pure,
    refilled,
    setting,
    tensors,
    weights,
)
from support.tensors import tensors_in, torch
from support.variants import PREDICTS

import linattn
from linattn import autograd
from linattn.testing import GATES, make_inputs

OPS = linattn.OPS
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ---- gradients ----


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, name, rng):
    x, options = setting(op, rng, name, grad=True)
    if name != "plain" and "g" in x:
        x["alpha"] = x.pop("g").detach().exp().requires_grad_()
    call, given = pure(op, x, output_final_state=True, **options)
    assert torch.autograd.gradcheck(call, given, fast_mode=name != "plain")


@pytest.mark.parametrize("op", PREDICTS)
def test_gradcheck_of_a_key_that_predicts(op, rng):
    x = inputs(op, rng, grad=True, x=True)
    call, given = pure(op, x, output_final_state=True)
    assert len(given) == len(x)
    assert torch.autograd.gradcheck(call, given)
    alone = {name: y.detach() for name, y in x.items()} | {"x": x["x"]}  # it alone is recorded
    o, _ = getattr(linattn, op)(**alone)
    got = torch.autograd.grad(o, [x["x"]], weights(o))
    assert_equal(got, [by_the_backward_pass(op, x, weights(o), None)[list(x).index("x")]])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("op", [op for op in OPS if GATES[op]])
def test_numbers_for_gates_are_recorded(op, compiled, rng):
    """The gradients of q, k and v are those of the backward pass with the same numbers."""
    x = inputs(op, rng, dtype=np.float32, grad=True)
    numbers = {"g": -0.1, "beta": 0.5, "gamma": 0.9, "slopes": 0.1, "bonus": 0.5, "eta": 0.5}
    x = {name: y.detach() if name in "xy" else y for name, y in (x | numbers).items()}
    x = {name: x[name] for name in ("q", "k", "v", *GATES[op])}
    call = getattr(linattn, op)
    if compiled:
        call = torch.compile(call, backend="eager", fullgraph=True)
    o, _ = call(**x)
    got = torch.autograd.grad(o, [x[name] for name in "qkv"], weights(o))
    plain = {name: y.detach() if name in "qkv" else y for name, y in x.items()}
    assert_equal(o, getattr(linattn, op)(**plain)[0])
    want = getattr(linattn, f"{op}_backward")(weights(o), **plain)
    assert_equal(got, (want.dq, want.dk, want.dv))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("normalize", [True, False])
def test_noncausal_with_other_keys(normalize, compiled, rng):
    """q has 5 tokens, k and v have 9."""
    q, k, v = (torch.from_numpy(rng.standard_normal((2, T, 2, 3))) for T in (5, 9, 9))
    given = [x.requires_grad_() for x in (q, k, v)]
    options = {"normalize": normalize, "causal": False}

    def call(q, k, v):
        return linattn.linear_attention(q, k, v, **options, output_final_state=True)

    assert torch.autograd.gradcheck(lambda *x: call(*x)[0], given)
    run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    o, state = run(*given)
    assert o.shape == (2, 5, 2, 3)
    of_state = torch.autograd.grad(tensors_in(state)[0].sum(), [k, v])  # o has no gradient here
    assert [x.shape for x in of_state] == [k.shape, v.shape]
    got = torch.autograd.grad(run(*given)[0], given, weights(o))
    plain = [x.detach() for x in given]
    want = linattn.linear_attention_backward(weights(o), *plain, **options)
    assert_equal(got, want[:3])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_bits_of_the_backward_pass(op, dtype, rng):
    x = inputs(op, rng, dtype=dtype, grad=True, T=20)
    got = gradients(op, x, output_final_state=True)
    o, state = getattr(linattn, op)(**x, output_final_state=True)
    d_state = tuple(map(weights, state)) if isinstance(state, tuple) else weights(state)
    assert_equal(got, by_the_backward_pass(op, x, weights(o), d_state))
    assert_equal(gradients(op, x), by_the_backward_pass(op, x, weights(o), None))


@pytest.mark.parametrize("op", OPS)
def test_a_recorded_call_has_the_bits_of_one_that_is_not(op, rng):
    x = inputs(op, rng, dtype=np.float32)
    with_grad = refilled(x, iter([y.clone().requires_grad_() for y in tensors_in(x)]))
    want = tensors_in(getattr(linattn, op)(**x, output_final_state=True))
    got = tensors_in(getattr(linattn, op)(**with_grad, output_final_state=True))
    assert_equal(got, want)
    assert all(y.requires_grad and y.is_contiguous() for y in got)
    o, state = getattr(linattn, op)(**with_grad)
    assert state is None and torch.equal(o, want[0])


@pytest.mark.parametrize("of", range(3))
def test_gradients_of_one_output_alone(of, rng):
    x = inputs("linear_attention", rng, grad=True)
    call, given = pure("linear_attention", x, output_final_state=True)
    outputs = call(*given)
    got = torch.autograd.grad(outputs[of].sum(), given)
    d = [torch.zeros_like(o) for o in outputs]
    d[of] = torch.ones_like(d[of])
    assert_equal(got, by_the_backward_pass("linear_attention", x, d[0], (d[1], d[2])))


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_one_input_alone(op, rng):
    x = inputs(op, rng)
    every = gradients(op, refilled(x, iter([y.clone().requires_grad_() for y in tensors_in(x)])))
    for i, want in enumerate(every):
        given = [y.clone() for y in tensors_in(x)]
        given[i].requires_grad_()
        o, _ = getattr(linattn, op)(**refilled(x, iter(given)))
        o.backward(weights(o))
        assert torch.equal(given[i].grad, want)
        assert all(y.grad is None for j, y in enumerate(given) if j != i)


def test_output_gradients_in_any_layout(rng):
    x = inputs("kda", rng, grad=True)
    call, given = pure("kda", x, output_final_state=True)
    o, state = call(*given)
    for do in (
        torch.ones((), dtype=o.dtype).expand(o.shape),
        weights(o.mT).mT,
        torch.stack([weights(o)] * 2, -1)[..., 0],
        weights(o).flip(0),
    ):
        got = torch.autograd.grad(o, given, do, retain_graph=True)
        want = by_the_backward_pass("kda", x, do.contiguous(), None)
        assert_equal(got, want)
    d_state = torch.stack([weights(state)] * 2, -1)[..., 1]
    got = torch.autograd.grad(state, given, d_state)
    want = by_the_backward_pass("kda", x, torch.zeros_like(o), d_state.contiguous())
    assert_equal(got, want)


def test_inputs_in_any_layout(rng):
    x = inputs("gla", rng)
    turned = {
        name: y.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name, y in x.items()
    }
    turned["v"] = torch.stack([x["v"]] * 2, -1).requires_grad_()
    got = gradients("gla", turned | {"v": turned["v"][..., 0]})
    assert_equal(got, by_the_backward_pass("gla", x, weights(x["v"]), None))


def test_packed_sequences_and_one_head(rng):
    x = inputs("gated_delta_rule", rng, grad=True, B=1, state=False, T=9)
    cu = torch.tensor([0, 4, 4, 9])
    o, state = linattn.gated_delta_rule(**x, cu_seqlens=cu, output_final_state=True)
    assert state.shape == (3, 2, 3, 4)
    got = torch.autograd.grad((o, state), tensors_in(x), (weights(o), weights(state)))
    want = by_the_backward_pass("gated_delta_rule", x, weights(o), weights(state), cu_seqlens=cu)
    assert_equal(got, want)
    one = {name: y.detach()[0, :, 0].clone().requires_grad_() for name, y in x.items()}
    call, given = pure("gated_delta_rule", one, output_final_state=True)
    assert call(*given)[1].shape == (3, 4)
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"normalize": False},
        {"normalize": "add", "eps": 0.5},
        {"feature_map": ("exp", "relu2"), "normalize": "add"},
        {"feature_map": "identity", "normalize": False},
    ],
    ids=str,
)
def test_options_of_linear_attention(options, rng):
    x = inputs("linear_attention", rng, grad=True, state=False)
    call, given = pure("linear_attention", x, **options)
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("norm", [False, True])
def test_feature_maps_of_ones_own_are_recorded(norm, rng):
    def phi(y):
        return torch.cat([y.exp(), (-y).exp()], -1)

    x = inputs("linear_attention", rng, grad=True, state=False)
    call, given = pure("linear_attention", x, feature_map=phi, qk_l2norm=norm)
    assert torch.autograd.gradcheck(call, given)
    for bad in (lambda y: y.detach().exp(), lambda y: torch.from_numpy(np.exp(y.detach().numpy()))):
        with pytest.raises(ValueError, match=r"^feature_map: expected PyTorch to record .* of q"):
            linattn.linear_attention(**x, feature_map=bad)
        with torch.no_grad():
            linattn.linear_attention(**x, feature_map=bad)


def test_a_bfloat16_state_has_a_bfloat16_gradient(rng):
    x = inputs("simple_gla", rng, dtype=np.float32, grad=True)
    x["initial_state"] = x["initial_state"].detach().bfloat16().requires_grad_()
    *_, got = gradients("simple_gla", x, output_final_state=True)
    assert got.dtype == torch.bfloat16 and got.any()


def test_no_tokens_and_no_sequences(rng):
    for sizes in ({"T": 0}, {"B": 0}):
        x = inputs("kda", rng, grad=True, **sizes)
        got = gradients("kda", x, output_final_state=True)
        assert [y.shape for y in got] == [y.shape for y in tensors_in(x)]


def test_numpy_arrays_beside_tensors(rng):
    """They are copied, so writing to them later changes no gradient."""
    made = make_inputs("simple_gla", rng, **SIZES | {"B": 1})
    cu = np.array([0, 2, 5], np.int32)
    x = tensors(made, grad=True)
    want = torch.autograd.grad(linattn.simple_gla(**x, cu_seqlens=cu)[0].sum(), x["q"])
    for kind in (np.copy, lambda g: g.astype(np.float64)[::-1][::-1]):
        mixed = x | {"g": kind(made["g"]), "v": made["v"].copy()}
        lengths = cu.copy()
        o, _ = linattn.simple_gla(**mixed, cu_seqlens=lengths)
        mixed["g"][:], mixed["v"][:], lengths[:] = np.nan, np.nan, 0
        assert_equal(torch.autograd.grad(o.sum(), x["q"]), want)
    g = make_inputs("simple_gla", rng, **SIZES, dtype=BFLOAT16)["g"]
    x = inputs("simple_gla", rng, state=False, grad=True)
    want = linattn.simple_gla(**x | {"g": tensors(g)})[0]
    assert torch.equal(linattn.simple_gla(**x | {"g": g})[0], want)


def test_gates_with_a_default_or_from_numpy(rng):
    x = inputs("retention", rng, grad=True)
    del x["gamma"]
    assert_equal(
        gradients("retention", x), by_the_backward_pass("retention", x, weights(x["v"]), None)
    )
    x = inputs("lightning_attention", rng, grad=True)
    x["slopes"] = linattn.lightning_slopes(2)
    assert_equal(
        gradients("lightning_attention", x),
        by_the_backward_pass("lightning_attention", x, weights(x["v"]), None),
    )


# ---- what is recorded, and when ----


@pytest.fixture
def spied(monkeypatch):
    """A list that grows with every call that is not passed straight to the core."""
    seen = []

    def spy(way):
        return lambda *arguments: seen.append(way) or way(*arguments)

    monkeypatch.setattr(
        autograd, "_OPS", {op: type(ways)(*map(spy, ways)) for op, ways in autograd._OPS.items()}
    )
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("op", OPS)
def test_what_nobody_asks_for_is_not_recorded(op, mode, rng, spied):
    x = inputs(op, rng, grad=mode is torch.no_grad)
    with mode():
        for y in tensors_in(getattr(linattn, op)(**x, output_final_state=True)):
            assert not y.requires_grad and y.grad_fn is None
            assert y.is_inference() == (mode is torch.inference_mode)
    assert not spied


@pytest.mark.parametrize("op", OPS)
def test_every_way_has_the_same_bits(op, rng, spied):
    """By autograd's own function, by the operator, and by torch.func."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = inputs(op, rng, grad=True)
    want = gradients(op, x, output_final_state=True)
    assert len(spied) == 1
    with Watch():
        assert_equal(gradients(op, x, output_final_state=True), want)
    call, given = pure(op, x, output_final_state=True)
    outputs, pull = torch.func.vjp(call, *[y.detach() for y in given])
    assert_equal(pull(tuple(weights(o) for o in outputs)), want)
    assert len(set(spied)) == 3


def test_inference_tensors_cannot_be_saved(rng):
    with torch.inference_mode():
        x = inputs("gla", rng)
    linattn.gla(**x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        linattn.gla(**x | {"q": x["q"].clone().requires_grad_()})


def test_parameters_of_a_module_learn(rng):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.nn.Parameter(torch.zeros(1, 2, 3, 4, dtype=torch.float64))
            self.g = torch.nn.Parameter(torch.full((2, 3), -0.5, dtype=torch.float64))

        def forward(self, q, k, v):
            g = self.g.expand(*v.shape[:3], 3)
            return linattn.gla(q, k, v, g, initial_state=self.state.expand(len(q), 2, 3, 4))[0]

    layer = Layer()
    x = inputs("gla", rng, state=False)
    q, k, v = x["q"], x["k"], x["v"]
    optimizer = torch.optim.SGD(layer.parameters(), 0.05)
    losses = []
    for _ in range(20):
        loss = ((layer(q, k, v) - v) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    parameter = torch.nn.Parameter(q)
    assert linattn.gla(parameter, k, v, x["g"])[0].grad_fn is not None


def test_subclasses(rng):
    class Named(torch.Tensor):
        pass

    x = inputs("gla", rng)
    want = linattn.gla(**x)[0]
    o, _ = linattn.gla(**{name: y.as_subclass(Named) for name, y in x.items()})
    assert type(o) is Named and torch.equal(o.as_subclass(torch.Tensor), want)
    q = x["q"].clone().as_subclass(Named).requires_grad_()
    linattn.gla(**x | {"q": q})[0].sum().backward()
    assert q.grad is not None


def test_saved_tensors(rng):
    """Hooks see them, and a write to one before the backward pass is an error."""
    x = inputs("delta_rule", rng, grad=True)
    want = gradients("delta_rule", x)
    packed = []

    def pack(y):
        packed.append(y)
        return y.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        o, _ = linattn.delta_rule(**x)
    assert len(packed) == 5  # q, k, v, beta and the initial state
    assert_equal(torch.autograd.grad(o, tensors_in(x), weights(o)), want)
    v = x["v"].detach().clone()
    o, _ = linattn.delta_rule(**x | {"v": v})
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, rng):
    from torch.utils.checkpoint import checkpoint

    x = inputs("gated_delta_rule", rng, grad=True)
    want = gradients("gated_delta_rule", x, output_final_state=True)
    call, given = pure("gated_delta_rule", x, output_final_state=True)
    outputs = checkpoint(call, *given, use_reentrant=reentrant)
    assert_equal(
        torch.autograd.grad(outputs, given, [weights(o) for o in outputs])
        if not reentrant
        else backward_into(given, outputs),
        want,
    )


def backward_into(given, outputs):
    torch.autograd.backward(outputs, [weights(o) for o in outputs])
    return [x.grad for x in given]


@pytest.mark.parametrize("op", [op for op in OPS if set("xy") & set(GATES[op])])
def test_autocast_casts_every_key(op, rng):
    x = inputs(op, rng, dtype=np.float32)
    half = {n: y.to(torch.bfloat16) if n in "qkvxy" else y for n, y in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(getattr(linattn, op)(**x)[0], getattr(linattn, op)(**half)[0])


def test_autocast(rng):
    x = inputs("gated_delta_rule", rng, grad=True, dtype=np.float32)
    for dtype in (torch.bfloat16, torch.float16):
        half = {
            n: y.detach().to(dtype) if n in ("q", "k", "v") else y.detach() for n, y in x.items()
        }
        want = linattn.gated_delta_rule(**half, output_final_state=True)
        with torch.autocast("cpu", dtype):
            got = linattn.gated_delta_rule(**x, output_final_state=True)
            with torch.no_grad():
                again = linattn.gated_delta_rule(**x, output_final_state=True)
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        assert_equal(got, want)
        assert_equal(again, want)
        grads = torch.autograd.grad(got, tensors_in(x), (weights(got[0]), weights(got[1])))
        of_half = by_the_backward_pass("gated_delta_rule", half, weights(got[0]), weights(got[1]))
        assert [y.dtype for y in grads] == [torch.float32] * 6
        assert_equal(grads, [y.float() for y in of_half])
    with torch.autocast("cpu", torch.bfloat16):
        double = inputs("gla", rng)
        assert linattn.gla(**double)[0].dtype == torch.float64  # as in a matrix product
        out = torch.empty_like(x["v"])
        with torch.no_grad():
            assert linattn.gated_delta_rule(**x, out=out)[0] is out  # as in PyTorch: no casts
        with torch.autocast("cpu", enabled=False):
            assert linattn.gated_delta_rule(**x)[0].dtype == torch.float32


# ---- what cannot be differentiated ----


@pytest.mark.parametrize("op", OPS)
def test_a_graph_of_the_gradients_changes_no_bit(op, rng):
    x = inputs(op, rng, grad=True)
    o, _ = getattr(linattn, op)(**x)
    want = torch.autograd.grad(o.sum(), tensors_in(x), retain_graph=True)
    got = torch.autograd.grad(o.sum(), tensors_in(x), create_graph=True)
    assert_equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_out_is_refused_where_gradients_are_recorded(op, rng):
    x = inputs(op, rng, grad=True)
    out = torch.full_like(x["v"], 3)
    with pytest.raises(ValueError, match=r"^q: requires gradients, .* there is no out; "):
        getattr(linattn, op)(**x, out=out)
    assert (out == 3).all()
    with torch.no_grad():
        assert getattr(linattn, op)(**x, out=out)[0] is out
    leaf = torch.empty_like(out).requires_grad_()
    x = inputs(op, rng)
    with pytest.raises(ValueError, match=r"^out: requires gradients, "):
        getattr(linattn, op)(**x, out=leaf)


@pytest.mark.parametrize("op", OPS)
def test_steps_are_refused_where_gradients_are_recorded(op, rng):
    x = inputs(op, rng)
    state = x.pop("initial_state")
    x = {name: y[:, 0].contiguous() if y.dim() > 2 else y for name, y in x.items()}
    before = [y.clone() for y in tensors_in(state)]
    step = getattr(linattn, op + "_step")
    for name in x:
        bad = x | {name: x[name].clone().requires_grad_(), "state": state}
        for call in (step, lambda **bad: linattn.bind(step, **bad)):
            with pytest.raises(ValueError, match=rf"^{name}: requires gradients, .* of a step"):
                call(**bad)
    assert_equal(tensors_in(state), before)
    with torch.no_grad():
        step(**bad)
    assert not torch.equal(tensors_in(state)[0], before[0])


def test_a_scale_that_would_have_a_gradient_is_refused(rng):
    x = inputs("gla", rng)
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=r"^scale: expected a number where gradients are recorded"):
        linattn.gla(**x, scale=scale)
    assert linattn.gla(**x, scale=scale.detach())[0].shape == x["v"].shape


BAD = {
    "scale a word": {"scale": "x"},
    "scale too large": {"scale": 10**400},
    "scale a flag": {"scale": True},
    "half a token": {"chunk_size": 1.5},
    "chunk too large": {"chunk_size": 2**70},
    "chunk zero": {"chunk_size": 0},
    "chunk a flag": {"chunk_size": True},
    "mode a number": {"mode": 3},
    "mode": {"mode": "chunks"},
    "flag": {"qk_l2norm": 1},
    "flag None": {"output_final_state": None},
    "flag word": {"state_v_first": "yes"},
    "tf32 a number": {"allow_tf32": 1},
    "k a list": {"k": [1.0]},
    "k None": {"k": None},
    "g None": {"g": None},
    "g a complex number": {"g": 0.5j},
    "state a pair": {"initial_state": (1, 2)},
    "state three": {"initial_state": (1, 2, 3)},
    "state shape": {"initial_state": torch.zeros(1, 1, 3, 4, dtype=torch.float64)},
    "v integers": {"v": torch.ones(2, 5, 2, 4, dtype=torch.int32)},
    "v objects": {"v": np.full((2, 5, 2, 4), None)},
    "q 3-D": {"q": torch.ones(5, 1, 3, dtype=torch.float64)},
    "both gates": {"alpha": torch.ones(2, 5, 2, 3)},
    "lengths": {"cu_seqlens": np.array([0, 3])},
    "lengths a list": {"cu_seqlens": [0, 5]},
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_have_the_words_that_they_have_without_gradients(name, rng):
    x = inputs("gla", rng)
    bad = x | BAD[name]
    with pytest.raises((TypeError, ValueError)) as want:
        linattn.gla(**bad)
    leaf = "g" if name == "q 3-D" else "q"
    with pytest.raises(want.type) as got:
        linattn.gla(**bad | {leaf: bad[leaf].clone().requires_grad_()})
    assert str(got.value) == str(want.value)


def test_numbers_and_flags_of_numpys(rng):
    x = inputs("gla", rng, grad=True)
    want = linattn.gla(**x, scale=0.5, chunk_size=3, qk_l2norm=True)[0]
    for scale, chunk, flag in (
        (np.float32(0.5), np.int64(3), np.True_),
        (np.float64(0.5), 3, True),
    ):
        got = linattn.gla(**x, scale=scale, chunk_size=chunk, qk_l2norm=flag, allow_tf32=flag)[0]
        assert torch.equal(got, want) and got.requires_grad
    assert torch.equal(linattn.gla(**x, scale=1)[0], linattn.gla(**x, scale=1.0)[0])


@pytest.mark.parametrize("grad", [False, True])
def test_a_growing_gate_is_warned_of_where_the_call_is(grad, rng):
    x = inputs("simple_gla", rng, grad=grad)
    x["g"] = x["g"].detach() + 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            o, _ = linattn.simple_gla(**x)  # one call site
        if grad:
            o.sum().backward()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert caught[0].filename == __file__
    assert str(caught[0].message).startswith("g: expected the log decay")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            linattn.simple_gla(**x)


@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu_the_gradients_are_those_of_the_cpu(op, rng):
    if not (torch.cuda.is_available() and linattn.cuda.is_available()):
        pytest.skip("no CUDA device that PyTorch and linattn both know")
    x = inputs(op, rng, grad=True)
    want = gradients(op, x, output_final_state=True)
    there = refilled(x, iter([y.detach().cuda().requires_grad_() for y in tensors_in(x)]))
    got = gradients(op, there, output_final_state=True)
    for a, b in zip(tensors_in(got), tensors_in(want), strict=True):
        assert a.is_cuda and a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=1e-10, atol=1e-12)
