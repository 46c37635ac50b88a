"""The list of planted mistakes fits the sources: `make mutants` plants them."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests" / "mutants" / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)
PATCHES = run.patches()
ROOMS = (
    "check.c",
    "arrays.c",
    "places.c",
    "views.c",
    "keywords.c",
    "module.c",
    "layer.c",
    "layers.c",
    "bound.c",
    "pool.c",
    "gate.c",
    "dispatch.c",
    "chunk.h",
    "chunk_forward.h",
    "chunk_backward.h",
    "scan.h",
    "noncausal.h",
    "reduce.h",
    "load.h",
    "tile.h",
    "elements.h",
    "recurrence.h",
    "convolve.h",
    "convolution.c",
    "diagonal_token.h",
    "diagonal_scan.h",
    "diagonal.c",
    "room.c",
    "rooms.c",
    "gates.c",
    "curves.h",
)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch["name"])
def test_a_patch_applies_in_one_place(patch):
    source = ROOT / patch["file"]
    if not source.exists():
        pytest.skip("no checkout: csrc/ is not here")
    assert set(patch) == {"name", "file", "old", "new", "means", "tests"}
    assert run.applies(patch, source.read_text())
    assert patch["new"] != patch["old"] and patch["means"].endswith(".")
    words = shlex.split(patch["tests"])
    files = [word for word in words if word.startswith("tests/test_")]
    assert words[0] == "make" or (files and all((ROOT / name).exists() for name in files))


def counts(selections):
    """How many tests each has: {selection: its number}."""
    script = ROOT / "tests" / "mutants" / "selections.py"
    done = subprocess.run(
        [sys.executable, script, *selections], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(selections, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_every_patch_names_tests():
    """Not one of them selects nothing. Files that need PyTorch have a number where it is."""
    found = counts(sorted({one["tests"] for one in PATCHES if not one["tests"].startswith("make")}))
    empty = [f"{one['name']}: {one['tests']}" for one in PATCHES if found.get(one["tests"]) == 0]
    assert not empty, "without a test:\n" + "\n".join(empty)


def test_a_selection_without_tests_is_found():
    """By its words, and by its files: the words may be in another file."""
    numbers = counts(
        [
            "tests/test_mutants.py",
            "tests/test_mutants.py -k names_tests",
            "tests/test_mutants.py -k names_of_nothing",
            "tests/test_mutants.py -k two_rows",
            "tests/test_pool.py -k two_rows",
            "tests/test_mutants.py tests/test_pool.py -k 'names_tests or two_rows'",
        ]
    )
    every, one, none, elsewhere, there, both = numbers.values()
    assert (one, none, elsewhere) == (1, 0, 0) and every > len(PATCHES)
    assert there > 0 and both == one + there


def test_every_room_has_a_patch():
    assert {Path(patch["file"]).name for patch in PATCHES} >= set(ROOMS)


def test_names_are_different():
    assert len({patch["name"] for patch in PATCHES}) == len(PATCHES) >= 30


def test_a_patch_that_is_nowhere_or_everywhere_does_not_apply():
    patch = PATCHES[0]
    assert run.applies(patch, f"x {patch['old']} y")
    assert not run.applies(patch, "x y")
    assert not run.applies(patch, 2 * patch["old"])
