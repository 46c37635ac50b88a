"""The step of a whole layer in one call, for decoding.

A model's mixer has an op in its middle. Around the op there are short convolutions, gates made of
projections, and the norm and the gate of each head's output. In a step each of these makes a few
numbers, and most of the time goes to the calls. :func:`layer_step` is one call for all of them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from linattn import _elementwise as elementwise
from linattn import _linattn, gates, ops
from linattn.convolution import causal_conv1d_step
from linattn.features import cast, is_seen, is_tensor, wide
from linattn.variants import VARIANTS

__all__ = ["layer_step"]

Activation = Literal["silu", "sigmoid"] | None
Convolution = tuple[Any, Any, Any] | None

# Those whose step takes in the core what it takes here: no feature maps and normaliser, which are
# another argument there, and no decay per head, for which there are defaults.
_OPS = tuple(op for op, kind in VARIANTS.items() if not kind.normaliser and kind.decay != "head")
_ACTIVATIONS = {"silu": elementwise.silu, "sigmoid": elementwise.sigmoid}


def layer_step(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    state: Any,
    q_conv: Convolution = None,
    k_conv: Convolution = None,
    v_conv: Convolution = None,
    conv_activation: Literal["silu"] | None = "silu",
    g: Any = None,
    decay: Literal["softplus", "bounded", "rwkv7"] | None = None,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float = -5.0,
    weigh: bool = False,
    beta: Any = None,
    sigmoid_beta: bool = False,
    allow_neg_eigval: bool = False,
    norm_weight: Any = None,
    norm_eps: float = 1e-5,
    norm_groups: int | None = None,
    output_gate: Any = None,
    output_activation: Activation = "silu",
    gate_first: bool = False,
    **arguments: Any,
) -> Any:
    """One token of each of N sequences through a layer's mixer, from its projections to its output.

    ::

        q, k, v = conv(q), conv(k), conv(v)          causal_conv1d_step
        g = -exp(A_log) softplus(g + dt_bias)        gates.softplus, gates.bounded or gates.rwkv7
        beta = sigmoid(beta)                         gates.beta
        o = op_step(q, k, v, g=g, beta=beta)         by heads
        y = o / rms(o) * norm_weight * silu(output_gate)

    Mamba-2 is `simple_gla` with C, B and x in the places of q, k and v, and dt in that of g::

        dt = softplus(dt + dt_bias)                  weigh=True
        o = op_step(C, B, dt * x, g=-exp(A_log) dt, scale=1) + skip * x
        y = norm(o * silu(output_gate)) * norm_weight    gate_first=True

    Each stage but the step of the op is left out where its arguments are not given. Sums are in
    float32 (float64 for float64 q), and numbers between the stages have the dtypes that they have
    between the functions.

    Parameters
    ----------
    op : str
        The name of an op, such as "gated_delta_rule": any but `linear_attention`, `retention` and
        `lightning_attention`.
    q, k : array [N,H*K]
        Of one dtype, as projections make them.
    v : array [N,HV*V]
    state : array [N,HV,K,V], or a pair
        The state of the op, which is updated in place. Its shape says what K and V are.
    q_conv, k_conv, v_conv : (weight [D,W], bias [D] or None, state [N,D,W-1]), optional
        The short convolution of q, k or v, whose D channels are those of that array. The state may
        hold older inputs too, as that of :func:`linattn.causal_conv1d_step`. The weight may
        be [D,1,W], as torch.nn.Conv1d has it. The state is updated in place, as
        :func:`linattn.causal_conv1d_step` does it.
    conv_activation : "silu" or None
        Of the convolutions.
    g : array [N,HV], or [N,HV*K] for a decay per key, optional
        The LOG of the decay; with `decay` the projection that it is made of.
    decay : "softplus", "bounded", "rwkv7" or None
        The function of :mod:`linattn.gates` that makes g.
    A_log : array [HV], optional
    dt_bias : array [HV], or [HV*K] for a decay per key, optional
    lower_bound : float
        Of "bounded", below 0.
    weigh : bool
        v is multiplied by softplus(g + dt_bias) before it is written, as by Mamba-2's time step.
        Of `simple_gla` and decay="softplus".
    beta : array [N,HV], optional
        With `sigmoid_beta` the projection that it is made of.
    sigmoid_beta : bool
        beta <- sigmoid(beta).
    allow_neg_eigval : bool
        With `sigmoid_beta`, beta <- 2 sigmoid(beta).
    norm_weight : array [V] or [HV*V], optional
        Of the root mean square norm of the output. None: no norm.
    norm_eps : float
        Added to the mean of the squares.
    norm_groups : int, optional
        A divisor of HV*V: so many groups of neighbouring numbers are normed, each by itself.
        norm_weight is then [HV*V]. None or HV: each head is a group.
    output_gate : array [N,HV*V], optional
        The output is multiplied by it, after `output_activation`.
    output_activation : "silu", "sigmoid" or None
    gate_first : bool
        The output is multiplied by the gate before its norm.
    **arguments
        Further arguments of the op's step but `out`: scale, qk_l2norm, state_v_first, alpha,
        state_indices (which pick the convolutions' states too), x, eta and so on. `simple_gla`
        also has weight [N,HV], a factor of what is written, and skip [HV]: o + scale skip v.

    Returns
    -------
    y : array [N,HV*V]
        The dtype of v.

    Raises
    ------
    TypeError
        An argument is no array, or has another dtype; or the op has no such argument.
    ValueError
        A shape does not fit, or a state shares memory with another array.
    MemoryError
        There is no memory for the result or the scratch. On a CPU no state has changed then.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.nn : Layers whose step is this function.

    Notes
    -----
    Tensors that torch.compile or a transform of PyTorch looks at go through the functions one by
    one.

    References
    ----------
    Yang et al., 2024, *Gated Delta Networks*, arXiv:2412.06464; Kimi Team, 2025, *Kimi Linear*,
    arXiv:2510.26692.

    Examples
    --------
    A head of 4 keys and values, with a convolution of q over two tokens:

    >>> import numpy as np, linattn
    >>> q, k, v = (np.ones((1, 4)) for _ in range(3))
    >>> state, before = np.zeros((1, 1, 4, 4)), np.zeros((1, 4, 1))
    >>> y = linattn.layer_step(
    ...     "gated_delta_rule", q, k, v, state=state, q_conv=(np.ones((4, 2)), None, before),
    ...     g=np.zeros((1, 1)), decay="softplus", A_log=np.zeros(1),
    ...     beta=np.zeros((1, 1)), sigmoid_beta=True, norm_weight=np.ones(4), qk_l2norm=True)
    >>> y.shape, before.ravel().tolist()  # the convolution remembers q
    ((1, 4), [1.0, 1.0, 1.0, 1.0])
    >>> y.round(3).ravel().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if op not in _OPS:
        raise ValueError(f"op: expected one of {', '.join(_OPS)}, got {op!r}")
    if decay is None and (A_log is not None or dt_bias is not None):
        raise ValueError("A_log, dt_bias: expected decay= beside them, got decay=None")
    if decay is not None and arguments.get("alpha") is not None:
        raise ValueError("alpha: expected g in its place, the projection that decay= is for")
    given = {"g": g, "beta": beta}
    arguments |= {name: x for name, x in given.items() if x is not None}
    convolutions = q_conv, k_conv, v_conv
    if weigh and decay is None:
        raise ValueError("weigh: expected decay='softplus' beside it, got decay=None")
    norm = norm_weight, norm_eps, output_gate, output_activation, gate_first, norm_groups
    curve = None
    if decay is not None:
        curve = decay, _factor_of(decay, lower_bound), A_log, dt_bias, weigh
    if is_tensor(q) and is_seen(q):
        _check_word("conv_activation", conv_activation, ("silu",))
        _check_word("output_activation", output_activation, tuple(_ACTIVATIONS))
        _check_weights(op, v, state, weigh, decay, arguments)
        _check_norm(v, state, arguments.get("state_v_first"), *norm)
        slots = arguments.get("state_indices")
        q, k, v = _convolved((q, k, v), convolutions, conv_activation, slots)
        arguments |= {
            "decay": decay,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "lower_bound": lower_bound,
            "weigh": weigh,
            "sigmoid_beta": sigmoid_beta,
            "allow_neg_eigval": allow_neg_eigval,
        }
        return _normed(_op_step(op, q, k, v, state, arguments), *norm)
    most = (2.0 if allow_neg_eigval else 1.0) if sigmoid_beta else None
    stages = (*convolutions, conv_activation, curve, most, norm)
    return _linattn.layer_step(stages, op, q, k, v, state=state, **arguments)


def _check_word(name: str, word: object, words: tuple[str, ...]) -> None:
    """As the core does it."""
    if word is None or (isinstance(word, str) and word in words):
        return
    kind = ValueError if isinstance(word, str) else TypeError
    expected = ", ".join(("None", *map(repr, words[:-1]))) + f" or {words[-1]!r}"
    raise kind(f"{name}: expected {expected}, got {word!r}")


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected True or False, got {flag!r}")


def _check_shape(name: str, x: Any, letters: str, *shapes: tuple[int, ...]) -> None:
    if x is None:
        return
    # number by number, since a tracer's sizes may be symbols
    fits = [
        x.dim() == len(shape) and all(n == m for n, m in zip(x.shape, shape, strict=True))
        for shape in shapes
    ]
    if not any(fits):
        raise ValueError(f"{name}: expected {letters}, got {tuple(x.shape)}")


def _check_weights(
    op: str, v: Any, state: Any, weigh: Any, decay: Any, arguments: dict[str, Any]
) -> None:
    """Of what is written, and of v in the read; as the core does it."""
    _check_flag("weigh", weigh)
    weighs = VARIANTS[op].decay == "token" and VARIANTS[op].rule == "additive"
    weight, skip = (arguments.get(name) for name in ("weight", "skip"))
    if weigh and not weighs:
        raise ValueError(f"weigh: expected False, since the writes of {op} have no weights")
    if weigh and decay != "softplus":
        raise ValueError("weigh: expected decay='softplus' beside it")
    if weigh and weight is not None:
        raise ValueError("weigh: expected False beside weight")
    for name, x in (("weight", weight), ("skip", skip)):
        if x is not None and not weighs:
            raise TypeError(f"{op}: no argument of its step is called '{name}'")
    if weighs:
        N, HV = v.shape[0], state.shape[1]
        _check_shape("weight", weight, "[N,HV]", (N, HV))
        _check_shape("skip", skip, "[HV]", (HV,))


def _check_norm(
    v: Any,
    state: Any,
    v_first: Any,
    weight: Any,
    eps: Any,
    gate: Any,
    activation: Any,
    gate_first: Any,
    groups: Any,
) -> None:
    """As the core does it."""
    S = state[0] if isinstance(state, tuple | list) else state
    HV, V = S.shape[1], S.shape[2 if v_first else 3]
    _check_flag("gate_first", gate_first)
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"norm_eps: expected a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"norm_eps: expected a finite number >= 0, got {eps!r}")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int)):
        raise TypeError(f"norm_groups: expected an int or None, got {type(groups).__name__}")
    if groups is not None and groups < 1:
        raise ValueError(f"norm_groups: expected at least 1, got {groups}")
    if groups is not None and HV * V % groups:
        raise ValueError(f"norm_groups: expected a divisor of HV*V = {HV * V}, got {groups}")
    by_head = groups is None or groups == HV
    shapes = ((HV * V,), (V,)) if by_head else ((HV * V,),)
    _check_shape("norm_weight", weight, "[V] or [HV*V]" if by_head else "[HV*V]", *shapes)
    _check_shape("output_gate", gate, "[N,HV*V]", (v.shape[0], HV * V))


def _factor_of(decay: str, lower_bound: float) -> float:
    if not isinstance(decay, str):
        raise TypeError(f"decay: expected a str or None, got {type(decay).__name__}")
    factors = {"softplus": -1.0, "rwkv7": -math.exp(-0.5)}
    if decay == "bounded":
        return gates.checked_bound(lower_bound)
    if decay not in factors:
        raise ValueError(f"decay: expected {', '.join(factors)}, bounded or None, got {decay!r}")
    return factors[decay]


def gated(arguments: dict[str, Any], heads: int, by_key: bool) -> dict[str, Any]:
    """The arguments of an op, of those of :func:`layer_step`: g and beta as the op takes them.

    Projections may have further axes in front, which are those of a sequence.
    """
    arguments = dict(arguments)
    decay, A_log, dt_bias, lower_bound = (
        arguments.pop(name, None) for name in ("decay", "A_log", "dt_bias", "lower_bound")
    )
    for name in ("g", "alpha"):
        gate = arguments.get(name)
        if by_key and gate is not None:
            keys = gate.shape[-1] // heads
            arguments[name] = gate.reshape(*gate.shape[:-1], heads, keys)
            A_log = A_log if A_log is None else A_log[:, None]
            dt_bias = dt_bias if dt_bias is None else dt_bias.reshape(heads, keys)
    g = arguments.get("g")
    weigh = arguments.pop("weigh", False)
    if weigh or (decay == "softplus" and A_log is None):
        u = wide(g) if dt_bias is None else wide(g) + wide(dt_bias)
        step = elementwise.softplus(u)
    if weigh:
        arguments["weight"] = step
    if decay == "softplus" and A_log is None:
        g = -step
    elif decay == "softplus":
        g = gates.softplus(g, A_log, dt_bias)
    elif decay == "bounded":
        g = gates.bounded(g, A_log, dt_bias, lower_bound)
    elif decay == "rwkv7":
        g = gates.rwkv7(g)
    if g is not None:
        arguments["g"] = g
    negative = arguments.pop("allow_neg_eigval", False)
    if arguments.pop("sigmoid_beta", False):
        arguments["beta"] = gates.beta(arguments["beta"], negative)
    return arguments


# ---- the stages one by one ----


def _convolved(
    rows: tuple[Any, ...], convolutions: tuple[Convolution, ...], activation: Any, slots: Any
) -> list[Any]:
    done = list(rows)
    for i, convolution in enumerate(convolutions):
        if convolution is not None:
            weight, bias, before = convolution
            done[i] = causal_conv1d_step(
                rows[i],
                weight.reshape(weight.shape[0], weight.shape[-1]),
                bias,
                state=before,
                state_indices=slots,
                activation=activation,
            )
    return done


def _op_step(op: str, q: Any, k: Any, v: Any, state: Any, arguments: dict[str, Any]) -> Any:
    """o [N,HV,V]."""
    S = state[0] if isinstance(state, tuple | list) else state
    HV, K, V = S.shape[1:]
    if arguments.get("state_v_first"):
        K, V = V, K
    q, k, v = (x.reshape(x.shape[0], -1, size) for x, size in ((q, K), (k, K), (v, V)))
    arguments = gated(arguments, HV, VARIANTS[op].decay == "key")
    weight, skip = (arguments.pop(name, None) for name in ("weight", "skip"))
    written = v if weight is None else cast(wide(v) * wide(weight)[..., None], v.dtype)
    o = getattr(ops, f"{op}_step")(q, k, written, state=state, **arguments)
    if skip is None:
        return o
    scale = arguments.get("scale")
    part = wide(skip)[:, None] * wide(v) * (K**-0.5 if scale is None else scale)
    return cast(wide(o) + part, o.dtype)


def _normed(
    o: Any,
    weight: Any,
    eps: float,
    gate: Any,
    activation: Activation,
    gate_first: bool,
    groups: int | None,
) -> Any:
    """o [N,HV,V] -> y [N,HV*V]."""
    N, HV, V = o.shape
    factor = None
    if gate is not None:
        u = wide(gate)
        factor = u if activation is None else _ACTIVATIONS[activation](u)
    y = wide(o).reshape(N, HV * V)
    if factor is not None and gate_first:
        y = y * factor
    if weight is not None:
        rows = y.reshape(N, HV if groups is None else groups, -1)
        squares = (rows * rows).sum(-1)[..., None]
        rows = rows / (squares / rows.shape[-1] + eps) ** 0.5
        of_head = groups in (None, HV) and weight.shape[0] == V
        y = (rows * wide(weight) if of_head else rows).reshape(N, HV * V)
        y = y if of_head else y * wide(weight)
    if factor is not None and not gate_first:
        y = y * factor
    return cast(y, o.dtype)
