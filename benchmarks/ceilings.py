"""The ceilings of this machine, measured between the cases beside which they stand; and memory."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from linattn.config import config

from .base import Case
from .inputs import aligned

ROUNDS = 100_000  # of 24 or 12 multiply-adds of a vector: some 0.3 ms
COPY = 256 << 20  # bytes, many times any cache


def compiled():
    """peak.c as a library, or None with the reason: a benchmark also runs where no compiler is.

    It is for the instruction set that linattn uses: LINATTN_ISA gives shares of that one's peak.
    """
    cc = shlex.split(os.environ.get("CC", "cc"))
    native = ["-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    flags = {
        "avx2": ["-mavx2", "-mfma"],
        "baseline": [] if platform.machine() == "x86_64" else native,
    }.get(config()["in use"].split()[0], native)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        command = [
            *cc,
            "-O3",
            *flags,
            "-ffp-contract=fast",
            "-shared",
            "-fPIC",
            str(Path(__file__).with_name("peak.c")),
            "-o",
            str(library),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            return None, str(error)
        except subprocess.CalledProcessError as error:
            return None, error.stderr.strip() or str(error)
        peak = ctypes.CDLL(str(library))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in (
        ("fma", [ctypes.c_long, pointer]),
        ("update", [pointer, size, ctypes.c_float]),
        ("copy", [pointer, pointer, size]),
    ):
        function = getattr(peak, f"peak_{name}")
        function.restype, function.argtypes = ctypes.c_double, arguments
    return peak, ""


def measures(threads):
    """([(key, description, unit, units of one call, call)], [(description, why it cannot run)])."""
    found, missing = [], []
    peak, why = compiled()
    if peak is None:
        missing.append(("FMA peak, state update and copy", f"peak.c: {why}"))
    else:
        sink = ctypes.c_float()
        work = peak.peak_fma(1, ctypes.addressof(sink)) * ROUNDS / 1e9
        found.append(
            (
                "fma",
                "float32 multiply-add peak, one core",
                "GFLOP/s",
                work,
                lambda: peak.peak_fma(ROUNDS, ctypes.addressof(sink)),
            )
        )
        state = aligned((Case.HV, Case.D, Case.D))
        found.append(
            (
                "update",
                f"one pass over a state of {state.nbytes >> 10} KiB, read and written, one core",
                "GB/s",
                2 * state.nbytes / 1e9,
                lambda: peak.peak_update(state.ctypes.data, state.size, 1.0),
            )
        )
        a, b = np.zeros(COPY, np.uint8), np.ones(COPY, np.uint8)
        found.append(
            (
                "copy",
                f"copy of {COPY >> 20} MiB, read and written, one core",
                "GB/s",
                2 * COPY / 1e9,
                lambda: peak.peak_copy(a.ctypes.data, b.ctypes.data, COPY),
            )
        )
    n = 1024
    x, y, z = (np.ones((n, n), np.float32) for _ in range(3))
    found.append(
        (
            "sgemm",
            f"NumPy sgemm {n}^3, {threads} thread{'s' * (threads > 1)}",
            "GFLOP/s",
            2 * n**3 / 1e9,
            lambda: np.matmul(x, y, out=z),
        )
    )
    return found, missing


MEMORY = """
import sys
import numpy as np
import linattn

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

T, K, V = 1 << 20, 128, 128
before = status("VmRSS:")
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, T, 1, d), np.float32) for d in (K, K, V))
k /= np.linalg.norm(k[:1024], axis=-1).mean()
g = np.full((1, T, 1), -0.01, np.float32)
beta = np.full((1, T, 1), 0.5, np.float32)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
o, _ = linattn.gated_delta_rule(q, k, v, g, beta)
print((status("VmHWM:") - before) / sum(a.nbytes for a in (q, k, v, g, beta, o)))
"""


def memory():
    """Peak memory of a gated delta rule of 2^20 tokens, in units of its inputs and output together;
    None where the system does not tell."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError:
        return None
    return float(done.stdout)
