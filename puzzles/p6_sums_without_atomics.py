"""Puzzle 6: the gradient of a bias is a sum over many rows. Add it up without atomics.

tl.atomic_add would let programs add in any order, and floating-point sums depend on the order: two runs
would give different bits. So each program adds up its own rows and stores one row of partial sums, and a
second kernel adds up the partial sums in a fixed order.

    x (M, C); result (C,), the sum over M. C is a power of two, M is not a multiple of ROWS
"""
import torch
import triton
import triton.language as tl

ROWS = 16  # that a program adds up


def inputs(size):
    return dict(x=torch.randn(100 * size, 32))


def plain(x):
    return x.sum(dim=0)


@triton.jit
def partial_sums_kernel(x, partial_sums, M, C: tl.constexpr, ROWS: tl.constexpr):
    """Program i: rows i * ROWS to (i + 1) * ROWS of x, into row i of partial_sums."""
    program, column = tl.program_id(0), tl.arange(0, C)
    row = program * ROWS + tl.arange(0, ROWS)
    block = tl.load(x + row[:, None] * C + column[None, :], mask=row[:, None] < M, other=0.0)  # (ROWS, C)
    # HOLE: add up the rows of the block (tl.sum has an axis). Now it stores zeros.
    tl.store(partial_sums + program * C + column, tl.zeros((C,), tl.float32))


@triton.jit
def add_up_kernel(partial_sums, out, programs, C: tl.constexpr):
    """One program: all rows of partial_sums, in their order."""
    column = tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    # HOLE: a loop, for i in range(programs)
    tl.store(out + column, total)


def answer(x):
    M, C = x.shape
    programs = triton.cdiv(M, ROWS)
    partial_sums, out = x.new_empty(programs, C), x.new_empty(C)
    partial_sums_kernel[programs,](x, partial_sums, M, C=C, ROWS=ROWS)
    add_up_kernel[1,](partial_sums, out, programs, C=C)
    return out


# Our own, which adds up all sums of an Evoformer block in one launch: sums_kernel in
# evoformer_kernels/reductions/sums.py
