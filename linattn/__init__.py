"""linattn: the linear-attention family, with a C core.

Chunked forward passes, recurrent steps and gradients on NumPy arrays, PyTorch tensors and those of
any other library, with no compiler at run time and nothing but NumPy to install. Start with
:func:`gated_delta_rule`, or with :mod:`linattn.reference`, which spells every op out in float64
NumPy.
"""

from linattn import ops
from linattn.arrays import zeros_state
from linattn.config import (
    cuda,
    get_float32_precision,
    get_num_threads,
    set_float32_precision,
    set_num_threads,
    show_config,
)
from linattn.features import FeatureMap
from linattn.ops import *  # noqa: F403 (its __all__ names the ops)
from linattn.variants import VARIANTS, Variant

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
    "FeatureMap",
    "Variant",
    "cuda",
    "get_float32_precision",
    "get_num_threads",
    "set_float32_precision",
    "set_num_threads",
    "show_config",
    "zeros_state",
    *ops.__all__,
]
