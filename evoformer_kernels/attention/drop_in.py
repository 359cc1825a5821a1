"""Triangle attention as other projects call it, under cuEquivariance's name: brings a call's tensors to the
sizes that row_attention() takes, or runs PyTorch's operations."""
import torch
from torch import Tensor

from evoformer_kernels.attention import padded_bias as padding
from evoformer_kernels.attention.function import row_attention
from evoformer_kernels.common import check_devices, check_shapes, multiplies
from evoformer_kernels.family import refuse_transforms, say_plain
from evoformer_kernels.limits import WIDEST_HEAD
from evoformer_kernels.precision import product_dtype

NAME = "triangle_attention"
CAST = (torch.float32, torch.float16, torch.bfloat16)  # by autocast, which leaves float64 as it is


def lifted(x):
    """x of five dimensions, by leading ones; None stays."""
    return x if x is None or x.dim() > 4 else x[(None,) * (5 - x.dim())]


def checked(q, k, v, bias, mask, kv_lengths=None):
    """ValueError for what would be misread, in tensors of five dimensions."""
    if not q.dim() == k.dim() == v.dim() == 5 or not q.shape[-1]:
        raise ValueError(f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, but must be "
                         "(B, N, H, S, D), without leading ones or with them, and D at least 1")
    (B, N, H, Q, D), K = q.shape, k.shape[3]
    check_shapes(("k", k, (B, N, H, K, D)), ("v", v, (B, N, H, K, D)), ("bias", bias, (B, 1, H, Q, K)),
                 ("mask", mask, (B, N, 1, 1, K)), ("kv_lengths", kv_lengths, (B, N, 1, 1, 1)))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, but they must be the same")
    if kv_lengths is not None and (mask is not None or kv_lengths.dtype != torch.int32):
        raise ValueError("kv_lengths must be int32, and there may be no mask beside it")
    check_devices(q=q, bias=bias, mask=mask, kv_lengths=kv_lengths)


def plain(q, k, v, bias, mask, scale):
    """The same by PyTorch's operations. What scores cost is reading and writing them: q is scaled, not they,
    and bias and mask are added in place (vmap may have a batch of these alone, which fits in no place)."""
    add = torch.add if torch._C._are_functorch_transforms_active() else torch.Tensor.add_
    wide = torch.float32 if q.dtype == torch.float16 else q.dtype  # -65504 ends float16
    scores = ((q * scale) @ k.mT).to(wide)  # (B, N, H, Q, K)
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

    q (B, N, H, Q, D); k, v (B, N, H, K, D); bias (B, 1, H, Q, K); mask (B, N, 1, 1, K), other than 0 =
    present, or None. Each of these may lack leading dimensions of 1. Returns (B, N, H, Q, D): always five
    dimensions, as cuEquivariance does. kv_lengths (B, N, 1, 1, 1) in int32, in place of a mask: so many of
    the first keys are present; rows of none are 0. scale: default D^-0.5.

    A bias below -1e9, or -inf, masks as much as that does. Gradients for q, k, v and bias, none from rows
    whose keys are all masked, none for q and k where a single one is present; no second derivatives
    (RuntimeError). Under autocast q, k and v are cast to its dtype; a bias is read as it is. Kernels take 16
    bits, heads of up to 128 channels and as many keys as queries; all else runs in PyTorch's operations,
    which a warning says: they keep all scores. Raises ValueError for another shape, dtypes of q, k and v that
    differ, and return_aux.
    """
    if return_aux:
        raise ValueError(f"{NAME} has no return_aux")
    if bias is None:
        raise ValueError("bias is missing")
    q, k, v, bias, mask = map(lifted, (q, k, v, bias, mask))
    if kv_lengths is not None:
        checked(q, k, v, bias, mask, kv_lengths)
        within = torch.arange(k.shape[3], device=k.device) < kv_lengths
        return triangle_attention(q, k, v, bias, within, scale) * (kv_lengths > 0)
    if torch.is_autocast_enabled(q.device.type):
        dtype = product_dtype(q)
        q, k, v = (x.to(dtype) if x.dtype in CAST else x for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else scale
    if q.shape[-1] > WIDEST_HEAD or q.shape != k.shape or not multiplies(q, q.dtype) or not q.numel():
        checked(q, k, v, bias, mask)
        if q.numel():
            keys = "" if q.shape == k.shape else "another number of keys than queries with "
            say_plain(NAME, f"{keys}heads of {q.shape[-1]} channels in {str(q.dtype)[6:]}")
        return plain(q, k, v, bias, mask, scale)
    checked(q, k, v, bias, mask)
    refuse_transforms(NAME)
    return row_attention(q, k, v, bias, mask, scale)
