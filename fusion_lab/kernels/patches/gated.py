"""Gated triangle attention, called from Python: operator.gated_attention() by a kept plan (eager.py)."""
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.common import alike, check_device, precision
from fusion_lab.kernels.eager import differentiable_once, looks, watched, where

NAME = "gated triangle attention"
plans = {}


class Plan:
    """What follows from how the tensors of a call look; transpose: whether backward will read a bias's."""

    def __init__(self, packed, bias, heads, axis, transpose):
        check_device(NAME, packed)
        self.settings = heads, axis, True, (packed.shape[-1] // 4 // heads) ** -0.5
        self.length, self.transpose, self.bias_dtype = packed.shape[axis], transpose, bias.dtype
        self.padded = attention.padded_length(self.length)
        self.padded_dtype = bias.dtype if bias.dtype in attention.HOLD_PADDING else torch.float32
        self.bound, self.call, self.sums = {}, None, 0

    def forward(self, packed, bias, keys):
        """out, and what backward reads."""
        padded, transposed = padding.launch(bias, None, self.padded, self.padded_dtype, self.transpose, True,
                                            self.bound)
        key_mask = None if keys is None else padding.launch_key_mask(keys, self.padded, self.bound)
        given = [packed], None, padded, key_mask, *self.settings
        if self.call is None:
            self.call = attention.Launch(*given)
            self.sums = self.call.bias_sum_count()
        out, lse = attention.forward(*given, self.call)
        return out, (packed, padded, transposed if self.transpose else None, key_mask, out, lse)

    def backward(self, gradient, packed, padded, transposed, key_mask, out, lse):
        """Gradients of packed and bias."""
        gradient = gradient.contiguous()
        gradient = gradient if alike(gradient) else gradient.clone()
        dpacked, bias_sums, *_ = attention.backward(
            [packed], None, padded, transposed, key_mask, out, lse, gradient, None, None, *self.settings,
            self.sums, 0, self.call)
        return dpacked, bias_gradient.launch(bias_sums, self.length, self.bias_dtype, False, self.bound)


class GatedAttention(torch.autograd.Function):
    """A plan's forward and backward."""

    @staticmethod
    def forward(ctx, plan, packed, bias, keys):
        ctx.plan = plan
        out, saved = plan.forward(packed, bias, keys)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @differentiable_once(NAME)
    def backward(ctx, gradient):
        with where(gradient):
            return None, *ctx.plan.backward(gradient, *ctx.saved_tensors), None


def gated_attention(packed, heads, axis, bias, keys=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each position on the other.

    packed (B, X, Y, 4 c), contiguous: q, k, v and gate behind each other; bias (B, H, L, L), with any
    strides; keys (B, R, L), 1 = present. Returns (B, X, Y, c). Gradients for packed and bias; no second
    derivatives (RuntimeError).
    """
    given = packed, bias, keys
    if watched(NAME, given):
        return attention.gated_attention([packed], heads, axis, bias, keys)
    learns = torch.is_grad_enabled() and (packed.requires_grad or bias.requires_grad)
    with where(packed):
        def make():
            return Plan(packed, bias, heads, axis, learns and packed.shape[axis] > attention.longest_short())
        aligned = alike(*given) and packed.shape[-1] // 4 * packed.element_size() % 16 == 0
        key = *looks(given), heads, axis, learns, precision(packed.dtype)
        plan = tuner.plan(plans, key, make) if aligned else make()
        return GatedAttention.apply(plan, *given) if learns else plan.forward(*given)[0]
