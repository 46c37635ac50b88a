"""Layers for PyTorch: the field's blocks around linattn's ops. Imported by name, never by linattn.

Every block maps x [B,T,D] to y [B,T,D], D = d_model, and carries a :class:`State`::

    layer = GatedDeltaNet(512, num_heads=4, head_dim=64)
    y, state = layer(x)              # a prompt, trained on or read
    y_t = layer.step(x_t, state)     # one token more, x_t [B,D]; the state changes in place

``layer(x, state)`` goes on from a state and leaves it alone; ``cu_seqlens`` packs N sequences into
one row, as in the ops. Parameters have the names of flash-linear-attention's layers (0.6.0), and
those of :class:`Mamba` and :class:`Mamba2` the names of mamba_ssm's, those of :class:`S4D` and
:class:`RGLRU` the names of their authors' code, so that their state dicts load. Those of
:class:`Titans` are our own.

:class:`LinearAttention` is the plain layer: three matrices and the op. It maps x [B,T,d_model] to y
[B,T,d_v], and returns a state only if it is asked for one.
"""

# so that a counter or a loader that comes first knows the operators
from linattn import _recorded_rooms, autograd  # noqa: F401
from linattn.nn._additive import GatedLinearAttention, Retention
from linattn.nn._blocks import State
from linattn.nn._delta import (
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    KimiDeltaAttention,
)
from linattn.nn._linear_attention import LinearAttention
from linattn.nn._mamba2 import Mamba2
from linattn.nn._rwkv import RWKV6, RWKV7
from linattn.nn._scans import RGLRU, S4D, Mamba
from linattn.nn._titans import Titans

__all__ = [
    "RGLRU",
    "RWKV6",
    "RWKV7",
    "S4D",
    "Comba",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Retention",
    "State",
    "Titans",
]
