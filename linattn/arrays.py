"""Arrays that users make for the ops: states with the alignment the kernels like."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["zeros_state"]

# A cache line: rows of a state that straddle two cost the step up to 45 % of its speed, and NumPy
# promises 16 bytes only.
_ALIGNMENT = 64


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def zeros_state(
    N: int,
    HV: int,
    K: int,
    V: int,
    *,
    dtype: DTypeLike = np.float32,
    state_v_first: bool = False,
    normalized: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """A zero state for ``op_step`` or ``initial_state``, aligned to a cache line.

    Parameters
    ----------
    N, HV, K, V : int
        Sequences, value heads, key and value dimension.
    dtype : dtype
        float32; float64 for float64 inputs; ``ml_dtypes.bfloat16`` halves a step's traffic.
    state_v_first : bool
        [N,HV,V,K] instead of [N,HV,K,V].
    normalized : bool
        The pair (S, z) of a normalised ``linear_attention``, z [N,HV,K].

    Returns
    -------
    ndarray, or the pair (S, z)
    """
    for name, size in (("N", N), ("HV", HV), ("K", K), ("V", V)):
        if size < 0:
            raise ValueError(f"{name}: expected a size >= 0, got {size}")
    dtype = np.dtype(dtype)
    if dtype.name not in ("float64", "float32", "bfloat16"):
        raise TypeError(f"dtype: expected float64, float32 or bfloat16, got {dtype}")
    S = _aligned_zeros((N, HV, V, K) if state_v_first else (N, HV, K, V), dtype)
    return (S, _aligned_zeros((N, HV, K), dtype)) if normalized else S
