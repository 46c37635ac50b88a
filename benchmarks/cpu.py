"""linattn and its peers on the CPU, in one run: a figure is the median over the rounds."""

import gc
import os
import sys
import time

import linattn
from linattn import VARIANTS

from . import ceilings, composed, report
from .base import BESIDE, Case, Result, WrongResult, per_element
from .check import Checker
from .inputs import bfloat16, numpy_inputs, ours
from .peers_cpu import MAKERS, available, wants_softmax
from .report import lines, ratio, us
from .timing import Timed, in_turns, progress, quiet
from .timing import ceilings as measured

T, H, D = Case.T, Case.H, Case.D
BOTH, FAR = "forward+backward", 4096
LENGTHS = (128, T, 1024, 2048, FAR)  # FAR: rows of [B,T,H,D] far apart, from memory for every chunk
COST_LENGTHS = tuple(4**n for n in range(4, 11))  # of one head, 2^8 to 2^20
SHARES = {
    "linear_attention": 0.75,
    "retention": 0.95,
    "simple_gla": 0.95,
    "gla": 0.70,
    "delta_rule": 0.80,
    "gated_delta_rule": 0.88,
    "kda": 0.68,
}  # asked, of the peak
MORE_SHARES = (
    (("gated_delta_rule", "forward", "bfloat16"), 1.30),
    (("gated_delta_rule", BOTH, "float32"), 0.55),
)
FALLBACK = "PyTorch, chunked"  # as transformers computes the gated delta rule without a kernel
THREADED = ((T, H), (FAR, H), (FAR, 1))  # T, heads


def table():
    """Every op, its three passes in float32, and forward in bfloat16 where NumPy has it.

    T = 512 is long enough that the first chunk's zero state does not count and short enough that
    everything but the inputs stays in the cache.
    """
    found = [Case(op, pass_) for pass_ in ("forward", BOTH) for op in VARIANTS]
    found += [Case(op, "step", T=1) for op in VARIANTS]
    if bfloat16() is not None:
        found += [Case(op, dtype="bfloat16") for op in VARIANTS]
    return found


def wanted(given):
    """(section, case, threads, whose calls, in which rounds) of the ops of the table."""
    found = [("table", case, given.threads, "all", 1) for case in table()]
    for op in VARIANTS:
        for length in LENGTHS:
            case = Case(op, T=length)
            if length == FAR:
                found.append(("lengths", case, given.threads, "ours", 1))
            elif length != T and not given.quick:
                found.append(("lengths", case, given.threads, "ours", 3))
            if length != T and not given.quick and given.plot is not None:
                found.append(("lengths", case, given.threads, "peers", 5))
        for length in COST_LENGTHS if not given.quick else ():
            case, every = Case(op, T=length, H=1, HV=1), 5 if length > 2**16 else 1
            found.append(("cost", case, given.threads, "ours", every))
            if wants_softmax(case) and length <= 2**16:
                found.append(("cost", case, given.threads, "peers", 3))
    if len(os.sched_getaffinity(0)) > 1:
        found += [
            (
                "threads",
                Case(op, T=length, H=heads, HV=heads),
                1 if given.threads > 1 else 2,
                "ours",
                1,
            )
            for length, heads in THREADED[: 2 if given.quick else 3]
            for op in VARIANTS
        ]
    return found


def checked(given, peers):
    """The calls to time. Each kind of them is checked on a shorter problem."""
    found, checker, able = [], Checker(), set()
    todo = wanted(given)
    step = progress(len(todo), "checking")
    for section, case, threads, whose, every in todo:
        x, kind = numpy_inputs(case), (case.op, case.pass_, case.dtype)
        if whose != "peers":
            if kind not in able:
                checker.ours(case)
                able.add(kind)
            found.append(Timed(Result(case, "linattn", section, threads), ours(case, x), every))
        for peer in peers if whose != "ours" else ():
            if peer.has(case):
                if (kind, peer.name) not in able:
                    checker.peer(peer, case)
                    able.add((kind, peer.name))
                # a loop over the tokens is never the best, and gets fewer samples
                seldom = "loop" in peer.name and case.pass_ != "step"
                found.append(
                    Timed(
                        Result(case, peer.name, peer.section(section), threads),
                        peer.make(case, x),
                        max(every, 3 if seldom else 1),
                    )
                )
        step()
    return found + composed.checked(checker, peers, given.threads)


def measure(found, rounds):
    """Other numbers of threads come last in a round: the pool is not rebuilt in between."""
    threads, before, step = None, 0, progress(rounds * len(found), "measuring")
    with quiet():
        for n, each in in_turns(found, rounds, last=lambda t: t.result.section == "threads"):
            if n > before:
                gc.collect()
                before = n
            if n % each.every == 0:
                if each.result.threads != threads:
                    linattn.set_num_threads(threads := each.result.threads)
                each.sample()
            step()


def run(given):
    linattn.set_num_threads(given.threads)
    picture(given)
    peers, missing = ([], []) if given.no_peers else available(MAKERS, given.threads)
    about = report.about(given, peers)
    started = time.monotonic()
    try:
        found = checked(given, peers)
    except WrongResult as error:
        return f"cpu: {error}\ncpu: nothing was timed"
    limits, more = ceilings.measures(given.threads)
    ends = {
        key: Timed(Result(None, key, "ceiling", given.threads), call, 3 if key == "copy" else 1)
        for key, _, _, _, call in limits
    }
    everything = [*found, *ends.values()]
    for each in everything:
        each.prepare()
    measure(everything, given.rounds)
    memory = None if given.quick else ceilings.memory()
    about["took"] = f"{time.monotonic() - started:.0f} s, {given.rounds} rounds"
    record = report.Record(
        [{"about": about, "ceilings": measured(limits, {k: t.result for k, t in ends.items()})}],
        [each.result for each in found],
        missing + more,
        memory,
    )
    page = markdown(record)
    print(page)
    record.write(given, report.results_name("cpu"), page)
    if given.plot is not None:
        plots(given.plot, record)


# The report.


def gflops(r):
    return r.case.flops / r.median() / 1e9


def tokens(r):
    return r.case.T / r.median()


def against(record, r):
    """The best peer's result, or None."""
    peers = [
        p
        for p in record.pick(section="table", op=r.case.op, pass_=r.case.pass_, dtype=r.case.dtype)
        if p.peer != "linattn"
    ]
    return min(peers, key=lambda p: p.median(), default=None)


def peer_cells(record, r, unit):
    best = against(record, r)
    return (
        [best.peer, unit(best.median()), ratio(best.median(), r.median())]
        if best
        else ["none", "-", "-"]
    )


def ms(seconds):
    return report.ms(seconds, ".2f")


def markdown(record):
    (run,), threads = record.runs, given_threads(record)
    limits = run["ceilings"]
    out = [
        f"# linattn on {run['about']['machine']}",
        "",
        *report.facts(run["about"]),
        *report.not_run(record),
        "",
        f"H = {H}, K = {D}, V = {D}, B = 1. Medians of interleaved rounds, the least "
        "beside them. Operations are those the recurrence needs, per token and head: "
        + ", ".join(f"{op} {per_element(op)}KV" for op in VARIANTS)
        + "; forward and backward together three times the forward's. Every call was checked "
        "against the float64 reference before it was timed.",
        "",
        "## Ceilings",
        "",
        *lines(
            ["ceiling", "median", "best", "unit"],
            [
                [c["what"], f"{c['median']:.1f}", f"{c['best']:.1f}", c["unit"]]
                for c in limits.values()
            ],
        ),
        "## Targets",
        "",
        *lines(["what", "asked", "measured"], targets(record)),
    ]
    peak, why = peak_of(record), "ratio: the peer's time divided by ours"
    for pass_, dtype in ("forward", "float32"), (BOTH, "float32"), ("forward", "bfloat16"):
        rows = record.pick(section="table", peer="linattn", pass_=pass_, dtype=dtype)
        if not rows:
            out += [f"## {pass_}, {dtype}", "", "Not run: ml_dtypes is not installed.", ""]
            continue
        out += [
            f"## {pass_}, {dtype}, T = {T}",
            "",
            f"share: of the float32 multiply-add peak of {threads} core{'s' * (threads > 1)}; "
            f"{why}.",
            "",
            *lines(
                [
                    "op",
                    "ms",
                    "least",
                    "GFLOP/s",
                    "share",
                    "tokens/s",
                    "best peer",
                    "its ms",
                    "ratio",
                ],
                [
                    [
                        r.case.op,
                        ms(r.median()),
                        ms(r.least()),
                        f"{gflops(r):.1f}",
                        ratio(gflops(r), peak),
                        f"{tokens(r):,.0f}",
                        *peer_cells(record, r, ms),
                    ]
                    for r in rows
                ],
            ),
        ]
    floor = step_floor(record)
    out += [
        "## One step, float32 state",
        "",
        "floor: reading and writing the state once, at the "
        f"rate above; {why}. Times include the call from Python.",
        "",
        *lines(
            ["op", "us", "least", "floor us", "time / floor", "best peer", "its us", "ratio"],
            [
                [
                    r.case.op,
                    us(r.median()),
                    us(r.least()),
                    us(floor),
                    ratio(r.median(), floor),
                    *peer_cells(record, r, us),
                ]
                for r in record.pick(section="table", peer="linattn", pass_="step")
            ],
        ),
    ]
    out += scaling(record) + cost(record) + report.beside_softmax(record, "call")
    out += composed.section(record, peak)
    others = [r for r in record.pick(section="table") if r.peer != "linattn"]
    others += record.pick(section=BESIDE, T=T, H=H)
    if others:
        out += [
            "## Every peer",
            "",
            "Milliseconds, median.",
            "",
            *lines(
                ["peer", "op", "pass", "dtype", "ms", "least", "samples"],
                [
                    [
                        r.peer,
                        r.case.op,
                        r.case.pass_,
                        r.case.dtype,
                        report.ms(r.median()),
                        report.ms(r.least()),
                        len(r.seconds["call"]),
                    ]
                    for r in others
                ],
            ),
        ]
    return "\n".join(out)


def given_threads(record):
    return int(record.runs[0]["about"]["threads"])


def peak_of(record):
    """GFLOP/s of all threads together, None where there was no compiler."""
    limits = record.runs[0]["ceilings"]
    return limits["fma"]["median"] * given_threads(record) if "fma" in limits else None


def step_floor(record):
    limits = record.runs[0]["ceilings"]
    return 8 * H * D * D / (limits["update"]["median"] * 1e9) if "update" in limits else None


def targets(record):
    """[what, asked, measured] of every target."""
    mine = {
        (r.case.op, r.case.pass_, r.case.dtype): r
        for r in record.pick(section="table", peer="linattn")
    }
    forward = {op: mine[op, "forward", "float32"] for op in VARIANTS}
    gated, rows, peak = "gated_delta_rule", [], peak_of(record)
    if peak:
        rows += [
            [f"share of peak: {' '.join(key)}", f">= {share:.2f}", ratio(gflops(mine[key]), peak)]
            for key, share in (
                *(((op, "forward", "float32"), n) for op, n in SHARES.items()),
                *MORE_SHARES,
            )
            if key in mine
        ]
    far = {
        r.case.op: tokens(r) / tokens(forward[r.case.op])
        for r in record.pick(section="lengths", peer="linattn", T=FAR)
    }
    worst = min(far, key=far.get)
    rows.append(
        [f"tokens/s, T = {FAR} / {T}, the lowest ({worst})", ">= 0.88", f"{far[worst]:.2f}"]
    )
    if step_floor(record):
        rows.append(
            [
                "time of a gated delta step / state read and written once",
                "<= 1.10",
                ratio(mine[gated, "step", "float32"].median(), step_floor(record)),
            ]
        )
    for length, heads in THREADED:
        if faster := by_threads(record, gated, length, heads):
            rows.append(
                [
                    f"one thread / two, {gated}, T = {length}, H = {heads}",
                    ">= 1.90",
                    f"{faster:.2f}",
                ]
            )
    best = {
        op: against(record, r).median() / r.median()
        for op, r in forward.items()
        if against(record, r)
    }
    if best:
        worst = min(best, key=best.get)
        rows.append(
            [f"best peer / ours, forward, the lowest ({worst})", ">= 1.40", f"{best[worst]:.2f}"]
        )
    for r in record.pick(
        section="table", peer=FALLBACK, op=gated, pass_="forward", dtype="float32"
    ):
        rows.append(
            [
                f"{FALLBACK} / ours, {gated} forward",
                ">= 25",
                f"{r.median() / forward[gated].median():.1f}",
            ]
        )
    if record.memory:
        rows.append(
            [
                f"peak memory / inputs and output, {gated}, T = 2^20, H = 1",
                "<= 1.20",
                f"{record.memory:.2f}",
            ]
        )
    if slopes := cost_slopes(record):
        rows.append(
            [
                "slope of log time against log T, T = 2^8 to 2^20, H = 1",
                "1",
                f"{min(slopes.values()):.3f} to {max(slopes.values()):.3f}",
            ]
        )
    return rows


def by_threads(record, op, length, heads):
    """One thread's time / several threads', or None where there is one thread."""
    rows = [
        r
        for r in record.pick(
            peer="linattn", pass_="forward", op=op, T=length, H=heads, dtype="float32"
        )
        if r.section != composed.SECTION
    ]
    one = [r.median() for r in rows if r.threads == 1]
    more = [r.median() for r in rows if r.threads > 1]
    return one[0] / more[0] if one and more else None


def scaling(record):
    """Long sequences against short ones, and threads."""
    rows = []
    for r in record.pick(section="table", peer="linattn", pass_="forward", dtype="float32"):
        (far,) = record.pick(section="lengths", peer="linattn", op=r.case.op, T=FAR)
        rows.append(
            [
                r.case.op,
                ms(far.median()),
                ratio(tokens(far), tokens(r)),
                *(report.text(by_threads(record, r.case.op, *each), ".2f") for each in THREADED),
            ]
        )
    return [
        "## Long sequences and threads, forward, float32",
        "",
        f"tokens/s at T = {FAR} divided by those at T = {T}; the time of one thread divided by "
        "that of two.",
        "",
        *lines(
            [
                "op",
                f"ms at T = {FAR}",
                f"tokens/s, {FAR} / {T}",
                f"two threads, T = {T}",
                f"T = {FAR}",
                f"T = {FAR}, H = 1",
            ],
            rows,
        ),
    ]


def cost_slopes(record):
    """By op: the exponent p of time = c T^p."""
    found = {}
    for op in VARIANTS:
        if rows := record.pick(section="cost", peer="linattn", op=op):
            found[op] = report.slope([r.case.T for r in rows], [r.median() for r in rows])
    return found


def cost(record):
    slopes = cost_slopes(record)
    if not slopes:
        return []
    each = {
        (r.case.op, r.case.T): r.median() / r.case.T
        for r in record.pick(section="cost", peer="linattn")
    }
    lengths = sorted({length for _, length in each})
    return [
        "## Cost against T, forward, float32, H = 1",
        "",
        "Nanoseconds per token, and the exponent p of time = c T^p.",
        "",
        *lines(
            ["op", *(f"2^{t.bit_length() - 1}" for t in lengths), "p"],
            [
                [op, *(report.text(each[op, t], ".0f", 1e9) for t in lengths), f"{p:.3f}"]
                for op, p in slopes.items()
            ],
        ),
    ]


def picture(given):
    """Settles where the plot goes, None for none; refused now rather than after the run."""
    asked = given.plot is not None
    if not asked and not given.quick and given.results is not None:
        given.plot = given.results / f"{report.results_name('cpu')}.png"
    if given.plot is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        if asked:
            sys.exit("--plot needs matplotlib: pip install matplotlib")
        print("no plot: matplotlib is not installed", file=sys.stderr)
        given.plot = None
        return
    if given.plot.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        sys.exit(f"{given.plot}: not a kind of picture that matplotlib writes")


def plots(path, record):
    """tokens/s against T beside every peer, a panel for every op; and, in a second file, time
    against T. Linear attention promises a straight line of slope 1 there."""
    from matplotlib.figure import Figure

    threads = f"threads: {given_threads(record)}"
    rows = -(-len(VARIANTS) // 4)
    figure = Figure((14, 3.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 4, sharex=True, sharey=True)
    for axes in panels.flat[len(VARIANTS) :]:
        axes.set_axis_off()
    ours_first = dict.fromkeys(["linattn", *sorted(r.peer for r in record.results)])
    for op, axes in zip(VARIANTS, panels.flat, strict=False):
        for i, name in enumerate(ours_first):
            found = sorted(
                (r.case.T, tokens(r))
                for r in record.pick(op=op, peer=name, pass_="forward", dtype="float32", H=H)
                if r.section in ("table", "lengths")
            )
            if found:
                axes.plot(
                    *zip(*found, strict=True),
                    "o-",
                    ms=4,
                    label=name,
                    color=f"C{i}",
                    lw=2.5 if i == 0 else 1.2,
                )
        axes.set_title(op)
        on_log_axes(axes, LENGTHS, [str(t) for t in LENGTHS])
    figure.supxlabel("T")
    figure.supylabel(f"tokens/s, forward, float32, H = {H}, K = V = {D}, {threads}")
    handles = {
        label: line
        for axes in panels.flat
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    save(figure, path)
    if not record.pick(section="cost"):
        return
    figure = Figure((7, 6), layout="constrained")
    axes = figure.subplots()
    for op, p in cost_slopes(record).items():
        found = sorted(
            (r.case.T, r.median()) for r in record.pick(section="cost", peer="linattn", op=op)
        )
        axes.plot(*zip(*found, strict=True), "o-", ms=4, label=f"{op} (slope {p:.3f})")
    axes.set(xlabel="T", ylabel=f"seconds, forward, float32, H = 1, K = V = {D}, {threads}")
    on_log_axes(axes, COST_LENGTHS, [f"$2^{{{t.bit_length() - 1}}}$" for t in COST_LENGTHS])
    axes.legend()
    save(figure, path.with_stem(path.stem + "-cost"))


def on_log_axes(axes, ticks, names):
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, names)
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")
