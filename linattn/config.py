"""Threads, instruction sets, and what this build is."""

from __future__ import annotations

import sys

import numpy as np

from linattn import _linattn, cuda

__all__ = [
    "cuda",
    "get_float32_precision",
    "get_num_threads",
    "set_float32_precision",
    "set_num_threads",
    "show_config",
]


def set_num_threads(n: int) -> None:
    """Let a call use up to n threads. Results do not depend on n, bit for bit.

    Parameters
    ----------
    n : int
        1 to 256.

    Raises
    ------
    TypeError
        ``n`` is not an int.
    ValueError
        ``n`` is less than 1 or more than 256.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.random.default_rng(0).standard_normal((1, 100, 4, 8))
    >>> before, (o, _) = linattn.get_num_threads(), linattn.retention(x, x, x)
    >>> linattn.set_num_threads(2)
    >>> np.array_equal(o, linattn.retention(x, x, x)[0])
    True
    >>> linattn.set_num_threads(before)
    """
    _linattn.set_num_threads(n)


def get_num_threads() -> int:
    """How many threads a call may use.

    Returns
    -------
    int
        The number that :func:`set_num_threads` was given; else that of the environment variable
        LINATTN_NUM_THREADS or OMP_NUM_THREADS; else that of the processors this process may run on.

    Examples
    --------
    >>> import linattn
    >>> 1 <= linattn.get_num_threads() <= 256
    True
    """
    return _linattn.get_num_threads()


def set_float32_precision(precision: str) -> None:
    """How products of float32 numbers may be rounded, in calls that do not say ``allow_tf32``.

    Parameters
    ----------
    precision : {"ieee", "tf32"}
        ``"ieee"``, the default: as float32. ``"tf32"``: at worst as tf32 rounds, operands to 11
        bits; sums and states stay float32. This lets float32 arrays on a GPU use its tensor cores
        where there is a kernel for it (forward passes in chunks, K <= 128), which keeps 16 bits,
        11 in the delta rules' inverse (docs/decisions/0025). Elsewhere, and in gradients and steps,
        it changes nothing.

    Raises
    ------
    TypeError
        ``precision`` is not a string.
    ValueError
        ``precision`` is another string.

    Examples
    --------
    >>> import linattn
    >>> before = linattn.get_float32_precision()
    >>> linattn.set_float32_precision("tf32")
    >>> linattn.get_float32_precision()
    'tf32'
    >>> linattn.set_float32_precision(before)
    """
    if not isinstance(precision, str):
        raise TypeError(f"precision: expected 'ieee' or 'tf32', got {type(precision)}")
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision: expected 'ieee' or 'tf32', got {precision!r}")
    _linattn.set_allow_tf32(precision == "tf32")


def get_float32_precision() -> str:
    """How products of float32 numbers may be rounded, as :func:`set_float32_precision` has it.

    Returns
    -------
    str
        ``"ieee"`` or ``"tf32"``.

    Examples
    --------
    >>> import linattn
    >>> linattn.get_float32_precision() in ("ieee", "tf32")
    True
    """
    return "tf32" if _linattn.get_allow_tf32() else "ieee"


def config() -> dict[str, str]:
    """The lines that show_config prints, by their names."""
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
        "float32": f"{get_float32_precision()} (set_float32_precision or allow_tf32 chooses)",
        "CUDA code": _linattn.CUDA_ARCHS or "none",
        "CUDA": "available" if cuda.is_available() else f"no: {cuda.why_not()}",
    }


def show_config() -> None:
    """Print version, compiler, instruction sets, threads and CUDA.

    Examples
    --------
    >>> import linattn
    >>> linattn.show_config()  # doctest: +ELLIPSIS
    linattn           ...
    Python            ...
    NumPy             ...
    """
    for name, value in config().items():
        print(f"{name:16}  {value}")
