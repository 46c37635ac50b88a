"""Families of transformers with their own functions and with linattn's: prompts, and tokens one by
one. Small models of random weights. No files.

Before a family is timed, greedy search has to give the same tokens both ways. Both ways take turns.
Needs nothing from the network.
"""

import copy
import statistics
import time

import torch
import transformers

import linattn
from linattn.compat.transformers import use_linattn

from .report import lines

D = 512
SIZES = {
    "vocab_size": 1024,
    "hidden_size": D,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ATTENTION = {"intermediate_size": 2 * D, "num_attention_heads": 8, "num_key_value_heads": 4}
GATED = SIZES | {
    "intermediate_size": 2 * D,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": D // 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
FAMILIES = {
    "qwen3_next": GATED | EXPERTS | {"shared_expert_intermediate_size": D // 2},
    "qwen3_5_text": GATED,
    "olmo_hybrid": GATED | {"num_key_value_heads": 8},
    "kimi_linear": SIZES
    | {
        "intermediate_size": 2 * D,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": D // 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "mamba": SIZES,
    "falcon_mamba": SIZES,
    "jamba": SIZES
    | ATTENTION
    | {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False}
    | {"attn_layer_period": 4, "attn_layer_offset": 3},
    "mamba2": SIZES | {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "bamba": SIZES | ATTENTION | MAMBA2 | {"attn_layer_indices": [3]},
    "granitemoehybrid": SIZES
    | ATTENTION
    | MAMBA2
    | LOCAL_EXPERTS
    | {"layer_types": ["mamba"] * 3 + ["attention"], "shared_intermediate_size": D},
    "falcon_h1": SIZES | ATTENTION | MAMBA2 | {"mamba_d_ssm": 1024, "head_dim": 64},
    "nemotron_h": SIZES
    | ATTENTION
    | {
        "hybrid_override_pattern": "MMM*",
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "head_dim": 64,
    },
    "zamba2": SIZES
    | ATTENTION
    | {
        "layers_block_type": ["linear_attention"] * 3 + ["hybrid"],
        "n_mamba_heads": 16,
        "use_mamba_kernels": False,
    },
    "minimax": SIZES
    | ATTENTION
    | LOCAL_EXPERTS
    | {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 64},
    "recurrent_gemma": SIZES
    | ATTENTION
    | {"lru_width": D, "block_types": ["recurrent", "recurrent", "attention"], "head_dim": 64},
    "xlstm": SIZES | {"num_heads": 4},
    "rwkv": SIZES,
    "lfm2": SIZES | ATTENTION | {"layer_types": ["conv"] * 3 + ["full_attention"]},
    "lfm3": SIZES | ATTENTION | {"layer_types": ["conv"] * 3 + ["full_attention"]},
}
T, PROMPT, NEW, ROUNDS = 512, 16, 32, 3


def made(name, device):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(FAMILIES[name]))
    return transformers.AutoModelForCausalLM.from_config(config).float().eval().to(device)


def tokens(n, device):
    maker = torch.Generator().manual_seed(n)
    return torch.randint(2, SIZES["vocab_size"], (1, n), generator=maker).to(device)


def seconds(call, device):
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    call()
    sync()
    return time.perf_counter() - start


def measure(model, device, rounds):
    """Tokens a second of a prompt and of a generation, by transformers' functions and by ours."""
    prompt, first = tokens(T, device), tokens(PROMPT, device)

    @torch.inference_mode()
    def read():
        model(prompt, use_cache=True)

    def write():
        return model.generate(first, do_sample=False, max_new_tokens=NEW, use_cache=True)

    own = write()
    with use_linattn(model):
        assert torch.equal(write(), own), "generate() gave other tokens"
    found = {(call, ours): [] for call in (read, write) for ours in (False, True)}
    for turn in range(-1, rounds):  # the first is not counted
        for (call, ours), times in found.items():
            replaced = use_linattn(model) if ours else None
            one = seconds(call, device)
            if replaced is not None:
                replaced.restore()
            if turn >= 0:
                times.append(one)
    many = {read: T, write: NEW}
    return [many[call] / statistics.median(times) for (call, _), times in found.items()]


def run(given):
    if given.device == "cuda" and not torch.cuda.is_available():
        return "families: PyTorch finds no GPU"
    torch.set_num_threads(given.threads)
    linattn.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    chosen = given.only.split(",") if given.only else list(FAMILIES)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    rows = []
    for name in chosen:
        if name not in known:
            print(f"not run: {name} is not in transformers {transformers.__version__}")
            continue
        model = made(name, given.device)
        read, our_read, write, our_write = measure(model, given.device, given.rounds or ROUNDS)
        rows.append(
            [
                name,
                *(f"{x:.0f}" for x in (read, our_read)),
                f"{our_read / read:.2f}",
                *(f"{x:.0f}" for x in (write, our_write)),
                f"{our_write / write:.2f}",
            ]
        )
        print("  ".join(rows[-1]), flush=True)
    used, _ = linattn._linattn.isa()
    print(
        f"\ntransformers {transformers.__version__}, PyTorch {torch.__version__}, {used}, "
        f"{given.threads} threads; models of 4 layers, hidden size {D}, float32. Tokens a second "
        f"of a prompt of {T}, and of {NEW} tokens after {PROMPT}: medians of turns.\n"
    )
    names = ["family", "prompt", "ours", "ratio", "generated", "ours", "ratio"]
    print("\n".join(lines(names, rows)))
    return 0
