"""A pattern of fusion round a product: act(x weight^T + bias) in one kernel, its derivative in one besides.

    y = linear_activation(x, weight, bias, "gelu")      # "relu", "gelu" (tanh), "silu"

x is (M, K), weight (N, K), bias (N,), y (M, N). The gradients of x and weight are products of the library.
"""
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from companions.kernels.dispatch import precision
from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import start
from fusion_lab.kernels.common import add_up, candidates


@triton.jit
def activated(z, KIND: tl.constexpr):
    """act(z) and its derivative, float32, both shaped as z. gelu is that with tanh: sqrt(2 / pi) is
    0.79788..., and tanh(u) = 2 sigmoid(2 u) - 1."""
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
    """One program: a tile (BM, BN) of z = x weight^T + bias, for backward, and of y = act(z). Axis 0: tiles,
    GROUP of them down a column, then the same rows of the next column, so that both operands are cached.

        x (M, K); weight (N, K); bias (N,); y, z (M, N)
    """
    # Which tile?
    tiles_down, tiles_across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    number, in_group = tl.program_id(0), GROUP * tiles_across
    first = number // in_group * GROUP
    size = tl.minimum(tiles_down - first, GROUP)
    m = (first + number % in_group % size) * BM + tl.arange(0, BM)
    n = number % in_group // size * BN + tl.arange(0, BN)

    # x weight^T
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K),
                    other=0.0)  # (BM, BK)
        b = tl.load(weight + n[None, :].to(tl.int64) * K + k[:, None],
                    mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)  # (BK, BN)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)

    # Bias and activation, before the tile leaves the registers
    acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    offsets, there = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    tl.store(z + offsets, acc.to(z.dtype.element_ty), mask=there)
    out, _ = activated(acc, KIND)
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def linear_activation_backward_kernel(dy, z, dz, partial_sums, M, N, KIND: tl.constexpr, BM: tl.constexpr,
                                      BN: tl.constexpr):
    """One program: a tile (BM, BN) of dz = dy act'(z), and its sums over rows, for the gradient of bias. Axis
    0: tiles of rows; axis 1: tiles of columns.

        dy, z, dz (M, N); partial_sums (programs along axis 0, N) float32
    """
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    offsets, there = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    _, slope = activated(tl.load(z + offsets, mask=there, other=0.0).to(tl.float32), KIND)  # (BM, BN)
    g = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32) * slope
    tl.store(dz + offsets, g.to(dz.dtype.element_ty), mask=there)
    tl.store(partial_sums + tl.program_id(0).to(tl.int64) * N + n, tl.sum(g, 0), mask=n < N)


SIZES = ("BM", "BN", "BK", "GROUP", "num_warps", "num_stages")
FORWARD = candidates(SIZES, (64, 64, 32, 8, 4, 2), (128, 128, 32, 8, 8, 3), (128, 128, 64, 8, 8, 3),
                     (128, 256, 64, 8, 8, 3), (128, 256, 64, 8, 8, 4), (64, 128, 64, 8, 4, 3))
BACKWARD = candidates(("BM", "BN", "num_warps", "num_stages"), (64, 64, 4, 1), (128, 64, 8, 1))


class LinearActivation(torch.autograd.Function):
    """linear_activation() with its derivative; saves x, weight and z."""

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
            partial_sums = z.new_empty(grid[0], N, dtype=torch.float32)
            start(linear_activation_backward_kernel, grid, dy, z, dz, partial_sums, M, N, KIND=ctx.kind,
                  **chosen)
            add_up(partial_sums, db)
        shape = f"{str(z.dtype)[6:]} M{triton.next_power_of_2(M)} N{N}"
        tuner.launch("linear_activation_backward_kernel", shape, BACKWARD, run)
        return dz @ weight, dz.t() @ x, db, None


def linear_activation(x, weight, bias, kind):
    """act(x weight^T + bias), (M, N)."""
    return LinearActivation.apply(x.contiguous(), weight.contiguous(), bias, kind)
