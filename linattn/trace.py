"""Linear attention number by number, on a few tokens; and an op's state over time."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from linattn.arrays import as_size
from linattn.features import (
    FeatureMapLike,
    any_features,
    apply_feature_map,
    feature_maps,
    is_tensor,
)
from linattn.variants import BY_TOKEN, op_named

__all__ = ["Explanation", "States", "explain", "states"]

_BAR = 20  # characters of a weight of 1
_MOST_TOKENS = 64  # of an explanation: more would not be read, and T squared weights are kept


@dataclass(frozen=True, repr=False)
class Explanation:
    """The numbers of :func:`linattn.explain`, for one head; its repr is a page to read.

    The arrays are float64, or of :class:`fractions.Fraction` if ``exact``.

    Attributes
    ----------
    tokens : tuple of str
    phi_q, phi_k : ndarray [T,K]
        The features of the queries and keys.
    S, z : ndarray [T,K,V] and [T,K]
        The sums of phi(k) v' and of phi(k) that token i reads.
    numerators : ndarray [T,V]
        scale * S' phi(q_i).
    denominators : ndarray [T], or None
        scale * z' phi(q_i); None if the call is not normalised.
    weights : ndarray [T,T]
        How much token i reads of token j.
    output : ndarray [T,V]
        numerators / denominators, with ``eps`` as in the op.

    Examples
    --------
    >>> import linattn
    >>> q, k, v = [[1, 0], [0, 1]], [[0, 1], [1, 1]], [[1], [3]]
    >>> why = linattn.explain(q, k, v, tokens=["the", "cat"], exact=True)
    >>> print(why.numerators[1, 0], why.denominators[1], why.output[1, 0])
    23 11 23/11
    >>> for line in str(why).splitlines()[-4:]:
    ...     print(line)
    the weights: token i reads token j
    the <- the         1  ####################
    cat <- the      5/11  #########
    cat <- cat      6/11  ###########
    """

    tokens: tuple[str, ...]
    phi_q: np.ndarray
    phi_k: np.ndarray
    S: np.ndarray
    z: np.ndarray
    numerators: np.ndarray
    denominators: np.ndarray | None
    weights: np.ndarray
    output: np.ndarray

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, header, rows) of all that is shown."""
        K, V = self.phi_q.shape[1], self.numerators.shape[1]
        keys = ["token", *map(str, range(K))]
        state = [
            [str(i), *_texts(S_i), _text(z_i)]
            for i, (S_i, z_i) in enumerate(zip(self.S[-1], self.z[-1], strict=True))
        ]
        header, columns = ["token", "numerator"], [_vectors(self.numerators)]
        if self.denominators is not None:
            header.append("denominator")
            columns.append(_texts(self.denominators))
        header.append("output")
        columns.append(_vectors(self.output))
        read = [list(row) for row in zip(self.tokens, *columns, strict=True)]
        return [
            ("phi(q)", keys, [[name, *_texts(x)] for name, x in self._named(self.phi_q)]),
            ("phi(k)", keys, [[name, *_texts(x)] for name, x in self._named(self.phi_k)]),
            ("the state of the last token", ["key", *(f"S[{v}]" for v in range(V)), "z"], state),
            ("the read", header, read),
        ]

    def _named(self, rows: np.ndarray) -> zip[tuple[str, Any]]:
        return zip(self.tokens, rows, strict=True)

    def __repr__(self) -> str:
        T, K = self.phi_q.shape
        parts = [f"linear attention of {T} tokens, K = {K}, V = {self.numerators.shape[1]}"]
        for title, header, rows in self._tables():
            cells = [header, *rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
            parts.append("\n".join([title, *lines]))
        most = max([1.0, *(abs(float(x)) for x in self.weights.flat)])
        widest = max(map(len, self.tokens), default=0)
        lines = ["the weights: token i reads token j"]
        for name, row in self._named(self.weights):
            for read, x in self._named(row):
                if x:
                    bar = "#" * round(abs(float(x)) / most * _BAR)
                    lines.append(
                        f"{name.rjust(widest)} <- {read.rjust(widest)}  {_text(x):>8}  {bar}"
                    )
        return "\n\n".join([*parts, "\n".join(lines)])

    def _repr_html_(self) -> str:
        parts = []
        for title, header, rows in self._tables():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in rows
            )
            parts.append(
                f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"
            )
        most = max([1.0, *(abs(float(x)) for x in self.weights.flat)])
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.tokens)
        body = ""
        for name, row in self._named(self.weights):
            cells = "".join(
                f'<td style="background:rgba(31,95,168,{abs(float(x)) / most * 0.6:.2f})">'
                f"{_text(x)}</td>"
                for x in row
            )
            body += f"<tr><th>{html.escape(name)}</th>{cells}</tr>"
        parts.append(
            "<table><caption>the weights: a row reads the columns</caption>"
            f"<tr><th></th>{head}</tr>{body}</table>"
        )
        return "".join(parts)


def _text(x: Any) -> str:
    return str(x) if isinstance(x, Fraction) else f"{x:.4g}"


def _texts(row: Any) -> list[str]:
    return [_text(x) for x in row]


def _vectors(rows: np.ndarray) -> list[str]:
    return [f"[{' '.join(_texts(row))}]" for row in rows]


def _numbers(name: str, x: Any, exact: bool) -> np.ndarray:
    """x as [T,K] of float64, or of Fractions."""
    if is_tensor(x):
        x = x.detach().cpu().double().numpy()
    x = np.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"{name}: expected one head, [T,K] or [T,V], got {x.shape}")
    if not exact:
        return x.astype(np.float64)
    made = np.empty(x.shape, object)
    for i in np.ndindex(x.shape):
        made[i] = Fraction(x[i])  # of a float: its own value, which is a fraction
    return made


_EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "identity": lambda x, eps: x,
    "relu+eps": lambda x, eps: max(x, Fraction(0)) + eps,
    "relu2": lambda x, eps: max(x, Fraction(0)) ** 2,
}


def _exact_elu(x: Fraction, eps: Fraction) -> Fraction:
    if x < 0:
        raise ValueError(f"exact: elu+1 of {x} is exp({x}), which is no fraction; expected x >= 0")
    return x + 1


def _features(x: np.ndarray, given: FeatureMapLike, exact: bool) -> np.ndarray:
    if not exact:
        return np.asarray(apply_feature_map(x, given))
    (phi, _) = feature_maps(given)
    maps = _EXACT | {"elu+1": _exact_elu}
    if phi.forward is not None or phi.name not in maps:
        raise ValueError(f"exact: expected one of {', '.join(maps)}, got {phi.name!r}")
    eps = Fraction(str(phi.eps))  # 1e-3 is meant as 1/1000
    made = np.empty(x.shape, object)
    for i in np.ndindex(x.shape):
        made[i] = maps[phi.name](x[i], eps)
    return made


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    tokens: Sequence[str] | None = None,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
    normalize: bool | str = True,
    causal: bool = True,
    scale: float = 1,
    eps: float = 1e-6,
    exact: bool = False,
) -> Explanation:
    """Every number of :func:`linear_attention` on a few tokens of one head, sum by sum.

    For reading, on up to 64 tokens. Nothing here is fast: it is the definition in NumPy, float64.

    Parameters
    ----------
    q, k : array or lists [T,K]
    v : array or lists [T,V]
    tokens : sequence of str, optional
        Names of the tokens, for the tables; their numbers by default.
    feature_map, normalize, causal, eps : as in :func:`linear_attention`
    scale : float
        Of numerators and denominators; 1 here, since a normalised output does not depend on it.
    exact : bool
        Compute with :class:`fractions.Fraction`. The map must give fractions: ``"identity"``,
        ``"relu+eps"``, ``"relu2"``, and ``"elu+1"`` of numbers that are not negative.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError
        Shapes that do not fit, no token or more than 64, or a map that has no fractions.

    References
    ----------
    Katharopoulos et al., 2020, *Transformers are RNNs*, arXiv:2006.16236.

    Examples
    --------
    >>> import linattn
    >>> q, k, v = [[1, 0], [0, 1]], [[0, 1], [1, 1]], [[1], [3]]
    >>> why = linattn.explain(q, k, v, tokens=["the", "cat"], exact=True)
    >>> print(why.output[1, 0], why.weights[1])
    23/11 [Fraction(5, 11) Fraction(6, 11)]
    """
    q, k, v = (_numbers(name, x, exact) for name, x in (("q", q), ("k", k), ("v", v)))
    T = len(q)
    if k.shape != q.shape:
        raise ValueError(f"k: expected [T,K] = {q.shape} like q, got {k.shape}")
    if len(v) != T:
        raise ValueError(f"v: expected [T,V] with T = {T} like q, got {v.shape}")
    if not 1 <= T <= _MOST_TOKENS:
        raise ValueError(f"q: expected 1 to {_MOST_TOKENS} tokens to explain, got {T}")
    names = tuple(map(str, range(T) if tokens is None else tokens))
    if len(names) != T:
        raise ValueError(f"tokens: expected {T} names, one a token, got {len(names)}")
    any_features(feature_map, normalize, eps, causal)  # refuses what linear_attention refuses
    least: Any = Fraction(str(eps)) if exact else eps
    factor: Any = Fraction(scale) if exact else scale
    maps = feature_map if isinstance(feature_map, tuple | list) else (feature_map, feature_map)
    phi_q, phi_k = (_features(x, phi, exact) for x, phi in zip((q, k), maps, strict=True))

    S = np.cumsum(phi_k[:, :, None] * v[:, None, :], 0)
    z = np.cumsum(phi_k, 0)
    if not causal:
        S, z = (np.broadcast_to(x[-1:], x.shape).copy() for x in (S, z))
    numerators = factor * (phi_q[:, :, None] * S).sum(1)
    weights = factor * (phi_q @ phi_k.T)
    if causal:
        weights = np.where(np.tri(T, dtype=bool), weights, 0 * factor)
    denominators, output = None, numerators
    if normalize is not False:
        denominators = factor * (phi_q * z).sum(1)
        divisor = denominators + least if normalize == "add" else np.maximum(denominators, least)
        output, weights = numerators / divisor[:, None], weights / divisor[:, None]
    return Explanation(names, phi_q, phi_k, S, z, numerators, denominators, weights, output)


class States(NamedTuple):
    """An op's state over time, from :func:`linattn.states`.

    Attributes
    ----------
    read : ndarray [n], int64
        The number of tokens up to each of the n states.
    S : array [n,N,HV,K,V], or [n,K,V] for one head
        [n,N,HV,V,K] or [n,V,K] with ``state_v_first``.
    z : array [n,N,HV,K], or [n,K] for one head, or None
        None without a normaliser. Of a memory with momentum the momentum, like S.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((5, 3))  # one head: [T,K]
    >>> found = linattn.states("linear_attention", x, x, x, every=2)
    >>> found.read
    array([2, 4, 5])
    >>> found.S.shape, found.z.shape
    ((3, 3, 3), (3, 3))
    """

    read: np.ndarray
    S: Any
    z: Any


def states(
    op: str | Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    *gates: Any,
    every: int = 1,
    initial_state: Any = None,
    **arguments: Any,
) -> States:
    """The state of an op after each token, or after every n-th one and the last.

    For looking at what an op keeps: it calls the op once for each state that it returns.

    Parameters
    ----------
    op : str or function
        Which op, such as ``"gla"`` or ``linattn.gla``.
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    *gates, **arguments
        The op's own, as it takes them.
    every : int
        Tokens between two states.
    initial_state : as in the op

    Returns
    -------
    States

    Raises
    ------
    TypeError
        ``every`` is no int.
    ValueError
        There is no such op, ``every`` is less than 1, or packed sequences are given.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.eye(3)
    >>> linattn.states("retention", x, x, x, gamma=0.5).S[:, 0, 0]
    array([1.  , 0.5 , 0.25])
    """
    from linattn import ops

    op, every = op_named(op), as_size("every", every, 1)
    for name in ("cu_seqlens", "out", "output_final_state"):
        if name in arguments:
            raise ValueError(
                f"{name}: expected whole sequences in rows of their own, and no {name}="
            )
    function = getattr(ops, op)
    positional_names = list(inspect.signature(function).parameters)[3:]
    axis = 0 if q.ndim == 2 else 1
    T = q.shape[axis]

    def piece(x: Any, of: slice) -> Any:
        if not getattr(x, "shape", ()):  # None, or a number for all tokens
            return x
        return x[of] if axis == 0 else x[:, of]

    found = []
    for start in range(0, T, every):
        of = slice(start, min(start + every, T))
        cut = {name: piece(x, of) if name in BY_TOKEN else x for name, x in arguments.items()}
        positional = [
            piece(x, of) if name in BY_TOKEN else x
            for name, x in zip(positional_names, gates, strict=False)
        ]
        _, state = function(
            *(piece(x, of) for x in (q, k, v)),
            *positional,
            initial_state=initial_state,
            output_final_state=True,
            **cut,
        )
        found.append((of.stop, state))
        initial_state = state
    if not found:
        raise ValueError(f"q: expected at least 1 token, got {tuple(q.shape)}")
    is_pair = isinstance(found[0][1], tuple)
    parts = [state if is_pair else (state, None) for _, state in found]
    S, z = (_stack([part[i] for part in parts]) for i in (0, 1))
    return States(np.array([read for read, _ in found]), S, z)


def _stack(arrays: list[Any]) -> Any:
    if arrays[0] is None:
        return None
    if is_tensor(arrays[0]):
        import torch

        return torch.stack(arrays)
    return np.stack(arrays)
