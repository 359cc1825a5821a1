"""Gated triangle attention, called from Python: operator.gated_attention() by a kept plan (eager.py)."""
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention.drop_in import KeptLaunches
from fusion_lab.kernels.eager import planned, watched

NAME = "gated triangle attention"


class Plan(KeptLaunches):
    """What follows from how the tensors of a call look."""
    name, kept = NAME, {}

    def __init__(self, tensors, learns, heads, axis):
        packed, bias, _ = tensors
        super().__init__(packed, bias, learns, heads, axis, True, (packed.shape[-1] // 4 // heads) ** -0.5)

    def forward(self, packed, bias, keys):
        return self.launch_forward([packed], bias, keys)

    def backward(self, gradient, packed, *saved):
        return *self.launch_backward(gradient, [packed], *saved), None


def gated_attention(packed, heads, axis, bias, keys=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each position on the other.

    packed (B, X, Y, 4 c), contiguous: q, k, v and gate behind each other; bias (B, H, L, L), with any
    strides; keys (B, R, L), 1 = present. Returns (B, X, Y, c). Gradients for packed and bias; no second
    derivatives (RuntimeError).
    """
    given = packed, bias, keys
    if watched(NAME, given):
        return attention.gated_attention([packed], heads, axis, bias, keys)
    return planned(Plan, given, packed.dtype, heads, axis)
