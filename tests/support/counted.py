"""Numbers that count what is done with them, and products of arrays of them."""

import numpy as np


class Counted:
    """A number that counts what is done with it."""

    done = 0

    def __init__(self, x):
        self.x = float(x)

    def _count(self, operation, other):
        if not isinstance(other, Counted):
            return NotImplemented  # an array: it does this for each of its numbers
        Counted.done += 1
        return Counted(operation(self.x, other.x))

    def __add__(self, other):
        return self._count(lambda x, y: x + y, other)

    def __sub__(self, other):
        return self._count(lambda x, y: x - y, other)

    def __mul__(self, other):
        return self._count(lambda x, y: x * y, other)

    def __truediv__(self, other):
        return self._count(lambda x, y: x / y, other)

    def __neg__(self):  # a change of sign is no operation
        return Counted(-self.x)


counted = np.vectorize(Counted, otypes=[object])
plain = np.vectorize(lambda x: x.x, otypes=[float])


def zeros(*shape):
    return counted(np.zeros(shape))


def dot(xs, ys, start=None):
    total = Counted(0) if start is None else start
    for x, y in zip(xs, ys, strict=True):
        total = total + x * y
    return total


def product(A, B, start=None):
    """start + A B, from zeros without a start."""
    start = zeros(len(A), B.shape[1]) if start is None else start
    rows = [[dot(A[i], B[:, j], start[i, j]) for j in range(B.shape[1])] for i in range(len(A))]
    return np.array(rows, object).reshape(start.shape)
