"""linattn.distributed on DTensors: tokens apart on one dimension of a mesh, heads on another."""

import pytest
from support.ranks import Failure
from support.shared_rows import leaves_of, near, pair_of, problem

import linattn
import linattn.distributed as lad

T = 21
CUTS = {"tokens and heads": "Th", "rows and tokens": "BT", "tokens": "T"}


def letters_of(op, name):
    from linattn.distributed._dtensors import _letters

    return "NhKV" if "state" in name else _letters(op)[name]


def placed(x, letters, cuts):
    """The placements of an array on a mesh whose dimensions cut these axes of v."""
    from torch.distributed.tensor import Replicate, Shard

    of = {"T": "TL", "h": "hH", "B": "BN"}
    places = [i for i, n in enumerate(letters) if n != "H" or x.shape[i] > 1]
    axes = [next((i for i in places if letters[i] in of[cut]), None) for cut in cuts]
    return [Replicate() if axis is None else Shard(axis) for axis in axes]


def mesh_of(group, cuts):
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    shape = (2, 2) if len(cuts) == 2 else (group.size(),)
    ranks = torch.arange(group.size()).reshape(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(cuts))


def on_mesh(group, op, x, d, cuts, last):
    """o, the final states, and the gradients by name, whole."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(group, cuts)
    leaves = leaves_of(x)

    def spread(name, y):
        if isinstance(y, tuple):
            return tuple(spread(name, part) for part in y)
        if not isinstance(y, torch.Tensor):
            return y
        there = distribute_tensor(
            y.detach(), mesh, placed(y, letters_of(op, name)[: y.dim()], cuts)
        )
        return there.requires_grad_(y.requires_grad)

    own = {name: spread(name, y) for name, y in leaves.items()}
    o, S = getattr(lad, op)(**own, group=mesh["T"], output_final_state="all" if last else False)
    outputs, weights = [o], [spread("v", torch.from_numpy(d["do"].copy()))]
    if last:
        outputs += pair_of(S)
        weights += [spread("initial_state", torch.from_numpy(w.copy()))
                    for w in pair_of(d["d_final_state"])]  # fmt: skip
    flat = {(name, i): y for name, ys in own.items() for i, y in enumerate(pair_of(ys))
            if isinstance(y, torch.Tensor) and y.requires_grad}  # fmt: skip
    assert list(o.placements) == placed(o, "BThV", cuts)
    ds = torch.autograd.grad(outputs, list(flat.values()), weights, allow_unused=True)
    found = {key: d.full_tensor().numpy() for key, d in zip(flat, ds, strict=True) if d is not None}
    return [y.full_tensor().detach().numpy() for y in outputs], found


def whole(op, x, d, last):
    import torch

    leaves = leaves_of(x)
    o, S = getattr(linattn, op)(**leaves, output_final_state=last)
    outputs, weights = [o], [d["do"]]
    if last:
        outputs, weights = [o, *pair_of(S)], [d["do"], *pair_of(d["d_final_state"])]
    flat = {(name, i): y for name, ys in leaves.items() for i, y in enumerate(pair_of(ys))
            if isinstance(y, torch.Tensor) and y.requires_grad}  # fmt: skip
    weights = [torch.from_numpy(w.copy()) for w in weights]
    ds = torch.autograd.grad(outputs, list(flat.values()), weights, allow_unused=True)
    return outputs, {key: d for key, d in zip(flat, ds, strict=True) if d is not None}


def check(ranks, op, x, d, cuts, last=True):
    outputs, gradients = whole(op, x, d, last)
    for found, ds in ranks.run(4, on_mesh, op, x, d, cuts, last):
        for a, b in zip(found, outputs, strict=True):
            near(a, b, "an output")
        assert ds.keys() == gradients.keys()
        for key, a in ds.items():
            near(a, gradients[key], f"gradient of {key[0]}")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("op", linattn.OPS)
def test_ops(op, cut, ranks, rng):
    """Initial states, "all" final states, and all gradients, of what parts share too."""
    check(ranks, op, *problem(op, rng, T), CUTS[cut])


@pytest.mark.parametrize("op", ["gla", "kda"])
def test_one_head_of_keys(op, ranks, rng):
    """All parts of the value heads read it, and its gradient is the sum over them. No state."""
    x, d = problem(op, rng, T, H=1)
    x.pop("initial_state")
    check(ranks, op, x, d, "Th", last=False)


# ---- errors ----


def refused(group, change):
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(group, "Th")
    tokens = [Shard(1), Shard(2)]

    def placed(placements):
        return distribute_tensor(torch.ones(1, 8, 2, 4), mesh, placements)

    arrays = {"q": placed(tokens), "k": placed(tokens), "v": placed(tokens)}
    how = {"op": "linear_attention", "group": mesh["T"]}
    if change == "a tensor":
        arrays["k"] = torch.ones(1, 8, 2, 4)
    elif change == "v alone":
        arrays["v"] = torch.ones(1, 8, 2, 4)
    elif change == "placements":
        arrays["k"] = placed([Replicate(), Shard(2)])
    elif change == "columns":
        arrays["v"] = placed([Shard(1), Shard(3)])
    elif change == "heads":
        arrays["v"] = distribute_tensor(torch.ones(1, 8, 3, 4), mesh, tokens)
    elif change == "group":
        how["group"] = mesh["h"]
    elif change == "state":
        how["output_final_state"] = True
    else:
        how["op"] = "hgrn"
        arrays = {"x": placed(tokens), "g": placed(tokens)}
    return getattr(lad, how.pop("op"))(**arrays, **how)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a tensor", "k: expected a DTensor, as v is one, got Tensor"),
        ("v alone", "v: expected a DTensor, as others are, got Tensor"),
        ("placements", "k: expected placements (Shard(dim=1), Shard(dim=2)) on the mesh of v"),
        ("columns", "v: expected rows, tokens or heads apart, or none, on dimension 1"),
        ("heads", "v: expected 2 equal parts on dimension 1 of the mesh, got 3 heads"),
        ("group", "group: expected that of dimension 0 of the mesh"),
        ("state", "output_final_state: expected False or 'all'"),
        ("scan", "hgrn: expected tensors that are no DTensors"),
    ],
)
def test_what_is_refused(change, message, ranks):
    for answer in ranks.answers(4, refused, change):
        assert isinstance(answer, Failure)
        assert answer.kind in ("TypeError", "ValueError")
        assert message in answer.message
