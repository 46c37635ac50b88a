"""linattn.gates on a GPU: what PyTorch records, graphs, streams, and sizes of a real layer.
`--device cuda` runs tests/test_gates.py there too."""

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.gpu import DTYPES, dtypes, needs_gpu
from support.tensors import to_numpy, torch

from linattn import gates
from linattn.testing import assert_accurate

pytestmark = needs_gpu

FACTORS = {"softplus": -1.0, "bounded": -5.0, "rwkv7": gates._RWKV7, "beta": 1.0}
every = pytest.mark.parametrize("name", FACTORS)
# x, A_log, dt_bias: KDA, Gated DeltaNet, and rows that are no multiple of four numbers
SHAPES = [
    ((2, 1000, 32, 128), (32, 1), (32, 128)),
    ((2, 4096, 32), (32,), (32,)),
    ((1, 777, 31, 33), (31, 1), (31, 33)),
    ((40, 10_003), (40, 1), None),
]


def drawn(name, dtype, shapes, seed=0):
    """x, A_log and dt_bias, as far as the gate has them."""
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=random, device="cuda")

    arrays = [3 * normal(shapes[0]), normal(shapes[1]) / 2]
    arrays += [] if shapes[2] is None else [normal(shapes[2])]
    arrays = [arrays[0].to(DTYPES[dtype]), *arrays[1:]]
    return arrays if name in ("softplus", "bounded") else arrays[:1]


def by_formula(name, arrays):
    x, A_log, dt = (*arrays, None, None)[:3]
    return gates.by_formula(name, FACTORS[name], x, A_log, dt)


def recorded(function, arrays, d):
    """The gate and its gradients, by way of autograd."""
    arrays = [x.clone().requires_grad_() for x in arrays]
    g = function(*arrays)
    return [g.detach(), *torch.autograd.grad(g, arrays, d)]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@dtypes
@every
def test_what_pytorch_records(name, dtype, shapes):
    """By the acceptance rule, where naive are PyTorch's own functions; and the same bits twice."""
    arrays = drawn(name, dtype, shapes)
    d = torch.randn(shapes[0], device="cuda")
    got = recorded(getattr(gates, name), arrays, d)
    assert got[0].dtype == torch.float32
    assert_same_bits(recorded(getattr(gates, name), arrays, d), got, name)
    naive = recorded(lambda *a: by_formula(name, a), arrays, d)
    want = recorded(lambda *a: by_formula(name, a), [x.double() for x in arrays], d.double())
    for i, found in enumerate(zip(got, want, naive, strict=True)):
        a, exact, plain = map(to_numpy, found)
        assert_accurate(a, exact, plain, dtype=a.dtype, gradient=i > 0, name=f"{name} {i}")


@dtypes
@every
def test_a_graph_of_a_gate(name, dtype):
    arrays = drawn(name, dtype, SHAPES[1])
    d, function = torch.ones(SHAPES[1][0], device="cuda"), getattr(gates, name)
    backward = getattr(gates, f"{name}_backward")
    function(*arrays), backward(d, *arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [function(*arrays), *(a for a in backward(d, *arrays) if a is not None)]
    for seed in (1, 2):
        for old, new in zip(arrays, drawn(name, dtype, SHAPES[1], seed), strict=True):
            old.copy_(new)
        for a in made:
            a.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        want = [function(*arrays), *(a for a in backward(d, *arrays) if a is not None)]
        assert_same_bits(made, want)


@every
def test_a_stream_of_its_own(name):
    arrays, stream = drawn(name, "bfloat16", SHAPES[0]), torch.cuda.Stream()
    want = getattr(gates, name)(*arrays)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [x * 1 for x in arrays]  # on this stream
        got = getattr(gates, name)(*late)
    stream.synchronize()
    assert_same_bits(got, want)


@every
def test_traced_with_gradients(name):
    arrays = drawn(name, "bfloat16", SHAPES[2])
    d, function = torch.randn(SHAPES[2][0], device="cuda"), getattr(gates, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(recorded(compiled, arrays, d), recorded(function, arrays, d))


def test_arrays_on_two_devices_are_refused():
    x, A_log = drawn("softplus", "float32", SHAPES[1])[:2]
    with pytest.raises(ValueError, match=r"^A_log: expected an array on cuda:0 like x, got one on"):
        gates.softplus(x, A_log.cpu())
    with pytest.raises(TypeError, match=r"^A_log: expected an array of x's library, got ndarray$"):
        gates.softplus(x, A_log.cpu().numpy().astype(np.float32))
