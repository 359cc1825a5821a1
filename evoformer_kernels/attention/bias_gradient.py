"""The gradient of attention's bias from the partial sums that backward stores, as a Triton kernel.

    out = sum over n of partial_sums[n], cropped    partial_sums (N, B, H, LP, LP), out (B, H, L, L)

With `transpose` it writes the transpose of that: the gradient of what made the bias of attention along axis
1. One launch reads every partial sum once, adds up in float32, crops, rounds once and writes what the next
kernel reads. Sum, crop and transpose by themselves would write it twice.

A program has an accumulator for each of BP partial sums that it loads at once, and adds these up at the end.
Otherwise every iteration would need a sum across threads. Every tile divides LP, so that no load is masked
but those of partial sums beyond N. Beyond L partial sums may hold anything: it is read and not stored.
"""
import math

import triton
import triton.language as tl

from evoformer_kernels.common import bind, cdiv, is_fake

LINE = 128  # bytes of a matrix row that a program reads: a line of the cache
TILE = 256  # numbers of a tile: queries times keys
LOADED = 2 << 10  # bytes that a program loads at once: 32 for each of 64 threads


def launch(partial_sums, length, dtype, transpose, bound=None):
    """The gradient (B, H, length, length) in dtype, or its transpose. bound: as in common.bind()."""
    size, name = (*partial_sums.shape[1:3], length, length), ("bias_gradient", dtype, transpose)
    out = partial_sums.new_empty(size, dtype=dtype)
    if bound is not None and name in bound:
        bound[name](partial_sums, out)
        return out
    if is_fake(partial_sums):
        return out
    N, B, H, LP, _ = partial_sums.shape
    BP, BI, BJ = tile_sizes(N, LP, partial_sums.itemsize)
    warps = BI * BJ * BP * partial_sums.itemsize // (32 * 32)  # of 32 threads, each of which loads 32 bytes
    bind(bound, name, attention_bias_gradient_kernel,
         (cdiv(length, BJ), cdiv(length, BI), B * H), (N, B * H * LP * LP, length, LP),
         TRANSPOSE=transpose, BP=BP, BI=BI, BJ=BJ, num_warps=max(1, warps))(partial_sums, out)
    return out


def tile_sizes(N, LP, itemsize):
    """(BP, BI, BJ), powers of two: how many of N partial sums are loaded at once; queries, keys of a tile."""
    BJ = math.gcd(LP, LINE // itemsize)
    BI = math.gcd(LP, TILE // BJ)
    return min(triton.next_power_of_2(max(1, N)), LOADED // (BI * BJ * itemsize)), BI, BJ


@triton.jit
def attention_bias_gradient_kernel(partial_sums, out, N, sum_stride, L, LP, TRANSPOSE: tl.constexpr,
                                   BP: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """One program: BI queries and BJ keys of one head, of the sum of N partial sums.

    Grid: axis 0: tiles of BJ keys; axis 1: tiles of BI queries; axis 2: bh = b H + h.
    Reads partial_sums (N, B, H, LP, LP: queries, keys), of sum_stride numbers each.
    Writes out (B, H, L, L: queries, keys), or with TRANSPOSE (B, H, L, L: keys, queries).
    """
    j0, i0 = tl.program_id(0).to(tl.int64) * BJ, tl.program_id(1).to(tl.int64) * BI
    bh = tl.program_id(2).to(tl.int64)
    n, p = tl.arange(0, BP), tl.arange(0, BI * BJ)  # (BP,), (BI BJ,): numbers of the tile, keys last
    offsets = n.to(tl.int64)[:, None] * sum_stride + (p // BJ * LP + p % BJ)[None, :]  # (BP, BI BJ)
    partial_sums += (bh * LP + i0) * LP + j0
    acc = tl.zeros((BP, BI * BJ), tl.float32)
    for n0 in tl.range(0, N, BP, num_stages=4):  # loads of the next three iterations are under way
        acc += tl.load(partial_sums + offsets, mask=(n < N - n0)[:, None], other=0.0).to(tl.float32)
        partial_sums += tl.cast(sum_stride, tl.int64) * BP
    acc = tl.sum(acc, 0)  # (BI BJ,)
    i, j = i0 + tl.arange(0, BI)[:, None], j0 + tl.arange(0, BJ)[None, :]  # (BI, 1), (1, BJ)
    offsets = j * L + i if TRANSPOSE else i * L + j  # (BI, BJ): a transpose is nothing but other addresses
    tl.store(out + bh * L * L + offsets, tl.reshape(acc, (BI, BJ)).to(out.dtype.element_ty),
             mask=(i < L) & (j < L))

