"""ggml, the peer of benchmarks/ that is called by address, where a package has its library."""

from dataclasses import replace
from importlib import metadata

import pytest

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
@pytest.mark.parametrize("op", linattn.OPS)
def test_ggml_computes_what_it_is_timed_for(peer, op, pass_):
    from benchmarks import check
    from benchmarks.base import Case, WrongResult

    checker, case = check.Checker(), Case(op, pass_)
    assert peer.has(case)
    checker.peer(peer, case)
    with pytest.raises(WrongResult):
        checker.peer(replace(peer, numpy=lambda o: 1.0001 * o), case)


def test_ggml_has_no_gradients_and_no_bfloat16(peer):
    from benchmarks.base import Case

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
