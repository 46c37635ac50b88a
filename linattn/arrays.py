"""Arrays that users make for the ops, and what csrc/arrays.c asks of other array libraries."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["zeros_state"]

# A cache line: rows of a state that straddle two cost the step up to 45 % of its speed, and NumPy
# promises 16 bytes only.
_ALIGNMENT = 64


def as_int(name: str, value: Any) -> int:
    """value as an int; a TypeError names what is none."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None


def as_size(name: str, value: Any, least: int = 0) -> int:
    """value as an int that is not less than the least."""
    size = as_int(name, value)
    if size < least:
        raise ValueError(f"{name}: expected a size >= {least}, got {size}")
    return size


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def zeros_state(
    N: int,
    HV: int,
    K: int | None = None,
    V: int | None = None,
    *,
    dtype: DTypeLike = np.float32,
    state_v_first: bool = False,
    normalized: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """A zero state for ``op_step`` or ``initial_state``: NumPy's, aligned to a cache line.

    ``zeros_state(N, HV, K, V)`` is for arrays [B,T,H,K], ``zeros_state(K, V)`` for those of one
    head, [T,K]. For another kind of array ask its own library: ``torch.zeros(N, HV, K, V,
    device="cuda")``, ``cupy.zeros((N, HV, K, V), "float32")``.

    Parameters
    ----------
    N, HV, K, V : int
        Sequences, value heads, key and value dimension; of one head the last two alone.
    dtype : dtype
        float32; float64 for float64 inputs; ``ml_dtypes.bfloat16`` halves a step's traffic.
    state_v_first : bool
        [N,HV,V,K] instead of [N,HV,K,V]; [V,K] of one head.
    normalized : bool
        The pair (S, z) of a normalised ``linear_attention``, z [N,HV,K].

    Returns
    -------
    ndarray, or the pair (S, z)

    Raises
    ------
    TypeError
        A size is no int, or the dtype is another.
    ValueError
        A size is negative, or no address space holds the state.
    MemoryError
        The memory does not hold the state.

    Examples
    --------
    >>> import linattn
    >>> S = linattn.zeros_state(2, 8, 64, 32)
    >>> S.shape, S.dtype.name, S.ctypes.data % 64
    ((2, 8, 64, 32), 'float32', 0)
    >>> S, z = linattn.zeros_state(2, 8, 64, 32, normalized=True)
    >>> z.shape
    (2, 8, 64)
    >>> linattn.zeros_state(64, 32).shape  # one head
    (64, 32)
    """
    if (K is None) != (V is None):
        raise TypeError("N, HV, K, V: expected all four, or K and V of one head, got three")
    letters = "KV" if K is None else ("N", "HV", "K", "V")
    given = (N, HV) if K is None else (N, HV, K, V)
    sizes = tuple(as_size(*pair) for pair in zip(letters, given, strict=True))
    dtype = np.dtype(dtype)
    if dtype.name not in ("float64", "float32", "bfloat16"):
        raise TypeError(f"dtype: expected float64, float32 or bfloat16, got {dtype}")
    names = ", ".join(letters)
    got = ", ".join(f"{x} = {n}" for x, n in zip(letters, sizes, strict=True)) + f" of {dtype}"
    # NumPy multiplies the sizes beside a 0 too. z is no larger than S.
    largest = math.prod(max(1, size) for size in sizes) * dtype.itemsize
    if largest + _ALIGNMENT > sys.maxsize:
        most = sys.maxsize - _ALIGNMENT
        raise ValueError(f"{names}: expected a state of at most {most} bytes, got {got}")
    *heads, keys, values = sizes
    try:
        S = _aligned_zeros((*heads, *((values, keys) if state_v_first else (keys, values))), dtype)
        return (S, _aligned_zeros((*heads, keys), dtype)) if normalized else S
    except MemoryError:
        raise MemoryError(f"{names}: expected a state that fits in memory, got {got}") from None


# ---- called from csrc/arrays.c, for libraries that are then imported already ----


def _sum(x: Any) -> float:
    """The sum of an array of any library as a number, added up in float64."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return float(x.sum(dtype=torch.float64))
    if hasattr(x, "__cuda_array_interface__") and hasattr(x, "sum"):  # CuPy's
        return float(x.sum(dtype="float64"))
    return float(np.asarray(x).sum(dtype=np.float64))


def _contiguous(x: Any) -> Any:
    """A contiguous copy of a device array by its own library; None where we know no way."""
    if hasattr(x, "contiguous"):
        return x.contiguous()
    if type(x).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"].ascontiguousarray(x)
    return None


def _cupy_stream(x: Any, ordinal: int) -> int:
    """CuPy's current stream on x's device."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(ordinal):
        return cupy.cuda.get_current_stream().ptr


def _cupy_empty(shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
    """A new array and its address."""
    cupy = sys.modules["cupy"]
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    with cupy.cuda.Device(ordinal):
        x = cupy.empty(shape, dtype)
    return x, x.data.ptr


def _importer(like: Any) -> Callable[[Any], Any] | None:
    """from_dlpack of like's library, if there is one."""
    if hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
        if hasattr(namespace, "from_dlpack"):
            return namespace.from_dlpack
    library = sys.modules.get(type(like).__module__.partition(".")[0])
    return getattr(library, "from_dlpack", None)


def _imports(like: Any, _ordinal: int) -> int:
    return int(_importer(like) is not None)


def _import_like(like: Any, memory: Any) -> Any:
    """Our memory as an array of like's kind; the memory itself where its library takes none."""
    importer = _importer(like)
    if importer is not None:
        return importer(memory)
    if type(like).__module__.partition(".")[0] == "numba":
        return sys.modules["numba.cuda"].as_cuda_array(memory)
    return memory
