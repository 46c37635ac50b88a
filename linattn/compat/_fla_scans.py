"""flash-linear-attention's functions of the recurrences whose state is one number a channel.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from typing import Any

from linattn import _rooms
from linattn.compat._fla_arrays import Result, state_of
from linattn.composed._names import called

__all__ = ["chunk_hgrn", "fused_recurrent_hgrn"]


def chunk_hgrn(
    x: Any, g: Any, initial_state: Any = None, output_final_state: bool = False
) -> Result:
    """h <- exp(g) h + x for each channel of x [B,T,D], with the log gates g [B,T,D].

    :func:`linattn.hgrn` takes the candidates instead, and multiplies them by 1 - exp(g). The state
    is [B,D], float32 (float64 for float64 x).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_hgrn
    >>> x, g = np.random.default_rng(0).standard_normal((2, 1, 8, 3))
    >>> g = -np.abs(g)
    >>> o, state = chunk_hgrn(-np.expm1(g) * x, g, output_final_state=True)
    >>> bool(np.allclose(o, linattn.hgrn(x, g)[0])), state.shape
    (True, (1, 3))
    """
    return _hgrn(x, g, initial_state, output_final_state, None)


def fused_recurrent_hgrn(
    x: Any,
    g: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_hgrn`, which takes packed sequences too.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import fused_recurrent_hgrn
    >>> x = np.ones((1, 4, 1))
    >>> fused_recurrent_hgrn(x, 0 * x, cu_seqlens=np.array([0, 3, 4]))[0][0, :, 0].tolist()
    [1.0, 2.0, 3.0, 1.0]
    """
    return _hgrn(x, g, initial_state, output_final_state, cu_seqlens)


def _hgrn(x: Any, g: Any, initial_state: Any, output_final_state: Any, cu_seqlens: Any) -> Result:
    arrays = {
        "u": x,
        "g": g,
        "cu_seqlens": cu_seqlens,
        "initial_state": state_of(x, initial_state),
    }
    with called({"u": "x"}, x):
        return _rooms.forward("scan", "gated", arrays, output_final_state=output_final_state)
