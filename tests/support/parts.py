"""Calls of DTensors: arrays of which each rank of a mesh has a part. Ranks import this module."""

import numpy as np

import linattn
from linattn.variants import ARRAYS
from support.recorded import inputs, weights
from support.tensors import tensors_in, torch

SIZES = {"B": 2, "T": 5, "H": 2, "HV": 4, "K": 3, "V": 3}
LETTERS = {line.label: line.letters for line in ARRAYS}
AXES = {"rows": "BN", "heads": "hH"}


def mesh_of(group):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu")


def placed(x, mesh, letters, axes, grad=True):
    """x as a DTensor that is cut along the first of its axes that is among these."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cut = next((i for i, letter in enumerate(letters) if letter in axes), None)
    where = Replicate() if cut is None else Shard(cut)
    return distribute_tensor(x.detach(), mesh, [where]).requires_grad_(grad)


def letters_of(op, name):
    """The axes of an array, or of a gate under its keyword."""
    from linattn import autograd

    gate = "g" if name in ("alpha", "gamma", "slopes") else name
    return autograd._LETTERS[op, 4].get(gate, LETTERS[gate])


def differences(call, whole, parts):
    """The largest difference of the outputs, that of the gradients, and what was communicated."""
    from torch.distributed.tensor.debug import CommDebugMode

    want = tensors_in(call(**whole))
    want_d = torch.autograd.grad(want, tensors_in(whole), [torch.ones_like(y) for y in want])
    with CommDebugMode() as counted:
        got = tensors_in(call(**parts))
        got_d = torch.autograd.grad(got, tensors_in(parts), [torch.ones_like(y) for y in got])

    def largest(some, others):
        return max(
            float((x - y.full_tensor()).abs().max()) for x, y in zip(some, others, strict=True)
        )

    return largest(want, got), largest(want_d, got_d), sum(counted.get_comm_counts().values())


def op_by_parts(group, op, how):
    x = inputs(op, np.random.default_rng(0), grad=True, **SIZES)
    mesh = mesh_of(group)
    parts = {}
    for name, given in x.items():
        letters = letters_of(op, name)
        pair = isinstance(given, tuple)
        found = [placed(y, mesh, letters, AXES[how]) for y in (given if pair else (given,))]
        parts[name] = tuple(found) if pair else found[0]

    def call(**given):
        return getattr(linattn, op)(**given, output_final_state=True)

    return differences(call, x, parts)


# A room's call: the function, the letters of its arrays, the groups of channels.
ROOMS = {
    "scan": ("selective_scan", "BTD BTD DN BTGN BTGN D BTD D SDN", 2),
    "scan of one group": ("selective_scan", "BTD BTD DN BTGN BTGN D BTD D SDN", 1),
    "hgrn": ("hgrn", "BTD BTD SD", 1),
    "convolution": ("causal_conv1d", "BTD DW D SDw", 1),
}
NAMES = {
    "selective_scan": "u delta A B C D z delta_bias initial_state",
    "hgrn": "x g initial_state",
    "causal_conv1d": "x weight bias initial_state",
}


def room_by_parts(group, room, how):
    function, letters, G = ROOMS[room]
    sizes = {"B": 2, "S": 2, "T": 5, "D": 4, "N": 3, "G": G, "W": 4, "w": 3}
    rng, mesh = np.random.default_rng(0), mesh_of(group)
    whole, parts = {}, {}
    for name, axes in zip(NAMES[function].split(), letters.split(), strict=True):
        x = torch.from_numpy(rng.standard_normal([sizes[c] for c in axes]))
        x = -x.abs() if name in ("A", "g") else x.abs() if name == "delta" else x
        whole[name] = x.requires_grad_()
        cut = "BS" if how == "rows" else "DG" if G > 1 else "D"
        parts[name] = placed(x, mesh, axes, cut)

    def call(**given):
        return getattr(linattn, function)(**given, output_final_state=True)

    return differences(call, whole, parts)


def others_by_parts(group):
    """Calls beside numbers and NumPy's arrays, with one key head, and of arrays cut otherwise."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of(group)
    q = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 6, 2, 3)))
    heads = placed(q, mesh, "BTHK", "H", grad=False)
    tokens = heads.redistribute(placements=[Shard(1)])
    starts = np.array([0, 2, 6])
    calls = {
        "a number": lambda q: linattn.delta_rule(q, q, q, 0.5),
        "the default decays": lambda q: linattn.retention(q, q, q),
        "packed": lambda q: linattn.delta_rule(q[:1], q[:1], q[:1], 0.5, cu_seqlens=starts),
        "one key head": lambda q: linattn.linear_attention(q[:, :, :1], q[:, :, :1], q),
        "noncausal": lambda q: linattn.linear_attention(q, q, q, causal=False),
        "a system": lambda q: linattn.hgrn2(q, -q.abs(), q),
    }
    found = {
        name: (call(heads)[0].full_tensor() - call(q)[0]).abs().max()
        for name, call in calls.items()
    }
    cut_otherwise = linattn.linear_attention(tokens, heads, heads)[0].full_tensor()
    found["tokens apart"] = (cut_otherwise - linattn.linear_attention(q, q, q)[0]).abs().max()
    return {name: float(x) for name, x in found.items()}


def layer_by_heads(group, name, options):
    """A layer whose projections are cut by heads: its output is a sum over the ranks."""
    from torch.distributed.tensor import distribute_module

    from linattn import nn

    torch.manual_seed(0)
    layer, x = getattr(nn, name)(16, **options).double(), torch.randn(2, 6, 16).double()
    y, _ = layer(x)
    want = torch.autograd.grad(y, list(layer.parameters()), weights(y))
    cut = (
        "q_proj",
        "k_proj",
        "v_proj",
        "a_proj",
        "b_proj",
        "g_proj",
        "gk_proj.1",
        "conv",
        "A_log",
        "dt_bias",
    )

    def cut_parameters(path, module, mesh):
        for label, p in list(module.named_parameters(recurse=False)):
            full = f"{path}.{label}"
            by = "-h" if "o_proj" in full else "h-" if any(word in full for word in cut) else "--"
            module.register_parameter(label, torch.nn.Parameter(placed(p, mesh, by, "h")))

    mesh = mesh_of(group)
    distribute_module(layer, mesh, cut_parameters)
    z, _ = layer(placed(x, mesh, "---", "", grad=False))
    of_sum = z.placements
    z = z.full_tensor()
    got = torch.autograd.grad(z, list(layer.parameters()), weights(z))
    far = [float((a - b.full_tensor()).abs().max()) for a, b in zip(want, got, strict=True)]
    return float((y - z).abs().max()), max(far), str(of_sum[0])
