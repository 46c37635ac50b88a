"""Rows over 2 to 1,024 ranks, by counting: nothing is measured, and no file is written but a plot.

    python -m benchmarks ranks
    python -m benchmarks ranks --plot docs/ranks.png

A rank that a sequence passes walks over its tokens twice, or in a delta rule's forward pass three
times; then it waits for an exchange (docs/distributed.md). So P ranks take

    (walks forward * F + walks backward * B) / P + exchanges

where F and B are the times of one GPU. A forward pass by itself waits for the host's calls of its
exchange. With a backward pass behind it these calls run beside the kernels, as long as the kernels
take longer. A layer's products, and those of a multilayer perceptron, are shared by the ranks
without an exchange.

F and B are those of `python -m benchmarks distributed` on two H200 of one host (2026-11-26; T
65536, 32 heads, K = V = 128, bfloat16), as milliseconds of one GPU. They grow with T: the heads of
one row leave some of the GPU's processors without work, at any T.
"""

import sys
from typing import NamedTuple

import linattn

from .report import lines

TOKENS, HEADS, K, V = 65536, 32, 128, 128
MEASURED = {  # op: one GPU forward and with backward, two GPUs forward and with backward; ms
    "simple_gla": (1.64, 8.6, 2.12, 8.6),
    "gla": (2.65, 19.3, 3.36, 19.0),
    "gated_delta_rule": (2.78, 11.4, 3.21, 11.5),
    "kda": (3.80, 26.7, 4.61, 23.2),
}
HOST = 0.5e-3  # the host's calls of an exchange: forward, two GPUs less one, above
NVLINK, NETWORK = 450e9, 50e9  # bytes a second one way: within a host; 400 Gb/s for each GPU
NODE = 8  # GPUs of a host
FLOPS = 600e12  # a second, of bfloat16 products of a layer
WIDTH, MLP = HEADS * V, 11008  # columns of the model; of a multilayer perceptron
RANKS = (2, 4, 8, 16, 64, 256, 1024)
LENGTHS = (32768, 131072, 1 << 20, 16 << 20)


class Cost(NamedTuple):
    """Seconds of a forward pass, or of both passes."""

    forward: float
    both: float

    def plus(self, seconds):
        """With products, whose backward pass takes twice as long."""
        return Cost(self.forward + seconds, self.both + 3 * seconds)


def one_gpu(op, T):
    forward, both, *_ = MEASURED[op]
    return Cost(forward * 1e-3 * T / TOKENS, both * 1e-3 * T / TOKENS)


def walks(op, ranks):
    """How often the slowest rank goes over its tokens, forward and backward. Of two ranks each has
    an end of the sequence: one walks while the other waits."""
    if ranks == 1:
        return 1, 1
    columns = 1 + K / V if linattn.VARIANTS[op].rule == "delta" else 1  # those of X and of M
    return (1 + columns if ranks > 2 else 2), 2


def exchange(op, ranks, backward=False):
    """Seconds of its bytes. A head's owner receives maps of all ranks, and sends states back."""
    if ranks == 1:
        return 0
    kind = linattn.VARIANTS[op]
    matrix = K * K if kind.rule == "delta" else K if kind.decay == "key" else 1
    numbers = 2 * K * V + (0 if backward else matrix)
    far = max(0, ranks - NODE) / ranks  # the part that leaves the host
    return 4 * HEADS * numbers * (far / NETWORK + (1 - far) / NVLINK)


def shared(op, T, ranks):
    """The same of a row over many ranks."""
    one = one_gpu(op, T / ranks)
    ahead, back = walks(op, ranks)
    forward = ahead * one.forward + exchange(op, ranks)
    both = forward + back * (one.both - one.forward) + exchange(op, ranks, backward=True)
    host = HOST if ranks > 1 else 0
    return Cost(forward + host, max(both, 2 * host))


def products(T, what):
    """Seconds of the products of T tokens: five of WIDTH x WIDTH in a layer, and three more of an
    MLP in a block."""
    numbers = 0 if what == "op" else 5 * WIDTH**2
    return 2 * (numbers + (3 * WIDTH * MLP if what == "block" else 0)) * T / FLOPS


def efficiency(op, T, ranks, what="op"):
    """The time of one GPU over that of all ranks together: forward, and with backward."""
    one = one_gpu(op, T).plus(products(T, what))
    many = shared(op, T, ranks).plus(products(T / ranks, what))
    return Cost(one.forward / ranks / many.forward, one.both / ranks / many.both)


def percent(x):
    return f"{100 * x:.0f}"


def beside_measured():
    """Two ranks by counting, and as they were measured."""
    rows = []
    for op, (*_, forward, both) in MEASURED.items():
        by_count = shared(op, TOKENS, 2)
        shown = (by_count.forward * 1e3, forward, by_count.both * 1e3, both)
        rows.append([op, *(f"{x:.2f}" for x in shown)])
    header = ["two ranks, ms", "forward", "measured", "with backward", "measured"]
    return lines(header, rows)


def table(T):
    header = [f"T {T:,}, %", *(f"{ranks} ranks" for ranks in RANKS)]
    rows = []
    for op in MEASURED:
        for what in ("op", "layer", "block"):
            found = (percent(efficiency(op, T, ranks, what).both) for ranks in RANKS)
            rows.append([f"{op}, {what}", *found])
    return lines(header, rows)


def plot(path):
    """The efficiency of a block against the number of ranks, a panel for each length."""
    from matplotlib.figure import Figure

    figure = Figure((11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS), sharey=True)
    for T, axes in zip(LENGTHS, panels, strict=True):
        for op in MEASURED:
            found = [100 * efficiency(op, T, ranks, "block").both for ranks in RANKS]
            axes.plot(RANKS, found, marker="o", markersize=3, label=op)
        axes.set_title(f"{T >> 20} Mi tokens" if T >> 20 else f"{T >> 10} Ki tokens", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS], fontsize=7)
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("% of one GPU's rate, a GPU")
    panels[0].legend(fontsize=7, loc="lower left")
    figure.supxlabel("ranks", fontsize=10)
    figure.savefig(path, dpi=110)


def run(given):
    print("\n".join(beside_measured()))
    for T in LENGTHS:
        print("\nForward and backward, as a part of one GPU's rate:\n")
        print("\n".join(table(T)))
    if given.plot:
        try:
            plot(given.plot)
        except ImportError:
            sys.exit("--plot needs matplotlib: pip install matplotlib")
