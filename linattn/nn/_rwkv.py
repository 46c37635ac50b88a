"""RWKV's time mix: token shift, an op, a norm of each head, and a gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import ops
from linattn.arrays import as_size
from linattn.nn._blocks import State, check_input, check_state, real_dtype, sequence_of, share_of


def token_shift(
    x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x [B,T,D] and the token before it [N,1,D] (zeros by default) -> those before each, the last.

    The token before the first is the one in `before`.
    """
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.new_zeros(N, 1, D) if before is None else before.to(x.dtype)
    if cu_seqlens is None:
        padded = torch.cat([before, x], 1)
        return padded[:, :-1], padded[:, -1:].clone()  # a step writes it, y's backward reads
    edges = cu_seqlens.to(torch.long)
    token = torch.arange(T, device=x.device)
    n = sequence_of(token, edges)
    rows = torch.cat([x.new_zeros(1, D), x[0]])  # row t is token t - 1
    shifted = torch.where((token == edges[n])[:, None], before[n, 0], rows[:-1])
    last = torch.where((edges.diff() > 0)[:, None], rows[edges[1:]], before[:, 0])
    return shifted[None], last[:, None]


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
    """What the op takes, and what its output needs."""

    arrays: tuple[Tensor, ...]
    options: dict[str, Any]
    gate: Tensor  # [...,H*V], after its activation


class TimeMix(nn.Module):
    """The part that the time mixes share: the state, the norm and the output's matrix.

    A subclass makes the arguments of its op from x and the token before it.
    """

    def __init__(self, d_model: int, H: int, K: int, V: int, norm_eps: float) -> None:
        super().__init__()
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
        """The norm of each head, the gate and the matrix, of o [...,H,V]."""
        real, norm = real_dtype(o), self.g_norm
        y = F.layer_norm(o.to(real), (self.V,), eps=norm.eps)
        y = y.flatten(-2) * norm.weight + norm.bias
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
    ) -> None:
        as_size("d_model", d_model, 1)
        H = as_size("num_heads", num_heads, 1)
        rank = as_size("proj_low_rank_dim", proj_low_rank_dim, 1)
        as_size("gate_low_rank_dim", gate_low_rank_dim, 1)
        K, V = (
            as_size(name, share_of(name, d_model, expand, H), 1)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(d_model, H, K, V, norm_eps)
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
        check_input(x, "BT", self.d_model, ("r_proj", self.r_proj.linear))
        if state is not None:
            check_state(state)
        shifted, last = token_shift(x, None if state is None else state.conv[0], cu_seqlens)
        mixed = self._mixed(x, shifted)
        o, memory = ops.rwkv6(
            *mixed.arrays,
            **mixed.options,
            cu_seqlens=cu_seqlens,
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
        return Mixed((r, k, by_head), options, gate)


def ramp(n: int) -> Tensor:
    """From 0 to 1 in n numbers."""
    return torch.arange(n) / max(1, n - 1)
