"""Which sub-layers this project's Triton kernels can run, and their calls; imported without Triton.

Functions come in pairs: one says whether a kernel takes these tensors, the other calls it. Ask the first
before the second: the second imports the kernel, by a statement that torch.compile can follow, and checks
nothing.

    whether                  call
    takes_attention          gated_attention
    takes_attention_layer    attention_layer
    takes_head_bias          head_bias
    runs                     outer_first
    fits                     two_layers, triangle_multiplication
    takes_transition         transition_layer
    takes_outer_sides        sides

Shapes: x (B, X, Y, c) is the MSA or the pair representation. recompute: backward recomputes what lies within
the sub-layer, but attention's output, instead of keeping it. residual: added in the kernel, None for the
update alone. drop: dropout's factors, broadcast to x, or None. norm, output and the like are modules.
"""

from fusion_lab.kernels.library.attention_choice import triton_attends
from fusion_lab.kernels.limits import (
    CHANNELS,
    HAS_TRITON,
    LAYER_CHANNELS,
    takes_bias,
    takes_layer,
    takes_sides,
)
from fusion_lab.kernels.precision import HALF, product_dtype


def runs(x):
    """Whether x lies on a GPU, and its products are in 16 bits, in which alone kernels run there."""
    return x.is_cuda and HAS_TRITON and product_dtype(x) in HALF


def fits(x):
    """Whether runs(x), and x (..., c) has a width that kernels over positions take."""
    return runs(x) and x.shape[-1] in CHANNELS


def takes_transition(x):
    """Whether one kernel makes LayerNorm and a product of x (..., c), and one kernel their backward pass."""
    return runs(x) and x.shape[-1] in LAYER_CHANNELS


def takes_attention(x, heads):
    """Whether a kernel runs attention with so many heads over x (..., c)."""
    return triton_attends(x.is_cuda, product_dtype(x), x.shape[-1] // heads)


def gated_attention(projections, heads, axis, bias, keys, gate_bias):
    """Gated attention (B, X, Y, c) along axis 1 or 2, of length L.

    projections: [q, k, v, gate], (B, X, Y, c) each, or [packed] (B, X, Y, 4 c); gate_bias (c,). bias
    (B, H, L, L) and keys (B, L), 1 = present, may be None.
    """
    from fusion_lab.kernels.attention import operator as kernels
    return kernels.gated_attention(projections, heads, axis, bias, keys, gate_bias)


def takes_attention_layer(x, heads):
    """Whether kernels run a whole attention sub-layer over x (..., c)."""
    return takes_layer(x.shape[-1], heads) and takes_attention(x, heads)


def takes_head_bias(x, heads):
    """Whether head_bias() takes x (..., c) and so many heads."""
    return runs(x) and takes_bias(x.shape[-1], heads)


def projections_by_library(**widths):
    """For the start-up line: whose attention, of {name: (channels, heads)}, keeps the library's projections
    beside our kernels."""
    names = [name for name, width in widths.items() if not takes_layer(*width)]
    return f"; {', '.join(names)}: projections by the library" if names else ""


def attention_layer(x, norm, weight, gate_bias, output, heads, axis, bias, bias_proj, keys, residual, drop,
                    recompute):
    """[residual +] LayerNorm, gated attention along axis and output projection of x (B, X, Y, c).

    weight (4 c, c) is that of q, k, v and gate, packed. The bias (B, H, L, L) is given, or made by the module
    bias_proj from the same LayerNorm, or None. keys (B, L) or None.
    """
    from fusion_lab.kernels.attention import layer as kernels
    weights = kernels.Weights(norm.weight, norm.bias, weight, gate_bias, output.weight, output.bias,
                              None if bias_proj is None else bias_proj.weight)
    return kernels.attention_layer(x, weights, heads, axis, bias, keys, norm.eps, residual, drop, recompute)


def head_bias(bias_proj, x, norm):
    """bias_proj(norm(x)) as a bias of attention, (B, H, X, Y); and x, for whoever reads it after this."""
    from fusion_lab.kernels import projections as kernels
    return kernels.head_bias(x, norm.weight, norm.bias, bias_proj.weight, norm.eps)


def outer_first(left, right, output, recompute, scale=1.0, onto=None):
    """[onto +] scale output(outer product of left and right, summed over rows), (B, S, S, c).

    left, right (B, N, S, h), rows summed over N; output is a module from h^2 to c; scale is a number.
    """
    from fusion_lab.kernels import outer_product as kernels
    return kernels.outer_first(left, right, output.weight, output.bias, scale, onto, recompute)


def takes_outer_sides(x, h):
    """Whether kernels project x (..., c) to both sides of an outer product, of h channels each."""
    return runs(x) and takes_sides(x.shape[-1], h)


def sides(x, norm, weight, bias):
    """Both sides of an outer product, (B, N, S, h) each: the halves of norm(x) weight^T + bias, of packed
    weight (2 h, c) and bias (2 h,); and x, for whoever reads it after this."""
    from fusion_lab.kernels import outer_product_sides as kernels
    return kernels.sides(x, norm.weight, norm.bias, weight, bias, norm.eps)


def two_layers(x, first, second):
    """second(relu(first(x))) of modules, shaped as x (..., c)."""
    from fusion_lab.kernels import transition as kernels
    return kernels.two_layers(x, first.weight, first.bias, second.weight, second.bias)


def transition_layer(x, norm, first, second, recompute):
    """x + second(relu(first(norm(x)))) of modules, shaped as x (B, X, Y, c)."""
    from fusion_lab.kernels import transition as kernels
    return kernels.layer(x, norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias,
                         norm.eps, recompute)


def gathered_gradients(gathers):
    """Options for torch.compile: it then knows our operators and, if `gathers`, makes small gradients and
    sums in few launches (reductions/compile_pass.py). {} without Triton."""
    if not HAS_TRITON:
        return {}
    from fusion_lab.kernels.reductions.compile_pass import GatheredGradients
    return dict(post_grad_custom_post_pass=GatheredGradients(gathers))


def triangle_multiplication(pair, norm, weight, bias, center, output, gate, mask, outgoing, residual, drop,
                            recompute):
    """[residual +] triangle multiplication of pair (B, S, S, c), outgoing or incoming.

    weight (4 c, c) and bias (4 c,) are those of left, right and their gates, packed. center is the module of
    the second LayerNorm; output and gate are projections. mask (B, S) or None.
    """
    from fusion_lab.kernels.triangle_multiplication import operator as kernels
    weights = kernels.Weights(norm.weight, norm.bias, weight, bias, center.weight, center.bias, output.weight,
                              output.bias, gate.weight, gate.bias)
    return kernels.triangle_multiplication(pair, weights, mask, outgoing, norm.eps, residual, drop, recompute)
