"""The GPU, as far as this build knows it.

This build has no CUDA part: every op runs on the CPU, and :func:`is_available` says False.
"""

from __future__ import annotations

__all__ = ["is_available", "why_not"]


def why_not() -> str | None:
    """Why no op can run on a GPU here; None if one can."""
    return "this build of linattn has no CUDA part"


def is_available() -> bool:
    """Can an op run on a GPU here?"""
    return why_not() is None
