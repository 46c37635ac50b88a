"""Case after case: inputs, first calls, the check, then ours and the peers in turn."""

import datetime
import gc
import platform
import re
import shlex
import subprocess
import sys
import time
import traceback

import torch
from report import commit, machine

import linattn

from . import check, first, report
from .cases import inputs, table
from .peers import OURS, available
from .timing import Ceilings, Contestant, Gpu, Host, median


def wanted(given):
    """The cases asked for; a pattern is searched for in a case's name."""
    cases = table(tiny=given.device == "torch")
    return [case for case in cases if (case.quick or not given.quick)
            and (not given.only or any(re.search(p, str(case)) for p in given.only))]


def about(given, gpu, peers):
    if gpu:
        properties = torch.cuda.get_device_properties(0)
        device = (f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
                  f"{properties.total_memory / 2**30:.0f} GiB, "
                  f"L2 {properties.L2_cache_size / 2**20:.0f} MiB")
    else:
        device = f"{machine()} (dry run: no GPU, no figures)"
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "driver": driver() if gpu else "none",
        "CPU": machine(),
        "commit": given.commit or commit(),
        "command": shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "linattn": linattn.__version__,
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }
    try:
        import triton
        found["Triton"] = triton.__version__
    except ImportError:
        pass
    return found | {peer.name: peer.version for peer in peers}


def driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True,
                              text=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def contestants(case, peers, copies, machine):
    """Ours and the peers that have the op: called once, checked, and so far not timed."""
    found, computed = [], []
    state = copies[0]["state"].clone() if case.face == "step" else None
    size = case.torch_dtype.itemsize * case.B * case.T * case.HV * case.D
    size += 0 if state is None else state.nbytes
    for peer in (peer for peer in peers if peer.has(case)):
        each = Contestant(peer.name, [], size)
        try:
            each.calls = [peer.make(case, x) for x in copies]
            if state is not None:
                copies[0]["state"].copy_(state)
            machine.sync()
            start = time.perf_counter()
            o, new = each.calls[0]()
            machine.sync()
            each.first = time.perf_counter() - start
            computed.append((peer, each, o, None if new is None else new.clone()))
        # a peer may raise whatever it likes: the others are still to be measured
        except Exception as error:
            each.error = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            traceback.print_exc()
        found.append(each)
    x = copies[0] | ({} if state is None else {"state": state})
    groups = {}
    for peer, *rest in computed:
        same = peer.computes(case, x)
        groups.setdefault(id(same) if same is not x else 0, (same, []))[1].append(rest)
    for same, group in groups.values():
        off = check.errors(case, same, [(o, new) for _, o, new in group])
        for (each, _, _), (whole, worst) in zip(group, off, strict=True):
            each.whole, each.worst = whole, worst
            each.error = check.verdict(whole, worst, case.dtype) or ""
    return found


def measure(case, peers, machine, rounds, seed):
    """The rows of one case."""
    n = max(1, -(-machine.cold // case.bytes))
    copies = [inputs(case, machine.kind, seed + i) for i in range(n)]
    everyone = contestants(case, peers, copies, machine)
    able = [each for each in everyone if not each.error]
    for each in able[:]:
        try:
            each.prepare(machine)
        except Exception as error:  # out of memory, say: as above
            each.error = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            traceback.print_exc()
            able.remove(each)
    gc.collect()
    gc.disable()
    kinds = ["sample_graph", "sample_eager"] + ["sample_launch"] * (case.face == "step")
    for kind in kinds:
        for i in range(rounds):
            # every other round backwards, lest one always follow the same neighbour
            for each in able if i % 2 == 0 else able[::-1]:
                getattr(each, kind)(machine)
    gc.enable()
    return [{
        "case": str(case), "op": case.op, "face": case.face, "B": case.B, "T": case.T, "H": case.H,
        "HV": case.HV, "D": case.D, "dtype": case.dtype, "why": case.why, "bytes": case.bytes,
        "flops": case.flops,
        "who": each.who, "error": each.error, "note": each.note, "rms": each.whole,
        "rms_chunk": each.worst, "first_s": each.first, "copies": n,
        "calls": each.length if each.graph else None, "samples": len(each.graph),
        "graph_s": median(each.graph), "graph_min_s": min(each.graph, default=None),
        "eager_s": median(each.eager), "launch_s": median(each.launch),
    } for each in everyone]


def main(given):
    """Returns the exit status: 1 where ours was wrong or the time ran out."""
    gpu = given.device == "cuda"
    if gpu and not torch.cuda.is_available():
        sys.exit("run.py: --device cuda: PyTorch finds no GPU")
    started = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)
    cases = wanted(given)
    if not cases:
        sys.exit(f"run.py: no case is called {given.only}")
    machine = Gpu() if gpu else Host()
    peers, missing = ([], []) if given.no_peers else available(given.device)
    peers = [p for p in peers if not given.peers or any(re.search(x, p.name) for x in given.peers)]
    figures = {"runs": [about(given, gpu, peers)], "rows": [], "first": [],
               "not_run": [{"what": what, "why": why} for what, why in missing]}
    if not given.no_first:
        say("first calls of linattn, each in a fresh process")
        figures["first"] += first.ours(machine.kind, cases)
    if gpu and peers and given.workers:
        say(f"the peers' kernels, {given.workers} processes side by side")
        figures["first"] += first.compile_peers("cuda", peers, cases, given.workers, say)
    ceilings = Ceilings(machine)
    late = None
    for i, case in enumerate(cases):
        if given.minutes and time.monotonic() - started > 60 * given.minutes:
            late = [str(c) for c in cases[i:]]
            figures["not_run"].append({"what": ", ".join(late),
                                       "why": f"not begun within {given.minutes} minutes"})
            break
        begun = time.monotonic()
        with torch.inference_mode():
            rows = measure(case, [OURS, *peers], machine, given.rounds, seed=1000 * i)
            ceilings.sample()
        took = time.monotonic() - begun
        for row in rows:
            row["run"], row["case_s"] = 0, took
        figures["rows"] += rows
        say(f"{case}, {took:.1f} s: " + ", ".join(
            f"{r['who']} {r['error'] or format(r['graph_s'] * 1e3, '.4f') + ' ms'}" for r in rows))
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
        figures["runs"][0] |= {"took": f"{time.monotonic() - started:.0f} s, "
                               f"{given.rounds} samples of each figure"}
        figures["runs"][0]["ceilings"] = ceilings.figures()
        figures["runs"][0]["ceiling names"] = ceilings.names
        if given.results is not None:  # what there is so far, should the time run out
            report.write(given.results, figures)
    print(report.short(figures))
    if given.results is not None:
        print("\n".join(f"written: {path}" for path in report.write(given.results, figures)))
    wrong = [r for r in figures["rows"] if r["who"] == "linattn" and r["error"]]
    return 1 if wrong or late else 0
