"""Ways for an array's elements to lie in memory, each a function of a contiguous array."""

import numpy as np


def fortran(x):
    return np.asfortranarray(x)


def transposed(x):
    """The last axis outermost in memory."""
    return np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(*range(1, x.ndim), 0)


def heads_first(x):
    """[B,T,H,K] over memory [B,H,T,K]: rows stay contiguous."""
    if x.ndim < 3:
        return x.copy()
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)


def backwards(x):
    """Every stride negative."""
    everything = (slice(None, None, -1),) * x.ndim
    return x[everything].copy()[everything]


def outer_backwards(x):
    return x[::-1].copy()[::-1] if x.ndim > 1 else x.copy()


def every_other(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 7, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def padded_rows(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), 7, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def misaligned(x):
    raw = bytearray(x.nbytes + 1)
    y = np.frombuffer(raw, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    assert not y.flags.aligned or x.dtype.itemsize == 1
    return y


def byte_swapped(x):
    return x.astype(x.dtype.newbyteorder())


def record_field(x):
    """Strides that are no multiple of the item size."""
    records = np.zeros(x.shape, np.dtype([("a", np.uint8), ("x", x.dtype)]))
    records["x"] = x
    return records["x"]


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


class Subclass(np.ndarray):
    pass


def subclass(x):
    return x.view(Subclass)


ROWS_KEPT = [heads_first, outer_backwards, padded_rows, read_only, subclass]
ROWS_BROKEN = [transposed, backwards, every_other, misaligned, byte_swapped, record_field]


def laid_out(made, layout, names=None):
    def one(x):
        if isinstance(x, tuple):
            return tuple(map(one, x))
        return layout(x) if isinstance(x, np.ndarray) else x

    return {name: one(x) if names is None or name in names else x for name, x in made.items()}
