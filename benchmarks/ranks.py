"""Rows over 2 to 1,024 ranks, by counting: nothing is measured, and no file is written but a plot.

    python -m benchmarks ranks
    python -m benchmarks ranks --plot docs/ranks.png

A rank first makes its map, waits for an exchange, and makes the call itself. In the backward pass
it first makes the gradient of its initial state (docs/distributed.md). So a rank of P takes

    map + forward + gradient of the initial state + backward + exchanges

where the parts are those of its tokens. The host runs ahead of the GPU. So a rank takes the longer
of two times: that of its kernels and exchanges, and that of the host. One call by itself also waits
for the host before each exchange, as long as the kernels before it take less. A layer's products,
and those of a multilayer perceptron, are shared by the ranks without an exchange.

The parts are milliseconds of an H200 between two events (32 heads, K = V = 128, or 4096 channels of
a scan, bfloat16), as `python -m benchmarks distributed` measures them: on 2026-11-30, and those of
2^16 tokens that are not cut on 2026-11-29 for `simple_gla`, `gla`, `gated_delta_rule` and `kda`.
They grow with the number of tokens. Normalised calls are never cut, and scans are not with 2^16
tokens. The whole row of `rwkv6` is four times a quarter of it.
"""

import sys
from typing import NamedTuple

import linattn

from .base import SYSTEMS
from .report import lines

HEADS, K, V = 32, 128, 128


class Parts(NamedTuple):
    """Milliseconds of the calls that a rank makes."""

    map: float
    forward: float
    initial: float  # the gradient of its initial state
    backward: float


class Measured(NamedTuple):
    row: tuple[float, float]  # milliseconds of one GPU with 2^20 tokens: forward, backward
    long: Parts  # of a rank with 2^18 tokens, which it cuts into sections
    cut: Parts  # with 2^16, in sections
    short: Parts  # with 2^16, not in sections
    one: tuple[float, float] | None = None  # of one GPU with 2^16 tokens, if they are others

    @property
    def of_one(self) -> tuple[float, float]:
        return self.one or (self.short.forward, self.short.backward)


ROW, LONG, SHORT = 1 << 20, 1 << 18, 1 << 16  # tokens
CUT = SHORT  # a rank with fewer tokens does not cut them; DPLR and titans are counted so, too
MEASURED = {
    "simple_gla": Measured(
        (15.00, 70.65),
        Parts(1.38, 2.68, 1.29, 15.67),
        Parts(0.42, 0.74, 0.39, 3.85),
        Parts(0.33, 0.95, 0.31, 4.10),
    ),
    "gla": Measured(
        (57.38, 136.52),
        Parts(3.81, 7.00, 2.69, 29.53),
        Parts(1.02, 1.73, 0.74, 7.24),
        Parts(0.92, 2.09, 0.65, 7.38),
    ),
    "gated_delta_rule": Measured(
        (28.83, 118.19),
        Parts(5.62, 3.56, 5.76, 22.64),
        Parts(1.36, 0.99, 1.32, 5.33),
        Parts(1.15, 1.20, 1.46, 5.87),
    ),
    "kda": Measured(
        (54.36, 212.72),
        Parts(9.38, 10.30, 10.50, 44.00),
        Parts(2.44, 2.54, 2.44, 10.62),
        Parts(2.52, 3.29, 3.13, 12.79),
    ),
    "rwkv6": Measured(
        (41.24, 138.45),
        Parts(3.82, 7.57, 2.70, 30.83),
        Parts(1.02, 1.88, 0.74, 7.52),
        Parts(0.93, 2.29, 0.66, 7.68),
    ),
    "dplr_delta_rule": Measured(
        (178.20, 539.84),
        Parts(28.81, 29.55, 30.07, 104.11),
        Parts(6.75, 7.59, 7.06, 25.82),
        Parts(6.93, 9.23, 8.74, 32.20),
    ),
    "titans": Measured(
        (188.39, 316.45),
        Parts(45.71, 16.59, 15.43, 56.75),
        Parts(11.41, 3.99, 3.85, 13.76),
        Parts(15.22, 8.11, 5.68, 17.04),
    ),
    "linear_attention": Measured(  # with elu + 1 and a normaliser
        (19.15, 171.90),
        Parts(1.65, 4.74, 31.44, 11.44),
        Parts(0.43, 1.23, 7.51, 2.91),
        Parts(0.43, 1.23, 7.51, 2.91),
        (1.20, 7.47),
    ),
    "retention": Measured(
        (14.53, 85.79),
        Parts(1.20, 2.69, 1.13, 16.72),
        Parts(0.38, 0.74, 0.34, 3.89),
        Parts(0.32, 0.96, 0.27, 4.28),
    ),
    "ssd": Measured(
        (16.68, 83.79),
        Parts(1.71, 2.82, 1.40, 19.18),
        Parts(0.52, 0.79, 0.43, 4.78),
        Parts(0.43, 1.08, 0.34, 5.08),
    ),
    "comba": Measured(
        (41.52, 146.74),
        Parts(8.91, 7.63, 6.75, 27.64),
        Parts(1.96, 1.78, 1.80, 6.57),
        Parts(2.10, 2.70, 2.69, 7.21),
    ),
    "precond_gated_delta_rule": Measured(
        (47.28, 164.27),
        Parts(10.42, 9.14, 8.23, 32.45),
        Parts(2.32, 2.14, 2.17, 7.79),
        Parts(2.46, 3.07, 3.06, 8.50),
    ),
    "selective_scan": Measured(
        (83.76, 320.80),
        Parts(9.67, 12.82, 11.32, 63.72),
        Parts(4.45, 5.29, 4.71, 20.25),
        Parts(4.45, 5.29, 4.71, 20.25),
        (5.27, 20.23),
    ),
    "hgrn": Measured(
        (39.42, 93.53),
        Parts(4.13, 5.10, 6.14, 13.27),
        Parts(1.93, 2.50, 2.61, 5.88),
        Parts(1.93, 2.50, 2.61, 5.88),
        (2.47, 5.86),
    ),
}
PLOTTED = tuple(MEASURED)[:7]  # one of each kind, between which the others lie
# Milliseconds of two GPUs that share 2^17 tokens, forward and backward, one call at a time: the GPU
# waits for the host.
TWO = {"simple_gla": 8.15, "gla": 12.12, "gated_delta_rule": 9.87, "kda": 19.06}
# Seconds of the host's calls of an exchange, forward and backward: of a rank that cuts its tokens,
# fitted to TWO, and of one that does not, fitted to the same of 2^16 tokens (2026-11-29, on another
# host: 5.03, 6.93, 6.08 and 10.91).
HOST, HOST_SHORT = (1.5e-3, 2.0e-3), (0.75e-3, 1.65e-3)
NVLINK, NETWORK = 450e9, 50e9  # bytes a second one way: within a host; 400 Gb/s for each GPU
NODE = 8  # GPUs of a host
FLOPS = 600e12  # a second, of bfloat16 products of a layer
WIDTH, MLP = HEADS * V, 11008  # columns of the model; of a multilayer perceptron
SCANS = {"selective_scan": 16, "hgrn": 1}  # numbers of a channel's state
# Of WIDTH x WIDTH in a layer: five if none is named. Mamba's has twice as many channels as columns.
PRODUCTS = {"selective_scan": 1.5, "hgrn": 4}
RANKS = (2, 4, 8, 16, 64, 256, 1024)
LENGTHS = (32768, 131072, 1 << 20, 16 << 20)


def one_gpu(op, T):
    """Seconds of one GPU with T tokens, forward and backward."""
    own = MEASURED[op]
    if T >= ROW:
        return 1e-3 * sum(own.row) * T / ROW
    return 1e-3 * sum(own.of_one) * T / SHORT


def exchange(op, ranks, backward=False):
    """Seconds of its bytes. A head's owner receives maps of all ranks, and sends states back."""
    if ranks == 1:
        return 0
    if op in SCANS:
        numbers = (2 if backward else 3) * SCANS[op] * V
    else:
        kind = linattn.VARIANTS[SYSTEMS[op].base if op in SYSTEMS else op]
        rows = 2 * K if kind.decay == "pair" else K
        matrix = rows**2 if kind.rule in ("delta", "dplr") else K if kind.decay == "key" else 1
        numbers = 2 * rows * V + (0 if backward else matrix)
    far = max(0, ranks - NODE) / ranks  # the part that leaves the host
    return 4 * HEADS * numbers * (far / NETWORK + (1 - far) / NVLINK)


def scaled(parts, factor):
    """In seconds."""
    return Parts(*(1e-3 * x * factor for x in parts))


def both_exchanges(op, ranks):
    return exchange(op, ranks) + exchange(op, ranks, backward=True)


def one_call(op, T, ranks):
    """Seconds of a call by itself, forward and backward: the GPU waits for the host."""
    parts, (host, host_back) = scaled(MEASURED[op].cut, T / ranks / SHORT), HOST
    waits = max(0, host - parts.map) + max(0, host_back - parts.initial)
    return sum(parts) + waits + both_exchanges(op, ranks)


def products(op, T, what):
    """Seconds of the products of T tokens: those of a layer, and three more of an MLP in a
    block."""
    numbers = 0 if what == "op" else PRODUCTS.get(op, 5) * WIDTH**2
    return 2 * (numbers + (3 * WIDTH * MLP if what == "block" else 0)) * T / FLOPS


def efficiency(op, T, ranks, what="op"):
    """The time of one GPU over that of all ranks together, forward and backward."""
    if ranks == 1:
        return 1
    own, tokens = MEASURED[op], T / ranks
    parts, host = scaled(own.short, tokens / SHORT), HOST_SHORT
    if tokens >= CUT:
        parts, host = scaled(own.cut, tokens / SHORT), HOST
        if T >= ROW:  # as long a row as that of `row`
            parts = scaled(own.long, tokens / LONG)
    kernels = sum(parts) + both_exchanges(op, ranks)
    one = one_gpu(op, T) + 3 * products(op, T, what)  # a backward pass has twice as many
    many = max(kernels + 3 * products(op, T / ranks, what), sum(host))
    return one / ranks / many


def percent(x):
    return f"{100 * x:.0f}"


def beside_measured():
    """Two ranks by counting, and as they were measured, one call at a time."""
    rows = []
    for op, measured in TWO.items():
        rows.append([op, f"{1e3 * one_call(op, 2 * SHORT, 2):.2f}", f"{measured:.2f}"])
    return lines(["two ranks, forward and backward, ms", "by counting", "measured"], rows)


def table(T):
    header = [f"T {T:,}, %", *(f"{ranks} ranks" for ranks in RANKS)]
    rows = []
    for op in MEASURED:
        for what in ("op", "layer", "block"):
            found = (percent(efficiency(op, T, ranks, what)) for ranks in RANKS)
            rows.append([f"{op}, {what}", *found])
    return lines(header, rows)


def plot(path):
    """The efficiency of a block against the number of ranks, a panel for each length."""
    from matplotlib.figure import Figure

    figure = Figure((11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS), sharey=True)
    for T, axes in zip(LENGTHS, panels, strict=True):
        for op in PLOTTED:
            found = [100 * efficiency(op, T, ranks, "block") for ranks in RANKS]
            axes.plot(RANKS, found, marker="o", markersize=3, label=op)
        axes.set_title(f"{T >> 20} Mi tokens" if T >> 20 else f"{T >> 10} Ki tokens", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS], fontsize=7)
        axes.set_ylim(0, 110)
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
