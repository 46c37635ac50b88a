"""PyTorch modules that call linattn, as ONNX models with the operators of its opset 27.

::

    import torch, linattn.onnx
    from linattn import nn

    layer = nn.GatedDeltaNet(64, num_heads=2, head_dim=16)
    x = torch.randn(2, 10, 64)  # an example: the model takes any B and T
    linattn.onnx.export(layer, (x, layer.zeros_state(2)), "layer.onnx")

An op becomes ONNX's ``LinearAttention``, and a short convolution ``CausalConvWithState``. Norms,
gates, feature maps and denominators become ONNX's plain operators. A state is an input, and the
next one an output, so that one model reads a prompt and then goes on token by token. A call that
ONNX's operators cannot say is refused with an error that names the argument.

It needs PyTorch and the packages onnx and onnxscript. ONNX Runtime 1.32 runs the models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from linattn import gates
from linattn.features import FEATURE_MAPS, FeatureMap, apply_feature_map, l2norm
from linattn.variants import OPS, VARIANTS

if TYPE_CHECKING:
    import torch

__all__ = ["export"]

OPSET = 27  # of LinearAttention and CausalConvWithState
BELOW = 25  # what PyTorch's exporter writes
# Of the operators that opsets 26 and 27 changed, what PyTorch's exporter can write: Range takes
# more types than before.
SAME = frozenset({"Range"})
ATTENTION, CONVOLUTION = "LinearAttention", "CausalConvWithState"
DOMAIN = "linattn"  # until the model is written
DOMAINS = ("", "com.microsoft")

# The arrays that _linear_attention uses. A call with another one is refused.
_KNOWN = {"q", "k", "v", "g", "beta", "weight", "skip", "value_gate"}
_KNOWN |= {"initial_state", "initial_state_second"}
# Why ONNX's LinearAttention does not have a rule.
_NO_RULE = {
    "dplr": "its delta rule writes and looks up one key",
    "bonus": "it reads after the write, and has no bonus",
    "pair": "it has no momentum",
}


def _symbolic(
    name: str, inputs: list[Any], attributes: dict[str, Any], *results: tuple[Any, ...]
) -> Any:
    """An operator of ONNX's; results: dtype and shape of each."""
    import torch

    dtypes, shapes = zip(*results, strict=True)
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", inputs, attributes, dtypes=dtypes, shapes=shapes, version=1
    )


def _fault(operator: str, given: Mapping[str, Any]) -> str | None:
    """What a call has that this operator of ONNX's does not, in the words of an error."""
    for name in ("cu_seqlens", "x"):
        if name in given and given[name] is not None and (operator, name) != (CONVOLUTION, "x"):
            return f"{name}: not supported by ONNX's {operator}, got a tensor"
    name, first = next((name, given[name]) for name in ("q", "x") if name in given)
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype != "float32":
        return f"{name}: expected float32 for ONNX's {operator}, got {dtype}"
    if operator == CONVOLUTION:
        return None
    for name, one in given.items():
        if hasattr(one, "dtype") and name not in _KNOWN:
            return f"{name}: not supported by ONNX's {operator}, got a tensor"
    if first.dim() != 4:
        return f"q: expected [B,T,H,K] for ONNX's {operator}, got {tuple(first.shape)}"
    if given["scale"] == 0:
        return f"scale: expected another number than 0, which means K**-0.5 in ONNX's {operator}"
    if given["features"] is not None and not _Features(*given["features"]).causal:
        return f"causal: expected True for ONNX's {operator}, got False"
    return None


# ---- an op of the table ----


class _Features(NamedTuple):
    """Linear attention's options, as its operator has them."""

    map_q: float
    eps_q: float
    map_k: float
    eps_k: float
    normaliser: float
    eps: float
    causal: float


def _mapped(x: Any, code: float, eps: float) -> Any:
    name = FEATURE_MAPS[int(code)]
    return apply_feature_map(x, FeatureMap(name, eps=eps) if name == "relu+eps" else name)


def _log_decay(op: str, given: Mapping[str, Any]) -> Any:
    """[B,T,HV*K] or [B,T,HV], or None: natural logs, whatever the decay was given as."""
    decay = VARIANTS[op].decay
    if decay == "none":
        return None
    g, q, HV = given["g"], given["q"], given["v"].shape[2]
    if given["gate"] == "slopes":
        g = -g
    elif given["gate"] in ("alpha", "gamma"):
        g = g.log()
    if decay == "head":
        g = g.expand(*q.shape[:2], HV)
    return g.to(q.dtype).flatten(2)


def _linear_attention(op: str, names: tuple[str, ...], *arguments: Any) -> tuple[Any, Any, Any]:
    """linattn::<op> by ONNX's LinearAttention."""
    import torch

    given = dict(zip(names, arguments, strict=True))
    variant = VARIANTS[op]
    q, k, v, beta = (given[name] for name in ("q", "k", "v", "beta"))
    state, features = given["initial_state"], given["features"]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    scale = K**-0.5 if given["scale"] is None else given["scale"]
    if given["qk_l2norm"]:
        q, k = l2norm(q), l2norm(k)
    passed = None if given["skip"] is None else scale * given["skip"][:, None] * v
    if given["weight"] is not None:
        v = given["weight"][..., None] * v
    if given["value_gate"] is not None:
        v = given["value_gate"] * v
    z = None
    if features is not None:
        how = _Features(*features)
        q, k = _mapped(q, how.map_q, how.eps_q), _mapped(k, how.map_k, how.eps_k)
        if how.normaliser:  # the sum of the keys is what values of 1 give
            z, v = how, torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if HV > H:  # ONNX shares a state among heads of q, and linattn a key among states
        q, k = (x[:, :, :, None].expand(B, T, H, HV // H, K).flatten(2, 3) for x in (q, k))
    if state is not None:
        state = state.transpose(2, 3) if given["state_v_first"] else state
        if z is not None:
            state = torch.cat([state, given["initial_state_second"][..., None]], -1)
    decay = _log_decay(op, given)
    rule = {"additive": "linear", "delta": "delta"}[variant.rule]
    if decay is not None:
        rule = "gated" if rule == "linear" else "gated_delta"
    o, S = _symbolic(
        ATTENTION,
        [q.flatten(2), k.flatten(2), v.flatten(2), state, decay, beta],
        {"q_num_heads": HV, "kv_num_heads": HV, "update_rule": rule, "scale": float(scale)},
        (q.dtype, (B, T, HV * v.shape[3])),
        (q.dtype, (B, HV, K, v.shape[3])),
    )
    o = o.unflatten(2, (HV, v.shape[3]))
    last = q.new_empty(0)
    if z is not None:
        den, last = o[..., V:], S[..., V]
        o = o[..., :V] / (den.clamp(min=z.eps) if z.normaliser == 1 else den + z.eps)
        S = S[..., :V]
    if passed is not None:
        o = o + passed
    return o, S.transpose(2, 3) if given["state_v_first"] else S, last


# ---- the other operators ----


def _convolution(
    x: Any, weight: Any, bias: Any, cu_seqlens: Any, state: Any, activation: Any, final: bool
) -> tuple[Any, Any]:
    """linattn::convolve_causal by ONNX's CausalConvWithState, which has the channels first."""
    (B, T, D), W = x.shape, weight.shape[1]
    y, last = _symbolic(
        CONVOLUTION,
        [x.transpose(1, 2), weight[:, None], bias, state],
        {"activation": "none" if activation is None else "silu"},
        (x.dtype, (B, D, T)),
        (x.dtype, (B, D, W - 1)),
    )
    return y.transpose(1, 2), last


def _table() -> dict[Any, Callable[..., Any]]:
    """By PyTorch's operator, what ONNX has in its place, made of tensors."""
    import torch

    from linattn import _recorded_gates, _recorded_rooms, autograd  # noqa: F401

    own = torch.ops.linattn
    found: dict[Any, Callable[..., Any]] = {
        own.convolve_causal.default: _convolution,
        own.gate.default: gates.by_formula,
    }
    for op in OPS:
        if VARIANTS[op].rule not in _NO_RULE and VARIANTS[op].decay not in _NO_RULE:
            operator = getattr(own, op).default
            names = tuple(argument.name for argument in operator._schema.arguments)
            found[operator] = partial(_linear_attention, op, names)
    return found


def _refuse_others(program: Any, table: Mapping[Any, Any]) -> None:
    """Raise for a call of an operator of linattn's that ONNX has no operator for."""
    import torch

    for node in program.graph_module.graph.nodes:
        for target in (node.target, *node.args):  # a step is an argument of another operator
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "linattn":
                said = _said_of(target, node, table)
                if said is not None:
                    raise ValueError(said)


def _said_of(target: Any, node: Any, table: Mapping[Any, Any]) -> str | None:
    """Why a call cannot be exported; None if it can."""
    name = target._schema.name.partition("::")[2]
    if target in table:
        if name not in OPS and table[target] is not _convolution:
            return None
        names = [argument.name for argument in target._schema.arguments]
        values = [getattr(a, "meta", {}).get("val", a) for a in node.args]
        operator = ATTENTION if name in OPS else CONVOLUTION
        return _fault(operator, dict(zip(names, values, strict=True)))
    if name.endswith("_step"):
        return (
            f"{name}: a step changes its state in place, which ONNX cannot; export the forward "
            "pass with a state, which takes one token too"
        )
    if name in OPS:
        why = _NO_RULE.get(VARIANTS[name].rule) or _NO_RULE[VARIANTS[name].decay]
        return f"{name}: not supported by ONNX's {ATTENTION}: {why}"
    return f"{name}: ONNX has no operator for it"


# ---- the model ----


def _is_layer(module: Any) -> bool:
    """Is it a layer of linattn.nn's, with a state that is given and returned?"""
    return type(module).__module__.startswith("linattn.nn.")


def _sizes(args: tuple[Any, ...]) -> Any:
    """Any number of sequences and of tokens, of a layer's arguments: x, and perhaps a state."""
    import torch
    from torch.utils import _pytree as pytree

    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")

    def of_state(a: Any) -> Any:
        return {0: batch} if isinstance(a, torch.Tensor) else None

    return ({0: batch, 1: tokens}, *(pytree.tree_map(of_state, a) for a in args[1:]))


def _names(program: Any) -> list[str]:
    """y, and next_memory, next_conv_0, ... for the parts of a layer's state."""
    from torch.utils import _pytree as pytree

    nodes = program.graph_module.graph.output_node().args[0]
    spec = program.call_spec.out_spec
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(nodes), spec))
    names = []
    for path, node in paths:
        words = [str(getattr(key, "name", getattr(key, "idx", ""))) for key in path]
        words = ["next", *words[1:]] if words[:1] == ["1"] else ["y", *words[1:]]
        if node is not None:
            names.append("_".join(words))
    return names


def _settle(model: Any, domain: str) -> None:
    """Give the operators of our domain the one that was asked for.

    For ONNX's own the whole model becomes one of opset 27, where its other operators mean the same.
    """
    import onnx

    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            node.domain, node.version = domain, None
        elif domain == "" and node.domain == "" and node.op_type not in SAME:
            newest = onnx.defs.get_schema(node.op_type, OPSET, "")
            if newest.since_version > BELOW:
                raise ValueError(
                    f"{node.op_type}: changed by ONNX's opset {newest.since_version}, and PyTorch "
                    f"wrote it for opset {BELOW}"
                )
    model.opset_imports.pop(DOMAIN, None)
    if domain == "":
        model.opset_imports[""] = OPSET
    else:
        model.opset_imports[domain] = 1


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    f: str | os.PathLike[str] | None = None,
    *,
    domain: str = "",
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    **options: Any,
) -> Any:
    """A module that calls linattn, as an ONNX model.

    The ops with an additive rule or a delta rule become ``LinearAttention``: with a decay or none,
    by heads or by keys, and with linear attention's denominators. :func:`linattn.causal_conv1d`
    becomes ``CausalConvWithState``. Everything else of the module is PyTorch's to export.

    Parameters
    ----------
    module : torch.nn.Module
        A layer of :mod:`linattn.nn`, or a model that has some, in float32.
    args : tuple
        Example arguments. A layer takes (x,), or (x, state) for a model that goes on from a state.
    f : path, optional
        Where the model is written.
    domain : "" or "com.microsoft"
        Whose operators: ONNX's own, of opset 27, or those of the same names and meaning that ONNX
        Runtime has kernels for. It runs ONNX's own LinearAttention by its definition, a loop over
        tokens, which takes longer.
    dynamic_shapes : optional
        Which sizes may vary, as in ``torch.export.export``. By default the sequences and tokens of
        a layer of linattn.nn, so an example needs two tokens or more, and nothing of other modules.
    input_names, output_names : list of str, optional
        A layer of linattn.nn has the outputs y, next_memory, next_conv_0, ... by default.
    **options
        For ``torch.onnx.export``.

    Returns
    -------
    torch.onnx.ONNXProgram

    Raises
    ------
    ImportError
        onnx or onnxscript is missing.
    ValueError
        The module calls what ONNX's operators cannot say: another rule (that of RWKV-6, RWKV-7 or
        Titans), a scan, a step, packed sequences (``cu_seqlens``), a key ``x`` of its own,
        ``causal=False``, or another dtype than float32. Or ``domain`` is another.

    References
    ----------
    ONNX, *Operator Schemas*, LinearAttention-27 and CausalConvWithState-27.

    Examples
    --------
    What ONNX has no rule for is refused:

    >>> import torch, linattn.onnx
    >>> from linattn.nn import RWKV6
    >>> layer = RWKV6(16, num_heads=2)
    >>> linattn.onnx.export(layer, (torch.zeros(2, 10, 16),))
    Traceback (most recent call last):
        ...
    ValueError: rwkv6: not supported by ONNX's LinearAttention: it reads after the write, and has \
no bonus
    """
    import torch
    from torch.utils import _pytree as pytree

    # of a part of a larger tensor, torch.export would take the strides for a rule
    args = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, args)
    if domain not in DOMAINS:
        raise ValueError(f"domain: expected '' or 'com.microsoft', got {domain!r}")
    ours = _is_layer(module)
    if dynamic_shapes is None and ours:
        dynamic_shapes = _sizes(args)
    program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
    table = _table()
    _refuse_others(program, table)
    program = program.run_decompositions(table)
    if output_names is None and ours:
        output_names = _names(program)
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=BELOW,
        input_names=input_names,
        output_names=output_names,
        verbose=False,
        **options,
    )
    assert made is not None  # dynamo=True
    _settle(made.model, domain)
    if f is not None:
        made.save(f)
    return made
