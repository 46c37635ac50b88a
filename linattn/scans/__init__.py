"""Diagonal scans: recurrences whose decay belongs to a channel and a number of its state at once.

No chunk of such a recurrence is a product of matrices, so they are no ops of the table. They share
one kernel (csrc/diagonal.h), and each has the three passes of an op: forward, step, backward.
"""

from linattn.scans.hgrn import HGRNGradients, hgrn, hgrn_backward, hgrn_step
from linattn.scans.rg_lru import RGLRUGradients, rg_lru, rg_lru_backward, rg_lru_step
from linattn.scans.s4d import S4DGradients, s4d, s4d_backward, s4d_step
from linattn.scans.selective_scan import (
    SelectiveScanGradients,
    selective_scan,
    selective_scan_backward,
    selective_scan_step,
)

__all__ = [
    "HGRNGradients",
    "RGLRUGradients",
    "S4DGradients",
    "SelectiveScanGradients",
    "hgrn",
    "hgrn_backward",
    "hgrn_step",
    "rg_lru",
    "rg_lru_backward",
    "rg_lru_step",
    "s4d",
    "s4d_backward",
    "s4d_step",
    "selective_scan",
    "selective_scan_backward",
    "selective_scan_step",
]
