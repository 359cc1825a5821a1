"""Triangle multiplication as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python operator.Multiplication runs as it is; under torch.compile, fake tensors or a counter it is
operator.triangle_multiplication().
"""
import torch
from torch import Tensor

from fusion_lab.kernels.calls import as_given, laid, once, say_plain, watched, where
from fusion_lab.kernels.common import check_devices, check_shapes, multiplies, shared_dtype
from fusion_lab.kernels.limits import CHANNELS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.reductions import sums
from fusion_lab.kernels.triangle_multiplication import operator as trimul

NAME = "triangle_multiplicative_update"
Given = Tensor | None
WEIGHTS = ("norm_in_weight", "norm_in_bias", "p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias",
           "norm_out_weight", "norm_out_bias", "p_out_weight", "p_out_bias", "g_out_weight", "g_out_bias")


def check(x, mask, weights):
    """ValueError for shapes that would be misread, or a weight that is missing."""
    if x.dim() not in (3, 4) or x.shape[-3] != x.shape[-2]:
        raise ValueError(f"x is {tuple(x.shape)}, but must be (B, N, N, D) or (N, N, D)")
    c = x.shape[-1]
    sizes = (c,), (c,), (2 * c, c), (2 * c,), (2 * c, c), (2 * c,), (c,), (c,), (c, c), (c,), (c, c), (c,)
    given = list(zip(WEIGHTS, weights, sizes, strict=True))
    for name, value, size in given:
        if value is None and len(size) == 2:
            raise ValueError(f"{name} is missing")
    check_shapes(*given)
    check_devices(x=x, mask=mask, **dict(zip(WEIGHTS, weights, strict=True)))
    pairs = x.shape[:-1]
    if mask is not None and (mask.dim() > len(pairs) or any(
            n not in (1, m) for n, m in zip(reversed(mask.shape), reversed(pairs), strict=False))):
        raise ValueError(f"mask is {tuple(mask.shape)}, but must be {tuple(pairs)}, or broadcast to it")


def joined(x, p, g, columns):
    """p over g, either of which may be None and is zero then; None if both are."""
    if p is None and g is None:
        return None
    return torch.cat([x.new_zeros(columns) if each is None else each for each in (p, g)])


def packed(x, weights, dtype=None):
    """operator.Weights from those of a call. dtype: that of products' weights, None: as it is. LayerNorms
    that are not given are 1 and 0."""
    (norm_in_weight, norm_in_bias, p_in, p_in_bias, g_in, g_in_bias, norm_out_weight, norm_out_bias,
     *products) = weights
    products = [torch.cat((p_in, g_in)), joined(x, p_in_bias, g_in_bias, p_in.shape[0]), *products]
    if dtype is not None:
        products = [w if w is None else w.to(dtype) for w in products]
    norms = [x.new_full(x.shape[-1:], default) if given is None else given for default, given in zip(
        (1, 0, 1, 0), (norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias), strict=True)]
    return trimul.Weights(*norms[:2], *products[:2], *norms[2:], *products[2:])


class Update(trimul.Multiplication):
    """A call from Python, by how its tensors look: x, mask and weights as they are given."""
    name = NAME

    def __init__(self, tensors, dtype, outgoing, eps, may_learn):
        x, mask, *weights = tensors
        check(x, mask, weights)
        save = may_learn and any(t is not None and t.requires_grad for t in tensors)
        given = dict(zip(WEIGHTS, weights, strict=True))
        biases = dict(IN_BIAS=given["p_in_bias"] is not None or given["g_in_bias"] is not None,
                      OUT_BIAS=given["p_out_bias"] is not None, GATE_BIAS=given["g_out_bias"] is not None)
        self.shape = x.shape if x.dim() == 4 else (1, *x.shape)
        self.describe(trimul.Given(x if x.dim() == 4 else x[None], self.spread(mask), None), dtype,
                      biases, trimul.Settings(outgoing, eps, save))
        self.given = [w is not None for w in weights]
        self.as_they_lie = all([t is None or t.is_contiguous() for t in (x, *weights)]) and x.dim() == 4
        need_cast = any([w is not None and w.dtype != dtype for w in (*weights[2:6], *weights[8:])])
        self.cast = dtype if need_cast else None
        self.sums_dtype, self.programs_of = None, None  # found by the first call

    def spread(self, mask):
        """The mask (B, N, N) as kernels read it, or None."""
        if mask is None:
            return None
        mask = mask if mask.shape == self.shape[:3] else mask.expand(self.shape[:3])
        return mask.view(torch.uint8) if mask.dtype == torch.bool else mask

    def update(self, x, mask, weights):
        """The update, and what backward reads."""
        pair = x if self.as_they_lie else x.contiguous().view(self.shape)
        weights = weights if self.as_they_lie else [w if w is None else w.contiguous() for w in weights]
        parameters, mask = packed(x, weights, self.cast), self.spread(mask)
        if self.programs_of is None:
            parameters.check(self.C)
            self.programs_of = [trimul.programs(name, *self.shape[:2], self.C, self.dtype)
                                for name in trimul.SUMMING]
            self.sums_dtype = shared_dtype(parameters.of_sums())
        out, *saved = self.forward((pair, mask, None, None, None), parameters)
        return out if x.dim() == 4 else out.view(x.shape), (pair, mask, *saved, *parameters)

    def gradients(self, gradient, pair, mask, *saved):
        """Gradients of x, not of the mask, and of all weights in the order of a call. Autograd casts them to
        the dtypes of what they belong to."""
        c, saved, parameters = self.C, saved[:5], saved[5:]
        dpair, dprojected, dout, *partial_sums = self.backward(
            gradient.view(self.shape), (pair, mask, None), parameters, saved, self.programs_of)
        front, back = [sums.launch(each, self.sums_dtype, self.bound, name)
                       for each, name in zip(partial_sums, ("front sums", "back sums"), strict=True)]
        _, normed, normed_product, _, _ = saved
        with as_given(gradient):
            dp_in, dg_in, dg_out = torch.mm(dprojected.t(), normed).split_with_sizes((2 * c, 2 * c, c))
            dp_out = torch.mm(dout.t(), normed_product)  # (c, c)
        dnorm_weight, dnorm_bias, dp_in_bias, dg_in_bias = front.split_with_sizes((c, c, 2 * c, 2 * c))
        dcenter_weight, dcenter_bias, dp_out_bias, dg_out_bias = back.split_with_sizes((c, c, c, c))
        found = (dnorm_weight, dnorm_bias, dp_in, dp_in_bias, dg_in, dg_in_bias, dcenter_weight, dcenter_bias,
                 dp_out, dp_out_bias, dg_out, dg_out_bias)
        return dpair.view(gradient.shape), [d if there else None
                                            for d, there in zip(found, self.given, strict=True)]


class FromPython(torch.autograd.Function):
    """An Update with its derivative."""

    @staticmethod
    def forward(ctx, settings, x, mask, *weights):
        ctx.call = Update.of((x, mask, *weights), *settings)
        out, saved = ctx.call.update(x, mask, weights)
        ctx.save_for_backward(*saved)
        ctx.mask_stride = None if mask is None else saved[1].stride()
        return out

    @staticmethod
    @once
    def backward(ctx, gradient):
        pair, mask, *saved = ctx.saved_tensors
        if mask is not None and mask.stride() != ctx.mask_stride:
            mask = laid(mask, ctx.mask_stride)
        dx, dweights = ctx.call.gradients(gradient, pair, mask, *saved)
        return None, dx, None, *dweights


def plain(pair, weights, mask, *settings):
    """operator.reference() of the same, with parameters in pair's dtype."""
    *weights, mask = (t if t is None else t.to(pair.dtype) for t in (*weights, mask))
    return trimul.reference(pair, weights, mask, *settings)


def by_whole_function(function, x, mask, weights, *settings):
    """function(pair, operator.Weights, mask, *settings): where no call is kept."""
    check(x, mask, weights)
    pair = x if x.dim() == 4 else x[None]
    mask = None if mask is None else mask.expand(pair.shape[:3])
    parameters = packed(x, weights)
    return function(pair, parameters, mask, *settings).view(x.shape)


def triangle_multiplicative_update(
        x: Tensor, direction: str = "outgoing", mask: Given = None, norm_in_weight: Given = None,
        norm_in_bias: Given = None, p_in_weight: Given = None, p_in_bias: Given = None,
        g_in_weight: Given = None, g_in_bias: Given = None, norm_out_weight: Given = None,
        norm_out_bias: Given = None, p_out_weight: Given = None, p_out_bias: Given = None,
        g_out_weight: Given = None, g_out_bias: Given = None, eps: float = 1e-5) -> Tensor:
    """cuEquivariance's function of this name: the update of x (B, N, N, D) or (N, N, D), without residual.

    mask (B, N, N) or (N, N), 1 = present; p_in_weight, g_in_weight (2 D, D): left, then right; p_out_weight,
    g_out_weight (D, D); biases (2 D,) and (D,). Norms default to 1 and 0, biases of projections to none.
    Weights of projections must be given: there they would be drawn at random. They are cast to the dtype of
    x, under autocast to autocast's, which the result has then, too; gradients have the dtypes of what they
    belong to. Kernels take 16 bits and 16, 32, 64, 128 or 256 channels; all else runs in PyTorch's
    operations, which a warning says. ValueError for wrong shapes, RuntimeError for second derivatives of
    kernels.
    """
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction is {direction!r}, but must be 'outgoing' or 'incoming'")
    weights = (norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias, norm_out_weight,
               norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias)
    outgoing, dtype, c = direction == "outgoing", product_dtype(x), x.shape[-1]
    if not x.numel():
        return by_whole_function(plain, x, mask, weights, outgoing, eps)
    if c not in CHANNELS or not multiplies(x, dtype):
        say_plain(NAME, f"{c} channels in {str(dtype)[6:]}")
        return by_whole_function(plain, x, mask, weights, outgoing, eps)
    given = x, mask, *weights
    if watched(NAME, given):
        return by_whole_function(trimul.triangle_multiplication, x, mask, weights, outgoing, eps)
    with where(x):
        return FromPython.apply((dtype, outgoing, float(eps), torch.is_grad_enabled()), *given)
