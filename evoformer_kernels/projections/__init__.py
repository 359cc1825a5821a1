"""LayerNorm with all projections of its result, and its derivative; an output projection with dropout and
residual. They stand before and behind attention; a transition and the outer product use them, too.

    y, head_bias = LayerNorm(x) W^T, LayerNorm(x) Wh^T        out = onto + drop * (og W^T + scale b)
    or, given a hidden layer's bias, y = relu(LayerNorm(x) W^T + hidden_bias)

x (B, X, Y, c); W (n, c); Wh (H, c); y (B, X, Y, n); hidden_bias (n,); head_bias (B, H, X, Y), the layout of a
bias of attention; og (B, X, Y, k); W (c, k); scale, a number; onto, the residual, and out (B, X, Y, c);
drop, factors without a gradient, broadcast to that.

Each kernel reads its input once. Weights come from the cache, a chunk at a time. Where there is room and that
was measured to win, they stay in shared memory while a program makes many tiles of positions. Backward
recomputes LayerNorm from x. Its affine weights are not folded into W: normalised x would be rounded
differently.

Backward of the first adds up dy W + d(head_bias) Wh and LayerNorm's derivative. Where a whole sub-layer is
one function (attention/function.py, transition.py), it adds the gradient of the residual, too. Normalised x
is written once more, for the product that makes the gradient of W in the BLAS library. The derivative of the
output projection is in attention/output_backward.py.

The kernels are in kernels.py; here are their tiles, launchers, operators and derivatives.

Sources: AlphaFold 2 supplement, Alg. 7, 8, 13, 14 and 1.11.6 (dropout shared by a row or column).
"""
import math

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels import tuner
from evoformer_kernels.common import (
    candidates,
    check_part,
    check_shapes,
    is_fake,
    lines,
    operation,
    padded_width,
    processors,
    shared_dtype,
)
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.projections import kernels
from evoformer_kernels.reductions import sums

# --------------------------------------------------------------------------------------------------------
# Tiles, of which the tuner chooses; the first of each list fits every GPU
# --------------------------------------------------------------------------------------------------------

LEAST = 16  # tl.dot takes no tile with fewer channels
WIDE = 256  # channels of which there is a head bias alone, so that BN says nothing
NAMES = ("BM", "BN", "num_warps", "num_stages")
OF_OUTPUT = ("BM", "BK", "num_warps", "num_stages")
NORM_PROJECT = candidates((*NAMES, "STAY"), *((*tile, False) for tile in (
    (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (128, 64, 8, 3))),
    (64, 128, 8, 3, True), (64, 64, 8, 3, True))
NORM_PROJECT_WIDE = candidates((*NAMES, "STAY"), (32, 32, 4, 2, False), (64, 32, 8, 2, False),
                               (64, 32, 8, 3, False), (128, 32, 8, 2, False))
NORM_PROJECT_BACKWARD = candidates(NAMES, (64, 64, 8, 2), (64, 32, 4, 2), (64, 128, 8, 2), (64, 64, 8, 3),
                                   (128, 32, 8, 2), (32, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4))
NORM_PROJECT_BACKWARD_WIDE = candidates(NAMES, (32, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3))
OUTPUT_PROJECT = candidates(OF_OUTPUT, (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3),
                            (64, 128, 4, 2), (64, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4),
                            (128, 64, 4, 3), (64, 64, 4, 4))
CANDIDATES = dict(norm_project_kernel=NORM_PROJECT, norm_project_backward_kernel=NORM_PROJECT_BACKWARD,
                  output_project_kernel=OUTPUT_PROJECT)
CANDIDATES_WIDE = dict(norm_project_kernel=NORM_PROJECT_WIDE,
                       norm_project_backward_kernel=NORM_PROJECT_BACKWARD_WIDE)


def looked_up(name, positions, channels, other, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates. other: the
    projection's width beside `channels`, N or K."""
    shape = tuner.class_of(dtype, P=positions, C=channels, N=other)
    return name, shape, (CANDIDATES_WIDE if channels == WIDE else CANDIDATES)[name]


@sums.constant
def programs(name, positions, channels, other, dtype):
    """How many programs a kernel has with the tuner's choice: so many partial sums will there be."""
    return triton.cdiv(positions, tuner.chosen(*looked_up(name, positions, channels, other, dtype))["BM"])


def run(kernel, x, weight, other, launch):
    """launch(grid, options) with the tuner's choice, for x (..., c); other: the projection's other width.
    Nothing for a fake x."""
    if is_fake(x):
        return
    channels = x.shape[-1]
    positions = x.numel() // channels
    if positions >= 1 << 31:  # kernels count them in 32 bits
        raise ValueError(f"{tuple(x.shape)} are too many positions for one launch")
    def fitted(chosen):
        # No chunk of the inner channels is masked, so BK must divide them.
        chosen = {key: math.gcd(size, other) if key == "BK" else size for key, size in chosen.items()}
        launch((triton.cdiv(positions, chosen["BM"]),), dict(chosen, C=channels))
    tuner.launch(*looked_up(kernel.__name__, positions, channels, other, weight.dtype), fitted)


def whole_tiles(shape, width, options):
    """Whether tiles of positions (B, X, Y, .), of one sample each, and of so many outputs are all full."""
    return math.prod(shape[1:3]) % options["BM"] == 0 and width % options["BN"] == 0


# --------------------------------------------------------------------------------------------------------
# Launchers: what each operator runs
# --------------------------------------------------------------------------------------------------------


def sizes_of(x, weight, head_weight):
    """Sizes that both kernels with a LayerNorm take by name; x (B, X, Y, c)."""
    heads = 0 if head_weight is None else len(head_weight)
    return dict(P=x.numel() // x.shape[-1], PLANE=x.shape[1] * x.shape[2], H=heads,
                N=0 if weight is None else len(weight), HEADS=padded_width(heads) if heads else 0)


def checked(weight, head_weight, channels):
    """The weight that kernels with a LayerNorm go by. ValueError for what they cannot take."""
    heads = 1 if head_weight is None else len(head_weight)
    if weight is None:
        check_part("head bias", head_weight, channels, heads)
        return head_weight
    check_part("projection", weight, channels, heads)
    return weight


def norm_project(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor | None,
                 head_weight: Tensor | None, eps: float, hidden_bias: Tensor | None = None,
                 after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and head_bias, empty where their weight is None. after: a tensor that must be there first, so that a
    compiler does not make them earlier and keep them."""
    (B, X, Y, C), sizes = x.shape, sizes_of(x, weight, head_weight)
    y = x.new_empty(0) if weight is None else weight.new_empty(B, X, Y, sizes["N"])
    head_bias = x.new_empty(0) if head_weight is None else head_weight.new_empty(B, sizes["H"], X, Y)
    given = checked(weight, head_weight, C)

    def launch(grid, options):
        stay = options["STAY"] and sizes["N"] % options["BN"] == 0 < sizes["N"]
        kernels.norm_project_kernel[(min(*grid, processors(x)),) if stay else grid](
            x, norm_weight, norm_bias, given, head_weight, hidden_bias, y, head_bias, eps=eps, **sizes,
            WHOLE_TILES=whole_tiles(x.shape, sizes["N"], options), **dict(options, STAY=stay))
    run(kernels.norm_project_kernel, x, given, sizes["N"], launch)
    return y, head_bias


def norm_project_gradients(dy: Tensor | None, dbias: Tensor | None, x: Tensor,
                           parameters: list[Tensor | None], handed_on: Tensor | None, eps: float, count: int,
                           total: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dx (B, X, Y, c), with the gradient handed_on added; normalised x (P, c), empty without weight; partial
    sums (count, 2 + H [+ 1], c) of the gradients of norm_weight, norm_bias, head_weight [and, if total, of
    handed_on]. parameters: norm_weight, norm_bias, weight, head_weight. count: from programs()."""
    norm_weight, norm_bias, weight, head_weight = parameters
    sizes, C = sizes_of(x, weight, head_weight), x.shape[-1]
    given = checked(weight, head_weight, C)
    dx, normed = x.new_empty(x.shape), given.new_empty((0,) if weight is None else (sizes["P"], C))
    partial_sums = x.new_empty(count, 2 + sizes["H"] + total, C, dtype=torch.float32)

    def launch(grid, options):
        with sums.room(partial_sums, *grid) as room:
            kernels.norm_project_backward_kernel[grid](
                dy, dbias, x, norm_weight, norm_bias, given, head_weight, handed_on, dx, normed, room,
                eps=eps, **sizes, HANDED_ON=handed_on is not None, TOTAL=int(total),
                WHOLE_TILES=whole_tiles(x.shape, sizes["N"], options), **options)
    run(kernels.norm_project_backward_kernel, x, given, sizes["N"], launch)
    return dx, normed, partial_sums


def output_project(og: Tensor, weight: Tensor, bias: Tensor, onto: Tensor | None, drop: Tensor | None,
                   scale: float = 1.0) -> Tensor:
    """out (B, X, Y, c) of og (B, X, Y, k)."""
    out = (weight if onto is None else onto).new_empty(*og.shape[:-1], len(weight))
    (*_, X, Y, channels), width = out.shape, og.shape[-1]
    check_part("projection", weight, channels)
    if not takes_inner(width):
        raise ValueError(f"no Triton projection from {width} channels, but from multiples of {LEAST}")
    strides = zip("bxy", drop_strides(drop, out), strict=True)
    sizes = dict(P=out.numel() // channels, X=X, Y=Y, K=width,
                 **{f"drop_stride_{name}": stride for name, stride in strides})
    run(kernels.output_project_kernel, out, weight, width, lambda grid, options:
        kernels.output_project_kernel[grid](
            og, weight, bias, onto, drop, out, scale=scale, **sizes, ONTO=onto is not None,
            DROP=drop is not None, LINES=lines(X, Y, options["BM"]), **options))
    return out


def takes_inner(width):
    """Whether tiles of an output projection divide this width k."""
    return width > 0 and width % LEAST == 0


def drop_strides(drop, out):
    """Strides along samples, X and Y of factors broadcast to the shape of out; 0 where they are shared."""
    return (0, 0, 0) if drop is None else drop.expand(out.shape).stride()[:3]


def widened(drop, channels):
    """Dropout's factors with all channels, side by side, as the kernels read them; None for None."""
    return None if drop is None else drop.expand(*drop.shape[:-1], channels).contiguous()


NORM_PROJECT_OP = operation("norm_project", norm_project)
NORM_PROJECT_BACKWARD_OP = operation("norm_project_backward", norm_project_gradients)
OUTPUT_PROJECT_OP = operation("output_project", output_project)


# --------------------------------------------------------------------------------------------------------
# Derivatives. All tensors are contiguous.
# --------------------------------------------------------------------------------------------------------


def norm_project_backward(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, eps, handed_on=None,
                          total=False):
    """Gradients of x, norm_weight, norm_bias, weight and head_weight from those of y and head_bias.
    handed_on: the gradient of x from its other readers, such as the residual, which is added; if total, its
    sum over positions comes last."""
    channels, (width, dtype) = x.shape[-1], (
        (0, head_weight.dtype) if weight is None else (len(weight), weight.dtype))
    count = programs("norm_project_backward_kernel", x.numel() // channels, channels, width, dtype)
    dx, normed, partial_sums = NORM_PROJECT_BACKWARD_OP(
        dy, dbias, x, [norm_weight, norm_bias, weight, head_weight], handed_on, eps, count, total)
    gradients = sums.OP(partial_sums, shared_dtype((norm_weight, norm_bias, head_weight)))  # (., c)
    return (dx, gradients[0].to(norm_weight.dtype), gradients[1].to(norm_bias.dtype),
            None if weight is None else dy.flatten(0, -2).t() @ normed,
            None if head_weight is None else gradients[2:2 + len(head_weight)].to(head_weight.dtype),
            *[gradients[-1]] * total)


class HeadBias(torch.autograd.Function):
    """head_bias() with its derivative; saves x. Its kernel adds the gradient of the x that it hands on, which
    autograd would add in a pass over both."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, head_weight, eps):
        ctx.save_for_backward(x, norm_weight, norm_bias, head_weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # nobody may read the x that is handed on
        _, bias = NORM_PROJECT_OP(x, norm_weight, norm_bias, None, head_weight, eps)
        return bias, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dbias, handed_on):
        x, norm_weight, norm_bias, head_weight = ctx.saved_tensors
        dx, dnorm_weight, dnorm_bias, _, dhead_weight = norm_project_backward(
            None, dbias.contiguous(), x, norm_weight, norm_bias, None, head_weight, ctx.eps,
            None if handed_on is None else handed_on.contiguous())
        return dx, dnorm_weight, dnorm_bias, dhead_weight, None


def head_bias(x, norm_weight, norm_bias, head_weight, eps):
    """LayerNorm(x) head_weight^T, an attention bias (B, H, X, Y); and x, for whoever reads it after this.
    Under autocast the products are in its dtype. ValueError for what the kernels cannot take."""
    channels = x.shape[-1]
    check_shapes(("norm_weight", norm_weight, (channels,)), ("norm_bias", norm_bias, (channels,)),
                 ("head_weight", head_weight, (len(head_weight), channels)))
    head_weight = head_weight.to(product_dtype(x)).contiguous()
    return HeadBias.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), head_weight, eps)
