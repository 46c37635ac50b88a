"""Messages of the ops, in the names that the caller of a system knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from linattn.features import is_traced
from linattn.ops._core import NAMES

__all__ = ["called"]

_ERRORS = (MemoryError, TypeError, ValueError)


@contextmanager
def called(names: Mapping[str, str], like: Any) -> Iterator[None]:
    """Within it an error or a warning of an op begins with the caller's name of the argument.

    names : the caller's names, by those of the op.
    like : an array of the call. While torch.compile reads it, the names are those of the op: there
        is no way to set a context variable then.
    """
    if is_traced(like):
        yield
        return
    token = NAMES.set(names)
    try:
        yield
    except _ERRORS as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in names:
            raise
        kind = next(kind for kind in _ERRORS if isinstance(error, kind))
        raise kind(f"{names[name]}: {rest}") from None
    finally:
        NAMES.reset(token)
