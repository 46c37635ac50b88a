"""Systems that are an op with arithmetic around it: each in its own authors' letters.

A system has the three passes of an op: forward, step, backward. It is spelled in the functions of
the caller's own library, so PyTorch records it, and it calls one of the ops of :mod:`linattn`.
What an op says about an argument is told by the name that the system has for it. Arrays have their
axes of batch and heads. A gate may be a number.

Sums are float32, or float64 for float64 inputs, as in the ops. Gates may be float32 beside float16
or bfloat16 arrays; what is made of them stays in float32 until the op has it.
"""

from linattn.composed.gated_delta_product import (
    gated_delta_product,
    gated_delta_product_backward,
    gated_delta_product_step,
)
from linattn.composed.hgrn2 import hgrn2, hgrn2_backward, hgrn2_step
from linattn.composed.mamba3 import (
    Mamba3Gradients,
    Mamba3States,
    mamba3,
    mamba3_backward,
    mamba3_step,
)
from linattn.composed.mlstm import MLSTMGradients, mlstm, mlstm_backward, mlstm_step
from linattn.composed.ssd import SSDGradients, ssd, ssd_backward, ssd_step

__all__ = [
    "MLSTMGradients",
    "Mamba3Gradients",
    "Mamba3States",
    "SSDGradients",
    "gated_delta_product",
    "gated_delta_product_backward",
    "gated_delta_product_step",
    "hgrn2",
    "hgrn2_backward",
    "hgrn2_step",
    "mamba3",
    "mamba3_backward",
    "mamba3_step",
    "mlstm",
    "mlstm_backward",
    "mlstm_step",
    "ssd",
    "ssd_backward",
    "ssd_step",
]
