"""A pattern of fusion round a product: act(x weight^T + bias) in one kernel, its derivative in one besides.

    y = linear_activation(x, weight, bias, "gelu")      # "relu", "gelu" (tanh), "silu"

x is (M, K), weight (N, K). The gradients of x and weight are products of the library.
"""
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import start
from fusion_lab.kernels.triton_parts import add_up, candidates, precision


@triton.jit
def activated(z, KIND: tl.constexpr):
    """act(z) and its derivative, float32."""
    if KIND == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    if KIND == "silu":
        s = tl.sigmoid(z)
        return z * s, s * (1.0 + z * (1.0 - s))
    inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
    t = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * z * z)
    return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope


@triton.jit
def linear_activation_kernel(x, weight, bias, y, z, M, N, K, KIND: tl.constexpr, PRECISION: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """A tile (BM, BN) a program; bias and activation before it leaves the registers. z: the product with its
    bias, which backward wants. Programs go down GROUP row blocks before the next column, for the cache."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    number, in_group = tl.program_id(0), GROUP * columns
    first = number // in_group * GROUP
    size = tl.minimum(rows - first, GROUP)
    m = (first + number % in_group % size) * BM + tl.arange(0, BM)
    n = number % in_group // size * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K),
                    other=0.0)
        b = tl.load(weight + n[None, :].to(tl.int64) * K + k[:, None],
                    mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at, there = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    tl.store(z + at, acc.to(z.dtype.element_ty), mask=there)
    out, _ = activated(acc, KIND)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def activation_backward_kernel(dy, z, dz, parts, M, N, KIND: tl.constexpr, BM: tl.constexpr,
                               BN: tl.constexpr):
    """dz of a tile, and its sums over rows for the bias."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    at, there = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    _, slope = activated(tl.load(z + at, mask=there, other=0.0).to(tl.float32), KIND)
    g = tl.load(dy + at, mask=there, other=0.0).to(tl.float32) * slope
    tl.store(dz + at, g.to(dz.dtype.element_ty), mask=there)
    tl.store(parts + tl.program_id(0).to(tl.int64) * N + n, tl.sum(g, 0), mask=n < N)


SIZES = ("BM", "BN", "BK", "GROUP", "num_warps", "num_stages")
FORWARD = candidates(SIZES, (64, 64, 32, 8, 4, 2), (128, 128, 32, 8, 8, 3), (128, 128, 64, 8, 8, 3),
                     (128, 256, 64, 8, 8, 3), (128, 256, 64, 8, 8, 4), (64, 128, 64, 8, 4, 3))
BACKWARD = candidates(("BM", "BN", "num_warps", "num_stages"), (64, 64, 4, 1), (128, 64, 8, 1))


class LinearActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kind):
        (M, K), N = x.shape, len(weight)
        y, z = x.new_empty(M, N), x.new_empty(M, N)
        shape = f"{str(x.dtype)[6:]} M{triton.next_power_of_2(M)} N{N} K{K}"
        tuner.launch("linear_activation_kernel", shape, FORWARD, lambda chosen: start(
            linear_activation_kernel, (triton.cdiv(M, chosen["BM"]) * triton.cdiv(N, chosen["BN"]),),
            x, weight, bias, y, z, M, N, K, KIND=kind, PRECISION=precision(x.dtype), **chosen))
        ctx.save_for_backward(x, weight, z)
        ctx.kind, ctx.bias_dtype = kind, bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, z = ctx.saved_tensors
        (M, N), dy = z.shape, dy.contiguous()
        dz, db = torch.empty_like(z), torch.empty(N, dtype=ctx.bias_dtype, device=z.device)

        def run(chosen):
            grid = triton.cdiv(M, chosen["BM"]), triton.cdiv(N, chosen["BN"])
            parts = z.new_empty(grid[0], N, dtype=torch.float32)
            start(activation_backward_kernel, grid, dy, z, dz, parts, M, N, KIND=ctx.kind, **chosen)
            add_up(parts, db)
        tuner.launch("activation_backward_kernel", f"{str(z.dtype)[6:]} M{triton.next_power_of_2(M)} N{N}",
                     BACKWARD, run)
        return dz @ weight, dz.t() @ x, db, None


def linear_activation(x, weight, bias, kind):
    """act(x weight^T + bias)"""
    return LinearActivation.apply(x.contiguous(), weight.contiguous(), bias, kind)
