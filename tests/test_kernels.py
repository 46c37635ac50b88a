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


def test_other_calls():
    x = np.ones((1, 5, 2, 4))
    assert linattn.explain_kernel("linear_attention", x, x, x, causal=False).kernel == "noncausal"
    none = linattn.explain_kernel("linear_attention", x[:, :0], x[:, :0], x[:, :0])
    assert (none.kernel, none.why) == ("none", "no output has an element")
    with pytest.raises(ValueError, match="op: expected one of"):
        linattn.explain_kernel("softmax", x, x, x)
