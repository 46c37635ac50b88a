"""linattn: the linear-attention family, with a C core.

Chunked forward passes, recurrent steps and gradients on NumPy arrays, PyTorch tensors and those of
any other library, with no compiler at run time and nothing but NumPy to install. Start with
:func:`gated_delta_rule`, or with :mod:`linattn.reference`, which spells every op out in float64
NumPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

from linattn._linattn import BoundStep
from linattn.analysis import implicit_weights, lightning_slopes
from linattn.arrays import zeros_state
from linattn.config import (
    cuda,
    get_float32_precision,
    get_num_threads,
    set_float32_precision,
    set_num_threads,
    show_config,
)
from linattn.cost import Memory, flops, memory
from linattn.drafts import replay
from linattn.features import FeatureMap, apply_feature_map
from linattn.kernels import KernelReport, explain_kernel
from linattn.maps import RandomFeatureMap, dpfp, favor
from linattn.ops._bind import bind
from linattn.ops._core import Gradients, LayoutHint
from linattn.ops.attend import attend
from linattn.ops.delta_rule import delta_rule, delta_rule_backward, delta_rule_step
from linattn.ops.dplr_delta_rule import (
    dplr_delta_rule,
    dplr_delta_rule_backward,
    dplr_delta_rule_step,
)
from linattn.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_step,
)
from linattn.ops.gla import gla, gla_backward, gla_step
from linattn.ops.kda import kda, kda_backward, kda_step
from linattn.ops.lightning_attention import (
    lightning_attention,
    lightning_attention_backward,
    lightning_attention_step,
)
from linattn.ops.linear_attention import (
    linear_attention,
    linear_attention_backward,
    linear_attention_step,
)
from linattn.ops.retention import retention, retention_backward, retention_step
from linattn.ops.rwkv6 import rwkv6, rwkv6_backward, rwkv6_step
from linattn.ops.simple_gla import simple_gla, simple_gla_backward, simple_gla_step
from linattn.ops.titans import titans, titans_backward, titans_step
from linattn.prompts import prefill
from linattn.trace import Explanation, States, explain, states
from linattn.variants import OPS, VARIANTS, Variant

if TYPE_CHECKING:
    from linattn import distributed as distributed
    from linattn import gates as gates
    from linattn import nn as nn
    from linattn import plot as plot
    from linattn import reference as reference
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
    from linattn.composed.hgrn2 import (
        hgrn2,
        hgrn2_backward,
        hgrn2_step,
    )
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
    from linattn.composed.mlstm import (
        MLSTMGradients,
        mlstm,
        mlstm_backward,
        mlstm_step,
    )
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
    from linattn.composed.ssd import (
        SSDGradients,
        ssd,
        ssd_backward,
        ssd_step,
    )
    from linattn.convolution import (
        ConvolutionGradients,
        causal_conv1d,
        causal_conv1d_backward,
        causal_conv1d_step,
    )
    from linattn.layers import layer_step
    from linattn.scans.hgrn import HGRNGradients, hgrn, hgrn_backward, hgrn_step
    from linattn.scans.rg_lru import RGLRUGradients, rg_lru, rg_lru_backward, rg_lru_step
    from linattn.scans.s4d import S4DGradients, s4d, s4d_backward, s4d_step
    from linattn.scans.selective_scan import (
        SelectiveScanGradients,
        selective_scan,
        selective_scan_backward,
        selective_scan_step,
    )
    from linattn.segments import SegmentMap, segment_map, segment_map_backward

__version__ = "0.1.0"

__all__ = [
    "OPS",
    "VARIANTS",
    "BoundStep",
    "ConvolutionGradients",
    "Explanation",
    "FeatureMap",
    "GDN2Gradients",
    "Gradients",
    "HGRNGradients",
    "IPLRGradients",
    "KernelReport",
    "LayoutHint",
    "MLSTMGradients",
    "Mamba3Gradients",
    "Mamba3States",
    "Memory",
    "PrecondGradients",
    "RGLRUGradients",
    "RWKV7Gradients",
    "RandomFeatureMap",
    "S4DGradients",
    "SSDGradients",
    "SegmentMap",
    "SelectiveScanGradients",
    "States",
    "Variant",
    "apply_feature_map",
    "attend",
    "bind",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_step",
    "comba",
    "comba_backward",
    "comba_step",
    "cuda",
    "delta_rule",
    "delta_rule_backward",
    "delta_rule_step",
    "dpfp",
    "dplr_delta_rule",
    "dplr_delta_rule_backward",
    "dplr_delta_rule_step",
    "explain",
    "explain_kernel",
    "favor",
    "flops",
    "gated_delta_product",
    "gated_delta_product_backward",
    "gated_delta_product_step",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_delta_rule_step",
    "gdn2",
    "gdn2_backward",
    "gdn2_step",
    "get_float32_precision",
    "get_num_threads",
    "gla",
    "gla_backward",
    "gla_step",
    "hgrn",
    "hgrn2",
    "hgrn2_backward",
    "hgrn2_step",
    "hgrn_backward",
    "hgrn_step",
    "implicit_weights",
    "iplr_delta_rule",
    "iplr_delta_rule_backward",
    "iplr_delta_rule_step",
    "kda",
    "kda_backward",
    "kda_step",
    "layer_step",
    "lightning_attention",
    "lightning_attention_backward",
    "lightning_attention_step",
    "lightning_slopes",
    "linear_attention",
    "linear_attention_backward",
    "linear_attention_step",
    "mamba3",
    "mamba3_backward",
    "mamba3_step",
    "memory",
    "mlstm",
    "mlstm_backward",
    "mlstm_step",
    "precond_gated_delta_rule",
    "precond_gated_delta_rule_backward",
    "precond_gated_delta_rule_step",
    "prefill",
    "replay",
    "retention",
    "retention_backward",
    "retention_step",
    "rg_lru",
    "rg_lru_backward",
    "rg_lru_step",
    "rwkv6",
    "rwkv6_backward",
    "rwkv6_step",
    "rwkv7",
    "rwkv7_backward",
    "rwkv7_step",
    "s4d",
    "s4d_backward",
    "s4d_step",
    "segment_map",
    "segment_map_backward",
    "selective_scan",
    "selective_scan_backward",
    "selective_scan_step",
    "set_float32_precision",
    "set_num_threads",
    "show_config",
    "simple_gla",
    "simple_gla_backward",
    "simple_gla_step",
    "ssd",
    "ssd_backward",
    "ssd_step",
    "states",
    "titans",
    "titans_backward",
    "titans_step",
    "zeros_state",
]

# Modules that import more than NumPy, or that few programs use: imported when they are first named.
_LAZY = ("distributed", "gates", "nn", "plot", "reference")

# Where the names of __all__ are that are not here yet: systems, scans, the short convolution, the
# step of a layer, maps of segments.
_PLACES = (
    "linattn.composed",
    "linattn.scans",
    "linattn.convolution",
    "linattn.layers",
    "linattn.segments",
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"linattn.{name}")
    if name in __all__:
        for place in map(importlib.import_module, _PLACES):
            if name in place.__all__:
                found = globals()[name] = getattr(place, name)
                return found
    raise AttributeError(f"module 'linattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})
