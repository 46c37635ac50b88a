"""flash-linear-attention's functions, computed by linattn.

The ops under the names of ``fla.ops`` (fla-core 0.6.0): the same arguments in the same order
with the same defaults, arrays [B,T,H,K] and [B,T,HV,V], log decays, states [N,HV,K,V]::

    from linattn.compat.fla import chunk_gated_delta_rule

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

``chunk_*`` work chunk by chunk, ``fused_recurrent_*`` token by token, ``parallel_*`` in one chunk.
Arguments that change how fla computes but not what (``cu_seqlens_cpu``, ``chunk_indices``,
``safe_gate``, ``disable_recompute``, ``checkpoint_level``, ``use_graph``, ``max_num_seqs``, and the
``lower_bound`` of RWKV-7 and DPLR) are taken and not needed. Whatever else differs from its default
and is not supported raises a ValueError; nothing is ignored in silence. A state that was not asked
for is None. ``transpose_state_layout``, fla's old name of ``state_v_first``, is taken with a
DeprecationWarning.

Gates and betas before their activation (``use_gate_in_kernel``, ``use_beta_sigmoid_in_kernel``) go
through :mod:`linattn.gates` first, in float32 (float64 for float64 g). ``A_log``, ``dt_bias`` or
``lower_bound`` without ``use_gate_in_kernel=True``, which fla does not look at, raise a ValueError.

An initial state may be float64, float32, float16 or bfloat16, whatever the dtype of q; fla's
``chunk_gla`` and ``chunk_kda`` insist on float32. A final state is float32, and float64 if q is.
``cp_context`` is a context of :func:`build_cp_context` or of :func:`linattn.distributed.context`:
the ranks of a group share the tokens. Initial and final states, which fla refuses there, are those
of :mod:`linattn.distributed`.

In ``fused_recurrent_*`` q, k and v may differ in dtype; one that is float64 is enough for a float64
state then. o has the dtype of v in the gated delta rule and in ``kda``, and that of q elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from linattn.compat._fla_additive import (
    chunk_gla,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    parallel_retention,
    parallel_simple_gla,
)
from linattn.compat._fla_delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)
from linattn.compat._fla_polynomials import (
    fused_chunk_based,
    parallel_based,
    parallel_rebased,
)
from linattn.compat._fla_precond import (
    chunk_precond_gated_delta_rule,
    chunk_precond_kda,
    fused_recurrent_precond_gated_delta_rule,
    fused_recurrent_precond_kda,
)
from linattn.compat._fla_rules import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_iplr_delta_rule,
    chunk_rwkv6,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
)
from linattn.compat._fla_scans import (
    chunk_hgrn,
    fused_recurrent_hgrn,
)
from linattn.compat._fla_slots import (
    chunk_abc,
    chunk_gsa,
    chunk_lightnet,
    fused_recurrent_gsa,
    fused_recurrent_lightnet,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from linattn.compat._fla_cp import FLACPContext
    from linattn.compat._replace import Replacement

__all__ = [
    "build_cp_context",
    "chunk_abc",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_gsa",
    "chunk_hgrn",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightnet",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_precond_gated_delta_rule",
    "chunk_precond_kda",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_chunk_based",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_hgrn",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightnet",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_precond_gated_delta_rule",
    "fused_recurrent_precond_kda",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "parallel_based",
    "parallel_rebased",
    "parallel_retention",
    "parallel_simple_gla",
    "use_linattn",
]

# fla has these as kernels of their own: the same results
fused_chunk_linear_attn = chunk_linear_attn
fused_chunk_retention = chunk_retention
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def build_cp_context(
    cu_seqlens: Tensor,
    group: Any,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> FLACPContext:
    """How a row of packed tokens is cut over the ranks of a group, for ``cp_context=``.

    It is :func:`linattn.distributed.context` with as many tokens for each rank, and the function of
    this name in ``fla.ops.cp``.

    Parameters
    ----------
    cu_seqlens : Tensor [N+1]
        Where the sequences of the WHOLE row begin, and where the last one ends.
    group : torch.distributed.ProcessGroup
        The ranks, in the order of the tokens.
    conv1d_kernel_size : int, optional
        The context keeps it. Nothing else needs it.
    cu_seqlens_cpu : Tensor [N+1], optional
        The same numbers on the host. Without it a GPU is waited for.
    use_tf32x3_affine_chain : bool
        True. States are added in float32.
    layout : str
        "contiguous": rank r has part r of the row. fla's "zigzag" is refused.

    Returns
    -------
    linattn.distributed.Context
        With the attributes of fla's: ``cu_seqlens``, ``num_seqs``, ``is_first_rank`` and others.

    Raises
    ------
    ValueError
        The ranks cannot share the tokens equally, or an option has another value.
    RuntimeError
        torch.distributed is not initialised.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from linattn.compat.fla import build_cp_context, chunk_kda
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = build_cp_context(torch.tensor([0, 5, 8]), dist.group.WORLD)
    >>> q = k = v = torch.rand(1, 8, 2, 4)  # [B,T,H,K]
    >>> o, _ = chunk_kda(q, k, v, -k, torch.ones(1, 8, 2), cp_context=cp)
    >>> o.shape, cp.cu_seqlens.tolist(), cp.is_last_rank
    (torch.Size([1, 8, 2, 4]), [0, 5, 8], True)
    >>> dist.destroy_process_group()
    """
    if use_tf32x3_affine_chain is not True:
        raise ValueError(f"use_tf32x3_affine_chain: expected True, got {use_tf32x3_affine_chain!r}")
    if layout != "contiguous":
        raise ValueError(f"layout: expected 'contiguous', got {layout!r}")
    from linattn.compat._fla_cp import built

    return built(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu)


def use_linattn(model: nn.Module) -> Replacement:
    """Make a layer or a model of fla compute with linattn and PyTorch: no Triton, on a CPU too.

    From now on, until the ``with`` block ends or ``restore()`` is called. The layer's ops become
    those of this module. Its short convolutions become :func:`linattn.causal_conv1d`; its norms,
    gates, activations and rotary embeddings become PyTorch's own functions. Weights, caches and
    arguments stay as they are, and other layers of the process too. It is what
    :func:`linattn.compat.transformers.use_linattn` is for models of transformers.

    fla imports Triton (``pip install triton``), which needs no GPU for that.

    Parameters
    ----------
    model : torch.nn.Module
        A layer of ``fla.layers``, a model of ``fla.models``, or a module that has some inside.

    Returns
    -------
    linattn.compat.transformers.Replacement
        A context manager; its ``layers`` has the names of the modules and of their functions.

    Raises
    ------
    TypeError
        ``model`` is not a module of PyTorch's.
    ValueError
        The model calls nothing of fla's, or a function of fla's has a parameter that ours lacks.

    Examples
    --------
    ::

        layer = fla.layers.GatedDeltaNet(hidden_size=256, num_heads=4, head_dim=32)
        with use_linattn(layer):
            o, _, _ = layer(x)

    Another module is refused:

    >>> import torch
    >>> from linattn.compat.fla import use_linattn
    >>> use_linattn(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: model: expected a layer or a model of flash-linear-attention (fla), got Linear, \
which calls none of its functions
    """
    from linattn.compat._fla_layers import TABLE
    from linattn.compat._replace import Replacement

    return Replacement(model, TABLE)
