"""The ops: members of one family, three passes each.

One recurrence, per sequence and value head, with S the state [K,V]::

    decay    S <- diag(a) S         a = 1 | one per head | one per token | one per token and key
    predict  p  = S' k              delta rule only
    write    S <- S + k u'          u = v  |  beta (v - p)
    read     o  = scale * S' q      after the write: a token sees itself

``dplr_delta_rule`` predicts before the decay, ``rwkv6`` reads before it, and ``titans`` has a
second state, the momentum through which it writes.

Letters: B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head h reads
query/key head h // (HV // H)), K key dimension, V value dimension, N sequences (B, or
len(cu_seqlens) - 1). Gates called ``g`` are natural LOGARITHMS of the decay, g <= 0; the decay
itself goes under ``alpha`` (``gamma`` in retention). One head may drop its axes: q, k [T,K] and
v [T,V] work and come back 2-D.

Arrays are NumPy's, PyTorch's, CuPy's, JAX's or any other library's that has ``__dlpack__`` or
``__cuda_array_interface__``: float64, float32, float16 or bfloat16 (ml_dtypes' in NumPy), one dtype
for q, k and v; gates any of them. A call runs where q lies, on the CPU or on a CUDA device, and all
its arrays lie there (a gate with one number per head may stay on the host). The results are arrays
of q's library. On a device a call is enqueued on the caller's current stream, and nothing waits for
it. Sums and states are float32, or float64 for float64 inputs. Inputs are never written. If q is
PyTorch's, gradients of the forward functions are recorded (linattn/autograd.py). A wrong argument
raises TypeError or ValueError before anything is written; the message names the argument, what was
expected and what came. MemoryError does the same.

Each op is a file. Its functions are thin: they hand their arguments to the core by keyword. What is
right is decided in csrc/check.c, from the tables csrc/variants.def and csrc/arrays.def.
"""

from linattn._linattn import BoundStep
from linattn.analysis import implicit_weights, lightning_slopes
from linattn.ops._bind import bind
from linattn.ops._core import Gradients, LayoutHint
from linattn.ops.attend import attend
from linattn.ops.delta_rule import delta_rule, delta_rule_backward, delta_rule_step
from linattn.ops.dplr_delta_rule import (
    dplr_delta_rule,
    dplr_delta_rule_backward,
    dplr_delta_rule_step,
)
from linattn.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_step,
)
from linattn.ops.gla import gla, gla_backward, gla_step
from linattn.ops.kda import kda, kda_backward, kda_step
from linattn.ops.lightning_attention import (
    lightning_attention,
    lightning_attention_backward,
    lightning_attention_step,
)
from linattn.ops.linear_attention import (
    linear_attention,
    linear_attention_backward,
    linear_attention_step,
)
from linattn.ops.retention import retention, retention_backward, retention_step
from linattn.ops.rwkv6 import rwkv6, rwkv6_backward, rwkv6_step
from linattn.ops.simple_gla import simple_gla, simple_gla_backward, simple_gla_step
from linattn.ops.titans import titans, titans_backward, titans_step
from linattn.variants import OPS

__all__ = [
    "OPS",
    "BoundStep",
    "Gradients",
    "LayoutHint",
    "attend",
    "bind",
    "delta_rule",
    "delta_rule_backward",
    "delta_rule_step",
    "dplr_delta_rule",
    "dplr_delta_rule_backward",
    "dplr_delta_rule_step",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_delta_rule_step",
    "gla",
    "gla_backward",
    "gla_step",
    "implicit_weights",
    "kda",
    "kda_backward",
    "kda_step",
    "lightning_attention",
    "lightning_attention_backward",
    "lightning_attention_step",
    "lightning_slopes",
    "linear_attention",
    "linear_attention_backward",
    "linear_attention_step",
    "retention",
    "retention_backward",
    "retention_step",
    "rwkv6",
    "rwkv6_backward",
    "rwkv6_step",
    "simple_gla",
    "simple_gla_backward",
    "simple_gla_step",
    "titans",
    "titans_backward",
    "titans_step",
]
