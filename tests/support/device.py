"""The ops on the arrays that `--device` names, for tests that make and compare NumPy arrays.

    from support.device import ops as linattn

is linattn itself with `--device numpy`, and `gates` there is linattn.gates. With another device
every call of an op takes its NumPy arguments there, runs on the arrays of that kind, and brings
back what comes out and what was written. The arguments of one call travel in one block of memory,
the arena: strides, offsets and overlaps are as they were on the host. Between the arrays lie bytes
that no call may write.

Some arrays do not exist in some libraries: read-only ones, byte-swapped ones, negative strides in
PyTorch. A test that needs one is skipped, and the report names the reason. If only a part of a test
has no meaning on a device, the test asks here (`negative_strides()`, `leave_out()`, `part()`) and
leaves that part out. The run ends with a list of these parts.
"""

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import warnings

import ml_dtypes
import numpy as np
import pytest

import linattn
from linattn import _rooms, scans, variants
from support import emulated

KINDS = ("numpy", "emulated", "torch", "cuda", "cupy")
FILES = (
    "test_arguments_dtypes.py",
    "test_arguments_options.py",
    "test_arguments_shapes.py",
    "test_autograd.py",
    "test_autograd_transforms.py",
    "test_backward.py",
    "test_bound.py",
    "test_comba.py",
    "test_convolution.py",
    "test_cuda.py",
    "test_cuda_bits.py",
    "test_cuda_gates.py",
    "test_cuda_large.py",
    "test_cuda_shared.py",
    "test_cuda_streams.py",
    "test_extremes.py",
    "test_features.py",
    "test_forward.py",
    "test_gated.py",
    "test_gates.py",
    "test_identities.py",
    "test_nn_cuda.py",
    "test_noncausal.py",
    "test_pool.py",
    "test_properties.py",
    "test_scans.py",
    "test_step.py",
    "test_weighed.py",
    "test_worked_example.py",
)
COMPUTED = (
    "test_backward.py",
    "test_comba.py",
    "test_extremes.py",
    "test_forward.py",
    "test_identities.py",
    "test_pool.py",
    "test_properties.py",
    "test_step.py",
)  # these have nothing but calls of the ops
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FEW_TOKENS = 8  # up to so many go token by token on a GPU: csrc/cuda/dispatch.cu
SCANS = [name for name in scans.__all__ if f"{name}_step" in scans.__all__]
OPS = (  # comba is an option of the core, with the arrays of the table
    *linattn.OPS,
    "comba",
    *SCANS,
    "causal_conv1d",
)
PASSES = {f"{op}{pass_}" for op in OPS for pass_ in ("", "_step", "_backward")}
# the keywords of arrays: the tables', the gradients of outputs, other names of g and of a state,
# those of linattn.gates, and those that a scan makes its own arrays of
LINES = (*variants.ARRAYS, *(line for room in _rooms.ROOMS.values() for line in room.lines))
ARRAYS = {"alpha", "gamma", "slopes", "state", "A_log", "dt_bias", "dg", "dbeta"}.union(
    (x.label for x in LINES),
    (x.gradient for x in LINES if x.role == "OUTPUT"),
    ("dt", "r", "i", "Lambda", "reset"),
)

kind = "numpy"
arrays = None  # a Torch or a CuPy
left_out = set()


def choose(name):
    """Once, before a test file is read. Raises RuntimeError where there is no such device."""
    global kind, arrays
    kind = name
    if name == "numpy":
        return
    if name == "emulated":
        arrays = emulated.Emulated()
        return
    if name != "torch" and not linattn.cuda.is_available():
        raise RuntimeError(linattn.cuda.why_not())
    try:
        arrays = CuPy() if name == "cupy" else Torch(name)
    except pytest.skip.Exception as error:
        raise RuntimeError(error) from None


def imported(name):
    """An optional library. Its own warnings while it loads are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


def on_host():
    return kind in ("numpy", "torch", "emulated")


def files():
    """The test files that have something for this device."""
    return COMPUTED if kind == "emulated" else FILES


def leave_out(what):
    left_out.add(what)


@contextlib.contextmanager
def part():
    """A part of a test: without arrays that it needs, this part alone is left out."""
    try:
        yield
    except pytest.skip.Exception as reason:
        leave_out(str(reason))


def negative_strides():
    """Can arrays have negative strides here? If not, note that the test ran without them."""
    there_are = arrays is None or arrays.negative_strides
    if not there_are:
        leave_out("negative strides")
    return there_are


def needs_host(what):
    """Skip a test of something that only the arrays' values show."""
    if not on_host():
        pytest.skip(f"{kind}: {what}")


def needs_numpy(what):
    if kind != "numpy":
        pytest.skip(f"{kind}: {what}")


# ---- kinds of arrays ----


class Torch:
    """PyTorch's tensors, on the CPU or on the current CUDA device."""

    negative_strides = False

    def __init__(self, name):
        self.torch = torch = imported("torch")
        self.device = torch.device("cpu" if name == "torch" else "cuda")
        names = (
            "float64",
            "float32",
            "float16",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "bool",
            "complex64",
            "complex128",
        )
        self.dtypes = {np.dtype(name): getattr(torch, name) for name in names}
        self.dtypes[BFLOAT16] = torch.bfloat16

    def there(self, block):
        return self.torch.from_numpy(block).to(self.device, copy=True)

    def back(self, block):
        return block.cpu().numpy()

    def view(self, block, offset, x, shape, strides):
        """An array of this shape and these strides (in bytes) from byte `offset` on, with x's
        dtype. If there can be none, a str that says why."""
        size = x.dtype.itemsize
        if x.dtype not in self.dtypes:
            return f"no arrays of {x.dtype}"
        if any(s < 0 for s in strides):
            return "no negative strides"
        if offset % size or any(s % size for s in strides):
            return "no arrays whose elements are not aligned"
        typed = block.view(self.dtypes[x.dtype])
        return typed.as_strided(shape, [s // size for s in strides], offset // size)

    def is_own(self, y):
        return isinstance(y, self.torch.Tensor) and y.device.type == self.device.type

    def from_numpy(self, y):
        flat = self.there(np.ascontiguousarray(y).reshape(-1).view(np.uint8))
        return flat.view(self.dtypes[y.dtype]).reshape(y.shape)

    def to_numpy(self, y):
        y = y.detach().cpu().contiguous()
        if y.dtype == self.torch.bfloat16:
            return y.view(self.torch.int16).numpy().view(BFLOAT16)
        return y.numpy()


class CuPy:
    """CuPy's arrays. They may have any strides."""

    negative_strides = True

    def __init__(self):
        self.cupy = imported("cupy")

    def there(self, block):
        return self.cupy.asarray(block)

    def back(self, block):
        return block.get()

    def view(self, block, offset, x, shape, strides):
        if not x.dtype.isnative or (x.dtype.kind not in "biufc" and x.dtype != BFLOAT16):
            return f"no arrays of {x.dtype}"
        try:
            return self.cupy.ndarray(shape, x.dtype, block.data + offset, strides)
        except (TypeError, ValueError):
            return f"no arrays of {x.dtype}"

    def is_own(self, y):
        return isinstance(y, self.cupy.ndarray)

    def from_numpy(self, y):
        return self.cupy.asarray(y)

    def to_numpy(self, y):
        return y.get()


# ---- one call ----

GAP = 256  # bytes of 0xFF, a NaN in every dtype, before, between and behind the arrays
ALIGN = 64  # an array's address modulo this is as on the host


def plain_strides(x):
    """The strides of x, those of axes with one element or none as in a contiguous array."""
    strides, size = [], x.dtype.itemsize
    for n, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        strides.append(stride if n > 1 and x.size else size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def extent(x):
    """The addresses [low, high) of x, which is not empty."""
    low = x.__array_interface__["data"][0]
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return low + sum(s for s in steps if s < 0), low + sum(s for s in steps if s > 0) + x.itemsize


def memory(low, high):
    """The bytes of the host at [low, high), as an array over them."""
    return np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)


class Arena:
    """The arrays of one call, on the device, and the way back."""

    def __init__(self, xs):
        spans = []  # [low, high, place in the arena]: arrays that overlap share one
        for low, high in sorted(extent(x) for x in xs if x.size):
            if spans and low < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], high)
            else:
                spans.append([low, high, 0])
        size = 0
        for span in spans:
            low, high, _ = span
            span[2] = size + GAP + (low - size - GAP) % ALIGN
            size = span[2] + high - low
        self.spans = spans
        block = np.full(-(-(size + GAP) // ALIGN) * ALIGN, 0xFF, np.uint8)
        for low, high, place in spans:
            block[place : place + high - low] = memory(low, high)
        self.block = arrays.there(block)

    def twin(self, x):
        """The device's array for the host's x. If there can be none, a str that says why."""
        offset = 0
        if x.nbytes:
            address = x.__array_interface__["data"][0]
            low, _, place = next(s for s in self.spans if s[0] <= address < s[1])
            offset = place + address - low
        return arrays.view(self.block, offset, x, x.shape, plain_strides(x))

    def bring_back(self):
        """Copy what the call wrote into the host's arrays, and check that it wrote nothing else."""
        block = arrays.back(self.block)
        end = 0
        gaps = []
        for low, high, place in self.spans:
            gaps.append(block[end:place])
            end = place + high - low
            there, here = block[place:end], memory(low, high)
            if not np.array_equal(there, here):
                here[:] = there
        gaps = np.concatenate([*gaps, block[end:]])
        assert (gaps == 0xFF).all(), "memory outside the call's arrays was written"


tolerant = False


@contextlib.contextmanager
def from_the_host():
    """Within this context, an array that the device cannot have is passed as the host's."""
    global tolerant
    tolerant = True
    try:
        yield
    finally:
        tolerant = False


def bridged(function):
    """A function of NumPy arrays, for the device's."""
    if function is None:
        return None

    @functools.wraps(function)
    def bridge(*xs):
        y = function(*map(arrays.to_numpy, xs))
        return arrays.from_numpy(y) if isinstance(y, np.ndarray) else y

    return bridge


def bridged_map(given):
    """A test's feature_map argument, its functions bridged."""
    if type(given) in (tuple, list):
        return type(given)(map(bridged_map, given))
    if isinstance(given, linattn.FeatureMap):
        return dataclasses.replace(
            given, forward=bridged(given.forward), backward=bridged(given.backward)
        )
    return bridged(given) if callable(given) else given


def through_the_device(real):
    positions = list(inspect.signature(real).parameters)

    @functools.wraps(real)
    def call(*args, **kwargs):
        xs = []

        def collect(name, x):
            if name in ARRAYS:
                for one in x if isinstance(x, tuple | list) else (x,):
                    if isinstance(one, np.ndarray):
                        xs.append(one)

        for name, x in (*zip(positions, args, strict=False), *kwargs.items()):
            collect(name, x)
        arena = Arena(xs)
        twins = []  # [(host's array, device's array)]

        def convert(name, x):
            if name == "feature_map":
                return bridged_map(x)
            if name not in ARRAYS:
                return x
            if type(x) in (tuple, list):
                return type(x)(convert(name, one) for one in x)
            if not isinstance(x, np.ndarray):
                return x
            twin = arena.twin(x)
            if name in ("out", "state") and not x.flags.writeable:
                twin = "no read-only arrays"
            if isinstance(twin, str):
                if not tolerant:
                    pytest.skip(f"{kind} has {twin}")
                return x
            twins.append((x, twin))
            return twin

        def revert(y):
            if y is None or type(y) is float:  # the gradient of a number
                return y
            if isinstance(y, tuple):
                parts = map(revert, y)
                return type(y)(*parts) if hasattr(y, "_fields") else tuple(parts)
            for x, twin in twins:
                if y is twin:
                    return x
            if tolerant and isinstance(y, np.ndarray):
                return y
            assert arrays.is_own(y), f"{real.__name__} of {kind} arrays gave a {type(y)}"
            return arrays.to_numpy(y)

        function = real
        if kind == "emulated":
            function = functools.partial(arrays.call, real.__name__)
        named = [convert(name, x) for name, x in zip(positions, args, strict=False)]
        rest = args[len(named) :]
        kwargs = {name: convert(name, x) for name, x in kwargs.items()}
        try:
            return revert(function(*named, *rest, **kwargs))
        finally:
            arena.bring_back()

    return call


def taken(function):
    """A test's function of arrays by the ops' names: it gets those of the device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if kind == "emulated":
            pytest.skip("emulated: the other Python calls functions of linattn alone")
        real = function if kind == "numpy" else through_the_device(function)
        return real(*args, **kwargs)

    return call


class Ops:
    """linattn, its ops taken through the device."""

    def __getattr__(self, name):
        real = getattr(linattn, name)
        if kind != "numpy" and name in PASSES:
            real = through_the_device(real)
            setattr(self, name, real)
        return real


ops = Ops()


class Gates:
    """linattn.gates, taken through the device."""

    def __getattr__(self, name):
        return taken(getattr(linattn.gates, name))


gates = Gates()
