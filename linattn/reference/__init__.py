"""The ops in plain NumPy, float64: read this first, and compare everything with it.

Most ops keep one matrix per head, the state S [K,V], and do the same four things for a token t::

    decay    S <- diag(a_t) S           forget a little (a_t = exp(g_t), in [0, 1])
    predict  p  = k_t' S                the state's answer to this key so far (delta rule only)
    write    S <- S + k_t u_t'          u_t = v_t, or b_t (v_t - p) under the delta rule
    read     o_t = scale q_t' S         after the write: a token sees itself

Three ops do them in another way: `dplr_delta_rule` predicts before the decay, `rwkv6` reads before
it, and `titans` has a second state, through which it writes.

Each op is spelled twice, for one head, q and k [T,K], v [T,V]::

    *_tokens   the recurrence, token by token; this is the definition
    *_chunk    C tokens at once: scores, (solve,) read, carry; C = T is the parallel form,
               o = (q k' . mask) v, and C = 1 is the recurrence again

The public functions below them loop over the batch, the packed sequences and the heads. Their
letters are q, k [B,T,H,K]; v, o [B,T,HV,V]; g [B,T,HV] or [B,T,HV,K], the natural log of the decay;
beta [B,T,HV]; state [N,HV,K,V]. Value head h reads the query and key head h // (HV/H).
Keywords that all of them take, in `common`::

    scale=None          the factor of the read; None is K**-0.5 (rwkv6 has 1 where none is given)
    initial_state=None  [N,HV,K,V]; None is zeros
    cu_seqlens=None     [N+1], the starts of N sequences packed into one row (B = 1), and T last
    qk_l2norm=False     q and k <- x / sqrt(sum x^2 + 1e-6) first
    form="recurrent"    or "chunk", or "parallel" (one chunk); chunk_size=64
    dtype=np.float64    the dtype of the arithmetic, see below

Arrays of one head may leave out the axes of batch and head: q is then [T,K], g [T], S [K,V].

They return (o, final_state), always both. Below each of them stands its record in OPS: its one-head
functions, and how its decay is given. `backward` reads the record. So a new op is its functions and
its record, both in the file of its rule, and its name here.

With dtype=np.float32 the same text is the "naive twin" of linattn.testing.assert_accurate: the
whole calculation in float32. With float16 or bfloat16, q, k and v are rounded to that dtype, the
state and the sums are float32, and o is rounded at the end. With np.longdouble it is the reference
for a float64 kernel. Nothing is checked here, and nothing is imported from the rest of the package.

The files of this folder::

    additive.py    the ops of the additive rule
    delta.py       the ops of the delta rule
    dplr.py        the op that looks up before the decay: a diagonal plus a low rank
    bonus.py       the op that reads before its write, with a bonus for it
    momentum.py    the op that writes by way of a momentum: two states
    chunks.py      the products that chunk forms share
    adjoints.py    the gradients of one head, one adjoint per rule
    gradients.py   `backward`: the gradients of an op
    elements.py    norm, feature maps, divisor and kinds of gate, each with its derivative
    scans.py       recurrences that are diagonal in channels and states: Mamba, S4D, RG-LRU, HGRN
    composed/      systems that are an op with arithmetic around it, token by token, one file each
    convolution.py the causal convolution in front of an op, and its gradients
    softmax.py     softmax attention, which these ops replace, and its gradients
    _one_head.py   q [T,K] in the place of [B,T,H,K]
    _loops.py      the record, the loops over sequences and heads, dtypes
"""

import numpy as np

from ._loops import OPS, Op
from .additive import (
    gla,
    gla_chunk,
    gla_tokens,
    lightning_attention,
    lightning_attention_chunk,
    lightning_attention_tokens,
    linear_attention,
    linear_attention_chunk,
    linear_attention_noncausal,
    linear_attention_tokens,
    retention,
    retention_chunk,
    retention_tokens,
    simple_gla,
    simple_gla_chunk,
    simple_gla_tokens,
)
from .adjoints import (
    additive_adjoint,
    chunk_adjoint,
    delta_adjoint,
    linear_attention_adjoint,
    linear_attention_noncausal_adjoint,
)
from .bonus import (
    rwkv6,
    rwkv6_adjoint,
    rwkv6_chunk,
    rwkv6_chunk_adjoint,
    rwkv6_tokens,
)
from .chunks import decay_matrix, faded_scores, solve_unit_lower
from .composed import (
    gated_delta_product,
    gated_delta_product_backward,
    hgrn2,
    hgrn2_backward,
    mamba3,
    mamba3_backward,
    mlstm,
    mlstm_backward,
    ssd,
    ssd_backward,
)
from .convolution import causal_conv1d, causal_conv1d_backward
from .delta import (
    delta_rule,
    delta_rule_chunk,
    delta_rule_tokens,
    gated_delta_rule,
    gated_delta_rule_chunk,
    gated_delta_rule_tokens,
    kda,
    kda_chunk,
    kda_tokens,
)
from .dplr import (
    dplr_adjoint,
    dplr_chunk_adjoint,
    dplr_delta_rule,
    dplr_delta_rule_chunk,
    dplr_delta_rule_tokens,
)
from .elements import FEATURE_MAPS, l2norm
from .gradients import Gradients, backward
from .momentum import (
    titans,
    titans_adjoint,
    titans_chunk,
    titans_chunk_adjoint,
    titans_tokens,
)
from .scans import (
    hgrn,
    hgrn_backward,
    rg_lru,
    rg_lru_backward,
    s4d,
    s4d_backward,
    selective_scan,
    selective_scan_backward,
)
from .softmax import (
    SoftmaxGradients,
    softmax_attention,
    softmax_attention_backward,
    softmax_weights,
)

__all__ = [
    "FEATURE_MAPS",
    "OPS",
    "Gradients",
    "Op",
    "SoftmaxGradients",
    "additive_adjoint",
    "backward",
    "causal_conv1d",
    "causal_conv1d_backward",
    "chunk_adjoint",
    "decay_matrix",
    "delta_adjoint",
    "delta_rule",
    "delta_rule_chunk",
    "delta_rule_tokens",
    "dplr_adjoint",
    "dplr_chunk_adjoint",
    "dplr_delta_rule",
    "dplr_delta_rule_chunk",
    "dplr_delta_rule_tokens",
    "faded_scores",
    "gated_delta_product",
    "gated_delta_product_backward",
    "gated_delta_rule",
    "gated_delta_rule_chunk",
    "gated_delta_rule_tokens",
    "gla",
    "gla_chunk",
    "gla_tokens",
    "hgrn",
    "hgrn2",
    "hgrn2_backward",
    "hgrn_backward",
    "implicit_weights",
    "kda",
    "kda_chunk",
    "kda_tokens",
    "l2norm",
    "lightning_attention",
    "lightning_attention_chunk",
    "lightning_attention_tokens",
    "linear_attention",
    "linear_attention_adjoint",
    "linear_attention_chunk",
    "linear_attention_noncausal",
    "linear_attention_noncausal_adjoint",
    "linear_attention_tokens",
    "mamba3",
    "mamba3_backward",
    "mlstm",
    "mlstm_backward",
    "retention",
    "retention_chunk",
    "retention_tokens",
    "rg_lru",
    "rg_lru_backward",
    "rwkv6",
    "rwkv6_adjoint",
    "rwkv6_chunk",
    "rwkv6_chunk_adjoint",
    "rwkv6_tokens",
    "s4d",
    "s4d_backward",
    "selective_scan",
    "selective_scan_backward",
    "simple_gla",
    "simple_gla_chunk",
    "simple_gla_tokens",
    "softmax_attention",
    "softmax_attention_backward",
    "softmax_weights",
    "solve_unit_lower",
    "ssd",
    "ssd_backward",
    "titans",
    "titans_adjoint",
    "titans_chunk",
    "titans_chunk_adjoint",
    "titans_tokens",
]


def implicit_weights(name, q, k, **arguments):
    """A with o = A v: the op called `name`, run on the values e_1 .. e_T.

    Parameters
    ----------
    name : str
    q, k : array [B,T,H,K], or [T,K] for one head
    **arguments
        The op's own.

    Returns
    -------
    A : ndarray [B,HV,T,T], or [T,T]

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> q = k = np.ones((3, 1))  # one head: [T,K]
    >>> reference.implicit_weights("retention", q, k, gamma=0.5)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    """
    if np.ndim(q) == 2:
        return globals()[name](q, k, np.eye(len(q)), **arguments)[0]
    B, T = q.shape[:2]
    by_token = [x for x in map(arguments.get, ("g", "alpha", "beta", "eta")) if np.ndim(x)]
    by_head = [x for x in map(arguments.get, ("gamma", "slopes")) if np.ndim(x)]
    HV = np.shape(by_token[0])[2] if by_token else len(by_head[0]) if by_head else q.shape[2]
    v = np.broadcast_to(np.eye(T)[None, :, None, :], (B, T, HV, T))
    return globals()[name](q, k, v, **arguments)[0].transpose(0, 2, 1, 3)
