"""fla's context of a row of tokens that ranks share, as a context of linattn.distributed.

fla.py has ``build_cp_context`` and says what is taken. This module imports PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from linattn.distributed import Context, context
from linattn.distributed._context import group_of

__all__ = ["FLACPContext", "built"]


@dataclass(frozen=True, eq=False)
class FLACPContext(Context):
    """A context with the attributes of fla's. Each rank has as many tokens as the others.

    Attributes
    ----------
    conv1d_kernel_size : int or None
        Nothing needs it here: the convolution's weight has its size.
    device : torch.device or None
        Of ``cu_seqlens``; None is the host.
    """

    conv1d_kernel_size: int | None = None
    device: torch.device | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Where the parts of sequences on this rank begin, and where the last one ends."""
        return self.on(self.device or torch.device("cpu"))

    @property
    def cu_seqlens_cpu(self) -> Tensor | None:
        """``cu_seqlens`` on the host."""
        return self.on(torch.device("cpu"))

    @property
    def num_seqs(self) -> int:
        """The parts of sequences on this rank."""
        return self.share.parts

    @property
    def layout(self) -> str:
        """Each rank has tokens that follow each other."""
        return "contiguous"

    @property
    def is_cp_enabled(self) -> bool:
        """True: fla has contexts without a group, and this one has a group."""
        return True

    @property
    def is_first_rank(self) -> bool:
        """Does the first sequence of this rank begin here?"""
        return not self.share.joins

    @property
    def is_last_rank(self) -> bool:
        """Does the last sequence of this rank end here?"""
        return not self.share.goes_on

    @property
    def pre_num_ranks(self) -> int:
        """The ranks before this one that have tokens of its first sequence."""
        return -(-self.pre_num_conv_tokens // self.lengths[0])

    @property
    def post_num_ranks(self) -> int:
        """The ranks behind this one that have tokens of its last sequence."""
        assert self.edges is not None
        end = self.start + self.lengths[0]
        return max(0, -(-(self.edges[self.share.last] - end) // self.lengths[0]))

    @property
    def pre_num_conv_tokens(self) -> int:
        """The tokens of this rank's first sequence before this rank."""
        return self.before[0]

    def copy_for_backward(self) -> FLACPContext:
        """This context: nothing changes it."""
        return self


def built(cu_seqlens: Any, group: Any, conv1d_kernel_size: Any, cu_seqlens_cpu: Any) -> Any:
    """A context of as many tokens for each rank."""
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    edges = known.tolist() if hasattr(known, "tolist") else list(known)
    size = group_of(group).size()
    total = edges[-1] if edges else 0
    if not total or total % size:
        raise ValueError(
            f"cu_seqlens: expected tokens that {size} ranks share equally, got {total}; "
            "linattn.distributed.context takes the tokens of each rank"
        )
    made = context(group, lengths=total // size, cu_seqlens=edges)
    own = {field.name: getattr(made, field.name) for field in fields(Context)}
    device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else None
    return FLACPContext(**own, conv1d_kernel_size=conv1d_kernel_size, device=device)
