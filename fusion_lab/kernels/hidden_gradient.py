"""Two layers with a ReLU between them, by the BLAS library, but for one product of backward: the gradient of
what stands before the ReLU, as a Triton kernel.

    h = relu(x W1^T + b1);  y = h W2^T + b2;  dh = (dy W2) * [h > 0];  db1 = sum of dh over positions

x, y (..., c); W1 (u, c); W2 (c, u); h, dh (..., u). The library writes dy W2, which is as wide as h, a second
kernel reads it with h and writes dh, and another one reads that for db1. Here h is read once and dh written
once. A program owns a chunk of hidden units, whose weights stay where they are, and a share of the positions,
over which it adds up db1 in registers, number by number: between threads only once.

Source: AlphaFold 2 supplement, Alg. 9 and 15 (transitions).
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import sums, tuner
from fusion_lab.kernels.limits import CHANNELS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    below,
    candidates,
    check_shapes,
    from_the_end,
    operation,
    precision,
    rows,
)

PROGRAMS = 1024  # over which chunks and positions are spread: about eight for each processor of a large GPU
UNIT = 64  # of which the number of hidden units is a multiple

# By bytes of a number and by whether there are more than 128 channels; the first of each fits every GPU.
TILES = ("BM", "BK", "num_warps", "num_stages")
CANDIDATES = {
    (2, False): candidates(TILES, (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 3),
                           (32, 64, 4, 3), (64, 128, 4, 3)),
    (2, True): candidates(TILES, (32, 32, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3),
                          (64, 128, 8, 3)),
    (4, False): candidates(TILES, (32, 32, 8, 2)),
    (4, True): candidates(TILES, (16, 16, 8, 2))}


def reference(x, w1, b1, w2, b2):
    """The same in plain PyTorch."""
    return F.linear(F.linear(x, w1, b1).relu(), w2, b2)


@triton.jit
def tile(matrix, p0, m, k, K: tl.constexpr):
    """Addresses of units k (BK,) at positions p0 + m (BM,)."""
    return matrix + p0 * K + m[:, None] * K + k[None, :]


@triton.jit
def hidden_gradient_kernel(gradient, w, hidden, out, sums, P, SHARE, K: tl.constexpr, EVEN: tl.constexpr,
                           PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """dh of BK units for SHARE positions, whole tiles of them; sums (shares, K); EVEN: BM divides P. h is
    loaded a tile ahead: no product takes it, so the compiler does not load it early by itself."""
    k, c, m = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, C), tl.arange(0, BM)
    number = from_the_end(1)
    first = number.to(tl.int64) * SHARE
    end = tl.minimum(first + SHARE, P)
    wt = tl.load(w + c[:, None] * K + k[None, :])
    acc = tl.zeros((BM, BK), tl.float32)
    left = None if EVEN else end - first
    h = tl.load(tile(hidden, first, m, k, K), mask=below(m, left)[:, None], other=0.0)
    for p0 in range(first, end, BM):
        now = None if EVEN else (end - p0).to(tl.int32)
        ahead = tl.full((BM,), p0 + BM, tl.int64) < end if EVEN else m + BM < now
        after = tl.load(tile(hidden, p0 + BM, m, k, K), mask=ahead[:, None], other=0.0)
        dh = tl.dot(rows(gradient + p0 * C, m, now, C), wt, input_precision=PRECISION)
        dh = tl.where(h > 0, dh, 0.0)
        acc += dh
        tl.store(tile(out, p0, m, k, K), dh.to(out.dtype.element_ty), mask=below(m, now)[:, None])
        h = after
    tl.store(sums + number * K + k, tl.sum(acc, 0))


def looked_up(positions, channels, units, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates: chunks of hidden
    units are whole."""
    shape = f"{str(dtype)[6:]} P{triton.next_power_of_2(positions)} C{channels} N{units}"
    tiles = CANDIDATES[dtype.itemsize, channels > 128]
    return "hidden_gradient_kernel", shape, [tile for tile in tiles if units % tile["BK"] == 0]


def shared(positions, units, chosen):
    """Positions of a share, and how many shares that makes, one at least."""
    tiles = triton.cdiv(positions, chosen["BM"])
    share = triton.cdiv(tiles, max(1, PROGRAMS * chosen["BK"] // units)) * chosen["BM"]
    return share, triton.cdiv(positions, share) if positions else 1


@sums.constant
def shares(positions, channels, units, dtype):
    """How many with the tuner's choice."""
    return shared(positions, units, tuner.chosen(*looked_up(positions, channels, units, dtype)))[1]


def launch(gradient, w2, hidden, parts):
    """dh (P, u) and so many parts (n, u) of db1 from dy (P, c), W2 (c, u) and h (P, u)."""
    found = out, parts = sizes(gradient, w2, hidden, parts)
    (channels, units), positions = w2.shape, len(hidden)
    if message := unsupported(w2.dtype, channels, units):
        raise ValueError(message)

    if not positions:
        return out, parts.zero_()

    def run(chosen):
        share, many = shared(positions, units, chosen)
        with sums.room(parts, many) as to:
            hidden_gradient_kernel[units // chosen["BK"], many](
                gradient, w2, hidden, out, to, positions, share, K=units, EVEN=positions % chosen["BM"] == 0,
                PRECISION=precision(w2.dtype), C=channels, **chosen)
    tuner.launch(*looked_up(positions, channels, units, w2.dtype), run)
    return found


def sizes(gradient, w2, hidden, parts):
    return hidden.new_empty(hidden.shape), hidden.new_empty(parts, hidden.shape[1], dtype=torch.float32)


def flops(gradient, w2, *_, **__):
    return 2 * math.prod(gradient) * w2[1]


OP = operation("hidden_gradient(Tensor gradient, Tensor w2, Tensor hidden, int parts) -> (Tensor, Tensor)",
               launch, sizes, flops)


class TwoLayers(torch.autograd.Function):
    """two_layers() with its derivative; saves x and h."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        h = torch._addmm_activation(b1, x.flatten(0, -2), w1.t())
        ctx.save_for_backward(x, w1, w2, h)
        return F.linear(h, w2, b2).view(*x.shape[:-1], len(w2))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, w1, w2, h = ctx.saved_tensors
        gradient = gradient.contiguous().flatten(0, -2)
        dh, parts = OP(gradient, w2, h, shares(len(h), *w2.shape, w2.dtype))
        return ((dh @ w1).view(x.shape), dh.t() @ x.flatten(0, -2), sums.OP(parts, h.dtype), gradient.t() @ h,
                sums.over_rows(gradient))


def two_layers(x, w1, b1, w2, b2):
    """relu(x w1^T + b1) w2^T + b2, (..., c); under autocast in its dtype. ValueError for what the kernel
    cannot take."""
    channels, units = x.shape[-1], len(w1)
    check_shapes(("w1", w1, (units, channels)), ("b1", b1, (units,)), ("w2", w2, (channels, units)),
                 ("b2", b2, (channels,)))
    x, w1, b1, w2, b2 = (t.to(product_dtype(x)).contiguous() for t in (x, w1, b1, w2, b2))
    if message := unsupported(w1.dtype, channels, units):
        raise ValueError(message)
    return TwoLayers.apply(x, w1, b1, w2, b2)


def unsupported(dtype, channels, units):
    """Why the kernel cannot take weights of this dtype, so many channels, hidden units; "" if it can."""
    if dtype not in DTYPES:
        return f"no Triton gradient of a hidden layer in {str(dtype)[6:]}"
    if channels not in CHANNELS:
        return (f"no Triton gradient of a hidden layer from {channels} channels (but from "
                f"{', '.join(map(str, CHANNELS))})")
    return f"{units} hidden units are no multiple of {UNIT}" if units % UNIT else ""
