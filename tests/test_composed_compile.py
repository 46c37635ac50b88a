"""torch.compile of the systems: one graph each, with the bits of the plain call."""

import pytest
from support.device import imported

import linattn


@pytest.fixture
def torch():
    torch = imported("torch")
    torch._dynamo.reset()
    yield torch
    torch._dynamo.reset()


def calls(torch):
    """Functions of one tensor x [1,20,4,6], all options among them."""
    torch.manual_seed(0)
    gate, half, A = torch.randn(1, 20, 4), torch.rand(1, 20, 4), -torch.rand(4)
    B, C = torch.randn(2, 1, 20, 2, 6)
    two = torch.randn(1, 40, 4, 6) / 3
    angles = torch.randn(1, 20, 4, 3)
    how = {"dt_bias": A, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
    return {
        "ssd": lambda x: linattn.ssd(x, half, A, B, C, D=A, z=x, **how)[0],
        "mamba3": lambda x: linattn.mamba3(x, half, A, B, C, half, angles, D=A, z=x)[0],
        "hgrn2": lambda x: linattn.hgrn2(x, -x * x, x)[0],
        "mlstm": lambda x: linattn.mlstm(x, x, x, gate, gate)[0],
        "gated_delta_product": lambda x: linattn.gated_delta_product(
            x, two, two, -half, 0.5, num_householder=2
        )[0],
    }


@pytest.mark.filterwarnings("default")  # PyTorch's own, while it traces
@pytest.mark.parametrize("system", ["ssd", "mamba3", "hgrn2", "mlstm", "gated_delta_product"])
def test_one_graph(system, torch):
    function = calls(torch)[system]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 20, 4, 6, requires_grad=True)
    results = []
    for call in (compiled, function):
        y = call(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, dx))
    for one, expected in zip(*results, strict=True):
        assert torch.equal(one, expected)


@pytest.mark.filterwarnings("default")
def test_a_graph_of_any_sizes(torch):
    """torch.export keeps the sequences and tokens of a system as symbols."""

    class System(torch.nn.Module):
        def forward(self, q, k, v):
            how = {"num_householder": 2, "qk_l2norm": True}
            return linattn.gated_delta_product(q, k, v, None, 0.5, **how)[0]

    def inputs(B, T):
        return torch.randn(B, T, 2, 4), *torch.randn(2, B, 2 * T, 2, 4)

    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    sizes = ({0: batch, 1: tokens}, *[{0: batch, 1: 2 * tokens}] * 2)
    program = torch.export.export(System(), inputs(2, 5), dynamic_shapes=sizes).module()
    for B, T in ((2, 5), (3, 9)):
        x = inputs(B, T)
        assert torch.equal(program(*x), System()(*x))
