"""Long sequences in float32, whose memory reaches back to their beginning: errors must not add up.

Up to T = 65536 the reference goes token by token in float64. Up to 2^20 the library's own float64
is the reference: its error is far below float32's rounding."""

import numpy as np
import pytest
from support.compare import leaves
from support.problems import PER_HEAD
from support.variants import DELTA, GATED, KEY_DECAY, PAIR_DECAY, TOKEN_DECAY, ops_with

import linattn
from linattn import reference
from linattn.testing import RMS_BOUND

LONG, LONGEST, K = 2**16, 2**20, 16
CASES = [
    (op, gate)
    for op in linattn.OPS
    for gate in (("equal", "random", "alpha") if op in GATED else ("",))
]


def long_inputs(op, gate, T):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((T, K)) for _ in range(3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    made = {"q": q, "k": k, "v": v}
    if op in GATED:
        shape = (T, K) if op in KEY_DECAY else (T,)
        g = np.full(shape, -1e-5) if gate == "equal" else rng.uniform(-2e-5, 0, shape)
        made["alpha" if gate == "alpha" else "g"] = np.exp(g) if gate == "alpha" else g
    if op in DELTA:
        made["beta"] = rng.uniform(0, 1, T)
    if op in PAIR_DECAY:
        made["eta"] = rng.uniform(0, 0.9, T)
    if op in ops_with(rule="dplr"):  # as a delta rule that looks before the decay
        made |= {"x": k, "y": rng.uniform(0, 1, (T, 1)) * k}
    if op in ops_with(rule="bonus"):
        made["bonus"] = rng.standard_normal(K)
    if op == "retention":
        made["gamma"] = np.array([1 - 2.0**-17])
    if op == "lightning_attention":
        made["slopes"] = np.array([1e-5])
    made = {name: x.astype(np.float32) for name, x in made.items()}
    if op == "linear_attention":
        made |= {"normalize": False, "feature_map": "identity"}
    return made


def widened(made):
    return {
        name: x.astype(np.float64) if isinstance(x, np.ndarray) else x for name, x in made.items()
    }


def with_heads(name, x):
    """One head's array as the reference takes it."""
    if name == "bonus":
        return x[None]
    return x if name in PER_HEAD or np.ndim(x) == 0 else x[None, :, None]


def error(x, exact):
    x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
    return np.sqrt(np.mean((x - exact) ** 2) / np.mean(exact**2))


@pytest.mark.parametrize(("op", "gate"), CASES, ids=str)
def test_65536_tokens(op, gate):
    """In chunks, by the acceptance rule. The state is the sum of them all."""
    made = long_inputs(op, gate, LONG)
    exact, final = getattr(reference, op)(
        **{name: with_heads(name, x) for name, x in widened(made).items()}
    )
    o, state = getattr(linattn, op)(**made, output_final_state=True)
    assert error(o, exact[0, :, 0]) < RMS_BOUND["float32"]
    for one, last in zip(leaves(state), leaves(final), strict=True):
        assert error(one, last[0, 0]) < RMS_BOUND["float32"]


@pytest.mark.parametrize(
    ("op", "gate"),
    [("simple_gla", "equal"), ("gla", "equal"), ("retention", ""), ("linear_attention", "")],
    ids=str,
)
def test_65536_tokens_one_by_one(op, gate):
    """The state is rounded once a token, by up to 2^-24 of it, and roundings are a random walk."""
    made = long_inputs(op, gate, LONG)
    exact, final = getattr(linattn, op)(**widened(made), output_final_state=True)
    o, state = getattr(linattn, op)(**made, mode="recurrent", output_final_state=True)
    most = np.sqrt(LONG / 3) * 2**-24
    assert error(o, exact) < most
    assert error(state, final) < most


@pytest.mark.parametrize("op", GATED)
def test_gradients_of_65536_tokens(op):
    """dS is carried back over as many decays as S is carried on."""
    made = long_inputs(op, "equal", LONG)
    do = np.zeros((LONG, K), np.float32)
    do[-16:] = 1  # the last tokens read what the first ones wrote
    exact = getattr(linattn, op + "_backward")(do.astype(np.float64), **widened(made))
    got = getattr(linattn, op + "_backward")(do, **made)
    for name in ("dq", "dk", "dv", "dg"):
        assert error(getattr(got, name), getattr(exact, name)) < 2 * RMS_BOUND["float32"], name


@pytest.mark.parametrize(
    ("op", "gate"),
    [
        ("simple_gla", "equal"),
        ("gla", "random"),
        ("linear_attention", ""),
        ("gated_delta_rule", "equal"),
    ],
    ids=str,
)
def test_a_million_tokens(op, gate):
    """Past 2^17 tokens the roundings of the state, one in 16 tokens, pass the rule
    (docs/accuracy.md)."""
    made = long_inputs(op, gate, LONGEST)
    exact, final = getattr(linattn, op)(**widened(made), output_final_state=True)
    o, state = getattr(linattn, op)(**made, output_final_state=True)
    most = np.sqrt(LONGEST / 16 / 3) * 2**-24  # 9e-6
    assert error(o, exact) < most
    assert error(state, final) < most


@pytest.mark.parametrize("gate", ["equal", "random"])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_reflections(op, gate):
    """With beta = 2 a token reflects the state, which damps no error. Chunks may lose twice what
    tokens one by one lose, as the acceptance rule has it."""
    rng = np.random.default_rng(3)
    T, K = 4096, 64
    q, k, v = (rng.standard_normal((T, K)) for _ in range(3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    shape = (T,) if op in TOKEN_DECAY else (T, K)
    g = np.full(shape, -1e-5) if gate == "equal" else rng.uniform(-2e-5, 0, shape)
    made = {"q": q, "k": k, "v": v, "g": g, "beta": np.full(T, 2.0)}
    made = {name: x.astype(np.float32) for name, x in made.items()}
    exact, _ = getattr(linattn, op)(**widened(made))
    by_chunks, by_tokens = (
        error(getattr(linattn, op)(**made, mode=mode)[0], exact) for mode in ("chunk", "recurrent")
    )
    assert by_chunks < 2 * by_tokens
