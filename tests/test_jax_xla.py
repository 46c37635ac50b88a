"""linattn.jax below: XLA's ABI, its handlers, meshes of devices, and rooms beside the table."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.jax_arrays import (
    LAST,
    PER_HEAD,
    ROOMS,
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
from linattn import _linattn

AxisType, NamedSharding = jax.sharding.AxisType, jax.sharding.NamedSharding
PartitionSpec = jax.sharding.PartitionSpec

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


# ---- the handlers ----


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


def test_the_targets_are_those_of_the_build():
    on_cpu = {name for name, platform, _ in _linattn.XLA_TARGETS if platform == "cpu"}
    passes = ("forward", "step", "backward")
    assert on_cpu == {f"linattn_{room}{x}" for room in ("", "room_") for x in passes}
    on_gpu = {name for name, platform, _ in _linattn.XLA_TARGETS if platform == "CUDA"}
    assert on_gpu == (on_cpu if _linattn.CUDA_ARCHS else set())


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

# Their decays and gates are JAX's own arithmetic: exp in XLA has other last bits than in NumPy.
GATED = ("rg_lru", "hgrn")
NEAR = (*GATED, "s4d")


def assert_as_plain(name, found, wanted):
    (assert_near if name in NEAR else assert_same)(found, wanted)


def room_problem(name, seed=0):
    """(arrays, options): every array that may be given, with sizes that differ."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    if name == "causal_conv1d":
        x = {"x": draw(2, 7, 6), "weight": draw(6, 4), "bias": draw(6)}
        return x | {"initial_state": draw(2, 6, 3)}, {"activation": "silu"}
    if name in GATED:
        x = {"x": draw(2, 7, 6), "initial_state": draw(2, 6)}
        if name == "hgrn":
            return x | {"g": -np.abs(draw(2, 7, 6))}, {}
        return x | {
            "r": rng.random((2, 7, 6), np.float32),
            "i": draw(2, 7, 6),
            "Lambda": draw(6),
        }, {}
    if name == "s4d":
        A = (-np.abs(draw(6, 5)) + 1j * draw(6, 5)).astype(np.complex64)
        x = {"u": draw(2, 7, 6), "dt": np.abs(draw(6)), "A": A, "B": A * draw(6, 5), "D": draw(6)}
        return x | {"C": A + 1, "initial_state": A + 0 * draw(2, 6, 5)}, {}
    x = {"u": draw(2, 7, 6), "delta": np.abs(draw(2, 7, 6)), "A": -np.abs(draw(6, 5))}
    x |= {name: draw(2, 7, 2, 5) for name in "BC"} | {"D": draw(6), "z": draw(2, 7, 6)}
    return x | {"delta_bias": draw(6), "initial_state": draw(2, 6, 5)}, {"delta_softplus": True}


@pytest.fixture
def float64(name):
    """s4d makes its constants in float64, which JAX has only if it is told so."""
    with jax.enable_x64(name == "s4d"):
        yield


@pytest.mark.usefixtures("float64")
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
    assert_as_plain(name, y, plain(**x, **options, output_final_state=True))
    # JAX's gradient of a complex array, and what it is given for one, is the conjugate of ours
    dy, d_final = (np.conj(np.asarray(z)) for z in y)
    wanted = getattr(linattn, f"{name}_backward")(dy, **x, **options, d_final_state=d_final)
    fields = {"initial_state": "d_initial_state"}
    for label in x:
        gradient = np.conj(np.asarray(found[label]))
        assert_as_plain(name, gradient, getattr(wanted, fields.get(label, f"d{label}")))
    many = [of_jax(room_problem(name, seed)[0]) for seed in range(2)]
    assert_as_plain(name, jax.jit(jax.vmap(both))(stacked(many)), stacked([one(x) for x in many]))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ROOMS)
def test_steps_of_rooms(name):
    x, options = room_problem(name)
    state = x.pop("initial_state")
    one = {label: y[:, 0] if y.shape[:2] == (2, 7) else y for label, y in x.items()}
    step = getattr(linattn.jax, f"{name}_step")
    found = jax.jit(lambda x, state: step(**x, **options, state=state))(of_jax(one), state)
    jax.block_until_ready(found)  # JAX may read the state where NumPy has it, which changes next
    y = getattr(linattn, f"{name}_step")(**one, **options, state=state)
    assert_as_plain(name, found, (y, state))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ROOMS)
def test_gradients_of_steps_of_rooms(name):
    """Those of a forward pass over one token."""
    x, options = room_problem(name)
    state = x.pop("initial_state")
    tokens = {label for label, y in x.items() if y.shape[:2] == (2, 7)}
    one = {label: y[:, 0] if label in tokens else y for label, y in x.items()}
    step, whole = getattr(linattn.jax, f"{name}_step"), getattr(linattn.jax, name)

    def total(y, state):
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(jnp.real(state)))

    def by_step(x, state):
        return total(*step(**x, **options, state=state))

    def by_whole(x, state):
        x = {label: y[:, None] if label in tokens else y for label, y in x.items()}
        y, state = whole(**x, **options, initial_state=state, output_final_state=True)
        return total(y, state)

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(of_jax(one), state) for f in (by_step, by_whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        off = np.sqrt(np.mean(np.abs(a - b) ** 2) / np.mean(np.abs(b) ** 2))
        assert a.dtype == b.dtype and off < 4e-6  # the acceptance rule's, of a gradient


def test_steps_from_a_pool_have_no_gradients():
    x, options = room_problem(ROOMS[-1])
    pool, index = x.pop("initial_state"), jnp.array([1, 0])
    x = {label: y[:, 0] if y.ndim == 3 else y for label, y in x.items()}
    step = getattr(linattn.jax, f"{ROOMS[-1]}_step")
    with pytest.raises(NotImplementedError, match="a pool"):
        jax.grad(lambda x: jnp.sum(step(**x, **options, state=pool, state_indices=index)[0]))(x)


def test_a_step_whose_state_holds_older_inputs():
    rng = np.random.default_rng(0)
    x, weight, long = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (3, 4), (2, 3, 5))
    )
    got = jax.jit(lambda *of: linattn.jax.causal_conv1d_step(*of[:2], state=of[2]))(x, weight, long)
    want = linattn.causal_conv1d_step(x, weight, state=long)
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], long)
    with pytest.raises(NotImplementedError, match="older inputs"):
        jax.grad(lambda x: jnp.sum(linattn.jax.causal_conv1d_step(x, weight, state=long)[0]))(x)


def test_errors_of_rooms():
    x, _ = room_problem(ROOMS[-1])
    call = getattr(linattn.jax, ROOMS[-1])
    with pytest.raises(ValueError, match=r"^weight: expected \[D,W\], got \(3, 4\)"):
        jax.jit(lambda weight: call(**x | {"weight": weight}))(x["weight"][:3])
    with pytest.raises(ValueError, match=r"^activation: expected None, 'silu'"):
        call(**x, activation="tanh")
    with pytest.raises(TypeError, match=r"^x: expected .*, got complex64"):
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
