"""The GPU, as far as this build knows it. Nothing here starts it but a question that needs it."""

from __future__ import annotations

from linattn import _linattn

__all__ = ["device_count", "is_available", "why_not"]


def why_not() -> str | None:
    """Why no op can run on a GPU here; None if one can."""
    return _linattn.cuda_why_not()


def is_available() -> bool:
    """Can an op run on a GPU here?"""
    return why_not() is None


def device_count() -> int:
    """How many GPUs an op could run on."""
    return _linattn.cuda_device_count()
