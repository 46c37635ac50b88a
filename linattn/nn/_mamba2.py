"""Mamba-2's block."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.arrays import as_size
from linattn.composed import ssd, ssd_step
from linattn.layers import layer_step
from linattn.nn._blocks import (
    SharesTokens,
    ShortConvolution,
    State,
    check_input,
    check_state,
    decay_parameters,
    real_dtype,
    told,
)
from linattn.nn._padding import without_padding


class Mamba2(SharesTokens):
    """Mamba-2: one projection, a short convolution, :func:`linattn.ssd`, and a gated norm.

    ::

        z, xBC, dt = u W_in'
        x, B, C = silu(conv(xBC))
        y = ssd(x, dt, -exp(A_log), B, C, D, dt_bias)
        out = norm(y silu(z)) W_out'

    Parameters have the names of mamba_ssm's Mamba2, so that its state dicts load.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    d_state : int
        N, the state dimension of a head.
    d_conv : int
        The inputs that the short convolution sees.
    expand : float
        The heads have d_model * expand features together, a whole number.
    headdim : int
        P, the features of a head: H = d_model * expand / headdim heads.
    ngroups : int
        G, a divisor of H: so many B and C, and groups of the norm.
    A_init_range : pair of floats
        A begins uniform between them.
    D_has_hdim : bool
        A factor D for each feature, not for each head.
    rmsnorm : bool
        Norm before the last matrix.
    norm_before_gate : bool
        Norm y, and then multiply by silu(z).
    dt_limit : pair of floats
        The least and the largest time step.
    bias, conv_bias : bool
        Have the two matrices a bias, and has the convolution?
    norm_eps : float
        Of the norm.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, expand or headdim does not fit d_model, or ngroups does not divide H.

    References
    ----------
    Dao and Gu, 2024, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality*, arXiv:2405.21060.

    Examples
    --------
    A prompt of nine tokens, then a step. The memory is that of ssd, [N,H,P,d_state]:

    >>> import torch
    >>> from linattn.nn import Mamba2
    >>> layer, x = Mamba2(16, d_state=8, headdim=4).double(), torch.randn(2, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    >>> tuple(state.memory.shape), [tuple(c.shape) for c in state.conv]
    ((2, 8, 4, 8), [(2, 3, 48)])
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.d_model = as_size("d_model", d_model, 1)
        self.d_state, self.P = as_size("d_state", d_state, 1), as_size("headdim", headdim, 1)
        self.G = as_size("ngroups", ngroups, 1)
        self.d_inner = int(d_model * expand)
        if self.d_inner != d_model * expand or self.d_inner < 1:
            raise ValueError(
                f"expand: expected {d_model} * expand to be a whole number, got {expand}"
            )
        self.H = self.d_inner // self.P
        if self.H * self.P != self.d_inner:
            raise ValueError(f"headdim: expected a divisor of {self.d_inner}, got {headdim}")
        if self.H % self.G:
            raise ValueError(f"ngroups: expected a divisor of {self.H} heads, got {ngroups}")
        if not 0 < A_init_range[0] <= A_init_range[1] < math.inf:
            raise ValueError(f"A_init_range: expected 0 < low <= high < inf, got {A_init_range!r}")
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.dt_limit = dt_limit
        convolved = self.d_inner + 2 * self.G * self.d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + convolved + self.H, bias=bias)
        self.conv1d = ShortConvolution(convolved, as_size("d_conv", d_conv, 1), conv_bias)
        self.A_log, self.dt_bias = decay_parameters(self.H, self.H, *A_init_range)
        self.D = nn.Parameter(torch.ones(self.d_inner if D_has_hdim else self.H))
        if rmsnorm:
            self.norm = nn.RMSNorm(self.d_inner, eps=norm_eps)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x [B,T,d_model] -> y [B,T,d_model] and the state after it.

        Parameters
        ----------
        x : Tensor [B,T,d_model]
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
        y : Tensor [B,T,d_model]
        state : State

        Raises
        ------
        ValueError
            x is not [B,T,d_model], or ssd raises it.
        """
        check_input(x, "BT", self.d_model, ("in_proj", self.in_proj))
        if attention_mask is not None:
            masked: tuple[Tensor, State] = without_padding(
                self, attention_mask, x, state, cu_seqlens
            )
            return masked
        if state is not None:
            check_state(state)
        z, xBC, dt = self._projected(x)
        cut = self.cut(x, cu_seqlens)
        xBC, conv = self.conv1d(xBC, None if state is None else state.conv[0], cut)
        y, memory = told(ssd, cut)(
            *self._arguments(xBC, dt),
            **self._options(z),
            initial_states=None if state is None else state.memory,
            return_final_states=True,
        )
        return self._output(y, z), State(memory, (conv,), None)

    @torch.no_grad()
    def step(self, x: Tensor, state: State) -> Tensor:
        """x [N,d_model], the next token of each of N sequences -> y [N,d_model].

        The state changes in place. Nothing is recorded for gradients.

        Parameters
        ----------
        x : Tensor [N,d_model]
        state : State
            Of N sequences.

        Returns
        -------
        y : Tensor [N,d_model]

        Raises
        ------
        ValueError
            x is not [N,d_model], or ssd_step raises it.
        """
        check_input(x, "N", self.d_model, ("in_proj", self.in_proj))
        check_state(state)
        z, xBC, dt = self._projected(x)
        if self._steps_at_once():
            return self.out_proj(self._step_at_once(z, xBC, dt, state))
        xBC = self.conv1d.step(xBC, state.conv[0])
        y = ssd_step(state.memory, *self._arguments(xBC, dt), **self._options(z))
        return self._output(y, z)

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        like, conv = self.in_proj.weight, self.conv1d
        memory = like.new_zeros(N, self.H, self.P, self.d_state, dtype=real_dtype(like))
        before = like.new_zeros(N, conv.kernel_size[0] - 1, conv.in_channels)
        return State(memory, (before,), None)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, H={self.H}, P={self.P}, d_state={self.d_state}, G={self.G}"

    def _projected(self, x: Tensor) -> list[Tensor]:
        """z, xBC and dt, of x [...,d_model]."""
        return self.in_proj(x).split([self.d_inner, self.conv1d.in_channels, self.H], -1)

    def _steps_at_once(self) -> bool:
        """Is all between the matrices one call? It has no limits of dt, and a D for each head."""
        return not self.D_has_hdim and self.dt_limit == (0.0, math.inf)

    def _step_at_once(self, z: Tensor, xBC: Tensor, dt: Tensor, state: State) -> Tensor:
        """The input of out_proj. C, B and x are q, k and v of `simple_gla`."""
        groups, conv = self.G * self.d_state, self.conv1d
        sizes = [self.d_inner, groups, groups]
        v, k, q = xBC.split(sizes, -1)
        weights, before = conv.weight.split(sizes), state.conv[0].mT.split(sizes, 1)
        biases = (None,) * 3 if conv.bias is None else conv.bias.split(sizes)
        parts = zip("vkq", weights, biases, before, strict=True)
        more: dict[str, Any] = {f"{name}_conv": tuple(arrays) for name, *arrays in parts}
        more["conv_activation"] = conv._activation()
        if self.rmsnorm:
            eps = torch.finfo(real_dtype(v)).eps if self.norm.eps is None else self.norm.eps
            more |= {"norm_weight": self.norm.weight, "norm_eps": eps, "norm_groups": self.G}
        y: Tensor = layer_step(
            "simple_gla",
            q,
            k,
            v,
            state=state.memory,
            g=dt,
            decay="softplus",
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            weigh=True,
            skip=self.D,
            scale=1.0,
            state_v_first=True,
            output_gate=z,
            gate_first=not self.norm_before_gate,
            **more,
        )
        return y

    def _arguments(self, xBC: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """x, dt, A, B and C of ssd."""
        groups = self.G * self.d_state
        x, B, C = xBC.split([self.d_inner, groups, groups], -1)
        real = real_dtype(xBC)
        return (
            x.unflatten(-1, (self.H, self.P)),
            dt.to(real),
            -self.A_log.to(real).exp(),
            B.unflatten(-1, (self.G, self.d_state)),
            C.unflatten(-1, (self.G, self.d_state)),
        )

    def _options(self, z: Tensor) -> dict[str, Any]:
        return {
            "D": self.D.unflatten(0, (self.H, self.P)) if self.D_has_hdim else self.D,
            "z": None if self.rmsnorm else z.unflatten(-1, (self.H, self.P)),
            "dt_bias": self.dt_bias,
            "dt_softplus": True,
            "dt_limit": self.dt_limit,
        }

    def _output(self, y: Tensor, z: Tensor) -> Tensor:
        if self.rmsnorm:
            real, gate = real_dtype(y), F.silu(z.to(real_dtype(y)))
            o = y.flatten(-2).to(real)
            o = o if self.norm_before_gate else o * gate
            groups = o.unflatten(-1, (self.G, -1))
            o = F.rms_norm(groups, groups.shape[-1:], eps=self.norm.eps).flatten(-2)
            o = o * self.norm.weight
            return self.out_proj((o * gate if self.norm_before_gate else o).to(y.dtype))
        return self.out_proj(y.flatten(-2))
