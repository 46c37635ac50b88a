"""Blocks whose op has the additive rule: RetNet and GLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn._elementwise import logsigmoid
from linattn.autograd import beside
from linattn.nn._blocks import Block, Cut, State, no_position, positions, real_dtype, share_of


class Retention(Block):
    """RetNet's multi-scale retention: decays 1 - 2**(-5-h), rotated q and k, a norm and a gate.

    The norm is one for each head, and the gate is on the output.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
        Heads of queries, keys and values.
    expand_k, expand_v : float
        K = d_model * expand_k / num_heads, and V likewise with expand_v; whole numbers, K an even
        one.
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    ValueError
        A size is less than 1, K or V is not a whole number, or K is not even.

    References
    ----------
    Sun et al., 2023, *Retentive Network: A Successor to Transformer for Large Language Models*,
    arXiv:2307.08621.

    Examples
    --------
    A prompt of nine tokens, then a step; its output is that of the tenth token of a longer call:

    >>> import torch
    >>> from linattn.nn import Retention
    >>> layer, x = Retention(16, num_heads=2).double(), torch.randn(2, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    >>> state.position.tolist()
    [10, 10]
    """

    op = "retention"
    norm_name = "g_norm_swish_gate"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 8,
        expand_k: float = 1,
        expand_v: float = 2,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        K, V = (
            share_of(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(
            d_model, num_heads, num_heads, K, V, None, norm_eps, process_group=process_group
        )
        if K % 2:
            raise ValueError(f"expand_k: expected an even number of keys per head, got {K}")
        self.g_proj = nn.Linear(d_model, num_heads * V, bias=False)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj):
            nn.init.xavier_uniform_(layer.weight, gain=2**-2.5)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        return {}

    def turn(self, q: Tensor, k: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        assert position is not None
        half = self.K // 2
        rate = 10000.0 ** -(torch.arange(half, device=q.device, dtype=torch.float32) / half)
        angle = (position.to(torch.float32)[..., None] * rate)[..., None, :]
        cos, sin = (beside(x.to(q.dtype), q) for x in (angle.cos(), angle.sin()))

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turned(q), turned(k)

    def _no_position(self, like: Tensor, N: int) -> Tensor | None:
        return no_position(like, N)

    def _positions(
        self, x: Tensor, state: State | None, cut: Cut
    ) -> tuple[Tensor | None, Tensor | None]:
        return positions(x, state, cut)


class GatedLinearAttention(Block):
    """GLA: a decay per key, sigmoid(x W_1 W_2 + b)**(1/16), of low rank.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
        Heads of queries, keys and values.
    expand_k, expand_v : float
        K = d_model * expand_k / num_heads, and V likewise with expand_v; whole numbers.
    gate_low_rank_dim : int
        The columns of W_1.
    gate_logit_normalizer : float
        The 16 in the exponent: with a larger one a head forgets more slowly.
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    ValueError
        A size is less than 1, or K or V is not a whole number.

    References
    ----------
    Yang et al., 2024, *Gated Linear Attention Transformers with Hardware-Efficient Training*,
    arXiv:2312.06635.

    Examples
    --------
    Two sequences, packed into one row and apart:

    >>> import torch
    >>> from linattn.nn import GatedLinearAttention
    >>> layer = GatedLinearAttention(16, num_heads=2).double()
    >>> x = torch.randn(1, 10, 16).double()
    >>> y, state = layer(x, cu_seqlens=torch.tensor([0, 4, 10]))
    >>> tuple(state.memory.shape)
    (2, 2, 4, 8)
    >>> torch.allclose(y[:, 4:], layer(x[:, 4:])[0])
    True
    """

    op = "gla"
    norm_name = "g_norm_swish_gate"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        K, V = (
            share_of(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(
            d_model, num_heads, num_heads, K, V, None, norm_eps, process_group=process_group
        )
        self.gate_logit_normalizer = gate_logit_normalizer
        self.gk_proj = nn.Sequential(
            nn.Linear(d_model, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, num_heads * K),
        )
        self.g_proj = nn.Linear(d_model, num_heads * V, bias=False)
        for layer in (
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.g_proj,
            self.o_proj,
            *self.gk_proj,
        ):
            nn.init.xavier_uniform_(layer.weight, gain=2**-2.5)

    def projections(self, x: Tensor) -> dict[str, Any]:
        logits = self.gk_proj(x).to(real_dtype(x))
        return {"g": logsigmoid(logits) / self.gate_logit_normalizer}
