#!/usr/bin/env python3
"""Draw docs/speed.png from the tables of benchmarks/results: python docs/pictures.py (matplotlib).

It shows the nanoseconds of a forward pass per token and head, of every op and of the fastest other
implementation in the same run. Both come from the pages' own tables, so the picture has no figure
that a page does not have.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
OURS, PEER = "#1f5fa8", "#c9c9c9"


def table(page: Path, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading."""
    text = page.read_text().split(f"## {heading}\n", 1)[1]
    lines = [line for line in re.split(r"\n## ", text)[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def on_a_cpu() -> list[tuple[str, float, float, str]]:
    rows = table(RESULTS / "cpu-amd-epyc.md", "forward, float32, T = 512")
    return [(row["op"], float(row["ms"]), float(row["its ms"]), row["best peer"]) for row in rows]


def on_a_gpu() -> list[tuple[str, float, float, str]]:
    rows = table(RESULTS / "cuda-nvidia-h200.md", "Forward, in a graph")
    case = re.compile(r"(\w+) forward B1 T8192 H96")
    return [
        (found[1], float(row["ms"]), float(row["its ms"]), row["best peer"])
        for row in rows
        if (found := case.fullmatch(row["case"]))
    ]


def draw(axes, rows, title: str, tokens: int) -> None:
    """Two bars an op: ours, and the best peer's with its name."""
    for i, (_op, ours, peer, who) in enumerate(rows):
        for offset, ms, color, text in ((-0.2, ours, OURS, ""), (0.2, peer, PEER, f" {who}")):
            ns = 1e6 * ms / tokens
            axes.barh(i + offset, ns, 0.38, color=color)
            number = f"{ns:,.0f}" if ns >= 100 else f"{ns:.2f}"
            axes.text(ns, i + offset, f" {number}{text}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(1e6 * max(row[1], row[2]) / tokens for row in rows))
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("nanoseconds per token and head, forward; less is better", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, (cpu, gpu) = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    title = "one core of an AMD EPYC (Zen 5): float32, T = 512, 16 heads"
    draw(cpu, on_a_cpu(), title, 512 * 16)
    draw(gpu, on_a_gpu(), "NVIDIA H200: bfloat16, T = 8192, 96 heads", 8192 * 96)
    bars = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, PEER)]
    names = ["linattn", "the fastest other implementation in the same run"]
    figure.legend(bars, names, fontsize=8, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(HERE / "speed.png", dpi=100)


if __name__ == "__main__":
    main()
