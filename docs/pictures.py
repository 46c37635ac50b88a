#!/usr/bin/env python3
"""Draw the pictures of the README: python docs/pictures.py (linattn, matplotlib).

docs/weights.png has the weights of every op beside those of softmax.

docs/speed.png is drawn from the tables of benchmarks/results. It shows the nanoseconds of a forward
pass per token and head against the sequence's length: of the library, of the fastest other
implementation of the same op in the same run, and of softmax attention. All come from the pages'
own tables, so the picture has no figure that a page does not have. Other pages than the README's
two can be named as arguments. Then docs/speed.png alone is drawn.
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import linattn
import linattn.testing

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
PAGES = {  # a page, and its panel's title
    "cpu-amd-epyc-zen4.md": "one core of an AMD EPYC (Zen 4), float32",
    "cuda-nvidia-h200.md": "NVIDIA H200, bfloat16",
}
HEADING = "Beside softmax attention"
OURS, PEER, SOFTMAX = "#1f5fa8", "#8a8a8a", "#c4572b"


def table(page: Path) -> list[dict[str, str]]:
    """The rows of the table below HEADING."""
    if f"## {HEADING}\n" not in page.read_text():
        sys.exit(f"{page} has no table `{HEADING}`: a run of `python -m benchmarks` makes it")
    text = page.read_text().split(f"## {HEADING}\n", 1)[1]
    lines = [line for line in re.split(r"\n## ", text)[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def along(page: Path) -> tuple[str, list[dict[str, str]]]:
    """The heads that were measured at most lengths, and the rows of one sequence of them by T."""
    by_heads: dict[str, dict[int, dict[str, str]]] = {}
    for row in table(page):
        if found := re.match(r"B1 T(\d+) H(\d+)( \w+)?$", row["shape"]):
            by_heads.setdefault(found[2], {})[int(found[1])] = row
    heads = max(by_heads, key=lambda heads: len(by_heads[heads]))
    return heads, [{"T": str(T), **row} for T, row in sorted(by_heads[heads].items())]


def line(axes, rows, column: str, name: str, color: str, up: int = 0, **more) -> None:
    """One line, with its name `up` points above the right end; {} in it stands for the peer's."""
    found = [row for row in rows if row[column] not in ("-", "failed")]
    if not found:
        return
    points = [(int(row["T"]), float(row[column])) for row in found]
    axes.plot(*zip(*points, strict=True), "o-", ms=3.5, color=color, **more)
    axes.annotate(
        name.format(found[-1].get(column.removesuffix("'s ns"))),
        points[-1],
        (6, up),
        textcoords="offset points",
        color=color,
        fontsize=8,
        va="center",
    )


def draw(axes, page: Path, title: str) -> None:
    heads, rows = along(page)
    ours = [float(row["linear_attention"]) for row in rows]
    slowest = [float(row["slowest op's ns"]) for row in rows]
    axes.fill_between([int(row["T"]) for row in rows], ours, slowest, color=OURS, alpha=0.15, lw=0)
    line(axes, rows, "softmax's ns", "{}", SOFTMAX)
    line(axes, rows, "best peer's ns", "{}, the best peer", PEER, up=7)
    line(axes, rows, "linear_attention", "linattn", OURS, up=-4, lw=2.5)
    lengths = [int(row["T"]) for row in rows]
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.2, lengths[-1] * 6))
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths], fontsize=7)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [m * 10.0**e for e in range(-2, 8) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks], fontsize=7)
    axes.grid(True, alpha=0.25)
    axes.set_title(f"{title}, {heads} head{'s' * (heads != '1')}", fontsize=9)
    axes.set_xlabel("T, tokens of the sequence", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def weights() -> None:
    """docs/weights.png. Of 24 tokens each writes at one of four keys, and asks for one of them."""
    rng = np.random.default_rng(5)
    T, K, decay = 24, 4, 0.9
    keys, asked = rng.integers(K, size=(2, T))
    q, k = np.eye(K)[asked], np.eye(K)[keys]
    faded = -rng.exponential(-np.log(decay), (T, K))  # logs of decays, 0.9 in the mean
    known = {
        "g": faded[:, 0],
        "beta": np.ones(T),
        "gamma": np.array([decay]),
        "slopes": np.array([-np.log(decay)]),
    }
    found = {"softmax": linattn.reference.softmax_weights(4 * q, k, scale=1)}
    for op in linattn.OPS:
        if not known.keys() >= set(linattn.testing.GATES[op]):
            continue  # it has other arrays, or a second state
        gates = {name: known[name] for name in linattn.testing.GATES[op]}
        if linattn.VARIANTS[op].decay == "key":
            gates["g"] = faded
        scale = {} if linattn.VARIANTS[op].normaliser else {"scale": 1}
        found[op] = linattn.implicit_weights(q, k, op=op, **gates, **scale)
    rows = 3
    figure, axes = plt.subplots(
        rows, -(-len(found) // rows), figsize=(7, 6.2), layout="constrained"
    )
    linattn.plot.weights(found, axes=axes.ravel()[: len(found)])
    for i, ax in enumerate(axes.flat):
        ax.set(xlabel="is read" * (i // axes.shape[1] == rows - 1), ylabel="")
        ax.set_ylabel("reads" * (i % axes.shape[1] == 0))
        ax.title.set_fontsize(9)
    figure.savefig(HERE / "weights.png", dpi=90)


def main() -> None:
    if not sys.argv[1:]:
        weights()
    pages = {Path(name): Path(name).stem for name in sys.argv[1:]}
    pages = pages or {RESULTS / name: title for name, title in PAGES.items()}
    figure, panels = plt.subplots(
        1, len(pages), figsize=(4.8 * len(pages), 3.7), layout="constrained", squeeze=False
    )
    for axes, (page, title) in zip(panels[0], pages.items(), strict=True):
        draw(axes, page, title)
    panels[0][0].set_ylabel("nanoseconds per token and head, forward", fontsize=8)
    figure.supxlabel(
        "linattn: linear_attention; the shade reaches up to its slowest op. Less is better.",
        fontsize=8,
    )
    figure.savefig(HERE / "speed.png", dpi=100)


if __name__ == "__main__":
    main()
