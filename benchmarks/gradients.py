"""Forward and backward through PyTorch's autograd, ours and others', in one run: a training step's
share of the op.

On a GPU the other is flash-linear-attention; on a CPU the chunked PyTorch that transformers falls
back to. Each is checked first, at a small size, against linattn's float64 gradients on the CPU; one
that fails, or refuses, is named and not timed.
"""

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

import linattn
from linattn import VARIANTS

from . import report
from .base import Case, Peer, Result
from .check import log_decay
from .forms import chunked
from .inputs import by_head, options, torch_inputs
from .peers_cpu import available
from .peers_cuda import fla as fla_peers
from .peers_cuda import fla_arguments, fla_forward
from .report import lines, ms, ratio, text
from .timing import Gpu, Host, described, in_turns

BOUND = {"bfloat16": 1.6e-2, "float32": 4e-6}  # rms: the acceptance rule's for gradients
PEER_BOUND = {"bfloat16": 1.6e-2, "float32": 1e-4}
GPU_SHAPES = ((1, 8192, 96, 96), (1, 32768, 16, 32), (4, 2048, 16, 16))
CPU_SHAPES = ((1, 512, 16, 16), (1, 2048, 16, 16))
GROUPED = ("gated_delta_rule", "kda")  # measured with fewer heads of q and k too


def ops():
    """name -> case without a shape. Retention stands for both fixed decays."""
    cases = [
        Case(op, "forward+backward", normalised=normalised)
        for op in VARIANTS
        for normalised in ((False, True) if VARIANTS[op].normaliser else (False,))
        if op != "lightning_attention"
    ]
    return {case.name: case for case in cases}


def inputs(case, device):
    """Tensors, of which all but `do`, the gradient of o, get a gradient."""
    x = torch_inputs(case, device, 1)
    x.pop("gamma", None)  # the default of ours and of fla
    return x | {"do": torch.randn_like(x["v"], dtype=torch.float32).to(x["v"].dtype)}


def recorded(function):
    """make(case, x) of a peer whose function(case) gives o from the arrays and is differentiated
    by autograd."""

    def make(case, x):
        attend, do = function(case), x["do"]
        plain = {name: a for name, a in x.items() if name != "do"}
        leaves = {name: a.clone().requires_grad_() for name, a in plain.items()}

        def both():
            o = attend(leaves)
            return torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))

        return {"both": both, "forward": torch.no_grad()(lambda: attend(plain))}

    return make


def ours(case):
    return lambda x: getattr(linattn, case.op)(**x, **options(case))[0]


def on_numpy(case, x):
    """Ours without PyTorch: the op and its backward pass. The difference is autograd's cost."""
    do, more = x["do"].numpy(), options(case)
    arrays = {name: a.numpy() for name, a in x.items() if name != "do"}
    op, backward = getattr(linattn, case.op), getattr(linattn, f"{case.op}_backward")

    def both():
        op(**arrays, **more)
        found = backward(do, **arrays, **more)
        return [torch.from_numpy(getattr(found, f"d{name}")) for name in arrays]

    return {"both": both, "forward": lambda: torch.from_numpy(op(**arrays, **more)[0])}


def fla(case):
    function, more = fla_forward(case) or (None, {})
    if function is None:
        raise NotImplementedError("it has other arrays for this rule")
    return lambda x: function(**fla_arguments(case, x), **more)[0]


def lift_refusal():
    """Let fla compute what it refuses: gated gradients on Hopper with Triton 3.4 to 3.7.0, which
    got them wrong (its issue 640). The results are checked as all others are."""
    from fla.ops.common import chunk_o

    if not hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        sys.exit("this fla has no such refusal")
    chunk_o.TRITON_ABOVE_3_7_1 = True


def fallback(solve):
    def function(case):
        if case.variant.decay == "key":
            raise NotImplementedError("it has no chunked form for gates per key")
        if not case.ordinary:
            raise NotImplementedError("it has no chunked form for this rule")
        if case.normalised:
            raise NotImplementedError("it has no normaliser")
        fixed = {name: torch.from_numpy(a) for name, a in by_head(case).items()}
        return lambda x: chunked(
            torch, x["q"], x["k"], x["v"], log_decay(torch, fixed | x), x.get("beta"), solve=solve
        )

    return function


def peers(given):
    found = [Peer("linattn", "", recorded(ours))]
    if given.no_peers:
        return found
    if given.device == "cuda":
        return [*found, Peer("fla", "", recorded(fla))]
    return [
        *found,
        Peer("linattn on NumPy's arrays", "", on_numpy),
        Peer("PyTorch, row by row as transformers", "", recorded(fallback("rows"))),
        Peer("PyTorch, its own solver", "", recorded(fallback("library"))),
    ]


def error(peer, case, device):
    """The worst rms error of a gradient, at a small size, against float64 on the CPU."""
    case = replace(case, B=2, T=192, H=2, HV=2)
    x = inputs(case, device)
    want = recorded(ours)(case, {name: a.cpu().double() for name, a in x.items()})["both"]()
    worst = 0.0
    for a, b in zip(peer.make(case, x)["both"](), want, strict=True):
        off = float((a.cpu().double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        worst = off if off > worst or off != off else worst
    return worst


def peak(device, call):
    """Bytes of PyTorch's own memory that a call takes at its peak, None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case, given, machine):
    able, found = {}, []
    for peer in peers(given):
        begun = time.perf_counter()
        try:
            off = error(peer, case, given.device)
            bound = (BOUND if peer.name == "linattn" else PEER_BOUND)[case.dtype]
            if not off < bound:
                raise ArithmeticError(f"rms error {off:.1e}, expected < {bound:.1e}")
            able[peer.name] = peer, off
        # a peer may raise anything, and the others are still to be measured
        except Exception as problem:
            found.append(Result(case, peer.name, "refused", error=described(problem)))
        print(
            f"{case.name} {peer.name}: checked in {time.perf_counter() - begun:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    for B, T, H, HV in GPU_SHAPES if given.device == "cuda" else CPU_SHAPES:
        if H == HV or case.op in GROUPED:
            found += in_turn(replace(case, B=B, T=T, H=H, HV=HV), able, given, machine)
            if given.device == "cuda":
                torch.cuda.empty_cache()
    return found


def in_turn(case, able, given, machine):
    """The results of one shape."""
    x = inputs(case, given.device)
    timed = [
        (Result(case, name, threads=given.threads, rms=off), peer.make(case, x))
        for name, (peer, off) in able.items()
    ]
    for n, (result, calls) in in_turns(timed, given.rounds + 2):
        for kind, call in calls.items():
            seconds = machine.plain(call)
            if n > 1:  # the first two rounds are warming up, and a peer's tuning
                result.add(kind, seconds)
    for result, calls in timed:
        result.memory = peak(given.device, calls["both"])
    return [result for result, _ in timed]


def table(record):
    """A line for each case and each of the others."""
    rows = []
    for r in record.pick(section="table", peer="linattn"):
        others = [
            o
            for o in record.results
            if o.peer != "linattn"
            and (o.case == r.case or (o.error and o.case.name == r.case.name))
        ]
        own = [
            f"{r.case.name} {r.case.shape}",
            ms(r.median("both")),
            ms(r.median("forward")),
            f"{r.rms:.1e}",
            gib(r.memory),
        ]
        for o in others or [None]:
            rows.append(
                [
                    *own,
                    *(
                        ["-"] * 4
                        if o is None
                        else [o.peer, "refused", "-", "-"]
                        if o.error
                        else [
                            o.peer,
                            ms(o.median("both")),
                            ratio(o.median("both"), r.median("both")),
                            gib(o.memory),
                        ]
                    ),
                ]
            )
    return lines(
        [
            "case",
            "ours, ms",
            "of it forward",
            "rms",
            "GiB",
            "other",
            "its ms",
            "its / ours",
            "its GiB",
        ],
        rows,
    )


def gib(size):
    return text(size or None, ".2f", 2**-30)


def run(given):
    cuda = given.device == "cuda"
    if cuda and not torch.cuda.is_available():
        return "gradients: PyTorch finds no GPU"
    torch.set_num_threads(given.threads)
    linattn.set_num_threads(given.threads)
    known = ops()
    chosen = re.split(r",(?! )", given.only) if given.only else list(known)
    if unknown := set(chosen) - set(known):
        return f"gradients: no such op: {', '.join(sorted(unknown))}"
    if given.lift_refusal:
        lift_refusal()
    if given.workers:
        with tempfile.TemporaryDirectory() as nowhere:
            command = [
                sys.executable,
                "-m",
                "benchmarks",
                "gradients",
                "--device",
                given.device,
                "--rounds",
                "1",
                "--results",
                nowhere,
                *(["--lift-refusal"] if given.lift_refusal else []),
                "--only",
            ]
            them = [subprocess.Popen([*command, op], stdout=subprocess.DEVNULL) for op in chosen]
            for one in them:
                one.wait()
    device, more = report.gpu() if cuda else (report.machine(), "none")
    about = report.about(given, GPU=more)
    if cuda and not given.no_peers:
        about |= {peer.name: peer.version for peer in available({"fla": fla_peers})[0][:1]}
    record = report.Record([{"about": about, "ceilings": {}}])
    dtype, machine = ("bfloat16", Gpu()) if cuda else ("float32", Host())
    for op in chosen:
        record.results += measure(replace(known[op], dtype=dtype), given, machine)
    page = "\n".join(
        [
            f"# Forward and backward on {device}",
            "",
            *report.facts(about),
            "",
            f"""\
K = V = {Case.D}; {dtype} q, k, v, float32 gates; through torch.autograd, medians of interleaved
rounds. rms: the worst gradient's, against float64, at T = 192. GiB: PyTorch's own memory at its
peak; ours without the kernels' scratch, which is not PyTorch's.
""",
            *table(record),
            "",
            *(f"- {r.case.name}, {r.peer}: {r.error}" for r in record.results if r.error),
            "",
        ]
    )
    print(page)
    record.write(given, f"gradients-{given.device}-{report.slug(device)}", page)
    return 1 if any(r.peer == "linattn" and r.error for r in record.results) else 0
