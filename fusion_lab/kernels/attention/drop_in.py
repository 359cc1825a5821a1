"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python operator.attention_from_python() runs; under torch.compile, fake tensors or a counter it is
row_attention().
"""
import torch
from torch import Tensor

from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.calls import say_plain, watched
from fusion_lab.kernels.common import check_shapes, multiplies
from fusion_lab.kernels.limits import WIDEST_HEAD
from fusion_lab.kernels.precision import product_dtype

NAME = "triangle_attention"
CAST = (torch.float32, torch.float16, torch.bfloat16)  # by autocast, which leaves float64 as it is


def spread(name, x, size):
    """x with its dimensions of 1 expanded to this size. ValueError where others differ."""
    if x is None or x.shape == size:
        return x
    if x.dim() != len(size) or any(n not in (1, m) for n, m in zip(x.shape, size, strict=True)):
        raise ValueError(f"{name} is {tuple(x.shape)}, but must be {size}, or 1 instead of any of these")
    return x.expand(size)


def checked(q, k, v, bias, mask):
    """q, k, v, bias (B, 1, H, Q, K) and mask (B, N, 1, 1, K) or None, of sizes that fit. ValueError for what
    would be misread."""
    if q.dim() != 5 or k.dim() != 5:
        raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}, but both must be (B, N, H, S, D) or "
                         "(N, H, S, D)")
    (B, N, H, Q, D), K = q.shape, k.shape[3]
    if not q.shape == k.shape == v.shape:
        check_shapes(("k", k, (B, N, H, K, D)), ("v", v, (B, N, H, K, D)))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, but they must be the same")
    return q, k, v, spread("bias", bias, (B, 1, H, Q, K)), spread("mask", mask, (B, N, 1, 1, K))


def plain(q, k, v, bias, mask, scale):
    """The same by PyTorch's operations. What scores cost is reading and writing them: q is scaled, not they,
    and bias and mask are added in place (vmap may have a batch of these alone, which fits in no place)."""
    add = torch.add if torch._C._are_functorch_transforms_active() else torch.Tensor.add_
    wide = torch.float32 if q.dtype == torch.float16 else q.dtype  # -65504 ends float16
    scores = ((q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT).to(wide)  # (B, N, H, Q, K)
    scores = add(scores, padding.lifted(bias))
    if mask is None:
        return scores.softmax(-1).to(v.dtype) @ v
    present = mask.bool()
    scores = add(scores, torch.zeros_like(present, dtype=wide).masked_fill(~present, padding.lowest(wide)))
    out = scores.softmax(-1).to(v.dtype) @ v
    return torch.where(present.any(-1, keepdim=True), out, out.detach())  # no gradient from empty rows


def triangle_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None,
                       scale: float | None = None, return_aux: bool = False, *,
                       kv_lengths: Tensor | None = None) -> Tensor:
    """cuEquivariance's function of this name: softmax(scale q k^T + bias, masked) v.

    q (B, N, H, Q, D); k, v (B, N, H, K, D); bias (B, 1, H, Q, K); mask (B, N, 1, 1, K), True = present, or
    None; in bias and mask any size may be 1. All of them may lack the B. kv_lengths (B, N, 1, 1, 1): so many
    of the first keys are present. scale: default D^-0.5. Returns what is shaped as q.

    A bias below -1e9, or -inf, masks as much as that does. Gradients for q, k, v and bias, none from rows
    whose keys are all masked, none for q and k where a single one is present; no second derivatives
    (RuntimeError). Under autocast q, k and v are cast to its dtype; a bias is read as it is. Kernels take 16
    bits, heads of up to 128 channels and as many keys as queries; all else runs in PyTorch's operations,
    which a warning says: they keep all scores. Raises ValueError for another shape, dtypes of q, k and v that
    differ, and return_aux.
    """
    if return_aux:
        raise ValueError(f"{NAME} has no return_aux")
    if q.dim() == 4:
        lifted = [x if x is None else x[None] for x in (q, k, v, bias, mask, kv_lengths)]
        return triangle_attention(*lifted[:5], scale, kv_lengths=lifted[5])[0]
    if kv_lengths is not None:
        within = torch.arange(k.shape[3], device=k.device) < kv_lengths
        mask = within if mask is None else within & mask.bool()
    if torch.is_autocast_enabled(q.device.type):
        dtype = product_dtype(q)
        q, k, v = (x.to(dtype) if x.dtype in CAST else x for x in (q, k, v))
    given = q, k, v, bias, mask = checked(q, k, v, bias, mask)
    if q.shape[-1] > WIDEST_HEAD or q.shape != k.shape or not multiplies(q, q.dtype):
        keys = "" if q.shape == k.shape else "another number of keys than queries with "
        say_plain(NAME, f"{keys}heads of {q.shape[-1]} channels in {str(q.dtype)[6:]}")
        return plain(*given, scale)
    if watched(NAME, given):
        key_mask = None if mask is None else mask.flatten(2).bool()  # (B, N, K)
        return attention.row_attention(q, k, v, bias[:, 0], key_mask, scale)
    qkv, strides = (q, k, v), q.stride()  # kernels take all by the same, as long as channels lie side by side
    if not (strides[-1] == 1 and strides == k.stride() == v.stride()):
        qkv = [x.contiguous() for x in qkv]
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return attention.attention_from_python(qkv, q.shape[2], 0, scale, bias, mask)
