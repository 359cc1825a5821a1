"""Whether a sub-layer runs in this project's Triton kernels, which are imported where they are used."""
import torch

from fusion_lab.kernels.attention import HAS_TRITON

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_HEAD = 128


def computed_in(x):
    """The dtype of a projection of x, which autocast may lower."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def attends(x, heads):
    """Whether attention over x (..., c) has a kernel."""
    fits = x.shape[-1] // heads <= WIDEST_HEAD and computed_in(x) in DTYPES
    return HAS_TRITON and x.is_cuda and fits


def gated_attention(*arguments):
    """biased_attention.gated_attention()"""
    from fusion_lab.kernels.biased_attention import gated_attention
    return gated_attention(*arguments)
