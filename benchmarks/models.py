"""A model of transformers with its own functions and with linattn's, timed in one run.

The models are small and random, of Qwen3-Next's kind (a few experts) and Qwen3.5's (none): three
gated delta layers, then one of attention, twice. Both ways take turns, a figure is the median over
the rounds, and nothing is timed before the logits have been held against the float64 reference and
the generated tokens against each other. Needs nothing from the network.
"""

import sys
import time
from unittest import mock

import numpy as np
import torch
import transformers

import linattn
from linattn import reference
from linattn.compat.transformers import use_linattn
from linattn.testing import assert_accurate

from . import report
from .base import Result
from .report import lines, ms, ratio

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KINDS = {"Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5_text"}
LENGTHS = (512, 2048)
PROMPT, NEW = 64, 64
CHECKED = 200  # tokens
LEAST = 20e-3  # seconds a sample lasts at least


def made(given, kind):
    torch.manual_seed(0)
    sizes = {
        name: n
        for name, n in MODEL.items()
        if kind == "Qwen3-Next" or ("expert" not in name and "moe" not in name)
    }
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(KINDS[kind], **sizes), dtype=torch.float32
    )
    return model.eval().to(given.device)


def tokens(given, T):
    made = torch.Generator().manual_seed(T)
    return torch.randint(2, MODEL["vocab_size"], (1, T), generator=made).to(given.device)


def exactly(q, k, v, g, beta, *, initial_state, output_final_state, qk_l2norm, **_):
    assert initial_state is None and not output_final_state
    x = (a.detach().double().cpu().numpy() for a in (q, k, v, g, beta))
    o, _ = reference.gated_delta_rule(*x, qk_l2norm=qk_l2norm)
    return torch.from_numpy(o).to(v), None


def generated(given, model, how_many=NEW):
    prompt = tokens(given, PROMPT)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=how_many
    )


def check(given, model):
    """In float32: a router takes other experts for one bfloat16 that was rounded elsewhere."""
    x = tokens(given, CHECKED)

    def logits():
        with torch.inference_mode():
            return model(x, use_cache=False).logits.cpu().numpy()

    theirs, their_tokens = logits(), generated(given, model)
    with use_linattn(model):
        ours, our_tokens = logits(), generated(given, model)
        with mock.patch.object(linattn.ops, "gated_delta_rule", exactly):
            exact = logits()
    assert_accurate(ours, exact, theirs, dtype=np.float32, name="logits")
    assert torch.equal(our_tokens, their_tokens), "generate() gave other tokens"


class Alone(torch.nn.Module):
    """A layer that is its functions and nothing else."""

    def __init__(self, layer):
        super().__init__()
        module = sys.modules[type(layer).__module__]
        self.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = module.torch_recurrent_gated_delta_rule
        self.heads = [(layer.num_k_heads, layer.head_k_dim)] * 2 + [
            (layer.num_v_heads, layer.head_v_dim)
        ]

    def call(self, given, T):
        made = torch.Generator().manual_seed(T)
        how = {"device": given.device, "dtype": getattr(torch, given.dtype)}
        x = [torch.randn(1, T, *heads, generator=made).to(**how) for heads in self.heads]
        (_, K), _, (HV, V) = self.heads
        options = {
            "g": -torch.rand(1, T, HV, generator=made).to(given.device),
            "beta": torch.rand(1, T, HV, generator=made).to(**how),
            "initial_state": torch.randn(1, HV, K, V, generator=made).to(given.device),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }

        @torch.inference_mode()
        def call():
            one = T == 1  # both functions are looked up in each call, since they are replaced
            (self.recurrent_gated_delta_rule if one else self.chunk_gated_delta_rule)(*x, **options)

        return call


def cases(given, kind, model):
    """(name, the model whose functions are replaced, a call, the divisor of its time)."""

    @torch.inference_mode()
    def prefill(x):
        model(x, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def one(x):
        layer(x)

    def train(x):
        model.zero_grad()
        model(x, labels=x, use_cache=False).loss.backward()

    layer = model.model.layers[0].linear_attn
    if kind == next(iter(KINDS)):  # in the others they are the same
        alone = Alone(layer)
        for T in LENGTHS:
            yield f"the function alone, T = {T}", alone, alone.call(given, T), 1
        yield "the function alone, one token", alone, alone.call(given, 1), 1
        for T in LENGTHS:
            x = torch.randn(1, T, MODEL["hidden_size"], device=given.device, dtype=model.dtype)
            yield f"a gated delta layer, T = {T}", model, lambda x=x: one(x), 1
    for T in LENGTHS:
        x = tokens(given, T)
        yield f"{kind}, prefill, T = {T}", model, lambda x=x: prefill(x), 1
    yield (
        f"{kind}, generate, one of {NEW} tokens after {PROMPT}",
        model,
        lambda: generated(given, model),
        NEW,
    )
    if given.device == "cpu":
        x = tokens(given, LENGTHS[0])
        yield f"{kind}, forward and backward, T = {LENGTHS[0]}", model, lambda: train(x), 1


def on_one_core(given):
    """Then the process's own time says more, on a machine with other work, than the clock's."""
    return given.device == "cpu" and given.threads == 1


def timed(given, call, repeats):
    """Seconds of a call, of several where one is short."""
    clock = time.process_time if on_one_core(given) else time.perf_counter
    sync = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    if repeats > 1:
        call()
    sync()
    start = clock()
    for _ in range(repeats):
        call()
    sync()
    return (clock() - start) / repeats


def measure(given, kind, model):
    """Two results of each case, whose name is their section."""
    found = []
    for name, whose, call, parts in cases(given, kind, model):
        pair = [Result(None, peer, name, given.threads) for peer in ("transformers", "linattn")]
        repeats = 1
        for n in range(-1, given.rounds):  # the first says how often to repeat
            for result in pair:
                ours = use_linattn(whose) if result.peer == "linattn" else None
                seconds = timed(given, call, repeats)
                if ours:
                    ours.restore()
                if n >= 0:
                    result.add("call", seconds / parts)
                elif not ours:
                    repeats = max(1, min(1000, int(LEAST / seconds)))
        found += pair
    return found


def about(given, models):
    return report.about(
        given,
        dtype=given.dtype,
        transformers=transformers.__version__,
        **({"GPU": report.gpu()[1]} if given.device == "cuda" else {}),
        models=", ".join(
            f"{type(model).__name__} ({sum(p.numel() for p in model.parameters()):,} parameters)"
            for model in models.values()
        )
        + ": "
        + ", ".join(f"{name} {n}" for name, n in MODEL.items() if "token_id" not in name),
    )


def markdown(given, record):
    rows = []
    for theirs, own in zip(
        record.pick(peer="transformers"), record.pick(peer="linattn"), strict=True
    ):
        rows.append(
            [
                own.section,
                *(ms(seconds, ".2f") for r in (theirs, own) for seconds in (r.median(), r.least())),
                ratio(theirs.median(), own.median()),
            ]
        )
    return "\n".join(
        (
            "# Models of transformers with linattn's functions",
            "",
            *report.facts(record.runs[0]["about"]),
            "",
            f"B = 1. Medians of {given.rounds} rounds in which both take turns, the least beside "
            "them; ratio: transformers' own functions in PyTorch divided by ours. All else of a "
            "model is the same in both. "
            + (
                "Times are the process's own on its core: other work ran on the machine meanwhile "
                "where the load says so, and the ratios hold better than the times. "
                if on_one_core(given)
                else ""
            )
            + "Before anything was timed, the logits in float32 were accepted against the float64 "
            f"reference, and generate() gave the same {NEW} tokens with and without.",
            "",
            *lines(["what", "transformers, ms", "least", "linattn, ms", "least", "ratio"], rows),
        )
    )


def run(given):
    if given.device == "cuda" and not torch.cuda.is_available():
        return "models: PyTorch finds no GPU"
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    torch.set_num_threads(given.threads)
    linattn.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    models = {kind: made(given, kind) for kind in KINDS}
    record = report.Record([{"about": about(given, models), "ceilings": {}}])
    for model in models.values():
        check(given, model)
    for kind, model in models.items():
        record.results += measure(given, kind, model.to(getattr(torch, given.dtype)))
    page = markdown(given, record)
    print(page)
    record.write(
        given,
        report.results_name("models")
        if given.device == "cpu"
        else f"models-cuda-{report.slug(report.gpu()[0])}",
        page,
    )
    return 0
