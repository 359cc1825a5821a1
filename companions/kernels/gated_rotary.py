"""Rotary positions of a LLaMA block's packed projections, as Triton kernels with derivatives; each tensor is
read once and written once. SwiGLU is in evoformer_kernels/swiglu.py.

    q, k, v of packed = [q; k; v]; of every head of q and k the channels i and i + D / 2 are a pair,
    (a, b) -> (a cos - b sin, b cos + a sin), by the angle of its position and of i;
    their gradients are rotated back, sin -> -sin

packed (B, S, (H + 2 G) D), angles (2, S, D / 2) -> q (B, H, S, D), k and v (B, G, S, D). H heads of queries,
G of keys and values, D channels each; P = B S positions. Float32 within.

q, k and v lie in memory as (B, S, heads, D). Attention's kernels read such strides, and give their output
those of q, so that the projection behind it needs no transposed copy. v is copied. As a view of packed it
would keep all of packed until backward; and not every compiler takes an autograd function whose result is a
view of its input.

Source: Su et al. 2021 (rotary positions), in the layout of transformers.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evoformer_kernels.common import operation, start

TILE = 1024  # pairs of numbers of a program: 8 a thread in four warps, 16 bytes in 16 bits


@triton.jit
def rotate_heads(tile, heads, packed, angles, strides, P, S, FIRST: tl.constexpr, HEADS: tl.constexpr,
                 ROTATED: tl.constexpr, BACKWARD: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
                 BM: tl.constexpr, BD: tl.constexpr):
    """Copies BM heads from packed (P, W), where they begin with head FIRST, to heads (B, S, HEADS, D); with
    BACKWARD the other way. ROTATED: rotates them, by angles (2, S, D / 2). They are tile `tile` of P HEADS,
    in the order of `heads`, and are held in two tiles (BM, BD): first and second halves of channels."""
    r, c = tile * BM + tl.arange(0, BM), tl.arange(0, BD)[None, :]  # (BM,), (1, BD)
    p, h = r // HEADS, (r % HEADS).to(tl.int64)  # (BM,) each: position, head
    s, there = p % S, (r < P * HEADS)[:, None] & (c < D // 2)
    heads += ((p // S).to(tl.int64) * strides[0] + s.to(tl.int64) * strides[1] + h * strides[2])[:, None] + c
    packed += (p.to(tl.int64) * W + (FIRST + h) * D)[:, None] + c
    if BACKWARD:
        source, target = heads, packed
    else:
        source, target = packed, heads
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)  # (BM, BD)
    second = tl.load(source + D // 2, mask=there, other=0.0).to(tl.float32)  # (BM, BD)
    if ROTATED:
        angle = angles + (s * (D // 2))[:, None] + c
        cos = tl.load(angle, mask=there, other=0.0)  # (BM, BD)
        sin = tl.load(angle + S * (D // 2), mask=there, other=0.0)  # (BM, BD)
        if BACKWARD:
            sin = -sin
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(target, first.to(target.dtype.element_ty), mask=there)
    tl.store(target + D // 2, second.to(target.dtype.element_ty), mask=there)


@triton.jit
def rotary_kernel(q, k, v, packed, angles, q_strides, k_strides, v_strides, P, S, H: tl.constexpr,
                  G: tl.constexpr, D: tl.constexpr, BACKWARD: tl.constexpr, BM: tl.constexpr,
                  BD: tl.constexpr):
    """One program: BM heads of q, k or v, copied from packed, those of q and k rotated; with BACKWARD packed
    from these, which are gradients. Axis 0: tiles of q, then of k, then of v.

        q (B, S, H, D), k, v (B, S, G, D), with any strides (of sample, position, head) but in D; packed
        (P, (H + 2 G) D) = [q; k; v]; angles (2, S, D / 2) float32, cosines and sines
    """
    tile, of_q, of_k, W = tl.program_id(0), tl.cdiv(P * H, BM), tl.cdiv(P * G, BM), (H + 2 * G) * D
    if tile < of_q:
        rotate_heads(tile, q, packed, angles, q_strides, P, S, 0, H, True, BACKWARD, D, W, BM, BD)
    elif tile < of_q + of_k:
        rotate_heads(tile - of_q, k, packed, angles, k_strides, P, S, H, G, True, BACKWARD, D, W, BM, BD)
    else:
        tile -= of_q + of_k
        rotate_heads(tile, v, packed, angles, v_strides, P, S, H + G, G, False, BACKWARD, D, W, BM, BD)


# --- Launchers and their derivatives --------------------------------------------------------------------


def rotate(q, k, v, packed, angles, backward):
    """Fill q (B, S, H, D), k and v (B, S, G, D), which may have any strides but in D, from packed; if
    backward, fill packed from these."""
    (B, S, H, D), G = q.shape, k.shape[2]
    width = triton.next_power_of_2(D // 2)
    height = max(1, TILE // width)
    grid = triton.cdiv(B * S * H, height) + 2 * triton.cdiv(B * S * G, height),
    strides = (x.stride()[:3] for x in (q, k, v))
    start(rotary_kernel, grid, q, k, v, packed, angles, *strides, B * S, S, H=H, G=G, D=D, BACKWARD=backward,
          BM=height, BD=width, num_warps=4)


def rotated(packed: Tensor, angles: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, S, H, D), k and v (B, S, G, D)."""
    B, S, channels = packed.shape
    width = channels // (heads + 2 * kv_heads)
    q, k, v = (packed.new_empty(B, S, count, width) for count in (heads, kv_heads, kv_heads))
    rotate(q, k, v, packed, angles, False)
    return q, k, v


def rotated_backward(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """The gradient of packed (B, S, (H + 2 G) D) from those of q (B, S, H, D), k and v (B, S, G, D)."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    (B, S, H, D), G = q.shape, k.shape[2]
    packed = q.new_empty(B, S, (H + 2 * G) * D)
    rotate(q, k, v, packed, angles, True)
    return packed


ROTARY_OP = operation("rotary", rotated)
ROTARY_BACKWARD_OP = operation("rotary_backward", rotated_backward)


class Rotary(torch.autograd.Function):
    """rotary() with its derivative, heads behind positions."""

    @staticmethod
    def forward(ctx, packed, angles, heads, kv_heads):
        ctx.save_for_backward(angles)
        return ROTARY_OP(packed, angles, heads, kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, q, k, v):
        return ROTARY_BACKWARD_OP(q, k, v, *ctx.saved_tensors), None, None, None


def rotary(packed, angles, heads, kv_heads):
    """q (B, H, S, D), k and v (B, G, S, D) from packed (B, S, (H + 2 G) D). q and k are rotated by angles
    (2, S, D / 2), cos and sin. D is even; B S H is less than 2**31."""
    found = Rotary.apply(packed.contiguous(), angles.float().contiguous(), heads, kv_heads)
    return tuple(x.transpose(1, 2) for x in found)
