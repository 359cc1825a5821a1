"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python a plan says once what follows from shapes, strides and dtypes, and small kernels pad mask and bias
first. Under torch.compile, fake tensors or a counter operator.row_attention() runs instead.
"""
import torch
from torch import Tensor

from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.attention.layout import strides
from fusion_lab.kernels.common import check_device, check_shapes, multiplies
from fusion_lab.kernels.eager import planned, say_plain, watched
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
    check_shapes(("k", k, (B, N, H, K, D)), ("v", v, (B, N, H, K, D)))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, but they must be the same")
    return q, k, v, spread("bias", bias, (B, 1, H, Q, K)), spread("mask", mask, (B, N, 1, 1, K))


class KeptLaunches:
    """What follows from how q and bias look, with the launches of operator.py's Launch, which keeps them.

    transpose: whether backward reads the transposed bias; bound: other launches by name.
    """

    def __init__(self, q, bias, learns, *settings):
        check_device(self.name, q)
        self.settings, self.length, self.bias_dtype = settings, bias.shape[-1], bias.dtype
        self.transpose = learns and self.length > attention.longest_short()
        self.padded = attention.padded_length(self.length)
        self.padded_dtype = bias.dtype if bias.dtype in attention.HOLD_PADDING else torch.float32
        self.bound, self.call, self.sums = {}, None, 0

    def launch_forward(self, qkvg, bias, keys):
        """out, and what backward reads: qkvg, the padded bias, its transpose, key_mask, out, lse."""
        padded, transposed = padding.launch(bias, None, self.padded, self.padded_dtype, self.transpose, True,
                                            self.bound)
        key_mask = None if keys is None else padding.launch_key_mask(keys, self.padded, self.bound)
        given = qkvg, None, padded, key_mask
        if self.call is None:
            self.call = attention.Launch(*given, *self.settings)
            self.sums = self.call.bias_sum_count()
        out, lse = self.call.forward(*given)
        return out, (*qkvg, padded, transposed if self.transpose else None, key_mask, out, lse)

    def launch_backward(self, gradient, qkvg, padded, transposed, key_mask, out, lse):
        """Gradients of qkvg and of the bias (B, H, L, L)."""
        *grads, bias_sums, _, _, _ = self.call.backward(
            qkvg, None, padded, transposed, key_mask, out, lse, gradient, None, None, self.sums, 0)
        return *grads, bias_gradient.launch(bias_sums, self.length, self.bias_dtype, False, self.bound)


class Plan(KeptLaunches):
    """What follows from how a call's tensors look."""
    name, kept = NAME, {}

    def __init__(self, tensors, learns, scale):
        q, k, v, bias, _ = tensors
        super().__init__(q, bias, learns, q.shape[2], 0, False,
                         float(q.shape[-1] ** -0.5 if scale is None else scale))
        # Kernels take q, k and v by the same strides, as long as channels lie side by side
        self.as_they_lie = q.stride(-1) == 1 and strides(q) == strides(k) == strides(v)

    def forward(self, q, k, v, bias, mask):
        """out, and what backward reads."""
        qkv = [q, k, v] if self.as_they_lie else [x.contiguous() for x in (q, k, v)]
        return self.launch_forward(qkv, bias[:, 0], None if mask is None else mask[:, :, 0, 0])

    def backward(self, gradient, q, k, v, *saved):
        """Gradients of q, k, v and the bias; none of the mask."""
        *grads, dbias = self.launch_backward(gradient, [q, k, v], *saved)
        return *grads, dbias[:, None], None


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
        keys = None if mask is None else mask[:, :, 0, 0].bool()
        return attention.row_attention(q, k, v, bias[:, 0], keys, scale)
    return planned(Plan, given, q.dtype, scale)
