"""A whole attention sub-layer: the projections of projections round the kernels of operator.py.

    y = LayerNorm(x) W^T; bias = LayerNorm(x) Wh^T, or is given, or there is none
    out = residual + drop * (softmax(q k^T scale + bias + key mask) v sigmoid(gate + gate_bias) Wo^T + bo)

x, residual, out (B, X, Y, c), attention along X or Y; W (4 c, c): q, k, v and gate below each other; Wh
(H, c). What lies between the kernels is written once and read as it lies: y as (B, X, Y, 4 c), attention's
output as (B, X, Y, c), their gradients alike; the head bias as (B, H, X, Y), of which attention along X takes
the transpose. Saved for backward: x, y, attention's output and statistics, the padded bias, its transpose
where backward will read it, what keys add to scores where no bias holds it, drop.
"""
import torch
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import projections
from fusion_lab.kernels.attention import bias_gradient, output_backward
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.common import check_shapes
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.reductions import sums


class AttentionLayer(torch.autograd.Function):
    """attention_layer() with its derivative; add: the residual is x, so output_project_kernel adds it."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, bias, head_weight,
                keys, drop, add, heads, axis, eps, transpose, recompute):
        ctx.add, ctx.eps, ctx.recompute = add, eps, recompute
        ctx.settings = heads, axis, True, (x.shape[-1] // heads) ** -0.5
        sizes = len(x), x.shape[3 - axis], heads, x.shape[axis]
        y, own_bias = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, head_weight, eps)
        if head_weight is not None:
            bias = own_bias.mT if axis == 1 else own_bias
        padded, transposed, key_mask = attention.padded_bias(bias, keys, y, sizes, transpose)
        og, lse = attention.FORWARD_OP([y], gate_bias, padded, key_mask, *ctx.settings)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, gate_bias, out_weight, head_weight, drop,
                              None if recompute else y, padded, transposed, key_mask, og, lse)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return projections.OUTPUT_PROJECT_OP(og, out_weight, out_bias, x if add else None, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, norm_weight, norm_bias, weight, gate_bias, out_weight, head_weight, drop, y, padded, transposed,
         key_mask, og, lse) = ctx.saved_tensors
        gradient, length = gradient.contiguous(), x.shape[ctx.settings[1]]
        if ctx.recompute:
            y, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, None, ctx.eps,
                                                   after=gradient)
        q = attention.views([y], *ctx.settings[:3])[0]
        dy, bias_sums, gate_bias_sums, du, out_bias_sums = attention.BACKWARD_OP(
            [y], gate_bias, padded, transposed, key_mask, og, lse, gradient, out_weight, drop, *ctx.settings,
            0 if padded is None else attention.bias_sum_count(*q.shape, q.dtype),
            output_backward.programs(gradient.numel() // len(out_weight), len(out_weight), out_weight.dtype))
        du = gradient.to(out_weight.dtype) if drop is None else du
        dout_weight = du.flatten(0, -2).t() @ og.flatten(0, -2)
        dgate_bias = sums.OP(gate_bias_sums, gate_bias.dtype).view_as(gate_bias)
        dout_bias = sums.OP(out_bias_sums, out_weight.dtype)
        own_bias = head_weight is not None  # of which attention along axis 1 has taken the transpose
        dbias = None if padded is None else bias_gradient.OP(bias_sums, length, ctx.bias_dtype,
                                                             own_bias and ctx.settings[1] == 1)
        own, dbias = (dbias, None) if own_bias else (None, dbias)
        dx, dnorm_weight, dnorm_bias, dweight, dhead_weight = projections.norm_project_backward(
            dy, own, x, norm_weight, norm_bias, weight, head_weight, ctx.eps, gradient if ctx.add else None)
        return (dx, dnorm_weight, dnorm_bias, dweight, dgate_bias, dout_weight, dout_bias, dbias,
                dhead_weight, *[None] * 8)


def attention_layer(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, heads, axis,
                    bias=None, head_weight=None, keys=None, eps=1e-5, residual=None, drop=None,
                    recompute=False):
    """Attention along axis 1 or 2 of LayerNorm(x), (B, X, Y, c), as an update or added to the residual,
    by the kernel where that is x itself.

    weight (4 c, c) of q, k, v and gate; gate_bias (c,); out_weight (c, c). bias (B, H, L, L), nowhere below
    -1e9, or head_weight (H, c), which makes it of LayerNorm(x) (then X = Y; for axis 1 the transpose is
    taken), or neither; keys (B, L), or (B, R, L) for each row, 1 = present; drop: factors that broadcast to
    x, without a gradient. Under autocast the products are made in its dtype, and the sum in that of the
    residual.
    """
    dtype, add, drop = product_dtype(x), residual is x, projections.widened(drop, x.shape[-1])
    c = x.shape[-1]
    if bias is not None and head_weight is not None:
        raise ValueError("bias and head_weight: either makes the bias")
    if head_weight is not None and x.shape[1] != x.shape[2]:
        raise ValueError(f"x is {tuple(x.shape)}, but must be (B, X, X, c) to make the bias from")
    check_shapes(("norm_weight", norm_weight, (c,)), ("norm_bias", norm_bias, (c,)),
                 ("weight", weight, (4 * c, c)), ("gate_bias", gate_bias, (c,)),
                 ("out_weight", out_weight, (c, c)), ("out_bias", out_bias, (c,)),
                 ("head_weight", head_weight, (heads, c)), ("residual", residual, tuple(x.shape)))
    if residual is not None and not add:
        return residual + attention_layer(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias,
                                          heads, axis, bias, head_weight, keys, eps, None, drop, recompute)
    weight, gate_bias, out_weight, out_bias, head_weight = (
        None if t is None else t.to(dtype).contiguous()
        for t in (weight, gate_bias, out_weight, out_bias, head_weight))
    return AttentionLayer.apply(
        x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), weight, gate_bias, out_weight,
        out_bias, bias, head_weight, keys, drop, add, heads, axis, eps,
        attention.reads_transposed_bias(x.shape[axis]), recompute)
