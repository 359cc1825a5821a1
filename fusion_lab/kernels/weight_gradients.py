"""Gradients of many weights in two launches, as Triton kernels.

    out = left^T right    for each of a list of problems

left (P, n), right (P, m), out (n, m), sizes of each problem its own; all in one dtype of 16 bits. A library
takes a product and, since P is long and n m small, the sum of its parts for each problem: two launches that
each leave most of the GPU idle. Here a program owns a tile of one problem's out and a share of its P
positions; parts are float32, and a second kernel adds up those of all problems. Sums have one order, so every
run gives the same bits. Tiles of one share follow each other, so that what they read twice is in the cache.
"""
from functools import partial

import torch
import triton
import triton.language as tl

from fusion_lab.kernels import tuner
from fusion_lab.kernels.triton_parts import add_up, candidates, check_shapes, operation

MOST = 32  # problems of one launch: pointers and sizes of all are its arguments
LEAST = 512  # positions of a share, if there are so many
DTYPES = (torch.float16, torch.bfloat16)

# PROGRAMS: over how many the positions are shared, about. Tiles of 32 rows, transposed, are faulty in Triton
# 3.6. The first fits every GPU.
TILES = ("BN", "BM", "BK", "num_warps", "num_stages", "PROGRAMS")
CANDIDATES = candidates(
    TILES, (64, 64, 64, 4, 2, 512), *((*tile, programs) for programs in (256, 512, 1024) for tile in (
        (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 2),
        (128, 128, 64, 8, 3))))


def reference(lefts, rights):
    """The same in plain PyTorch."""
    return torch.cat([(left.t() @ right).flatten() for left, right in zip(lefts, rights, strict=True)])


@triton.jit
def weight_gradients_kernel(lefts, rights, positions, left_widths, right_widths, left_strides, right_strides,
                            parts, TOTAL, SHARES, COUNT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
                            BK: tl.constexpr):
    """A tile of one of COUNT problems, from one of SHARES shares of its positions. Tuples have an entry for
    each; parts (SHARES, TOTAL): all results, behind each other."""
    number, begin, place = tl.program_id(0), 0, 0
    left, right, P, N, M = lefts[0], rights[0], positions[0], left_widths[0], right_widths[0]
    left_stride, right_stride, first, at = left_strides[0], right_strides[0], begin, place
    for i in tl.static_range(1, COUNT):
        begin += tl.cdiv(left_widths[i - 1], BN) * tl.cdiv(right_widths[i - 1], BM) * SHARES
        place += left_widths[i - 1] * right_widths[i - 1]
        if number >= begin:
            left, right, P, N, M = lefts[i], rights[i], positions[i], left_widths[i], right_widths[i]
            left_stride, right_stride, first, at = left_strides[i], right_strides[i], begin, place
    across = tl.cdiv(M, BM)
    tiles = tl.cdiv(N, BN) * across
    share, tile = (number - first) // tiles, (number - first) % tiles
    n, m = tile // across * BN + tl.arange(0, BN), tile % across * BM + tl.arange(0, BM)
    size, k = tl.cdiv(tl.cdiv(P, SHARES), BK) * BK, tl.arange(0, BK)
    p0, share = share.to(tl.int64) * size, share.to(tl.int64)
    end = tl.minimum(p0 + size, P)
    lt_at = left + (p0 + k)[:, None] * left_stride + n[None, :]
    rt_at = right + (p0 + k)[:, None] * right_stride + m[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for p in range(p0, end, BK):
        inside = k[:, None] < end - p
        lt = tl.load(lt_at, mask=inside & (n[None, :] < N), other=0.0)
        rt = tl.load(rt_at, mask=inside & (m[None, :] < M), other=0.0)
        acc = tl.dot(tl.trans(lt), rt, acc)
        lt_at += BK * left_stride
        rt_at += BK * right_stride
    to = parts + share * TOTAL + at + n[:, None] * M + m[None, :]
    tl.store(to, acc.to(parts.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


def multiply(lefts, rights, out, chosen):
    """out (numbers,) = the products of at most MOST problems, with one of CANDIDATES."""
    sizes = positions, widths, others = [tuple(found) for found in zip(
        *((*left.shape, right.shape[1]) for left, right in zip(lefts, rights, strict=True)), strict=True)]
    strides = [tuple(t.stride(0) for t in tensors) for tensors in (lefts, rights)]
    bn, bm, programs = chosen["BN"], chosen["BM"], chosen["PROGRAMS"]
    tiles = sum(triton.cdiv(n, bn) * triton.cdiv(m, bm) for n, m in zip(widths, others, strict=True))
    shares = max(1, min(programs // tiles, triton.cdiv(max(positions), LEAST)))
    parts = out if shares == 1 else out.new_empty(shares, len(out), dtype=torch.float32)
    weight_gradients_kernel[(tiles * shares,)](
        tuple(lefts), tuple(rights), *sizes, *strides, parts, len(out), shares, COUNT=len(lefts),
        **{name: value for name, value in chosen.items() if name != "PROGRAMS"})
    if shares > 1:
        add_up(parts, out)


def launch(lefts, rights):
    """All results behind each other, (numbers,). ValueError for what the kernel cannot take."""
    check(lefts, rights)
    out = sizes(lefts, rights)
    lefts, rights = ([t if t.stride(1) == 1 else t.contiguous() for t in tensors]
                     for tensors in (lefts, rights))
    ends = [0]
    for left, right in zip(lefts, rights, strict=True):
        ends.append(ends[-1] + left.shape[1] * right.shape[1])
    for first in range(0, len(lefts), MOST):
        last = min(first + MOST, len(lefts))
        given = lefts[first:last], rights[first:last], out[ends[first]:ends[last]]
        numbers = max(len(left) for left in given[0]), len(given[2])
        shape = " ".join([str(out.dtype)[6:], *(f"{name}{triton.next_power_of_2(number)}"
                                                for name, number in zip("PL", numbers, strict=True))])
        tuner.launch(weight_gradients_kernel.__name__, shape, CANDIDATES, partial(multiply, *given))
    return out


def check(lefts, rights):
    """ValueError with what is wrong."""
    if not lefts or len(lefts) != len(rights):
        raise ValueError(f"{len(lefts)} left and {len(rights)} right operands, but there must be as many of "
                         "each, and one at least")
    dtypes = {t.dtype for t in (*lefts, *rights)}
    if len(dtypes) > 1 or lefts[0].dtype not in DTYPES:
        raise ValueError(f"no Triton gradients of weights from {' and '.join(sorted(map(str, dtypes)))}, but "
                         "from one of float16 and bfloat16")
    for number, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        check_shapes((f"left {number}", left, (left.shape[0], left.shape[-1])),
                     (f"right {number}", right, (left.shape[0], right.shape[-1])))


def sizes(lefts, rights):
    return lefts[0].new_empty(sum(left.shape[1] * right.shape[1]
                                  for left, right in zip(lefts, rights, strict=True)))


def flops(lefts, rights, **_):
    return sum(2 * positions * n * m for (positions, n), (_, m) in zip(lefts, rights, strict=True))


OP = operation("weight_gradients(Tensor[] lefts, Tensor[] rights) -> Tensor", launch, sizes, flops)
