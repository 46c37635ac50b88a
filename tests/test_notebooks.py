"""The notebooks of docs/notebooks: their cells, one after another, without a warning."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import processes

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
FOUND = sorted(NOTEBOOKS.glob("*.ipynb"))
NEEDS = {"layer-in-training": ["torch"], "real-model": ["torch", "transformers"]}


def cells(path, kind):
    notebook = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_there_are_some():
    assert {path.stem for path in FOUND} > set(NEEDS) or not NOTEBOOKS.exists()


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_runs(path, tmp_path):
    """Without Jupyter: pictures are drawn, and shown nowhere."""
    for package in ["matplotlib", *NEEDS.get(path.stem, [])]:
        pytest.importorskip(package)
    script = tmp_path / "cells.py"
    show = "import matplotlib; matplotlib.use('Agg')\nimport matplotlib.pyplot as _p\n"
    show += "_p.show = lambda: [_p.figure(n).canvas.draw() for n in _p.get_fignums()]\n"
    script.write_text(show + "\n\n".join(cells(path, "code")) + "\n_p.show()\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=processes.environment(),
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_is_stored_without_outputs_and_links_to_files(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    for text in cells(path, "markdown"):
        for link in (part.split(")")[0] for part in text.split("](")[1:]):
            assert "://" in link or (path.parent / link.split("#")[0]).exists(), link
