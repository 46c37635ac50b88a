"""linattn.layer_step of PyTorch's tensors."""

import numpy as np
import pytest
from support.compare import arrays_in, assert_same_bits, over_arrays
from support.layers import (
    BAD_STAGES,
    OPS,
    bad_arguments,
    layer_arguments,
    mamba2_arguments,
)
from support.tensors import tensors_in, to_numpy, to_tensor, torch

import linattn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_as_arrays(dtype):
    x = layer_arguments("gated_delta_rule", dtype=np.dtype(dtype))
    y = over_arrays(lambda a: to_tensor(a.copy()), x)
    got, want = (
        linattn.layer_step("gated_delta_rule", **y),
        linattn.layer_step("gated_delta_rule", **x),
    )
    assert_same_bits(to_numpy(got), want)
    assert_same_bits([to_numpy(a) for a in tensors_in(y)], arrays_in(x))


TRACED = {
    "kda": ("kda", layer_arguments("kda")),
    "Mamba-2": ("simple_gla", mamba2_arguments()),
    "no bias of dt": ("simple_gla", mamba2_arguments() | {"dt_bias": None, "scale": 1.0}),
    "a weight for all heads": (
        "simple_gla",
        mamba2_arguments() | {"norm_groups": None, "norm_weight": np.arange(1.0, 13)},
    ),
    "the gate after the norm": ("simple_gla", mamba2_arguments() | {"gate_first": False}),
    "groups that are heads": (
        "simple_gla",
        mamba2_arguments() | {"norm_groups": 4, "norm_weight": np.arange(1.0, 13)},
    ),
    "no rate": ("simple_gla", mamba2_arguments() | {"A_log": None}),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_tracer_sees_the_functions(name):
    op, arrays = TRACED[name]
    x = over_arrays(lambda a: to_tensor(a.copy()), arrays)
    y = over_arrays(torch.clone, x)
    step = torch.compile(linattn.layer_step, fullgraph=True, backend="aot_eager")
    got, want = step(op, **x), linattn.layer_step(op, **y)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(tensors_in(x), tensors_in(y), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op, options, error, text", BAD_STAGES)
def test_a_tracer_sees_what_the_core_refuses(op, options, error, text, monkeypatch):
    monkeypatch.setattr("linattn.layers.is_seen", lambda _: True)
    x = over_arrays(lambda a: to_tensor(a.copy()), bad_arguments(op, options))
    with pytest.raises(error, match=text):
        linattn.layer_step(op, **x)


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_that_requires_gradients(op):
    x = over_arrays(to_tensor, layer_arguments(op))
    x["norm_weight"].requires_grad_()
    with pytest.raises(ValueError, match="norm_weight: requires gradients"):
        linattn.layer_step(op, **x)
    with torch.no_grad():
        linattn.layer_step(op, **x)
