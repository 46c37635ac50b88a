"""`--device emulated`: the ops on another machine's processor; tests and references stay here.

LINATTN_EMULATED is the command that starts a Python of that machine, for example in an emulator.
linattn must be importable there. There `serve` reads calls from standard input and writes answers
to standard output. A call's arrays travel with their arena (device.py), so they lie there as they
do here. The references in NumPy would take far longer there than the ops.
"""

import os
import pickle
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Twin:
    """An array of the other side: where in the call's arena it lies."""

    number: int  # of all that the call's arena has
    offset: int
    shape: tuple
    strides: tuple
    dtype: np.dtype

    def over(self, block):
        return np.ndarray(self.shape, self.dtype, block, self.offset, self.strides)


def mapped(x, change):
    """change(x), or of its members if x is a tuple or a list."""
    if isinstance(x, tuple | list):
        parts = [mapped(y, change) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return change(x)


class Emulated:
    """The methods that device.py needs of a kind of arrays. There is one arena at a time."""

    negative_strides = True

    def __init__(self):
        if not os.environ.get("LINATTN_EMULATED"):
            raise RuntimeError("LINATTN_EMULATED names no command that starts the other Python")
        tests = os.path.dirname(os.path.dirname(__file__))
        start = (
            f"import sys; sys.path.append({tests!r}); "
            "from support import emulated; emulated.serve()"
        )
        self.other = subprocess.Popen(
            [*shlex.split(os.environ["LINATTN_EMULATED"]), "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.what = self.answer()

    def answer(self):
        try:
            return pickle.load(self.other.stdout)
        except EOFError:
            raise RuntimeError(f"the other side ended with {self.other.wait()}") from None
        except BaseException:  # a test ran out of time: no other call may read its late answer
            self.other.kill()
            raise

    def there(self, block):
        self.block, self.twins = block.copy(), []
        return self.block

    def back(self, block):
        return block

    def view(self, block, offset, x, shape, strides):
        self.twins.append(Twin(len(self.twins), offset, shape, strides, x.dtype))
        return self.twins[-1]

    def is_own(self, y):
        return isinstance(y, np.ndarray)

    def from_numpy(self, y):
        return y

    def to_numpy(self, y):
        return y

    def call(self, name, *args, **kwargs):
        pickle.dump((name, self.block, args, kwargs), self.other.stdin)
        self.other.stdin.flush()
        error, result, warned, self.block[:] = self.answer()
        for message, category in warned:
            warnings.warn(message, category, stacklevel=2)
        if error:
            raise error
        return mapped(result, lambda y: self.twins[y.number] if isinstance(y, Twin) else y)


def serve():
    import platform

    import linattn

    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers

    def answer(*what):
        pickle.dump(what, answers)
        answers.flush()

    answer(platform.machine(), linattn._linattn.isa()[0])
    while True:
        try:
            call = pickle.load(calls)
        except EOFError:
            return
        answer(*run(linattn, *call))


def run(linattn, name, block, args, kwargs):
    block = block.copy()  # an unpickled array may be read-only
    arrays = []  # [(array, twin)]

    def made(x):
        if not isinstance(x, Twin):
            return x
        arrays.append((x.over(block), x))
        return arrays[-1][0]

    def twin_of(y):
        return next((twin for array, twin in arrays if y is array), y)

    error = result = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = getattr(linattn, name)(
                *mapped(args, made), **{key: mapped(x, made) for key, x in kwargs.items()}
            )
        except Exception as raised:
            error = raised
    said = [(str(w.message), w.category) for w in warned]
    return error, mapped(result, twin_of), said, block
