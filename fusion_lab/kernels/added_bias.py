"""The gradient of attention's bias from the parts that its backward stores, as a Triton kernel.

    out = sum over r of parts[r], of L queries and L keys    parts (n, B, H, LP, LP), out (B, H, L, L)

or, turned, the transpose of that, which is the gradient of what made the bias of attention along axis 1. One
launch reads every part once, adds up in float32, crops, rounds once and writes what the next kernel reads:
sum, crop and transpose by themselves would write it twice.

A program owns PLACES places of one head, of which it reads whole lines of 128 bytes. It has a sum for each of
RN parts, RN apart, and adds these up at the end: what else would be a sum across threads in every turn. Every
tile divides LP, so that no load is masked but that of parts beyond n: what parts hold beyond L, which may be
anything, is read and not stored.
"""
import math

import torch
import triton
import triton.language as tl

from fusion_lab.kernels.triton_parts import operation

LINE, PLACES = 128, 256  # bytes of a row that a program reads; queries times keys of a tile
TURN = 2 << 10  # bytes that it loads at once, 32 a thread


def reference(parts, length, dtype, turned):
    """The same in plain PyTorch."""
    out = parts.sum(0, dtype=torch.float32)[..., :length, :length].to(dtype)
    return (out.mT if turned else out).contiguous()


def launch(parts, length, dtype, turned):
    out = sizes(parts, length, dtype, turned)
    n, B, H, LP, _ = parts.shape
    together, BI, BJ = tile(n, LP, parts.itemsize)
    warps = BI * BJ * together * parts.itemsize // (32 * 32)
    added_bias_kernel[(triton.cdiv(length, BJ), triton.cdiv(length, BI), B * H)](
        parts, out, n, B * H * LP * LP, length, LP, TURNED=turned, RN=together, BI=BI, BJ=BJ,
        num_warps=max(1, warps))
    return out


def tile(n, LP, itemsize):
    """How many of n parts are loaded at once, and queries and keys of a tile, (RN, BI, BJ): powers of two."""
    BJ = math.gcd(LP, LINE // itemsize)
    BI = math.gcd(LP, PLACES // BJ)
    return min(triton.next_power_of_2(max(1, n)), TURN // (BI * BJ * itemsize)), BI, BJ


def sizes(parts, length, dtype, turned):
    return parts.new_empty(*parts.shape[1:3], length, length, dtype=dtype)


@triton.jit
def added_bias_kernel(parts, out, N, apart, L, LP, TURNED: tl.constexpr, RN: tl.constexpr, BI: tl.constexpr,
                      BJ: tl.constexpr):
    """A tile (BI, BJ) of one head, from N parts of `apart` numbers each. What is turned is only addresses."""
    j0, i0 = tl.program_id(0).to(tl.int64) * BJ, tl.program_id(1).to(tl.int64) * BI
    head = tl.program_id(2).to(tl.int64)
    r, p = tl.arange(0, RN), tl.arange(0, BI * BJ)
    here = r.to(tl.int64)[:, None] * apart + (p // BJ * LP + p % BJ)[None, :]
    parts += (head * LP + i0) * LP + j0
    acc = tl.zeros((RN, BI * BJ), tl.float32)
    for r0 in tl.range(0, N, RN, num_stages=4):  # loads of later turns are under way
        acc += tl.load(parts + here, mask=(r < N - r0)[:, None], other=0.0).to(tl.float32)
        parts += tl.cast(apart, tl.int64) * RN
    acc = tl.sum(acc, 0)
    i, j = i0 + tl.arange(0, BI)[:, None], j0 + tl.arange(0, BJ)[None, :]
    at = j * L + i if TURNED else i * L + j
    tl.store(out + head * L * L + at, tl.reshape(acc, (BI, BJ)).to(out.dtype.element_ty),
             mask=(i < L) & (j < L))


OP = operation("added_bias(Tensor parts, int length, ScalarType dtype, bool turned) -> Tensor", launch, sizes)
