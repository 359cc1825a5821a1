"""Puzzle 4: softmax where some keys are missing, and S is no power of two.

    scores (R, S); key_mask (R, S), 1 = present, 0 = missing
    result (R, S): softmax over the keys that are present, 0 at the others

Blocks have a size that is a power of two, so a block of BLOCK columns holds a row of S <= BLOCK. What is
beyond S counts as missing. tl.load gives `other` where its mask is False. tl.where(condition, a, b) chooses
element by element, and key_mask > 0 is such a condition.

There are two traps. A missing score may be anything, even infinite, and infinity * 0 is NaN: choose with
tl.where instead of multiplying. A row without any key must give zeros. If its maximum is minus infinity, the
exponent is infinity minus infinity, which is NaN, and its sum of 0 must not become a divisor.
"""
import torch
import triton
import triton.language as tl


def inputs(size):
    scores, key_mask = 20 * torch.randn(16 * size, 77), (torch.rand(16 * size, 77) < 0.7).float()
    key_mask[3], scores[5, 7], key_mask[5, 7] = 0, float("inf"), 0
    return dict(scores=scores, key_mask=key_mask)


def plain(scores, key_mask):
    return torch.softmax(scores.masked_fill(key_mask == 0, -torch.inf), dim=-1).nan_to_num(0.0)


@triton.jit
def masked_softmax_kernel(scores, key_mask, out, S, BLOCK: tl.constexpr):
    """Program r: row r."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(scores + row * S + column, mask=column < S, other=0.0)
    # HOLE: load key_mask (what does `other` have to be?), and let only present keys count in maximum and sum
    x = tl.exp(x - tl.max(x))
    tl.store(out + row * S + column, x / tl.sum(x), mask=column < S)


def answer(scores, key_mask):
    out, (rows, S) = torch.empty_like(scores), scores.shape
    masked_softmax_kernel[rows,](scores, key_mask, out, S, BLOCK=triton.next_power_of_2(S))
    return out


# Our own, where a missing key's score gets -1e9 (scores are finite there): attention_forward_kernel in
# evoformer_kernels/attention/kernels.py
