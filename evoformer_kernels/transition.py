"""Transitions: two layers with a ReLU between them, and LayerNorm and residual around them.

    h = relu(LayerNorm(x) W1^T + b1);  out = x + h W2^T + b2

x, out (B, X, Y, c); W1 (u, c); W2 (c, u); h (B, X, Y, u). Saved for backward: x and h. Kernels:

    forward    norm_project               h = relu(LayerNorm(x) W1^T + b1)
               output_project             x + h W2^T + b2
    backward   hidden gradient            dh = (dout W2) * [h > 0], partial sums of db1
               norm_project_backward      dx = LayerNorm's derivative of dh W1, + dout; dW1; db2 = sum of dout

Only the hidden gradient's kernel stands here; the others are those of projections. A library writes dout W2,
which is as wide as h; a second kernel reads that with h and writes dh, and a third one reads dh for db1. Our
kernel reads h once and writes dh once. A program owns a chunk of hidden units, whose weights it loads once,
and a share of the positions. It adds up db1 in registers, number by number, and between threads only at the
end.

Where the kernels of projections do not take so many channels, two_layers() leaves all products but the hidden
gradient to the library.

Source: AlphaFold 2 supplement, Alg. 9 and 15.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels import projections, tuner
from evoformer_kernels.common import (
    below,
    candidates,
    check_part,
    check_shapes,
    from_the_end,
    is_fake,
    load_rows,
    operation,
)
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums

PROGRAMS = 1024  # over which chunks and positions are spread: about eight for each processor of a large GPU
UNIT = 64  # of which the number of hidden units is a multiple: BK of every first candidate divides it

# BM positions and BK hidden units of a tile, by whether there are more than 128 channels; the first of each
# fits every GPU.
TILES = ("BM", "BK", "num_warps", "num_stages")
CANDIDATES = {
    False: candidates(TILES, (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 3),
                           (32, 64, 4, 3), (64, 128, 4, 3)),
    True: candidates(TILES, (32, 32, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3),
                          (64, 128, 8, 3))}


@triton.jit
def unit_pointers(matrix, p0, m, k, K: tl.constexpr):
    """Pointers (BM, BK) into a matrix (P, K): units k (BK,) at positions p0 + m (BM,)."""
    return matrix + p0 * K + m[:, None] * K + k[None, :]


@triton.jit
def transition_hidden_gradient_kernel(
        gradient,  # (P, C): dy
        w2,  # (C, K)
        hidden,  # (P, K): h
        out,  # (P, K) out: dh
        partial_sums,  # (shares, K) out: of db1
        P, SHARE, K: tl.constexpr, WHOLE_TILES: tl.constexpr, C: tl.constexpr,
        BM: tl.constexpr, BK: tl.constexpr):
    """dh = (dy W2) * [h > 0];  db1 = sum of dh over positions: BK hidden units of K, SHARE positions of P a
    program, in tiles of BM.

    Letters: P positions, C = c channels, K = u hidden units; p0, m, k, c count within them.
    Grid: axis 0: chunks of BK hidden units; axis 1: shares of the positions, from the last to the first.
    WHOLE_TILES: BM divides P. h is loaded a tile ahead: no product takes it, so the compiler does not load it
    early by itself."""
    k, c, m = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, C), tl.arange(0, BM)
    share = from_the_end(1)
    first = share.to(tl.int64) * SHARE
    end = tl.minimum(first + SHARE, P)
    w_tile = tl.load(w2 + c[:, None] * K + k[None, :])  # (C, BK), for all positions
    acc = tl.zeros((BM, BK), tl.float32)  # db1, not yet summed over the BM rows
    there = below(m, None if WHOLE_TILES else end - first)  # (BM,)
    h = tl.load(unit_pointers(hidden, first, m, k, K), mask=there[:, None], other=0.0)  # (BM, BK)
    for p0 in range(first, end, BM):
        # The next tile of h; none beyond the end
        remaining = None if WHOLE_TILES else (end - p0).to(tl.int32)  # positions from p0 on
        ahead = tl.full((BM,), p0 + BM, tl.int64) < end if WHOLE_TILES else m + BM < remaining  # (BM,)
        next_h = tl.load(unit_pointers(hidden, p0 + BM, m, k, K), mask=ahead[:, None], other=0.0)
        dh = load_rows(gradient + p0 * C, m, remaining, C)  # (BM, C)
        dh = tl.dot(dh, w_tile)  # (BM, BK)
        dh = tl.where(h > 0, dh, 0.0)
        acc += dh
        tl.store(unit_pointers(out, p0, m, k, K), dh.to(out.dtype.element_ty),
                 mask=below(m, remaining)[:, None])
        h = next_h
    tl.store(partial_sums + share * K + k, tl.sum(acc, 0))


def looked_up(positions, channels, units, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates: chunks of hidden
    units are whole."""
    whole = [each for each in CANDIDATES[channels > 128] if units % each["BK"] == 0]
    shape = tuner.class_of(dtype, P=positions, C=channels, N=units)
    return transition_hidden_gradient_kernel.__name__, shape, whole


def split_positions(positions, units, chosen):
    """Positions of a share, and how many shares that makes, one at least."""
    tiles = triton.cdiv(positions, chosen["BM"])
    share = triton.cdiv(tiles, max(1, PROGRAMS * chosen["BK"] // units)) * chosen["BM"]
    return share, triton.cdiv(positions, share) if positions else 1


@sums.constant
def shares(positions, channels, units, dtype):
    """How many shares of the positions the kernel makes with the tuner's choice."""
    return split_positions(positions, units, tuner.chosen(*looked_up(positions, channels, units, dtype)))[1]


def hidden_gradient(gradient: Tensor, w2: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """dh (P, u) and partial sums (count, u) of db1 from dout (P, c), W2 (c, u) and h (P, u).
    count: from shares()."""
    (channels, units), positions = w2.shape, hidden.shape[0]
    dh = hidden.new_empty(hidden.shape)
    partial_sums = hidden.new_empty(count, units, dtype=torch.float32)
    check(w2, channels, units)
    if is_fake(dh):
        return dh, partial_sums
    if not positions:
        return dh, partial_sums.zero_()

    def launch(chosen):
        share, number = split_positions(positions, units, chosen)
        with sums.room(partial_sums, number) as room:
            transition_hidden_gradient_kernel[units // chosen["BK"], number](
                gradient, w2, hidden, dh, room, P=positions, SHARE=share, K=units,
                WHOLE_TILES=positions % chosen["BM"] == 0, C=channels, **chosen)
    tuner.launch(*looked_up(positions, channels, units, w2.dtype), launch)
    return dh, partial_sums


OP = operation("hidden_gradient", hidden_gradient)


def hidden_gradients(gradient, w2, h):
    """dh (P, u) and partial sums (shares, u) of db1, by the operator."""
    return OP(gradient, w2, h, shares(len(h), *w2.shape, w2.dtype))


class Layer(torch.autograd.Function):
    """layer() with its derivative. Saves x and, unless recompute, h."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, w1, b1, w2, b2, eps, recompute):
        h, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, eps, b1)
        ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2, None if recompute else h)
        ctx.eps = eps
        return projections.OUTPUT_PROJECT_OP(h, w2, b2, x, None)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x, norm_weight, norm_bias, w1, b1, w2, h), gradient = ctx.saved_tensors, gradient.contiguous()
        if h is None:  # recompute
            h, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, w1, None, ctx.eps, b1, gradient)
        h = h.flatten(0, -2)  # (P, u)
        dupdate = gradient.flatten(0, -2).to(w2.dtype)  # (P, c)
        dh, partial_sums = hidden_gradients(dupdate, w2, h)  # (P, u), (shares, u)
        # The kernel that adds the residual's gradient sums it over positions, too: that is b2's gradient
        dh = dh.view(*x.shape[:-1], len(w1))
        dx, dnorm_weight, dnorm_bias, dw1, _, db2 = projections.norm_project_backward(
            dh, None, x, norm_weight, norm_bias, w1, None, ctx.eps, gradient, True)
        db1, dw2 = sums.OP(partial_sums, h.dtype), dupdate.t() @ h  # (u,), (c, u)
        return dx, dnorm_weight, dnorm_bias, dw1, db1, dw2, db2.to(w2.dtype), None, None


def layer(x, norm_weight, norm_bias, w1, b1, w2, b2, eps=1e-5, recompute=False):
    """x + relu(LayerNorm(x) w1^T + b1) w2^T + b2 of x (B, X, Y, c). Under autocast the products are made in
    its dtype, and the sum in that of x. recompute: save x alone, and compute the hidden layer once more in
    backward. ValueError for what the kernels cannot take."""
    units, channels = w1.shape
    check_shapes(("x", x, (*x.shape[:3], channels)), ("norm_weight", norm_weight, (channels,)),
                 ("norm_bias", norm_bias, (channels,)))
    x, norm_weight, norm_bias = (t.contiguous() for t in (x, norm_weight, norm_bias))
    return Layer.apply(x, norm_weight, norm_bias, *checked(x, w1, b1, w2, b2), eps, recompute)


class TwoLayers(torch.autograd.Function):
    """two_layers() with its derivative; saves x and h."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        h = torch._addmm_activation(b1, x.flatten(0, -2), w1.t())
        ctx.save_for_backward(x, w1, w2, h)
        return F.linear(h, w2, b2).view(*x.shape[:-1], len(w2))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, w1, w2, h = ctx.saved_tensors
        gradient = gradient.contiguous().flatten(0, -2)
        dh, partial_sums = hidden_gradients(gradient, w2, h)  # (P, u), (shares, u)
        dx, dw1, dw2 = dh @ w1, dh.t() @ x.flatten(0, -2), gradient.t() @ h  # (P, c), (u, c), (c, u)
        return dx.view(x.shape), dw1, sums.OP(partial_sums, h.dtype), dw2, sums.over_rows(gradient)


def two_layers(x, w1, b1, w2, b2):
    """relu(x w1^T + b1) w2^T + b2, (..., c); under autocast in its dtype. ValueError for what the kernel
    cannot take."""
    x = x.to(product_dtype(x)).contiguous()
    return TwoLayers.apply(x, *checked(x, w1, b1, w2, b2))


def checked(x, w1, b1, w2, b2):
    """The weights in the dtype of products, contiguous. ValueError for what the kernels cannot take."""
    units, channels = len(w1), x.shape[-1]
    check_shapes(("w1", w1, (units, channels)), ("b1", b1, (units,)), ("w2", w2, (channels, units)),
                 ("b2", b2, (channels,)))
    weights = [t.to(product_dtype(x)).contiguous() for t in (w1, b1, w2, b2)]
    check(weights[0], channels, units)
    return weights


def check(weight, channels, units):
    """ValueError for weights that the kernel cannot take: their dtype, so many channels, hidden units."""
    check_part("two layers", weight, channels)
    if units % UNIT:
        raise ValueError(f"{units} hidden units are no multiple of {UNIT}")
