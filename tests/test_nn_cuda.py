"""linattn.nn on a GPU: each block beside itself in float64, at widths of tensor cores."""

import copy

import pytest
from support.gpu import needs_gpu
from support.tensors import torch

from linattn import nn
from linattn.testing import RMS_BOUND

pytestmark = needs_gpu

WIDE = {
    "Mamba2": {},
    "RWKV7": {"head_dim": 64},
    "Titans in batches": {"batch": 4},
}
BLOCKS = sorted({*nn.__all__, *WIDE} - {"LinearAttention", "State"})
DTYPES = (torch.float32, torch.bfloat16)


def block(name, seed):
    """Away from the zeros at which some layers begin."""
    torch.manual_seed(seed)
    heads = {} if name in ("Mamba", "Mamba2", "RWKV7", "S4D") else {"num_heads": 2}
    made = getattr(nn, name.split()[0])(128, **heads, **WIDE.get(name, {}))
    with torch.no_grad():
        for parameter in made.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1)
    return made


def results(made, x, dy):
    """By name: the output, the gradients of x and of the parameters, and steps from a prompt."""
    x = x.clone().requires_grad_()
    y = made(x)[0]
    y.backward(dy)
    found = {"y": y, "dx": x.grad} | {n: p.grad for n, p in made.named_parameters()}
    with torch.no_grad():
        _, state = made(x[:, :101])
        found["steps"] = torch.stack([made.step(x[:, t], state) for t in range(101, 120)], 1)
    return {n: a.detach().cpu().double() for n, a in found.items() if a is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_gpu_computes_what_a_cpu_does(name, dtype):
    """The yardstick is the block in float64 on the CPU, and its twin the block in the dtype on the
    CPU. A GPU may have four times the twin's rms error, and half a unit in the last place more.
    Some gradients have two numbers, whose error is an accident in one draw: three are pooled."""
    squares = {}  # of the error, of the twin's error and of the yardstick, by name
    for seed in range(3):
        here = block(name, seed).to(dtype)
        x, dy = (torch.randn(2, 150, 128).to(dtype) for _ in range(2))
        exact = results(copy.deepcopy(here).double(), x.double(), dy.double())
        twin = results(copy.deepcopy(here), x, dy)
        found = results(here.to("cuda"), x.cuda(), dy.cuda())
        assert found.keys() == twin.keys() == exact.keys()
        for which, a in exact.items():
            apart = (found[which] - a, twin[which] - a, a)
            parts = torch.stack([x.square().sum() for x in apart])
            squares[which] = squares.get(which, 0) + parts
    for which, parts in squares.items():
        error, allowed, size = parts.sqrt()
        bound = 4 * allowed + torch.finfo(dtype).eps / 2 * size
        assert error <= bound, f"{name}, {which}: {error / size:.1e} > {bound / size:.1e}"


@pytest.mark.filterwarnings("default")  # PyTorch's own, while it traces
@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention", "Mamba", "Mamba2"])
@torch.compiler.config.patch(force_disable_caches=True)
def test_a_compiled_step_is_a_cuda_graph(name):
    """A cached graph would say what held when it was made."""
    torch.compiler.reset()
    counted = torch._dynamo.utils.counters["inductor"]
    layer = block(name, 0).to("cuda", torch.bfloat16)
    plain, static = layer.zeros_state(2), layer.zeros_state(2).mark_static()
    step = torch.compile(layer.step, fullgraph=True, mode="reduce-overhead")
    skipped = counted["cudagraph_skips"]
    for token in torch.randn(6, 2, 128, device="cuda").bfloat16():
        torch.compiler.cudagraph_mark_step_begin()
        got, want = step(token, static), layer.step(token, plain)
        assert float((got - want).norm() / want.norm()) < 2 * RMS_BOUND["bfloat16"]
    assert counted["cudagraph_skips"] == skipped
    torch.testing.assert_close(static.memory, plain.memory, rtol=1e-2, atol=1e-2)
