"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python a plan says once what follows from shapes, strides and dtypes; kernels make of mask and bias what
attention reads. Where somebody looks at operators it is operator.row_attention().
"""
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.attention.layout import strides
from fusion_lab.kernels.common import alike, check_device, check_shapes, precision
from fusion_lab.kernels.eager import differentiable_once, looks, watched, where
from fusion_lab.kernels.precision import product_dtype

NAME = "triangle_attention"
CAST = (torch.float32, torch.float16, torch.bfloat16)  # by autocast, which leaves float64 as it is
plans = {}


def check(q, k, v, bias, mask):
    """ValueError for a shape that would be misread."""
    B, N, H, S, _ = q.shape
    check_shapes(("k", k, tuple(q.shape)), ("v", v, tuple(q.shape)), ("bias", bias, (B, 1, H, S, S)),
                 ("mask", mask, (B, N, 1, 1, S)))


class Plan:
    """What follows from how the tensors of a call look; transpose: whether backward will read a bias's."""

    def __init__(self, q, k, v, bias, mask, scale, transpose):
        check_device(NAME, q)
        check(q, k, v, bias, mask)
        self.heads, self.length = q.shape[2:4]
        self.scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        self.transpose, self.bias_dtype = transpose, bias.dtype
        self.padded = attention.padded_length(self.length)
        self.padded_dtype = bias.dtype if bias.dtype in attention.HOLD_PADDING else torch.float32
        # Kernels take q, k and v by the same strides, as long as channels lie side by side
        self.as_they_lie = q.stride(-1) == 1 and strides(q) == strides(k) == strides(v)
        self.bound, self.call, self.sums = {}, None, 0

    def forward(self, q, k, v, bias, mask):
        """out, and what backward reads: q, k, v, the padded bias, its transpose, key_mask, out, lse."""
        qkv = [q, k, v] if self.as_they_lie else [x.contiguous() for x in (q, k, v)]
        padded, transposed = padding.launch(bias[:, 0], None, self.padded, self.padded_dtype, self.transpose,
                                            True, self.bound)
        key_mask = None
        if mask is not None:
            key_mask = padding.launch_key_mask(mask[:, :, 0, 0], self.padded, self.bound)
        settings = self.heads, 0, False, self.scale
        if self.call is None:
            self.call = attention.Launch(qkv, None, padded, key_mask, *settings)
            self.sums = self.call.bias_sum_count()
        out, lse = attention.forward(qkv, None, padded, key_mask, *settings, self.call)
        return out, (*qkv, padded, transposed if self.transpose else None, key_mask, out, lse)

    def backward(self, gradient, q, k, v, padded, transposed, key_mask, out, lse):
        """Gradients of q, k, v and the bias."""
        gradient = gradient.contiguous()
        gradient = gradient if alike(gradient) else gradient.clone()
        dq, dk, dv, bias_sums, *_ = attention.backward(
            [q, k, v], None, padded, transposed, key_mask, out, lse, gradient, None, None, self.heads, 0,
            False, self.scale, self.sums, 0, self.call)
        dbias = bias_gradient.launch(bias_sums, self.length, self.bias_dtype, False, self.bound)
        return dq, dk, dv, dbias[:, None]


class TriangleAttention(torch.autograd.Function):
    """A plan's forward and backward."""

    @staticmethod
    def forward(ctx, plan, q, k, v, bias, mask):
        ctx.plan = plan
        out, saved = plan.forward(q, k, v, bias, mask)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @differentiable_once(NAME)
    def backward(ctx, gradient):
        with where(gradient):
            return None, *ctx.plan.backward(gradient, *ctx.saved_tensors), None


def triangle_attention(q, k, v, bias, mask=None, scale=None):
    """cuEquivariance's function of this name: softmax(scale q k^T + bias, masked) v.

    q, k, v (B, N, H, S, D); bias (B, 1, H, S, S); mask (B, N, 1, 1, S), True = present, or None; scale:
    default D^-0.5. Returns (B, N, H, S, D). A bias below -1e9, or -inf, masks as much as that does. Gradients
    for q, k, v and bias, none from rows whose keys are all masked; no second derivatives (RuntimeError).
    Under autocast q, k and v are cast to its dtype; a bias is read as it is. Raises ValueError for another
    shape, dtypes of q, k and v that differ, and for more keys than queries.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = product_dtype(q)
        q, k, v = (x.to(dtype) if x.dtype in CAST else x for x in (q, k, v))
    given = q, k, v, bias, mask
    if watched(NAME, given):
        check(*given)
        return attention.row_attention(q, k, v, bias[:, 0], None if mask is None else mask[:, :, 0, 0], scale)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                          or bias.requires_grad)
    with where(q):
        def make():
            return Plan(*given, scale, learns and q.shape[3] > attention.longest_short())
        key = *looks(given), scale, learns, precision(q.dtype)
        plan = tuner.plan(plans, key, make) if alike(*given) else make()
        return TriangleAttention.apply(plan, *given) if learns else plan.forward(*given)[0]

