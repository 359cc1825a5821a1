"""Stands in for cuEquivariance in tests of benchmarks: two functions as in its manual."""
import torch
import torch.nn.functional as F


def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False):
    """q, k, v (B, N, H, S, D); bias (B, 1, H, S, S), float32; mask (B, N, 1, 1, S), True = present."""
    assert q.is_contiguous() and bias.shape[1] == 1 and bias.dtype == torch.float32
    bias = bias if mask is None else bias.masked_fill(~mask, -1e9)
    return (q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5) + bias).softmax(dim=-1).to(v.dtype) @ v


def triangle_multiplicative_update(x, direction="outgoing", mask=None, *, norm_in_weight, norm_in_bias,
                                   p_in_weight, g_in_weight, norm_out_weight, norm_out_bias, p_out_weight,
                                   g_out_weight, p_in_bias=None, g_in_bias=None, p_out_bias=None,
                                   g_out_bias=None, eps=1e-5):
    """x (B, N, N, C), not normalised; the "in" weights hold those of both sides, one below the other."""
    y = F.layer_norm(x, x.shape[-1:], norm_in_weight, norm_in_bias, eps)
    gated = F.linear(y, p_in_weight, p_in_bias) * F.linear(y, g_in_weight, g_in_bias).sigmoid()
    gated = gated if mask is None else gated * mask[..., None]
    a, b = gated.chunk(2, dim=-1)
    rule = {"outgoing": "bikc,bjkc->bijc", "incoming": "bkic,bkjc->bijc"}[direction]
    out = F.layer_norm(torch.einsum(rule, a, b), a.shape[-1:], norm_out_weight, norm_out_bias, eps)
    return F.linear(out, p_out_weight, p_out_bias) * F.linear(y, g_out_weight, g_out_bias).sigmoid()
