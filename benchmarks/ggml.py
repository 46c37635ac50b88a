"""ggml's gated_delta_net, gated_linear_attn, rwkv_wkv6, rwkv_wkv7 and ssm_scan, called in the
library that a Python package brings.

pip install llama-cpp-python (with CMAKE_ARGS=-DLLAVA_BUILD=OFF it compiles less) or, for a look,
pywhispercpp. Nothing of them is imported: libggml-cpu is opened, where there is one, and a graph of
the one op is computed, again and again, on arrays that are ours.
"""

import ctypes
import re
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib import metadata

import numpy as np

from .base import Peer
from .check import log_decay
from .inputs import aligned

# pip compiles the first for the processor it is on; the second comes compiled for many
PACKAGES = ("llama-cpp-python", "pywhispercpp")
LIBRARY = re.compile(r"libggml-cpu(\.\d+)*\.(so|dylib)(\.\d+)*")
TYPES = {"float32": 0, "int32": 26}  # GGML_TYPE_F32, GGML_TYPE_I32
POOL_PARAMS = 4096  # bytes: more than a ggml_threadpool_params, of which only ggml knows the inside

ptr = c_void_p
FUNCTIONS = {  # its result, its arguments
    "ggml_version": (c_char_p,),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_new_tensor_4d": (ptr, ptr, c_int, c_int64, c_int64, c_int64, c_int64),
    "ggml_nbytes": (c_size_t, ptr),
    "ggml_gated_delta_net": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, c_int64),
    "ggml_gated_linear_attn": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, c_float),
    "ggml_rwkv_wkv6": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr),
    "ggml_rwkv_wkv7": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr),
    "ggml_ssm_scan": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, c_int64),
    "ggml_new_graph_custom": (ptr, ptr, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, ptr, ptr),
    "ggml_threadpool_params_init": (None, ptr, c_int),
    "ggml_threadpool_new": (ptr, ptr),
    "ggml_backend_cpu_init": (ptr,),
    "ggml_backend_cpu_set_n_threads": (None, ptr, c_int),
    "ggml_backend_cpu_set_threadpool": (None, ptr, ptr),
    "ggml_backend_cpu_buffer_from_ptr": (ptr, ptr, c_size_t),
    "ggml_backend_tensor_alloc": (c_int, ptr, ptr, ptr),
    "ggml_backend_graph_plan_create": (ptr, ptr, ptr),
    "ggml_backend_graph_plan_compute": (c_int, ptr, ptr),
}


class InitParams(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("buffer", ptr), ("no_alloc", c_bool))


def library():
    """The first package's libggml-cpu, and the package's name with its version."""
    for package in PACKAGES:
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        files = [f for f in found.files or () if LIBRARY.fullmatch(f.name)]
        if files:
            # the functions of libggml-base are found through it too, since it is linked with that
            path = min(files, key=lambda f: len(f.name)).locate()
            return ctypes.CDLL(str(path)), f"{package} {found.version}"
    raise ImportError(f"neither {' nor '.join(PACKAGES)} is installed with its libggml-cpu")


class Ggml:
    """The library with its functions declared, and its CPU backend with its threads."""

    def __init__(self, threads):
        self.lib, package = library()
        for name, (result, *takes) in {"ggml_init": (ptr, InitParams), **FUNCTIONS}.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, takes
            setattr(self, name.removeprefix("ggml_"), function)
        version = self.version().decode()
        self.release = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        # Before, gated_delta_net took the state in another shape, and a wrong shape aborts the
        # process. Tried with 0.13.1 and 0.25.3.
        if self.release != (0, 13) and self.release < (0, 15):
            raise ImportError(f"ggml {version} of {package}: neither 0.13 nor 0.15 or later")
        if threads > 1 and not hasattr(self.lib, "omp_get_num_threads"):
            raise ImportError(
                f"ggml {version} of {package}: built without OpenMP, its own threads "
                "wait for the next call in a loop, while the others are timed"
            )
        self.about = f"{version} of {package}, {self.built_for()}"
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)
        # a pool for good, even of one: each call makes one and ends it else
        params = ctypes.create_string_buffer(POOL_PARAMS)
        self.threadpool_params_init(params, threads)
        self.backend_cpu_set_threadpool(self.backend, self.threadpool_new(params))

    def built_for(self):
        """The vectors it was compiled for, which is more than half of how fast it is."""
        for name in ("avx512", "avx2", "avx", "sve", "neon"):
            has = getattr(self.lib, f"ggml_cpu_has_{name}", None)
            if has is not None and has():
                return name.upper()
        return "no AVX"

    def planned(self, case, arrays, state, out):
        """A function that computes the case into `out`: o, and the state after it.

        Arrays are ggml's as they are: its first dimension is our last, and memory is the same.
        """

        def build(context, tensors):
            if case.op == "ssd":
                return self.scan(context, tensors)
            if case.delta:
                return self.gated_delta_net(context, *tensors, 1)  # 1: the last token's state only
            if not case.ordinary:
                wkv = self.rwkv_wkv7 if case.variant.rule == "dplr" else self.rwkv_wkv6
                return wkv(context, *tensors)
            q, k, v, g, s = tensors
            return self.gated_linear_attn(context, k, v, q, g, s, case.D**-0.5)

        return self.computing(build, (*arrays, state), out)

    def scan(self, context, tensors):
        """ssm_scan of x, dt, A, B, C, the rows of the states, and the states."""
        x, dt, A, B, C, ids, s = tensors
        return self.ssm_scan(context, s, x, dt, A, B, C, ids, 1)  # 1: the last state only

    def computing(self, build, arrays, out):
        """A function that computes build(context, tensors of the arrays) into `out`.

        Contexts and plans, a few kilobytes each, live as long as the process.
        """
        size = 16 * self.tensor_overhead() + self.graph_overhead_custom(8, False)
        context = self.init(InitParams(size, None, True))
        result = build(context, [self.tensor(context, a) for a in arrays])
        assert self.nbytes(result) == out.nbytes
        self.place(result, out)
        graph = self.new_graph_custom(context, 8, False)
        self.build_forward_expand(graph, result)
        plan = self.backend_graph_plan_create(self.backend, graph)
        compute, backend = self.backend_graph_plan_compute, self.backend

        def call():
            if compute(backend, plan) != 0:
                raise RuntimeError("ggml: the graph was not computed")

        return call

    def tensor(self, context, a):
        """A tensor whose memory is the array's: four dimensions, ours turned round."""
        tensor = self.new_tensor_4d(context, TYPES[a.dtype.name], *a.shape[::-1])
        assert self.nbytes(tensor) == a.nbytes and a.flags.c_contiguous
        self.place(tensor, a)
        return tensor

    def place(self, tensor, a):
        buffer = self.backend_cpu_buffer_from_ptr(a.ctypes.data, a.nbytes)
        if self.backend_tensor_alloc(buffer, tensor, a.ctypes.data) != 0:
            raise RuntimeError("ggml: no tensor in this array's memory")

    def state_shape(self, case):
        """As the op takes it; [V,K] of each head for gated_delta_net, rwkv_wkv7 and ssm_scan, [K,V]
        for the others."""
        B, heads, D = case.B, case.HV, case.D
        if case.op == "ssd":
            return B, heads, case.values, D
        if not case.delta:
            return 1, 1, B, heads * D * D
        return (1, B, 1, heads * D * D) if self.release == (0, 13) else (B, heads, D, D)


def peers(threads):
    try:
        ggml = Ggml(threads)
    except (AttributeError, OSError) as error:  # not a function of it; not for this system
        raise ImportError(str(error)) from None

    def has(case):
        if case.dtype != "float32" or case.pass_ == "forward+backward":
            return False
        if case.system:
            return case.op == "ssd" and case.pass_ == "forward"
        return case.ordinary or case.variant.rule in ("dplr", "bonus")

    def arguments(case, x):
        """The arrays in ggml's order and shapes, all but the state."""
        if case.op == "ssd":
            # It takes the softplus of its dt, one for a token and head, where a caller of ours does
            # that before. ids says which row of the states a sequence has.
            raw = np.log(np.expm1(x["dt"].astype(np.float64)))
            ids = np.arange(case.B, dtype=np.int32).reshape(1, 1, 1, -1)
            return [x["x"], raw[None], x["A"].reshape(1, 1, -1, 1), x["B"], x["C"], ids]
        B, T, H, D = x["v"].shape
        g = log_decay(np, x)
        # Prepared once, which is a favour: gated_linear_attn takes decays where ours takes their
        # logarithms, and one for each key where others have one for a head. No decay is one of 1.
        if case.delta:
            g = np.zeros((B, T, H, 1)) if g is None else g.reshape(B, T, H, -1)
            return [x["q"], x["k"], x["v"], g, x["beta"][..., None]]
        if not case.ordinary:  # RWKV's functions take the tokens of all sequences in a row
            q, a = x["q"] * case.D**-0.5, np.exp(g)
            if case.variant.rule == "dplr":
                given = [q, a, x["k"], x["v"], x["x"], -x["y"]]
            else:
                bonus = np.broadcast_to(x["bonus"], (1, 1, H, D))
                given = [x["k"], x["v"], q, bonus, a]
            return [z.reshape(1, -1, H, D) for z in given]
        g = np.ones((B, T, H, 1)) if g is None else np.exp(g).reshape(B, T, H, -1)
        return [x["q"], x["k"], x["v"], np.broadcast_to(g, (B, T, H, D))]

    def make(case, x):
        given = arguments(case, x)
        kinds = [np.int32 if a.dtype == np.int32 else np.float32 for a in given]
        arrays = [aligned(a.shape, kind) for a, kind in zip(given, kinds, strict=True)]
        for a, b in zip(arrays, given, strict=True):
            a[:] = b
        shape = case.B, case.T, case.HV, case.values
        n = int(np.prod(shape))
        # o, then the state after the last token
        out = aligned((n + case.B * case.HV * case.D * case.values,))
        o, after = out[:n].reshape(shape), out[n:].reshape(ggml.state_shape(case))
        # A step's state is written where it was read, as ours: another favour, as ggml's programs
        # have it written elsewhere and copy it back.
        step = case.pass_ == "step"
        state = after if step else aligned(after.shape)
        call = ggml.planned(case, arrays, state, out)

        def run():
            call()
            return (o[:, 0] if step else o,)

        run.held = arrays, state  # ggml has their addresses only
        return run

    return [Peer("ggml", ggml.about, make, has)]
