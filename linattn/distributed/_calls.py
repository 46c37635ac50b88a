"""One call of a function of linattn's on the tokens of one rank: run, mapped, differentiated.

Which kind of map a function has follows from its row in the table of ops: a delta rule has a matrix
[K,K] (two states: [2K,2K]), a decay per key a diagonal, another decay a number, no decay nothing.
A scan, which is not in the table, has a diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import linattn
from linattn.autograd import is_number, tensor_of
from linattn.distributed._exchange import Form
from linattn.distributed._systems import SYSTEMS
from linattn.features import core_features, mapped
from linattn.kernels import note
from linattn.ops._core import CoreCall
from linattn.segments import (
    core_call,
    final_state,
    initial_gradient,
    product_of_decays,
    segment_map,
    segment_map_backward,
    signature_of,
    with_default_gate,
)
from linattn.variants import VARIANTS

__all__ = ["Call", "Derivatives", "States", "is_flushing", "names_of_states"]

CHANNELS = 256  # so many channels of a scan keep a GPU as busy as a head of an op
States = tuple[Tensor, ...]  # the state of a call, or the two of a pair
_NOT_OPTIONS = ("cu_seqlens", "out")


_PROBED: dict[Any, tuple[list[tuple[int, ...]], torch.dtype]] = {}
_MOST_PROBED = 10_000
_SIMPLE = (type(None), bool, int, float, str)  # of options, whose repr is their value


class Derivatives(NamedTuple):
    """The gradients of the arrays by name, and of the state before the tokens."""

    arrays: dict[str, Tensor]
    states: States | None


def is_flushing() -> bool:
    """Does this thread take numbers below the least normal one for zero?"""
    small = torch.full((), 2.0**-130, dtype=torch.float32)
    return bool((small * 1 == 0).item())


@contextmanager
def _flushing(device: torch.device) -> Iterator[None]:
    """Columns of M that nothing is written to fade. Below the least normal number they would stay,
    because a decay above 1/2 of the least number is rounded to that number, and a CPU would take
    many times as long for each product. linattn's threads have the mode of the caller's."""
    if device.type != "cpu":
        yield
        return
    before = is_flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _is_of_tokens(x: Tensor) -> bool:
    """Is axis 1 that of tokens? Arrays that all tokens share have two axes at most."""
    return x.dim() > 2 or x.dtype == torch.bool


class Call:
    """The arrays and options of a call. Arrays are kept apart, for PyTorch records them."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name, self.row = name, VARIANTS.get(name)
        self.forward, self.back = getattr(linattn, name), getattr(linattn, f"{name}_backward")
        self.system = SYSTEMS.get(name)
        # the row of an op, and a system's is that of the op under it; a scan has none
        self.kind = self.row if self.system is None else VARIANTS[self.system.op]
        self.initial, self.final = names_of_states(name)
        aside = (self.initial, self.final, *_NOT_OPTIONS)
        given = {x: value for x, value in given.items() if x not in aside}
        if self.row is not None:
            given = self._completed(given)
        self.arrays: dict[str, Tensor] = {}
        self.options: dict[str, Any] = {}
        for x, value in given.items():
            is_array = value is not None and hasattr(value, "shape") and not is_number(value)
            if isinstance(value, np.ma.MaskedArray):
                raise TypeError(f"{x}: expected an array without a mask")
            made = tensor_of(x, value) if is_array else value
            (self.arrays if isinstance(made, Tensor) else self.options)[x] = made
        first = next(iter(given))
        if not isinstance(given[first], Tensor):
            got = type(given[first]).__name__
            raise TypeError(
                f"{first}: expected a tensor of PyTorch's or an array of NumPy's, got {got}"
            )
        self.names = tuple(self.arrays)
        self.like = self.arrays[first].detach().new_empty(0)
        axes, shape = 3 if self.is_scan else 4, tuple(self.arrays[first].shape)
        if len(shape) != axes:
            raise ValueError(
                f"{first}: expected [B,T,{'D' if axes == 3 else 'H,K'}], with all axes, where the "
                f"tokens are shared by ranks, got {shape}"
            )
        self.B, self.T = shape[:2]
        self.of_tokens = [x for x, array in self.arrays.items() if _is_of_tokens(array)]
        self.writes = self.options.get("num_householder", 1)  # of a token
        self.state_v_first = bool(self.options.pop("state_v_first", False))
        if self.system is not None:
            self.state_v_first |= self.system.state_v_first
            for x in self.system.refused:
                if given[x] is not None:
                    raise ValueError(f"{x}: expected None where ranks share the tokens")
        self.causal = self.options.get("causal", True)
        takes = signature_of(self.back).parameters
        self.back_options = {x: value for x, value in self.options.items() if x in takes}
        self.shapes: list[tuple[int, ...]] = []  # of each state, without the axis of sequences
        self.recorded = False  # does PyTorch record it?
        self.wanted: str | None = None  # the sequences whose final states it returns

    @property
    def is_scan(self) -> bool:
        return self.row is None and self.system is None

    @property
    def value(self) -> str:
        """The array that is written."""
        if self.is_scan:
            return self.names[0]
        return "v" if self.system is None else self.system.value

    def cut(self, arrays: Mapping[str, Tensor], tokens: slice) -> dict[str, Tensor]:
        """The arrays of some tokens. A token may have several writes."""
        found = dict(arrays)
        for x in self.of_tokens:
            times = self.writes if arrays[x].shape[1] != self.T else 1
            begin, end = (None if i is None else i * times for i in (tokens.start, tokens.stop))
            found[x] = arrays[x][:, begin:end]
        return found

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """A default gate, and q and k behind maps that are functions, which PyTorch records."""
        assert self.row is not None
        given = with_default_gate(self.name, given)
        if not self.row.normaliser:
            return given
        options = [given[x] for x in ("feature_map", "normalize", "eps", "causal")]
        phi_q, phi_k, _ = core_features(*options)
        *_, q, k, norm = mapped(phi_q, phi_k, given["q"], given["k"], given["qk_l2norm"], {})
        if phi_q.forward is None and phi_k.forward is None:
            return given
        named = tuple("identity" if phi.forward else phi for phi in (phi_q, phi_k))
        normalize = "clamp" if given["normalize"] is True else given["normalize"]
        changed = {"feature_map": named, "normalize": normalize, "qk_l2norm": norm}
        return given | {"q": q, "k": k} | changed

    # ---- before anything is sent ----

    def taken(self) -> tuple[Tensor, ...]:
        """The arrays, which are kept here no longer: PyTorch keeps what a backward pass needs."""
        tensors = tuple(self.arrays.values())
        value = self.arrays[self.value]
        self.o_shape = (self.B, self.T, *value.shape[2:])
        self.arrays = {}
        return tensors

    def probe(self, states: States | None, is_packed: bool) -> None:
        """Raise what the function would raise, by a call of no tokens, and learn its states.

        If all arrays of a call have tokens, its result is kept under the shapes, dtypes, devices
        and options. The next call with the same ones is not probed."""
        known = self._key(states, is_packed)
        if known in _PROBED:
            self.shapes, self.real = _PROBED[known]
            return
        self._probe(states, is_packed)
        if known is not None and len(_PROBED) < _MOST_PROBED:
            _PROBED[known] = self.shapes, self.real

    def _key(self, states: States | None, is_packed: bool) -> Any:
        given = (*self.arrays.items(), *(("", S) for S in states or ()))
        is_plain = all(type(a) is Tensor and a.layout == torch.strided for _, a in given)
        is_simple = all(type(value) in _SIMPLE for value in self.options.values())
        if len(self.of_tokens) < len(self.arrays) or not (is_plain and is_simple):
            return None
        arrays = tuple(
            (x, tuple(a.shape), a.dtype, a.device, a.is_conj(), a.is_neg()) for x, a in given
        )
        options = tuple((x, repr(value)) for x, value in self.options.items())
        return self.name, arrays, options, self.state_v_first, is_packed

    def _probe(self, states: States | None, is_packed: bool) -> None:
        arrays = {x: array.detach() for x, array in self.arrays.items()}
        own = [x for x in self.of_tokens if self.causal or x != self.names[0]]
        counts = [arrays[x].shape[1] for x in own]  # a tracer has symbols, which have no hash
        wanted = (self.T, self.writes * self.T) if self.causal else counts[:1]
        fits = all(any(n == fit for fit in wanted) for n in counts)
        if not fits:
            self._run(arrays, None, None)  # which says which one
        none = self.cut(arrays, slice(0, 0))
        edges = None
        if is_packed:
            count = 1 if states is None else len(states[0])
            edges = torch.zeros(count + 1, dtype=torch.int64, device=self.like.device)
        given = None if states is None else tuple(S.detach() for S in states)
        _, found = self._run(none, given, edges)
        self.shapes = [tuple(S.shape[1:]) for S in found]
        self.real = found[0].dtype

    def described(self) -> dict[str, str]:
        """What has to be the same on all ranks, in words."""
        words = {"op": self.name}
        for x, array in self.arrays.items():
            shape = list(array.shape)
            if x in self.of_tokens:
                shape[1] = -1
            words[f"dtype of {x}"] = str(array.dtype).removeprefix("torch.")
            words[f"shape of {x}"] = str(tuple("T" if n < 0 else n for n in shape)).replace("'", "")
        words["device"] = self.like.device.type
        words |= {x: repr(value) for x, value in self.options.items()}
        words["state_v_first"] = repr(self.state_v_first)
        return words

    # ---- one rank's tokens ----

    def run(
        self, arrays: Mapping[str, Tensor], states: States | None, edges: Tensor | None
    ) -> tuple[Tensor, States]:
        """o and the state after the tokens. Nothing is recorded."""
        found = self._run(arrays, states, edges)
        note("call")
        return found

    def _run(
        self, arrays: Mapping[str, Tensor], states: States | None, edges: Tensor | None
    ) -> tuple[Tensor, States]:
        named = {self.initial: self._given(states), self.final: True, "cu_seqlens": edges}
        with torch.no_grad():
            o, final = self.forward(**arrays, **self.options, **named)
        found = self._found(final)
        assert found is not None
        return o, found

    def _given(self, states: States | None) -> Any:
        """States as the function takes them."""
        if states is not None and self.system is not None and self.system.state_v_first:
            states = tuple(S.mT for S in states)
        return states[0] if states is not None and len(states) == 1 else states

    def _found(self, states: Any) -> States | None:
        """The way back."""
        if states is None:
            return None
        found = states if isinstance(states, tuple) else (states,)
        if self.system is not None and self.system.state_v_first:
            found = tuple(S.mT for S in found)
        return found

    def derivatives(
        self,
        do: Tensor,
        arrays: Mapping[str, Tensor],
        states: States | None,
        d_states: States | None,
        edges: Tensor | None,
    ) -> Derivatives:
        d_final = self.initial.replace("initial", "d_final")
        named = {self.initial: self._given(states), d_final: self._given(d_states)}
        found = self.back(do.contiguous(), **arrays, **self.back_options, **named, cu_seqlens=edges)
        by_name = found._asdict()
        d_initial = self._found(by_name[f"d_{self.initial}"])
        smooth = [x for x, array in arrays.items() if array.dtype != torch.bool]
        return Derivatives({x: by_name.get(f"d{x}", by_name.get("dg")) for x in smooth}, d_initial)

    @property
    def has_gradient_alone(self) -> bool:
        """Are there calls that make the gradient of the initial state, and no other? That of a
        normalised call depends on the state."""
        return not self.options.get("normalize")

    def _core_call(
        self, arrays: Mapping[str, Tensor], states: States | None, edges: Tensor | None
    ) -> CoreCall:
        """The pass of the core that a call comes to."""
        named = {self.initial: self._given(states), self.final: True, "cu_seqlens": edges}
        with torch.no_grad():
            return core_call(self.forward, **arrays, **self.options, **named)

    def final_states(
        self, arrays: Mapping[str, Tensor], states: States | None, edges: Tensor | None = None
    ) -> States:
        """The state after the tokens, and no o. That of a noncausal call is that of a causal one:
        either has no decay."""
        if self.system is not None:
            found = self._core_call(arrays, states, edges).states_alone()[1]
        else:
            options = {**self.options, **self._as_causal, "cu_seqlens": edges}
            found = final_state(self.name, self._given(states), **arrays, **options)
        note("final state")
        return self._states_of(found)

    @property
    def _as_causal(self) -> dict[str, bool]:
        return {} if self.causal else {"causal": True}

    def _states_of(self, found: Any) -> States:
        states = self._found(found)
        assert states is not None
        return states

    def d_initial_states(
        self,
        do: Tensor,
        arrays: Mapping[str, Tensor],
        d_states: States | None,
        edges: Tensor | None = None,
    ) -> States:
        """The gradient of the state before the tokens, and no other."""
        d_final = self.initial.replace("initial", "d_final")
        options = {**self.back_options, d_final: self._given(d_states), "cu_seqlens": edges}
        options |= self._as_causal
        if self.system is None:
            found = segment_map_backward(self.name, do.contiguous(), **arrays, **options)
        else:
            with torch.no_grad():
                found = initial_gradient(core_call(self.back, do.contiguous(), **arrays, **options))
        return self._states_of(found)

    def zeros(self, n: int) -> States:
        """The state before n sequences."""
        return tuple(self.like.new_zeros(n, *shape, dtype=self.real) for shape in self.shapes)

    # ---- maps ----

    def form(self, rows: int) -> Form:
        """Of the map of `rows` sequences."""
        heads, K, V = (*self.shapes[0], 1, 1)[:3]
        if self.is_stacked:
            K *= 2
        elif len(self.shapes) == 2:
            V += 1
        transition: tuple[int, ...] = (K, K) if self.has_matrix else (K,)
        if self.kind is not None and not self.has_matrix:
            transition = {"none": (), "key": (K,)}.get(self.kind.decay, (1,))
        return Form(rows * heads, K, V, transition, self.real, self.like.device)

    @property
    def busy(self) -> int:
        """How many blocks of a GPU walk over the tokens of a row at least, each for a head or for
        some channels of a scan."""
        first = self.shapes[0][0]
        return -(-first // CHANNELS) if self.is_scan else first

    @property
    def is_stacked(self) -> bool:
        """Are there two states of one shape, each of which the other one depends on?"""
        return len(self.shapes) == 2 and self.shapes[0] == self.shapes[1]

    @property
    def has_matrix(self) -> bool:
        return self.kind is not None and self.kind.rule in ("delta", "dplr")

    def as_rows(self, states: Sequence[Tensor]) -> Tensor:
        """States [n,heads,K,V] as rows [n heads,K,V], two of them as one."""
        S = states[0]
        S = S.reshape(*S.shape, *[1] * (4 - S.dim()))
        if self.is_stacked:
            S = torch.cat([S, states[1]], 2)
        elif len(states) == 2:
            S = torch.cat([S, states[1][..., None]], 3)
        return S.flatten(0, 1)

    def as_states(self, S: Tensor) -> States:
        """The way back."""
        n = len(S) // self.shapes[0][0]
        S = S.unflatten(0, (n, self.shapes[0][0]))
        if self.is_stacked:
            return tuple(x.contiguous() for x in S.chunk(2, 2))
        if len(self.shapes) == 2:
            return S[..., :-1].contiguous(), S[..., -1].contiguous()
        return (S.reshape(n, *self.shapes[0]),)

    @property
    def has_sections(self) -> bool:
        """May a rank cut its own tokens?"""
        return self.has_gradient_alone and self.B == 1 and "mask" not in self.names

    def map(
        self, arrays: Mapping[str, Tensor], edges: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """X and M of tokens that turn any state S into M S + X. A call of packed sequences (edges)
        has to be a scan, or M a matrix."""
        with _flushing(self.like.device):
            X, M = self._map_of_system(arrays, edges)
        note("map")
        if M is not None:
            M = M.reshape(-1, 1) if M.dim() == 2 else M.flatten(0, 1)
        return self.as_rows(self._states_of(X)), M

    def _map_of_system(self, arrays: Mapping[str, Tensor], edges: Tensor | None) -> Any:
        """The same of an op or a system, in the layout of the core."""
        if self.system is None:
            return segment_map(self.name, **arrays, **self.options, cu_seqlens=edges)
        call = self._core_call(arrays, None, edges)
        if self.has_matrix:
            return call.states_alone(segment_map=True)[1:]
        X = call.states_alone()[1]
        return X, self._decays(call.arguments, X)

    def _decays(self, given: Mapping[str, Any], X: Tensor) -> Tensor:
        assert self.kind is not None
        decays: Tensor = product_of_decays(given, X, self.kind.decay == "key")
        return decays

    def maps_of_sections(
        self, arrays: Mapping[str, Tensor], lengths: Sequence[int], edges: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """X and M of packed sections, all of one length but the last one, as rows."""
        if self.kind is None or self.has_matrix:
            return self.map(arrays, edges)
        call = self._core_call(arrays, None, edges)
        X = call.states_alone()[1]
        note("map")
        rows = self.as_rows(self._states_of(X))
        if self.kind.decay == "none":
            return rows, None
        n, count = lengths[0], len(lengths) - 1
        first, last = {**call.arguments}, {**call.arguments}
        for x, a in call.arguments.items():
            if isinstance(a, Tensor) and _is_of_tokens(a) and a.shape[1] == self.T:
                first[x] = a[0, : n * count].unflatten(0, (count, n))
                last[x] = a[:, n * count :]
        M = torch.cat([self._decays(first, X[:count]), self._decays(last, X[count:])])
        return rows, M.reshape(len(rows), -1)


def names_of_states(name: str) -> tuple[str, str]:
    """The arguments that are the state before the tokens, and that ask for the one after them."""
    system = SYSTEMS.get(name)
    return ("initial_state", "output_final_state") if system is None else system[2:4]
