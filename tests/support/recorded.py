"""Calls of the ops on PyTorch's tensors, and their gradients by two ways: by PyTorch, and by the
backward pass."""

import importlib

import numpy as np

import linattn
from linattn.testing import make_inputs
from support.tensors import tensors_in, to_tensor, torch

importlib.import_module("linattn.autograd")  # registers the operators, where PyTorch is

SIZES = {"B": 2, "T": 5, "H": 1, "HV": 2, "K": 3, "V": 4}


def tensors(x, *, grad=False):
    """NumPy's arrays as tensors, at any depth of dicts, tuples and lists."""
    if isinstance(x, dict):
        return {name: tensors(one, grad=grad) for name, one in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(tensors(one, grad=grad) for one in x)
    if not isinstance(x, np.ndarray):
        return x
    y = to_tensor(x.copy())
    return y.requires_grad_() if grad and y.is_floating_point() else y


def refilled(x, new):
    """x with its tensors replaced, one after the other."""
    if isinstance(x, torch.Tensor):
        return next(new)
    if isinstance(x, dict):
        return {name: refilled(one, new) for name, one in x.items()}
    return type(x)(refilled(one, new) for one in x) if isinstance(x, tuple | list) else x


def inputs(op, rng, *, grad=False, dtype=np.float64, state=True, **changed):
    made = make_inputs(op, rng, **SIZES | changed, dtype=dtype, initial_state=state)
    return tensors(made, grad=grad)


def pure(op, x, **options):
    """A function from the op's tensors alone to a tuple of tensors, and the tensors to call it
    with."""

    def call(*given):
        return tuple(tensors_in(getattr(linattn, op)(**refilled(x, iter(given)), **options)))

    return call, tensors_in(x)


def gradients(op, x, **options):
    """PyTorch's gradients of a weighted sum of all outputs."""
    call, given = pure(op, x, **options)
    outputs = call(*given)
    return torch.autograd.grad(outputs, given, [weights(o) for o in outputs])


def weights(x):
    return torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape).to(x)


def by_the_backward_pass(op, x, do, d_state, **options):
    """The backward pass's gradients of every tensor in x, in the same order."""
    x = refilled(x, iter([one.detach() for one in tensors_in(x)]))
    grads = getattr(linattn, op + "_backward")(do, **x, d_final_state=d_state, **options)
    field = {"alpha": "dg", "gamma": "dg", "slopes": "dg", "initial_state": "d_initial_state"}
    return tensors_in(
        [getattr(grads, field.get(name, "d" + name)) for name in x if tensors_in(x[name])]
    )


def assert_equal(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.detach(), y.detach())


# Ways to call an op, the plain one first.
SETTINGS = {
    "plain": {},
    "no state": {"state": False},
    "v first": {"state_v_first": True, "V": 3},
    "l2norm": {"qk_l2norm": True, "mode": "recurrent", "scale": 0.7},
    "chunks of 2": {"chunk_size": 2},
}


def setting(op, rng, name, **more):
    """A call's tensors, and its options."""
    sizes = {k: v for k, v in SETTINGS[name].items() if k in ("V", "state")}
    options = {k: v for k, v in SETTINGS[name].items() if k not in sizes}
    return inputs(op, rng, **sizes, **more), options
