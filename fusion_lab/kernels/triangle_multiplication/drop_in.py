"""Triangle multiplication as other projects call it, under cuEquivariance's name, from Python or compiled.

From Python a plan says once what follows from shapes, strides and dtypes. Where somebody looks at operators
it is operator.triangle_multiplication().
"""
import torch
from torch import Tensor

from fusion_lab.kernels.common import check_device, check_shapes, multiplies, shared_dtype
from fusion_lab.kernels.eager import as_given, planned, say_plain, watched
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
    pairs = x.shape[:-1]
    if mask is not None and (mask.dim() > len(pairs) or any(
            n not in (1, m) for n, m in zip(reversed(mask.shape), reversed(pairs), strict=False))):
        raise ValueError(f"mask is {tuple(mask.shape)}, but must be {tuple(pairs)}, or broadcast to it")


def joined(x, p, g, columns):
    """p over g, either of which may be None and is zero then; None if both are."""
    if p is None and g is None:
        return None
    return torch.cat([x.new_zeros(columns) if each is None else each for each in (p, g)])


def packed(x, weights, norms, dtype=None):
    """Weights as the kernels have them, operator.PARAMETERS, from those of a call. dtype: that of products'
    weights, None: as it is; norms: the LayerNorms' where they are not given."""
    (norm_in_weight, norm_in_bias, p_in, p_in_bias, g_in, g_in_bias, norm_out_weight, norm_out_bias,
     *products) = weights
    products = [torch.cat((p_in, g_in)), joined(x, p_in_bias, g_in_bias, p_in.shape[0]), *products]
    if dtype is not None:
        products = [w if w is None else w.to(dtype) for w in products]
    norms = [default if given is None else given for default, given in zip(
        norms, (norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias), strict=True)]
    return [*norms[:2], *products[:2], *norms[2:], *products[2:]]


class Plan:
    """What follows from how the tensors of a call look."""
    name, kept = NAME, {}

    def __init__(self, tensors, learns, outgoing, eps):
        x, mask, *weights = tensors
        check_device(NAME, x)
        check(x, mask, weights)
        self.outgoing, self.eps = outgoing, float(eps)
        self.dtype, self.learns = product_dtype(x), learns
        self.call = None  # made of what the first call gives the kernels
        self.shape, self.c = x.shape if x.dim() == 4 else (1, *x.shape), x.shape[-1]
        self.norms = (x.new_ones(self.c), x.new_zeros(self.c)) * 2  # where they are not given
        self.given = [w is not None for w in weights]
        self.as_they_lie = all([t is None or t.is_contiguous() for t in (x, *weights)]) and x.dim() == 4
        need_cast = any([w is not None and w.dtype != self.dtype for w in (*weights[2:6], *weights[8:])])
        self.cast = self.dtype if need_cast else None

    def forward(self, x, mask, *weights):
        """The update, and what backward reads."""
        pair = x if self.as_they_lie else x.contiguous().view(self.shape)
        weights = weights if self.as_they_lie else [w if w is None else w.contiguous() for w in weights]
        parameters = packed(x, weights, self.norms, self.cast)
        if mask is not None:
            mask = mask if mask.shape == self.shape[:3] else mask.expand(self.shape[:3])
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        if self.call is None:
            trimul.check(pair, parameters, mask, None, None)
            self.call = trimul.Call(pair, parameters, mask, None, self.outgoing)
            self.programs = [trimul.programs(name, *self.shape[:2], self.c, self.dtype) for name in (
                "triangle_multiplication_front_backward_kernel",
                "triangle_multiplication_back_backward_kernel")]
            self.sums_dtype = shared_dtype([dict(zip(trimul.PARAMETERS, parameters, strict=True))[name]
                                            for name in trimul.SUMMED])
        out, *saved = self.call.forward(pair, parameters, mask, None, None, self.eps, self.learns)
        return out if x.dim() == 4 else out.view(x.shape), (pair, mask, *saved, *parameters)

    def backward(self, gradient, pair, mask, statistics, normed, normed_product, product, sides, *parameters):
        """Gradients of x, not of the mask, and of all weights in the order of a call. Autograd casts them to
        the dtypes of what they belong to."""
        c, shape = self.c, gradient.shape
        dpair, dprojected, dout, *partial_sums = self.call.backward(
            gradient.view(self.shape), pair, parameters, mask, None, statistics, normed, normed_product,
            product, sides, False, *self.programs)
        front, back = [sums.launch(each, self.sums_dtype, self.call.bound, name)
                       for each, name in zip(partial_sums, ("front sums", "back sums"), strict=True)]
        with as_given(gradient):
            dp_in, dg_in, dg_out = torch.mm(dprojected.t(), normed).split_with_sizes((2 * c, 2 * c, c))
            dp_out = torch.mm(dout.t(), normed_product)  # (c, c)
        dnorm_weight, dnorm_bias, dp_in_bias, dg_in_bias = front.split_with_sizes((c, c, 2 * c, 2 * c))
        dcenter_weight, dcenter_bias, dp_out_bias, dg_out_bias = back.split_with_sizes((c, c, c, c))
        found = (dnorm_weight, dnorm_bias, dp_in, dp_in_bias, dg_in, dg_in_bias, dcenter_weight, dcenter_bias,
                 dp_out, dp_out_bias, dg_out, dg_out_bias)
        return (dpair.view(shape), None,
                *[d if there else None for d, there in zip(found, self.given, strict=True)])


def plain(pair, *given):
    """operator.reference() of the same, with parameters in pair's dtype."""
    return trimul.reference(pair, *(t.to(pair.dtype) if isinstance(t, torch.Tensor) else t for t in given))


def by_whole_function(function, x, mask, weights, *settings):
    """function(pair, *operator.PARAMETERS, mask, *settings): where no plan serves."""
    check(x, mask, weights)
    pair, c = x if x.dim() == 4 else x[None], x.shape[-1]
    mask = None if mask is None else mask.expand(pair.shape[:3])
    parameters = packed(x, weights, (x.new_ones(c), x.new_zeros(c)) * 2)
    return function(pair, *parameters, mask, *settings).view(x.shape)


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
    if c not in CHANNELS or not multiplies(x, dtype):
        say_plain(NAME, f"{c} channels in {str(dtype)[6:]}")
        return by_whole_function(plain, x, mask, weights, outgoing, eps)
    given = x, mask, *weights
    if watched(NAME, given):
        return by_whole_function(trimul.triangle_multiplication, x, mask, weights, outgoing, eps)
    return planned(Plan, given, dtype, outgoing, eps)
