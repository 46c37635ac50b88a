"""Long sequences, many elements and large numbers on a GPU, against a reference on the device."""

import os

import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import (
    APART,
    PLAIN,
    distance,
    gpu_problem,
    heads_of,
    judge,
    kernels_of,
    kinds,
    needs_gpu,
    ops,
    reference64,
    run,
    to_gpu,
)
from support.tensors import to_numpy, torch
from support.variants import (
    BY_TOKEN,
    DELTA,
    GATED,
    HEAD_DECAY,
    KEY_DECAY,
    PAIR_DECAY,
    TOKEN_DECAY,
    ops_with,
)

import linattn
from linattn import reference, testing
from linattn.testing import make_inputs

pytestmark = needs_gpu


@ops
def test_the_reference_of_these_tests_is_the_reference(op):
    x = make_inputs(
        op, np.random.default_rng(0), B=2, T=150, H=1, HV=2, K=16, V=24, initial_state=True
    )
    want, _ = getattr(reference, op)(**x)
    got, _ = reference64(op, over_arrays(to_gpu, x))
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-9, atol=1e-11)


# ---- long ----


@kinds
@ops
def test_a_long_sequence(op, dtype):
    """2^17 tokens against the reference of this file."""
    x = gpu_problem(op, dtype=dtype, B=1, T=2**17, H=1, HV=1, K=64, V=32)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    judge(op, x, o, "2^17 tokens")


@pytest.mark.parametrize(
    "K, dtype",
    [(128, "bfloat16"), (256, "bfloat16"), (128, "float16"), (256, "float16"), (128, "tf32")],
)
@ops
def test_tensor_cores_at_32768_tokens(op, K, dtype):
    x = gpu_problem(op, dtype=dtype, B=1, T=32768, H=1, HV=1, K=K, V=128)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    judge(op, x, o, "32768 tokens")


@ops
def test_a_long_sequence_token_by_token(op):
    x = gpu_problem(op, dtype="float32", B=1, T=2**14, H=1, HV=1, K=64, V=32)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x, mode="recurrent")
    judge(op, x, o, "token by token")


@pytest.mark.parametrize("gate", ["equal", "random"])
@pytest.mark.parametrize("op", [HEAD_DECAY[0], *TOKEN_DECAY])
def test_65536_tokens_one_by_one(op, gate):
    """The state's own roundings, one a token and each up to 2^-24, are a random walk. Decays may
    all be rounded to one side, by up to 2^-25 of each: README gives the consequence."""
    T, K = 2**16, 64
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, T, 1, K)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": q, "k": k, "v": v}
    if op == "retention":
        x["gamma"] = np.array([1 - 2.0**-17])
    else:
        x["g"] = np.full((1, T, 1), -1e-5) if gate == "equal" else rng.uniform(-2e-5, 0, (1, T, 1))
    if op in DELTA:
        x["beta"] = rng.uniform(0, 1, (1, T, 1))
    x = {name: a.astype(np.float32) for name, a in x.items()}
    exact, final = getattr(linattn, op)(
        **{name: a.astype(np.float64) for name, a in x.items()}, output_final_state=True
    )
    o, state = getattr(linattn, op)(**over_arrays(to_gpu, x), output_final_state=True)
    most = T * 2**-25 if op == "simple_gla" else np.sqrt(T / 3) * 2**-24
    for got, want in ((o, exact), (state, final)):
        error = to_numpy(got).astype(np.float64) - want
        assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < most


# ---- numbers that a dtype has not ----


def large_scores(x):
    """q'k up to 1e6 from token 70 on, v small enough that o is an ordinary number."""
    x["q"][:, 70:] *= 500
    x["k"][:, 70:] *= 500
    x["v"][:, 70:] /= 1e4


def large_state(x):
    """A state of about 1e7, which q brings back."""
    x["initial_state"] = over_arrays(lambda s: s * 1e7, x["initial_state"])
    x["q"] /= 1e4


def large_growth(x):
    """A decay above one, by which the state grows past 65504 within a chunk and shrinks again."""
    x["g"][:, 100:116] = 1
    x["g"][:, 116:132] = -1
    x["q"] /= 1e4


@pytest.mark.parametrize("large", [large_scores, large_state, large_growth])
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, *linattn.OPS])
def test_float16_numbers_between_that_float16_has_not(op, K, large):
    """Products leave float32. Where an operand of the next product does not fit into float16's
    range, the kernel goes token by token. The result equals the recurrence except for rounding."""
    x = gpu_problem(op, dtype="float16", T=300, K=K)
    if op == PLAIN:
        x["feature_map"] = "identity"
    if large is large_growth and "g" not in x:
        pytest.skip(f"{op} has no gate that may grow")
    if large is large_scores and ("beta" in x or "y" in x):
        pytest.skip(f"{op} with keys of length 500 is no contraction: its state has no bound")
    large(x)
    x["scale"] = K**-0.5  # rwkv6 has 1
    op = op.split(",")[0]
    want, _ = getattr(linattn, op)(**x, mode="recurrent")
    got, _ = getattr(linattn, op)(**x)
    assert torch.isfinite(want).all()
    assert torch.isfinite(got).all(), "an infinity that float32 does not have"
    assert distance(got, want) < APART["float16"]


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_float16_keys_times_strengths_that_float16_has_not(op):
    """A key of 6e4 fits, and so does a strength of 2. Their product does not, which one kernel for
    the delta rule forms before it meets a value. No key looks like another one before token 128."""
    x = gpu_problem(op, dtype="float16", T=120, K=128, V=64)
    del x["initial_state"]
    x["k"] = torch.zeros_like(x["k"])
    for t in range(120):
        x["k"][:, t, :, t] = 6e4 if t >= 70 else 1
    x["q"], x["v"] = x["q"] / 1e3, x["v"] / 1e2
    x["beta"] = torch.full_like(x["beta"], 2)
    want, want_state = getattr(linattn, op)(**x, mode="recurrent", output_final_state=True)
    got, state = getattr(linattn, op)(**x, output_final_state=True)
    assert torch.isfinite(want).all()
    for a, b in ((got, want), (state, want_state)):
        assert torch.isfinite(a).all(), "an infinity that float32 does not have"
        assert distance(a, b) < APART["float16"]


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, "simple_gla", "gla"])
def test_float16_state_that_float16_has_not_beside_a_nan(op, K):
    """The state is too large in a few of its keys, in the chunk that also has a NaN."""
    x = gpu_problem(op, dtype="float16", T=130, K=K)
    if op == PLAIN:
        x["feature_map"] = "identity"
    large_state(x)
    x["initial_state"][..., 8:, :] /= 1e7
    x["k"][:, 20, :, 3] = torch.nan
    op = op.split(",")[0]
    want, _ = getattr(linattn, op)(**x, mode="recurrent")
    got, _ = getattr(linattn, op)(**x)
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    assert torch.isfinite(want[:, :20]).all() and not torch.isfinite(want[:, 20:]).any()
    assert distance(got, want) < APART["float16"]


@ops
def test_tf32_has_the_range_of_float32(op):
    """Powers of two are not rounded: scaling v by 2^100 or 2^-60 scales o by exactly that."""
    x = gpu_problem(op, dtype="tf32", T=300, K=100, V=72)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    for by in (2.0**100, 2.0**-60):
        scaled, _ = getattr(linattn, op)(**x | {"v": x["v"] * by})
        assert_same_bits([scaled], [o * by])


@ops
def test_tf32_only_where_it_is_allowed(op):
    """The call or the setting allows it; the call has precedence. Nothing else rounds float32.
    Where it is allowed, the result is within tf32's bound and differs from the recurrence's
    bits."""
    x = gpu_problem(op, dtype="float32", T=300, K=128)
    forward = getattr(linattn, op)
    plain, plain_state = forward(**x, output_final_state=True)
    assert_same_bits([plain], [forward(**x, mode="recurrent")[0]])
    allowed, state = forward(**x, allow_tf32=True, output_final_state=True)
    if op in BY_TOKEN or torch.cuda.get_device_capability() != (9, 0):
        assert_same_bits([allowed], [plain])
        pytest.skip("float32 goes token by token here, whatever is allowed")
    for a, b in zip([allowed, *leaves(state)], [plain, *leaves(plain_state)], strict=True):
        assert distance(a, b) < 3e-4  # one operand without its second plane would be 1.7e-3 off
    assert distance(allowed, plain) > 0
    recorded, _ = forward(**x | {"v": x["v"].clone().requires_grad_()}, allow_tf32=True)
    assert_same_bits([recorded.detach()], [allowed])
    assert_same_bits([forward(**x, allow_tf32=True, mode="recurrent")[0]], [plain])
    linattn.set_float32_precision("tf32")
    try:
        assert_same_bits([forward(**x)[0], forward(**x, allow_tf32=False)[0]], [allowed, plain])
    finally:
        linattn.set_float32_precision("ieee")
    assert_same_bits([forward(**x)[0]], [plain])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "K, dtype",
    [(100, "bfloat16"), (100, "float16"), (100, "tf32"), (200, "bfloat16"), (200, "float16")],
)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("op", [PLAIN, *linattn.OPS])
def test_not_finite_in_one_number_of_a_chunk(op, name, K, dtype, value):
    """The chunk's earlier tokens keep their bits. The others are finite where the recurrence is."""
    x = gpu_problem(op, dtype=dtype, T=150, K=K, V=72)
    plain = op == PLAIN
    op = op.split(",")[0]
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    x |= {"feature_map": "identity"} if plain else {}
    clean, _ = getattr(linattn, op)(**x)
    if name == "initial_state":
        leaves(x[name])[0][0, 1, K - 3, 5] = value
    elif name == "g":
        x[name][0, 80, 1] = torch.nan  # a gate of infinity is refused
    else:
        x[name][(0, 80, 0, 7) if x[name].ndim == 4 else (0, 80, 0)] = value
    want, want_state = getattr(linattn, op)(**x, mode="recurrent", output_final_state=True)
    got, state = getattr(linattn, op)(**x, output_final_state=True)
    assert not torch.isfinite(want).all()
    for a, b in zip([got, *leaves(state)], [want, *leaves(want_state)], strict=True):
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        assert distance(a, b) < APART[dtype]
        if dtype == "tf32" and linattn.VARIANTS[op].rule not in ("delta", "dplr"):
            # IEEE's infinities stay infinities. The other two rules may subtract one from another,
            # and then the order of the sums decides whether NaN comes out
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a == torch.inf, b == torch.inf)
    if name != "initial_state":
        assert_same_bits([got[:, :80]], [clean[:, :80]])
    assert_same_bits([got[1]], [clean[1]])


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, "linear_attention"])
def test_float16_sums_of_all_tokens(op, K):
    """Not causal: every token reads the sum of 8192 values of 300 or so."""
    x = gpu_problem(op, dtype="float16", T=8192, K=K)
    del x["initial_state"]
    if op == PLAIN:
        x |= {"feature_map": "identity", "k": abs(x["k"])}
    x["v"] = x["v"] * 10 + 300
    x["q"] /= 1000
    op = op.split(",")[0]
    want, want_state = getattr(linattn, op)(
        **x, causal=False, mode="recurrent", output_final_state=True
    )
    got, state = getattr(linattn, op)(**x, causal=False, output_final_state=True)
    assert max(abs(s).max() for s in leaves(want_state)) > 65504
    assert torch.isfinite(want).all()
    for a, b in zip([got, *leaves(state)], [want, *leaves(want_state)], strict=True):
        assert distance(a, b) < APART["float16"]


# ---- many ----


@pytest.mark.parametrize("op", TOKEN_DECAY)
def test_more_than_65535_heads(op):
    """A launch has at most 65,535 blocks along its second and third axis."""
    for pass_ in ("forward", "step"):
        x = gpu_problem(op, pass_=pass_, B=70_000, T=3, H=1, HV=1, K=8, V=8, dtype="float32")
        rows = run(op, x, pass_)
        last = over_arrays(lambda a: a[-1:].clone(), x)
        assert_same_bits([a[-1:] for a in rows], run(op, last, pass_))


@pytest.mark.parametrize("op", TOKEN_DECAY)
def test_more_than_65535_chunks(op):
    x = gpu_problem(op, B=1, T=65_540, H=1, HV=1, K=16, V=16, dtype="float32")
    del x["initial_state"]
    x = {name: torch.cat([a] * 64, 1) for name, a in x.items()}
    o, _ = getattr(linattn, op)(**x)
    # The gates forget: after 512 tokens nothing of the earlier ones is left.
    tail = {name: a[:, -4096:].contiguous() for name, a in x.items()}
    want, _ = reference64(op, tail)
    naive, _ = reference64(op, tail, torch.float32)
    testing.assert_accurate(
        to_numpy(o[:, -3584:]),
        to_numpy(want[:, -3584:]),
        to_numpy(naive[:, -3584:]),
        dtype=np.float32,
    )


@pytest.mark.parametrize("op", TOKEN_DECAY)
def test_more_elements_than_an_int_counts(op):
    """v and o have 2^31 + 2^24 elements. Every head is a copy of those of a smaller call, which has
    as many heads as it takes for the same kernels."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of the GPU's memory are free")
    HV, FEWER, T, V = 129, 127, 2**17, 128
    one = gpu_problem(op, B=1, T=T, H=1, HV=1, K=64, V=V)
    del one["initial_state"]

    def copies(n):
        return {
            name: a if name in ("q", "k") else a.repeat_interleave(n, 2) for name, a in one.items()
        }

    want = getattr(linattn, op)(**copies(FEWER))[0][:, :, :1].clone()
    x = copies(HV)
    assert x["v"].numel() > 2**31 > FEWER * T * V
    o, _ = getattr(linattn, op)(**x)
    for head in (0, 127, 128):
        assert_same_bits([o[:, :, head : head + 1]], [want])


# Few heads of these go in turns of tokens, if their rows are long.
BY_TOKENS = [
    *(op for op in DELTA if op in KEY_DECAY + PAIR_DECAY),
    *ops_with(rule="dplr"),
]

# Few heads of these go in segments in a backward pass.
IN_SEGMENTS = (
    *ops_with(rule="additive"),
    *ops_with(rule="dplr"),  # 50 heads of them go in turns of tokens
    *(op for op in DELTA if op not in KEY_DECAY + PAIR_DECAY),
)


@pytest.mark.parametrize(
    ("op", "group"), [*((op, 1) for op in GATED), *((op, 2) for op in TOKEN_DECAY)]
)
def test_gradients_in_turns(op, group):
    """A backward pass takes at most 4 GiB of scratch: it takes the heads in turns, to the same
    bits. Few heads go in segments, and are the same up to rounding."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of the GPU's memory are free")
    heads, T = 50, 2**16
    small = gpu_problem(op, pass_="backward", B=1, T=T, H=1, HV=group, K=128, V=128)
    groups = heads // group
    x = heads_of(small, groups)
    want = run(op, small, "backward")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    got = run(op, x, "backward")
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - ours)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # no other process uses the GPU's memory
        assert taken <= (4 << 30) + (64 << 20)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        axis = 0 if a.ndim == 2 else 2 if a.shape[1] == T else 1  # of a bonus, a token, a state
        count = b.shape[axis]
        for i in (0, groups // 2 - 1, groups // 2, groups - 1):
            part = a.narrow(axis, i * count, count)
            if op in IN_SEGMENTS:
                assert distance(part, b) < APART["bfloat16"]
            else:
                assert_same_bits([part], [b])
        for i in (0, groups - 2):  # heads of one turn are copies of each other
            assert_same_bits(*([a.narrow(axis, j * count, count)] for j in (i, i + 1)))
    linattn.cuda.empty_cache()


def one_of(x, T, row, head):
    """A row and a head of arrays [B,T,H,.] and of states [B,H,.,.]."""
    return over_arrays(
        lambda a: a[row : row + 1].narrow(2 if a.shape[1] == T else 1, head, 1).contiguous(), x
    )


@pytest.mark.parametrize(("given", "B"), [(True, 1), (False, 1), (True, 2)])
@pytest.mark.parametrize("op", BY_TOKENS)
def test_gradients_in_turns_of_tokens(op, given, B):
    """Where the scratch would take few heads, a turn has some tokens of all heads. A head alone has
    all its tokens at once, and the same gradients up to rounding."""
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("less than 64 GiB of the GPU's memory are free")
    heads, T, K = 16, 2**18 + 100, 64 if op in PAIR_DECAY else 128
    two = gpu_problem(op, pass_="backward", B=B, T=T, H=2, HV=2, K=K, V=128)
    if not given:
        del two["initial_state"], two["d_final_state"]
    x = heads_of(two, heads // 2)
    back = getattr(linattn, f"{op}_backward")
    found = kernels_of(lambda: back(**x))
    walks = found.count("chunks_both_ways")
    assert walks > 2
    assert walks < heads  # turns of heads
    assert "chunks_forward" in found  # of the states before the turns; turns of heads have none
    got = run(op, x, "backward")
    for row, head in {(0, 0), (B - 1, 1)}:
        want = run(op, one_of(two, T, row, head), "backward")
        assert len(got) == len(want)
        for same in (head, heads - 2 + head):
            for a, b in zip(one_of(got, T, row, same), want, strict=True):
                assert distance(a, b) < APART["bfloat16"]
    torch.cuda.empty_cache()
    linattn.cuda.empty_cache()
    alone = {name: y for name, y in x.items() if name not in ("do", "initial_state")}
    dS = leaves(linattn.segment_map_backward(op, x["do"], **alone))
    if not given:
        zeros = tuple(map(torch.zeros_like, dS))
        x["initial_state"] = zeros if op in PAIR_DECAY else zeros[0]
    for a, b in zip(dS, leaves(back(**x).d_initial_state), strict=True):
        assert distance(a, b) < APART["bfloat16"]
    linattn.cuda.empty_cache()


@pytest.mark.parametrize("op", GATED)
def test_a_forward_pass_in_turns(op):
    """A forward pass takes at most 4 GiB of scratch too. KDA of 32 heads and a million tokens took
    34 GiB once."""
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("less than 48 GiB of the GPU's memory are free")
    heads, T = 16, 2**19
    small = gpu_problem(op, B=1, T=T, H=1, HV=1, K=128, V=128)
    del small["initial_state"]
    x = heads_of(small, heads)
    want = run(op, small)
    torch.cuda.synchronize()
    linattn.cuda.empty_cache()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    got = run(op, x)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - ours)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert taken <= (4 << 30) + (256 << 20)
    for a, b in zip(got, want, strict=True):
        axis = 2 if a.shape[1] == T else 1
        for head in (0, 7, heads - 1):
            distant = distance(a.narrow(axis, head, 1), b)  # few heads go in other segments
            assert distant < APART["bfloat16"]
    linattn.cuda.empty_cache()


def test_gradients_of_more_elements_than_an_int_counts():
    """v, do and dv have 2^31 + 2^24 elements, and one q/k head has all value heads. A smaller call
    has as many heads as it takes for the same kernels: a head alone goes in segments, and is the
    same up to rounding."""
    op = "gated_delta_rule"
    if torch.cuda.mem_get_info()[0] < 96 << 30:
        pytest.skip("less than 96 GiB of the GPU's memory are free")
    HV, FEWER, T = 129, 127, 2**17
    small = gpu_problem(op, pass_="backward", B=1, T=T, H=1, HV=1, K=64, V=128)

    def gradients(count):
        x = heads_of(small, count) | {name: small[name] for name in ("q", "k")}
        return x["v"].numel(), getattr(linattn, f"{op}_backward")(**x)

    alone = getattr(linattn, f"{op}_backward")(**small)
    fewer, of_fewer = gradients(FEWER)
    names = [name for name in ("dv", "dg", "dbeta") if getattr(alone, name) is not None]
    want = {name: getattr(of_fewer, name)[:, :, :1].clone() for name in names}
    sums = {name: getattr(of_fewer, name).float() for name in ("dq", "dk")}
    del of_fewer
    elements, got = gradients(HV)
    assert elements > 2**31 > fewer
    for name in names:
        assert distance(want[name], getattr(alone, name)) < APART["bfloat16"]
        for head in (0, 127, 128):
            assert_same_bits([getattr(got, name)[:, :, head : head + 1]], [want[name]])
    for name in ("dq", "dk"):  # a sum over heads, each rounded once more: two bf16 roundings
        found, each = getattr(got, name).float(), sums[name] / FEWER
        assert ((found - HV * each).abs() <= 2**-7 * (HV * each).abs()).all()
        assert distance(found, HV * getattr(alone, name).float()) < APART["bfloat16"]


def test_what_calls_keep_can_be_given_back():
    """Other processes may run: more memory comes back than they take meanwhile."""
    x = gpu_problem("gated_delta_rule", pass_="backward", B=1, T=2**15, H=32, HV=32, K=128, V=128)
    run("gated_delta_rule", x, "backward")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    linattn.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after - before > 1 << 30
    run("gated_delta_rule", x, "backward")
    torch.cuda.synchronize()
    linattn.cuda.empty_cache()
