"""A whole attention sub-layer: the projections of projection.py round the kernels of biased_attention.py.

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

from fusion_lab.kernels import added_bias, gated_output, projection, sums
from fusion_lab.kernels import biased_attention as attention
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import check_shapes


def reference(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, heads, axis, bias=None,
              head_weight=None, keys=None, eps=1e-5, residual=None, drop=None):
    """The same in plain PyTorch; arguments as in attention_layer()."""
    y, own_bias = projection.norm_project_reference(x, norm_weight, norm_bias, weight, head_weight, eps)
    if own_bias is not None:
        bias = own_bias.mT if axis == 1 else own_bias
    q, k, v, gate = attention.views([y], heads, axis, True)
    og = attention.reference(q, k, v, bias, keys, gate, gate_bias.view(heads, -1))
    og = og.permute((0, 3, 1, 2, 4) if axis == 1 else (0, 1, 3, 2, 4)).flatten(-2)
    return projection.output_project_reference(og, out_weight, out_bias, residual, drop)


class AttentionLayer(torch.autograd.Function):
    """attention_layer() with its derivative; add: the residual is x."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, bias, head_weight,
                keys, drop, add, heads, axis, eps, turn, again):
        ctx.add, ctx.eps, ctx.again = add, eps, again
        ctx.how = heads, axis, True, (x.shape[-1] // heads) ** -0.5
        sizes = len(x), x.shape[3 - axis], heads, x.shape[axis]
        y, own_bias = projection.NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, head_weight, eps)
        if head_weight is not None:
            bias = own_bias.mT if axis == 1 else own_bias
        padded, turned, summand = attention.padded_bias(bias, keys, y, sizes, turn)
        og, lse = attention.FORWARD_OP([y], gate_bias, padded, summand, *ctx.how)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, gate_bias, out_weight, head_weight, drop,
                              None if again else y, padded, turned, summand, og, lse)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return projection.OUTPUT_PROJECT_OP(og, out_weight, out_bias, x if add else None, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, norm_weight, norm_bias, weight, gate_bias, out_weight, head_weight, drop, y, padded, turned,
         summand, og, lse) = ctx.saved_tensors
        gradient, length = gradient.contiguous(), x.shape[ctx.how[1]]
        if ctx.again:
            y, _ = projection.NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, None, ctx.eps,
                                              after=gradient)
        q = attention.views([y], *ctx.how[:3])[0]
        dy, dbias, dgate_bias, du, dout_bias = attention.BACKWARD_OP(
            [y], gate_bias, padded, turned, summand, og, lse, gradient, out_weight, drop, *ctx.how,
            0 if padded is None else attention.bias_parts(*q.shape, q.dtype),
            gated_output.programs(gradient.numel() // len(out_weight), len(out_weight), out_weight.dtype))
        du = gradient.to(out_weight.dtype) if drop is None else du
        dout_weight = du.flatten(0, -2).t() @ og.flatten(0, -2)
        dgate_bias = sums.OP(dgate_bias, gate_bias.dtype).view_as(gate_bias)
        dout_bias = sums.OP(dout_bias, out_weight.dtype)
        own_bias = head_weight is not None  # of which attention along axis 1 has taken the transpose
        dbias = None if padded is None else added_bias.OP(dbias, length, ctx.bias_dtype,
                                                          own_bias and ctx.how[1] == 1)
        own, dbias = (dbias, None) if own_bias else (None, dbias)
        dx, dnorm_weight, dnorm_bias, dweight, dhead_weight = projection.norm_project_backward(
            dy, own, x, norm_weight, norm_bias, weight, head_weight, ctx.eps, gradient if ctx.add else None)
        return (dx, dnorm_weight, dnorm_bias, dweight, dgate_bias, dout_weight, dout_bias, dbias,
                dhead_weight, *[None] * 8)


def attention_layer(x, norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, heads, axis,
                    bias=None, head_weight=None, keys=None, eps=1e-5, residual=None, drop=None,
                    again=False):
    """Attention along axis 1 or 2 of LayerNorm(x), (B, X, Y, c), as an update or added to the residual.

    weight (4 c, c) of q, k, v and gate; gate_bias (c,); out_weight (c, c). bias (B, H, L, L), nowhere below
    -1e9, or head_weight (H, c), which makes it of LayerNorm(x) (then X = Y; for axis 1 the transpose is
    taken), or neither; keys (B, L), 1 = present; drop: factors that broadcast to x, without a gradient. Under
    autocast the products are made in its dtype, and the sum in that of the residual.
    """
    dtype, add, drop = product_dtype(x), residual is x, projection.widened(drop, x.shape[-1])
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
                                          heads, axis, bias, head_weight, keys, eps, None, drop, again)
    weight, gate_bias, out_weight, out_bias, head_weight = (
        None if t is None else t.to(dtype).contiguous()
        for t in (weight, gate_bias, out_weight, out_bias, head_weight))
    return AttentionLayer.apply(
        x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), weight, gate_bias, out_weight,
        out_bias, bias, head_weight, keys, drop, add, heads, axis, eps, attention.turns(x.shape[axis]), again)
