"""Two patterns of fusion round a softmax: the k most probable entries of a row, and attention probabilities.

    values, indices = softmax_topk(x, k)                # k <= 64; the probabilities are never in memory
    p = masked_softmax(q, k, mask)                      # softmax(q k^T / sqrt(D)) over keys that are there

x is (rows, width); q and k are (heads, L, D), mask (heads, L), 1 = present; all contiguous.
"""
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from companions.kernels.dispatch import precision
from companions.kernels.pattern_norms import shape_of
from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import start
from fusion_lab.kernels.common import candidates

MOST_KEPT = 64  # entries of a row, which a program keeps in registers


# --------------------------------------------------------------------------------------------------------
# Softmax and top-k
# --------------------------------------------------------------------------------------------------------


@triton.jit
def sortable(x, index):
    """float32 x and its index, of one shape -> one int64 each. It is larger for larger x, NaN the largest,
    and among equals for smaller indices. Bits of negative numbers grow the other way, so they are flipped."""
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def sorted_back(key):
    """(x, index) from the key that sortable() made."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def softmax_topk_kernel(x, values, indices, stats, width, k, K: tl.constexpr, BN: tl.constexpr):
    """One program: the k largest entries of softmax(one row), k <= K, in tiles of BN numbers. Axis 0: rows.

        x (rows, width); values, indices (rows, k); stats (rows, 2) float32: maximum, sum of exp(x - maximum)

    Maximum, sum and the K largest so far are kept. A tile whose largest entry is below all of these is not
    sorted. K is a power of two, as tl.topk demands.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    lowest = -0x7FFFFFFFFFFFFFFF
    best = tl.full((K,), lowest, tl.int64)  # keys of sortable()
    m, total = float("-inf"), 0.0
    for n0 in range(0, width, BN):
        there = n0 + n < width
        tile = tl.load(x + row * width + n0 + n, mask=there, other=float("-inf")).to(tl.float32)  # (BN,)
        higher = tl.maximum(m, tl.max(tile, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is not a number
        total = total * tl.exp(m - safe) + tl.sum(tl.exp(tile - safe), 0)
        m = higher
        keys = tl.where(there, sortable(tile, n0 + n), lowest)  # (BN,)
        if tl.max(keys, 0) > tl.min(best, 0):
            best = tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), (2 * K,)), K)
    number, index = sorted_back(tl.sort(best, descending=True))  # (K,) each
    safe, kept = tl.where(m == float("-inf"), 0.0, m), tl.arange(0, K)
    out = row * k + kept
    tl.store(values + out, (tl.exp(number - safe) / total).to(values.dtype.element_ty), mask=kept < k)
    tl.store(indices + out, index.to(tl.int64), mask=kept < k)
    tl.store(stats + 2 * row, safe)
    tl.store(stats + 2 * row + 1, total)


@triton.jit
def softmax_topk_backward_kernel(x, stats, along, dx, width, BN: tl.constexpr):
    """One program: dx = -p along of BN numbers of a row. Axis 0: rows; axis 1: tiles of a row.

        x (rows, width); stats (rows, 2) of softmax_topk_kernel; along (rows,) = sum of values dvalues;
        dx (rows, width) float32

    What the k chosen ones get beside, values dvalues, is added by scatter.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    offsets, there = row * width + n, n < width
    p = tl.exp(tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - tl.load(stats + 2 * row))  # (BN,)
    p = p / tl.load(stats + 2 * row + 1)
    tl.store(dx + offsets, -p * tl.load(along + row), mask=there)


TOPK = candidates(("BN", "num_warps", "num_stages"), (1024, 4, 2), (512, 4, 2), (2048, 8, 2), (4096, 8, 2))
ROW = candidates(("BN", "num_warps", "num_stages"), (1024, 4, 1), (4096, 8, 1))


class SoftmaxTopK(torch.autograd.Function):
    """softmax_topk() with its derivative; saves x and not its probabilities."""

    @staticmethod
    def forward(ctx, x, k):
        rows, width = x.shape
        values, indices = x.new_empty(rows, k), x.new_zeros(rows, k, dtype=torch.int64)  # zeros are indices
        stats, kept = x.new_empty(rows, 2, dtype=torch.float32), max(2, triton.next_power_of_2(k))
        tuner.launch("softmax_topk_kernel", f"{shape_of(x)} K{kept}", TOPK, lambda chosen: start(
            softmax_topk_kernel, (rows,), x, values, indices, stats, width, k, K=kept, **chosen))
        ctx.save_for_backward(x, values, indices, stats)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues, _):
        x, values, indices, stats = ctx.saved_tensors
        rows, width = x.shape
        share = values.float() * dvalues.float()
        along, dx = share.sum(-1), torch.empty_like(x, dtype=torch.float32)
        tuner.launch("softmax_topk_backward_kernel", shape_of(x), ROW, lambda chosen: start(
            softmax_topk_backward_kernel, (rows, triton.cdiv(width, chosen["BN"])), x, stats, along, dx,
            width, **chosen))
        return dx.scatter_add_(1, indices, share).to(x.dtype), None


def softmax_topk(x, k):
    """(values, indices) of the k largest entries of softmax(x), in falling order."""
    if not 1 <= k <= min(MOST_KEPT, x.shape[-1]):
        raise ValueError(f"k = {k}: must be from 1 to {min(MOST_KEPT, x.shape[-1])}")
    return SoftmaxTopK.apply(x.contiguous(), k)


# --------------------------------------------------------------------------------------------------------
# Scores, mask, softmax
# --------------------------------------------------------------------------------------------------------


@triton.jit
def scores_of(q, keys, mask, head, n, L, scale, D: tl.constexpr, PRECISION: tl.constexpr):
    """Scores (BM, BN) float32 of queries q (BM, D) with keys n (BN,) of a head; -inf where there is none."""
    d = tl.arange(0, D)
    k = tl.load(keys + (head * L + n[None, :]) * D + d[:, None], mask=n[None, :] < L, other=0.0)  # (D, BN)
    there = tl.load(mask + head * L + n, mask=n < L, other=0.0) > 0
    return tl.where(there[None, :], tl.dot(q, k, input_precision=PRECISION) * scale, float("-inf"))


@triton.jit
def masked_softmax_kernel(queries, keys, mask, out, L, scale, D: tl.constexpr, PRECISION: tl.constexpr,
                          BM: tl.constexpr, BN: tl.constexpr):
    """One program: attention probabilities of BM queries of a head with all keys, BN at a time. Axis 0: tiles
    of queries; axis 1: heads.

        queries, keys (heads, L, D); mask (heads, L), above 0 where there is a key; out (heads, L, L)

    The first loop makes maximum and sum of the scores; the second recomputes scores and stores probabilities.
    """
    head, m = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(queries + (head * L + m[:, None]) * D + d[None, :], mask=m[:, None] < L, other=0.0)  # (BM, D)
    highest, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for n0 in range(0, L, BN):
        s = scores_of(q, keys, mask, head, n0 + tl.arange(0, BN), L, scale, D, PRECISION)  # (BM, BN)
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.sum(tl.exp(s - safe[:, None]), 1)
        highest = higher
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    for n0 in range(0, L, BN):
        n = n0 + tl.arange(0, BN)
        s = scores_of(q, keys, mask, head, n, L, scale, D, PRECISION)  # (BM, BN)
        p = tl.exp(s - safe[:, None]) / total[:, None]
        tl.store(out + (head * L + m[:, None]) * L + n[None, :], p.to(out.dtype.element_ty),
                 mask=(m[:, None] < L) & (n[None, :] < L))


@triton.jit
def masked_softmax_backward_kernel(dp, p, ds, L, scale, BM: tl.constexpr, BN: tl.constexpr):
    """One program: the gradient of q k^T for BM queries of a head, BN keys at a time. Axis 0: tiles of
    queries; axis 1: heads.

        ds = scale p (dp - sum over keys of p dp)           dp, p, ds (heads, L, L)
    """
    head, m = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    row, along = (head * L + m[:, None]) * L, tl.zeros((BM,), tl.float32)  # along: sums of p dp
    for n0 in range(0, L, BN):
        n = n0 + tl.arange(0, BN)
        there = (m[:, None] < L) & (n[None, :] < L)
        along += tl.sum(tl.load(p + row + n[None, :], mask=there, other=0.0).to(tl.float32)
                        * tl.load(dp + row + n[None, :], mask=there, other=0.0).to(tl.float32), 1)
    for n0 in range(0, L, BN):
        n = n0 + tl.arange(0, BN)
        there = (m[:, None] < L) & (n[None, :] < L)
        g = tl.load(dp + row + n[None, :], mask=there, other=0.0).to(tl.float32) - along[:, None]
        g = g * tl.load(p + row + n[None, :], mask=there, other=0.0).to(tl.float32) * scale
        tl.store(ds + row + n[None, :], g.to(ds.dtype.element_ty), mask=there)


SCORES = candidates(("BM", "BN", "num_warps", "num_stages"), (32, 32, 4, 2), (64, 64, 4, 2), (64, 128, 8, 2),
                    (128, 64, 8, 2))
SCORES_BACKWARD = candidates(("BM", "BN", "num_warps", "num_stages"), (4, 256, 4, 2), (2, 1024, 4, 2),
                             (8, 512, 8, 2))


class MaskedSoftmax(torch.autograd.Function):
    """masked_softmax() with its derivative; saves q, k and the probabilities."""

    @staticmethod
    def forward(ctx, q, k, mask):
        heads, L, D = q.shape
        p, scale = q.new_empty(heads, L, L), D ** -0.5
        tuner.launch("masked_softmax_kernel", f"{shape_of(p[0])} D{D}", SCORES, lambda chosen: start(
            masked_softmax_kernel, (triton.cdiv(L, chosen["BM"]), heads), q, k, mask, p, L, scale, D=D,
            PRECISION=precision(q.dtype), **chosen))
        ctx.save_for_backward(q, k, p)
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        q, k, p = ctx.saved_tensors
        heads, L, D = q.shape
        dp, ds = dp.contiguous(), torch.empty_like(p)
        tuner.launch("masked_softmax_backward_kernel", shape_of(p[0]), SCORES_BACKWARD, lambda chosen: start(
            masked_softmax_backward_kernel, (triton.cdiv(L, chosen["BM"]), heads), dp, p, ds, L, D ** -0.5,
            **chosen))
        return ds @ k, ds.transpose(-1, -2) @ q, None


def masked_softmax(q, k, mask):
    """softmax(q k^T / sqrt(D)), (heads, L, L), over keys whose mask is above 0; NaN where there are none.
    D: a power of two from 16 to 128."""
    if q.shape[-1] not in (16, 32, 64, 128):
        raise ValueError(f"no kernel for heads of width {q.shape[-1]}")
    return MaskedSoftmax.apply(q.contiguous(), k.contiguous(), mask.float().contiguous())
