"""The Triton kernels of triangle multiplication, which triangle_multiplication.py launches and explains.

q: positions in the padded planes (B, SP, SP); p: the same in (B, S, S); inside: whether they lie there,
as all do if EVEN.
"""
import triton
import triton.language as tl

from fusion_lab.kernels.triton_parts import (
    affine,
    layer_norm_backward,
    moments,
    normalised,
    sigmoid,
    store_sums,
)


@triton.jit
def places(S, SP, EVEN: tl.constexpr, LINES: tl.constexpr, BM: tl.constexpr):
    """Of this program's positions: where q and p count from, int64; q, p and inside, each (BM,); sample, row
    and column. If EVEN, q and p are one, and count from the first: within a tile addresses have 32 bits, half
    as many instructions. LINES, if not 0: of how many lines the tile is the whole, or 1 for a part of one, so
    that only the first position is divided."""
    first, q = tl.program_id(0) * BM, tl.arange(0, BM)
    if LINES > 0:
        W: tl.constexpr = BM // LINES
        b, i, j = first // (SP * SP), first // SP % SP + q // W, tl.multiple_of(first % SP, W) + q % W
    else:
        b, i, j = (first + q) // (SP * SP), (first + q) // SP % SP, (first + q) % SP
    if EVEN:
        start, p, inside = first.to(tl.int64), q, tl.full((BM,), True, tl.int1)
    else:
        start, p, inside = tl.cast(0, tl.int64), ((b * S + i) * S + j).to(tl.int64), (i < S) & (j < S)
        q = first + q
    return start, q, p, inside, b, i, j


@triton.jit
def rows(matrix, p, inside, columns, stride):
    """(BM, columns) of a matrix of positions; zeros outside."""
    return tl.load(matrix + p[:, None] * stride + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def store_rows(matrix, p, inside, columns, stride, values):
    at = matrix + p[:, None] * stride + columns[None, :]
    tl.store(at, values.to(matrix.dtype.element_ty), mask=inside[:, None])


@triton.jit
def vector(pointer, columns):
    """A weight or bias of these columns, in float32."""
    return tl.load(pointer + columns).to(tl.float32)


@triton.jit
def store_statistics(x, statistics, plane, q, eps, C: tl.constexpr):
    """moments() of x (BM, C), which statistics (2, plane) get too."""
    mean, rstd = moments(x, eps, C)
    tl.store(statistics + q, mean)
    tl.store(statistics + plane + q, rstd)
    return mean, rstd


@triton.jit
def biases(pointer, columns, BIAS: tl.constexpr):
    """vector(), or 0. Kernels load those of the next columns while they work on these: a product starts from
    its bias, and so few bytes are not loaded early by the compiler."""
    if BIAS:
        found = vector(pointer, columns)
    else:
        found = 0.0
    return found


@triton.jit
def projected(x, w, bias, BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """x (BM, C) times w (BC, C), plus bias (BC,), in float32."""
    y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    if BIAS:
        y += bias[None, :]
    return y


@triton.jit
def kept(mask, inside, at, MASK: tl.constexpr):
    """What the mask says of positions (BM,), in float32, or 1."""
    if MASK:
        found = tl.load(mask + at, mask=inside, other=1.0).to(tl.float32)
    else:
        found = 1.0
    return found


@triton.jit
def front_kernel(pair, norm_weight, norm_bias, weight, bias, mask, sides, normed, statistics, S, SP, plane,
                 eps, mb, mi, mj, BIAS: tl.constexpr, MASK: tl.constexpr, BOTH: tl.constexpr,
                 EVEN: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
                 BM: tl.constexpr, BC: tl.constexpr):
    """left and right, neighbours in sides (2 C, B, SP, SP); normed = LN(pair) (P, C) and its statistics; mask
    multiplies left or BOTH. Results are made channel first: weights are the left operand."""
    start, q, p, inside, b, i, j = places(S, SP, EVEN, LINES, BM)
    pair, normed, sides, statistics = pair + start * C, normed + start * C, sides + start, statistics + start
    k, c = tl.arange(0, C), tl.arange(0, BC)
    x = rows(pair, p, inside, k, C)
    value_bias, gate_bias = biases(bias, c, BIAS), biases(bias, c + 2 * C, BIAS)
    mean, rstd = store_statistics(x, statistics, plane, q, eps, C)
    x = affine(normalised(x, mean, rstd), norm_weight, norm_bias, C).to(weight.dtype.element_ty)
    store_rows(normed, p, inside, k, C, x)
    keep, x = kept(mask, inside, b * mb + i * mi + j * mj, MASK), tl.trans(x)
    for c0 in range(0, 2 * C, BC):
        c, after = c0 + tl.arange(0, BC), (c0 + BC) % (2 * C) + tl.arange(0, BC)
        next_value, next_gate = biases(bias, after, BIAS), biases(bias, after + 2 * C, BIAS)
        at = weight + c[:, None] * C + k[None, :]
        value = tl.dot(tl.load(at), x, input_precision=PRECISION)
        gate = tl.dot(tl.load(at + 2 * C * C), x, input_precision=PRECISION)
        if BIAS:
            value += value_bias[:, None]
            gate += gate_bias[:, None]
        value *= sigmoid(gate)
        if MASK:
            value *= tl.where((c0 < C) | BOTH, keep, 1.0)[None, :]
        if not EVEN:
            value = tl.where(inside[None, :], value, 0.0)
        tl.store(sides + c[:, None].to(tl.int64) * plane + q[None, :], value.to(sides.dtype.element_ty))
        value_bias, gate_bias = next_value, next_gate


@triton.jit
def side_tile(sides, c, q, plane):
    """(positions, channels c) of channel first planes."""
    return tl.trans(tl.load(sides + c[:, None].to(tl.int64) * plane + q[None, :]))


@triton.jit
def back_kernel(product, normed, center_weight, center_bias, out_weight, out_bias, gate_weight, gate_bias,
                drop, residual, out, centered, statistics, S, SP, plane, eps, db, di, dj,
                OUT_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, DROP: tl.constexpr, RESIDUAL: tl.constexpr,
                KEEP: tl.constexpr, OUT: tl.constexpr, EVEN: tl.constexpr, LINES: tl.constexpr,
                PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """If OUT, out (B, S, S, C) from the product and normed = LN(pair) (P, C). If KEEP, for backward:
    centered = LN(product) (P, C) and its statistics."""
    start, q, p, inside, b, i, j = places(S, SP, EVEN, LINES, BM)
    normed, out = normed + start * C, out + start * C
    product, statistics = product + start, statistics + start
    if KEEP:
        centered += start * C
    if RESIDUAL:
        residual += start * C
    dtype: tl.constexpr = out_weight.dtype.element_ty
    k, c = tl.arange(0, C), tl.arange(0, BC)
    n, x = side_tile(product, k, q, plane), rows(normed, p, inside, k, C)
    value_bias, opening_bias = biases(out_bias, c, OUT_BIAS), biases(gate_bias, c, GATE_BIAS)
    mean, rstd = store_statistics(n, statistics, plane, q, eps, C)
    n = affine(normalised(n, mean, rstd), center_weight, center_bias, C).to(dtype)
    if KEEP:
        store_rows(centered, p, inside, k, C, n)
    if not OUT:
        return
    for c0 in range(0, C, BC):
        c, after = c0 + tl.arange(0, BC), (c0 + BC) % C + tl.arange(0, BC)
        next_value, next_opening = biases(out_bias, after, OUT_BIAS), biases(gate_bias, after, GATE_BIAS)
        if DROP:
            factor = rows(drop, b * db + i * di + j * dj, inside, c, 1).to(tl.float32)
        if RESIDUAL:
            given = rows(residual, p, inside, c, C)
        at = c[:, None] * C + k[None, :]
        y = projected(n, tl.load(out_weight + at), value_bias, OUT_BIAS, PRECISION)
        y *= sigmoid(projected(x, tl.load(gate_weight + at), opening_bias, GATE_BIAS, PRECISION))
        if DROP:
            y *= factor
        if RESIDUAL:
            y += given.to(tl.float32)
        store_rows(out, p, inside, c, C, y)
        value_bias, opening_bias = next_value, next_opening


@triton.jit
def back_backward_kernel(product, normed, center_weight, out_weight, out_bias, gate_weight, gate_bias, drop,
                         centered, statistics, gradient, dproduct, dout, dgates, S, SP, plane, db, di, dj,
                         sums, OUT_BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, DROP: tl.constexpr,
                         EVEN: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
                         BM: tl.constexpr, BC: tl.constexpr):
    """dproduct (C, B, SP, SP), zero beyond S. For gradients of weights: dout (P, C), the gradient of the
    projection; the gradient of the output gate, the last C columns of dgates (P, 5 C). sums
    (programs, 4 C): of center_weight, center_bias, out_bias, gate_bias."""
    start, q, p, inside, b, i, j = places(S, SP, EVEN, LINES, BM)
    normed, centered, dout = normed + start * C, centered + start * C, dout + start * C
    gradient, dgates, statistics = gradient + start * C, dgates + start * 5 * C, statistics + start
    product, dproduct = product + start, dproduct + start
    k, c = tl.arange(0, C), tl.arange(0, BC)
    dtype: tl.constexpr = out_weight.dtype.element_ty
    n, x = rows(centered, p, inside, k, C), rows(normed, p, inside, k, C)
    value_bias, opening_bias = biases(out_bias, c, OUT_BIAS), biases(gate_bias, c, GATE_BIAS)
    sums += tl.program_id(0).to(tl.int64) * 4 * C
    acc = tl.zeros((BM, C), tl.float32)
    for c0 in range(0, C, BC):
        c, after = c0 + tl.arange(0, BC), (c0 + BC) % C + tl.arange(0, BC)
        next_value, next_opening = biases(out_bias, after, OUT_BIAS), biases(gate_bias, after, GATE_BIAS)
        d = rows(gradient, p, inside, c, C).to(tl.float32)
        at = c[:, None] * C + k[None, :]
        w = tl.load(out_weight + at)
        y = projected(n, w, value_bias, OUT_BIAS, PRECISION)
        gate = sigmoid(projected(x, tl.load(gate_weight + at), opening_bias, GATE_BIAS, PRECISION))
        if DROP:
            d *= rows(drop, b * db + i * di + j * dj, inside, c, 1).to(tl.float32)
        dy = d * gate
        dg = dy * y * (1 - gate)
        if OUT_BIAS:
            store_sums(sums + 2 * C, c, dy, dtype, PRECISION, BM)
        if GATE_BIAS:
            store_sums(sums + 3 * C, c, dg, dtype, PRECISION, BM)
        store_rows(dout, p, inside, c, C, dy)
        store_rows(dgates, p, inside, c + 4 * C, 5 * C, dg)
        acc = tl.dot(dy.to(dtype), w, acc, input_precision=PRECISION)
        value_bias, opening_bias = next_value, next_opening
    mean, rstd = tl.load(statistics + q), tl.load(statistics + plane + q)
    n_hat = normalised(side_tile(product, k, q, plane), mean, rstd)
    store_sums(sums, k, acc * n_hat, dtype, PRECISION, BM)
    store_sums(sums + C, k, acc, dtype, PRECISION, BM)
    d = layer_norm_backward(acc, n_hat, rstd, vector(center_weight, k), C).to(dproduct.dtype.element_ty)
    tl.store(dproduct + k[:, None].to(tl.int64) * plane + q[None, :], tl.trans(d))


@triton.jit
def front_backward_kernel(pair, norm_weight, weight, bias, mask, sides, normed, statistics, dsides,
                          gate_weight, gradient, dgates, dpair, S, SP, plane, mb, mi, mj, sums,
                          BIAS: tl.constexpr, MASK: tl.constexpr, BOTH: tl.constexpr, ADD: tl.constexpr,
                          EVEN: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
                          BM: tl.constexpr, BC: tl.constexpr):
    """dpair, with the gradient of a residual if ADD. For gradients of weights: those of the four projections,
    the first 4 C columns of dgates (P, 5 C). sums (programs, 6 C): of norm_weight, norm_bias and bias. Sides
    and their gradients are channel first, and turned as they are read: what is made of them is a left operand
    as it stands."""
    start, q, p, inside, b, i, j = places(S, SP, EVEN, LINES, BM)
    pair, normed, dpair = pair + start * C, normed + start * C, dpair + start * C
    gradient, dgates, statistics = gradient + start * C, dgates + start * 5 * C, statistics + start
    k, c = tl.arange(0, C), tl.arange(0, BC)
    dtype: tl.constexpr = weight.dtype.element_ty
    x = rows(normed, p, inside, k, C)
    keep = kept(mask, inside, b * mb + i * mi + j * mj, MASK)
    gate_bias = biases(bias, c + 2 * C, BIAS)
    sums += tl.program_id(0).to(tl.int64) * 6 * C
    acc = tl.zeros((BM, C), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        w = tl.load(gate_weight + c[:, None] * C + k[None, :])
        dg = rows(dgates, p, inside, c + 4 * C, 5 * C)
        acc = tl.dot(dg, w, acc, input_precision=PRECISION)
    for c0 in range(0, 2 * C, BC):
        c = c0 + tl.arange(0, BC)
        next_bias = biases(bias, (c0 + BC) % (2 * C) + 2 * C + tl.arange(0, BC), BIAS)
        w = tl.load(weight + (c[:, None] + 2 * C) * C + k[None, :])
        gate = sigmoid(projected(x, w, gate_bias, BIAS, PRECISION))
        dy = side_tile(dsides + start, c, q, plane).to(tl.float32)
        dg = dy * side_tile(sides + start, c, q, plane).to(tl.float32) * (1 - gate)
        if BIAS:
            store_sums(sums + 4 * C, c, dg, dtype, PRECISION, BM)
        dg = dg.to(dtype)
        store_rows(dgates, p, inside, c + 2 * C, 5 * C, dg)
        acc = tl.dot(dg, w, acc, input_precision=PRECISION)
        dy *= gate
        if MASK:
            dy *= tl.where((c0 < C) | BOTH, keep, 1.0)[:, None]
        if BIAS:
            store_sums(sums + 2 * C, c, dy, dtype, PRECISION, BM)
        dv = dy.to(dtype)
        store_rows(dgates, p, inside, c, 5 * C, dv)
        w = tl.load(weight + c[:, None] * C + k[None, :])
        acc = tl.dot(dv, w, acc, input_precision=PRECISION)
        gate_bias = next_bias
    x, mean, rstd = rows(pair, p, inside, k, C), tl.load(statistics + q), tl.load(statistics + plane + q)
    if ADD:
        given = rows(gradient, p, inside, k, C)
    x_hat = normalised(x, mean, rstd)
    store_sums(sums, k, acc * x_hat, dtype, PRECISION, BM)
    store_sums(sums + C, k, acc, dtype, PRECISION, BM)
    d = layer_norm_backward(acc, x_hat, rstd, vector(norm_weight, k), C)
    if ADD:
        d += given.to(tl.float32)
    store_rows(dpair, p, inside, k, C, d)
