"""The figures of a run: as a dict for the .json, as the .md, and as the plot."""

import datetime
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from cases import FLOPS, H, K, T, V

import linattn
from linattn.config import config

HERE = Path(__file__).resolve().parent


class NoPlot(Exception):
    """A plot was asked for and cannot be drawn."""


def machine():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.+)$", text, re.M)
    return match[1].strip() if match else platform.processor() or platform.machine()


def commit():
    def git(*arguments):
        return subprocess.run(["git", "-C", str(HERE), *arguments], check=True,
                              capture_output=True, text=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/",
                      ":(exclude,top)benchmarks/results")
        return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def about(given, peers):
    here = config()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{machine()}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.2f} (mean number of running processes)",
        "commit": given.commit or commit(),
        "command": shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "threads": str(given.threads),
        "linattn": f"{linattn.__version__}, {here['in use'].split()[0]}, {here['compiler']}",
        "Python": here["Python"],
        "NumPy": here["NumPy"],
    } | {peer.name: peer.version for peer in peers}


def figures(about, found, ceilings, missing, memory):
    """Everything the reports need: seconds as median, least and count for each entry."""
    rows = [{"section": e.section, "who": e.who, "op": e.case.op, "face": e.case.face,
             "T": e.case.T, "heads": e.case.heads, "dtype": e.case.dtype, "threads": e.threads,
             "median_s": statistics.median(e.samples), "min_s": min(e.samples),
             "samples": len(e.samples),
             "gflops": e.case.flops / statistics.median(e.samples) / 1e9,
             "tokens_per_s": e.case.T / statistics.median(e.samples)}
            for e in found if e.case is not None]
    samples = {e.who: e.samples for e in found if e.case is None}
    limits = {key: {"what": what, "unit": unit, "best": work / min(samples[key]) / 1e9,
                    "median": work / statistics.median(samples[key]) / 1e9}
              for key, what, unit, work, _ in ceilings}
    return {"about": about, "problem": {"B": 1, "H": H, "K": K, "V": V}, "ceilings": limits,
            "rows": rows, "memory": memory,
            "not_run": [{"what": what, "why": why} for what, why in missing]}


def pick(figures, **wanted):
    return [r for r in figures["rows"] if all(r[key] == value for key, value in wanted.items())]


def lines(header, rows):
    """A Markdown table; all columns but the first to the right."""
    width = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]
    def line(cells):
        return "| " + " | ".join(str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w)
                                 in enumerate(zip(cells, width, strict=True))) + " |"
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":")
                          for i, w in enumerate(width)) + "|"
    return [line(header), rule, *(line(row) for row in rows), ""]


def against(figures, row):
    """The best peer's name, time and ratio to ours, as text."""
    peers = [r for r in pick(figures, section="table", op=row["op"], face=row["face"],
                             dtype=row["dtype"]) if r["who"] != "linattn"]
    if not peers:
        return "none", "-", "-"
    best = min(peers, key=lambda r: r["median_s"])
    return best["who"], best["median_s"], f"{best['median_s'] / row['median_s']:.2f}"


def milliseconds(seconds):
    return seconds if isinstance(seconds, str) else f"{seconds * 1e3:.2f}"


def microseconds(seconds):
    return seconds if isinstance(seconds, str) else f"{seconds * 1e6:.1f}"


def markdown(figures):
    limits, threads = figures["ceilings"], int(figures["about"]["threads"])
    out = [f"# linattn on {figures['about']['machine']}", ""]
    out += [f"- {name}: {value}" for name, value in figures["about"].items()]
    out += [f"- not run: {m['what']} ({m['why']})" for m in figures["not_run"]]
    out += ["", f"H = {H}, K = {K}, V = {V}, B = 1. Medians of interleaved rounds, the least "
            "beside them. Operations are those the recurrence needs, per token and head: "
            + ", ".join(f"{op} {n}KV" for op, n in FLOPS.items())
            + "; forward and backward together three times the forward's. Every call was checked "
            "against the float64 reference before it was timed.", "", "## Ceilings", ""]
    out += lines(["ceiling", "median", "best", "unit"],
                 [[c["what"], f"{c['median']:.1f}", f"{c['best']:.1f}", c["unit"]]
                  for c in limits.values()])
    at = len(out)  # where the summary goes
    peak = limits["fma"]["median"] * threads if "fma" in limits else None
    ratio = "ratio: the peer's time divided by ours"
    for face, dtype in (("forward", "float32"), ("forward+backward", "float32"),
                        ("forward", "bfloat16")):
        rows = pick(figures, section="table", who="linattn", face=face, dtype=dtype)
        if not rows:
            out += [f"## {face}, {dtype}", "", "Not run: ml_dtypes is not installed.", ""]
            continue
        out += [f"## {face}, {dtype}, T = {T}", "",
                f"share: of the float32 multiply-add peak of {threads} core{'s' * (threads > 1)}; "
                f"{ratio}.", ""]
        table = []
        for r in rows:
            name, seconds, factor = against(figures, r)
            table.append([r["op"], milliseconds(r["median_s"]), milliseconds(r["min_s"]),
                          f"{r['gflops']:.1f}", f"{r['gflops'] / peak:.2f}" if peak else "-",
                          f"{r['tokens_per_s']:,.0f}", name, milliseconds(seconds), factor])
        out += lines(["op", "ms", "least", "GFLOP/s", "share", "tokens/s", "best peer", "its ms",
                      "ratio"], table)
    out += ["## One step, float32 state", "", "floor: reading and writing the state once, at the "
            f"rate above; {ratio}. Times include the call from Python.", ""]
    table = []
    for r in pick(figures, section="table", who="linattn", face="step"):
        name, seconds, factor = against(figures, r)
        floor = 2 * 4 * H * K * V / (limits["update"]["median"] * 1e9) if "update" in limits else 0
        table.append([r["op"], microseconds(r["median_s"]), microseconds(r["min_s"]),
                      microseconds(floor) if floor else "-",
                      f"{r['median_s'] / floor:.2f}" if floor else "-", name,
                      microseconds(seconds), factor])
    out += lines(["op", "us", "least", "floor us", "time / floor", "best peer", "its us", "ratio"],
                 table)
    return "\n".join(out[:at] + targets(figures) + out[at:] + scaling(figures) + cost(figures)
                     + every_peer(figures))


SHARES = {"linear_attention": 0.75, "retention": 0.95, "simple_gla": 0.95, "gla": 0.70,
          "delta_rule": 0.80, "gated_delta_rule": 0.88, "kda": 0.68}
FALLBACK = "PyTorch, chunked"  # as transformers computes the gated delta rule without a kernel


def targets(figures):
    """What the library is meant to reach, and what it reached in this run."""
    limits, threads = figures["ceilings"], int(figures["about"]["threads"])
    ours = {(r["op"], r["face"], r["dtype"]): r
            for r in pick(figures, section="table", who="linattn")}
    forward = {op: ours[op, "forward", "float32"] for op in FLOPS}
    table = []
    if "fma" in limits:
        peak = limits["fma"]["median"] * threads
        asked = [((op, "forward", "float32"), share) for op, share in SHARES.items()]
        asked += [(("gated_delta_rule", "forward", "bfloat16"), 1.30),
                  (("gated_delta_rule", "forward+backward", "float32"), 0.55)]
        table += [[f"share of peak: {' '.join(key)}", f">= {share:.2f}",
                   f"{ours[key]['gflops'] / peak:.2f}"] for key, share in asked if key in ours]
    far = {r["op"]: r for r in pick(figures, section="lengths", who="linattn", T=4096)}
    worst = min(far, key=lambda op: far[op]["tokens_per_s"] / forward[op]["tokens_per_s"])
    table.append([f"tokens/s, T = 4096 / {T}, the lowest ({worst})", ">= 0.88",
                  f"{far[worst]['tokens_per_s'] / forward[worst]['tokens_per_s']:.2f}"])
    step = ours["gated_delta_rule", "step", "float32"]
    if "update" in limits:
        floor = 8 * H * K * V / (limits["update"]["median"] * 1e9)
        table.append(["time of a gated delta step / state read and written once", "<= 1.10",
                      f"{step['median_s'] / floor:.2f}"])
    for T_, heads in ((T, H), (4096, H), (4096, 1)):
        ratio = by_threads(figures, "gated_delta_rule", T_, heads)
        if ratio:
            table.append([f"one thread / two, gated_delta_rule, T = {T_}, H = {heads}", ">= 1.90",
                          f"{ratio[0]:.2f}"])
    ratios = {op: against(figures, r)[2] for op, r in forward.items()}
    found = {op: float(ratio) for op, ratio in ratios.items() if ratio != "-"}
    if found:
        worst = min(found, key=found.get)
        table.append([f"best peer / ours, forward, the lowest ({worst})", ">= 1.40",
                      f"{found[worst]:.2f}"])
    slow = [r for r in pick(figures, section="table", who=FALLBACK, op="gated_delta_rule",
                            face="forward", dtype="float32")]
    if slow:
        ratio = slow[0]["median_s"] / forward["gated_delta_rule"]["median_s"]
        table.append([f"{FALLBACK} / ours, gated_delta_rule forward", ">= 25", f"{ratio:.1f}"])
    if figures["memory"]:
        table.append(["peak memory / inputs and output, gated_delta_rule, T = 2^20, H = 1",
                      "<= 1.20", f"{figures['memory']:.2f}"])
    slopes = cost_slopes(figures)
    if slopes:
        table.append(["slope of log time against log T, T = 2^8 to 2^20, H = 1", "1",
                      f"{min(slopes.values()):.3f} to {max(slopes.values()):.3f}"])
    return ["## Targets", "", *lines(["what", "asked", "measured"], table)]


def by_threads(figures, op, length, heads):
    """(one thread's time / several threads', the several), or None where there is one thread."""
    rows = [r for r in figures["rows"] if r["who"] == "linattn" and r["face"] == "forward"
            and (r["op"], r["T"], r["heads"], r["dtype"]) == (op, length, heads, "float32")]
    one = [r for r in rows if r["threads"] == 1]
    more = [r for r in rows if r["threads"] > 1]
    return (one[0]["median_s"] / more[0]["median_s"], more[0]) if one and more else None


def scaling(figures):
    """Long sequences against short ones, and threads."""
    table = []
    for r in pick(figures, section="table", who="linattn", face="forward", dtype="float32"):
        far = pick(figures, section="lengths", who="linattn", op=r["op"], T=4096)
        cells = [r["op"], milliseconds(far[0]["median_s"]),
                 f"{far[0]['tokens_per_s'] / r['tokens_per_s']:.2f}"]
        for length, heads in ((T, H), (4096, H), (4096, 1)):
            ratio = by_threads(figures, r["op"], length, heads)
            cells.append(f"{ratio[0]:.2f}" if ratio else "-")
        table.append(cells)
    return ["## Long sequences and threads, forward, float32", "",
            f"tokens/s at T = 4096 divided by those at T = {T}; the time of one thread divided by "
            "that of two.", "",
            *lines(["op", "ms at T = 4096", "tokens/s, 4096 / 512", f"two threads, T = {T}",
                    "T = 4096", "T = 4096, H = 1"], table)]


def cost_slopes(figures):
    """By op: the exponent p of the least squares fit of time = c T^p."""
    slopes = {}
    for op in FLOPS:
        rows = pick(figures, section="cost", op=op)
        if rows:
            x = [math.log(r["T"]) for r in rows]
            y = [math.log(r["median_s"]) for r in rows]
            slopes[op] = statistics.linear_regression(x, y).slope
    return slopes


def cost(figures):
    slopes = cost_slopes(figures)
    if not slopes:
        return []
    lengths = sorted({r["T"] for r in pick(figures, section="cost")})
    table = []
    for op, slope in slopes.items():
        each = {r["T"]: r["median_s"] / r["T"] for r in pick(figures, section="cost", op=op)}
        table.append([op, *(f"{each[t] * 1e9:.0f}" for t in lengths), f"{slope:.3f}"])
    return ["## Cost against T, forward, float32, H = 1", "",
            "Nanoseconds per token, and the exponent p of time = c T^p.", "",
            *lines(["op", *(f"2^{t.bit_length() - 1}" for t in lengths), "p"], table)]


def every_peer(figures):
    out = ["## Every peer", "", "Milliseconds, median.", ""]
    table = [[r["who"], r["op"], r["face"], r["dtype"], f"{r['median_s'] * 1e3:.3f}",
              f"{r['min_s'] * 1e3:.3f}", r["samples"]]
             for r in pick(figures, section="table") if r["who"] != "linattn"]
    header = ["peer", "op", "face", "dtype", "ms", "least", "samples"]
    return [*out, *lines(header, table)] if table else []


def write(given, figures):
    """cpu-<machine>.md and .json; returns their paths."""
    given.results.mkdir(parents=True, exist_ok=True)
    stem = given.results / results_name()
    stem.with_suffix(".md").write_text(markdown(figures))
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    return stem.with_suffix(".md"), stem.with_suffix(".json")


def results_name():
    """By machine, and by instruction set where one was asked for."""
    asked = os.environ.get("LINATTN_ISA")
    return "cpu-" + re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-") + (
        f"-{asked}" if asked else "")


def plot_path(given):
    """Where the plot goes, None for none; refused now rather than after the run."""
    wanted = given.plot or (None if given.quick else given.results / f"{results_name()}.png")
    if wanted is None:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        if given.plot:
            raise NoPlot("--plot needs matplotlib: pip install matplotlib") from None
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return None
    if wanted.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise NoPlot(f"{wanted}: not a kind of picture that matplotlib writes")
    return wanted


def plots(path, figures):
    """Both pictures; returns their paths."""
    plot(path, figures)
    if not pick(figures, section="cost"):
        return (path,)
    second = path.with_stem(path.stem + "-cost")
    plot_cost(second, figures)
    return path, second


def plot_cost(path, figures):
    """Time against T: a straight line of slope 1 is what linear attention promises."""
    from matplotlib.figure import Figure

    figure = Figure((7, 6), layout="constrained")
    axes = figure.subplots()
    for op, slope in cost_slopes(figures).items():
        rows = sorted(pick(figures, section="cost", op=op), key=lambda r: r["T"])
        axes.plot([r["T"] for r in rows], [r["median_s"] for r in rows], "o-", ms=4,
                  label=f"{op} (slope {slope:.3f})")
    axes.set(xscale="log", yscale="log", xlabel="T", ylabel="seconds, forward, float32, H = 1, "
             f"K = V = {K}, threads: {figures['about']['threads']}")
    lengths = sorted({r["T"] for r in pick(figures, section="cost")})
    axes.set_xticks(lengths, [f"$2^{{{t.bit_length() - 1}}}$" for t in lengths])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def plot(path, figures):
    """Tokens a second against T, a panel for every op, a line for ours and every peer."""
    from matplotlib.figure import Figure

    figure = Figure((14, 7), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey=True)
    names = ["linattn", *sorted({r["who"] for r in figures["rows"]} - {"linattn"})]
    for op, axes in zip(FLOPS, panels.flat, strict=True):
        for i, name in enumerate(names):
            found = {r["T"]: r["tokens_per_s"] for r in figures["rows"]
                     if r["op"] == op and r["who"] == name and r["face"] == "forward"
                     and r["dtype"] == "float32" and r["section"] in ("table", "lengths")}
            if found:
                axes.plot(sorted(found), [found[t] for t in sorted(found)], "o-", ms=4, label=name,
                          color=f"C{i}", lw=2.5 if i == 0 else 1.2)
        axes.set(title=op, xscale="log", yscale="log")
        axes.grid(True, which="major", alpha=0.3)
    lengths = sorted({r["T"] for r in figures["rows"] if r["section"] in ("table", "lengths")
                      and r["face"] == "forward"})
    panels[0, 0].set_xticks(lengths, [str(t) for t in lengths])
    panels[0, 0].minorticks_off()
    figure.supxlabel("T")
    figure.supylabel(f"tokens/s, forward, float32, H = {H}, K = V = {K}, "
                     f"threads: {figures['about']['threads']}")
    handles = {label: line for axes in panels.flat
               for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
