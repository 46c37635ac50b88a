"""linattn.compat.transformers: the families of Mamba and Mamba-2, MiniMax, RecurrentGemma, and
those with a short convolution alone. They give the same results as before. Afterwards they are as
they were."""

import copy
import functools
import inspect
import os
import re
from pathlib import Path

import numpy as np
import pytest
from support import static_cache
from support.device import imported
from support.tensors import to_numpy

from linattn.testing import assert_accurate

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = imported("torch")
transformers = imported("transformers")

from linattn.compat import transformers as compat  # noqa: E402 (needs PyTorch)
from linattn.compat.transformers import _decode, use_linattn  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 6, "use_mamba_kernels": False}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
PLAIN = {"residual_in_fp32": False}  # so that a model in float64 is one
# every expert for every token: a router that chooses jumps where it is undecided
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}

INKLING = {
    "unpadded_vocab_size": 96,
    "head_dim": 12,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "sliding_window_size": 16,
    "rel_extent": 32,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
}

CONVOLVES = {"causal_conv1d_fn", "causal_conv1d_update"}
SCANS = CONVOLVES | {"mamba_selective_scan", "mamba_selective_state_update"}
SCANS2 = CONVOLVES | {
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba2_split_conv1d_scan_combined",
}
# the functions that are ours, and a small model
FAMILIES = {
    "mamba": (SCANS | {"mamba_inner_fn"}, SIZES | PLAIN | {"state_size": 8}),
    "falcon_mamba": (SCANS | {"mamba_inner_fn"}, SIZES | PLAIN | {"state_size": 8}),
    "jamba": (
        SCANS,
        SIZES
        | ATTENTION
        | MAMBA
        | {
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "zamba": (SCANS, SIZES | ATTENTION | MAMBA | {"num_hidden_layers": 9, "n_mamba_heads": 2}),
    "mamba2": (
        SCANS2,
        SIZES | PLAIN | {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2},
    ),
    "bamba": (SCANS2, SIZES | ATTENTION | MAMBA2 | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        SCANS2,
        SIZES
        | ATTENTION
        | MAMBA2
        | EXPERTS
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "falcon_h1": (SCANS2, SIZES | ATTENTION | MAMBA2 | {"mamba_d_ssm": 96, "head_dim": 12}),
    "nemotron_h": (
        SCANS2,
        SIZES
        | ATTENTION
        | PLAIN
        | {
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "head_dim": 12,
        },
    ),
    "zamba2": (
        SCANS2,
        SIZES
        | ATTENTION
        | {
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 6,
            "mamba_ngroups": 2,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": (CONVOLVES, SIZES | ATTENTION | CONVOLUTION),
    "lfm2_moe": (
        CONVOLVES,
        SIZES
        | ATTENTION
        | CONVOLUTION
        | {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"num_dense_layers": 1},
    ),
    "lfm3": (CONVOLVES, SIZES | ATTENTION | CONVOLUTION),
    "inkling_text": (CONVOLVES, SIZES | ATTENTION | INKLING | {"n_shared_experts": 1}),
    "inkling2_text": (CONVOLVES, SIZES | ATTENTION | INKLING),
    "inkling2_loop_text": (
        CONVOLVES,
        SIZES
        | {name: n for name, n in ATTENTION.items() if name != "intermediate_size"}
        | INKLING
        | {"n_layers_per_attn_res_block": 1, "loop_num_passes": 2, "loop_gate_rank": 4}
        | {"loop_layer_index_start": 1, "loop_layer_index_end": 2},
    ),
    "minimax": (
        {"lightning_attention"},
        SIZES
        | ATTENTION
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 12, "block_size": 16},
    ),
    "xlstm": (
        {"matrix_lstm"},
        # transformers' cache rounds the width of all keys up to a multiple of 64
        {**SIZES, "hidden_size": 128, "num_heads": 4, "qk_dim_factor": 0.5, "chunk_size": 16}
        | {"mode": "inference", "return_last_states": True},
    ),
    "rwkv": ({"rwkv_linear_attention"}, SIZES | {"intermediate_size": 64, "context_length": 64}),
    "recurrent_gemma": (
        {"real_gated_lru"},
        SIZES
        | ATTENTION
        | {
            "lru_width": 48,
            "attention_window_size": 64,
            "block_types": ["recurrent", "attention"],
            "head_dim": 12,
        },
    ),
}
there = [name for name in FAMILIES if name in transformers.CONFIG_MAPPING]
families = pytest.mark.parametrize("name", there)
# The state of this model's layers lies in the layers, not in the cache that a caller keeps.
STATE_IN_LAYERS = ("recurrent_gemma",)
NO_BEAMS = ("rwkv", "xlstm")  # transformers cannot reorder these models' caches
# transformers' own functions fail in a static cache of these: its sizes do not fit their attention
NO_STATIC_CACHE = ("inkling_text", "inkling2_text", "inkling2_loop_text")


@functools.cache
def model(name):
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(FAMILIES[name][1]))
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return made.float().eval()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ids(*shape, seed=0):
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(seed))


def padded(tokens, n=7):
    """A mask whose first row begins with padding."""
    mask = torch.ones_like(tokens)
    mask[0, :n] = 0
    return mask


def agree(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))


def accurate(got, exact, fallback, name, dtype=np.float32):
    """By the acceptance rule. exact is ours in float64: the fallback must be near it too."""
    size = float(exact.abs().max())
    near = 1e-4 if dtype == np.float32 else 0.05
    torch.testing.assert_close(fallback.double(), exact, rtol=0, atol=near * size)
    assert_accurate(to_numpy(got), to_numpy(exact), to_numpy(fallback), dtype=dtype, name=name)


def test_every_family_is_here():
    folder = Path(transformers.__file__).parent / "models"
    defined = re.compile(r"^def (mamba2?_(selective_scan|chunk_scan)|causal_conv1d_fn)\(", re.M)
    delta = re.compile(r"^def \w*chunk_(gated_delta_rule|kda|kimi_delta_attention)\(", re.M)
    texts = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in folder.glob("*/modeling_*.py")
    }
    installed = {x for x, text in texts.items() if defined.search(text) and not delta.search(text)}
    tried = {name.removesuffix("_text") for name in there}
    own = {name for name in tried if not defined.search(texts[name])}
    assert installed == tried - own
    assert own <= {"minimax", "recurrent_gemma", "rwkv", "xlstm"}


def hidden(made, tokens):
    """What the logits are made of. Some models round logits to float32, float64 ones too."""
    return made.base_model(tokens)[0]


def in_dtype(made, dtype):
    """A copy. Parameters that transformers keeps in float32 when it loads such a model stay so."""
    changed = copy.deepcopy(made).to(dtype)
    kept = getattr(made, "_keep_in_fp32_modules_strict", None) or ()
    for name, p in changed.named_parameters():
        if any(part in name for part in kept):
            p.data = p.data.float()
    return changed


def in_float64(made, tokens):
    """By ours: the reference's own functions round to float32."""
    wide = in_dtype(made, torch.float64)
    with use_linattn(wide):
        return hidden(wide, tokens)


@families
def test_a_forward_pass_is_accurate(name):
    made, tokens = model(name), ids(2, 37)
    with torch.no_grad():
        want, exact = hidden(made, tokens), in_float64(made, tokens)
        with use_linattn(made) as ours:
            got = hidden(made, tokens)
        again = hidden(made, tokens)
    assert {function for used in ours.layers.values() for function in used} == FAMILIES[name][0]
    accurate(got, exact, want, name)
    assert torch.equal(again, want)
    assert not torch.equal(got, want)  # ours ran, and rounds in another order


@pytest.mark.parametrize(
    "name, beams", [(name, n) for name in there for n in (1, 3) if n == 1 or name not in NO_BEAMS]
)
def test_the_same_tokens_are_generated(name, beams):
    """With a cache, and the prompt of the first row padded on the left."""
    made, tokens = model(name), ids(2, 15)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "use_cache": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    options |= {"attention_mask": padded(tokens)}
    want = made.generate(tokens, **options)
    with use_linattn(made):
        got = made.generate(tokens, **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        agree(a, b)


@pytest.mark.parametrize("name", [name for name in there if name not in NO_STATIC_CACHE])
def test_a_static_cache(name):
    made, tokens = model(name), ids(2, 15)
    how = {"attention_mask": padded(tokens), "max_new_tokens": 5}
    want = static_cache.generated(made, tokens, **how)
    with use_linattn(made):
        got = static_cache.generated(made, tokens, **how)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [name for name in ("mamba", "bamba", "xlstm") if name in there])
def test_a_static_cache_of_a_compiled_model(name):
    """One graph for the prompt, and one for all tokens."""
    made, tokens = model(name), ids(2, 15)
    want = static_cache.generated(made, tokens, max_new_tokens=5)
    with use_linattn(made):
        got, graphs, breaks = static_cache.by_a_compiled_model(made, tokens, max_new_tokens=5)
    assert torch.equal(got, want)
    assert (graphs, breaks) == (2, 0)


@families
def test_left_padding(name):
    made, tokens = model(name), ids(2, 20)
    mask = padded(tokens)
    with torch.no_grad():
        want = made(tokens, attention_mask=mask).logits
        with use_linattn(made):
            got = made(tokens, attention_mask=mask).logits
    agree(got[mask > 0], want[mask > 0])


@families
def test_gradients(name):
    made, tokens = model(name), ids(2, 21)
    found = []
    for ours in (False, True):
        made.zero_grad()
        made.train()  # where a layer looks for one kernel for all of it
        replaced = use_linattn(made) if ours else None
        made(tokens, labels=tokens, use_cache=False).loss.backward()
        if replaced is not None:
            replaced.restore()
        made.eval()
        found.append({n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None})
    made.zero_grad()
    for layer in made.modules():  # a state that is kept there has a graph behind it
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states = None
    want, got = found
    assert want.keys() == got.keys()
    for which in want:
        agree(got[which], want[which])


def named_cache(made):
    names = inspect.signature(made.forward).parameters
    (name,) = {"past_key_values", "cache_params", "cache", "state"} & set(names)
    return name


def in_parts(made, tokens, ours_too):
    """The logits of a text in parts, whose cache goes from one part to the next, and from our
    functions to the model's own."""
    cache, parts = None, []
    cached = named_cache(made)
    for use, piece in (
        (True, slice(0, 11)),
        (True, slice(11, 23)),
        (False, slice(23, 24)),
        (True, slice(24, 25)),
        (True, slice(25, 26)),
        (True, slice(26, 29)),
    ):
        ours = use_linattn(made) if use and ours_too else None
        out = made(tokens[:, piece], use_cache=True, **{cached: cache})
        if ours is not None:
            ours.restore()
        cache = out[cached]
        parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", [name for name in there if name not in STATE_IN_LAYERS])
def test_a_text_in_parts(name):
    made, tokens = model(name), ids(2, 29)
    with torch.inference_mode():
        want, got = (in_parts(made, tokens, ours_too) for ours_too in (False, True))
    agree(got, want)


MAMBA2S = [name for name in there if FAMILIES[name][0] == SCANS2]
NORMED = {"mamba_rms_norm": True}  # Falcon-H1 has a norm on demand


@pytest.mark.parametrize(
    "name, options",
    [(name, {}) for name in MAMBA2S]
    + [
        ("falcon_h1", NORMED | {"mamba_norm_before_gate": first})
        for first in (False, True)
        if "falcon_h1" in there
    ],
    ids=str,
)
def test_a_token_of_mamba2_in_one_call_is_that_of_the_layer(name, options, monkeypatch):
    """With a cache, the layer's own method has the same token and the same states."""
    calls, real = [], _decode.layer_step
    monkeypatch.setattr(
        _decode, "layer_step", lambda *args, **x: (calls.append(1), real(*args, **x))[1]
    )
    config = transformers.AutoConfig.for_model(
        name.removesuffix("_text"), **copy.deepcopy(FAMILIES[name][1]) | options
    )
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    tokens = ids(2, 15)
    layers = [layer for layer in made.modules() if type(layer).__name__ in _decode._KINDS]
    with use_linattn(made), torch.no_grad():
        out = made(tokens[:, :-1], use_cache=True)
        cached = named_cache(made)
        one, other = out[cached], copy.deepcopy(out[cached])
        assert not calls
        got = made(tokens[:, -1:], **{cached: one}, use_cache=True)
        assert len(calls) == len(layers) > 0
        calls.clear()
        with torch.enable_grad():  # a call that may be recorded
            want = made(tokens[:, -1:], **{cached: other}, use_cache=True)
        assert not calls
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    for layer in layers:
        a, b = one.layers[layer.layer_idx], other.layers[layer.layer_idx]
        torch.testing.assert_close(a.recurrent_states, b.recurrent_states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.conv_states, b.conv_states, rtol=1e-4, atol=1e-4)


@families
def test_bfloat16(name):
    """Over a whole model any two roundings drift apart: the errors are compared as wholes."""
    made, tokens = in_dtype(model(name), torch.bfloat16), ids(2, 37)
    with torch.no_grad():
        want, exact = hidden(made, tokens), in_float64(made, tokens)
        with use_linattn(made):
            got = hidden(made, tokens)
    assert got.dtype == torch.bfloat16
    ours, theirs = ((x.double() - exact).norm() for x in (got, want))
    assert ours < 1.25 * theirs < 0.1 * exact.norm()


@pytest.mark.parametrize("name", [name for name in ("bamba", "lfm2") if name in there])
def test_packed_sequences(name):
    """transformers refuses them without kernels for a GPU."""
    made, tokens = model(name), ids(1, 30)
    packed = {
        "seq_idx": torch.tensor([[0] * 11 + [1] * 19], dtype=torch.int32),
        "position_ids": torch.cat([torch.arange(11), torch.arange(19)])[None],  # for attention
        "use_cache": False,
    }
    with torch.no_grad(), use_linattn(made):
        parts = [made(tokens[:, part]).logits for part in (slice(11), slice(11, 30))]
        got = made(tokens, **packed).logits
    agree(got, torch.cat(parts, 1))
    with torch.no_grad(), pytest.raises(ValueError, match="can't keep packed sequences apart"):
        made(tokens, **packed)


def test_a_layer_with_the_name_alone_is_refused():
    class SomeLightningAttention(torch.nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="SomeLightningAttention: expected a layer with qkv_proj"):
        use_linattn(torch.nn.Sequential(SomeLightningAttention()))


# ---- the functions ----

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def doubled(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@dtypes
def test_a_step_is_a_scan_of_one_token(dtype):
    torch.manual_seed(0)
    u, dt, z = torch.rand(3, 2, 6).to(dtype)
    B, C = torch.randn(2, 2, 4).to(dtype)
    A, D, bias = -torch.rand(6, 4), torch.randn(6), torch.randn(6)
    state = torch.randn(2, 6, 4).to(dtype)
    kept = state.clone()
    more = {"D": D, "dt_softplus": True, "dt_bias": bias, "z": z}
    y = compat.mamba_selective_state_update(state, u, dt, A, B, C, **more)
    wide = [x.double() for x in (kept, u, dt, A, B, C)]
    more = {name: doubled(x) for name, x in more.items()}
    want = compat.mamba_selective_state_update(*wide, **more)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound * float(want.abs().max()))
    torch.testing.assert_close(state.double(), wide[0], rtol=bound, atol=4 * bound)
    with pytest.raises(ValueError, match="seq_idx: not supported"):
        compat.mamba_selective_state_update(kept, u, dt, A, B, C, seq_idx=torch.zeros(2))


def written_out(state, x, dt, A, B, C, D, dt_bias, z):
    """Mamba-2's step with a number of each kind for each channel."""
    dt = torch.nn.functional.softplus(dt + dt_bias)[..., None]
    B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1)[:, :, None] for y in (B, C))
    state = torch.exp(dt * A) * state + dt * B * x[..., None]
    return ((state * C).sum(-1) + D * x) * torch.nn.functional.silu(z), state


@dtypes
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_of_mamba2(dtype, expanded, recorded):
    torch.manual_seed(0)
    x, dt, z = torch.rand(3, 2, 4, 3).to(dtype)
    A, D, bias = -torch.rand(4, 3, 5), torch.randn(4, 3), torch.randn(4, 3)
    B, C = torch.randn(2, 2, 2, 5).to(dtype)
    if expanded:
        dt, D, bias = (x[..., :1].expand(x.shape) for x in (dt, D, bias))
        A = A[:, :1, :1].expand(A.shape)
    state = torch.randn(2, 4, 3, 5)
    arrays = [x, dt, A, B, C, D, bias, z]
    want, after = written_out(*map(doubled, (state, *arrays)))
    x.requires_grad_(recorded)
    y = compat.mamba2_selective_state_update(
        state, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True, z=z
    )
    assert y.dtype == dtype and y.requires_grad == recorded
    bound = 4 * torch.finfo(dtype).eps
    size = float(want.abs().max())
    torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound * size)
    torch.testing.assert_close(state.double(), after, rtol=1e-5, atol=1e-5)


def averages(w, u, k, v, state):
    """RWKV-4's operator as its paper has it, token by token, without a maximum."""
    a, b, m = (x.double() for x in state)
    a, b, y = a * torch.exp(m), b * torch.exp(m), []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        own = torch.exp(u + k_t)
        y.append((a + own * v_t) / (b + own))
        a, b = (torch.exp(-torch.exp(w)) * x for x in (a, b))
        a, b = a + torch.exp(k_t) * v_t, b + torch.exp(k_t)
    return torch.stack(y, 1), a, b


@pytest.mark.parametrize("T", [1, 2, 37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_averages_of_rwkv(T, dtype):
    """Keys of up to some hundred, of both signs, and a state."""
    torch.manual_seed(0)
    k, v = (80 * torch.randn(2, T, 6)).to(dtype), torch.randn(2, T, 6).to(dtype)
    w, u = torch.randn(2, 6, dtype=torch.float64)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    a, b, m = torch.randn(2, 6).to(real), torch.rand(2, 6).to(real), torch.randn(2, 6).to(real)
    x = [w.to(real), u.to(real), k, v]
    want, a_after, b_after = averages(*map(doubled, x), (a, b, m))
    y, (a, b, m) = compat.rwkv_linear_attention(*x, state=[a, b, m])
    assert y.dtype == dtype and a.dtype == real
    bound = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound * float(want.abs().max()))
    unit = torch.exp(m.double())
    for got, exact in ((a, a_after), (b, b_after)):
        # an exponent near 200 is off by 2^-17 in float32
        torch.testing.assert_close(got.double() * unit, exact, rtol=max(bound, 1e-4), atol=0)


def test_averages_of_rwkv_have_their_gradients():
    torch.manual_seed(0)
    x = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3,), (3,), (2, 9, 3), (2, 9, 3))
    ]
    state = [torch.randn(2, 3), torch.rand(2, 3), torch.randn(2, 3)]
    state = [s.double() for s in state]

    def ours(*x):
        return compat.rwkv_linear_attention(*x, state=state)[0]

    assert torch.autograd.gradcheck(ours, x)
    dy = torch.randn(2, 9, 3, dtype=torch.float64)
    for zeros in (False, True):  # then both exponents of a read are the same
        if zeros:
            with torch.no_grad():
                x[1].zero_()
                x[2].zero_()
        want = torch.autograd.grad(averages(*x, state)[0], x, dy)
        torch.testing.assert_close(torch.autograd.grad(ours(*x), x, dy), want)


@dtypes
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("width, kept", [(4, 4), (4, 3), (3, 5), (2, 1)])
def test_a_step_of_the_convolution(dtype, activation, width, kept):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(5, width), torch.randn(5)
    x, weight, bias = (y.to(dtype) for y in (x, weight, bias))
    whole = compat.causal_conv1d_fn(x, weight, bias, activation)
    wide = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.double(), (width - 1, 0)),
        weight.double()[:, None],
        bias.double(),
        groups=5,
    )
    if activation is not None:
        wide = getattr(torch.nn.functional, activation)(wide)
    bound = 4 * torch.finfo(dtype).eps
    close = {"rtol": bound, "atol": bound * float(wide.abs().max())}
    torch.testing.assert_close(whole.double(), wide, **close)
    state = torch.nn.functional.pad(x[..., :4], (kept, 0))[..., -kept:].contiguous()
    parts = [
        compat.causal_conv1d_update(x[..., t:end], state, weight, bias, activation)
        for t, end in ((4, 5), (5, 6), (6, 8), (8, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, -1).double(), wide[..., 4:], **close)
    assert torch.equal(state, torch.nn.functional.pad(x, (kept, 0))[..., -kept:])


def test_a_convolution_keeps_packed_sequences_apart():
    x, weight = torch.randn(1, 5, 9), torch.randn(5, 4)
    index, edges = torch.tensor([[0] * 2 + [3] * 7]), torch.tensor([0, 2, 9])
    want = torch.cat(
        [compat.causal_conv1d_fn(x[..., p], weight) for p in (slice(2), slice(2, 9))], 2
    )
    for packed in ({"seq_idx": index}, {"cu_seq_lens_q": edges}, {"cu_seqlens": edges}):
        assert torch.equal(compat.causal_conv1d_fn(x, weight, **packed), want)
    with pytest.raises(ValueError, match=r"^seq_idx: expected \[1,T\], got \(2, 9\)"):
        compat.causal_conv1d_fn(x, weight, seq_idx=index.expand(2, 9))
    with pytest.raises(ValueError, match=r"^initial_states: not supported"):
        compat.causal_conv1d_fn(x, weight, initial_states=x)
