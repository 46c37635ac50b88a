"""linattn.compat.transformers: the families of Mamba, with their selective scans computed by
linattn. They give the same results as before. Afterwards they are as they were."""

import copy
import functools
import os

import pytest
from support.device import imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = imported("torch")
transformers = imported("transformers")

from linattn.compat import transformers as compat  # noqa: E402 (needs PyTorch)
from linattn.compat.transformers import use_linattn  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ATTENTION = {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 6,
    "use_mamba_kernels": False,
}
FAMILIES = {
    "mamba": SIZES | {"state_size": 8},
    "falcon_mamba": SIZES | {"state_size": 8},
    "jamba": SIZES
    | ATTENTION
    | {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "zamba": SIZES | ATTENTION | {"num_hidden_layers": 9, "n_mamba_heads": 2},
}
families = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def model(name):
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(FAMILIES[name]))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def ids(*shape, seed=0):
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(seed))


def agree(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))


@families
def test_logits(name):
    made, tokens = model(name), ids(2, 37)
    with torch.no_grad():
        want = made(tokens).logits
        with use_linattn(made) as ours:
            got = made(tokens).logits
        again = made(tokens).logits
    names = {function for used in ours.layers.values() for function in used}
    assert names == {"mamba_selective_scan", "mamba_selective_state_update"}
    agree(got, want)
    assert torch.equal(again, want)
    assert not torch.equal(got, want)  # ours ran, and rounds in another order


@families
def test_the_same_tokens_are_generated(name):
    made = model(name)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "use_cache": True}
    want = made.generate(ids(2, 9), **options)
    with use_linattn(made):
        got = made.generate(ids(2, 9), **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        agree(a, b)


@families
def test_left_padding(name):
    made, tokens = model(name), ids(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
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
        replaced = use_linattn(made) if ours else None
        made(tokens, labels=tokens).loss.backward()
        if replaced is not None:
            replaced.restore()
        found.append({n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None})
    made.zero_grad()
    want, got = found
    assert want.keys() == got.keys()
    for which in want:
        agree(got[which], want[which])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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
    more = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    want = compat.mamba_selective_state_update(*wide, **more)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound * float(want.abs().max()))
    torch.testing.assert_close(state.double(), wide[0], rtol=bound, atol=4 * bound)
    with pytest.raises(ValueError, match="seq_idx: not supported"):
        compat.mamba_selective_state_update(kept, u, dt, A, B, C, seq_idx=torch.zeros(2))
