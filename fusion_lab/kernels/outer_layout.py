"""The outer product mean's big tensor and its gradient, each written by its product in the layout of its
reader, as a Triton kernel; the projection too, if it adds a residual; other products are the BLAS library's.

    out = [residual +] scale (W vec(sum over n of left[n, i] right[n, j]^T) + b)

left, right (B, N, S, h); W (c, h*h); b (c,); residual, out (B, S, S, c). A library's product of left and
right has rows (i, c) and columns (j, d), so it writes (i, c, j, d), while the projection reads (i, j, c, d).
The gradient of what it reads is made with rows (i, j) and columns (c, d), while the products that make
gradients of left and right read (i, c, j, d). Both are one product of matrices, each with two indices of rows
and two of columns, the middle two of which change places in the result:

    out[m1, n1, m2, n2] = scale * sum over k of a[m1, m2, k] b[k, n1, n2]

Otherwise either tensor, h*h numbers for every pair of positions, is written, read and written once more.
Sums are short, so that most of a program is addresses, a wait for its operands and the store: a program makes
several tiles of columns from the same rows, and loads the next one's operand while it stores. The scale goes
into both tensors as they are written, so that no pass over out or its gradient is spent on it; a residual is
added by the kernel that projects (projection.py), where it takes these widths. Rows of out's gradient are
added up, for that of b, by the programs that multiply them with the first columns.

Sources: AlphaFold 2 supplement, Alg. 10.
"""
import contextlib
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import projection, sums, tuner
from fusion_lab.kernels.limits import LAYER_CHANNELS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    below,
    candidates,
    check_shapes,
    from_the_end,
    lines,
    operation,
    precision,
    store_sums,
)


def reference(left, right, weight, bias, scale=1.0, residual=None):
    """The same in plain PyTorch."""
    update = F.linear(torch.einsum("bnic,bnjd->bijcd", left, right).flatten(-2), weight, bias) * scale
    return update if residual is None else residual + update


@triton.jit
def store_row_sums(parts, at, rows, k, K, sak, scale, PRECISION: tl.constexpr, BM: tl.constexpr,
                   BK: tl.constexpr):
    """Store scale times the sum of a tile's rows, but those beyond the last. at: addresses of their first BK
    numbers; K: numbers of a row. Not in the loop of their other product: see ahead_of_time.overwritten()."""
    for k0 in range(0, K, BK):
        there = rows[:, None] & (k < K - k0)[None, :]
        found = tl.load(at, mask=there, other=0.0)
        store_sums(parts + k0, k, found, found.dtype, PRECISION, BM, scale, K - k0)
        at += BK * sak


@triton.jit
def layout_matmul_kernel(a, b, out, parts, M1, M2, N1, K, sab, sam1, sam2, sak, sbb, sbk, sbn1, sbn2,
                         scale, N2: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
                         LINES: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr, BM: tl.constexpr,
                         BN: tl.constexpr, BK: tl.constexpr, MANY: tl.constexpr):
    """BM rows and MANY tiles of BN columns of one sample. Beyond the last ones it reads from within, for
    nobody uses that. EVEN: BK divides K; ONCE: K is no more than BK; LINES, if not 0: nothing is beyond, and
    rows are the whole of so many lines of M2, or a part of one, columns likewise of N2, so that only the
    first is divided. MANY, if not 1: as LINES, ONCE, and a tile's columns are whole lines; what the next tile
    reads is loaded while this one is written. SUM: programs of the first columns store scale times the sum of
    their rows of a in parts (samples * tiles of rows, K), too."""
    sample, across = tl.program_id(1).to(tl.int64), tl.cdiv(N1 * N2, BN * MANY)
    number, k = from_the_end(0), tl.arange(0, BK)
    m, n = number // across * BM, number % across * BN * MANY
    a, b = a + sample * sab, b + sample * sbb
    out += sample * M1 * M2 * N1 * N2
    adds = number % across == 0 if SUM else False
    parts += (sample * tl.cdiv(M1 * M2, BM) + number // across) * K
    if LINES > 0:
        WM: tl.constexpr = BM // LINES
        WN: tl.constexpr = min(BN, N2)
        line, m2, n1, n2 = (m // M2).to(tl.int64), tl.multiple_of(m % M2, WM), n // N2, n % N2
        n2 = tl.multiple_of(n2, WN)
        a += line * sam1 + m2 * sam2
        b += n1 * sbn1 + n2 * sbn2
        out += line * (N1 * M2 * N2) + m2 * N2 + n1 * (M2 * N2) + n2
        m, n = tl.arange(0, BM), tl.arange(0, BN)
        line, m2, n1, n2 = m // WM, m % WM, n // WN, n % WN
        row, column = line, n1
    else:
        m, n = m + tl.arange(0, BM), n + tl.arange(0, BN)
        line, m2, n1, n2 = (m // M2).to(tl.int64), m % M2, n // N2, n % N2
        row, column = tl.minimum(line, M1 - 1), tl.minimum(n1, N1 - 1)
    at = a + ((row * sam1 + m2 * sam2)[:, None] + (k * sak)[None, :])
    bt = b + ((column * sbn1 + n2 * sbn2)[None, :] + (k * sbk)[:, None])
    to = out + (line * (N1 * M2 * N2) + m2 * N2)[:, None] + (n1 * (M2 * N2) + n2)[None, :]
    if MANY > 1:
        left = tl.load(at) if EVEN else tl.load(at, mask=k[None, :] < K, other=0.0)
        if adds:
            store_sums(parts, k, left, left.dtype, PRECISION, BM, scale, K)
        for _ in range(MANY):
            right = tl.load(bt) if EVEN else tl.load(bt, mask=k[:, None] < K, other=0.0)
            acc = tl.dot(left, right, input_precision=PRECISION)
            tl.store(to, (acc * scale).to(out.dtype.element_ty))
            bt += BN // N2 * sbn1
            to += BN // N2 * (M2 * N2)
    else:
        acc, rows = tl.zeros((BM, BN), tl.float32), below(line, None if LINES > 0 else M1)
        if not ONCE:
            tl.assume(K > 0)  # else what the loop starts from is copied, for one without an iteration
        for k0 in range(0, BK if ONCE else K, BK):
            left = tl.load(at) if EVEN else tl.load(at, mask=k[None, :] < K - k0, other=0.0)
            right = tl.load(bt) if EVEN else tl.load(bt, mask=k[:, None] < K - k0, other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
            at += BK * sak
            bt += BK * sbk
        columns = below(n1, None if LINES > 0 else N1)
        tl.store(to, (acc * scale).to(out.dtype.element_ty), mask=rows[:, None] & columns[None, :])
        if adds:
            at -= tl.cdiv(K, BK) * BK * sak  # back to the first of K
            store_row_sums(parts, at, rows, k, K, sak, scale, PRECISION, BM, BK)


# By bytes of a number; the first of each fits every GPU. Strict float32 has no matrix instructions on NVIDIA.
NAMES = ("BM", "BN", "BK", "num_warps", "num_stages", "MANY")
TILES = {
    2: candidates(NAMES, (64, 64, 64, 4, 2, 1), (128, 64, 64, 4, 2, 1), (128, 128, 64, 8, 2, 1),
                  (64, 128, 64, 4, 2, 1), (64, 128, 32, 4, 3, 1), (128, 64, 128, 4, 3, 8),
                  (64, 64, 128, 4, 3, 8), (128, 128, 128, 4, 2, 8), (64, 128, 128, 4, 2, 4)),
    4: candidates(NAMES, (64, 64, 16, 8, 2, 1))}


def looked_up(rows, columns, K, h, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates. The class: P
    rows, S columns, L numbers in each sum; ragged if tiles do not divide L, which takes more registers."""
    sizes = zip("PSL", (rows, columns, K), strict=True)
    shape = " ".join([str(dtype)[6:], *(f"{name}{triton.next_power_of_2(size)}" for name, size in sizes),
                      f"H{h}", *["ragged"] * (K % max(16, min(128, triton.next_power_of_2(K))) > 0)])
    return layout_matmul_kernel.__name__, shape, TILES[dtype.itemsize]


@sums.constant
def programs(samples, rows, columns, K, h, dtype):
    """How many of the kernel's programs store sums with the tuner's choice."""
    return samples * triton.cdiv(rows, tuner.chosen(*looked_up(rows, columns, K, h, dtype))["BM"])


def multiply(a, b, out, scale, parts=None):
    """Fill contiguous out, B M1 N1 M2 N2 numbers, from a (B, M1, M2, K) and b (B, K, N1, N2) of any strides,
    and parts (n, K), if given, whose sum is then scale times that of all rows of a."""
    (samples, M1, M2, K), (N1, N2), dtype = a.shape, b.shape[2:], out.dtype
    if dtype not in DTYPES:
        raise ValueError(f"no Triton outer product in {str(dtype)[6:]}")

    def launch(chosen):
        bm, bn, bk = chosen["BM"], chosen["BN"], max(16, min(chosen["BK"], triton.next_power_of_2(K)))
        whole = lines(M1, M2, bm) if lines(N1, N2, bn) else 0
        whole = 0 if dtype == torch.float32 else whole  # on sm_80 it would spill
        many = math.gcd(chosen["MANY"], N1 * N2 // bn) if whole and K <= bk and bn % N2 == 0 else 1
        tiles, adds = triton.cdiv(M1 * M2, bm), parts is not None
        with sums.room(parts, samples * tiles) if adds else contextlib.nullcontext(out) as to:
            layout_matmul_kernel[tiles * triton.cdiv(N1 * N2, bn * many), samples](
                a, b, out, to, M1, M2, N1, K, *a.stride(), *b.stride(), scale, N2=N2,
                EVEN=K % bk == 0 < K, ONCE=K <= bk, LINES=whole, PRECISION=precision(dtype), SUM=adds,
                **dict(chosen, BK=bk, MANY=many))
    tuner.launch(*looked_up(M1 * M2, N1 * N2, K, N2, dtype), launch)


def forward(left, right, scale=1.0, after=None):
    """scale times the sum over rows, (B, S, S, h*h). after: see projection.norm_project_launch()."""
    out = forward_sizes(left, right)
    multiply(left.permute(0, 2, 3, 1), right, out, scale)
    return out


def forward_sizes(left, right, scale=1.0, after=None):
    samples, _, size, h = left.shape
    return left.new_empty(samples, size, size, h * h)


def backward(gradient, weight, scale, parts):
    """That sum's gradient, by that of out: ((i, c), (j, d)) of each sample, (B, S h, S h); and so many parts
    (n, c) of scale times the sum of out's gradient over positions."""
    found, h = backward_sizes(gradient, weight, scale, parts), side(weight)
    multiply(gradient, weight.view(1, -1, h, h).expand(len(gradient), -1, -1, -1), found[0], scale, found[1])
    return found


def backward_sizes(gradient, weight, scale, parts):
    (samples, size, _, c), h = gradient.shape, side(weight)
    return (weight.new_empty(samples, size * h, size * h),
            weight.new_empty(parts, c, dtype=torch.float32))


def side(weight):
    """Channels h of each side, from weight (c, h*h)."""
    return math.isqrt(weight.shape[1])


def forward_flops(left, right, *_, **__):
    samples, rows, size, h = left
    return 2 * samples * rows * (size * h) ** 2


def backward_flops(gradient, weight, *_, **__):
    return 2 * math.prod(gradient) * weight[1]


FORWARD_OP = operation("outer_layout(Tensor left, Tensor right, float scale=1.0, Tensor? after=None) "
                       "-> Tensor", forward, forward_sizes, forward_flops)
BACKWARD_OP = operation("outer_layout_backward(Tensor gradient, Tensor weight, float scale, int parts) "
                        "-> (Tensor, Tensor)", backward, backward_sizes, backward_flops)


class OuterLayout(torch.autograd.Function):
    """outer_layout() with its derivative; saves left, right and the sum over rows, as plain code does."""

    @staticmethod
    def forward(ctx, left, right, weight, bias, scale, residual, again):
        outer = FORWARD_OP(left, right, scale)
        ctx.save_for_backward(left, right, weight, None if again else outer)
        ctx.scale, ctx.residual = scale, residual is not None
        if residual is not None and projects(weight):
            return projection.OUTPUT_PROJECT_OP(outer, weight, bias, residual, None, scale)
        update = F.linear(outer, weight) + bias * scale  # a compiler adds that where it adds the residual
        return (residual + update).to(residual.dtype) if ctx.residual else update

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (left, right, weight, outer), gradient = ctx.saved_tensors, gradient.contiguous()
        given = gradient.to(weight.dtype)
        if outer is None:
            outer = FORWARD_OP(left, right, ctx.scale, given)
        dweight = given.flatten(0, -2).t() @ outer.flatten(0, -2)
        (B, S, _, c), wide = given.shape, weight.shape[1]
        parts = programs(B, S * S, wide, c, side(weight), weight.dtype)
        d, dbias = BACKWARD_OP(given, weight, ctx.scale, parts)
        return ((right.flatten(2) @ d.mT).view(left.shape), (left.flatten(2) @ d).view(right.shape),
                dweight, sums.OP(dbias, weight.dtype), None, gradient if ctx.residual else None, None)


def projects(weight):
    """Whether the kernel that adds a residual takes this weight (c, h*h): wider ones are the library's."""
    return (weight.dtype in DTYPES and len(weight) in LAYER_CHANNELS
            and projection.takes_inner(weight.shape[1]))


def outer_layout(left, right, weight, bias, scale=1.0, residual=None, again=False):
    """[residual +] scale (weight vec(sum over n of left[n, i] right[n, j]^T) + bias), (B, S, S, c), in
    autocast's dtype, or the residual's; scale is a number."""
    (B, _, S, h), c = left.shape, len(weight)
    check_shapes(("right", right, tuple(left.shape)), ("weight", weight, (c, h * h)), ("bias", bias, (c,)),
                 ("residual", residual, (B, S, S, c)))
    left, right, weight, bias = (t.to(product_dtype(left)) for t in (left, right, weight, bias))
    residual = None if residual is None else residual.contiguous()
    return OuterLayout.apply(left, right, weight.contiguous(), bias.contiguous(), scale, residual, again)
