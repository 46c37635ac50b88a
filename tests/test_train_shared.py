"""python -m linattn train --context-parallel: processes that share the tokens of each sequence."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.device import imported
from support.processes import environment

from linattn.programs import demo
from linattn.programs.command_line import main
from linattn.testing import RMS_BOUND

torch = imported("torch")

SIZES = {"d-model": 32, "head-dim": 16, "blocks": 2, "context": 32, "batch": 2, "steps": 6}
GIVEN = [f"--{name}={value}" for name, value in SIZES.items()]
GIVEN += ["--every=3", "--held-out=0.02", "--sample=5", Path(demo.__file__)]


def saved(directory):
    return torch.load(directory / "checkpoint.pt", weights_only=True)


def by_processes(size, *arguments):
    """The command in processes that torchrun would start so: their exit statuses and outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(size):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        command = [sys.executable, "-m", "linattn", "train", f"--context-parallel={size}"]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**{name: str(value) for name, value in variables.items()}),
        )
        started.append(process)
    said = [process.communicate(timeout=120) for process in started]
    return [(p.returncode, *texts) for p, texts in zip(started, said, strict=True)]


@pytest.mark.parametrize("layer", ["kda", "linear_attention"])
def test_the_loss_curve_is_that_of_one_process(layer, tmp_path, capsys):
    given = [f"--layer={layer}", *GIVEN]
    assert main(["train", *map(str, given), f"--out={tmp_path / 'one'}"]) == 0
    *_, of_one = capsys.readouterr().out.split("\n")
    answers = by_processes(2, *given, f"--out={tmp_path / 'two'}")
    assert [status for status, *_ in answers] == [0, 0], answers
    assert "held out, bits per byte" in answers[0][1] and not answers[1][1]
    assert answers[0][1].split("\n")[-1] == of_one  # the end of the sample
    one, two = (saved(tmp_path / name) for name in ("one", "two"))
    for name in ("losses", "held_out"):
        a, b = np.array(one[name]), np.array(two[name])
        rms = np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))
        assert a.shape == b.shape and rms < RMS_BOUND["float32"], name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "expected as many processes, got 1; start them by torchrun"),
        (("--layer=softmax",), "softmax attention reads all tokens at once"),
        (("--context=33",), "--context: expected a multiple of --context-parallel 2, got 33"),
    ],
)
def test_what_cannot_be_shared(given, message, tmp_path, monkeypatch, capsys):
    if given:
        monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = [*map(str, GIVEN), *given, "--context-parallel=2", f"--out={tmp_path}"]
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
