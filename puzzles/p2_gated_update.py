"""Puzzle 2: a gated update, out = x + sigmoid(gate) * update. Your first kernel.

PyTorch would run three kernels, which write and read two tensors in between. Yours reads each input once
and writes once.

A Triton kernel is a function that runs many times side by side. Each run is called a program, and
tl.program_id(0) is its number. `kernel[(programs,)](arguments)` starts so many. A tensor arrives as a pointer
to its first element. A pointer plus a block of whole numbers is a block of pointers, from which tl.load
makes a block of numbers. With blocks you calculate as with tensors, element by element. This kernel doubles
y; each program handles BLOCK elements:

    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)   # for program 2 and BLOCK 128: 256 to 383
    block = tl.load(y + where, mask=where < n)
    tl.store(out + where, 2 * block, mask=where < n)

The last program's block reaches beyond the end of the tensor. The mask says which elements may be touched.
tl.constexpr marks a number that is known when the kernel is compiled; the length of tl.arange must be such a
number, and a power of two.

    x, gate, update, out: n numbers, contiguous
"""
import torch
import triton
import triton.language as tl


def inputs(size):
    return {name: torch.randn(250 * size) for name in ("x", "gate", "update")}


def plain(x, gate, update):
    return x + torch.sigmoid(gate) * update


@triton.jit
def gated_update_kernel(x, gate, update, out, n, BLOCK: tl.constexpr):
    """Program i: elements i * BLOCK to (i + 1) * BLOCK."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # HOLE: load the three inputs at `where`, gate (tl.sigmoid), and store the result. Now it stores zeros.
    tl.store(out + where, tl.zeros((BLOCK,), tl.float32), mask=where < n)


def answer(x, gate, update):
    out, n = torch.empty_like(x), x.numel()
    gated_update_kernel[triton.cdiv(n, 128),](x, gate, update, out, n, BLOCK=128)
    return out


# Our own: attention's gate, within attention_forward_kernel in evoformer_kernels/attention/kernels.py
