"""Layers for PyTorch: the field's blocks around linattn's ops. Imported by name, never by linattn.

Every block maps x [B,T,D] to y [B,T,D], D = d_model, and carries a :class:`State`::

    layer = GatedDeltaNet(512, num_heads=4, head_dim=64)
    y, state = layer(x)              # a prompt, trained on or read
    y_t = layer.step(x_t, state)     # one token more, x_t [B,D]; the state changes in place

``layer(x, state)`` goes on from a state and leaves it alone; ``cu_seqlens`` packs N sequences into
one row, as in the ops. Parameters have the names of flash-linear-attention's layers (0.6.0), so
that its state dicts load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import ops

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
    memory : Tensor [N,HV,K,V]
        The state of the op, float32 (float64 for float64 parameters).
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

    memory: Tensor
    conv: tuple[Tensor, ...]
    position: Tensor | None


class LinearAttention(nn.Module):
    """Linear attention with the feature map elu(x) + 1 and the normaliser; one head.

    Katharopoulos et al., 2020, *Transformers are RNNs*. ``forward(x, causal=False)`` maps x
    [B,T,d_model] to [B,T,d_v]; with causal=True token t reads the tokens up to t alone. Parameters
    W_q, W_k [d_k,d_model], W_v [d_v,d_model].

    Examples
    --------
    A token that comes later changes no output of a causal call:

    >>> import torch
    >>> from linattn.nn import LinearAttention
    >>> layer, x = LinearAttention(16, 8, 4).double(), torch.randn(2, 10, 16).double()
    >>> y = layer(x, causal=True)
    >>> tuple(y.shape)
    (2, 10, 4)
    >>> torch.allclose(y[:, :6], layer(x[:, :6], causal=True))
    True
    """

    def __init__(self, d_model: int, d_k: int, d_v: int, *, bias: bool = False) -> None:
        super().__init__()
        self.W_q = nn.Linear(d_model, d_k, bias=bias)
        self.W_k = nn.Linear(d_model, d_k, bias=bias)
        self.W_v = nn.Linear(d_model, d_v, bias=bias)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (W(x)[:, :, None] for W in (self.W_q, self.W_k, self.W_v))
        o, _ = ops.linear_attention(q, k, v, causal=causal)
        return o[:, :, 0]


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
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
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
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x: expected [B,T,{self.d_model}], got {tuple(x.shape)}")
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
        if x.dim() != 2 or x.shape[1] != self.d_model:
            raise ValueError(f"x: expected [N,{self.d_model}], got {tuple(x.shape)}")
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
        real = torch.float64 if like.dtype == torch.float64 else torch.float32
        memory = like.new_zeros(N, self.HV, self.K, self.V, dtype=real)
        return State(memory, conv, self._no_position(like, N))

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
        K.
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
        K.
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
