"""Triangle multiplication as other projects call it, under cuEquivariance's name."""
import torch
from torch import Tensor

from evoformer_kernels.common import check_devices, check_shapes, multiplies
from evoformer_kernels.family import say_plain
from evoformer_kernels.limits import CHANNELS
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.triangle_multiplication import function as trimul

NAME = "triangle_multiplicative_update"
Given = Tensor | None
WEIGHTS = ("norm_in_weight", "norm_in_bias", "p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias",
           "norm_out_weight", "norm_out_bias", "p_out_weight", "p_out_bias", "g_out_weight", "g_out_bias")


def check(x, mask, weights):
    """ValueError for shapes that would be misread, or a weight that is missing; x and mask as of_pairs()
    returns them. Returns the hidden width."""
    if x.dim() != 4 or x.shape[1] != x.shape[2]:
        raise ValueError(f"x is {tuple(x.shape)}, but must be (..., N, N, C)")
    given = dict(zip(WEIGHTS, weights, strict=True))
    for name, value in given.items():
        if value is None and name[0] in "pg" and name.endswith("weight"):
            raise ValueError(f"{name} is missing")
    c, d = x.shape[-1], len(given["p_in_weight"]) // 2
    sizes = (c,), (c,), (2 * d, c), (2 * d,), (2 * d, c), (2 * d,), (d,), (d,), (c, d), (c,), (c, c), (c,)
    check_shapes(*zip(WEIGHTS, weights, sizes, strict=True))
    check_devices(x=x, mask=mask, **given)
    pairs = x.shape[:3]
    if mask is not None and any(n not in (1, m) for n, m in zip(mask.shape, pairs, strict=True)):
        raise ValueError(f"mask is {tuple(mask.shape)}, but must be {tuple(pairs)}, or broadcast to it")
    return d


def of_pairs(x, dimensions):
    """x with so many dimensions, by leading ones or with the leading ones flattened; None stays."""
    if x is None or x.dim() == dimensions:
        return x
    missing = dimensions - x.dim()
    return x[(None,) * missing] if missing > 0 else x.flatten(0, -missing)


def packed(x, weights):
    """function.Weights from those of a call. LayerNorms that are not given are 1 and 0; of two biases behind
    each other one that is not given is 0."""
    given = dict(zip(WEIGHTS, weights, strict=True))
    for name, columns in (("norm_in", x.shape[-1]), ("norm_out", len(given["p_in_weight"]) // 2)):
        for part, default in (("weight", 1), ("bias", 0)):
            if given[f"{name}_{part}"] is None:
                given[f"{name}_{part}"] = x.new_full((columns,), default)
    in_bias, columns = None, len(given["p_in_weight"])
    if given["p_in_bias"] is not None or given["g_in_bias"] is not None:
        in_bias = torch.cat([x.new_zeros(columns) if given[name] is None else given[name]
                             for name in ("p_in_bias", "g_in_bias")])
    in_weight = torch.cat((given["p_in_weight"], given["g_in_weight"]))
    return trimul.Weights(given["norm_in_weight"], given["norm_in_bias"], in_weight, in_bias,
                          *[given[name] for name in WEIGHTS[6:]])


def plain(pair, weights, mask, outgoing, eps):
    """function.reference() of the same: parameters, too, in the dtype of pair's products."""
    *weights, mask = (t if t is None else t.to(pair.dtype) for t in (*weights, mask))
    return trimul.reference(pair, weights, mask, outgoing, eps)


def triangle_multiplicative_update(
        x: Tensor, direction: str = "outgoing", mask: Given = None, norm_in_weight: Given = None,
        norm_in_bias: Given = None, p_in_weight: Given = None, p_in_bias: Given = None,
        g_in_weight: Given = None, g_in_bias: Given = None, norm_out_weight: Given = None,
        norm_out_bias: Given = None, p_out_weight: Given = None, p_out_bias: Given = None,
        g_out_weight: Given = None, g_out_bias: Given = None, eps: float = 1e-5, precision=None) -> Tensor:
    """cuEquivariance's function of this name: the update of x (B, N, N, C), without residual, shaped as x.

    x may lack the B, or have several leading dimensions; so may the mask (B, N, N), by which both sides are
    multiplied: 1 = present. Hidden width D: p_in_weight, g_in_weight (2 D, C), left, then right; norm_out
    (D,); p_out_weight (C, D); g_out_weight (C, C); biases as long as their weights. Norms default to 1 and 0,
    biases of projections to none. Weights of projections must be given: there they would be drawn at random.
    They are cast to the dtype of x, under autocast to autocast's, which the result has then, too; gradients
    have the dtypes of what they belong to. Kernels take 16 bits and 16, 32, 64, 128 or 256 channels, as many
    within; all else runs in PyTorch's operations, which a warning says. ValueError for wrong shapes and a
    precision other than None and "default", RuntimeError for second derivatives of kernels.
    """
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction is {direction!r}, but must be 'outgoing' or 'incoming'")
    asked = getattr(precision, "value", precision)  # theirs is an enum
    if asked not in (None, -1, 0) and str(asked).lower() not in ("none", "default"):
        raise ValueError(f"{NAME} has no precision {precision!r}: products are in x's dtype, or autocast's")
    weights = (norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias, norm_out_weight,
               norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias)
    shape, x, mask = x.shape, of_pairs(x, 4), of_pairs(mask, 3)
    width, dtype, c = check(x, mask, weights), product_dtype(x), x.shape[-1]
    mask = None if mask is None else mask.expand(x.shape[:3])
    function = trimul.triangle_multiplication
    if width != c or c not in CHANNELS or not multiplies(x, dtype) or not x.numel():
        function = plain
        if x.numel():
            within = f" and {width} within" * (width != c)
            say_plain(NAME, f"{c} channels{within} in {str(dtype)[6:]}")
    return function(x, packed(x, weights), mask, direction == "outgoing", float(eps)).view(shape)
