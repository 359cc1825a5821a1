"""A whole transition by kernels of other sub-layers: those of projections, and in backward that of
hidden_gradient.py before them.

    h = relu(LayerNorm(x) W1^T + b1);  out = x + h W2^T + b2

x, out (B, X, Y, c); W1 (u, c); W2 (c, u); h (B, X, Y, u). Saved for backward: x and h. Kernels:

    forward    norm_project               h = relu(LayerNorm(x) W1^T + b1)
               output_project             x + h W2^T + b2
    backward   hidden gradient            dh = (dout W2) * [h > 0], partial sums of db1
               norm_project_backward      dx = LayerNorm's derivative of dh W1, + dout; dW1; db2 = sum of dout

The kernels of projections are those of attention's projections. Left to the library and a compiler
each line is a product, a pass over what it wrote, one over what it reads, and more for the sums.

Source: AlphaFold 2 supplement, Alg. 9 and 15 (transitions).
"""
import torch
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import projections
from fusion_lab.kernels.common import check_shapes
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.reductions import sums
from fusion_lab.kernels.transition import hidden_gradient


class TransitionLayer(torch.autograd.Function):
    """transition_layer() with its derivative. Saves x and, unless recompute, h."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, w1, b1, w2, b2, residual_is_x, eps, recompute):
        h, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, eps, b1)
        ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2, None if recompute else h)
        ctx.residual_is_x, ctx.eps, ctx.recompute = residual_is_x, eps, recompute
        return projections.OUTPUT_PROJECT_OP(h, w2, b2, x if residual_is_x else None, None)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, norm_weight, norm_bias, w1, b1, w2, h), gradient = ctx.saved_tensors, gradient.contiguous()
        if ctx.recompute:
            h, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, ctx.eps, b1, gradient)
        h = h.flatten(0, -2)  # (P, u)
        dupdate = gradient.flatten(0, -2).to(w2.dtype)  # (P, c)
        shares = hidden_gradient.shares(len(h), *w2.shape, w2.dtype)
        dh, partial_sums = hidden_gradient.OP(dupdate, w2, h, shares)  # (P, u), (shares, u)
        dx, dnorm_weight, dnorm_bias, dw1, _, *total = projections.norm_project_backward(
            dh.view(*x.shape[:-1], len(w1)), None, x, norm_weight, norm_bias, w1, None, ctx.eps,
            gradient if ctx.residual_is_x else None, ctx.residual_is_x)
        db1, dw2 = sums.OP(partial_sums, h.dtype), dupdate.t() @ h  # (u,), (c, u)
        # The kernel that adds the residual's gradient sums it over positions, too: that is b2's gradient
        db2 = total[0].to(w2.dtype) if ctx.residual_is_x else sums.over_rows(dupdate)
        return dx, dnorm_weight, dnorm_bias, dw1, db1, dw2, db2, *[None] * 3


def transition_layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps=1e-5, residual=None, recompute=False):
    """[residual +] relu(LayerNorm(x) w1^T + b1) w2^T + b2 of x (B, X, Y, c). Under autocast the products are
    made in its dtype, and the sum in that of the residual. recompute: save x alone, and compute the hidden
    layer once more in backward. ValueError for what the kernels cannot take."""
    (units, channels), residual_is_x = w1.shape, residual is x
    check_shapes(("x", x, (*x.shape[:3], channels)), ("norm_weight", norm_weight, (channels,)),
                 ("norm_bias", norm_bias, (channels,)), ("b1", b1, (units,)),
                 ("w2", w2, (channels, units)), ("b2", b2, (channels,)), ("residual", residual, x.shape))
    if residual is not None and not residual_is_x:
        return residual + transition_layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps,
                                           recompute=recompute)
    w1, b1, w2, b2 = (t.to(product_dtype(x)).contiguous() for t in (w1, b1, w2, b2))
    hidden_gradient.check(w1, channels, units)
    return TransitionLayer.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), w1, b1, w2,
                                 b2, residual_is_x, eps, recompute)
