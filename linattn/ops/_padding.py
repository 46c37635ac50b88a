"""Rows with padding: an op reads the tokens of a mask alone, packed behind one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linattn import _linattn
from linattn.features import is_tensor, library_of, shape_of
from linattn.ops._core import Gradients
from linattn.variants import ARRAYS

__all__ = ["Tokens", "masked_backward", "masked_forward"]

# the arrays with a number or a row for each token
LINES = [line for line in ARRAYS if line.letters[:2] in ("BT", "BL")]
# their keywords: do is the gradient of out
OF_TOKENS = {line.label for line in LINES} | {"alpha", "do"}
# whose gradient each field of Gradients is
INPUTS = {line.gradient: line.label for line in LINES if line.role == "INPUT"}


class Tokens:
    """The tokens [B,T] where `there`, an array of truth values, is true."""

    def __init__(self, there: Any) -> None:
        self.there = there
        self.shape = tuple(there.shape)
        self.library = library_of(there)
        none, ends = there.sum() * 0, self.library.cumsum(there.sum(1), 0)
        self.cu_seqlens = self.library.concatenate([none.reshape(1), ends])

    def packed(self, x: Any) -> Any:
        """[B,T,...] -> [1,n,...], the n tokens row by row."""
        return x[self.there][None]

    def spread(self, y: Any) -> Any:
        """[1,n,...] -> [B,T,...], with zeros at the other tokens."""
        lib, rows = self.library, y[0]
        one = rows[:1] if rows.shape[0] else rows.sum(0)[None]
        rows = lib.concatenate([rows, lib.zeros_like(one)])  # the last is for those
        there = self.there.reshape(-1)
        places = lib.where(there, lib.cumsum(there, 0) - 1, -1)
        return rows[places].reshape(*self.shape, *y.shape[2:])


def tokens_of(mask: Any, q: Any, cu_seqlens: Any) -> Tokens:
    """Those of the mask of a call."""
    if cu_seqlens is not None:
        raise ValueError("mask: expected None with cu_seqlens, got a mask")
    shape, rows = shape_of(mask), shape_of(q)
    if shape is None or (rows is not None and library_of(mask) is not library_of(q)):
        name = type(mask).__name__
        raise TypeError(f"mask: expected an array [B,T] of q's library, got {name}")
    if rows is None:
        raise TypeError(f"q: expected an array, got {type(q).__name__}")
    if len(rows) != 4:
        raise ValueError(f"q: expected [B,T,H,K] with a mask, got shape {rows}")
    if shape != rows[:2]:
        raise ValueError(f"mask: expected [B,T] = {rows[:2]}, got shape {shape}")
    return Tokens((mask.to(q.device) if is_tensor(q) else mask) != 0)


def packed(tokens: Tokens, name: str, x: Any) -> Any:
    """An argument of the call of these tokens. Those without a number for each stay as they are."""
    shape = shape_of(x)
    if name not in OF_TOKENS or shape is None or len(shape) < 2:
        return x
    if shape[:2] != tokens.shape:
        raise ValueError(
            f"{name}: expected [B,T] = {tokens.shape} in front, as of mask, got shape {shape}"
        )
    return tokens.packed(x)


def masked_forward(
    forward: Callable[..., tuple[Any, Any]], mask: Any
) -> Callable[..., tuple[Any, Any]]:
    """A forward pass of the tokens of a mask."""

    def masked(
        op: str, q: Any, k: Any, v: Any, *, cu_seqlens: Any, out: Any, **options: Any
    ) -> tuple[Any, Any]:
        tokens = tokens_of(mask, q, cu_seqlens)
        if out is not None:
            raise ValueError("out: expected None with a mask, got an array")
        inputs = [packed(tokens, name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
        options = {name: packed(tokens, name, x) for name, x in options.items()}
        o, state = forward(op, *inputs, cu_seqlens=tokens.cu_seqlens, out=None, **options)
        return tokens.spread(o), state

    return masked


def masked_backward(mask: Any) -> Callable[..., tuple[Any, ...]]:
    """The gradients of such a pass: zeros at the padding."""

    def backward(
        op: str, q: Any, k: Any, v: Any, *, cu_seqlens: Any, **options: Any
    ) -> tuple[Any, ...]:
        tokens = tokens_of(mask, q, cu_seqlens)
        given = {"q": q, "k": k, "v": v} | options
        taken = {name: packed(tokens, name, x) for name, x in given.items()}
        grads = _linattn.backward(op, cu_seqlens=tokens.cu_seqlens, **taken)
        inputs = INPUTS | ({"dg": "alpha"} if given.get("g") is None else {})
        of_tokens = {d for d, name in inputs.items() if taken.get(name) is not given.get(name)}
        return tuple(
            tokens.spread(y) if name in of_tokens else y
            for name, y in zip(Gradients._fields, grads, strict=True)
        )

    return backward
