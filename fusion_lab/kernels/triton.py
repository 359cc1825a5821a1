"""Which sub-layers this project's Triton kernels can run, and their calls; imported without Triton.

Kernels are imported where they are called, by statements that torch.compile can follow: whoever calls one has
asked the function beside it first.
"""
from fusion_lab.kernels.attention import TRITON_DTYPES, triton_attends
from fusion_lab.kernels.limits import CHANNELS, HAS_TRITON
from fusion_lab.kernels.precision import product_dtype


def fits(x):
    """Whether x (..., c) lies on a GPU, in a dtype and a width that the kernels over positions take."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in TRITON_DTYPES and x.shape[-1] in CHANNELS


def attends(x, heads):
    """Whether attention over x (..., c) has a kernel."""
    return triton_attends(x.is_cuda, product_dtype(x), x.shape[-1] // heads)


def hears(edges):
    """Whether messages from edges (..., K, c) have a kernel."""
    if not fits(edges):
        return False
    from fusion_lab.kernels import messages as kernels
    return not kernels.unsupported(edges.shape[-1], edges.shape[-2])


def incoming(index, rows):
    """For messages(): the edges by the rows of table to which index (..., K) leads."""
    from fusion_lab.kernels import messages as kernels
    return kernels.incoming(index.flatten(0, -2), rows)


def messages(own, edges, table, index, mask, first, second, leading):
    """Sum over neighbours of mask gelu(second(gelu(own + first edges + table[index]))), shaped as own; first
    is a weight, second a module, leading what incoming() returned."""
    from fusion_lab.kernels import messages as kernels
    flat = (x.flatten(0, -dims) for x, dims in ((own, 2), (edges, 3)))
    own_rows, edge_rows = flat
    return kernels.messages(own_rows, edge_rows, table, index.flatten(0, -2), mask.flatten(0, -2), first,
                            second.weight, second.bias, leading).view(own.shape)


def gated_attention(parts, heads, axis, bias, keys, gate_bias):
    from fusion_lab.kernels import biased_attention as kernels
    return kernels.gated_attention(parts, heads, axis, bias, keys, gate_bias)


def transition(x, norm, first, second, residual):
    """residual + second(relu(first(norm(x)))), from the modules; residual may be None."""
    from fusion_lab.kernels import transition as kernels
    return kernels.transition(
        x, norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias, norm.eps, residual)


def triangle_multiplication(pair, norm, weight, bias, center, output, gate, mask, outgoing, residual, drop):
    """Triangle multiplication from modules and the packed weight and bias of left, right and their gates."""
    from fusion_lab.kernels import triangle_multiplication as kernels
    return kernels.triangle_multiplication(
        pair, norm.weight, norm.bias, weight, bias, center.weight, center.bias, output.weight, output.bias,
        gate.weight, gate.bias, mask, outgoing, norm.eps, residual, drop)
