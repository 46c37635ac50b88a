"""Calls that ranks share, in one graph of torch.compile: the bits of an eager call.

The ranks have different graphs. Their messages have to stay, and stay in one order.
"""

import numpy as np
import pytest
from support.blocks import BLOCKS, D, torch
from support.compare import assert_same_bits, leaves, over_arrays
from support.ranks import Failure
from support.shared_rows import cut, drawn, is_of_tokens, maker_of, on_rank
from support.variants import FEW, KEY_DECAY, NORMALISED

import linattn
import linattn.distributed as lad
from linattn import FeatureMap

CARRIED = ("mamba3", "mlstm")
LAYERS = [name for name in BLOCKS if name != "Titans in batches"]


def both(group, op, x, d, lengths, edges, backend):
    call = group, op, x, d, lengths, edges
    return on_rank(*call), on_rank(*call, backend)


def compared(ranks, op, x, d, lengths, edges, backend="aot_eager"):
    for plain, compiled in ranks.run(len(lengths), both, op, x, d, lengths, edges, backend):
        if op in CARRIED:
            assert_near(compiled[:3], plain[:3])
        else:
            assert_same_bits(compiled[:3], plain[:3])


def assert_near(found, wanted):
    """An op of arrays that a graph makes: their sums may be in another order."""
    found, wanted = leaves(found), leaves(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert np.abs(x - y).max(initial=0) <= 1e-12 * np.abs(y).max(initial=1e-300)


@pytest.mark.parametrize("op", [*(x for x in lad.FUNCTIONS if x not in CARRIED), "causal_conv1d"])
def test_packed(op, ranks, rng):
    """Packed sequences. The host reads those of mlstm and mamba3, which a graph does not take."""
    compared(ranks, op, *drawn(op, rng, "across"))


@pytest.mark.parametrize(
    "op", [*FEW, KEY_DECAY[0], *CARRIED, "rwkv7", "selective_scan", "causal_conv1d"]
)
def test_rows(op, ranks, rng):
    """Rows that are not packed, of a rank that they pass, too."""
    compared(ranks, op, *drawn(op, rng, "short between"))


@pytest.mark.parametrize("op", [FEW[0], FEW[-1], "causal_conv1d"])
def test_by_inductor(op, ranks, rng):
    compared(ranks, op, *drawn(op, rng, "unequal"), backend="inductor")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"normalize": False, "feature_map": "identity"},
        {"feature_map": FeatureMap("relu+eps", eps=0.1)},
        {"feature_map": ("relu2", "exp")},
    ],
)
def test_options(options, ranks, rng):
    compared(ranks, "linear_attention", *drawn("linear_attention", rng, "unequal", **options))


def between_graphs(group, op, x, lengths, edges, options):
    """By a compiler that may break a graph, where the call does not fit one."""
    torch._dynamo.reset()
    cp = lad.context(group, lengths=lengths, cu_seqlens=edges)
    own = over_arrays(lambda y: y.detach(), cut(group, x, lengths))

    def call(x):
        return getattr(lad, op)(**x, **options, group=cp)[0].sin()

    return call(own).numpy(), torch.compile(call, backend="aot_eager")(own).numpy()


@pytest.mark.parametrize(
    ("op", "edges", "options"),
    [("mlstm", [0, 7, 18], {}), ("linear_attention", None, {"feature_map": linattn.dpfp(1)})],
)
def test_calls_that_fit_no_graph(op, edges, options, ranks, rng):
    x, _ = maker_of(op)(op, rng, 18, edges=edges)
    x = {name: y for name, y in x.items() if "state" not in name}
    for plain, compiled in ranks.run(2, between_graphs, op, x, [9, 9], edges, options):
        assert_same_bits(compiled, plain)


# ---- layers ----


def layer_on_rank(group, name, x, backend):
    """y, and the gradients of x and of the parameters, by the layer and by its graph."""
    torch.manual_seed(0)
    layer = BLOCKS[name]().double()
    layer.process_group = group
    own = torch.from_numpy(np.array_split(x, group.size(), 1)[group.rank()].copy())
    torch._dynamo.reset()
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        given = own.clone().requires_grad_()
        y, _ = run(given)
        wanted = [given, *layer.parameters()]
        ds = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        found.append([y.detach().numpy(), *(d.numpy() for d in ds if d is not None)])
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, ranks, rng):
    x = rng.standard_normal((2, 15, D))
    for plain, compiled in ranks.run(3, layer_on_rank, name, x, "aot_eager"):
        assert_same_bits(compiled, plain)


def test_a_layer_by_inductor(ranks, rng):
    """Inductor makes other sums of what is around the calls."""
    x = rng.standard_normal((2, 15, D))
    for plain, compiled in ranks.run(3, layer_on_rank, "KimiDeltaAttention", x, "inductor"):
        assert_near(compiled, plain)


def rows_of_lengths(group, rows):
    """One compiled layer for rows of all lengths, and within a checkpoint: y and the gradient."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = BLOCKS["GatedDeltaNet"]().double()
    layer.process_group = group
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
    runs = (
        lambda x: layer(x)[0],
        compiled,
        lambda x: checkpoint(compiled, x, use_reentrant=False),
    )
    found = []
    for x in rows:
        own = torch.from_numpy(np.array_split(x, group.size(), 1)[group.rank()].copy())
        for run in runs:
            given = own.clone().requires_grad_()
            y = run(given)
            (dx,) = torch.autograd.grad(y.square().sum(), given)
            found.append([y.detach().numpy(), dx.numpy()])
    return found


def test_rows_of_other_lengths(ranks, rng):
    """PyTorch takes a length that changes for a symbol."""
    rows = [rng.standard_normal((1, T, D)) for T in (6, 10, 14)]
    for answer in ranks.run(2, rows_of_lengths, rows):
        for plain, compiled, within in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
            assert_same_bits(compiled, plain)
            assert_same_bits(within, plain)


def bare_rows_of_lengths(group, op, rows):
    """Bare calls with a group alone, of which PyTorch takes T for a symbol."""
    torch._dynamo.reset()

    def call(x):
        return getattr(lad, op)(**x, group=group, output_final_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    own = [cut(group, x, lengths) for x, lengths in rows]
    return [[[y.detach().numpy() for y in leaves(run(x))] for run in (call, compiled)] for x in own]


@pytest.mark.parametrize("op", FEW)
def test_bare_rows_of_other_lengths(op, ranks, rng):
    rows = []
    for T in (8, 10, 13):
        x, *_ = (
            drawn(op, rng, "equal", normalize=False)
            if op in NORMALISED
            else drawn(op, rng, "equal")
        )
        rows.append(({name: y[:, :T] if is_of_tokens(name, y) else y for name, y in x.items()},
                     [T // 2, T - T // 2]))  # fmt: skip
    for answer in ranks.run(2, bare_rows_of_lengths, op, rows):
        for plain, compiled in answer:
            assert_same_bits(compiled, plain)


def on_one_rank_alone(group, how):
    """A call that rank 0 compiles, or makes under a mode that counts operations."""
    from torch.utils.flop_counter import FlopCounterMode

    cp = lad.context(group, lengths=4)
    q = torch.ones(1, 4, 2, 4, dtype=torch.float64)
    x, weight = q[:, :, 0], torch.ones(4, 3, dtype=torch.float64)

    def call(q):
        state = {"output_final_state": True, "state_v_first": True}
        return lad.gla(q, q, q, alpha=0.5, group=cp, **state)[0]

    if how == "a mode" and group.rank() == 0:
        with FlopCounterMode(display=False):
            return call(q).numpy(), lad.causal_conv1d(x, weight, group=group)[0].numpy()
    if how == "a graph" and group.rank() == 0:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    return call(q).numpy(), lad.causal_conv1d(x, weight, group=group)[0].numpy()


@pytest.mark.parametrize("how", ["a mode", "a graph"])
def test_on_one_rank_alone(how, ranks):
    """The ranks agree on the call, whatever is around it."""
    plain = ranks.run(2, on_one_rank_alone, "nothing")
    assert_same_bits(ranks.run(2, on_one_rank_alone, how), plain)


# ---- errors ----


def without_lengths(group):
    x, weight = torch.ones(1, 4, 2), torch.ones(2, 3)
    run = torch.compile(lambda x: lad.causal_conv1d(x, weight, group=group)[0], fullgraph=True)
    return run(x)


def recorded_on_one_rank(group):
    cp = lad.context(group, lengths=4)
    q = torch.ones(1, 4, 2, 3, requires_grad=True)
    run = torch.compile(lambda q: lad.attend(q, q, q, group=cp), fullgraph=True)
    with torch.set_grad_enabled(group.rank() == 0):
        return run(q).shape


def of_other_sizes(group):
    cp = lad.context(group, lengths=4)
    q = torch.ones(1, 4, 2, 3 + group.rank())
    run = torch.compile(lambda q: lad.attend(q, q, q, group=cp), fullgraph=True)
    return run(q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (without_lengths, "group: expected a Context with lengths in a compiled graph"),
        (recorded_on_one_rank, "expected the same recording of gradients"),
        (of_other_sizes, "expected the same"),
    ],
)
def test_errors_of_all_ranks(call, message, ranks):
    for answer in ranks.answers(2, call):
        assert isinstance(answer, Failure)
        assert message in answer.message
