"""Threads, instruction sets, and what this build is."""

from __future__ import annotations

import sys

import numpy as np

from linattn import _linattn, cuda

__all__ = ["cuda", "get_num_threads", "set_num_threads", "show_config"]


def set_num_threads(n: int) -> None:
    """Let a call use up to n threads (1 to 256). Results do not depend on n, bit for bit."""
    _linattn.set_num_threads(n)


def get_num_threads() -> int:
    """Threads that a call may use: set_num_threads, else LINATTN_NUM_THREADS, OMP_NUM_THREADS or
    the processors this process may run on."""
    return _linattn.get_num_threads()


def config() -> dict[str, str]:
    """What show_config prints."""
    import linattn

    isa, compiled = _linattn.isa()
    return {
        "linattn": linattn.__version__,
        "Python": sys.version.split()[0],
        "NumPy": np.__version__,
        "compiler": _linattn.COMPILER,
        "instruction sets": ", ".join(
            name if here else f"{name} (not on this machine)" for name, here in compiled.items()
        ),
        "in use": f"{isa} (LINATTN_ISA chooses)",
        "threads": f"{get_num_threads()} (set_num_threads or LINATTN_NUM_THREADS chooses)",
        "CUDA": "available" if cuda.is_available() else f"no: {cuda.why_not()}",
    }


def show_config() -> None:
    """Print version, compiler, instruction sets, threads and CUDA."""
    for name, value in config().items():
        print(f"{name:16}  {value}")
