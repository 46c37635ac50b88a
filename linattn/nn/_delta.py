"""Blocks whose op has the delta rule: DeltaNet, Gated DeltaNet, DeltaProduct, Comba, KDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn import gates
from linattn.arrays import as_size
from linattn.composed import (
    comba,
    comba_step,
    gated_delta_product,
    gated_delta_product_step,
)
from linattn.features import l2norm
from linattn.nn._blocks import Block, Cut, decay_parameters, share_of, told


class DeltaNet(Block):
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
    conv_bias : bool
        Whether the short convolutions have biases.
    use_gate : bool
        Whether the output is gated by silu(x W_g).
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
        conv_bias: bool = False,
        use_gate: bool = False,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        K, V = (
            share_of(name, d_model, expand, num_heads)
            for name, expand in (("expand_k", expand_k), ("expand_v", expand_v))
        )
        super().__init__(
            d_model,
            num_heads,
            num_heads,
            K,
            V,
            conv_size,
            norm_eps,
            conv_bias=conv_bias,
            process_group=process_group,
        )
        self.b_proj = nn.Linear(d_model, num_heads, bias=False)
        if use_gate:
            self.g_proj = nn.Linear(d_model, num_heads * V, bias=False)

    def projections(self, x: Tensor) -> dict[str, Any]:
        return {"beta": self.b_proj(x), "sigmoid_beta": True, "qk_l2norm": True}


class GatedDeltaNet(Block):
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
    conv_bias : bool
        Whether the short convolutions have biases.
    use_gate : bool
        Whether the output is gated by silu(x W_g).
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

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
        conv_bias: bool = False,
        use_gate: bool = True,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = share_of("expand_v", head_dim, expand_v, 1)
        super().__init__(
            d_model,
            num_heads,
            HV,
            head_dim,
            V,
            conv_size,
            norm_eps,
            conv_bias=conv_bias,
            process_group=process_group,
        )
        self.a_proj = nn.Linear(d_model, HV, bias=False)
        self.b_proj = nn.Linear(d_model, HV, bias=False)
        self.A_log, self.dt_bias = decay_parameters(HV, HV, 1e-4)
        if use_gate:
            self.g_proj = nn.Linear(d_model, HV * V, bias=False)

    def projections(self, x: Tensor) -> dict[str, Any]:
        return {
            "g": self.a_proj(x),
            "decay": "softplus",
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "beta": self.b_proj(x),
            "sigmoid_beta": True,
            "qk_l2norm": True,
        }


class GatedDeltaProduct(Block):
    """Gated DeltaProduct: several writes of the delta rule in a token, for one decay and one read.

    It is :class:`GatedDeltaNet` with ``num_householder`` keys, values and betas for each token.

    Parameters
    ----------
    d_model : int
        The features of x and y.
    num_householder : int
        R, the writes of a token.
    num_heads : int
        Heads of queries and keys.
    head_dim : int
        K, the key dimension of a head.
    expand_v : float
        V = head_dim * expand_v, a whole number.
    num_v_heads : int, optional
        Heads of values, a multiple of num_heads; num_heads by default.
    use_forget_gate : bool
        False: nothing decays (DeltaProduct).
    allow_neg_eigval : bool
        beta is 2 sigmoid(x W), so that a write can turn the state's sign along its key.
    conv_size : int
        The inputs that a short convolution sees.
    conv_bias : bool
        Whether the short convolutions have biases.
    use_output_gate : bool
        Whether the output is gated by silu(x W_g).
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    TypeError
        num_householder is no int.
    ValueError
        A size is less than 1, V is not a whole number, or num_v_heads not a multiple of num_heads.

    References
    ----------
    Siems et al., 2025, *DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
    Products*, arXiv:2502.10297.

    Examples
    --------
    The writes of a token are further keys and values, and the state has one size for any number:

    >>> import torch
    >>> from linattn.nn import GatedDeltaProduct
    >>> layer = GatedDeltaProduct(16, num_householder=3, num_heads=2, head_dim=8)
    >>> y, state = layer(torch.randn(2, 10, 16))
    >>> tuple(layer.k_proj.weight.shape), tuple(state.memory.shape)  # [R H K,D], [N,HV,K,V]
    ((48, 16), (2, 2, 8, 16))
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_householder: int = 2,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2,
        num_v_heads: int | None = None,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = share_of("expand_v", head_dim, expand_v, 1)
        R = as_size("num_householder", num_householder, 1)
        super().__init__(
            d_model,
            num_heads,
            HV,
            head_dim,
            V,
            conv_size,
            norm_eps,
            R,
            conv_bias=conv_bias,
            process_group=process_group,
        )
        self.R, self.allow_neg_eigval, self.use_forget_gate = R, allow_neg_eigval, use_forget_gate
        self.b_proj = nn.Linear(d_model, R * HV, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(d_model, HV, bias=False)
            self.A_log, self.dt_bias = decay_parameters(HV, HV, 1e-4)
        if use_output_gate:
            self.g_proj = nn.Linear(d_model, HV * V, bias=False)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        beta = gates.beta(self.b_proj(x), self.allow_neg_eigval).unflatten(-1, (self.R, self.HV))
        decay = {}
        if self.use_forget_gate:
            decay["g"] = gates.softplus(self.a_proj(x), self.A_log, self.dt_bias)
        return {**decay, "beta": beta, "qk_l2norm": True, "num_householder": self.R}

    def run(self, cut: Cut, *arrays: Tensor, **options: Any) -> tuple[Tensor, Any]:
        q, k, v = arrays
        options["beta"] = options["beta"].flatten(1, 2)  # [B,T,R,...] as [B,TR,...]
        run = told(gated_delta_product, cut)
        done: tuple[Tensor, Any] = run(q, k.flatten(1, 2), v.flatten(1, 2), **options)
        return done

    def run_step(self, *arrays: Tensor, **options: Any) -> Tensor:
        return gated_delta_product_step(*arrays, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, R={self.R}"

    def _by_heads(self, projected: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = projected
        return (
            q.unflatten(-1, (self.H, self.K)),
            k.unflatten(-1, (self.R, self.H, self.K)),
            v.unflatten(-1, (self.R, self.HV, self.V)),
        )


class Comba(Block):
    """Comba: Gated DeltaNet with a prediction from the state before its decay, and corrected reads.

    ::

        p = sigmoid(decay) k;   q <- q - D p;   q, k, x = q, k, p of length 1
        S <- exp(g_t) S + beta_t k (v - S' x)',   y = (norm(S' q) * sigmoid(x_t W_g)) W_o

    decay and D are numbers for each head. Parameters have the names of flash-linear-attention's
    Comba, so that its state dicts load.

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
    use_output_correction : bool
        False: q is not corrected, and there is no D.
    use_inner_decay : bool
        False: p is k, and there is no decay.
    correction_factor : float
        Where D begins. The authors found 0.02 better for some small models.
    norm_x : bool
        False: x is sigmoid(decay) k with a k of length 1, as the paper has it. True is the authors'
        code: the norm takes the factor out of x again, and it acts on q alone.
    conv_size : int
        The inputs that a short convolution sees.
    conv_bias : bool
        Whether the short convolutions have biases.
    use_output_gate : bool
        Whether the output is gated by sigmoid(x W_g).
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

    Raises
    ------
    ValueError
        A size is less than 1, V is not a whole number, or num_v_heads not a multiple of num_heads.

    References
    ----------
    Hu et al., 2025, *Comba: Improving Bilinear RNNs with Closed-loop Control*, arXiv:2506.02475.

    Examples
    --------
    A prompt of nine tokens, then a step; its output is that of the tenth token of a longer call:

    >>> import torch
    >>> from linattn.nn import Comba
    >>> layer, x = Comba(16, num_heads=2, head_dim=8).double(), torch.randn(2, 10, 16).double()
    >>> y, state = layer(x[:, :9])
    >>> y_last = layer.step(x[:, 9], state)  # the state changes in place
    >>> torch.allclose(y_last, layer(x)[0][:, 9])
    True
    """

    output_activation = "sigmoid"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2,
        num_v_heads: int | None = None,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1,
        norm_x: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = share_of("expand_v", head_dim, expand_v, 1)
        super().__init__(
            d_model,
            num_heads,
            HV,
            head_dim,
            V,
            conv_size,
            norm_eps,
            conv_bias=conv_bias,
            process_group=process_group,
        )
        self.norm_x = norm_x
        self.use_inner_decay, self.use_output_correction = use_inner_decay, use_output_correction
        self.a_proj = nn.Linear(d_model, HV, bias=False)
        self.b_proj = nn.Linear(d_model, HV, bias=False)
        if use_inner_decay:
            self.decay = nn.Parameter(torch.ones(num_heads))
        if use_output_correction:
            self.D = nn.Parameter(torch.full((num_heads,), float(correction_factor)))
        self.A_log, self.dt_bias = decay_parameters(HV, HV, 1e-4)
        if use_output_gate:
            self.g_proj = nn.Linear(d_model, HV * V, bias=False)

    def arguments(self, x: Tensor) -> dict[str, Any]:
        return {
            "g": gates.softplus(self.a_proj(x), self.A_log, self.dt_bias),
            "beta": gates.beta(self.b_proj(x)),
            "qk_l2norm": True,
        }

    def run(self, cut: Cut, *arrays: Tensor, **options: Any) -> tuple[Tensor, Any]:
        done: tuple[Tensor, Any] = told(comba, cut)(*self._corrected(*arrays), **options)
        return done

    def run_step(self, *arrays: Tensor, **options: Any) -> Tensor:
        return comba_step(*self._corrected(*arrays), **options)

    def _corrected(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and x, of q and k before their norms."""
        share = self.decay.sigmoid()[:, None] if self.use_inner_decay else 1
        p = (share * k).to(k.dtype)
        if self.use_output_correction:
            q = (q - self.D[:, None] * p).to(q.dtype)
        return q, k, v, l2norm(p) if self.norm_x else (share * l2norm(k)).to(k.dtype)


class KimiDeltaAttention(Block):
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
    conv_bias : bool
        Whether the short convolutions have biases.
    norm_eps : float
        Of the norm of each head's output.
    process_group : ProcessGroup or DeviceMesh, optional
        The ranks that share the tokens of each row, by :mod:`linattn.distributed`.

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
    output_activation = "sigmoid"

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 16,
        head_dim: int = 128,
        expand_v: float = 1,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        process_group: Any = None,
    ) -> None:
        HV = num_heads if num_v_heads is None else num_v_heads
        V = share_of("expand_v", head_dim, expand_v, 1)
        super().__init__(
            d_model,
            num_heads,
            HV,
            head_dim,
            V,
            conv_size,
            norm_eps,
            conv_bias=conv_bias,
            process_group=process_group,
        )
        self.f_proj = nn.Sequential(
            nn.Linear(d_model, V, bias=False), nn.Linear(V, HV * head_dim, bias=False)
        )
        self.b_proj = nn.Linear(d_model, HV, bias=False)
        self.A_log, self.dt_bias = decay_parameters(HV, HV * head_dim, 1)
        self.g_proj = nn.Sequential(nn.Linear(d_model, V, bias=False), nn.Linear(V, HV * V))

    def projections(self, x: Tensor) -> dict[str, Any]:
        return {
            "g": self.f_proj(x),
            "decay": "softplus",
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "beta": self.b_proj(x),
            "sigmoid_beta": True,
            "qk_l2norm": True,
        }
