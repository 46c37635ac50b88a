"""RWKV's time mix: token shift, an op, a norm of each head, and a gate."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import gates, ops
from linattn.arrays import as_size
from linattn.composed import rwkv7, rwkv7_step
from linattn.nn._blocks import (
    SharesTokens,
    State,
    check_input,
    check_state,
    real_dtype,
    share_of,
    token_shift,
    told,
)
from linattn.nn._padding import without_padding


class LowRank(nn.Module):
    """x W_1, an activation, W_2 and a bias. It begins as the bias alone: W_1 is zero."""

    def __init__(
        self, d_in: int, d_out: int, rank: int, activation: nn.Module, bias: bool = True
    ) -> None:
        super().__init__()
        self.lora = nn.Sequential(
            nn.Linear(d_in, rank, bias=False), activation, nn.Linear(rank, d_out, bias=bias)
        )
        first, last = self.ends()
        nn.init.zeros_(first.weight)
        nn.init.orthogonal_(last.weight, gain=0.1 * max(1, rank / d_out) ** 0.5)
        if bias:
            nn.init.zeros_(last.bias)

    def ends(self) -> tuple[Any, Any]:
        return self.lora[0], self.lora[2]

    def begin_at(self, bias: Tensor) -> None:
        """Let the bias be this."""
        with torch.no_grad():
            self.ends()[1].bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lora(x)
        return y


class Lerp(nn.Module):
    """A matrix, or two of low rank, after x + mu (shifted - x). mu is learnt, or the caller's."""

    def __init__(self, linear: nn.Module, d_mu: int | None = None) -> None:
        super().__init__()
        self.linear = linear
        if d_mu is not None:
            self.mu = nn.Parameter(torch.zeros(d_mu))

    def forward(self, x: Tensor, delta: Tensor, mu: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x + delta * (self.mu if mu is None else mu))
        return y


class Mixed(NamedTuple):
    """The arguments of the op, and the parts of the output that are made beside it."""

    arrays: tuple[Tensor, ...]
    options: dict[str, Any]
    gate: Tensor  # [...,H*V], after its activation
    bonus: Tensor | None  # [...,H,V], added after the norm
    v: Tensor  # [...,H*V], before v_first is mixed in


class TimeMix(SharesTokens):
    """The part that the time mixes share: the state, the norm and the output's matrix.

    A subclass makes the arguments of its op from x and the token before it.
    """

    def __init__(
        self, d_model: int, H: int, K: int, V: int, norm_eps: float, process_group: Any
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.d_model, self.H, self.K, self.V = d_model, H, K, V
        self.g_norm = nn.GroupNorm(H, H * V, eps=norm_eps)
        self.o_proj = nn.Linear(H * V, d_model, bias=False)

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        like = self.o_proj.weight
        memory = like.new_zeros(N, self.H, self.K, self.V, dtype=real_dtype(like))
        return State(memory, (like.new_zeros(N, 1, self.d_model),), None)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, H={self.H}, K={self.K}, V={self.V}"

    def by_heads(self, *arrays: Tensor) -> list[Tensor]:
        return [a.unflatten(-1, (self.H, -1)) for a in arrays]

    def output(self, o: Tensor, mixed: Mixed) -> Tensor:
        """The norm of each head, the bonus, the gate and the matrix, of o [...,H,V]."""
        real, norm = real_dtype(o), self.g_norm
        y = F.layer_norm(o.to(real), (self.V,), eps=norm.eps)
        y = y.flatten(-2) * norm.weight + norm.bias
        if mixed.bonus is not None:
            y = y + mixed.bonus.flatten(-2)
        return self.o_proj(y.to(o.dtype) * mixed.gate)


class RWKV6(TimeMix):
    """RWKV-6 (Finch): token shift and decays that depend on x, and a bonus for the token itself.

    ::

        r, w, k, v, g = (x + (x_before - x) * (mu + low rank of x)) W     each its own mu and W
        o = rwkv6(r, k, v, bonus, -exp(w)),   y = (norm(o) * silu(g)) W_o

    Parameters have the names of flash-linear-attention's RWKV6Attention.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_heads : int
    expand_k, expand_v : float
        K = d_model * expand_k / num_heads, and V likewise with expand_v; whole numbers.
    proj_low_rank_dim : int
        Of the token shift: the columns for each of r, w, k, v and g.
    gate_low_rank_dim : int
        Of the decay.
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, or K or V is not a whole number.

    Notes
    -----
    The log decays begin at -exp(w) with w from -6 to -1, as in RWKV's own code: a head has slow and
    fast keys.

    References
    ----------
    Peng et al., 2024, *Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence*,
    arXiv:2404.05892.

    Examples
    --------
    A prompt of nine tokens, then a step. The state has the last token too, for the token shift:

    >>> import torch
    >>> from linattn.nn import RWKV6
    >>> layer, x = RWKV6(16, num_heads=2).double(), torch.randn(2, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> torch.equal(state.conv[0][:, 0], x[:, 8])
    True
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1,
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        as_size("d_model", d_model, 1)
        H = as_size("num_heads", num_heads, 1)
        rank = as_size("proj_low_rank_dim", proj_low_rank_dim, 1)
        as_size("gate_low_rank_dim", gate_low_rank_dim, 1)
        K, V = (
            as_size(name, share_of(name, d_model, expand, H), 1)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(d_model, H, K, V, norm_eps, process_group)
        self.x_proj = nn.Sequential(
            Lerp(nn.Linear(d_model, 5 * rank, bias=False), d_model),
            nn.Tanh(),
            nn.Linear(5 * rank, d_model, bias=False),
        )
        self.x_bias = nn.Parameter(torch.zeros(5, d_model))
        decay = LowRank(d_model, H * K, gate_low_rank_dim, nn.Tanh())
        self.r_proj = Lerp(nn.Linear(d_model, H * K, bias=False))
        self.w_proj = Lerp(decay)
        self.k_proj = Lerp(nn.Linear(d_model, H * K, bias=False))
        self.v_proj = Lerp(nn.Linear(d_model, H * V, bias=False))
        self.g_proj = Lerp(nn.Linear(d_model, H * V, bias=False))
        self.bonus = nn.Parameter(torch.zeros(H, K))
        matrices: list[Any] = [
            lerp.linear for lerp in (self.r_proj, self.k_proj, self.v_proj, self.g_proj)
        ]
        matrices += [self.x_proj[0].linear, self.x_proj[2], self.o_proj]
        for matrix in matrices:
            nn.init.xavier_uniform_(matrix.weight, gain=2**-2.5)
        decay.begin_at(-6 + 5 * ramp(H * K) ** 0.7)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x [B,T,D] -> y [B,T,D] and the state after it.

        Parameters
        ----------
        x : Tensor [B,T,D]
        state : State, optional
            The memory of the tokens before x, of N sequences; it is left as it is. Zeros by
            default.
        cu_seqlens : int Tensor [N+1], or a linattn.distributed.Context, optional
            Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. N is
            B by default. With a process group they are those of the whole row, on the host.

        attention_mask : Tensor [B,T], optional
            0 at padding, which may lie anywhere: it changes no state, and its y is 0. On a GPU the
            host waits for it. Not with cu_seqlens or a process group.

        Returns
        -------
        y : Tensor [B,T,D]
        state : State

        Raises
        ------
        ValueError
            x is not [B,T,D], or the op raises it.
        """
        check_input(x, "BT", self.d_model, ("r_proj", self.r_proj.linear))
        if attention_mask is not None:
            masked: tuple[Tensor, State] = without_padding(
                self, attention_mask, x, state, cu_seqlens
            )
            return masked
        if state is not None:
            check_state(state)
        cut = self.cut(x, cu_seqlens)
        shifted, last = token_shift(x, None if state is None else state.conv[0], cut)
        mixed = self._mixed(x, shifted)
        o, memory = told(ops.rwkv6, cut)(
            *mixed.arrays,
            **mixed.options,
            output_final_state=True,
            initial_state=None if state is None else state.memory,
        )
        return self.output(o, mixed), State(memory, (last,), None)

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
        check_input(x, "N", self.d_model, ("r_proj", self.r_proj.linear))
        check_state(state)
        mixed = self._mixed(x, state.conv[0][:, 0].to(x.dtype))
        o = ops.rwkv6_step(*mixed.arrays, **mixed.options, state=state.memory)
        state.conv[0][:, 0].copy_(x)
        return self.output(o, mixed)

    def _mixed(self, x: Tensor, shifted: Tensor) -> Mixed:
        delta = shifted - x
        inner, rank = self.x_proj[1](self.x_proj[0](x, delta)), self.x_proj[2].in_features // 5
        weight = self.x_proj[2].weight.unflatten(-1, (5, rank))
        mu = torch.einsum("...nr,dnr->...nd", inner.unflatten(-1, (5, rank)), weight) + self.x_bias
        mu_r, mu_w, mu_k, mu_v, mu_g = mu.unbind(-2)
        r, k = self.r_proj(x, delta, mu_r), self.k_proj(x, delta, mu_k)
        v, gate = self.v_proj(x, delta, mu_v), F.silu(self.g_proj(x, delta, mu_g))
        w = self.w_proj(x, delta, mu_w).to(real_dtype(x))
        r, k, by_head, g = self.by_heads(r, k, v, -w.exp())
        options = {"bonus": self.bonus, "g": g, "scale": 1.0}
        return Mixed((r, k, by_head), options, gate, None, v)


class RWKV7(TimeMix):
    """RWKV-7 (Goose): a decay per key, and a rate per key at which what is known is taken off.

    ::

        xr, xw, xk, xv, xa, xg = x + (x_before - x) * x_r, x_w, ...
        r, k, v = xr W_r, xk W_k, xv W_v
        w, a = -exp(-1/2) sigmoid(low rank of xw), sigmoid(low rank of xa)
        v <- v + (v_first - v) sigmoid(low rank of xv)           in the layers after the first
        kk = k k_k of length 1;   k <- k (1 + (a - 1) k_a)
        o = rwkv7(r, w, k, v, a, kk=kk)
        y = ((norm(o) + (r . (k r_k)) v) * g) W_o,   g = sigmoid(xg W_1) W_2

    Parameters have the names of flash-linear-attention's RWKV7Attention, so that its state dicts
    load.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    head_dim : int
        K, a divisor of d_model: H = d_model / head_dim heads.
    expand_v : float
        V = head_dim * expand_v, a whole number.
    decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim : int, optional
        By default near 2.5, 2.5, 1.7 and 5 times the root of d_model, in multiples of 32; the first
        three times head_dim / 64 too.
    layer_idx, num_layers : int
        The place of the layer among those of the model. Layer 0 makes v_first, and the others take
        it. The parameters begin at values that depend on the place.
    norm_eps : float
        Of the norm of each head's output; head_dim times that is added to the variance.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, head_dim does not divide d_model, V is not a whole number, or
        layer_idx is not less than num_layers.

    Notes
    -----
    W_o begins at zero: a new layer returns zeros.

    References
    ----------
    Peng et al., 2025, *RWKV-7 "Goose" with Expressive Dynamic State Evolution*, arXiv:2503.14456.

    Examples
    --------
    The values of the first layer go on to the second:

    >>> import torch
    >>> from linattn.nn import RWKV7
    >>> first, second = (RWKV7(16, head_dim=8, layer_idx=i, num_layers=2) for i in range(2))
    >>> x = torch.randn(2, 10, 16)
    >>> y, state, v_first = first(x, output_v_first=True)
    >>> y, state = second(x + y, v_first=v_first)
    >>> tuple(v_first.shape), tuple(state.memory.shape)  # [B,T,H*V], [N,H,K,V]
    ((2, 10, 16), (2, 2, 8, 8))

    A token more:

    >>> states = first.zeros_state(2), second.zeros_state(2)
    >>> y_t, v_t = first.step(x[:, 0], states[0], output_v_first=True)
    >>> tuple(second.step(x[:, 0] + y_t, states[1], v_t).shape)
    (2, 16)
    """

    def __init__(
        self,
        d_model: int,
        *,
        head_dim: int = 64,
        expand_v: float = 1,
        decay_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        layer_idx: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        as_size("d_model", d_model, 1)
        K = as_size("head_dim", head_dim, 1)
        if d_model % K:
            raise ValueError(f"head_dim: expected a divisor of {d_model}, got {head_dim}")
        H, V = d_model // K, as_size("expand_v", share_of("expand_v", K, expand_v, 1), 1)
        as_size("num_layers", num_layers, 1)
        if as_size("layer_idx", layer_idx, 0) >= num_layers:
            raise ValueError(
                f"layer_idx: expected less than num_layers = {num_layers}, got {layer_idx}"
            )
        super().__init__(d_model, H, K, V, K * norm_eps, process_group)
        self.layer_idx, self.num_layers = layer_idx, num_layers

        def rank(name: str, given: int | None, times: float) -> int:
            if given is not None:
                return as_size(name, given, 1)
            return max(32, 32 * round(times * d_model**0.5 / 32))

        share = K / 64
        of_w = rank("decay_low_rank_dim", decay_low_rank_dim, 2.5 * share)
        of_a = rank("a_low_rank_dim", a_low_rank_dim, 2.5 * share)
        of_v = rank("v_low_rank_dim", v_low_rank_dim, 1.7 * share)
        of_g = rank("gate_low_rank_dim", gate_low_rank_dim, 5)
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
            setattr(self, name, nn.Parameter(torch.zeros(1, 1, d_model)))
        self.k_k = nn.Parameter(torch.zeros(d_model))
        self.k_a = nn.Parameter(torch.zeros(d_model))
        self.r_k = nn.Parameter(torch.zeros(H, K))
        self.r_proj = nn.Linear(d_model, H * K, bias=False)
        self.k_proj = nn.Linear(d_model, H * K, bias=False)
        self.v_proj = nn.Linear(d_model, H * V, bias=False)
        self.w_lora = LowRank(d_model, H * K, of_w, nn.Tanh())
        if layer_idx:
            self.v_lora = LowRank(d_model, H * V, of_v, nn.Identity())
        self.a_lora = LowRank(d_model, H * K, of_a, nn.Identity())
        self.g_lora = LowRank(d_model, H * V, of_g, nn.Sigmoid(), bias=False)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """The values that RWKV-7's own code begins with, for this place among the layers."""
        D, at, of = self.d_model, self.layer_idx, self.num_layers
        depth, rest = at / max(1, of - 1), 1 - at / of
        channel = torch.arange(D) / D
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            getattr(self, f"x_{name}").copy_(1 - channel ** (power * rest))
        line, in_head = ramp(D) - 0.5, (2 * ramp(self.K) - 1).repeat(self.H)
        in_head = in_head * in_head.abs()
        self.k_k.copy_(0.71 - 0.1 * line)
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        self.w_lora.begin_at(-5.5 + 6 * ramp(D) ** (1 + depth**0.3) + 2.5 * in_head)
        self.a_lora.begin_at(-0.19 + 0.3 * in_head + 0.4 * line)
        if at:
            self.v_lora.begin_at(0.73 - 0.4 * (ramp(self.H * self.V) - 0.5))
        nn.init.constant_(self.g_norm.weight, ((at + 1) / of) ** 0.7)
        nn.init.orthogonal_(self.r_proj.weight)
        nn.init.orthogonal_(self.k_proj.weight, gain=0.1)
        nn.init.orthogonal_(self.v_proj.weight)
        nn.init.zeros_(self.o_proj.weight)

    @overload
    def forward(
        self,
        x: Tensor,
        state: State | None = ...,
        cu_seqlens: Any = ...,
        v_first: Tensor | None = ...,
        output_v_first: Literal[False] = ...,
        *,
        attention_mask: Tensor | None = ...,
    ) -> tuple[Tensor, State]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        state: State | None = ...,
        cu_seqlens: Any = ...,
        v_first: Tensor | None = ...,
        *,
        output_v_first: Literal[True],
        attention_mask: Tensor | None = ...,
    ) -> tuple[Tensor, State, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Any = None,
        v_first: Tensor | None = None,
        output_v_first: bool = False,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Tensor]:
        """x [B,T,D] -> y [B,T,D] and the state after it, and v_first if it is asked for.

        Parameters
        ----------
        x : Tensor [B,T,D]
        state : State, optional
            The memory of the tokens before x, of N sequences; it is left as it is. Zeros by
            default.
        cu_seqlens : int Tensor [N+1], or a linattn.distributed.Context, optional
            Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. N is
            B by default. With a process group they are those of the whole row, on the host.
        v_first : Tensor [B,T,H*V], optional
            The values of layer 0, for every other layer.
        output_v_first : bool
            Return v_first too: that of layer 0 is made here, another layer's is its argument.
        attention_mask : Tensor [B,T], optional
            0 at padding, which may lie anywhere: it changes no state, and its y is 0. On a GPU the
            host waits for it. Not with cu_seqlens or a process group.

        Returns
        -------
        y : Tensor [B,T,D]
        state : State
        v_first : Tensor [B,T,H*V]
            Only with ``output_v_first``.

        Raises
        ------
        TypeError
            v_first is missing in a layer after the first, or is no tensor.
        ValueError
            x is not [B,T,D], layer 0 is given a v_first or another layer one of another shape, or
            the op raises it.
        """
        check_input(x, "BT", self.d_model, ("r_proj", self.r_proj))
        if state is not None:
            check_state(state)
        self._check_v_first(v_first, "B,T", x)
        if attention_mask is not None:
            masked: tuple[Tensor, State] | tuple[Tensor, State, Tensor] = without_padding(
                self,
                attention_mask,
                x,
                state,
                cu_seqlens,
                v_first,
                output_v_first=output_v_first,
            )
            return masked
        cut = self.cut(x, cu_seqlens)
        shifted, last = token_shift(x, None if state is None else state.conv[0], cut)
        mixed = self._mixed(x, shifted, v_first)
        o, memory = told(rwkv7, cut)(
            *mixed.arrays,
            **mixed.options,
            output_final_state=True,
            initial_state=None if state is None else state.memory,
        )
        y, after = self.output(o, mixed), State(memory, (last,), None)
        if output_v_first:
            return y, after, mixed.v if v_first is None else v_first
        return y, after

    @overload
    def step(
        self,
        x: Tensor,
        state: State,
        v_first: Tensor | None = ...,
        output_v_first: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def step(
        self,
        x: Tensor,
        state: State,
        v_first: Tensor | None = ...,
        *,
        output_v_first: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        state: State,
        v_first: Tensor | None = None,
        output_v_first: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [N,D], the next token of each of N sequences -> y [N,D], and v_first if asked for.

        The state changes in place. Nothing is recorded for gradients.

        Parameters
        ----------
        x : Tensor [N,D]
        state : State
            Of N sequences.
        v_first : Tensor [N,H*V], optional
            The values of layer 0, for every other layer.
        output_v_first : bool
            Return v_first too.

        Returns
        -------
        y : Tensor [N,D]
        v_first : Tensor [N,H*V]
            Only with ``output_v_first``.

        Raises
        ------
        TypeError, ValueError
            As in :meth:`forward`.
        """
        check_input(x, "N", self.d_model, ("r_proj", self.r_proj))
        check_state(state)
        self._check_v_first(v_first, "N", x)
        mixed = self._mixed(x, state.conv[0][:, 0].to(x.dtype), v_first)
        o = rwkv7_step(*mixed.arrays, **mixed.options, state=state.memory)
        state.conv[0][:, 0].copy_(x)
        y = self.output(o, mixed)
        if output_v_first:
            return y, mixed.v if v_first is None else v_first
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layer_idx={self.layer_idx}, num_layers={self.num_layers}"

    def _check_v_first(self, v_first: Any, axes: str, x: Tensor) -> None:
        if not self.layer_idx:
            if v_first is not None:
                raise ValueError("v_first: expected None in layer 0, which makes it, got a value")
            return
        if not isinstance(v_first, Tensor):
            raise TypeError(
                f"v_first: expected the values of layer 0, a torch.Tensor, in layer "
                f"{self.layer_idx}, got {type(v_first).__name__}"
            )
        shape = (*x.shape[:-1], self.H * self.V)
        if v_first.shape != shape:
            raise ValueError(
                f"v_first: expected [{axes},H*V] = {shape}, got {tuple(v_first.shape)}"
            )

    def _mixed(self, x: Tensor, shifted: Tensor, v_first: Tensor | None) -> Mixed:
        delta, real = shifted - x, real_dtype(x)

        def at(name: str) -> Tensor:
            mu: Tensor = getattr(self, name)
            return x + delta * mu.flatten()

        xv = at("x_v")
        r, k, v = self.r_proj(at("x_r")), self.k_proj(at("x_k")), self.v_proj(xv)
        w, a = gates.rwkv7(self.w_lora(at("x_w"))), self.a_lora(at("x_a")).to(real).sigmoid()
        made = v
        if v_first is not None:
            v = v + (v_first.to(v.dtype) - v) * self.v_lora(xv).sigmoid()
        kk = F.normalize((k * self.k_k).to(real).unflatten(-1, (self.H, self.K)), dim=-1)
        k = (k * (1 + (a - 1) * self.k_a)).to(k.dtype)
        r, w, k, by_head, a = self.by_heads(r, w, k, v, a)
        bonus = (r * k * self.r_k).to(real).sum(-1, keepdim=True) * by_head
        options = {"a": a, "kk": kk.to(r.dtype), "scale": 1.0}
        return Mixed((r, w, k, by_head), options, self.g_lora(at("x_g")), bonus, made)


def ramp(n: int) -> Tensor:
    """From 0 to 1 in n numbers."""
    return torch.arange(n) / max(1, n - 1)
