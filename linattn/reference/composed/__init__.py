"""Systems that linattn computes by its ops, here each from its own paper, token by token.

Nothing of the ops is used. Each system has a file. A loop over the tokens of one sequence, for all
of its heads, and its adjoint stand first; `ssd` and `hgrn2` share theirs, which are in
`_memory.py`. The public functions take the arrays of a call, [B,T,...]. Keywords of all::

    initial_state=None  zeros; under the name that the system has for it
    cu_seqlens=None     [S+1], the starts of S sequences packed into one row (B = 1), and T last
    dtype=np.float64    of the arithmetic, as in the ops. With float16 and bfloat16 every row is
                        rounded to it: those that are given, written and read, and their gradients.
                        Gates, states and sums are float32

A forward function returns the outputs and the state after the last token of each sequence. A
backward function returns a dict: the gradients of sum(d_output * output) + sum(d_state * state), by
the names of the arguments.
"""

from .gated_delta_product import gated_delta_product, gated_delta_product_backward
from .hgrn2 import hgrn2, hgrn2_backward
from .mamba3 import mamba3, mamba3_backward
from .mlstm import mlstm, mlstm_backward
from .ssd import ssd, ssd_backward

__all__ = [
    "gated_delta_product",
    "gated_delta_product_backward",
    "hgrn2",
    "hgrn2_backward",
    "mamba3",
    "mamba3_backward",
    "mlstm",
    "mlstm_backward",
    "ssd",
    "ssd_backward",
]
