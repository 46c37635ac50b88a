"""Measure linattn and its peers in one run, interleaved: python benchmarks/run.py --help.

Every round calls everything once, so that a clock that drifts or a neighbour that wakes up slows
all of them alike; a figure is the median over the rounds. Nothing is printed before everything that
is timed has been checked.

Here for the CPU; --device cuda measures on a GPU, as device/ says, and --device torch walks through
that with tiny problems where there is no GPU.
"""

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python -P leaves it out

LEAST = 4e-3  # seconds a sample lasts at least, short calls being repeated
SLOW = 0.06  # seconds from which a call is not warmed up before each sample


@dataclass
class Entry:
    """One call to time."""

    section: str  # "table" | "lengths" | "cost" | "threads" | "ceiling"
    who: str
    case: object
    call: object
    threads: int
    every: int = 1  # in which rounds
    repeats: int = 1
    slow: bool = False
    samples: list = field(default_factory=list)

    def prepare(self):
        """How often to repeat; the first call of all, which pays for memory, is not counted."""
        seconds = timed(self.call, 1)
        if seconds < 5 * SLOW:
            seconds = timed(self.call, 1)
        self.repeats = max(1, min(1000, int(LEAST / seconds)))
        self.slow = seconds > SLOW

    def sample(self):
        if not self.slow:
            self.call()
        self.samples.append(timed(self.call, self.repeats))


def timed(call, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "torch"), default="cpu",
                        help="torch: what cuda does, tried out on the CPU with tiny problems")
    parser.add_argument("--quick", action="store_true",
                        help="few rounds, one length: a look, writes nothing unless told where")
    parser.add_argument("--rounds", type=int, help="samples of each figure")
    parser.add_argument("--results", metavar="DIR", type=Path, help="where DEVICE-MACHINE.md and "
                        ".json go (default: benchmarks/results; --device torch: nowhere)")
    parser.add_argument("--commit", metavar="TEXT", help="what to say where there is no checkout")
    parser.add_argument("--no-peers", action="store_true", help="linattn and the ceilings only")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--threads", type=int, help="of ours and of the peers (default: 1)")
    cpu.add_argument("--plot", metavar="PATH", type=Path,
                     help="tokens/s against T (default: beside the results)")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--only", metavar="PATTERN", action="append",
                     help="cases whose name has this regular expression, such as '^kda forward' or "
                     "'step B1 '; may be repeated")
    gpu.add_argument("--peers", metavar="PATTERN", action="append",
                     help="peers whose name has this regular expression; may be repeated")
    gpu.add_argument("--no-first", action="store_true",
                     help="no first calls of linattn in fresh processes")
    gpu.add_argument("--workers", metavar="N", type=int,
                     help="processes that compile the peers' kernels beforehand (default: one for "
                     "each core; 0: each is compiled when its turn comes)")
    gpu.add_argument("--minutes", metavar="M", type=float,
                     help="begin no further case after this time")
    gpu.add_argument("--merge", metavar="JSON", type=Path, nargs="+",
                     help="measure nothing: put these runs' results together; of a case in "
                     "several, the last run's")
    given = parser.parse_args()
    groups = {cpu: given.device == "cpu", gpu: given.device != "cpu" or given.merge}
    for group, right in groups.items():
        for action in group._group_actions:
            if getattr(given, action.dest) not in (None, False) and not right:
                parser.error(f"{action.option_strings[0]} goes with another --device")
    if min(1 if n is None else n for n in (given.threads, given.rounds)) < 1:
        parser.error("--threads and --rounds must be at least 1")
    given.threads = given.threads or 1
    given.workers = len(os.sched_getaffinity(0)) if given.workers is None else given.workers
    given.no_first = given.no_first or given.quick
    few, many = (3, 15) if given.device == "cpu" else (8, 30)
    given.rounds = given.rounds or (few if given.quick else many)
    if given.results is None and not given.quick and given.device != "torch":
        given.results = HERE / "results"
    return given


def wanted(given):
    """(section, case, threads, whose, every how many rounds) of everything to time but ceilings."""
    from cases import COST_LENGTHS, LENGTHS, Case, T, table

    import linattn

    found = [("table", case, given.threads, "all", 1) for case in table()]
    for op in linattn.OPS:
        for length, _ in LENGTHS:
            if length == max(LENGTHS)[0]:
                found.append(("lengths", Case(op, T=length), given.threads, "ours", 1))
            elif length != T and not given.quick:
                found.append(("lengths", Case(op, T=length), given.threads, "ours", 3))
            if length != T and not given.quick and given.plot is not None:
                found.append(("lengths", Case(op, T=length), given.threads, "peers", 5))
        for length in COST_LENGTHS if not given.quick else ():
            found.append(("cost", Case(op, T=length, heads=1), given.threads, "ours",
                          5 if length > 2**16 else 1))
    if len(os.sched_getaffinity(0)) > 1:
        other = 1 if given.threads > 1 else 2
        found += [("threads", Case(op), other, "ours", 1) for op in linattn.OPS]
        found += [("threads", Case(op, T=4096), other, "ours", 1) for op in linattn.OPS]
        if not given.quick:
            found += [("threads", Case(op, T=4096, heads=1), other, "ours", 1)
                      for op in linattn.OPS]
    return found


def entries(given, peers):
    """What to time, every kind of call checked on a shorter problem."""
    from cases import inputs, ours
    from check import Checker

    found, checker, able = [], Checker(), {}
    todo = wanted(given)
    step = progress(len(todo), "checking")
    for section, case, threads, whose, every in todo:
        x, kind = inputs(case), (case.op, case.face, case.dtype)
        if whose != "peers":
            if kind not in able:
                checker.ours(case)
                able[kind] = True
            found.append(Entry(section, "linattn", case, ours(case, x), threads, every))
        for peer in peers if whose != "ours" else ():
            if (kind, peer.name) not in able:
                able[kind, peer.name] = checker.peer(peer, case)
            call = peer.make(case, x) if able[kind, peer.name] else None
            if call is not None:
                # a loop over the tokens is never the best: fewer samples of it
                seldom = "loop" in peer.name and case.face != "step"
                found.append(Entry(section, peer.name, case, call, threads,
                                   max(every, 3 if seldom else 1)))
        step()
    return found


def run(found, rounds, step):
    """Round after round, everything once; every other round backwards, lest one always follow the
    same neighbour. Other numbers of threads come last: the pool is not rebuilt in between."""
    import linattn

    threads = None
    gc.collect()
    gc.disable()
    for n in range(rounds):
        order = found if n % 2 == 0 else found[::-1]
        for entry in sorted(order, key=lambda e: e.section == "threads"):
            if n % entry.every == 0:
                if entry.threads != threads:
                    linattn.set_num_threads(threads := entry.threads)
                entry.sample()
            step()
        gc.collect()
    gc.enable()


def progress(total, what):
    """A function to call after each of `total` things: tqdm's, or a line of our own."""
    if not sys.stderr.isatty():
        return lambda: None
    try:
        from tqdm import tqdm
        return tqdm(total=total, desc=what, leave=False).update
    except ImportError:
        done = 0

    def update():
        nonlocal done
        done += 1
        print(f"\r{what}: {done / total:4.0%}", end="\n" if done == total else "",
              file=sys.stderr, flush=True)
    return update


def best_blas():
    """Let NumPy's OpenBLAS use AVX-512 where the processor has it: it goes by the AMD family, and
    takes AVX2 kernels, half as fast, for one it does not know or where the environment says so."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    flags = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    if "AuthenticAMD" in text and flags <= {*text.split()}:
        os.environ["OPENBLAS_CORETYPE"] = "SKYLAKEX"


def merge(given):
    from device import report

    figures = report.merged(given.merge)
    print(report.short(figures))
    print("\n".join(f"written: {path}" for path in report.write(given.results, figures)))


def main():
    given = arguments()
    if given.merge:
        return merge(given)
    if given.device != "cpu":
        from device.main import main as on_a_gpu
        sys.exit(on_a_gpu(given))
    # before NumPy loads its BLAS
    for name in ("OPENBLAS", "OMP", "MKL"):
        os.environ[f"{name}_NUM_THREADS"] = str(given.threads)
    best_blas()
    import ceilings
    import check
    import report
    from peers import available

    import linattn

    try:
        given.plot = report.plot_path(given)
    except report.NoPlot as error:
        sys.exit(f"run.py: {error}")
    linattn.set_num_threads(given.threads)
    peers, missing = ([], []) if given.no_peers else available(given.threads)
    about = report.about(given, peers)
    started = time.monotonic()
    try:
        found = entries(given, peers)
    except check.WrongResult as error:
        sys.exit(f"run.py: {error}\nrun.py: nothing was timed")
    limits, more = ceilings.measures(given.threads)
    found += [Entry("ceiling", key, None, call, given.threads, 3 if key == "copy" else 1)
              for key, _, _, _, call in limits]
    for entry in found:
        entry.prepare()
    run(found, given.rounds, progress(given.rounds * len(found), "measuring"))
    memory = None if given.quick else ceilings.memory()
    about["took"] = f"{time.monotonic() - started:.0f} s, {given.rounds} rounds"
    figures = report.figures(about, found, limits, missing + more, memory)
    print(report.markdown(figures))
    if given.results is not None:
        print("\n".join(f"written: {path}" for path in report.write(given, figures)))
    if given.plot is not None:
        print("\n".join(f"written: {path}" for path in report.plots(given.plot, figures)))


if __name__ == "__main__":
    main()
