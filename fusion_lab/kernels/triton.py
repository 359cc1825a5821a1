"""Which sub-layers this project's Triton kernels can run, and their calls; imported without Triton.

Kernels are imported where they are called, by statements that torch.compile can follow: whoever calls one has
asked the function beside it first.
"""
import torch
import torch.nn.functional as F

from fusion_lab.kernels.attention import TRITON_DTYPES, triton_attends
from fusion_lab.kernels.limits import (
    CHANNELS,
    HAS_TRITON,
    LAYER_CHANNELS,
    SWITCH,
    takes,
    takes_bias,
    takes_sides,
)
from fusion_lab.kernels.precision import product_dtype


def runs(x):
    """Whether x lies on a GPU, and products of it are in a dtype in which the model calls kernels: 16 bits
    (attention.TRITON_DTYPES says why)."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in TRITON_DTYPES


def fits(x):
    """Whether x (..., c) has a width, too, that the kernels over positions take."""
    return runs(x) and x.shape[-1] in CHANNELS


def wraps(x):
    """Whether LayerNorm and a product of x (..., c) are given to one kernel, and their backward to one."""
    return runs(x) and x.shape[-1] in LAYER_CHANNELS


def attends(x, heads):
    """Whether attention over x (..., c) has a kernel."""
    return triton_attends(x.is_cuda, product_dtype(x), x.shape[-1] // heads)


def hears(edges):
    """Whether what stands between products of messages from edges (..., c) has kernels, which multiply
    nothing and so take float32 too."""
    return (edges.is_cuda and HAS_TRITON and edges.shape[-1] in CHANNELS
            and product_dtype(edges) in (torch.float32, *TRITON_DTYPES))


def incoming(index, rows):
    """For message_layer(): the edges by the rows of table to which index (..., K) leads."""
    from fusion_lab.kernels import messages as kernels
    return kernels.incoming(index.flatten(0, -2), rows)


def message_layer(own, edges, table, index, leading):
    """gelu(own + edges + table[index]), shaped as edges (..., K, c); own (..., c), table (R, c), index
    (..., K), leading what incoming() returned."""
    from fusion_lab.kernels import messages as kernels
    return kernels.first_layer(own.flatten(0, -2), edges.flatten(0, -3), table, index.flatten(0, -2),
                               leading).view(edges.shape)


def linear_gelu(x, layer):
    """gelu(layer(x)) of edges (..., K, c)."""
    from fusion_lab.kernels import messages as kernels
    y = F.linear(x, layer.weight)
    return kernels.biased_gelu(y.flatten(0, -3), layer.bias).view(y.shape)


def linear_gelu_sum(x, layer, mask):
    """Sum over K of mask (..., K) gelu(layer(x)), of edges x (..., K, c)."""
    from fusion_lab.kernels import messages as kernels
    y = F.linear(x, layer.weight)
    summed = kernels.sum_over_neighbours(y.flatten(0, -3), layer.bias, mask.flatten(0, -2))
    return summed.view(*mask.shape[:-1], -1)


def takes_elements(x):
    """Whether rotary positions and SwiGLU of packed projections of x have kernels, which multiply no
    matrices and so take float32 too."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in (torch.float32, *TRITON_DTYPES)


def swiglu(packed):
    """silu(gate) * up of packed = [gate; up] (..., 2 F), (..., F)."""
    from fusion_lab.kernels import gated_rotary as kernels
    return kernels.swiglu(packed)


def rotary(packed, angles, of_q, of_k, of_v):
    """q (B, H, S, D), k and v (B, G, S, D) of packed (B, S, of_q + of_k + of_v), channels of each; q and k
    turned by angles (2, S, D / 2)."""
    from fusion_lab.kernels import gated_rotary as kernels
    width = 2 * angles.shape[-1]
    return kernels.rotary(packed, angles, of_q // width, of_k // width)


def gated_attention(parts, heads, axis, bias, keys, gate_bias):
    from fusion_lab.kernels import biased_attention as kernels
    return kernels.gated_attention(parts, heads, axis, bias, keys, gate_bias)


def projects(x, heads):
    """Whether a whole attention sub-layer over x (..., c) is given to kernels."""
    return takes(f"{SWITCH}projection", (x.shape[-1], heads)) and attends(x, heads)


def projects_bias(x, heads):
    """Whether head_bias() takes x (..., c) and so many heads."""
    return runs(x) and takes_bias(x.shape[-1], heads)


def projections_by_library(**parts):
    """Which parts of attention, {name: (channels, heads)}, keep the library's projections beside kernels, for
    the start-up line."""
    left = [name for name, width in parts.items() if not takes(f"{SWITCH}projection", width)]
    return f"; {', '.join(left)}: projections by the library" if left else ""


def attention_layer(x, norm, weight, gate_bias, output, heads, axis, bias, head, keys, residual, drop,
                    again):
    """LayerNorm, attention, output projection [and residual] of x from modules and the packed weight of q, k,
    v and gate; `head`, if given, is the module that makes the bias. again, here and below: of what lies
    between, backward makes again all but attention's output."""
    from fusion_lab.kernels import attention_layer as kernels
    return kernels.attention_layer(
        x, norm.weight, norm.bias, weight, gate_bias, output.weight, output.bias, heads, axis, bias,
        None if head is None else head.weight, keys, norm.eps, residual, drop, again)


def head_bias(head, x, norm):
    """head(norm(x)) as a bias of attention, (B, H, X, Y); x, for who reads it behind this."""
    from fusion_lab.kernels import projection as kernels
    return kernels.norm_project(x, norm.weight, norm.bias, None, head.weight, norm.eps, True)[1:]


def multiplies_out(x, output):
    """Whether an outer product of x's dtype and device, projected by the module output, has kernels."""
    widths = int(output.in_features ** 0.5), output.out_features
    return runs(x) and takes(f"{SWITCH}outer_product", widths)


def outer_product(left, right, output, rows, residual):
    """[residual +] output(outer product of left and right, summed over rows) / (rows + 1e-3), from a module;
    rows: a number, or one for each sample, (B, 1, 1, 1)."""
    from fusion_lab.kernels import outer_product as kernels
    norm = (rows.flatten().float() if isinstance(rows, torch.Tensor)
            else torch.full((len(left),), float(rows), device=left.device)) + 1e-3
    return kernels.outer_product(left, right, output.weight, output.bias, norm, residual)


def outer_layout(left, right, output, again, scale=1.0, residual=None):
    """[residual +] scale, a number, times output(outer product of left and right, summed over rows), from a
    module."""
    from fusion_lab.kernels import outer_layout as kernels
    return kernels.outer_layout(left, right, output.weight, output.bias, scale, residual, again)


def projects_sides(x, h):
    """Whether both sides of an outer product, of h channels, are projected from x (..., c) by kernels."""
    return runs(x) and takes_sides(x.shape[-1], h)


def sides(x, norm, weight, bias):
    """Both sides of an outer product, LayerNorm(x) weight^T + bias in halves, from a module and their packed
    weight and bias; x, for who reads it behind this."""
    from fusion_lab.kernels import side_projection as kernels
    return kernels.side_projection(x, norm.weight, norm.bias, weight, bias, norm.eps)


def transition(x, norm, first, second, residual, again):
    """residual + second(relu(first(norm(x)))), from the modules; residual may be None. It makes all again
    anyway."""
    from fusion_lab.kernels import transition as kernels
    return kernels.transition(
        x, norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias, norm.eps, residual)


def two_layers(x, first, second):
    """second(relu(first(x))), from the modules."""
    from fusion_lab.kernels import hidden_gradient as kernels
    return kernels.two_layers(x, first.weight, first.bias, second.weight, second.bias)


def transition_layer(x, norm, first, second, residual, again):
    """[residual +] second(relu(first(norm(x)))), from the modules."""
    from fusion_lab.kernels import transition_layer as kernels
    return kernels.transition_layer(x, norm.weight, norm.bias, first.weight, first.bias, second.weight,
                                    second.bias, norm.eps, residual, again)


def gathered_gradients(products, sums):
    """Options with which torch.compile knows our ops and gathers small gradients, if asked to; {} without
    Triton."""
    if not HAS_TRITON:
        return {}
    from fusion_lab.kernels.gathered_gradients import GatheredGradients
    return dict(post_grad_custom_post_pass=GatheredGradients(products, sums))


def triangle_multiplication(pair, norm, weight, bias, center, output, gate, mask, outgoing, residual, drop,
                            again):
    """Triangle multiplication from modules and the packed weight and bias of left, right and their gates."""
    from fusion_lab.kernels import triangle_multiplication as kernels
    return kernels.triangle_multiplication(
        pair, norm.weight, norm.bias, weight, bias, center.weight, center.bias, output.weight, output.bias,
        gate.weight, gate.bias, mask, outgoing, norm.eps, residual, drop, again)
