"""linattn.jax: the bits of linattn's own calls, under what JAX makes of functions."""

import doctest
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits
from support.device import imported
from support.problems import at_token
from support.variants import HEAD_DECAY, KEY_DECAY, NORMALISED, PAIR_DECAY, TOKEN_DECAY

import linattn
from linattn import _linattn, testing
from linattn.variants import OPS

jax = imported("jax")
jax.config.update("jax_num_cpu_devices", 4)  # one processor, as four devices

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import linattn.jax  # noqa: E402

SIZES = {"B": 2, "T": 7, "H": 2, "HV": 4, "K": 4, "V": 3}
HALVES = (ml_dtypes.bfloat16, np.float16)
FIELDS = {"alpha": "dg", "gamma": "dg", "slopes": "dg", "initial_state": "d_initial_state"}
PER_HEAD = ("gamma", "slopes", "bonus")
LAST = KEY_DECAY[-1]


def problem(op, *, seed=0, dtype=np.float32, state=True, **sizes):
    rng = np.random.default_rng(seed)
    return testing.make_inputs(op, rng, **SIZES | sizes, dtype=dtype, initial_state=state)


def of_jax(x):
    """NumPy's arrays as JAX's, at any depth; numbers stay."""
    return jax.tree.map(lambda y: jnp.asarray(y) if isinstance(y, np.ndarray) else y, x)


def whole(op, **options):
    """A forward pass with its final state, as a function of a dict of arrays."""
    return lambda x: getattr(linattn.jax, op)(**x, output_final_state=True, **options)


def loss(op, **options):
    """A number that depends on all that a forward pass makes."""
    call = whole(op, **options)
    return lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(call(x)))


def assert_same(found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


def assert_near(found, wanted):
    """For sums whose order another number of devices changes."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, float), np.asarray(y, float)
        assert x.shape == y.shape and np.abs(x - y).max() <= 16 * 2**-24 * np.abs(y).max()


def stacked(many):
    return jax.tree.map(lambda *x: jnp.stack(x), *many)


# ---- the ABI ----

# Our structs of csrc/xla.h, XLA's, and the fields: ours by XLA's.
STRUCTS = {
    "xla_extension": ("Extension_Base", "struct_size type next"),
    "xla_version": (
        "Api_Version",
        "struct_size extension=extension_start major=major_version minor=minor_version",
    ),
    "xla_metadata": ("Metadata", "struct_size version=api_version traits"),
    "xla_metadata_extension": ("Metadata_Extension", "base=extension_base metadata"),
    "xla_buffer": ("Buffer", "struct_size extension=extension_start dtype data rank dims"),
    "xla_text": ("ByteSpan", "data=ptr size=len"),
    "xla_scalar": ("Scalar", "dtype value"),
    "xla_array": ("Array", "dtype size data"),
    "xla_attributes": (
        "Attrs",
        "struct_size extension=extension_start size types names values=attrs",
    ),
    "xla_error_create": ("Error_Create_Args", "struct_size message code=errc"),
    "xla_stream_get": ("Stream_Get_Args", "struct_size context=ctx stream"),
    "xla_api": (
        "Api",
        "struct_size version=api_version internal=internal_api "
        "error_create=XLA_FFI_Error_Create stream_get=XLA_FFI_Stream_Get",
    ),
    "xla_frame": (
        "CallFrame",
        "struct_size extension=extension_start api context=ctx stage arguments=args "
        "results=rets attributes=attrs",
    ),
}
NUMBERS = {
    "XLA_MAJOR": "API_MAJOR",
    "XLA_METADATA": "Extension_Metadata",
    "XLA_BUFFER": "ArgType_BUFFER",
    "XLA_ARRAY": "AttrType_ARRAY",
    "XLA_SCALAR": "AttrType_SCALAR",
    "XLA_STRING": "AttrType_STRING",
    "XLA_INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "Error_Code_RESOURCE_EXHAUSTED",
    "XLA_INTERNAL": "Error_Code_INTERNAL",
} | {f"XLA_{x}": f"DataType_{x}" for x in ("PRED", "S32", "S64", "F16", "F32", "F64", "BF16")}


def abi_program():
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla.h"']

    def hold(condition):
        lines.append(f'_Static_assert({condition}, "{condition}");')

    for ours, (name, fields) in STRUCTS.items():
        for field in fields.split():
            own, _, theirs = field.partition("=")
            at = f"XLA_FFI_{name}, {theirs or own}"
            hold(f"offsetof({ours}, {own}) == offsetof({at})")
            hold(f"sizeof((({ours} *)0)->{own}) == sizeof(((XLA_FFI_{name} *)0)->{theirs or own})")
    for name, last in (("Args", "args"), ("Rets", "rets")):
        for own, theirs in (("size", "size"), ("types", "types"), ("buffers", last)):
            hold(f"offsetof(xla_buffers, {own}) == offsetof(XLA_FFI_{name}, {theirs})")
    for ours in ("xla_extension", "xla_buffer", "xla_buffers", "xla_attributes", "xla_version"):
        name = {"xla_buffers": "Args"}.get(ours) or STRUCTS[ours][0]
        hold(f"sizeof({ours}) == sizeof(XLA_FFI_{name})")
    for ours, theirs in NUMBERS.items():
        hold(f"(int){ours} == (int)XLA_FFI_{theirs}")
    hold("XLA_MINOR <= XLA_FFI_API_MINOR")
    return "\n".join([*lines, "int main(void) { return 0; }"])


def test_the_abi_is_that_of_this_jax(tmp_path):
    csrc = Path(__file__).parents[1] / "csrc"
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    source = tmp_path / "abi.c"
    source.write_text(abi_program())
    where = ["-I", csrc, "-isystem", jax.ffi.include_dir()]
    command = [compiler, "-std=gnu11", "-fsyntax-only", "-Werror", *where, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_header_that_differs_is_found(tmp_path):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    csrc = Path(__file__).parents[1] / "csrc"
    (tmp_path / "xla.h").write_text(
        (csrc / "xla.h").read_text().replace("XLA_F32 = 11", "XLA_F32 = 12")
    )
    (tmp_path / "abi.c").write_text(abi_program())
    where = ["-I", tmp_path, "-isystem", jax.ffi.include_dir()]
    command = [compiler, "-std=gnu11", "-fsyntax-only", *where, tmp_path / "abi.c"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "XLA_F32 == (int)" in done.stderr


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


# ---- meshes ----


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(kind, kind))


def placed(x, mesh, *, rows="rows", heads="heads"):
    """The arrays with rows and heads on the devices of a mesh; and how they lie."""

    def spec(name, y):
        if name in PER_HEAD:
            return PartitionSpec(heads)
        return (
            PartitionSpec(rows, heads)
            if name == "initial_state"
            else PartitionSpec(rows, None, heads)
        )

    specs = {
        name: jax.tree.map(lambda y, name=name: spec(name, y), value) for name, value in x.items()
    }
    put = jax.tree.map(lambda y, p: jax.device_put(y, NamedSharding(mesh, p)), x, specs)
    return put, specs


@pytest.mark.parametrize("op", [NORMALISED[0], HEAD_DECAY[0], LAST, *PAIR_DECAY])
def test_rows_and_heads_on_several_devices(op):
    x = of_jax(problem(op))
    there, _ = placed(x, mesh_of(AxisType.Auto))
    call, gradients = jax.jit(whole(op)), jax.jit(jax.grad(loss(op)))
    o, state = call(there)
    assert o.sharding.spec[:3] == ("rows", None, "heads")
    assert_same((o, state), call(x))
    assert_near(gradients(there), gradients(x))
    text = gradients.lower(there).compile().as_text()
    assert "linattn_backward" in text and "all-gather" not in text


def test_tokens_on_several_devices_are_gathered():
    x = of_jax(problem(LAST, T=8))
    there, _ = placed(x, mesh_of(AxisType.Auto))
    tokens = NamedSharding(mesh_of(AxisType.Auto), PartitionSpec(None, ("rows", "heads")))
    there["q"] = jax.device_put(x["q"], tokens)
    assert_same(jax.jit(whole(LAST))(there), whole(LAST)(x))


def test_value_heads_of_one_key_head_on_several_devices():
    """The gradients of what all devices read, q, k and bonus, are sums over them."""
    x = of_jax(problem(LAST, H=1))
    by_heads = {name: y for name, y in x.items() if name not in ("q", "k", "bonus")}
    there = x | placed(by_heads, mesh_of(AxisType.Auto))[0]
    o, state = jax.jit(whole(LAST))(there)
    assert o.sharding.spec[:3] == ("rows", None, "heads")
    assert_same((o, state), jax.jit(whole(LAST))(x))
    gradients = jax.jit(jax.grad(loss(LAST)))
    assert_near(gradients(there), gradients(x))


def test_a_pool_of_states_on_several_devices():
    """Rows that pick their states are whole, since each changes the one pool. Heads are not."""
    mesh = mesh_of(AxisType.Auto)
    x = of_jax(at_token(problem(TOKEN_DECAY[0], state=False, B=4), 0))
    pool = jnp.ones((6, 4, 4, 3)) * jnp.arange(6.0)[:, None, None, None]
    step = getattr(linattn.jax, f"{TOKEN_DECAY[0]}_step")
    call = jax.jit(lambda x, pool: step(**x, state=pool, state_indices=jnp.array([4, -1, 2, 0])))
    there = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows", "heads")))
    assert_same(call(there, pool), call(x, pool))


def test_explicit_axes():
    mesh = mesh_of(AxisType.Explicit)
    x = of_jax(problem(LAST))
    with jax.set_mesh(mesh):
        there, _ = placed(x, mesh)
        o, state = jax.jit(whole(LAST))(there)
        assert jax.typeof(o).sharding.spec[:3] == ("rows", None, "heads")
        assert_same((o, state), whole(LAST)(x))
        assert_near(jax.jit(jax.grad(loss(LAST)))(there), jax.grad(loss(LAST))(x))


@pytest.mark.parametrize("op", [HEAD_DECAY[0], LAST])
def test_shard_map(op):
    mesh = mesh_of(AxisType.Auto)
    x = of_jax(problem(op))
    _, specs = placed(x, mesh)
    out = (specs["v"], specs["initial_state"])
    call = jax.shard_map(whole(op), mesh=mesh, in_specs=(specs,), out_specs=out)
    assert_same(jax.jit(call)(x), whole(op)(x))

    def total(call):
        return jax.jit(
            jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(call(x))))
        )

    assert_near(total(call)(x), total(whole(op))(x))


# ---- rooms beside the table ----


def room_problem(name, seed=0):
    """(arrays, options): every array that may be given, with sizes that differ."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    if name == "causal_conv1d":
        x = {"x": draw(2, 7, 6), "weight": draw(6, 4), "bias": draw(6)}
        return x | {"initial_state": draw(2, 6, 3)}, {"activation": "silu"}
    x = {"u": draw(2, 7, 6), "delta": np.abs(draw(2, 7, 6)), "A": -np.abs(draw(6, 5))}
    x |= {name: draw(2, 7, 2, 5) for name in "BC"} | {"D": draw(6), "z": draw(2, 7, 6)}
    return x | {"delta_bias": draw(6), "initial_state": draw(2, 6, 5)}, {"delta_softplus": True}


BESIDE = [name for name in linattn.jax.__all__ if name.removesuffix("_step") not in OPS]
ROOMS = [name for name in BESIDE if not name.endswith("_step")]


@pytest.mark.parametrize("name", ROOMS)
def test_rooms(name):
    """Forward passes, gradients, and both of mapped arrays."""
    x, options = room_problem(name)
    own, plain = getattr(linattn.jax, name), getattr(linattn, name)

    def both(x):
        y, pull = jax.vjp(lambda x: own(**x, **options, output_final_state=True), x)
        return y, pull(y)[0]

    one = jax.jit(both)
    y, found = one(of_jax(x))
    assert_same(y, plain(**x, **options, output_final_state=True))
    dy, d_final = map(np.asarray, y)
    wanted = getattr(linattn, f"{name}_backward")(dy, **x, **options, d_final_state=d_final)
    fields = {"initial_state": "d_initial_state"}
    for label in x:
        assert_same(found[label], getattr(wanted, fields.get(label, f"d{label}")))
    many = [of_jax(room_problem(name, seed)[0]) for seed in range(2)]
    assert_same(jax.jit(jax.vmap(both))(stacked(many)), stacked([one(x) for x in many]))


@pytest.mark.parametrize("name", ROOMS)
def test_steps_of_rooms(name):
    x, options = room_problem(name)
    state = x.pop("initial_state")
    one = {label: y[:, 0] if y.shape[:2] == (2, 7) else y for label, y in x.items()}
    step = getattr(linattn.jax, f"{name}_step")
    found = jax.jit(lambda x, state: step(**x, **options, state=state))(of_jax(one), state)
    y = getattr(linattn, f"{name}_step")(**one, **options, state=state)
    assert_same(found, (y, state))


def test_errors_of_rooms():
    x, _ = room_problem(ROOMS[-1])
    call = getattr(linattn.jax, ROOMS[-1])
    with pytest.raises(ValueError, match=r"^weight: expected \[D,W\], got \(3, 4\)"):
        jax.jit(lambda weight: call(**x | {"weight": weight}))(x["weight"][:3])
    with pytest.raises(ValueError, match=r"^activation: expected None, 'silu'"):
        call(**x, activation="tanh")
    with pytest.raises(TypeError, match=r"expected real arrays, got complex"):
        linattn.jax.causal_conv1d_step(x["x"][:, 0] + 0j, x["weight"], state=x["initial_state"])
    with pytest.raises(NotImplementedError, match="no double backward"):
        once = jax.grad(lambda y: jnp.sum(call(**x | {"x": y})[0] ** 2))
        jax.grad(lambda y: jnp.sum(once(y)))(jnp.asarray(x["x"]))
    result = [jax.ShapeDtypeStruct((1, 4, 2), jnp.float32)]
    call = jax.ffi.ffi_call("linattn_room_forward", result)
    y, names = jnp.ones((1, 4, 2)), {"arguments": "x weight", "results": "out"}
    for weight, attributes, message in (
        (jnp.ones((3, 2)), {"room": "convolve", "form": "causal"}, r"weight: expected \[D,W\]"),
        (jnp.ones((2, 2)), {"room": "convolve", "form": "none"}, "room: expected the name"),
        (
            jnp.ones((2, 2)),
            {"room": "convolve", "form": "causal", "output_final_state": True},
            "final_state: expected a result",
        ),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(y, weight, **names, **attributes)[0].block_until_ready()


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
    with pytest.raises(TypeError, match="'out'"):
        whole(LAST, out=x["v"])(x)


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


def test_the_handlers_refuse_what_the_tracer_would_have():
    """The core checks again what XLA hands over."""
    q = jnp.ones((1, 4, 1, 2))
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    names = {"arguments": "q k v gamma", "results": "out"}
    call = jax.ffi.ffi_call("linattn_forward", results)
    op = HEAD_DECAY[0]
    for arrays, attributes, message in (
        (
            (q, q, q, jnp.ones(3)),
            {"op": op, **names},
            r"gamma: expected \[HV\] = \(1,\), got \(3,\)",
        ),
        ((q, q, q, jnp.ones(1)), {"op": "none", **names}, "op: expected the name of an op"),
        ((q, q, q, jnp.ones(1)), {"op": op, **names, "results": "o"}, "results: expected a label"),
        ((q, q, q, jnp.ones(1)), {"op": op, **names, "scale": 1}, "scale: expected"),
        ((q, q, q, jnp.ones(1)), {"op": op, **names, "mode": "fast"}, "mode: expected"),
        (
            (q, q, q, jnp.ones(1)),
            {"op": op, **names, "output_final_state": True},
            "final_state: expected a result",
        ),
        (
            (q, q, jnp.ones((1, 4, 1, 3)), jnp.ones(1)),
            {"op": op, **names},
            r"out: expected \[B,T,HV,V\]",
        ),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(*arrays, **attributes)[0].block_until_ready()


# ---- the module ----


def test_every_op_is_there_with_its_arguments():
    assert {*OPS, *(f"{op}_step" for op in OPS)} == set(linattn.jax.__all__) - set(BESIDE)
    assert len(BESIDE) == 2 * len(ROOMS) > 0
    for name in linattn.jax.__all__:
        own, inner = (
            inspect.signature(getattr(m, name)).parameters for m in (linattn.jax, linattn)
        )
        assert list(own) == [x for x in inner if x not in ("out", "_unknown")]
        assert f"linattn.{name}" in getattr(linattn.jax, name).__doc__


def test_the_targets_are_those_of_the_build():
    on_cpu = {name for name, platform, _ in _linattn.XLA_TARGETS if platform == "cpu"}
    passes = ("forward", "step", "backward")
    assert on_cpu == {f"linattn_{room}{x}" for room in ("", "room_") for x in passes}
    on_gpu = {name for name, platform, _ in _linattn.XLA_TARGETS if platform == "CUDA"}
    assert on_gpu == (on_cpu if _linattn.CUDA_ARCHS else set())


def test_the_page_runs():
    """docs/jax.md, its layer for Flax too."""
    imported("flax")
    page = (Path(__file__).parents[1] / "docs" / "jax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {"__name__": "page"}
    exec("\n".join(blocks), names)
    assert names["o"].shape == (2, 64, 4, 16) and np.allclose(names["y"], names["last"], atol=1e-5)


def test_the_examples_run():
    done = doctest.testmod(linattn.jax)
    assert done.attempted > 5 and not done.failed
