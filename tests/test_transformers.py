"""linattn.compat.transformers: small random models of every family with such layers. With linattn
they compute the same results as before. Afterwards they are as they were."""

import copy
import functools
import inspect
import os
import re
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import static_cache
from support.device import imported
from support.tensors import to_numpy

import linattn
from linattn import ops
from linattn.testing import assert_accurate

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = imported("torch")
transformers = imported("transformers")

from linattn.compat import transformers as compat  # noqa: E402 (needs PyTorch)
from linattn.compat.transformers import _decode, _replace, use_linattn  # noqa: E402
from linattn.compat.transformers._shared import FOR_OTHERS  # noqa: E402

nn = torch.nn

# ---- the models ----

LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
INDEXED = {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# every expert for every token: a router that chooses jumps where it is undecided
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GATED_DELTA = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
KIMI_DELTA = SIZES | {
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
FAMILIES = {
    "qwen3_next": GATED_DELTA | EXPERTS | LAYERS,
    "qwen3_5_text": GATED_DELTA | LAYERS,
    "qwen3_5_moe_text": GATED_DELTA | EXPERTS | LAYERS,
    "qwen4_exp_text": GATED_DELTA
    | EXPERTS
    | INDEXED
    | {
        "hc_lowrank": 8,
        "hc_count": 2,
        "indexer_budget": 256,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "lara_mini": GATED_DELTA | EXPERTS | LAYERS,
    "olmo_hybrid": GATED_DELTA | LAYERS | {"num_key_value_heads": 4},
    "kimi_linear": KIMI_DELTA
    | LAYERS
    | {"qk_rope_head_dim": 8, "num_experts": 2, "num_experts_per_token": 2},
    "bailing_hybrid": KIMI_DELTA
    | LAYERS
    | {
        "qk_rope_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_token": 2,
        "topk_group": 1,
        "num_expert_group": 1,
        "num_nextn_predict_layers": 0,
    },
    "glm5_next": {
        "vision_config": VISION,
        "text_config": KIMI_DELTA
        | INDEXED
        | {
            "q_lora_rank": 16,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 256,
            "hc_mult": 2,
            "indexer_types": ["full"] * 3,
        },
    },
}
FAMILIES["qwen3_5"] = {"vision_config": VISION, "text_config": FAMILIES["qwen3_5_text"]}
there = [name for name in FAMILIES if name in transformers.CONFIG_MAPPING]
families = pytest.mark.parametrize("name", there)
ONE = "qwen3_next"  # where any will do
T, PROMPT = 70, 50


def named_cache(m):
    """The name of a model's cache in transformers: since 5.24 it is `cache`."""
    names = inspect.signature(m.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@functools.cache
def model(name=ONE):
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(FAMILIES[name]))
    several = "text_config" in FAMILIES[name]
    auto = (
        transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    return auto.from_config(config, experts_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def text():
    """Tokens [2,T], and a mask of them: the first row begins with padding."""
    made = torch.Generator().manual_seed(1)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :20] = 0
    return torch.randint(3, 96, (2, T), generator=made) * mask, mask


def looked_at(model):
    ours = use_linattn(model)
    ours.restore()
    return ours.layers


def layers_of(model):
    return {name: model.get_submodule(name) for name in looked_at(model)}


def fallbacks_of(model):
    """The modules of transformers and the names of the functions that the layers call there."""
    return {
        (sys.modules[type(model.get_submodule(layer)).__module__], function)
        for layer, functions in looked_at(model).items()
        for function in functions
    }


def exact(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **_,
):
    """Either rule, token by token, in float64."""
    q, k, v, decay, beta = (x.double() for x in (query, key, value, g.double().exp(), beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    decay = decay if decay.dim() == 4 else decay[..., None]
    S = k.new_zeros(*k.shape[::2], k.shape[3], v.shape[3])
    if initial_state is not None:
        S = S + initial_state
    o = []
    for t in range(k.shape[1]):
        S = decay[:, t, ..., None] * S
        u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S)[:, :, 0])
        S = S + k[:, t, ..., None] * u[:, :, None]
        o.append((q[:, t, :, None] @ S)[:, :, 0] * k.shape[3] ** -0.5)
    return torch.stack(o, 1).to(query.dtype), S.float() if output_final_state else None


def exact_convolution(hidden_states, weight, bias=None, activation=None, **_):
    x = nn.functional.pad(hidden_states.double(), (weight.shape[1] - 1, 0))
    bias = None if bias is None else bias.double()
    y = nn.functional.conv1d(x, weight.double()[:, None], bias, groups=weight.shape[0])
    y = y if activation is None else getattr(nn.functional, activation)(y)
    return y.to(hidden_states.dtype)


def use_exact(model, patch):
    """From here on every model of its kind computes its delta rules in float64, and the
    convolutions of its prompts."""
    for module, function in fallbacks_of(model):
        if function == "causal_conv1d_fn":
            patch.setattr(module, function, exact_convolution)
        elif function != "causal_conv1d_update":
            patch.setattr(module, function, exact)


@pytest.fixture
def calls(monkeypatch):
    """How often each op was called, and the modes."""
    counted = Counter()

    def counting(module, name):
        real = getattr(module, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            counted[name, kwargs.get("mode", "chunk")] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("gated_delta_rule", "kda"):
        counting(ops, name)
        counting(ops, f"{name}_step")
    counting(_decode, "layer_step")
    return counted


def step_of(model, op):
    """What a token with a cache calls, in each layer."""
    kinds = {type(layer).__name__ for layer in layers_of(model).values()}
    return "layer_step" if kinds <= set(_decode._KINDS) else f"{op}_step"


def op_of(name):
    return "kda" if "kimi" in name or "bailing" in name or "glm" in name else "gated_delta_rule"


# ---- what they compute ----


def test_every_family_is_here():
    folder = Path(transformers.__file__).parent / "models"
    defined = re.compile(
        r"^def \w*(chunk|recurrent)_(gated_delta_rule|kda|kimi_delta_attention)\(", re.M
    )
    installed = {
        path.stem
        for path in folder.glob("*/modeling_*.py")
        if defined.search(path.read_text(encoding="utf-8"))
    }
    tried = {
        type(layer).__module__.rpartition(".")[2]
        for name in there
        for layer in layers_of(model(name)).values()
    }
    assert installed == tried


@families
def test_the_logits_are_accurate(name, calls):
    m, (tokens, mask) = model(name), text()
    with torch.inference_mode():
        fallback = m(tokens, attention_mask=mask).logits[mask.bool()]
        with use_linattn(m) as ours:
            logits = m(tokens, attention_mask=mask).logits[mask.bool()]
            assert calls == {(op_of(name), "chunk"): 2} and len(ours.layers) == 2
        with pytest.MonkeyPatch.context() as patch:
            use_exact(m, patch)
            want = m(tokens, attention_mask=mask).logits[mask.bool()]
    assert logits.dtype == torch.float32
    assert_accurate(
        to_numpy(logits), to_numpy(want), to_numpy(fallback), dtype=np.float32, name=name
    )


@families
def test_generate_gives_the_same_tokens(name, calls):
    m, (tokens, mask) = model(name), text()
    how = {
        "attention_mask": mask[:, :PROMPT],
        "do_sample": False,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
    }
    fallback = m.generate(tokens[:, :PROMPT], **how)
    assert not calls
    with use_linattn(m):
        ours = m.generate(tokens[:, :PROMPT], **how)
    assert ours.sequences.shape == (2, PROMPT + 12)
    assert torch.equal(ours.sequences, fallback.sequences)
    # the prompt in chunks, then a step for each token but the last, in both layers
    op = op_of(name)
    assert calls == {(op, "chunk"): 2, (step_of(m, op), "chunk"): 2 * 11}
    for layer in layers_of(m).values():
        there, here = (
            x[named_cache(m)].layers[layer.layer_idx].recurrent_states[0] for x in (fallback, ours)
        )
        assert here.dtype == there.dtype == torch.float32 and here.shape == there.shape
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


@families
def test_a_static_cache(name, calls):
    m, (tokens, mask) = model(name), text()
    how = {"attention_mask": mask[:, :PROMPT], "max_new_tokens": 5}
    want = static_cache.generated(m, tokens[:, :PROMPT], **how)
    with use_linattn(m):
        got = static_cache.generated(m, tokens[:, :PROMPT], **how)
    assert calls[step_of(m, op_of(name)), "chunk"] == 2 * 4
    assert torch.equal(got, want)


@pytest.mark.skipif("qwen3_5_text" not in there, reason="this transformers has no Qwen3.5")
def test_a_static_cache_of_a_compiled_model():
    """One graph for the prompt, and one for all tokens. (A mixture of experts breaks the graph by
    itself.)"""
    m, (tokens, _) = model("qwen3_5_text"), text()
    want = static_cache.generated(m, tokens[:, :PROMPT], max_new_tokens=5)
    with use_linattn(m):
        got, graphs, breaks = static_cache.by_a_compiled_model(
            m, tokens[:, :PROMPT], max_new_tokens=5
        )
    assert torch.equal(got, want)
    assert (graphs, breaks) == (2, 0)


@families
def test_a_token_in_one_call_is_that_of_the_layer(name, calls):
    """With a cache, the layer's own method has the same token and the same states."""
    m, (tokens, _) = model(name), text()
    op = op_of(name)
    with use_linattn(m), torch.no_grad():
        out = m(tokens[:, :PROMPT], use_cache=True)
        one, other = out[named_cache(m)], copy.deepcopy(out[named_cache(m)])
        calls.clear()
        got = m(tokens[:, PROMPT : PROMPT + 1], **{named_cache(m): one}, use_cache=True)
        assert calls == {(step_of(m, op), "chunk"): 2}
        calls.clear()
        with torch.enable_grad():  # a call that may be recorded
            want = m(tokens[:, PROMPT : PROMPT + 1], **{named_cache(m): other}, use_cache=True)
        assert ("layer_step", "chunk") not in calls
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    for layer in layers_of(m).values():
        a, b = one.layers[layer.layer_idx], other.layers[layer.layer_idx]
        torch.testing.assert_close(a.recurrent_states, b.recurrent_states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.conv_states, b.conv_states, rtol=1e-4, atol=1e-4)


def test_gates_that_lie_apart(calls):
    """With as many heads of keys as of values, Qwen3-Next has its gates in every second column."""
    sizes = copy.deepcopy(FAMILIES["qwen3_next"]) | {"linear_num_value_heads": 2}
    config = transformers.AutoConfig.for_model("qwen3_next", **sizes)
    torch.manual_seed(0)
    m = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager", dtype=torch.float32
    ).eval()
    tokens, _ = text()

    def logits():
        cache, found = None, []
        for t in range(PROMPT, PROMPT + 3):
            piece = tokens[:, t : t + 1] if cache else tokens[:, : t + 1]
            out = m(piece, **{named_cache(m): cache}, use_cache=True)
            cache = out[named_cache(m)]
            found.append(out.logits[:, -1])
        return torch.stack(found)

    with torch.inference_mode():
        want = logits()
        with use_linattn(m):
            got = logits()
    assert calls["layer_step", "chunk"] == 2 * 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@families
def test_the_gradients_of_a_layer_are_accurate(name, calls):
    """The gradients of its input, and of its parameters as one vector. Over a whole model some
    random weights amplify a rounding beyond the rule's bound, in the fallback too."""
    m, (_, mask) = model(name), text()
    layer = next(iter(layers_of(m).values()))
    made = torch.Generator().manual_seed(2)
    x, dy = torch.randn(2, 2, T, 48, generator=made)
    x.requires_grad_()

    def gradients():
        layer.zero_grad()
        x.grad = None
        layer(x, attention_mask=mask).backward(dy)
        return x.grad, torch.cat([p.grad.flatten() for p in layer.parameters()])

    fallback = gradients()
    with use_linattn(m):
        ours = gradients()
    assert calls == {(op_of(name), "chunk"): 1}
    with pytest.MonkeyPatch.context() as patch:
        use_exact(m, patch)
        want = gradients()
    layer.zero_grad()
    for what, got, right, theirs in zip(("x", "parameters"), ours, want, fallback, strict=True):
        assert_accurate(
            to_numpy(got),
            to_numpy(right),
            to_numpy(theirs),
            dtype=np.float32,
            gradient=True,
            name=f"{name}: {what}",
        )


@families
def test_a_model_learns_as_before(name, calls):
    """A coarse check that every parameter is reached."""
    m, (tokens, mask) = model(name), text()

    def gradients():
        m.train()
        m.zero_grad()
        labels = tokens.masked_fill(mask == 0, -100)
        m(tokens, attention_mask=mask, labels=labels).loss.backward()
        m.eval()
        return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}

    want = gradients()
    with use_linattn(m):
        got = gradients()
    m.zero_grad()
    assert got.keys() == want.keys() and calls == {(op_of(name), "chunk"): 2}
    for layer, one in layers_of(m).items():
        assert {f"{layer}.{p}" for p, _ in one.named_parameters()} <= got.keys()
    ours, theirs = (torch.cat([x.flatten() for x in one.values()]) for one in (got, want))
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()


@families
def test_a_layer_in_bfloat16_is_accurate(name):
    """One layer, because over a whole model any two roundings drift apart."""
    m, (_, mask) = copy.deepcopy(model(name)).to(torch.bfloat16), text()
    layer = next(iter(layers_of(m).values()))
    made = torch.Generator().manual_seed(2)
    x = torch.randn(2, T, 48, generator=made).to(torch.bfloat16)
    with torch.inference_mode():
        fallback = layer(x, attention_mask=mask)
        with use_linattn(m):
            ours = layer(x, attention_mask=mask)
        with pytest.MonkeyPatch.context() as patch:
            use_exact(m, patch)
            want = layer(x, attention_mask=mask)
    assert ours.dtype == torch.bfloat16
    assert_accurate(
        to_numpy(ours), to_numpy(want), to_numpy(fallback), dtype=ml_dtypes.bfloat16, name=name
    )


@pytest.mark.parametrize(
    "name", [name for name in ("qwen3_5_text", "kimi_linear") if name in there]
)
def test_a_prompt_in_parts_is_the_prompt(name, calls):
    """A cache is handed from one prompt to the next, and between our functions and the
    fallback's."""
    m, (tokens, _) = model(name), text()
    with torch.inference_mode():
        whole = m(tokens, use_cache=False).logits
        cache = None
        parts = []
        for use, piece in (
            (True, slice(0, 30)),
            (True, slice(30, 47)),
            (False, slice(47, 48)),
            (True, slice(48, 49)),
            (True, slice(49, T)),
        ):
            ours = use_linattn(m) if use else None
            out = m(tokens[:, piece], **{named_cache(m): cache}, use_cache=True)
            if ours:
                ours.restore()
            cache = out[named_cache(m)]
            parts.append(out.logits)
    op = op_of(name)
    assert calls == {(op, "chunk"): 6, (step_of(m, op), "chunk"): 2}
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not (linattn.cuda.is_available() and torch.cuda.is_available()),
    reason=linattn.cuda.why_not() or "PyTorch sees no GPU",
)
@families
def test_on_a_gpu(name, calls):
    """The same on CUDA, the float64 functions too."""
    m, (tokens, mask) = copy.deepcopy(model(name)).cuda(), (x.cuda() for x in text())
    how = {"attention_mask": mask[:, :PROMPT], "do_sample": False, "max_new_tokens": 12}
    with torch.inference_mode():
        fallback = m(tokens, attention_mask=mask).logits[mask.bool()]
        same = m.generate(tokens[:, :PROMPT], **how)
        with use_linattn(m):
            logits = m(tokens, attention_mask=mask).logits[mask.bool()]
            assert torch.equal(m.generate(tokens[:, :PROMPT], **how), same)
        with pytest.MonkeyPatch.context() as patch:
            use_exact(m, patch)
            want = m(tokens, attention_mask=mask).logits[mask.bool()]
    op = op_of(name)
    assert calls == {(op, "chunk"): 4, (step_of(m, op), "chunk"): 2 * 11}
    assert logits.is_cuda and logits.dtype == torch.float32
    assert_accurate(
        to_numpy(logits.cpu()),
        to_numpy(want.cpu()),
        to_numpy(fallback.cpu()),
        dtype=np.float32,
        name=name,
    )


def test_a_compiled_layer_keeps_its_graph():
    layer = next(iter(layers_of(model()).values()))
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    x = torch.randn(2, 20, 48)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        want = compiled(x)
        with use_linattn(model()):
            got = compiled(x)
        again = compiled(x)
    torch._dynamo.reset()
    ours = [any("linattn.gated_delta_rule" in target for target in graph) for graph in graphs]
    assert ours == [False, True]  # and the first graph once more
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, want)


# ---- what they are like before, meanwhile and afterwards ----


def snapshot(model):
    """Every attribute of every module, and every global of the layers' own modules."""
    own = {(name, a): x for name, module in model.named_modules() for a, x in vars(module).items()}
    for layer in layers_of(model).values():
        module = sys.modules[type(layer).__module__]
        own |= {(module.__name__, a): x for a, x in vars(module).items()}
        own |= {(type(layer).__name__, a): x for a, x in vars(type(layer)).items()}
    return own


def same(before, after):
    return before.keys() == after.keys() and all(after[a] is x for a, x in before.items())


def in_use(model, calls):
    calls.clear()
    with torch.no_grad():
        model(text()[0][:, :5], use_cache=False)
    return sum(calls.values())


@families
def test_everything_is_put_back(name, calls):
    m = model(name)
    before = snapshot(m)
    with use_linattn(m):
        assert in_use(m, calls) == 2
    assert same(before, snapshot(m)) and in_use(m, calls) == 0


def test_an_exception_puts_everything_back(calls):
    m = model()
    before = snapshot(m)
    with pytest.raises(KeyError, match="of mine"), use_linattn(m):
        raise KeyError("of mine")
    assert same(before, snapshot(m)) and in_use(m, calls) == 0


def test_without_with(calls):
    m = model()
    before = snapshot(m)
    ours = use_linattn(m)
    assert in_use(m, calls) == 2
    assert repr(ours).startswith(f"linattn, in 2 layers of {type(m).__name__}\n  model.layers.0.")
    ours.restore()
    ours.restore()
    assert "no longer" in repr(ours)
    assert same(before, snapshot(m)) and in_use(m, calls) == 0


def test_nested_and_used_again(calls):
    m = model()
    before = snapshot(m)
    with use_linattn(m) as outer:
        with use_linattn(m) as inner:
            assert inner.layers == outer.layers and in_use(m, calls) == 2
        assert in_use(m, calls) == 2
        with outer:
            assert in_use(m, calls) == 2
        assert in_use(m, calls) == 2
    assert same(before, snapshot(m))
    with outer:
        assert in_use(m, calls) == 2
    assert same(before, snapshot(m)) and in_use(m, calls) == 0


def test_the_last_in_goes_first(calls):
    m = model()
    before = snapshot(m)
    first = use_linattn(m)
    last = use_linattn(m)
    with pytest.raises(RuntimeError, match=r"forward was replaced after use_linattn"):
        first.restore()
    assert in_use(m, calls) == 2
    last.restore()
    first.restore()
    assert same(before, snapshot(m))


def test_other_models_stay_as_they_are(calls):
    m, other = model(), copy.deepcopy(model())
    before = snapshot(other)
    with use_linattn(m):
        assert same(before, snapshot(other)) and in_use(other, calls) == 0
        inner = copy.deepcopy(m)
        assert in_use(inner, calls) == 2  # a copy equals its original
        assert all(layer.forward.__self__ is layer for layer in layers_of(inner).values())


def test_the_state_dict_does_not_notice():
    m = model()
    before = list(m.state_dict())
    with use_linattn(m):
        assert list(m.state_dict()) == before


# ---- what is a layer ----


def recurrent(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
):
    return exact(
        query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


class ByAttribute(nn.Module):
    """As transformers had them before 5: the functions are attributes."""

    def __init__(self, chunk=recurrent):
        super().__init__()
        self.chunk_gated_delta_rule = chunk
        self.recurrent_gated_delta_rule = recurrent

    def forward(self, *x, **options):
        one = x[0].shape[1] == 1
        return (self.recurrent_gated_delta_rule if one else self.chunk_gated_delta_rule)(
            *x, **options
        )


torch_recurrent_kda = recurrent


def logged(function):
    @functools.wraps(function)
    def call(self, *args, **kwargs):
        self.log.append("called")
        return function(self, *args, **kwargs)

    return call


class ByName(nn.Module):
    """A method, behind a decorator, that calls a global from within a comprehension."""

    def __init__(self):
        super().__init__()
        self.log = []

    @logged
    def forward(self, *x, **options):
        (o,) = [torch_recurrent_kda(*x, **options) for _ in range(1)]
        return o


def some(T=3, K=4, gates=1, dtype=torch.float32):
    """q, k [2,T,2,K], v [2,T,4,5], g and beta."""
    made = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(2, T, *shape, generator=made, dtype=torch.float64).to(dtype)

    g = -normal(4, *([K] if gates == 2 else [])).abs()
    return normal(2, K), normal(2, K), normal(4, 5), g, normal(4).sigmoid()


def test_functions_that_are_attributes(calls):
    layer, x = ByAttribute(), some()
    want, _ = layer(*x, use_qk_l2norm_in_kernel=True)
    with use_linattn(layer) as ours:
        assert ours.layers == {"": ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")}
        got, state = layer(*x, use_qk_l2norm_in_kernel=True)
        assert state is None and calls == {("gated_delta_rule", "chunk"): 1}
    assert layer.chunk_gated_delta_rule is layer.recurrent_gated_delta_rule is recurrent
    torch.testing.assert_close(got, want)


def test_a_function_that_is_called_by_other_names():
    """As the convolution of transformers before 5, which names its array x."""

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        raise NotImplementedError

    layer = nn.Identity()
    layer.causal_conv1d_fn = causal_conv1d_fn
    x, weight = torch.randn(2, 3, 5), torch.randn(3, 4)
    with use_linattn(layer):
        got = layer.causal_conv1d_fn(x=x, weight=weight, seq_idx=None, activation="silu")
    torch.testing.assert_close(got, exact_convolution(x, weight, activation="silu"))


def test_functions_that_are_globals(calls):
    layer, x = ByName(), some(gates=2)
    want, _ = layer(*x, use_qk_l2norm_in_kernel=True)
    with use_linattn(layer) as ours:
        assert ours.layers == {"": ("torch_recurrent_kda",)}
        got, _ = layer(*x, use_qk_l2norm_in_kernel=True)
        assert calls == {("kda", "recurrent"): 1} and torch_recurrent_kda is recurrent
    assert layer.log == ["called"] * 2 and "forward" not in vars(layer)
    torch.testing.assert_close(got, want)


def test_hooks_stay_around_a_forward(calls):
    """As accelerate sets them: a partial in the place of forward, forward in another."""
    layer, seen = ByName(), []

    def hooked(module, *x, **options):
        seen.append("hook")
        return module._old_forward(*x, **options)

    layer._old_forward = layer.forward
    layer.forward = functools.partial(hooked, layer)
    before = dict(vars(layer))
    with use_linattn(layer):
        layer(*some(gates=2))
        assert calls == {("kda", "recurrent"): 1} and seen == ["hook"] and layer.log == ["called"]
    assert same(before, vars(layer))


def test_a_model_without_such_layers_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(
        ValueError,
        match=r"^model: expected layers .* chunk_gated_delta_rule, .*, mamba_selective_scan, .*; "
        r"LlamaForCausalLM has none",
    ):
        use_linattn(transformers.AutoModelForCausalLM.from_config(config))
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got .*str"):
        use_linattn("Qwen/Qwen3-Next-80B-A3B-Instruct")


def test_a_function_with_other_parameters_is_refused():
    def other(query, key, value, g, beta, state=None):
        raise AssertionError

    whole = nn.ModuleDict({"first": ByAttribute(), "second": ByAttribute(other)})
    with pytest.raises(
        ValueError,
        match=r"^model: second: chunk_gated_delta_rule: expected a func"
        r"tion \(query, key, value, g, .* got \(query, .*state\)",
    ):
        use_linattn(whole)
    assert whole["first"].chunk_gated_delta_rule is recurrent  # nothing was touched


# ---- the functions ----

FUNCTIONS = {
    "chunk_gated_delta_rule": 1,
    "recurrent_gated_delta_rule": 1,
    "chunk_kda": 2,
    "recurrent_kda": 2,
}
functions = pytest.mark.parametrize("function", FUNCTIONS)


@families
def test_what_the_fallbacks_take_ours_take(name):
    for module, function in fallbacks_of(model(name)):
        theirs = inspect.signature(getattr(module, function)).parameters
        ours = inspect.signature(_replace._replacement(function, getattr(module, function)))
        assert set(theirs) - {"kwargs"} <= set(ours.parameters)


@functions
@pytest.mark.parametrize("T", [1, 2, 37])
def test_a_function_computes_its_op(function, T):
    call = getattr(compat, function)
    x = some(T, gates=FUNCTIONS[function])
    state = torch.randn(2, 4, 4, 5, generator=torch.Generator().manual_seed(4))
    before = state.clone()
    for initial_state in (None, state, state.mT.contiguous().mT):
        options = {
            "initial_state": initial_state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        got, want = call(*x, **options), exact(*x, **options)
        torch.testing.assert_close(got, want)
        assert torch.equal(state, before) and got[1].dtype == torch.float32
        assert got[1] is not initial_state
    assert call(*x)[1] is None
    strided = [y.transpose(1, -1).contiguous().transpose(1, -1) for y in x]
    torch.testing.assert_close(call(*strided, **options), got, rtol=0, atol=0)


@functions
def test_dtypes_of_states(function):
    call = getattr(compat, function)
    x = some(1, gates=FUNCTIONS[function])
    for dtype, kept in (
        (torch.float64, torch.float64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        for given in (torch.float32, torch.float64, torch.bfloat16):
            state = torch.ones(2, 4, 4, 5, dtype=given)
            o, final = call(*(y.to(dtype) for y in x), initial_state=state, output_final_state=True)
            assert (o.dtype, final.dtype) == (dtype, kept) and (state == 1).all()


@functions
def test_a_token_that_is_recorded(function):
    """A step would not be."""
    call = getattr(compat, function)
    x = [y.double().requires_grad_() for y in some(1, gates=FUNCTIONS[function])]
    state = torch.ones(2, 4, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda *x: call(*x[:-1], initial_state=x[-1], output_final_state=True), (*x, state)
    )


@functions
def test_what_is_not_supported_is_refused_by_name(function):
    call, x = getattr(compat, function), some(3, gates=FUNCTIONS[function])
    edges, index = torch.tensor([0, 1, 3]), torch.tensor([[0, 1, 1]])
    for name, value in (
        ("use_gate_in_kernel", True),
        ("is_causal", False),
        ("A_log", x[0]),
        ("something_else", "x"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: not supported by linattn"):
            call(*x, **{name: value})
    for given in ({"cu_seqlens": edges}, {"cu_seq_lens_q": edges}):
        with pytest.raises(ValueError, match=r"^cu_seqlens: expected seq_idx beside it"):
            call(*x, **given)
    with pytest.raises(ValueError, match=r"^seq_idx: expected cu_seqlens beside it"):
        call(*x, seq_idx=index)
    with pytest.raises(TypeError, match="positional"):
        call(*x, 64)
    # an argument about something else makes no difference
    others = dict.fromkeys(FOR_OTHERS, 1) | {"is_causal": True, "anything": None}
    assert torch.equal(call(*x, **others)[0], call(*x)[0])


@functions
def test_packed_sequences_beside_their_index(function):
    call = getattr(compat, function)
    x = [y[:1] for y in some(5, gates=FUNCTIONS[function])]
    packed = {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]])}
    want = torch.cat([call(*(y[:, part] for y in x))[0] for part in (slice(2), slice(2, 5))], 1)
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        torch.testing.assert_close(call(*x, **packed, **{name: torch.tensor([0, 2, 5])})[0], want)


def test_a_model_hands_down_what_is_not_supported():
    tokens = text()[0][:1]
    with use_linattn(model()), torch.no_grad():
        with pytest.raises(ValueError, match=r"^is_causal: not supported"):
            model()(tokens, is_causal=False)
        with pytest.raises(ValueError, match=r"^cu_seqlens: expected seq_idx"):
            model()(tokens, cu_seq_lens_q=torch.tensor([0, 30, T]))
        model()(tokens, is_causal=True)
        model()(tokens, num_items_in_batch=torch.tensor(3), output_hidden_states=True)
