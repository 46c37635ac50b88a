"""A library of arrays of our own: DLPack and nothing else, every byte of it in view."""

import ctypes

import ml_dtypes
import numpy as np

from support.compare import leaves

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


PyCapsule_New = ctypes.pythonapi.PyCapsule_New
PyCapsule_New.restype = ctypes.py_object
PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
PyCapsule_GetName = ctypes.pythonapi.PyCapsule_GetName
PyCapsule_GetName.restype = ctypes.c_char_p
PyCapsule_GetName.argtypes = (ctypes.py_object,)

CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class Exporter:
    """A NumPy array that shows DLPack's two methods only, and counts what happens to its capsules.

    A capsule here has no destructor: only its consumer can end it.
    """

    versions = True
    flags = 0
    major = 1
    device = (1, 0)
    offset = 0
    compact = False  # leave the strides out

    def __init__(self, x, **options):
        self.x, self.exported, self.ended, self.alive = x, 0, 0, {}
        self.asked = []
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def shape(self):
        return self.x.shape

    @property
    def dtype(self):
        return self.x.dtype

    def __dlpack_device__(self):
        return self.device

    def end(self, address):
        self.ended += 1
        del self.alive[address]

    def __dlpack__(self, **options):
        self.asked.append(options)
        if not self.versions and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        x = self.x
        size = x.dtype.itemsize
        sizes = (ctypes.c_int64 * max(x.ndim, 1))(*x.shape)
        strides = (ctypes.c_int64 * max(x.ndim, 1))(*(s // size for s in x.strides))
        code = 4 if x.dtype == BFLOAT16 else CODES[x.dtype.kind]
        tensor = Tensor(
            x.ctypes.data - self.offset,
            Device(*self.device),
            x.ndim,
            Dtype(code, 8 * size, 1),
            sizes,
            None if self.compact else strides,
            self.offset,
        )
        deleter = DELETER(self.end)
        versioned = self.versions and "max_version" in options
        managed = (
            Versioned(self.major, 0, None, deleter, self.flags, tensor)
            if versioned
            else Managed(tensor, None, deleter)
        )
        address = ctypes.addressof(managed)
        self.alive[address] = managed, sizes, strides, deleter
        self.exported += 1
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return PyCapsule_New(address, name, None)


class Old(Exporter):
    versions = False


class Compact(Exporter):
    """Strides left out, and the data behind an offset."""

    compact = True
    offset = 64

    def __init__(self, x, **options):
        super().__init__(np.ascontiguousarray(x) if x.ndim else x, **options)


class Importer(Exporter):
    """A library with a namespace: outputs come back as its own."""

    class Namespace:
        @staticmethod
        def from_dlpack(memory):
            return Importer(np.from_dlpack(memory))

    def __array_namespace__(self):
        return self.Namespace


def numpy_of(x):
    return x.x if isinstance(x, Exporter) else np.asarray(x)


def all_ended(made):
    for x in leaves(list(made.values())):
        if isinstance(x, Exporter):
            assert x.exported == x.ended and not x.alive
