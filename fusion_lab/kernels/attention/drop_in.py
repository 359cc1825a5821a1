"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python a plan says once what follows from shapes, strides and dtypes, and small kernels pad mask and bias
first. Under torch.compile, fake tensors or a counter operator.row_attention() runs instead.
"""
import torch

from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.attention.layout import strides
from fusion_lab.kernels.common import check_device, check_shapes
from fusion_lab.kernels.eager import planned, say_plain, stream_of, watched
from fusion_lab.kernels.limits import WIDEST_HEAD
from fusion_lab.kernels.precision import HALF, product_dtype

NAME = "triangle_attention"
LAUNCHES = {  # of backward: the tensors that each kernel takes, in groups
    "attention_gate_backward_kernel": ("gate",),
    "attention_backward_short_kernel": ("qkv", "bias", "saved", "dq", "dkv", "sums"),
    "attention_backward_q_kernel": ("qkv", "bias", "saved", "dq"),
    "attention_backward_kv_kernel": ("qkv", "transposed", "saved", "dkv", "nothing"),
    "attention_backward_kv_kernel stored": ("qkv", "transposed", "saved", "dkv", "dscores"),
    "attention_backward_scores_kernel": ("k", "dscores", "dq", "sums"),
    "attention_backward_bias_kernel": ("qkv", "bias", "saved", "sums"),
    "attention_one_key_kernel": ("one_key",)}
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
    """What follows from how q and bias look, and operator.py's launchers, which keep their launches.

    transpose: whether backward reads the transposed bias; bound: launches by name; call: forward's.
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
        """Gradients of qkvg and the bias (B, H, L, L); dtype of the partial sums of the latter."""
        *grads, bias_sums, _, _, _ = self.call.backward(
            qkvg, None, padded, transposed, key_mask, out, lse, gradient, None, None, self.sums, 0)
        dbias = bias_gradient.launch(bias_sums, self.length, self.bias_dtype, False, self.bound)
        return *grads, dbias, bias_sums.dtype


class Plan(KeptLaunches):
    """What follows from how a call's tensors look. repeat: backward's launches, None before its first run."""
    name, kept = NAME, {}

    def __init__(self, tensors, learns, scale):
        q, k, v, bias, mask = tensors
        super().__init__(q, bias, learns, q.shape[2], 0, False,
                         float(q.shape[-1] ** -0.5 if scale is None else scale))
        # Kernels take q, k and v by the same strides, as long as channels lie side by side
        self.as_they_lie = q.stride(-1) == 1 and strides(q) == strides(k) == strides(v)
        self.repeat = None
        self.bias_size = (*bias.shape[:1], *bias.shape[2:3], self.padded, self.padded)
        self.mask_size = (*q.shape[:2], self.padded)

    def forward(self, q, k, v, bias, mask):
        """out, and what backward reads: q, k, v, the padded bias, its transpose, key_mask, out, lse."""
        if self.call is None:
            return self.first_forward(q, k, v, bias, mask)
        if not self.as_they_lie:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        stream, bound, new = stream_of(q), self.bound, q.new_empty
        padded, key_mask = new(self.bias_size, dtype=self.padded_dtype), None
        transposed = new(self.bias_size, dtype=self.padded_dtype) if self.transpose else None
        bound["padded_bias"](bias, None, padded, padded if transposed is None else transposed, stream=stream)
        if mask is not None:
            key_mask = new(self.mask_size, dtype=torch.float32)
            mask = mask.view(torch.uint8) if mask.dtype is torch.bool else mask
            bound["key_mask"](mask, key_mask, stream=stream)
        out, lse = new(q.shape), new(q.shape[:-1], dtype=torch.float32)
        bound["forward"](q, k, v, q, None, padded, key_mask, out, lse, stream=stream)
        return out, (q, k, v, padded, transposed, key_mask, out, lse)

    def first_forward(self, q, k, v, bias, mask):
        """The same by operator.py's launchers."""
        qkv = [q, k, v] if self.as_they_lie else [x.contiguous() for x in (q, k, v)]
        found = self.launch_forward(qkv, bias[:, 0], None if mask is None else mask[:, :, 0, 0])
        self.bound["forward"], = self.call.bound.values()
        self.sums_size = (self.sums, *self.bias_size)
        return found

    def backward(self, gradient, q, k, v, padded, transposed, key_mask, out, lse):
        """Gradients of q, k, v and the bias; none of the mask."""
        if self.repeat is None:
            return self.first_backward(gradient, q, k, v, padded, transposed, key_mask, out, lse)
        stream = stream_of(q)
        size, new = q.shape, q.new_empty
        dq, dk, dv, delta = new(size), new(size), new(size), torch.empty_like(lse)
        bias_sums = new(self.sums_size, dtype=self.sums_dtype)
        given = dict(qkv=(q, k, v), k=(k,), bias=(padded,), transposed=(transposed,), dq=(dq,), dkv=(dk, dv),
                     saved=(key_mask, gradient, lse, delta), sums=(bias_sums,), nothing=(None,),
                     dscores=(new(self.dscores_size) if self.dscores_size else None,),
                     gate=(q, None, out, gradient, dq, gradient, delta, None), one_key=(key_mask, dq, dk))
        for launch, names in self.repeat:
            launch(*[t for name in names for t in given[name]], stream=stream)
        dbias = new(self.dbias_size, dtype=self.bias_dtype)
        self.bound["bias_gradient"](bias_sums, dbias, stream=stream)
        return dq, dk, dv, dbias, None

    def first_backward(self, gradient, q, k, v, *saved):
        """The same by operator.py's launchers; their launches are repeated later, if one of each kind."""
        *grads, dbias, self.sums_dtype = self.launch_backward(gradient, [q, k, v], *saved)
        dbias = dbias[:, None]
        self.dbias_size = dbias.shape
        kept = [(name, launch) for (name, _), launch in self.call.bound.items()
                if launch is not self.bound["forward"]]
        names = [name for name, _ in kept]
        if len(set(names)) == len(names):  # all rows in one round
            self.repeat = [(launch, LAUNCHES[name]) for name, launch in kept]
            stored = "attention_backward_scores_kernel" in names
            self.dscores_size = (self.call.R, *self.bias_size) if stored else None
        return *grads, dbias, None


def plain(q, k, v, bias, mask, scale):
    """The same by PyTorch's operations. What scores cost is reading and writing them: q is scaled, not they,
    and bias and mask are added in place (vmap may have a batch of these alone, which fits in no place)."""
    add = torch.add if torch._C._are_functorch_transforms_active() else torch.Tensor.add_
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT  # (B, N, H, Q, K)
    scores = add(scores, padding.lifted(bias))
    if mask is None:
        return scores.softmax(-1) @ v
    present = mask.bool()
    scores = add(scores, torch.zeros_like(present, dtype=q.dtype).masked_fill(~present,
                                                                             padding.lowest(q.dtype)))
    out = scores.softmax(-1) @ v
    return torch.where(present.any(-1, keepdim=True), out, out.detach())  # no gradient from empty rows


def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False, *, kv_lengths=None):
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
    if q.shape[-1] > WIDEST_HEAD or q.shape != k.shape or q.is_cuda and q.dtype not in HALF:
        keys = "" if q.shape == k.shape else "another number of keys than queries with "
        say_plain(NAME, f"{keys}heads of {q.shape[-1]} channels in {str(q.dtype)[6:]}")
        return plain(*given, scale)
    if watched(NAME, given):
        keys = None if mask is None else mask[:, :, 0, 0].bool()
        return attention.row_attention(q, k, v, bias[:, 0], keys, scale)
    return planned(Plan, given, q.dtype, scale)
