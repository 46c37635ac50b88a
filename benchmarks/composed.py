"""The section of the composed ops: each beside its base, an op of the table, and Mamba-2's beside
its peers.

The ratio to the base is the price of the arithmetic around it. A composed op takes no `out`, so the
base is not given one here either: every call of both makes a new array.
"""

from .base import SYSTEMS, Case, Result
from .inputs import numpy_inputs, ours, plain
from .report import lines, met, ms, ratio
from .timing import Timed

SECTION = "composed"
# Mamba-2's: 64 values for 128 keys, and one B and C for all heads
CASES = [Case(op, **({"H": 1, "V": 64} if op == "ssd" else {})) for op in SYSTEMS]
PEERS = {"ssd": ("ggml", "PyTorch, minimal SSD", "PyTorch, minimal SSD, few products")}
FASTER = 4  # asked: a peer's time divided by ours


def arrays_of_base(case, x):
    """The base's arguments for the problem of a composed op with the arrays x."""
    if case.op != "ssd":
        return numpy_inputs(case.base)
    dt = x["dt"]
    return {"q": x["C"], "k": x["B"], "v": dt[..., None] * x["x"], "g": dt * x["A"], "scale": 1}


def checked(checker, peers, threads):
    """The calls to time, each checked: a base, the composed ops that it is the base of, peers."""
    found, there = [], set()

    def add(case, name, call):
        found.append(Timed(Result(case, name, SECTION, threads), call))

    for case in CASES:
        x = numpy_inputs(case)
        if case.base not in there:
            there.add(case.base)
            checker.ours(case.base)
            add(case.base, "linattn", plain(case.base.op, arrays_of_base(case, x)))
        checker.ours(case)
        add(case, "linattn", ours(case, x))
        for peer in peers:
            if peer.has(case):
                checker.peer(peer, case)
                add(case, peer.name, peer.make(case, x))
    return found


def one(record, case, peer="linattn"):
    """Its result, or None where the peer did not run."""
    found = [r for r in record.pick(section=SECTION, peer=peer) if r.case == case]
    return found[0] if found else None


def beside_base(record, peak):
    """A row for each composed op; `peak` in GFLOP/s, or None."""
    rows = []
    for case in CASES:
        mine, base = one(record, case), one(record, case.base)
        within = case.system.within
        rows.append(
            [
                f"{case.op} {case.shape}",
                ms(mine.median()),
                ms(mine.least()),
                ratio(case.flops / mine.median() / 1e9, peak),
                case.base.op,
                ms(base.median()),
                ms(base.least()),
                ratio(mine.median(), base.median()),
                f"<= {within:.2f}",
                met(mine.median() <= within * base.median()),
            ]
        )
    return rows


def beside_peers(record):
    """A row for each peer that a composed op is to be faster than, those that did not run too."""
    rows = []
    for case in CASES:
        for name in PEERS.get(case.op, ()):
            mine, other = one(record, case), one(record, case, name)
            asked = f">= {FASTER:.2f}"
            if other is None:
                rows.append([case.op, name, "not run", "-", "-", asked, "-"])
                continue
            figures = ms(other.median()), ms(other.least()), ratio(other.median(), mine.median())
            good = other.median() >= FASTER * mine.median()
            rows.append([case.op, name, *figures, asked, met(good)])
    return rows


def section(record, peak):
    """The lines of the page."""
    base = ["base", "its ms", "its least", "time / its", "asked", "met"]
    peer = ["peer", "its ms", "its least", "ratio", "asked", "met"]
    return [
        f"## Composed ops, forward, float32, T = {Case.T}",
        "",
        "A composed op is arithmetic around an op of the table, its base, which is timed here on "
        "the same numbers. Neither is given an array for its output. ssd, Mamba-2, has 16 heads of "
        "64 values and one B and C of 128 for all of them. share: of the float32 multiply-add "
        "peak, the operations being those that the base's recurrence needs.",
        "",
        *lines(["case", "ms", "least", "share", *base], beside_base(record, peak)),
        "Peers. ratio: the peer's time divided by ours. Minimal SSD is written as in the paper, "
        "and as few large products. ggml's ssm_scan takes a softplus of each time step besides.",
        "",
        *lines(["op", *peer], beside_peers(record)),
    ]
