"""The outer product mean from its two sides on: a Triton kernel for the outer product, and the projection.

    out = [onto +] scale (W vec(sum over n of left[n, i] right[n, j]^T) + bias)

left, right (B, N, S, h); W (c, h*h); bias (c,); onto, the residual, and out (B, S, S, c). Indices: n rows of
the alignment; i, j positions; u, v channels of left and right.

The outer product is the largest tensor here, h*h numbers for every pair of positions. A library's product of
left and right has rows (i, u) and columns (j, v), so it writes (i, u, j, v), while the projection reads
(i, j, u, v). The gradient of what the projection reads is made with rows (i, j) and columns (u, v), while the
products that make gradients of left and right read (i, u, j, v). A copy between the two layouts would read
and write all of it. So one kernel multiplies matrices whose rows and columns have two indices each, the
middle two of which change places in the result:

    out[m1, n1, m2, n2] = scale * sum over k of a[m1, m2, k] b[k, n1, n2]

              a                (m1, m2)   b       (n1, n2)   k
    forward   left             (i, u)     right   (j, v)     rows n of the alignment
    backward  out's gradient   (i, j)     W       (u, v)     channels of out

Sums are short, so most of a program is addresses, a wait for its operands and the store. So a program makes
several tiles of columns from the same rows, and loads the next one's operand while it stores. The scale goes
into both tensors as they are written, which saves a pass over out and its gradient. The gradient of the bias
is a sum of rows of out's gradient: programs that multiply these with the first columns add them up. A kernel
of projections multiplies by W and adds the residual, where it takes these widths; other products are the
library's.

Source: AlphaFold 2 supplement, Alg. 10.
"""
import contextlib
import math

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
    check_dtype,
    check_shapes,
    from_the_end,
    is_fake,
    lines,
    operation,
    store_sums,
)
from evoformer_kernels.limits import LAYER_CHANNELS
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums


@triton.jit
def store_row_sums(partial_sums, at, row_inside, k, K, a_stride_k, scale, BM: tl.constexpr, BK: tl.constexpr):
    """partial_sums (K,) = scale times the sum of BM rows of a, but those beyond the last. at: pointers of
    their first BK numbers, (BM, BK). A loop of its own: in that of the product Triton would overwrite tiles
    too early (tests/kernels/test_ahead_of_time.py: overwritten())."""
    for k0 in range(0, K, BK):
        there = row_inside[:, None] & (k < K - k0)[None, :]
        a_tile = tl.load(at, mask=there, other=0.0)  # (BM, BK)
        store_sums(partial_sums + k0, k, a_tile, a_tile.dtype, BM, scale, K - k0)
        at += BK * a_stride_k


@triton.jit
def tile_pointers(a, b, out, m, n, k, M1, M2, N1, a_stride_m1, a_stride_m2, a_stride_k, b_stride_k,
                  b_stride_n1, b_stride_n2, N2: tl.constexpr, LINES: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr):
    """Pointers of a (BM, BK), b (BK, BN), out (BM, BN) for the tile from row m and column n on; m1 (BM,) and
    n1 (BN,), which say what lies beyond the last row and column.

    Row m is (m1, m2), column n is (n1, n2). A line: the M2 rows of one m1, or the N2 columns of one n1."""
    if LINES > 0:
        # Only the first row and column are divided, and go into the pointers. Others count from there.
        WM: tl.constexpr = BM // LINES  # rows of one line in the tile
        WN: tl.constexpr = min(BN, N2)  # columns of one line in the tile
        m1, m2, n1, n2 = (m // M2).to(tl.int64), tl.multiple_of(m % M2, WM), n // N2, n % N2
        n2 = tl.multiple_of(n2, WN)
        a += m1 * a_stride_m1 + m2 * a_stride_m2
        b += n1 * b_stride_n1 + n2 * b_stride_n2
        out += m1 * (N1 * M2 * N2) + m2 * N2 + n1 * (M2 * N2) + n2
        m, n = tl.arange(0, BM), tl.arange(0, BN)
        m1, m2, n1, n2 = m // WM, m % WM, n // WN, n % WN  # (BM,), (BM,), (BN,), (BN,)
        m1_read, n1_read = m1, n1
    else:
        # Every row and column is divided. Beyond the last, pointers lead back inside, to what nobody uses.
        m, n = m + tl.arange(0, BM), n + tl.arange(0, BN)
        m1, m2, n1, n2 = (m // M2).to(tl.int64), m % M2, n // N2, n % N2  # (BM,), (BM,), (BN,), (BN,)
        m1_read, n1_read = tl.minimum(m1, M1 - 1), tl.minimum(n1, N1 - 1)
    # out is contiguous, in the order m1, n1, m2, n2
    a_at = a + ((m1_read * a_stride_m1 + m2 * a_stride_m2)[:, None] + (k * a_stride_k)[None, :])  # (BM, BK)
    b_at = b + ((n1_read * b_stride_n1 + n2 * b_stride_n2)[None, :] + (k * b_stride_k)[:, None])  # (BK, BN)
    out_at = out + (m1 * (N1 * M2 * N2) + m2 * N2)[:, None] + (n1 * (M2 * N2) + n2)[None, :]  # (BM, BN)
    return a_at, b_at, out_at, m1, n1


@triton.jit
def outer_product_matmul_kernel(
        a,  # (B, M1, M2, K) by its strides
        b,  # (B, K, N1, N2) by its strides
        out,  # (B, M1, N1, M2, N2) out
        partial_sums,  # (B * tiles of rows, K) out, float32
        M1, M2, N1, K, a_stride_sample, a_stride_m1, a_stride_m2, a_stride_k, b_stride_sample, b_stride_k,
        b_stride_n1, b_stride_n2, scale, N2: tl.constexpr, WHOLE_K: tl.constexpr, ONE_STEP: tl.constexpr,
        LINES: tl.constexpr, SUM_ROWS: tl.constexpr, BM: tl.constexpr,
        BN: tl.constexpr, BK: tl.constexpr, MANY: tl.constexpr):
    """out[m1, n1, m2, n2] = scale * sum over k of a[m1, m2, k] b[k, n1, n2]

    One program: BM rows (m1, m2) and MANY tiles of BN columns (n1, n2) of one sample.

    Grid: axis 0: tiles of rows times tiles of columns, columns innermost, from the last to the first;
    axis 1: samples. (Last tiles first: from_the_end() says why.)
    WHOLE_K: BK divides K. ONE_STEP: K is no more than BK.
    LINES: the tile's rows are so many whole lines, or (1) a part of one. Its columns are whole lines, or a
    part of one. None lies beyond the last. 0: none of this. (A line: see tile_pointers().)
    MANY above 1 needs LINES, ONE_STEP and columns that are whole lines.
    SUM_ROWS: programs of the first columns store scale times the sum of their rows of a, too."""
    sample, tiles_across = tl.program_id(1).to(tl.int64), tl.cdiv(N1 * N2, BN * MANY)
    tile, k = from_the_end(0), tl.arange(0, BK)  # (), (BK,)
    m, n = tile // tiles_across * BM, tile % tiles_across * BN * MANY  # the first row and column
    a, b = a + sample * a_stride_sample, b + sample * b_stride_sample
    out += sample * M1 * M2 * N1 * N2
    sums_rows = tile % tiles_across == 0 if SUM_ROWS else False
    partial_sums += (sample * tl.cdiv(M1 * M2, BM) + tile // tiles_across) * K
    a_at, b_at, out_at, m1, n1 = tile_pointers(
        a, b, out, m, n, k, M1, M2, N1, a_stride_m1, a_stride_m2, a_stride_k, b_stride_k, b_stride_n1,
        b_stride_n2, N2, LINES, BM, BN)
    if MANY > 1:
        # One tile of a for MANY of b: the next one of b is loaded while this product is stored
        a_tile = tl.load(a_at) if WHOLE_K else tl.load(a_at, mask=k[None, :] < K, other=0.0)  # (BM, BK)
        if sums_rows:
            store_sums(partial_sums, k, a_tile, a_tile.dtype, BM, scale, K)
        for _ in range(MANY):
            b_tile = tl.load(b_at) if WHOLE_K else tl.load(b_at, mask=k[:, None] < K, other=0.0)  # (BK, BN)
            acc = tl.dot(a_tile, b_tile)  # (BM, BN)
            tl.store(out_at, (acc * scale).to(out.dtype.element_ty))
            b_at += BN // N2 * b_stride_n1
            out_at += BN // N2 * (M2 * N2)
    else:
        # One tile of out, by a sum of BK numbers at a time
        acc, row_inside = tl.zeros((BM, BN), tl.float32), below(m1, None if LINES > 0 else M1)
        if not ONE_STEP:
            tl.assume(K > 0)  # else what the loop starts from is copied, for one without an iteration
        for k0 in range(0, BK if ONE_STEP else K, BK):
            a_tile = tl.load(a_at) if WHOLE_K else tl.load(a_at, mask=k[None, :] < K - k0, other=0.0)
            b_tile = tl.load(b_at) if WHOLE_K else tl.load(b_at, mask=k[:, None] < K - k0, other=0.0)
            acc = tl.dot(a_tile, b_tile, acc)  # (BM, BN)
            a_at += BK * a_stride_k
            b_at += BK * b_stride_k
        column_inside = below(n1, None if LINES > 0 else N1)
        tl.store(out_at, (acc * scale).to(out.dtype.element_ty),
                 mask=row_inside[:, None] & column_inside[None, :])
        if sums_rows:
            a_at -= tl.cdiv(K, BK) * BK * a_stride_k  # back to the first of K
            store_row_sums(partial_sums, a_at, row_inside, k, K, a_stride_k, scale, BM, BK)


# BM rows, BN columns, BK numbers of a sum, MANY tiles of columns a program. The first fits every GPU.
TILES = candidates(("BM", "BN", "BK", "num_warps", "num_stages", "MANY"), (64, 64, 64, 4, 2, 1),
                   (128, 64, 64, 4, 2, 1), (128, 128, 64, 8, 2, 1), (64, 128, 64, 4, 2, 1),
                   (64, 128, 32, 4, 3, 1), (128, 64, 128, 4, 3, 8), (64, 64, 128, 4, 3, 8),
                   (128, 128, 128, 4, 2, 8), (64, 128, 128, 4, 2, 4))


def looked_up(rows, columns, K, h, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates. The class: P
    rows, S columns, L numbers in each sum; ragged if tiles of at most 128 numbers, the largest BK, do not
    divide L, which takes more registers. 16 is the least that a product takes."""
    shape = tuner.class_of(dtype, P=rows, S=columns, L=K, H=h)
    ragged = K % max(16, min(128, triton.next_power_of_2(K))) > 0
    return outer_product_matmul_kernel.__name__, shape + " ragged" * ragged, TILES


@sums.constant
def programs(samples, rows, columns, K, h, dtype):
    """How many of the kernel's programs store sums with the tuner's choice."""
    return samples * triton.cdiv(rows, tuner.chosen(*looked_up(rows, columns, K, h, dtype))["BM"])


def named_strides(a, b):
    """Strides of a (B, M1, M2, K) and b (B, K, N1, N2) by the names that the kernel gives them."""
    names = [f"a_stride_{axis}" for axis in ("sample", "m1", "m2", "k")]
    names += [f"b_stride_{axis}" for axis in ("sample", "k", "n1", "n2")]
    return dict(zip(names, (*a.stride(), *b.stride()), strict=True))


def multiply(a, b, out, scale, partial_sums=None):
    """Fill contiguous out, B M1 N1 M2 N2 numbers, from a (B, M1, M2, K) and b (B, K, N1, N2) of any strides;
    and partial_sums (n, K), if given, whose sum is then scale times that of all rows of a. Nothing for fake
    tensors."""
    check_dtype(out, "outer product")
    if is_fake(out):
        return
    (samples, M1, M2, K), (N1, N2) = a.shape, b.shape[2:]

    def launch(chosen):
        bm, bn, bk = chosen["BM"], chosen["BN"], max(16, min(chosen["BK"], triton.next_power_of_2(K)))
        whole = lines(M1, M2, bm) if lines(N1, N2, bn) else 0
        several = whole and K <= bk and bn % N2 == 0  # whether a program may make several tiles
        column_tiles = math.gcd(chosen["MANY"], N1 * N2 // bn) if several else 1
        row_tiles, sums_rows = triton.cdiv(M1 * M2, bm), partial_sums is not None
        room = sums.room(partial_sums, samples * row_tiles) if sums_rows else contextlib.nullcontext(out)
        with room as row_sums:  # without sums a pointer that nobody uses
            outer_product_matmul_kernel[row_tiles * triton.cdiv(N1 * N2, bn * column_tiles), samples](
                a, b, out, row_sums, M1=M1, M2=M2, N1=N1, K=K, **named_strides(a, b), scale=scale, N2=N2,
                WHOLE_K=K % bk == 0 < K, ONE_STEP=K <= bk, LINES=whole,
                SUM_ROWS=sums_rows, **dict(chosen, BK=bk, MANY=column_tiles))
    tuner.launch(*looked_up(M1 * M2, N1 * N2, K, N2, out.dtype), launch)


def outer_product(left: Tensor, right: Tensor, scale: float = 1.0, after: Tensor | None = None) -> Tensor:
    """scale times the sum over rows, (B, S, S, h*h). after: see projections.norm_project()."""
    samples, _, size, h = left.shape
    out = left.new_empty(samples, size, size, h * h)
    multiply(left.permute(0, 2, 3, 1), right, out, scale)
    return out


def outer_product_gradient(gradient: Tensor, weight: Tensor, scale: float,
                           count: int) -> tuple[Tensor, Tensor]:
    """That sum's gradient, by that of out: ((i, u), (j, v)) of each sample, (B, S h, S h); and partial sums
    (count, c) of scale times the sum of out's gradient over positions."""
    (samples, size, _, c), h = gradient.shape, math.isqrt(weight.shape[1])
    douter = weight.new_empty(samples, size * h, size * h)
    partial_sums = weight.new_empty(count, c, dtype=torch.float32)
    b = weight.view(1, -1, h, h).expand(len(gradient), -1, -1, -1)  # (B, c, h, h)
    multiply(gradient, b, douter, scale, partial_sums)
    return douter, partial_sums


FORWARD_OP = operation("outer_layout", outer_product)
BACKWARD_OP = operation("outer_layout_backward", outer_product_gradient)


class OuterFirst(torch.autograd.Function):
    """outer_first() with its derivative. Saves left, right and, unless recompute, the sum over rows: no more
    than plain code."""

    @staticmethod
    def forward(ctx, left, right, weight, bias, scale, onto, recompute):
        outer = FORWARD_OP(left, right, scale)
        ctx.save_for_backward(left, right, weight, None if recompute else outer)
        ctx.scale, ctx.adds = scale, onto is not None
        if onto is not None and projects(weight):
            return projections.OUTPUT_PROJECT_OP(outer, weight, bias, onto, None, scale)
        update = F.linear(outer, weight) + bias * scale  # a compiler adds that where it adds the residual
        return (onto + update).to(onto.dtype) if ctx.adds else update

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (left, right, weight, outer), gradient = ctx.saved_tensors, gradient.contiguous()
        dupdate = gradient.to(weight.dtype)  # (B, S, S, c)
        if outer is None:  # recompute
            outer = FORWARD_OP(left, right, ctx.scale, dupdate)
        dweight = dupdate.flatten(0, -2).t() @ outer.flatten(0, -2)  # (c, h h)
        (B, S, _, c), wide = dupdate.shape, weight.shape[1]
        count = programs(B, S * S, wide, c, math.isqrt(wide), weight.dtype)
        douter, partial_sums = BACKWARD_OP(dupdate, weight, ctx.scale, count)  # (B, S h, S h), (count, c)
        dleft, dright = right.flatten(2) @ douter.mT, left.flatten(2) @ douter  # (B, N, S h) each
        dbias = sums.OP(partial_sums, weight.dtype)  # (c,)
        return (dleft.view(left.shape), dright.view(right.shape), dweight, dbias, None,
                gradient if ctx.adds else None, None)


def projects(weight):
    """Whether the kernel that adds a residual takes this weight (c, h*h): wider ones are the library's."""
    return len(weight) in LAYER_CHANNELS and projections.takes_inner(weight.shape[1])


def outer_first(left, right, weight, bias, scale=1.0, onto=None, recompute=False):
    """[onto +] scale (weight vec(sum over n of left[n, i] right[n, j]^T) + bias), (B, S, S, c), in
    autocast's dtype, or that of onto; scale is a number. recompute: backward recomputes the sum over n.
    Outer product first: the other order of the sums, weight first, needs no kernel."""
    (B, _, S, h), c = left.shape, len(weight)
    check_shapes(("right", right, tuple(left.shape)), ("weight", weight, (c, h * h)), ("bias", bias, (c,)),
                 ("onto", onto, (B, S, S, c)))
    left, right, weight, bias = (t.to(product_dtype(left)) for t in (left, right, weight, bias))
    onto = None if onto is None else onto.contiguous()
    return OuterFirst.apply(left, right, weight.contiguous(), bias.contiguous(), scale, onto, recompute)
