"""PyTorch's tensors for NumPy's arrays, and back. Where PyTorch is not installed, a test file that
imports this module is skipped as a whole."""

import ml_dtypes
import numpy as np

from support.compare import leaves
from support.device import imported

torch = imported("torch")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_tensor(x):
    """A tensor over the memory of a NumPy array, bfloat16 too."""
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x):
    """A tensor's numbers as a NumPy array, bfloat16 too."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy()


def tensors_in(x):
    """The tensors among the leaves, in the order of the dict."""
    return [y for y in leaves(x) if isinstance(y, torch.Tensor)]
