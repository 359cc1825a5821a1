"""A whole attention sub-layer: the projections of projections round the kernels of operator.py.

    y = LayerNorm(x) W^T; bias = LayerNorm(x) Wh^T, or is given, or there is none
    out = [onto +] drop * (softmax(q k^T scale + bias + key_bias) v sigmoid(gate + gate_bias) Wo^T + bo)

x, out (B, X, Y, c), onto x itself, attention along X or Y; W (4 c, c): q, k, v and gate below each other; Wh
(H, c). What lies between the kernels is written once and read as it lies: y as (B, X, Y, 4 c), attention's
output as (B, X, Y, c), their gradients alike; the head bias as (B, H, X, Y), of which attention along X takes
the transpose. Saved for backward: x, y, attention's output and statistics, the padded bias, its transpose
where backward will read it, what keys add to scores where no bias holds it, drop.
"""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels import projections
from evoformer_kernels.attention import bias_gradient, call, output_backward
from evoformer_kernels.attention.layout import views
from evoformer_kernels.attention.operator import padded_bias
from evoformer_kernels.common import check_onto, check_shapes
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums


class Weights(NamedTuple):
    """Parameters of a sub-layer. weight: of q, k, v and gate, below each other; head_weight: of the bias that
    LayerNorm(x) makes, for as many heads, or None."""
    norm_weight: Tensor  # (c,)
    norm_bias: Tensor  # (c,)
    weight: Tensor  # (4 c, c)
    gate_bias: Tensor  # (c,)
    out_weight: Tensor  # (c, c)
    out_bias: Tensor  # (c,)
    head_weight: Tensor | None = None  # (H, c)

    def check(self, c, heads):
        """ValueError for a shape that is wrong."""
        sizes = (c,), (c,), (4 * c, c), (c,), (c, c), (c,), (heads, c)
        check_shapes(*zip(self._fields, self, sizes, strict=True))

    def cast(self, dtype):
        """All contiguous, and in this dtype but those of LayerNorm."""
        return Weights(*[None if t is None else (t if name in ("norm_weight", "norm_bias") else t.to(dtype))
                         .contiguous() for name, t in zip(self._fields, self, strict=True)])


class AttentionLayer(torch.autograd.Function):
    """attention_layer() with its derivative; settings: number of heads, axis, eps; whether the update is
    added to x, by output_project_kernel; whether backward reads a transposed bias; whether it recomputes."""

    @staticmethod
    def forward(ctx, x, bias, key_mask, drop, settings, *weights):
        heads, axis, ctx.eps, ctx.adds, transpose, ctx.recompute = settings
        ctx.settings = heads, axis, (x.shape[-1] // heads) ** -0.5
        w, sizes = Weights(*weights), (len(x), x.shape[3 - axis], heads, x.shape[axis])
        y, own_bias = projections.NORM_PROJECT_OP(x, w.norm_weight, w.norm_bias, w.weight, w.head_weight,
                                                  ctx.eps)
        if w.head_weight is not None:
            bias = own_bias.mT if axis == 1 else own_bias
        padded, transposed, key_bias = padded_bias(bias, key_mask, y, sizes, transpose)
        og, lse = call.FORWARD_OP(call.listed([y], w.gate_bias, padded, key_bias), *ctx.settings)
        ctx.save_for_backward(x, drop, None if ctx.recompute else y, padded, transposed, key_bias, og, lse,
                              *weights)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return projections.OUTPUT_PROJECT_OP(og, w.out_weight, w.out_bias, x if ctx.adds else None, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, drop, y, padded, transposed, key_bias, og, lse, *weights = ctx.saved_tensors
        w, gradient, axis = Weights(*weights), gradient.contiguous(), ctx.settings[1]
        if ctx.recompute:
            y, _ = projections.NORM_PROJECT_OP(x, w.norm_weight, w.norm_bias, w.weight, None, ctx.eps,
                                               after=gradient)
        q = views([y], *ctx.settings[:2])[0]
        given = call.listed([y], w.gate_bias, padded, key_bias)
        saved = call.Saved(transposed, og, lse, gradient, w.out_weight, drop)
        dy, bias_sums, gate_bias_sums, du, out_bias_sums = call.BACKWARD_OP(
            [*given, *saved], *ctx.settings,
            0 if padded is None else call.bias_sum_count(*q.shape, q.dtype),
            output_backward.programs(gradient.numel() // len(w.out_weight), len(w.out_weight),
                                     w.out_weight.dtype))
        du = gradient.to(w.out_weight.dtype) if drop is None else du
        dout_weight = du.flatten(0, -2).t() @ og.flatten(0, -2)
        dgate_bias = sums.OP(gate_bias_sums, w.gate_bias.dtype).view_as(w.gate_bias)
        dout_bias = sums.OP(out_bias_sums, w.out_weight.dtype)
        own_bias = w.head_weight is not None  # of which attention along axis 1 has taken the transpose
        dbias = None if padded is None else bias_gradient.OP(bias_sums, x.shape[axis], ctx.bias_dtype,
                                                             own_bias and axis == 1)
        own, dbias = (dbias, None) if own_bias else (None, dbias)
        dx, dnorm_weight, dnorm_bias, dweight, dhead_weight = projections.norm_project_backward(
            dy, own, x, w.norm_weight, w.norm_bias, w.weight, w.head_weight, ctx.eps,
            gradient if ctx.adds else None)
        return (dx, dbias, None, None, None, dnorm_weight, dnorm_bias, dweight, dgate_bias, dout_weight,
                dout_bias, dhead_weight)


def attention_layer(x, weights, heads, axis, bias=None, key_mask=None, eps=1e-5, onto=None, drop=None,
                    recompute=False):
    """Attention along axis 1 or 2 of LayerNorm(x), (B, X, Y, c), as an update or, given onto, added to
    that, which must be x itself.

    weights: Weights. Its head_weight makes the bias of LayerNorm(x) (then X = Y; for axis 1 the transpose is
    taken), or the bias (B, H, L, L), nowhere below -1e9, is given, or there is none. key_mask (B, L), or
    (B, R, L) for each row, 1 = present; drop: factors that broadcast to x, without a gradient. Under autocast
    the products are made in its dtype, and the sum in that of x.
    """
    drop, weights = projections.widened(drop, x.shape[-1]), Weights(*weights)
    check_onto(onto, x)
    if bias is not None and weights.head_weight is not None:
        raise ValueError("bias and head_weight: either makes the bias")
    if weights.head_weight is not None and x.shape[1] != x.shape[2]:
        raise ValueError(f"x is {tuple(x.shape)}, but must be (B, X, X, c) to make the bias from")
    weights.check(x.shape[-1], heads)
    settings = heads, axis, eps, onto is x, call.reads_transposed_bias(x.shape[axis]), recompute
    return AttentionLayer.apply(x.contiguous(), bias, key_mask, drop, settings,
                                *weights.cast(product_dtype(x)))
