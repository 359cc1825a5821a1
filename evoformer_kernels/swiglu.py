"""SwiGLU, and AlphaFold 3's transition round it (Algorithm 11), as Triton kernels with derivatives.

    h = silu(g) * u, of packed = [g; u];    silu(g) = g s,  s = 1 / (1 + exp(-g))
    dg = dh u s (1 + g (1 - s)),  du = dh g s
    transition: h Wo^T, of packed = LayerNorm(x) W^T

packed (..., 2 F) -> h (..., F); x (B, X, Y, c); W (2 F, c); Wo (c, F). Each tensor is read once and written
once, float32 within. Left to a compiler, gradients of slices of packed become masked loads in every element,
of the other slice's gradients too (measured). A transition keeps x and packed; backward makes h again.

Source: Shazeer 2020 (SwiGLU).
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from evoformer_kernels import projections
from evoformer_kernels.common import check_shapes, operation, sigmoid, start
from evoformer_kernels.family import once
from evoformer_kernels.precision import product_dtype

TILE = 1024  # numbers of a program: 8 a thread in four warps, 16 bytes in 16 bits


@triton.jit
def gate_and_up(packed, C, BN: tl.constexpr):
    """Of this program: row; channels n (BN,); which of them exist; gate and up, (BN,) float32 each."""
    tiles = tl.cdiv(C, BN)  # of a row
    row, n = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    at, there = packed + row * (2 * C) + n, n < C
    gate, up = tl.load(at, mask=there, other=0.0), tl.load(at + C, mask=there, other=0.0)
    return row, n, there, gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def swiglu_kernel(packed, out, C, BN: tl.constexpr):
    """One program: h = silu(gate) up of BN channels of a row. Axis 0: rows, and within each its tiles.

        packed (P, 2 C) = [gate; up]; out (P, C)
    """
    row, n, there, gate, up = gate_and_up(packed, C, BN)
    h = gate * sigmoid(gate) * up
    tl.store(out + row * C + n, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_backward_kernel(gradient, packed, out, C, BN: tl.constexpr):
    """One program: gradients of gate and up of BN channels of a row. Axis 0: rows, and within each its tiles.

        gradient (P, C) of h; packed, out (P, 2 C) = [gate; up]
    """
    row, n, there, gate, up = gate_and_up(packed, C, BN)
    d = tl.load(gradient + row * C + n, mask=there, other=0.0).to(tl.float32)  # (BN,)
    share, at = sigmoid(gate), out + row * (2 * C) + n
    d_gate = d * up * share * (1.0 + gate * (1.0 - share))
    tl.store(at, d_gate.to(out.dtype.element_ty), mask=there)
    tl.store(at + C, (d * gate * share).to(out.dtype.element_ty), mask=there)


def tiles(rows, channels):
    """(grid, options) of the kernels, for h (rows, channels)."""
    width = min(TILE, triton.next_power_of_2(channels))
    return (rows * triton.cdiv(channels, width),), dict(BN=width, num_warps=4)


def gated(packed: Tensor) -> Tensor:
    """h (P, F) of packed (P, 2 F)."""
    rows, channels = packed.shape[0], packed.shape[1] // 2
    out, (grid, options) = packed.new_empty(rows, channels), tiles(rows, channels)
    start(swiglu_kernel, grid, packed, out, channels, **options)
    return out


def gated_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """The gradient of packed (P, 2 F)."""
    out, (grid, options) = packed.new_empty(packed.shape), tiles(*gradient.shape)
    start(swiglu_backward_kernel, grid, gradient, packed, out, gradient.shape[1], **options)
    return out


GATED = operation("swiglu", gated)
GATED_BACKWARD = operation("swiglu_backward", gated_backward)


class SwiGLU(torch.autograd.Function):
    """swiglu() of (P, 2 F) with its derivative."""

    @staticmethod
    def forward(ctx, packed):
        ctx.save_for_backward(packed)
        return GATED(packed)

    @staticmethod
    @once("swiglu")
    def backward(ctx, gradient):
        return GATED_BACKWARD(gradient, *ctx.saved_tensors),


def swiglu(packed):
    """silu(gate) * up of packed (..., 2 F), gate first: (..., F)."""
    flat = packed.contiguous().view(-1, packed.shape[-1])
    return SwiGLU.apply(flat).view(*packed.shape[:-1], packed.shape[-1] // 2)


class Transition(torch.autograd.Function):
    """transition() with its derivative."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, out_weight, eps):
        packed, _ = projections.NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, None, eps)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, out_weight, packed)
        ctx.eps = eps
        return GATED(packed.view(-1, len(weight))).view(*x.shape[:-1], -1) @ out_weight.t()

    @staticmethod
    @once("transition")
    def backward(ctx, gradient):
        x, norm_weight, norm_bias, weight, out_weight, packed = ctx.saved_tensors
        gradient, packed = gradient.view(-1, len(out_weight)), packed.view(-1, len(weight))
        dout_weight = gradient.t() @ GATED(packed)
        dpacked = GATED_BACKWARD(gradient @ out_weight, packed)
        found = projections.norm_project_backward(dpacked.view(*x.shape[:-1], -1), None, x, norm_weight,
                                                  norm_bias, weight, None, ctx.eps)
        return *found[:4], dout_weight, None


def transition(x, norm_weight, norm_bias, weight, out_weight, eps=1e-5):
    """silu(LayerNorm(x) W1^T) * (LayerNorm(x) W2^T) Wo^T of x (B, X, Y, c), without residual, in the dtype of
    products. weight (2 F, c): W1 over W2; out_weight (c', F). ValueError for what the kernels cannot take."""
    c, dtype = x.shape[-1], product_dtype(x)
    check_shapes(("norm_weight", norm_weight, (c,)), ("norm_bias", norm_bias, (c,)),
                 ("weight", weight, (2 * out_weight.shape[1], c)))
    return Transition.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(),
                            weight.to(dtype).contiguous(), out_weight.to(dtype).contiguous(), eps)
