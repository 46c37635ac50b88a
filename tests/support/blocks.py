"""The layers of linattn.nn, small ones, and how their results are compared. PyTorch's current
generator makes them."""

import pytest

from support.device import imported

torch = imported("torch")
nn = pytest.importorskip("linattn.nn", reason="PyTorch is not installed")

D = 24


def stirred(layer):
    """Away from the zeros at which a layer begins."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


BLOCKS = {
    "Retention": lambda: nn.Retention(D, num_heads=2, expand_k=1, expand_v=1),
    "GatedLinearAttention": lambda: nn.GatedLinearAttention(D, num_heads=3, gate_low_rank_dim=5),
    "DeltaNet": lambda: nn.DeltaNet(D, num_heads=2),
    "GatedDeltaNet": lambda: nn.GatedDeltaNet(D, num_heads=2, head_dim=6, num_v_heads=4),
    "GatedDeltaProduct": lambda: nn.GatedDeltaProduct(
        D, num_householder=3, num_heads=2, head_dim=6, num_v_heads=4
    ),
    "KimiDeltaAttention": lambda: nn.KimiDeltaAttention(D, num_heads=2, head_dim=6),
    "Mamba": lambda: nn.Mamba(D, d_state=5),
    "Mamba2": lambda: nn.Mamba2(D, d_state=5, headdim=8, ngroups=2),
    "S4D": lambda: nn.S4D(D, d_state=10),
    "RGLRU": lambda: nn.RGLRU(D, lru_width=32, num_heads=4),
    "Comba": lambda: nn.Comba(D, num_heads=2, head_dim=6, num_v_heads=4),
    "RWKV6": lambda: stirred(nn.RWKV6(D, num_heads=2, proj_low_rank_dim=3, gate_low_rank_dim=4)),
    "RWKV7": lambda: stirred(nn.RWKV7(D, head_dim=6)),
    "Titans": lambda: nn.Titans(D, num_heads=2, head_dim=6, num_v_heads=4),
    "Titans in batches": lambda: nn.Titans(D, num_heads=2, head_dim=6, num_v_heads=4, batch=4),
}


def agree(got, want):
    """float64 results of two ways through a layer."""
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
