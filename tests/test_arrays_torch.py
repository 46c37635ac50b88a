"""PyTorch's tensors give NumPy's bits and come back as tensors; a tensor that the ops cannot take
is refused by name. Gradients: test_autograd.py."""

import collections
import gc
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.dlpack import Exporter
from support.problems import OPS, PASSES, arguments, call, function
from support.tensors import to_numpy, to_tensor, torch

import linattn
from linattn import _linattn

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("op", OPS)
def test_torch_gives_numpys_bits(op, pass_, dtype):
    made = arguments(op, pass_, dtype=dtype)
    theirs = over_arrays(to_tensor, over_arrays(np.copy, made))
    want, got = call(op, pass_, made), call(op, pass_, theirs)
    for x, y in zip(leaves(want), leaves(got), strict=True):
        assert type(y) is torch.Tensor and y.is_contiguous()
        assert_same_bits(to_numpy(y), x)
    for name in made:
        for x, y in zip(leaves(made[name]), leaves(theirs[name]), strict=True):
            if isinstance(x, np.ndarray):
                assert_same_bits(to_numpy(y), x)


def test_torch_out_strides_and_kinds_mixed():
    made = arguments("kda", "forward")
    want = linattn.kda(**made)[0]
    q = torch.from_numpy(np.stack([made["q"]] * 2, -1))[..., 0]
    out = torch.full(made["v"].shape, torch.nan)
    o, state = linattn.kda(**made | {"q": q}, out=out, output_final_state=True)
    assert o is out and type(state) is torch.Tensor
    assert_same_bits(out.numpy(), want)
    o, _ = linattn.kda(**made | {"k": torch.from_numpy(made["k"]), "g": Exporter(made["g"])})
    assert type(o) is np.ndarray
    assert_same_bits(o, want)
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got .* with v"):
        linattn.kda(**made | {"q": q, "out": torch.from_numpy(made["v"])})


def test_torch_steps_change_the_state_in_place():
    made = arguments("gated_delta_rule", "step")
    theirs = over_arrays(torch.from_numpy, over_arrays(np.copy, made))
    for _ in range(3):
        want, got = (linattn.gated_delta_rule_step(**x) for x in (made, theirs))
        assert_same_bits(got.numpy(), want)
    assert_same_bits(theirs["state"].numpy(), made["state"])
    bad = theirs | {"q": torch.stack([theirs["q"]] * 2, -1)[..., 0]}
    with pytest.raises(ValueError, match="q: expected an aligned array in native"):
        linattn.gated_delta_rule_step(**bad)


def test_torch_numbers_for_gates():
    q, v = torch.ones(8), torch.ones(6)
    state = torch.zeros(8, 6)
    o = linattn.gated_delta_rule_step(q, q, v, -0.5, 0.25, state=state)
    S = np.zeros((8, 6), np.float32)
    want = linattn.gated_delta_rule_step(q.numpy(), q.numpy(), v.numpy(), -0.5, 0.25, state=S)
    assert_same_bits(o.numpy(), want)
    assert_same_bits(state.numpy(), S)


def test_torch_gradients_that_nobody_records_are_refused():
    """test_autograd.py has the calls that are recorded."""
    why = {
        "forward": "recorded only if q is a tensor of PyTorch's and there is no out",
        "step": "not recorded of a step, which changes its state in place",
        "backward": "not recorded of gradients",
    }
    for pass_ in PASSES:
        made = over_arrays(torch.from_numpy, arguments("gla", pass_))
        if pass_ == "forward":
            made["out"] = torch.empty_like(made["v"])
        for name in ("q", "k", "g", "state" if pass_ == "step" else "initial_state"):
            leaf = made[name].clone().requires_grad_()
            for x in (leaf, leaf * 1.0, torch.nn.Parameter(made[name].clone())):
                with pytest.raises(ValueError) as error:
                    function("gla", pass_)(**made | {name: x})
                assert str(error.value) == (
                    f"{name}: requires gradients, which are {why[pass_]}; pass {name}.detach(), or "
                    "call it under torch.no_grad()"
                )
                with torch.no_grad():
                    function("gla", pass_)(**made | {name: x})
                function("gla", pass_)(**made | {name: x.detach()})
    numpys = arguments("gla", "forward")
    with pytest.raises(ValueError, match=r"^k: requires gradients, which are recorded only if q"):
        linattn.gla(**numpys | {"k": torch.from_numpy(numpys["k"]).requires_grad_()})


def test_the_core_alone_refuses_what_pytorch_records():
    """Unless its caller says that it has asked each array."""
    made = over_arrays(torch.from_numpy, arguments("gla", "forward"))
    for name in ("q", "k", "v", "g", "initial_state"):
        leaf = made[name].clone().requires_grad_()
        for words in ({}, {"unrecorded": False}):
            with pytest.raises(ValueError, match=f"^{name}: requires gradients"):
                _linattn.forward("gla", **made | {name: leaf}, **words)
        _linattn.forward("gla", **made | {name: leaf}, unrecorded=True)
    with pytest.raises(TypeError, match="unrecorded: expected True or False, got "):
        _linattn.forward("gla", **made, unrecorded=1)


def test_torch_tensors_that_are_not_their_memory():
    made = over_arrays(torch.from_numpy, arguments("gla", "forward"))
    negative = torch.complex(made["k"], -made["k"]).conj().imag
    assert negative.is_neg()
    with pytest.raises(TypeError, match=r"k: .* pass k.resolve_neg\(\)"):
        linattn.gla(**made | {"k": negative})
    o = linattn.gla(**made | {"k": negative.resolve_neg()})[0]
    assert torch.equal(o, linattn.gla(**made)[0])
    for bad, error in (
        (torch.complex(made["k"], made["k"]), TypeError),
        (made["k"].to_sparse(), (TypeError, ValueError, RuntimeError)),
        (made["k"].to(torch.int8), TypeError),
        (made["k"].to("meta"), (TypeError, ValueError, RuntimeError)),
    ):
        with pytest.raises(error, match=r"^k: "):
            linattn.gla(**made | {"k": bad})


def test_torch_tensors_without_memory():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    made = over_arrays(torch.from_numpy, arguments("gla", "forward"))
    with pytest.raises(TypeError, match="__torch_dispatch__"):  # it is asked, and has no answer
        linattn.gla(**made | {"k": Wrapper(made["k"])})
    with pytest.raises((TypeError, RuntimeError), match=r"^k: "):
        linattn.gla(**made | {"k": Wrapper(made["k"]), "out": torch.empty_like(made["v"])})
    empty = over_arrays(torch.from_numpy, arguments("gla", "forward", B=0))
    assert linattn.gla(**empty)[0].shape == (0, 5, 4, 6)


def test_torch_subclasses():
    class Named(torch.Tensor):
        pass

    made = arguments("gla", "forward")
    theirs = over_arrays(lambda x: torch.from_numpy(x).as_subclass(Named), made)
    assert_same_bits(linattn.gla(**theirs)[0].numpy(), linattn.gla(**made)[0])


def test_torch_gradients_show_dtypes_and_shapes():
    x = torch.ones(1, 3, 1, 2, dtype=torch.bfloat16)
    shown = repr(linattn.retention_backward(x, x, x, x, gamma=torch.ones(1)))
    assert "dq=bfloat16[1,3,1,2]" in shown and "dg=float32[1]" in shown


def test_torch_leaks_nothing():
    made = {pass_: over_arrays(torch.from_numpy, arguments("gla", pass_)) for pass_ in PASSES}
    everything = list(leaves([list(x.values()) for x in made.values()]))
    before = [sys.getrefcount(x) for x in everything]
    counts = []
    for _ in range(5):
        for _ in range(50):
            for pass_ in PASSES:
                call("gla", pass_, made[pass_])
            with pytest.raises(ValueError):
                linattn.gla(**made["forward"] | {"out": made["forward"]["v"]})
            with pytest.raises(TypeError):
                linattn.gla(**made["forward"] | {"k": made["forward"]["k"].int()})
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert min(np.diff(counts)) < 25, counts  # a leak shows in every batch of 50, a cache at first
    assert [sys.getrefcount(x) for x in everything] == before


def test_torch_feature_maps_get_tensors():
    seen = collections.Counter()

    def phi(x):
        seen[type(x)] += 1
        return torch.cat([x.relu(), (-x).relu()], -1) + 0.1

    def phi_numpy(x):
        return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], -1) + x.dtype.type(0.1)

    made = arguments("linear_attention", "forward")
    made.pop("initial_state")
    for norm in (False, True):
        want, _ = linattn.linear_attention(**made | {"feature_map": phi_numpy, "qk_l2norm": norm})
        theirs = over_arrays(torch.from_numpy, made) | {"feature_map": phi, "qk_l2norm": norm}
        got, _ = linattn.linear_attention(**theirs)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    assert set(seen) == {torch.Tensor}
    made = arguments("linear_attention", "forward", HV=2, V=8)
    theirs = over_arrays(torch.from_numpy, made)
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got .* with q"):
        linattn.linear_attention(**theirs, feature_map=torch.exp, out=theirs["q"])


def test_torch_nested_tensors_are_named():
    """They have no shape, and say so with an error of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they may change
        x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    with pytest.raises(TypeError, match=r"^q: expected an array, got "):
        linattn.linear_attention(x, x, x, feature_map=torch.exp)


def test_torch_default_gamma():
    made = arguments("retention", "forward")
    del made["gamma"]
    got, _ = linattn.retention(**over_arrays(torch.from_numpy, made))
    assert_same_bits(got.numpy(), linattn.retention(**made)[0])
