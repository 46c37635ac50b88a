"""Tests of a GPU alone: memory on the device, layouts there, other libraries' arrays.

`--device cuda` runs the rest of the suite there. This file and test_cuda_*.py run wherever PyTorch
and a GPU are, and are skipped by name elsewhere.
"""

import os
import statistics
import time

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.device import imported
from support.gpu import Dlpack, Interface, dtypes, gpu_problem, kinds, needs_gpu, ops, passes, run
from support.problems import PER_TOKEN
from support.tensors import to_numpy, torch
from support.variants import GATED, PAIR_DECAY

import linattn
from linattn import reference, testing

pytestmark = needs_gpu


# ---- memory ----


@passes
@ops
def test_outputs_in_memory_full_of_nan(op, pass_):
    """The caching allocator hands out memory with old contents. Scratch may have them too."""
    x = gpu_problem(op, pass_=pass_, T=131, K=100, V=72, dtype="float32")
    want = run(op, x, pass_)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = [
            torch.full((1 << size,), torch.nan, device="cuda")
            for size in range(8, 26)
            for _ in range(3)
        ]
        blocks += [torch.full_like(a, torch.nan) for a in want for _ in range(8)]
        del blocks
        got = run(op, x, pass_)
        assert all(torch.isfinite(a).all() for a in got)
        assert_same_bits(got, want)


def test_outputs_outlive_their_inputs():
    x = gpu_problem("gated_delta_rule")
    want = run("gated_delta_rule", x)
    got = run("gated_delta_rule", over_arrays(torch.clone, x))
    junk = [torch.full_like(a, torch.nan) for a in want for _ in range(50)]
    assert_same_bits(got, want)
    del junk


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_calls_do_not_pile_up_memory(pass_):
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other processes use the GPU's memory: run this one alone")
    x = gpu_problem("kda", B=1, T=4096, pass_=pass_)
    for _ in range(5):
        run("kda", x, pass_)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(200):
        run("kda", x, pass_)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after <= 2 << 20  # CUDA's own unit


def test_out_of_memory_leaves_the_context_usable():
    x = gpu_problem("gla", B=1, T=4, H=1, HV=1, K=8, V=8)
    want = run("gla", x)
    # 8 TB of o: 128 sequences as long as a GPU takes them
    huge = {
        name: a[:, :1].expand(128, 2**31 - 1, *a.shape[2:])
        if name in PER_TOKEN
        else a.expand(128, *a.shape[1:])
        if isinstance(a, torch.Tensor)
        else a
        for name, a in x.items()
    }
    with pytest.raises((MemoryError, torch.cuda.OutOfMemoryError)):
        linattn.gla(**huge)
    assert_same_bits(run("gla", x), want)


# ---- layouts ----

LAYOUTS = {
    "heads first": lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
    "padded rows": lambda a: torch.nn.functional.pad(a, (3, 5))[..., 3:-5],
    "every second": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "last axis first": lambda a: a.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second row": lambda a: a.repeat_interleave(2, 0)[::2],
    "off by one element": lambda a: torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape),
}


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
@ops
def test_any_layout_gives_the_same_bits(op, layout, dtype):
    x = gpu_problem(op, dtype=dtype)
    odd = {name: LAYOUTS[layout](a) if name in PER_TOKEN else a for name, a in x.items()}
    assert_same_bits(run(op, odd), run(op, x))
    room = LAYOUTS[layout](torch.zeros_like(x["v"]))
    if room.stride(-1) == 1:
        o, _ = getattr(linattn, op)(**x, out=room)
        assert o is room
        assert_same_bits([o], run(op, x)[:1])


def test_broadcast_inputs():
    x = gpu_problem("gated_delta_rule")
    wide = {name: a[:1].expand(a.shape) if name in PER_TOKEN else a for name, a in x.items()}
    plain = {name: a.contiguous() if name in PER_TOKEN else a for name, a in wide.items()}
    assert_same_bits(run("gated_delta_rule", wide), run("gated_delta_rule", plain))


@pytest.mark.parametrize("name", ["q", "k", "v", "state"])
def test_a_step_refuses_rows_that_it_would_have_to_copy(name):
    x = gpu_problem("gated_delta_rule", pass_="step")
    before = over_arrays(torch.clone, x)
    odd = x | {name: x[name].repeat_interleave(2, -1)[..., ::2]}
    with pytest.raises(ValueError, match=f"{name}: expected .*innermost axis is contiguous"):
        linattn.gated_delta_rule_step(**odd)
    assert_same_bits(leaves(tuple(x.values())), leaves(tuple(before.values())))


# ---- what is refused ----


@pytest.mark.parametrize("pass_", ["forward", "step"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state", "out"])
def test_host_and_device_do_not_mix(pass_, name):
    op, name = "kda", "initial_state" if (pass_, name) == ("forward", "state") else name
    x = gpu_problem(op, pass_=pass_, dtype="float32")
    x["out"] = torch.zeros_like(x["v"])
    call = getattr(linattn, op if pass_ == "forward" else f"{op}_step")
    for host in (x[name].cpu(), x[name].cpu().numpy()):
        with pytest.raises(ValueError) as error:
            call(**x | {name: host})
        where = (
            "the CPU like q, got one on cuda:0"
            if name == "q"
            else "cuda:0 like q, got one on the CPU"
        )
        wrong = r"k" if name == "q" else name
        assert str(error.value) == f"{wrong}: expected an array on {where}"
    assert not x["out"].any()


def test_cu_seqlens_on_the_host_are_refused_beside_a_device():
    x = gpu_problem("gla", B=1)
    with pytest.raises(ValueError, match="cu_seqlens: expected an array on cuda:0 like q"):
        linattn.gla(**x, cu_seqlens=np.array([0, 200]))


def test_another_device_is_refused_by_name():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = gpu_problem("kda")
    with pytest.raises(
        ValueError,
        match=r"^v: expected an array on cuda:0 like q, got "
        r"one on cuda:1$",
    ):
        linattn.kda(**x | {"v": x["v"].to("cuda:1")})


@ops
def test_the_second_device_is_used(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = gpu_problem(op)
    there = over_arrays(lambda a: a.to("cuda:1"), x)
    for pass_ in ("forward", "step"):
        x = gpu_problem(op, pass_=pass_)
        there = over_arrays(lambda a: a.to("cuda:1"), x)
        got = run(op, there, pass_)  # the current device is still the first
        assert torch.cuda.current_device() == 0 and {a.device.index for a in got} == {1}
        assert_same_bits([a.to("cuda:0") for a in got], run(op, x, pass_))


# ---- other libraries' arrays ----


def arrays_of(op, pass_, dtype="float32"):
    return gpu_problem(op, dtype=dtype, pass_=pass_)


@pytest.mark.parametrize("kind", [Interface, Dlpack])
@pytest.mark.parametrize("pass_", ["forward", "step"])
@ops
def test_bare_protocols(op, pass_, kind):
    """With `out`, since the library cannot make such arrays."""
    x = arrays_of(op, pass_)
    want = run(op, x, pass_)[0]
    out = kind(torch.full_like(x["v"], torch.nan))
    call = getattr(linattn, op if pass_ == "forward" else f"{op}_step")
    o = call(**over_arrays(lambda a: kind(a.clone()), x), out=out)
    o = o[0] if pass_ == "forward" else o
    assert o is out
    torch.cuda.synchronize()
    assert_same_bits([out.x], [want])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@ops
def test_cupy(op, dtype):
    cupy = imported("cupy")
    if dtype == "bfloat16":
        try:
            cupy.zeros(1, ml_dtypes.bfloat16)
        except (TypeError, ValueError):
            pytest.skip("this CuPy has no bfloat16")
    for pass_ in ("forward", "step"):
        x = arrays_of(op, pass_, dtype)
        want = run(op, x, pass_)
        torch.cuda.synchronize()
        theirs = over_arrays(lambda a: cupy.asarray(to_numpy(a)), x)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            if pass_ == "forward":
                got = leaves(getattr(linattn, op)(**theirs, output_final_state=True))
            else:
                got = [getattr(linattn, f"{op}_step")(**theirs), *leaves(theirs["state"])]
        stream.synchronize()
        assert all(isinstance(a, cupy.ndarray) for a in got)
        for a, b in zip(got, want, strict=True):
            assert a.get().tobytes() == to_numpy(b).tobytes()


@dtypes
@ops
def test_jax(op, dtype):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need the memory too
    jax = imported("jax")
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    x = arrays_of(op, "forward", dtype)
    want = run(op, x)
    theirs = over_arrays(lambda a: jax.device_put(to_numpy(a), gpu), x)
    got = leaves(getattr(linattn, op)(**theirs, output_final_state=True))
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, jax.Array) and a.devices() == {gpu}
        assert np.asarray(a).tobytes() == to_numpy(b).tobytes()
    again = leaves(getattr(linattn, op)(**theirs, output_final_state=True))
    assert all(
        np.asarray(a).tobytes() == to_numpy(b).tobytes() for a, b in zip(again, want, strict=True)
    )


# ---- systems that hand an op more than its functions do ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gdn2_is_kda_of_the_products(dtype):
    """Bit for bit: the kernels round the products as PyTorch does."""
    x = gpu_problem("kda", B=2, T=200, H=2, HV=4, K=128, V=64, dtype=dtype)
    del x["beta"]
    g, q, k, v = (x.pop(name) for name in "gqkv")
    b, w = (torch.rand(y.shape, device="cuda").to(y.dtype) for y in (k, v))
    want = linattn.kda(q, k, w * v, g, 1.0, x=b * k, output_final_state=True, **x)
    assert_same_bits(linattn.gdn2(q, k, v, b, w, g, output_final_state=True, **x), want)
    at = [y[:, 0].contiguous() for y in (q, k, v, b, w, g)]
    state = torch.zeros(2, 4, 128, 64, device="cuda")
    o = linattn.gdn2_step(*at, state=state)
    first, _ = linattn.gdn2(*(y[:, :1] for y in (q, k, v, b, w, g)))
    assert_same_bits([o], [first[:, 0]])


# ---- a step from Python, for the log ----


@ops
def test_time_of_a_step(op):
    """Printed (pytest -rP), not judged: the median of 1000 calls, none of which waits."""
    x = gpu_problem(op, B=1, H=32, HV=32, K=128, V=128, pass_="step")
    out = torch.empty_like(x["v"])
    step = getattr(linattn, f"{op}_step")
    times = []
    for i in range(1100):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(**x, out=out)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    print(
        f"{op}_step from Python, B 1, H 32, K V 128, bfloat16: "
        f"median {statistics.median(times[100:]) * 1e6:.1f} us"
    )
    bound, times = linattn.bind(step, **x, out=out), []
    for i in range(1100):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        bound()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    print(f"  bound: median {statistics.median(times[100:]) * 1e6:.1f} us")
    assert torch.isfinite(out).all()


# ---- rwkv6 and dplr_delta_rule, by chunks of other rules ----

BORROWED = pytest.mark.parametrize("op", ["rwkv6", "dplr_delta_rule"])


def long_problem(op, **shape):
    return gpu_problem(op, **{"B": 2, "T": 300, "K": 64, "V": 64} | shape)


@BORROWED
def test_goes_by_chunks(op):
    x = long_problem(op)
    d_o = torch.ones_like(x["v"])
    assert linattn.explain_kernel(op, **x).kernel == "chunks"
    backward = getattr(linattn, f"{op}_backward")
    assert linattn.explain_kernel(backward, d_o, **x).kernel == "chunks"
    assert linattn.explain_kernel(op, **x, mode="recurrent").kernel == "token by token"


@pytest.mark.parametrize("batch", [1, 2, 16, 64, 3, 128])
def test_whole_batches_go_by_chunks(batch):
    x = long_problem("titans")
    d_o = torch.ones_like(x["v"])
    kernel = "chunks" if 64 % batch == 0 else "token by token"
    assert linattn.explain_kernel("titans", **x, batch=batch).kernel == kernel
    report = linattn.explain_kernel(linattn.titans_backward, d_o, **x, batch=batch)
    assert report.kernel == kernel
    assert ("batch is no divisor of 64" in report.why) == (kernel == "token by token")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_nan_in_a_bonus_is_in_the_reads_of_its_head_alone(dtype):
    x = long_problem("rwkv6", H=2, HV=2, dtype=dtype)
    want, state = linattn.rwkv6(**x, output_final_state=True)
    x["bonus"] = x["bonus"].clone()
    x["bonus"][1, 3] = torch.nan
    o, same = linattn.rwkv6(**x, output_final_state=True)
    assert o[:, :, 1].isnan().all()
    assert_same_bits([o[:, :, 0], same], [want[:, :, 0], state])
    grads = linattn.rwkv6_backward(torch.ones_like(o), **x)
    assert torch.isfinite(grads.dg).all() and torch.isfinite(grads.dbonus).all()
    for of_rows in (grads.dq, grads.dk):  # those of key 3, which the bonus multiplies
        assert of_rows[:, :, 1, 3].isnan().all()
        assert torch.isfinite(of_rows[..., 4:]).all() and torch.isfinite(of_rows[:, :, 0]).all()
    assert grads.dv[:, :, 1].isnan().all() and torch.isfinite(grads.dv[:, :, 0]).all()


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}])
def test_the_gradient_of_a_bonus_is_zeros_without_tokens(sizes):
    x = long_problem("rwkv6", **sizes)
    grads = linattn.rwkv6_backward(torch.ones_like(x["v"]), **x)
    assert grads.dbonus.shape == x["bonus"].shape and not grads.dbonus.any()


@pytest.mark.parametrize("name", ["g", "y", "k"])
def test_a_nan_of_the_last_token_is_in_its_row_of_the_state(name):
    x = long_problem("dplr_delta_rule")
    x[name][:, -1, 0, 5] = torch.nan
    states = [
        linattn.dplr_delta_rule(**x, mode=mode, output_final_state=True)[1].isnan()
        for mode in ("chunk", "recurrent")
    ]
    assert torch.equal(*states) and states[0].any() and not states[0].all()


@pytest.mark.parametrize("decay", [-1e-3, -1.0, -80.0, -np.inf])
@BORROWED
def test_one_decay_for_all_tokens(op, decay):
    """From one that hardly decays within a chunk to one that forgets at once."""
    x = long_problem(op, B=1, T=150, H=1, HV=1)
    x["g"] = torch.full_like(x["g"], decay)
    d_o = torch.randn_like(x["v"])
    o, _ = getattr(linattn, op)(**x)
    grads = getattr(linattn, f"{op}_backward")(d_o, **x)
    x, d_o = over_arrays(to_numpy, (x, d_o))

    def by_reference(dtype):
        o, _ = getattr(reference, op)(**x, dtype=dtype)
        return {"o": o} | reference.backward(op, d_o, **x, dtype=dtype)._asdict()

    exact, naive = by_reference(np.float64), by_reference(np.float32)
    for name, got in ({"o": o} | grads._asdict()).items():
        if got is None or exact[name] is None:
            continue
        testing.assert_accurate(  # sums are float32, but the factors of products are not
            to_numpy(got),
            exact[name],
            naive[name].astype(ml_dtypes.bfloat16),
            dtype=ml_dtypes.bfloat16,
            name=f"{name} {decay}",
            gradient=name != "o",
        )


# ---- decays ----


@pytest.mark.parametrize("op", sorted({*GATED} - {*PAIR_DECAY}))
def test_errors_of_decays_have_no_sign(op):
    """A state to which nothing is written is the product of its decays. 4,096 decays of CUDA's expf
    are 6e-5 off, since its errors have one sign on the average."""
    x = gpu_problem(op, B=1, T=4096, H=4, HV=4, K=64, V=8, dtype="float32")
    x = {name: torch.zeros_like(a) if name in [*"qkvxy", "bonus"] else a for name, a in x.items()}
    x["g"] = 1e-3 * -torch.rand_like(x["g"])
    x["initial_state"] = torch.ones_like(x["initial_state"])
    _, S = getattr(linattn, op)(**x, mode="recurrent", output_final_state=True)
    want = x["g"].double().sum(1).exp().reshape(1, 4, -1, 1).expand(S.shape)
    # 4,096 roundings without a sign are 2e-6 in the root mean square
    assert (S / want - 1).abs().max() < 1e-5
