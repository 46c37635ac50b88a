"""Bound steps: checked once, run many times over arrays whose contents change meanwhile.

The arrays live from call to call, so they are made here, of the kind that `--device` names, and do
not go there and back with each call.
"""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits, leaves, over_arrays
from support.dlpack import Exporter
from support.pools import KINDS, SHAPES, B, P, pool_problem
from support.problems import PER_TOKEN, at_token

import linattn
from linattn import _linattn

OPS = linattn.OPS


def there(x):
    """A NumPy array as one of the device's, with memory of its own."""
    return x.copy() if device.arrays is None else device.arrays.from_numpy(x)


def here(x):
    """An array's contents as a NumPy array of its own."""
    return np.array(x if isinstance(x, np.ndarray) else device.arrays.to_numpy(x))


def write(to, x):
    """New contents where the array lies."""
    to[...] = x if device.arrays is None else device.arrays.from_numpy(np.ascontiguousarray(x))


def on_device(x):
    return {name: there(a) if isinstance(a, np.ndarray) else a for name, a in x.items()}


def step(op):
    return getattr(linattn, f"{op}_step")


def assert_bits(got, want):
    assert_same_bits([here(x) for x in leaves(got)], [here(x) for x in leaves(want)])


def small(op="gated_delta_rule", seed=0, **changed):
    """One token of B rows on the device, its state, and out."""
    x, state = pool_problem(op, np.random.default_rng(seed), np.float32, np.float32, SHAPES[0], P=B)
    made = on_device(at_token(x, 0)) | {"state": over_arrays(there, state)}
    return made | {"out": there(np.full((B, *x["v"].shape[2:]), np.nan, np.float32))} | changed


# ---- what it does ----


@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "pool"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(np.dtype(d).name for d in kind))
@pytest.mark.parametrize("op", OPS)
def test_tokens(op, kind, v_first, pooled, rng):
    """Bit for bit as plain steps over the same arrays. The indices of a pool change too."""
    if kind[0] == ml_dtypes.bfloat16 and device.kind == "cupy":
        try:
            there(np.zeros(1, kind[0]))
        except (TypeError, ValueError):
            pytest.skip("this CuPy has no bfloat16")
    for shape in SHAPES[:2]:
        size, tokens = P if pooled else B, 4
        x, start = pool_problem(op, rng, *kind, shape, P=size, T=tokens, v_first=v_first)
        made = on_device(at_token(x, 0))
        state, want_state = over_arrays(there, start), over_arrays(there, start)
        out = there(np.full((B, *x["v"].shape[2:]), np.nan).astype(kind[0]))
        if pooled:
            made["state_indices"] = there(np.zeros(B, np.int32))
        bound = linattn.bind(step(op), **made, state=state, out=out)
        assert type(bound) is linattn.BoundStep
        assert_bits(state, over_arrays(there, start))
        assert np.isnan(here(out).astype(np.float32)).all()
        for t in range(tokens):
            for name, a in at_token(x, t).items():
                if name in PER_TOKEN:
                    write(made[name], a)
            if pooled:
                indices = rng.permutation(P)[:B].astype(np.int32)
                indices[t % B] = -1
                write(made["state_indices"], indices)
            assert bound() is out
            assert_bits(out, step(op)(**made, state=want_state))
            assert_bits(state, want_state)


@pytest.mark.parametrize("V", [16, 64, 128])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("op", OPS)
def test_rows_of_a_state_that_lie_apart(op, dtype, V, rng):
    """V + 1 numbers apart, V whole lanes of every instruction set: as a state without gaps."""
    x, want_state = pool_problem(op, rng, dtype, dtype, (1, 2, 24, V), P=B)
    S, *z = leaves(want_state)
    wide = np.full((*S.shape[:-1], V + 1), 7, dtype)
    wide[..., :V] = S
    made, wide = on_device(at_token(x, 0)), there(wide)
    state = (wide[..., :V], *map(there, z)) if z else wide[..., :V]
    want_state = over_arrays(there, want_state)
    bound = linattn.bind(step(op), **made, state=state)
    for _ in range(3):
        assert_bits(bound(), step(op)(**made, state=want_state))
        assert_bits(state, want_state)
        assert (here(wide)[..., V:] == 7).all()


@pytest.mark.parametrize("op", OPS)
def test_out_is_made_once(op):
    made = small(op)
    del made["out"]
    bound, other = (linattn.bind(step(op), **made) for _ in range(2))
    o = bound()
    assert device.arrays is None or device.arrays.is_own(o)
    kept = here(o)
    assert other() is not o
    assert_bits(o, kept)
    assert bound() is o
    assert here(o).tobytes() != kept.tobytes()


def test_positions_and_keywords():
    made = small()
    want = step("gated_delta_rule")(**made | {"state": there(here(made["state"])), "out": None})
    rest = {name: made.pop(name) for name in ("state", "out")}
    bound = linattn.bind(linattn.gated_delta_rule_step, *made.values(), **rest)
    assert_bits(bound(), want)


def test_retention_has_its_own_decays():
    made = small("retention")
    del made["gamma"]
    state = there(here(made["state"]))
    bound = linattn.bind(linattn.retention_step, **made)
    for _ in range(2):
        assert_bits(bound(), linattn.retention_step(**made | {"state": state, "out": None}))


def test_a_number_for_a_gate_stays():
    rng = np.random.default_rng(0)
    q, v = there(rng.standard_normal(8)), there(rng.standard_normal(6))
    state, want = there(np.zeros((8, 6))), there(np.zeros((8, 6)))
    bound = linattn.bind(linattn.gated_delta_rule_step, q, q, v, -0.5, 0.25, state=state)
    for _ in range(3):
        o = bound()
        assert_bits(o, linattn.gated_delta_rule_step(q, q, v, -0.5, 0.25, state=want))
        assert_bits(state, want)


def test_a_feature_map_by_name():
    for phi in ("relu+eps", linattn.FeatureMap("relu+eps", eps=0.5), ("elu+1", "exp")):
        made = small("linear_attention", feature_map=phi, eps=1e-3, normalize="add")
        state = over_arrays(lambda s: there(here(s)), made["state"])
        bound = linattn.bind(linattn.linear_attention_step, **made)
        for _ in range(2):
            want = linattn.linear_attention_step(**made | {"state": state, "out": None})
            assert_bits(bound(), want)


def test_several_threads():
    """Each with a bound step of its own, over inputs that they share."""
    made = small()
    count, rounds = 4, 50
    states = [there(here(made["state"])) for _ in range(count + 1)]
    steps = [
        linattn.bind(step("gated_delta_rule"), **made | {"state": s, "out": None}) for s in states
    ]
    for _ in range(rounds):
        want = steps[-1]()

    def walk(bound):
        for _ in range(rounds):
            bound()

    threads = [threading.Thread(target=walk, args=(one,)) for one in steps[:-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states[:-1]:
        assert_bits(state, states[-1])
    assert_bits(steps[0](), steps[-1]())
    assert want is steps[-1]()


# ---- what it holds ----


def test_arrays_live_as_long_as_the_step():
    device.needs_numpy("what keeps its memory is not the array")
    made = small() | {"state_indices": np.arange(B)}
    want = linattn.gated_delta_rule_step(**made | {"state": made["state"].copy(), "out": None})
    alive = [weakref.ref(x) for x in made.values()]
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    made.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    assert_bits(bound(), want)
    del bound
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_a_cycle_is_collected():
    device.needs_numpy("an array with attributes")

    class Tagged(np.ndarray):
        pass

    made = small()
    made["q"] = made["q"].view(Tagged)
    made["out"] = made["out"].view(Tagged)
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    bound()
    made["q"].bound = made["out"].bound = bound
    refs = [weakref.ref(made["q"]), weakref.ref(made["out"]), weakref.ref(made["state"])]
    assert gc.is_tracked(bound)
    made.clear()
    del bound
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_references_come_out_even():
    device.needs_numpy("references of NumPy's arrays")
    import sys

    made = small() | {"state_indices": np.arange(B)}
    before = [sys.getrefcount(x) for x in made.values()]
    for _ in range(3):
        bound = linattn.bind(linattn.gated_delta_rule_step, **made)
        for _ in range(5):
            bound()
        del bound
        with pytest.raises(ValueError):
            linattn.bind(linattn.gated_delta_rule_step, **made | {"v": made["v"][:-1]})
    assert [sys.getrefcount(x) for x in made.values()] == before


def test_a_tensor_that_is_given_other_memory():
    """PyTorch allows it. The step is bound to the memory, which must not go away."""
    if device.kind not in ("torch", "cuda"):
        pytest.skip(f"{device.kind}: PyTorch's alone")
    made = small()
    state = there(here(made["state"]))
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    want = here(linattn.gated_delta_rule_step(**made | {"state": state, "out": None}))
    out = made["out"]
    for name in ("q", "k", "v", "g", "beta", "state"):
        made[name].data = there(np.full(made[name].shape, np.nan, np.float32))
    made.clear()
    gc.collect()
    trash = [there(np.full((B, 2, 16), np.nan, np.float32)) for _ in range(20)]
    assert bound() is out
    assert_bits(out, want)
    del trash


@pytest.mark.parametrize("name", ["state", "v", "out"])
def test_a_tensor_that_is_given_another_storage(name):
    """set_ changes the tensor alone, and the bound memory stays. A storage of no bytes has none."""
    if device.kind != "torch":
        pytest.skip(f"{device.kind}: PyTorch's tensors on the CPU alone")
    import torch

    made = small()
    want = here(
        linattn.gated_delta_rule_step(**made | {"state": there(here(made["state"])), "out": None})
    )
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    made[name].set_(torch.empty(0))
    gc.collect()
    bound()
    if name != "out":
        assert_bits(made["out"], want)
    made = small()
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    made[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: expected its memory to stay where it is"):
        bound()


@pytest.mark.parametrize("name", ["state", "out"])
def test_an_array_made_read_only_after_binding(name):
    device.needs_numpy("its flag")
    made = small()
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    bound()
    before = made["state"].copy(), made["out"].copy()
    made[name].flags.writeable = False
    with pytest.raises(ValueError, match=f"^{name}: expected a writable array, got a read-only"):
        bound()
    assert_bits(made["state"], before[0])
    assert_bits(made["out"], before[1])
    made[name].flags.writeable = True
    bound()


@pytest.mark.parametrize("name", ["state", "q", "beta"])
def test_an_array_resized_after_binding(name):
    device.needs_numpy("resize")
    made = small()
    made[name] = made[name].copy()
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    bound()
    made[name].resize((0,), refcheck=False)
    with pytest.raises(ValueError, match=f"^{name}: expected its memory to stay where it is"):
        bound()


# ---- what is refused ----


def test_what_is_no_step():
    x = there(np.ones((3, 4)))
    for bad in (linattn.kda, linattn.kda_backward, linattn.zeros_state, print, lambda **_: None):
        with pytest.raises(ValueError, match=r"^step: expected one of the functions"):
            linattn.bind(bad, x, x, x)
    for bad in (None, 3, "kda_step", x):
        with pytest.raises(TypeError, match=r"^step: expected one of the functions"):
            linattn.bind(bad, x, x, x)
    with pytest.raises(TypeError, match="step"):
        linattn.bind()


@pytest.mark.parametrize(
    "phi",
    [np.exp, ("elu+1", np.exp), (np.exp, "elu+1"), linattn.FeatureMap("mine", forward=np.exp)],
    ids=str,
)
def test_a_feature_map_that_is_a_function(phi):
    made = small("linear_attention", feature_map=phi)
    before = over_arrays(here, made["state"])
    with pytest.raises(ValueError, match=r"^feature_map: expected one that runs inside"):
        linattn.bind(linattn.linear_attention_step, **made)
    assert_bits(made["state"], before)


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_as_in_a_plain_call(op):
    made = small(op)
    before = {name: over_arrays(here, x) for name, x in made.items()}
    wrong = {
        "q": made["q"][:-1],
        "v": None,
        "state": None,
        "out": made["v"],
        "state_indices": there(np.zeros(B, np.float32)),
        "scale": "x",
        "nonsense": 1,
    }
    for name, bad in wrong.items():
        texts = []
        for call in (step(op), lambda **x: linattn.bind(step(op), **x)):
            with pytest.raises((TypeError, ValueError)) as caught:
                call(**made | {name: bad})
            texts.append((caught.type, str(caught.value)))
        assert texts[0] == texts[1], name
    missing = {name: x for name, x in made.items() if name != "state"}
    with pytest.raises(TypeError, match="state"):
        linattn.bind(step(op), **missing)
    for name, x in made.items():
        assert_bits(x, before[name])


def test_a_call_takes_no_arguments():
    bound = linattn.bind(linattn.gated_delta_rule_step, **small())
    for args, kwargs in (((1,), {}), ((), {"q": 1})):
        with pytest.raises(TypeError, match="a bound step takes no arguments"):
            bound(*args, **kwargs)
    bound(*(), **{})


def test_it_is_made_by_bind_alone():
    bound = linattn.bind(linattn.gated_delta_rule_step, **small())
    with pytest.raises(TypeError):
        linattn.BoundStep()
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="BoundStep"):
            how(bound)
    assert linattn.BoundStep.__name__ == "BoundStep"
    assert callable(bound)


def test_indices_are_looked_at_in_every_call():
    device.needs_host("the values of state_indices are not looked at")
    rng = np.random.default_rng(1)
    x, pool = pool_problem("kda", rng, np.float32, np.float32, SHAPES[0])
    indices = there(np.full(B, 10**6))  # not yet what they will be
    made = on_device(at_token(x, 0)) | {"state": there(pool), "state_indices": indices}
    bound = linattn.bind(linattn.kda_step, **made)
    write(indices, np.arange(B))
    out = bound()
    before = [here(out), here(made["state"])]
    for bad, text in (
        ([0, 1, P, 2], f"got {P} at index 2"),
        ([0, -2, 1, 2], "got -2 at index 1"),
        ([0, 1, 2, 1], "twice, got 1 at index 1 and at index 3"),
    ):
        write(indices, np.array(bad))
        with pytest.raises(ValueError, match=f"^state_indices: expected .*{text}$"):
            bound()
        assert_bits(out, before[0])
        assert_bits(made["state"], before[1])
    write(indices, np.arange(B))
    assert bound() is out
    assert here(made["state"]).tobytes() != before[1].tobytes()


def test_growth_is_warned_of_where_the_step_is_called():
    device.needs_host("the values of gates are not looked at")
    made = small()
    g = here(made["g"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        write(made["g"], np.full_like(g, 0.5))
        bound = linattn.bind(linattn.gated_delta_rule_step, **made)
        assert not seen
        bound()
        assert [w.filename for w in seen] == [__file__] and "g: expected" in str(seen[0].message)
        write(made["g"], g)
        bound()
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(made["g"], np.full_like(g, 0.5))
        before = here(made["state"])
        with pytest.raises(RuntimeWarning):
            bound()
        assert_bits(made["state"], before)


def test_memory_that_is_not_there():
    device.needs_numpy("scratch of the CPU's")
    made = small()
    bound = linattn.bind(linattn.gated_delta_rule_step, **made)
    before = made["state"].copy()
    _linattn._fail_allocation(1)
    try:
        with pytest.raises(MemoryError, match="scratch"):
            bound()
    finally:
        _linattn._fail_allocation(0)
    assert_bits(made["state"], before)
    bound()
    assert made["state"].tobytes() != before.tobytes()


def test_exporters_and_their_copies():
    """A copy that a library exports would never change."""
    device.needs_numpy("an exporter over NumPy's arrays")
    made = small()
    state, out = made.pop("state"), made.pop("out")
    want_state = state.copy()
    theirs = {name: Exporter(x) for name, x in made.items()}
    bound = linattn.bind(linattn.gated_delta_rule_step, **theirs, state=state, out=out)
    for scale in (1, -2):
        made["q"] *= scale
        assert bound() is out
        assert_bits(out, linattn.gated_delta_rule_step(**made, state=want_state))
    del bound
    assert all(x.exported == x.ended == 1 for x in theirs.values())
    for name in made:
        copied = Exporter(made[name], flags=2)
        with pytest.raises(ValueError, match=f"^{name}: expected the array's own memory, got a"):
            linattn.bind(
                linattn.gated_delta_rule_step, **made | {name: copied}, state=state, out=out
            )
        assert copied.ended == 1
