"""Gradients of many weights in two launches, as Triton kernels.

    out = left^T right    for each of a list of problems

left (P, n), right (P, m), out (n, m), sizes of each problem its own; all in one dtype of 16 bits.

P is long and n m is small. So a library cuts P into shares and adds up their products: two launches for each
problem, which leave most of the GPU idle. Here one launch makes the partial sums of all problems: a program
makes one tile of one problem's out, from one share of its positions. A second launch adds up the shares, in
one order, so every run gives the same bits. Tiles of one share follow each other, so that what they read
twice is in the cache.
"""
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoformer_kernels import tuner
from evoformer_kernels.common import add_up, candidates, is_fake, operation

MOST = 32  # problems of one launch: pointers and sizes of all are its arguments
LEAST = 512  # positions of a share, if there are so many: eight iterations of a program's loop

# PROGRAMS: about how many there shall be; it sets the number of shares. No tile has 32 rows: Triton 3.6 makes
# faulty code for those, transposed. The first candidate fits every GPU.
TILES = ("BN", "BM", "BK", "num_warps", "num_stages", "PROGRAMS")
CANDIDATES = candidates(
    TILES, (64, 64, 64, 4, 2, 512), *((*tile, programs) for programs in (256, 512, 1024) for tile in (
        (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 2),
        (128, 128, 64, 8, 3))))


@triton.jit
def weight_gradients_kernel(lefts, rights, positions, left_widths, right_widths, left_strides, right_strides,
                            partial_sums, TOTAL, SHARES, COUNT: tl.constexpr, BN: tl.constexpr,
                            BM: tl.constexpr, BK: tl.constexpr):
    """One program: a tile (BN, BM) of left^T right of one of COUNT problems, over one of SHARES shares of its
    positions, BK at a time. Axis 0: problems; within each its shares, within each share its tiles, by rows.

        all before partial_sums: tuples with an entry for each problem
        lefts[i] (positions[i], left_widths[i]), rights[i] (positions[i], right_widths[i]); strides are those
        of positions, widths lie side by side
        partial_sums (SHARES, TOTAL): all results, one after the other, TOTAL numbers
    """
    # Which problem is this program's? begin: its first program; start: its first number in a row of results
    number, begin, start = tl.program_id(0), 0, 0
    left, right, P, N, M = lefts[0], rights[0], positions[0], left_widths[0], right_widths[0]
    left_stride, right_stride, first, offset = left_strides[0], right_strides[0], begin, start
    for i in tl.static_range(1, COUNT):
        begin += tl.cdiv(left_widths[i - 1], BN) * tl.cdiv(right_widths[i - 1], BM) * SHARES
        start += left_widths[i - 1] * right_widths[i - 1]
        if number >= begin:
            left, right, P, N, M = lefts[i], rights[i], positions[i], left_widths[i], right_widths[i]
            left_stride, right_stride, first, offset = left_strides[i], right_strides[i], begin, start

    # Which of its shares, p0 <= p < end, and which of its tiles, rows n and columns m?
    across = tl.cdiv(M, BM)
    tiles = tl.cdiv(N, BN) * across
    share, tile = (number - first) // tiles, (number - first) % tiles
    n, m = tile // across * BN + tl.arange(0, BN), tile % across * BM + tl.arange(0, BM)  # (BN,), (BM,)
    size, k = tl.cdiv(tl.cdiv(P, SHARES), BK) * BK, tl.arange(0, BK)
    p0, share = share.to(tl.int64) * size, share.to(tl.int64)
    end = tl.minimum(p0 + size, P)

    # left^T right
    left_from = left + (p0 + k)[:, None] * left_stride + n[None, :]  # (BK, BN)
    right_from = right + (p0 + k)[:, None] * right_stride + m[None, :]  # (BK, BM)
    acc = tl.zeros((BN, BM), tl.float32)
    for p in range(p0, end, BK):
        inside = k[:, None] < end - p  # (BK, 1)
        left_tile = tl.load(left_from, mask=inside & (n[None, :] < N), other=0.0)  # (BK, BN)
        right_tile = tl.load(right_from, mask=inside & (m[None, :] < M), other=0.0)  # (BK, BM)
        acc = tl.dot(tl.trans(left_tile), right_tile, acc)
        left_from += BK * left_stride
        right_from += BK * right_stride
    to = partial_sums + share * TOTAL + offset + n[:, None] * M + m[None, :]  # (BN, BM)
    tl.store(to, acc.to(partial_sums.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


def multiply(lefts, rights, out, chosen):
    """out (numbers,) = the products of at most MOST problems, with one of CANDIDATES."""
    positions = tuple(len(left) for left in lefts)
    left_widths, right_widths = (tuple(t.shape[1] for t in tensors) for tensors in (lefts, rights))
    left_strides, right_strides = (tuple(t.stride(0) for t in tensors) for tensors in (lefts, rights))
    bn, bm, programs = chosen["BN"], chosen["BM"], chosen["PROGRAMS"]
    tiles = sum(triton.cdiv(n, bn) * triton.cdiv(m, bm)
                for n, m in zip(left_widths, right_widths, strict=True))
    shares = max(1, min(programs // tiles, triton.cdiv(max(positions), LEAST)))
    partial_sums = out if shares == 1 else out.new_empty(shares, len(out), dtype=torch.float32)
    weight_gradients_kernel[(tiles * shares,)](
        tuple(lefts), tuple(rights), positions, left_widths, right_widths, left_strides, right_strides,
        partial_sums, TOTAL=len(out), SHARES=shares, COUNT=len(lefts),
        **{name: value for name, value in chosen.items() if name != "PROGRAMS"})
    if shares > 1:
        add_up(partial_sums, out)


def launch(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """All results one after the other, (numbers,). compile_pass.py knows what the kernel takes."""
    numbers = [left.shape[1] * right.shape[1] for left, right in zip(lefts, rights, strict=True)]
    out = lefts[0].new_empty(sum(numbers))
    if is_fake(out):
        return out
    lefts, rights = ([t if t.stride(1) == 1 else t.contiguous() for t in tensors]
                     for tensors in (lefts, rights))
    end = 0
    for first in range(0, len(lefts), MOST):
        problems = slice(first, first + MOST)
        begin, end = end, end + sum(numbers[problems])
        shape = tuner.class_of(out.dtype, P=max(map(len, lefts[problems])), L=end - begin)
        tuner.launch(weight_gradients_kernel.__name__, shape, CANDIDATES,
                     partial(multiply, lefts[problems], rights[problems], out[begin:end]))
    return out


OP = operation("weight_gradients", launch)
