"""The ops on a sequence that the ranks of a torch.distributed process group share.

Every op of ``linattn.VARIANTS``, every scan and the short convolution is here under its own name,
with its own arguments and ``group=``. A rank gives its tokens and gets its o::

    import linattn.distributed as lad

    o, state = lad.kda(q, k, v, g, beta, group=group)  # q, k, v, ...: this rank's tokens

Linear attention needs no tokens of other ranks, only the states between them, so results and
gradients are exact and the bytes that travel do not depend on T. docs/distributed.md has the rest.
"""

from __future__ import annotations

import inspect
from typing import Any

import linattn
from linattn.distributed._context import Context, context
from linattn.distributed._convolution import causal_conv1d
from linattn.distributed._shared import shared
from linattn.distributed._systems import SYSTEMS
from linattn.segments import SCANS
from linattn.variants import OPS

__all__ = ["Context", "attend", "causal_conv1d", "context", "parallelize"]

# The ops and the scans are made from the tables, so no list of them is here.
FUNCTIONS: tuple[str, ...] = (
    *OPS,
    *SYSTEMS,
    *SCANS,
)

_NOTE = """

    The tokens are this rank's; ``group`` is keyword-only and required. Arrays are tensors of
    PyTorch's, or of NumPy's on the host: then so are the results, and nothing is recorded.

    group : ProcessGroup, DeviceMesh of one dimension, Context, or None
        The ranks that share each row of tokens, in the order of its tokens. None is the default
        group.
    cu_seqlens :
        Of the WHOLE row, on the host. A :class:`Context` has its own.
    initial_state :
        A row for each part of a sequence on this rank. It counts where the sequence begins.
    output_final_state : bool or "all"
        True: the state after this rank's last token of each part. "all": the final states of all
        sequences, on all ranks.
    out :
        None.
"""


def attend(q: Any, k: Any, v: Any, *, causal: bool = True, scale: float = 1.0, group: Any) -> Any:
    """:func:`linattn.attend` of tokens that ranks share: O = scale (Q K' . M) V.

    Tensors may be NumPy's arrays on the host, as in all functions of this module.

    Parameters
    ----------
    q, k : Tensor [B,T,H,K]
    v : Tensor [B,T,HV,V]
        The tokens are this rank's.
    causal : bool
        False: every token reads the tokens of all ranks.
    scale : float
        Of the reads.
    group : ProcessGroup, DeviceMesh of one dimension, Context, or None
        The ranks that share each row of tokens, in the order of its tokens. None is the default
        group.

    Returns
    -------
    o : Tensor [B,T,HV,V], dtype of v

    Raises
    ------
    TypeError, ValueError, MemoryError
        As in :func:`linattn.linear_attention`.
    RuntimeError
        torch.distributed is not initialised, or a rank is gone.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import linattn.distributed as lad
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> lad.attend(q, k, v, group=None).flatten().tolist()
    [1.0, 2.0, 3.0]
    >>> dist.destroy_process_group()
    """
    plain = {"feature_map": "identity", "normalize": False, "causal": causal, "scale": scale}
    o, _ = shared("linear_attention", group, (q, k, v), plain)
    return o


def parallelize(model: Any, group: Any) -> Any:
    """Let the ranks of a group share the tokens of each row, in all layers of linattn in a model.

    Parameters
    ----------
    model : torch.nn.Module
        Layers of :mod:`linattn.nn`, at any depth, get the group as their ``process_group``.
    group : ProcessGroup, DeviceMesh of one dimension, or None
        None: each rank has whole rows again.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    ValueError
        The model has no such layer.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import linattn.distributed as lad
    >>> from linattn import nn
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), nn.LinearAttention(8, 8, 8))
    >>> lad.parallelize(model, dist.group.WORLD)(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 8])
    >>> dist.destroy_process_group()
    """
    from linattn.nn._blocks import SharesTokens

    layers = [layer for layer in model.modules() if isinstance(layer, SharesTokens)]
    if not layers:
        raise ValueError("model: expected a layer of linattn.nn in it, got none")
    for layer in layers:
        layer.process_group = group
    return model


def _made(name: str) -> Any:
    function = getattr(linattn, name)

    def call(*args: Any, group: Any, **given: Any) -> Any:
        return shared(name, group, args, given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{name} of tokens that ranks share: see linattn.{name}.{_NOTE}"
    parameters = list(inspect.signature(function).parameters.values())
    rest = [x for x in parameters if x.kind == x.VAR_KEYWORD]
    own = inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY)
    parameters = [*(x for x in parameters if x not in rest), own, *rest]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'linattn.distributed' has no attribute {name!r}")
    made = globals()[name] = _made(name)
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *FUNCTIONS})
