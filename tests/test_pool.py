"""Steps whose states are picked from a pool: state_indices."""

import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits, over_arrays
from support.device import ops as linattn
from support.pools import KINDS, SHAPES, B, P, pool_problem
from support.problems import KEY_HEADS, PER_TOKEN, arguments, at_token, poisoned, refused

OPS = linattn.OPS
TOKENS = 3


def step(op):
    return getattr(linattn, f"{op}_step")


@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(np.dtype(d).name for d in kind))
@pytest.mark.parametrize("op", OPS)
def test_rows_step_with_the_states_they_name(op, kind, shape, v_first, rng):
    """Every token has another choice. The outputs are those of steps of one row each, and the rest
    of the pool stays as it was."""
    x, pool = pool_problem(op, rng, *kind, shape, T=TOKENS, v_first=v_first)
    alone = [over_arrays(lambda s, i=i: s[i : i + 1].copy(), pool) for i in range(P)]
    for t in range(TOKENS):
        indices = rng.permutation(P)[:B].astype(np.int32 if t % 2 else np.int64)
        indices[t] = -1
        out = poisoned((B, *x["v"].shape[2:]), kind[0])
        o = step(op)(**at_token(x, t), state=pool, state_indices=indices, out=out)
        assert o is out
        for n, i in enumerate(indices):
            if i < 0:
                assert o[n].tobytes() == bytes(o[n].nbytes)
                continue
            want = step(op)(**at_token(x, t, slice(n, n + 1)), state=alone[i])
            assert_same_bits(o[n : n + 1], want)
        for i in range(P):
            assert_same_bits(over_arrays(lambda s, i=i: s[i : i + 1], pool), alone[i])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_no_row_has_a_state(op, kind, rng):
    """The output is zero, whatever the inputs are, and the pool is not touched."""
    x, pool = pool_problem(op, rng, *kind, SHAPES[0])
    x = {name: np.full_like(a, np.nan) if name in PER_TOKEN else a for name, a in x.items()}
    before = over_arrays(np.copy, pool)
    out = poisoned((B, *x["v"].shape[2:]), kind[0])
    o = step(op)(**at_token(x, 0), state=pool, state_indices=np.full(B, -1), out=out)
    assert not o.astype(np.float32).any() and not np.signbit(o.astype(np.float32)).any()
    assert_same_bits(pool, before)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_of_any_size(op, rng):
    """Fewer states than rows, as many, and one."""
    for size in (1, 2, B):
        x, pool = pool_problem(op, rng, np.float32, np.float32, SHAPES[0], P=size)
        indices = np.full(B, -1)
        indices[:size] = rng.permutation(size)
        rows = np.arange(size)
        want_pool = over_arrays(lambda s, at=indices[:size]: s[at], pool)
        want = step(op)(**at_token(x, 0, rows), state=want_pool)
        o = step(op)(**at_token(x, 0), state=pool, state_indices=indices)
        assert_same_bits(o[:size], want)
        assert not o[size:].any()
        assert_same_bits(over_arrays(lambda s, at=indices[:size]: s[at], pool), want_pool)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_indices_lie_anywhere(dtype, rng):
    x, pool = pool_problem("gated_delta_rule", rng, np.float32, np.float32, SHAPES[0])
    plain = np.array([5, -1, 0, 3], dtype)
    want_pool = pool.copy()
    want = step("gated_delta_rule")(**at_token(x, 0), state=want_pool, state_indices=plain)
    spread = np.full(2 * B + 1, 10**6, dtype)
    spread[1::2] = plain
    layouts = [spread[1::2]]
    if device.negative_strides():
        layouts.append(plain[::-1].copy()[::-1])
    for indices in layouts:
        state = pool.copy()
        o = step("gated_delta_rule")(**at_token(x, 0), state=state, state_indices=indices)
        assert_same_bits(o, want)
        assert_same_bits(state, want_pool)


def test_a_pool_with_gaps(rng):
    """Outer strides are free: every other state of a larger pool."""
    x, pool = pool_problem("kda", rng, np.float32, np.float32, SHAPES[0], P=2 * P)
    indices = np.array([6, 2, -1, 0])
    want_pool = pool[::2].copy()
    want = step("kda")(**at_token(x, 0), state=want_pool, state_indices=indices)
    others = pool[1::2].copy()
    assert_same_bits(step("kda")(**at_token(x, 0), state=pool[::2], state_indices=indices), want)
    assert_same_bits(pool[::2], want_pool)
    assert_same_bits(pool[1::2], others)


@pytest.mark.parametrize("op", OPS)
def test_one_head(op, rng):
    x, pool = pool_problem(op, rng, np.float32, np.float32, (1, 1, 8, 6), B=1)
    row = {
        name: a[0, 0, 0] if name in PER_TOKEN else a[0] if name in KEY_HEADS else a
        for name, a in x.items()
    }
    want_pool = over_arrays(np.copy, pool)
    want = step(op)(**at_token(x, 0), state=want_pool, state_indices=np.array([4]))
    flat = over_arrays(lambda s: s[:, 0].copy(), pool)
    o = step(op)(**row, state=flat, state_indices=np.array([4]))
    assert o.shape == (6,)
    assert_same_bits(o, want[0, 0])
    assert_same_bits(flat, over_arrays(lambda s: s[:, 0].copy(), want_pool))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_of_a_large_pool(threads, rng):
    """More rows than fit on the stack, indices that are equal modulo a power of two."""
    x, pool = pool_problem(
        "gated_delta_rule", rng, np.float32, np.float32, (1, 1, 8, 16), B=300, P=9000
    )
    indices = rng.permutation(9000)[:300]
    indices[:3] = 5, 5 + 4096, 5 + 8192
    indices[3:] = [i for i in rng.permutation(9000) if i % 4096 != 5][:297]
    want_pool = pool[indices]
    want = step("gated_delta_rule")(**at_token(x, 0), state=want_pool)
    before = linattn.get_num_threads()
    linattn.set_num_threads(threads)
    try:
        o = step("gated_delta_rule")(**at_token(x, 0), state=pool, state_indices=indices)
    finally:
        linattn.set_num_threads(before)
    assert_same_bits(o, want)
    assert_same_bits(pool[indices], want_pool)
    if device.on_host():
        indices[299] = 5 + 4096
        with pytest.raises(ValueError, match="twice, got 4101 at index 1 and at index 299"):
            step("gated_delta_rule")(**at_token(x, 0), state=pool, state_indices=indices)


def test_an_empty_batch():
    made = arguments("kda", "step", B=0) | {"state": np.ones((P, 4, 8, 6), np.float32)}
    o = linattn.kda_step(**made, state_indices=np.zeros(0, np.int32))
    assert o.shape == (0, 4, 6) and (made["state"] == 1).all()


# ---- what is refused ----


def spoiled(op="gated_delta_rule", **changed):
    """A legal call of 3 rows and 5 states, out given, with something else in it."""
    made = arguments(op, "step") | {"out": np.ones((3, 4, 6), np.float32)}
    made["state"] = over_arrays(lambda _: np.ones((5, 4, 8, 6), np.float32), made["state"])
    return made | {"state_indices": np.array([4, -1, 0])} | changed


@pytest.mark.parametrize("op", OPS)
def test_values_outside_the_pool(op):
    device.needs_host("the values of state_indices are not looked at")
    for bad in (5, -2, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**63 - 1):
        for n in range(3):
            for dtype in (np.int32, np.int64):
                indices = np.array([4, -1, 0], dtype)
                if not np.iinfo(dtype).min <= bad <= np.iinfo(dtype).max:
                    continue
                indices[n] = bad
                refused(
                    step(op),
                    spoiled(op, state_indices=indices),
                    ValueError,
                    "state_indices: expected 0 to P - 1 = 4, or -1 for no state, "
                    f"got {bad} at index {n}",
                )


@pytest.mark.parametrize("op", OPS)
def test_a_state_for_two_rows(op):
    device.needs_host("the values of state_indices are not looked at")
    refused(
        step(op),
        spoiled(op, state_indices=np.array([2, -1, 2], np.int32)),
        ValueError,
        "state_indices: expected no state twice, got 2 at index 0 and at index 2",
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2), (0, 2)])
def test_a_state_for_any_two_rows(first, second, dtype):
    """Rows that are neighbours, and rows that are not."""
    device.needs_host("the values of state_indices are not looked at")
    indices = np.array([4, 1, 0], dtype)
    indices[second] = indices[first]
    refused(
        step("kda"),
        spoiled("kda", state_indices=indices),
        ValueError,
        f"state_indices: expected no state twice, got {indices[first]} at index {first} and at "
        f"index {second}",
    )


@pytest.mark.parametrize("op", OPS)
def test_both_parts_of_a_pair_are_pools(op):
    if op != "linear_attention":
        return
    S, z = np.ones((5, 4, 8, 6), np.float32), np.ones((3, 4, 8), np.float32)
    made = spoiled(op, state=(S, z), normalize=True)
    refused(step(op), made, ValueError, "state[1]: expected [P,HV,K] = (5, 4, 8), got (3, 4, 8)")


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 3), ()], ids=str)
def test_shapes_of_indices(shape):
    refused(
        step("kda"),
        spoiled("kda", state_indices=np.full(shape, -1)),
        ValueError,
        f"state_indices: expected [B] = (3,), got {shape}",
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint8, np.bool_])
def test_dtypes_of_indices(dtype):
    refused(
        step("kda"),
        spoiled("kda", state_indices=np.zeros(3, dtype)),
        TypeError,
        "state_indices: expected int32 or int64, got ",
    )


@pytest.mark.parametrize("bad", [[4, -1, 0], (4, -1, 0), 4, "x", True], ids=repr)
def test_indices_that_are_no_array(bad):
    refused(
        step("kda"),
        spoiled("kda", state_indices=bad),
        TypeError,
        "state_indices: expected an array, got ",
    )


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((5, 4, 6, 8), " = (5, 4, 8, 6), got (5, 4, 6, 8)"),
        ((5, 2, 8, 6), " = (5, 4, 8, 6), got (5, 2, 8, 6)"),
        ((4, 8, 6), ", got (4, 8, 6)"),
        ((5, 1, 4, 8, 6), ", got (5, 1, 4, 8, 6)"),
    ],
    ids=str,
)
def test_shapes_of_pools(shape, text):
    refused(
        step("kda"),
        spoiled("kda", state=np.ones(shape, np.float32)),
        ValueError,
        f"state: expected [P,HV,K,V]{text}",
    )


def test_an_empty_pool():
    refused(
        step("kda"),
        spoiled("kda", state=np.ones((0, 4, 8, 6), np.float32)),
        ValueError,
        "state: expected P >= 1 states in the pool, got P = 0",
    )


def test_states_without_indices_are_one_a_row():
    made = spoiled("kda")
    del made["state_indices"]
    refused(
        step("kda"), made, ValueError, "state: expected [N,HV,K,V] = (3, 4, 8, 6), got (5, 4, 8, 6)"
    )


@pytest.mark.parametrize("written", ["out", "state"])
def test_indices_in_memory_that_is_written(written):
    made = spoiled("kda")
    inside = made[written].reshape(-1)[:3].view(np.int32)
    inside[...] = 4, -1, 0
    refused(
        step("kda"),
        made | {"state_indices": inside},
        ValueError,
        f"{written}: expected memory of its own, got memory shared with state_indices",
    )


def test_byteswapped_indices():
    device.needs_numpy("no arrays of swapped bytes")
    swapped = np.array([4, -1, 0], np.dtype(np.int64).newbyteorder())
    refused(
        step("kda"),
        spoiled("kda", state_indices=swapped),
        ValueError,
        "state_indices: expected an aligned array in native byte order",
    )


def test_it_is_a_step_keyword_only():
    made = arguments("kda", "forward")
    with pytest.raises(TypeError, match="state_indices"):
        linattn.kda(**made, state_indices=np.zeros(3, np.int64))
