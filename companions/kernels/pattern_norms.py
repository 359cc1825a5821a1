"""Two patterns of fusion over rows: residual + norm in one kernel, and a LayerNorm of any width.

    total, y = add_norm(x, residual, weight, bias)      # LayerNorm; RMSNorm where bias is None
    y = wide_layer_norm(x, weight, bias)                # in tiles, by Welford's and Chan's sums

The first keeps a whole row in registers: at some width they spill, which companions/fusion_patterns.py shows.
The second reads a row twice and has no such end. x is (rows, width), contiguous.
"""
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from companions.kernels.pattern_references import EPS
from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import start
from fusion_lab.kernels.common import add_up, candidates

PROGRAMS = 512  # of a backward pass, each with partial sums of its own for the weights' gradients


@triton.jit
def normalised_row(x, there, width, eps, CENTRED: tl.constexpr):
    """x (BN,) float32, of which width exist -> normalised (BN,), 1 / standard deviation (CENTRED) or 1 / root
    mean square, a number."""
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / width, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    return x * rstd, rstd


@triton.jit
def add_norm_kernel(x, residual, weight, bias, total, y, width, eps, CENTRED: tl.constexpr,
                    BN: tl.constexpr):
    """One program: one row, BN >= width. Both inputs are read once, both results are written once.
    Axis 0: rows.

        total = x + residual;  y = LayerNorm(total) if CENTRED, else RMSNorm(total), which has no bias

        x, residual, total, y (rows, width); weight, bias (width,)
    """
    n, row = tl.arange(0, BN), tl.program_id(0).to(tl.int64) * width
    there = n < width
    both = (tl.load(x + row + n, mask=there, other=0.0).to(tl.float32)
            + tl.load(residual + row + n, mask=there, other=0.0).to(tl.float32))  # (BN,)
    both = both.to(total.dtype.element_ty)  # rounded as total is, which backward reads
    tl.store(total + row + n, both, mask=there)
    x_hat, _ = normalised_row(both.to(tl.float32), there, width, eps, CENTRED)
    out = x_hat * tl.load(weight + n, mask=there, other=0.0).to(tl.float32)
    if CENTRED:
        out += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row + n, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def add_norm_backward_kernel(dtotal, dy, total, weight, dx, partial_sums, rows, width, eps,
                             CENTRED: tl.constexpr, BN: tl.constexpr):
    """One program p: rows p, p + programs, ..., and its share of the weights' gradients. Axis 0: programs.

        dx = dy weight through the norm + dtotal;  dweight = sum of dy x_hat;  dbias = sum of dy

        dtotal, dy, total, dx (rows, width); weight (width,); partial_sums (programs, 2, width) float32
    """
    n, p = tl.arange(0, BN), tl.program_id(0).to(tl.int64)
    there = n < width
    w = tl.load(weight + n, mask=there, other=0.0).to(tl.float32)
    dw, db = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for r in range(p, rows, tl.num_programs(0)):
        offsets = r * width + n  # (BN,)
        x = tl.load(total + offsets, mask=there, other=0.0).to(tl.float32)
        x_hat, rstd = normalised_row(x, there, width, eps, CENTRED)
        g = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
        dw += g * x_hat
        db += g
        g = g * w
        result = g - x_hat * (tl.sum(g * x_hat, 0) / width)
        if CENTRED:
            result -= tl.sum(g, 0) / width
        result = result * rstd + tl.load(dtotal + offsets, mask=there, other=0.0).to(tl.float32)
        tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=there)
    own = partial_sums + p * 2 * width + n
    tl.store(own, dw, mask=there)
    tl.store(own + width, db, mask=there)


def row_tiles(width):
    """The whole row, with few or many warps to hold it; the first choice is by its width."""
    first = 4 if width <= 1024 else 8 if width <= 4096 else 16
    return [dict(BN=triton.next_power_of_2(width), num_warps=warps, num_stages=1)
            for warps in (first, *(w for w in (4, 8, 16) if w != first))]


class AddNorm(torch.autograd.Function):
    """add_norm() with its derivative; saves the sum."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        rows, width = x.shape
        total, y = torch.empty_like(x), torch.empty_like(x)
        affine = weight, weight if bias is None else bias
        tuner.launch("add_norm_kernel", shape_of(x), row_tiles(width), lambda chosen: start(
            add_norm_kernel, (rows,), x, residual, *affine, total, y, width, eps, CENTRED=bias is not None,
            **chosen))
        ctx.save_for_backward(total, weight)
        ctx.biased, ctx.eps = bias is not None, eps
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dy):
        total, weight = ctx.saved_tensors
        rows, width = total.shape
        dx, sums = torch.empty_like(total), torch.empty(2, width, dtype=weight.dtype, device=weight.device)
        partial_sums = sums.new_empty(min(rows, PROGRAMS), 2, width, dtype=torch.float32)
        gradients = dtotal.contiguous(), dy.contiguous()
        tuner.launch("add_norm_backward_kernel", shape_of(total), row_tiles(width), lambda chosen: start(
            add_norm_backward_kernel, (len(partial_sums),), *gradients, total, weight, dx, partial_sums, rows,
            width, ctx.eps, CENTRED=ctx.biased, **chosen))
        add_up(partial_sums, sums)
        return dx, dx, sums[0], sums[1] if ctx.biased else None, None


def shape_of(x):
    """The class of a matrix for the tuner."""
    rows, width = (triton.next_power_of_2(size) for size in x.shape)
    return f"{str(x.dtype)[6:]} P{rows} W{width}"


def add_norm(x, residual, weight, bias=None, eps=EPS):
    """(x + residual, its LayerNorm or, without a bias, RMSNorm)."""
    return AddNorm.apply(x.contiguous(), residual.contiguous(), weight, bias, eps)


# --------------------------------------------------------------------------------------------------------
# LayerNorm of any width
# --------------------------------------------------------------------------------------------------------


@triton.jit
def wide_norm_kernel(x, weight, bias, y, stats, width, eps, BN: tl.constexpr):
    """One program: LayerNorm of one row, in tiles of BN numbers, which are read twice. Axis 0: rows.

        x, y (rows, width); weight, bias (width,); stats (rows, 2) float32: mean, 1 / standard deviation

    Means and sums of squares of the tiles are merged as Chan does it, so nothing cancels.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    mean, squares, seen = 0.0, 0.0, 0.0
    for n0 in range(0, width, BN):
        there = n0 + n < width
        tile = tl.load(x + row * width + n0 + n, mask=there, other=0.0).to(tl.float32)  # (BN,)
        count = tl.sum(there.to(tl.float32), 0)
        own = tl.sum(tile, 0) / count  # the tile's mean
        centred = tl.where(there, tile - own, 0.0)
        apart, seen = own - mean, seen + count
        squares += tl.sum(centred * centred, 0) + apart * apart * (seen - count) * count / seen
        mean += apart * count / seen
    rstd = tl.rsqrt(squares / width + eps)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, rstd)
    for n0 in range(0, width, BN):
        there = n0 + n < width
        tile = tl.load(x + row * width + n0 + n, mask=there, other=0.0).to(tl.float32)
        w, b = (tl.load(weight + n0 + n, mask=there, other=0.0).to(tl.float32),
                tl.load(bias + n0 + n, mask=there, other=0.0).to(tl.float32))
        tl.store(y + row * width + n0 + n, ((tile - mean) * rstd * w + b).to(y.dtype.element_ty), mask=there)


@triton.jit
def wide_norm_backward_kernel(dy, x, weight, stats, dx, width, BN: tl.constexpr):
    """One program: dx of one row, in tiles of BN numbers, which are read twice. Axis 0: rows.

        dx = rstd (g - mean(g) - x_hat mean(g x_hat)),  g = dy weight

        dy, x, dx (rows, width); weight (width,); stats (rows, 2) of wide_norm_kernel
    """
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    mean, rstd = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
    plain, along = 0.0, 0.0  # sums of g and of g x_hat
    for n0 in range(0, width, BN):
        there = n0 + n < width
        offsets = row * width + n0 + n  # (BN,)
        g = (tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
             * tl.load(weight + n0 + n, mask=there, other=0.0).to(tl.float32))
        plain += tl.sum(g, 0)
        along += tl.sum(g * (tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean) * rstd, 0)
    for n0 in range(0, width, BN):
        there = n0 + n < width
        offsets = row * width + n0 + n  # (BN,)
        g = (tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
             * tl.load(weight + n0 + n, mask=there, other=0.0).to(tl.float32))
        x_hat = (tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx + offsets, (rstd * (g - plain / width - x_hat * (along / width))).to(dx.dtype.element_ty),
                 mask=there)


@triton.jit
def wide_norm_weights_kernel(dy, x, stats, partial_sums, rows, width, BM: tl.constexpr, BN: tl.constexpr):
    """One program p: its share of the weights' gradients, BN columns of them, from blocks p, p + programs and
    so on of BM rows. Axis 0: programs that share the rows; axis 1: tiles of columns.

        dweight = sum over rows of dy x_hat;  dbias = sum of dy

        dy, x (rows, width); stats (rows, 2) of wide_norm_kernel; partial_sums (programs, 2, width) float32
    """
    p, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    dw, db = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for r0 in range(p * BM, rows, tl.num_programs(0) * BM):
        r = r0 + tl.arange(0, BM)
        there = (r[:, None] < rows) & (n[None, :] < width)
        offsets = r[:, None].to(tl.int64) * width + n[None, :]  # (BM, BN)
        mean, rstd = (tl.load(stats + 2 * r, mask=r < rows, other=0.0),
                      tl.load(stats + 2 * r + 1, mask=r < rows, other=0.0))  # (BM,) each
        g = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
        x_hat = (tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean[:, None]) * rstd[:, None]
        dw += tl.sum(g * x_hat, 0)
        db += tl.sum(g, 0)
    own = partial_sums + p.to(tl.int64) * 2 * width + n
    tl.store(own, dw, mask=n < width)
    tl.store(own + width, db, mask=n < width)


WIDE = candidates(("BN", "num_warps", "num_stages"), (1024, 4, 2), (2048, 8, 2), (4096, 8, 2), (4096, 16, 1))
WEIGHTS = candidates(("BM", "BN", "num_warps", "num_stages"), (16, 64, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2))


class WideLayerNorm(torch.autograd.Function):
    """wide_layer_norm() with its derivative; saves x, weight and stats."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        rows, width = x.shape
        y, stats = torch.empty_like(x), torch.empty(rows, 2, dtype=torch.float32, device=x.device)
        tuner.launch("wide_norm_kernel", shape_of(x), WIDE, lambda chosen: start(
            wide_norm_kernel, (rows,), x, weight, bias, y, stats, width, eps, **chosen))
        ctx.save_for_backward(x, weight, stats)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, stats = ctx.saved_tensors
        (rows, width), dy = x.shape, dy.contiguous()
        dx, sums = torch.empty_like(x), torch.empty(2, width, dtype=weight.dtype, device=x.device)
        tuner.launch("wide_norm_backward_kernel", shape_of(x), WIDE, lambda chosen: start(
            wide_norm_backward_kernel, (rows,), dy, x, weight, stats, dx, width, **chosen))

        def weights(chosen):
            programs = min(triton.cdiv(rows, chosen["BM"]), 64)  # along rows; add_up() reads as many
            partial_sums = stats.new_empty(programs, 2, width)
            grid = programs, triton.cdiv(width, chosen["BN"])
            start(wide_norm_weights_kernel, grid, dy, x, stats, partial_sums, rows, width, **chosen)
            add_up(partial_sums, sums)
        tuner.launch("wide_norm_weights_kernel", shape_of(x), WEIGHTS, weights)
        return dx, sums[0], sums[1], None


def wide_layer_norm(x, weight, bias, eps=EPS):
    """LayerNorm of rows of any width."""
    return WideLayerNorm.apply(x.contiguous(), weight, bias, eps)
