"""mamba3 and mlstm on ranks: the numbers that travel beside their states.

tests/test_distributed.py has their results and gradients in float64 in every layout.
"""

import ml_dtypes
import numpy as np
import pytest
from support.composed import judged
from support.ranks import Failure
from support.shared_rows import (
    LAYOUTS,
    PACKED,
    check,
    cut,
    drawn,
    leaves_of,
    near,
    prompt_and_steps,
    states_of,
    system_problem,
    tokens_of,
)
from support.tensors import to_numpy, to_tensor, torch

import linattn
import linattn.distributed as lad
from linattn import reference
from linattn.distributed._systems import SYSTEMS

CARRIED = [name for name, system in SYSTEMS.items() if system.is_carried]
some_layouts = pytest.mark.parametrize("layout", ["nothing first", "nothing between", "across"])


def without_states(x):
    return {name: y for name, y in x.items() if "state" not in name}


@pytest.mark.parametrize("layout", PACKED)
def test_the_maximum_has_a_gradient_by_way_of_eps(layout, ranks, rng):
    x, d, lengths, edges = drawn("mlstm", rng, layout)
    check(ranks, "mlstm", x | {"eps": 0.3}, d, lengths, edges)


def plainest(x):
    """Without angles, skip and gate, and with numbers for gates."""
    numbers = {"dt": 0.4, "A": -0.7, "trap": 0.3, "i": 0.5, "f": 1.5}
    return {n: numbers.get(n, y) for n, y in x.items() if n not in ("angles", "D", "z")}


@some_layouts
@pytest.mark.parametrize("op", CARRIED)
def test_numbers_and_what_may_be_left_out(op, layout, ranks, rng):
    x, d, *cut = drawn(op, rng, layout)
    x = plainest(x)
    if op == "mamba3":
        angle, *rest = x["initial_states"]
        x["initial_states"] = (angle[..., :0].copy(), *rest)
        d["d_final_state"] = (d["d_final_state"][0][..., :0].copy(), *d["d_final_state"][1:])
    check(ranks, op, x, d, *cut)


def read(group, op, x, lengths, edges):
    """o and final states of all sequences, of a call without initial states."""
    own = {n: y.detach() for n, y in cut(group, x, lengths).items()}
    cp = lad.context(group, lengths=lengths, cu_seqlens=edges)
    o, S = getattr(lad, op)(**own, group=cp, **{states_of(system(op))[1]: "all"})
    plain, none = getattr(lad, op)(**own, group=cp)
    assert none is None and torch.equal(o, plain)
    return to_numpy(o), tuple(map(to_numpy, S))


def system(op):
    return {SYSTEMS[op].initial: None}


@some_layouts
@pytest.mark.parametrize("op", CARRIED)
def test_final_states_on_all_ranks(op, layout, ranks, rng):
    x, _, lengths, edges = drawn(op, rng, layout)
    x = without_states(x)
    answers = ranks.run(len(lengths), read, op, x, lengths, edges)
    packed = {} if edges is None else {"cu_seqlens": np.array(edges)}
    o, S = getattr(linattn, op)(**x, **packed, **{states_of(system(op))[1]: True})
    near(np.concatenate([o for o, _ in answers], 1), to_tensor(o), "o")
    for _, states in answers:
        for found, want in zip(states, S, strict=True):
            near(found, to_tensor(want), "a final state")


@pytest.mark.parametrize("op", CARRIED)
def test_steps_after_a_prompt(op, ranks, rng):
    x = without_states(system_problem(op, rng, 24)[0])
    prompt = {n: tokens_of(n, y, 0, 20, 24) for n, y in x.items()}
    tokens = {n: tokens_of(n, y, 20, 4, 24) for n, y in x.items()}
    *_, last = ranks.run(3, prompt_and_steps, op, prompt, [5, 9, 6], tokens)
    near(last, to_tensor(getattr(linattn, op)(**x)[0][:, 20:].copy()), "o of steps")


def gradient_of_one(group, op, x, lengths, name):
    own = cut(group, x, lengths)
    o, _ = getattr(lad, op)(**own, group=group)
    (found,) = torch.autograd.grad(o.square().sum(), [own[name]])
    return found.numpy()


@pytest.mark.parametrize(
    ("op", "name"),
    [("mamba3", "z"), ("mamba3", "angles"), ("mamba3", "dt"), ("mlstm", "i"), ("mlstm", "v")],
)
def test_the_gradient_of_one_array(op, name, ranks, rng):
    """Every rank takes part in what the backward pass sends, one without tokens too."""
    x, _, lengths, _ = drawn(op, rng, "nothing between")
    x = without_states(x) | ({"eps": 0.1} if op == "mlstm" else {})
    answers = ranks.run(3, gradient_of_one, op, x, lengths, name)
    given = leaves_of(x)
    (want,) = torch.autograd.grad(getattr(linattn, op)(**given)[0].square().sum(), [given[name]])
    near(np.concatenate(answers, 1), want, f"gradient of {name}")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", CARRIED)
def test_accuracy(op, dtype, ranks, rng):
    lengths, edges = LAYOUTS["short between"]
    which = {"mamba3": 1, "mlstm": 0}[op]  # of the parts of a state, the one that is a matrix

    def call(**x):
        o, S = ranks.run(len(lengths), read, op, x, lengths, edges)[-1]
        return {"o": o, "S": S[which]}

    def by_reference(dtype, **x):
        o, S = getattr(reference, op)(**x, dtype=dtype)
        return {"o": o[:, -lengths[-1] :], "S": S[which]}

    def draw():
        return without_states(system_problem(op, rng, 37, dtype=dtype)[0])

    judged(draw, call, by_reference, dtype)


def misfit(group, op):
    """A call whose last gate has another shape on rank 1."""
    lengths = [5, 9, 6]
    x, _ = system_problem(op, np.random.default_rng(0), 20)
    own = {n: y.detach() for n, y in cut(group, without_states(x), lengths).items()}
    name = "angles" if op == "mamba3" else "f"
    if group.rank() == 1:
        own[name] = own[name][..., :1]
    getattr(lad, op)(**own, group=group)


@pytest.mark.parametrize("op", CARRIED)
def test_calls_that_do_not_fit(op, ranks):
    for answer in ranks.answers(3, misfit, op):
        assert isinstance(answer, Failure) and answer.kind == "ValueError"
        assert op in answer.message or "f: expected" in answer.message
