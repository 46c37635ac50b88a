"""The figures of one run or of several together: targets first, then every table. Needs no PyTorch,
so that runs made elsewhere can be put together here."""

import json
import re

from report import lines

# (what, pattern for the case, of linattn's row, asked, unit, factor to the unit)
FORWARD = (
    (r"^gated_delta_rule forward B1 T32768 H16/64$", 1.5),
    (r"^gated_delta_rule forward B4 T8192 H16/64$", 0.85),
    (r"^gated_delta_rule forward B1 T32768 H2/8$", 0.35),
    (r"^kda forward B1 T8192 H96$", 1.4),
    (r"^simple_gla forward B1 T8192 H96$", 0.45),
    (r"^gla forward B1 T8192 H96$", 1.0),
    (r"^delta_rule forward B1 T8192 H96$", 0.8),
)
STEP_SHARE, STEP_GRAPH, STEP_CALL, FIRST = 0.85, 6e-6, 20e-6, 1.0
NOT_RUN = "not run"


def ceilings(figures, row):
    return figures["runs"][row["run"]]["ceilings"]


def floors(figures, row):
    """Seconds: every array moved once at copy speed; the products at the matrix units' speed."""
    limits = ceilings(figures, row)
    return row["bytes"] / limits["copy"], row["flops"] / limits["matmul"]


def ours(figures, face):
    return [r for r in figures["rows"] if r["who"] == "linattn" and r["face"] == face]


def rivals(figures, row, which=""):
    """The case's timed rows of others, the fastest in a graph first."""
    found = [r for r in figures["rows"] if r["case"] == row["case"] and r["who"] != "linattn"
             and r["who"].startswith(which) and r["graph_s"]]
    return sorted(found, key=lambda r: r["graph_s"])


def met(good):
    return "yes" if good else "NO"


def targets(figures):
    """[what, asked, measured, met] of each target."""
    table = []
    for op in dict.fromkeys(r["op"] for r in figures["rows"]):
        for face in ("forward", "step"):
            cases = [r for r in ours(figures, face) if r["op"] == op]
            if not cases:
                continue
            ratios = {r["case"]: rivals(figures, r, "fla")[0]["graph_s"] / r["graph_s"]
                      for r in cases if r["graph_s"] and rivals(figures, r, "fla")}
            failed = [r["case"] for r in cases if r["error"]]
            what = f"fla / ours, {op} {face}, the least of {len(ratios)}"
            if failed:
                table.append([what, "> 1.00", f"ours failed: {failed[0]}", "NO"])
            elif ratios:
                worst = min(ratios, key=ratios.get)
                table.append([f"{what} ({shape(worst)})", "> 1.00", f"{ratios[worst]:.2f}",
                              met(ratios[worst] > 1)])
    for pattern, asked in FORWARD:
        rows = [r for r in ours(figures, "forward") if re.search(pattern, r["case"])]
        name = pattern.strip("^$")
        value = rows[0]["graph_s"] if rows else None
        table.append([f"{name}, ms", f"<= {asked:.2f}", ms(value) if value else NOT_RUN,
                      met(value * 1e3 <= asked) if value else "-"])
    steps = [r for r in ours(figures, "step") if r["graph_s"]]

    def steps_of(B):
        return [r for r in steps if (r["B"], r["H"]) == (B, 32)]
    table.append(extreme("step B256 H32, share of copy speed, the least", f">= {STEP_SHARE:.2f}",
                         {r["op"]: floors(figures, r)[0] / r["graph_s"] for r in steps_of(256)},
                         min, lambda x: f"{x:.2f}", lambda x: x >= STEP_SHARE))
    for what, key, asked in (("in a graph", "graph_s", STEP_GRAPH),
                             ("until the call from Python returns", "launch_s", STEP_CALL),
                             ("calls back to back from Python", "eager_s", STEP_CALL)):
        table.append(extreme(f"step B1 H32, us {what}, the most", f"<= {asked * 1e6:.0f}",
                             {r["op"]: r[key] for r in steps_of(1)}, max, us,
                             lambda x, asked=asked: x <= asked))
    alone = {r["op"]: r["import_s"] + r["call_s"] for r in figures["first"]
             if r["who"] == "linattn" and "call_s" in r}
    table.append(extreme("import and first call in a fresh process, s, the most", f"<= {FIRST:.0f}",
                         alone, max, lambda x: f"{x:.2f}", lambda x: x <= FIRST))
    return table


def extreme(what, asked, values, pick, text, good):
    if not values:
        return [what, asked, NOT_RUN, "-"]
    key = pick(values, key=values.get)
    return [f"{what} ({key})", asked, text(values[key]), met(good(values[key]))]


def shape(case):
    return case.split(" ", 2)[2]


def ms(seconds):
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def us(seconds):
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def ratio(a, b):
    return "-" if a is None or b is None else f"{a / b:.2f}"


def target_lines(figures):
    return ["## Targets", "", *lines(["what", "asked", "measured", "met"], targets(figures))]


def table_of(figures, face, unit, key):
    """Ours, fla and the best of all peers by one kind of time, with the floors."""
    table = []
    for r in ours(figures, face):
        fla = rivals(figures, r, "fla")
        best = min((x for x in rivals(figures, r) if x[key]), key=lambda x: x[key], default=None)
        fla = min((x[key] for x in fla if x[key]), default=None)
        low = floors(figures, r)
        table.append([r["case"], unit(r[key]) if not r["error"] else "failed", unit(fla),
                      ratio(fla, r[key]), best["who"] if best else "none",
                      unit(best[key]) if best else "-", ratio(best and best[key], r[key]),
                      *(unit(x) for x in low), ratio(max(low), r[key])])
    name = {ms: "ms", us: "us"}[unit]
    return lines(["case", name, f"fla {name}", "fla / ours", "best peer", f"its {name}",
                  "its / ours", f"bytes {name}", f"products {name}", "floor / ours"], table)


def short(figures):
    """What to print last: a line for each case, what failed, and the targets."""
    table, failed = [], []
    for r in figures["rows"]:
        if r["error"]:
            failed.append(f"- {r['case']}, {r['who']}: {r['error'][:160]}")
        if r["who"] != "linattn":
            continue
        unit, best = us if r["face"] == "step" else ms, (rivals(figures, r) or [None])[0]
        table.append([r["case"], unit(r["graph_s"]), unit(r["eager_s"]), unit(r["launch_s"]),
                      ratio(max(floors(figures, r)), r["graph_s"]),
                      f"{best['who']} {unit(best['graph_s'])}" if best else "-",
                      ratio(best and best["graph_s"], r["graph_s"])])
    return "\n".join([*lines(["case", "graph", "eager", "call", "floor / it", "best peer", "ratio"],
                             table), "ms; us for a step", "", *failed, "", *target_lines(figures)])


def markdown(figures):
    runs = figures["runs"]
    devices = list(dict.fromkeys(run["device"].split(",")[0] for run in runs))
    out = [f"# linattn on {' and '.join(devices)}", "", *target_lines(figures)]
    for i, run in enumerate(runs):
        out += [f"## Run {i + 1} of {len(runs)}" if len(runs) > 1 else "## The run", ""]
        out += [f"- {name}: {value}" for name, value in run.items()
                if not name.startswith("ceiling")]
        if "ceilings" in run:  # else the time was up before the first case
            names, limits = run["ceiling names"], run["ceilings"]
            out += [f"- {names['copy']}: {limits['copy'] / 1e12:.3f} TB/s",
                    f"- {names['matmul']}: {limits['matmul'] / 1e12:.1f} TFLOP/s"]
        out.append("")
    out += [f"- not run: {m['what']} ({m['why']})" for m in figures["not_run"]]
    out += ["", """\
K = V = 128, or as the case says (K256: both); q, k, v and o bfloat16, or as it says (tf32: float32,
ours with `allow_tf32=True`, fla with what Triton's products do by default, tf32); gates (the
logarithm of the decay) and beta float32, no state in, none out; a step's state float32. H16/64: 16
heads of q and k, 64 of v; nobody is given repeated heads. Every output was checked at the shape
that is timed against the recurrence in float64 (rms below 8e-3, in float16 2e-3, tf32 1e-3; of any
64 tokens of a head below ten times that); what failed is named and not timed. Ours and the peers
take turns; medians.

- graph: device time of a call, several captured in one graph, over copies of the inputs together
  twice as large as the cache. What could not be captured is timed by events, and says so.
- eager: wall time of a call from Python, calls back to back. call: until it returns.
- bytes: every array moved once, at the copy's speed. products: those of the chunked form at the
  matrix product's speed; per token 2 C K for each head of q and k, 2 C V + 4 K V for each of v,
  with the delta rule 2 C K and 2 C V + 2 K V + 2 C C / 3 more, C = 64; 4 K V or 6 K V for a step.
  floor: the larger of the two.
""", ""]
    out += ["## Forward, in a graph", "", *table_of(figures, "forward", ms, "graph_s")]
    out += ["## Forward, called from Python", "", *table_of(figures, "forward", ms, "eager_s")]
    out += ["## One step, in a graph", "", *table_of(figures, "step", us, "graph_s")]
    out += ["## One step, called from Python, back to back", "",
            *table_of(figures, "step", us, "eager_s")]
    out += ["## One step, until the call returns", "", *table_of(figures, "step", us, "launch_s")]
    out += ["## First calls", "", """\
Seconds in a fresh process, the GPU in use and the inputs there before: importing, and the first
call, which for a compiler at run time is compilation and tuning (at 256 tokens).
""", ""]
    out += lines(["who", "case", "import s", "first call s", "how"],
                 [[r["who"], r["case"], seconds(r.get("import_s")), seconds(r.get("call_s")),
                   r.get("error") or r["how"]] for r in figures["first"]])
    out += ["## Everyone", "", "ms; first: the first call in the measuring process, in s.", ""]
    out += lines(["case", "who", "graph", "least", "eager", "first", "rms", "64 tokens'", "calls",
                  "copies", "note"],
                 [[r["case"], r["who"], ms(r["graph_s"]), ms(r["graph_min_s"]), ms(r["eager_s"]),
                   seconds(r["first_s"]), small(r["rms"]), small(r["rms_chunk"]),
                   r["calls"] or "-", r["copies"], r["error"] or r["note"] or ""]
                  for r in figures["rows"]])
    out += ["## Why these cases", ""]
    whys = dict.fromkeys((shape_of(r), r["why"]) for r in figures["rows"])
    out += [f"- {what}: {why}" for what, why in whys]
    return "\n".join(out) + "\n"


def shape_of(row):
    return f"{row['face']} {shape(row['case'])}"


def seconds(value):
    return "-" if value is None else f"{value:.3f}"


def small(value):
    return "-" if value is None else f"{value:.1e}"


def write(folder, figures):
    """cuda-<device>.md and .json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    device = figures["runs"][0]["device"]
    kind = "torch-dry-run" if "dry run" in device else "cuda-" + re.sub(
        r"[^a-z0-9]+", "-", device.split(",")[0].lower()).strip("-")
    stem = folder / kind
    md, data = stem.with_suffix(".md"), stem.with_suffix(".json")
    md.write_text(markdown(figures))
    data.write_text(json.dumps(figures, indent=1) + "\n")
    return md, data


def merged(paths):
    """The figures of several runs as one; a case belongs whole to the last run that has it."""
    found = {"runs": [], "rows": [], "first": [], "not_run": []}
    for path in paths:
        new = json.loads(path.read_text())
        before, cases = len(found["runs"]), {r["case"] for r in new["rows"]}
        calls = {(r["who"], r["case"]) for r in new["first"]}
        found["runs"] += new["runs"]
        found["rows"] = [r for r in found["rows"] if r["case"] not in cases] + [
            r | {"run": r["run"] + before} for r in new["rows"]]
        found["first"] = [r for r in found["first"] if (r["who"], r["case"]) not in calls]
        found["first"] += new["first"]
        found["not_run"] += [m for m in new["not_run"] if m not in found["not_run"]]
    return found
