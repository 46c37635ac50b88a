"""Calls of linattn.jax, and how their results are compared. Where JAX is not installed, a test file
that imports this module is skipped as a whole."""

import numpy as np

import linattn
from linattn import testing
from linattn.variants import OPS
from support.compare import assert_same_bits
from support.device import imported
from support.variants import KEY_DECAY

jax = imported("jax")
jax.config.update("jax_num_cpu_devices", 4)  # one processor, as four devices

import jax.numpy as jnp  # noqa: E402

import linattn.jax  # noqa: E402

SIZES = {"B": 2, "T": 7, "H": 2, "HV": 4, "K": 4, "V": 3}
PER_HEAD = ("gamma", "slopes", "bonus")
LAST = KEY_DECAY[-1]
SYSTEMS = linattn.jax.SYSTEMS
# The functions that are of no op; those of them that are neither steps nor systems.
BESIDE = [name for name in linattn.jax.__all__ if name.removesuffix("_step") not in OPS]
ROOMS = [name for name in BESIDE if name.removesuffix("_step") not in SYSTEMS]
ROOMS = [name for name in ROOMS if not name.endswith("_step")]


def problem(op, *, seed=0, dtype=np.float32, state=True, **sizes):
    rng = np.random.default_rng(seed)
    return testing.make_inputs(op, rng, **SIZES | sizes, dtype=dtype, initial_state=state)


def of_jax(x):
    """NumPy's arrays as JAX's, at any depth; numbers stay."""
    return jax.tree.map(lambda y: jnp.asarray(y) if isinstance(y, np.ndarray) else y, x)


def whole(op, **options):
    """A forward pass with its final state, as a function of a dict of arrays."""
    return lambda x: getattr(linattn.jax, op)(**x, output_final_state=True, **options)


def loss(op, **options):
    """A number that depends on all that a forward pass makes."""
    call = whole(op, **options)
    return lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(call(x)))


def assert_same(found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


def assert_near(found, wanted):
    """Of sums whose order differs: up to 16 roundings of the largest number."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(z) + np.float64(0) for z in (x, y))
        assert x.shape == y.shape and np.abs(x - y).max() <= 16 * 2**-24 * np.abs(y).max()


def stacked(many):
    return jax.tree.map(lambda *x: jnp.stack(x), *many)
