"""A model whose layers get functions of ours in the place of their own, and get theirs back.

:mod:`linattn.compat.transformers` and :mod:`linattn.compat.fla` say which functions.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Replacement", "Table"]


class Table(NamedTuple):
    """The functions of another library that are replaced, by the names that its layers call."""

    is_name: Callable[[str], bool]
    replacement: Callable[[str, Any], Any]  # ours for a name and its value; None if it is not meant
    forward_of: Callable[[nn.Module], Callable[..., Any] | None]  # for a layer that is replaced
    expected: Callable[[nn.Module], str]  # the error for a model that has none of these
    # A function around that of a forward method in which functions are replaced; None for none.
    around: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any] | None] = (
        lambda layer, forward: None
    )


def _globals_of(code: CodeType, is_name: Callable[[str], bool]) -> set[str]:
    """The global names of the table that a function reads, or a function within it."""
    inner = (_globals_of(c, is_name) for c in code.co_consts if isinstance(c, CodeType))
    names: set[str] = set().union(*inner)
    if any(map(is_name, code.co_names)):  # attributes' names too
        read = (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
        names |= {name for name in read if is_name(name)}
    return names


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return None


class _Remaker:
    """Functions made anew, in which the names of a table mean ours."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.made: dict[Any, tuple[Any, tuple[str, ...]]] = {}

    def __call__(self, function: Any) -> tuple[Any, tuple[str, ...]]:
        """What to put in its place and the names that changed; (None, ()) if there are none.

        A function that calls another through its closure (a decorator), a method and a partial are
        looked into.
        """
        if isinstance(function, MethodType):
            inner, names = self(function.__func__)
            return (MethodType(inner, function.__self__) if names else None), names
        if isinstance(function, functools.partial):
            inner, names = self(function.func)
            if not names:
                return None, ()
            partial = functools.partial(inner, *function.args, **function.keywords)
            vars(partial).update(vars(function))
            return partial, names
        if not isinstance(function, FunctionType):
            return None, ()
        if function not in self.made:
            self.made[function] = None, ()  # if it is in its own closure
            self.made[function] = self.remade(function)
        return self.made[function]

    def remade(self, function: FunctionType) -> tuple[Any, tuple[str, ...]]:
        seen = function.__globals__
        ours = {}
        for name in sorted(_globals_of(function.__code__, self.table.is_name)):
            mine = self.table.replacement(name, seen.get(name))
            if mine is not None:
                ours[name] = mine
        names, cells = list(ours), []
        for cell in function.__closure__ or ():
            inner, within = self(_contents(cell))
            cells.append(CellType(inner) if within else cell)
            names.extend(within)
        if not names:
            return None, ()
        if ours:
            # Without __name__: torch.compile looks for a function's globals in the module of that
            # name, and here they are these.
            seen = {name: x for name, x in (seen | ours).items() if name != "__name__"}
        made = FunctionType(
            function.__code__.replace(),  # of its own: torch.compile keeps what it made by the code
            seen,
            function.__name__,
            function.__defaults__,
            tuple(cells) if function.__closure__ else None,
        )
        functools.update_wrapper(made, function)
        made.__kwdefaults__ = function.__kwdefaults__
        return made, tuple(dict.fromkeys(names))


def _changes(layer: nn.Module, remade: _Remaker) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """What to set in a layer, and which functions are ours then, by attribute."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    own = vars(layer)
    forward = remade.table.forward_of(layer)
    if forward is not None:
        found["forward"] = MethodType(forward, layer), (forward.__name__,)
    for name, value in own.items():
        ours = remade.table.replacement(name, value)
        if ours is not None:
            found[name] = ours, (name,)
        elif isinstance(value, MethodType | functools.partial | FunctionType):  # a hook's, say
            made, names = remade(value)
            if names:
                found[name] = made, names
    for kind in type(layer).__mro__:
        for name, value in vars(kind).items():
            if name in own or name in found or name.startswith("__"):
                continue
            if isinstance(value, FunctionType) and getattr(type(layer), name, None) is value:
                made, names = remade(value)
                if names:
                    found[name] = MethodType(made, layer), names
    if forward is None and "forward" in found:
        made, names = found["forward"]
        around = remade.table.around(layer, getattr(made, "__func__", made))
        if around is not None and isinstance(made, MethodType):
            found["forward"] = MethodType(around, layer), names
    return found


# ---- the way in, and back ----

_NOTHING = object()


class Replacement:
    """The result of `use_linattn`: a context manager, which :meth:`.restore` ends.

    Attributes
    ----------
    layers : dict
        By the names of the layers that were changed: the names of the functions that are ours.

    Examples
    --------
    A model with one layer, which has the function as an attribute:

    >>> import torch
    >>> from linattn.compat.transformers import use_linattn
    >>> def chunk_gated_delta_rule(
    ...     q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
    ... ):
    ...     raise NotImplementedError("the model's own")
    >>> model = torch.nn.ModuleDict({"layer": torch.nn.Identity()})
    >>> model.layer.chunk_gated_delta_rule = chunk_gated_delta_rule
    >>> ours = use_linattn(model)
    >>> print(ours)
    linattn, in 1 layers of ModuleDict
      layer: chunk_gated_delta_rule
    >>> ours.restore()
    >>> model.layer.chunk_gated_delta_rule is chunk_gated_delta_rule
    True
    """

    def __init__(self, model: nn.Module, table: Table) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model)}")
        self._model = model
        self._table = table
        self._entered = 0
        self._before: list[tuple[nn.Module, str, Any, Any]] = []
        self._apply()

    def _apply(self) -> None:
        remade = _Remaker(self._table)
        planned = {}
        for name, layer in self._model.named_modules():
            try:
                planned[name] = layer, _changes(layer, remade)
            except ValueError as error:
                raise ValueError(f"model: {name}: {error}") from None
        planned = {name: plan for name, plan in planned.items() if plan[1]}
        if not planned:
            raise ValueError(self._table.expected(self._model))
        self.layers: dict[str, tuple[str, ...]] = {}
        for name, (layer, changes) in planned.items():
            for attribute, (ours, _) in changes.items():
                before = vars(layer).get(attribute, _NOTHING)
                self._before.append((layer, attribute, before, ours))
                setattr(layer, attribute, ours)
            used = (function for _, names in changes.values() for function in names)
            self.layers[name] = tuple(dict.fromkeys(used))

    def restore(self) -> None:
        """Put back the functions that were there before. A second call does nothing.

        Raises
        ------
        RuntimeError
            Ours were replaced meanwhile. Nothing is changed: the last replacement has to be undone
            first.
        """
        for layer, attribute, _, ours in self._before:
            if vars(layer).get(attribute) is not ours:
                raise RuntimeError(
                    f"{type(layer).__name__}.{attribute} was replaced after use_linattn: "
                    "that has to be undone first"
                )
        for layer, attribute, before, _ in self._before:
            if before is _NOTHING:
                delattr(layer, attribute)
            else:
                setattr(layer, attribute, before)
        self._before.clear()

    def __enter__(self) -> Replacement:
        if not self._before:
            self._apply()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.restore()

    def __repr__(self) -> str:
        state = "in" if self._before else "no longer in"
        kind = type(self._model).__name__
        lines = (f"  {name}: {', '.join(used)}" for name, used in self.layers.items())
        return "\n".join((f"linattn, {state} {len(self.layers)} layers of {kind}", *lines))
