"""Scans as tests see them: how problems are drawn, and how gradients are judged."""

import numpy as np
import pytest

from linattn import reference
from support import device
from support.composed import DTYPES, judged, state_dtype
from support.device import ops as linattn


def gated_arrays(rng, B, T, D):
    return rng.standard_normal((B, T, D)), -rng.exponential(0.5, (B, T, D))


class Scan:
    """A scan: how problems are drawn, and the names of its arrays."""

    tokens: tuple  # arrays [B,T,...] of the dtype of the call
    wide = ()  # the others
    options: dict

    def __init__(self, name, **options):
        self.name, self.options = name, options
        self.forward, self.backward, self.step = (
            getattr(linattn, name + suffix) for suffix in ("", "_backward", "_step")
        )
        self.reference = getattr(reference, name)
        self.reference_backward = getattr(reference, name + "_backward")

    def __repr__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def arrays(self, rng, B, T, D, N, G):
        raise NotImplementedError

    def draw(self, rng, dtype=np.float64, B=2, T=19, D=6, N=5, G=2, S=None, state=True):
        """All arrays by name. S: the number of sequences, B unless they are packed."""
        found = self.arrays(rng, B, T, D, N, G)
        if state:
            found["initial_state"] = self.complex_or_real(rng, self.state_shape(S or B, D, N))
        return {name: self.cast(name, x, dtype) for name, x in found.items()}

    def cast(self, name, x, dtype):
        if x.dtype == bool:
            return x
        kind = dtype if name in self.tokens and not np.iscomplexobj(x) else state_dtype(dtype)
        return x.astype(np.result_type(kind, np.complex64) if np.iscomplexobj(x) else kind)

    def complex_or_real(self, rng, shape):
        return rng.standard_normal(shape)

    def state_shape(self, S, D, N):
        return S, D, N

    def draw_state(self, rng, arrays, S):
        """Numbers like those of the states of a call."""
        first = arrays[self.tokens[0]]
        N = arrays["A"].shape[1] if "A" in arrays else 1
        x = self.complex_or_real(rng, self.state_shape(S, first.shape[2], N))
        return self.cast("state", x, first.dtype)


class Selective(Scan):
    tokens = ("u", "delta", "B", "C", "z")

    def arrays(self, rng, B, T, D, N, G):
        r = self.complex_or_real
        A = -rng.exponential(1, (D, N))
        found = {
            "u": rng.standard_normal((B, T, D)),
            "delta": rng.uniform(0.01, 1, (B, T, D)),
            "A": A + 1j * rng.standard_normal((D, N)) if self.options.get("pairs") else A,
            "B": r(rng, (B, T, G, N)),
            "C": r(rng, (B, T, G, N)),
        }
        if self.options.get("all"):
            found |= {
                "D": rng.standard_normal(D),
                "z": rng.standard_normal((B, T, D)),
                "delta_bias": rng.standard_normal(D),
            }
        return found

    def complex_or_real(self, rng, shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if self.options.get("pairs") else x

    @property
    def keywords(self):
        return {"delta_softplus": True} if self.options.get("all") else {}


class S4D(Scan):
    tokens = ("u",)

    def arrays(self, rng, B, T, D, N, G):
        A = -rng.exponential(1, (D, N))
        A[0, 0] = -1e-9 if self.real else A[0, 0]
        r = self.complex_or_real
        return {
            "u": rng.standard_normal((B, T, D)),
            "dt": rng.uniform(0.01, 1, D),
            "A": A if self.real else A + 1j * rng.uniform(0, 9, (D, N)),
            "B": r(rng, (D, N)) / 4,  # the gradient of dt would be too large for float16
            "C": r(rng, (D, N)) / 4,
            "D": rng.standard_normal(D),
        }

    @property
    def real(self):
        return self.options.get("real", False)

    def complex_or_real(self, rng, shape):
        x = rng.standard_normal(shape)
        return x if self.real else x + 1j * rng.standard_normal(shape)

    @property
    def keywords(self):
        return {"discretization": self.options.get("by", "zoh")}


class HGRN(Scan):
    tokens = ("x", "g")

    @property
    def keywords(self):
        return {}

    def arrays(self, rng, B, T, D, N, G):
        x, g = gated_arrays(rng, B, T, D)
        return {"x": x, "g": g}

    def state_shape(self, S, D, N):
        return S, D


class RGLRU(HGRN):
    tokens = ("x", "r", "i", "reset")

    def arrays(self, rng, B, T, D, N, G):
        x, _ = gated_arrays(rng, B, T, D)
        gates = rng.uniform(0.01, 1, (2, B, T, D))
        found = {"x": x, "r": gates[0], "i": gates[1], "Lambda": rng.standard_normal(D) - 3}
        if self.options.get("resets"):
            found["reset"] = rng.random((B, T)) < 0.1
        return found


SCANS = [
    Selective("selective_scan"),
    Selective("selective_scan", all=True),
    Selective("selective_scan", pairs=True),
    S4D("s4d"),
    S4D("s4d", by="bilinear"),
    S4D("s4d", real=True),
    HGRN("hgrn"),
    RGLRU("rg_lru"),
    RGLRU("rg_lru", resets=True),
]
every = pytest.mark.parametrize("scan", SCANS, ids=repr)
# Complex numbers of the tokens have the dtype of u, and there are none of two bytes.
of_dtypes = pytest.mark.parametrize(
    ("scan", "dtype"),
    [
        pytest.param(scan, dtype, id=f"{scan}-{dtype.name}")
        for scan in SCANS
        for dtype in DTYPES
        if not (scan.name == "selective_scan" and scan.options.get("pairs") and dtype.itemsize < 4)
    ],
)
SHAPES = [
    {"B": 2, "T": 19, "D": 6, "N": 5, "G": 2},
    {"B": 1, "T": 70, "D": 37, "N": 16, "G": 1},
    {"B": 1, "T": 33, "D": 260, "N": 3, "G": 2},
    {"B": 3, "T": 1, "D": 1, "N": 1, "G": 1},
    {"B": 2, "T": 20, "D": 12, "N": 30, "G": 1},
    {"B": 1, "T": 9, "D": 8, "N": 75, "G": 2},
]


def run_reference(scan, dtype, arrays, **keywords):
    y, state = scan.reference(**arrays, **scan.keywords, **keywords, dtype=dtype)
    return {"y": y, "state": as_reals(state)}


def ends_of(rng, T):
    """Four sequences, the second of which is empty."""
    cut = np.sort(rng.integers(0, T + 1, 2))
    return np.array([0, cut[0], cut[0], cut[1], T])


def as_reals(x):
    """Complex numbers as pairs, for the acceptance rule."""
    if not np.iscomplexobj(x):
        return x
    return np.stack([x.real, x.imag], -1)


def gradients(scan, dy, d_state, arrays, back=lambda x: x, **keywords):
    """back: brings a gradient to the host."""
    grads = scan.backward(dy, **arrays, **scan.keywords, d_final_state=d_state, **keywords)
    names = {name: "d_initial_state" if "initial" in name else f"d{name}" for name in arrays}
    names.pop("reset", None)
    return {name: as_reals(back(getattr(grads, label))) for name, label in names.items()}


def reference_gradients(scan, dtype, dy, d_state, arrays, **keywords):
    grads = scan.reference_backward(
        dy, **arrays, **scan.keywords, d_final_state=d_state, **keywords, dtype=dtype
    )
    return {name: as_reals(grads[name]) for name in arrays if name != "reset"}


def gpu_gradients(scan, dy, d_state, arrays, **keywords):
    """The same of arrays on a GPU, whatever `--device` names."""
    from support.tensors import to_numpy, to_tensor

    def to_gpu(x):
        return to_tensor(np.ascontiguousarray(x)).cuda()

    there = {name: to_gpu(x) for name, x in arrays.items()}
    keywords = {name: to_gpu(x) for name, x in keywords.items()}
    return gradients(scan, to_gpu(dy), to_gpu(d_state), there, to_numpy, **keywords)


def judge_gradients(scan, rng, dtype, S, *, on_gpu=False, **shape):
    """The gradients of S sequences, which lie in one row if their number is not B."""
    B, T, D = shape["B"], shape["T"], shape["D"]
    packed = {} if S == B else {"cu_seqlens": ends_of(rng, T)}
    is_bridged = not device.on_host()  # then functions take arrays of the host to the GPU
    found = gpu_gradients if on_gpu and not is_bridged else gradients

    def draw():
        arrays = scan.draw(rng, dtype, S=S, **shape)
        dy = rng.standard_normal((B, T, D)).astype(dtype)
        return {"dy": dy, "d_state": scan.draw_state(rng, arrays, S), "arrays": arrays}

    judged(
        draw,
        lambda dy, d_state, arrays: found(scan, dy, d_state, arrays, **packed),
        lambda dy, d_state, arrays, dtype: reference_gradients(
            scan, dtype, dy, d_state, arrays, **packed
        ),
        dtype,
        gradient=True,
        on_gpu=on_gpu,
    )
