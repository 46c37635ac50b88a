"""PyTorch: the forward passes once more, written in PyTorch's own functions, token by token.

The core has first gradients alone. All other derivatives are PyTorch's own, of this text: gradients
of gradients, and those of forward mode. It is slow: about ten calls of PyTorch's for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from linattn._elementwise import held_root
from linattn.features import CoreFeatures, l2norm
from linattn.variants import ARRAYS, VARIANTS

__all__ = [
    "MAPS",
    "SLOPES",
    "convolution",
    "gradients_of_gradients",
    "op",
    "outline",
    "scan",
]

# The maps by the core's numbers (features.py), with the core's slopes where a map has a corner.
MAPS: dict[float, Callable[[Tensor, float], Tensor]] = {
    0.0: lambda x, eps: x,
    1.0: lambda x, eps: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    2.0: lambda x, eps: x.relu() + eps,
    3.0: lambda x, eps: x.relu() ** 2,
    4.0: lambda x, eps: x.exp(),
}
# The derivative of y = phi(x), for each of MAPS: PyTorch records nothing within an operator.
SLOPES: dict[float, Callable[[Tensor, Tensor], Tensor]] = {
    0.0: lambda x, y: torch.ones_like(x),
    1.0: lambda x, y: y.clamp(max=1),  # exp(x) below zero, which is y
    2.0: lambda x, y: (x > 0).to(x.dtype),
    3.0: lambda x, y: x.relu().mul_(2),
    4.0: lambda x, y: y,
}
_NO_FEATURES: CoreFeatures = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
# How a decay comes from what the caller gave, by the keyword.
_DECAYS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "g": torch.exp,
    "slopes": lambda slopes: (-slopes).exp(),
    "alpha": lambda alpha: alpha,
    "gamma": lambda gamma: gamma,
}
_LETTERS = {line.label: line.letters for line in ARRAYS if line.role == "INPUT"}
# The arrays that this text knows. It refuses a call with another one.
_KNOWN = {"q", "k", "v", "g", "beta", "x", "y", "bonus", "eta", "cu_seqlens"}
_KNOWN |= {"initial_state", "initial_state_second", "weight", "skip", "value_gate"}


def gradients_of_gradients(
    forward: Callable[..., tuple[Any, ...]],
    wanted: tuple[Tensor | None, ...],
    weights: tuple[Tensor | None, ...],
    arrays: Mapping[int, Tensor],
    arguments: tuple[Any, ...],
) -> tuple[list[Tensor | None], dict[int, Tensor]]:
    """The gradients of sum(weights * g), where g are the gradients of sum(wanted * outputs).

    Parameters
    ----------
    forward
        The forward pass, of `arguments`.
    wanted
        The gradient of each of its outputs; None for an output that does not count.
    weights
        One for each array that has a gradient, in the order of `arrays`.
    arrays
        The arguments that have one, by their place.

    Returns
    -------
    The gradients of `wanted`, and those of `arrays`.
    """
    there = [i for i, d in enumerate(wanted) if d is not None]

    def first(*given: Tensor) -> tuple[Tensor, ...]:
        cotangents, smooth = given[: len(there)], given[len(there) :]

        def outputs(*smooth: Tensor) -> tuple[Tensor, ...]:
            full = list(arguments)
            for place, x in zip(arrays, smooth, strict=True):
                full[place] = x
            made = forward(*full)
            # the type of an output is that of its gradient
            return tuple(made[i].to(d.dtype) for i, d in zip(there, cotangents, strict=True))

        pulled: tuple[Tensor, ...] = torch.func.vjp(outputs, *smooth)[1](cotangents)
        return pulled

    given = [*(wanted[i] for i in there), *arrays.values()]
    gradients, pull = torch.func.vjp(first, *given)
    full = [
        torch.zeros_like(g) if w is None else w.to(g.dtype)
        for g, w in zip(gradients, weights, strict=True)
    ]
    found = pull(tuple(full))
    of_wanted: list[Tensor | None] = [None] * len(wanted)
    for i, d in zip(there, found, strict=False):
        of_wanted[i] = d
    return of_wanted, dict(zip(arrays, found[len(there) :], strict=True))


def outline(x: Any) -> Any:
    """A tensor's shape and dtype, which the core checks as those of an array. PyTorch's wrappers
    have no memory for it."""
    if isinstance(x, tuple):
        return tuple(map(outline, x))
    if not isinstance(x, Tensor):
        return x
    dtype = SimpleNamespace(name=str(x.dtype).removeprefix("torch."))
    return SimpleNamespace(shape=tuple(x.shape), dtype=dtype)


# ---- the ops of the table ----


def op(name: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The outputs, and the state after each sequence, of an operator's arguments by their names."""
    for label, x in given.items():
        if isinstance(x, Tensor) and label not in _KNOWN:
            raise NotImplementedError(
                f"{label}: expected None where {name} has other derivatives "
                "than first gradients, got a tensor"
            )
    call = _Call(name, given)
    rows, states = [], []
    for n, tokens in _sequences(given["cu_seqlens"]):
        o, state = call.all_at_once(n, tokens) if call.noncausal else call.walk(n, tokens)
        rows.append(o)
        states.append(state)
    o = torch.cat(rows, 1) if rows else torch.zeros_like(call.v)
    finals = [torch.cat(parts) for parts in zip(*states, strict=True)] or list(call.states)
    if given["state_v_first"]:  # z has no columns
        finals = [S.transpose(-1, -2) if S.dim() == 4 else S for S in finals]
    if call.alone:
        o = o[0, :, 0]
        finals = [S[:, 0] if call.packed else S[0, 0] for S in finals]
    S, second, *_ = *finals, None
    return o.to(given["q"].dtype), S, second


class _Call:
    """The arguments with all their axes and the dtype of sums. Each value head has its own keys."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.variant, self.given = VARIANTS[name], given
        q, k, self.v = (self.full(x, given[x]) for x in "qkv")
        self.alone, self.packed = given["q"].dim() == 2, given["cu_seqlens"] is not None
        self.group = self.v.shape[2] // max(q.shape[2], 1)
        if given["qk_l2norm"]:
            q, k = l2norm(q), l2norm(k)
        features: CoreFeatures = given["features"] or _NO_FEATURES
        phi_q, eps_q, phi_k, eps_k, self.normaliser, self.eps, causal = features
        self.noncausal = not causal
        q, k = MAPS[phi_q](q, eps_q), MAPS[phi_k](k, eps_k)
        scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        self.q, self.k = scale * self.spread(q), self.spread(k)
        self.x, self.y = (self.spread(self.full(x, given[x])) for x in "xy")
        self.beta, self.eta = (self.full(x, given[x]) for x in ("beta", "eta"))
        self.passed = None  # what reads have of their own values
        if given["skip"] is not None:
            self.passed = scale * self.full("skip", given["skip"])[:, None] * self.v
        if given["weight"] is not None:
            self.v = self.full("weight", given["weight"])[..., None] * self.v
        if given["value_gate"] is not None:
            self.v = self.full("value_gate", given["value_gate"]) * self.v
        self.bonus = self.full("bonus", given["bonus"])
        if self.bonus is not None:
            self.bonus = self.bonus.repeat_interleave(self.group, 0)
        self.a = self.decays()
        self.states = self.first_states()

    def full(self, name: str, x: Tensor | None) -> Any:
        """x with the axes that a call of one head leaves out."""
        if x is None:
            return None
        x = x.double() if self.given["q"].dtype == torch.float64 else x.float()
        if self.given["q"].dim() == 2:
            for i, letter in enumerate(_LETTERS[name]):
                if letter in "BHh":
                    x = x.unsqueeze(i)
        return x

    def spread(self, x: Tensor | None) -> Any:
        """Arrays of key heads, for value heads."""
        return x if x is None or self.group == 1 else x.repeat_interleave(self.group, 2)

    def decays(self) -> Any:
        """[B,T,h,1] or [B,T,h,K]; one number for each head is [1,1,h,1]."""
        g = self.given["g"]
        if g is None:
            return None
        a = _DECAYS[self.given["gate"]](g.to(self.v.dtype))
        if self.variant.decay == "head":
            return a.reshape(1, 1, -1, 1)
        if self.alone:
            a = a[None, :, None]
        return a if self.variant.decay == "key" else a.unsqueeze(-1)

    def first_states(self) -> tuple[Tensor, ...]:
        """S [N,h,K,V], and z [N,h,K] or the momentum."""
        (_, _, h, V), K, given = self.v.shape, self.q.shape[-1], self.given
        N = _states(self.v, given["cu_seqlens"])
        shapes: dict[str, tuple[int, ...]] = {"initial_state": (N, h, K, V)}
        if self.variant.decay == "pair":
            shapes["initial_state_second"] = (N, h, K, V)
        elif self.normaliser:
            shapes["initial_state_second"] = (N, h, K)
        states = []
        for name, shape in shapes.items():
            S = given[name]
            S = self.v.new_zeros(shape) if S is None else S.to(self.v.dtype)
            if given[name] is not None and given["state_v_first"] and len(shape) == 4:
                S = S.transpose(-1, -2)
            states.append(S.reshape(shape))
        return tuple(states)

    def tokens(self, at: slice) -> Iterator[Iterable[Any]]:
        """q, k, v, a, beta, eta, x and y of each token. unbind: an index for each token would make
        gradients of all tokens."""
        for x in (self.q, self.k, self.v, self.a, self.beta, self.eta, self.x, self.y):
            if x is None:
                yield [None] * self.v[:, at].shape[1]
            elif x is self.a and self.variant.decay == "head":
                yield [x[:, 0]] * self.v[:, at].shape[1]
            else:
                yield x[:, at].unbind(1)

    def walk(self, n: slice, tokens: slice) -> tuple[Tensor, list[Tensor]]:
        """csrc/recurrence.h, for one token after another."""
        rule, decay, given = self.variant.rule, self.variant.decay, self.given
        S, second, *_ = *(S[n] for S in self.states), None
        outputs, M0 = [], S
        arrays: Iterator[tuple[Any, ...]] = zip(*self.tokens(tokens), strict=True)
        for t, (q, k, v, a, beta, eta, x, y) in enumerate(arrays):
            before = S
            if a is not None:
                S = a.unsqueeze(-1) * S
            if rule == "delta":
                seen = S
                if decay == "pair":
                    M0 = before if t % given["batch"] == 0 else M0
                    seen = M0
                elif given["predicts_before"]:
                    seen = before
                v = beta[..., None] * (v - _read(seen, k if x is None else x))
            if rule == "bonus":
                own = (q * self.bonus * k).sum(-1, keepdim=True)
                outputs.append(_read(before, q) + own * v)
            written = _outer(k, v)
            if rule == "dplr":
                written = written - _outer(y, _read(before, x))
            if decay == "pair":
                second = written if eta is None else eta[..., None, None] * second + written
                written = second
            S = S + written
            if self.normaliser:
                second = second + k
                den = (q * second).sum(-1, keepdim=True)
            if rule != "bonus":
                o = _read(S, q)
                outputs.append(self.divided(o, den) if self.normaliser else o)
        o = torch.stack(outputs, 1) if outputs else self.v[:, :0]
        if self.passed is not None:
            o = o + self.passed[:, tokens]
        return o, [S] if second is None else [S, second]

    def divided(self, o: Tensor, den: Tensor) -> Tensor:
        added = self.normaliser == 2
        return o / (den + self.eps if added else torch.where(den > self.eps, den, self.eps))

    def all_at_once(self, n: slice, tokens: slice) -> tuple[Tensor, list[Tensor]]:
        """Every token reads what all have written."""
        q, k, v = self.q[:, tokens], self.k[:, tokens], self.v[:, tokens]
        S = self.states[0][n] + torch.einsum("blhk,blhv->bhkv", k, v)
        o = torch.einsum("bthk,bhkv->bthv", q, S)
        if not self.normaliser:
            return o, [S]
        z = self.states[1][n] + k.sum(1)
        return self.divided(o, torch.einsum("bthk,bhk->bth", q, z)[..., None]), [S, z]


def _read(S: Tensor, q: Tensor) -> Tensor:
    return (q.unsqueeze(-2) @ S).squeeze(-2)


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


# ---- the rooms ----


def scan(form: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A diagonal scan: csrc/diagonal_token.h, for one token after another."""
    given, pairs = dict(given), bool(given["complex"])
    first: Tensor = given["u"]
    real = torch.float64 if first.dtype == torch.float64 else torch.float32
    for name, x in given.items():
        if isinstance(x, Tensor) and name != "cu_seqlens":
            given[name] = x.to(real)
            if pairs and name in ("A", "B", "C", "initial_state"):
                given[name] = torch.view_as_complex(given[name].unflatten(-1, (-1, 2)).contiguous())
    u, D, h0 = given["u"], given.get("D"), given["initial_state"]
    if form == "selective":
        delta = given["delta"]
        if given["delta_bias"] is not None:
            delta = delta + given["delta_bias"]
        if given["delta_softplus"]:
            delta = torch.nn.functional.softplus(delta, 1, 40)
        many = u.shape[-1] // max(given["B"].shape[2], 1)
        spread = {name: given[name].repeat_interleave(many, 2) for name in "BC"}
        given |= {"delta": delta, **spread}
    if h0 is None:
        like: Tensor = u.new_zeros(u.shape[2]) if form == "gated" else given["A"]
        h0 = like.new_zeros(_states(u, given["cu_seqlens"]), *like.shape)
    rows, states = [], []
    for n, tokens in _sequences(given["cu_seqlens"]):
        h, reads = h0[n], []
        for a, written, c in _scanned(form, u, given, tokens):
            h = a * h + written
            if c is None:
                reads.append(h)
                continue
            read = (c * h).sum(-1)
            reads.append(2 * read.real if pairs else read)
        rows.append(torch.stack(reads, 1) if reads else u[:, :0])
        states.append(h)
    y, state = (torch.cat(rows, 1), torch.cat(states)) if rows else (u, h0)
    if D is not None:
        y = y + D * u
    if given.get("z") is not None:
        y = y * torch.nn.functional.silu(given["z"])
    return y.to(first.dtype), torch.view_as_real(state).flatten(-2) if pairs else state


def _scanned(
    form: str, u: Tensor, given: Mapping[str, Any], at: slice
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """The decay of each token, its write, and its C. The state of a gated scan is its read."""
    if form == "gated":
        g, w = given["g"][:, at], u[:, at]
        if given.get("write") == "share":
            w = -g.expm1() * w
        elif given.get("write") == "root":
            w = held_root(-(2 * g).expm1(), _LIMIT_OF_ROOT) * w
        for a, write in zip(g.exp().unbind(1), w.unbind(1), strict=True):
            yield a, write, None
        return

    A, B, C = (given[name] for name in "ABC")
    if form == "fixed":
        for w in u[:, at].unbind(1):
            yield A, w.unsqueeze(-1) * B, C
        return
    for w, step, b, c in zip(*(x[:, at].unbind(1) for x in (u, given["delta"], B, C)), strict=True):
        yield (step.unsqueeze(-1) * A).exp(), (step * w).unsqueeze(-1) * b, c


_LIMIT_OF_ROOT = 1000.0  # csrc/diagonal_token.h


def convolution(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Each channel with its own taps, of which the last one belongs to the token itself."""
    first: Tensor = given["x"]
    real = torch.float64 if first.dtype == torch.float64 else torch.float32
    x, weight = first.to(real), given["weight"].to(real)
    W, rows, states = weight.shape[1], [], []
    before = given["initial_state"]
    if before is None:
        before = x.new_zeros(_states(x, given["cu_seqlens"]), x.shape[2], W - 1)
    before = before.to(real)
    for n, tokens in _sequences(given["cu_seqlens"]):
        inputs = x[:, tokens]
        T = inputs.shape[1]
        inputs = torch.cat([before[n].transpose(1, 2), inputs], 1)
        total = sum(weight[:, j] * inputs[:, j : j + T] for j in range(W))
        rows.append(total)
        states.append(inputs[:, T:].transpose(1, 2))
    y, state = (torch.cat(rows, 1), torch.cat(states)) if rows else (x, before)
    if given["bias"] is not None:
        y = y + given["bias"].to(real)
    if given["activation"] is not None:
        y = torch.nn.functional.silu(y)
    return y.to(first.dtype), state


def _states(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _sequences(cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Those that can go side by side: their states, and their tokens."""
    if cu_seqlens is None:
        yield slice(None), slice(None)
        return
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        yield slice(n, n + 1), slice(begin, end)
