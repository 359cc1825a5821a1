"""Puzzle 8: triangle multiplication is a batched matrix product in the wrong layout.

For the "outgoing" edges of AlphaFold 2's algorithm 11, channel c of the result is

    out[i, j, c] = sum_k a[i, k, c] * b[j, k, c],      a = sigmoid(gate_a) * side_a, b likewise

For one c that is a matrix product A @ B.T; but channels lie next to each other in memory (S, S, C), so
A's rows are strided. Write a kernel that applies the gate and stores the channels first, (C, S, S). Then
torch.bmm does the rest, and its result (C, S, S) is what the next layer's kernel reads.

    side_a, gate_a, side_b, gate_b (S, S, C) -> (C, S, S)

A program handles BP pairs (i, k) and all C channels: it loads a block (BP, C), along which channels are
neighbours, and stores its transpose (C, BP), along which pairs are neighbours. Both are fast; one element
at a time is not.
"""
import torch
import triton
import triton.language as tl


def inputs(size):
    return {name: torch.randn(8 * size, 8 * size, 16) for name in ("side_a", "gate_a", "side_b", "gate_b")}


def plain(side_a, gate_a, side_b, gate_b):
    return torch.einsum("ikc,jkc->cij", side_a * gate_a.sigmoid(), side_b * gate_b.sigmoid())


@triton.jit
def channels_first_kernel(side, gate, out, pairs, C: tl.constexpr, BP: tl.constexpr):
    """Program i: BP of the S * S pairs, all channels."""
    pair, channel = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, C)
    # HOLE: load (BP, C) of side and gate, gate it, and store it channels first. tl.trans helps. Now: zeros.
    tl.store(out + channel[:, None] * pairs + pair[None, :], tl.zeros((C, BP), tl.float32))


def channels_first(side, gate):
    (S, _, C), BP = side.shape, 32
    out = side.new_empty(C, S, S)
    channels_first_kernel[S * S // BP,](side, gate, out, S * S, C=C, BP=BP)
    return out


def answer(side_a, gate_a, side_b, gate_b):
    return channels_first(side_a, gate_a) @ channels_first(side_b, gate_b).transpose(1, 2)


# Our own: triangle_multiplication_front_kernel, with LayerNorm and the projections in front, in
# evoformer_kernels/triangle_multiplication/kernels.py
