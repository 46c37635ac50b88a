"""The parts of every report: where and when it was made, Markdown tables, the files."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

import linattn
from linattn.config import config

from .base import BESIDE, Case, Result

HERE = Path(__file__).resolve().parent


@dataclass
class Record:
    """Everything the reports need. A run has `about` and `ceilings`; there are several runs where
    records were put together, and a result says which is its own."""

    runs: list[dict]
    results: list[Result] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)  # what, why
    memory: float | None = None

    def pick(self, **wanted):
        return [r for r in self.results if r.has(**wanted)]

    def write(self, given, name, markdown, say=True):
        """DIR/name.md and .json, if there is a DIR, and says where."""
        if given.results is None:
            return
        given.results.mkdir(parents=True, exist_ok=True)
        for suffix, text in (".md", markdown), (".json", json.dumps(asdict(self)) + "\n"):
            path = given.results / f"{name}{suffix}"
            path.write_text(text)
            if say:
                print(f"written: {path}")

    @classmethod
    def read(cls, path):
        found = json.loads(Path(path).read_text())
        found["results"] = [
            Result(**r | {"case": r["case"] and Case(**r["case"])}) for r in found["results"]
        ]
        found["not_run"] = [tuple(pair) for pair in found["not_run"]]
        return cls(**found)


def machine():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.+)$", text, re.M)
    return match[1].strip() if match else platform.processor() or platform.machine()


def gpu():
    """(its name, a line about it), of the current GPU."""
    import torch

    it = torch.cuda.get_device_properties(torch.cuda.current_device())
    return it.name, (
        f"{it.name}, {it.multi_processor_count} multiprocessors, "
        f"{it.total_memory / 2**30:.0f} GiB, L2 {it.L2_cache_size / 2**20:.0f} MiB, "
        f"driver {smi('driver_version')}"
    )


def smi(what):
    """An answer of nvidia-smi about the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        return (
            subprocess.run(command, check=True, capture_output=True, text=True)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def commit():
    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(HERE), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed = git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":/",
            ":(exclude,top)benchmarks/results",
        )
        return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def about(given, peers=(), **more):
    """Facts for the head of a report."""
    here = config()
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{machine()}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.2f} (mean number of running processes)",
        "commit": given.commit or commit(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "threads": str(given.threads),
        "linattn": f"{linattn.__version__}, {here['in use'].split()[0]}, {here['compiler']}",
        "Python": here["Python"],
        "NumPy": here["NumPy"],
    }
    if "torch" in sys.modules:
        facts["PyTorch"] = sys.modules["torch"].__version__
    return facts | {peer.name: peer.version for peer in peers} | more


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def results_name(program):
    """By machine, and by instruction set where one was asked for."""
    asked = os.environ.get("LINATTN_ISA")
    return f"{program}-{slug(machine())}" + (f"-{asked}" if asked else "")


def facts(about):
    """Lines of a list. A command is code: a page may take what lies between two $ for math."""
    return [
        f"- {name}: `{value}`" if name == "command" else f"- {name}: {value}"
        for name, value in about.items()
    ]


def not_run(record):
    return [f"- not run: {what} ({why})" for what, why in record.not_run]


def lines(header, rows):
    """A Markdown table; all columns but the first to the right."""
    width = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]

    def line(cells):
        return (
            "| "
            + " | ".join(
                str(c).ljust(w) if i == 0 else str(c).rjust(w)
                for i, (c, w) in enumerate(zip(cells, width, strict=True))
            )
            + " |"
        )

    rule = (
        "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(width)) + "|"
    )
    return [line(header), rule, *(line(row) for row in rows), ""]


def beside_softmax(record, kind):
    """The table of linear attention, the op that takes most, the best peer and softmax attention,
    by one kind of time: docs/pictures.py draws it."""
    op, softmax = "linear_attention", {r.case: r for r in record.pick(section=BESIDE)}
    alike = {(case.H, case.D, case.dtype) for case in softmax}
    timed = [
        r
        for r in record.pick(pass_="forward")
        if r.section in ("table", "cost") and (r.case.H, r.case.D, r.case.dtype) in alike
    ]

    def cells(r):
        """Of a result that may be None: its name, and nanoseconds per token and head."""
        if r is None or not r.median(kind):
            return [r.peer, "failed"] if r else ["none", "-"]
        ns = 1e9 * r.median(kind) / (r.case.B * r.case.T * r.case.H)
        return [r.peer, format(ns, ".0f" if ns >= 100 else ".3g")]

    def ranked(found):
        return sorted((r for r in found if r.median(kind)), key=lambda r: r.median(kind))

    same_shape = {}
    for r in timed:
        same_shape.setdefault(replace(r.case, op=op), []).append(r)
    rows = []
    for r in sorted(timed, key=lambda r: (r.case.H, r.case.D, r.case.dtype, r.case.T)):
        if (r.case.op, r.peer) != (op, "linattn"):
            continue
        case, soft = r.case, softmax.get(r.case)
        ours = ranked(x for x in same_shape[case] if x.peer == "linattn")
        best = ranked(x for x in same_shape[case] if x.peer != "linattn" and x.case == case)
        rows.append(
            [
                case.shape,
                cells(r)[1],
                *([ours[-1].case.op, cells(ours[-1])[1]] if ours else ["none", "-"]),
                *cells(best[0] if best else None),
                *cells(soft),
                ratio(soft and soft.median(kind), r.median(kind)),
            ]
        )
    header = ["shape", op]
    for name in "slowest op", "best peer", "softmax":
        header += [name, f"{name}'s ns"]
    return [
        "## Beside softmax attention",
        "",
        "Nanoseconds per token and head of a forward pass. The best peer is linear attention's.",
        "Softmax attention is causal, of the same q, k and v. ratio: its time divided by ours.",
        "",
        *lines([*header, "ratio"], rows),
    ] * bool(softmax)


def text(value, form=".3f", times=1.0):
    """A number in a table, "-" for none."""
    return "-" if value is None else format(value * times, form)


def ms(seconds, form=".3f"):
    return text(seconds, form, 1e3)


def us(seconds):
    return text(seconds, ".1f", 1e6)


def ratio(a, b):
    return "-" if not a or not b else f"{a / b:.2f}"


def met(good):
    return "yes" if good else "NO"


def plural(n):
    return f"{n} thread{'s' * (n > 1)}"


def slope(lengths, seconds):
    """The exponent p of the least squares fit of time = c T^p."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])
