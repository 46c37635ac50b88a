"""Options, markers and fixtures: the choice of cases and of the device.

The grid is too large for every run: `--grid=sample` (the default) takes a fixed sample of it,
`--grid=few` a fifth of that, `--grid=all` all of it. `--device` names the arrays that the ops are
called on: see support/device.py.
"""

import os
import sys
from collections import Counter
from pathlib import Path

# Before NumPy is there, and for child processes too. The products are small. BLAS's other threads
# wait in a loop, on the processors that the other workers and linattn's own threads need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from support import device


def pytest_addoption(parser):
    parser.addoption(
        "--grid",
        choices=("few", "sample", "all"),
        default="sample",
        help="how much of the grid of shapes to run",
    )
    parser.addoption(
        "--device",
        choices=device.KINDS,
        default="numpy",
        help="the arrays that the ops are called with: NumPy's, here or on another "
        "processor (emulated), or PyTorch's on the CPU (torch) or a GPU (cuda), "
        "or CuPy's",
    )


def pytest_configure(config):
    try:
        device.choose(config.getoption("--device"))
    except RuntimeError as error:
        raise pytest.UsageError(f"--device {config.getoption('--device')}: {error}") from None


def pytest_report_header(config):
    if device.kind != "numpy":
        what = f" {device.arrays.what}" if device.kind == "emulated" else ""
        return (
            f"device: {device.kind}{what}; test files with nothing for a device are left out, "
            f"these run: {', '.join(device.files())}"
        )


def pytest_ignore_collect(collection_path):
    path = collection_path
    if device.kind != "numpy" and path.match("test_*.py") and path.name not in device.files():
        return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    device.left_out.clear()
    try:
        return (yield)
    finally:
        item.user_properties.extend(("left out", what) for what in sorted(device.left_out))


def pytest_terminal_summary(terminalreporter):
    """List the tests that ran without one of their parts."""
    counts = Counter(
        (what, report.nodeid.partition("[")[0])
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for key, what in report.user_properties
        if key == "left out"
    )
    if counts:
        terminalreporter.section(f"parts left out on {device.kind}")
    for (what, test), count in sorted(counts.items()):
        terminalreporter.line(f"{what}: {test} ({count})")


@pytest.fixture
def bench(monkeypatch):
    """The package benchmarks/ can be imported. The checkout comes last on sys.path, since it has a
    linattn of its own without the extension."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).resolve().parents[1])])
    pytest.importorskip("benchmarks", reason="no checkout: benchmarks/ is not here")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Processes of one torch.distributed world, which tests send functions to."""
    from support.ranks import Ranks

    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.end()


@pytest.fixture
def rng(request):
    """A generator of this test's own: the same numbers whatever runs beside it."""
    return np.random.default_rng(abs(hash_of(request.node.nodeid)))


def hash_of(text):
    """A hash that does not change from process to process."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
