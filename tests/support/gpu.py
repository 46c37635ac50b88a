"""Helpers of the GPU's tests: problems on the device, and the reference computed there."""

import numpy as np
import pytest

import linattn
from linattn import testing
from support.compare import leaves, over_arrays
from support.problems import PER_HEAD, problem
from support.tensors import to_numpy, to_tensor, torch

# Each of these files runs wherever PyTorch and a GPU are, and is skipped by name elsewhere.
needs_gpu = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or not linattn.cuda.is_available(),
        reason=f"no GPU: {linattn.cuda.why_not() or 'PyTorch sees none'}",
    ),
    # other libraries' warnings are not ours to mend
    *(
        pytest.mark.filterwarnings(f"default::{kind}")
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
    ),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ops = pytest.mark.parametrize("op", linattn.OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
KINDS = (*DTYPES, "tf32")  # of forward passes: float32 arrays too, with allow_tf32
kinds = pytest.mark.parametrize("dtype", KINDS)
passes = pytest.mark.parametrize("pass_", ["forward", "step", "backward"])
PLAIN = "linear_attention, not normalised"
gradients = pytest.mark.parametrize("op", [*linattn.OPS, PLAIN])


def to_gpu(x, device="cuda"):
    return to_tensor(np.ascontiguousarray(x)).to(device)


def gpu_problem(op, seed=0, *, dtype="bfloat16", pass_="forward", **shape):
    """A legal call on the GPU: B 2, T 200, HV 2 H, K 64, V 128 unless told otherwise. tf32: float32
    arrays, with permission to round them to tf32."""
    tf32 = dtype == "tf32"
    dtype = np.dtype("float32" if tf32 else dtype)
    shape = {"B": 2, "T": 200, "H": 2, "HV": 4, "K": 64, "V": 128} | shape
    if pass_ == "step":
        shape["T"] = 1
    if op == PLAIN:
        shape["normalize"] = False
    x = over_arrays(to_gpu, problem(op.split(",")[0], pass_, dtype=dtype, seed=seed, **shape))
    return x | {"allow_tf32": True} if tf32 else x


def run(op, x, pass_="forward", **options):
    """The arrays that a call makes or changes."""
    op = op.split(",")[0]
    if pass_ == "backward":
        return leaves(tuple(getattr(linattn, f"{op}_backward")(**x, **options)))
    if pass_ == "step":
        state = over_arrays(torch.clone, x["state"])
        o = getattr(linattn, f"{op}_step")(**x | {"state": state}, **options)
        return [o, *leaves(state)]
    return leaves(getattr(linattn, op)(**x, output_final_state=True, **options))


# If each of two results meets the rule, they are at most twice its bound apart.
APART = {dtype: 2 * bound for dtype, bound in testing.RMS_BOUND.items()}
APART["tf32"] = 2 * testing.RMS_BOUND_TF32


def distance(got, want):
    """The root mean square error where both are finite, relative to the wanted numbers'."""
    there = torch.isfinite(got) & torch.isfinite(want)
    got, want = got[there].double(), want[there].double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def busy(seconds=0.3):
    """Something long on the current stream."""
    torch.cuda._sleep(int(seconds * 1.7e9))


def heads_of(x, count):
    """One head's problem, repeated for `count` heads."""
    shared = ("initial_state", "d_final_state")
    return {
        name: a
        if name in PER_HEAD
        else over_arrays(lambda s: s.repeat_interleave(count, 1), a)
        if name in shared
        else a.repeat_interleave(count, 2)
        for name, a in x.items()
    }


# ---- arrays with a protocol and nothing else ----


class Interface:
    """Nothing but __cuda_array_interface__."""

    def __init__(self, x):
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


class Dlpack:
    """Nothing but DLPack's two methods."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


# ---- the reference, on the device: hours of NumPy in seconds ----


def reference64(op, x, dtype=None, C=64):
    """o [B,T,HV,V] and S [B,HV,K,V], in float64 (or `dtype`), C tokens at a time.

    With b_i the sum of the log decays up to token i of the chunk, per key or for all keys at once,
        P_ij = (q_i e^b_i)'(k_j e^-b_j), L_ij = beta_i (k_i e^b_i)'(k_j e^-b_j) below the diagonal,
        u = v, or (I + L)^-1 beta (v - (k e^b) S) under the delta rule,
        o = scale ((q e^b) S + P u),  S <- e^b_C S + (k e^(b_C - b))' u.
    b is at least -3 C (make_inputs), so e^-b is an ordinary number.
    """
    dtype = dtype or torch.float64
    q, k, v = (x[name].to(dtype).transpose(1, 2) for name in ("q", "k", "v"))  # [B,H,T,.]
    group = v.shape[1] // q.shape[1]
    q, k = (a.repeat_interleave(group, 1) for a in (q, k))
    (B, HV, T, V), K = v.shape, q.shape[3]
    normalised = op == "linear_attention"
    if normalised:  # the denominator is one more column of v
        q, k = (torch.where(a > 0, a + 1, a.clamp(max=0).exp()) for a in (q, k))
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if "g" in x:
        g = x["g"].to(dtype).transpose(1, 2).reshape(B, HV, T, -1)
    else:
        g = torch.zeros(HV, device=v.device, dtype=dtype)
        if op == "retention":
            g = x["gamma"].to(dtype).log()
        elif op == "lightning_attention":
            g = -x["slopes"].to(dtype)
        g = g[None, :, None, None].expand(B, HV, T, 1)
    beta = x["beta"].to(dtype).transpose(1, 2)[..., None] if "beta" in x else None

    S = torch.zeros(B, HV, K, v.shape[3], device=v.device, dtype=dtype)
    if "initial_state" in x:
        S = torch.cat([s.to(dtype).reshape(B, HV, K, -1) for s in leaves(x["initial_state"])], -1)
    o = torch.empty_like(v)
    for start in range(0, T, C):
        at = slice(start, min(start + C, T))
        b = g[:, :, at].cumsum(2)
        last = b[:, :, -1:]
        q_c, k_c, u = q[:, :, at] * b.exp(), k[:, :, at] * b.exp(), v[:, :, at]
        k_back = (k[:, :, at] * (-b).exp()).transpose(2, 3)
        if beta is not None:
            L = (beta[:, :, at] * (k_c @ k_back)).tril(-1)
            u = torch.linalg.solve_triangular(
                L, beta[:, :, at] * (u - k_c @ S), upper=False, unitriangular=True
            )
        o[:, :, at] = K**-0.5 * (q_c @ S + (q_c @ k_back).tril() @ u)
        S = last.exp().transpose(2, 3) * S
        S = S + (k[:, :, at] * (last - b).exp()).transpose(2, 3) @ u
    if normalised:
        o = o[..., :V] / o[..., V:].clamp(min=1e-6)
        S = S[..., :V]
    return o.transpose(1, 2), S


def judge(op, x, o, name=""):
    """Judge o by the acceptance rule. naive is the reference in float32, its o rounded at the
    end."""
    ref, _ = reference64(op, x)
    naive, _ = reference64(op, x, torch.float32)
    testing.assert_accurate(
        to_numpy(o),
        to_numpy(ref),
        to_numpy(naive.to(o.dtype)),
        dtype=to_numpy(o[:0]).dtype,
        name=f"{op} {name}",
        tf32=x.get("allow_tf32", False),
    )
