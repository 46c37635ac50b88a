"""Rows over 2 to 1,024 ranks, by counting: nothing is measured, and no file is written but a plot.

    python -m benchmarks ranks
    python -m benchmarks ranks --plot docs/ranks.png

A rank first makes its map, waits for an exchange, and makes the call itself. In the backward pass
it first makes the gradient of its initial state (docs/distributed.md). So P ranks take

    (map + forward + gradient of the initial state + backward) / P + exchanges

where the parts are those of one GPU with all tokens. Of two ranks the first one makes no map, but
its final state. The host's calls of an exchange run beside the kernels before it, as long as
these take longer. A forward pass by itself also waits for the host's first calls. A layer's
products, and those of a multilayer perceptron, are shared by the ranks without an exchange.

The parts are milliseconds of an H200 between two events (2026-11-29; T 65536, 32 heads, K = V =
128, bfloat16), as `python -m benchmarks distributed` measures them. They grow with T.
"""

import sys
from typing import NamedTuple

import linattn

from .report import lines

TOKENS, HEADS, K, V = 65536, 32, 128, 128


class Parts(NamedTuple):
    """Milliseconds of one GPU: of all calls that a rank makes."""

    final: float  # its final state
    map: float
    forward: float
    initial: float  # the gradient of its initial state
    backward: float


MEASURED = {
    "simple_gla": Parts(0.31, 0.33, 0.95, 0.31, 4.10),
    "gla": Parts(0.66, 0.92, 2.09, 0.65, 7.38),
    "gated_delta_rule": Parts(1.13, 1.15, 1.20, 1.46, 5.87),
    "kda": Parts(2.51, 2.52, 3.29, 3.13, 12.79),
}
# Milliseconds of two GPUs, forward and backward. Forward passes alone are bound by the host, whose
# time varied by half from op to op.
TWO = {"simple_gla": 5.03, "gla": 6.93, "gated_delta_rule": 6.08, "kda": 10.91}
# Seconds of the host's calls of an exchange, fitted to TWO. On another host they took half.
HOST, HOST_BACK = 0.75e-3, 1.65e-3
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

    def times(self, factor):
        return Cost(*(factor * x for x in self))

    def plus(self, seconds):
        """With products, whose backward pass takes twice as long."""
        return Cost(self.forward + seconds, self.both + 3 * seconds)


def one_gpu(op, T):
    own = MEASURED[op]
    return Cost(own.forward, own.forward + own.backward).times(1e-3 * T / TOKENS)


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
    if ranks == 1:
        return one_gpu(op, T)
    own, part = MEASURED[op], 1e-3 * T / ranks / TOKENS
    ahead = part * (own.final if ranks == 2 else own.map)
    # the GPU waits for the host's calls if what it did before them takes less time
    forward = ahead + max(0, HOST - ahead) + part * own.forward + exchange(op, ranks)
    initial = part * own.initial
    back = (
        initial
        + max(0, HOST_BACK - initial)
        + part * own.backward
        + exchange(op, ranks, backward=True)
    )
    return Cost(forward + HOST, forward + back)


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
    for op, measured in TWO.items():
        rows.append([op, f"{1e3 * shared(op, TOKENS, 2).both:.2f}", f"{measured:.2f}"])
    return lines(["two ranks, forward and backward, ms", "by counting", "measured"], rows)


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
