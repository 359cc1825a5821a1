"""Softmax over keys that come tile by tile, for the forward kernel of attention.

Tiles: BM queries, BN keys, BD channels of a head.
Sources: Milakov and Gimelshein 2018 (arXiv:1805.02867); Dao et al. 2022 (arXiv:2205.14135).
"""
import triton
import triton.language as tl

from fusion_lab.kernels.common import LOG2E

NO_KEY = tl.constexpr(-5e8)  # a maximum smaller than this: all keys are masked, by -1e9


@triton.jit
def online_softmax(s, v_tile, maximum, total, acc, MAX_UNIT: tl.constexpr, PRECISION: tl.constexpr):
    """Maxima (BM,), sums (BM,) and outputs (BM, BD) with one more tile of keys, of scores s (BM, BN).

    A larger maximum shrinks what was summed before:
        m' = max(m, rowmax(s));  p = exp(s - m');  n = n exp(m - m') + rowsum(p);  acc = acc exp(m - m') + p v
    Maxima are in base 2, so that an exponent is one multiply-add: MAX_UNIT is log2(e). In float16 it is 1: in
    a tile of masked keys alone, -1e9 times log2(e) is off by 18, and 2^18 is more than float16 holds. There
    differences are taken first. A bias far below -1e9 would be off by more than float32 holds: it is lifted
    to -1e9 before.
    """
    TO_BASE_2: tl.constexpr = LOG2E / MAX_UNIT
    new_maximum = tl.maximum(maximum, tl.max(s, 1) * MAX_UNIT)  # (BM,)
    p = tl.exp2((s * MAX_UNIT - new_maximum[:, None]) * TO_BASE_2)  # (BM, BN)
    shrink = tl.exp2((maximum - new_maximum) * TO_BASE_2)  # (BM,)
    new_total = total * shrink + tl.sum(p, 1)  # (BM,)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)  # (BM, BD)
    return new_maximum, new_total, acc


@triton.jit
def log_sum_exp(maximum, total, MAX_UNIT: tl.constexpr):
    """lse (BM,) from what online_softmax() left. A row without any key gets infinity: its probabilities are 0
    in backward. The sum itself would drown in a maximum of -1e9."""
    return tl.where(maximum < NO_KEY, float("inf"), maximum * (LOG2E / MAX_UNIT) + tl.log2(total))
