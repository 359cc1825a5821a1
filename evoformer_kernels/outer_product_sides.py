"""Both sides of the outer product mean, a LayerNorm and two projections, by Triton kernels.

    left = LayerNorm(x) Wl^T + bl;  right = LayerNorm(x) Wr^T + br

x (B, N, S, c); W = [Wl; Wr] (2 h, c); b (2 h,); left, right (B, N, S, h). Both are tensors of their own: the
library's products of backward then read and write matrices without gaps, and nothing is copied.

Backward is one kernel. Its dx is LayerNorm's derivative of dleft Wl + dright Wr, to which it adds the
gradient of the x that forward has handed on (`HeadBias` in projections says why). W is small, so a program
adds up the gradients of all parameters in registers, over a share of the positions, and stores them as
partial sums. The library and a compiler would make two products, their operands joined, and five passes.

Source: AlphaFold 2 supplement, Alg. 10 (lines 1 and 2).
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels import tuner
from evoformer_kernels.common import (
    candidates,
    check_part,
    check_shapes,
    is_fake,
    layer_norm,
    layer_norm_backward,
    load_rows,
    moments,
    normalised,
    operation,
    shared_dtype,
    store_rows,
    vector,
)
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums

PROGRAMS = 256  # of backward, at most: each leaves partial sums as large as all parameters


@triton.jit
def side_weights(weight, side: tl.constexpr, H: tl.constexpr, C: tl.constexpr):
    """(H, C): the weights of one side, 0 for left, 1 for right."""
    return tl.load(weight + (side * H + tl.arange(0, H))[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def outer_product_sides_kernel(
        x,  # (P, C)
        norm_weight, norm_bias,  # (C,) each
        weight, bias,  # (2 H, C), (2 H,): left, then right
        left, right,  # (P, H) each, out
        P, eps, C: tl.constexpr, H: tl.constexpr, BM: tl.constexpr):
    """left = LayerNorm(x) Wl^T + bl;  right = LayerNorm(x) Wr^T + br: BM positions of P = B N S a program.

    Grid: axis 0: tiles of BM positions."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # (BM,)
    normal, x_hat, rstd = layer_norm(load_rows(x, p, P, C), norm_weight, norm_bias, eps, C)
    normal = normal.to(weight.dtype.element_ty)  # (BM, C)
    y = tl.dot(normal, tl.trans(side_weights(weight, 0, H, C)))  # (BM, H)
    store_rows(left, p, P, y + vector(bias, H), H)
    y = tl.dot(normal, tl.trans(side_weights(weight, 1, H, C)))  # (BM, H)
    store_rows(right, p, P, y + vector(bias + H, H), H)


@triton.jit
def store_parameter_sums(left_products, right_products, left_sums, right_sums, norm_weight, norm_bias, weight,
                         partial_sums, H: tl.constexpr, C: tl.constexpr):
    """One program's part of the gradients of all four parameters, (2 C + 2 H C + 2 H,) numbers, from
    G = dleft^T x_hat (H, C), g = dleft (BM, H), and those of the right side."""
    channels, h = tl.arange(0, C), tl.arange(0, H)
    left_weight, right_weight = side_weights(weight, 0, H, C), side_weights(weight, 1, H, C)  # (H, C)
    scale, shift = vector(norm_weight, C), vector(norm_bias, C)  # (1, C)
    dleft_bias, dright_bias = tl.sum(left_sums, 0), tl.sum(right_sums, 0)  # (H,)
    # norm_weight's: W * G summed over both sides' channels; norm_bias's: W * g
    tl.store(partial_sums + channels,
             tl.sum(left_weight * left_products, 0) + tl.sum(right_weight * right_products, 0))
    tl.store(partial_sums + C + channels, tl.sum(left_weight * dleft_bias[:, None], 0)
             + tl.sum(right_weight * dright_bias[:, None], 0))
    # weight's: G norm_weight + g norm_bias; bias's: g
    at = partial_sums + 2 * C + h[:, None] * C + channels[None, :]  # (H, C)
    tl.store(at, left_products * scale + dleft_bias[:, None] * shift)
    tl.store(at + H * C, right_products * scale + dright_bias[:, None] * shift)
    tl.store(partial_sums + (2 + 2 * H) * C + h, dleft_bias)
    tl.store(partial_sums + (2 + 2 * H) * C + H + h, dright_bias)


@triton.jit
def outer_product_sides_backward_kernel(
        dleft, dright,  # (P, H) each
        x,  # (P, C)
        norm_weight, norm_bias,  # (C,) each
        weight,  # (2 H, C)
        handed_on,  # (P, C): gradient of the x that was handed on
        dx,  # (P, C) out
        partial_sums,  # (programs, 2 C + 2 H C + 2 H) out: norm_weight's, norm_bias's, weight's, bias's
        P, SHARE, eps, C: tl.constexpr, H: tl.constexpr, BM: tl.constexpr):
    """dx = LayerNorm's derivative of (dleft Wl + dright Wr) + handed_on, and partial sums of the
    gradients of all parameters: SHARE positions a program, whole tiles of BM.

    Grid: axis 0: shares of the positions.
    All gradients of parameters follow from G = dleft^T x_hat and g = dleft^T 1, and those of the right side,
    which a program adds up: y = W (norm_weight x_hat + norm_bias) + bias."""
    channels, m = tl.arange(0, C), tl.arange(0, BM)
    first = tl.program_id(0).to(tl.int64) * SHARE
    end = tl.minimum(first + SHARE, P)
    left_products, right_products = tl.zeros((H, C), tl.float32), tl.zeros((H, C), tl.float32)  # G
    left_sums, right_sums = tl.zeros((BM, H), tl.float32), tl.zeros((BM, H), tl.float32)  # g, not yet over BM
    for p0 in range(first, end, BM):
        p = p0 + m  # (BM,)
        x_tile, handed_on_tile = load_rows(x, p, end, C), load_rows(handed_on, p, end, C)  # (BM, C)
        dl, dr = load_rows(dleft, p, end, H), load_rows(dright, p, end, H)  # (BM, H)
        dnormal = tl.dot(dl, side_weights(weight, 0, H, C))  # (BM, C)
        dnormal = tl.dot(dr, side_weights(weight, 1, H, C), dnormal)
        mean, rstd = moments(x_tile, eps, C)  # (BM,)
        x_hat = normalised(x_tile, mean, rstd)  # (BM, C)
        rounded = x_hat.to(weight.dtype.element_ty)
        left_products = tl.dot(tl.trans(dl), rounded, left_products)  # (H, C)
        right_products = tl.dot(tl.trans(dr), rounded, right_products)
        left_sums += dl
        right_sums += dr
        result = layer_norm_backward(dnormal, x_hat, rstd, tl.load(norm_weight + channels).to(tl.float32), C)
        store_rows(dx, p, end, result + handed_on_tile.to(tl.float32), C)
    partial_sums += tl.program_id(0) * ((2 + 2 * H) * C + 2 * H)
    store_parameter_sums(left_products, right_products, left_sums, right_sums, norm_weight, norm_bias, weight,
                         partial_sums, H, C)


# BM positions of a tile; backward's by whether there are more than 64 channels. The first fits every GPU.
TILES = ("BM", "num_warps", "num_stages")
FORWARD = candidates(TILES, (64, 4, 1), (32, 4, 1), (128, 8, 1))
BACKWARD = {
    False: candidates(TILES, (32, 4, 1), (16, 4, 1), (32, 4, 2), (32, 8, 1), (64, 8, 1)),
    True: candidates(TILES, (16, 4, 1), (32, 8, 1), (32, 8, 2))}


def looked_up(name, positions, channels, h, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
    shape = tuner.class_of(dtype, P=positions, C=channels, H=h)
    back = name == "outer_product_sides_backward_kernel"
    return name, shape, BACKWARD[channels > 64] if back else FORWARD


def split_positions(positions, chosen):
    """Positions of a share, and how many shares that makes, one at least."""
    tiles = max(1, triton.cdiv(positions, chosen["BM"]))
    each = triton.cdiv(tiles, PROGRAMS)  # tiles of a share
    return each * chosen["BM"], triton.cdiv(tiles, each)


@sums.constant
def shares(positions, channels, h, dtype):
    """How many shares of the positions backward's kernel makes with the tuner's choice."""
    name = "outer_product_sides_backward_kernel"
    return split_positions(positions, tuner.chosen(*looked_up(name, positions, channels, h, dtype)))[1]


def run(kernel, x, weight, launch):
    """launch(positions, configuration, options) with the tuner's choice; nothing for a fake x. ValueError for
    what kernels cannot take."""
    channels, h = x.shape[-1], len(weight) // 2
    check_part("sides", weight, channels, side=h)
    if is_fake(x):
        return
    positions = x[..., 0].numel()
    tuner.launch(*looked_up(kernel.__name__, positions, channels, h, weight.dtype), lambda chosen: launch(
        positions, chosen, dict(C=channels, H=h, **chosen)))


def project_sides(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor,
                  eps: float) -> tuple[Tensor, Tensor]:
    """left and right."""
    left, right = (weight.new_empty(*x.shape[:-1], len(weight) // 2) for _ in range(2))

    def launch(positions, chosen, options):
        outer_product_sides_kernel[triton.cdiv(positions, chosen["BM"]),](
            x, norm_weight, norm_bias, weight, bias, left, right, P=positions, eps=eps, **options)
    run(outer_product_sides_kernel, x, weight, launch)
    return left, right


def project_sides_backward(dleft: Tensor, dright: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor,
                           weight: Tensor, handed_on: Tensor, eps: float,
                           count: int) -> tuple[Tensor, Tensor]:
    """dx, with handed_on added, and partial sums (count, 2 c + 2 h c + 2 h) of the gradients of
    norm_weight, norm_bias, weight and bias, behind each other."""
    both, channels = weight.shape
    dx = x.new_empty(x.shape)
    partial_sums = x.new_empty(count, (2 + both) * channels + both, dtype=torch.float32)

    def launch(positions, chosen, options):
        share, programs = split_positions(positions, chosen)
        with sums.room(partial_sums, programs) as room:
            outer_product_sides_backward_kernel[programs,](
                dleft, dright, x, norm_weight, norm_bias, weight, handed_on, dx, room, P=positions,
                SHARE=share, eps=eps, **options)
    run(outer_product_sides_backward_kernel, x, weight, launch)
    return dx, partial_sums


FORWARD_OP = operation("side_projection", project_sides)
BACKWARD_OP = operation("side_projection_backward", project_sides_backward)


class Sides(torch.autograd.Function):
    """sides() with its derivative; saves x."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, eps):
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias)
        ctx.eps = eps
        return *FORWARD_OP(x, norm_weight, norm_bias, weight, bias, eps), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dleft, dright, handed_on):
        x, *parameters = ctx.saved_tensors
        weight, channels = parameters[2], x.shape[-1]
        count = shares(x.numel() // channels, channels, len(weight) // 2, weight.dtype)
        dx, partial_sums = BACKWARD_OP(dleft.contiguous(), dright.contiguous(), x, *parameters[:3],
                                       handed_on.contiguous(), ctx.eps, count)
        flat = sums.OP(partial_sums, shared_dtype(parameters)).split([t.numel() for t in parameters])
        return dx, *(d.view(t.shape).to(t.dtype) for d, t in zip(flat, parameters, strict=True)), None


def sides(x, norm_weight, norm_bias, weight, bias, eps=1e-5):
    """left and right (B, N, S, h) from x (B, N, S, c), weight (2 h, c) and bias (2 h,), and x for who reads
    it behind this. Under autocast the products are made in its dtype. ValueError for what the kernels cannot
    take."""
    both, c = weight.shape
    check_shapes(("x", x, (*x.shape[:-1], c)), ("norm_weight", norm_weight, (c,)),
                 ("norm_bias", norm_bias, (c,)), ("bias", bias, (both,)))
    weight, bias = (t.to(product_dtype(x)).contiguous() for t in (weight, bias))
    check_part("sides", weight, c, side=both / 2)
    return Sides.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), weight, bias, eps)
