"""The report of the GPU program, of one run or of several together. It needs no PyTorch, so that
runs made elsewhere can be put together here."""

from . import report
from .base import BESIDE
from .report import lines, met, ms, ratio, text, us

# linattn's case, milliseconds asked
FORWARD = (
    ("gated_delta_rule forward B1 T32768 H16/64", 1.5),
    ("gated_delta_rule forward B4 T8192 H16/64", 0.85),
    ("gated_delta_rule forward B1 T32768 H2/8", 0.35),
    ("kda forward B1 T8192 H96", 1.4),
    ("simple_gla forward B1 T8192 H96", 0.45),
    ("gla forward B1 T8192 H96", 1.0),
    ("delta_rule forward B1 T8192 H96", 0.8),
)
STEP_SHARE, STEP_GRAPH, STEP_CALL, FIRST = 0.85, 6e-6, 20e-6, 1.0
NOT_RUN = "not run"


def write(given, record, say=True):
    """cuda-DEVICE.md and .json, or cuda-dry-run.*."""
    device = record.runs[0]["about"]["device"]
    name = "dry-run" if "dry run" in device else report.slug(device.split(",")[0])
    record.write(given, f"cuda-{name}", markdown(record), say=say)


def merged(paths):
    """Several runs as one; a case belongs whole to the last run that has it."""
    found = report.Record([])
    for path in paths:
        new = report.Record.read(path)
        timed = {str(r.case) for r in new.pick(section="table")}
        calls = {(r.peer, str(r.case)) for r in new.pick(section="first")}
        for r in new.results:
            r.run += len(found.runs)
        found.runs += new.runs
        found.results = [
            r
            for r in found.results
            if (
                (r.peer, str(r.case)) not in calls
                if r.section == "first"
                else str(r.case) not in timed
            )
        ] + new.results
        found.not_run += [pair for pair in new.not_run if pair not in found.not_run]
    return found


def run(given):
    """Puts the results of several runs together."""
    record = merged(given.merge)
    print(short(record))
    write(given, record)


def floors(record, r):
    """Seconds: every array moved once at copy speed; the products at the matrix units' speed."""
    limits = record.runs[r.run]["ceilings"]
    return (
        r.case.bytes / (limits["copy"]["median"] * 1e12),
        r.case.products / (limits["matmul"]["median"] * 1e12),
    )


def ours_of(record, **wanted):
    return record.pick(section="table", peer="linattn", **wanted)


def rivals(record, r, which="", kind="graph"):
    """The case's timed results of others, the fastest first."""
    found = [
        x
        for x in record.pick(section="table", case=r.case)
        if x.peer != "linattn" and x.peer.startswith(which) and x.median(kind)
    ]
    return sorted(found, key=lambda x: x.median(kind))


def targets(record):
    """[what, asked, measured, met] of each target."""
    rows = []
    for op in dict.fromkeys(r.case.op for r in record.pick(section="table")):
        for pass_ in ("forward", "step"):
            cases = ours_of(record, op=op, pass_=pass_)
            if not cases:
                continue
            ratios = {
                r.case.shape: rivals(record, r, "fla")[0].median("graph") / r.median("graph")
                for r in cases
                if r.median("graph") and rivals(record, r, "fla")
            }
            failed = [str(r.case) for r in cases if r.error]
            what = f"fla / ours, {op} {pass_}, the least of {len(ratios)}"
            if failed:
                rows.append([what, "> 1.00", f"ours failed: {failed[0]}", "NO"])
            elif ratios:
                rows.append(extreme(what, "> 1.00", ratios, min, ".2f", lambda x: x > 1))
    for name, asked in FORWARD:
        seconds = next((r.median("graph") for r in ours_of(record) if str(r.case) == name), None)
        rows.append(
            [
                f"{name}, ms",
                f"<= {asked:.2f}",
                ms(seconds) if seconds else NOT_RUN,
                met(seconds * 1e3 <= asked) if seconds else "-",
            ]
        )

    def of_steps(B, value):
        return {
            r.case.op: value(r)
            for r in ours_of(record, pass_="step", B=B, H=32)
            if r.median("graph")
        }

    rows.append(
        extreme(
            "step B256 H32, share of copy speed, the least",
            f">= {STEP_SHARE:.2f}",
            of_steps(256, lambda r: floors(record, r)[0] / r.median("graph")),
            min,
            ".2f",
            lambda x: x >= STEP_SHARE,
        )
    )
    for what, kind, asked in (
        ("in a graph", "graph", STEP_GRAPH),
        ("until the call from Python returns", "launch", STEP_CALL),
        ("calls back to back from Python", "eager", STEP_CALL),
    ):
        rows.append(
            extreme(
                f"step B1 H32, us {what}, the most",
                f"<= {asked * 1e6:.0f}",
                of_steps(1, lambda r, kind=kind: r.median(kind) * 1e6),
                max,
                ".1f",
                lambda x, asked=asked: x <= asked * 1e6,
            )
        )
    alone = {
        r.case.op: r.median("import") + r.median()
        for r in record.pick(section="first", peer="linattn")
        if r.median()
    }
    rows.append(
        extreme(
            "import and first call in a fresh process, s, the most",
            f"<= {FIRST:.0f}",
            alone,
            max,
            ".2f",
            lambda x: x <= FIRST,
        )
    )
    return rows


def extreme(what, asked, values, pick, form, good):
    if not values:
        return [what, asked, NOT_RUN, "-"]
    key = pick(values, key=values.get)
    return [f"{what} ({key})", asked, format(values[key], form), met(good(values[key]))]


def target_lines(record):
    return ["## Targets", "", *lines(["what", "asked", "measured", "met"], targets(record))]


def table_of(record, pass_, unit, kind):
    """Ours, fla and the best of all peers by one kind of time, with the floors."""
    rows = []
    for r in ours_of(record, pass_=pass_):
        fla, best = ([*rivals(record, r, name, kind), None][0] for name in ("fla", ""))
        fla, own, low = fla and fla.median(kind), r.median(kind), floors(record, r)
        rows.append(
            [
                str(r.case),
                "failed" if r.error else unit(own),
                unit(fla),
                ratio(fla, own),
                best.peer if best else "none",
                unit(best and best.median(kind)),
                ratio(best and best.median(kind), own),
                *(unit(x) for x in low),
                ratio(max(low), own),
            ]
        )
    name = unit.__name__
    return lines(
        [
            "case",
            name,
            f"fla {name}",
            "fla / ours",
            "best peer",
            f"its {name}",
            "its / ours",
            f"bytes {name}",
            f"products {name}",
            "floor / ours",
        ],
        rows,
    )


def short(record):
    """The end of the output: a line for each case, the failures, and the targets."""
    rows = []
    for r in ours_of(record):
        unit, best = us if r.case.pass_ == "step" else ms, [*rivals(record, r), None][0]
        graph = r.median("graph")
        rows.append(
            [
                str(r.case),
                unit(graph),
                unit(r.median("eager")),
                unit(r.median("launch")),
                ratio(max(floors(record, r)), graph),
                f"{best.peer} {unit(best.median('graph'))}" if best else "-",
                ratio(best and best.median("graph"), graph),
            ]
        )
    failed = [
        f"- {r.case}, {r.peer}: {r.error[:160]}" for r in record.pick(section="table") if r.error
    ]
    return "\n".join(
        [
            *lines(["case", "graph", "eager", "call", "floor / it", "best peer", "ratio"], rows),
            "ms; us for a step",
            "",
            *failed,
            "",
            *target_lines(record),
        ]
    )


def markdown(record):
    devices = dict.fromkeys(run["about"]["device"].split(",")[0] for run in record.runs)
    out = [f"# linattn on {' and '.join(devices)}", "", *target_lines(record)]
    for i, one in enumerate(record.runs):
        several = f"## Run {i + 1} of {len(record.runs)}"
        out += [several if len(record.runs) > 1 else "## The run", "", *report.facts(one["about"])]
        # none: the time was up before the first case
        out += [
            f"- {c['what']}: {c['median']:.{3 if key == 'copy' else 1}f} {c['unit']}"
            for key, c in one.get("ceilings", {}).items()
        ] + [""]
    out += [
        *report.not_run(record),
        "",
        """\
K = V = 128, or as the case says (K256: both); q, k, v and o bfloat16, or as it says (tf32: float32,
ours with `allow_tf32=True`, fla with the default of Triton's products, tf32); gates (the
logarithm of the decay) and beta float32, no state in, none out; a step's state float32. H16/64: 16
heads of q and k, 64 of v; no call is given repeated heads. Every output was checked at the shape
that is timed against the recurrence in float64 (rms below 8e-3, in float16 2e-3, tf32 1e-3; of any
64 tokens of a head below ten times that); a failed call is named and not timed. Ours and the peers
take turns; medians.

- graph: device time of a call, several captured in one graph, over copies of the inputs together
  twice as large as the cache. A call that is not captured is timed by events, and a note says so.
- eager: wall time of a call from Python, calls back to back. call: until it returns.
- bytes: every array moved once, at the copy's speed. products: those of the chunked form at the
  matrix product's speed; per token 2 C K for each head of q and k, 2 C V + 4 K V for each of v,
  with the delta rule 2 C K and 2 C V + 2 K V + 2 C C / 3 more, C = 64; 4 K V or 6 K V for a step.
  floor: the larger of the two.
""",
        "",
    ]
    for title, pass_, unit, kind in (
        ("Forward, in a graph", "forward", ms, "graph"),
        ("Forward, called from Python", "forward", ms, "eager"),
        ("One step, in a graph", "step", us, "graph"),
        ("One step, called from Python, back to back", "step", us, "eager"),
        ("One step, until the call returns", "step", us, "launch"),
    ):
        out += [f"## {title}", "", *table_of(record, pass_, unit, kind)]
    out += report.beside_softmax(record, "graph")
    out += [
        "## First calls",
        "",
        """\
Seconds in a fresh process, the GPU in use and the inputs there before: importing, and the first
call, which for a compiler at run time is compilation and tuning (at 256 tokens).
""",
        "",
        *lines(
            ["peer", "case", "import s", "first call s", "how"],
            [
                [r.peer, str(r.case), text(r.median("import")), text(r.median()), r.error or r.note]
                for r in record.pick(section="first")
            ],
        ),
    ]
    rows = record.pick(section="table") + record.pick(section=BESIDE)
    out += [
        "## Every peer",
        "",
        "ms; first: the first call in the measuring process, in s.",
        "",
        *lines(
            [
                "case",
                "peer",
                "graph",
                "least",
                "eager",
                "first",
                "rms",
                "64 tokens'",
                "calls",
                "copies",
                "note",
            ],
            [
                [
                    str(r.case),
                    r.peer,
                    ms(r.median("graph")),
                    ms(r.least("graph")),
                    ms(r.median("eager")),
                    text(r.median("first")),
                    text(r.rms, ".1e"),
                    text(r.rms_chunk, ".1e"),
                    r.calls or "-",
                    r.copies,
                    r.error or r.note,
                ]
                for r in rows
            ],
        ),
    ]
    whys = dict.fromkeys((f"{r.case.pass_} {r.case.shape}", r.case.why) for r in rows)
    out += ["## Why these cases", "", *(f"- {what}: {why}" for what, why in whys)]
    return "\n".join(out) + "\n"
