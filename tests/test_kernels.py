"""linattn.explain_kernel: what it says is what ran."""

import numpy as np
import pytest

import linattn
from linattn import testing
from linattn.variants import OPS


def inputs(op, dtype=np.float32, **sizes):
    return testing.make_inputs(op, np.random.default_rng(0), dtype=dtype, **sizes)


@pytest.mark.parametrize("op", OPS)
def test_modes(op):
    x = inputs(op, T=70)
    isa = linattn._linattn.isa()[0]
    isa = {"amx": "avx512", "amxbf16": "avx512"}.get(isa, isa)  # which have none of float32
    chunks = linattn.explain_kernel(op, **x)
    assert (chunks.kernel, chunks.why, chunks.chunk) == ("chunks", "", 16)
    assert chunks.unit == isa or chunks.unit.startswith(isa.removesuffix("bf16"))
    assert linattn.explain_kernel(op, **x, chunk_size=7).chunk == 7
    assert linattn.explain_kernel(op, **x, mode="parallel").chunk == 70
    tokens = linattn.explain_kernel(op, **x, mode="recurrent")
    assert (tokens.kernel, tokens.chunk, tokens.bits) == ("token by token", None, 24)


@pytest.mark.parametrize("op", OPS)
def test_gradients(op):
    x = inputs(op, dtype=np.float64)
    made = testing.make_output_gradients(op, np.random.default_rng(1), x)
    report = linattn.explain_kernel(getattr(linattn, f"{op}_backward"), **made, **x)
    assert (report.kernel, report.bits) == ("chunks", 53)


def test_a_step_leaves_the_state_as_it_was():
    x, state = np.ones((2, 3, 4)), linattn.zeros_state(2, 3, 4, 4, dtype=float)
    report = linattn.explain_kernel(linattn.delta_rule_step, x, x, x, 0.5, state=state)
    assert report.kernel == "one token" and not state.any()


def test_scans_and_convolutions():
    u, a = np.ones((1, 5, 3), np.float32), np.ones((3, 2), np.float32)
    bc, state = np.ones((1, 5, 1, 2), np.float32), np.zeros((1, 3, 2), np.float32)
    isa = linattn._linattn.isa()[0]
    scan = linattn.explain_kernel(linattn.selective_scan, u, u, a, bc, bc)
    assert (scan.kernel, scan.why, scan.chunk, scan.bits) == ("scan", "", None, 24)
    assert isa.startswith(scan.unit.removesuffix("bf16")) or scan.unit == "avx512"
    back = linattn.explain_kernel(linattn.selective_scan_backward, u, u, u, a, bc, bc)
    assert back == scan
    wide = linattn.explain_kernel(linattn.hgrn, u.astype(float), -u.astype(float))
    assert (wide.kernel, wide.bits) == ("scan", 53)
    step = linattn.explain_kernel(
        linattn.selective_scan_step, state, u[:, 0], u[:, 0], a, bc[:, 0], bc[:, 0]
    )
    assert step.kernel == "one token" and not state.any()
    short = linattn.explain_kernel(linattn.causal_conv1d, u, a)
    assert (short.kernel, short.unit, short.bits) == ("convolution", scan.unit, 24)
    none = linattn.explain_kernel(linattn.causal_conv1d, u[:, :0], a)
    assert (none.kernel, none.why) == ("none", "no output has an element")
    kept = linattn.explain_kernel(linattn.causal_conv1d, u[:, :0], a, output_final_state=True)
    assert kept.kernel == "convolution"  # which copies the state
    with pytest.raises(ValueError, match="weight: expected"):
        linattn.explain_kernel(linattn.causal_conv1d, u, a[:2])


def test_other_calls():
    x = np.ones((1, 5, 2, 4))
    assert linattn.explain_kernel("linear_attention", x, x, x, causal=False).kernel == "noncausal"
    none = linattn.explain_kernel("linear_attention", x[:, :0], x[:, :0], x[:, :0])
    assert (none.kernel, none.why) == ("none", "no output has an element")
    with pytest.raises(ValueError, match="op: expected one of"):
        linattn.explain_kernel("softmax", x, x, x)
