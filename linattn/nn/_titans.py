"""Titans' block: a linear memory with momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linattn import gates
from linattn._elementwise import logsigmoid
from linattn.arrays import as_size
from linattn.nn import _batches
from linattn.nn._blocks import (
    Block,
    Cut,
    State,
    is_shared,
    no_position,
    positions,
    real_dtype,
    share_of,
)


class Titans(Block):
    """Titans' memory as a layer, with a linear memory: the delta rule with momentum and decay.

    ::

        q, k, v = silu(conv(x W));   q and k of length 1
        theta, eta, alpha = sigmoid(x W + b), a number each for a token and a head
        Y <- eta Y + theta k (v - M0' k)';   M <- (1 - alpha) M + Y
        y = (norm(M' q) * silu(x W_g)) W_o

    M0 is the memory that the first token of a batch finds. With batches of one token it is M. The
    paper has deeper memories too, and persistent tokens in front of the sequence. The latter
    are the caller's.

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
    batch : int
        The tokens that predict from one memory, M0. The paper trains with more than one. Batches
        begin with the sequence. A call, or a step, goes on within the batch that its state left
        open.
    conv_size : int or None
        The inputs that a short convolution sees. With None there is no convolution and no silu.
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        batch is no int.
    ValueError
        A size is less than 1, V is not a whole number, or num_v_heads not a multiple of num_heads.

    Notes
    -----
    theta and eta begin near 1/2. alpha begins near 2**-4 in the first head and 2**-9 in the last:
    heads forget within 16 to 512 tokens. The paper does not say where they begin.

    With batches of several tokens a state has the three (M, Y, M0), and a position, the number of
    tokens so far. M0 is M where no batch is open. A call with ``cu_seqlens`` or a state reads on
    the host how many tokens end open batches. On a GPU it waits for that. A step reads nothing on
    the host.

    References
    ----------
    Behrouz et al., 2025, *Titans: Learning to Memorize at Test Time*, arXiv:2501.00663.

    Examples
    --------
    The state is a pair, the memory and its momentum:

    >>> import torch
    >>> from linattn.nn import Titans
    >>> layer, x = Titans(16, num_heads=2, head_dim=8).double(), torch.randn(3, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> M, Y = state.memory  # [N,HV,K,V] each
    >>> tuple(M.shape), tuple(Y.shape)
    ((3, 2, 8, 8), (3, 2, 8, 8))
    >>> y_last = layer.step(x[:, 9], state)  # both change in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True

    In batches of four tokens the third batch is open after nine. The step goes on in it:

    >>> layer = Titans(16, num_heads=2, head_dim=8, batch=4).double()
    >>> y, state = layer(x[:, :9])
    >>> M, Y, M0 = state.memory
    >>> torch.allclose(M0, layer(x[:, :8])[1].memory[0])
    True
    >>> y_last = layer.step(x[:, 9], state)
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    """

    op = "titans"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        head_dim: int = 128,
        expand_v: float = 1,
        num_v_heads: int | None = None,
        batch: int = 1,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = share_of("expand_v", head_dim, expand_v, 1)
        super().__init__(
            d_model, num_heads, HV, head_dim, V, conv_size, norm_eps, process_group=process_group
        )
        self.batch = as_size("batch", batch, 1)
        self.theta_proj = nn.Linear(d_model, HV)
        self.eta_proj = nn.Linear(d_model, HV)
        self.alpha_proj = nn.Linear(d_model, HV)
        self.g_proj = nn.Linear(d_model, HV * V, bias=False)
        nn.init.zeros_(self.theta_proj.bias)
        nn.init.zeros_(self.eta_proj.bias)
        with torch.no_grad():  # sigmoid(b) is nearly exp(b)
            self.alpha_proj.bias.copy_(-math.log(2) * torch.linspace(4, 9, HV))

    def arguments(self, x: Tensor) -> dict[str, Any]:
        return {
            "beta": gates.beta(self.theta_proj(x)),
            "eta": gates.beta(self.eta_proj(x)),
            "g": logsigmoid(-self.alpha_proj(x).to(real_dtype(x))),  # log(1 - alpha)
            "scale": 1.0,
            "qk_l2norm": True,
        }

    def run_from(
        self, state: State | None, cut: Cut, *arrays: Tensor, **options: Any
    ) -> tuple[Tensor, Any]:
        if self.batch == 1:
            return super().run_from(state, cut, *arrays, **options)
        if is_shared(cut):
            raise ValueError(
                f"batch: expected 1 where ranks share the tokens, got {self.batch}; "
                "linattn.distributed.titans takes whole batches"
            )
        tokens = self._tokens(arrays, options)
        return _batches.forward(tokens, state, cut, self.batch, **options)

    def run_step_from(self, state: State, *arrays: Tensor, **options: Any) -> Tensor:
        if self.batch == 1:
            return super().run_step_from(state, *arrays, **options)
        return _batches.step(self._tokens(arrays, options), state, self.batch, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, batch={self.batch}"

    def _tokens(self, arrays: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Tensor]:
        """q, k, v and what else has a row for each token, taken out of the options."""
        gates_of = {name: options.pop(name) for name in ("beta", "eta", "g")}
        return dict(zip("qkv", arrays, strict=True)) | gates_of

    def _no_memory(self, like: Tensor, N: int) -> Any:
        return tuple(super(Titans, self)._no_memory(like, N) for _ in range(2 + (self.batch > 1)))

    def _no_position(self, like: Tensor, N: int) -> Tensor | None:
        return None if self.batch == 1 else no_position(like, N)

    def _positions(
        self, x: Tensor, state: State | None, cut: Cut
    ) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.batch == 1 else positions(x, state, cut)
