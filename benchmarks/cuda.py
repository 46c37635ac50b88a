"""linattn and its peers on a GPU, case after case: inputs, first calls, the check, the times."""

import gc
import re
import sys
import time
import traceback

import torch

from linattn import VARIANTS

from . import check, first, report
from .base import Case, Result
from .cuda_report import ours_of, short, write
from .inputs import torch_inputs
from .peers_cpu import available
from .peers_cuda import DRY, FLA_STEP, MAKERS, OURS
from .timing import Captured, Ceilings, Gpu, Host, described, in_turns, quiet

SHAPES = (  # every op's forward
    (1, 8192, 96, "heads enough to fill the chip many times over: throughput alone"),
    (1, 32768, 8, "one long prompt, few heads: the chain of chunks is the cost"),
    (4, 2048, 16, "a batch of prompts of ordinary length: one wave of blocks"),
)
GROUPED = (  # heads of q and k, of v: a model's on one, two and eight GPUs
    (1, 32768, 16, 64, "Qwen3-Next's heads, one long prompt"),
    (4, 8192, 16, 64, "Qwen3-Next's heads, a batch"),
    (1, 32768, 8, 32, "half of the heads, one long prompt"),
    (4, 8192, 8, 32, "half of the heads, a batch"),
    (1, 32768, 2, 8, "an eighth of the heads: no parallel work but along the sequence"),
    (1, 2048, 2, 8, "an eighth of the heads, a short prompt: launches are the cost"),
)
ENDS = ("linear_attention", "kda")  # the ops that take least and most
LENGTHS = (  # theirs
    (512, "time against T, beside softmax attention: a short prompt"),
    (2048, "time against T, beside softmax attention"),
    (8192, "time against T, beside softmax attention"),
    (32768, "one long prompt, many heads"),
)
BATCHES = (
    (1, "one user: the latency of a launch and of the call"),
    (8, "a few users"),
    (64, "states larger than the cache"),
    (256, "a server's batch: the bytes of the states alone"),
)
STEPS = [op for op in VARIANTS if op in FLA_STEP]


def case_of(op, pass_, B, T, H, HV, why, **more):
    return Case(op, pass_, B, T, H, HV, **{"dtype": "bfloat16"} | more, why=why)


def table(tiny=False):
    """Every case. Those of an op are neighbours, since they share compiled kernels."""
    found = []
    for op in VARIANTS:
        grouped = op == "gated_delta_rule"
        if tiny:  # for a machine with no GPU: the same code, no figures
            found.append(
                case_of(op, "forward", 2, 128, 2, 4 if grouped else 2, "dry run", quick=True)
            )
            found += [case_of(op, "step", 2, 1, 2, 2, "dry run", quick=True)] * (op in STEPS)
            continue
        found += [case_of(op, "forward", B, T, H, H, why, quick=B == 4) for B, T, H, why in SHAPES]
        if grouped:
            found += [case_of(op, "forward", *shape) for shape in GROUPED]
        if op in ENDS:
            found += [case_of(op, "forward", 1, T, 32, 32, why) for T, why in LENGTHS]
        # few heads, as RetNet and fla's gated delta layers have them
        found.append(case_of(op, "forward", 1, 8192, 24, 24, "K = V = 256", D=256))
        for dtype in ("float16", "tf32"):
            found.append(case_of(op, "forward", 1, 8192, 96, 96, dtype, dtype=dtype))
        if op in STEPS:
            found += [case_of(op, "step", B, 1, 32, 32, why, quick=B == 1) for B, why in BATCHES]
    return found


def wanted(given):
    """The cases asked for; a pattern is searched for in a case's name."""
    return [
        case
        for case in table(tiny=given.dry_run)
        if (case.quick or not given.quick)
        and (not given.only or any(re.search(p, str(case)) for p in given.only))
    ]


def called(case, peers, copies, machine):
    """Ours and the peers that have the case: called once, checked, and not timed yet."""
    found, computed = [], []
    state = copies[0]["state"].clone() if case.pass_ == "step" else None
    for peer in (peer for peer in peers if peer.has(case)):
        each = Captured(Result(case, peer.name, peer.section("table"), copies=len(copies)), machine)
        found.append(each)
        try:
            each.calls = [peer.make(case, x) for x in copies]
            if state is not None:
                copies[0]["state"].copy_(state)
            machine.sync()
            start = time.perf_counter()
            o, *after = each.calls[0]()
            machine.sync()
            each.result.add("first", time.perf_counter() - start)
            computed.append((peer, each.result, (o, *(a.clone() for a in after))))
        # a peer may raise anything, and the others are still to be measured
        except Exception as error:
            each.result.error = described(error, 300)
            traceback.print_exc()
    x = copies[0] | ({} if state is None else {"state": state})
    groups = {}
    for peer, *rest in computed:
        same = peer.computes(case, x)
        key = id(same) if same is not x else 0, peer.instead
        groups.setdefault(key, (same, []))[1].append(rest)
    for (_, instead), (same, group) in groups.items():
        off = check.errors(case, same, [outputs for _, outputs in group], instead or check.chunks)
        for (result, _), errors in zip(group, off, strict=True):
            result.rms, result.rms_chunk = errors
            result.error = check.verdict(*errors, case.dtype)
    return found


def measure(case, peers, machine, rounds, seed):
    """The results of one case."""
    copies = [
        torch_inputs(case, machine.kind, seed + i)
        for i in range(max(1, -(-machine.cold // case.bytes)))
    ]
    timed = called(case, peers, copies, machine)
    size = case.itemsize * case.B * case.T * case.HV * case.D
    size += copies[0]["state"].nbytes if case.pass_ == "step" else 0
    for each in timed:
        try:
            if not each.result.error:
                each.prepare(size)
        except Exception as error:  # out of memory, say: as above
            each.result.error = described(error, 300)
            traceback.print_exc()
    with quiet():
        for kind in ("graph", "eager", "launch")[: 3 if case.pass_ == "step" else 2]:
            for _, each in in_turns([c for c in timed if not c.result.error], rounds):
                each.sample(kind)
    return [each.result for each in timed]


def run(given):
    """Returns the exit status: 1 where ours was wrong or the time ran out."""
    if not given.dry_run and not torch.cuda.is_available():
        return "cuda: PyTorch finds no GPU; --dry-run goes through the same code on the CPU"
    started = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    cases = wanted(given)
    if not cases:
        return f"cuda: no case is called {given.only}"
    machine = Host() if given.dry_run else Gpu()
    if given.dry_run:
        torch.set_num_threads(1)
    peers, missing = ([], []) if given.no_peers else available(DRY if given.dry_run else MAKERS)
    peers = [p for p in peers if not given.peers or any(re.search(x, p.name) for x in given.peers)]
    device = (
        f"{report.machine()} (dry run: no GPU, no figures)" if given.dry_run else (report.gpu()[1])
    )
    record = report.Record(
        [{"about": report.about(given, peers, device=device) | triton()}], not_run=missing
    )
    if not given.no_first and not given.quick:
        say("first calls of linattn, each in a fresh process")
        record.results += first.ours(machine.kind, cases)
    if not given.dry_run and peers and given.workers:
        say(f"the peers' kernels, {given.workers} processes side by side")
        record.results += first.compile_peers(peers, cases, given.workers, say)
    ceilings, late = Ceilings(machine), False
    for i, case in enumerate(cases):
        if given.minutes and time.monotonic() - started > 60 * given.minutes:
            late = True
            record.not_run.append(
                (", ".join(str(c) for c in cases[i:]), f"not begun within {given.minutes} minutes")
            )
            break
        begun = time.monotonic()
        with torch.inference_mode():
            results = measure(case, [OURS, *peers], machine, given.rounds, seed=1000 * i)
            ceilings.sample()
        record.results += results
        say(
            f"{case}, {time.monotonic() - begun:.1f} s: "
            + ", ".join(
                f"{r.peer} {r.error or report.ms(r.median('graph'), '.4f') + ' ms'}"
                for r in results
            )
        )
        gc.collect()
        if not given.dry_run:
            torch.cuda.empty_cache()
        record.runs[0]["about"]["took"] = (
            f"{time.monotonic() - started:.0f} s, {given.rounds} samples of each figure"
        )
        record.runs[0]["ceilings"] = ceilings.figures()
        write(given, record, say=False)  # in case the time runs out
    print(short(record))
    write(given, record)
    return 1 if late or any(r.error for r in ours_of(record)) else 0


def triton():
    try:
        import triton
    except ImportError:
        return {}
    return {"Triton": triton.__version__}
