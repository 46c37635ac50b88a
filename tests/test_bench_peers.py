"""The benchmark's peer that is called by address: ggml, where a package has its library."""

from dataclasses import replace
from importlib import metadata

import pytest

import linattn


@pytest.fixture
def peer(bench):
    from peers import ggml_peers

    try:
        return ggml_peers(1)[0]
    except ImportError as error:
        pytest.skip(f"no ggml: {error}")


@pytest.mark.parametrize("face", ("forward", "step"))
@pytest.mark.parametrize("op", linattn.OPS)
def test_ggml_computes_what_it_is_timed_for(peer, op, face):
    import check
    from cases import Case

    checker, case = check.Checker(), Case(op, face)
    assert checker.peer(peer, case)
    with pytest.raises(check.WrongResult):
        checker.peer(replace(peer, numpy=lambda o: 1.0001 * o), case)


def test_ggml_has_no_gradients_no_bfloat16_and_no_other_shapes(peer, monkeypatch):
    import ggml
    from cases import Case

    for case in Case("kda", "forward+backward"), Case("kda", dtype="bfloat16"):
        assert peer.make(case, {}) is None
    monkeypatch.setattr(ggml, "V", ggml.K // 2)
    assert peer.make(Case("kda"), {}) is None


def test_a_package_without_the_library_is_no_peer(bench, monkeypatch):
    """Built without it, or not there at all: the reason names the packages."""
    import ggml

    class Bare:
        version = "1"
        files = (metadata.PackagePath("llama_cpp/lib/libggml-base.so"),)

    def distribution(name):
        if name == ggml.PACKAGES[0]:
            return Bare()
        raise metadata.PackageNotFoundError(name)
    monkeypatch.setattr(ggml.metadata, "distribution", distribution)
    with pytest.raises(ImportError, match=" nor ".join(ggml.PACKAGES)):
        ggml.ggml_peers(1)


@pytest.mark.parametrize("name, is_it", [
    ("libggml-cpu.so", True), ("libggml-cpu.so.0.25.3", True), ("libggml-cpu.0.dylib", True),
    ("libggml-cpu-67036419.so.0.13.1", False), ("libggml-base.so", False)])
def test_the_library_is_told_from_its_neighbours(bench, name, is_it):
    from ggml import LIBRARY

    assert bool(LIBRARY.fullmatch(name)) == is_it
