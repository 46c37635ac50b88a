"""titans(batch=b): b tokens predict from one memory. The properties of test_properties.py draw it
too."""

import itertools

import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits
from support.device import ops as linattn
from support.grid import DTYPES, MODES, Pool, bits_multiplied, rounds_products, wider
from support.variants import PAIR_DECAY

from linattn import OPS, reference, testing

BATCHES = (1, 2, 5, 16, 24, 64, 1000)


def problem(op, rng, dtype, T=83, **sizes):
    x = testing.make_inputs(
        op,
        rng,
        B=2,
        T=T,
        **{"H": 2, "HV": 4, "K": 20, "V": 35} | sizes,
        dtype=dtype,
        initial_state=True,
    )
    return x, testing.make_output_gradients(op, rng, x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(b, d) for b in BATCHES for d in DTYPES if d == np.float32 or b in (5, 64)],
    ids=lambda x: str(x) if isinstance(x, int) else np.dtype(x).name,
)
@pytest.mark.parametrize("op", PAIR_DECAY)
def test_accuracy(op, batch, dtype, mode, rng):
    form = {"form": mode, "chunk_size": 16} if device.on_host() else {"form": "recurrent"}
    rounded = rounds_products(op, dtype, 20, mode)
    forward, backward = Pool(dtype if rounded else None), Pool()

    def outputs(x, **how):
        return dict(zip(OUTPUTS, getattr(reference, op)(**x, batch=batch, **how), strict=True))

    def gradients(x, **how):
        return given(reference.backward(op, **x, batch=batch, **how))

    for _ in range(3):
        x, d = problem(op, rng, dtype)
        got = getattr(linattn, op)(**x, batch=batch, mode=mode, output_final_state=True)
        got = dict(zip(OUTPUTS, got, strict=True))
        forward.add(
            got, outputs(x, dtype=wider(dtype)), lambda x: outputs(x, dtype=dtype, **form), x
        )
        grads = given(getattr(linattn, f"{op}_backward")(**d, **x, batch=batch, mode=mode))
        x |= d
        backward.add(
            grads, gradients(x, dtype=wider(dtype)), lambda x: gradients(x, dtype=dtype, **form), x
        )
    tf32 = device.on_host() and bits_multiplied(op, dtype, mode) == 16
    forward.judge(f"{op} {batch}", tf32=tf32)
    backward.judge(f"{op} {batch}", gradient=True)


OUTPUTS = ("o", "final_state")


def given(gradients):
    """{name: gradient} of those that are there."""
    return {name: a for name, a in gradients._asdict().items() if a is not None}


@pytest.mark.parametrize("op", PAIR_DECAY)
@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_have_batches_of_their_own(op, mode, rng):
    x, d = problem(op, rng, np.float64)
    cu = np.array([0, 3, 3, 40, 83])
    one = {name: a[:1] if hasattr(a, "shape") else a for name, a in x.items()}
    one["initial_state"] = tuple(np.concatenate([a, a]) for a in x["initial_state"])
    d = {"do": d["do"][:1], "d_final_state": tuple(a.repeat(2, 0) for a in d["d_final_state"])}
    got, last = getattr(linattn, op)(
        **one, cu_seqlens=cu, batch=7, mode=mode, output_final_state=True
    )
    grads = getattr(linattn, f"{op}_backward")(**d, **one, cu_seqlens=cu, batch=7, mode=mode)
    for n, (first, end) in enumerate(itertools.pairwise(cu)):
        rows = slice(first, end)
        own = {k: a[:, rows] for k, a in one.items() if hasattr(a, "shape") and a.ndim > 2}
        own["initial_state"] = tuple(a[n : n + 1] for a in one["initial_state"])
        own_d = {
            "do": d["do"][:, rows],
            "d_final_state": tuple(a[n : n + 1] for a in d["d_final_state"]),
        }
        o, state = getattr(linattn, op)(**own, batch=7, mode=mode, output_final_state=True)
        assert_same_bits(got[:, rows], o)
        for a, b in zip(last, state, strict=True):
            assert_same_bits(a[n : n + 1], b)
        of_own = getattr(linattn, f"{op}_backward")(**own_d, **own, batch=7, mode=mode)
        for name in ("dq", "dk", "dv", "dbeta", "deta", "dg"):
            assert_same_bits(getattr(grads, name)[:, rows], getattr(of_own, name), name)


@pytest.mark.parametrize("mode", MODES)
def test_one_batch_without_decay_and_momentum_is_linear_attention(mode, rng):
    """All writes are then known beforehand: beta (v - M0'k)."""
    x, _ = problem("titans", rng, np.float64)
    M, Y = x["initial_state"][0], np.zeros_like(x["initial_state"][1])
    of_value_head = x["k"].repeat(2, axis=2)
    error = x["v"] - np.einsum("bthk,bhkv->bthv", of_value_head, M)
    o, (last, _) = linattn.titans(
        x["q"],
        x["k"],
        x["v"],
        x["beta"],
        alpha=1,
        initial_state=(M, Y),
        batch=83,
        mode=mode,
        output_final_state=True,
    )
    wanted, S = linattn.linear_attention(
        x["q"],
        x["k"],
        x["beta"][..., None] * error,
        feature_map="identity",
        normalize=False,
        initial_state=M,
        mode=mode,
        output_final_state=True,
    )
    np.testing.assert_allclose(o, wanted, rtol=0, atol=1e-13 * abs(wanted).max())
    np.testing.assert_allclose(last, S, rtol=0, atol=1e-13 * abs(S).max())


def test_a_batch_is_no_chunk(rng):
    """The results depend on it: else the tests above would show nothing."""
    x, _ = problem("titans", rng, np.float64)
    one, two = (linattn.titans(**x, batch=batch)[0] for batch in (1, 2))
    assert abs(one - two).max() > 0.01 * abs(one).max()
    assert_same_bits(linattn.titans(**x)[0], one)
    assert_same_bits(two, linattn.titans(**x, batch=2, chunk_size=17)[0])  # 16, and that is default


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (0, ValueError, "batch: expected >= 1, got 0"),
        (-3, ValueError, "batch: expected >= 1, got -3"),
        (2**70, ValueError, "batch: expected 1 to 2\\^63-1"),
        (1.0, TypeError, "batch: expected an int, got <class 'float'>"),
        (True, TypeError, "batch: expected an int"),
        (None, TypeError, "batch: expected an int"),
    ],
    ids=str,
)
def test_errors(batch, error, text, rng):
    x, d = problem("titans", rng, np.float32, T=3)
    with pytest.raises(error, match=text):
        linattn.titans(**x, batch=batch)
    with pytest.raises(error, match=text):
        linattn.titans_backward(**d, **x, batch=batch)


@pytest.mark.parametrize("op", [op for op in OPS if op not in PAIR_DECAY])
def test_other_ops_have_no_batches(op, rng):
    x = testing.make_inputs(op, rng, B=1, T=2, H=1, K=2, V=2, dtype=np.float32)
    with pytest.raises(TypeError, match="batch"):
        getattr(linattn, op)(**x, batch=2)


def test_gradients_that_pytorch_records(rng):
    torch = pytest.importorskip("torch")
    device.needs_numpy("gradcheck has its own tensors")
    x, _ = problem("titans", rng, np.float64, T=7, H=1, HV=1, K=3, V=2)
    names = ("q", "k", "v", "beta", "eta", "g")
    tensors = [torch.tensor(x[name], requires_grad=True) for name in names]
    state = [torch.tensor(a, requires_grad=True) for a in x["initial_state"]]

    def call(*given):
        o, (M, Y) = device.imported("linattn").titans(
            *given[:6], initial_state=given[6:], batch=3, output_final_state=True
        )
        return o, M, Y

    assert torch.autograd.gradcheck(call, (*tensors, *state))
