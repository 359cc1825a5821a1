"""Whether the companions' Triton kernels run; imported without Triton."""
import torch

from fusion_lab.kernels.limits import HAS_TRITON
from fusion_lab.kernels.precision import HALF, product_dtype


def takes(x):
    """Whether x lies where kernels run that multiply no matrices, and so take float32 too."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in (torch.float32, *HALF)
