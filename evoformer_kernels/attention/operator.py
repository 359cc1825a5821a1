"""Attention with its derivative, as functions: of operators for graphs, of launches for calls from Python.

    out = softmax(q k^T scale + bias + key_bias) v * sigmoid(gate + gate_bias)

key_mask is 1 where a key is present; key_bias is what is added to scores for it. layout.py says what `qkvg`
and `axis` are, call.py how forward and backward are launched.
"""
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from evoformer_kernels.attention import bias_gradient
from evoformer_kernels.attention import padded_bias as padding
from evoformer_kernels.attention.call import (
    BACKWARD_OP,
    FORWARD_OP,
    NONE,
    Attention,
    Given,
    Saved,
    bias_sum_count,
    gate_sum_count,
    listed,
    padded_length,
    reads_transposed_bias,
)
from evoformer_kernels.attention.layout import views
from evoformer_kernels.attention.padded_bias import HOLD_PADDING, MASKED, PADDING
from evoformer_kernels.calls import laid, once, watched, where
from evoformer_kernels.common import check_shapes
from evoformer_kernels.precision import at_least_float32
from evoformer_kernels.reductions import sums


def reference(q, k, v, bias=None, key_mask=None, gate=None, gate_bias=None, scale=None):
    """The same in plain PyTorch.

    q, k, v, gate (B, R, H, L, D); bias (B, H, L, L); key_mask (B, L) or (B, R, L), 1 = present; gate_bias
    (H, D).
    """
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias[:, None]
    if key_mask is not None:
        key_mask = key_mask[:, None] if key_mask.dim() == 2 else key_mask
        lowest = torch.finfo(torch.float16).min / 2 if scores.dtype == torch.float16 else MASKED
        scores = scores.masked_fill(~key_mask.bool()[:, :, None, None, :], lowest)
    out = scores.softmax(-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v
    if gate is None:
        return out
    return out * (gate if gate_bias is None else gate + gate_bias[:, None]).sigmoid()


class BiasedAttention(torch.autograd.Function):
    """Attention by operators, with its derivative; saves qkvg, the output, lse and the padded bias. settings:
    number of heads, axis, scale."""

    @staticmethod
    def forward(ctx, settings, bias, key_mask, gate_bias, transpose, *qkvg):
        ctx.settings, ctx.bias = settings, None if bias is None else (bias.shape[-1], bias.dtype)
        *sizes, width = views(qkvg, *settings[:2])[0].shape
        check_shapes(("gate_bias", gate_bias, (sizes[2] * width,)))
        padded, transposed, key_bias = padded_bias(bias, key_mask, qkvg[0], sizes, transpose)
        out, lse = FORWARD_OP(listed(qkvg, gate_bias, padded, key_bias), *settings)
        ctx.save_for_backward(gate_bias, padded, key_bias, transposed, out, lse, *qkvg)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gate_bias, padded, key_bias, transposed, out, lse, *qkvg = ctx.saved_tensors
        q, dbias, dgate_bias = views(qkvg, *ctx.settings[:2])[0], None, None
        saved = Saved(transposed, out, lse, gradient.contiguous(), None, None)
        *grads, bias_sums, gate_bias_sums, _, _ = BACKWARD_OP(
            [*listed(qkvg, gate_bias, padded, key_bias), *saved], *ctx.settings,
            0 if padded is None else bias_sum_count(*q.shape, q.dtype),
            0 if gate_bias is None else gate_sum_count(*q.shape, q.dtype))
        if padded is not None:
            dbias = bias_gradient.OP(bias_sums, *ctx.bias, False)
        if gate_bias is not None:
            dgate_bias = sums.OP(gate_bias_sums, gate_bias.dtype).view(gate_bias.shape)
        return None, dbias, None, dgate_bias, None, *grads


class CallFromPython(Attention):
    """The launches for a call from Python: of a bias and a mask as they are given, which small kernels pad.

    may_learn: whether gradients are enabled."""

    def __init__(self, tensors, heads, axis, scale, may_learn):
        super().__init__(tensors, heads, axis, scale)
        given = Given(*tensors)
        self.stride, self.bias_size, self.bias_dtype = given.q.stride(), given.bias.shape, given.bias.dtype
        self.padded_dtype = self.bias_dtype if self.bias_dtype in HOLD_PADDING else torch.float32
        # Whether there will be a backward that reads the transposed bias:
        self.transpose = may_learn and not self.short and any(
            t is not None and t.requires_grad for t in tensors)

    def pad(self, bias, key_mask):
        """Attention's bias, its transpose or None, and key_bias or None."""
        padded, transposed = padding.launch(bias, None, self.LP, self.padded_dtype, self.transpose, True,
                                            self.bound)
        key_bias = None if key_mask is None else padding.launch_key_bias(key_mask, self.LP, self.bound)
        return padded, transposed, key_bias


class FromPython(torch.autograd.Function):
    """The same by the launches of a CallFromPython, for calls that nothing watches.

    bias (B, H, L, L) or (B, 1, H, L, L), key_mask (B, R, L), (B, R, 1, 1, L) or None, both of any strides.
    RuntimeError for tensors on a CPU, where no kernel runs, and for a second derivative."""

    @staticmethod
    def forward(ctx, call, bias, key_mask, *qkvg):
        ctx.call = call
        padded, transposed, key_bias = call.pad(bias, key_mask)
        given = *qkvg, *NONE[len(qkvg):], padded, key_bias
        out, lse = call.forward(given)
        ctx.save_for_backward(*given, transposed, out, lse)
        return out

    @staticmethod
    @once
    def backward(ctx, gradient):
        *given, transposed, out, lse = ctx.saved_tensors
        call, saved = ctx.call, (transposed, out, lse, gradient, None, None)
        if given[0].stride() != call.stride:
            given[:call.parts] = [laid(x, call.stride) for x in given[:call.parts]]
        *grads, bias_sums, _, _, _ = call.backward(given, saved, call.bias_sum_count, 0)
        dbias = bias_gradient.launch(bias_sums, call.bias_size, call.bias_dtype, False, call.bound)
        return None, dbias, None, *grads


def padded_bias(bias, key_mask, like, sizes, transpose):
    """What the kernels add to scores: (bias (B, H, LP, LP), its transpose, key_bias (B or 1, R or 1, LP)).

    bias (B, H, L, L) or None; key_mask (B, L) or (B, R, L), whose B and R may be 1, or None; like: a tensor
    of the same device; sizes: B, R, H, L; transpose: whether the transpose is needed. What is not needed is
    None. A key mask that all rows share goes into the bias, if there is one.
    """
    samples, rows, heads, length = sizes
    check_shapes(("bias", bias, (samples, heads, length, length)),
                 ("key_mask", key_mask, (samples, length), (samples, rows, length), (1, length),
                  (1, rows, length), (samples, 1, length), (1, 1, length)))
    transposed, LP = None, padded_length(length)
    if bias is not None:
        dtype = bias.dtype if bias.dtype in HOLD_PADDING else torch.float32
        shared = None
        if key_mask is not None and key_mask.dim() == 2:
            shared, key_mask = key_mask, None
        if shared is None and LP == length:
            bias = bias.to(dtype)  # which often is one of these two already
            bias, transposed = bias.contiguous(), bias.mT.contiguous() if transpose else None
        else:
            bias, transposed = padding.OP(bias, shared, LP, dtype, transpose)
            transposed = transposed if transpose else None
    elif key_mask is None and LP > length:
        key_mask = like.new_ones(1, length)  # so that there is a key bias, with PADDING beyond L
    key_bias = None
    if key_mask is not None:
        key_mask = key_mask[:, None] if key_mask.dim() == 2 else key_mask
        key_bias = F.pad((key_mask.float() - 1) * -MASKED, (0, LP - length), value=PADDING).contiguous()
    return bias, transposed, key_bias


def in_order(x):
    """x, contiguous, with the strides that follow from its shape: contiguous() leaves those along 1."""
    return x.contiguous().flatten().view(x.shape)


def gated_attention(qkvg, heads, axis, bias=None, key_mask=None, gate_bias=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each position on the other.

    qkvg: [packed], q, k, v and gate behind each other (B, X, Y, 4 c), or [q, k, v, gate]; bias (B, H, L, L),
    nowhere below -1e9; key_mask (B, L) or (B, R, L) for each row, 1 = present; gate_bias (c,), added to the
    gate. Returns (B, X, Y, c). Gradients for all but key_mask.
    """
    width = qkvg[-1].shape[-1] // (4 if len(qkvg) == 1 else 1) // heads
    length, gate_bias = qkvg[0].shape[axis], None if gate_bias is None else gate_bias.contiguous()
    return BiasedAttention.apply((heads, axis, width ** -0.5), bias, key_mask, gate_bias,
                                 reads_transposed_bias(length), *qkvg)


def row_attention(q, k, v, bias=None, key_mask=None, scale=None):
    """Attention without a gate for q, k, v (B, R, H, L, D), bias (B, H, L, L), key_mask (B, L) or (B, R, L).

    A bias below -1e9, or -inf, masks as much as that does, in float16 as much as its lowest number.
    """
    bias = None if bias is None else padding.lifted(bias)
    qkv = [in_order(x) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BiasedAttention.apply((q.shape[2], 0, scale), bias, key_mask, None,
                                 reads_transposed_bias(q.shape[3]), *qkv)


def gated_attention_from_python(packed, heads, axis, bias, key_mask=None):
    """gated_attention() of packed (B, X, Y, 4 c), contiguous, for calls from Python; key_mask (B, R, L)."""
    if watched("gated triangle attention", (packed, bias, key_mask)):
        return gated_attention([packed], heads, axis, bias, key_mask)
    scale = (packed.shape[-1] // 4 // heads) ** -0.5
    with where(packed):
        call = CallFromPython.of((packed, *NONE[1:], bias, key_mask), heads, axis, scale,
                                 torch.is_grad_enabled())
        return FromPython.apply(call, bias, key_mask, packed)
