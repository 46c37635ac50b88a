"""linattn.distributed: groups and contexts, bits, steps, and calls that do not fit each other."""

import gc
import inspect
import os
import signal
import time
import weakref

import numpy as np
import pytest
from support.compare import assert_same_bits, over_arrays
from support.ranks import Failure, Ranks
from support.shared_rows import (
    LAYOUTS,
    cut,
    drawn,
    gradients,
    is_of_tokens,
    leaves_of,
    maker_of,
    near,
    on_rank,
    pair_of,
    problem,
    prompt_and_steps,
    states_of,
    through,
)
from support.tensors import to_tensor, torch
from support.variants import GATED, HEAD_DECAY, NORMALISED, PREDICTS

import linattn
import linattn.distributed as lad
from linattn import _rooms, scans, testing
from linattn.distributed._calls import Call, is_flushing
from linattn.variants import ARRAYS

OPS = linattn.OPS
SCANS = [name for name in lad.FUNCTIONS if name in scans.__all__]


# ---- calls without a context, and what else a call may say ----


def plain(op, rng, T=21, edges=None):
    """Tensors of a call of two rows, or of packed ones, without an initial state."""
    x, _ = problem(op, rng, T, edges=edges)
    return {name: y for name, y in x.items() if name != "initial_state"}


def by_groups(group, op, x, lengths, edges):
    """o and final states of all sequences by a process group, a mesh, and a context."""
    from torch.distributed.device_mesh import DeviceMesh

    own, found = cut(group, x, lengths), []
    mesh = DeviceMesh.from_group(group, "cpu")
    for given in (group, mesh, lad.context(mesh, tokens=lengths[group.rank()], cu_seqlens=edges)):
        more = {} if isinstance(given, lad.Context) or edges is None else {"cu_seqlens": edges}
        o, S = getattr(lad, op)(**own, **more, group=given, output_final_state="all")
        loss = o.square().sum() + sum(y.square().sum() for y in pair_of(S)) / group.size()
        names = [name for name, y in own.items() if y.requires_grad]
        ds = torch.autograd.grad(loss, [own[name] for name in names])
        found.append((o.detach(), tuple(y.detach() for y in pair_of(S)), ds))
    return found


@pytest.mark.parametrize("edges", [None, [0, 5, 15, 21]], ids=["rows", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_groups_meshes_and_contexts(op, edges, ranks, rng):
    """The same bits, and those of one process up to rounding; "all" has its gradient too."""
    x, lengths = plain(op, rng, edges=edges), [8, 4, 9]
    answers = ranks.run(3, by_groups, op, x, lengths, edges)
    for of_group, of_mesh, of_context in answers:
        assert_same_bits(of_mesh, of_group)
        assert_same_bits(of_context, of_group)
    given = leaves_of(x)
    more = {} if edges is None else {"cu_seqlens": torch.tensor(edges)}
    o, S = getattr(linattn, op)(**given, **more, output_final_state=True)
    loss = o.square().sum() + sum(y.square().sum() for y in pair_of(S))
    names = [name for name, y in given.items() if y.requires_grad]
    wanted = torch.autograd.grad(loss, [given[name] for name in names])
    near(np.concatenate([found[0][0] for found in answers], 1), o, "o")
    for _, states, _ in (found[0] for found in answers):
        for a, b in zip(states, pair_of(S), strict=True):
            near(a.numpy(), b, "the final states of all")
    for i, (name, want) in enumerate(zip(names, wanted, strict=True)):
        ds = [found[0][2][i].numpy() for found in answers]
        whole = np.concatenate(ds, 1) if is_of_tokens(name, want) else sum(ds)
        near(whole, want, f"gradient of {name}")


def one_rank(group, op, x, d):
    """lad's function and linattn's own, of a group of one."""
    found = []
    for call in (lambda **y: getattr(lad, op)(**y, group=group), getattr(linattn, op)):
        given = leaves_of(x)
        o, S = call(**given, **{states_of(given)[1]: True})
        weights = [to_tensor(y) for y in (d["do"], *pair_of(d["d_final_state"]))]
        ds = gradients(given, [o, *pair_of(S)], weights)
        found.append(
            tuple(y.detach().resolve_conj() for y in (o, *pair_of(S)))
            + tuple(y for one in ds.values() for y in one)
        )
    return found


@pytest.mark.parametrize("op", [*lad.FUNCTIONS, "causal_conv1d"])
def test_one_rank_is_the_plain_function(op, ranks, rng):
    x, d = maker_of(op)(op, rng, 37, dtype=np.float32)
    (answer,) = ranks.run(1, one_rank, op, x, d)
    assert_same_bits(*answer)


def alone(group, op, x, edges):
    """A group of one takes what others take, and refuses what they refuse."""
    own = {name: to_tensor(y) for name, y in x.items()}
    with pytest.raises(ValueError, match="out: expected None"):
        getattr(lad, op)(**own, group=group, out=own["v"])
    return getattr(lad, op)(**own, group=group, cu_seqlens=edges)[0].numpy()


@pytest.mark.parametrize("op", PREDICTS[:1])
def test_one_rank_takes_edges_as_a_list(op, ranks, rng):
    x, edges = plain(op, rng, edges=[0, 5, 21]), [0, 5, 21]
    (o,) = ranks.run(1, alone, op, x, edges)
    np.testing.assert_array_equal(o, getattr(linattn, op)(**x, cu_seqlens=np.array(edges))[0])


def with_threads(group, op, x, d, lengths, edges, threads):
    before = linattn.get_num_threads(), torch.get_num_threads()
    linattn.set_num_threads(threads)
    torch.set_num_threads(threads)
    try:
        return on_rank(group, op, x, d, lengths, edges)
    finally:
        linattn.set_num_threads(before[0])
        torch.set_num_threads(before[1])


@pytest.mark.parametrize("op", [*lad.FUNCTIONS, "causal_conv1d"])
def test_the_same_bits_again(op, ranks, rng):
    x, d, lengths, edges = drawn(op, rng, "short between", dtype=np.float32)
    again = [ranks.run(4, with_threads, op, x, d, lengths, edges, threads) for threads in (1, 1, 2)]
    for answers in again[1:]:
        for a, b in zip(answers, again[0], strict=True):
            assert_same_bits(a[:3], b[:3])


def modes_after_calls(group, op, x, lengths):
    """Whether small numbers are flushed to zero after a call, if they were and if they were not."""
    own, found = cut(group, x, lengths), []
    for mode in (True, False):
        torch.set_flush_denormal(mode)
        getattr(lad, op)(**own, group=group)
        found.append(is_flushing())
    return found


@pytest.mark.parametrize("op", [PREDICTS[-1]])
def test_the_floating_point_mode_is_the_callers(op, ranks, rng):
    assert ranks.run(3, modes_after_calls, op, plain(op, rng), [8, 4, 9]) == [[True, False]] * 3


def faded(group):
    """M of 8,000 tokens that forget by 1/e in 50: no number of it is left."""
    x = {name: torch.ones(1, 8000, 1, 4) for name in "qkv"}
    call = Call("kda", x | {"g": x["k"] * -0.02, "beta": torch.zeros(1, 8000, 1)})
    call.probe(None, False)
    return call.map(call.arrays)[1].abs().max().item()


def test_what_has_faded_is_zero(ranks):
    """A decay above 1/2 never takes the least number to zero, and such numbers are slow."""
    assert ranks.run(1, faded) == [0.0]


def what_stays(group, op, x, lengths):
    """The names of arrays that a call keeps beside what PyTorch saves, and offloads here."""
    own = {name: y * 1 for name, y in cut(group, x, lengths).items()}
    left = {name: weakref.ref(y.untyped_storage()) for name, y in own.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y.clone(), lambda y: y):
        made = getattr(lad, op)(**own, group=group)
    del own
    gc.collect()
    assert made[0].requires_grad
    return [name for name, ref in left.items() if ref() is not None]


@pytest.mark.parametrize("op", [OPS[0], PREDICTS[-1]])
def test_saved_tensors_are_pytorchs_alone(op, ranks, rng):
    """Checkpointing and offloading free the memory of arrays."""
    assert ranks.run(3, what_stays, op, plain(op, rng), [8, 4, 9]) == [[], [], []]


@pytest.mark.parametrize("op", OPS)
def test_steps_after_a_prompt(op, ranks, rng):
    x = plain(op, rng, 24)
    split = {n: np.split(y, [20], 1) if is_of_tokens(n, y) else (y, y)
             for n, y in x.items()}  # fmt: skip
    prompt, tokens = ({n: np.ascontiguousarray(y[i]) for n, y in split.items()} for i in (0, 1))
    *_, last = ranks.run(3, prompt_and_steps, op, prompt, [5, 9, 6], tokens)
    near(last, torch.from_numpy(getattr(linattn, op)(**x)[0][:, 20:].copy()), "o of steps")


def doubled(x):
    """A feature map of another number of features, which PyTorch records."""
    return torch.cat([x.exp(), (-x).exp()], -1)


class Weighed:
    """A map with a parameter: it is made anew on each rank."""

    __name__ = "weighed"

    def __init__(self):
        self.weight = torch.linspace(0.5, 1.5, 5, dtype=torch.float64).requires_grad_()

    def __call__(self, x):
        return (x * self.weight).exp()


def by_map(group, op, x, lengths):
    own, phi = cut(group, x, lengths), Weighed()
    o, _ = getattr(lad, op)(**own, group=group, feature_map=(phi, doubled_half))
    return o.detach().numpy(), torch.autograd.grad(o.square().sum(), [phi.weight, own["k"]])


def doubled_half(x):
    return (x / 2).exp()


@pytest.mark.parametrize("op", NORMALISED)
def test_feature_maps_of_ones_own(op, ranks, rng):
    x, lengths = plain(op, rng), [8, 4, 9]
    answers = ranks.run(3, by_map, op, x, lengths)
    given, phi = leaves_of(x), Weighed()
    o, _ = getattr(linattn, op)(**given, feature_map=(phi, doubled_half))
    dw, dk = torch.autograd.grad(o.square().sum(), [phi.weight, given["k"]])
    near(np.concatenate([o for o, _ in answers], 1), o, "o")
    near(sum(ds[0].numpy() for _, ds in answers), dw, "gradient of a map's parameter")
    near(np.concatenate([ds[1].numpy() for _, ds in answers], 1), dk, "gradient of k")


def by_features(group, op, x, lengths, phi):
    own = cut(group, x, lengths)
    o, _ = getattr(lad, op)(**own, group=group, feature_map=phi)
    (dk,) = torch.autograd.grad(o.square().sum(), [own["k"]])
    return o.detach().numpy(), dk.numpy()


@pytest.mark.parametrize("phi", [linattn.favor(12, dim=5), linattn.dpfp()], ids=["favor", "dpfp"])
@pytest.mark.parametrize("op", NORMALISED)
def test_features_of_performers_and_dpfp(op, phi, ranks, rng):
    x, lengths = plain(op, rng), [8, 4, 9]
    answers = ranks.run(3, by_features, op, x, lengths, phi)
    given = leaves_of(x)
    o, _ = getattr(linattn, op)(**given, feature_map=phi)
    (dk,) = torch.autograd.grad(o.square().sum(), [given["k"]])
    near(np.concatenate([o for o, _ in answers], 1), o, "o")
    near(np.concatenate([dk for _, dk in answers], 1), dk, "gradient of k")


def attended(group, x, lengths, options):
    own = cut(group, x, lengths)
    o = lad.attend(own["q"], own["k"], own["v"], **options, group=group)
    ds = torch.autograd.grad(o.square().sum(), [own["q"], own["k"], own["v"]])
    return o.detach().numpy(), *(d.numpy() for d in ds)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"scale": 0.5}], ids=str)
def test_attend(options, ranks, rng):
    x, lengths = plain(NORMALISED[0], rng), [8, 4, 9]
    answers = ranks.run(3, attended, x, lengths, options)
    given = leaves_of({name: x[name] for name in "qkv"})
    o = linattn.attend(**given, **options)
    wanted = o, *torch.autograd.grad(o.square().sum(), list(given.values()))
    for name, found, want in zip(
        ("o", "dq", "dk", "dv"), zip(*answers, strict=True), wanted, strict=True
    ):
        near(np.concatenate(found, 1), want, name)


def under_autocast(group, op, x, lengths):
    own = {name: y.float().detach() for name, y in cut(group, x, lengths).items()}
    own["q"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = getattr(lad, op)(**own, group=group)
    (dq,) = torch.autograd.grad(o.float().sum(), [own["q"]])
    return str(o.dtype), str(dq.dtype)


@pytest.mark.parametrize("op", [OPS[0], PREDICTS[-1]])
def test_autocast(op, ranks, rng):
    for answer in ranks.run(2, under_autocast, op, plain(op, rng), [8, 13]):
        assert answer == ("torch.bfloat16", "torch.float32")


@pytest.mark.parametrize("op", HEAD_DECAY[:1])
def test_the_default_gate(op, ranks, rng):
    x = {name: y for name, y in plain(op, rng).items() if name in "qkv"}
    answers = ranks.run(3, by_default, op, x, [8, 4, 9])
    near(np.concatenate(answers, 1), torch.from_numpy(getattr(linattn, op)(**x)[0]), "o")


def by_default(group, op, x, lengths):
    return getattr(lad, op)(**cut(group, x, lengths), group=group)[0].detach().numpy()


@pytest.mark.parametrize("op", [OPS[0], GATED[0], PREDICTS[-1]])
def test_a_nan_stays_in_its_sequence(op, ranks, rng):
    lengths, edges = LAYOUTS["over three ranks"]
    x, d = problem(op, rng, 37, edges=edges)
    x["v"][0, 8, 1, 0] = np.nan  # in the second of three sequences, on the first rank
    with np.errstate(all="ignore"):
        o, states, _ = through(ranks, op, x, d, lengths, edges)
    wrong = np.isnan(o).any((0, 2, 3))
    assert wrong[8:20].any() and not wrong[:8].any() and not wrong[20:].any()
    assert [bool(np.isnan(S).any()) for S in states[0]] == [False, True, False]


# ---- what does not fit ----


def misfit(group, which):
    """A call of rank 1 that differs from the others'."""
    other = group.rank() == 1
    x = torch.ones(1, 6, 2, 4)
    beta = torch.ones(1, 6, 2)
    op, v, options = "delta_rule", x, {}
    if which == "op":
        op = "kda" if other else op
        options = {"g": -torch.ones(1, 6, 2, 4)} if other else {}
    elif which == "dtype of q":
        x = v = x.double() if other else x
    elif which == "shape of v":
        v = torch.ones(1, 6, 2, 5) if other else v
    elif which == "scale":
        options = {"scale": 2.0} if other else {}
    elif which == "cu_seqlens":
        options = {"cu_seqlens": [0, 12, 18] if other else [0, 10, 18]}
    elif which == "recording of gradients":
        beta = beta.requires_grad_(other)
    elif which == "an argument":
        beta = torch.ones(1, 5, 2) if other else beta
    elif which == "a keyword":
        options = {"betas": 1} if other else {}
    elif which == "an initial state":
        options = {"initial_state": torch.ones(2, 2, 4, 4)} if other else {}
    elif which == "lengths":
        options = {"lengths": [6, 6, 6] if other else [5, 6, 7]}
    elif which == "tokens":
        options = {"lengths": [6, 7, 5]}
    cp = lad.context(group, lengths=options.pop("lengths")) if "lengths" in options else group
    getattr(lad, op)(x, x, v, **options, beta=beta, group=cp)


MISFITS = {
    "op": "expected the same op on all ranks of the group, got delta_rule on rank 0, kda on rank 1",
    "dtype of q": "expected the same dtype of q on all ranks of the group, got float32 on rank 0",
    "shape of v": "expected the same shape of v on all ranks of the group, got (1, T, 2, 4) on",
    "scale": "expected the same scale on all ranks of the group, got None on rank 0, 2.0 on rank 1",
    "cu_seqlens": "expected the same cu_seqlens on all ranks of the group, got [0, 10, 18] on",
    "recording of gradients": "expected the same recording of gradients on all ranks",
    "an argument": "beta: expected [B,T,HV]",
    "a keyword": "betas",
    "an initial state": "initial_state: expected",
    "lengths": "expected the same lengths on all ranks",
    "tokens": "expected T = 7 on rank 1, as lengths = [6, 7, 5] say, got 6",
}


@pytest.mark.parametrize("which", MISFITS)
def test_calls_that_do_not_match(which, ranks):
    """An error on all ranks, and the next call of the same group works."""
    for answer in ranks.answers(3, misfit, which):
        assert isinstance(answer, Failure)
        assert answer.kind == ("TypeError" if which == "a keyword" and answer.rank == 1
                               else "ValueError")  # fmt: skip
        assert MISFITS[which] in answer.message, answer.message
    assert [x.shape for x in ranks.run(3, by_default, OPS[1], fitting(), [6, 6, 6])] == [
        (1, 6, 2, 4)
    ] * 3


def fitting():
    return {name: np.ones((1, 18, 2, 4)) for name in "qkv"}


def refused(group, which):
    x = torch.ones(1, 6, 2, 4)
    call = {
        "out": lambda: lad.retention(x, x, x, group=group, out=x.clone()),
        "one head": lambda: lad.retention(x[0, :, 0], x[0, :, 0], x[0, :, 0], group=group),
        "lists": lambda: lad.retention([1.0], [1.0], [1.0], group=group),
        "lengths": lambda: lad.context(group, lengths=[6]),
        "neither": lambda: lad.context(group),
        "edges": lambda: lad.context(group, lengths=6, cu_seqlens=[0, 7, 13]),
        "a context's edges": lambda: lad.retention(
            x, x, x, group=lad.context(group, lengths=6), cu_seqlens=[0, 12]
        ),
        "a rank": lambda: lad.retention(x, x, x, group=3),
        "a word": lambda: lad.retention(x, x, x, group="cp"),
        "final states": lambda: lad.retention(x, x, x, group=group, output_final_state="each"),
    }
    call[which]()


REFUSED = {
    "out": ("ValueError", "out: expected None"),
    "one head": ("ValueError", "q: expected [B,T,H,K]"),
    "lists": ("TypeError", "q: expected a tensor of PyTorch's or an array of NumPy's, got list"),
    "lengths": ("ValueError", "lengths: expected one for each of 2 ranks, got 1"),
    "neither": ("TypeError", "lengths: expected either lengths or tokens"),
    "edges": ("ValueError", "cu_seqlens: expected to rise from 0 to 12"),
    "a context's edges": ("ValueError", "cu_seqlens: expected None beside a Context"),
    "a rank": ("ValueError", "group: expected a group that this process is a rank of"),
    "final states": ("ValueError", "output_final_state: expected True, False or 'all'"),
    "a word": ("TypeError", "group: expected a ProcessGroup, a DeviceMesh, a Context"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_arguments_that_are_refused(which, ranks):
    for answer in ranks.answers(2, refused, which):
        assert isinstance(answer, Failure)
        assert (answer.kind, REFUSED[which][1] in answer.message) == (REFUSED[which][0], True), (
            answer
        )


def test_without_a_process_group():
    x = torch.ones(1, 6, 2, 4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        lad.retention(x, x, x, group=None)


def killed(group, how):
    """Rank 1 goes. The others find out by their next calls."""
    x = torch.ones(1, 6, 2, 4)
    lad.retention(x, x, x, group=group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            lad.retention(x, x, x, group=group)
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    return "not noticed"


def test_a_killed_rank(tmp_path):
    """An error on the others, within the time-out of the group."""
    own = Ranks(tmp_path, world=3, seconds=20)
    own.start(3, killed, "between calls")
    answers = [own.answer(rank) for rank in (0, 2)]
    own.processes[1].join(20)
    assert own.processes[1].exitcode == -signal.SIGKILL
    for process in own.processes:
        process.kill()
    for took, message in answers:
        assert took < 25
        assert message.startswith("linattn.distributed: the ") and "of 3:" in message


# ---- the tables ----


def test_there_is_a_function_for_each_op_and_scan():
    assert set(OPS) < set(lad.FUNCTIONS) and len(SCANS) == len(_rooms.ROOMS["scan"].left_out) + 1
    for name in lad.FUNCTIONS:
        own = inspect.signature(getattr(lad, name)).parameters
        plain = inspect.signature(getattr(linattn, name)).parameters
        assert set(own) == set(plain) | {"group"}
        assert own["group"].default is inspect.Parameter.empty
        assert getattr(lad, name) is getattr(lad, name) and name in dir(lad)
        assert name in getattr(lad, name).__doc__
    with pytest.raises(AttributeError, match="softmax"):
        lad.softmax  # noqa: B018


def test_arrays_of_tokens_have_three_axes():
    """What linattn.distributed goes by."""
    for line in ARRAYS:
        if line.role == "INPUT" and line.gradient:
            has_tokens = bool(set("TL") & set(line.letters))
            assert has_tokens == (len(line.letters) > 2), line
    for room in _rooms.ROOMS.values():
        for line in room.lines:
            if line.role == "INPUT" and line.gradient and "F" in line.passes:
                assert ("T" in line.letters) == (len(line.letters) > 2), line


def parts_in_order(group, op, lengths, x):
    """The names of a call's parts in a profile, forward and backward, in the order of time."""
    mine = slice(sum(lengths[: group.rank()]), sum(lengths[: group.rank() + 1]))
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(a[:, mine])).requires_grad_()
        for name, a in x.items()
    }
    cp = lad.context(group, lengths=lengths, check=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        o, _ = getattr(lad, op)(**tensors, group=cp)
        o.sum().backward()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("linattn.distributed: ")]
    return [name.removeprefix("linattn.distributed: ") for name in names]


def test_a_profile_names_the_parts(ranks, rng):
    """A rank's map comes before the exchange, as does the gradient of its first state."""
    lengths = [5, 6, 7]
    x = testing.make_inputs("gla", rng, T=18, H=2, K=4, V=4, dtype=np.float64)
    for rank, found in enumerate(ranks.run(3, parts_in_order, "gla", lengths, x)):
        first = ["gradient of the initial state"] if rank else []
        assert found == ["map", "exchange", *first, "exchange"]


def masked_on_rank(group, op, lengths, x, mask):
    mine = slice(sum(lengths[: group.rank()]), sum(lengths[: group.rank() + 1]))
    tensors = {name: torch.from_numpy(a[:, mine].copy()).requires_grad_() for name, a in x.items()}
    cp = lad.context(group, lengths=lengths)
    there = torch.from_numpy(mask[:, mine].copy())
    o, S = getattr(lad, op)(**tensors, group=cp, mask=there, output_final_state="all")
    gradients = torch.autograd.grad(o.square().sum(), tuple(tensors.values()))
    return o.detach().numpy(), S.detach().numpy(), [d.numpy() for d in gradients]


@pytest.mark.parametrize("op", ["gla", "delta_rule"])
def test_padding(op, ranks, rng):
    """Of each rank's tokens, those of a mask count: on a rank that a row passes too."""
    x = testing.make_inputs(op, rng, B=2, T=18, H=2, K=4, V=4, dtype=np.float64)
    mask = rng.random((2, 18)) < 0.6
    answers = ranks.run(3, masked_on_rank, op, [5, 6, 7], x, mask)
    whole = {name: torch.from_numpy(a).requires_grad_() for name, a in x.items()}
    call = getattr(linattn, op)
    o, S = call(**whole, mask=torch.from_numpy(mask), output_final_state=True)
    wanted = torch.autograd.grad(o.square().sum(), tuple(whole.values()))
    near(np.concatenate([o for o, *_ in answers], 1), o, "o")
    for _, found, _ in answers:
        near(found, S, "final state")
    for i, want in enumerate(wanted):
        near(np.concatenate([ds[i] for *_, ds in answers], 1), want, "gradient")


def explained(group, op, x, lengths):
    """The parts of a rank's call, and the kernel of each."""
    own = over_arrays(lambda y: y.detach(), cut(group, x, lengths))
    own.pop("initial_state", None)
    cp = lad.context(group, lengths=lengths)
    report = linattn.explain_kernel(getattr(lad, op), **own, group=cp)
    assert report[:5] == report.parts[-1][1][:5]
    return [(part, told.kernel) for part, told in report.parts]


@pytest.mark.parametrize("op", ["kda", "ssd", "selective_scan"])
def test_explain_kernel_names_the_parts(op, ranks, rng):
    """The first rank has a final state to give. The last one has nothing to give."""
    lengths = [9, 9, 9]
    x, _ = maker_of(op)(op, rng, sum(lengths))
    x = {name: y for name, y in x.items() if "state" not in name}
    answers = ranks.run(3, explained, op, x, lengths)
    assert [[part for part, _ in parts] for parts in answers] == [
        ["final state", "call"],
        ["map", "call"],
        ["call"],
    ]
    assert {kernel for parts in answers for _, kernel in parts} <= {"chunks", "scan"}
    assert linattn.explain_kernel(getattr(linattn, op), **x).parts == ()
