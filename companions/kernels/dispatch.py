"""Where the companions' Triton kernels run, and their calls; imported without Triton. As in
fusion_lab/kernels/dispatch.py, whoever calls one has asked the function beside it first.
"""
import torch
import torch.nn.functional as F

from fusion_lab.kernels.limits import CHANNELS, HAS_TRITON
from fusion_lab.kernels.precision import HALF, product_dtype


def hears(edges):
    """Whether what stands between products of messages from edges (..., c) has kernels, which multiply
    nothing and so take float32 too."""
    return (edges.is_cuda and HAS_TRITON and edges.shape[-1] in CHANNELS
            and product_dtype(edges) in (torch.float32, *HALF))


def incoming(index, rows):
    """For message_layer(): the edges by the rows of table to which index (..., K) leads."""
    from companions.kernels import messages as kernels
    return kernels.incoming(index.flatten(0, -2), rows)


def message_layer(own, edges, table, index, leading):
    """gelu(own + edges + table[index]), shaped as edges (..., K, c); own (..., c), table (R, c), index
    (..., K), leading what incoming() returned."""
    from companions.kernels import messages as kernels
    return kernels.first_layer(own.flatten(0, -2), edges.flatten(0, -3), table, index.flatten(0, -2),
                               leading).view(edges.shape)


def linear_gelu(x, layer):
    """gelu(layer(x)) of edges (..., K, c)."""
    from companions.kernels import messages as kernels
    y = F.linear(x, layer.weight)
    return kernels.biased_gelu(y.flatten(0, -3), layer.bias).view(y.shape)


def linear_gelu_sum(x, layer, mask):
    """Sum over K of mask (..., K) gelu(layer(x)), of edges x (..., K, c)."""
    from companions.kernels import messages as kernels
    y = F.linear(x, layer.weight)
    summed = kernels.sum_over_neighbours(y.flatten(0, -3), layer.bias, mask.flatten(0, -2))
    return summed.view(*mask.shape[:-1], -1)


def takes_elements(x):
    """Whether rotary positions and SwiGLU of packed projections of x have kernels, which multiply no
    matrices and so take float32 too."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in (torch.float32, *HALF)


def swiglu(packed):
    """silu(gate) * up of packed = [gate; up] (..., 2 F), (..., F)."""
    from companions.kernels import gated_rotary as kernels
    return kernels.swiglu(packed)


def rotary(packed, angles, of_q, of_k, of_v):
    """q (B, H, S, D), k and v (B, G, S, D) of packed (B, S, of_q + of_k + of_v), channels of each; q and k
    rotated by angles (2, S, D / 2)."""
    from companions.kernels import gated_rotary as kernels
    width = 2 * angles.shape[-1]
    return kernels.rotary(packed, angles, of_q // width, of_k // width)
