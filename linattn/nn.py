"""Layers for PyTorch: the field's blocks around linattn's ops. Imported by name, never by linattn.

Every block maps x [B,T,D] to y [B,T,D], D = d_model, and carries a :class:`State`::

    layer = GatedDeltaNet(512, num_heads=4, head_dim=64)
    y, state = layer(x)              # a prompt, trained on or read
    y_t = layer.step(x_t, state)     # one token more, x_t [B,D]; the state changes in place

``layer(x, state)`` goes on from a state and leaves it alone; ``cu_seqlens`` packs N sequences into
one row, as in the ops. Parameters have the names of flash-linear-attention's layers (0.6.0), so
that its state dicts load.

:class:`LinearAttention` is the plain layer: three matrices and the op. It maps x [B,T,d_model] to y
[B,T,d_v], and returns a state only if it is asked for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import ops
from linattn.arrays import as_size
from linattn.features import FeatureMapLike, apply_feature_map, core_features, feature_maps

__all__ = [
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "Retention",
    "State",
]


class State(NamedTuple):
    """The memory of a block after the tokens of N sequences so far.

    Attributes
    ----------
    memory : Tensor [N,HV,K,V], or a pair
        The state of the op, float32 (float64 for float64 parameters). In a normalised
        :class:`LinearAttention` it is the pair (S, z [N,HV,K]).
    conv : tuple of Tensor [N,W-1,D_i]
        The last inputs of each short convolution; empty without one.
    position : Tensor [N], or None
        The number of tokens so far, in a block that needs it.

    Examples
    --------
    >>> from linattn.nn import DeltaNet
    >>> state = DeltaNet(16, num_heads=2).zeros_state(3)
    >>> tuple(state.memory.shape), [tuple(x.shape) for x in state.conv]
    ((3, 2, 8, 8), [(3, 3, 16), (3, 3, 16), (3, 3, 16)])
    >>> state.position is None
    True
    """

    memory: Any
    conv: tuple[Tensor, ...]
    position: Tensor | None


def _check_input(x: Any, axes: str, d_model: int, first: tuple[str, nn.Module]) -> None:
    """Refuse an x that the layer `first`, which reads it, cannot take. `axes` are those of x."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dim() != len(axes) + 1 or x.shape[-1] != d_model:
        raise ValueError(
            f"x: expected [{','.join(axes)},d_model] with d_model = {d_model}, got {tuple(x.shape)}"
        )
    name, layer = first
    if type(layer) is not nn.Linear:  # the caller's own: it takes the dtypes that it takes
        return
    cast = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    if x.dtype != layer.weight.dtype and not cast:
        wanted, got = (str(dtype).removeprefix("torch.") for dtype in (layer.weight.dtype, x.dtype))
        raise TypeError(f"x: expected {wanted} (the dtype of {name}), got {got}")


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"state: expected a linattn.nn.State, got {type(state).__name__}")


class LinearAttention(nn.Module):
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
    ) -> None:
        super().__init__()
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

        Returns
        -------
        y : Tensor [B,T,d_v]
        state : State
            Only with ``state`` or ``output_final_state``.
        """
        _check_input(x, "BT", self.d_model, ("W_q", self.W_q))
        returns_state = output_final_state or state is not None
        if returns_state and not causal:
            raise ValueError(
                "causal: expected True with state or output_final_state=True, got False: "
                "without a causal mask there is no state between tokens"
            )
        if state is not None:
            _check_state(state)
        o, memory = ops.linear_attention(
            *self._by_heads(x),
            **self._options(),
            causal=causal,
            initial_state=None if state is None else state.memory,
            output_final_state=returns_state,
        )
        y = o.flatten(-2)
        return (y, State(memory, (), None)) if returns_state else y

    @torch.no_grad()
    def step(self, x: Tensor, state: State) -> Tensor:
        """x [B,d_model], the next token of each of B sequences -> y [B,d_v].

        The state changes in place. Nothing is recorded for gradients.
        """
        _check_input(x, "B", self.d_model, ("W_q", self.W_q))
        _check_state(state)
        o = ops.linear_attention_step(*self._by_heads(x), **self._options(), state=state.memory)
        return o.flatten(-2)

    def zeros_state(self, N: int) -> State:
        """The state before N sequences, where the parameters lie."""
        like, H = self.W_q.weight, self.num_heads
        K, phi_k = self.d_k // H, feature_maps(self.feature_map)[1]
        if phi_k.forward is not None:  # a map may give another number of keys
            with torch.no_grad():
                K = apply_feature_map(like.new_zeros(1, 1, 1, K), phi_k).shape[-1]
        S = like.new_zeros(N, H, K, self.d_v // H, dtype=_real(like))
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


class _ShortConvolution(nn.Conv1d):
    """A causal convolution of each channel over its last W inputs, and SiLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B,T,D] and the W-1 inputs before it [N,W-1,D] (zeros by default) -> y, the next."""
        W, (B, T, D) = self.kernel_size[0], x.shape
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if before is None:
            before = x.new_zeros(N, W - 1, D)
        before = before.to(x.dtype)
        if cu_seqlens is None:
            padded = torch.cat([before, x, x.new_zeros(B, 1, D)], 1)  # a window, even if T is 0
            y = F.conv1d(padded.mT, self.weight, groups=D).mT
            return F.silu(y[:, :T]), padded[:, T:-1].clone()  # a step writes it, y's backward reads
        # every sequence behind what came before it: no window sees two
        edges = cu_seqlens.to(torch.long)
        shift = (W - 1) * torch.arange(N, device=x.device)
        tail = torch.arange(W - 1, device=x.device)
        window = torch.arange(T, device=x.device)  # where that of a token begins
        window = window + (W - 1) * _sequence_of(window, edges)
        padded = x.new_zeros(T + N * (W - 1) + 1, D)
        start = (edges[:-1] + shift)[:, None] + tail
        padded = padded.index_copy(0, start.flatten(), before.reshape(-1, D))
        padded = padded.index_copy(0, window + W - 1, x[0])
        y = F.conv1d(padded.mT, self.weight, groups=D).mT[window]
        return F.silu(y)[None], padded[(edges[1:] + shift)[:, None] + tail]

    def step(self, x: Tensor, before: Tensor) -> Tensor:
        """x [N,D]; `before` moves on in place."""
        window = torch.cat([before, x[:, None].to(before.dtype)], 1)
        before.copy_(window[:, 1:])
        return F.silu((window.to(x.dtype) * self.weight[:, 0].T).sum(1))


def _sequence_of(token: Tensor, edges: Tensor) -> Tensor:
    """Which of the sequences between `edges` each token is in."""
    n = torch.searchsorted(edges[1:], token, right=True)
    return n.clamp(max=edges.shape[0] - 2)


def _decay_parameters(heads: int, rates: int, least: float) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log [heads] and dt_bias [rates] as Mamba-2 has them (Dao and Gu, 2024).

    A is uniform in [least, 16]; softplus(dt_bias) is log-uniform in [0.001, 0.1].
    """
    A = torch.empty(heads).uniform_(least, 16)
    dt = torch.exp(torch.empty(rates).uniform_(math.log(1e-3), math.log(0.1))).clamp(min=1e-4)
    return nn.Parameter(A.log()), nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


class _Block(nn.Module):
    """The part that all blocks share.

    It makes q, k and v by heads, through short convolutions if there are any, and it has the norm
    of each head's output, its gate and its matrix, and the states. A subclass has the op and its
    arguments.
    """

    op = ""
    gate_activation: Callable[..., Tensor] = staticmethod(F.silu)
    norm_name = "o_norm"

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_v_heads: int,
        K: int,
        V: int,
        conv_size: int | None,
        norm_eps: float,
    ) -> None:
        super().__init__()
        for name, value in (
            ("d_model", d_model),
            ("num_heads", num_heads),
            ("head_dim", K),
            ("expand_v", V),
        ):
            as_size(name, value, 1)
        if num_v_heads < 1 or num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}"
            )
        self.d_model, self.H, self.HV, self.K, self.V = d_model, num_heads, num_v_heads, K, V
        self.q_proj = nn.Linear(d_model, num_heads * K, bias=False)
        self.k_proj = nn.Linear(d_model, num_heads * K, bias=False)
        self.v_proj = nn.Linear(d_model, num_v_heads * V, bias=False)
        if conv_size is not None:
            self.q_conv1d = _ShortConvolution(num_heads * K, conv_size)
            self.k_conv1d = _ShortConvolution(num_heads * K, conv_size)
            self.v_conv1d = _ShortConvolution(num_v_heads * V, conv_size)
        self.has_conv = conv_size is not None
        setattr(self, self.norm_name, nn.RMSNorm(V, eps=norm_eps))
        self.o_proj = nn.Linear(num_v_heads * V, d_model, bias=False)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """The op's arguments besides q, k and v, of x [...,D]."""
        raise NotImplementedError

    def turn(self, q: Tensor, k: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        """q, k [...,H,K] at their positions [...]."""
        return q, k

    def output_gate(self, x: Tensor) -> Tensor | None:
        """[...,HV*V], before its activation."""
        g_proj: Any = getattr(self, "g_proj", None)
        return None if g_proj is None else g_proj(x)

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """x [B,T,D] -> y [B,T,D] and the state after it.

        Parameters
        ----------
        x : Tensor [B,T,D]
        state : State, optional
            The memory of the tokens before x, of N sequences; it is left as it is. Zeros by
            default.
        cu_seqlens : int Tensor [N+1], optional
            Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. N is
            B by default.

        Returns
        -------
        y : Tensor [B,T,D]
        state : State

        Raises
        ------
        ValueError
            x is not [B,T,D], or the op raises it.
        """
        _check_input(x, "BT", self.d_model, ("q_proj", self.q_proj))
        if state is not None:
            _check_state(state)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        conv: tuple[Tensor, ...] = ()
        if self.has_conv:
            before = (None,) * 3 if state is None else state.conv
            done = [
                layer(y, b, cu_seqlens)
                for layer, y, b in zip(self._convolutions(), projected, before, strict=True)
            ]
            projected, conv = [y for y, _ in done], tuple(c for _, c in done)
        q, k, v = self._by_heads(projected)
        at, position = self._positions(x, state, cu_seqlens)
        q, k = self.turn(q, k, at)
        o, memory = getattr(ops, self.op)(
            q,
            k,
            v,
            **self.arguments(x),
            cu_seqlens=cu_seqlens,
            output_final_state=True,
            initial_state=None if state is None else state.memory,
        )
        return self._output(o, x), State(memory, conv, position)

    @torch.no_grad()
    def step(self, x: Tensor, state: State) -> Tensor:
        """x [N,D], the next token of each of N sequences -> y [N,D]. The state changes in place.

        Parameters
        ----------
        x : Tensor [N,D]
        state : State
            Of N sequences.

        Returns
        -------
        y : Tensor [N,D]
            Without gradients.

        Raises
        ------
        ValueError
            x is not [N,D], or the step of the op raises it.
        """
        _check_input(x, "N", self.d_model, ("q_proj", self.q_proj))
        _check_state(state)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.has_conv:
            projected = [
                layer.step(y, before)
                for layer, y, before in zip(
                    self._convolutions(), projected, state.conv, strict=True
                )
            ]
        q, k, v = self._by_heads(projected)
        q, k = self.turn(q, k, state.position)
        o = getattr(ops, f"{self.op}_step")(q, k, v, **self.arguments(x), state=state.memory)
        if state.position is not None:
            state.position.add_(1)
        return self._output(o, x)

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        like = self.q_proj.weight
        conv = tuple(
            like.new_zeros(N, layer.kernel_size[0] - 1, layer.in_channels)
            for layer in self._convolutions()
        )
        memory = like.new_zeros(N, self.HV, self.K, self.V, dtype=_real(like))
        return State(memory, conv, self._no_position(like, N))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, H={self.H}, HV={self.HV}, K={self.K}, V={self.V}"

    def _convolutions(self) -> tuple[_ShortConvolution, ...]:
        return (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.has_conv else ()

    def _by_heads(self, projected: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected
        return (
            q.unflatten(-1, (self.H, self.K)),
            k.unflatten(-1, (self.H, self.K)),
            v.unflatten(-1, (self.HV, self.V)),
        )

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate, norm = self.output_gate(x), getattr(self, self.norm_name)
        o = (F.rms_norm(o.to(_real(o)), (self.V,), eps=norm.eps) * norm.weight).to(o.dtype)
        if gate is not None:
            o = o * self.gate_activation(gate.unflatten(-1, (self.HV, self.V)))
        return self.o_proj(o.flatten(-2))

    def _no_position(self, like: Tensor, N: int) -> Tensor | None:
        return None

    def _positions(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of each token, and after the last of each sequence."""
        return None, None


class Retention(_Block):
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
    ) -> None:
        K, V = (
            _share(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(d_model, num_heads, num_heads, K, V, None, norm_eps)
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
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turned(q), turned(k)

    def _no_position(self, like: Tensor, N: int) -> Tensor | None:
        return torch.zeros(N, dtype=torch.long, device=like.device)

    def _positions(
        self, x: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        B, T = x.shape[:2]
        token = torch.arange(T, device=x.device)
        if cu_seqlens is None:
            start = torch.zeros(B, dtype=torch.long, device=x.device)
            if state is not None and state.position is not None:
                start = state.position
            return start[:, None] + token, start + T
        edges = cu_seqlens.to(torch.long)
        start = torch.zeros_like(edges[1:])
        if state is not None and state.position is not None:
            start = state.position
        n = _sequence_of(token, edges)
        return (token - edges[n] + start[n])[None], start + edges.diff()


class GatedLinearAttention(_Block):
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
    ) -> None:
        K, V = (
            _share(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(d_model, num_heads, num_heads, K, V, None, norm_eps)
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

    def arguments(self, x: Tensor) -> dict[str, Any]:
        logits = self.gk_proj(x).to(_real(x)).unflatten(-1, (self.H, self.K))
        return {"g": F.logsigmoid(logits) / self.gate_logit_normalizer}


class DeltaNet(_Block):
    """DeltaNet: short convolutions, keys and queries of unit length, beta = sigmoid(x W).

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
        Heads of queries, keys and values.
    expand_k, expand_v : float
        K = d_model * expand_k / num_heads, and V likewise with expand_v; whole numbers.
    conv_size : int
        The inputs that a short convolution sees.
    norm_eps : float
        Of the norm of each head's output.

    Raises
    ------
    ValueError
        A size is less than 1, or K or V is not a whole number.

    References
    ----------
    Schlag et al., 2021, *Linear Transformers Are Secretly Fast Weight Programmers*,
    arXiv:2102.11174; Yang et al., 2024, *Parallelizing Linear Transformers with the Delta Rule over
    Sequence Length*, arXiv:2406.06484.

    Examples
    --------
    A long sequence in two parts. The second call leaves the state of the first as it is:

    >>> import torch
    >>> from linattn.nn import DeltaNet
    >>> layer, x = DeltaNet(16, num_heads=2).double(), torch.randn(2, 10, 16).double()
    >>> first, state = layer(x[:, :6])
    >>> then, _ = layer(x[:, 6:], state)
    >>> torch.allclose(torch.cat([first, then], 1), layer(x)[0])
    True
    """

    op = "delta_rule"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        expand_k: float = 1,
        expand_v: float = 1,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        K, V = (
            _share(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(d_model, num_heads, num_heads, K, V, conv_size, norm_eps)
        self.b_proj = nn.Linear(d_model, num_heads, bias=False)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        return {"beta": self.b_proj(x).to(_real(x)).sigmoid(), "qk_l2norm": True}


class GatedDeltaNet(_Block):
    """Gated DeltaNet: the delta rule, a decay per head, short convolutions and an output gate.

    The decay is exp(-A softplus(x W + dt)), with A and dt as in Mamba-2.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
        Heads of queries and keys.
    head_dim : int
        K, the key dimension of a head.
    expand_v : float
        V = head_dim * expand_v, a whole number.
    num_v_heads : int, optional
        Heads of values, a multiple of num_heads; num_heads by default.
    conv_size : int
        The inputs that a short convolution sees.
    norm_eps : float
        Of the norm of each head's output.

    Raises
    ------
    ValueError
        A size is less than 1, V is not a whole number, or num_v_heads not a multiple of num_heads.

    References
    ----------
    Yang et al., 2024, *Gated Delta Networks: Improving Mamba2 with Delta Rule*, arXiv:2412.06464.

    Examples
    --------
    Four heads of values share two heads of queries and keys, as in Qwen3-Next:

    >>> import torch
    >>> from linattn.nn import GatedDeltaNet
    >>> layer = GatedDeltaNet(32, num_heads=2, head_dim=8, num_v_heads=4)
    >>> y, state = layer(torch.randn(1, 10, 32))
    >>> tuple(y.shape), tuple(state.memory.shape)  # [N,HV,K,V]
    ((1, 10, 32), (1, 4, 8, 16))
    """

    op = "gated_delta_rule"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = _share("expand_v", head_dim, expand_v, 1)
        super().__init__(d_model, num_heads, HV, head_dim, V, conv_size, norm_eps)
        self.a_proj = nn.Linear(d_model, HV, bias=False)
        self.b_proj = nn.Linear(d_model, HV, bias=False)
        self.A_log, self.dt_bias = _decay_parameters(HV, HV, 1e-4)
        self.g_proj = nn.Linear(d_model, HV * V, bias=False)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        real = _real(x)
        rate = F.softplus(self.a_proj(x).to(real) + self.dt_bias)
        return {
            "g": -self.A_log.to(real).exp() * rate,
            "beta": self.b_proj(x).to(real).sigmoid(),
            "qk_l2norm": True,
        }


class KimiDeltaAttention(_Block):
    """Kimi Delta Attention: the delta rule, a decay per key, short convolutions and an output gate.

    The decay is exp(-A softplus(x W_1 W_2 + dt)). It and the gate, a sigmoid, are of low rank.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
        Heads of queries and keys.
    head_dim : int
        K, the key dimension of a head.
    expand_v : float
        V = head_dim * expand_v, a whole number.
    num_v_heads : int, optional
        Heads of values, a multiple of num_heads; num_heads by default.
    conv_size : int
        The inputs that a short convolution sees.
    norm_eps : float
        Of the norm of each head's output.

    Raises
    ------
    ValueError
        A size is less than 1, V is not a whole number, or num_v_heads not a multiple of num_heads.

    References
    ----------
    Kimi Team, 2025, *Kimi Linear: An Expressive, Efficient Attention Architecture*,
    arXiv:2510.26692.

    Examples
    --------
    Gradients flow to all parameters, through the state too:

    >>> import torch
    >>> from linattn.nn import KimiDeltaAttention
    >>> layer = KimiDeltaAttention(16, num_heads=2, head_dim=8)
    >>> y, state = layer(torch.randn(2, 10, 16))
    >>> (y.square().mean() + state.memory.square().mean()).backward()
    >>> all(parameter.grad is not None for parameter in layer.parameters())
    True
    """

    op = "kda"
    gate_activation = staticmethod(torch.sigmoid)

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 16,
        head_dim: int = 128,
        expand_v: float = 1,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = _share("expand_v", head_dim, expand_v, 1)
        super().__init__(d_model, num_heads, HV, head_dim, V, conv_size, norm_eps)
        self.f_proj = nn.Sequential(
            nn.Linear(d_model, V, bias=False), nn.Linear(V, HV * head_dim, bias=False)
        )
        self.b_proj = nn.Linear(d_model, HV, bias=False)
        self.A_log, self.dt_bias = _decay_parameters(HV, HV * head_dim, 1)
        self.g_proj = nn.Sequential(nn.Linear(d_model, V, bias=False), nn.Linear(V, HV * V))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        real = _real(x)
        rate = F.softplus(self.f_proj(x).to(real) + self.dt_bias).unflatten(-1, (self.HV, self.K))
        return {
            "g": -self.A_log.to(real).exp()[:, None] * rate,
            "beta": self.b_proj(x).to(real).sigmoid(),
            "qk_l2norm": True,
        }


def _share(name: str, size: int, expand: float, heads: int) -> int:
    """size * expand / heads, which must be a whole number."""
    share = size * expand / max(heads, 1)
    if share != int(share):
        raise ValueError(
            f"{name}: expected {size} * {name} to be a multiple of {heads}, got {expand}"
        )
    return int(share)


def _real(x: Tensor) -> torch.dtype:
    """Of norms, gates and betas, never narrower than float32: a decay's error grows with T."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
