"""Both sides of an outer product mean, as Triton kernels with derivatives: LayerNorm, two projections.

    left = LayerNorm(x) Wl^T + bl;  right = LayerNorm(x) Wr^T + br

x (B, N, S, c); W = [Wl; Wr] (2 h, c); b (2 h,); left, right (B, N, S, h), each a tensor of its own: so the
library's products of backward read and write matrices without gaps, and nothing copies their operands or puts
dleft beside dright.

Backward is one kernel: dx = LayerNorm's derivative of dleft Wl + dright Wr, to which it adds the gradient of
the x that it has handed on (`NormProject` in projection.py says why), and parts of the gradients of all four
parameters. W is small, so a program adds up its gradient in registers, over a share of the positions. Left to
the library and a compiler these are two products, their operands joined, and five passes for the rest.

Source: AlphaFold 2 supplement, Alg. 10 (lines 1 and 2).
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import sums, tuner
from fusion_lab.kernels.limits import takes_sides
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    candidates,
    check_shapes,
    layer_norm,
    layer_norm_backward,
    moments,
    normalised,
    operation,
    precision,
    rows,
    shared_dtype,
    store_rows,
    vector,
)

PROGRAMS = 256  # of backward, at most: each leaves parts as large as all parameters


def reference(x, norm_weight, norm_bias, weight, bias, eps=1e-5):
    """The same in plain PyTorch."""
    normal = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    return *F.linear(normal, weight, bias).chunk(2, dim=-1), x


@triton.jit
def side_weights(w, side: tl.constexpr, H: tl.constexpr, C: tl.constexpr):
    """(H, C): those of one side."""
    return tl.load(w + (side * H + tl.arange(0, H))[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def side_projection_kernel(x, norm_weight, norm_bias, w, bias, left, right, P, eps, PRECISION: tl.constexpr,
                           C: tl.constexpr, H: tl.constexpr, BM: tl.constexpr):
    """BM positions of P."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    normal, x_hat, rstd = layer_norm(rows(x, p, P, C), norm_weight, norm_bias, eps, C)
    normal = normal.to(w.dtype.element_ty)
    t = tl.dot(normal, tl.trans(side_weights(w, 0, H, C)), input_precision=PRECISION)
    store_rows(left, p, P, t + vector(bias, H), H)
    t = tl.dot(normal, tl.trans(side_weights(w, 1, H, C)), input_precision=PRECISION)
    store_rows(right, p, P, t + vector(bias + H, H), H)


@triton.jit
def side_projection_backward_kernel(dleft, dright, x, norm_weight, norm_bias, w, residual, dx, sums, P, SHARE,
                                    eps, PRECISION: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                                    BM: tl.constexpr):
    """SHARE positions, whole tiles of them; sums (programs, (2 + 2 H) C + 2 H): parts of the gradients of
    norm_weight, norm_bias, w and bias. All follow from G = dleft^T x_hat and g = dleft^T 1 (and those of the
    other side), which a program adds up: since y = w (norm_weight x_hat + norm_bias) + bias, they are sums
    over channels of the sides of w G and w g, then G norm_weight + g norm_bias, and g."""
    c, h, m = tl.arange(0, C), tl.arange(0, H), tl.arange(0, BM)
    first = tl.program_id(0).to(tl.int64) * SHARE
    end = tl.minimum(first + SHARE, P)
    left_products, right_products = tl.zeros((H, C), tl.float32), tl.zeros((H, C), tl.float32)
    left_sums, right_sums = tl.zeros((BM, H), tl.float32), tl.zeros((BM, H), tl.float32)
    for p0 in range(first, end, BM):
        p = p0 + m
        given, handed_on = rows(x, p, end, C), rows(residual, p, end, C)
        dl, dr = rows(dleft, p, end, H), rows(dright, p, end, H)
        acc = tl.dot(dl, side_weights(w, 0, H, C), input_precision=PRECISION)
        acc = tl.dot(dr, side_weights(w, 1, H, C), acc, input_precision=PRECISION)
        mean, rstd = moments(given, eps, C)
        x_hat = normalised(given, mean, rstd)
        rounded = x_hat.to(w.dtype.element_ty)
        left_products = tl.dot(tl.trans(dl), rounded, left_products, input_precision=PRECISION)
        right_products = tl.dot(tl.trans(dr), rounded, right_products, input_precision=PRECISION)
        left_sums += dl
        right_sums += dr
        result = layer_norm_backward(acc, x_hat, rstd, tl.load(norm_weight + c).to(tl.float32), C)
        store_rows(dx, p, end, result + handed_on.to(tl.float32), C)
    sums += tl.program_id(0) * ((2 + 2 * H) * C + 2 * H)
    left_weight, right_weight = side_weights(w, 0, H, C), side_weights(w, 1, H, C)
    scale, shift = vector(norm_weight, C), vector(norm_bias, C)
    dleft_bias, dright_bias = tl.sum(left_sums, 0), tl.sum(right_sums, 0)
    tl.store(sums + c, tl.sum(left_weight * left_products, 0) + tl.sum(right_weight * right_products, 0))
    tl.store(sums + C + c, tl.sum(left_weight * dleft_bias[:, None], 0)
             + tl.sum(right_weight * dright_bias[:, None], 0))
    at = sums + 2 * C + h[:, None] * C + c[None, :]
    tl.store(at, left_products * scale + dleft_bias[:, None] * shift)
    tl.store(at + H * C, right_products * scale + dright_bias[:, None] * shift)
    tl.store(sums + (2 + 2 * H) * C + h, dleft_bias)
    tl.store(sums + (2 + 2 * H) * C + H + h, dright_bias)


# By bytes of a number, backward's also by whether there are more than 64 channels; the first of each fits
# every GPU.
TILES = ("BM", "num_warps", "num_stages")
FORWARD = {2: candidates(TILES, (64, 4, 1), (32, 4, 1), (128, 8, 1)), 4: candidates(TILES, (32, 8, 1))}
BACKWARD = {
    (2, False): candidates(TILES, (32, 4, 1), (16, 4, 1), (32, 4, 2), (32, 8, 1), (64, 8, 1)),
    (2, True): candidates(TILES, (16, 4, 1), (32, 8, 1), (32, 8, 2)),
    (4, False): candidates(TILES, (16, 8, 1)),
    (4, True): candidates(TILES, (16, 8, 1))}


def looked_up(name, positions, channels, h, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
    shape = f"{str(dtype)[6:]} P{triton.next_power_of_2(positions)} C{channels} H{h}"
    back = name == "side_projection_backward_kernel"
    return name, shape, BACKWARD[dtype.itemsize, channels > 64] if back else FORWARD[dtype.itemsize]


def shared(positions, chosen):
    """Positions of a share, and how many shares that makes, one at least."""
    tiles = max(1, triton.cdiv(positions, chosen["BM"]))
    each = triton.cdiv(tiles, PROGRAMS)
    return each * chosen["BM"], triton.cdiv(tiles, each)


@sums.constant
def shares(positions, channels, h, dtype):
    """How many with the tuner's choice."""
    found = looked_up("side_projection_backward_kernel", positions, channels, h, dtype)
    return shared(positions, tuner.chosen(*found))[1]


def run(kernel, x, weight, launch):
    """launch(positions, tile, options) with the tuner's choice. ValueError for what kernels cannot take."""
    channels, h, positions = x.shape[-1], len(weight) // 2, x[..., 0].numel()
    if message := unsupported(weight.dtype, channels, h):
        raise ValueError(message)
    tuner.launch(*looked_up(kernel.__name__, positions, channels, h, weight.dtype), lambda chosen: launch(
        positions, chosen, dict(C=channels, H=h, PRECISION=precision(weight.dtype), **chosen)))


def forward(x, norm_weight, norm_bias, weight, bias, eps):
    """left and right."""
    found = forward_sizes(x, norm_weight, norm_bias, weight, bias, eps)
    run(side_projection_kernel, x, weight, lambda positions, chosen, options: side_projection_kernel[
        triton.cdiv(positions, chosen["BM"]),](x, norm_weight, norm_bias, weight, bias, *found, positions,
                                               eps, **options))
    return found


def forward_sizes(x, norm_weight, norm_bias, weight, bias, eps):
    size = *x.shape[:-1], len(weight) // 2
    return weight.new_empty(size), weight.new_empty(size)


def backward(dleft, dright, x, norm_weight, norm_bias, weight, residual, eps, parts):
    """dx, with the gradient `residual` added, and so many parts (n, (2 + 2 h) c + 2 h) of the gradients of
    norm_weight, norm_bias, weight and bias, behind each other."""
    found = dx, parts = backward_sizes(dleft, dright, x, norm_weight, norm_bias, weight, residual, eps, parts)

    def launch(positions, chosen, options):
        share, many = shared(positions, chosen)
        with sums.room(parts, many) as to:
            side_projection_backward_kernel[many,](
                dleft, dright, x, norm_weight, norm_bias, weight, residual, dx, to, positions, share, eps,
                **options)
    run(side_projection_backward_kernel, x, weight, launch)
    return found


def backward_sizes(dleft, dright, x, norm_weight, norm_bias, weight, residual, eps, parts):
    both, channels = weight.shape
    return x.new_empty(x.shape), x.new_empty(parts, (2 + both) * channels + both, dtype=torch.float32)


def forward_flops(x, norm_weight, norm_bias, weight, *_, **__):
    return 2 * math.prod(x) * weight[0]


def backward_flops(dleft, dright, *forward, **_):
    return 2 * forward_flops(*forward)


NORMS = "Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight"
FORWARD_OP = operation(f"side_projection({NORMS}, Tensor bias, float eps) -> (Tensor, Tensor)", forward,
                       forward_sizes, forward_flops)
BACKWARD_OP = operation(
    f"side_projection_backward(Tensor dleft, Tensor dright, {NORMS}, Tensor residual, float eps, int parts) "
    "-> (Tensor, Tensor)", backward, backward_sizes, backward_flops)


class SideProjection(torch.autograd.Function):
    """side_projection() with its derivative; saves x."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, eps):
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias)
        ctx.eps = eps
        return *FORWARD_OP(x, norm_weight, norm_bias, weight, bias, eps), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dleft, dright, handed_on):
        x, *parameters = ctx.saved_tensors
        weight, channels = parameters[2], x.shape[-1]
        parts = shares(x.numel() // channels, channels, len(weight) // 2, weight.dtype)
        dx, parts = BACKWARD_OP(dleft.contiguous(), dright.contiguous(), x, *parameters[:3],
                                handed_on.contiguous(), ctx.eps, parts)
        found = sums.OP(parts, shared_dtype(parameters)).split([t.numel() for t in parameters])
        return dx, *(d.view(t.shape).to(t.dtype) for d, t in zip(found, parameters, strict=True)), None


def side_projection(x, norm_weight, norm_bias, weight, bias, eps=1e-5):
    """left and right (B, N, S, h) from x (B, N, S, c), weight (2 h, c) and bias (2 h,), and x for who reads
    it behind this. Under autocast the products are made in its dtype. ValueError for what the kernels cannot
    take."""
    both, c = weight.shape
    check_shapes(("x", x, (*x.shape[:-1], c)), ("norm_weight", norm_weight, (c,)),
                 ("norm_bias", norm_bias, (c,)), ("bias", bias, (both,)))
    weight, bias = (t.to(product_dtype(x)).contiguous() for t in (weight, bias))
    if message := unsupported(weight.dtype, c, both / 2):
        raise ValueError(message)
    return SideProjection.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), weight,
                                bias, eps)


def unsupported(dtype, channels, h):
    """Why the kernels cannot take weights of this dtype, so many channels, and of a side; "" if they can."""
    if dtype not in DTYPES:
        return f"no Triton projections of sides in {str(dtype)[6:]}"
    return "" if takes_sides(channels, h) else f"no Triton projections of {channels} channels to sides of {h}"
