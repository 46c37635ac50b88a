"""Steps whose states are picked from a pool, for tests of plain steps and of bound ones."""

import ml_dtypes
import numpy as np

from linattn.testing import make_inputs
from support.compare import over_arrays

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = [  # dtypes of the inputs and of the state
    (np.float64, np.float64),
    (np.float32, np.float32),
    (np.float16, np.float32),
    (BFLOAT16, BFLOAT16),
]
SHAPES = [(2, 4, 16, 32), (1, 3, 7, 59), (1, 1, 130, 64)]  # H, HV, K, V
P, B = 7, 4


def pool_problem(op, rng, dtype, state_dtype, shape, B=B, P=P, T=1, v_first=False):
    """The arguments of T steps, with a token axis, and a pool of P states."""
    H, HV, K, V = shape
    x = make_inputs(op, rng, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=dtype)
    pool = make_inputs(op, rng, B=P, T=1, H=H, HV=HV, K=K, V=V, dtype=dtype, initial_state=True)
    pool = over_arrays(lambda s: s.astype(state_dtype), pool["initial_state"])
    if v_first:
        pool = over_arrays(
            lambda s: np.ascontiguousarray(s.swapaxes(2, 3)) if s.ndim == 4 else s, pool
        )
        x["state_v_first"] = True
    return x, pool
