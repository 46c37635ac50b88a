"""What the layers share: the state, short convolutions, and the block around an op."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import ops
from linattn.arrays import as_size
from linattn.convolution import causal_conv1d, causal_conv1d_step
from linattn.layers import gated, layer_step
from linattn.nn._padding import without_padding
from linattn.variants import VARIANTS


class State(NamedTuple):
    """The memory of a block after the tokens of N sequences so far.

    Attributes
    ----------
    memory : Tensor [N,HV,K,V], or a pair
        The state of the op, float32 (float64 for float64 parameters). In a normalised
        :class:`LinearAttention` it is the pair (S, z [N,HV,K]), in :class:`Titans` the pair (M, Y)
        of memory and momentum, or the three (M, Y, M0) where it has batches of several tokens. In
        :class:`Mamba2` it is the states of ssd, [N,H,P,d_state]; in :class:`Mamba`, :class:`S4D`
        (complex) and :class:`RGLRU` those of their scans, [N,channels,d_state] or [N,channels].
    conv : tuple of Tensor [N,W-1,D_i]
        The last inputs of each short convolution, or of RWKV's token shift (W = 2); empty without
        one.
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

    def mark_static(self) -> State:
        """Tell torch.compile that the tensors of this state stay where they are.

        A step changes its state in place. With mode="reduce-overhead" torch.compile puts it into a
        CUDA graph only if it knows that. A compiled step is then compiled for this state alone: for
        another one PyTorch compiles it again, so make one state and write into it.

        Returns
        -------
        State
            This state.

        Examples
        --------
        >>> from linattn.nn import DeltaNet
        >>> layer = DeltaNet(16, num_heads=2)
        >>> state = layer.zeros_state(1)
        >>> state.mark_static() is state
        True
        """
        memory = self.memory if isinstance(self.memory, tuple) else (self.memory,)
        for x in (*memory, *self.conv, self.position):
            if x is not None:
                torch._dynamo.mark_static_address(x)
        return self


# torch.load(..., weights_only=True), which is its default, makes no class that it does not know.
torch.serialization.add_safe_globals([State])


def check_input(x: Any, axes: str, d_model: int, first: tuple[str, nn.Module]) -> None:
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


def check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"state: expected a linattn.nn.State, got {type(state).__name__}")


# Where the sequences of a row begin, as a layer passes it on: cu_seqlens, None, or a
# linattn.distributed.Context of the ranks that share the row.
Cut = Any


def is_shared(cut: Cut) -> bool:
    return not (cut is None or isinstance(cut, Tensor)) and hasattr(cut, "shares")


def told(function: Callable[..., Any], cut: Cut) -> Callable[..., Any]:
    """A function of linattn's that knows where sequences begin, or which ranks share them."""
    if not is_shared(cut):
        return partial(function, cu_seqlens=cut)
    from linattn import distributed

    return partial(getattr(distributed, function.__name__), group=cut)


class SharesTokens(nn.Module):
    """A layer whose rows of tokens may be shared by the ranks of a process group."""

    process_group: Any = None

    def cut(self, x: Tensor, cu_seqlens: Any) -> Cut:
        """By the layer's own group all ranks have as many tokens of x [B,T,D]."""
        if self.process_group is None or is_shared(cu_seqlens):
            return cu_seqlens
        from linattn import distributed

        return distributed.context(self.process_group, lengths=x.shape[1], cu_seqlens=cu_seqlens)


class ShortConvolution(nn.Conv1d):
    """A causal convolution of each channel over its last W inputs, and SiLU, unless that is off."""

    def __init__(self, channels: int, width: int, bias: bool = False, silu: bool = True) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)
        self.silu = silu

    def _activation(self) -> str | None:
        return "silu" if self.silu else None

    def forward(  # type: ignore[override]
        self, x: Tensor, before: Tensor | None, cut: Cut
    ) -> tuple[Tensor, Tensor]:
        """x [B,T,D] and the W-1 inputs before it [N,W-1,D] (zeros by default) -> y, the next."""
        y, after = told(causal_conv1d, cut)(
            x,
            self.weight[:, 0],
            self.bias,
            activation=self._activation(),
            initial_state=None if before is None else before.to(x.dtype).mT,
            output_final_state=True,
        )
        return y, after.to(x.dtype).mT

    def step(self, x: Tensor, before: Tensor) -> Tensor:
        """x [N,D]; `before` moves on in place."""
        moved: Tensor = causal_conv1d_step(
            x,
            self.weight[:, 0],
            self.bias,
            state=before.mT,
            activation=self._activation(),
        )
        return moved


def sequence_of(token: Tensor, edges: Tensor) -> Tensor:
    """Which of the sequences between `edges` each token is in."""
    n = torch.searchsorted(edges[1:], token, right=True)
    return n.clamp(max=edges.shape[0] - 2)


def no_position(like: Tensor, N: int) -> Tensor:
    return torch.zeros(N, dtype=torch.long, device=like.device)


def positions(x: Tensor, state: State | None, cut: Cut) -> tuple[Tensor, Tensor]:
    """Of each token of x [B,T,D], and after the last of each sequence.

    Where ranks share a row, the position of a state is looked at on all of them.
    """
    B, T = x.shape[:2]
    token = torch.arange(T, device=x.device)
    before: Any = 0
    if is_shared(cut):
        before = torch.tensor(cut.before, device=x.device)
        cut = cut.on(x.device)
    if cut is None:
        start = no_position(x, B) + before
        if state is not None and state.position is not None:
            start = state.position + before
        return start[:, None] + token, start + T
    edges = cut.to(torch.long)
    start = torch.zeros_like(edges[1:]) + before
    if state is not None and state.position is not None:
        start = state.position + before
    n = sequence_of(token, edges)
    return (token - edges[n] + start[n])[None], start + edges.diff()


def token_shift(x: Tensor, before: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor]:
    """x [B,T,D] and the token before it [N,1,D] (zeros by default) -> those before each, the last.

    The token before the first is the one in `before`.
    """
    B, T, D = x.shape
    if is_shared(cut):  # a convolution of two inputs that takes the one before
        weight = torch.tensor([1.0, 0.0], dtype=x.dtype, device=x.device).expand(D, 2)
        state = None if before is None else before.to(x.dtype).mT
        shifted, last = told(causal_conv1d, cut)(
            x, weight, initial_state=state, output_final_state=True
        )
        return shifted, last.to(x.dtype).mT.clone()
    N = B if cut is None else cut.shape[0] - 1
    before = x.new_zeros(N, 1, D) if before is None else before.to(x.dtype)
    if cut is None:
        padded = torch.cat([before, x], 1)
        return padded[:, :-1], padded[:, -1:].clone()  # a step writes it, y's backward reads
    edges = cut.to(torch.long)
    token = torch.arange(T, device=x.device)
    n = sequence_of(token, edges)
    rows = torch.cat([x.new_zeros(1, D), x[0]])  # row t is token t - 1
    shifted = torch.where((token == edges[n])[:, None], before[n, 0], rows[:-1])
    last = torch.where((edges.diff() > 0)[:, None], rows[edges[1:]], before[:, 0])
    return shifted[None], last[:, None]


def decay_parameters(
    heads: int, rates: int, least: float, most: float = 16
) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log [heads] and dt_bias [rates] as Mamba-2 has them (Dao and Gu, 2024).

    A is uniform in [least, most]; softplus(dt_bias) is log-uniform in [0.001, 0.1].
    """
    A = torch.empty(heads).uniform_(least, most)
    dt = torch.exp(torch.empty(rates).uniform_(math.log(1e-3), math.log(0.1))).clamp(min=1e-4)
    return nn.Parameter(A.log()), nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


_OF_A_STEP = ("arguments", "turn", "run_step", "run_step_from", "_by_heads", "_output")


class Block(SharesTokens):
    """The part that all blocks share.

    It makes q, k and v by heads, through short convolutions if there are any, and it has the norm
    of each head's output, its gate and its matrix, and the states. A subclass has the op and its
    arguments.
    """

    op = ""
    output_activation: Literal["silu", "sigmoid"] = "silu"
    norm_name = "o_norm"
    steps_at_once = False  # is a step one call of layer_step? See __init_subclass__

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_v_heads: int,
        K: int,
        V: int,
        conv_size: int | None,
        norm_eps: float,
        writes: int = 1,
        conv_bias: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.process_group = process_group
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
        self.k_proj = nn.Linear(d_model, writes * num_heads * K, bias=False)
        self.v_proj = nn.Linear(d_model, writes * num_v_heads * V, bias=False)
        if conv_size is not None:
            self.q_conv1d = ShortConvolution(num_heads * K, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(writes * num_heads * K, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(writes * num_v_heads * V, conv_size, conv_bias)
        self.has_conv = conv_size is not None
        setattr(self, self.norm_name, nn.RMSNorm(V, eps=norm_eps))
        self.o_proj = nn.Linear(num_v_heads * V, d_model, bias=False)

    def __init_subclass__(cls, **options: Any) -> None:
        """A block that has `projections`, and all else from here, steps in one call."""
        super().__init_subclass__(**options)
        ours = all(getattr(cls, name) is getattr(Block, name) for name in _OF_A_STEP)
        cls.steps_at_once = ours and cls.projections is not Block.projections

    def projections(self, x: Tensor) -> dict[str, Any]:
        """The arguments of layer_step that make those of the op but q, k and v, of x [...,D]."""
        raise NotImplementedError

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """The op's arguments besides q, k and v, of x [...,D]."""
        return gated(self.projections(x), self.HV, VARIANTS[self.op].decay == "key")

    def turn(self, q: Tensor, k: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        """q, k [...,H,K] at their positions [...]."""
        return q, k

    def run(self, cut: Cut, *arrays: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """The op, of a sequence."""
        done: tuple[Tensor, Any] = told(getattr(ops, self.op), cut)(*arrays, **options)
        return done

    def run_from(
        self,
        state: State | None,
        cut: Cut,
        *arrays: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """The op, of N sequences that go on from a state, and the memory after them."""
        return self.run(
            cut,
            *arrays,
            **options,
            output_final_state=True,
            initial_state=None if state is None else state.memory,
        )

    def run_step(self, *arrays: Tensor, **options: Any) -> Tensor:
        """The op, of a token."""
        o: Tensor = getattr(ops, f"{self.op}_step")(*arrays, **options)
        return o

    def run_step_from(self, state: State, *arrays: Tensor, **options: Any) -> Tensor:
        """The op, of a token of each of N sequences. The memory of the state moves on."""
        return self.run_step(*arrays, **options, state=state.memory)

    def output_gate(self, x: Tensor) -> Tensor | None:
        """[...,HV*V], before its activation."""
        g_proj: Any = getattr(self, "g_proj", None)
        return None if g_proj is None else g_proj(x)

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
        check_input(x, "BT", self.d_model, ("q_proj", self.q_proj))
        if attention_mask is not None:
            masked: tuple[Tensor, State] = without_padding(
                self, attention_mask, x, state, cu_seqlens
            )
            return masked
        if state is not None:
            check_state(state)
        cut = self.cut(x, cu_seqlens)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        conv: tuple[Tensor, ...] = ()
        if self.has_conv:
            before = (None,) * 3 if state is None else state.conv
            done = [
                layer(y, b, cut)
                for layer, y, b in zip(self._convolutions(), projected, before, strict=True)
            ]
            projected, conv = [y for y, _ in done], tuple(c for _, c in done)
        q, k, v = self._by_heads(projected)
        at, position = self._positions(x, state, cut)
        q, k = self.turn(q, k, at)
        o, memory = self.run_from(state, cut, q, k, v, **self.arguments(x))
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
        check_input(x, "N", self.d_model, ("q_proj", self.q_proj))
        check_state(state)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.steps_at_once:
            activations = {layer._activation() for layer in self._convolutions()}
            if len(activations) < 2:
                return self._step_at_once(x, projected, state, *activations)
        if self.has_conv:
            projected = [
                layer.step(y, before)
                for layer, y, before in zip(
                    self._convolutions(), projected, state.conv, strict=True
                )
            ]
        q, k, v = self._by_heads(projected)
        q, k = self.turn(q, k, state.position)
        o = self.run_step_from(state, q, k, v, **self.arguments(x))
        if state.position is not None:
            state.position.add_(1)
        return self._output(o, x)

    def _step_at_once(
        self, x: Tensor, projected: list[Tensor], state: State, activation: Any = None
    ) -> Tensor:
        convolutions: dict[str, Any] = {
            f"{name}_conv": (layer.weight, layer.bias, before.mT)
            for name, layer, before in zip("qkv", self._convolutions(), state.conv, strict=False)
        }
        norm = getattr(self, self.norm_name)
        q, k, v = projected
        y = layer_step(
            self.op,
            q,
            k,
            v,
            state=state.memory,
            **convolutions,
            conv_activation=activation,
            norm_weight=norm.weight,
            norm_eps=torch.finfo(real_dtype(q)).eps if norm.eps is None else norm.eps,
            output_gate=self.output_gate(x),
            output_activation=self.output_activation,
            **self.projections(x),
        )
        return self.o_proj(y)

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
        return State(self._no_memory(like, N), conv, self._no_position(like, N))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, H={self.H}, HV={self.HV}, K={self.K}, V={self.V}"

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
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
        o = (F.rms_norm(o.to(real_dtype(o)), (self.V,), eps=norm.eps) * norm.weight).to(o.dtype)
        if gate is not None:
            o = o * ACTIVATIONS[self.output_activation](gate.unflatten(-1, (self.HV, self.V)))
        return self.o_proj(o.flatten(-2))

    def _no_memory(self, like: Tensor, N: int) -> Any:
        return like.new_zeros(N, self.HV, self.K, self.V, dtype=real_dtype(like))

    def _no_position(self, like: Tensor, N: int) -> Tensor | None:
        return None

    def _positions(
        self, x: Tensor, state: State | None, cut: Cut
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of each token, and after the last of each sequence."""
        return None, None


def share_of(name: str, size: int, expand: float, heads: int) -> int:
    """size * expand / heads, which must be a whole number."""
    share = size * expand / max(heads, 1)
    if share != int(share):
        raise ValueError(
            f"{name}: expected {size} * {name} to be a multiple of {heads}, got {expand}"
        )
    return int(share)


def real_dtype(x: Tensor) -> torch.dtype:
    """Of norms, gates and betas, never narrower than float32: a decay's error grows with T."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
