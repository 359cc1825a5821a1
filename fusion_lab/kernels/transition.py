"""AF2's transition as Triton kernels with derivatives: no hidden layer in memory in forward, none kept.

    out = residual + relu(LayerNorm(x) w1^T + b1) w2^T + b2

x, residual, out (..., c); w1 (f, c); b1 (f,); w2 (c, f); b2 (c,). P positions. Products are made in the
dtype of the weights, sums in float32. Forward holds BM positions: their normalised x meets the weights BH
hidden units at a time, and what these give goes at once into the sum that the residual starts.

Backward makes hidden units and their gradient again, adds up the gradient of x with LayerNorm's derivative
and the residual's own, and writes normalised x, hidden and its gradient, c + 2 f numbers a position that
are freed at once: gradients of weights are two products over all positions, which the BLAS library makes
faster than a kernel that would have to make hidden units a third time. Saved for backward: x.

Where |hidden| is below half a rounding, its mask may differ from one made of rounded numbers; both are
right.

Sources: AlphaFold 2 supplement, Alg. 9 and 15.
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import tuner
from fusion_lab.kernels.limits import CHANNELS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    add_up,
    layer_norm,
    layer_norm_backward,
    operation,
    precision,
    relu,
    rows,
    shared_dtype,
    store_rows,
    vector,
)

UNITS = 64  # hidden units come in multiples of the widest tile


def reference(x, norm_weight, norm_bias, w1, b1, w2, b2, eps, residual=None):
    """The same in plain PyTorch."""
    y = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    update = F.linear(F.linear(y, w1, b1).relu(), w2, b2)
    return update if residual is None else residual + update


@triton.jit
def transition_forward_kernel(x, norm_weight, norm_bias, w1, b1, w2, b2, residual, out, P, units, eps,
                              RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
                              BM: tl.constexpr, BH: tl.constexpr):
    """BM positions; residual and out (P, C)."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    y, x_hat, rstd = layer_norm(rows(x, p, P, C), norm_weight, norm_bias, eps, C)
    y = y.to(w1.dtype.element_ty)
    acc = tl.zeros((BM, C), tl.float32) + vector(b2, C)
    if RESIDUAL:
        acc += rows(residual, p, P, C).to(tl.float32)
    for f0 in range(0, units, BH):
        f = f0 + tl.arange(0, BH)
        h = tl.dot(y, tl.trans(tl.load(w1 + f[:, None] * C + c[None, :])), input_precision=PRECISION)
        h = relu(h + tl.load(b1 + f).to(tl.float32)[None, :]).to(y.dtype)
        wt = tl.load(w2 + c[:, None] * units + f[None, :])
        acc = tl.dot(h, tl.trans(wt), acc, input_precision=PRECISION)
    store_rows(out, p, P, acc, C)


@triton.jit
def transition_backward_kernel(gradient, x, norm_weight, norm_bias, w1, b1, w2, dx, y_out, hidden, dhidden,
                               sums, P, units, eps, ADD: tl.constexpr, PRECISION: tl.constexpr,
                               C: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """BM positions; ADD: dx takes the residual's gradient too. sums (programs, 3 C + units): parts of the
    gradients of norm_weight, norm_bias, b2 and b1."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    y, x_hat, rstd = layer_norm(rows(x, p, P, C), norm_weight, norm_bias, eps, C)
    y = y.to(w1.dtype.element_ty)
    store_rows(y_out, p, P, y, C)
    dout = rows(gradient, p, P, C)
    sums += tl.program_id(0).to(tl.int64) * (3 * C + units)
    tl.store(sums + 2 * C + c, tl.sum(dout.to(tl.float32), 0))
    dout = dout.to(w2.dtype.element_ty)
    acc = tl.zeros((BM, C), tl.float32)
    for f0 in range(0, units, BH):
        f = f0 + tl.arange(0, BH)
        wt = tl.load(w1 + f[:, None] * C + c[None, :])
        h = tl.dot(y, tl.trans(wt), input_precision=PRECISION) + tl.load(b1 + f).to(tl.float32)[None, :]
        dh = tl.dot(dout, tl.load(w2 + c[:, None] * units + f[None, :]), input_precision=PRECISION)
        dh = tl.where(h > 0, dh, 0.0)
        tl.store(sums + 3 * C + f, tl.sum(dh, 0))
        at = p[:, None] * units + f[None, :]
        tl.store(hidden + at, relu(h).to(y.dtype), mask=p[:, None] < P)
        dh = dh.to(y.dtype)
        tl.store(dhidden + at, dh, mask=p[:, None] < P)
        acc = tl.dot(dh, wt, acc, input_precision=PRECISION)
    # Again: registers are scarce above.
    y, x_hat, rstd = layer_norm(rows(x, p, P, C), norm_weight, norm_bias, eps, C)
    tl.store(sums + c, tl.sum(acc * x_hat, 0))
    tl.store(sums + C + c, tl.sum(acc, 0))
    result = layer_norm_backward(acc, x_hat, rstd, tl.load(norm_weight + c).to(tl.float32), C)
    if ADD:
        result += rows(gradient, p, P, C).to(tl.float32)
    store_rows(dx, p, P, result, C)


# --------------------------------------------------------------------------------------------------------
# Launchers and their derivative. Tiles by bytes of a number and by whether there are more than 128 channels.
# The first of each fits every GPU, others only some: what NVIDIA's compiler can hold in registers, AMD's
# cannot, and the reverse. Strict float32 has no matrix instructions on NVIDIA, hence small tiles.
# --------------------------------------------------------------------------------------------------------


def tiles(*rows):
    """Candidates from (BM, BH, warps, stages)."""
    return [dict(BM=m, BH=h, num_warps=warps, num_stages=stages) for m, h, warps, stages in rows]


FORWARD = {
    (2, False): tiles((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 3)),
    (2, True): tiles((32, 32, 4, 2), (64, 32, 8, 2), (64, 16, 8, 2), (64, 32, 8, 3)),
    (4, False): tiles((32, 32, 8, 2), (64, 32, 8, 2)),
    (4, True): tiles((16, 16, 8, 2), (32, 16, 8, 2))}
BACKWARD = {
    (2, False): tiles((64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 3)),
    (2, True): tiles((16, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 2), (32, 16, 4, 1), (64, 16, 8, 1)),
    (4, False): tiles((16, 32, 8, 2), (32, 16, 8, 2)),
    (4, True): tiles((16, 16, 8, 2))}


def run(kernel, candidates, x, w1, launch):
    """launch(grid, options) with the tuner's choice."""
    channels, units = x.shape[-1], len(w1)
    if message := unsupported(w1.dtype, channels, units):
        raise ValueError(message)
    fitting = candidates[w1.element_size(), channels > 128]
    options = dict(C=channels, PRECISION=precision(w1.dtype))
    positions = x.numel() // channels
    shape = f"{str(w1.dtype)[6:]} P{triton.next_power_of_2(positions)} C{channels}"
    tuner.launch(kernel.__name__, shape, fitting, lambda chosen: launch(
        (triton.cdiv(positions, chosen["BM"]),), dict(options, **chosen)))


def forward(x, norm_weight, norm_bias, w1, b1, w2, b2, residual, eps):
    out = forward_sizes(x, norm_weight, norm_bias, w1, b1, w2, b2, residual, eps)
    run(transition_forward_kernel, FORWARD, x, w1, lambda grid, options: transition_forward_kernel[grid](
        x, norm_weight, norm_bias, w1, b1, w2, b2, residual, out, x.numel() // x.shape[-1], len(w1), eps,
        RESIDUAL=residual is not None, **options))
    return out


def forward_sizes(x, norm_weight, norm_bias, w1, b1, w2, b2, residual, eps):
    return (w1 if residual is None else residual).new_empty(x.shape)


def backward(gradient, x, norm_weight, norm_bias, w1, b1, w2, add, eps):
    """dx; normalised x (P, c), hidden and its gradient (P, f); gradients of norm_weight, norm_bias, b2 and b1
    behind each other, in the dtype of these, float32 if they differ."""
    found = backward_sizes(gradient, x, norm_weight, norm_bias, w1, b1, w2, add, eps)
    *made, sums = found

    def launch(grid, options):
        parts = sums.new_empty(*grid, *sums.shape, dtype=torch.float32)
        transition_backward_kernel[grid](gradient, x, norm_weight, norm_bias, w1, b1, w2, *made, parts,
                                         len(made[1]), len(w1), eps, ADD=add, **options)
        add_up(parts, sums)
    run(transition_backward_kernel, BACKWARD, x, w1, launch)
    return found


def backward_sizes(gradient, x, norm_weight, norm_bias, w1, b1, w2, add, eps):
    (units, channels), positions = w1.shape, x.numel() // x.shape[-1]
    return (x.new_empty(x.shape), *(w1.new_empty(positions, width) for width in (channels, units, units)),
            x.new_empty(3 * channels + units, dtype=shared_dtype((norm_weight, norm_bias, b1))))


def forward_flops(x, norm_weight, norm_bias, w1, *_, **__):
    return 4 * math.prod(x) * w1[0]


def backward_flops(gradient, *forward, **_):
    return forward_flops(*forward)  # of x; gradients of weights are products outside


PARAMETERS = "Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor w1, Tensor b1, Tensor w2"
FORWARD_OP = operation(f"transition_forward({PARAMETERS}, Tensor b2, Tensor? residual, float eps) -> Tensor",
                       forward, forward_sizes, forward_flops)
BACKWARD_OP = operation(f"transition_backward(Tensor gradient, {PARAMETERS}, bool add, float eps) -> "
                        "(Tensor, Tensor, Tensor, Tensor, Tensor)", backward, backward_sizes, backward_flops)


class Transition(torch.autograd.Function):
    """transition() with its derivative; `own`: the residual is x itself."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, w1, b1, w2, b2, residual, own, eps):
        ctx.save_for_backward(x, norm_weight, norm_bias, w1, b1, w2)
        ctx.residual, ctx.own, ctx.eps = residual is not None, own, eps
        return FORWARD_OP(x, norm_weight, norm_bias, w1, b1, w2, b2, x if own else residual, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, norm_weight, norm_bias, w1, b1, w2 = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx, y, hidden, dhidden, sums = BACKWARD_OP(gradient, x, norm_weight, norm_bias, w1, b1, w2, ctx.own,
                                                   ctx.eps)
        channels, units = x.shape[-1], len(w1)
        dnorm_weight, dnorm_bias, db2, db1 = sums.split([channels, channels, channels, units])
        dw2 = gradient.view(-1, channels).to(w2.dtype).t() @ hidden
        return (dx, dnorm_weight.to(norm_weight.dtype), dnorm_bias.to(norm_bias.dtype), dhidden.t() @ y,
                db1.to(b1.dtype), dw2, db2.to(b1.dtype), gradient if ctx.residual else None, None, None)


def transition(x, norm_weight, norm_bias, w1, b1, w2, b2, eps, residual=None):
    """[residual +] relu(LayerNorm(x) w1^T + b1) w2^T + b2; residual (normally x) and result are shaped as x.
    Under autocast the products are made in its dtype, and the sum in that of the residual."""
    dtype, own = product_dtype(x), residual is x
    w1, b1, w2, b2 = (t.to(dtype).contiguous() for t in (w1, b1, w2, b2))
    residual = None if own or residual is None else residual.contiguous()
    return Transition.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), w1, b1, w2, b2,
                            residual, own, eps)


def unsupported(dtype, channels, units):
    """Why these kernels cannot take weights of this dtype, so many channels, hidden units; "" if they can."""
    if dtype not in DTYPES:
        return f"no Triton transition in {str(dtype)[6:]}"
    if channels not in CHANNELS:
        return f"no Triton transition for {channels} channels (but for {', '.join(map(str, CHANNELS))})"
    return f"no Triton transition for {units} hidden units (no multiple of {UNITS})" if units % UNITS else ""
