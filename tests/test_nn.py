"""linattn.nn: the blocks go on where they stopped, learn, and compute what their papers say."""

import copy
import doctest
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from support.blocks import BLOCKS, D, agree, stirred
from support.device import imported

from linattn import reference

torch = imported("torch")
nn = pytest.importorskip("linattn.nn", reason="PyTorch is not installed")
F = torch.nn.functional

# of flash-linear-attention 0.6.0's layers, of mamba_ssm's Mamba and Mamba2, of the authors' code of
# S4D and RG-LRU; Titans has no known ones
NAMES = {
    "Retention": "q_proj.weight k_proj.weight v_proj.weight g_proj.weight o_proj.weight "
    "g_norm_swish_gate.weight",
    "GatedLinearAttention": "q_proj.weight k_proj.weight v_proj.weight g_proj.weight "
    "gk_proj.0.weight gk_proj.1.weight gk_proj.1.bias o_proj.weight "
    "g_norm_swish_gate.weight",
    "DeltaNet": "q_proj.weight k_proj.weight v_proj.weight b_proj.weight q_conv1d.weight "
    "k_conv1d.weight v_conv1d.weight o_norm.weight o_proj.weight",
    "GatedDeltaNet": "q_proj.weight k_proj.weight v_proj.weight a_proj.weight b_proj.weight A_log "
    "dt_bias q_conv1d.weight k_conv1d.weight v_conv1d.weight g_proj.weight "
    "o_norm.weight o_proj.weight",
    "GatedDeltaProduct": "q_proj.weight k_proj.weight v_proj.weight a_proj.weight b_proj.weight "
    "A_log dt_bias q_conv1d.weight k_conv1d.weight v_conv1d.weight g_proj.weight "
    "o_norm.weight o_proj.weight",
    "Mamba": "in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias "
    "A_log D out_proj.weight",
    "S4D": "kernel.log_dt kernel.C kernel.log_A_real kernel.A_imag D output_linear.0.weight "
    "output_linear.0.bias",
    "RGLRU": "linear_y.weight linear_y.bias linear_x.weight linear_x.bias linear_out.weight "
    "linear_out.bias conv_1d.weight conv_1d.bias rg_lru.input_gate_weight rg_lru.input_gate_bias "
    "rg_lru.recurrent_gate_weight rg_lru.recurrent_gate_bias rg_lru.recurrent_param",
    "Mamba2": "in_proj.weight conv1d.weight conv1d.bias dt_bias A_log D norm.weight "
    "out_proj.weight",
    "Comba": "q_proj.weight k_proj.weight v_proj.weight a_proj.weight b_proj.weight A_log "
    "dt_bias decay D q_conv1d.weight k_conv1d.weight v_conv1d.weight g_proj.weight "
    "o_norm.weight o_proj.weight",
    "RWKV6": "x_proj.0.linear.weight x_proj.0.mu x_proj.2.weight x_bias r_proj.linear.weight "
    "w_proj.linear.lora.0.weight w_proj.linear.lora.2.weight w_proj.linear.lora.2.bias "
    "k_proj.linear.weight v_proj.linear.weight g_proj.linear.weight bonus g_norm.weight "
    "g_norm.bias o_proj.weight",
    "RWKV7": "x_r x_w x_k x_v x_a x_g k_k k_a r_k r_proj.weight k_proj.weight v_proj.weight "
    "w_lora.lora.0.weight w_lora.lora.2.weight w_lora.lora.2.bias a_lora.lora.0.weight "
    "a_lora.lora.2.weight a_lora.lora.2.bias g_lora.lora.0.weight g_lora.lora.2.weight "
    "g_norm.weight g_norm.bias o_proj.weight",
    "Titans": "q_proj.weight k_proj.weight v_proj.weight q_conv1d.weight k_conv1d.weight "
    "v_conv1d.weight theta_proj.weight theta_proj.bias eta_proj.weight eta_proj.bias "
    "alpha_proj.weight alpha_proj.bias g_proj.weight o_norm.weight o_proj.weight",
    "KimiDeltaAttention": "q_proj.weight k_proj.weight v_proj.weight q_conv1d.weight "
    "k_conv1d.weight v_conv1d.weight f_proj.0.weight f_proj.1.weight "
    "b_proj.weight A_log dt_bias g_proj.0.weight g_proj.1.weight "
    "g_proj.1.bias o_norm.weight o_proj.weight",
}
NAMES["Titans in batches"] = NAMES["Titans"]
blocks = pytest.mark.parametrize("name", BLOCKS)


def block(name, dtype=None, seed=0):
    torch.manual_seed(seed)
    return BLOCKS[name]().to(dtype or torch.float64)


def tokens(*shape, seed=1, dtype=None):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=made, dtype=torch.float64).to(dtype or torch.float64)


def first_weight(layer):
    names = ("in_proj", "q_proj", "r_proj", "linear_x", "output_linear")
    first = getattr(layer, next(name for name in names if hasattr(layer, name)))
    first = first[0] if isinstance(first, torch.nn.Sequential) else first
    return getattr(first, "linear", first).weight


def flat(state):
    return [*real_parts(state), *state.conv, *([] if state.position is None else [state.position])]


# ---- the plain layer ----


class Notes(torch.nn.Module):
    """Linear attention as it is taught: a sum of phi(k) v', of all tokens or of those so far."""

    def __init__(self, d_model, d_k, d_v):
        super().__init__()
        self.W_q = torch.nn.Linear(d_model, d_k, bias=False)
        self.W_k = torch.nn.Linear(d_model, d_k, bias=False)
        self.W_v = torch.nn.Linear(d_model, d_v, bias=False)

    def forward(self, x, causal=False):
        q, k, v = F.elu(self.W_q(x)) + 1, F.elu(self.W_k(x)) + 1, self.W_v(x)
        S, z = k[..., :, None] * v[..., None, :], k
        if causal:
            S, z = S.cumsum(1), z.cumsum(1)
        else:
            S, z = S.sum(1, keepdim=True), z.sum(1, keepdim=True)
        return (q[..., :, None] * S).sum(-2) / (q * z).sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_the_notes(causal):
    torch.manual_seed(0)
    theirs = Notes(D, 8, 10).double()
    ours = nn.LinearAttention(D, 8, 10).double()
    ours.load_state_dict(theirs.state_dict())
    x = [tokens(2, 40).requires_grad_() for _ in range(2)]
    y = [layer(at, causal=causal) for layer, at in zip((ours, theirs), x, strict=True)]
    agree(*y)
    for each in y:
        each.square().sum().backward()
    agree(x[0].grad, x[1].grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        agree(a.grad, b.grad)
    assert torch.equal(ours(x[0]), ours(x[0], False))


def plain(num_heads=2, d_k=8, d_v=6, seed=0, **options):
    torch.manual_seed(seed)
    return nn.LinearAttention(D, d_k, d_v, num_heads=num_heads, **options).double()


OPTIONS = {
    "default": {},
    "unnormalised": {"normalize": False},
    "relu2": {"feature_map": "relu2", "eps": 1e-3, "normalize": "add"},
    "a function": {"feature_map": lambda x: torch.cat([x.exp(), (-x).exp()], -1)},
    "a pair": {"feature_map": ("exp", "relu+eps")},
}
options = pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)


def parts(state):
    return state.memory if isinstance(state.memory, tuple) else (state.memory,)


def real_parts(state):
    """Complex numbers as pairs."""
    return tuple(torch.view_as_real(x) if x.is_complex() else x for x in parts(state))


@options
@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_layers_of_one_head(given, causal):
    layer, x = plain(2, **given), tokens(3, 20)
    for h, y in enumerate(layer(x, causal).chunk(2, -1)):
        alone = plain(1, 4, 3, **given)
        for W in ("W_q", "W_k", "W_v"):
            getattr(alone, W).weight.data = getattr(layer, W).weight.chunk(2)[h]
        agree(y, alone(x, causal))


@options
def test_a_plain_layer_goes_on_from_a_state_and_step_by_step(given):
    layer, x = plain(**given), tokens(3, 30)
    with torch.no_grad():
        y, state = layer(x, True, output_final_state=True)
        assert torch.equal(y, layer(x, True))
        first, half = layer(x[:, :13], causal=True, output_final_state=True)
        kept = [a.clone() for a in parts(half)]
        rest, end = layer(x[:, 13:], causal=True, state=half)
        agree(torch.cat([first, rest], 1), y)
        for a, b, before, after in zip(*map(parts, (end, state, half)), kept, strict=True):
            agree(a, b)
            assert torch.equal(before, after)  # a state that was given is left alone
    stepped = [layer.step(x[:, t], half) for t in range(13, 30)]
    assert not stepped[0].requires_grad
    agree(torch.stack(stepped, 1), rest)
    for a, b in zip(parts(half), parts(state), strict=True):
        agree(a, b)
    start = layer.zeros_state(3)
    assert [a.shape for a in parts(start)] == [a.shape for a in parts(state)]
    assert [a.dtype for a in parts(start)] == [a.dtype for a in parts(state)]
    agree(torch.stack([layer.step(x[:, t], start) for t in range(30)], 1), y)


@options
def test_a_plain_layers_gradients(given):
    layer, x = plain(**given), tokens(2, 5).requires_grad_()
    _, state = layer(tokens(2, 4, seed=7), True, output_final_state=True)
    before = [a.detach().requires_grad_() for a in parts(state)]
    of_all = (x, *layer.parameters(), *before)

    def whole(x, *_):
        return layer(x)

    def causal(x, W_q, W_k, W_v, *memory):
        memory = memory if layer.normalize else memory[0]
        y, after = layer(x, True, state=nn.State(memory, (), None))
        return y, *parts(after)

    assert torch.autograd.gradcheck(whole, of_all[:4], fast_mode=True)
    assert torch.autograd.gradcheck(causal, of_all, fast_mode=True)


def test_a_plain_layer_keeps_the_notes_names():
    names = ["W_q.weight", "W_k.weight", "W_v.weight"]
    assert list(nn.LinearAttention(D, 8, 10).state_dict()) == names
    assert list(nn.LinearAttention(D, 8, 10, num_heads=2).state_dict()) == names
    layer = nn.LinearAttention(D, 8, 10, bias=True)
    assert sorted(layer.state_dict()) == sorted([*names, "W_q.bias", "W_k.bias", "W_v.bias"])
    assert (layer.d_model, layer.d_k, layer.d_v, layer.num_heads) == (D, 8, 10, 1)


class Learnt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_features = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.to_features(x).exp()


@pytest.mark.parametrize("pair", [False, True])
def test_a_feature_map_that_learns(pair):
    torch.manual_seed(0)
    given = (Learnt(), Learnt()) if pair else Learnt()
    names = ["phi_q", "phi_k"] if pair else ["feature_map"]
    layer, x = plain(feature_map=given), tokens(2, 6)
    learnt = [f"{name}.to_features.{which}" for name in names for which in ("weight", "bias")]
    assert sorted(layer.state_dict()) == sorted([*learnt, "W_q.weight", "W_k.weight", "W_v.weight"])
    y, state = layer(x, True, output_final_state=True)
    assert state.memory[0].shape == (2, 2, 5, 3) == layer.zeros_state(2).memory[0].shape
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    assert not torch.equal(other(x), layer(x))


def test_a_plain_layer_in_bfloat16_autocast_and_compiled():
    layer, x = plain().float(), tokens(2, 20, dtype=torch.float32)
    want, end = layer(x, True, output_final_state=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, state = compiled(x, True, output_final_state=True)
    torch.testing.assert_close(y, want)
    for a, b in zip(parts(state), parts(end), strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, True)
        stepped = layer.step(x[:, 0], layer.zeros_state(2))
    narrow = plain().bfloat16()
    y, state = narrow(x.bfloat16(), True, output_final_state=True)
    assert cast.dtype == stepped.dtype == y.dtype == torch.bfloat16
    assert state.memory[0].dtype == torch.float32 == narrow.zeros_state(1).memory[0].dtype
    for got in (cast, y):
        assert 0 < (got - want).norm() < 0.05 * want.norm()


def test_empty_sequences_and_batches():
    layer = plain()
    for B, T in ((2, 0), (0, 3), (0, 0)):
        assert layer(tokens(B, T)).shape == (B, T, 6)
        y, state = layer(tokens(B, T), True, state=layer.zeros_state(B))
        assert y.shape == (B, T, 6) and state.memory[0].shape == (B, 2, 4, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda layer: layer(tokens(5)),
            ValueError,
            "x: expected [B,T,d_model] with d_model = 24, got (5, 24)",
        ),
        (
            lambda layer: layer(tokens(2, 5)[..., :8]),
            ValueError,
            "x: expected [B,T,d_model] with d_model = 24, got (2, 5, 8)",
        ),
        (
            lambda layer: layer(tokens(2, 5).float()),
            TypeError,
            "x: expected float64 (the dtype of W_q), got float32",
        ),
        (
            lambda layer: layer(tokens(2, 5).long()),
            TypeError,
            "x: expected float64 (the dtype of W_q), got int64",
        ),
        (
            lambda layer: layer(tokens(2, 5).numpy()),
            TypeError,
            "x: expected a torch.Tensor, got ndarray",
        ),
        (
            lambda layer: layer.step(tokens(2, 5), layer.zeros_state(2)),
            ValueError,
            "x: expected [B,d_model] with d_model = 24, got (2, 5, 24)",
        ),
        (
            lambda layer: layer.step(tokens(2), layer.zeros_state(2).memory),
            TypeError,
            "state: expected a linattn.nn.State, got tuple",
        ),
        (
            lambda layer: layer.step(tokens(2), layer.zeros_state(3)),
            ValueError,
            "state[0]: expected [N,HV,K,V] = (2, 2, 4, 3), got (3, 2, 4, 3)",
        ),
        (
            lambda layer: layer(tokens(2, 5), output_final_state=True),
            ValueError,
            "causal: expected True with state or output_final_state=True, got False",
        ),
        (
            lambda layer: layer(tokens(2, 5), state=layer.zeros_state(2)),
            ValueError,
            "causal: expected True with state or output_final_state=True, got False",
        ),
        (
            lambda layer: nn.LinearAttention(D, 9, 6, num_heads=2),
            ValueError,
            "d_k: expected a multiple of num_heads = 2, got 9",
        ),
        (
            lambda layer: nn.LinearAttention(D, 8, 7, num_heads=2),
            ValueError,
            "d_v: expected a multiple of num_heads = 2, got 7",
        ),
        (
            lambda layer: nn.LinearAttention(D, 8, 6, num_heads=0),
            ValueError,
            "num_heads: expected a size >= 1, got 0",
        ),
        (
            lambda layer: nn.LinearAttention(D, 8.0, 6),
            TypeError,
            "d_k: expected an int, got float",
        ),
        (
            lambda layer: nn.LinearAttention(D, 8, 6, feature_map="gelu"),
            ValueError,
            "feature_map: expected one of 'identity'",
        ),
        (
            lambda layer: nn.LinearAttention(D, 8, 6, feature_map="identity"),
            ValueError,
            "normalize: with feature_map='identity'",
        ),
    ],
)
def test_a_plain_layer_refuses(call, error, text):
    with pytest.raises(error) as caught:
        call(plain())
    assert str(caught.value).startswith(text)


def test_layers_show_their_sizes():
    assert "d_model=24, d_k=8, d_v=6, num_heads=2, feature_map='elu+1'" in repr(plain())
    shown = repr(plain(feature_map=Learnt()))
    assert "feature_map=FeatureMap('callable', forward=Learnt)" in shown
    shown = repr(plain(feature_map=("exp", "relu+eps")))
    assert "feature_map=(FeatureMap('exp'), FeatureMap('relu+eps', eps=0.001))" in shown
    for name in BLOCKS:
        layer = block(name)
        if hasattr(layer, "HV"):
            sizes = f"d_model=24, H={layer.H}, HV={layer.HV}, K={layer.K}, V={layer.V}"
            assert sizes in repr(layer)
    assert "V=12, R=3" in repr(block("GatedDeltaProduct"))
    assert "d_model=24, H=6, P=8, d_state=5, G=2" in repr(block("Mamba2"))
    assert "d_model=24, H=2, K=6, V=12" in repr(block("RWKV6"))
    assert "K=6, V=6, batch=1" in repr(block("Titans"))
    assert "K=6, V=6, batch=4" in repr(block("Titans in batches"))
    assert "d_model=24, H=4, K=6, V=6, layer_idx=0, num_layers=1" in repr(block("RWKV7"))


def test_examples():
    for module in {sys.modules[getattr(nn, name).__module__] for name in nn.__all__}:
        done = doctest.testmod(module)
        assert done.attempted and not done.failed


# ---- the blocks ----


@blocks
def test_parameters_have_flas_names(name):
    assert sorted(block(name).state_dict()) == sorted(NAMES[name].split())


@blocks
def test_on_from_a_state_and_step_by_step(name):
    layer, x = block(name), tokens(3, 30)
    with torch.no_grad():
        y, state = layer(x)
        first, half = layer(x[:, :13])
        kept = [a.clone() for a in flat(half)]
        rest, end = layer(x[:, 13:], half)
        agree(torch.cat([first, rest], 1), y)
        for a, b, before, after in zip(flat(end), flat(state), flat(half), kept, strict=True):
            agree(a, b)
            assert torch.equal(before, after)  # a state that was given is left alone
    # gradients may be on: none are kept
    stepped = [layer.step(x[:, t], half) for t in range(13, 30)]
    assert not stepped[0].requires_grad
    agree(torch.stack(stepped, 1), rest)
    for a, b in zip(flat(half), flat(state), strict=True):
        agree(a, b)
    # and from nothing
    state = layer.zeros_state(3)
    agree(torch.stack([layer.step(x[:, t], state) for t in range(30)], 1), y)


@blocks
def test_packed_sequences_are_sequences(name):
    layer, edges = block(name), [0, 2, 2, 9, 30]
    x = tokens(1, 30)
    with torch.no_grad():
        before = layer(tokens(4, 7, seed=5))[1]
        y, state = layer(x, before, torch.tensor(edges, dtype=torch.int32))
        for n, (i, j) in enumerate(pairwise(edges)):
            memory = tuple(a[n : n + 1] for a in parts(before))
            own = nn.State(
                memory if isinstance(before.memory, tuple) else memory[0],
                tuple(c[n : n + 1] for c in before.conv),
                None if before.position is None else before.position[n : n + 1],
            )
            alone, end = layer(x[:, i:j], own)
            agree(y[:, i:j], alone)
            for a, b in zip(flat(state), flat(end), strict=True):
                agree(a[n : n + 1], b)


@blocks
def test_every_parameter_learns(name):
    layer, x = block(name), tokens(2, 20).requires_grad_()
    y, state = layer(x)
    (y.square().sum() + sum(a.square().sum() for a in real_parts(state))).backward()
    for which, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, which
    assert x.grad.abs().sum() > 0


@blocks
def test_a_step_between_a_forward_and_its_backward(name):
    layer, x = block(name), tokens(2, 20)
    y, state = layer(x)
    layer.step(x[:, 0], state)
    y.sum().backward()
    got = first_weight(layer).grad.clone()
    layer.zero_grad()
    layer(x)[0].sum().backward()
    assert torch.equal(got, first_weight(layer).grad)


@blocks
def test_gradients_are_differences(name):
    layer, x = block(name), tokens(1, 6)
    way = tokens(1, 6, seed=3)
    x.requires_grad_()
    weight = tokens(1, 6, seed=4)
    ((layer(x)[0] * weight).sum()).backward()
    with torch.no_grad():
        step = 1e-5
        up, down = ((layer(x + s * way)[0] * weight).sum() for s in (step, -step))
    assert math.isclose((x.grad * way).sum(), (up - down) / (2 * step), rel_tol=1e-6)


@blocks
def test_bfloat16_and_autocast(name):
    layer, x = block(name), tokens(2, 30)
    with torch.no_grad():
        want, _ = layer(x)
        narrow = block(name, torch.bfloat16)
        y, state = narrow(x.bfloat16())
        assert y.dtype == torch.bfloat16 and real_parts(state)[0].dtype == torch.float32
        assert narrow.step(x[:, 0].bfloat16(), state).dtype == torch.bfloat16
        single = block(name, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            cast, _ = single(x.float())
    for got in (y, cast):
        assert (got.double() - want).norm() < 0.05 * want.norm()
        assert (got.double() - want).norm() > 0


@blocks
def test_compiled_without_a_break(name):
    torch.compiler.reset()  # blocks share a forward, which is compiled for 8 of them at most
    layer, x = block(name, torch.float32), tokens(2, 20, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, state = compiled(x)
    want, end = layer(x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(flat(state), flat(end))
    y.sum().backward()
    assert first_weight(layer).grad is not None


@blocks
def test_a_state_is_saved_and_loaded(name, tmp_path):
    """By PyTorch's default, which makes no class of a package that it does not know."""
    layer, x = block(name), tokens(2, 9)
    _, state = layer(x)
    torch.save(state, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(found) is type(state)
    token = tokens(2)
    assert torch.equal(layer.step(token, found), layer.step(token, state))


@blocks
@pytest.mark.filterwarnings("default")  # PyTorch's own, while it traces
def test_a_step_compiled_without_a_break(name):
    torch.compiler.reset()
    layer, x = block(name, torch.float32), tokens(3, 2, dtype=torch.float32)
    plain, traced = layer.zeros_state(2), layer.zeros_state(2)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    for token in x:
        torch.testing.assert_close(step(token, traced), layer.step(token, plain))
    torch.testing.assert_close(flat(traced), flat(plain))


@blocks
@pytest.mark.filterwarnings("default")
def test_a_compiled_step_of_a_state_that_stays(name):
    torch.compiler.reset()
    layer, x = block(name, torch.float32), tokens(3, 2, dtype=torch.float32)
    plain, static = layer.zeros_state(2), layer.zeros_state(2)
    assert static.mark_static() is static
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    for token in x:
        torch.testing.assert_close(step(token, static), layer.step(token, plain))
    torch.testing.assert_close(flat(static), flat(plain))


# ---- what each is ----


def by_hand(layer, x):
    """A block from its formulas, the op apart: q, k, v after projection and convolution."""

    def conv(y, name):
        if not hasattr(layer, name):
            return y
        w = getattr(layer, name).weight[:, 0]
        padded = F.pad(y, (0, 0, w.shape[1] - 1, 0))
        return F.silu(sum(padded[:, j : j + y.shape[1]] * w[:, j] for j in range(w.shape[1])))

    q, k, v = (conv(getattr(layer, f"{n}_proj")(x), f"{n}_conv1d") for n in "qkv")
    return (
        q.unflatten(-1, (layer.H, -1)),
        k.unflatten(-1, (layer.H, -1)),
        v.unflatten(-1, (layer.HV, -1)),
    )


def normed(o, weight):
    o = torch.from_numpy(o)
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_a_gated_delta_net_by_hand():
    layer, x = block("GatedDeltaNet"), tokens(2, 25)
    q, k, v = by_hand(layer, x)
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = layer.b_proj(x).sigmoid()
    o, _ = reference.gated_delta_rule(
        *(a.detach().numpy() for a in (q, k, v, g, beta)), qk_l2norm=True
    )
    o = normed(o, layer.o_norm.weight)
    o = o * F.silu(layer.g_proj(x)).unflatten(-1, (4, -1))
    agree(layer(x)[0], layer.o_proj(o.flatten(-2)))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_a_gated_delta_product_by_hand(gated, twice):
    """A token's writes one after another; its decay before the first, its read after the last."""
    torch.manual_seed(0)
    layer = nn.GatedDeltaProduct(
        D, num_householder=3, num_heads=2, head_dim=6, use_forget_gate=gated, allow_neg_eigval=twice
    ).double()
    x, (T, R, H, V) = tokens(1, 15), (15, 3, 2, 12)

    def conv(y, w):
        padded = F.pad(y, (0, 0, 3, 0))
        return F.silu(sum(padded[:, j : j + T] * w[:, 0, j] for j in range(4)))

    def unit(a):
        return a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = (
        conv(getattr(layer, f"{n}_proj")(x), getattr(layer, f"{n}_conv1d").weight)[0] for n in "qkv"
    )
    q, k = unit(q.reshape(T, H, 6)), unit(k.reshape(T, R, H, 6))
    v, beta = v.reshape(T, R, H, V), layer.b_proj(x)[0].sigmoid().reshape(T, R, H) * (1 + twice)
    decay = torch.ones(T, H, dtype=torch.float64)
    if gated:
        decay = (-layer.A_log.exp() * F.softplus(layer.a_proj(x)[0] + layer.dt_bias)).exp()
    S, o = torch.zeros(H, 6, V, dtype=torch.float64), []
    for t in range(T):
        S = decay[t, :, None, None] * S
        for r in range(R):
            error = v[t, r] - torch.einsum("hkv,hk->hv", S, k[t, r])
            S = S + torch.einsum("h,hk,hv->hkv", beta[t, r], k[t, r], error)
        o.append(torch.einsum("hkv,hk->hv", S, q[t]) / 6**0.5)
    o = torch.stack(o)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    o = o * F.silu(layer.g_proj(x)[0]).reshape(T, H, V)
    y, state = layer(x)
    agree(y[0], layer.o_proj(o.flatten(-2)))
    agree(state.memory[0], S)


def test_a_delta_product_of_one_write_is_a_gated_delta_net():
    torch.manual_seed(0)
    options = {"num_heads": 2, "head_dim": 6, "num_v_heads": 4}
    one = nn.GatedDeltaProduct(D, num_householder=1, allow_neg_eigval=False, **options).double()
    net = nn.GatedDeltaNet(D, **options).double()
    net.load_state_dict(one.state_dict())
    x = tokens(2, 12)
    agree(one(x)[0], net(x)[0])
    state, same = one.zeros_state(2), net.zeros_state(2)
    for t in range(12):
        agree(one.step(x[:, t], state), net.step(x[:, t], same))


MAMBA2 = {
    "default": {},
    "features of D": {"D_has_hdim": True, "bias": True, "conv_bias": False},
    "no norm": {"rmsnorm": False},
    "norm before gate": {"norm_before_gate": True},
    "limits": {"dt_limit": (0.3, 0.8), "A_init_range": (0.1, 0.5), "d_conv": 2},
}


@pytest.mark.parametrize("options", MAMBA2.values(), ids=MAMBA2)
def test_a_mamba_2_by_hand(options):
    torch.manual_seed(0)
    H, P, N, G, T = 6, 8, 5, 2, 15
    layer = nn.Mamba2(D, d_state=N, headdim=P, ngroups=G, **options).double()
    with torch.no_grad():
        layer.D.normal_()
        layer.dt_bias.normal_()
    x = tokens(1, T)
    z, xBC, dt = layer.in_proj(x)[0].split([H * P, H * P + 2 * G * N, H], -1)
    W = layer.conv1d.weight.shape[-1]
    padded = F.pad(xBC, (0, 0, W - 1, 0))
    xBC = sum(padded[j : j + T] * layer.conv1d.weight[:, 0, j] for j in range(W))
    xBC = F.silu(xBC if layer.conv1d.bias is None else xBC + layer.conv1d.bias)
    u, B, C = xBC.split([H * P, G * N, G * N], -1)
    u = u.reshape(T, H, P)
    B, C = (a.reshape(T, G, N).repeat_interleave(H // G, 1) for a in (B, C))
    dt = F.softplus(dt + layer.dt_bias).clamp(*options.get("dt_limit", (0, math.inf)))
    skip = layer.D.reshape(H, -1)
    h, y = torch.zeros(H, P, N, dtype=torch.float64), []
    for t in range(T):
        h = (-dt[t] * layer.A_log.exp()).exp()[:, None, None] * h
        h = h + torch.einsum("h,hp,hn->hpn", dt[t], u[t], B[t])
        y.append(torch.einsum("hpn,hn->hp", h, C[t]) + skip * u[t])
    y, gate = torch.stack(y).flatten(-2), F.silu(z)
    before = options.get("norm_before_gate", False)
    y = y if before else y * gate
    if options.get("rmsnorm", True):
        groups = y.reshape(T, G, -1)
        groups = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y = groups.flatten(-2) * layer.norm.weight
    y = y * gate if before else y
    got, state = layer(x)
    agree(got[0], layer.out_proj(y))
    agree(state.memory[0], h)
    step = layer.zeros_state(1)
    agree(torch.stack([layer.step(x[:, t], step) for t in range(T)], 1), got)


def test_a_mamba_2_of_transformers():
    """Its state dict loads, and the outputs are the same. It computes in float32."""
    transformers = imported("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    sizes = {"hidden_size": D, "num_heads": 6, "head_dim": 8, "state_size": 5, "n_groups": 2}
    config = transformers.Mamba2Config(**sizes, chunk_size=16, layer_norm_epsilon=1e-5)
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in (theirs.D, theirs.dt_bias, theirs.norm.weight):
            parameter.normal_()
    ours = nn.Mamba2(D, d_state=5, headdim=8, ngroups=2)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 37, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(x)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(ours(x)[0], want, rtol=1e-5, atol=1e-5 * want.abs().max())


def test_a_mamba_of_transformers():
    """Its state dict loads, and the outputs are the same. It computes in float32."""
    transformers = imported("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=D, state_size=5, num_hidden_layers=1)
    theirs = MambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        theirs.D.normal_()
    ours = nn.Mamba(D, d_state=5)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 37, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(x)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(ours(x)[0], want, rtol=1e-5, atol=1e-5 * want.abs().max())


def test_a_recurrent_block_of_recurrent_gemma():
    transformers = imported("transformers")
    from transformers.models.recurrent_gemma import modeling_recurrent_gemma as gemma

    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        hidden_size=D, lru_width=D, num_attention_heads=4, conv1d_width=4
    )
    theirs = gemma.RecurrentGemmaRecurrentBlock(config, 0).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    ours = nn.RGLRU(D, num_heads=4)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(2, 37, dtype=torch.float32)
    positions = torch.arange(37)[None].expand(2, -1)
    with torch.no_grad():
        want = theirs(x, positions, None, use_cache=False)[0]
        torch.testing.assert_close(ours(x)[0], want, rtol=1e-5, atol=1e-5 * want.abs().max())


class Halved(nn.GatedDeltaNet):
    """A block whose decay is made in its own way."""

    def arguments(self, x):
        given = super().arguments(x)
        return given | {"g": given["g"] / 2}


def without_silu():
    block = nn.GatedDeltaNet(16, num_heads=2, head_dim=8)
    block.k_conv1d.silu = False
    return block


def without_eps():
    return nn.GatedDeltaNet(16, num_heads=2, head_dim=8, norm_eps=None)


def interleaved():
    """Its gates come from one matrix, every second number."""
    block = nn.GatedDeltaNet(16, num_heads=2, head_dim=8)

    class Every(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)[..., ::2]

    block.a_proj, block.b_proj = Every(16, 4), Every(16, 4)
    return block


@pytest.mark.parametrize(
    "make",
    [lambda: Halved(16, num_heads=2, head_dim=8), without_silu, without_eps, interleaved],
    ids=["its own decay", "one activation less", "no eps", "gates apart"],
)
def test_a_block_of_its_own_steps_as_it_runs(make):
    block, x = make().double(), torch.randn(2, 5, 16).double()
    state = block.zeros_state(2)
    steps = torch.stack([block.step(x[:, t], state) for t in range(5)], 1)
    want, after = block(x)
    torch.testing.assert_close(steps, want)
    torch.testing.assert_close(state.memory, after.memory)


def test_an_s4d_by_hand():
    """Its layer is a convolution, of which this is the kernel."""
    layer, x = block("S4D"), tokens(2, 25)
    kernel = layer.kernel
    dt = kernel.log_dt.exp()[:, None]
    A = torch.complex(-kernel.log_A_real.exp(), kernel.A_imag)
    C = torch.view_as_complex(kernel.C) * (torch.exp(dt * A) - 1) / A
    powers = torch.exp((dt * A)[..., None] * torch.arange(25))
    taps = 2 * (C[..., None] * powers).sum(1).real  # [D,T]
    y = F.conv1d(F.pad(x.mT, (24, 0)), taps.flip(-1)[:, None], groups=D).mT + layer.D * x
    agree(layer(x)[0], layer.output_linear(F.gelu(y).mT).mT)


def test_a_kimi_delta_attention_by_hand():
    layer, x = block("KimiDeltaAttention"), tokens(2, 25)
    q, k, v = by_hand(layer, x)
    rate = F.softplus(layer.f_proj(x) + layer.dt_bias).unflatten(-1, (2, 6))
    g, beta = -layer.A_log.exp()[:, None] * rate, layer.b_proj(x).sigmoid()
    o, _ = reference.kda(*(a.detach().numpy() for a in (q, k, v, g, beta)), qk_l2norm=True)
    o = normed(o, layer.o_norm.weight)
    o = o * layer.g_proj(x).sigmoid().unflatten(-1, (2, -1))
    agree(layer(x)[0], layer.o_proj(o.flatten(-2)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_x": False},
        {"use_inner_decay": False},
        {"use_output_correction": False, "norm_x": False},
        {"correction_factor": 0.25, "num_v_heads": None},
    ],
    ids=repr,
)
def test_a_comba_by_hand(options):
    """It predicts from the state before its decay; the factor of p acts before the norms."""
    torch.manual_seed(0)
    sizes = {"num_heads": 2, "head_dim": 6, "num_v_heads": 4} | options
    layer, x = nn.Comba(D, **sizes).double(), tokens(1, 15)
    with torch.no_grad():
        if options.get("use_inner_decay", True):
            layer.decay.normal_()
    q, k, v = (a[0] for a in by_hand(layer, x))
    p = k * layer.decay.sigmoid()[:, None] if options.get("use_inner_decay", True) else k
    if options.get("use_output_correction", True):
        q = q - options.get("correction_factor", 1) * p

    def unit(a):
        return a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    if options.get("norm_x", True):
        look = unit(p)
    else:
        look = unit(k) * (layer.decay.sigmoid()[:, None])
    q, k, look = (a.repeat_interleave(layer.HV // 2, 1) for a in (unit(q), unit(k), look))
    decay = (-layer.A_log.exp() * F.softplus(layer.a_proj(x)[0] + layer.dt_bias)).exp()
    beta = layer.b_proj(x)[0].sigmoid()
    S, o = torch.zeros(layer.HV, 6, 12, dtype=torch.float64), []
    for t in range(15):
        error = v[t] - torch.einsum("hkv,hk->hv", S, look[t])
        S = decay[t, :, None, None] * S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        o.append(torch.einsum("hkv,hk->hv", S, q[t]) / 6**0.5)
    o = torch.stack(o)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    o = o * layer.g_proj(x)[0].sigmoid().unflatten(-1, (layer.HV, -1))
    y, state = layer(x)
    agree(y[0], layer.o_proj(o.flatten(-2)))
    agree(state.memory[0], S)


@pytest.mark.parametrize("batch", [1, 4, 15, 20])
@pytest.mark.parametrize("convolved", [True, False])
def test_a_titans_by_hand(convolved, batch):
    """The paper's letters: S is minus our Y, and alpha is what is forgotten."""
    options = {} if convolved else {"conv_size": None}
    layer = titans(batch, **options)
    x = tokens(1, 15)
    q, k, v = (a[0] for a in by_hand(layer, x))
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    q, k = (a.repeat_interleave(2, 1) for a in (q, k))
    theta, eta, alpha = (
        getattr(layer, f"{n}_proj")(x)[0].sigmoid()[..., None, None]
        for n in ("theta", "eta", "alpha")
    )
    (M, S), o = torch.zeros(2, 4, 6, 6, dtype=torch.float64), []
    for t in range(15):
        if t % batch == 0:
            M0 = M
        surprise = torch.einsum("hk,hv->hkv", k[t], torch.einsum("hkv,hk->hv", M0, k[t]) - v[t])
        S = eta[t] * S - theta[t] * surprise
        M = (1 - alpha[t]) * M + S
        o.append(torch.einsum("hkv,hk->hv", M, q[t]))
    o = torch.stack(o)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    o = o * F.silu(layer.g_proj(x)[0]).unflatten(-1, (4, -1))
    y, state = layer(x)
    agree(y[0], layer.o_proj(o.flatten(-2)))
    agree(state.memory[0][0], M)
    agree(state.memory[1][0], S)
    if batch == 1:
        assert len(state.memory) == 2 and state.position is None
    else:
        agree(state.memory[2][0], M if batch == 15 else M0)
        assert state.position.tolist() == [15]


def titans(batch, **options):
    torch.manual_seed(0)
    return nn.Titans(D, num_heads=2, head_dim=6, num_v_heads=4, batch=batch, **options).double()


@pytest.mark.parametrize("batch", [2, 3, 7, 50])
@pytest.mark.parametrize(
    "edges", [(5, 8), (1, 2), (6, 7), (3, 14), (0, 0), (14, 21), (9, 9)], ids=str
)
def test_titans_goes_on_within_a_batch(edges, batch):
    """Three calls are one call, with gradients. Some end within a batch, some after it."""
    layer, x = titans(batch), tokens(2, 21).requires_grad_()
    y, whole = layer(x)
    state, some = None, []
    for i, j in pairwise((0, *edges, 21)):
        part, state = layer(x[:, i:j], state)
        some.append(part)
    some = torch.cat(some, 1)
    agree(some, y)
    agree(flat(state), flat(whole))
    weight = tokens(2, 21, seed=2)
    for each, end in ((y, whole), (some, state)):
        layer.zero_grad()
        loss = (each * weight).sum() + sum((1 + a).square().sum() for a in end.memory)
        grads = torch.autograd.grad(loss, [x, *layer.parameters()])
        if each is y:
            want = grads
    agree(grads, want)


def test_titans_steps_from_any_token():
    """To the end of its batch and on; the backward pass of the call before sees none of it."""
    layer, x = titans(4), tokens(2, 13)
    y, _ = layer(x)
    begun = layer.zeros_state(2)
    for i in range(13):
        first, state = layer(x[:, :i])
        agree(flat(state), flat(begun))
        want = torch.autograd.grad(first.sum(), layer.v_proj.weight, retain_graph=True)
        agree(torch.stack([layer.step(x[:, t], state) for t in range(i, 13)], 1), y[:, i:])
        assert torch.equal(*torch.autograd.grad(first.sum(), layer.v_proj.weight), *want)
        layer.step(x[:, i], begun)


def test_titans_of_sequences_within_different_batches():
    """Packed prompts of several lengths, then as many tokens for each, then a token for each."""
    layer, lengths = titans(4), (9, 0, 4, 3, 6)
    x, then = tokens(1, sum(lengths)), tokens(5, 11, seed=2)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        prompt, state = layer(x, cu_seqlens=edges)
        assert state.position.tolist() == list(lengths)
        y, end = layer(then[:, :7], state)
        assert end.position.tolist() == [length + 7 for length in lengths]
        kept = [a.clone() for a in flat(end)]
        stepped = torch.stack([layer.step(then[:, t], end) for t in range(7, 11)], 1)
        for n, (i, j) in enumerate(pairwise(edges.tolist())):
            alone = torch.cat([x[:, i:j], then[n : n + 1]], 1)
            want, last = layer(alone)
            agree(torch.cat([prompt[0, i:j], y[n], stepped[n]]), want[0])
            agree([a[n : n + 1] for a in flat(end)], flat(last))
            agree([a[n : n + 1] for a in kept], flat(layer(alone[:, :-4])[1]))


def test_gradients_of_the_state_of_titans_within_a_batch():
    layer, x = titans(3, conv_size=None), tokens(2, 8).requires_grad_()
    made = torch.Generator().manual_seed(5)
    memory = [
        torch.randn(2, 4, 6, 6, generator=made, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]

    def call(x, *memory):
        y, state = layer(x, nn.State(memory, (), torch.tensor([2, 4])))
        return y, *state.memory

    assert torch.autograd.gradcheck(call, (x, *memory), fast_mode=True)


def test_titans_in_bfloat16_within_a_batch():
    layer, x = titans(7), tokens(2, 30)
    with torch.no_grad():
        want, _ = layer(x)
        narrow, x = titans(7).bfloat16(), x.bfloat16()
        first, state = narrow(x[:, :10])
        some = [first, *(narrow.step(x[:, t], state)[:, None] for t in range(10, 12))]
        rest, state = narrow(x[:, 12:], state)
    y = torch.cat([*some, rest], 1)
    assert y.dtype == torch.bfloat16 and {a.dtype for a in state.memory} == {torch.float32}
    assert (y.double() - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda layer: titans(0), ValueError, "batch: expected a size >= 1, got 0"),
        (lambda layer: titans(2.0), TypeError, "batch: expected an int, got float"),
        (lambda layer: titans(True), TypeError, "batch: expected an int, got bool"),
        (
            lambda layer: layer(tokens(2, 5), titans(1, conv_size=None).zeros_state(2)),
            ValueError,
            "state: expected a memory (M, Y, M0) and a position, as batch = 4 needs, got 2 in the "
            "memory and no position",
        ),
        (
            lambda layer: layer.step(
                tokens(2), layer.zeros_state(2)._replace(position=None, memory=torch.zeros(2))
            ),
            ValueError,
            "state: expected a memory (M, Y, M0) and a position, as batch = 4 needs, got 1 in the "
            "memory and no position",
        ),
        (
            lambda layer: titans(1, conv_size=None)(tokens(2, 5), layer.zeros_state(2)),
            ValueError,
            "initial_state: expected the pair (M, Y), got 3 items",
        ),
        (
            lambda layer: layer(tokens(2, 5), layer.zeros_state(3)),
            ValueError,
            "state: expected that of 2 sequences, got that of 3",
        ),
        (
            lambda layer: layer.step(tokens(2), layer.zeros_state(3)),
            ValueError,
            "state: expected that of 2 sequences, got that of 3",
        ),
        (
            lambda layer: layer(tokens(2, 5), cu_seqlens=torch.tensor([0, 2, 5])),
            ValueError,
            "cu_seqlens: expected packed sequences to have B = 1, got B = 2",
        ),
        (
            lambda layer: layer(tokens(1, 5), cu_seqlens=torch.tensor([0, 7])),
            ValueError,
            "cu_seqlens: expected to rise from 0 to T = 5, got [0, 7]",
        ),
        (
            lambda layer: layer(tokens(1, 5), cu_seqlens=torch.tensor([0, 4, 3, 5])),
            ValueError,
            "cu_seqlens: expected to rise from 0 to T = 5, got [0, 4, 3, 5]",
        ),
    ],
)
def test_titans_in_batches_refuses(call, error, text):
    with pytest.raises(error) as caught:
        call(titans(4, conv_size=None))
    assert str(caught.value) == text


def test_titans_heads_begin_by_forgetting_at_their_own_pace():
    layer = nn.Titans(D, num_heads=6, head_dim=4)
    alpha = layer.alpha_proj.bias.sigmoid()
    torch.testing.assert_close(alpha, 2.0 ** -torch.arange(4.0, 10.0), rtol=0.07, atol=0)


# ---- RWKV ----


def before(x):
    """The token before each, zeros before the first; x [T,D]."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def low_rank(module, x, activation=lambda y: y):
    y = activation(x @ module.lora[0].weight.T) @ module.lora[2].weight.T
    return y if module.lora[2].bias is None else y + module.lora[2].bias


def grouped(layer, o, eps):
    """The norm of each head, with a mean; o [T,H,V]."""
    o = o - o.mean(-1, keepdim=True)
    o = o / (o.square().mean(-1, keepdim=True) + eps).sqrt()
    return o.flatten(-2) * layer.g_norm.weight + layer.g_norm.bias


def test_an_rwkv_6_by_hand():
    """The paper's recurrence, token by token: a read before the decay, and the bonus."""
    layer, x = block("RWKV6"), tokens(15)
    H, K, V, delta = 2, 6, 12, before(x) - x
    inner = ((x + delta * layer.x_proj[0].mu) @ layer.x_proj[0].linear.weight.T).tanh()
    mixed = {}
    for i, name in enumerate("rwkvg"):
        mu = inner[:, 3 * i : 3 * i + 3] @ layer.x_proj[2].weight[:, 3 * i : 3 * i + 3].T
        mixed[name] = x + delta * (mu + layer.x_bias[i])
    r, k, v, gate = (
        mixed[n] @ getattr(layer, f"{n}_proj").linear.weight.T for n in ("r", "k", "v", "g")
    )
    w = low_rank(layer.w_proj.linear, mixed["w"], torch.tanh)
    decay = (-w.exp()).exp().reshape(15, H, K)
    r, k, v = r.reshape(15, H, K), k.reshape(15, H, K), v.reshape(15, H, V)
    S, o = torch.zeros(H, K, V, dtype=torch.float64), []
    for t in range(15):
        write = torch.einsum("hk,hv->hkv", k[t], v[t])
        o.append(torch.einsum("hk,hkv->hv", r[t], S + layer.bonus[..., None] * write))
        S = decay[t][..., None] * S + write
    y, state = layer(x[None])
    agree(y[0], layer.o_proj(grouped(layer, torch.stack(o), 1e-5) * F.silu(gate)))
    agree(state.memory[0], S)
    assert torch.equal(state.conv[0], x[None, -1:])


def rwkv7(layer_idx=0, seed=0, **options):
    torch.manual_seed(seed)
    layer = nn.RWKV7(D, head_dim=6, layer_idx=layer_idx, num_layers=3, **options)
    return stirred(layer).double()


@pytest.mark.parametrize("layer_idx", [0, 2])
@pytest.mark.parametrize("V", [6, 9])
def test_an_rwkv_7_by_hand(layer_idx, V):
    """The paper's recurrence, token by token, with its own matrices: S [V,K]."""
    layer, x = rwkv7(layer_idx, expand_v=V / 6), tokens(15)
    H, K, T, delta = 4, 6, 15, before(x) - x
    xr, xw, xk, xv, xa, xg = (x + delta * getattr(layer, f"x_{n}")[0] for n in "rwkvag")
    r, k, v = (y @ W.weight.T for y, W in zip((xr, xk, xv), projections(layer), strict=True))
    decay = (-math.exp(-0.5) * low_rank(layer.w_lora, xw, torch.tanh).sigmoid()).exp()
    a = low_rank(layer.a_lora, xa).sigmoid()
    gate = low_rank(layer.g_lora, xg, torch.sigmoid)
    made, v_first = v, None
    if layer_idx:
        v_first = torch.randn(T, H * V, dtype=torch.float64)
        mix = low_rank(layer.v_lora, xv).sigmoid()
        v = (1 - mix) * v + mix * v_first
    kk = (k * layer.k_k).reshape(T, H, K)
    kk = kk / kk.norm(dim=-1, keepdim=True)
    k = k * (1 - layer.k_a) + k * a * layer.k_a
    r, k, a, decay = (y.reshape(T, H, K) for y in (r, k, a, decay))
    v = v.reshape(T, H, V)
    S, o = torch.zeros(H, V, K, dtype=torch.float64), []
    for t in range(T):
        turn = torch.diag_embed(decay[t]) - torch.einsum("hi,hj->hij", kk[t], a[t] * kk[t])
        S = S @ turn + torch.einsum("hv,hk->hvk", v[t], k[t])
        o.append(torch.einsum("hvk,hk->hv", S, r[t]))
    o = grouped(layer, torch.stack(o), 6 * 1e-5)
    o = o + ((r * k * layer.r_k).sum(-1, keepdim=True) * v).flatten(-2)
    given = None if v_first is None else v_first[None]
    y, state, returned = layer(x[None], v_first=given, output_v_first=True)
    agree(y[0], layer.o_proj(o * gate))
    agree(state.memory[0].mT, S)
    assert torch.equal(state.conv[0], x[None, -1:])
    if layer_idx:
        assert returned is given
    else:
        agree(returned[0], made)


def projections(layer):
    return layer.r_proj, layer.k_proj, layer.v_proj


class Stack(torch.nn.Module):
    """Three RWKV-7 layers, of which the first gives its values to the others."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(rwkv7(i, seed=i) for i in range(3))

    def forward(self, x, states=(None,) * 3, cu_seqlens=None):
        v_first, after = None, []
        for layer, state in zip(self.layers, states, strict=True):
            y, state, v_first = layer(x, state, cu_seqlens, v_first, True)
            x = x + y
            after.append(state)
        return x, after

    def step(self, x, states):
        v_first = None
        for layer, state in zip(self.layers, states, strict=True):
            y, v_first = layer.step(x, state, v_first, True)
            x = x + y
        return x


def test_the_values_of_the_first_rwkv_7_layer_go_to_the_others():
    stack, x, edges = Stack(), tokens(1, 20), [0, 6, 6, 20]
    with torch.no_grad():
        y, _ = stack(x)
        first, states = stack(x[:, :8])
        agree(torch.cat([first, stack(x[:, 8:], states)[0]], 1), y)
        agree(torch.stack([stack.step(x[:, t], states) for t in range(8, 20)], 1), y[:, 8:])
        packed, ends = stack(x, cu_seqlens=torch.tensor(edges))
        for n, (i, j) in enumerate(pairwise(edges)):
            alone, own = stack(x[:, i:j])
            agree(packed[:, i:j], alone)
            for a, b in zip(ends, own, strict=True):
                agree([c[n : n + 1] for c in flat(a)], flat(b))
    stack(x)[0].square().sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    agree(compiled(x)[0], y)
    assert [name for name in stack.state_dict() if "v_lora" in name] == [
        f"layers.{i}.v_lora.lora.{which}"
        for i in (1, 2)
        for which in ("0.weight", "2.weight", "2.bias")
    ]


def test_an_rwkv_7_begins_as_its_authors_let_it():
    """Channel by channel, for layer 2 of 5; the decays are within what the gate allows."""
    layer = nn.RWKV7(32, head_dim=8, layer_idx=2, num_layers=5)
    for n in range(32):
        line, in_head = n / 31 - 0.5, (n % 8 - 3.5) / 3.5
        in_head *= abs(in_head)
        want = {
            "x_r": 1 - (n / 32) ** (0.2 * 0.6),
            "x_w": 1 - (n / 32) ** (0.9 * 0.6),
            "x_k": 1 - (n / 32) ** (0.7 * 0.6),
            "x_v": 1 - (n / 32) ** (0.7 * 0.6),
            "x_a": 1 - (n / 32) ** (0.9 * 0.6),
            "x_g": 1 - (n / 32) ** (0.2 * 0.6),
            "k_k": 0.71 - 0.1 * line,
            "k_a": 1.02,
            "r_k": -0.04,
            "w_lora.lora.2.bias": 0.5 - 6 + 6 * (n / 31) ** (1 + 0.5**0.3) + 2.5 * in_head,
            "a_lora.lora.2.bias": -0.19 + 0.3 * in_head + 0.4 * line,
            "v_lora.lora.2.bias": 0.73 - 0.4 * line,
            "g_norm.weight": 0.6**0.7,
        }
        for name, value in want.items():
            got = layer.state_dict()[name].flatten()[n].item()
            assert math.isclose(got, value, rel_tol=1e-5, abs_tol=1e-6), (name, n)
    y, _ = layer(torch.randn(1, 5, 32), v_first=torch.zeros(1, 5, 32))
    assert not y.any()
    eye = torch.eye(32)
    for W, gain in zip(projections(layer), (1, 0.1, 1), strict=True):
        torch.testing.assert_close(W.weight @ W.weight.T, gain**2 * eye, rtol=1e-5, atol=1e-5)


def test_the_ranks_of_an_rwkv_7():
    with torch.device("meta"):
        layer = nn.RWKV7(2048, layer_idx=1, num_layers=24)
    ranks = [getattr(layer, f"{n}_lora").lora[0].out_features for n in "wavg"]
    assert ranks == [128, 128, 64, 224]


@blocks
def test_a_step_of_training_lowers_the_loss(name):
    layer, x, target = block(name), tokens(2, 20), tokens(2, 20, seed=2)
    if name == "RWKV7":  # from where it really begins
        layer = nn.RWKV7(D, head_dim=6).double()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    losses = []
    for _ in range(2):
        loss = (layer(x)[0] - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]


def test_a_retention_by_hand():
    layer, x = block("Retention"), tokens(1, 25)
    q, k, v = by_hand(layer, x)
    t, half = torch.arange(25, dtype=torch.float64), layer.K // 2
    turn = torch.polar(
        torch.ones(25, half).double(), t[:, None] * 10000.0 ** (-torch.arange(half) / half)
    )

    def turned(a):  # pairs of halves as complex numbers
        z = torch.complex(a[..., :half], a[..., half:]) * turn[:, None]
        return torch.cat([z.real, z.imag], -1)

    gamma = 1 - 2.0 ** (-5 - np.arange(2))
    o, _ = reference.retention(
        *(a.detach().numpy() for a in (turned(q), turned(k), v)), gamma=gamma
    )
    o = normed(o, layer.g_norm_swish_gate.weight)
    o = o * F.silu(layer.g_proj(x)).unflatten(-1, (2, -1))
    # angles are float32's, as at any position
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(-2)), rtol=1e-4, atol=1e-6)


def test_a_gated_linear_attention_by_hand():
    layer, x = block("GatedLinearAttention"), tokens(2, 25)
    q, k, v = by_hand(layer, x)
    g = F.logsigmoid(layer.gk_proj(x)).unflatten(-1, (3, -1)) / 16
    o, _ = reference.gla(*(a.detach().numpy() for a in (q, k, v, g)))
    o = normed(o, layer.g_norm_swish_gate.weight)
    o = o * F.silu(layer.g_proj(x)).unflatten(-1, (3, -1))
    agree(layer(x)[0], layer.o_proj(o.flatten(-2)))


def test_a_delta_net_by_hand():
    layer, x = block("DeltaNet"), tokens(2, 25)
    q, k, v = by_hand(layer, x)
    o, _ = reference.delta_rule(
        *(a.detach().numpy() for a in (q, k, v, layer.b_proj(x).sigmoid())), qk_l2norm=True
    )
    o = normed(o, layer.o_norm.weight)
    agree(layer(x)[0], layer.o_proj(o.flatten(-2)))


def test_decays_begin_where_mamba_2s_do():
    layer = nn.GatedDeltaNet(8, num_heads=512, head_dim=1, expand_v=1)
    dt = F.softplus(layer.dt_bias.detach().double())
    assert 1e-3 * 0.999 <= dt.min() and dt.max() <= 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(0.01)) < 0.2  # the middle of a log-uniform
    assert layer.A_log.exp().max() <= 16 and 6 < layer.A_log.exp().mean() < 10


# ---- errors ----


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^num_v_heads: expected a multiple of num_heads = 2"):
        nn.GatedDeltaNet(D, num_heads=2, head_dim=4, num_v_heads=3)
    with pytest.raises(ValueError, match=r"^expand_k: expected 24 \* expand_k to be a multiple"):
        nn.DeltaNet(D, num_heads=5)
    with pytest.raises(ValueError, match=r"^expand_k: expected an even number"):
        nn.Retention(D, num_heads=8)
    with pytest.raises(ValueError, match=r"^num_heads: expected a size >= 1, got 0"):
        nn.DeltaNet(D, num_heads=0)
    for call, text in (
        (
            lambda: nn.GatedDeltaProduct(D, num_householder=0),
            "num_householder: expected a size >= 1",
        ),
        (lambda: nn.Mamba2(D, expand=1.3), r"expand: expected 24 \* expand to be a whole number"),
        (lambda: nn.Mamba2(D, headdim=7), "headdim: expected a divisor of 48, got 7"),
        (
            lambda: nn.Mamba2(D, headdim=8, ngroups=4),
            "ngroups: expected a divisor of 6 heads, got 4",
        ),
        (lambda: nn.Mamba2(D, d_state=0), "d_state: expected a size >= 1, got 0"),
        (lambda: nn.Mamba2(D, headdim=8, d_conv=0), "d_conv: expected a size >= 1, got 0"),
        (
            lambda: nn.Mamba2(D, headdim=8, A_init_range=(0, 1)),
            r"A_init_range: expected 0 < low <= high < inf, got \(0, 1\)",
        ),
        (
            lambda: block("Mamba2")(tokens(2)),
            r"x: expected \[B,T,d_model\] with d_model = 24, got \(2, 24\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            call()
    for call, text in (
        (lambda: nn.RWKV6(D, num_heads=5), r"expand_k: expected 24 \* expand_k to be a multiple"),
        (lambda: nn.RWKV6(D, gate_low_rank_dim=0), "gate_low_rank_dim: expected a size >= 1"),
        (lambda: nn.RWKV6(D, expand_k=0), "expand_k: expected a size >= 1, got 0"),
        (lambda: nn.RWKV7(D, head_dim=7), "head_dim: expected a divisor of 24, got 7"),
        (lambda: nn.RWKV7(D, head_dim=6, v_low_rank_dim=0), "v_low_rank_dim: expected a size"),
        (
            lambda: nn.RWKV7(D, head_dim=6, layer_idx=2, num_layers=2),
            "layer_idx: expected less than num_layers = 2, got 2",
        ),
        (
            lambda: rwkv7()(tokens(1, 2), v_first=tokens(1, 2)),
            "v_first: expected None in layer 0, which makes it",
        ),
        (
            lambda: rwkv7(1)(tokens(1, 2), v_first=tokens(1, 3)),
            r"v_first: expected \[B,T,H\*V\] = \(1, 2, 24\), got \(1, 3, 24\)",
        ),
        (
            lambda: rwkv7(1).step(tokens(2), rwkv7(1).zeros_state(2), tokens(2, 1)),
            r"v_first: expected \[N,H\*V\] = \(2, 24\), got \(2, 1, 24\)",
        ),
        (lambda: block("RWKV6")(tokens(2)), r"x: expected \[B,T,d_model\] with d_model = 24"),
        (lambda: nn.Titans(D, num_heads=2, num_v_heads=3), "num_v_heads: expected a multiple of"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            call()
    with pytest.raises(TypeError, match=r"^v_first: expected the values of layer 0, .* NoneType"):
        rwkv7(1)(tokens(1, 2))
    with pytest.raises(TypeError, match=r"^x: expected float64 \(the dtype of r_proj\), got float"):
        rwkv7()(tokens(1, 2).float())
    with pytest.raises(TypeError, match=r"^state: expected a linattn.nn.State, got Tensor"):
        block("RWKV6").step(tokens(1), torch.zeros(1, 2, 6, 12))
    layer = block("DeltaNet")
    with pytest.raises(ValueError, match=r"^x: expected \[B,T,d_model\] .* = 24, got \(2, 24\)"):
        layer(tokens(2))
    with pytest.raises(ValueError, match=r"^x: expected \[N,d_model\] .* got \(1, 2, 24\)"):
        layer.step(tokens(1, 2), layer.zeros_state(1))
    with pytest.raises(
        TypeError, match=r"^x: expected float64 \(the dtype of q_proj\), got float32"
    ):
        layer(tokens(1, 2).float())
    for call in (lambda S: layer(tokens(1, 2), S), lambda S: layer.step(tokens(1), S)):
        with pytest.raises(TypeError, match=r"^state: expected a linattn.nn.State, got Tensor"):
            call(torch.zeros(1, 2, 12, 12))
