"""Models of transformers, their recurrences and short convolutions computed by linattn.

::

    from linattn.compat.transformers import use_linattn

    model = AutoModelForCausalLM.from_pretrained(...)  # a Qwen3-Next, Kimi Linear, Bamba, ...
    with use_linattn(model):
        model.generate(**tokens)                       # afterwards the model is as it was

    ours = use_linattn(model)                          # or until told otherwise
    ...
    ours.restore()

Models are not listed anywhere. A layer is meant if it keeps one of some functions as an attribute,
or if its methods call one by a global name, and if that function has the parameters that ours has:
the gated delta rule and Kimi delta attention, the selective scans of Mamba and Mamba-2, RWKV-4's
attention, and the causal convolution. Three layers have their recurrence in their forward method
(MiniMax's lightning attention, RecurrentGemma's RG-LRU and xLSTM's cell): they are known by their
name and attributes.

The layer then gets functions, or methods that see functions, of its own. Nothing is written into
its class, its module or transformers. So other models of the process, of the same class too, stay
as they are.
"""

from linattn.compat._replace import Replacement
from linattn.compat.transformers._convolution import causal_conv1d_fn, causal_conv1d_update
from linattn.compat.transformers._delta import (
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from linattn.compat.transformers._mamba import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
    mamba_selective_scan,
    mamba_selective_state_update,
)
from linattn.compat.transformers._replace import use_linattn
from linattn.compat.transformers._rwkv import rwkv_linear_attention

__all__ = [
    "Replacement",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba_selective_scan",
    "mamba_selective_state_update",
    "recurrent_gated_delta_rule",
    "recurrent_kda",
    "rwkv_linear_attention",
    "use_linattn",
]
