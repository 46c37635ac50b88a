"""The section of benchmarks/ for composed ops: its checks, its peers and what it prints."""

from dataclasses import replace

import numpy as np
import pytest

import linattn

pytestmark = pytest.mark.usefixtures("bench")


@pytest.fixture
def cases(bench):
    from benchmarks import composed

    return {case.op: case for case in composed.CASES}


def without_dt(x, dt, A, B, C):
    return linattn.simple_gla(C, B, x, dt * A, scale=1)


def decayed_first(q, k, v, x, g, beta):
    return linattn.gated_delta_rule(q, k, v, g, beta, x=x)


def preconditioned_prediction(q, k, v, preconditioner, g, beta):
    return linattn.gated_delta_rule(q, k, v, g, beta, x=preconditioner * k)


def value_as_it_is(q, k, v, b, w, g):
    return linattn.kda(q, k, v, g, 1.0, x=b * k)


MISTAKES = {
    "ssd": without_dt,
    "comba": decayed_first,
    "precond_gated_delta_rule": preconditioned_prediction,
    "gdn2": value_as_it_is,
}


def test_every_composed_op_of_the_section_has_a_mistake_here(cases):
    assert cases.keys() == MISTAKES.keys()


@pytest.mark.parametrize("op", MISTAKES)
def test_ours_is_checked_against_the_paper(op, cases, monkeypatch):
    """A call that does another thing is refused; so is one that is right to four digits."""
    from benchmarks import check
    from benchmarks.base import WrongResult

    checker, right = check.Checker(), getattr(linattn, op)
    checker.ours(cases[op])
    monkeypatch.setattr(linattn, op, MISTAKES[op])
    with pytest.raises(WrongResult):
        checker.ours(cases[op])
    monkeypatch.setattr(linattn, op, lambda **x: (np.float32(1.0001) * right(**x)[0], None))
    with pytest.raises(WrongResult):
        checker.ours(cases[op])


def test_the_check_keeps_one_group_for_all_heads(cases):
    from benchmarks import check

    short, x, _ = check.Checker().problem(cases["ssd"])
    assert (short.H, short.HV) == (1, check.HEADS) and x["B"].shape[2] == 1
    short, *_ = check.Checker().problem(cases["gdn2"])
    assert short.H == short.HV == check.HEADS


def test_the_base_computes_the_same_problem(cases):
    """So the ratio is that of the arithmetic around it, and not of other numbers."""
    from benchmarks import composed, inputs

    short = {op: replace(case, T=64) for op, case in cases.items()}
    x = {op: inputs.numpy_inputs(case) for op, case in short.items()}
    base = {op: composed.arrays_of_base(case, x[op]) for op, case in short.items()}
    y, _ = linattn.ssd(**x["ssd"])
    o, _ = linattn.simple_gla(**base["ssd"])  # of dt x, which ssd does not round
    assert np.abs(y - o).max() <= 2.0**-20 * np.abs(o).max()
    assert y.shape == (1, 64, 16, 64) and base["ssd"]["q"].shape == (1, 64, 1, 128)
    for op in cases.keys() - {"ssd"}:
        assert base[op].keys() == set("qkvg") | {"beta"}
        for name in base[op].keys() & x[op].keys():
            assert base[op][name] is x[op][name], (op, name)


def test_operations_are_those_of_the_base(cases):
    """A decay, a write and a read of a state of 128 x 64: 5 for each of its elements."""
    assert cases["ssd"].flops == 5 * 128 * 64 * 16 * 512
    for case in cases.values():
        assert case.flops == case.base.flops
        assert case.base.op in linattn.VARIANTS
        assert case.base.ordinary and not case.ordinary  # libraries that have the base lack it


def peers_of(kind):
    from benchmarks import peers_cpu

    found, missing = peers_cpu.available({kind: peers_cpu.MAKERS[kind]}, 1)
    if missing:
        pytest.skip(f"no {kind}: {missing[0][1]}")
    return found


@pytest.mark.parametrize("kind", ["ggml", "PyTorch"])
def test_a_peer_of_ssd_computes_what_it_is_timed_for(kind, cases):
    from benchmarks import check, composed
    from benchmarks.base import WrongResult

    checker, case = check.Checker(), cases["ssd"]
    found = [peer for peer in peers_of(kind) if peer.has(case)]
    assert {peer.name for peer in found} == {n for n in composed.PEERS["ssd"] if kind in n}
    for peer in found:
        for problem in (case, replace(case, H=16)):  # one B and C for all heads, and for each
            checker.peer(peer, problem)
            with pytest.raises(WrongResult):
                wrong = replace(peer, numpy=lambda o, peer=peer: 1.0001 * peer.numpy(o))
                checker.peer(wrong, problem)


@pytest.mark.parametrize("kind", ["NumPy", "PyTorch", "ONNX Runtime", "ggml", "softmax"])
def test_no_peer_takes_a_composed_op_for_its_base(kind, cases):
    from benchmarks import composed

    for peer in peers_of(kind):
        for op, case in cases.items():
            for pass_ in ("forward", "forward+backward", "step"):
                has = peer.has(replace(case, pass_=pass_))
                assert has == (pass_ == "forward" and peer.name in composed.PEERS.get(op, ())), (
                    pass_
                )


def test_calls_are_checked_and_stand_behind_their_base(cases):
    from benchmarks import composed
    from benchmarks.base import Peer

    seen = []

    class Checker:
        def ours(self, case):
            seen.append(("linattn", case.op))

        def peer(self, peer, case):
            seen.append((peer.name, case.op))

    peer = Peer("ggml", "1", lambda case, x: None, lambda case: case.op == "ssd")
    found = [each.result for each in composed.checked(Checker(), [peer], 2)]
    assert seen == [(r.peer, r.case.op) for r in found]
    assert [op for _, op in seen] == [
        *("simple_gla", "ssd", "ssd"),
        *("gated_delta_rule", "comba", "precond_gated_delta_rule"),
        *("kda", "gdn2"),
    ]
    assert {(r.section, r.threads) for r in found} == {(composed.SECTION, 2)}


def record(cases, seconds, base=1e-3, peers=()):
    from benchmarks import composed
    from benchmarks.base import Result
    from benchmarks.report import Record

    def result(case, peer, time):
        return Result(case, peer, composed.SECTION, seconds={"call": [time]})

    found = []
    for case in cases.values():
        found += [result(case.base, "linattn", base), result(case, "linattn", seconds)]
    return Record([], found + [result(cases["ssd"], name, time) for name, time in peers])


@pytest.mark.parametrize("op", MISTAKES)
def test_what_is_met_and_what_is_not(op, cases):
    from benchmarks import composed

    within = cases[op].system.within

    def row(seconds):
        rows = composed.beside_base(record(cases, seconds), 500.0)
        return next(row for row in rows if row[0].startswith(f"{op} "))

    assert row(1e-3 * (within - 0.01))[-3:] == [
        f"{within - 0.01:.2f}",
        f"<= {within:.2f}",
        "yes",
    ]
    assert row(1e-3 * (within + 0.01))[-3::2] == [f"{within + 0.01:.2f}", "NO"]
    assert row(2e-3)[3] == f"{cases[op].flops / 2e-3 / 500e9:.2f}"


def test_a_peer_is_four_times_slower_or_not_or_did_not_run(cases):
    from benchmarks import composed

    first, second, third = composed.PEERS["ssd"]
    rows = composed.beside_peers(record(cases, 1e-3, peers=[(first, 3.9e-3), (third, 4.1e-3)]))
    assert rows == [
        ["ssd", first, "3.900", "3.900", "3.90", ">= 4.00", "NO"],
        ["ssd", second, "not run", "-", "-", ">= 4.00", "-"],
        ["ssd", third, "4.100", "4.100", "4.10", ">= 4.00", "yes"],
    ]


def test_the_page_has_the_section(cases, monkeypatch):
    """And no other figure of the page is taken from it."""
    from benchmarks import composed, cpu
    from benchmarks.__main__ import arguments
    from benchmarks.base import Result
    from benchmarks.report import Record

    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0, 1})
    given = arguments(["cpu", "--quick"])
    table = [
        Result(case, "linattn", section, threads, {"call": [1e-3 / threads]})
        for section, case, threads, *_ in cpu.wanted(given)
    ]
    ceilings = {
        key: {"what": key, "unit": "GFLOP/s", "median": 500.0, "best": 500.0}
        for key in ("fma", "update")
    }
    about = {"machine": "a machine", "threads": "1"}
    found = record(cases, 1.2e-3, base=7e-3, peers=[(composed.PEERS["ssd"][0], 9e-3)])
    page = Record([{"about": about, "ceilings": ceilings}], [*found.results, *table])
    text = cpu.markdown(page)
    assert "\n".join(composed.section(found, 500.0)) in text
    assert cpu.by_threads(page, "gated_delta_rule", cpu.T, cpu.H) == pytest.approx(2.0)


def test_the_program_times_the_section(monkeypatch):
    from benchmarks import composed, cpu
    from benchmarks.__main__ import arguments

    monkeypatch.setattr(cpu, "wanted", lambda given: [])
    found = cpu.checked(arguments(["cpu", "--quick"]), [])
    assert {each.result.case for each in found if each.result.section == composed.SECTION} == {
        each for case in composed.CASES for each in (case, case.base)
    }
