"""Softmax over keys that come tile by tile, for the forward kernel of attention.

Tiles: BM queries, BN keys, BD channels of a head.
Sources: Milakov and Gimelshein 2018 (arXiv:1805.02867); Dao et al. 2022 (arXiv:2205.14135).
"""
import triton
import triton.language as tl

from evoformer_kernels.common import LOG2E

NO_KEY = tl.constexpr(-5e8)  # a maximum smaller than this: all keys are masked, by -1e9


@triton.jit
def online_softmax(s, v_tile, maximum, total, acc, SCORE_FACTOR: tl.constexpr):
    """Maxima (BM,), sums (BM,) and outputs (BM, BD) with one more tile of keys, of scores s (BM, BN).

    A larger maximum shrinks what was summed before, with u for SCORE_FACTOR:
        maximum' = max(maximum, u rowmax(s));  p = 2^((u s - maximum') log2(e) / u)
        shrink = 2^((maximum - maximum') log2(e) / u)
        total' = total shrink + rowsum(p);  acc' = acc shrink + p v
    With u = log2(e) an exponent is one fused multiply-add. The maximum was rounded, the product within is
    not: at scores of -1e9, in a tile of masked keys alone, the exponent is off by up to 18. Dividing by sums
    cancels that, but float16 does not hold 2^18: there u is 1. A bias far below -1e9 would be off by more
    than float32 holds: it is lifted to -1e9 before.
    """
    TO_BASE_2: tl.constexpr = LOG2E / SCORE_FACTOR
    new_maximum = tl.maximum(maximum, tl.max(s, 1) * SCORE_FACTOR)  # (BM,)
    p = tl.exp2((s * SCORE_FACTOR - new_maximum[:, None]) * TO_BASE_2)  # (BM, BN)
    shrink = tl.exp2((maximum - new_maximum) * TO_BASE_2)  # (BM,)
    new_total = total * shrink + tl.sum(p, 1)  # (BM,)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])  # (BM, BD)
    return new_maximum, new_total, acc


@triton.jit
def log_sum_exp(maximum, total, SCORE_FACTOR: tl.constexpr):
    """lse (BM,) from what online_softmax() left. A row without any key gets infinity: its probabilities are 0
    in backward. The sum itself would drown in a maximum of -1e9."""
    return tl.where(maximum < NO_KEY, float("inf"), maximum * (LOG2E / SCORE_FACTOR) + tl.log2(total))
