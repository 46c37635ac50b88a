"""One pass of an op as a call of XLA: its targets, its arrays by letters, and what vmap and meshes
make of it.

A call has its heads and rows written out here, so a mapped or a sharded axis is one of them. What
is right, and which shapes there are, the core says (``_linattn.outline``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from linattn import _linattn
from linattn.variants import ARRAYS, VARIANTS

__all__ = ["Call", "Options", "Row", "called", "gate_of", "outlined", "run", "varying"]

if not hasattr(jax.sharding, "ManualAxisType"):
    raise ImportError(f"linattn.jax takes JAX 0.10 or later, got {jax.__version__}")

for _name, _platform, _handler in _linattn.XLA_TARGETS:
    jax.ffi.register_ffi_target(_name, _handler, platform=_platform)

_BATCHES, _HEADS = "BN", "Hh"
_LINES = {line.label: line for line in ARRAYS} | {
    line.gradient: line for line in ARRAYS if line.gradient
}

Options = tuple[tuple[str, Any], ...]  # by their keywords; hashable


class Row(NamedTuple):
    """An array of a call, as the core outlines it. Letters are those of csrc/arrays.def, with h for
    HV, O for N + 1 and P for the states of a pool."""

    label: str
    letters: str
    shape: tuple[int, ...]
    dtype: str


class Call(NamedTuple):
    """What is known of a call before its arrays are: XLA compiles one program for each."""

    target: str
    options: Options
    arguments: tuple[tuple[str, str], ...]  # label, letters
    results: tuple[tuple[str, str, str], ...]  # label, letters, dtype
    rows: str = "BN"  # the letters of axes of rows, and of heads or channels
    heads: str = "Hh"

    @property
    def changed(self) -> dict[int, int]:
        """The results that take the place of arguments, a step's states: by their numbers."""
        taken: list[int] = []
        for label, *_ in self.results:
            labels = [i for i, x in enumerate(self.arguments) if x[0] == label and i not in taken]
            taken += labels[:1]
        inputs = iter(taken)
        known = {label for label, _ in self.arguments}
        return {next(inputs): i for i, x in enumerate(self.results) if x[0] in known}


# ---- letters ----


def _whole(op: str, label: str, letters: str) -> str:
    """The letters with rows and heads, which a call of one head leaves out."""
    line = _LINES[label]
    if line.dtype == "INTEGER" or (line.part_of == "DECAY" and VARIANTS[op].decay == "head"):
        return letters
    same = {"L": "T", "N": "P"}
    order = line.letters.replace("KV", "VK") if "VK" in letters else line.letters
    found = [(x, same.get(x, x)) for x in order]
    return "".join(
        x if x in letters else other if other in letters else x if x in _BATCHES + _HEADS else ""
        for x, other in found
    )


def _reshaped(x: Any, letters: str, whole: str) -> Any:
    sizes = dict(zip(letters, x.shape, strict=True))
    return x.reshape([sizes.get(letter, 1) for letter in whole])


def _sizes(call: Call, arrays: Sequence[Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for (_, letters), x in zip(call.arguments, arrays, strict=True):
        sizes |= zip(letters, x.shape, strict=True)
    states = sizes["O"] - 1 if "O" in sizes else sizes.get("B", 1)
    taps = {"w": sizes["W"] - 1} if "W" in sizes else {}
    return {call.rows[1]: states, **taps} | sizes


# ---- XLA ----


def varying(x: Any) -> frozenset[str]:
    """The axes of the mesh over which an array differs, inside shard_map."""
    kind = jax.typeof(x)
    found: frozenset[str] = kind.manual_axis_type.varying
    return found


def _ffi(call: Call, *arrays: Any) -> list[Any]:
    sizes = _sizes(call, arrays)
    over = frozenset[str]().union(*map(varying, arrays))
    results = [
        jax.ShapeDtypeStruct([sizes[x] for x in letters], dtype, **_where(over, arrays, letters))
        for _, letters, dtype in call.results
    ]
    run = jax.ffi.ffi_call(
        call.target, results, input_output_aliases=call.changed, vmap_method="sequential"
    )
    labels = {
        "arguments": " ".join(label for label, _ in call.arguments),
        "results": " ".join(label for label, *_ in call.results),
    }
    attributes = {name: _attribute(value) for name, value in call.options}
    return list(run(*(_cast(x, over) for x in arrays), **labels, **attributes))


def _where(over: frozenset[str], arrays: Sequence[Any], letters: str) -> dict[str, Any]:
    if not over:
        return {}
    whole = NamedSharding(
        jax.typeof(arrays[0]).sharding.mesh, PartitionSpec(*[None] * len(letters))
    )
    return {"sharding": whole, "manual_axis_type": jax.sharding.ManualAxisType(varying=over)}


def _cast(x: Any, over: frozenset[str]) -> Any:
    missing = tuple(over - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return np.array(value, np.float64)
    if isinstance(value, bool | str):
        return value
    return np.float64(value) if isinstance(value, float) else np.int64(value)


# ---- meshes ----


def _is_packed(call: Call) -> bool:
    return any("O" in letters for _, letters in call.arguments)


def _rule(call: Call, heads: int, times: int) -> str:
    """Which axes of arguments and results are one, where there are so many key heads, and so many
    value heads for each. Value heads go with the key head that they read."""
    names = {x: x.lower() for x in "BTLHKVOP"}
    names["N"] = "n" if _is_packed(call) else "b"
    names["h"] = "h" if times == 1 else "(h r)" if heads > 1 else "r"

    def side(rows: list[str]) -> str:
        return ", ".join(" ".join(names[x] for x in letters) for letters in rows)

    arguments = [letters for _, letters in call.arguments]
    return f"{side(arguments)} -> {side([letters for _, letters, _ in call.results])}"


def _axes_of(sharding: Any, axis: int, size: int, mesh: Any) -> Any:
    """The axes of the mesh over which an array's axis lies in equal parts; None if it is whole."""
    spec = tuple(sharding.spec)
    axes = spec[axis] if axis < len(spec) else None
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None


class _Layout(NamedTuple):
    """The axes of a mesh over which the axes of a call's arrays lie, by letter; all others are
    whole."""

    axes: dict[str, Any]

    def spec(self, letters: str) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(x) for x in letters))

    def summed(self, letters: str) -> tuple[str, ...]:
        """The axes of the mesh that a result has not, so that it is a sum over them: the gradient
        of an array without rows, or of the one key head of many value heads."""
        there = set(jax.tree.leaves(tuple(self.spec(letters))))
        return tuple(x for x in dict.fromkeys(jax.tree.leaves(self.axes)) if x not in there)


def _layout(call: Call, arguments: Sequence[Any], mesh: Any) -> _Layout:
    """Arrays lie as q does in rows and heads. Where q has one head, value heads lie as v does."""
    labels = [label for label, _ in call.arguments]

    def of(label: str, letter: str) -> Any:
        at = labels.index(label)
        x, axis = arguments[at], call.arguments[at][1].index(letter)
        return _axes_of(x.sharding, axis, x.shape[axis], mesh)

    # packed sequences lie in one row, and rows that pick their states change one pool
    whole = _is_packed(call) or "state_indices" in labels
    rows = None if whole else of("q", "B")
    q = labels.index("q")
    if arguments[q].shape[call.arguments[q][1].index("H")] == 1:
        return _Layout({"B": rows, "N": rows, "H": None, "h": of("v", "h")})
    heads = of("q", "H")
    return _Layout({"B": rows, "N": rows, "H": heads, "h": heads})


@lru_cache(maxsize=256)
def _partitioned(call: Call, heads: int, times: int) -> Any:
    """The call for arrays that may lie on several devices: each computes its rows and heads."""

    def everywhere(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_ffi(call, *arrays))

    def partition(mesh: Any, arguments: Any, _results: Any) -> Any:
        if mesh.empty:  # no names for the devices, as in a call outside of jit
            if not all(x.sharding.is_fully_replicated for x in arguments):
                raise NotImplementedError(
                    "linattn.jax takes arrays over several devices by a NamedSharding, got "
                    f"{arguments[0].sharding}"
                )
            whole = arguments[0].sharding
            return mesh, everywhere, (whole,) * len(call.results), (whole,) * len(arguments)
        layout = _layout(call, arguments, mesh)

        def here(*arrays: Any) -> tuple[Any, ...]:
            found = zip(call.results, _ffi(call, *arrays), strict=True)
            sums = ((x, layout.summed(row[1])) for row, x in found)
            return tuple(jax.lax.psum(x, over) if over else x for x, over in sums)

        def lie(row: tuple[str, ...]) -> NamedSharding:
            return NamedSharding(mesh, layout.spec(row[1]))

        return mesh, here, tuple(map(lie, call.results)), tuple(map(lie, call.arguments))

    made = custom_partitioning(everywhere)
    sizes = {"r": times} if times > 1 and heads > 1 else {}
    made.def_partition(partition, sharding_rule=_rule(call, heads, times), **sizes)
    return made


# ---- vmap ----


def _axis(letters: str, among: str) -> int | None:
    return next((i for i, x in enumerate(letters) if x in among), None)


def _fold(x: Any, mapped: bool, n: int, at: int | None) -> Any:
    """The mapped axis, the first one, in front of the axis `at`, with which it becomes one."""
    if at is None:
        return x
    if not mapped:
        x = jnp.broadcast_to(x, (n, *x.shape))
    x = jnp.moveaxis(x, 0, at)
    return x.reshape(*x.shape[:at], n * x.shape[at + 1], *x.shape[at + 2 :])


def _unfold(x: Any, n: int, at: int) -> Any:
    parted = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
    return jnp.moveaxis(parted, at, 0)


def _axes_to_join(call: Call, mapped: Sequence[bool]) -> str | None:
    """The letters of the axes that a mapped axis joins: rows, else heads. None: neither."""
    moving = [letters for (_, letters), yes in zip(call.arguments, mapped, strict=True) if yes]
    moving += [letters for _, letters, _ in call.results]
    for among in ("" if _is_packed(call) else call.rows, call.heads):
        # state_indices have an axis of rows, and say where in a pool
        if among and all(_axis(x, among) is not None and x != "B" for x in moving):
            return among
    return None


@lru_cache(maxsize=256)
def _mapped(call: Call) -> Callable[..., tuple[Any, ...]]:
    """The call as a function that vmap can map."""

    @custom_vmap
    def one(*arrays: Any) -> tuple[Any, ...]:
        if "h" not in call.heads or any(map(varying, arrays)):
            return tuple(_ffi(call, *arrays))
        sizes = _sizes(call, arrays)
        return tuple(_partitioned(call, sizes["H"], sizes["h"] // sizes["H"])(*arrays))

    compiled = jax.jit(one)

    @one.def_vmap
    def many(n: int, mapped: list[bool], *arrays: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        among = _axes_to_join(call, mapped)
        yes = (True,) * len(call.results)
        if among is None:
            moving = tuple(x for x, moves in zip(arrays, mapped, strict=True) if moves)

            def at(some: tuple[Any, ...]) -> tuple[Any, ...]:
                rest = iter(some)
                given = zip(arrays, mapped, strict=True)
                return compiled(*(next(rest) if moves else x for x, moves in given))

            return jax.lax.map(at, moving), yes
        folded = [
            _fold(x, moves, n, _axis(letters, among))
            for x, moves, (_, letters) in zip(arrays, mapped, call.arguments, strict=True)
        ]
        found = zip(compiled(*folded), call.results, strict=True)
        return tuple(_unfold(x, n, _axis(y[1], among) or 0) for x, y in found), yes

    return compiled


# ---- a pass ----


def gate_of(arrays: Mapping[str, Any]) -> str:
    """The keyword that gives the decay: the only one that the table does not have."""
    return next((name for name in arrays if name not in _LINES and name != "state"), "g")


def outlined(
    pass_: str, op: str, arrays: dict[str, Any], options: Options
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """The arrays that a call is given and that it makes. TypeError or ValueError as from the op."""
    given, made = _linattn.outline(pass_, op, **arrays, **dict(options))
    return tuple(Row(*row) for row in given), tuple(Row(*row) for row in made)


def called(call: Call, arrays: list[Any]) -> tuple[Any, ...]:
    """The call; on a mesh with explicit axes, what it makes lies as q does."""
    kinds = [jax.typeof(x) for x in arrays]
    mesh = kinds[0].sharding.mesh
    if not mesh.explicit_axes or "h" not in call.heads:
        return _mapped(call)(*arrays)
    layout = _layout(call, kinds, mesh)
    where = tuple(NamedSharding(mesh, layout.spec(letters)) for _, letters, _ in call.results)
    found: tuple[Any, ...] = jax.sharding.auto_axes(_mapped(call), out_sharding=where)(*arrays)
    return found


def run(pass_: str, op: str, arrays: dict[str, Any], options: Options) -> list[tuple[str, Any]]:
    """(label, array) for what the pass makes. The arrays are by the core's keywords."""
    given, made = outlined(pass_, op, arrays, options)
    whole = [_whole(op, row.label, row.letters) for row in given]
    labels = [gate_of(arrays) if row.label == "g" else row.label for row in given]
    call = Call(
        f"linattn_{pass_}",
        (("op", op), *options),
        tuple(zip(labels, whole, strict=True)),
        tuple((row.label, _whole(op, row.label, row.letters), row.dtype) for row in made),
    )
    flat = zip(_in_order(arrays, given), given, whole, strict=True)
    found = called(call, [_reshaped(x, row.letters, letters) for x, row, letters in flat])
    return [(row.label, x.reshape(row.shape)) for row, x in zip(made, found, strict=True)]


def _in_order(arrays: dict[str, Any], given: tuple[Row, ...]) -> list[Any]:
    """The arrays in the order of the rows; a pair of states is two rows."""
    state = arrays.get("state", arrays.get("initial_state"))
    by_label = {**arrays, "g": arrays.get(gate_of(arrays)), "initial_state": state}
    parts = {
        label: iter(x if isinstance(x, tuple | list) else (x,)) for label, x in by_label.items()
    }
    return [next(parts[row.label]) for row in given]
