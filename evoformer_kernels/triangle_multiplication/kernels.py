"""The Triton kernels of triangle multiplication. operator.py launches them in order and has the formulas.

Letters: B samples, S residues, SP = S rounded up to 16, C channels, P = B S S positions.
A program owns BM positions and all their channels. It passes over the channels in chunks of BC.
Grid of every kernel here: axis 0: tiles of BM positions of the padded planes, B SP SP / BM programs. No other
axis. No tile is partial: SP SP is a multiple of 256, BM a power of two up to 128; BC divides C.

A position has two numbers:
    padded_p  in the padded planes (B, SP, SP): sides, product and statistics, whose channels come first
    p         in (B, S, S): pair, normed, out and others, whose channels come last
`inside` says which padded positions are real ones. channel_stride = B SP SP numbers lie between two channels
of the planes.
"""
import triton
import triton.language as tl

from evoformer_kernels.common import (
    affine,
    layer_norm_backward,
    load_columns,
    moments,
    normalised,
    sigmoid,
    store_columns,
    store_sums,
)


@triton.jit
def tile_positions(S, SP, NO_PADDING: tl.constexpr, LINES: tl.constexpr, BM: tl.constexpr):
    """This program's positions: padded_p and p count from start (), the tile's first position if NO_PADDING,
    else 0; padded_p, p, inside (BM,); sample b () if LINES, else (BM,); row i, column j (BM,).

    NO_PADDING: S is SP, so both are the same and all are inside. LINES: how many rows i the tile touches, if
    these are whole or it lies within one; else 0.
    """
    first, offset = tl.program_id(0) * BM, tl.arange(0, BM)  # (), (BM,)
    # Sample, row and column of each position. If LINES, only the first position is divided by SP, not all BM.
    if LINES > 0:
        W: tl.constexpr = BM // LINES  # columns of one row in the tile
        b, i = first // (SP * SP), first // SP % SP + offset // W
        j = tl.multiple_of(first % SP, W) + offset % W
    else:
        b, i, j = (first + offset) // (SP * SP), (first + offset) // SP % SP, (first + offset) % SP  # (BM,)
    # Without padding both count from the tile's first position. Addresses then have 32 bits within a tile,
    # which takes half as many instructions.
    if NO_PADDING:
        start, padded_p, p, inside = first.to(tl.int64), offset, offset, tl.full((BM,), True, tl.int1)
    else:
        start, p, inside = tl.cast(0, tl.int64), ((b * S + i) * S + j).to(tl.int64), (i < S) & (j < S)
        padded_p = first + offset
    return start, padded_p, p, inside, b, i, j


@triton.jit
def load_plane_tile(planes, columns, padded_p, channel_stride):
    """(BM, columns) of channel-first planes (., B SP SP). They need no mask: padding is there, and zero."""
    return tl.trans(tl.load(planes + columns[:, None].to(tl.int64) * channel_stride + padded_p[None, :]))


@triton.jit
def store_plane_tile(planes, columns, padded_p, channel_stride, values):
    """Store values (columns, BM), channel first, where load_plane_tile() reads them."""
    at = planes + columns[:, None].to(tl.int64) * channel_stride + padded_p[None, :]  # (columns, BM)
    tl.store(at, values.to(planes.dtype.element_ty))


@triton.jit
def load_vector(pointer, columns):
    """(columns,) of a weight or bias, in float32."""
    return tl.load(pointer + columns).to(tl.float32)


@triton.jit
def load_bias(pointer, columns, BIAS: tl.constexpr):
    """(columns,) of a bias, or 0 without one. Kernels load the next chunk's while they work on this one (at
    the end the first's, unused): the compiler adds a bias as its product's first value, so the product waits
    for it, and it does not load so few bytes early."""
    if BIAS:
        bias = load_vector(pointer, columns)
    else:
        bias = 0.0
    return bias


@triton.jit
def load_mask(mask, inside, at, MASK: tl.constexpr):
    """(BM,) factors of the mask in float32, or 1 without a mask."""
    if MASK:
        factor = tl.load(mask + at, mask=inside, other=1.0).to(tl.float32)
    else:
        factor = 1.0
    return factor


@triton.jit
def store_statistics(x, statistics, channel_stride, padded_p, eps, C: tl.constexpr):
    """Mean and 1 / std of x (BM, C), (BM,) each; statistics (2, B SP SP) get them, too."""
    mean, rstd = moments(x, eps, C)
    tl.store(statistics + padded_p, mean)
    tl.store(statistics + channel_stride + padded_p, rstd)
    return mean, rstd


@triton.jit
def project(x, w, bias, BIAS: tl.constexpr):
    """x (BM, C) times w (BC, C) transposed, plus bias (BC,): (BM, BC) in float32."""
    result = tl.dot(x, tl.trans(w))
    if BIAS:
        result += bias[None, :]
    return result


@triton.jit
def norm_gradient(dnormed, x, mean, rstd, weight, partial_sums, channels, dtype: tl.constexpr,
                  C: tl.constexpr, BM: tl.constexpr):
    """LayerNorm's derivative (BM, C) of dnormed and x (BM, C). partial_sums (2, C): of weight's, bias's."""
    x_hat = normalised(x, mean, rstd)  # (BM, C)
    store_sums(partial_sums, channels, dnormed * x_hat, dtype, BM)
    store_sums(partial_sums + C, channels, dnormed, dtype, BM)
    return layer_norm_backward(dnormed, x_hat, rstd, load_vector(weight, channels), C)


@triton.jit
def triangle_multiplication_front_kernel(
        pair,  # (P, C)
        norm_weight, norm_bias,  # (C,) each
        in_weight, in_bias,  # (4 C, C), (4 C,): left, right, left's gate, right's gate
        mask,  # (B, S, S) by its strides; (B, S) has stride 0 along the other axis
        sides,  # (2 C, B, SP, SP) out: left, right
        normed,  # (P, C) out: LN(pair)
        statistics,  # (2, B SP SP) out, float32: pair's mean, 1 / std
        S, SP, channel_stride, eps, mask_stride_b, mask_stride_i, mask_stride_j,
        IN_BIAS: tl.constexpr, MASK: tl.constexpr, MASK_BOTH: tl.constexpr, NO_PADDING: tl.constexpr,
        LINES: tl.constexpr, C: tl.constexpr,
        BM: tl.constexpr, BC: tl.constexpr):
    """Forward, before the product: left and right of BM positions.

        x = LN(pair);  side = (x W^T + b) * sigmoid(x G^T + g) * mask

    A mask of residues k multiplies left alone, one of pairs both (MASK_BOTH). Tiles are channel first, as
    sides lie: weights are the first operands of tl.dot, and no result is transposed.
    """
    start, padded_p, p, inside, b, i, j = tile_positions(S, SP, NO_PADDING, LINES, BM)
    pair, normed, sides, statistics = pair + start * C, normed + start * C, sides + start, statistics + start
    channels, chunk = tl.arange(0, C), tl.arange(0, BC)

    # LayerNorm, kept for the gradients of weights
    x = load_columns(pair, p, inside, channels, C)  # (BM, C)
    chunk_bias = load_bias(in_bias, chunk, IN_BIAS)  # (BC,)
    chunk_gate_bias = load_bias(in_bias, chunk + 2 * C, IN_BIAS)  # (BC,)
    mean, rstd = store_statistics(x, statistics, channel_stride, padded_p, eps, C)  # (BM,)
    x = affine(normalised(x, mean, rstd), norm_weight, norm_bias, C).to(in_weight.dtype.element_ty)  # (BM, C)
    store_columns(normed, p, inside, channels, C, x)
    mask_factor = load_mask(mask, inside, b * mask_stride_b + i * mask_stride_i + j * mask_stride_j, MASK)
    x = tl.trans(x)  # (C, BM)

    # Projections and their gates, BC of the 2 C channels of both sides at a time
    for c0 in range(0, 2 * C, BC):
        chunk, next_chunk = c0 + tl.arange(0, BC), (c0 + BC) % (2 * C) + tl.arange(0, BC)
        next_bias = load_bias(in_bias, next_chunk, IN_BIAS)  # (BC,)
        next_gate_bias = load_bias(in_bias, next_chunk + 2 * C, IN_BIAS)  # (BC,)
        at = in_weight + chunk[:, None] * C + channels[None, :]  # (BC, C)
        value = tl.dot(tl.load(at), x)  # (BC, BM)
        gate = tl.dot(tl.load(at + 2 * C * C), x)  # (BC, BM); gates: 2 C rows on
        if IN_BIAS:
            value += chunk_bias[:, None]
            gate += chunk_gate_bias[:, None]
        value *= sigmoid(gate)
        if MASK:
            value *= tl.where((c0 < C) | MASK_BOTH, mask_factor, 1.0)[None, :]  # c0 < C: left's channels
        if not NO_PADDING:
            value = tl.where(inside[None, :], value, 0.0)  # the product sums over padding
        store_plane_tile(sides, chunk, padded_p, channel_stride, value)
        chunk_bias, chunk_gate_bias = next_bias, next_gate_bias


@triton.jit
def triangle_multiplication_back_kernel(
        product,  # (C, B, SP, SP)
        normed,  # (P, C): LN(pair)
        center_weight, center_bias,  # (C,) each
        out_weight, out_bias,  # (C, C), (C,)
        gate_weight, gate_bias,  # (C, C), (C,)
        drop,  # (B, S, S, C) by its strides; channels are contiguous
        onto,  # (P, C), to which the update is added
        out,  # (P, C) out
        normed_product, statistics,  # out: LN(product) (P, C); its mean, 1 / std (2, B SP SP), float32
        S, SP, channel_stride, eps, drop_stride_b, drop_stride_i, drop_stride_j,
        OUT_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, DROP: tl.constexpr, ONTO: tl.constexpr,
        SAVE: tl.constexpr, OUT: tl.constexpr, NO_PADDING: tl.constexpr, LINES: tl.constexpr,
        C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Forward, behind the product: the result of BM positions.

        out = [onto +] drop * (LN(product) Wo^T + bo) * sigmoid(LN(pair) Wg^T + bg)

    SAVE: write normed_product, which backward reads. OUT: write out; recomputation for backward does not.
    """
    start, padded_p, p, inside, b, i, j = tile_positions(S, SP, NO_PADDING, LINES, BM)
    normed, out = normed + start * C, out + start * C
    product, statistics = product + start, statistics + start
    if SAVE:
        normed_product += start * C
    if ONTO:
        onto += start * C
    dtype: tl.constexpr = out_weight.dtype.element_ty
    channels, chunk = tl.arange(0, C), tl.arange(0, BC)
    # LayerNorm of the product; the tiles of LN(product) and LN(pair) stay for all chunks
    n = load_plane_tile(product, channels, padded_p, channel_stride)  # (BM, C)
    x = load_columns(normed, p, inside, channels, C)  # (BM, C)
    chunk_out_bias = load_bias(out_bias, chunk, OUT_BIAS)  # (BC,)
    chunk_gate_bias = load_bias(gate_bias, chunk, GATE_BIAS)  # (BC,)
    mean, rstd = store_statistics(n, statistics, channel_stride, padded_p, eps, C)  # (BM,)
    n = affine(normalised(n, mean, rstd), center_weight, center_bias, C).to(dtype)  # (BM, C)
    if SAVE:
        store_columns(normed_product, p, inside, channels, C, n)
    if not OUT:
        return

    # BC channels at a time. Dropout and onto are loaded before the products: they arrive meanwhile.
    for c0 in range(0, C, BC):
        chunk, next_chunk = c0 + tl.arange(0, BC), (c0 + BC) % C + tl.arange(0, BC)
        next_out_bias = load_bias(out_bias, next_chunk, OUT_BIAS)  # (BC,)
        next_gate_bias = load_bias(gate_bias, next_chunk, GATE_BIAS)  # (BC,)
        if DROP:
            factor = load_columns(drop, b * drop_stride_b + i * drop_stride_i + j * drop_stride_j, inside,
                                  chunk, 1).to(tl.float32)  # (BM, BC)
        if ONTO:
            onto_tile = load_columns(onto, p, inside, chunk, C)  # (BM, BC)
        at = chunk[:, None] * C + channels[None, :]  # (BC, C)
        value = project(n, tl.load(out_weight + at), chunk_out_bias, OUT_BIAS)  # (BM, BC)
        value *= sigmoid(project(x, tl.load(gate_weight + at), chunk_gate_bias, GATE_BIAS))
        if DROP:
            value *= factor
        if ONTO:
            value += onto_tile.to(tl.float32)
        store_columns(out, p, inside, chunk, C, value)
        chunk_out_bias, chunk_gate_bias = next_out_bias, next_gate_bias


@triton.jit
def triangle_multiplication_back_backward_kernel(
        product,  # (C, B, SP, SP)
        normed, normed_product,  # (P, C) each: LN(pair), LN(product)
        center_weight, out_weight, out_bias, gate_weight, gate_bias,  # (C,), (C, C), (C,), (C, C), (C,)
        drop,  # (B, S, S, C) by its strides; channels are contiguous
        statistics, gradient,  # (2, B SP SP): the product's mean, 1 / std; (P, C): of out
        dproduct,  # (C, B, SP, SP) out, zero beyond S
        dout,  # (P, C) out: gradient of the output projection's result
        dprojected,  # (P, 5 C) out: its last C columns, the gradient of the output gate before its sigmoid
        partial_sums,  # (programs, 4, C) out: of center_weight's, center_bias's, out_bias's, gate_bias's
        S, SP, channel_stride, drop_stride_b, drop_stride_i, drop_stride_j,
        OUT_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, DROP: tl.constexpr, NO_PADDING: tl.constexpr,
        LINES: tl.constexpr, C: tl.constexpr,
        BM: tl.constexpr, BC: tl.constexpr):
    """Backward of the back stage: the product's gradient of BM positions. With out = drop * value * gate:

        dvalue = drop * gradient * gate;  dgate = dvalue * value (1 - gate);  dproduct: LN's, of dvalue Wo
    """
    start, padded_p, p, inside, b, i, j = tile_positions(S, SP, NO_PADDING, LINES, BM)
    normed, normed_product, dout = normed + start * C, normed_product + start * C, dout + start * C
    gradient, dprojected, statistics = gradient + start * C, dprojected + start * 5 * C, statistics + start
    product, dproduct = product + start, dproduct + start
    partial_sums += tl.program_id(0).to(tl.int64) * 4 * C
    channels, chunk = tl.arange(0, C), tl.arange(0, BC)
    dtype: tl.constexpr = out_weight.dtype.element_ty
    n, x = load_columns(normed_product, p, inside, channels, C), load_columns(normed, p, inside, channels, C)
    chunk_out_bias = load_bias(out_bias, chunk, OUT_BIAS)  # (BC,)
    chunk_gate_bias = load_bias(gate_bias, chunk, GATE_BIAS)  # (BC,)
    dn = tl.zeros((BM, C), tl.float32)  # gradient of LN(product)

    # Value and gate are recomputed, BC channels at a time; their gradients follow at once
    for c0 in range(0, C, BC):
        chunk, next_chunk = c0 + tl.arange(0, BC), (c0 + BC) % C + tl.arange(0, BC)
        next_out_bias = load_bias(out_bias, next_chunk, OUT_BIAS)  # (BC,)
        next_gate_bias = load_bias(gate_bias, next_chunk, GATE_BIAS)  # (BC,)
        d = load_columns(gradient, p, inside, chunk, C).to(tl.float32)  # (BM, BC)
        at = chunk[:, None] * C + channels[None, :]  # (BC, C)
        w = tl.load(out_weight + at)  # (BC, C)
        value = project(n, w, chunk_out_bias, OUT_BIAS)  # (BM, BC)
        gate = sigmoid(project(x, tl.load(gate_weight + at), chunk_gate_bias, GATE_BIAS))
        if DROP:
            d *= load_columns(drop, b * drop_stride_b + i * drop_stride_i + j * drop_stride_j, inside, chunk,
                           1).to(tl.float32)
        dvalue = d * gate
        dgate = dvalue * value * (1 - gate)
        if OUT_BIAS:
            store_sums(partial_sums + 2 * C, chunk, dvalue, dtype, BM)
        if GATE_BIAS:
            store_sums(partial_sums + 3 * C, chunk, dgate, dtype, BM)
        store_columns(dout, p, inside, chunk, C, dvalue)
        store_columns(dprojected, p, inside, chunk + 4 * C, 5 * C, dgate)
        dn = tl.dot(dvalue.to(dtype), w, dn)  # (BM, C)
        chunk_out_bias, chunk_gate_bias = next_out_bias, next_gate_bias

    # LayerNorm's derivative, stored channel first for the library's product
    mean, rstd = tl.load(statistics + padded_p), tl.load(statistics + channel_stride + padded_p)  # (BM,)
    d = norm_gradient(dn, load_plane_tile(product, channels, padded_p, channel_stride), mean, rstd,
                      center_weight, partial_sums, channels, dtype, C, BM)
    d = d.to(dproduct.dtype.element_ty)
    store_plane_tile(dproduct, channels, padded_p, channel_stride, tl.trans(d))


@triton.jit
def output_gate_part(dprojected, gate_weight, p, inside, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """(BM, C) in float32: what the output gate adds to the gradient of LN(pair), dgate Wg."""
    channels, dx = tl.arange(0, C), tl.zeros((BM, C), tl.float32)
    for c0 in range(0, C, BC):
        chunk = c0 + tl.arange(0, BC)
        w = tl.load(gate_weight + chunk[:, None] * C + channels[None, :])  # (BC, C)
        dgate = load_columns(dprojected, p, inside, chunk + 4 * C, 5 * C)  # (BM, BC)
        dx = tl.dot(dgate, w, dx)
    return dx


@triton.jit
def pair_gradient(dx, pair, gradient, statistics, norm_weight, partial_sums, p, padded_p, inside,
                  channel_stride, ADD_GRADIENT: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr,
                  BM: tl.constexpr):
    """(BM, C) in float32: LayerNorm's derivative of dx (BM, C), with ADD_GRADIENT out's gradient added."""
    channels = tl.arange(0, C)
    x, mean, rstd = (load_columns(pair, p, inside, channels, C), tl.load(statistics + padded_p),
                     tl.load(statistics + channel_stride + padded_p))  # (BM, C), (BM,), (BM,)
    if ADD_GRADIENT:
        out_gradient = load_columns(gradient, p, inside, channels, C)  # (BM, C)
    d = norm_gradient(dx, x, mean, rstd, norm_weight, partial_sums, channels, dtype, C, BM)
    if ADD_GRADIENT:
        d += out_gradient.to(tl.float32)
    return d


@triton.jit
def triangle_multiplication_front_backward_kernel(
        pair, normed,  # (P, C) each; normed = LN(pair)
        norm_weight, gate_weight,  # (C,), (C, C)
        in_weight, in_bias,  # (4 C, C), (4 C,): left, right, left's gate, right's gate
        mask,  # (B, S, S) by its strides; (B, S) has stride 0 along the other axis
        sides, dsides,  # (2 C, B, SP, SP) each: left, right, and their gradients
        statistics, gradient,  # (2, B SP SP): pair's mean, 1 / std; (P, C): of out
        dprojected,  # (P, 5 C) in and out: gradients of left, right, their gates, and (in) the output gate
        dpair,  # (P, C) out
        partial_sums,  # (programs, 6, C) out: of norm_weight's, norm_bias's, in_bias's (4)
        S, SP, channel_stride, mask_stride_b, mask_stride_i, mask_stride_j,
        IN_BIAS: tl.constexpr, MASK: tl.constexpr, MASK_BOTH: tl.constexpr, ADD_GRADIENT: tl.constexpr,
        NO_PADDING: tl.constexpr, LINES: tl.constexpr, C: tl.constexpr,
        BM: tl.constexpr, BC: tl.constexpr):
    """Backward of the front stage: pair's gradient of BM positions. Of a side = value * gate * mask:

        dvalue = dside * gate * mask;  dgate = dside * side (1 - gate)
        dpair = LN's of dx [+ gradient];  dx = the sum of dvalue W + dgate G + the output gate's dgate Wg

    No value is recomputed, only its gate. Sides are transposed as they are read: first operands of tl.dot.
    """
    start, padded_p, p, inside, b, i, j = tile_positions(S, SP, NO_PADDING, LINES, BM)
    pair, normed, dpair = pair + start * C, normed + start * C, dpair + start * C
    gradient, dprojected, statistics = gradient + start * C, dprojected + start * 5 * C, statistics + start
    partial_sums += tl.program_id(0).to(tl.int64) * 6 * C
    channels, chunk = tl.arange(0, C), tl.arange(0, BC)
    dtype: tl.constexpr = in_weight.dtype.element_ty
    x = load_columns(normed, p, inside, channels, C)  # (BM, C)
    mask_factor = load_mask(mask, inside, b * mask_stride_b + i * mask_stride_i + j * mask_stride_j, MASK)
    chunk_gate_bias = load_bias(in_bias, chunk + 2 * C, IN_BIAS)
    dx = output_gate_part(dprojected, gate_weight, p, inside, C, BM, BC)  # (BM, C)

    # Both sides: gradients of gates, then of values, BC of 2 C channels at a time
    for c0 in range(0, 2 * C, BC):
        chunk = c0 + tl.arange(0, BC)
        next_gate_bias = load_bias(in_bias, (c0 + BC) % (2 * C) + 2 * C + tl.arange(0, BC), IN_BIAS)
        w = tl.load(in_weight + (chunk[:, None] + 2 * C) * C + channels[None, :])  # (BC, C) of the gate
        gate = sigmoid(project(x, w, chunk_gate_bias, IN_BIAS))  # (BM, BC)
        dside = load_plane_tile(dsides + start, chunk, padded_p, channel_stride).to(tl.float32)  # (BM, BC)
        side = load_plane_tile(sides + start, chunk, padded_p, channel_stride).to(tl.float32)
        dgate = dside * side * (1 - gate)
        if IN_BIAS:
            store_sums(partial_sums + 4 * C, chunk, dgate, dtype, BM)
        dgate = dgate.to(dtype)
        store_columns(dprojected, p, inside, chunk + 2 * C, 5 * C, dgate)
        dx = tl.dot(dgate, w, dx)
        dvalue = dside * gate
        if MASK:
            dvalue *= tl.where((c0 < C) | MASK_BOTH, mask_factor, 1.0)[:, None]  # c0 < C: left's channels
        if IN_BIAS:
            store_sums(partial_sums + 2 * C, chunk, dvalue, dtype, BM)
        dvalue = dvalue.to(dtype)  # (BM, BC)
        store_columns(dprojected, p, inside, chunk, 5 * C, dvalue)
        w = tl.load(in_weight + chunk[:, None] * C + channels[None, :])  # (BC, C) of the value
        dx = tl.dot(dvalue, w, dx)
        chunk_gate_bias = next_gate_bias

    d = pair_gradient(dx, pair, gradient, statistics, norm_weight, partial_sums, p, padded_p, inside,
                      channel_stride, ADD_GRADIENT, dtype, C, BM)
    store_columns(dpair, p, inside, channels, C, d)
