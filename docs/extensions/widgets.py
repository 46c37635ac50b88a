"""The pictures with sliders: every number is computed here by linattn, when the site is built.

A widget has controls, and a frame for each setting of them. `WIDGETS` has them by the name that a
page gives to the directive `frames`.
"""

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

import linattn
from linattn.features import FEATURE_MAPS
from linattn.testing import GATES

# The worked example of docs/math.md.
TOKENS = ("The", "cat", "sat", "on", "mat")
Q = np.array([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], float)
K = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]])
V = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]])


class Slider(NamedTuple):
    label: str
    texts: Sequence[str]


class Choice(NamedTuple):
    label: str
    texts: Sequence[str]


class Frame(NamedTuple):
    """The view of one setting: HTML, and the sentence with the number that matters."""

    body: str
    says: str


class Widget(NamedTuple):
    title: str
    controls: Sequence[Slider | Choice]
    frame: Callable[..., Frame]


# ---- tables and heat maps ----


def colour(x: float, least: float, most: float) -> str:
    """Of linattn.plot's scale, in 32 steps."""
    at = (x - least) / (most - least) if most > least else 0.0
    return to_hex(colormaps["cividis"](round(at * 31) / 31))


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    colours: np.ndarray | None = None,
    most: float = 0,
    least: float = 0,
) -> str:
    """Rows of a heading and cells. `colours` are the numbers behind the first cells of each row."""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in header)
    body = ""
    for i, (name, *cells) in enumerate(rows):
        body += f'<tr><th scope="row">{html.escape(name)}</th>'
        for j, cell in enumerate(cells):
            style = ""
            if colours is not None and j < colours.shape[1]:
                back = colour(float(colours[i, j]), least, most)
                bright = sum(int(back[n : n + 2], 16) for n in (1, 3, 5)) > 3 * 110
                style = f' style="background:{back};color:{"#000" if bright else "#fff"}"'
            body += f"<td{style}>{cell}</td>"
        body += "</tr>"
    return (
        f'<div class="frames-part"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heat_map(title: str, A: np.ndarray, least: float, most: float) -> str:
    """A causal matrix of weights: a row reads the columns. One path has all cells of a colour."""
    cells: dict[str, str] = {}
    for i, j in zip(*np.tril_indices(len(A)), strict=True):
        fill = colour(float(A[i, j]), least, most)
        cells[fill] = cells.get(fill, "") + f"M{j} {i}h1v1h-1z"
    paths = "".join(f'<path fill="{fill}" d="{d}"/>' for fill, d in cells.items())
    n = len(A)
    return (
        f'<div class="frames-part" style="flex:1 1 12rem">{html.escape(title)}'
        f'<svg viewBox="0 0 {n} {n}" role="img" aria-label="weights of {html.escape(title)}">'
        f"{paths}</svg></div>"
    )


def row(*parts: str) -> str:
    return f'<div class="frames-row">{"".join(parts)}</div>'


# ---- the widgets ----


def kernel_trick() -> Widget:
    why = linattn.explain(Q, K, V, tokens=TOKENS, exact=True)
    assert why.denominators is not None

    def frame(i: int) -> Frame:
        keys = [f"key {x}" for x in range(K.shape[1])]
        state = table(
            "S, the sum of phi(k) v', and z, the sum of phi(k)",
            ["", *(f"S {x}" for x in range(V.shape[1])), "z", f"phi(q) of {TOKENS[i]}"],
            [[keys[x], *why.S[i][x], why.z[i][x], why.phi_q[i][x]] for x in range(len(keys))],
        )
        read = table(
            f"{TOKENS[i]} reads: phi(q)' S, phi(q)' z, and their quotient",
            ["", *(f"value {x}" for x in range(V.shape[1]))],
            [
                ["numerators", *why.numerators[i]],
                ["denominator", why.denominators[i], *[""] * (V.shape[1] - 1)],
                ["output", *why.output[i]],
            ],
        )
        weights = table(
            f"the row of weights of {TOKENS[i]}",
            ["", *TOKENS],
            [
                ["exact", *(str(x) for x in why.weights[i])],
                ["decimal", *(f"{float(x):.3f}" for x in why.weights[i])],
            ],
        )
        output = ", ".join(map(str, why.output[i]))
        return Frame(
            row(state, read, weights),
            f"{TOKENS[i]}: denominator {why.denominators[i]}, output ({output})",
        )

    return Widget("The kernel trick, token by token", [Slider("tokens read", TOKENS)], frame)


# Random queries and keys of one head, for the weights beside softmax.
SIZES = (0.5, 1.0, 1.5, 2.0, 3.0)
RANDOM_Q, RANDOM_K = np.random.default_rng(0).standard_normal((2, 16, 8))


def beside_softmax() -> Widget:
    # identity is last: its weights may be negative, so they have no normaliser
    maps = sorted(FEATURE_MAPS, key=lambda phi: phi == "identity")
    names = [f"{phi}, not normalised" if phi == "identity" else phi for phi in maps]

    def frame(chosen: int, size: int) -> Frame:
        phi = maps[chosen]
        q, k = SIZES[size] * RANDOM_Q, SIZES[size] * RANDOM_K
        A = linattn.implicit_weights(q, k, feature_map=phi, normalize=phi != "identity")
        softmax = linattn.reference.softmax_weights(q, k, causal=True)
        least, most = min(0.0, float(A.min())), max(1.0, float(A.max()))
        difference = float(np.abs(A - softmax).sum(1).mean() / 2)
        return Frame(
            row(heat_map("softmax", softmax, least, most), heat_map(names[chosen], A, least, most)),
            f"Mean difference of a row from softmax: {difference:.3f}. "
            f"Largest weight of the last row: {A[-1].max():.3f}, "
            f"of softmax {softmax[-1].max():.3f}",
        )

    return Widget(
        "Weights of linear attention beside those of softmax",
        [Choice("feature map", names), Slider("size of q and k", [f"times {x:g}" for x in SIZES])],
        frame,
    )


DECAY, RATE = 0.9, 0.5


def gates(op: str) -> dict[str, np.ndarray]:
    """Every decay is DECAY, every beta and eta is RATE; x is k, y is beta k, the bonus is 1."""
    per_token = (len(TOKENS), K.shape[1]) if linattn.VARIANTS[op].decay == "key" else len(TOKENS)
    known = {
        "g": np.full(per_token, np.log(DECAY)),
        "beta": np.full(len(TOKENS), RATE),
        "gamma": np.array([DECAY]),
        "slopes": np.array([-np.log(DECAY)]),
        "eta": np.full(len(TOKENS), RATE),
        "x": K,
        "y": RATE * K,
        "bonus": np.ones(K.shape[1]),
    }
    return {name: known[name] for name in GATES[op]}


def the_state() -> Widget:
    over_time = {op: linattn.states(op, Q, K, V, **gates(op)) for op in linattn.OPS}
    outputs = {op: getattr(linattn, op)(Q, K, V, **gates(op), scale=1)[0] for op in linattn.OPS}

    def frame(chosen: int, i: int) -> Frame:
        op = linattn.OPS[chosen]
        S, z = over_time[op].S, over_time[op].z
        if z is not None and z.ndim > 2:
            z = None  # a momentum, which is not shown
        header = ["", *(f"S {x}" for x in range(S.shape[2]))] + ["z"] * (z is not None)
        rows = []
        for x in range(S.shape[1]):
            numbers = [*S[i, x], *([] if z is None else [z[i, x]])]
            rows.append([f"key {x}", *(f"{number:.3f}" for number in numbers)])
        state = table(
            f"the state of {op} after {TOKENS[i]}",
            header,
            rows,
            S[i],
            float(S.max()),
            min(0.0, float(S.min())),
        )
        output = table(
            f"the output of {TOKENS[i]}",
            ["", *(f"value {x}" for x in range(V.shape[1]))],
            [["o", *(f"{x:.3f}" for x in outputs[op][i])]],
        )
        size = float(np.sqrt((S[i] ** 2).sum()))
        return Frame(row(state, output), f"{op}, after {TOKENS[i]}: |S| = {size:.4f}")

    return Widget(
        "The state, token by token",
        [Choice("op", linattn.OPS), Slider("tokens read", TOKENS)],
        frame,
    )


LENGTHS = tuple(2**n for n in range(4, 21))
DIMENSIONS = (16, 32, 64, 128, 256)


def cost() -> Widget:
    def frame(length: int, dimension: int) -> Frame:
        T, d = LENGTHS[length], DIMENSIONS[dimension]
        both = ("softmax", "linear_attention")
        counts = [linattn.flops(op, T, d, d) for op in both]
        bytes_of = [linattn.memory(op, T, d, d) for op in both]
        rows, said = [], []
        for name, (softmax, linear), word in (
            ("operations", counts, "Fewer operations"),
            ("bytes that a decoder keeps", [one.kept for one in bytes_of], "Less memory"),
        ):
            cheaper = "linear attention" if linear < softmax else "softmax"
            factor = max(linear, softmax) / min(linear, softmax)
            rows.append([name, f"{softmax:,}", f"{linear:,}", cheaper, f"{factor:.3g}"])
            said.append(f"{word}: {cheaper}, by a factor of {factor:.3g}.")
        rows.append(["bytes of all weights at once", f"{bytes_of[0].weights:,}", "", "", ""])
        return Frame(
            table(
                f"one head, T = {T:,}, K = V = {d}",
                ["", "softmax", "linear attention", "cheaper", "factor"],
                rows,
            ),
            " ".join(said),
        )

    return Widget(
        "The cost of softmax and of linear attention",
        [
            Slider("tokens T", [f"{T:,}" for T in LENGTHS]),
            Slider("dimension d = K = V", [str(d) for d in DIMENSIONS]),
        ],
        frame,
    )


WIDGETS: dict[str, Callable[[], Widget]] = {
    "kernel-trick": kernel_trick,
    "beside-softmax": beside_softmax,
    "the-state": the_state,
    "cost": cost,
}
