"""Scans for states alone: maps of segments of tokens, and gradients of initial states."""

import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits
from support.composed import assert_near, judged
from support.device import ops as linattn
from support.scans import (
    SCANS,
    SHAPES,
    as_reals,
    ends_of,
    every,
    of_dtypes,
    reference_gradients,
    run_reference,
)

from linattn import _linattn


def draw_long(scan, rng, dtype=np.float64, **shape):
    """A problem whose decays leave something of a state. A row of several is reset."""
    arrays = scan.draw(rng, dtype, **shape)
    if "g" in arrays:
        arrays["g"] = (arrays["g"] / np.float32(arrays["g"].shape[1])).astype(dtype)
    if "reset" in arrays:
        arrays["reset"][1:] = False
        arrays["reset"][0] &= len(arrays["reset"]) > 1
    return arrays


def of_segment(scan, arrays, **keywords):
    """The map of the tokens, which begin from no state."""
    given = {name: x for name, x in arrays.items() if name != "initial_state"}
    X, M = linattn.segment_map(scan.name, **given, **scan.keywords, **keywords)
    return {"X": as_reals(X), "M": as_reals(M)}


def reference_of_segment(scan, dtype, arrays, **keywords):
    """X is the state after zeros, and M that after ones if nothing is written."""
    first = scan.tokens[0]
    starts = arrays["initial_state"]
    X = arrays | {"initial_state": 0 * starts}
    M = arrays | {first: 0 * arrays[first], "initial_state": 0 * starts + 1}
    found = {"X": X, "M": M}
    return {x: run_reference(scan, dtype, a, **keywords)["state"] for x, a in found.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@of_dtypes
def test_map_of_a_segment(scan, shape, dtype, rng):
    judged(
        lambda: {"arrays": draw_long(scan, rng, dtype, **shape)},
        lambda arrays: of_segment(scan, arrays),
        lambda arrays, dtype: reference_of_segment(scan, dtype, arrays),
        dtype,
    )


@every
def test_maps_of_packed_sequences(scan, rng):
    """One of which is empty: its map changes nothing."""
    ends = ends_of(rng, 50)
    arrays = scan.draw(rng, B=1, T=50, S=4)
    want = reference_of_segment(scan, np.longdouble, arrays, cu_seqlens=ends)
    for name, x in of_segment(scan, arrays, cu_seqlens=ends).items():
        assert_near(x, want[name], 1e-13, name)
        if scan.name != "s4d":  # whose numbers are near each other's for all tokens
            assert name == "X" or np.ptp(x) > 0


@of_dtypes
def test_states_alone_have_the_bits_of_whole_calls(scan, dtype, rng):
    """On a GPU they come from other kernels."""
    arrays = scan.draw(rng, dtype, B=1, T=70, D=37, N=16, G=1)
    start = arrays.pop("initial_state")
    dy = rng.standard_normal((1, 70, 37)).astype(dtype)
    ends = {"d_final_state": scan.draw_state(rng, arrays, 1)}
    grads = scan.backward(dy, **arrays, **scan.keywords, **ends, initial_state=start)
    whole = {
        "X": scan.forward(**arrays, **scan.keywords, output_final_state=True)[1],
        "dS": grads.d_initial_state,
    }
    found = {
        "X": linattn.segment_map(scan.name, **arrays, **scan.keywords).X,
        "dS": linattn.segment_map_backward(scan.forward, dy, **arrays, **scan.keywords, **ends),
    }
    if device.on_host():
        assert_same_bits(found, whole)
    for name, x in found.items():
        assert_near(
            as_reals(x), as_reals(whole[name]), 1e-12 if dtype == np.float64 else 1e-5, name
        )


@pytest.mark.parametrize("N", [5, 75])
@every
def test_gradient_of_a_state_alone(scan, N, rng):
    ends = ends_of(rng, 90)
    arrays = scan.draw(rng, B=1, T=90, N=N, S=4)
    dy = rng.standard_normal((1, 90, 6))
    d_state = scan.draw_state(rng, arrays, 4)
    want = reference_gradients(scan, np.longdouble, dy, d_state, arrays, cu_seqlens=ends)
    arrays.pop("initial_state")
    options = {"d_final_state": d_state, "cu_seqlens": ends}
    found = linattn.segment_map_backward(scan.name, dy, **arrays, **scan.keywords, **options)
    assert_near(as_reals(found), want["initial_state"], 1e-12, "dS")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every
def test_no_tokens_change_nothing(scan, dtype, rng):
    """Not even where a rate is infinite."""
    arrays = scan.draw(rng, dtype, T=0, state=False)
    if scan.name == "selective_scan":
        arrays["A"][0, 0] = -np.inf
    found = of_segment(scan, arrays)
    assert found["X"].size and not found["X"].any()
    ones = found["M"][..., 0] if np.iscomplexobj(arrays.get("A")) else found["M"]
    assert (ones == 1).all()


@pytest.mark.parametrize("name", ["initial_state", "out"])
def test_a_map_takes_no_state(name, rng):
    scan = SCANS[0]
    arrays = scan.draw(rng, state=False)
    with pytest.raises(ValueError, match=f"{name}: expected None: a map is of all states"):
        linattn.segment_map(scan.name, **arrays, **{name: np.zeros((2, 6, 5))})


def test_a_call_of_states_alone_has_no_place_for_y(rng):
    x, g = rng.standard_normal((2, 1, 3, 4))
    with pytest.raises(ValueError, match="out: expected None, for a call of states alone"):
        _linattn.scan("gated", "forward", u=x, g=g, out=x.copy(), states_only=True)
