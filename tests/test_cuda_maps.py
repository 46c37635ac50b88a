"""Linear attention with feature maps and a normaliser, on a GPU, where chunks take the call.

Forward passes map the rows in the one kernel of the additive rule. Gradients find the denominators
by chunks, and undo elu + 1 in the last kernel."""

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import needs_gpu, to_gpu
from support.grid import Pool
from support.tensors import to_numpy, torch

import linattn
from linattn import reference, testing

pytestmark = needs_gpu

OP, DTYPE = "linear_attention", np.dtype(ml_dtypes.bfloat16)
maps = pytest.mark.parametrize("feature_map", ["elu+1", "relu+eps", "relu2", "exp"])
options = pytest.mark.parametrize(
    "options",
    [{}, {"normalize": "add", "eps": 0.01}, {"normalize": False}, {"qk_l2norm": True}],
    ids=["clamp", "add", "plain", "norm"],
)
# whole tiles; one key more than a multiple of 32, and no multiple of 8 of them; value heads that
# share keys; a second tile of value columns; and sequences of 0, 1 and 64 tokens
SHAPES = {
    "whole": {"B": 2, "H": 4, "K": 128, "V": 128},
    "odd": {"B": 2, "H": 2, "K": 33, "V": 72},
    "shared": {"B": 1, "H": 2, "HV": 6, "K": 100, "V": 64},
    "wide": {"B": 1, "H": 2, "K": 64, "V": 200},
    "packed": {"B": 1, "H": 2, "K": 64, "V": 64, "cu_seqlens": [0, 0, 1, 65, 129, 129, 200]},
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def a_problem(shape, normalize=True, **_):
    """The arrays of a call, and d_final_state and do."""
    shape = SHAPES[shape] | {"T": 200, "dtype": DTYPE, "initial_state": True}
    x = testing.make_inputs(OP, np.random.default_rng(0), normalize=bool(normalize), **shape)
    d = testing.make_output_gradients(OP, np.random.default_rng(1), x)
    return {name: a for name, a in x.items() if name != "normalize"}, d


def named(names, results):
    """As host arrays."""
    return {
        name: over_arrays(to_numpy, y) if torch.is_tensor(leaves(y)[0]) else y
        for name, y in zip(names, results, strict=True)
    }


@shapes
@options
@maps
def test_forward(feature_map, options, shape):
    x, options = a_problem(shape, **options)[0], options | {"feature_map": feature_map}

    def outputs(function, x, **dtype):
        return named(("o", "final_state"), function(**x, **options, **dtype))

    assert linattn.explain_kernel(OP, **over_arrays(to_gpu, x), **options).kernel == "chunks"
    pool = Pool(DTYPE)
    pool.add(
        outputs(linattn.linear_attention, over_arrays(to_gpu, x), output_final_state=True),
        outputs(reference.linear_attention, x),
        lambda x: outputs(reference.linear_attention, x, dtype=DTYPE),
        x,
    )
    pool.judge(f"{feature_map} {options} {shape}")


@shapes
@options
@maps
def test_gradients(feature_map, options, shape):
    x, d = a_problem(shape, **options)
    x, options = x | d, options | {"feature_map": feature_map}

    def gradients(function, x, **dtype):
        d = function(x, dtype)
        names = [name for name in d._fields if getattr(d, name) is not None]
        return named(names, [getattr(d, name) for name in names])

    def exact(x, dtype):
        return reference.backward(OP, **x, **options, **dtype)

    pool = Pool(DTYPE)
    pool.add(
        gradients(
            lambda x, _: linattn.linear_attention_backward(**x, **options), over_arrays(to_gpu, x)
        ),
        gradients(exact, x),
        lambda x: gradients(exact, x, dtype=DTYPE),
        x,
    )
    pool.judge(f"{feature_map} {options} {shape}", gradient=True)


@shapes
def test_the_same_bits_twice(shape):
    """Warps that map rows, score and fetch meet in any order."""
    x, d = over_arrays(to_gpu, a_problem(shape))

    def results():
        o = linattn.linear_attention(**x, output_final_state=True)
        return leaves(o) + leaves(tuple(linattn.linear_attention_backward(**x, **d)))

    want = results()
    for _ in range(20):
        assert_same_bits(results(), want)
