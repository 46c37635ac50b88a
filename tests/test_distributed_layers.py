"""linattn.nn: layers whose rows of tokens are shared by the ranks of a group."""

import inspect

import numpy as np
import pytest
from support.blocks import BLOCKS, D, nn, torch
from support.ranks import Failure
from support.shared_rows import near, pair_of

import linattn.distributed as lad


def made_layer(name):
    torch.manual_seed(0)
    return BLOCKS[name]().double()


def parts_of(state):
    """The tensors of a layer's state; complex numbers as pairs."""
    found = [*pair_of(state.memory), *state.conv]
    found += [] if state.position is None else [state.position]
    return [torch.view_as_real(y) if y.is_complex() else y for y in found]


def weighed(y, begin):
    """A loss whose weights are those of the tokens."""
    token = torch.arange(begin, begin + y.shape[1], dtype=torch.float64)
    return (y.square() * token.cos()[:, None]).sum()


def layer_on_rank(group, name, x, lengths, edges, by_its_group):
    """y, the state, the gradients of x and of the parameters, and the next tokens by steps."""
    layer = made_layer(name)
    cp = lad.context(group, lengths=lengths, cu_seqlens=edges)
    own = torch.from_numpy(np.ascontiguousarray(x[:, cp.start :][:, : lengths[cp.rank]]))
    own.requires_grad_()
    if by_its_group:
        layer.process_group = group
        y, state = layer(own, cu_seqlens=edges)
    else:
        y, state = layer(own, cu_seqlens=cp)
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(
        weighed(y, cp.start), [own, *parameters.values()], allow_unused=True
    )
    gradients = [torch.zeros(()) if d is None else d for d in found]
    after = [y.detach().clone() for y in parts_of(state)]
    ended = all(cp.ends) and cp.rank + 1 == cp.size
    token = torch.linspace(-1, 1, x.shape[2], dtype=torch.float64)
    step = None
    if ended:
        with torch.no_grad():
            step = layer.step(token.expand(state_rows(state), -1).clone(), state).numpy()
    return y.detach().numpy(), [d.numpy() for d in gradients], [y.numpy() for y in after], step


def state_rows(state):
    return len(pair_of(state.memory)[0])


LAYERS = [name for name in BLOCKS if name != "Titans in batches"]
# by the group of the layer, or by a context
CUTS = {
    "equal": ([7, 7, 7], None, True),
    "unequal": ([12, 1, 8], None, False),
    "nothing first": ([0, 15, 6], None, False),
    "packed": ([7, 7, 7], [0, 3, 3, 16, 21], True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, cut, ranks, rng):
    lengths, edges, by_its_group = CUTS[cut]
    x = rng.standard_normal((2 if edges is None else 1, 21, D))
    answers = ranks.run(3, layer_on_rank, name, x, lengths, edges, by_its_group)
    layer, whole = made_layer(name), torch.from_numpy(x.copy()).requires_grad_()
    y, state = layer(whole, cu_seqlens=None if edges is None else torch.tensor(edges))
    wanted = torch.autograd.grad(weighed(y, 0), [whole, *layer.parameters()], allow_unused=True)
    near(np.concatenate([y for y, *_ in answers], 1), y, "y")
    near(np.concatenate([ds[0] for _, ds, *_ in answers], 1), wanted[0], "gradient of x")
    for i, want in enumerate(wanted[1:], 1):
        if want is not None:
            near(sum(ds[i] for _, ds, *_ in answers), want, f"gradient of parameter {i - 1}")
    _, _, after, step = answers[-1]
    for a, b in zip(after, parts_of(state), strict=True):
        near(a, b if edges is None else b[-len(a) :], "state")
    token = torch.linspace(-1, 1, D, dtype=torch.float64)
    with torch.no_grad():
        want = layer.step(token.expand(state_rows(state), -1).clone(), state)
    near(step, want if edges is None else want[-len(step) :], "y of a step")


def hooked_on_one_rank(group, x):
    torch.manual_seed(0)
    layer = nn.GatedDeltaNet(D, num_heads=2, head_dim=4, process_group=group).double()
    seen = []
    if group.rank() == 1:
        layer.k_conv1d.register_forward_hook(lambda *_: seen.append(1))
    own = torch.from_numpy(x[:, 7 * group.rank() :][:, :7].copy())
    return layer(own)[0].detach().numpy(), len(seen)


def test_a_hook_on_one_rank(ranks, rng):
    """The messages of a rank do not depend on the hooks of its modules."""
    x = rng.standard_normal((2, 21, D))
    answers = ranks.run(3, hooked_on_one_rank, x)
    assert [seen for _, seen in answers] == [0, 1, 0]
    torch.manual_seed(0)
    y, _ = nn.GatedDeltaNet(D, num_heads=2, head_dim=4).double()(torch.from_numpy(x))
    near(np.concatenate([y for y, _ in answers], 1), y, "y")


def plain_layer(group, x, lengths):
    torch.manual_seed(0)
    layer = nn.LinearAttention(D, 8, 6, num_heads=2, process_group=group).double()
    mine = slice(sum(lengths[: group.rank()]), sum(lengths[: group.rank() + 1]))
    return [layer(torch.from_numpy(x[:, mine].copy()), causal).detach().numpy()
            for causal in (True, False)]  # fmt: skip


def test_the_plain_layer(ranks, rng):
    x = rng.standard_normal((2, 21, D))
    answers = ranks.run(3, plain_layer, x, [7, 7, 7])
    torch.manual_seed(0)
    layer = nn.LinearAttention(D, 8, 6, num_heads=2).double()
    for i, causal in enumerate((True, False)):
        y = layer(torch.from_numpy(x), causal)
        near(np.concatenate([ys[i] for ys in answers], 1), y, "y")


def titans_in_batches(group):
    layer = BLOCKS["Titans in batches"]()
    layer.process_group = group
    layer(torch.ones(1, 8, D))


def test_a_layer_with_batches_is_refused(ranks):
    for answer in ranks.answers(2, titans_in_batches):
        assert isinstance(answer, Failure) and answer.kind == "ValueError"
        assert "batch: expected 1 where ranks share the tokens, got 4" in answer.message


def test_layers_take_a_group():
    """All that have tokens to share. Those of a state dict are the same."""
    for name in nn.__all__:
        if name != "State":
            parameter = inspect.signature(getattr(nn, name)).parameters["process_group"]
            assert parameter.default is None


# ---- what PyTorch does around layers ----


def small_layer(group, d_model=12):
    torch.manual_seed(5)
    return nn.KimiDeltaAttention(d_model, num_heads=2, head_dim=4, process_group=group).double()


def shard_of(group, x):
    return torch.from_numpy(np.array_split(x, group.size(), 1)[group.rank()].copy())


def loss_gradients(run, layer, x):
    given = x.clone().requires_grad_()
    found = torch.autograd.grad(run(given).square().sum(), [given, *layer.parameters()])
    return [d.numpy() for d in found]


def by_checkpoints(group, x):
    from torch.utils.checkpoint import checkpoint

    layer, own = small_layer(group), shard_of(group, x)

    def run(x):
        return layer(x)[0]

    def again(x):
        return checkpoint(run, x, use_reentrant=False)

    return loss_gradients(run, layer, own), loss_gradients(again, layer, own)


def by_the_compiler(group, x):
    layer, own = small_layer(group), shard_of(group, x)

    def run(x):
        return layer(x)[0]

    compiled = torch.compile(run, backend="eager")
    return loss_gradients(run, layer, own), loss_gradients(compiled, layer, own)


@pytest.mark.parametrize("how", [by_checkpoints, by_the_compiler])
def test_the_same_bits(how, ranks, rng):
    """With activation checkpointing, which exchanges states again, and in a compiled function."""
    for plain, other in ranks.run(2, how, rng.standard_normal((1, 18, 12))):
        assert all(np.array_equal(a, b) for a, b in zip(plain, other, strict=True))


def by_fsdp(group, x):
    """Parameters are sharded over the ranks that share the row. FSDP takes the mean over ranks."""
    import warnings

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    mesh = DeviceMesh.from_group(group, "cpu")
    layers = torch.nn.ModuleList([small_layer(mesh), small_layer(mesh)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        y = shard_of(group, x)
        for layer in layers:
            y = y + checkpoint(layer, y, use_reentrant=False)[0]
        (y.square().sum() * group.size()).backward()
    return [p.grad.full_tensor().numpy() for p in layers.parameters()]


def test_fsdp(ranks, rng):
    x = rng.standard_normal((1, 18, 12))
    layers = torch.nn.ModuleList([small_layer(None), small_layer(None)])
    y = torch.from_numpy(x)
    for layer in layers:
        y = y + layer(y)[0]
    y.square().sum().backward()
    for answer in ranks.run(2, by_fsdp, x):
        for p, found in zip(layers.parameters(), answer, strict=True):
            near(found, p.grad, "gradient of a parameter")
