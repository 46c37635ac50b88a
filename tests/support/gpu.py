"""Helpers of the GPU's tests: problems on the device, and the reference computed there."""

import numpy as np
import pytest

import linattn
from linattn import _linattn, testing
from support.compare import leaves, over_arrays
from support.problems import PER_HEAD, problem
from support.tensors import to_numpy, to_tensor, torch
from support.variants import PAIR_DECAY, RARE, ops_with

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


def with_look(x):
    """The problem with an x of its own: a key of unit norm that predicts, and is not written."""
    look = torch.nn.functional.normalize(x["k"].float() + 0.1, dim=-1)
    return x | {"x": look.to(x["k"].dtype)}


def on_hopper():
    """Do calls take the kernels that are Hopper's alone?"""
    return torch.cuda.get_device_capability() == (9, 0) and "90a" in _linattn.CUDA_ARCHS


def needs_keys(op, K):
    """Skip the test where a GPU takes fewer keys for this op."""
    if op in RARE and K > 256:
        pytest.skip(f"{op} has at most 256 keys on a GPU")


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


def kernels_of(call):
    """The names of the kernels, each as often as it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return " ".join(event.name for event in seen.events())


# If each of two results meets the rule, they are at most twice its bound apart.
APART = {dtype: 2 * bound for dtype, bound in testing.RMS_BOUND.items()}
APART["tf32"] = 2 * testing.RMS_BOUND_TF32


def distance(got, want):
    """The root mean square error where both are finite, relative to the wanted numbers'."""
    there = torch.isfinite(got) & torch.isfinite(want)
    got, want = got[there].double(), want[there].double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def with_normed_rows(x):
    """The same call without an option: q and k are normalised in float64."""

    def normed(a):
        a = a.double()
        return a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    return {name: a for name, a in x.items() if name != "qk_l2norm"} | {
        name: normed(x[name]) for name in ("q", "k")
    }


def busy(seconds=0.3):
    """Something long on the current stream."""
    torch.cuda._sleep(int(seconds * 1.7e9))


def heads_of(x, count):
    """The problem of one q/k head and its value heads, repeated for `count` q/k heads."""
    shared = ("initial_state", "d_final_state")

    def repeated(a, axis):
        return torch.cat([a] * count, axis)

    return {
        name: a
        if name in PER_HEAD
        else repeated(a, 0)
        if name == "bonus"
        else over_arrays(lambda s: repeated(s, 1), a)
        if name in shared
        else repeated(a, 2)
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
    b is at least -3 C (make_inputs), so e^-b is an ordinary number. A rule that sees the state
    before its decay has b_(i-1) in the place of b_i. With a bonus P_ii is q_i . (bonus k_i). DPLR
    takes (y e^(b_C - b))' p off, with p = (I + L)^-1 ((x e^b) S + M v), L of x and y, M of x and k.
    """
    dtype = dtype or torch.float64
    if op in PAIR_DECAY:
        return momentum64(x, dtype, C)
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
    dplr, reads_before = op in ops_with(rule="dplr"), op in ops_with(rule="bonus")
    if dplr:
        looks, y = (x[n].to(dtype).transpose(1, 2).repeat_interleave(group, 1) for n in ("x", "y"))
    if reads_before:
        bonus = x["bonus"].to(dtype).repeat_interleave(group, 0)[None, :, None]

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
        before = (b - g[:, :, at]).exp()
        if reads_before:
            q_c = q[:, :, at] * before
            own = (q[:, :, at] * bonus * k[:, :, at]).sum(-1, keepdim=True)
            read = q_c @ S + (q_c @ k_back).tril(-1) @ u + own * u
        else:
            read = q_c @ S + (q_c @ k_back).tril() @ u
        to_end = (last - b).exp()
        written = (k[:, :, at] * to_end).transpose(2, 3) @ u
        if dplr:
            x_c, y_back = looks[:, :, at] * before, (y[:, :, at] * (-b).exp()).transpose(2, 3)
            L, M = (x_c @ y_back).tril(-1), (x_c @ k_back).tril(-1)
            p = torch.linalg.solve_triangular(L, x_c @ S + M @ u, upper=False, unitriangular=True)
            read = read - (q_c @ y_back).tril() @ p
            written = written - (y[:, :, at] * to_end).transpose(2, 3) @ p
        o[:, :, at] = read if reads_before else K**-0.5 * read  # rwkv6 has the scale 1
        S = last.exp().transpose(2, 3) * S + written
    if normalised:
        o = o[..., :V] / o[..., V:].clamp(min=1e-6)
        S = S[..., :V]
    return o.transpose(1, 2), S


def momentum64(x, dtype, C):
    """reference64 of titans: Y <- eta Y + k u', S <- a S + Y, and u = beta (v - S'k) sees S before.

    A write k_j u_j' is in S_i by a weight W_ij, which goes through the same recursion of two
    numbers as (S, Y) does. So do the weights of the states before the chunk. All chunks go at once,
    a token after the other.
    """
    q, k, v = (x[name].to(dtype).transpose(1, 2) for name in ("q", "k", "v"))
    group = v.shape[1] // q.shape[1]
    q, k = (a.repeat_interleave(group, 1) for a in (q, k))
    (B, HV, T, V), K = v.shape, q.shape[3]
    by_token = {
        name: torch.nn.functional.pad(x[name].to(dtype).transpose(1, 2), (0, -T % C))
        for name in ("g", "beta", "eta")
        if name in x
    }
    a, eta = (
        y.unflatten(2, (-1, C)) for y in (by_token["g"].exp(), by_token["eta"])
    )  # [B,HV,chunks,C]
    # the last two columns: the weights of S and Y before the chunk
    W = torch.zeros(*a.shape, C + 2, device=v.device, dtype=dtype)
    of_S, of_Y = (torch.zeros(*a.shape[:3], C + 2, device=v.device, dtype=dtype) for _ in range(2))
    of_S[..., C], of_Y[..., C + 1] = 1, 1
    seen = torch.empty_like(W)
    for i in range(C):
        seen[..., i, :] = of_S
        of_Y = eta[..., i, None] * of_Y
        of_Y[..., i] = 1
        of_S = a[..., i, None] * of_S + of_Y
        W[..., i, :] = of_S
    S, Y = (
        s.to(dtype)
        for s in x.get(
            "initial_state", (torch.zeros(B, HV, K, V, device=v.device, dtype=dtype),) * 2
        )
    )
    o = torch.empty_like(v)
    for chunk, start in enumerate(range(0, T, C)):
        at = slice(start, min(start + C, T))
        n = at.stop - at.start
        w, p = W[:, :, chunk, :n], seen[:, :, chunk, :n]
        kc, qc = k[:, :, at], q[:, :, at]
        beta = by_token["beta"][:, :, at, None]
        back = kc.transpose(2, 3)
        predicted = p[..., C, None] * (kc @ S) + p[..., C + 1, None] * (kc @ Y)
        u = torch.linalg.solve_triangular(
            beta * (p[..., :n] * (kc @ back)).tril(-1),
            beta * (v[:, :, at] - predicted),
            upper=False,
            unitriangular=True,
        )
        read = w[..., C, None] * (qc @ S) + w[..., C + 1, None] * (qc @ Y)
        o[:, :, at] = K**-0.5 * (read + (w[..., :n] * (qc @ back)).tril() @ u)
        # the last token's weights, and those of Y, whose decay is eta alone
        e = eta[:, :, chunk, :n]
        fade = torch.ones_like(e)
        for i in range(n - 2, -1, -1):
            fade[..., i] = fade[..., i + 1] * e[..., i + 1]
        end = w[:, :, -1]
        S, Y = (
            end[..., C, None, None] * S
            + end[..., C + 1, None, None] * Y
            + (kc * end[..., :n, None]).transpose(2, 3) @ u,
            (fade[..., 0] * e[..., 0])[..., None, None] * Y
            + (kc * fade[..., None]).transpose(2, 3) @ u,
        )
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
