"""Five patterns of fusion as Triton kernels (companions/fusion_patterns.py measures them).

    y = linear(x, weight, bias, "gelu")             # gelu(x weight^T + bias), by tanh; also "relu", "silu"
    total, y = add_norm(x, residual, weight, bias)  # x + residual and its LayerNorm; without bias RMSNorm
    y = wide_layer_norm(x, weight, bias)            # LayerNorm of rows of any width, in tiles
    values, indices = softmax_topk(x, k)            # k <= 64; the probabilities are never in memory
    p = masked_softmax(q, k, mask)                  # softmax(q k^T / sqrt(D)) over keys that are there
    p = masked_softmax(q, k)                        # causal: each query with the keys up to its own place

x is (rows, width); weight of a product is (N, K); q and k are (heads, L, D), mask (heads, L), 1 = present.
add_norm alone has a derivative; the others are for forward passes.
"""
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from companions.kernels import EPS
from evoformer_kernels import tuner
from evoformer_kernels.common import candidates, start

PROGRAMS = 512  # of add_norm's backward pass, each with partial sums of its own for the weights' gradients


def shape_of(x):
    """The class of a matrix for the tuner."""
    rows, width = (triton.next_power_of_2(size) for size in x.shape)
    return f"{str(x.dtype)[6:]} P{rows} W{width}"


# --- A product, its bias and an activation --------------------------------------------------------------


@triton.jit
def linear_kernel(x, weight, bias, y, M, N, K, ACTIVATION: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """One program: a tile (BM, BN) of y = activation(x weight^T + bias). Axis 0: tiles, GROUP of them down a
    column, then the same rows of the next column, so that both operands are cached.

        x (M, K); weight (N, K); bias (N,); y (M, N)
    """
    # Which tile?
    tiles_down, tiles_across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    number, in_group = tl.program_id(0), GROUP * tiles_across
    first = number // in_group * GROUP
    size = tl.minimum(tiles_down - first, GROUP)
    m = (first + number % in_group % size) * BM + tl.arange(0, BM)
    n = number % in_group // size * BN + tl.arange(0, BN)

    # x weight^T
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K),
                    other=0.0)  # (BM, BK)
        b = tl.load(weight + n[None, :].to(tl.int64) * K + k[:, None],
                    mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)  # (BK, BN)
        acc = tl.dot(a, b, acc)

    # Bias and activation, before the tile leaves the registers; gelu: 0.5 z (1 + tanh(u)) = z sigmoid(2 u)
    z = acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0)
    elif ACTIVATION == "silu":
        z *= tl.sigmoid(z)
    else:
        z *= tl.sigmoid(2.0 * 0.7978845608028654 * (z + 0.044715 * z * z * z))  # sqrt(2 / pi)
    offsets, there = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + offsets, z.to(y.dtype.element_ty), mask=there)


LINEAR = candidates(("BM", "BN", "BK", "GROUP", "num_warps", "num_stages"), (64, 64, 32, 8, 4, 2),
                    (128, 128, 32, 8, 8, 3), (128, 128, 64, 8, 8, 3), (128, 256, 64, 8, 8, 3),
                    (128, 256, 64, 8, 8, 4), (64, 128, 64, 8, 4, 3))


def linear(x, weight, bias, activation):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, len(weight)
    y, shape = x.new_empty(M, N), f"{str(x.dtype)[6:]} M{triton.next_power_of_2(M)} N{N} K{K}"
    tuner.launch(f"linear_{activation}_kernel", shape, LINEAR, lambda chosen: start(
        linear_kernel, (triton.cdiv(M, chosen["BM"]) * triton.cdiv(N, chosen["BN"]),), x, weight,
        bias, y, M, N, K, activation, **chosen))
    return y


# --- Residual and norm ----------------------------------------------------------------------------------


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
    def forward(ctx, x, residual, weight, bias):
        rows, width = x.shape
        total, y = torch.empty_like(x), torch.empty_like(x)
        affine = weight, weight if bias is None else bias
        tuner.launch("add_norm_kernel", shape_of(x), row_tiles(width), lambda chosen: start(
            add_norm_kernel, (rows,), x, residual, *affine, total, y, width, EPS, CENTRED=bias is not None,
            **chosen))
        ctx.save_for_backward(total, weight)
        ctx.biased = bias is not None
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dy):
        total, weight = ctx.saved_tensors
        rows, width = total.shape
        dx, partial_sums = torch.empty_like(total), torch.empty(
            min(rows, PROGRAMS), 2, width, dtype=torch.float32, device=weight.device)
        gradients = dtotal.contiguous(), dy.contiguous()
        tuner.launch("add_norm_backward_kernel", shape_of(total), row_tiles(width), lambda chosen: start(
            add_norm_backward_kernel, (len(partial_sums),), *gradients, total, weight, dx, partial_sums, rows,
            width, EPS, CENTRED=ctx.biased, **chosen))
        dweight, dbias = partial_sums.sum(0).to(weight.dtype)
        return dx, dx, dweight, dbias if ctx.biased else None


def add_norm(x, residual, weight, bias=None):
    return AddNorm.apply(x.contiguous(), residual.contiguous(), weight, bias)


# --- LayerNorm of any width -----------------------------------------------------------------------------


@triton.jit
def wide_norm_kernel(x, weight, bias, y, width, eps, BN: tl.constexpr):
    """One program: LayerNorm of one row, in tiles of BN numbers, which are read twice. Axis 0: rows.

        x, y (rows, width); weight, bias (width,)

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
    for n0 in range(0, width, BN):
        there = n0 + n < width
        tile = tl.load(x + row * width + n0 + n, mask=there, other=0.0).to(tl.float32)
        w, b = (tl.load(weight + n0 + n, mask=there, other=0.0).to(tl.float32),
                tl.load(bias + n0 + n, mask=there, other=0.0).to(tl.float32))
        tl.store(y + row * width + n0 + n, ((tile - mean) * rstd * w + b).to(y.dtype.element_ty), mask=there)


WIDE = candidates(("BN", "num_warps", "num_stages"), (1024, 4, 2), (2048, 8, 2), (4096, 8, 2), (4096, 16, 1))


def wide_layer_norm(x, weight, bias):
    x = x.contiguous()
    y = torch.empty_like(x)
    tuner.launch("wide_norm_kernel", shape_of(x), WIDE, lambda chosen: start(
        wide_norm_kernel, (len(x),), x, weight, bias, y, x.shape[1], EPS, **chosen))
    return y


# --- Softmax and top-k ----------------------------------------------------------------------------------


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
def softmax_topk_kernel(x, values, indices, width, k, K: tl.constexpr, BN: tl.constexpr):
    """One program: the k largest entries of softmax(one row), k <= K, in tiles of BN numbers. Axis 0: rows.

        x (rows, width); values, indices (rows, k)

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


TOPK = candidates(("BN", "num_warps", "num_stages"), (1024, 4, 2), (512, 4, 2), (2048, 8, 2), (4096, 8, 2))


def softmax_topk(x, k):
    """In falling order; k is at most the width, and 64."""
    rows, width = x.shape
    x, kept = x.contiguous(), max(2, triton.next_power_of_2(k))
    values, indices = x.new_empty(rows, k), x.new_zeros(rows, k, dtype=torch.int64)  # zeros are indices
    tuner.launch("softmax_topk_kernel", f"{shape_of(x)} K{kept}", TOPK, lambda chosen: start(
        softmax_topk_kernel, (rows,), x, values, indices, width, k, K=kept, **chosen))
    return values, indices


# --- Scores, mask, softmax ------------------------------------------------------------------------------


@triton.jit
def scores_of(q, keys, mask, head, m, n, L, scale, D: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores (BM, BN) float32 of queries m (BM,), q (BM, D), with keys n (BN,) of a head; -inf where there is
    none, or with CAUSAL a later one."""
    d = tl.arange(0, D)
    k = tl.load(keys + (head * L + n[None, :]) * D + d[:, None], mask=n[None, :] < L, other=0.0)  # (D, BN)
    if CAUSAL:
        there = (n[None, :] <= m[:, None]) & (n[None, :] < L)
    else:
        there = (tl.load(mask + head * L + n, mask=n < L, other=0.0) > 0)[None, :]
    return tl.where(there, tl.dot(q, k) * scale, float("-inf"))


@triton.jit
def masked_softmax_kernel(queries, keys, mask, out, L, scale, D: tl.constexpr, CAUSAL: tl.constexpr,
                          BM: tl.constexpr, BN: tl.constexpr):
    """One program: attention probabilities of BM queries of a head with all keys, BN at a time. Axis 0: tiles
    of queries; axis 1: heads.

        queries, keys (heads, L, D); mask (heads, L), above 0 where there is a key, not read if CAUSAL;
        out (heads, L, L)

    The first loop makes maximum and sum of the scores; the second recomputes scores and stores probabilities.
    """
    head, m = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(queries + (head * L + m[:, None]) * D + d[None, :], mask=m[:, None] < L, other=0.0)  # (BM, D)
    highest, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for n0 in range(0, L, BN):
        s = scores_of(q, keys, mask, head, m, n0 + tl.arange(0, BN), L, scale, D, CAUSAL)  # (BM, BN)
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.sum(tl.exp(s - safe[:, None]), 1)
        highest = higher
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    for n0 in range(0, L, BN):
        n = n0 + tl.arange(0, BN)
        s = scores_of(q, keys, mask, head, m, n, L, scale, D, CAUSAL)  # (BM, BN)
        p = tl.exp(s - safe[:, None]) / total[:, None]
        tl.store(out + (head * L + m[:, None]) * L + n[None, :], p.to(out.dtype.element_ty),
                 mask=(m[:, None] < L) & (n[None, :] < L))


SCORES = candidates(("BM", "BN", "num_warps", "num_stages"), (32, 32, 4, 2), (64, 64, 4, 2), (64, 128, 8, 2),
                    (128, 64, 8, 2))


def masked_softmax(q, k, mask=None):
    """(heads, L, L), over keys whose mask is above 0, without one over those up to the query's own place; NaN
    where there are none. D: a power of two from 16 to 128."""
    heads, L, D = q.shape
    q, k, p, causal = q.contiguous(), k.contiguous(), q.new_empty(heads, L, L), mask is None
    mask = q if causal else mask.float().contiguous()
    kind = "causal" if causal else "masked"
    tuner.launch(f"{kind}_softmax_kernel", f"{shape_of(p[0])} D{D}", SCORES, lambda chosen: start(
        masked_softmax_kernel, (triton.cdiv(L, chosen["BM"]), heads), q, k, mask, p, L, D ** -0.5, D=D,
        CAUSAL=causal, **chosen))
    return p
