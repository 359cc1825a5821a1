"""A whole LLaMA block in one persistent kernel: five phases with a grid-wide barrier between each two.

    RMSNorm, Q, K, V, rotary | causal attention | output projection, residual |
    RMSNorm, gate, up, SiLU | down, residual

Results of a phase pass through memory, for the most part the L2 cache, not through registers. No
multiprocessor could keep the weights: with hidden 512 and intermediate 2048 (7.9 MB in bfloat16) they are 34
times its shared memory (227 KB). What is saved is launches.

All programs must run at once, or the barrier would wait for ever. So the launch is cooperative, for which
CUDA and HIP refuse a grid that does not fit. RMSNorm scales rows, so it is applied after the product, from a
sum of squares that the same loop makes.

Letters: B samples of S positions, M = B S rows; C channels; H heads of queries, G of keys and values, D
channels each; F channels between gate, up and down. In every phase the programs share its tiles: program p
makes tiles p, p + programs, and so on.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from companions.kernels import ULTRA_WIDTHS
from evoformer_kernels import tuner
from evoformer_kernels.common import candidates, check_dtype, processors, start

BARRIERS = 4  # between five phases, each with a counter of its own


class Weights(NamedTuple):
    """Of a block, each contiguous; qkv: (q, k, v) below each other, gate_up: (gate, up)."""
    norm1: torch.Tensor    # (c,)
    qkv: torch.Tensor      # ((H + 2 G) D, c)
    out: torch.Tensor      # (c, c)
    norm2: torch.Tensor    # (c,)
    gate_up: torch.Tensor  # (2 f, c)
    down: torch.Tensor     # (c, f)


@triton.jit
def wait_for_all(counters, number: tl.constexpr):
    """A barrier of the grid: returns when all programs have arrived. counters (BARRIERS,) int32; counter
    `number` counts arrivals here. All programs have left the barrier before, so its counter becomes 0 again;
    that of the last one does in the next launch."""
    tl.debug_barrier()  # all threads of this program have stored what others will read
    tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counters + number, 0, sem="acq_rel", scope="gpu") < tl.num_programs(0):
        pass
    if tl.program_id(0) == 0:
        tl.atomic_xchg(counters + (number + 3) % 4, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()


@triton.jit
def product(x, weight, norm, m, n, M, K, NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):
    """Rows m (BM,) of x (M, K) times rows n (BN,) of weight (N, K), (BM, BN) float32. With NORM x's channels
    are multiplied by norm (K,) first, and the rows' sums of squares, (BM,), are made, else zeros."""
    acc, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM,), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K),
                    other=0.0)  # (BM, BK)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            a = wide * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        b = tl.load(weight + n[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0)  # (BK, BN)
        acc = tl.dot(a.to(b.dtype), b, acc)
    return acc, squares


@triton.jit
def projections(x, norm, weight, angles, qkv, M, S, C, eps, ROTATED: tl.constexpr, HEADS: tl.constexpr,
                D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Phase 1: qkv (M, HEADS, D) = RMSNorm(x) weight^T, the first ROTATED heads rotated by their positions.

        x (M, C); norm (C,); weight (HEADS D, C); angles (2, S, D / 2) float32, cosines and sines

    A tile is BM rows of one head, in two halves of its channels, which rotation mixes.
    """
    half = tl.arange(0, D // 2)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * HEADS, tl.num_programs(0)):
        head, m = tile % HEADS, (tile // HEADS * BM + tl.arange(0, BM)).to(tl.int64)
        first, squares = product(x, weight, norm, m, head * D + half, M, C, True, BM, D // 2, BK)
        second, _ = product(x, weight, norm, m, head * D + D // 2 + half, M, C, True, BM, D // 2, BK)
        scale = tl.rsqrt(squares / C + eps)[:, None]  # (BM, 1), of RMSNorm
        first, second = first * scale, second * scale
        if head < ROTATED:
            offsets = (m[:, None] % S) * (D // 2) + half[None, :]
            cos, sin = tl.load(angles + offsets), tl.load(angles + S * (D // 2) + offsets)  # (BM, D / 2) each
            rotated = first * cos - second * sin
            second = second * cos + first * sin
            first = rotated
        offsets, there = (m[:, None] * HEADS + head) * D + half[None, :], m[:, None] < M
        tl.store(qkv + offsets, first.to(qkv.dtype.element_ty), mask=there)
        tl.store(qkv + offsets + D // 2, second.to(qkv.dtype.element_ty), mask=there)


@triton.jit
def attention(qkv, out, B, S, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr):
    """Phase 2: causal attention, out (B S, H D) of qkv (B S, (H + 2 G) D). A tile is BM queries of one head;
    it takes BN keys at a time, up to the diagonal."""
    d, blocks = tl.arange(0, D), tl.cdiv(S, BM)
    for tile in range(tl.program_id(0), B * H * blocks, tl.num_programs(0)):
        block, head, sample = tile % blocks, tile // blocks % H, (tile // blocks // H).to(tl.int64)
        m, width = block * BM + tl.arange(0, BM), (H + 2 * G) * D
        rows = sample * S + m  # (BM,)
        q = tl.load(qkv + rows[:, None] * width + head * D + d[None, :], mask=m[:, None] < S,
                    other=0.0)  # (BM, D)
        highest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        for n0 in range(0, tl.minimum((block + 1) * BM, S), BN):
            n = n0 + tl.arange(0, BN)
            keys = qkv + (sample * S + n) * width + (H + head // (H // G)) * D  # H / G heads share keys
            k = tl.load(keys[None, :] + d[:, None], mask=n[None, :] < S, other=0.0)  # (D, BN)
            v = tl.load(keys[:, None] + G * D + d[None, :], mask=n[:, None] < S, other=0.0)  # (BN, D)
            s = tl.dot(q, k) * scale  # (BM, BN)
            s = tl.where((n[None, :] <= m[:, None]) & (n[None, :] < S), s, -1e30)
            # Softmax so far, scaled by its highest score
            higher = tl.maximum(highest, tl.max(s, 1))  # (BM,)
            p, shrink = tl.exp(s - higher[:, None]), tl.exp(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
            highest = higher
        tl.store(out + rows[:, None] * (H * D) + head * D + d[None, :],
                 (acc / total[:, None]).to(out.dtype.element_ty), mask=m[:, None] < S)


@triton.jit
def added(x, weight, residual, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Phases 3 and 5: out (M, N) = residual (M, N) + x (M, K) weight^T, weight (N, K), in tiles (BM, BN).
    Columns beyond N read rows of weight from its beginning (n % N), and are not stored."""
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
        m = (tile // columns * BM + tl.arange(0, BM)).to(tl.int64)
        n = tile % columns * BN + tl.arange(0, BN)
        acc, _ = product(x, weight, weight, m, n % N, M, K, False, BM, BN, BK)
        at, there = m[:, None] * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
        acc += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def gated(x, norm, weight, out, M, C, F, eps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Phase 4: out (M, F) = silu(RMSNorm(x) gate^T) (RMSNorm(x) up^T), of x (M, C), norm (C,) and weight
    (2 F, C) = [gate; up], in tiles (BM, BN)."""
    columns = tl.cdiv(F, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
        m = (tile // columns * BM + tl.arange(0, BM)).to(tl.int64)
        n = tile % columns * BN + tl.arange(0, BN)
        gate, squares = product(x, weight, norm, m, n % F, M, C, True, BM, BN, BK)
        up, _ = product(x, weight + F.to(tl.int64) * C, norm, m, n % F, M, C, True, BM, BN, BK)
        scale = tl.rsqrt(squares / C + eps)[:, None]
        gate, up = gate * scale, up * scale
        tl.store(out + m[:, None] * F + n[None, :], (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
                 mask=(m[:, None] < M) & (n[None, :] < F))


@triton.jit
def ultra_block_kernel(x, norm1, w_qkv, w_out, norm2, w_gate_up, w_down, angles, qkv, mixed, middle, wide,
                       out, counters, B, S, C, F, eps, scale, H: tl.constexpr, G: tl.constexpr,
                       D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One program: its share of the tiles of every phase. Axis 0: programs, as many as run at once.

        x, out (B S, C); norm1, norm2 (C,); w_qkv ((H + 2 G) D, C); w_out (C, C); w_gate_up (2 F, C); w_down
        (C, F); angles (2, S, D / 2) float32, cosines and sines; counters (BARRIERS,) int32
        between phases: qkv (B S, (H + 2 G) D); mixed (B S, C), attention's output; middle (B S, C), behind
        the first residual; wide (B S, F)
    """
    M = B * S
    projections(x, norm1, w_qkv, angles, qkv, M, S, C, eps, H + G, H + 2 * G, D, BM, BK)
    wait_for_all(counters, 0)
    attention(qkv, mixed, B, S, scale, H, G, D, BM, BN)
    wait_for_all(counters, 1)
    added(mixed, w_out, x, middle, M, C, C, BM, BN, BK)
    wait_for_all(counters, 2)
    gated(middle, norm2, w_gate_up, wide, M, C, F, eps, BM, BN, BK)
    wait_for_all(counters, 3)
    added(wide, w_down, middle, out, M, C, F, BM, BN, BK)


TILES = candidates(("BM", "BN", "BK", "num_warps", "num_stages"), (32, 32, 32, 4, 2), (64, 64, 32, 4, 2),
                   (64, 64, 64, 4, 3), (128, 64, 32, 8, 2), (16, 64, 64, 4, 3))


def ultra_block(x, weights, angles, heads, kv_heads, eps, counters):
    """The block of x (B, S, c) in one launch. angles (2, S, D / 2) float32: cos and sin; counters (4,) int32,
    zero at first, kept for the next launch. All programs must fit on the GPU at once."""
    B, S, C = x.shape
    width, F = C // heads, weights.down.shape[1]
    if width not in ULTRA_WIDTHS:
        raise ValueError(f"no ultra-fused block for heads of width {width} (but for {ULTRA_WIDTHS})")
    x, dtype = x.contiguous(), weights.qkv.dtype
    check_dtype(weights.qkv, "ultra-fused block")
    qkv = x.new_empty(B * S, (heads + 2 * kv_heads) * width, dtype=dtype)
    mixed, wide = x.new_empty(B * S, C, dtype=dtype), x.new_empty(B * S, F, dtype=dtype)
    middle, out = torch.empty_like(x), torch.empty_like(x)
    shape = f"{str(dtype)[6:]} M{triton.next_power_of_2(B * S)} S{S} C{C} F{F}"
    sizes = dict(B=B, S=S, C=C, F=F, H=heads, G=kv_heads, D=width)
    tuner.launch("ultra_block_kernel", shape, TILES, lambda chosen: start(
        ultra_block_kernel, (processors(x, 1),), x, *weights, angles, qkv, mixed, middle, wide, out,
        counters, eps=eps, scale=width ** -0.5, **sizes, launch_cooperative_grid=True, **chosen))
    return out
