"""A script of a NumPy user, for type checkers: `make lint` runs mypy --strict and pyright on it.

Both read the installed package. The script also runs, and prints nothing: python user_script.py.
"""

from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
from numpy.typing import NDArray

import linattn

Floats = NDArray[np.float32]

B, T, H, K, V = 1, 24, 2, 8, 8
rng = np.random.default_rng(0)


def random(*shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


q, k, v = random(B, T, H, K), random(B, T, H, K), random(B, T, H, V)
g: Floats = -np.abs(random(B, T, H))
beta: Floats = np.abs(np.tanh(random(B, T, H)))

# A whole sequence, with and without the state that it leaves.
o, final = linattn.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
assert_type(o, Floats)
assert_type(final, None)
assert final is None
o, final = linattn.gated_delta_rule(
    q, k, v, g, beta, mode="chunk", qk_l2norm=True, output_final_state=True
)
assert_type(o, Floats)
assert final is not None and final.shape == (B, H, K, V)

# A name that is wrong is found before the script runs.
if TYPE_CHECKING:
    linattn.gated_delta_rule(q, k, v, g, beta, mode="chunks")  # type: ignore[call-overload]
    linattn.gated_delta_rule(q, k, v, g, beta, out_state=True)  # type: ignore[call-overload]

# Token by token, the state in place.
state = linattn.zeros_state(B, H, K, V)
assert isinstance(state, np.ndarray)
for t in range(T):
    read = linattn.gated_delta_rule_step(
        q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state=state, qk_l2norm=True
    )
    assert_type(read, Floats)
    np.testing.assert_allclose(read, o[:, t], rtol=1e-3, atol=1e-5)

# The same arrays many times over.
bound = linattn.bind(
    linattn.gated_delta_rule_step, q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state=state
)
assert_type(bound(), Any)

# Gradients. A gate that was given has one.
gradients = linattn.gated_delta_rule_backward(np.ones_like(v), q, k, v, g, beta)
assert_type(gradients.dq, Any)
assert gradients.dg is not None and gradients.dg.shape == g.shape
assert gradients.dbeta is not None and gradients.dbeta.dtype == beta.dtype
assert gradients.d_initial_state is None

# A gate that is one number a head.
slopes = linattn.lightning_slopes(H)
o, _ = linattn.lightning_attention(q, k, v, slopes)
assert o.dtype == v.dtype

# The process's settings.
linattn.set_num_threads(1)
assert_type(linattn.get_num_threads(), int)
