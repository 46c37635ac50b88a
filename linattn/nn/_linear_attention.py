"""Linear attention as it is taught."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn import ops
from linattn.arrays import as_size
from linattn.features import FeatureMapLike, apply_feature_map, core_features, feature_maps
from linattn.nn._blocks import (
    SharesTokens,
    State,
    check_input,
    check_state,
    real_dtype,
    told,
)
from linattn.nn._padding import Padding


class LinearAttention(SharesTokens):
    """Linear attention as it is taught: three matrices, a feature map, and the normaliser.

    ::

        q, k, v = x W_q', x W_k', x W_v'
        y_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)

    Token i reads all tokens j, or the tokens j <= i with ``causal=True``. Katharopoulos et al.,
    2020, *Transformers are RNNs*. With several heads, each head does this with its own slice of q,
    k and v, and y has the heads side by side. There is no output projection.

    Parameters
    ----------
    d_model : int
        The last axis of x.
    d_k, d_v : int
        Key and value dimension of all heads together: multiples of num_heads.
    bias : bool
        Do W_q, W_k and W_v have a bias?
    num_heads : int
        H. A head has K = d_k / H keys and V = d_v / H values.
    feature_map, normalize, eps
        As in :func:`linattn.linear_attention`. The parameters of a map that is a module are
        parameters of this layer.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Attributes
    ----------
    d_model, d_k, d_v, num_heads : int
    W_q, W_k, W_v : torch.nn.Linear
        Weights [d_k,d_model], [d_k,d_model], [d_v,d_model].

    Raises
    ------
    TypeError
        A size is no int; or an x that is no tensor or has another dtype than W_q.
    ValueError
        A size below 1, a d_k or d_v that num_heads does not divide; or an x of another shape.

    Examples
    --------
    >>> import torch
    >>> from linattn import nn
    >>> layer = nn.LinearAttention(16, 8, 12, num_heads=2)
    >>> layer(torch.zeros(3, 10, 16)).shape
    torch.Size([3, 10, 12])

    A causal layer goes on from a state, with more tokens or with one:

    >>> y, state = layer(torch.zeros(3, 10, 16), causal=True, output_final_state=True)
    >>> y, state = layer(torch.zeros(3, 5, 16), causal=True, state=state)
    >>> layer.step(torch.zeros(3, 16), state).shape
    torch.Size([3, 12])
    """

    def __init__(
        self,
        d_model: int,
        d_k: int,
        d_v: int,
        *,
        bias: bool = False,
        num_heads: int = 1,
        feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
        normalize: bool | str = True,
        eps: float = 1e-6,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.d_model = as_size("d_model", d_model, 1)
        self.num_heads = as_size("num_heads", num_heads, 1)
        self.d_k, self.d_v = as_size("d_k", d_k, 1), as_size("d_v", d_v, 1)
        for name, size in (("d_k", self.d_k), ("d_v", self.d_v)):
            if size % self.num_heads:
                raise ValueError(
                    f"{name}: expected a multiple of num_heads = {self.num_heads}, got {size}"
                )
        maps = core_features(feature_map, normalize, eps, True)[:2]  # refuses what is wrong
        self.feature_map, self.normalize, self.eps = feature_map, normalize, eps
        for name, phi in zip(("phi_q", "phi_k"), maps, strict=True):
            if isinstance(phi.forward, nn.Module) and phi.forward is not feature_map:
                self.add_module(name, phi.forward)
        self.W_q = nn.Linear(self.d_model, self.d_k, bias=bias)
        self.W_k = nn.Linear(self.d_model, self.d_k, bias=bias)
        self.W_v = nn.Linear(self.d_model, self.d_v, bias=bias)

    def forward(
        self,
        x: Tensor,
        causal: bool = False,
        *,
        state: State | None = None,
        output_final_state: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """x [B,T,d_model] -> y [B,T,d_v]; or (y, state) if there is a state.

        Parameters
        ----------
        x : Tensor [B,T,d_model]
        causal : bool
            Token t reads the tokens up to t alone.
        state : State, optional
            Of B sequences, before x; it is left alone. Only with causal=True.
        output_final_state : bool
            Return the state after x too, as a call with ``state`` does. Only with causal=True.
        attention_mask : Tensor [B,T], optional
            0 at padding, which may lie anywhere: no token reads it, and its y is 0. On a GPU the
            host waits for it. Not with a process group.

        Returns
        -------
        y : Tensor [B,T,d_v]
        state : State
            Only with ``state`` or ``output_final_state``.
        """
        check_input(x, "BT", self.d_model, ("W_q", self.W_q))
        returns_state = output_final_state or state is not None
        if returns_state and not causal:
            raise ValueError(
                "causal: expected True with state or output_final_state=True, got False: "
                "without a causal mask there is no state between tokens"
            )
        if state is not None:
            check_state(state)
        padding = None
        if attention_mask is not None:
            padding = Padding(self, attention_mask, x)
            x = padding.packed(x)
        cut = self.cut(x, None) if padding is None else padding.cu_seqlens
        o, memory = told(ops.linear_attention, cut)(
            *self._by_heads(x),
            **self._options(),
            causal=causal,
            initial_state=None if state is None else state.memory,
            output_final_state=returns_state,
        )
        y = o.flatten(-2) if padding is None else padding.spread(o.flatten(-2))
        return (y, State(memory, (), None)) if returns_state else y

    @torch.no_grad()
    def step(self, x: Tensor, state: State) -> Tensor:
        """x [B,d_model], the next token of each of B sequences -> y [B,d_v].

        The state changes in place. Nothing is recorded for gradients.
        """
        check_input(x, "B", self.d_model, ("W_q", self.W_q))
        check_state(state)
        o = ops.linear_attention_step(*self._by_heads(x), **self._options(), state=state.memory)
        return o.flatten(-2)

    def zeros_state(self, N: int) -> State:
        """The state before N sequences, where the parameters lie."""
        like, H = self.W_q.weight, self.num_heads
        K, phi_k = self.d_k // H, feature_maps(self.feature_map)[1]
        if phi_k.forward is not None:  # a map may give another number of keys
            with torch.no_grad():
                K = apply_feature_map(like.new_zeros(1, 1, 1, K), phi_k).shape[-1]
        S = like.new_zeros(N, H, K, self.d_v // H, dtype=real_dtype(like))
        return State((S, S.new_zeros(N, H, K)) if self.normalize else S, (), None)

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_k={self.d_k}, d_v={self.d_v}"
        phi_q, phi_k = feature_maps(self.feature_map)
        maps = repr(phi_q) if phi_q == phi_k else f"({phi_q!r}, {phi_k!r})"
        if isinstance(self.feature_map, str):
            maps = repr(self.feature_map)
        return (
            f"{sizes}, num_heads={self.num_heads}, feature_map={maps}, "
            f"normalize={self.normalize!r}, eps={self.eps}"
        )

    def _by_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H = self.num_heads
        q, k, v = (W(x).unflatten(-1, (H, -1)) for W in (self.W_q, self.W_k, self.W_v))
        return q, k, v

    def _options(self) -> dict[str, Any]:
        return {
            "feature_map": self.feature_map,
            "normalize": self.normalize,
            "eps": self.eps,
        }
