"""linattn.replay: the state after the first tokens of each row."""

import numpy as np
import pytest
from support.compare import leaves

import linattn
from linattn.testing import make_inputs
from linattn.variants import BY_TOKEN

OPS = linattn.OPS


def drawn(op, rng, **sizes):
    sizes = {"B": 3, "T": 9, "H": 2, "HV": 4, "K": 5, "V": 6} | sizes
    return make_inputs(op, rng, dtype=np.float64, initial_state=True, **sizes)


def cut(op, x, row, n):
    """Row `row` of a problem alone, and its first n tokens."""
    found = {}
    for name, a in x.items():
        if name == "initial_state":
            parts = tuple(S[row : row + 1] for S in leaves([a]))
            found[name] = parts if isinstance(a, tuple) else parts[0]
        elif a.ndim > 2 and a.shape[:2] == x["q"].shape[:2]:
            found[name] = a[row : row + 1, :n]
        else:
            found[name] = a
    return getattr(linattn, op)(**found, output_final_state=True)[1]


def assert_rows(op, x, counts, state):
    for row, n in enumerate(counts):
        want = leaves([cut(op, x, row, n)])
        for S, one in zip(leaves([state]), want, strict=True):
            np.testing.assert_allclose(S[row : row + 1], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [0, 4, 9, [4, 9, 0], np.array([1, 1, 2])], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_rows(op, n, rng):
    x = drawn(op, rng)
    state = linattn.replay(op, n, **x)
    assert_rows(op, x, np.broadcast_to(n, 3), state)
    if np.ndim(n) == 0 and n == 0:
        for S, given in zip(leaves([state]), leaves([x["initial_state"]]), strict=True):
            np.testing.assert_array_equal(S, given)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences(op, rng):
    x = drawn(op, rng, B=1, T=12, cu_seqlens=np.array([0, 5, 5, 12]))
    counts, starts = [2, 0, 7], [0, 5, 5]
    state = linattn.replay(getattr(linattn, op), counts, **x)
    for i, (at, n) in enumerate(zip(starts, counts, strict=True)):
        alone = {
            name: a[:, at : at + n] if name in BY_TOKEN | {"k", "v"} and np.ndim(a) > 2 else a
            for name, a in x.items()
        }
        del alone["cu_seqlens"]
        first = tuple(S[i : i + 1] for S in leaves([x["initial_state"]]))
        pair = isinstance(x["initial_state"], tuple)
        alone["initial_state"] = first if pair else first[0]
        want = leaves([getattr(linattn, op)(**alone, output_final_state=True)[1]])
        for S, one in zip(leaves([state]), want, strict=True):
            np.testing.assert_allclose(S[i : i + 1], one, rtol=1e-12, atol=1e-12)


def test_one_head_and_positional_gates(rng):
    q, k, v = rng.standard_normal((3, 7, 4))
    beta = rng.uniform(0, 1, 7)
    want = linattn.delta_rule(q[:3], k[:3], v[:3], beta[:3], output_final_state=True)[1]
    np.testing.assert_array_equal(linattn.replay("delta_rule", 3, q, k, v, beta), want)
    cu = np.array([0, 3, 7])
    packed = linattn.replay("delta_rule", [3, 1], q, k, v, beta, cu_seqlens=cu)
    np.testing.assert_allclose(packed[0], want, rtol=1e-12)
    numbers = linattn.replay("delta_rule", [2], q, k, v, 0.5, state_v_first=True)
    np.testing.assert_allclose(numbers.T, linattn.replay("delta_rule", 2, q, k, v, 0.5))


def test_a_gate_given_twice_is_refused(rng):
    q = rng.standard_normal((3, 4))
    with pytest.raises(TypeError, match="multiple values for argument 'beta'"):
        linattn.replay("delta_rule", 2, q, q, q, 0.5, beta=0.7)
    with pytest.raises(TypeError, match="too many positional arguments"):
        linattn.replay("delta_rule", 2, q, q, q, 0.5, 0.7)


def test_tensors_are_recorded(rng):
    torch = pytest.importorskip("torch")
    x = {name: torch.from_numpy(a).requires_grad_() for name, a in drawn("kda", rng).items()}
    n = torch.tensor([2, 9, 0])
    state = linattn.replay("kda", n, **x)
    assert torch.autograd.grad(state.sum(), x["k"])[0][0, 2:].abs().max() == 0
    plain = {name: a.detach().numpy() for name, a in x.items()}
    np.testing.assert_array_equal(state.detach().numpy(), linattn.replay("kda", [2, 9, 0], **plain))


@pytest.mark.parametrize(
    "bad, error, text",
    [
        ({"n": 10}, ValueError, "n: expected 0 to 9 tokens of row 0, got 10"),
        ({"n": [1, -1, 1]}, ValueError, "n: expected 0 to 9 tokens of row 1, got -1"),
        ({"n": [1, 1]}, ValueError, r"n: expected an int or \[N\] = \[3\] ints, got 2"),
        ({"n": 1.5}, TypeError, "n: expected an int, got float"),
        ({"n": True}, TypeError, "n: expected an int, got bool"),
        ({"out": 1}, ValueError, "out: expected no out="),
        ({"output_final_state": True}, ValueError, "output_final_state: expected no"),
        ({"op": "softmax"}, ValueError, "op: expected one of"),
        ({"q": 3}, ValueError, "q: expected an array"),
        ({"q": np.ones((2, 3, 4))}, ValueError, "q: expected an array"),
        ({"k": np.ones((3, 9, 2, 4))}, ValueError, "k: expected"),
        ({"op": "linear_attention", "causal": False}, ValueError, "causal: expected True"),
    ],
)
def test_bad_arguments(bad, error, text, rng):
    x = drawn("linear_attention", rng) | {"op": "linear_attention", "n": 1}
    with pytest.raises(error, match=text):
        linattn.replay(**x | bad)
