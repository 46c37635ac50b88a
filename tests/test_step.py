"""T steps of every op and dtype against the reference, and against one forward pass."""

import ml_dtypes
import numpy as np
import pytest
from support.device import ops as linattn
from support.grid import (
    DTYPES,
    Case,
    inputs_of,
    reference_op,
    repeated,
    taking_turns,
    v_first,
    wider,
)
from support.problems import at_token, poisoned

SHAPES = [  # (B, H, HV, K, V)
    (1, 1, 1, 1, 1),
    (2, 2, 4, 16, 8),
    (1, 1, 2, 7, 59),
    (3, 1, 1, 128, 64),
    (1, 2, 2, 33, 130),
    (1, 1, 1, 256, 256),
    (2, 4, 4, 64, 64),
    (1, 1, 4, 100, 3),
]
TOKENS = 20


def step_through(case, x, state):
    step = getattr(linattn, f"{case.op}_step")
    outputs = []
    for t in range(case.T):
        args = at_token(x, t)
        args.pop("initial_state", None)
        out = poisoned(args["v"].shape, case.dtype)
        o = step(**args, state=state, state_v_first=case.v_first, out=out)
        assert o is out
        outputs.append(o)
    return np.stack(outputs, 1)


def fresh_state(case, x, dtype):
    state = x["initial_state"]
    pair = state if isinstance(state, tuple) else (state,)
    pair = tuple(s.astype(dtype) for s in pair)
    if case.v_first:
        pair = v_first(pair)
    return pair if isinstance(state, tuple) else pair[0]


CASES = [
    Case(op, "recurrent", dtype, TOKENS, None, K, V, H, HV, B, v_first=v_first_layout)
    for op, dtype, (B, H, HV, K, V), v_first_layout in taking_turns(
        linattn.OPS, DTYPES, SHAPES, turns=(False, True)
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps(case, rng):

    def reference(x, **how):
        return dict(zip(("o", "final_state"), reference_op(case)(**x, **how), strict=True))

    def once(pool):
        x = inputs_of(case, rng)
        state = fresh_state(case, x, np.float64 if case.dtype == np.float64 else np.float32)
        o = step_through(case, x, state)
        pool.add(
            {"o": o, "final_state": v_first(state) if case.v_first else state},
            reference(x, dtype=wider(case.dtype)),
            lambda x: reference(x, dtype=case.dtype),
            x,
        )

    repeated(case, rng, once).judge(str(case))


@pytest.mark.parametrize("op", linattn.OPS)
def test_a_state_in_bfloat16(op, rng):
    """The arithmetic is float32, and the state is rounded after every token. The same rounding by
    hand between float32 steps gives the same bits."""
    case = Case(op, "recurrent", np.float32, TOKENS, None, 32, 48, 2, 4, 2)
    x = inputs_of(case, rng)
    short = fresh_state(case, x, ml_dtypes.bfloat16)
    pair = short if isinstance(short, tuple) else (short,)
    by_hand = tuple(s.astype(np.float32) for s in pair)
    step = getattr(linattn, f"{op}_step")
    for t in range(TOKENS):
        args = at_token(x, t)
        args.pop("initial_state")
        o = step(**args, state=short)
        expected = step(**args, state=by_hand if isinstance(short, tuple) else by_hand[0])
        for s in by_hand:
            s[...] = s.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(o, expected)
        for s, wide in zip(pair, by_hand, strict=True):
            np.testing.assert_array_equal(s.astype(np.float32), wide)


@pytest.mark.parametrize("op", linattn.OPS)
def test_steps_continue_a_forward_pass(op, rng):
    case = Case(op, "chunk", np.float64, 40, None, 16, 24, 1, 2, 2, state=False)
    x = inputs_of(case, rng)
    whole, _ = getattr(linattn, op)(**x)
    first = {name: v[:, :23] if np.ndim(v) > 1 else v for name, v in x.items()}
    _, state = getattr(linattn, op)(**first, output_final_state=True)
    for t in range(23, 40):
        o = getattr(linattn, f"{op}_step")(**at_token(x, t), state=state)
        np.testing.assert_allclose(o, whole[:, t], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("gap", [1, 16])
@pytest.mark.parametrize("V", [16, 64, 128])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("op", linattn.OPS)
def test_rows_of_a_state_that_lie_apart(op, dtype, V, gap, rng):
    """V is whole lanes on every machine. Rows V + 1 apart are not, rows V + 16 apart are."""
    case = Case(op, "recurrent", dtype, 3, None, 24, V, 1, 2, 2)
    x = inputs_of(case, rng)
    want_state = fresh_state(case, x, dtype)
    S, *z = want_state if isinstance(want_state, tuple) else (want_state,)
    wide = np.full((*S.shape[:-1], V + gap), 7, dtype)
    wide[..., :V] = S
    state = (wide[..., :V], *map(np.copy, z)) if z else wide[..., :V]
    for t in range(case.T):
        args = at_token(x, t)
        args.pop("initial_state")
        o = getattr(linattn, f"{op}_step")(**args, state=state)
        want = getattr(linattn, f"{op}_step")(**args, state=want_state)
        np.testing.assert_array_equal(o, want)
        np.testing.assert_array_equal(wide[..., :V], S)
        assert (wide[..., V:] == 7).all()
