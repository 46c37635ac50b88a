"""linattn.jax: the bits of linattn's own calls, under what JAX makes of functions."""

import doctest
import inspect
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.device import imported
from support.jax_arrays import (
    BESIDE,
    LAST,
    PER_HEAD,
    ROOMS,
    SIZES,
    SYSTEMS,
    assert_near,
    assert_same,
    jax,
    jnp,
    loss,
    of_jax,
    problem,
    stacked,
    whole,
)
from support.problems import at_token
from support.variants import HEAD_DECAY, NORMALISED, PAIR_DECAY, TOKEN_DECAY

import linattn
from linattn import testing
from linattn.variants import OPS

HALVES = (ml_dtypes.bfloat16, np.float16)
FIELDS = {"alpha": "dg", "gamma": "dg", "slopes": "dg", "initial_state": "d_initial_state"}


# ---- forward passes and gradients ----


@pytest.mark.parametrize("op", OPS)
def test_forward(op):
    x = problem(op)
    wanted = getattr(linattn, op)(**x, output_final_state=True)
    assert_same(jax.jit(whole(op))(of_jax(x)), wanted)


def test_a_call_that_is_not_traced():
    x = problem(LAST)
    o, nothing = getattr(linattn.jax, LAST)(**x)  # NumPy's arrays become JAX's
    assert nothing is None and isinstance(o, jax.Array)
    assert_same(o, getattr(linattn, LAST)(**x)[0])


@pytest.mark.parametrize("op", OPS)
def test_gradients(op, rng):
    x = problem(op)
    d = testing.make_output_gradients(op, rng, x)

    @jax.jit
    def pulled(x, d):
        _, pull = jax.vjp(whole(op), x)
        return pull((d["do"], d["d_final_state"]))[0]

    found = pulled(of_jax(x), of_jax(d))
    wanted = getattr(linattn, f"{op}_backward")(**d, **x)
    for name in x:
        assert_same(found[name], getattr(wanted, FIELDS.get(name, f"d{name}")))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [*zip((NORMALISED[0], HEAD_DECAY[0], LAST, *PAIR_DECAY), HALVES * 2, strict=True)],
)
def test_dtypes(op, dtype):
    x = problem(op, dtype=dtype)
    wanted = getattr(linattn, op)(**x, output_final_state=True)
    assert_same(jax.jit(whole(op))(of_jax(x)), wanted)
    found = jax.jit(jax.grad(loss(op)))(of_jax(x))
    assert jax.tree.map(lambda y: y.dtype, found) == jax.tree.map(lambda y: y.dtype, x)


def test_float64():
    x = problem(LAST, dtype=np.float64)
    with jax.enable_x64(True):
        o, state = jax.jit(whole(LAST))(of_jax(x))
        assert o.dtype == state.dtype == np.float64
        assert_same((o, state), getattr(linattn, LAST)(**x, output_final_state=True))


@pytest.mark.parametrize("op", [TOKEN_DECAY[0], HEAD_DECAY[0], LAST])
def test_one_head(op):
    x = problem(op, B=1, H=1, HV=1)
    axes = {"initial_state": (0, 1), "bonus": 0, "gamma": ()}  # of rows and heads
    one = {name: np.squeeze(y, axes.get(name, (0, 2))) for name, y in x.items()}
    wanted = getattr(linattn, op)(**one, output_final_state=True)
    assert_same(jax.jit(whole(op))(of_jax(one)), wanted)
    many = of_jax(one)
    found = jax.jit(jax.grad(loss(op)))(many)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(np.shape, one)


@pytest.mark.parametrize("op", [NORMALISED[0], LAST])
def test_packed_sequences(op):
    cu_seqlens = np.array([0, 3, 3, 7])
    x = problem(op, state=False, B=1)
    options = {"cu_seqlens": jnp.asarray(cu_seqlens)}
    wanted = getattr(linattn, op)(**x, cu_seqlens=cu_seqlens, output_final_state=True)
    assert_same(jax.jit(whole(op, **options))(of_jax(x)), wanted)
    jax.jit(jax.grad(loss(op, **options)))(of_jax(x))  # an index has no gradient

    def given(cu_seqlens):
        return getattr(linattn.jax, op)(**of_jax(x), cu_seqlens=cu_seqlens)[0]

    both = jax.vmap(given)(jnp.asarray([cu_seqlens, cu_seqlens]))
    assert_same(both, np.stack([wanted[0]] * 2))


def test_options():
    op = NORMALISED[0]
    x = problem(op, state=False)
    for options in (
        {"scale": 2, "mode": "recurrent", "qk_l2norm": True},
        {"chunk_size": 2, "state_v_first": True, "normalize": "add", "eps": 0.1},
        {"causal": False, "feature_map": ("exp", "relu2")},
        {"normalize": False, "feature_map": linattn.FeatureMap("relu+eps", eps=0.5)},
    ):
        wanted = getattr(linattn, op)(**x, output_final_state=True, **options)
        assert_same(jax.jit(whole(op, **options))(of_jax(x)), wanted)


def test_a_feature_map_of_jax_is_differentiated():
    op = NORMALISED[0]
    x = of_jax(problem(op, state=False))
    own, core = (jax.jit(jax.grad(loss(op, feature_map=f)))(x) for f in (jnp.exp, "exp"))
    assert_near(own, core)


def test_numbers_stand_for_arrays():
    x = problem(LAST, state=False) | {"g": -0.5}
    found = jax.jit(lambda q: getattr(linattn.jax, LAST)(**of_jax(x) | {"q": q})[0])(x["q"])
    assert_same(found, getattr(linattn, LAST)(**x)[0])


def test_the_default_decay():
    op = HEAD_DECAY[0]
    x = problem(op, state=False)
    x = {name: x[name] for name in "qkv"}
    assert_same(getattr(linattn.jax, op)(**of_jax(x))[0], getattr(linattn, op)(**x)[0])


def test_checkpoints():
    x = of_jax(problem(LAST))
    kept, again = (jax.jit(jax.grad(f))(x) for f in (loss(LAST), jax.checkpoint(loss(LAST))))
    assert_same(again, kept)


# ---- steps ----


def scanned(op, x):
    """(o [B,T,HV,V], the last state) by steps in a scan."""
    x = dict(x)
    state = x.pop("initial_state")
    heads = {name: y for name, y in x.items() if name in PER_HEAD}
    tokens = {name: jnp.swapaxes(y, 0, 1) for name, y in x.items() if name not in heads}

    def token(state, one):
        o, state = getattr(linattn.jax, f"{op}_step")(**one, **heads, state=state)
        return state, o

    state, o = jax.lax.scan(token, state, tokens)
    return jnp.swapaxes(o, 0, 1), state


@pytest.mark.parametrize("op", OPS)
def test_steps_in_a_scan(op):
    x = problem(op)
    o, last = jax.jit(lambda x: scanned(op, x))(of_jax(x))
    state = jax.tree.map(np.copy, x["initial_state"])
    for t in range(SIZES["T"]):
        one = at_token(x, t)
        one["state"] = state
        del one["initial_state"]
        assert_same(o[:, t], getattr(linattn, f"{op}_step")(**one))
    assert_same(last, state)


@pytest.mark.parametrize("op", OPS)
def test_steps_are_as_accurate_as_a_forward_pass(op):
    x = problem(op)
    reference = getattr(linattn.reference, op)
    wide = jax.tree.map(lambda y: y.astype(np.float64), x)
    wanted, yardstick = reference(**wide)[0], reference(**x, dtype=np.float32)[0]
    o, _ = scanned(op, of_jax(x))
    testing.assert_accurate(np.asarray(o), wanted, yardstick, dtype=np.float32, name=op)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_a_step(op, rng):
    """Those of a forward pass over one token."""
    x = problem(op, T=1)
    d = testing.make_output_gradients(op, rng, x)
    wanted = getattr(linattn, f"{op}_backward")(**d, **x)
    one = at_token(x, 0)
    one["state"] = one.pop("initial_state")
    step = getattr(linattn.jax, f"{op}_step")

    @jax.jit
    def pulled(x, do, d_state):
        _, pull = jax.vjp(lambda x: step(**x), x)
        return pull((do, d_state))[0]

    found = pulled(of_jax(one), d["do"][:, 0], d["d_final_state"])
    for name in x:
        gradient = found["state" if name == "initial_state" else name]
        want = getattr(wanted, FIELDS.get(name, f"d{name}"))
        assert_same(gradient, jax.tree.map(lambda g, w: w.reshape(g.shape), gradient, want))


def test_gradients_through_a_scan():
    x = of_jax(problem(LAST, T=3))
    scan, forward = (
        jax.jit(jax.grad(lambda x, call=call: jnp.sum(jnp.sin(call(x)[0]))))(x)
        for call in (lambda x: scanned(LAST, x), whole(LAST))
    )
    assert_near(scan, forward)


def test_a_step_changes_nothing():
    x = at_token(problem(LAST), 0)
    state = jnp.asarray(x.pop("initial_state"))
    before = np.array(state)
    _, after = getattr(linattn.jax, f"{LAST}_step")(**of_jax(x), state=state)
    assert_same(state, before)
    assert not np.array_equal(after, before)


def test_a_state_that_is_given_up_is_written_in_place():
    x = of_jax(at_token(problem(LAST), 0))
    state = jnp.array(x.pop("initial_state"))
    step = jax.jit(
        lambda x, state: getattr(linattn.jax, f"{LAST}_step")(**x, state=state), donate_argnums=1
    )
    text = step.lower(x, state).compile().as_text()
    assert "may-alias" in text and " copy(" not in text
    place = state.unsafe_buffer_pointer()
    _, after = step(x, state)
    assert after.unsafe_buffer_pointer() == place


def test_a_bfloat16_state_has_a_gradient():
    x = of_jax(at_token(problem(LAST, state=False), 0))
    state = jnp.ones((2, 4, 4, 3), jnp.bfloat16)
    step = getattr(linattn.jax, f"{LAST}_step")
    d = jax.grad(lambda state: jnp.sum(step(**x, state=state)[1].astype(jnp.float32)))(state)
    assert d.dtype == jnp.bfloat16 and d.shape == state.shape


def test_states_from_a_pool():
    x = at_token(problem(LAST, state=False, B=3), 0)
    pool = np.random.default_rng(1).standard_normal((6, 4, 4, 3)).astype(np.float32)
    rows = np.array([4, -1, 2])
    call = getattr(linattn.jax, f"{LAST}_step")
    given = of_jax(x)
    found = jax.jit(lambda pool, rows: call(**given, state=pool, state_indices=rows))(pool, rows)
    many = jax.vmap(lambda pool: call(**given, state=pool, state_indices=jnp.asarray(rows)))(
        jnp.stack([pool, pool])
    )
    state = pool.copy()
    o = getattr(linattn, f"{LAST}_step")(**x, state=state, state_indices=rows)
    assert_same(found, (o, state))
    assert_same(many, (np.stack([o, o]), np.stack([state, state])))
    with pytest.raises(NotImplementedError, match="pool"):
        jax.grad(lambda pool: call(**given, state=pool, state_indices=rows)[0].sum())(pool)
    with pytest.raises(jax.errors.JaxRuntimeError, match="state_indices: expected no state twice"):
        call(**given, state=pool, state_indices=jnp.asarray([2, 2, 0]))[0].block_until_ready()


# ---- vmap ----


@pytest.mark.parametrize("op", OPS)
def test_vmap(op):
    """Also of gradients, where a decay per head is another one in each call."""
    many = [of_jax(problem(op, seed=seed)) for seed in range(2)]

    def both(x):
        o, pull = jax.vjp(whole(op), x)
        return o, pull(o)

    one, mapped = jax.jit(both), jax.jit(jax.vmap(both))
    assert_same(mapped(stacked(many)), stacked([one(x) for x in many]))


def test_vmap_of_some_arguments():
    op = HEAD_DECAY[0]
    x = of_jax(problem(op, state=False))
    queries = jnp.stack([x["q"], 2 * x["q"]])

    def total(x, q):
        return jnp.sum(jnp.sin(getattr(linattn.jax, op)(**x | {"q": q})[0]))

    one = jax.jit(jax.value_and_grad(total))
    both = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jax.vmap(total, (None, 0))(x, queries))))
    each = [one(x, q) for q in queries]
    assert_near(both(x), jax.tree.map(lambda *parts: sum(parts), *each))


def test_vmap_of_one_head_is_one_call():
    """vmap of vmap, over rows and heads: no loop, but a call whose axes they are."""
    x = of_jax(problem(LAST, state=False, HV=2))
    one = getattr(linattn.jax, LAST)
    rows = {name: 0 for name in x} | ({"bonus": None} if "bonus" in x else {})
    heads = {name: 0 if name in PER_HEAD else 1 for name in x}  # rows are gone

    def over(x):
        inner = jax.vmap(lambda x: one(**x)[0], in_axes=(heads,), out_axes=1)
        return jax.vmap(inner, in_axes=(rows,))(x)

    assert_same(over(x), one(**x)[0])
    assert "while" not in str(jax.make_jaxpr(over)(x))


# ---- errors ----


def test_a_wrong_shape_is_an_error_of_the_core_while_jax_traces():
    x = of_jax(problem(LAST))
    with pytest.raises(ValueError, match=r"^g: expected \[B,T,HV,K\] = \(2, 7, 4, 4\), got"):
        jax.jit(whole(LAST))(x | {"g": x["g"][0]})
    with pytest.raises(TypeError, match=r"^v: expected float32 \(the dtype of q\), got bfloat16"):
        jax.jit(whole(LAST))(x | {"v": x["v"].astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"^q: expected .* got uint8"):
        whole(LAST)(x | {"q": x["q"].astype(jnp.uint8)})
    with pytest.raises(TypeError, match=r"^k: expected an array, got"):
        whole(LAST)(x | {"k": "k"})
    with pytest.raises(ValueError, match=r"^mode: expected"):
        whole(LAST, mode="fast")(x)
    with pytest.raises(TypeError, match=r"^scale: expected a number"):
        jax.jit(lambda scale: whole(LAST, scale=scale)(x))(1.0)
    for name in ("out", "mask"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            whole(LAST, **{name: x["v"]})(x)


def test_cu_seqlens_are_read_when_the_call_runs():
    x = of_jax(problem(LAST, state=False, B=1))
    call = jax.jit(whole(LAST))
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens: expected to end at T = 7"):
        jax.block_until_ready(call(x | {"cu_seqlens": jnp.asarray([0, 3])}))


def test_gradients_have_no_gradients():
    x = of_jax(problem(LAST))
    with pytest.raises(NotImplementedError, match="no double backward"):
        jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(jax.grad(loss(LAST))(x)))))(x)


@pytest.mark.parametrize("function", [jax.jit, jax.vmap, jax.grad])
def test_a_traced_array_names_linattn_jax(function):
    x = problem(LAST, state=False)

    def call(q):
        return jnp.sum(getattr(linattn, LAST)(**x | {"q": q})[0])

    q = jnp.asarray(x["q"])
    with pytest.raises(TypeError, match=r"^q: .*being traced.*linattn\.jax"):
        function(call)(q[None] if function is jax.vmap else q)


# ---- the module ----


def test_every_op_is_there_with_its_arguments():
    assert {*OPS, *(f"{op}_step" for op in OPS)} == set(linattn.jax.__all__) - set(BESIDE)
    assert len(BESIDE) == 2 * (len(ROOMS) + len(SYSTEMS)) > 0
    for name in linattn.jax.__all__:
        own, inner = (
            inspect.signature(getattr(m, name)).parameters for m in (linattn.jax, linattn)
        )
        assert list(own) == [x for x in inner if x not in ("out", "mask", "_unknown")]
        assert f"linattn.{name}" in getattr(linattn.jax, name).__doc__


def test_the_page_runs():
    """docs/jax.md, its layer for Flax too."""
    imported("flax")
    page = (Path(__file__).parents[1] / "docs" / "jax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names = {"__name__": "page"}
    exec("\n".join(blocks), names)
    assert names["o"].shape == (2, 64, 4, 16) and np.allclose(names["y"], names["last"], atol=1e-5)


def test_the_examples_run():
    done = doctest.testmod(linattn.jax)
    assert done.attempted > 5 and not done.failed
