"""linattn.compat.fla's functions of one number a channel, against fla's recurrence, written out."""

import inspect
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support.device import imported

from linattn.compat import _fla_scans, fla

# Parameters of fla.ops, fla-core 0.6.0, in order, with their defaults.
SIGNATURES = {
    "chunk_hgrn": "x, g, initial_state=None, output_final_state=False",
    "fused_recurrent_hgrn": "x, g, initial_state=None, output_final_state=False, cu_seqlens=None",
}
functions = pytest.mark.parametrize("name", SIGNATURES)
B, T, D = 2, 37, 21


def inputs(rng, B=B, dtype=np.float64):
    x = rng.standard_normal((B, T, D)).astype(dtype)
    return x, np.log(rng.uniform(0.01, 1, x.shape)).astype(dtype)


def loop(x, g, state=None):
    h = np.zeros((len(x), D)) if state is None else state
    o = np.empty(x.shape)
    for t in range(x.shape[1]):
        o[:, t] = h = np.exp(g[:, t].astype(float)) * h + x[:, t].astype(float)
    return o, h


def test_every_name_is_there():
    assert sorted(_fla_scans.__all__) == sorted(SIGNATURES)


@functions
def test_the_parameters_are_flas(name):
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == SIGNATURES[name]


@functions
def test_it_computes_the_recurrence(name, rng):
    f = getattr(fla, name)
    x, g = inputs(rng)
    want, last = loop(x, g)
    o, final = f(x, g, output_final_state=True)
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(final, last, rtol=1e-12, atol=1e-12)
    assert f(x, g)[1] is None
    o, _ = f(x, g, initial_state=final)
    np.testing.assert_allclose(o, loop(x, g, last)[0], rtol=1e-12, atol=1e-12)


def test_packed_sequences(rng):
    x, g = inputs(rng, B=1)
    ends = np.array([0, 5, 5, T])
    first = rng.standard_normal((3, D))
    o, final = fla.fused_recurrent_hgrn(x, g, first, True, ends)
    for n, (begin, end) in enumerate(pairwise(ends)):
        want, last = loop(x[:, begin:end], g[:, begin:end], first[n : n + 1])
        np.testing.assert_allclose(o[:, begin:end], want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(final[n : n + 1], last, rtol=1e-12, atol=1e-12)


@functions
def test_half_precision(name, rng):
    """x in bfloat16, gates in float32, a state in float16: o is x's, the state float32."""
    x, g = inputs(rng)
    x, g = x.astype(ml_dtypes.bfloat16), g.astype(np.float32)
    state = rng.standard_normal((B, D)).astype(np.float16)
    o, final = getattr(fla, name)(x, g, state, True)
    assert (o.dtype, final.dtype) == (x.dtype, np.float32)
    want, last = loop(x, g, state.astype(float))
    np.testing.assert_allclose(o.astype(float), want, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(final, last, rtol=1e-5, atol=1e-5)


@functions
def test_gradients_through_pytorch(name, rng):
    torch = imported("torch")
    x, g = (torch.tensor(a, requires_grad=True) for a in inputs(rng))
    state = torch.tensor(rng.standard_normal((B, D)), requires_grad=True)
    given = (x, g, state)
    assert torch.autograd.gradcheck(
        lambda x, g, state: getattr(fla, name)(x[:1, :5], g[:1, :5], state[:1], True), given
    )


@functions
def test_errors_name_flas_arguments(name, rng):
    f = getattr(fla, name)
    x, g = inputs(rng)
    with pytest.raises(TypeError, match="x: expected"):
        f(None, g)
    with pytest.raises(TypeError, match="g: expected"):
        f(x, None)
    with pytest.raises(ValueError, match="g: expected"):
        f(x, g[:, 1:])
    with pytest.raises(ValueError, match="x: expected"):
        f(x[0], g[0])
    with pytest.raises(ValueError, match="initial_state: expected"):
        f(x, g, x)
