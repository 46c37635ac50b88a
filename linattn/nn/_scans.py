"""Blocks around the diagonal scans: Mamba, S4D, and Griffin's recurrent block."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.arrays import as_size
from linattn.nn._blocks import (
    Cut,
    SharesTokens,
    ShortConvolution,
    State,
    check_input,
    check_state,
    no_position,
    positions,
    real_dtype,
    told,
)
from linattn.nn._padding import without_padding
from linattn.scans import rg_lru, rg_lru_step, s4d, s4d_step, selective_scan, selective_scan_step


class _ScanBlock(SharesTokens):
    """The passes of the three blocks: checks, then the pass of the subclass."""

    first: str  # the name of the layer that reads x

    def __init__(self, d_model: int, process_group: Any) -> None:
        super().__init__()
        self.process_group = process_group
        self.d_model = as_size("d_model", d_model, 1)

    def run(self, x: Tensor, state: State | None, cut: Cut) -> tuple[Tensor, State]:
        raise NotImplementedError

    def run_step(self, x: Tensor, state: State) -> Tensor:
        raise NotImplementedError

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
            x is not [B,T,d_model], or the scan raises it.
        RuntimeError
            On a GPU: CUDA refuses, or this build has no CUDA part.
        """
        check_input(x, "BT", self.d_model, (self.first, self._first()))
        if attention_mask is not None:
            masked: tuple[Tensor, State] = without_padding(
                self, attention_mask, x, state, cu_seqlens
            )
            return masked
        if state is not None:
            check_state(state)
        return self.run(x, state, self.cut(x, cu_seqlens))

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
            x is not [N,d_model], or the step of the scan raises it.
        RuntimeError
            On a GPU: CUDA refuses, or this build has no CUDA part.
        """
        check_input(x, "N", self.d_model, (self.first, self._first()))
        check_state(state)
        return self.run_step(x, state)

    def _first(self) -> nn.Module:
        return self.get_submodule(self.first)


def _before(conv: ShortConvolution, like: Tensor, N: int) -> Tensor:
    """The inputs of a convolution before the first token."""
    return like.new_zeros(N, conv.kernel_size[0] - 1, conv.in_channels)


class Mamba(_ScanBlock):
    """Mamba: a projection, a short convolution, :func:`linattn.selective_scan`, and a gate.

    ::

        x, z = u W_in'
        x = silu(conv(x))
        dt, B, C = x W_x';   delta = dt W_dt'
        y = selective_scan(x, delta, -exp(A_log), B, C, D, z, softplus with the bias of W_dt)
        out = y W_out'

    Parameters have the names of mamba_ssm's Mamba, so that its state dicts load.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    d_state : int
        N, the numbers of a channel's state.
    d_conv : int
        The inputs that the short convolution sees.
    expand : float
        There are d_model * expand channels, a whole number.
    dt_rank : int or "auto"
        The features that a time step is made of; d_model / 16, rounded up.
    dt_min, dt_max : float
        The time step begins log-uniform between them.
    bias, conv_bias : bool
        Have the two outer matrices a bias, and has the convolution?
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, or expand does not fit d_model.

    References
    ----------
    Gu and Dao, 2023, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces*,
    arXiv:2312.00752.

    Examples
    --------
    A prompt of nine tokens, then a step. The memory is [N,channels,d_state]:

    >>> import torch
    >>> from linattn.nn import Mamba
    >>> layer, x = Mamba(16, d_state=4).double(), torch.randn(2, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    >>> tuple(state.memory.shape), [tuple(c.shape) for c in state.conv]
    ((2, 32, 4), [(2, 3, 32)])
    """

    first = "in_proj"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bias: bool = False,
        conv_bias: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(d_model, process_group)
        self.d_state = as_size("d_state", d_state, 1)
        self.d_inner = int(d_model * expand)
        if self.d_inner != d_model * expand or self.d_inner < 1:
            raise ValueError(
                f"expand: expected {d_model} * expand to be a whole number, got {expand}"
            )
        rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.dt_rank = as_size("dt_rank", rank, 1)
        if not 0 < dt_min <= dt_max < math.inf:
            raise ValueError(f"dt_min, dt_max: expected 0 < low <= high, got {dt_min}, {dt_max}")
        channels = self.d_inner
        self.in_proj = nn.Linear(d_model, 2 * channels, bias=bias)
        self.conv1d = ShortConvolution(channels, as_size("d_conv", d_conv, 1), conv_bias)
        self.x_proj = nn.Linear(channels, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, channels)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        dt = torch.exp(torch.empty(channels).uniform_(math.log(dt_min), math.log(dt_max)))
        dt = dt.clamp(min=1e-4)
        with torch.no_grad():  # softplus of the bias is dt
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        rates = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(channels, 1)
        self.A_log, self.D = nn.Parameter(rates.log()), nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, d_model, bias=bias)

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        like = self.in_proj.weight
        memory = like.new_zeros(N, self.d_inner, self.d_state, dtype=real_dtype(like))
        return State(memory, (_before(self.conv1d, like, N),), None)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, channels={self.d_inner}, d_state={self.d_state}"

    def run(self, x: Tensor, state: State | None, cut: Cut) -> tuple[Tensor, State]:
        x, z = self.in_proj(x).chunk(2, -1)
        x, conv = self.conv1d(x, None if state is None else state.conv[0], cut)
        y, memory = told(selective_scan, cut)(
            *self._arguments(x),
            **self._options(z),
            initial_state=None if state is None else state.memory,
            output_final_state=True,
        )
        return self.out_proj(y), State(memory, (conv,), None)

    def run_step(self, x: Tensor, state: State) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        x = self.conv1d.step(x, state.conv[0])
        y = selective_scan_step(state.memory, *self._arguments(x), **self._options(z))
        out: Tensor = self.out_proj(y)
        return out

    def _arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """u, delta, A, B and C of the scan."""
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        delta = F.linear(dt, self.dt_proj.weight)
        return x, delta, -self.A_log.to(real_dtype(x)).exp(), B, C

    def _options(self, z: Tensor) -> dict[str, Any]:
        return {"D": self.D, "z": z, "delta_bias": self.dt_proj.bias, "delta_softplus": True}


class _S4DKernel(nn.Module):
    """The parameters of S4D's recurrence, under the names of its authors' code."""

    def __init__(self, d_model: int, N: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(
            torch.empty(d_model).uniform_(math.log(dt_min), math.log(dt_max))
        )
        self.C = nn.Parameter(torch.randn(d_model, N, 2) / math.sqrt(2))
        self.log_A_real = nn.Parameter(torch.full((d_model, N), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(N).float().repeat(d_model, 1))


class S4D(_ScanBlock):
    """S4D: :func:`linattn.s4d` with the same A, C and time step for all tokens, and a GLU.

    ::

        y = s4d(x, dt, -exp(log_A_real) + i A_imag, B = 1, C, D)
        out = GLU(gelu(y) W' + b)

    Parameters have the names of the authors' minimal code, so that its state dicts load.

    Parameters
    ----------
    d_model : int
        The features of x and y, each a channel.
    d_state : int
        Twice N, the conjugate pairs of a channel's state; an even number.
    dt_min, dt_max : float
        The time step begins log-uniform between them.
    discretization : "zoh" or "bilinear"
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, or d_state is odd.

    References
    ----------
    Gu, Gupta, Goel and Re, 2022, *On the Parameterization and Initialization of Diagonal State
    Space Models*, arXiv:2206.11893.

    Examples
    --------
    >>> import torch
    >>> from linattn.nn import S4D
    >>> layer, x = S4D(6, d_state=8).double(), torch.randn(2, 10, 6).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    >>> tuple(state.memory.shape), state.memory.dtype
    ((2, 6, 4), torch.complex128)
    """

    first = "output_linear.0"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        discretization: Any = "zoh",
        process_group: Any = None,
    ) -> None:
        super().__init__(d_model, process_group)
        if as_size("d_state", d_state, 2) % 2:
            raise ValueError(f"d_state: expected an even number, got {d_state}")
        if not 0 < dt_min <= dt_max < math.inf:
            raise ValueError(f"dt_min, dt_max: expected 0 < low <= high, got {dt_min}, {dt_max}")
        self.N, self.discretization = d_state // 2, discretization
        self.kernel = _S4DKernel(d_model, self.N, dt_min, dt_max)
        self.D = nn.Parameter(torch.randn(d_model))
        self.output_linear = nn.Sequential(nn.Conv1d(d_model, 2 * d_model, 1), nn.GLU(-2))

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        wide = real_dtype(self.D) == torch.float64
        kind = torch.complex128 if wide else torch.complex64
        memory = torch.zeros(N, self.d_model, self.N, dtype=kind, device=self.D.device)
        return State(memory, (), None)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, N={self.N}"

    def run(self, x: Tensor, state: State | None, cut: Cut) -> tuple[Tensor, State]:
        y, memory = told(s4d, cut)(
            x,
            *self._constants(),
            D=self.D,
            discretization=self.discretization,
            initial_state=None if state is None else state.memory,
            output_final_state=True,
        )
        return self._output(y), State(memory, (), None)

    def run_step(self, x: Tensor, state: State) -> Tensor:
        y = s4d_step(
            state.memory, x, *self._constants(), D=self.D, discretization=self.discretization
        )
        return self._output(y)

    def _constants(self) -> tuple[Tensor, ...]:
        """dt, A, B and C."""
        real = real_dtype(self.D)
        kernel: Any = self.kernel
        A = torch.complex(-kernel.log_A_real.to(real).exp(), kernel.A_imag.to(real))
        C = torch.view_as_complex(kernel.C.to(real).contiguous())
        return kernel.log_dt.to(real).exp(), A, torch.ones_like(A), C

    def _output(self, y: Tensor) -> Tensor:
        layer: Any = self.output_linear[0]
        return F.glu(F.linear(F.gelu(y), layer.weight[..., 0], layer.bias), -1)


class _Gates(nn.Module):
    """RG-LRU's parameters, under the names of RecurrentGemma's code: matrices by blocks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        size = width // heads
        for name in ("input_gate", "recurrent_gate"):
            weight = torch.randn(heads, size, size) / math.sqrt(size)
            setattr(self, f"{name}_weight", nn.Parameter(weight))
            setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(heads, size)))
        # a^2 begins uniform in [0.9, 0.999]^2 where the gate is 1: a = exp(-8 softplus(param))
        square = torch.empty(width).uniform_(0.9**2, 0.999**2)
        self.recurrent_param = nn.Parameter(torch.log(torch.expm1(-square.log() / 16)))

    def gate(self, name: str, x: Tensor) -> Tensor:
        """sigmoid of x times the matrix of each block."""
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        blocks = x.unflatten(-1, bias.shape)
        made = torch.einsum("...hi,hij->...hj", blocks, weight) + bias
        return made.flatten(-2).sigmoid()


class RGLRU(_ScanBlock):
    """Griffin's recurrent block: a gated branch around :func:`linattn.rg_lru`.

    ::

        y = gelu(x W_y' + b_y);   x = conv(x W_x' + b_x)
        r, i = sigmoid of x times matrices by blocks
        out = (rg_lru(x, r, i, recurrent_param) * y) W_out' + b_out

    Parameters have the names of RecurrentGemma's recurrent block, so that its state dicts load. The
    first token of a sequence is written unscaled, as it has it.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    lru_width : int, optional
        The channels of the recurrence; d_model by default.
    num_heads : int
        The blocks of the gates' matrices, a divisor of lru_width.
    d_conv : int
        The inputs that the short convolution sees.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        A size is no int.
    ValueError
        A size is less than 1, or num_heads does not divide lru_width.

    References
    ----------
    De et al., 2024, *Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models*, arXiv:2402.19427.

    Examples
    --------
    >>> import torch
    >>> from linattn.nn import RGLRU
    >>> layer, x = RGLRU(8, num_heads=2).double(), torch.randn(2, 10, 8).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    >>> tuple(state.memory.shape)
    (2, 8)
    """

    first = "linear_x"

    def __init__(
        self,
        d_model: int,
        *,
        lru_width: int | None = None,
        num_heads: int = 1,
        d_conv: int = 4,
        process_group: Any = None,
    ) -> None:
        super().__init__(d_model, process_group)
        self.width = as_size("lru_width", d_model if lru_width is None else lru_width, 1)
        if self.width % as_size("num_heads", num_heads, 1):
            raise ValueError(f"num_heads: expected a divisor of {self.width}, got {num_heads}")
        self.linear_y = nn.Linear(d_model, self.width)
        self.linear_x = nn.Linear(d_model, self.width)
        self.linear_out = nn.Linear(self.width, d_model)
        self.conv_1d = ShortConvolution(self.width, as_size("d_conv", d_conv, 1), True, silu=False)
        self.rg_lru = _Gates(self.width, num_heads)

    def zeros_state(self, N: int) -> State:
        """The state before the first token of N sequences, on the device of the parameters.

        Parameters
        ----------
        N : int

        Returns
        -------
        State
        """
        like = self.linear_x.weight
        memory = like.new_zeros(N, self.width, dtype=real_dtype(like))
        return State(memory, (_before(self.conv_1d, like, N),), no_position(like, N))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, width={self.width}"

    def run(self, x: Tensor, state: State | None, cut: Cut) -> tuple[Tensor, State]:
        y, x = F.gelu(self.linear_y(x), approximate="tanh"), self.linear_x(x)
        x, conv = self.conv_1d(x, None if state is None else state.conv[0], cut)
        at, after = positions(x, state, cut)
        h, memory = told(rg_lru, cut)(
            *self._arguments(x),
            reset=(at == 0).expand(x.shape[:2]),
            initial_state=None if state is None else state.memory,
            output_final_state=True,
        )
        return self.linear_out(h * y), State(memory, (conv,), after)

    def run_step(self, x: Tensor, state: State) -> Tensor:
        y, x = F.gelu(self.linear_y(x), approximate="tanh"), self.linear_x(x)
        x = self.conv_1d.step(x, state.conv[0])
        at: Any = state.position
        h = rg_lru_step(state.memory, *self._arguments(x), reset=at == 0)
        at.add_(1)
        out: Tensor = self.linear_out(h * y)
        return out

    def _arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """x, r, i and Lambda of rg_lru."""
        gates: Any = self.rg_lru
        r, i = gates.gate("recurrent_gate", x), gates.gate("input_gate", x)
        return x, r, i, gates.recurrent_param
