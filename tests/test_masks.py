"""mask=: an op reads the tokens that a mask leaves, as if each row had no others."""

import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.tensors import to_numpy, to_tensor, torch
from support.variants import HEAD_DECAY

import linattn
from linattn import _linattn, testing

ops = pytest.mark.parametrize("op", linattn.OPS)
# padding to the left, to the right, between tokens; a row without padding, and one without tokens
MASK = np.ones((5, 12), bool)
MASK[0, :5] = MASK[1, 7:] = MASK[2, 3:9] = MASK[4] = False
OF_TOKENS = {line[0] for line in _linattn.ARRAYS if line[1][:2] in ("BT", "BL")} | {"alpha", "do"}


def a_problem(op, gradients=False, **options):
    rng = np.random.default_rng(0)
    B, T = MASK.shape
    x = testing.make_inputs(op, rng, B=B, T=T, H=1, HV=2, K=4, V=3, initial_state=True, **options)
    return x | (testing.make_output_gradients(op, rng, x) if gradients else {})


def with_nans(x):
    """Padding may hold anything."""
    return {
        name: np.where(MASK.reshape(*MASK.shape, *[1] * (a.ndim - 2)), a, np.nan)
        if name in OF_TOKENS
        else a
        for name, a in x.items()
    }


def row_of(x, n):
    """The call of row n alone, without padding."""

    def one(name, a):
        if name in OF_TOKENS and isinstance(a, np.ndarray):
            return a[n : n + 1, MASK[n]]
        states = name in ("initial_state", "d_final_state")
        return over_arrays(lambda s: s[n : n + 1], a) if states else a

    return {name: one(name, a) for name, a in x.items()}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@ops
def test_forward(op, library):
    x = a_problem(op)
    function, call = getattr(linattn, op), with_nans(x) | {"mask": MASK}
    if library == "torch":
        call = over_arrays(to_tensor, call)
    o, state = function(**call, output_final_state=True)
    if library == "torch":
        o, state = over_arrays(to_numpy, (o, state))
    assert not o[~MASK].any()
    for n in range(len(MASK)):
        want, after = function(**row_of(x, n), output_final_state=True)
        assert_same_bits(o[n : n + 1, MASK[n]], want)
        assert_same_bits(over_arrays(lambda s, n=n: s[n : n + 1], state), after)


@ops
def test_gradients(op):
    x = a_problem(op, gradients=True)
    backward = getattr(linattn, f"{op}_backward")
    got = backward(**with_nans(x), mask=MASK)
    rows = [backward(**row_of(x, n)) for n in range(len(MASK))]
    for name in got._fields:
        d = getattr(got, name)
        parts = [getattr(row, name) for row in rows]
        if d is None:
            assert parts[0] is None
        elif name == "d_initial_state":
            for a, b in zip(leaves(d), zip(*map(leaves, parts), strict=True), strict=True):
                assert_same_bits(a, np.concatenate(b))
        elif name == "dbonus" or (name == "dg" and op in HEAD_DECAY):
            assert d.shape == parts[0].shape and d.all()  # no zeros that hide a part
            np.testing.assert_allclose(d, sum(parts), rtol=1e-12)
        else:
            assert not d[~MASK].any()
            for n, part in enumerate(parts):
                assert_same_bits(d[n : n + 1, MASK[n]], part)


@ops
def test_pytorch_records_the_call(op):
    x = a_problem(op, gradients=True)
    d = {name: x.pop(name) for name in ("do", "d_final_state")}
    want = getattr(linattn, f"{op}_backward")(**x, **d, mask=MASK)
    t = over_arrays(to_tensor, x)
    for name in "qkv":
        t[name].requires_grad_()
    out = leaves(getattr(linattn, op)(**t, mask=to_tensor(MASK), output_final_state=True))
    torch.autograd.backward(out, leaves(over_arrays(to_tensor, (d["do"], d["d_final_state"]))))
    for name in "qkv":
        assert_same_bits(to_numpy(t[name].grad), getattr(want, f"d{name}"))


def test_numbers_are_gates_of_all_tokens():
    x = a_problem("gated_delta_rule") | {"g": -0.1, "beta": 0.5}
    o, _ = linattn.gated_delta_rule(**x, mask=MASK)
    for n in range(len(MASK)):
        assert_same_bits(o[n : n + 1, MASK[n]], linattn.gated_delta_rule(**row_of(x, n))[0])


def test_no_tokens_at_all():
    x = a_problem("kda")
    o, state = linattn.kda(**x, mask=np.zeros_like(MASK), output_final_state=True)
    assert o.shape == x["v"].shape and not o.any()
    np.testing.assert_array_equal(state, x["initial_state"])
    d = linattn.kda_backward(np.ones_like(x["v"]), **x, mask=np.zeros_like(MASK))
    assert d.dq.shape == x["q"].shape and not d.dq.any()


def test_numbers_as_a_mask():
    x = a_problem("delta_rule")
    want = linattn.delta_rule(**x, mask=MASK)[0]
    for dtype in (np.int64, np.float32):
        assert_same_bits(linattn.delta_rule(**x, mask=MASK.astype(dtype))[0], want)


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"mask": [[1]]}, TypeError, r"mask: expected an array \[B,T\] of q's library, got list"),
        ({"mask": MASK[:, 1:]}, ValueError, r"mask: expected \[B,T\] = \(5, 12\), got .*\(5, 11\)"),
        (
            {"mask": MASK, "cu_seqlens": np.array([0, 60])},
            ValueError,
            "mask: .*None with cu_seqlens",
        ),
        (
            {"mask": MASK, "out": np.zeros((5, 12, 2, 3))},
            ValueError,
            "out: expected None with a mask",
        ),
        ({"mask": MASK, "q": [1]}, TypeError, "q: expected an array, got list"),
        ({"mask": MASK, "beta": np.ones((5, 11, 2))}, ValueError, r"beta: expected \[B,T\] = "),
        ({"mask": torch.ones(5, 12)}, TypeError, "mask: .* of q's library, got Tensor"),
    ],
)
def test_what_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        linattn.delta_rule(**a_problem("delta_rule") | given)


def test_one_head_without_a_batch_is_refused():
    x = np.ones((3, 2))
    with pytest.raises(
        ValueError, match=r"q: expected \[B,T,H,K\] with a mask, got shape \(3, 2\)"
    ):
        linattn.linear_attention(x, x, x, mask=np.ones(3))
