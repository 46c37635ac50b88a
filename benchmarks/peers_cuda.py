"""The peers on a GPU, each optional.

All that can be prepared once (another layout, the decay for its logarithm) is prepared outside the
call. No peer is asked for a final state that ours is not asked for, but for that of a step.
"""

import importlib
import os
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from .base import Peer
from .check import log_decay, softmax_chunks
from .forms import chunked
from .inputs import LAYER, LAYERS, ours
from .peers_cpu import SCALAR, wants_softmax

# fla may hand its calls to these where they are installed: here each stands for itself
os.environ.update(FLA_FLASH_QLA="0", FLA_FLASH_KDA="0")

OURS = Peer("linattn", "", ours)

# fla's chunked functions by op, ours first: (variant, function, further arguments)
FLA = {
    "linear_attention": [
        ("", "chunk_linear_attn", {}),
        (" fused_chunk", "fused_chunk_linear_attn", {}),
    ],
    "retention": [("", "chunk_retention", {}), (" fused_chunk", "fused_chunk_retention", {})],
    "lightning_attention": [
        ("", "chunk_lightning_attn", {"layer_idx": LAYER, "num_layers": LAYERS})
    ],
    "simple_gla": [("", "chunk_simple_gla", {}), (" fused_chunk", "fused_chunk_simple_gla", {})],
    # the gates are above -5, so that both compute the same: the one any gate, the other those
    "kda": [("", "chunk_kda", {}), (" safe_gate", "chunk_kda", {"safe_gate": True})],
}
# op -> (its function for a step, its name for g)
FLA_STEP = {
    "linear_attention": ("fused_recurrent_linear_attn", "g"),
    "simple_gla": ("fused_recurrent_simple_gla", "g"),
    "gla": ("fused_recurrent_gla", "gk"),
    "gated_delta_rule": ("fused_recurrent_gated_delta_rule", "g"),
    "kda": ("fused_recurrent_kda", "g"),
}


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "version unknown"


def fla_arguments(case, x, g="g"):
    """The decay that is fixed by head is a matter of fla's own functions."""
    rule, scale = case.variant.rule, case.D**-0.5
    if rule == "dplr":
        looks = {"a": -x["x"], "b": x["y"], "gk": x["g"]}
        return {name: x[name] for name in "qkv"} | looks | {"scale": scale}
    if rule == "bonus":
        theirs = {"r": "q", "k": "k", "v": "v", "w": "g", "u": "bonus"}
        return {name: x[ours] for name, ours in theirs.items()} | {"scale": scale}
    arguments = {
        {"g": g}.get(name, name): x[name] for name in ("q", "k", "v", "g", "beta") if name in x
    }
    if case.variant.normaliser:
        arguments["normalize"] = case.normalised
    return arguments | {"scale": scale}


def fla_forward(case, variant=""):
    """fla's function of an op and its further arguments, or None."""
    if not case.ordinary and (case.system or case.variant.rule not in ("dplr", "bonus")):
        return None
    rows = FLA.get(case.op, [("", f"chunk_{case.op}", {})])
    name, more = next((row[1:] for row in rows if row[0] == variant), (None, None))
    return name and (getattr(importlib.import_module("fla.ops"), name), more)


def fla():
    """flash-linear-attention's chunked forms and, for a step, its recurrent ones."""
    ops = importlib.import_module("fla.ops")

    def peer(variant):
        def has(case):
            if case.pass_ == "step":
                return variant == "" and case.op in FLA_STEP
            return fla_forward(case, variant) is not None

        def make(case, x):
            if case.pass_ == "step":
                name, g = FLA_STEP[case.op]
                function, arguments = getattr(ops, name), fla_arguments(case, x, g)
                arguments |= {"initial_state": x["state"], "output_final_state": True}

                def step():  # the new state is another array
                    o, state = function(**arguments)
                    return o[:, 0], state

                return step
            function, more = fla_forward(case, variant)
            # heads of q and k may be fewer than of v: nothing is repeated
            arguments = fla_arguments(case, x) | more
            return lambda: (function(**arguments)[0],)

        return Peer(f"fla{variant}", about, make, has)

    about = f"fla-core {installed('fla-core')}, Triton {installed('triton')}, {fla_backends()}"
    return [
        peer(variant)
        for variant in dict.fromkeys(variant for rows in FLA.values() for variant, *_ in rows)
    ]


def fla_backends():
    """Whose kernels fla takes, as its own registry says: Triton's where no other is active."""
    try:
        registries = importlib.import_module("fla.backends")._operation_registries
        active = {name: registry.get_active() for name, registry in registries.items()}
    except (ImportError, AttributeError) as error:
        return f"backend unknown ({error})"
    other = [
        f"{name}: {backend.backend_type}"
        for name, backend in sorted(active.items())
        if backend is not None
        and name in ("common", "gla", "gated_delta_rule", "kda", "simple_gla")
    ]
    return "backend Triton" + (f" but {', '.join(other)} where they accept" if other else "")


def only(op):
    return lambda case: (case.op, case.pass_) == (op, "forward")


def flash_qla():
    module = importlib.import_module("flash_qla")

    def make(case, x):
        arguments = fla_arguments(case, x)
        return lambda: (module.chunk_gated_delta_rule(**arguments)[0],)

    return [
        Peer(
            "FlashQLA",
            f"{installed('flash-qla')}, TileLang {installed('tilelang')}",
            make,
            only("gated_delta_rule"),
        )
    ]


def flashinfer():
    """Packed sequences, and the decay itself where the others take its logarithm."""
    module = importlib.import_module("flashinfer.gdn_prefill")

    def make(case, x):
        arguments = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "beta")}
        arguments["g"] = x["g"].exp().flatten(0, 1)
        starts = torch.arange(0, case.B * case.T + 1, case.T, device=x["v"].device)
        shape = x["v"].shape
        return lambda: (
            module.chunk_gated_delta_rule(
                **arguments, scale=case.D**-0.5, cu_seqlens=starts
            ).reshape(shape),
        )

    return [Peer("FlashInfer", installed("flashinfer-python"), make, only("gated_delta_rule"))]


def flash_kda():
    """Norms, sigmoid and gate are in its kernel. Its arguments are those that become our inputs."""
    module, low = importlib.import_module("flash_kda"), -5.0

    def raw(x):
        return (x["g"] / low).logit().bfloat16(), x["beta"].logit().bfloat16()

    def make(case, x):
        g, beta = raw(x)
        out, device = torch.full_like(x["v"], float("nan")), x["v"].device
        zero = {
            "A_log": torch.zeros(case.HV, device=device),
            "dt_bias": torch.zeros(case.HV, case.D, device=device),
        }

        def run():
            module.fwd(
                x["q"],
                x["k"],
                x["v"],
                g,
                beta,
                case.D**-0.5,
                out,
                **zero,
                lower_bound=low,
                initial_state=None,
                final_state=None,
                cu_seqlens=None,
            )
            return (out,)

        return run

    def computes(case, x):
        g, beta = raw(x)
        unit = torch.nn.functional.normalize
        return x | {
            "g": low * g.double().sigmoid(),
            "beta": beta.double().sigmoid(),
            "q": unit(x["q"].double(), dim=-1),
            "k": unit(x["k"].double(), dim=-1),
        }

    return [Peer("FlashKDA", installed("flash-kda"), make, only("kda"), computes=computes)]


def softmax():
    """Softmax attention: PyTorch's, by FlashAttention. It takes heads first, and no float32."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def has(case):
        return wants_softmax(case) and case.dtype in ("bfloat16", "float16")

    def make(case, x):
        arrays = [x[name].transpose(1, 2).contiguous() for name in "qkv"]
        attend = torch.nn.functional.scaled_dot_product_attention

        def run():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return (attend(*arrays, is_causal=True).transpose(1, 2),)

        return run

    return [
        Peer(
            "softmax, PyTorch",
            torch.__version__,
            make,
            has,
            instead=partial(softmax_chunks, torch),
        )
    ]


def dry():
    """For a machine with no GPU: PyTorch in float32, from the benchmark on the CPU."""

    def make(case, x):
        x = {
            name: a.float().repeat_interleave(case.HV // case.H, 2)
            if name in ("q", "k")
            else a.float()
            for name, a in x.items()
        }
        arrays = *(x[name] for name in "qkv"), log_decay(torch, x), x.get("beta")
        return lambda: (chunked(torch, *arrays, solve="library").bfloat16(),)

    return [
        Peer(
            "PyTorch, chunked",
            torch.__version__,
            make,
            lambda case: case.pass_ == "forward" and case.variant.decay in SCALAR,
        )
    ]


MAKERS = {
    "fla": fla,
    "FlashQLA": flash_qla,
    "FlashInfer": flashinfer,
    "FlashKDA": flash_kda,
    "softmax": softmax,
}
DRY = {"PyTorch": dry, "softmax": softmax}
