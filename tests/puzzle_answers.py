"""An answer to each of the puzzles, for tests: python puzzles/check.py N --answer tests/puzzle_answers.py"""
import torch
import triton
import triton.language as tl


def project(x, w_q, w_k, w_v):
    return (x @ torch.cat([w_q, w_k, w_v]).T).chunk(3, dim=-1)


@triton.jit
def gated_update_kernel(x, gate, update, out, n, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = where < n
    gated = tl.sigmoid(tl.load(gate + where, mask=there)) * tl.load(update + where, mask=there)
    tl.store(out + where, tl.load(x + where, mask=there) + gated, mask=there)


@triton.jit
def softmax_kernel(scores, bias, out, BIAS_ROWS, S: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, S)
    x = tl.load(scores + row * S + column) + tl.load(bias + row % BIAS_ROWS * S + column)
    x = tl.exp(x - tl.max(x))
    tl.store(out + row * S + column, x / tl.sum(x))


@triton.jit
def masked_softmax_kernel(scores, key_mask, out, S, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    there = column < S
    present = tl.load(key_mask + row * S + column, mask=there, other=0.0) > 0
    x = tl.where(present, tl.load(scores + row * S + column, mask=there, other=0.0), -1e30)
    x = tl.where(present, tl.exp(x - tl.max(x)), 0.0)
    tl.store(out + row * S + column, x / tl.maximum(tl.sum(x), 1e-30), mask=there)


@triton.jit
def softmax_backward_kernel(p, dp, dx, S, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    there = column < S
    p_row = tl.load(p + row * S + column, mask=there, other=0.0)
    dp_row = tl.load(dp + row * S + column, mask=there, other=0.0)
    tl.store(dx + row * S + column, p_row * (dp_row - tl.sum(p_row * dp_row)), mask=there)


@triton.jit
def partial_sums_kernel(x, partial_sums, M, C: tl.constexpr, ROWS: tl.constexpr):
    program, column = tl.program_id(0), tl.arange(0, C)
    row = program * ROWS + tl.arange(0, ROWS)
    block = tl.load(x + row[:, None] * C + column[None, :], mask=row[:, None] < M, other=0.0)
    tl.store(partial_sums + program * C + column, tl.sum(block, axis=0))


@triton.jit
def add_up_kernel(partial_sums, out, programs, C: tl.constexpr):
    column = tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    for i in range(programs):
        total += tl.load(partial_sums + i * C + column)
    tl.store(out + column, total)


@triton.jit
def gated_product_kernel(x, w, gate, out, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x_block = tl.load(x + row[:, None] * K + k[None, :])
        w_block = tl.load(w + column[:, None] * K + k[None, :])
        acc = tl.dot(x_block, tl.trans(w_block), acc, input_precision="ieee")
    where = row[:, None] * N + column[None, :]
    tl.store(out + where, acc * tl.sigmoid(tl.load(gate + where)))


@triton.jit
def channels_first_kernel(side, gate, out, pairs, C: tl.constexpr, BP: tl.constexpr):
    pair, channel = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, C)
    where = pair[:, None] * C + channel[None, :]
    gated = tl.load(side + where) * tl.sigmoid(tl.load(gate + where))
    tl.store(out + channel[:, None] * pairs + pair[None, :], tl.trans(gated))
