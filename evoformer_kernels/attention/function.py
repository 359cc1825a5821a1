"""Attention with its derivative, and the whole sub-layers round it: one autograd Function, for every caller.

    y = LayerNorm(x) W^T; bias = LayerNorm(x) Wh^T                            optional, before
    out = softmax(q k^T scale + bias, masked) v * sigmoid(gate + gate_bias)   plan.py has the launches
    result = [onto +] drop * (out Wo^T + bo)                                  optional, behind

x, onto and the result (B, X, Y, c), onto x itself, attention along axis 1 or 2; W (4 c, c): q, k, v and gate
below each other; Wh (H, c). What lies between the kernels is written once and read as it lies: y as (B, X, Y,
4 c), attention's output as (B, X, Y, c), their gradients alike; the head bias as (B, H, X, Y), of which
attention along X takes the transpose, unless asked otherwise. layout.py says what `qkvg` and `axis` are.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from evoformer_kernels import projections
from evoformer_kernels.attention import output_backward, plan
from evoformer_kernels.attention.layout import views
from evoformer_kernels.attention.plan import Behind, Inputs, Kept, Settings
from evoformer_kernels.common import check_onto, check_shapes
from evoformer_kernels.family import once, refuse_transforms
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums


class Before(NamedTuple):
    """LayerNorm and projections that make q, k, v, gate and, with head_weight, the bias."""
    x: Tensor | None = None  # (B, X, Y, c)
    norm_weight: Tensor | None = None  # (c,)
    norm_bias: Tensor | None = None  # (c,)
    weight: Tensor | None = None  # (4 c, c)
    head_weight: Tensor | None = None  # (H, c)


class Around(NamedTuple):
    """eps of the LayerNorm; whether the update is added to x; whether backward recomputes y; whether
    attention takes the transpose of the bias that LayerNorm(x) makes."""
    eps: float = 0.0
    adds: bool = False
    recompute: bool = False
    turned: bool = False



def apart(tensors, *classes):
    """Tensors behind each other as named tuples of these classes."""
    end, found = 0, []
    for each in classes:
        begin, end = end, end + len(each._fields)
        found.append(each(*tensors[begin:end]))
    return found


def there(tensors):
    """An operator's results, None for what is empty."""
    return [x if x.dim() > 1 or x.shape[0] else None for x in tensors]


class Attention(torch.autograd.Function):
    """The formulas above with their derivative. Saves the inputs that backward reads, x or y, and Kept."""

    @staticmethod
    def forward(ctx, settings, around, *tensors):
        inputs, before, behind = apart(tensors, Inputs, Before, Behind)
        ctx.settings, ctx.around = settings, around
        if before.x is not None:
            y, own_bias = projections.NORM_PROJECT_OP(*before, around.eps)
            inputs = inputs._replace(q=y)
            if before.head_weight is not None:
                inputs = inputs._replace(bias=own_bias.mT if around.turned else own_bias)
        ctx.bias = None if inputs.bias is None else (inputs.bias.shape, inputs.bias.dtype)
        if ctx.bias and not settings.lift:  # kernels of backward may read it as it is, too
            inputs = inputs._replace(bias=inputs.bias.contiguous())
        kept = Kept(*plan.FORWARD(**inputs._asdict(), **settings._asdict()))
        length = views(inputs[:1] if inputs.k is None else inputs[:3], *settings[:2])[0].shape[3]
        read = plan.how_read(inputs, length, settings)
        kept = kept._replace(bias=inputs.bias if read.as_it_is else kept.bias if ctx.bias else None,
                             bias_transposed=kept.bias_transposed if read.transposed else None,
                             key_bias=kept.key_bias if read.for_keys else None)
        saved = inputs._replace(q=None if around.recompute else inputs.q, bias=None, key_mask=None)
        ctx.save_for_backward(*saved, *kept, *before, *behind)
        if behind.weight is None:
            return kept.out
        return projections.OUTPUT_PROJECT_OP(kept.out, behind.weight, behind.bias,
                                             before.x if around.adds else None, behind.drop)

    @staticmethod
    @once("attention")
    def backward(ctx, gradient):
        inputs, kept, before, behind = apart(ctx.saved_tensors, Inputs, Kept, Before, Behind)
        (heads, axis, scale, *_), around = ctx.settings, ctx.around
        if inputs.q is None:
            y, _ = projections.NORM_PROJECT_OP(*before[:4], None, around.eps, after=gradient)
            inputs = inputs._replace(q=y)
        own = before.head_weight is not None
        found = plan.Gradients(*there(plan.BACKWARD(
            *inputs[:5], bias=kept.bias, out=kept.out, lse=kept.lse, bias_transposed=kept.bias_transposed,
            key_bias=kept.key_bias, weight=behind.weight, drop=behind.drop, gradient=gradient, heads=heads,
            axis=axis, scale=scale, gate_sums=gate_sums(inputs, ctx.settings, behind, gradient),
            bias_dtype=ctx.bias[1] if ctx.bias else kept.out.dtype, turned=around.turned)))
        dbias = found.bias
        dinputs = Inputs(*found[:4], None, None if dbias is None or own else dbias.view(ctx.bias[0]))
        dbehind, dbefore = Behind(), Before()
        if behind.weight is not None:
            du = gradient.to(behind.weight.dtype) if behind.drop is None else found.du
            dbehind = Behind(du.flatten(0, -2).t() @ kept.out.flatten(0, -2))
        if inputs.gate_bias is not None:
            dinputs = dinputs._replace(gate_bias=sums.OP(
                found.gate_bias_sums, inputs.gate_bias.dtype).view_as(inputs.gate_bias))
        if behind.weight is not None:
            dbehind = dbehind._replace(bias=sums.OP(found.out_bias_sums, behind.weight.dtype))
        if before.x is not None:
            dbefore = Before(*projections.norm_project_backward(
                found.q, dbias if own else None, *before, around.eps, gradient if around.adds else None))
            dinputs = dinputs._replace(q=None)
        return None, None, *dinputs, *dbefore, *dbehind


def gate_sums(inputs, settings, behind, gradient):
    """How many partial sums of the gate bias's gradient, and of the projection's, there will be."""
    if behind.weight is not None:
        c = len(behind.weight)
        return output_backward.programs(gradient.numel() // c, c, behind.weight.dtype)
    if inputs.gate_bias is None:
        return 0
    q = views([x for x in inputs[:4] if x is not None], *settings[:2])[0]
    return plan.gate_sum_count(*q.shape, q.dtype)


def apply(inputs, settings, before=None, behind=None, around=None):
    """The result of the formulas above. inputs: Inputs; where before has x, of which bias and gate_bias
    alone. ValueError for what the kernels would misread."""
    refuse_transforms("attention")
    tensors = *inputs, *(before or Before()), *(behind or Behind())
    return Attention.apply(settings, around or Around(), *tensors)


def check_added(bias, key_mask, samples, rows, heads, length):
    """ValueError for a bias or a mask of another size."""
    check_shapes(("bias", bias, (samples, heads, length, length), (samples, 1, heads, length, length)),
                 ("key_mask", key_mask, (samples, length), (samples, rows, length), (1, length),
                  (1, rows, length), (samples, 1, length), (1, 1, length), (samples, rows, 1, 1, length)))


def gated_attention(qkvg, heads, axis, bias=None, key_mask=None, gate_bias=None, lift=False):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each position on the other.

    qkvg: [packed], q, k, v and gate behind each other (B, X, Y, 4 c), or [q, k, v, gate]; bias (B, H, L, L),
    nowhere below -1e9, with lift also below; key_mask (B, L) or (B, R, L) for each row,
    other than 0 = present; gate_bias (c,), added to the gate. Returns (B, X, Y, c). Gradients for all but
    key_mask.
    """
    (B, X, Y, width), parts = qkvg[-1].shape, 4 if len(qkvg) == 1 else 1
    length, rows = (X, Y) if axis == 1 else (Y, X)
    check_added(bias, key_mask, B, rows, heads, length)
    check_shapes(("gate_bias", gate_bias, (width // parts,)))
    settings = Settings(heads, axis, (width // parts // heads) ** -0.5, lift, torch.is_grad_enabled())
    gate_bias = None if gate_bias is None else gate_bias.contiguous()
    return apply(Inputs.of(qkvg, gate_bias=gate_bias, bias=bias, key_mask=key_mask), settings)


def in_order(x):
    """x, contiguous, with the strides that follow from its shape: contiguous() leaves those along 1."""
    return x.contiguous().flatten().view(x.shape)


def row_attention(q, k, v, bias=None, key_mask=None, scale=None):
    """Attention without a gate for q, k, v (B, R, H, L, D), bias (B, H, L, L) or (B, 1, H, L, L), key_mask
    (B, L), (B, R, L) or (B, R, 1, 1, L). A bias below -1e9, or -inf, masks as much as that does."""
    if not (q.stride(-1) == 1 and q.stride() == k.stride() == v.stride()):  # one stride() serves all
        q, k, v = map(in_order, (q, k, v))
    (B, rows, heads, length, width) = q.shape
    check_added(bias, key_mask, B, rows, heads, length)
    scale = width ** -0.5 if scale is None else float(scale)
    return apply(Inputs(q, k, v, bias=bias, key_mask=key_mask),
                 Settings(heads, 0, scale, lift=True, learns=torch.is_grad_enabled()))


class Weights(NamedTuple):
    """Parameters of a sub-layer. weight: of q, k, v and gate, below each other; head_weight: of the bias that
    LayerNorm(x) makes, for as many heads, or None."""
    norm_weight: Tensor  # (c,)
    norm_bias: Tensor  # (c,)
    weight: Tensor  # (4 c, c)
    gate_bias: Tensor  # (c,)
    out_weight: Tensor  # (c, c)
    out_bias: Tensor  # (c,)
    head_weight: Tensor | None = None  # (H, c)

    def check(self, c, heads):
        """ValueError for a shape that is wrong."""
        sizes = (c,), (c,), (4 * c, c), (c,), (c, c), (c,), (heads, c)
        check_shapes(*zip(self._fields, self, sizes, strict=True))

    def cast(self, dtype):
        """All contiguous, and in this dtype but those of LayerNorm."""
        return Weights(*[None if t is None else (t if name in ("norm_weight", "norm_bias") else t.to(dtype))
                         .contiguous() for name, t in zip(self._fields, self, strict=True)])


def attention_layer(x, weights, heads, axis, bias=None, key_mask=None, eps=1e-5, onto=None, drop=None,
                    recompute=False, *, turned=None):
    """Attention along axis 1 or 2 of LayerNorm(x), (B, X, Y, c), as an update or, given onto, added to
    that, which must be x itself.

    weights: Weights. Its head_weight makes the bias of LayerNorm(x) (then X = Y; turned: whether the
    transpose is taken, as it is for axis 1 by default), or the bias (B, H, L, L), nowhere below -1e9, is
    given, or there is none. key_mask (B, L), or
    (B, R, L) for each row, other than 0 = present; drop: factors that broadcast to x, without a gradient.
    Under autocast the products are made in its dtype, and the sum in that of x.
    """
    drop, weights, (B, X, Y, c) = projections.widened(drop, x.shape[-1]), Weights(*weights), x.shape
    check_onto(onto, x)
    own = weights.head_weight is not None
    if bias is not None and own:
        raise ValueError("bias and head_weight: either makes the bias")
    if own and X != Y:
        raise ValueError(f"x is {tuple(x.shape)}, but must be (B, X, X, c) to make the bias from")
    weights.check(c, heads)
    check_added(bias, key_mask, B, Y if axis == 1 else X, heads, X if axis == 1 else Y)
    w = weights.cast(product_dtype(x))
    turned = own and (axis == 1 if turned is None else turned)
    settings = Settings(heads, axis, (c // heads) ** -0.5, lift=turned, learns=torch.is_grad_enabled())
    return apply(Inputs(None, gate_bias=w.gate_bias, bias=bias, key_mask=key_mask), settings,
                 Before(x.contiguous(), w.norm_weight, w.norm_bias, w.weight, w.head_weight),
                 Behind(w.out_weight, w.out_bias, drop), Around(eps, onto is x, recompute, turned))
