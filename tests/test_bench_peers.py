"""Peers of benchmarks/ with ways of their own: ggml, which is called by address where a package has
its library, and softmax attention, which computes another function."""

import sys
from dataclasses import replace
from importlib import metadata

import pytest
from support.variants import PAIR_DECAY

import linattn

pytestmark = pytest.mark.usefixtures("bench")


@pytest.fixture
def peer(bench):
    from benchmarks import ggml

    try:
        return ggml.peers(1)[0]
    except ImportError as error:
        pytest.skip(f"no ggml: {error}")


@pytest.mark.parametrize("pass_", ("forward", "step"))
@pytest.mark.parametrize("op", [op for op in linattn.OPS if op not in PAIR_DECAY])
def test_ggml_computes_what_it_is_timed_for(peer, op, pass_):
    from benchmarks import check
    from benchmarks.base import Case, WrongResult

    checker, case = check.Checker(), Case(op, pass_)
    assert peer.has(case)
    checker.peer(peer, case)
    with pytest.raises(WrongResult):
        checker.peer(replace(peer, numpy=lambda o: 1.0001 * o), case)


def test_ggml_has_no_gradients_no_bfloat16_and_no_momentum(peer):
    from benchmarks.base import Case

    assert not any(peer.has(Case(op)) for op in PAIR_DECAY)
    assert not peer.has(Case("kda", "forward+backward"))
    assert not peer.has(Case("kda", dtype="bfloat16"))


def test_a_package_without_the_library_is_no_peer(monkeypatch):
    """Built without it, or not there at all: the reason names the packages."""
    from benchmarks import ggml

    class Bare:
        version = "1"
        files = (metadata.PackagePath("llama_cpp/lib/libggml-base.so"),)

    def distribution(name):
        if name == ggml.PACKAGES[0]:
            return Bare()
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ggml.metadata, "distribution", distribution)
    with pytest.raises(ImportError, match=" nor ".join(ggml.PACKAGES)):
        ggml.peers(1)


@pytest.mark.parametrize(
    "name, is_it",
    [
        ("libggml-cpu.so", True),
        ("libggml-cpu.so.0.25.3", True),
        ("libggml-cpu.0.dylib", True),
        ("libggml-cpu-67036419.so.0.13.1", False),
        ("libggml-base.so", False),
    ],
)
def test_the_library_is_told_from_its_neighbours(name, is_it):
    from benchmarks.ggml import LIBRARY

    assert bool(LIBRARY.fullmatch(name)) == is_it


@pytest.mark.parametrize("pass_", ("forward", "forward+backward", "step"))
@pytest.mark.parametrize("op", linattn.OPS)
def test_every_op_is_measured_beside_a_loop(op, pass_):
    """Ours and the peers that have the case compute it, in a shortened problem."""
    from benchmarks import check, peers_cpu
    from benchmarks.base import Case, WrongResult

    pytest.importorskip("torch")
    checker, case = check.Checker(), Case(op, pass_)
    checker.ours(case)
    found = [p for p in peers_cpu.numpy_peers(1) + peers_cpu.torch_peers(1) if p.has(case)]
    assert found
    for peer in found:
        checker.peer(peer, case)
        with pytest.raises(WrongResult):
            wrong = replace(peer, numpy=lambda o, peer=peer: 1.0001 * peer.numpy(o))
            checker.peer(wrong, case)


@pytest.mark.parametrize("library", ["NumPy", "PyTorch"])
def test_softmax_attention_is_checked_as_what_it_is(library, monkeypatch):
    from benchmarks import check, peers_cpu
    from benchmarks.base import Case, WrongResult

    if library == "NumPy":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        pytest.importorskip("torch")
    (peer,) = peers_cpu.softmax_peers(1)
    checker, case = check.Checker(), Case("linear_attention")
    assert peer.name == f"softmax, {library}"
    checker.peer(peer, case)
    with pytest.raises(WrongResult):
        checker.peer(replace(peer, numpy=lambda o: 1.0001 * peer.numpy(o)), case)
    with pytest.raises(WrongResult):  # as if it were linear attention
        checker.peer(replace(peer, instead=None), case)
    assert peer.has(replace(case, T=2**14, H=1)) and not peer.has(replace(case, T=2**15, H=1))
    assert not peer.has(Case("simple_gla")) and not peer.has(Case("linear_attention", "step"))


def test_softmax_attention_stands_beside_the_peers():
    """It is in a table of its own, and never the best of the op's peers."""
    from benchmarks import cpu, report
    from benchmarks.base import BESIDE, Case, Result

    def result(op, peer, seconds, section="cost", T=1024):
        return Result(Case(op, T=T, H=1, HV=1), peer, section, seconds={"call": [seconds]})

    found = report.Record(
        [],
        [
            result("linear_attention", "linattn", 1024e-6),
            result("kda", "linattn", 2048e-6),
            result("kda", "NumPy", 1024e-6),
            result("linear_attention", "NumPy", 4096e-6),
            result("linear_attention", "PyTorch", 3072e-6),
            result("linear_attention", "softmax, PyTorch", 512e-6, BESIDE),
            result("linear_attention", "linattn", 4096e-6, T=4096),
        ],
    )
    table = [line for line in report.beside_softmax(found, "call") if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert cells == [
        [
            "B1 T1024 H1",
            "1000",
            "kda",
            "2000",
            "PyTorch",
            "3000",
            "softmax, PyTorch",
            "500",
            "0.50",
        ],
        ["B1 T4096 H1", "1000", "linear_attention", "1000", "none", "-", "none", "-", "-"],
    ]
    assert report.beside_softmax(report.Record([], found.results[:3]), "call") == []
    for r in found.results[:5]:
        r.section = "table"
    assert cpu.against(found, found.results[0]).peer == "PyTorch"
