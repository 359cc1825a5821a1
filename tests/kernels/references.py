"""What kernels compute, in plain PyTorch: what the 3x rule compares them with. Arguments are the kernels'."""
import torch
import torch.nn.functional as F

from evoformer_kernels.attention.layout import views
from evoformer_kernels.attention.padded_bias import MASKED, PADDING
from evoformer_kernels.precision import at_least_float32


def norm_project(x, norm_weight, norm_bias, weight, head_weight, eps, hidden_bias=None):
    """None for what is empty."""
    x = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    y = None if weight is None else F.linear(x, weight, hidden_bias)
    return (y if hidden_bias is None else y.relu(),
            None if head_weight is None else F.linear(x, head_weight).permute(0, 3, 1, 2))


def output_project(og, weight, bias, onto=None, drop=None, scale=1.0):
    update = F.linear(og, weight, bias * scale)
    update = update if drop is None else update * drop
    return update if onto is None else onto + update


def attention(q, k, v, bias=None, key_mask=None, gate=None, gate_bias=None, scale=None):
    """q, k, v, gate (B, R, H, L, D); bias (B, H, L, L); key_mask (B, L) or (B, R, L), 1 = present; gate_bias
    (H, D)."""
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


def gated_attention(x, heads, axis, bias=None, key_mask=None, gate_bias=None):
    """Of packed q, k, v and gate."""
    q, k, v, gate = views([x], heads, axis)
    gate_bias = None if gate_bias is None else gate_bias.view(heads, -1)
    out = attention(q, k, v, bias, key_mask, gate, gate_bias)
    return out.permute((0, 3, 1, 2, 4) if axis == 1 else (0, 1, 3, 2, 4)).flatten(-2)


def attention_layer(x, weights, heads, axis, bias=None, key_mask=None, eps=1e-5, onto=None, drop=None,
                    turned=None):
    norm_weight, norm_bias, weight, gate_bias, out_weight, out_bias, head_weight = weights
    y, own_bias = norm_project(x, norm_weight, norm_bias, weight, head_weight, eps)
    if own_bias is not None:
        bias = own_bias.mT if (axis == 1 if turned is None else turned) else own_bias
    og = gated_attention(y, heads, axis, bias, key_mask, gate_bias)
    return output_project(og, out_weight, out_bias, onto, drop)


def padded_bias(bias, keys, LP, dtype, transpose):
    out, pad = bias.to(dtype), LP - bias.shape[-1]
    if keys is not None:
        out = torch.where(keys.bool()[:, None, None, :], out, MASKED)
    out = F.pad(out, (0, pad, 0, pad), value=PADDING)
    return out, out.mT.contiguous() if transpose else None


def bias_gradient(partial_sums, length, dtype, transpose):
    out = partial_sums.sum(0, dtype=torch.float32)[..., :length, :length].to(dtype)
    return (out.mT if transpose else out).contiguous()


def swiglu_transition(x, norm_weight, norm_bias, weight, out_weight, eps=1e-5):
    gate, value = norm_project(x, norm_weight, norm_bias, weight, None, eps)[0].chunk(2, -1)
    return F.linear(F.silu(gate) * value, out_weight)


def outer_first(left, right, weight, bias, scale=1.0, onto=None):
    update = F.linear(torch.einsum("bnic,bnjd->bijcd", left, right).flatten(-2), weight, bias) * scale
    return update if onto is None else onto + update


def sides(x, norm_weight, norm_bias, weight, bias, eps=1e-5):
    normal = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    return *F.linear(normal, weight, bias).chunk(2, dim=-1), x


def two_layers(x, w1, b1, w2, b2):
    return F.linear(F.linear(x, w1, b1).relu(), w2, b2)


def transition_layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps=1e-5):
    return x + two_layers(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), w1, b1, w2, b2)
