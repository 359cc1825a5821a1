"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python operator.FromPython runs; under torch.compile, fake tensors or a counter it is row_attention().
"""
import torch
from torch import Tensor

from evoformer_kernels.attention import operator as attention
from evoformer_kernels.attention import padded_bias as padding
from evoformer_kernels.calls import say_plain, watched, where
from evoformer_kernels.common import check_devices, check_shapes, multiplies
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


class Update(attention.CallFromPython):
    """A call from Python whose tensors q, k, v, two Nones, bias and mask have passed checked() and lie as
    kernels read them. So have all tensors that look like them."""
    name = NAME

    def __init__(self, tensors, scale, may_learn):
        super().__init__(tensors, tensors[0].shape[2], 0, scale, may_learn)


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
    if watched(NAME, (q, k, v, bias, mask)):
        checked(q, k, v, bias, mask)
        key_mask = None if mask is None else mask.flatten(2).bool()  # (B, N, K)
        return attention.row_attention(q, k, v, bias[:, 0], key_mask, scale)
    with where(q):
        settings = float(scale), torch.is_grad_enabled()
        call = Update.known((q, k, v, None, None, bias, mask), *settings)
        if call is None:
            checked(q, k, v, bias, mask)
            if not (q.stride(-1) == 1 and q.stride() == k.stride() == v.stride()):  # one stride() serves all
                q, k, v = map(attention.in_order, (q, k, v))
            call = Update.of((q, k, v, None, None, bias, mask), *settings)
        return attention.FromPython.apply(call, bias, mask, q, k, v)
