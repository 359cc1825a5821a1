"""Backward of an attention sub-layer's output projection and of the gate before it, as one Triton kernel.

    o = softmax(q k^T scale + bias) v;  out = o sigmoid(gate + gate_bias);  update = drop * (out W^T + b)

    du = drop dupdate;  dout = du W;  do = dout sigmoid(.);  dgate = dout out (1 - sigmoid(.))
    delta = the sum of do o = dout out over the channels of a head, which the softmax's derivative needs

out, gate, do, dgate (B, X, Y, c), gate and dgate as slices of wider tensors; W (c, c); delta (B, R, H, L).
Neither o nor dout is ever written. The kernels of attention then read do and delta alone. Computed in there,
gates were a quarter of the instructions of the gradient of q at 256 keys (counted).
"""
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from evoformer_kernels import projections, tuner
from evoformer_kernels.common import (
    below,
    candidates,
    check_part,
    lines,
    load_columns,
    load_rows,
    sigmoid,
    store_columns,
    store_rows,
    store_sums,
)
from evoformer_kernels.projections import OF_OUTPUT
from evoformer_kernels.projections.kernels import factors
from evoformer_kernels.reductions import sums

SAMPLE, ALONG_X, ALONG_Y, HEAD = (tl.constexpr(n) for n in range(4))  # of a tuple of strides


@triton.jit
def delta_offsets(X, Y, delta_strides, LINES: tl.constexpr, BM: tl.constexpr):
    """Offsets (BM,) of this program's positions in delta, of head 0. delta_strides: sample, X, Y, head."""
    first, i = tl.program_id(0) * BM, tl.arange(0, BM)
    divided = first if LINES > 0 else first + i  # LINES save the division of every position
    line, y = divided // Y, divided % Y  # a line has Y positions
    offsets = (line // X).to(tl.int64) * delta_strides[SAMPLE] + (line % X).to(
        tl.int64) * delta_strides[ALONG_X] + y.to(tl.int64) * delta_strides[ALONG_Y]
    if LINES > 0:
        offsets += i // (BM // LINES) * delta_strides[ALONG_X] + i % (BM // LINES) * delta_strides[ALONG_Y]
    return offsets


@triton.jit
def attention_output_backward_kernel(
        dupdate, w, drop, out, gate, gate_bias, do, dgate, delta, du, bias_sums, gate_bias_sums, P, X, Y,
        drop_stride_sample, drop_stride_x, drop_stride_y: tl.constexpr, gate_stride, dgate_stride,
        delta_strides, DROP: tl.constexpr, LINES: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
        BM: tl.constexpr, BK: tl.constexpr):
    """One program: all gradients of the formulas above at BM positions, in heads of D channels each.

    Grid: axis 0: tiles of BM of the P = B X Y positions.
    Reads dupdate, out, gate (P, C), w (C, C), gate_bias (C,); with DROP drop (B, X, Y, C), broadcast.
    Writes do, dgate (P, C), delta (B, R, H, L) by delta_strides (sample, X, Y, head); with DROP du (P, C).
    Writes partial sums (programs, C) of the gradients of b and gate_bias: bias_sums, gate_bias_sums.
    LINES: how many lines of Y positions the tile is the whole of, 1 if a part of one, 0 if neither.
    """
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)  # -, (BM,), (C,)
    remaining = None if LINES > 0 else (P - first).to(tl.int32)  # positions from the first on; None: enough
    dtype: tl.constexpr = w.dtype.element_ty
    # Gradient of the projection's output, and a partial sum of its bias's gradient.
    du_tile = load_rows(dupdate + first * C, p, remaining, C).to(tl.float32)  # (BM, C)
    if DROP:
        du_tile *= factors(drop, first + p, P, X, Y, drop_stride_sample, drop_stride_x, drop_stride_y, C,
                           LINES)
    row = tl.program_id(0).to(tl.int64) * C  # of this program in the partial sums
    bias_sums, gate_bias_sums = bias_sums + row, gate_bias_sums + row
    if DROP:  # store_sums() makes sums as a product with ones: with DROP that spilled on sm_80
        tl.store(bias_sums + c, tl.sum(du_tile, 0))
    else:
        store_sums(bias_sums, c, du_tile, dtype, BM)
    du_tile = du_tile.to(dtype)
    if DROP:
        store_rows(du + first * C, p, remaining, du_tile, C)
    out, do = out + first * C, do + first * C
    gate, dgate = gate + first * gate_stride, dgate + first * dgate_stride
    delta += delta_offsets(X, Y, delta_strides, LINES, BM)  # (BM,)
    # BK channels at a time: one or more heads, or a part of one, whose delta head_delta then sums.
    head_delta, valid = tl.zeros((BM,), tl.float32), below(p, remaining)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)  # (BK,)
        out_tile = load_columns(out, p, valid, k, C)  # (BM, BK)
        gate_tile = load_columns(gate, p, valid, k, gate_stride)  # (BM, BK)
        # Gradient of the gated output.
        w_tile = tl.load(w + c[:, None] * C + k[None, :])  # (C, BK)
        dout = tl.dot(du_tile, w_tile)  # (BM, BK)
        # The gate's derivative.
        bias_tile = tl.load(gate_bias + k).to(tl.float32)[None, :]  # (1, BK)
        opening = sigmoid(gate_tile.to(tl.float32) + bias_tile)  # (BM, BK)
        dout_out = dout * out_tile.to(tl.float32)  # (BM, BK)
        dgate_tile = dout_out * (1 - opening)  # (BM, BK)
        store_columns(do, p, valid, k, C, dout * opening)
        store_columns(dgate, p, valid, k, dgate_stride, dgate_tile)
        store_sums(gate_bias_sums, k, dgate_tile, dtype, BM)
        # delta, summed over the channels of each head.
        if BK >= D:
            h = k0 // D + tl.arange(0, BK // D)  # (BK / D,)
            deltas = tl.sum(tl.reshape(dout_out, (BM, BK // D, D)), 2)  # (BM, BK / D)
            tl.store(delta[:, None] + h[None, :] * delta_strides[HEAD], deltas, mask=valid[:, None])
        else:
            head_delta += tl.sum(dout_out, 1)
            if (k0 + BK) % D == 0:
                tl.store(delta + k0 // D * delta_strides[HEAD], head_delta, mask=valid)
                head_delta = tl.zeros((BM,), tl.float32)


TILES = candidates(OF_OUTPUT, (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2),
                   (32, 64, 4, 3), (128, 64, 8, 2))


def looked_up(positions, channels, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates."""
    return attention_output_backward_kernel.__name__, tuner.class_of(dtype, P=positions, C=channels), TILES


@sums.constant
def programs(positions, channels, dtype):
    """How many programs, each with its partial sums, the kernel has with the tuner's choice."""
    return triton.cdiv(positions, tuner.chosen(*looked_up(positions, channels, dtype))["BM"])


class Results(NamedTuple):
    """What the kernel writes: do like out, dgate like gate; du with drop; partial sums of both biases."""
    do: Tensor
    dgate: Tensor
    delta: Tensor  # (B, R, H, L)
    du: Tensor
    bias_sums: Tensor  # (n, c)
    gate_bias_sums: Tensor  # (n, H, D)


def launch(dupdate, weight, drop, out, gate, gate_bias, results, axis):
    """Fill the results. out and do are contiguous; gate and dgate views (B, R, H, L, D) of tensors (B, X, Y,
    wide)."""
    check_part("projection", weight, len(weight))
    do, dgate, delta, du, bias_sums, gate_bias_sums = results
    positions, (X, Y), C = dupdate.numel() // len(weight), dupdate.shape[1:3], len(weight)
    sample, x, head, y = delta.stride()
    if axis == 1:  # rows of attention are along Y then
        x, y = y, x
    position = 3 if axis == 2 else 1  # the dimension of gate, dgate (B, R, H, L, D) that is Y: L or R

    def run(config):
        config = dict(config, BK=min(config["BK"], C))
        size = triton.cdiv(positions, config["BM"])
        with sums.room(bias_sums, size) as of_bias, sums.room(gate_bias_sums, size) as of_gate:
            attention_output_backward_kernel[(size,)](
                dupdate, weight, drop, out, gate, gate_bias, do, dgate, delta, du, of_bias, of_gate,
                positions, X, Y, *projections.drop_strides(drop, dupdate),
                gate_stride=gate.stride(position), dgate_stride=dgate.stride(position),
                delta_strides=(sample, x, y, head), DROP=drop is not None,
                LINES=lines(X, Y, config["BM"]), C=C, D=gate.shape[-1], **config)
    tuner.launch(*looked_up(positions, C, weight.dtype), run)
