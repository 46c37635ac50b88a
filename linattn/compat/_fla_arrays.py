"""What the functions of fla.py share: arguments that are refused, and the dtypes that fla takes."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from linattn.features import cast, is_array, is_tensor

__all__ = [
    "Result",
    "common_dtype",
    "forward",
    "group_and_edges",
    "ones_if_none",
    "refuse",
    "repeated",
    "state_of",
    "v_first_of",
]

Result = tuple[Any, Any]


def refuse(**given: Any) -> None:
    """Raise if one of these is set: all are None or False where they are not."""
    for name, value in given.items():
        if value is not None and value is not False:
            what = repr(value) if isinstance(value, bool | int | float | str) else "an array"
            raise ValueError(f"{name}: not supported by linattn.compat.fla, got {what}")


def v_first_of(state_v_first: Any, transpose_state_layout: Any) -> Any:
    """state_v_first, which may be given by its old name instead; None is not given."""
    if transpose_state_layout is None:
        return state_v_first
    for name, value in (
        ("state_v_first", state_v_first),
        ("transpose_state_layout", transpose_state_layout),
    ):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name}: expected True or False, got {type(value)}")
    if state_v_first and not transpose_state_layout:
        raise ValueError(
            "transpose_state_layout: expected the same as state_v_first, its new name, got "
            "transpose_state_layout=False and state_v_first=True"
        )
    warnings.warn(
        "transpose_state_layout: deprecated, its new name is state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout


def library(x: Any) -> Any:
    """Whose are the dtypes of x? PyTorch's or, in every other library, NumPy's."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else np


def float_name(x: Any) -> str | None:
    """The name of x's dtype if the ops know it as a float; else None."""
    name = str(getattr(x, "dtype", None)).removeprefix("torch.")
    return name if name in ("float64", "float32", "float16", "bfloat16") else None


def state_of(q: Any, x: Any) -> Any:
    """An initial state, in a dtype that the core takes.

    fla loads a state of any float dtype as float32. The core takes the dtype of its sums, which is
    float64 if q is float64 and float32 otherwise; then it takes bfloat16 too. PyTorch records the
    conversion, so that the gradient has the dtype of what was given.
    """
    if isinstance(x, tuple):
        return tuple(state_of(q, one) for one in x)
    if not is_array(x):
        return x
    double = getattr(q, "dtype", None) == library(q).float64
    sums = library(x).float64 if double else library(x).float32
    if x.dtype == sums or (name := float_name(x)) is None or (name == "bfloat16" and not double):
        return x
    return cast(x, sums)


def common_dtype(*arrays: Any) -> Any:
    """The dtype that holds the several float dtypes of these; None if there are not several.

    None, too, if one is no array, has another dtype than a float, or if only some are PyTorch's:
    these are for the core to refuse.
    """
    if not all(is_array(x) for x in arrays) or all(x.dtype == arrays[0].dtype for x in arrays):
        return None
    names, own = [float_name(x) for x in arrays], library(arrays[0])
    if None in names or any(library(x) is not own for x in arrays):
        return None
    return own.float64 if "float64" in names else own.float32


def forward(
    op: Any,
    q: Any,
    k: Any,
    v: Any,
    *gates: Any,
    initial_state: Any,
    keys: tuple[Any, ...] = (),
    mode: str = "chunk",
    o_dtype: Any = None,
    cp_context: Any = None,
    **options: Any,
) -> Result:
    """`op`, with the dtypes that fla takes, of tokens that ranks share if there is a cp_context.

    Token by token, fla loads q, k and v as float32, whatever the dtype of each. The core takes one
    dtype. Where they differ, o is given `o_dtype`, or that of q if it is None. keys: the arrays of
    the dtype of q that the op takes behind v.
    """
    common = common_dtype(q, k, v, *keys) if mode == "recurrent" else None
    if common is not None:
        o_dtype = q.dtype if o_dtype is None else o_dtype
        q, k, v, *keys_cast = (cast(x, common) for x in (q, k, v, *keys))
        keys = tuple(keys_cast)
    if cp_context is not None:
        options |= group_and_edges(cp_context, options["cu_seqlens"])
        op = getattr(sys.modules["linattn.distributed"], op.__name__)
    state = state_of(q, initial_state)
    o, final = op(q, k, v, *keys, *gates, initial_state=state, mode=mode, **options)
    return o if common is None else cast(o, o_dtype), final


def group_and_edges(cp_context: Any, cu_seqlens: Any) -> dict[str, Any]:
    """The arguments by which a function of linattn.distributed knows its ranks and its tokens.

    fla's callers may give the context's own cu_seqlens beside it. It says nothing new.
    """
    distributed = sys.modules.get("linattn.distributed")
    if distributed is None or not isinstance(cp_context, distributed.Context):
        raise TypeError(
            "cp_context: expected a context of linattn.compat.fla.build_cp_context or of "
            f"linattn.distributed.context, got {type(cp_context)}"
        )
    if cu_seqlens is not None and cu_seqlens is not cp_context.cu_seqlens:
        given = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
        if given != cp_context.local_edges:
            raise ValueError(
                f"cu_seqlens: expected None beside cp_context, or its own "
                f"{cp_context.local_edges}, got {given}"
            )
    return {"group": cp_context, "cu_seqlens": None}


def ones_if_none(beta: Any, v: Any) -> Any:
    """[B,T,HV]; ones, of v's kind, where it is not given."""
    if beta is not None:
        return beta
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(v, torch.Tensor):
        return v.new_ones(v.shape[:3])
    # NumPy 2, CuPy and JAX say which library they are of
    namespace = v.__array_namespace__() if hasattr(v, "__array_namespace__") else np
    return namespace.ones(v.shape[:3], dtype=v.dtype)


def repeated(x: Any, times: int, axis: int) -> Any:
    """x with each of its parts along the axis that often, one behind the other."""
    return x.repeat_interleave(times, axis) if is_tensor(x) else x.repeat(times, axis)
