"""linattn.compat.fla.use_linattn: fla's own layers on a CPU, and our layers with their weights."""

import inspect
import math
from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="fla's layers import triton")
layers = pytest.importorskip("fla.layers", reason="needs flash-linear-attention")

from support.blocks import agree  # noqa: E402

from linattn import nn  # noqa: E402
from linattn.compat import _fla_modules, fla  # noqa: E402
from linattn.compat.fla import use_linattn  # noqa: E402
from linattn.testing import RMS_BOUND  # noqa: E402

# fla's layers warn of what their authors recommend
# fla 0.6 still gives the cache the name that it had before transformers 5.24
pytestmark = pytest.mark.filterwarnings(
    "ignore:(According to Bo|The correction_factor is set|`past_key_values` is deprecated)"
)

F = torch.nn.functional
D, T = 32, 70
HEADS = {"hidden_size": D, "num_heads": 2, "layer_idx": 0}
DELTA = HEADS | {"head_dim": 16}
# The arguments that each layer is made with.
LAYERS = {
    "ABCAttention": HEADS | {"num_slots": 4},
    "BasedLinearAttention": {
        "hidden_size": D,
        "num_heads": 2,
        "num_key_value_heads": 2,
        "feature_dim": 4,
    },
    "Comba": DELTA,
    "DeltaNet": HEADS,
    "GatedDeltaNet": DELTA,
    "GatedDeltaNet2": DELTA,
    "GatedDeltaProduct": DELTA,
    "GatedLinearAttention": HEADS,
    "GatedSlotAttention": HEADS | {"num_slots": 4},
    "HGRN2Attention": HEADS | {"expand_ratio": 16},
    "HGRNAttention": {"hidden_size": D, "layer_idx": 0},
    "KimiDeltaAttention": DELTA,
    "LightNetAttention": HEADS,
    "LinearAttention": HEADS,
    "MultiScaleRetention": HEADS,
    "PrecondGatedDeltaNet": DELTA,
    "PrecondKDA": DELTA,
    "RWKV6Attention": HEADS | {"proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    "RWKV7Attention": {
        "hidden_size": D,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_idx": 0,
    },
    "ReBasedLinearAttention": {
        "hidden_size": D,
        "num_heads": 2,
        "num_key_value_heads": 2,
        "feature_dim": 4,
    },
    "RodimusAttention": {"hidden_size": D, "layer_idx": 0},
}
# These keep no cache; fla's ABC begins its sums anew with each call.
NO_CACHE = {"ABCAttention", "BasedLinearAttention", "ReBasedLinearAttention"}
# Why the rest of fla.ops is not here.
SOFTMAX = "a softmax over all tokens"
NOT_OURS = {
    "chunk_cyfa": "a softmax over slots that turn",
    "fused_recurrent_cyfa": "a softmax over slots that turn",
    "chunk_log_linear_attn": "log T states",
    "chunk_mesa_net": "each read solves a linear system",
    "chunk_momentum_delta_rule": "a momentum with a key and a rate of its own",
    "fused_recurrent_momentum_delta_rule": "a momentum with a key and a rate of its own",
    "fused_attnres": "a softmax over layers",
    "fused_chunk_delta_rule": "fla's raises NotImplementedError",
    "fused_chunk_gla": "fla's raises NotImplementedError",
    "parallel_attn": SOFTMAX,
    "parallel_forgetting_attn": SOFTMAX,
    "parallel_nsa": SOFTMAX,
    "parallel_parallax": SOFTMAX,
    "parallel_path_attn": SOFTMAX,
    "parallel_stickbreaking_attn": "a stick-breaking weight of all tokens",
    "parallel_wall_attn": SOFTMAX,
    "parallel_wall_attn_decode": SOFTMAX,
}
PACKAGES = "comba cp gated_delta_product gdn2 hgrn lightnet rebased rwkv7".split()


def made(name, **more):
    """A layer in float64 whose parameters are all stirred: some of fla's begin at zero."""
    torch.manual_seed(0)
    layer = getattr(layers, name)(**LAYERS[name] | more).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def tokens(*shape):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def cache():
    return import_module("fla.models.utils").Cache()


every_layer = pytest.mark.parametrize("name", LAYERS)


# ---- the names ----


def theirs():
    """fla's functions by their names: those of fla.ops, and of packages below it."""
    ops = import_module("fla.ops")
    found = {name: getattr(ops, name) for name in ops.__all__}
    for package in PACKAGES:
        module = import_module(f"fla.ops.{package}")
        found |= {name: getattr(module, name) for name in module.__all__ if "naive" not in name}
    return found


def test_every_function_of_fla_is_here_or_computes_something_else():
    ops = set(import_module("fla.ops").__all__)
    assert ops - set(fla.__all__) == set(NOT_OURS)
    assert set(fla.__all__) - {"use_linattn"} <= set(theirs())


@pytest.mark.parametrize("name", [name for name in fla.__all__ if name != "use_linattn"])
def test_the_parameters_are_flas(name):
    """The names, order and defaults. fla reads some from **kwargs; they are keyword-only here."""
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    got, want = (
        [
            (p.name, p.default)
            for p in inspect.signature(f).parameters.values()
            if p.kind in positional
        ]
        for f in (getattr(fla, name), theirs()[name])
    )
    # before fla renamed it; ours take both names
    want = [(n, d) for n, d in want if n != "transpose_state_layout" or (n, d) in got]
    assert got == want


# ---- the layers ----


@every_layer
def test_a_layer_runs_on_a_cpu(name):
    """Forward and backward; without ours it needs Triton's kernels."""
    layer, x = made(name), tokens(2, T).requires_grad_()
    with use_linattn(layer) as ours:
        y = first(layer(x))
        y.square().sum().backward()
    assert ours.layers and y.shape == x.shape
    grads = {n: p.grad for n, p in layer.named_parameters()} | {"x": x.grad}
    nothing = [n for n, g in grads.items() if g is None or not g.abs().sum() > 0]
    assert nothing == []
    assert "forward" not in vars(layer)  # it is as it was


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NO_CACHE])
def test_a_cache_gives_what_the_sequence_gives(name):
    """A prompt in chunks, then tokens, of a layer in evaluation: fla takes the recurrent form."""
    layer, x = made(name).eval(), tokens(2, T)
    with use_linattn(layer), torch.no_grad():
        want, kept = first(layer(x)), cache()
        cuts = [slice(0, T - 3), *(slice(t, t + 1) for t in range(T - 3, T))]
        got = [first(layer(x[:, cut], past_key_values=kept, use_cache=True)) for cut in cuts]
    agree(torch.cat(got, 1), want)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention", "RWKV6Attention"])
def test_padding_and_packed_sequences(name):
    layer, x = made(name).eval(), tokens(2, T)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :20] = 0
    with use_linattn(layer), torch.no_grad():
        padded = first(layer(x, attention_mask=mask))
        alone = first(layer(x[:1, 20:]))
        edges = torch.tensor([0, 30, T])
        packed = first(layer(x[:1], cu_seqlens=edges))
        second = first(layer(x[:1, 30:]))
    agree(padded[:1, 20:], alone)
    agree(packed[:, 30:], second)


# fla computes the angles of the first and the gates of the others in float32, whatever it is given.
IN_FLOAT32 = {"MultiScaleRetention", "GatedDeltaProduct", "Comba"}


def as_float32(got, want, gradient=False):
    """By the bound of the acceptance rule."""
    error = (got - want).square().mean() / want.square().mean()
    assert error.sqrt() < (1 + gradient) * RMS_BOUND["float32"]


OURS = {
    "DeltaNet": lambda **o: nn.DeltaNet(D, num_heads=2, **o),
    "GatedDeltaNet": lambda **o: nn.GatedDeltaNet(D, num_heads=2, head_dim=16, **o),
    "GatedDeltaProduct": lambda **o: nn.GatedDeltaProduct(D, num_heads=2, head_dim=16, **o),
    "Comba": lambda **o: nn.Comba(D, num_heads=2, head_dim=16, **o),
    "KimiDeltaAttention": lambda **o: nn.KimiDeltaAttention(D, num_heads=2, head_dim=16, **o),
    "GatedLinearAttention": lambda **o: nn.GatedLinearAttention(D, num_heads=2, **o),
    "MultiScaleRetention": lambda **o: nn.Retention(D, num_heads=2, **o),
    "RWKV6Attention": lambda **o: nn.RWKV6(
        D, num_heads=2, proj_low_rank_dim=4, gate_low_rank_dim=4, **o
    ),
}
OPTIONS = [
    *((name, {}) for name in OURS),
    *((name, {"conv_bias": True}) for name in list(OURS)[:5]),
    ("DeltaNet", {"use_gate": True}),
    ("GatedDeltaNet", {"use_gate": False}),
    ("GatedDeltaNet", {"use_gate": False, "conv_bias": True}),
    ("GatedDeltaProduct", {"use_output_gate": False}),
    ("Comba", {"use_output_gate": False}),
]


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=["-".join([n, *o, *map(str, o.values())]) for n, o in OPTIONS]
)
def test_our_layer_with_flas_weights_and_flas_with_ours(name, options):
    """load_state_dict both ways, the same output and gradients, and the state by steps."""
    theirs, x = made(name, **options), tokens(2, T)
    ours = OURS[name](**options).double()
    ours.load_state_dict(theirs.state_dict())
    back = made(name, **options)
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.zero_()
    back.load_state_dict(ours.state_dict())
    near = as_float32 if name in IN_FLOAT32 else agree
    more = {"gradient": True} if name in IN_FLOAT32 else {}
    y, state = ours(x[:, : T - 1])
    with use_linattn(theirs), use_linattn(back):
        want = first(theirs(x))
        agree(first(back(x)), want)
        near(y, want[:, : T - 1])
        weights = torch.randn_like(want)
        (want * weights).sum().backward()
    near(ours.step(x[:, T - 1], state), want[:, T - 1].detach())
    (ours(x)[0] * weights).sum().backward()
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    for n, parameter in ours.named_parameters():
        near(parameter.grad, grads[n], **more)


def test_rwkv7_with_flas_weights():
    """Its layer gives the first layer's values to the others, so it is called otherwise."""
    theirs, x = made("RWKV7Attention"), tokens(2, T)
    ours = nn.RWKV7(D, head_dim=16, layer_idx=0, num_layers=2).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = layers.RWKV7Attention(
        **LAYERS["RWKV7Attention"],
        **{
            f"{name}_low_rank_dim": getattr(ours, f"{short}_lora").lora[0].out_features
            for name, short in (("decay", "w"), ("gate", "g"), ("a", "a"))
        },
    ).double()
    theirs.load_state_dict(ours.state_dict())
    with use_linattn(theirs):
        agree(first(theirs(x)), ours(x)[0])


# ---- models ----


def test_a_model_and_its_generation():
    """Four tokens by a cache are those of whole sequences."""
    models = import_module("fla.models")
    torch.manual_seed(0)
    config = models.GatedDeltaNetConfig(
        hidden_size=D, num_hidden_layers=2, num_heads=2, head_dim=16, vocab_size=50
    )
    model = models.GatedDeltaNetForCausalLM(config).eval()
    prompt = torch.randint(0, 50, (1, 9))
    with use_linattn(model) as ours, torch.no_grad():
        made = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        logits = model(made[:, :-1]).logits
    assert len(ours.layers) >= 2 * 4
    assert made[:, 9:].tolist() == logits[:, 8:].argmax(-1).tolist()
    assert "Gated" in repr(ours) and "no longer" in repr(ours)


def test_other_layers_stay_as_they_are():
    one, two = made("GatedDeltaNet"), made("GatedDeltaNet")
    with use_linattn(one):
        assert "forward" in vars(one) and "forward" not in vars(two)
        assert "forward" in vars(one.o_norm) and "forward" not in vars(two.o_norm)


def test_a_function_with_another_parameter_is_refused():
    """A layer of a later fla, whose op takes what ours does not know."""
    code = "def chunk_gla(q, k, v, g, turn): ...\nclass L(nn.Module):\n  def forward(self, x):\n"
    scope = {"nn": torch.nn, "__name__": "fla.layers.later"}
    exec(code + "    return chunk_gla(x, x, x, x, 1)", scope)
    with pytest.raises(ValueError, match=r"^model: : chunk_gla: expected .*, got turn besides$"):
        use_linattn(scope["L"]())


# ---- the functions beside the ops: against fla's own in plain PyTorch, where it has them ----


def module(name):
    return import_module(f"fla.modules.{name}")


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_norms(biased, prenorm):
    ref = module("norm.layernorm")
    x, residual = tokens(3, 5), tokens(3, 5).flip(0)
    weight, bias = tokens()[None].squeeze(0), tokens().flip(0) if biased else None
    for n in ("layer_norm", "rms_norm"):
        got = getattr(_fla_modules, n)(x, weight, bias, residual, 1e-3, prenorm)
        want = getattr(ref, f"{n}_ref")(x, weight, bias, residual, 1e-3, prenorm)
        agree(got, want)
    got = _fla_modules.group_norm(x, weight, bias, eps=1e-3, num_groups=4, prenorm=prenorm)
    agree(got, ref.group_norm_ref(x, weight, bias, 4, eps=1e-3, prenorm=prenorm))
    half = _fla_modules.rms_norm(x.half(), weight.half(), None, residual_in_fp32=True, prenorm=True)
    assert half[0].dtype == torch.half and half[1].dtype == torch.float


def test_gated_norms():
    x, g, weight = tokens(3, 5), tokens(3, 5).flip(0), tokens()
    for activation, by in (("swish", F.silu), ("sigmoid", torch.sigmoid)):
        rms = F.rms_norm(x, (D,), weight, 1e-3) * by(g)
        agree(_fla_modules.rms_norm_gated(x, g, weight, None, activation, eps=1e-3), rms)
        plain = F.layer_norm(x, (D,), weight, None, 1e-3) * by(g)
        agree(_fla_modules.layer_norm_gated(x, g, weight, None, activation, eps=1e-3), plain)
    with pytest.raises(ValueError, match=r"^activation: expected 'swish', 'silu' or 'sigmoid'"):
        _fla_modules.rms_norm_gated(x, g, weight, None, "relu")
    W = tokens(4)
    rms = F.rms_norm(x, (D,), weight, 1e-3)
    got = _fla_modules.rms_norm_swish_gate_linear(x, g, weight, None, W, None, eps=1e-3)
    agree(got, F.linear(rms * F.silu(g), W))
    got, total = _fla_modules.rms_norm_linear(x, weight, None, W, None, eps=1e-3, prenorm=True)
    agree(got, F.linear(rms, W))
    agree(total, x)
    ref = module("norm.layernorm_gated").rms_norm_ref
    for before in (True, False):
        for size in (None, 8):
            got = _fla_modules.rmsnorm_fn(
                x.float(), weight.float(), None, g.float(), 1e-3, size, before
            )
            want = ref(x, weight, None, g, 1e-3, size, before)
            torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)


def test_token_shift():
    ref = module("token_shift").token_shift_ref
    x, edges = tokens(1, 12), torch.tensor([0, 5, 6, 12])
    agree(_fla_modules.token_shift(x), ref(x))
    agree(_fla_modules.token_shift(x, edges), ref(x, edges))
    whole, last = _fla_modules.token_shift(x, output_cache=True)
    half, kept = _fla_modules.token_shift(x[:, :7], output_cache=True)
    agree(torch.cat([half, _fla_modules.token_shift(x[:, 7:], cache=kept)], 1), whole)
    agree(last, x[:, -1:])
    _, kept = _fla_modules.token_shift(x, torch.tensor([0, 5, 5, 12]), tokens(3), True)
    agree(kept[:, 0], torch.stack([x[0, 4], tokens(3)[1], x[0, 11]]))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_embedding(interleaved):
    ref = module("rotary.ops").rotary_embedding_ref
    x = tokens(2, 6).reshape(2, 6, 2, 16)
    angles = torch.outer(torch.arange(20.0), 0.5 ** torch.arange(4.0)).double()
    cos, sin = angles.cos(), angles.sin()
    turn = _fla_modules.rotary_embedding
    agree(turn(x, cos, sin, interleaved), ref(x, cos[:6], sin[:6], interleaved))
    got = turn(x, cos, sin, interleaved, seqlen_offsets=torch.tensor([3, 8]))
    for n, start in enumerate((3, 8)):
        agree(got[n], ref(x[n : n + 1], cos[start:][:6], sin[start:][:6], interleaved)[0])
    packed = turn(x[:1], cos, sin, interleaved, cu_seqlens=torch.tensor([0, 2, 6]))
    agree(packed[:, 2:], ref(x[:1, 2:], cos[:4], sin[:4], interleaved))


def test_activations():
    x, y = tokens(5), tokens(5).flip(0)
    names = module("activations.ops").ACT2FN
    assert set(_fla_modules.ACTIVATIONS) == set(names)
    for n, want in (
        ("swish", F.silu(x)),
        ("sqrelu", x.relu() ** 2),
        ("logsigmoid", -F.softplus(-x)),
    ):
        agree(_fla_modules.ACTIVATIONS[n](x), want)
    by_hand = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    agree(_fla_modules.ACTIVATIONS["gelu"](x), by_hand)
    agree(_fla_modules.swiglu(x, y), x * x.sigmoid() * y)
    W = tokens(4)
    agree(_fla_modules.swiglu_linear(x, y, W, None), F.linear(x * x.sigmoid() * y, W))
    agree(_fla_modules.elu_p1(x), torch.where(x > 0, x + 1, x.exp()))
    agree(_fla_modules.l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def test_the_helpers_of_rwkv7_and_kda():
    update = import_module("fla.ops.rwkv7.fused_k_update").k_update_ref
    correct = import_module("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref
    mix = import_module("fla.ops.rwkv7.fused_addcmul").torch_addcmul_rwkv7
    k, a = tokens(2, 5), tokens(2, 5).sigmoid()
    agree(_fla_modules.fused_k_rwkv7(k, a, k[0, 0]), update(k, a, k[0, 0]))
    heads = k.reshape(2, 5, 2, 16)
    args = k, heads, heads.flip(0), heads[0, 0], heads.flip(1), a
    agree(_fla_modules.gate_output_correction(*args), correct(*args))
    shares = tokens(6)[:, None, None]
    for some in (shares, shares[:5]):
        agree(_fla_modules.fused_addcmul_rwkv7(k, a, *some), mix(k, a, *some))
    g, A_log, dt_bias = heads, torch.tensor([0.1, 0.5]).double(), tokens()
    got = _fla_modules.fused_kda_gate(g, A_log, dt_bias, output_dtype=torch.float64)
    u = g + dt_bias.reshape(2, 16)
    agree(got, -A_log.exp()[:, None] * F.softplus(u))
    got = _fla_modules.fused_kda_gate(g, A_log, dt_bias, -5.0, output_dtype=torch.float64)
    agree(got, -5 * (A_log.exp()[:, None] * u).sigmoid())


@pytest.mark.parametrize("W", [1, 4])
def test_the_short_convolution(W):
    """fla's cache has W inputs, of which the oldest is never read."""
    x, weight, bias = tokens(2, 9), tokens(W).mT, tokens()
    convolve, update = _fla_modules.causal_conv1d, _fla_modules.causal_conv1d_update
    padded = F.pad(x.mT, (W - 1, 0))
    want = F.silu(F.conv1d(padded, weight[:, None], bias, groups=D)).mT
    y, last = convolve(x, weight, bias, x, activation="silu", output_final_state=True)
    agree(y, want + x)
    agree(last, F.pad(x.mT, (W, 0))[..., -W:])
    _, kept = convolve(x[:, :6], weight, bias, activation="silu", output_final_state=True)
    then, end = convolve(x[:, 6:8], weight, bias, None, kept, True, "silu")
    agree(then, want[:, 6:8])
    assert update(x[:, 8:], end, x[:, 8:], weight, bias, "silu")[1] is end
    agree(end, last)
    packed, ends = convolve(
        x[:1],
        weight,
        bias,
        activation="silu",
        cu_seqlens=torch.tensor([0, 2, 9]),
        output_final_state=True,
    )
    agree(packed[:, :2], want[:1, :2])
    agree(packed[:, 2:], convolve(x[:1, 2:], weight, bias, activation="silu")[0])
    agree(ends[1], x[0, 9 - W :].mT)
    with pytest.raises(ValueError, match=r"^weight: expected a tensor \[D,W\], got None$"):
        convolve(x)
    with pytest.raises(TypeError, match=r"^cp_context: expected a context of .*, got .*ndarray"):
        convolve(x, weight, cp_context=np.zeros(1))
