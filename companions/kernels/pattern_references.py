"""The patterns of pattern_*.py in plain PyTorch, one operation after the other, as they are written first."""
import torch
import torch.nn.functional as F

from fusion_lab.kernels.precision import at_least_float32

EPS = 1e-5
ACTIVATIONS = dict(relu=F.relu, gelu=lambda x: F.gelu(x, approximate="tanh"), silu=F.silu)


def plain_linear_activation(x, weight, bias, kind):
    """The same in three operations, as they are written first."""
    return ACTIVATIONS[kind](x @ weight.t() + bias)


def plain_add_norm(x, residual, weight, bias=None, eps=EPS):
    """The same in three to five operations."""
    total = x + residual
    if bias is not None:
        return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    wide = total.to(at_least_float32(total.dtype))
    return total, weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(total.dtype)


def plain_layer_norm(x, weight, bias, eps=EPS):
    wide = x.to(at_least_float32(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


def plain_softmax_topk(x, k):
    """The same in two operations. Equal entries: the earlier ones, where torch leaves that open."""
    return tuple(x.softmax(-1).topk(k))


def plain_masked_softmax(q, k, mask):
    """The same in three operations."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(mask[:, None] == 0, float("-inf")).softmax(-1)
