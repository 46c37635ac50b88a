"""The arrays of a call, checked by their names.

One spelling serves NumPy, PyTorch, CuPy and every library whose arrays know their namespace.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from linattn.features import (
    cast,
    held,
    is_array,
    is_recorded,
    is_tensor,
    is_traced,
    library_of,
    shape_of,
)
from linattn.ops._core import other_ways

__all__ = [
    "Arrays",
    "Sequences",
    "detached",
    "total",
]

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTS = ("int32", "int64")


def is_number(x: object) -> bool:
    return isinstance(x, int | float | np.floating | np.integer) and not isinstance(x, bool)


def _dtype_of(x: Any) -> str:
    return getattr(x.dtype, "name", None) or str(x.dtype).removeprefix("torch.")


def _shown(shape: tuple[Any, ...]) -> str:
    return str(tuple(int(n) for n in shape))


class Arrays:
    """The arrays of one call. The first decides library, device and dtype; letters are shared.

    A letter gets its size where it first occurs. A method checks one argument and returns it as
    the call computes with it. Nothing is computed before all of them were checked.

    Parameters
    ----------
    name, x, letters
        The first array: its name, itself, and its axes, as in "B T H P".
    recorded : bool
        May PyTorch record the call? A step and a backward pass refuse what requires gradients.
    """

    def __init__(self, name: str, x: Any, letters: str, *, recorded: bool = True) -> None:
        self.first, self.recorded = name, recorded
        self.sizes: dict[str, Any] = {}
        self._require_array(name, x)
        self._require_float(name, x)
        self._begin(x)
        self._fit(name, x, letters)

    def _begin(self, x: Any) -> None:
        """What follows from the first array."""
        self.like = x
        self.xp, self.device = library_of(x), getattr(x, "device", None)
        self.dtype = _dtype_of(x)
        self.real = self.xp.float64 if self.dtype == "float64" else self.xp.float32
        #: Does linattn.jax make the call? Then no array changes, and a step returns its state.
        self.by_jax = other_ways(x) is not None
        #: For sums of many tokens.
        self.double = held(self.xp.float64, x)

    @classmethod
    def checked(cls, x: Any) -> Arrays:
        """Those of a step whose arrays were checked."""
        call = cls.__new__(cls)
        call._begin(x)
        return call

    # ---- checks ----

    def _require_array(self, name: str, x: Any) -> None:
        if not is_array(x):
            raise TypeError(f"{name}: expected an array, got {type(x)}")
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got {type(x)}")
        if not self.recorded and is_recorded(x):
            raise ValueError(
                f"{name}: requires gradients, which are not recorded of a step or of gradients; "
                f"pass {name}.detach(), or call it under torch.no_grad()"
            )

    def _require_float(self, name: str, x: Any) -> None:
        if _dtype_of(x) not in FLOATS:
            expected = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
            raise TypeError(f"{name}: expected {expected}, got {_dtype_of(x)}")

    def _require_own(self, name: str, x: Any) -> None:
        """x is an array of the first one's library, where that lies."""
        device = getattr(x, "device", None)
        if type(x) is type(self.like) and device == self.device and not is_recorded(x):
            return
        self._require_array(name, x)
        if library_of(x) is not self.xp:
            raise TypeError(
                f"{name}: expected an array of {self.xp.__name__} like {self.first}, got {type(x)}"
            )
        if device != self.device:
            raise ValueError(
                f"{name}: expected an array on {self.device} like {self.first}, got one on {device}"
            )

    def _fit(self, name: str, x: Any, letters: str) -> None:
        axes = letters.split()
        shape = shape_of(x) or ()
        if len(shape) != len(axes):
            raise ValueError(f"{name}: expected [{','.join(axes)}], got {_shown(shape)}")
        for letter, n in zip(axes, shape, strict=True):  # symbols, where PyTorch traces them
            if self.sizes.setdefault(letter, n) != n:
                want = tuple(self.sizes.get(axis, m) for axis, m in zip(axes, shape, strict=True))
                raise ValueError(
                    f"{name}: expected [{','.join(axes)}] = {_shown(want)}, got {_shown(shape)}"
                )

    def array(self, name: str, x: Any, letters: str) -> Any:
        """An array of the dtype of the first."""
        self._require_own(name, x)
        if _dtype_of(x) != self.dtype:
            raise TypeError(
                f"{name}: expected {self.dtype} (the dtype of {self.first}), got {_dtype_of(x)}"
            )
        self._fit(name, x, letters)
        return x

    def wide(self, name: str, x: Any, *letters: str, number: bool = True) -> Any:
        """An array of any floating dtype, or a number that stands for one.

        It is one of several shapes; None stays None.
        """
        if x is None:
            return None
        if number and is_number(x):
            return _Number(float(x), letters[0])
        self._require_own(name, x)
        self._require_float(name, x)
        axes = len(shape_of(x) or ())
        self._fit(name, x, next((one for one in letters if len(one.split()) == axes), letters[0]))
        return x

    def state(
        self,
        name: str,
        x: Any,
        letters: str,
        *,
        written: bool,
        short: bool = True,
        angle: bool = False,
    ) -> Any:
        """Part of a state: float32 (float64 for float64 arrays), or bfloat16 if it may be short.

        An angle is float64 or float32, whatever the arrays are.
        """
        self._require_own(name, x)
        may_be = ["float64" if self.dtype == "float64" else "float32"]
        if angle:
            may_be = ["float64", "float32"]
        elif short and self.dtype != "float64":
            may_be.append("bfloat16")
        if _dtype_of(x) not in may_be:
            raise TypeError(f"{name}: expected {' or '.join(may_be)}, got {_dtype_of(x)}")
        if written and isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        self._fit(name, x, letters)
        return x

    def integers(self, name: str, x: Any, letters: str) -> Any:
        self._require_own(name, x)
        if _dtype_of(x) not in INTS:
            raise TypeError(f"{name}: expected {' or '.join(INTS)}, got {_dtype_of(x)}")
        self._fit(name, x, letters)
        return x

    def flags(self, name: str, x: Any, letters: str) -> Any:
        self._require_own(name, x)
        if _dtype_of(x) != "bool":
            raise TypeError(f"{name}: expected bool, got {_dtype_of(x)}")
        self._fit(name, x, letters)
        return x

    def multiple(self, name: str, letter: str, of: str) -> None:
        """One size is a multiple of another, so that heads can share in groups."""
        heads, groups = self.sizes[letter], self.sizes[of]
        if groups < 1 or heads % groups:
            raise ValueError(
                f"{name}: expected {of} to divide {letter} = {heads}, got {of} = {groups}"
            )

    def packed(self, name: str, x: Any) -> Any:
        """cu_seqlens, its values too where the host can read them without waiting."""
        if x is None:
            return None
        self._require_array(name, x)
        if _dtype_of(x) not in INTS:
            raise TypeError(f"{name}: expected {' or '.join(INTS)}, got {_dtype_of(x)}")
        shape = shape_of(x) or ()
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{name}: expected [N+1], got {_shown(shape)}")
        if self.sizes["B"] != 1:
            raise ValueError(
                f"{name}: expected packed sequences to have B = 1, got B = {self.sizes['B']}"
            )
        on_host = getattr(x, "device", None) is None or str(x.device) == "cpu"
        if isinstance(x, np.ndarray) or (on_host and not is_traced(x)):
            ends = x.tolist()
            if ends[0] != 0:
                raise ValueError(f"{name}: expected to start at 0, got {ends[0]}")
            if any(after < before for before, after in pairwise(ends)):
                raise ValueError(f"{name}: expected never to fall, got {ends}")
            if ends[-1] != self.sizes["T"]:
                raise ValueError(
                    f"{name}: expected to end at T = {self.sizes['T']}, got {ends[-1]}"
                )
        return x

    # ---- after the checks ----

    def is_like(self, x: Any) -> bool:
        """Is x, which was checked, an array of the dtype of the first one?"""
        return not isinstance(x, _Number) and _dtype_of(x) == self.dtype

    def real_of(self, x: Any) -> Any:
        """An array that was checked, in the dtype of the sums: float32, or float64."""
        if x is None:
            return None
        if isinstance(x, _Number):
            return self.full([self.sizes[letter] for letter in x.letters.split()], x.value)
        return cast(np.asarray(x) if isinstance(x, np.ndarray) else x, self.real)

    def full(self, shape: list[int], value: float) -> Any:
        if is_tensor(self.like):
            return self.like.new_full(shape, value, dtype=self.real)
        return self.xp.full(shape, value, dtype=self.real)

    def counts(self, values: list[int]) -> Any:
        """Whole numbers as an array, where the first one lies."""
        if is_tensor(self.like):
            return self.xp.tensor(values, dtype=self.xp.int64, device=self.device)
        return self.xp.asarray(np.asarray(values, np.int64))

    def contiguous(self, x: Any) -> Any:
        """x in memory of its own, where it is a part of a larger array; those of JAX never are."""
        if self.by_jax:
            return x
        return x.contiguous() if is_tensor(x) else self.xp.ascontiguousarray(x)

    def scaled(self, a: Any, x: Any) -> Any:
        """a x in the dtype of x, rounded once; a is an array that was checked, or a number."""
        if is_tensor(x) and self.is_like(a) and not is_traced(x):
            return a * x  # which is rounded once
        recorded = is_recorded(a) or is_recorded(x)
        if not is_tensor(x) or x.dtype == self.real or recorded or is_traced(x):
            return self.short(self.real_of(a) * x)
        # One pass over memory, where PyTorch neither records the product nor fuses it.
        return self.xp.mul(x, self.factor(a), out=x.new_empty(x.shape))

    def plus(self, y: Any, a: Any, x: Any) -> Any:
        """y + a x, rounded once. All have the dtype of the first array."""
        if is_tensor(y) and not is_traced(y):
            return self.xp.addcmul(y, a, x)
        return self.short(y + a * self.real_of(x))

    def factor(self, a: Any) -> Any:
        """An array that was checked, or a number, beside an array in the dtype of the sums. The
        library multiplies in the wider of both dtypes. A copy of a in the dtype of the sums would
        be one more pass over memory, and PyTorch would keep it."""
        return a.value if isinstance(a, _Number) else a

    def short(self, x: Any) -> Any:
        """x in the dtype of the first array."""
        return cast(x, self.like.dtype)

    def stepped(self, found: Any, state: Any) -> tuple[Any, Any]:
        """The output of an op's step, and its state: the one it changed, or for JAX a new one."""
        return found if self.by_jax else (found, state)

    def with_state(self, y: Any, state: Any) -> Any:
        """What a step returns: for JAX the new state, too."""
        return (y, state) if self.by_jax else y

    def replaced(self, x: Any, value: Any, indices: Any = None) -> Any:
        """Part of a state with this value, in its dtype: x, which changes, or for JAX a new array.

        With indices x is a pool, and a row whose index is -1 has no place in it.
        """
        value = cast(value, x.dtype)
        if self.by_jax:
            if indices is None:
                return value
            return x.at[self.xp.where(indices < 0, len(x), indices)].set(value, mode="drop")
        if indices is None:
            x[...] = value
        else:
            there = (indices >= 0) & (indices < len(x))
            x[indices[there]] = value[there]
        return x

    def short_of_step(self, found: Any) -> Any:
        """The same of what a step gives: its output, and for JAX the new state beside it."""
        if not isinstance(found, tuple):
            return self.short(found)
        y, state = found
        return self.short(y), state

    def as_given(self, dx: Any, given: Any) -> Any:
        """A gradient in the dtype of its array. That of a number is a number."""
        if given is None:
            return None
        if isinstance(given, _Number):
            return float(total(self.xp, dx, tuple(range(dx.ndim))))
        return cast(dx, given.dtype)


class Sequences:
    """Where the sequences of a call begin and end: the rows of a batch, or packed ones.

    Tokens are [B,T,...], and what a sequence has one of is [N,...]. The letter is the name of N in
    the call. A packed sequence may be empty.
    """

    def __init__(self, call: Arrays, ends: Any, letter: str) -> None:
        self.call, self.xp, T = call, call.xp, call.sizes["T"]
        self.T, self.bounds = T, None if ends is None else [int(end) for end in ends.tolist()]
        if self.bounds is None:
            N, starts, stops = call.sizes["B"], {0}, {T}
            empties = [T == 0] * N
        else:
            N, starts, stops = len(self.bounds) - 1, set(self.bounds), set(self.bounds)
            spans = list(pairwise(self.bounds))
            empties = [start == end for start, end in spans]
            self.of_token = call.counts(
                [n for n, (start, end) in enumerate(spans) for _ in range(start, end)]
            )
            self.firsts = call.counts([min(start, max(T - 1, 0)) for start, _ in spans])
            self.lasts = call.counts([max(end - 1, 0) for _, end in spans])
        call.sizes[letter] = N
        self.is_first = call.counts([int(t in starts) for t in range(T)]) > 0
        self.is_last = call.counts([int(t + 1 in stops) for t in range(T)]) > 0
        self.there = call.counts([int(not empty) for empty in empties]) > 0

    def own(self, y: Any) -> Any:
        """For every token what its sequence has of y."""
        return y[:, None] if self.bounds is None else y[self.of_token][None]

    def _pick(self, x: Any, otherwise: Any, first: bool) -> Any:
        if self.T == 0:
            return otherwise
        if self.bounds is None:
            return x[:, 0 if first else -1]
        picked = x[0][self.firsts if first else self.lasts]
        return self.xp.where(_axes(self.there, (0,), x.ndim - 1), picked, otherwise)

    def first(self, x: Any, otherwise: Any) -> Any:
        """x [B,T,...] at the first token of every sequence; of an empty one, what is there else."""
        return self._pick(x, otherwise, True)

    def last(self, x: Any, otherwise: Any) -> Any:
        return self._pick(x, otherwise, False)

    def at(self, where: Any, y: Any, x: Any) -> Any:
        """What each sequence has of y at the tokens `where`, and x at the others."""
        return self.xp.where(_axes(where, (1,), x.ndim), self.own(y), x)

    def earlier(self, x: Any, first: Any) -> Any:
        """x one token later: each token has what the one before it had."""
        moved = self.xp.concatenate([x[:, :1], x[:, :-1]], 1)
        return self.at(self.is_first, first, moved)

    def later(self, x: Any, last: Any) -> Any:
        """x one token earlier: each token has what the one after it had."""
        moved = self.xp.concatenate([x[:, 1:], x[:, -1:]], 1)
        return self.at(self.is_last, last, moved)

    def sums(self, x: Any, from_the_end: bool = False) -> Any:
        """The sums over each sequence up to every token, or from it on."""
        xp, bounds = self.xp, [0, self.T] if self.bounds is None else self.bounds
        parts = [x[:, start:end] for start, end in pairwise(bounds)]
        if from_the_end:
            parts = [xp.flip(xp.cumsum(xp.flip(part, (1,)), 1), (1,)) for part in parts]
        else:
            parts = [xp.cumsum(part, 1) for part in parts]
        return xp.concatenate(parts, 1) if parts else x


def _axes(mask: Any, at: tuple[int, ...], ndim: int) -> Any:
    """A mask of one axis as one of ndim axes."""
    return mask.reshape([mask.shape[0] if axis in at else 1 for axis in range(ndim)])


class _Number:
    """A number that stands for an array of these letters."""

    def __init__(self, value: float, letters: str) -> None:
        self.value, self.letters = value, letters


def total(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """The sum over these axes, taken in float64: it may have a term for every token."""
    return cast(x.sum(axes, dtype=xp.float64), x.dtype)


def detached(x: Any) -> Any:
    """x, of which PyTorch and JAX record nothing."""
    if is_tensor(x):
        return x.detach()
    jax = sys.modules.get("jax")
    return jax.lax.stop_gradient(x) if jax and isinstance(x, jax.Array) else x
