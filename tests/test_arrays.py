"""Arrays of every kind give NumPy's bits and come back in their own kind. An array that cannot be
taken is refused by name. No memory is kept after a call, and none is released twice."""

import gc
import sys

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.dlpack import (
    Compact,
    Dtype,
    Exporter,
    Importer,
    Old,
    PyCapsule_GetName,
    all_ended,
    numpy_of,
)
from support.problems import OPS, PASSES, arguments, call, function

import linattn
from linattn import _linattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ---- a library with DLPack and nothing else ----


@pytest.mark.parametrize("kind", [Exporter, Old, Compact, Importer])
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("op", OPS)
def test_dlpack_gives_numpys_bits(op, pass_, kind):
    made = arguments(op, pass_)
    theirs = over_arrays(kind, arguments(op, pass_))
    want, got = call(op, pass_, made), call(op, pass_, theirs)
    for x, y in zip(leaves(want), leaves(got), strict=True):
        assert isinstance(y, Importer if kind is Importer else np.ndarray)
        assert_same_bits(numpy_of(y), x)
    for name in made:
        for x, y in zip(leaves(made[name]), leaves(theirs[name]), strict=True):
            if isinstance(x, np.ndarray):
                assert_same_bits(numpy_of(y), x)  # a step's state, and inputs as they were
    all_ended(theirs)
    assert all(x.exported == 1 for x in leaves(list(theirs.values())) if isinstance(x, Exporter))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
def test_dlpack_dtypes(dtype):
    made = arguments("gated_delta_rule", "forward", dtype=dtype)
    want = linattn.gated_delta_rule(**made)[0]
    got = linattn.gated_delta_rule(**over_arrays(Exporter, made))[0]
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: np.stack([x, -x], -1)[..., 0],
        lambda x: x[..., ::-1],
        lambda x: x.swapaxes(0, 1),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
    ids=["inner", "reversed", "swapped", "broadcast"],
)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_dlpack_strides(pass_, layout):
    made = arguments("kda", pass_)
    for name in ("q", "k", "v", "g", "beta"):
        like = made[name].shape
        x = layout(made[name])
        made[name] = x if x.shape == like else x.swapaxes(0, 1).copy().swapaxes(0, 1).reshape(like)
    want = call("kda", pass_, made)
    theirs = over_arrays(Exporter, made)
    for x, y in zip(leaves(want), leaves(call("kda", pass_, theirs)), strict=True):
        assert_same_bits(y, x)
    all_ended(theirs)


def test_a_step_refuses_what_it_would_have_to_copy():
    made = arguments("kda", "step")
    made["q"] = Exporter(np.stack([made["q"]] * 2, -1)[..., 0])
    with pytest.raises(ValueError, match=r"q: expected an aligned array .* got strides"):
        linattn.kda_step(**made)
    assert made["q"].ended == 1


def test_out_comes_back_itself():
    for kind in (Exporter, Old):
        made = arguments("gla", "forward")
        out = kind(np.full(made["v"].shape, np.nan, np.float32))
        o, _ = linattn.gla(**over_arrays(kind, made), out=out)
        assert o is out and out.ended == 1
        assert_same_bits(out.x, linattn.gla(**made)[0])


@pytest.mark.parametrize("kind", [Exporter, Old])
@pytest.mark.parametrize("pass_", ["forward", "step"])
def test_read_only(pass_, kind):
    """An input may be read-only; out and state may not."""
    made = over_arrays(lambda x: kind(x, flags=1), arguments("delta_rule", pass_))
    out = np.zeros(made["v"].shape, np.float32)
    state = made.pop("state") if pass_ == "step" else None
    extra = {"state": Exporter(state.x)} if pass_ == "step" else {}
    function("delta_rule", pass_)(**made, **extra)
    bad = {"out": Exporter(out, flags=1)}
    if pass_ == "step":
        with pytest.raises(ValueError, match="state: expected a writable array, got a read-only"):
            linattn.delta_rule_step(**made, state=Exporter(state.x, flags=1))
    with pytest.raises(ValueError, match="out: expected a writable array, got a read-only one"):
        function("delta_rule", pass_)(**made, **extra, **bad)
    copied = Exporter(out, flags=2)
    with pytest.raises(ValueError, match="out: expected the array's own memory, got a copy"):
        function("delta_rule", pass_)(**made, **extra, out=copied)
    all_ended(made | bad | {"copied": copied})
    assert not out.any()


# ---- aliasing ----


def test_memory_that_is_written_may_not_be_an_inputs():
    for kind in (Exporter, np.asarray):
        made = arguments("delta_rule", "forward", HV=2, V=8)
        for name in "qkv":
            with pytest.raises(ValueError, match=f"out: expected memory .* shared with {name}"):
                linattn.delta_rule(**over_arrays(Exporter, made) | {"out": kind(made[name])})
        made = arguments("delta_rule", "step", HV=2, V=8)
        with pytest.raises(ValueError, match=r"out: expected memory of its own, got .* with v"):
            linattn.delta_rule_step(**over_arrays(Exporter, made) | {"out": kind(made["v"])})


def test_out_over_an_input_that_is_copied():
    made = arguments("delta_rule", "forward", T=8, H=2, HV=2, K=8, V=8)
    for dtype in (np.float32, BFLOAT16):
        q, k, v = (made[x].astype(dtype) for x in "qkv")
        out = Exporter(k)
        k = Exporter(k[..., ::-1])
        with pytest.raises(ValueError, match=r"out: expected memory of its own, got .* with k"):
            linattn.delta_rule(q, k, v, made["beta"], out=out)


def test_neighbours_in_one_buffer_are_allowed():
    made = arguments("kda", "forward")
    both = np.zeros((3, 5, 8, 6), np.float32)
    both[:, :, ::2] = made["v"]
    out = Exporter(both[:, :, 1::2])
    linattn.kda(**over_arrays(Exporter, made | {"v": both[:, :, ::2]}), out=out)
    assert_same_bits(out.x, linattn.kda(**made)[0])


def test_an_output_over_itself():
    made = arguments("gla", "forward")
    out = Exporter(
        np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), made["v"].shape, (0, 96, 24, 4))
    )
    with pytest.raises(ValueError, match="out: expected every element in a place of its own"):
        linattn.gla(**made, out=out)
    assert out.ended == 1


def test_shares_memory():
    x = np.zeros((4, 6), np.float32)
    assert _linattn.shares_memory(x, Exporter(x[1:])) is True
    assert _linattn.shares_memory(Exporter(x[:2]), Exporter(x[2:])) is False
    assert _linattn.shares_memory(Exporter(x[:, ::2]), x[:, 1::2]) is False


# ---- devices ----


def on_cuda(x, ordinal=0):
    return Exporter(x, device=(2, ordinal))


@pytest.mark.skipif(linattn.cuda.is_available(), reason="this build has a device")
@pytest.mark.parametrize("pass_", PASSES)
def test_cuda_without_a_device_says_so(pass_):
    made = over_arrays(on_cuda, arguments("gla", pass_))
    with pytest.raises(RuntimeError, match="q: got an array on cuda:0, where no op can run: ") as e:
        call("gla", pass_, made)
    assert linattn.cuda.why_not() in str(e.value)
    assert made["q"].exported == 0  # its memory was not asked for


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "cu_seqlens", "out"])
def test_a_device_array_among_host_arrays(name):
    made = arguments("kda", "forward", B=1)
    made |= {"cu_seqlens": np.array([0, 5]), "out": np.zeros_like(made["v"])}
    made[name] = on_cuda(made[name])
    with pytest.raises(ValueError) as error:
        linattn.kda(**made)
    assert str(error.value) == f"{name}: expected an array on the CPU like q, got one on cuda:0"


@pytest.mark.parametrize("type_", [4, 8, 10, 14, 99])
def test_other_devices(type_):
    made = arguments("gla", "forward")
    for name in ("q", "v"):
        with pytest.raises(ValueError, match=f"{name}: expected an array on the CPU or .* {type_}"):
            linattn.gla(**made | {name: Exporter(made[name], device=(type_, 0))})


def test_pinned_memory_is_the_hosts():
    made = arguments("gla", "forward")
    pinned = over_arrays(lambda x: Exporter(x, device=(3, 0)), made)
    assert_same_bits(linattn.gla(**pinned)[0], linattn.gla(**made)[0])


def test_device_count():
    assert (linattn.cuda.device_count() > 0) == linattn.cuda.is_available()


# ---- what is no array for an op ----


def refuses(made, error, match, name="k", op="gla"):
    with pytest.raises(error, match=match) as caught:
        getattr(linattn, op)(**made)
    assert str(caught.value).startswith(name)
    all_ended(made)
    return caught.value


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(np.int8, "int8"), (np.uint16, "uint16"), (np.complex64, "complex64"), (bool, "bool")],
)
def test_dtypes_without_a_place(dtype, said):
    made = arguments("gla", "forward")
    for kind in (Exporter, Old):
        refuses(
            made | {"k": kind(made["k"].astype(dtype))},
            TypeError,
            f"k: expected float64, float32, float16 or bfloat16, got {said}$",
        )


def test_vector_dtypes_and_unknown_codes():
    class Odd(Exporter):
        def __dlpack__(self, **options):
            capsule = super().__dlpack__(**options)
            managed = next(iter(self.alive.values()))[0]
            managed.tensor.dtype = Dtype(*self.odd)
            return capsule

    made = arguments("gla", "forward")
    for odd in ((2, 32, 4), (17, 8, 1)):
        refuses(made | {"k": Odd(made["k"], odd=odd)}, TypeError, r"got DLPack's dtype \(")


def test_shapes_and_dimensions():
    made = arguments("gla", "forward")
    refuses(made | {"k": Exporter(made["k"][:, :2])}, ValueError, r"expected \[B,T,H,K\] = ")
    refuses(made | {"k": Exporter(made["k"][None, None])}, ValueError, r"got \(1, 1, 3, 5, 2, 8\)")
    refuses(made | {"k": Exporter(np.zeros((), np.float32))}, ValueError, r"got \(\)")


def test_a_version_of_the_future():
    made = arguments("gla", "forward")
    made["k"] = Exporter(made["k"], major=2)
    refuses(made, TypeError, "expected DLPack version 1, got version 2.0")


def test_exporters_that_fail():
    class Failing(Exporter):
        def __dlpack__(self, **options):
            raise self.error

    made = arguments("gla", "forward")
    for error, becomes in (
        (BufferError("no"), TypeError),
        (ValueError("no"), ValueError),
        (RuntimeError("no"), RuntimeError),
        (MemoryError("no"), MemoryError),
        (TypeError("no"), TypeError),
        (OSError("no"), RuntimeError),
    ):
        raised = refuses(made | {"k": Failing(made["k"], error=error)}, becomes, "^k: no$")
        assert raised.__cause__ is error
    with pytest.raises(KeyboardInterrupt):
        linattn.gla(**made | {"k": Failing(made["k"], error=KeyboardInterrupt())})


def test_exporters_that_lie():
    made = arguments("gla", "forward")

    class NoCapsule(Exporter):
        def __dlpack__(self, **options):
            return 3

    class Used(Exporter):
        def __dlpack__(self, **options):
            return self.capsule

    class BadDevice(Exporter):
        def __dlpack_device__(self):
            return self.answer

    refuses(made | {"k": NoCapsule(made["k"])}, TypeError, "expected __dlpack__ to give a DLPack")
    x = Exporter(made["k"])
    capsule = x.__dlpack__()
    refuses(
        made | {"k": Used(made["k"], capsule=capsule)} | {"k": Used(x.x, capsule=3.5)},
        TypeError,
        "expected __dlpack__ to give a DLPack capsule, got 3.5",
    )
    first = Used(x.x, capsule=capsule)
    linattn.gla(**made | {"k": first})
    assert x.ended == 1 and PyCapsule_GetName(capsule) == b"used_dltensor"
    refuses(made | {"k": first}, TypeError, "expected __dlpack__ to give a DLPack")  # once only
    assert x.ended == 1
    for answer in (3, (), ("a", "b"), None):
        k = BadDevice(made["k"], answer=answer)
        refuses(made | {"k": k}, (TypeError, RuntimeError), "^k: ")


@pytest.mark.parametrize(
    "typestr",
    [
        "<f",
        "<f0",
        "<f32",
        "<f36",
        "<f4x",
        "<f 4",
        "<f-4",
        "<",
        "",
        ">f4",
        "<i" + 30 * "9",
        "\udcff",
        4,
    ],
)
def test_a_typestr_without_a_place(typestr):
    """Also an item size whose bits do not fit in a byte: this was a division by zero once."""

    class Header:
        def __init__(self):
            self.__cuda_array_interface__ = {
                "shape": (2, 2),
                "typestr": typestr,
                "version": 3,
                "data": (4096, False),
                "strides": (8, 8),
            }

    with pytest.raises(TypeError, match=r"^q: expected float64, float32, float16 or bfloat16"):
        linattn.linear_attention(Header(), Header(), Header())


def test_a_class_is_not_an_array():
    made = arguments("gla", "forward")
    for bad in (Exporter, np.ndarray, [1.0], "x", 3, object()):
        refuses(made | {"k": bad}, TypeError, "^k: expected an array, got <class '")


# ---- references ----


def test_nothing_is_kept(op="gated_delta_rule"):
    """Good calls and bad ones keep no reference and no block, and end every capsule."""
    made = {pass_: arguments(op, pass_) for pass_ in PASSES}
    theirs = {pass_: over_arrays(Importer, made[pass_]) for pass_ in PASSES}
    bad = [
        {"k": Exporter(made["forward"]["k"].astype("i1"))},
        {"v": Exporter(np.zeros(3))},
        {"k": Exporter(made["forward"]["k"], major=2)},
        {"beta": on_cuda(np.zeros((3, 5, 4)))},
        {"out": Exporter(made["forward"]["v"])},
        {"initial_state": 3},
        {"mode": "x"},
        {"out": Exporter(np.zeros_like(made["forward"]["v"]), flags=1)},
    ]
    everything = list(leaves([list(x.values()) for x in theirs.values()]))
    before = [sys.getrefcount(x) for x in everything]
    counts = []
    for _ in range(5):
        for _ in range(120):
            for pass_ in PASSES:
                call(op, pass_, theirs[pass_])
            for one in bad:
                with pytest.raises((TypeError, ValueError)):
                    linattn.gated_delta_rule(**theirs["forward"] | one)
            for x in [*everything, *leaves([list(one.values()) for one in bad])]:
                if isinstance(x, Exporter):
                    assert x.exported == x.ended and not x.alive
                    x.asked.clear()
        gc.collect()
        counts.append(sys.getallocatedblocks())
    # a leak shows in every batch of 120; the exporters' ctypes keeps ever fewer new blocks
    assert min(np.diff(counts)) < 60, counts
    assert [sys.getrefcount(x) for x in everything] == before


def test_what_a_producer_is_asked():
    made = arguments("gla", "forward")
    k, old = Exporter(made["k"]), Old(made["q"])
    linattn.gla(**made | {"k": k, "q": old})
    assert k.asked == [{"max_version": (1, 0)}]
    assert old.asked == [{"max_version": (1, 0)}, {}]


def test_outputs_outlive_the_call():
    made = over_arrays(Importer, arguments("gla", "forward"))
    o, state = linattn.gla(**made, output_final_state=True)
    want = o.x.copy()
    del made, state
    gc.collect()
    junk = [np.full(o.x.shape, np.nan, np.float32) for _ in range(50)]
    assert_same_bits(o.x, want)
    assert o.x.ctypes.data % 64 == 0
    del junk


# ---- the user's own feature maps, default gates ----


def test_the_default_gamma_needs_a_shape_only():
    for pass_ in PASSES:
        made = arguments("retention", pass_)
        del made["gamma"]
        want, got = call("retention", pass_, made), None
        made = arguments("retention", pass_)
        del made["gamma"]
        got = call("retention", pass_, over_arrays(Exporter, made))
        for x, y in zip(leaves(want), leaves(got), strict=True):
            assert_same_bits(y, x)


class NoShape(Exporter):
    @property
    def shape(self):
        raise AttributeError("no shape")


class OddShape(Exporter):
    @property
    def shape(self):
        return list(self.x.shape)


@pytest.mark.parametrize("kind", [NoShape, OddShape])
@pytest.mark.parametrize("pass_", PASSES)
def test_the_default_gamma_of_a_v_without_a_shape(pass_, kind):
    made = arguments("retention", pass_)
    call("retention", pass_, made | {name: kind(made[name]) for name in "qkv"})  # gamma is given
    del made["gamma"]
    for name in ("q", "k", ""):
        given = made | {one: kind(made[one]) for one in "qkv"} | ({name: [1]} if name else {})
        with pytest.raises(TypeError) as error:
            call("retention", pass_, given)
        assert str(error.value) == (
            f"{name}: expected an array, got <class 'list'> (np.asarray({name}, float) makes one)"
            if name
            else f"gamma: expected [HV], since v has no shape to make it of; got None ({kind})"
        )


def test_a_default_gamma_that_memory_does_not_hold():
    x = np.ones((1, 1, 1, 1), np.float32)
    v = np.broadcast_to(x, (1, 1, 2**58, 1))
    with pytest.raises(MemoryError, match=r"^v: .* got \[HV\] = \(288230376151711744,\)$"):
        linattn.retention(x, x, v)
