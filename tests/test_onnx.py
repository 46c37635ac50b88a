"""linattn.onnx: ONNX Runtime gives the numbers, and a call that ONNX cannot say is refused."""

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

import linattn  # noqa: E402
import linattn.onnx  # noqa: E402
from linattn import VARIANTS, nn, reference  # noqa: E402
from linattn.testing import assert_accurate, make_inputs  # noqa: E402

# of torch.export's and onnxscript's own code
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

D = 16
OPSET_27 = {"LinearAttention", "CausalConvWithState"}


@pytest.fixture(autouse=True)
def quiet():
    """The exporter logs that a part of a state is None."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def export(module, args, **options):
    return linattn.onnx.export(module.eval(), args, **options)


def session(program):
    return runtime.InferenceSession(program.model_proto.SerializeToString())


def run(of, *tensors):
    feeds = {i.name: np.asarray(x) for i, x in zip(of.get_inputs(), tensors, strict=True)}
    return of.run(None, feeds)


def operators(program):
    return [node.op_type for node in program.model.graph.all_nodes()]


# ---- the ops ----

B, T = 2, 37


def call_of(op):
    """Heads of values and options of a call, which between them have all that is exported."""
    variant = VARIANTS[op]
    how = {"qk_l2norm": True} if variant.rule == "delta" or variant.decay == "key" else {}
    if variant.decay == "token":
        how |= {"scale": 0.3, "chunk_size": 16}
    if variant.decay == "key":
        how["mode"] = "recurrent"
    return 2 if variant.decay in ("none", "head") else 4, how


# the ops that ONNX's operator has a rule for
CALLS = {
    op: call_of(op)
    for op, variant in VARIANTS.items()
    if variant.rule in ("additive", "delta") and variant.decay != "pair"
}


class Calls(torch.nn.Module):
    """All these ops, each of its own arrays: one model, since an export takes seconds."""

    def forward(self, given):
        out = []
        for op, (_, options) in CALLS.items():
            o, state = getattr(linattn, op)(**given[op], **options, output_final_state=True)
            out += [o, *(state if isinstance(state, tuple) else [state])]
        return out


def arrays(rng, dtype):
    given = {}
    for op, (HV, _) in CALLS.items():
        x = make_inputs(op, rng, B=B, T=T, H=2, HV=HV, K=8, V=6, dtype=dtype)
        S = rng.standard_normal((B, HV, 8, 6)).astype(dtype)
        pair = VARIANTS[op].normaliser
        z = 5 + rng.random((B, HV, 8)).astype(dtype)
        given[op] = x | {"initial_state": (S, z) if pair else S}
    return given


def test_the_ops_and_their_states(rng):
    """Each, by the acceptance rule: outputs and states, on from a state."""
    x = arrays(rng, np.float32)
    tree = torch.utils._pytree
    tensors = tree.tree_map_only(np.ndarray, torch.from_numpy, x)
    program = export(Calls(), (tensors,))
    assert operators(program).count("LinearAttention") == len(CALLS)
    assert program.model.opset_imports == {"": 27}
    found = iter(run(session(program), *tree.tree_leaves(x)))
    for op, (_, options) in CALLS.items():
        known = {n: o for n, o in options.items() if n not in ("mode", "chunk_size")}
        wide = tree.tree_map_only(np.ndarray, lambda a: a.astype(np.float64), x[op])
        exact, naive = (
            getattr(reference, op)(**given, **known, dtype=dtype)
            for given, dtype in ((wide, np.float64), (x[op], np.float32))
        )
        for ref64, by in zip(tree.tree_leaves(exact), tree.tree_leaves(naive), strict=True):
            assert_accurate(next(found), ref64, by, dtype=np.float32, name=op)
    assert next(found, None) is None


class Rest(torch.nn.Module):
    """What the ops above leave: numbers for gates, other maps, divisors, layouts, no state."""

    def forward(self, q, k, v, alpha, S):
        out = []
        for feature_map, normalize in (("relu+eps", "add"), ("relu2", False), ("exp", True)):
            how = {"feature_map": feature_map, "normalize": normalize}
            out.append(linattn.linear_attention(q, k, v, **how)[0])
        out.append(linattn.gated_delta_rule(0.3 * q, 0.3 * k, v, alpha=alpha, beta=0.5)[0])
        how = {"initial_state": S.mT, "state_v_first": True, "output_final_state": True}
        out += linattn.delta_rule(0.3 * q, 0.3 * k, v, 1.0, **how)
        out += linattn.causal_conv1d(v[:, :, 0], v[0, :4, 0].mT, output_final_state=True)
        return out


def test_the_other_options_and_any_sizes(rng):
    """Against the module itself: each of its calls is compared with the reference elsewhere."""

    def made(B, T):
        q, k, v = (
            torch.from_numpy(rng.standard_normal((B, T, 2, n), np.float32)) for n in (8, 8, 6)
        )
        alpha = torch.from_numpy(rng.random((B, T, 2), np.float32))
        return q, k, v, alpha, torch.from_numpy(rng.standard_normal((B, 2, 8, 6), np.float32))

    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens", min=5)
    sizes = (*[{0: batch, 1: tokens}] * 4, {0: batch})
    program = export(Rest(), made(2, 9), dynamic_shapes=sizes, output_names=list("abcdefgh"))
    of = session(program)
    assert [o.name for o in of.get_outputs()] == list("abcdefgh")
    for shape in ((2, 9), (1, 30)):
        x = made(*shape)
        for got, want in zip(run(of, *x), Rest()(*x), strict=True):
            exact = np.linalg.norm(want)
            assert np.linalg.norm(got - want.numpy()) < 2e-6 * exact


# ---- the layers ----

LAYERS = {
    "DeltaNet": lambda: nn.DeltaNet(D, num_heads=2, conv_bias=True),
    "GatedDeltaNet": lambda: nn.GatedDeltaNet(D, num_heads=2, head_dim=6, num_v_heads=4),
    "GatedDeltaProduct": lambda: nn.GatedDeltaProduct(D, num_heads=2, head_dim=6),
    "GatedLinearAttention": lambda: nn.GatedLinearAttention(D, num_heads=2),
    "KimiDeltaAttention": lambda: nn.KimiDeltaAttention(D, num_heads=2, head_dim=6),
    "Mamba2": lambda: nn.Mamba2(D, d_state=5, headdim=8),
    "Retention": lambda: nn.Retention(D, num_heads=2),
}


class Layers(torch.nn.Module):
    """All layers beside each other: one model, since an export takes seconds."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: make() for name, make in LAYERS.items()})

    def forward(self, x, states):
        return [parts(layer(x, states[name])) for name, layer in self.layers.items()]


def parts(given):
    """y and the tensors of a state, or those alone."""
    y, state = ((), given) if isinstance(given, nn.State) else ((given[0],), given[1])
    return [a for a in (*y, state.memory, *state.conv, state.position) if a is not None]


def judge(name, found, exact, naive):
    """By the acceptance rule, with PyTorch's float32 as the yardstick."""
    for got, ref64, by in zip(found, exact, naive, strict=True):
        if got.dtype == np.int64:
            np.testing.assert_array_equal(got, ref64)
        else:
            assert_accurate(got, ref64.numpy(), by.numpy(), dtype=np.float32, name=name)


def widened(state):
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda a: a.double() if a.is_floating_point() else a, state
    )


@torch.no_grad()
def test_layers_go_on_from_their_states():
    torch.manual_seed(0)
    layers = Layers()
    x, before = torch.randn(2, 9, D), torch.randn(2, 5, D)
    states = {name: layer(before)[1] for name, layer in layers.layers.items()}
    program = export(layers, (x, states), domain="com.microsoft")
    assert set(operators(program)) >= OPSET_27
    assert program.model.opset_imports["com.microsoft"] == 1
    found = run(session(program), x, *(a for s in states.values() for a in parts(s)))
    naive = layers(x, states)
    exact = layers.double()(x.double(), {name: widened(s) for name, s in states.items()})
    for name, ref64, by in zip(LAYERS, exact, naive, strict=True):
        mine, found = found[: len(by)], found[len(by) :]
        judge(name, mine, ref64, by)
    assert found == []


@torch.no_grad()
def test_a_layer_alone_reads_a_prompt_and_goes_on():
    """Of ONNX's own operators and any sizes: a prompt, then a token from the state after it."""
    torch.manual_seed(0)
    layer, x = nn.GatedDeltaNet(D, num_heads=2, head_dim=6), torch.randn(2, 12, D)
    of = session(export(layer, (x[:, 1:], layer.zeros_state(2))))
    convs = [f"conv_{i}" for i in range(3)]
    given = ["x", "state_memory", *(f"state_{name}" for name in convs)]
    assert [i.name for i in of.get_inputs()] == given
    made = ["y", "next_memory", *(f"next_{name}" for name in convs)]
    assert [o.name for o in of.get_outputs()] == made
    x = torch.randn(3, 20, D)
    y, *state = run(of, x[:, :19], *parts(layer.zeros_state(3)))
    last, *state = run(of, x[:, 19:], *state)
    naive, exact = parts(layer(x)), parts(layer.double()(x.double()))
    judge("GatedDeltaNet", [np.concatenate([y, last], 1), *state], exact, naive)


def test_linear_attention_without_a_state_in_a_file(tmp_path):
    """Any number of sequences and tokens, of a layer that is given no state."""
    torch.manual_seed(0)
    layer, x = nn.LinearAttention(D, 8, 10, num_heads=2), torch.randn(2, 11, D)
    path = tmp_path / "layer.onnx"
    export(layer, (x, True), f=path)
    (y,) = run(runtime.InferenceSession(path), x := torch.randn(3, 20, D))
    with torch.no_grad():
        naive, exact = layer(x, True), layer.double()(x.double(), True)
    assert_accurate(y, exact.numpy(), naive.numpy(), dtype=np.float32)


# ---- what is refused ----


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def refusals():
    q, edges = torch.ones(1, 6, 2, 4), torch.tensor([0, 2, 6])
    gate, rows = torch.zeros(1, 6, 2), torch.ones(1, 6, 4)

    def op(name, *more, **options):
        return lambda *x: getattr(linattn, name)(*x[:3], *more, **options)[0]

    delta = "not supported by ONNX's LinearAttention"
    packed = Call(lambda q, e: linattn.retention(q, q, q, cu_seqlens=e)[0])
    yield packed, (q, edges), rf"cu_seqlens: {delta}, got a tensor"
    x = Call(lambda q: linattn.delta_rule(q, q, q, 0.1, x=q)[0])
    yield x, (q,), rf"x: {delta}, got a tensor"
    whole = Call(lambda q: linattn.linear_attention(q, q, q, causal=False)[0])
    yield whole, (q,), "causal: expected True for ONNX's LinearAttention, got False"
    zero = Call(lambda q: linattn.retention(q, q, q, scale=0.0)[0])
    yield zero, (q,), r"scale: expected another number than 0, which means K\*\*-0.5 in ONNX's .*"
    alone = Call(lambda q: linattn.retention(q, q, q)[0])
    yield alone, (q[0, :, 0],), r"q: expected \[B,T,H,K\] for ONNX's LinearAttention, got \(6, 4\)"
    kept = Call(lambda q: linattn.retention(q, q, q)[0])
    for dtype in ("float64", "bfloat16"):
        said = f"q: expected float32 for ONNX's LinearAttention, got {dtype}"
        yield kept, (q.to(getattr(torch, dtype)),), said
    dplr = Call(lambda q: linattn.dplr_delta_rule(q, q, q, q, q, -q)[0])
    yield dplr, (q,), rf"dplr_delta_rule: {delta}: its delta rule writes and looks up one key"
    rwkv6 = Call(lambda q: linattn.rwkv6(q, q, q, q[0, 0], -q)[0])
    yield rwkv6, (q,), rf"rwkv6: {delta}: it reads after the write, and has no bonus"
    titans = Call(lambda q, g: linattn.titans(q, q, q, g, g, g)[0])
    yield titans, (q, gate), rf"titans: {delta}: it has no momentum"
    scan = Call(lambda x: linattn.hgrn(x, -x)[0])
    yield scan, (rows,), "scan_gated: ONNX has no operator for it"
    step = Call(lambda q, S: linattn.delta_rule_step(q, q, q, 0.1, state=S.clone()))
    said = "delta_rule_step: a step changes its state in place, which ONNX cannot; export the .*"
    yield step, (q[:, 0], torch.zeros(1, 2, 4, 4)), said
    convolve = Call(lambda x, e: linattn.causal_conv1d(x, x[0, :2].mT, cu_seqlens=e)[0])
    yield convolve, (rows, edges), "cu_seqlens: not supported by ONNX's CausalConvWithState.*"
    convolve = Call(lambda x: linattn.causal_conv1d(x, x[0, :2].mT)[0])
    said = "x: expected float32 for ONNX's CausalConvWithState, got float64"
    yield convolve, (rows.double(),), said


def test_another_domain_is_refused():
    with pytest.raises(
        ValueError, match=r"^domain: expected '' or 'com.microsoft', got 'ai.onnx'$"
    ):
        export(Call(lambda x: x), (torch.ones(2),), domain="ai.onnx")


@pytest.mark.parametrize(("module", "args", "said"), list(refusals()))
def test_what_onnx_cannot_say_is_refused(module, args, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        export(module, args)


def test_an_array_that_the_export_does_not_know_is_refused():
    """A new array of an operator must not be lost without a word."""
    ours = linattn.onnx
    x = torch.zeros(1, 2, 1, 4)
    given = dict.fromkeys("qkv", x) | {"scale": None, "features": None}
    assert ours._fault(ours.ATTENTION, given) is None
    said = ours._fault(ours.ATTENTION, given | {"offset": x})
    assert said == "offset: not supported by ONNX's LinearAttention, got a tensor"
