"""The gradient of attention's bias from the parts that its backward stores, as a Triton kernel.

    out = sum over r of parts[r], of L queries and L keys    parts (n, B, H, LP, LP), out (B, H, L, L)

or, turned, the transpose of that, which is the gradient of what made the bias of attention along axis 1. One
launch reads every part once, adds up in float32, crops, rounds once and writes what the next kernel reads:
sum, crop and transpose by themselves would write it twice.

A program owns a tile of one head: at least 32 bytes of a row, read and, turned, written. It loads RN parts of
it at once, four times 16 bytes a thread, since the compiler keeps no more than three or four loads in flight;
hence many warps. Every tile divides LP, so that no load is masked but that of parts beyond n: what parts hold
beyond L, which may be anything, is read and not stored.
"""
import math

import torch
import triton
import triton.language as tl

from fusion_lab.kernels.triton_parts import operation

DEEPEST = 128  # bytes of one place that a tile has, at most: of 64 parts in 16 bits, of 32 in float32
LEAST, TILE = 16 * 16, 16 << 10  # places of a tile; its bytes, unless it is so deep that LEAST has more
HIGHEST, WIDEST = 64, 32
LOADED = 4 * 16 * 32  # bytes that a warp of 32 threads loads


def reference(parts, length, dtype, turned):
    """The same in plain PyTorch."""
    out = parts.sum(0, dtype=torch.float32)[..., :length, :length].to(dtype)
    return (out.mT if turned else out).contiguous()


def launch(parts, length, dtype, turned):
    out = sizes(parts, length, dtype, turned)
    n, B, H, LP, _ = parts.shape
    together, BI, BJ = tile(n, LP, parts.itemsize)
    warps = BI * BJ * together * parts.itemsize // LOADED
    added_bias_kernel[(triton.cdiv(length, BJ), triton.cdiv(length, BI), B * H)](
        parts, out, n, B * H * LP * LP, length, LP, TURNED=turned, RN=together, BI=BI, BJ=BJ,
        num_warps=max(1, warps))
    return out


def tile(n, LP, itemsize):
    """How many of n parts are loaded at once, and queries and keys of a tile, (RN, BI, BJ): powers of two."""
    together = min(triton.next_power_of_2(max(1, n)), DEEPEST // itemsize)
    places = max(LEAST, TILE // (together * itemsize))
    BJ = math.gcd(LP, 16 if places == LEAST else WIDEST)
    return together, math.gcd(LP, min(HIGHEST, places // BJ)), BJ


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
    acc = tl.zeros((BI * BJ,), tl.float32)
    for r0 in range(0, N, RN):
        found = tl.load(parts + here, mask=(r < N - r0)[:, None], other=0.0)
        acc += tl.sum(found.to(tl.float32), 0)
        parts += tl.cast(apart, tl.int64) * RN
    i, j = i0 + tl.arange(0, BI)[:, None], j0 + tl.arange(0, BJ)[None, :]
    at = j * L + i if TURNED else i * L + j
    tl.store(out + head * L * L + at, tl.reshape(acc, (BI, BJ)).to(out.dtype.element_ty),
             mask=(i < L) & (j < L))


OP = operation("added_bias(Tensor parts, int length, ScalarType dtype, bool turned) -> Tensor", launch, sizes)
