"""The GPU, as far as this build knows it. Nothing here starts it but a question that needs it."""

from __future__ import annotations

from linattn import _linattn

__all__ = ["device_count", "empty_cache", "is_available", "why_not"]


def why_not() -> str | None:
    """Why no op can run on a GPU here; None if one can.

    Returns
    -------
    str or None

    Examples
    --------
    >>> import linattn
    >>> reason = linattn.cuda.why_not()
    >>> reason is None or isinstance(reason, str)
    True
    """
    return _linattn.cuda_why_not()


def is_available() -> bool:
    """Can an op run on a GPU here?

    Returns
    -------
    bool
        False if this build has no CUDA part, or if there is no driver or no device; :func:`why_not`
        says which.

    Examples
    --------
    >>> import linattn
    >>> device = "cuda" if linattn.cuda.is_available() else "cpu"
    >>> linattn.cuda.is_available() == (linattn.cuda.why_not() is None)
    True
    """
    return why_not() is None


def device_count() -> int:
    """How many GPUs an op could run on.

    Returns
    -------
    int
        0 where none is available.

    Examples
    --------
    >>> import linattn
    >>> (linattn.cuda.device_count() > 0) == linattn.cuda.is_available()
    True
    """
    return _linattn.cuda_device_count()


def empty_cache() -> None:
    """Give the memory that linattn keeps on the devices back to them.

    A call's scratch (up to 4 GiB for gradients of long sequences with many heads) stays with a pool
    of linattn's own for the next call; other libraries cannot use it meanwhile, and
    ``torch.cuda.empty_cache`` does not know of it. What a running kernel still uses stays:
    synchronize first. Does nothing where no op ran on a GPU.

    Raises
    ------
    RuntimeError
        CUDA refuses, in its words.

    Examples
    --------
    >>> import linattn
    >>> linattn.cuda.empty_cache()
    """
    _linattn.cuda_trim()
