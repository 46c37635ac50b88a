"""linattn.prefill: prompts of sequences whose states lie in a pool."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from support.compare import leaves, over_arrays
from support.device import imported

import linattn
from linattn import composed, reference, scans
from linattn.testing import make_inputs

OPS = linattn.OPS
SYSTEMS = [name for name in composed.__all__ if f"{name}_step" in composed.__all__]
SCANS = [name for name in scans.__all__ if f"{name}_step" in scans.__all__]
N, SLOTS = 3, [5, -1, 2]


def names_of(function):
    names = inspect.signature(function).parameters
    return next(x for x in names if x.startswith("initial")), next(x for x in names if "final" in x)


def called(name, x, S, **more):
    """The function with these initial states: o, and the final ones."""
    function = getattr(linattn, name)
    initial, final = names_of(function)
    return function(**x, **more, **{initial: S, final: True})


def drawn(name, rng):
    """Arguments without a state, and a pool: from the shapes of the function's own final state."""
    if name in OPS:
        x = make_inputs(name, rng, B=N, T=9, H=2, HV=4, K=5, V=6, dtype=np.float64)
    elif name in SYSTEMS:
        x = of_system(name, rng)
    else:
        x = of_room(name, rng)
    _, S = called(name, x, None)
    parts = [rng.standard_normal((7, *a.shape[1:])).astype(a.dtype) for a in leaves([S])]
    return x, tuple(parts) if isinstance(S, tuple) else parts[0]


def of_system(name, rng):
    from support.shared_rows import is_of_tokens, system_problem

    x = system_problem(name, rng, 9)[0]
    x = {n: y for n, y in x.items() if "state" not in n}
    return {
        n: np.concatenate([y, y[:1]]) if is_of_tokens(n, y) and len(y) == 2 else y
        for n, y in x.items()
    }


def of_room(name, rng):
    D, n = 6, 4
    normal = rng.standard_normal
    tokens = (N, 9, D)
    if name == "hgrn":
        return {"x": normal(tokens), "g": -rng.exponential(0.5, tokens)}
    if name == "rg_lru":
        gates = {"r": rng.uniform(0, 1, tokens), "i": rng.uniform(0, 1, tokens)}
        return {"x": normal(tokens), "Lambda": normal(D)} | gates
    if name == "causal_conv1d":
        return {"x": normal(tokens), "weight": normal((D, 4)), "activation": "silu"}
    A = -rng.uniform(0.1, 2, (D, n))
    if name == "s4d":
        x = {"u": normal(tokens), "dt": rng.uniform(0.1, 0.5, D), "A": A}
        return x | {"B": normal((D, n)), "C": normal((D, n))}
    rows = {"B": normal((N, 9, 2, n)), "C": normal((N, 9, 2, n))}
    return {"u": normal(tokens), "delta": rng.uniform(0.1, 0.5, tokens), "A": A} | rows


def copied(S):
    return over_arrays(np.copy, S) if isinstance(S, tuple) else S.copy()


def assert_pool(pool, before, finals, slots):
    """The final states are in their places, and the others stayed."""
    for now, was, S in zip(leaves([pool]), leaves([before]), leaves([finals]), strict=True):
        for n, slot in enumerate(slots):
            if slot >= 0:
                np.testing.assert_array_equal(now[slot], S[n].astype(now.dtype))
        others = [slot for slot in range(len(now)) if slot not in slots]
        np.testing.assert_array_equal(now[others], was[others])


@pytest.mark.parametrize("name", [*OPS, *SYSTEMS, *SCANS, "causal_conv1d"])
def test_the_bits_of_the_call(name, rng):
    x, pool = drawn(name, rng)
    before = copied(pool)
    starts = over_arrays(lambda a: a[[5, 0, 2]], pool) if isinstance(pool, tuple) else pool[SLOTS]
    for S in leaves([starts]):
        S[1] = 0  # it has no state
    want, finals = called(name, x, starts)
    o = linattn.prefill(name, **x, state=pool, state_indices=SLOTS)
    np.testing.assert_array_equal(o, want)
    assert_pool(pool, before, finals, SLOTS)


@pytest.mark.parametrize("name", [OPS[0], OPS[-1], "kda"])
def test_sequences_that_begin(name, rng):
    x, pool = drawn(name, rng)
    for S in leaves([pool]):
        S[5] = np.nan  # another sequence left it
    before = copied(pool)
    starts = tuple(S[[5, 1, 2]] for S in leaves([pool]))
    for S in starts:
        S[0] = 0
    want, finals = called(name, x, starts if isinstance(pool, tuple) else starts[0])
    slots = np.array([5, 1, 2])
    o = linattn.prefill(
        getattr(linattn, name), **x, state=pool, state_indices=slots, begins=[True, False, False]
    )
    np.testing.assert_array_equal(o, want)
    assert_pool(pool, before, finals, slots)


@pytest.mark.parametrize("name", OPS)
def test_packed_sequences_in_parts(name, rng):
    """A prompt in two parts is the prompt, in a pool of bfloat16 numbers too."""
    edges = np.array([0, 4, 4, 9])
    x = make_inputs(name, rng, B=1, T=9, H=2, HV=4, K=5, V=6, dtype=np.float32, cu_seqlens=edges)
    _, finals = called(name, x, None)
    pool = over_arrays(lambda a: np.zeros((4, *a.shape[1:]), a.dtype), finals)
    pool = tuple(pool) if isinstance(finals, tuple) else pool
    before = copied(pool)
    o = linattn.prefill(name, **x, state=pool, state_indices=[3, 0, 1])
    np.testing.assert_array_equal(o, called(name, x, None)[0])
    assert_pool(pool, before, finals, [3, 0, 1])


def test_a_short_pool(rng):
    x, pool = drawn("kda", rng)
    x = {n: y.astype(np.float32) for n, y in x.items()}
    short = pool.astype(ml_dtypes.bfloat16)
    before = short.copy()
    _, finals = called("kda", x, short[[5, 1, 2]])
    linattn.prefill("kda", **x, state=short, state_indices=[5, 1, 2])
    assert_pool(short, before, finals, [5, 1, 2])


def test_tensors(rng):
    torch = imported("torch")
    x, pool = drawn("gated_delta_rule", rng)
    x = {n: torch.from_numpy(y) for n, y in x.items()}
    pool = torch.from_numpy(pool)
    want, finals = called("gated_delta_rule", x, pool[[5, 1, 2]])
    o = linattn.prefill("gated_delta_rule", **x, state=pool, state_indices=torch.tensor([5, 1, 2]))
    assert torch.equal(o, want) and torch.equal(pool[[5, 1, 2]], finals)
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="v: requires gradients"):
        linattn.prefill("gated_delta_rule", **x, state=pool, state_indices=[5, 1, 2])


@pytest.mark.parametrize("change", [{}, {"state_indices": []}])
def test_nothing(change, rng):
    """No rows, and no pool."""
    q = np.zeros((0, 4, 2, 5))
    pool = np.zeros((0, 2, 5, 5))
    o = linattn.prefill("delta_rule", q, q, q, 0.5, state=pool, **{"state_indices": []} | change)
    assert o.shape == q.shape


WRONG = {
    "an index outside": ({"state_indices": [0, 7, 1]}, ValueError, "expected -1 to 6, got 7"),
    "an index twice": ({"state_indices": [0, 1, 0]}, ValueError, "no state twice, got 0"),
    "two indices": ({"state_indices": [0, 1]}, ValueError, r"expected \[N\] = \[3\], got 2"),
    "no ints": ({"state_indices": [0, 1.5, 2]}, TypeError, "state_indices: expected an int"),
    "no indices": ({"state_indices": 3}, TypeError, "state_indices: expected a sequence"),
    "no bools": ({"begins": [0, 1, 1]}, TypeError, "begins: expected bools, got int"),
    "no pool": ({"state": 3.0}, TypeError, "state: expected an array"),
    "pools of two sizes": (
        {"state": (np.zeros(3), np.zeros(4))},
        ValueError,
        r"size, got \[3, 4\]",
    ),
    "a state beside it": ({"initial_state": 1}, ValueError, "initial_state: expected no"),
    "another function of an op's name": (
        {"op": reference.kda},
        ValueError,
        "op: expected a function",
    ),
    "sequences without edges": ({"cu_seqlens": 6}, ValueError, r"cu_seqlens: expected \[N\+1\]"),
    "text for indices": ({"state_indices": "012"}, TypeError, "state_indices: expected a sequence"),
    "no op": ({"op": "softmax"}, ValueError, "op: expected a function of linattn's"),
    "no pass of an op": ({"op": "kda_step"}, ValueError, "op: expected a function of linattn's"),
    "no batch": (
        {"q": np.zeros((9, 5))},
        ValueError,
        "q: expected an array with all of its 4 axes",
    ),
    "no such argument": ({"gamma": 0.5}, TypeError, "gamma"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_refused(which, rng):
    change, kind, said = WRONG[which]
    x, pool = drawn("kda", rng)
    before = pool.copy()
    given = {"op": "kda", "state": pool, "state_indices": [0, 1, 2]} | x | change
    with pytest.raises(kind, match=said):
        linattn.prefill(given.pop("op"), **given)
    np.testing.assert_array_equal(pool, before)


def test_a_pool_that_does_not_fit_stays(rng):
    x, _ = drawn("kda", rng)
    pool = np.ones((7, 3, 3, 3))
    with pytest.raises(ValueError, match=r"^state: expected"):
        linattn.prefill("kda", **x, state=pool, state_indices=[0, 1, 2])
    assert (pool == 1).all()
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="state: expected a writable array"):
        linattn.prefill("kda", **x, state=pool, state_indices=[0, 1, 2])


def test_arrays_of_jax(rng):
    """They do not change: there is a new pool."""
    imported("jax")
    import jax
    import jax.numpy as jnp

    import linattn.jax

    q, k, v = (jnp.asarray(x) for x in rng.standard_normal((3, 2, 9, 2, 4)).astype(np.float32))
    pool = jnp.ones((5, 2, 4, 4), jnp.float32)
    options = {"state_indices": [3, -1], "begins": [True, False]}
    o, after = jax.jit(
        lambda pool: linattn.prefill("delta_rule", q, k, v, 0.5, state=pool, **options)
    )(pool)
    mine = np.ones(pool.shape, np.float32)
    rows = [np.asarray(x) for x in (q, k, v)]
    want = linattn.prefill("delta_rule", *rows, 0.5, state=mine, **options)
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, mine, rtol=1e-5, atol=1e-6)
    assert (np.asarray(pool) == 1).all()


def test_pools_that_the_step_refuses(rng):
    """In a pool every state has memory of its own."""
    x, pool = drawn("titans", rng)
    with pytest.raises(ValueError, match=r"state\[0\]: .* shared with state\[1\]"):
        linattn.prefill("titans", **x, state=(pool[0], pool[0]), state_indices=[0, 1, 2])
    x, pool = drawn("kda", rng)
    wide = np.lib.stride_tricks.as_strided(pool, (7, *pool.shape[1:]), (0, *pool.strides[1:]))
    with pytest.raises(ValueError, match="state: expected every element in a place of its own"):
        linattn.prefill("kda", **x, state=wide, state_indices=[0, 1, 2])
    block = np.zeros(7 * 4 * 5 * 6)
    q = x | {"q": block[: x["q"].size].reshape(x["q"].shape)}
    with pytest.raises(ValueError, match=r"state: expected memory of its own, got .* with q"):
        linattn.prefill("kda", **q, state=block.reshape(7, 4, 5, 6), state_indices=[0, 1, 2])


def test_pairs_that_do_not_fit_stay(rng):
    torch = imported("torch")
    q, k, v = (torch.from_numpy(y) for y in rng.standard_normal((3, 2, 9, 2, 4)))
    options = {"state_indices": [0, 1]}
    S, z = torch.zeros(4, 2, 4, 4).double(), torch.zeros(4, 2, 4).double()
    for wrong, kind, said in (
        (z.clone().requires_grad_(), ValueError, r"state\[1\]: requires gradients"),
        (z.numpy(), TypeError, r"state\[1\]: expected an array of torch"),
        (z.to("meta"), TypeError, r"state\[1\]: expected an array of torch on cpu"),
        (z[:, :, :3].contiguous(), ValueError, r"state\[1\]: expected"),
    ):
        with pytest.raises(kind, match=said):
            linattn.prefill("linear_attention", q, k, v, state=(S, wrong), **options)
        assert not S.any()
    line = torch.nn.Linear(4, 4).double()
    o = linattn.prefill(
        "linear_attention", q, k, v, feature_map=lambda x: line(x).exp(), state=(S, z), **options
    )
    assert not o.requires_grad and not S.requires_grad and S[:2].all()


def test_options_that_have_no_place(rng):
    x, pool = drawn("linear_attention", rng)
    with pytest.raises(ValueError, match="causal: expected True"):
        linattn.prefill("linear_attention", **x, causal=False, state=pool, state_indices=[0, 1, 2])
