"""Systems that are an op with arithmetic around it: each in its own authors' letters.

A system has the three passes of an op: forward, step, backward. It is spelled in the functions of
the caller's own library, so PyTorch records it, and it calls one of the ops of :mod:`linattn`.
Messages of an op about an argument have the name that the system gives to it. Arrays have their
axes of batch and heads. A gate may be a number.

Sums are float32, or float64 for float64 inputs, as in the ops. Gates may be float32 beside float16
or bfloat16 arrays; what is made of them stays in float32 until the op has it.
"""

from linattn.composed.comba import (
    comba,
    comba_backward,
    comba_step,
)
from linattn.composed.gated_delta_product import (
    gated_delta_product,
    gated_delta_product_backward,
    gated_delta_product_step,
)
from linattn.composed.gdn2 import (
    GDN2Gradients,
    gdn2,
    gdn2_backward,
    gdn2_step,
)
from linattn.composed.hgrn2 import hgrn2, hgrn2_backward, hgrn2_step
from linattn.composed.iplr_delta_rule import (
    IPLRGradients,
    iplr_delta_rule,
    iplr_delta_rule_backward,
    iplr_delta_rule_step,
)
from linattn.composed.mamba3 import (
    Mamba3Gradients,
    Mamba3States,
    mamba3,
    mamba3_backward,
    mamba3_step,
)
from linattn.composed.mlstm import MLSTMGradients, mlstm, mlstm_backward, mlstm_step
from linattn.composed.precond_gated_delta_rule import (
    PrecondGradients,
    precond_gated_delta_rule,
    precond_gated_delta_rule_backward,
    precond_gated_delta_rule_step,
)
from linattn.composed.rwkv7 import (
    RWKV7Gradients,
    rwkv7,
    rwkv7_backward,
    rwkv7_step,
)
from linattn.composed.ssd import SSDGradients, ssd, ssd_backward, ssd_step

__all__ = [
    "GDN2Gradients",
    "IPLRGradients",
    "MLSTMGradients",
    "Mamba3Gradients",
    "Mamba3States",
    "PrecondGradients",
    "RWKV7Gradients",
    "SSDGradients",
    "comba",
    "comba_backward",
    "comba_step",
    "gated_delta_product",
    "gated_delta_product_backward",
    "gated_delta_product_step",
    "gdn2",
    "gdn2_backward",
    "gdn2_step",
    "hgrn2",
    "hgrn2_backward",
    "hgrn2_step",
    "iplr_delta_rule",
    "iplr_delta_rule_backward",
    "iplr_delta_rule_step",
    "mamba3",
    "mamba3_backward",
    "mamba3_step",
    "mlstm",
    "mlstm_backward",
    "mlstm_step",
    "precond_gated_delta_rule",
    "precond_gated_delta_rule_backward",
    "precond_gated_delta_rule_step",
    "rwkv7",
    "rwkv7_backward",
    "rwkv7_step",
    "ssd",
    "ssd_backward",
    "ssd_step",
]
