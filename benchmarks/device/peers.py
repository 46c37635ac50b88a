"""What others offer for the same problems on a GPU, each optional.

make(case, x) gives the call to time, which returns (o, the state after it or None), for the cases
that the peer has(). What can be prepared once (another layout, the decay for its logarithm) is
prepared outside the call. No peer is asked for a final state that ours is not asked for.
"""

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from .cases import LAYER, LAYERS, PER_KEY, ours

# fla may hand its calls to these where they are installed: here each stands for itself
os.environ.update(FLA_FLASH_QLA="0", FLA_FLASH_KDA="0")


@dataclass(frozen=True)
class Peer:
    name: str
    version: str
    has: object  # (case) -> whether it can be asked
    make: object
    # (case, x) -> the problem that its call computes, where rounding makes it another one
    computes: object = staticmethod(lambda case, x: x)


OURS = Peer("linattn", "", lambda case: True, ours)

# op -> (variant, function, arguments beside q, k, v, those taken from x under their own names)
FLA = {
    "linear_attention": [("", "chunk_linear_attn", {"normalize": False}, ()),
                         (" fused_chunk", "fused_chunk_linear_attn", {"normalize": False}, ())],
    "retention": [("", "chunk_retention", {}, ()),
                  (" fused_chunk", "fused_chunk_retention", {}, ())],
    "lightning_attention": [("", "chunk_lightning_attn",
                             {"layer_idx": LAYER, "num_layers": LAYERS}, ())],
    "simple_gla": [("", "chunk_simple_gla", {}, ("g",)),
                   (" fused_chunk", "fused_chunk_simple_gla", {}, ("g",))],
    "gla": [("", "chunk_gla", {}, ("g",))],
    "delta_rule": [("", "chunk_delta_rule", {}, ("beta",))],
    "gated_delta_rule": [("", "chunk_gated_delta_rule", {}, ("g", "beta"))],
    # the gates are above -5, so that both compute the same: the one any gate, the other those
    "kda": [("", "chunk_kda", {}, ("g", "beta")),
            (" safe_gate", "chunk_kda", {"safe_gate": True}, ("g", "beta"))],
}
FLA_STEP = {
    "linear_attention": ("fused_recurrent_linear_attn", {"normalize": False}, {}),
    "simple_gla": ("fused_recurrent_simple_gla", {}, {"g": "g"}),
    "gla": ("fused_recurrent_gla", {}, {"gk": "g"}),
    "gated_delta_rule": ("fused_recurrent_gated_delta_rule", {}, {"g": "g", "beta": "beta"}),
    "kda": ("fused_recurrent_kda", {}, {"g": "g", "beta": "beta"}),
}


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "version unknown"


def fla():
    """flash-linear-attention's chunked forms and, for a step, its recurrent ones."""
    ops = importlib.import_module("fla.ops")

    def peer(variant):
        def row(case):
            return next((row for row in FLA[case.op] if row[0] == variant), None)

        def has(case):
            if case.face == "step":
                return variant == "" and case.op in FLA_STEP
            return row(case) is not None

        def make(case, x):
            if case.face == "step":
                return step(case, x)
            _, name, options, taken = row(case)
            function = getattr(ops, name)
            arguments = {a: x[a] for a in ("q", "k", "v", *taken)} | options
            # heads of q and k may be fewer than of v: nothing is repeated
            return lambda: (function(**arguments, scale=case.D**-0.5)[0], None)
        return Peer(f"fla{variant}", about, has, make)

    def step(case, x):
        name, options, taken = FLA_STEP[case.op]
        function = getattr(ops, name)
        arguments = {a: x[a][:, None] for a in "qkv"} | options
        arguments |= {theirs: x[a][:, None] for theirs, a in taken.items()}

        def run():  # the new state is another array
            o, state = function(**arguments, scale=case.D**-0.5, initial_state=x["state"],
                                output_final_state=True)
            return o[:, 0], state
        return run
    about = f"fla-core {installed('fla-core')}, Triton {installed('triton')}, {fla_backends()}"
    variants = dict.fromkeys(variant for rows in FLA.values() for variant, *_ in rows)
    return [peer(variant) for variant in variants]


def fla_backends():
    """Whose kernels fla takes, as its own registry says: Triton's where no other is active."""
    try:
        registries = importlib.import_module("fla.backends")._operation_registries
        active = {name: registry.get_active() for name, registry in registries.items()}
    except (ImportError, AttributeError) as error:
        return f"backend unknown ({error})"
    other = [f"{name}: {backend.backend_type}" for name, backend in sorted(active.items())
             if backend is not None and name in ("common", "gla", "gated_delta_rule", "kda",
                                                 "simple_gla")]
    return "backend Triton" + (f" but {', '.join(other)} where they accept" if other else "")


def gated_delta(case):
    return (case.op, case.face) == ("gated_delta_rule", "forward")


def flash_qla():
    module = importlib.import_module("flash_qla")

    def make(case, x):
        arguments = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
        return lambda: (module.chunk_gated_delta_rule(**arguments, scale=case.D**-0.5)[0], None)
    return [Peer("FlashQLA", f"{installed('flash-qla')}, TileLang {installed('tilelang')}",
                 gated_delta, make)]


def flashinfer():
    """Packed sequences, and the decay itself where the others take its logarithm."""
    module = importlib.import_module("flashinfer.gdn_prefill")

    def make(case, x):
        arguments = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "beta")}
        arguments["g"] = x["g"].exp().flatten(0, 1)
        starts = torch.arange(0, case.B * case.T + 1, case.T, device=x["v"].device)
        shape = x["v"].shape
        return lambda: (module.chunk_gated_delta_rule(
            **arguments, scale=case.D**-0.5, cu_seqlens=starts).reshape(shape), None)
    return [Peer("FlashInfer", installed("flashinfer-python"), gated_delta, make)]


def flash_kda():
    """Norms, sigmoid and gate are in its kernel: it is given what they turn into our inputs."""
    module, low = importlib.import_module("flash_kda"), -5.0

    def raw(x):
        return (x["g"] / low).logit().bfloat16(), x["beta"].logit().bfloat16()

    def make(case, x):
        g, beta = raw(x)
        out, device = torch.full_like(x["v"], float("nan")), x["v"].device
        zero = {"A_log": torch.zeros(case.HV, device=device),
                "dt_bias": torch.zeros(case.HV, case.D, device=device)}

        def run():
            module.fwd(x["q"], x["k"], x["v"], g, beta, case.D**-0.5, out, **zero, lower_bound=low,
                       initial_state=None, final_state=None, cu_seqlens=None)
            return out, None
        return run

    def computes(case, x):
        g, beta = raw(x)
        unit = torch.nn.functional.normalize
        return x | {"g": low * g.double().sigmoid(), "beta": beta.double().sigmoid(),
                    "q": unit(x["q"].double(), dim=-1), "k": unit(x["k"].double(), dim=-1)}
    return [Peer("FlashKDA", installed("flash-kda"),
                 lambda case: (case.op, case.face) == ("kda", "forward"), make, computes)]


def dry():
    """For a machine with no GPU: PyTorch in float32, from the benchmark on the CPU."""
    from peers import chunked, log_decay

    def make(case, x):
        x = {name: a.float().repeat_interleave(case.HV // case.H, 2) if name in ("q", "k") else
             a.float() for name, a in x.items()}
        g = log_decay(torch, case.op, x)
        arrays = *(x[name] for name in "qkv"), g, x.get("beta")
        return lambda: (chunked(torch, *arrays, solve="library").bfloat16(), None)
    return [Peer("PyTorch, chunked", torch.__version__,
                 lambda case: case.face == "forward" and case.op not in PER_KEY, make)]


def available(device):
    """The peers that can run here; and those that cannot, by name, with the reason."""
    found, missing = [], []
    for name, make in (("fla", fla), ("FlashQLA", flash_qla), ("FlashInfer", flashinfer),
                       ("FlashKDA", flash_kda)) if device == "cuda" else (("PyTorch", dry),):
        try:
            found += make()
        # they compile, look for a GPU and for one another while they are imported: whatever
        # happens there, the others are still to be measured
        except Exception as error:
            missing.append((name, f"{type(error).__name__}: {error}".split("\n")[0]))
    return found, missing
