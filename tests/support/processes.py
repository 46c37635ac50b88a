"""Code in a process of its own: a fresh interpreter, or a fork of this one."""

import os
import pathlib
import signal
import subprocess
import sys
import warnings

import pytest

import linattn
from support import device

PATHS = (str(pathlib.Path(linattn.__file__).parents[1]), str(pathlib.Path(__file__).parents[1]))


def environment(**changed):
    """This process's variables, for a child that sees the same linattn, and `support`."""
    path = [*PATHS, os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | changed


def python(code, *, timeout=60, check=True, **variables):
    """Run code in a fresh interpreter where a warning is an error: its stdout.

    With check=False any ending is fine, and the finished process is the answer.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**variables),
    )
    if check:
        assert done.returncode == 0, done.stderr
        return done.stdout
    return done


def outcome_of(call):
    """The exception of a call in a child: a crash there must not end the tests. (A device is of no
    use to a child; the checks are the same.)"""
    if device.kind != "numpy":
        with pytest.raises(Exception) as caught:
            call()
        return f"{caught.type.__name__}: {caught.value}"
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: forks beside threads
        child = os.fork()
    if child == 0:
        try:
            try:
                call()
                text = "nothing raised"
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return text
