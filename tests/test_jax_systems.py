"""The systems in linattn.jax: beside linattn's own calls, under what JAX makes of functions.

XLA may fuse what NumPy computes one after another, so the results are near, and not the same bits.
"""

import inspect

import numpy as np
import pytest
from support.jax_arrays import SYSTEMS, assert_near, jax, jnp, of_jax, stacked

import linattn

B, T, H, HV, K, V, R = 2, 7, 2, 4, 4, 3, 2
systems = pytest.mark.parametrize("system", SYSTEMS)


class Draw:
    """Arrays of one seed. `tokens` are the axes that a token of a whole sequence has."""

    def __init__(self, seed=0, rows=B, tokens=T):
        self.rng, self.rows, self.tokens = np.random.default_rng(seed), rows, tokens

    def normal(self, *shape, times=1):
        return self.rng.standard_normal((self.rows, self.tokens * times, *shape), np.float32)

    def unit(self, *shape, times=1):
        x = self.normal(*shape, times=times)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def between(self, low, high, *shape, times=1):
        shape = (self.rows, self.tokens * times, *shape)
        return self.rng.uniform(low, high, shape).astype(np.float32)

    def per_head(self, low, high):
        return self.rng.uniform(low, high, HV).astype(np.float32)


def rows(draw, heads=HV, times=1):
    keys = {"times": times}
    return {
        "q": draw.normal(H, K),
        "k": draw.unit(H, K, **keys),
        "v": draw.normal(heads, V, **keys),
    }


def gates(draw, *keys):
    return {"g": draw.between(-1, 0, HV, *keys), "beta": draw.between(0, 1, HV)}


PROBLEMS = {
    "comba": lambda d: rows(d) | gates(d) | {"x": d.unit(H, K)},
    "gated_delta_product": lambda d: (
        rows(d, times=R)
        | {"g": d.between(-1, 0, HV), "beta": d.between(0, 1, HV, times=R), "num_householder": R}
    ),
    "gdn2": lambda d: (
        rows(d)
        | {"g": d.between(-1, 0, HV, K), "b": d.between(0, 1, H, K), "w": d.between(0, 1, HV, V)}
    ),
    "hgrn2": lambda d: {"q": d.normal(H, K), "g": d.between(-1, 0, H, K), "v": d.normal(H, V)},
    "iplr_delta_rule": lambda d: rows(d) | {"a": -d.unit(H, K), "b": d.unit(H, K)},
    "mamba3": lambda d: ssm(d) | {"trap": d.between(0, 1, HV), "angles": d.normal(HV, 2)},
    "mlstm": lambda d: rows(d) | {"i": d.normal(HV), "f": d.normal(HV)},
    "precond_gated_delta_rule": lambda d: (
        rows(d) | gates(d) | {"preconditioner": d.between(0, 1, H, K)}
    ),
    "rwkv7": lambda d: {
        "r": d.normal(H, K),
        "w": d.between(-1, 0, H, K),
        "k": d.normal(H, K),
        "v": d.normal(H, V),
        "a": d.between(0, 1, H, K),
        "kk": d.unit(H, K),
    },
    "ssd": lambda d: ssm(d) | {"dt_bias": d.per_head(-1, 1), "dt_softplus": True},
}


def ssm(draw):
    return {
        "x": draw.normal(HV, V),
        "dt": draw.between(0.1, 1, HV),
        "A": draw.per_head(-2, -0.1),
        "B": draw.normal(H, K),
        "C": draw.normal(H, K),
        "D": draw.per_head(-1, 1),
        "z": draw.normal(HV, V),
    }


def problem(system, **how):
    """The arrays of a call, and its other arguments."""
    given = PROBLEMS[system](Draw(**how))
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in given.items() if name not in arrays}


def state_names(system):
    """The keywords of the initial state, and of the wish for the final one."""
    named = inspect.signature(getattr(linattn, system)).parameters
    first = next(x for x in named if x.startswith("initial_state"))
    return first, next(x for x in named if x.endswith(("final_state", "final_states")))


def state_of(system, x, options):
    """A state that is not zeros: of a call before."""
    wish = state_names(system)[1]
    return getattr(linattn, system)(**x, **options, **{wish: True})[1]


def test_there_is_a_problem_for_each():
    assert set(PROBLEMS) == set(SYSTEMS)


@systems
def test_forward_and_gradients(system):
    x, options = problem(system)
    first, wish = state_names(system)
    x[first] = state_of(system, *problem(system, seed=1))
    wanted = getattr(linattn, system)(**x, **options, **{wish: True})
    dy = Draw(seed=2).normal(*wanted[0].shape[2:])

    @jax.jit
    def call(x):
        return getattr(linattn.jax, system)(**x, **options, **{wish: True})

    assert_near(call(of_jax(x)), wanted)
    found = jax.jit(jax.grad(lambda x: jnp.sum(call(x)[0] * dy)))(of_jax(x))
    grads = getattr(linattn, f"{system}_backward")(dy, **x, **options)._asdict()
    if system == "mlstm":  # every m gives the same output
        *found[first], dm = found[first]
        assert not dm.any()
    for name in x:
        assert_near(found[name], grads.get(f"d{name}", grads.get(f"d_{name}")))


def tokens_of(system, x):
    """The arrays that have tokens, tokens first."""
    per_head = ("A", "D", "dt_bias")
    tokens = {name: y for name, y in x.items() if name not in per_head}
    if system == "gated_delta_product":
        tokens = {
            name: y.reshape(B, T, -1, *y.shape[2:]) if y.shape[1] == T * R else y
            for name, y in tokens.items()
        }
    moved = {name: np.moveaxis(y, 1, 0) for name, y in tokens.items()}
    return moved, {name: y for name, y in x.items() if name in per_head}


@systems
def test_steps_in_a_scan(system):
    x, options = problem(system)
    first, wish = state_names(system)
    state = state_of(system, *problem(system, seed=1))
    wanted, last = getattr(linattn, system)(**x, **options, **{first: state, wish: True})
    tokens, others = tokens_of(system, x)

    @jax.jit
    def read(state, tokens):
        def token(state, x):
            y, state = getattr(linattn.jax, f"{system}_step")(**x, **others, **options, state=state)
            return state, y

        return jax.lax.scan(token, state, tokens)

    given = of_jax(state)
    found, y = read(given, of_jax(tokens))
    assert_near(given, state)  # the old one is as it was
    assert_near(jnp.moveaxis(y, 0, 1), wanted)
    assert_near(found, last)


@systems
def test_steps_of_a_pool(system):
    """The second row has no state: its output is zeros, and no state changes for it."""
    x, options = problem(system)
    pool = state_of(system, *problem(system, seed=1, rows=3))
    tokens, others = tokens_of(system, x)
    token = {name: y[0] for name, y in tokens.items()}
    indices = np.array([2, -1])
    step = getattr(linattn, f"{system}_step")
    keyword = next(x for x in inspect.signature(step).parameters if x.endswith("_indices"))
    options |= {keyword: indices}
    given, changed = of_jax(pool), jax.tree.map(np.copy, pool)
    wanted = step(**token, **others, **options, state=changed)
    found, state = getattr(linattn.jax, f"{system}_step")(**token, **others, **options, state=given)
    assert not np.asarray(found)[1].any()
    assert_near(found, wanted)
    assert_near(state, changed)


@systems
def test_packed_sequences(system):
    """The host knows their ends, which NumPy's array has."""
    x, options = problem(system, rows=1, tokens=9)
    edges = np.array([0, 4, 4, 9])
    wish = state_names(system)[1]
    options |= {"cu_seqlens": edges, wish: True}
    wanted = getattr(linattn, system)(**x, **options)
    found = jax.jit(lambda x: getattr(linattn.jax, system)(**x, **options))(of_jax(x))
    assert_near(found, wanted)


@systems
def test_vmap(system):
    many = [problem(system, seed=seed)[0] for seed in range(3)]
    options = problem(system)[1]
    call = jax.vmap(lambda x: getattr(linattn.jax, system)(**x, **options)[0])
    wanted = [getattr(linattn, system)(**x, **options)[0] for x in many]
    assert_near(call(stacked(many)), np.stack(wanted))


@systems
def test_float64(system):
    """JAX has float64 if it is told so."""
    with jax.enable_x64(True):
        x, options = problem(system)
        x = {name: y.astype(np.float64) for name, y in x.items()}
        wish = state_names(system)[1]
        wanted = getattr(linattn, system)(**x, **options, **{wish: True})
        found = jax.jit(lambda x: getattr(linattn.jax, system)(**x, **options, **{wish: True}))(
            of_jax(x)
        )
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_wrong_argument_is_named_as_the_caller_knows_it():
    x, options = problem("ssd")
    with pytest.raises(ValueError, match=r"^dt: expected"):
        jax.jit(lambda x: linattn.jax.ssd(**x, **options)[0])(of_jax(x | {"dt": x["dt"][:, :3]}))
    x, options = problem("rwkv7")
    with pytest.raises(TypeError, match=r"^k: expected float32"):
        linattn.jax.rwkv7(**x | {"k": x["k"].astype(np.float16)}, **options)
