"""A whole transition by kernels of other sub-layers: those of projection.py, and in backward that of
hidden_gradient.py before them.

    h = relu(LayerNorm(x) W1^T + b1);  out = x + h W2^T + b2

x, out (B, X, Y, c); W1 (u, c); W2 (c, u). Saved for backward: x and h. Forward is a kernel for h and one for
the rest. In backward the gradient of h before its ReLU makes that of x in the kernel that does the same
behind attention's projections: dh W1, LayerNorm's derivative, the residual's gradient, and the sum of that
over positions, which is b2's. Left to the library and a compiler each of these is a product, a pass over what
it wrote, one over what it reads, and more for the sums.

Source: AlphaFold 2 supplement, Alg. 9 and 15 (transitions).
"""
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import hidden_gradient, projection, sums
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import check_shapes


def reference(x, norm_weight, norm_bias, w1, b1, w2, b2, eps=1e-5, residual=None):
    """The same in plain PyTorch; arguments as in transition_layer()."""
    normal = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    update = hidden_gradient.reference(normal, w1, b1, w2, b2)
    return update if residual is None else residual + update


class TransitionLayer(torch.autograd.Function):
    """transition_layer() with its derivative; add: the residual is x."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, w1, b1, w2, b2, add, eps, again):
        h, _ = projection.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, eps, b1)
        ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2, None if again else h)
        ctx.add, ctx.eps, ctx.again = add, eps, again
        return projection.OUTPUT_PROJECT_OP(h, w2, b2, x if add else None, None)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, norm_weight, norm_bias, w1, b1, w2, h), gradient = ctx.saved_tensors, gradient.contiguous()
        if ctx.again:
            h, _ = projection.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, ctx.eps, b1, gradient)
        h = h.flatten(0, -2)
        dupdate = gradient.flatten(0, -2).to(w2.dtype)
        dh, parts = hidden_gradient.OP(dupdate, w2, h, hidden_gradient.shares(len(h), *w2.shape, w2.dtype))
        dx, dnorm_weight, dnorm_bias, dw1, _, *total = projection.norm_project_backward(
            dh.view(*x.shape[:-1], len(w1)), None, x, norm_weight, norm_bias, w1, None, ctx.eps,
            gradient if ctx.add else None, ctx.add)
        db2 = total[0].to(w2.dtype) if ctx.add else sums.over_rows(dupdate)
        return dx, dnorm_weight, dnorm_bias, dw1, sums.OP(parts, h.dtype), dupdate.t() @ h, db2, *[None] * 3


def transition_layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps=1e-5, residual=None, again=False):
    """[residual +] relu(LayerNorm(x) w1^T + b1) w2^T + b2 of x (B, X, Y, c). Under autocast the products are
    made in its dtype, and the sum in that of the residual. ValueError for what the kernels cannot take."""
    (units, channels), add = w1.shape, residual is x
    check_shapes(("x", x, (*x.shape[:3], channels)), ("norm_weight", norm_weight, (channels,)),
                 ("norm_bias", norm_bias, (channels,)), ("b1", b1, (units,)),
                 ("w2", w2, (channels, units)), ("b2", b2, (channels,)), ("residual", residual, x.shape))
    if residual is not None and not add:
        return residual + transition_layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps, again=again)
    w1, b1, w2, b2 = (t.to(product_dtype(x)).contiguous() for t in (w1, b1, w2, b2))
    if message := hidden_gradient.unsupported(w1.dtype, channels, units):
        raise ValueError(message)
    return TransitionLayer.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), w1, b1, w2,
                                 b2, add, eps, again)
