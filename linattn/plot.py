"""Pictures of what an op does, for notebooks (matplotlib: ``pip install linattn[plot]``).

Every function draws into ``axes`` if they are given, else into a new figure, and returns the axes;
nothing is shown or saved. The colours read in grey, and with every kind of colour vision: cividis,
whose lightness grows evenly, and lines that differ by marker too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from linattn.cost import CHUNK, flops, memory
from linattn.features import is_tensor

if TYPE_CHECKING:
    from linattn.trace import States

__all__ = ["cost", "curve", "decay", "states", "weights"]

COLORS = ("#00224e", "#a59c74", "#575d6d", "#d3a82b", "#123570", "#7c7b78")  # cividis, far apart
MARKERS = "os^Dvx"
_MAP = "cividis"


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ImportError(
            "linattn.plot needs matplotlib, which is not installed: pip install linattn[plot]"
        ) from error
    return pyplot


def _new(axes: Any, columns: int, rows: int = 1, width: float = 3.2, height: float = 3.0) -> Any:
    """An array [rows,columns] of axes: those given, or a new figure's."""
    if axes is None:
        size = (width * columns, height * rows)
        _, made = _pyplot().subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        return made
    given = np.asarray(axes, dtype=object)
    if given.size != rows * columns:
        raise ValueError(f"axes: expected {rows * columns} axes, got {given.size}")
    return given.reshape(rows, columns)


def _numbers(name: str, x: Any, *dimensions: int) -> np.ndarray:
    if is_tensor(x):
        x = x.detach().cpu().double().numpy()
    x = np.asarray(x).astype(np.float64)
    if x.ndim not in dimensions:
        raise ValueError(f"{name}: expected {dimensions[0]} dimensions, got shape {x.shape}")
    return x


def _ticks(axis: Any, names: Sequence[str] | None, n: int, name: str) -> None:
    if names is None:
        return
    if len(names) != n:
        raise ValueError(f"{name}: expected {n} names, one a token, got {len(names)}")
    axis.set_ticks(range(n), names)


def weights(
    matrices: Mapping[str, Any] | Any,
    *,
    tokens: Sequence[str] | None = None,
    row: int | None = None,
    axes: Any = None,
) -> Any:
    """Which token reads which: weights [T,T] as heat maps side by side, with one scale of colours.

    Parameters
    ----------
    matrices : array [T,T], or a dict of them by title
        From :func:`linattn.implicit_weights`, :func:`linattn.reference.softmax_weights`, or the
        ``weights`` of :func:`linattn.explain`.
    tokens : sequence of str, optional
        Names of the tokens.
    row : int, optional
        Draw this row of each as bars below.
    axes : array of axes, optional
        One a matrix; twice as many with ``row``.

    Returns
    -------
    ndarray of axes, [1, n] or [2, n]

    Raises
    ------
    ValueError
        A matrix is not [T,T], or the numbers of names, axes and tokens do not fit.
    ImportError
        There is no matplotlib.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import plot, reference
    >>> q, k = np.random.default_rng(0).standard_normal((2, 6, 4))  # one head: [T,K]
    >>> softmax, linear = reference.softmax_weights(q, k), linattn.implicit_weights(q, k)
    >>> axes = plot.weights({"softmax": softmax, "linear": linear}, row=-1)
    >>> axes.shape, [ax.get_title() for ax in axes[0]]
    ((2, 2), ['softmax', 'linear'])
    """
    given = matrices if isinstance(matrices, Mapping) else {"": matrices}
    found = {title: _numbers(f"matrices[{title!r}]", A, 2) for title, A in given.items()}
    if not found:
        raise ValueError("matrices: expected at least one, got none")
    for title, A in found.items():
        if A.shape[0] != A.shape[1]:
            raise ValueError(f"matrices[{title!r}]: expected [T,T], got {A.shape}")
        if row is not None and not -len(A) <= row < len(A):
            raise ValueError(f"row: expected a token of {len(A)}, got {row}")
    axes = _new(axes, len(found), 1 if row is None else 2)
    least = min(0.0, *(float(A.min(initial=0)) for A in found.values()))
    most = max(float(A.max(initial=0)) for A in found.values()) or 1.0
    image = None
    for i, (title, A) in enumerate(found.items()):
        ax = axes[0, i]
        seen = np.tri(len(A), dtype=bool) | bool(
            np.triu(A, 1).any()
        )  # the future of a causal op is blank
        image = ax.imshow(np.where(seen, A, np.nan), cmap=_MAP, vmin=least, vmax=most)
        ax.set(title=title, xlabel="is read", ylabel="reads" if i == 0 else "")
        _ticks(ax.xaxis, tokens, len(A), "tokens")
        _ticks(ax.yaxis, tokens, len(A), "tokens")
        if row is not None:
            bars = axes[1, i]
            bars.bar(range(len(A)), A[row], color=COLORS[0])
            bars.axhline(0, color="black", linewidth=0.8)
            bars.set_ylim(min(0, 1.1 * least), 1.1 * most)
            reader = tokens[row] if tokens is not None else f"token {row % len(A)}"
            bars.set(xlabel="is read", ylabel="weight" if i == 0 else "", title=f"read by {reader}")
            _ticks(bars.xaxis, tokens, len(A), "tokens")
    axes[0, 0].figure.colorbar(image, ax=list(axes[0]), shrink=0.8)
    return axes


def states(
    states: States | Any,
    *,
    tokens: Sequence[str] | None = None,
    columns: int = 6,
    axes: Any = None,
) -> Any:
    """The state after each token as small multiples, S [K,V], with z as one more column.

    Parameters
    ----------
    states : States, or array [n,K,V]
        Of one head, from :func:`linattn.states`.
    tokens : sequence of str, optional
        The names of the tokens read; the number of tokens read by default.
    columns : int
        Pictures in a row.
    axes : array of axes, optional
        One a state.

    Returns
    -------
    ndarray of axes, [n]

    Raises
    ------
    ValueError
        The states are not those of one head, or there are none.
    ImportError
        There is no matplotlib.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import plot
    >>> x = np.random.default_rng(0).standard_normal((5, 4))  # one head: [T,K]
    >>> found = linattn.states("delta_rule", x, x, x, beta=0.5, qk_l2norm=True)
    >>> axes = plot.states(found, tokens=["the", "cat", "sat", "on", "it"], columns=3)
    >>> [ax.get_title() for ax in axes]
    ['the', 'cat', 'sat', 'on', 'it']
    """
    S = _numbers("states", getattr(states, "S", states), 3)
    z = getattr(states, "z", None)
    n, K, V = S.shape
    if not S.size:
        raise ValueError(f"states: expected at least one [K,V], got shape {S.shape}")
    read = getattr(states, "read", np.arange(1, n + 1))
    if tokens is not None and len(tokens) < int(read[-1]):
        raise ValueError(f"tokens: expected {int(read[-1])} names, one a token, got {len(tokens)}")
    columns = min(columns, n)
    rows = math.ceil(n / columns)
    if axes is None:
        every = _new(None, columns, rows, 1.6, 1.9).ravel()
    else:
        every = _new(axes, n).ravel()
    of_z = None if z is None else _numbers("states.z", z, 2)
    shown = (
        S if of_z is None else np.concatenate([S, np.full((n, K, 1), np.nan), of_z[..., None]], 2)
    )
    least, most = min(0.0, float(np.nanmin(shown))), float(np.nanmax(shown))
    image = None
    for i, ax in enumerate(every):
        if i >= n:
            ax.set_axis_off()
            continue
        image = ax.imshow(shown[i], cmap=_MAP, vmin=least, vmax=most or 1.0)
        last = int(read[i])
        ax.set_title(tokens[last - 1] if tokens is not None else f"{last} tokens", fontsize=9)
        ax.set_yticks([])
        ax.set_xticks([(V - 1) / 2] + ([V + 1] if of_z is not None else []))
        ax.set_xticklabels(["S"] + (["z"] if of_z is not None else []), fontsize=8)
        ax.tick_params(length=0)
    every[0].set_ylabel("keys", fontsize=8)
    every[0].figure.colorbar(image, ax=list(every), shrink=0.8)
    return every[:n]


def decay(
    gamma: Any = None, *, g: Any = None, tokens: int = 256, names: Any = None, axes: Any = None
) -> Any:
    """The part of a write that is left after n more tokens, for each head; dots are half-lives.

    Parameters
    ----------
    gamma : array [HV], optional
        Decays of a token, in (0, 1]; or
    g : array [HV], optional
        Their natural logs, <= 0 (:func:`linattn.lightning_attention`'s are minus its slopes).
    tokens : int
        How far to look.
    names : sequence of str, optional
        Of the heads; their numbers by default.
    axes : axes, optional

    Returns
    -------
    axes

    Raises
    ------
    ValueError
        Both or none of gamma and g are given, or a decay is outside (0, 1].
    ImportError
        There is no matplotlib.

    Examples
    --------
    >>> from linattn import plot
    >>> ax = plot.decay(gamma=[0.5, 0.9, 1.0], tokens=16)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['0: half-life 1', '1: half-life 6.58', '2: keeps everything']
    """
    if (gamma is None) == (g is None):
        raise ValueError(
            "gamma: expected either gamma or g, got " + ("none" if g is None else "both")
        )
    if g is None:
        decays = np.atleast_1d(_numbers("gamma", gamma, 1, 0))
        if not ((decays > 0) & (decays <= 1)).all():
            raise ValueError(
                f"gamma: expected decays in (0, 1], got {decays.min()} to {decays.max()}"
            )
        logs = np.log(decays)
    else:
        logs = np.atleast_1d(_numbers("g", g, 1, 0))
        if not (logs <= 0).all():
            raise ValueError(f"g: expected logs of decays, <= 0, got {logs.max()}")
    if names is not None and len(names) != len(logs):
        raise ValueError(f"names: expected {len(logs)}, one a head, got {len(names)}")
    ax = _new(axes, 1, width=5.5, height=3.4)[0, 0]
    n = np.arange(tokens + 1)
    for h, log in enumerate(logs):
        half = math.log(0.5) / log if log else math.inf
        name = str(h) if names is None else names[h]
        label = f"{name}: half-life {half:.3g}" if log else f"{name}: keeps everything"
        color = _pyplot().get_cmap(_MAP)(h / max(1, len(logs)))
        ax.plot(n, np.exp(n * log), color=color, label=label)
        if half <= tokens:
            ax.plot([half], [0.5], MARKERS[h % len(MARKERS)], color=color)
    ax.set(xlabel="tokens after the write", ylabel="what is left of it", ylim=(0, 1.02))
    ax.legend(
        fontsize=8, title="head", title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
    )  # beside the picture: anywhere in it, some decay passes
    return ax


def cost(
    op: str = "linear_attention",
    *,
    d: int = 64,
    T: Sequence[int] | None = None,
    H: int = 1,
    chunk_size: int | None = None,
    passes: Literal["forward", "backward", "both"] = "forward",
    seconds: Mapping[str, Mapping[int, float]] | None = None,
    axes: Any = None,
) -> Any:
    """Operations and memory against T, for an op and for softmax attention; and measured times.

    A circle is where a line of the op falls below that of softmax; the legend has its T.

    Parameters
    ----------
    op : str
        The op beside softmax.
    d : int
        Key and value dimension.
    T : sequence of int, optional
        Numbers of tokens; powers of two from 16 to 16384 by default.
    H : int
        Heads.
    chunk_size : int, optional
        Tokens per chunk; 16 by default, as in :func:`linattn.flops`.
    passes : {"forward", "backward", "both"}
        Whose operations, as in :func:`linattn.flops`.
    seconds : dict of dict, optional
        Measured times, {name: {T: seconds}}, for a third picture.
    axes : array of axes, optional
        Two; three with ``seconds``.

    Returns
    -------
    ndarray of axes, [2] or [3]

    Raises
    ------
    ValueError
        There is no such op or pass, or a size is too small.
    ImportError
        There is no matplotlib.

    Examples
    --------
    >>> from linattn import plot
    >>> measured = {"gla": {256: 0.1, 1024: 0.4}}  # seconds, by T
    >>> axes = plot.cost("gla", d=128, T=[256, 1024, 4096], seconds=measured)
    >>> [ax.get_title() for ax in axes[1:]]
    ['bytes that a decoder keeps', 'seconds of a forward pass']
    """
    lengths = [2**n for n in range(4, 15)] if T is None else list(T)
    C = CHUNK if chunk_size is None else chunk_size
    shared: dict[str, Any] = {"H": H, "passes": passes}
    counts: dict[str, Callable[[int], int]] = {
        f"{op}, chunks of {C}": lambda t: flops(op, t, d, d, chunk_size=C, **shared),
        f"{op}, token by token": lambda t: flops(op, t, d, d, mode="recurrent", **shared),
        "softmax": lambda t: flops("softmax", t, d, d, **shared),
    }
    kept: dict[str, Callable[[int], int]] = {
        op: lambda t: memory(op, t, d, d, H=H).kept,
        "softmax": lambda t: memory("softmax", t, d, d, H=H).kept,
    }
    of_pass = "both passes" if passes == "both" else f"a {passes} pass"
    made = _new(axes, 2 + (seconds is not None), width=4.2, height=3.4).ravel()
    for ax, title, lines in (
        (made[0], f"operations of {of_pass}", counts),
        (made[1], "bytes that a decoder keeps", kept),
    ):
        for i, (name, of) in enumerate(lines.items()):
            at = None if name == "softmax" else _crossing(of, lines["softmax"], lengths)
            label = name if at is None else f"{name}\n   below softmax from T = {at}"
            _cost_line(ax, i, label, lengths, [of(t) for t in lengths])
            if at is not None:
                ax.plot([at], [of(at)], "o", ms=9, mfc="none", mec="black", mew=1)
        ax.set(title=title, xlabel="tokens T")
    if seconds is not None:
        for i, (name, times) in enumerate(seconds.items()):
            _cost_line(made[2], i, name, sorted(times), [times[t] for t in sorted(times)])
        made[2].set(title=f"seconds of {of_pass}", xlabel="tokens T")
    for ax in made:
        ax.set_yscale("log")
        ax.set_xscale("log", base=2)
        ax.legend(fontsize=8)
    return made


def _cost_line(ax: Any, i: int, name: str, xs: Sequence[int], ys: Sequence[float]) -> None:
    ax.plot(xs, ys, marker=MARKERS[i % 6], ms=3.5, color=COLORS[i % 6], label=name)


def _crossing(
    of: Callable[[int], int], softmax: Callable[[int], int], lengths: Sequence[int]
) -> int | None:
    """The first T from which on `of` is below `softmax`; None if that is not among the lengths."""
    above = [t for t in sorted(lengths) if of(t) >= softmax(t)]
    below = [t for t in sorted(lengths) if of(t) < softmax(t)]
    if not above or not below or below[0] < above[-1]:
        return None
    low, high = above[-1], below[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle) >= softmax(middle) else (low, middle)
    return high


def curve(
    values: Mapping[str, Any] | Any,
    *,
    xlabel: str = "step",
    ylabel: str = "loss",
    axes: Any = None,
) -> Any:
    """A curve of training, or several by name.

    Parameters
    ----------
    values : array [n], a pair (x, y) of them, or a dict of these by name
    xlabel, ylabel : str
    axes : axes, optional

    Returns
    -------
    axes

    Raises
    ------
    ValueError
        x and y have different lengths.
    ImportError
        There is no matplotlib.

    Examples
    --------
    The numbers of steps are 0, 1, 2, ... where they are not given:

    >>> from linattn import plot
    >>> ax = plot.curve({"training": [3.0, 2.0, 1.5], "test": ([0, 2], [3.1, 1.7])})
    >>> [line.get_xdata().tolist() for line in ax.lines]
    [[0.0, 1.0, 2.0], [0.0, 2.0]]
    """
    ax = _new(axes, 1, width=5.5, height=3.4)[0, 0]
    named = isinstance(values, Mapping)
    lines: Mapping[str, Any] = values if isinstance(values, Mapping) else {"": values}
    for i, (name, line) in enumerate(lines.items()):
        if isinstance(line, tuple):
            x, y = (_numbers(of, part, 1) for of, part in zip("xy", line, strict=True))
        else:
            y = _numbers("values", line, 1)
            x = np.arange(len(y), dtype=np.float64)
        if len(x) != len(y):
            raise ValueError(f"values: expected as many x as y, got {len(x)} and {len(y)}")
        marker = MARKERS[i % 6] if len(y) <= 40 else None
        ax.plot(x, y, color=COLORS[i % 6], marker=marker, ms=3.5, label=name or None)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if named:
        ax.legend(fontsize=8)
    return ax
