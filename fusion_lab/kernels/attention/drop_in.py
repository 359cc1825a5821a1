"""Triangle attention as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python a plan says once what follows from shapes, strides and dtypes, and small kernels pad mask and bias
first. Under torch.compile, fake tensors or a counter operator.row_attention() runs instead.
"""
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import operator as attention
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.attention.layout import strides
from fusion_lab.kernels.common import alike, check_device, check_shapes, precision
from fusion_lab.kernels.eager import differentiable_once, looks, stream_of, watched, where
from fusion_lab.kernels.precision import product_dtype

NAME = "triangle_attention"
LAUNCHES = {  # of backward: the tensors that each kernel takes, in groups
    "attention_gate_backward_kernel": ("gate",),
    "attention_backward_short_kernel": ("qkv", "bias", "saved", "dq", "dkv", "sums"),
    "attention_backward_q_kernel": ("qkv", "bias", "saved", "dq"),
    "attention_backward_kv_kernel": ("qkv", "transposed", "saved", "dkv", "nothing"),
    "attention_backward_kv_kernel stored": ("qkv", "transposed", "saved", "dkv", "dscores"),
    "attention_backward_scores_kernel": ("k", "dscores", "dq", "sums"),
    "attention_backward_bias_kernel": ("qkv", "bias", "saved", "sums")}
CAST = (torch.float32, torch.float16, torch.bfloat16)  # by autocast, which leaves float64 as it is
plans = {}


def check(q, k, v, bias, mask):
    """ValueError for a shape that would be misread."""
    B, N, H, S, _ = q.shape
    check_shapes(("k", k, tuple(q.shape)), ("v", v, tuple(q.shape)), ("bias", bias, (B, 1, H, S, S)),
                 ("mask", mask, (B, N, 1, 1, S)))


class Plan:
    """What follows from how a call's tensors look. transpose: whether backward needs the transposed bias.
    bound: recorded launches by name; call: forward's; repeat: backward's, None before its first run."""

    def __init__(self, q, k, v, bias, mask, scale, transpose):
        check_device(NAME, q)
        check(q, k, v, bias, mask)
        self.heads, self.length = q.shape[2:4]
        self.scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        self.transpose, self.bias_dtype = transpose, bias.dtype
        self.padded = attention.padded_length(self.length)
        self.padded_dtype = bias.dtype if bias.dtype in attention.HOLD_PADDING else torch.float32
        # Kernels take q, k and v by the same strides, as long as channels lie side by side
        self.as_they_lie = q.stride(-1) == 1 and strides(q) == strides(k) == strides(v)
        self.bound, self.call, self.sums, self.repeat = {}, None, 0, None
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
        """The same by operator.py's launchers, whose launches are then kept."""
        qkv = [q, k, v] if self.as_they_lie else [x.contiguous() for x in (q, k, v)]
        padded, transposed = padding.launch(bias[:, 0], None, self.padded, self.padded_dtype, self.transpose,
                                            True, self.bound)
        key_mask = None
        if mask is not None:
            key_mask = padding.launch_key_mask(mask[:, :, 0, 0], self.padded, self.bound)
        settings = self.heads, 0, False, self.scale
        call = attention.Launch(qkv, None, padded, key_mask, *settings)
        out, lse = attention.forward(qkv, None, padded, key_mask, *settings, call)
        self.bound["forward"], = call.bound.values()
        self.call, self.sums = call, call.bias_sum_count()
        self.sums_size = (self.sums, *self.bias_size)
        return out, (*qkv, padded, transposed if self.transpose else None, key_mask, out, lse)

    def backward(self, gradient, q, k, v, padded, transposed, key_mask, out, lse):
        """Gradients of q, k, v and the bias."""
        gradient = gradient.contiguous()
        gradient = gradient if alike(gradient) else gradient.clone()
        if self.repeat is None:
            return self.first_backward(gradient, q, k, v, padded, transposed, key_mask, out, lse)
        stream = stream_of(q)
        size, new = q.shape, q.new_empty
        dq, dk, dv, delta = new(size), new(size), new(size), torch.empty_like(lse)
        bias_sums = new(self.sums_size, dtype=self.sums_dtype)
        given = dict(qkv=(q, k, v), k=(k,), bias=(padded,), transposed=(transposed,), dq=(dq,), dkv=(dk, dv),
                     saved=(key_mask, gradient, lse, delta), sums=(bias_sums,), nothing=(None,),
                     dscores=(new(self.dscores_size) if self.dscores_size else None,),
                     gate=(q, None, out, gradient, dq, gradient, delta, None))
        for launch, names in self.repeat:
            launch(*[t for name in names for t in given[name]], stream=stream)
        dbias = new(self.dbias_size, dtype=self.bias_dtype)
        self.bound["bias_gradient"](bias_sums, dbias, stream=stream)
        return dq, dk, dv, dbias

    def first_backward(self, gradient, q, k, v, padded, transposed, key_mask, out, lse):
        """The same by operator.py's launchers, whose launches are then kept, if they are one of each kind."""
        *grads, bias_sums, _, _, _ = attention.backward(
            [q, k, v], None, padded, transposed, key_mask, out, lse, gradient, None, None, self.heads, 0,
            False, self.scale, self.sums, 0, self.call)
        dbias = bias_gradient.launch(bias_sums, self.length, self.bias_dtype, False, self.bound)[:, None]
        self.dbias_size, self.sums_dtype = dbias.shape, bias_sums.dtype
        kept = [(name, launch) for (name, _), launch in self.call.bound.items()
                if launch is not self.bound["forward"]]
        names = [name for name, _ in kept]
        if len(set(names)) == len(names):  # all rows in one round
            self.repeat = [(launch, LAUNCHES[name]) for name, launch in kept]
            stored = "attention_backward_scores_kernel" in names
            self.dscores_size = (self.call.R, *self.bias_size) if stored else None
        return *grads, dbias


class TriangleAttention(torch.autograd.Function):
    """A plan's forward and backward."""

    @staticmethod
    def forward(ctx, plan, q, k, v, bias, mask):
        ctx.plan = plan
        out, saved = plan.forward(q, k, v, bias, mask)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @differentiable_once(NAME)
    def backward(ctx, gradient):
        with where(gradient):
            return None, *ctx.plan.backward(gradient, *ctx.saved_tensors), None


def triangle_attention(q, k, v, bias, mask=None, scale=None):
    """cuEquivariance's function of this name: softmax(scale q k^T + bias, masked) v.

    q, k, v (B, N, H, S, D); bias (B, 1, H, S, S); mask (B, N, 1, 1, S), True = present, or None; scale:
    default D^-0.5. Returns (B, N, H, S, D). A bias below -1e9, or -inf, masks as much as that does. Gradients
    for q, k, v and bias, none from rows whose keys are all masked; no second derivatives (RuntimeError).
    Under autocast q, k and v are cast to its dtype; a bias is read as it is. Raises ValueError for another
    shape, dtypes of q, k and v that differ, and for more keys than queries.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = product_dtype(q)
        q, k, v = (x.to(dtype) if x.dtype in CAST else x for x in (q, k, v))
    given = q, k, v, bias, mask
    if watched(NAME, given):
        check(*given)
        return attention.row_attention(q, k, v, bias[:, 0], None if mask is None else mask[:, :, 0, 0], scale)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                          or bias.requires_grad)
    with where(q):
        def make():
            return Plan(*given, scale, learns and q.shape[3] > attention.longest_short())
        key = *looks(given), scale, learns, precision(q.dtype)
        plan = tuner.plan(plans, key, make) if alike(*given) else make()
        return TriangleAttention.apply(plan, *given) if learns else plan.forward(*given)[0]

