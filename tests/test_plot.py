"""linattn.plot: what is in the pictures. How they look is for the eye."""

import subprocess
import sys

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

import linattn  # noqa: E402
from linattn import plot, reference  # noqa: E402

WORDS = ("The", "cat", "sat", "on", "mat")
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 5, 4))


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    pyplot.close("all")


def drawn(axes):
    """The figure, drawn as a file would have it: a mistake in a label shows only then."""
    axes.figure.canvas.draw()
    return axes


def test_weights():
    given = {"softmax": reference.softmax_weights(q, k), "elu+1": linattn.implicit_weights(q, k)}
    axes = plot.weights(given, tokens=WORDS, row=-1)
    assert axes.shape == (2, 2) and [ax.get_title() for ax in axes[0]] == list(given)
    drawn(axes[0, 0])
    for ax, A in zip(axes[0], given.values(), strict=True):
        (image,) = ax.get_images()
        shown = image.get_array()
        np.testing.assert_array_equal(shown.filled(0), A)
        np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~np.tri(5, dtype=bool))
        assert [label.get_text() for label in ax.get_xticklabels()] == list(WORDS)
    scales = {ax.get_images()[0].get_clim() for ax in axes[0]}
    assert len(scales) == 1
    bars = [bar.get_height() for bar in axes[1, 1].patches]
    np.testing.assert_array_equal(bars, given["elu+1"][-1])
    assert axes[1, 1].get_title() == "read by mat"


def test_weights_of_one_matrix_into_given_axes():
    _, ax = pyplot.subplots()
    A = linattn.implicit_weights(q, k, causal=False)
    assert plot.weights(A, axes=ax)[0, 0] is drawn(ax)
    assert not np.ma.getmaskarray(ax.get_images()[0].get_array()).any()


def test_states():
    found = linattn.states("linear_attention", q, k, v)
    axes = plot.states(found, tokens=WORDS, columns=3)
    drawn(axes[0])
    assert len(axes) == 5 and [ax.get_title() for ax in axes] == list(WORDS)
    for i, ax in enumerate(axes):
        shown = ax.get_images()[0].get_array()
        np.testing.assert_array_equal(shown[:, :4], found.S[i])
        np.testing.assert_array_equal(shown[:, -1], found.z[i])
    assert plot.states(found.S)[4].get_title() == "5 tokens"


def test_decay():
    ax = drawn(plot.decay(np.array([0.5, 1.0]), tokens=4))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 0.5 ** np.arange(5))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["0: half-life 1", "1: keeps everything"]
    other = plot.decay(g=np.log([0.5, 1.0]), tokens=4)
    np.testing.assert_allclose(other.lines[0].get_ydata(), ax.lines[0].get_ydata())


def test_cost():
    axes = plot.cost("gla", d=16, T=[8, 32], seconds={"linattn": {32: 2.0, 8: 1.0}})
    drawn(axes[0])
    (softmax,) = (line for line in axes[0].lines if line.get_label() == "softmax")
    expected = [linattn.flops("softmax", T, 16, 16) for T in (8, 32)]
    np.testing.assert_array_equal(softmax.get_ydata(), expected)
    kept = axes[1].lines[0].get_ydata()
    np.testing.assert_array_equal(kept, [linattn.memory("gla", 8, 16, 16).kept] * 2)
    np.testing.assert_array_equal(axes[2].lines[0].get_xdata(), [8, 32])
    np.testing.assert_array_equal(axes[2].lines[0].get_ydata(), [1, 2])


@pytest.mark.parametrize("passes", ["forward", "backward", "both"])
def test_cost_marks_the_crossings(passes):
    op, d = "linear_attention", 32
    axes = plot.cost(op, d=d, passes=passes)
    drawn(axes[0])

    def operations(T, op=op, **how):
        return linattn.flops(op, T, d, d, passes=passes, **how)

    def kept(T, op=op):
        return linattn.memory(op, T, d, d).kept

    ways = [
        (axes[0], f"{op}, chunks of 16", operations),
        (axes[0], f"{op}, token by token", lambda T: operations(T, mode="recurrent")),
        (axes[1], op, kept),
    ]
    circles = [line for ax in axes for line in ax.lines if len(line.get_xdata()) == 1]
    assert len(circles) == len(ways)
    for circle, (ax, name, of) in zip(circles, ways, strict=True):
        softmax = operations if ax is axes[0] else kept
        (T,), (y,) = circle.get_xdata(), circle.get_ydata()
        assert of(T) == y < softmax(T, op="softmax")
        assert of(T - 1) >= softmax(T - 1, op="softmax")
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        assert f"{name}\n   below softmax from T = {T}" in texts
    # no crossing among the lengths, no circle
    for T in ([2, 4], [2**12, 2**13]):
        assert all(
            len(ax.lines) == n for ax, n in zip(plot.cost(op, d=d, T=T), (3, 2), strict=True)
        )


@pytest.mark.parametrize(
    "op", [op for op, row in linattn.VARIANTS.items() if row.rule != "additive"]
)
def test_cost_of_other_rules(op):
    """The lines are those of the op: x changes none of them, for each head has its own keys."""
    axes, T = plot.cost(op, d=16, T=[8, 32], H=2, passes="both"), (8, 32)
    for line, how in zip(axes[0].lines, ({"chunk_size": 16}, {"mode": "recurrent"}), strict=False):
        expected = [linattn.flops(op, t, 16, 16, H=2, passes="both", **how) for t in T]
        np.testing.assert_array_equal(line.get_ydata(), expected)
    kept = [linattn.memory(op, 8, 16, 16, H=2).kept] * 2
    np.testing.assert_array_equal(axes[1].lines[0].get_ydata(), kept)


def test_curve():
    ax = drawn(plot.curve({"a": [3, 2], "b": ([0, 5], [1, 2])}))
    np.testing.assert_array_equal(ax.lines[1].get_xdata(), [0, 5])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert plot.curve([1, 2]).get_legend() is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plot.weights({}), "matrices: expected at least one, got none"),
        (lambda: plot.weights(np.ones((2, 3))), "matrices['']: expected [T,T], got (2, 3)"),
        (lambda: plot.weights(np.ones((2, 2)), tokens=["a"]), "tokens: expected 2 names"),
        (lambda: plot.weights(np.ones((2, 2)), row=2), "row: expected a token of 2, got 2"),
        (lambda: plot.states(np.ones((1, 2, 3, 4))), "states: expected 3 dimensions, got shape"),
        (lambda: plot.states(np.ones((2, 3, 4)), tokens=["a"]), "tokens: expected 2 names"),
        (lambda: plot.decay(), "gamma: expected either gamma or g, got none"),
        (lambda: plot.decay(np.array([1.5])), "gamma: expected decays in (0, 1], got 1.5 to 1.5"),
        (lambda: plot.decay(g=np.array([1.5])), "g: expected logs of decays, <= 0, got 1.5"),
        (lambda: plot.cost("mamba"), "op: expected one of linear_attention"),
        (lambda: plot.cost(passes="step"), "passes: expected 'forward', 'backward' or 'both'"),
        (lambda: plot.cost(axes=[1, 2, 3]), "axes: expected 2 axes, got 3"),
        (lambda: plot.curve(([1], [1, 2])), "values: expected as many x as y, got 1 and 2"),
    ],
)
def test_refuses(call, text):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_nothing_is_imported_before_it_is_used():
    script = (
        "import sys, linattn; assert 'plot' in dir(linattn)\n"
        "linattn.plot.decay; assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
