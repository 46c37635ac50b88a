"""More than 256 keys or values on a GPU: token by token, or by kernels that share out columns."""

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import dtypes, gpu_problem, needs_gpu, needs_keys, ops, passes, to_gpu
from support.grid import (
    POOL,
    Case,
    Pool,
    for_op,
    form_of,
    gradients_on_tensor_cores,
    inputs_of,
    on_tensor_cores,
    parts,
    reference_op,
    v_first,
    wider,
)
from support.problems import PER_TOKEN
from support.tensors import to_numpy, torch
from support.variants import RARE

import linattn
from linattn import reference, testing

pytestmark = needs_gpu


@passes
@ops
def test_more_than_512_keys_or_values_are_refused(op, pass_):
    call = getattr(linattn, op if pass_ == "forward" else f"{op}_{pass_}")
    for letter, name, most in (("K", "q", 256 if op in RARE else 512), ("V", "v", 512)):
        x = gpu_problem(op, pass_=pass_, **{letter: most + 1})
        refusal = f"^{name}: expected {letter} <= {most} .* = {most + 1}$"
        with pytest.raises(ValueError, match=refusal):
            call(**x)
        call(**gpu_problem(op, pass_=pass_, **{letter: most}))


# T, K, V, H, HV, B, more of the case. In the first, every array but a gate per head has POOL
# numbers.
WIDE = {
    "257x33": (300, 257, 33, 2, 4, 2, {}),
    "257x257": (3, 257, 257, 2, 4, 2, {"mode": "recurrent", "v_first": True, "l2norm": True}),
    "320x512": (40, 320, 512, 1, 2, 1, {"packed": True, "v_first": True}),
    "512x320": (37, 512, 320, 1, 1, 2, {"state": False}),
    "512x512": (20, 512, 512, 1, 1, 1, {"mode": "recurrent"}),
    "512x64": (300, 512, 64, 1, 1, 1, {"packed": True, "l2norm": True}),
    "64x320": (300, 64, 320, 1, 2, 1, {"v_first": True}),
    "200x512": (70, 200, 512, 1, 1, 1, {"packed": True}),
    "120x257": (70, 120, 257, 1, 1, 1, {"mode": "recurrent"}),
}
wide_sizes = pytest.mark.parametrize("size", WIDE)
all_dtypes = pytest.mark.parametrize(
    "dtype",
    (np.float64, np.float32, np.float16, ml_dtypes.bfloat16),
    ids=lambda dtype: np.dtype(dtype).name,
)


def wide_case(op, dtype, size):
    T, K, V, H, HV, B, more = WIDE[size]
    needs_keys(op, K)
    return Case(
        op, dtype=dtype, T=T, chunk=None, K=K, V=V, H=H, HV=HV, B=B, **({"mode": "chunk"} | more)
    )


def enough(outputs):
    """Without arrays of fewer than POOL numbers: the largest error of a few is an accident."""
    kept = {}
    for name, value in outputs.items():
        large = [y for _, y in parts(name, value) if y.size >= POOL]
        if large:
            kept[name] = tuple(large) if len(large) > 1 else large[0]
    return kept


def judge_wide(case, outputs, expected, x, *, rounded, gradient=False):
    """Outputs by name; expected(x, form=, dtype=) has them from the reference. rounded: by tensor
    cores; all other results come token by token."""
    naive = form_of(case) if rounded else {"form": "recurrent"}
    pool = Pool(case.dtype if rounded else None)
    pool.add(
        enough(outputs),
        enough(expected(x, form="chunk", dtype=wider(case.dtype))),
        lambda x: enough(expected(x, dtype=case.dtype, **naive)),
        x,
    )
    pool.judge(str(case), gradient=gradient)


def wide_inputs(case, rng, options):
    x = inputs_of(case, rng) | options
    if x.get("normalize") is False and case.state:
        x["initial_state"], _ = x["initial_state"]
    return x


def check_wide_forward(case, rng, **options):
    x = wide_inputs(case, rng, options)
    o, state = over_arrays(
        to_numpy,
        getattr(linattn, case.op)(**over_arrays(to_gpu, for_op(case, x)), output_final_state=True),
    )
    outputs = {"o": o, "final_state": v_first(state) if case.v_first else state}

    def expected(x, **how):
        return dict(zip(outputs, reference_op(case)(**x, **how), strict=True))

    judge_wide(
        case, outputs, expected, x, rounded=on_tensor_cores(case.dtype, case.K, case.mode, case.T)
    )


def check_wide_backward(case, rng, **options):
    x = wide_inputs(case, rng, options)
    d = testing.make_output_gradients(case.op, rng, x)
    given = for_op(case, x) | d
    if case.v_first:
        given["d_final_state"] = v_first(given["d_final_state"])
    grads = getattr(linattn, f"{case.op}_backward")(**over_arrays(to_gpu, given))._asdict()
    grads = over_arrays(to_numpy, grads)
    if case.v_first:
        grads["d_initial_state"] = v_first(grads["d_initial_state"])

    def expected(x, **how):
        return reference.backward(case.op, **x, **how)._asdict()

    judge_wide(
        case,
        grads,
        expected,
        x | d,
        gradient=True,
        rounded=gradients_on_tensor_cores(case.op, case.dtype, case.K, case.V, case.mode, case.T),
    )


@wide_sizes
@all_dtypes
@ops
def test_wide_forward(op, dtype, size, rng):
    check_wide_forward(wide_case(op, dtype, size), rng)


@wide_sizes
@all_dtypes
@ops
def test_wide_backward(op, dtype, size, rng):
    check_wide_backward(wide_case(op, dtype, size), rng)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
@pytest.mark.parametrize("normalize", [True, "add", False])
@pytest.mark.parametrize("feature_map", ["relu+eps", "exp"])
@pytest.mark.parametrize(
    "check", [check_wide_forward, check_wide_backward], ids=["forward", "backward"]
)
@pytest.mark.parametrize("size", ["257x257", "320x512", "512x320", "200x512"])
def test_wide_linear_attention(size, check, feature_map, normalize, causal, rng):
    case = wide_case("linear_attention", np.float32, size)
    check(case, rng, feature_map=feature_map, normalize=normalize, causal=causal)


@pytest.mark.parametrize("layout", ["kv", "vk", "pool"])
@pytest.mark.parametrize("K, V", [(257, 33), (320, 512), (512, 257), (64, 320), (256, 512)])
@all_dtypes
@ops
def test_wide_steps(op, dtype, K, V, layout, rng):
    """Four tokens. In a pool the states lie [V][K], and one row has none."""
    needs_keys(op, K)
    case = Case(
        op, "recurrent", dtype, T=4, chunk=None, K=K, V=V, H=2, HV=4, B=3, v_first=layout != "kv"
    )
    x = inputs_of(case, rng)
    first = x["initial_state"]
    first = leaves(over_arrays(to_gpu, v_first(first) if case.v_first else first))
    rows, index = slice(None), {}
    state = [s.clone() for s in first]
    if layout == "pool":
        rows, slots = [0, 2], torch.tensor([4, -1, 2], device="cuda")
        index = {"state_indices": slots}
        state = [s.new_full((5, *s.shape[1:]), 7) for s in first]
        for s, one in zip(state, first, strict=True):
            s[slots[rows]] = one[rows]
    step = getattr(linattn, f"{op}_step")
    o = torch.stack(
        [
            step(
                **over_arrays(
                    to_gpu,
                    {
                        name: np.ascontiguousarray(a[:, t]) if name in PER_TOKEN else a
                        for name, a in x.items()
                        if name != "initial_state"
                    },
                ),
                state=tuple(state) if len(state) > 1 else state[0],
                state_v_first=case.v_first,
                **index,
            )
            for t in range(case.T)
        ],
        1,
    )
    if layout == "pool":
        assert not o[1].any() and all((s[[0, 1, 3]] == 7).all() for s in state)
        state = [s[slots] for s in state]
    states = [to_numpy(s)[rows] for s in state]
    if case.v_first:
        states = [v_first(s) if s.ndim == 4 else s for s in states]

    def expected(x, **how):
        o, state = reference_op(case)(**x, **how)
        return {"o": o[rows], "final_state": over_arrays(lambda s: s[rows], state)}

    outputs = {
        "o": to_numpy(o)[rows],
        "final_state": tuple(states) if len(states) > 1 else states[0],
    }
    judge_wide(case, outputs, expected, x, rounded=False)


@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("K, V", [(320, 40), (512, 512), (64, 320)])
@dtypes
@ops
def test_wide_states_in_bfloat16(op, dtype, K, V, v_first):
    """As float32 states that are rounded by hand after every token, bit for bit."""
    needs_keys(op, K)
    x = gpu_problem(op, dtype=dtype, pass_="step", K=K, V=V)
    state = leaves(x.pop("state"))
    if v_first:
        state = [s.transpose(2, 3).contiguous() if s.ndim == 4 else s for s in state]
    short = [s.bfloat16() for s in state]
    by_hand = [s.float() for s in short]
    step = getattr(linattn, f"{op}_step")
    for _ in range(3):
        o, want = (
            step(**x, state=tuple(s) if len(s) > 1 else s[0], state_v_first=v_first)
            for s in (short, by_hand)
        )
        by_hand = [s.bfloat16().float() for s in by_hand]
        assert_same_bits([o, *(s.float() for s in short)], [want, *by_hand])
