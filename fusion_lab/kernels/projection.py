"""What stands before and behind attention, as Triton kernels: LayerNorm with all projections of its result,
and its derivative; the output projection with dropout and residual, whose derivative is in gated_output.py.
Both layers of a transition (transition_layer.py) and the outer product's projection are such products, too.

    y, head_bias = LayerNorm(x) W^T, LayerNorm(x) Wh^T        out = residual + drop * (og W^T + scale b)
    or, given a hidden layer's bias, y = relu(LayerNorm(x) W^T + hidden_bias)

x (B, X, Y, c); W (n, c); Wh (H, c); y (B, X, Y, n); hidden_bias (n,); head_bias (B, H, X, Y), the layout of a
bias of attention; og (B, X, Y, k); W (c, k); scale, a number; residual, out (B, X, Y, c); drop, factors
without a gradient, broadcast to that.

Each kernel reads its input once; weights come from the cache, a chunk at a time, or stay in shared memory
while a program makes many tiles of positions, where there is room and that was measured to win. LayerNorm is
made again in backward, from x, and its affine weights are not folded into W: normalised x would be rounded
differently.

Backward of the first adds up dy W + d(head_bias) Wh, LayerNorm's derivative and, where a whole sub-layer is
one function (attention_layer.py), the residual's gradient. Normalised x is written once more, for the
product that makes the gradient of W in the BLAS library.

Sources: AlphaFold 2 supplement, Alg. 7, 8, 13, 14 and 1.11.6 (dropout shared by a row or column).
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import sums, tuner
from fusion_lab.kernels.limits import CHANNELS, MOST_HEADS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    below,
    candidates,
    check_shapes,
    from_the_end,
    layer_norm,
    layer_norm_backward,
    lines,
    operation,
    padded_width,
    precision,
    processors,
    relu,
    rows,
    shared_dtype,
    store_rows,
    store_sums,
    vector,
)


def norm_project_reference(x, norm_weight, norm_bias, weight, head_weight, eps, hidden_bias=None):
    """NORM_PROJECT_OP in plain PyTorch, with None for what is empty."""
    x = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    y = None if weight is None else F.linear(x, weight, hidden_bias)
    return (y if hidden_bias is None else y.relu(),
            None if head_weight is None else F.linear(x, head_weight).permute(0, 3, 1, 2))


def output_project_reference(og, weight, bias, residual=None, drop=None, scale=1.0):
    """OUTPUT_PROJECT_OP in plain PyTorch."""
    update = F.linear(og, weight, bias * scale)
    update = update if drop is None else update * drop
    return update if residual is None else residual + update


@triton.jit
def head_places(number, h, P, PLANE, H, EVEN: tl.constexpr, BM: tl.constexpr):
    """Offsets (BM, heads) in (B, H, PLANE) of positions of the tile of this number and heads h, and which
    exist. EVEN: of one sample, so that only the first is divided. In 32 bits: in 64 that was a quarter of the
    instructions of output_project_kernel, which does the same."""
    first, p = number * BM, tl.arange(0, BM)
    if EVEN:
        row = (first // PLANE).to(tl.int64) * H + h
        at = (row * PLANE + tl.multiple_of(first % PLANE, BM))[None, :] + p[:, None]
        exist = (h < H)[None, :]
    else:
        p += first
        sample, place = (p // PLANE).to(tl.int64), p % PLANE
        at = (sample[:, None] * H + h[None, :]) * PLANE + place[:, None]
        exist = (p[:, None] < P) & (h[None, :] < H)
    return at, exist


@triton.jit
def normal_tile(x, norm_weight, norm_bias, ht, head_bias, number, P, PLANE, H, eps, dtype: tl.constexpr,
                EVEN: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """LayerNorm of tile `number`, (BM, C) in this dtype; of that head_bias by ht (HEADS, C), if there is."""
    first = number.to(tl.int64) * BM
    left = None if EVEN else (P - first).to(tl.int32)
    given = rows(x + first * C, tl.arange(0, BM), left, C)
    normal = layer_norm(given, norm_weight, norm_bias, eps, C)[0].to(dtype)
    if ht is not None:
        bt = tl.dot(normal, tl.trans(ht), input_precision=PRECISION)
        at, exist = head_places(number, tl.arange(0, ht.shape[0]), P, PLANE, H, EVEN, BM)
        tl.store(head_bias + at, bt.to(head_bias.dtype.element_ty), mask=exist)
    return normal


@triton.jit
def store_outputs(y, t, number, n, P, N: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr):
    """t (BM, BN), outputs n (BN,) of tile `number`."""
    first, p = number.to(tl.int64) * BM, tl.arange(0, BM)
    here = below(p, None if EVEN else (P - first).to(tl.int32))
    tl.store(y + first * N + p[:, None] * N + n[None, :], t.to(y.dtype.element_ty),
             mask=here[:, None] & below(n, None if EVEN else N)[None, :])


@triton.jit
def norm_project_kernel(x, norm_weight, norm_bias, w, wh, hidden_bias, y, head_bias, P, PLANE, H, eps,
                        N: tl.constexpr, HEADS: tl.constexpr, EVEN: tl.constexpr, STAY: tl.constexpr,
                        PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """BM positions of P, of which PLANE = X Y are one sample's; HEADS: H padded for a product, or 0. EVEN:
    tiles of positions, of one sample each, and of the N outputs are whole. STAY: a program makes many tiles,
    of whole outputs; weights stay in shared memory, and the next positions are on their way."""
    c, n, h = tl.arange(0, C), tl.arange(0, BN), tl.arange(0, max(HEADS, 1))
    dtype: tl.constexpr = w.dtype.element_ty
    ht = None
    if HEADS > 0:
        ht = tl.load(wh + h[:, None] * C + c[None, :], mask=h[:, None] < H, other=0.0)
    if STAY:
        ws, shifts, tiles = (), (), tl.cdiv(P, BM)
        for i in tl.static_range(N // BN):
            ws = ws + (tl.trans(rows(w, i * BN + n, None, C)),)
            if hidden_bias is not None:
                shifts = shifts + (tl.load(hidden_bias + i * BN + n).to(tl.float32),)
        for ago in range(tl.program_id(0), tiles, tl.num_programs(0)):
            number = tiles - 1 - ago
            normal = normal_tile(x, norm_weight, norm_bias, ht, head_bias, number, P, PLANE, H, eps, dtype,
                                 EVEN, PRECISION, C, BM)
            for i in tl.static_range(N // BN):
                t = tl.dot(normal, ws[i], input_precision=PRECISION)
                if hidden_bias is not None:
                    t = relu(t + shifts[i][None, :])
                store_outputs(y, t, number, i * BN + n, P, N, EVEN, BM)
    else:
        number = from_the_end(0)
        normal = normal_tile(x, norm_weight, norm_bias, ht, head_bias, number, P, PLANE, H, eps, dtype,
                             EVEN, PRECISION, C, BM)
        for n0 in range(0, N, BN):
            n, width = n0 + tl.arange(0, BN), None if EVEN else N
            if hidden_bias is not None:
                shift = tl.load(hidden_bias + n, mask=below(n, width), other=0.0).to(tl.float32)
            t = tl.dot(normal, tl.trans(rows(w, n, width, C)), input_precision=PRECISION)
            if hidden_bias is not None:
                t = relu(t + shift[None, :])
            store_outputs(y, t, number, n, P, N, EVEN, BM)


@triton.jit
def norm_project_backward_kernel(dy, dbias, x, norm_weight, norm_bias, w, wh, residual, dx, normal_out, sums,
                                 P, PLANE, H, eps, N: tl.constexpr, HEADS: tl.constexpr,
                                 RESIDUAL: tl.constexpr, TOTAL: tl.constexpr, EVEN: tl.constexpr,
                                 PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                                 BN: tl.constexpr):
    """BM positions, EVEN as above. dbias (B, H, PLANE); sums (programs, 2 + H + TOTAL, C): parts of the
    gradients of norm_weight, norm_bias and wh; TOTAL: 1 for those of residual's sum, too, else 0."""
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)
    left = None if EVEN else (P - first).to(tl.int32)
    width = None if EVEN else N
    given = rows(x + first * C, p, left, C)  # on its way while dy is multiplied
    acc = tl.zeros((BM, C), tl.float32)
    if HEADS > 0:
        h = tl.arange(0, HEADS)
        at, exist = head_places(tl.program_id(0), h, P, PLANE, H, EVEN, BM)
        t = tl.load(dbias + at, mask=exist, other=0.0).to(w.dtype.element_ty)
        of_head = h[:, None] * C + c[None, :]
        ht = tl.load(wh + of_head, mask=h[:, None] < H, other=0.0)
        acc = tl.dot(t, ht, acc, input_precision=PRECISION)
    if N > 0:
        dy += first * N
        for n0 in range(0, N, BN):
            n = n0 + tl.arange(0, BN)
            dt = tl.load(dy + p[:, None] * N + n[None, :], other=0.0,
                         mask=below(p, left)[:, None] & below(n, width)[None, :])
            acc = tl.dot(dt, rows(w, n, width, C), acc, input_precision=PRECISION)
    normal, x_hat, rstd = layer_norm(given, norm_weight, norm_bias, eps, C)
    normal = normal.to(w.dtype.element_ty)
    if N > 0:
        store_rows(normal_out + first * C, p, left, normal, C)
    sums += tl.program_id(0).to(tl.int64) * (2 + H + TOTAL) * C
    if HEADS > 0:
        dwh = tl.dot(tl.trans(t), normal, input_precision=PRECISION)
        tl.store(sums + 2 * C + of_head, dwh, mask=h[:, None] < H)
    store_sums(sums, c, acc * x_hat, w.dtype.element_ty, PRECISION, BM)
    store_sums(sums + C, c, acc, w.dtype.element_ty, PRECISION, BM)
    result = layer_norm_backward(acc, x_hat, rstd, tl.load(norm_weight + c).to(tl.float32), C)
    if RESIDUAL:
        handed_on = rows(residual + first * C, p, left, C).to(tl.float32)
        if TOTAL > 0:
            store_sums(sums + (2 + H) * C, c, handed_on, w.dtype.element_ty, PRECISION, BM)
        result += handed_on
    store_rows(dx + first * C, p, left, result, C)


@triton.jit
def factors(drop, p, P, X, Y, sb, sx, sy, C: tl.constexpr, LINES: tl.constexpr = 0):
    """(BM, C) or (1, C) of drop (B, X, Y, C) with strides s* for this program's positions p, in float32.
    LINES, if not 0: of how many lines they are the whole, or a part of one: only the first is divided."""
    if LINES > 0:
        BM: tl.constexpr = p.shape[0]
        first, i = tl.program_id(0) * BM, tl.arange(0, BM)
        line, y = first // Y, first % Y
        drop += (line // X).to(tl.int64) * sb + (line % X).to(tl.int64) * sx + y.to(tl.int64) * sy
        if LINES == 1 and sy == 0:
            found = vector(drop, C)
        else:
            at = i // (BM // LINES) * sx + i % (BM // LINES) * sy
            found = tl.load(drop + at[:, None] + tl.arange(0, C)[None, :]).to(tl.float32)
    else:
        line, y = p.to(tl.int32) // Y, p.to(tl.int32) % Y
        at = (line // X).to(tl.int64) * sb + (line % X).to(tl.int64) * sx + y.to(tl.int64) * sy
        at = at[:, None] + tl.arange(0, C)[None, :]
        found = tl.load(drop + at, mask=p[:, None] < P, other=0.0).to(tl.float32)
    return found


@triton.jit
def output_project_kernel(og, w, bias, residual, drop, out, P, X, Y, sb, sx, sy: tl.constexpr, scale,
                          K: tl.constexpr, RESIDUAL: tl.constexpr, DROP: tl.constexpr, LINES: tl.constexpr,
                          PRECISION: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """BM positions; LINES as above."""
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)
    left = None if LINES > 0 else (P - first).to(tl.int32)
    og += first * K
    acc = tl.broadcast_to(vector(bias, C) * scale, (BM, C))
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        xt = tl.load(og + p[:, None] * K + k[None, :], mask=below(p, left)[:, None], other=0.0)
        wt = tl.load(w + c[:, None] * K + k[None, :])
        acc = tl.dot(xt, tl.trans(wt), acc, input_precision=PRECISION)
    if DROP:
        acc *= factors(drop, first + p, P, X, Y, sb, sx, sy, C, LINES)
    if RESIDUAL:
        acc += rows(residual + first * C, p, left, C).to(tl.float32)
    store_rows(out + first * C, p, left, acc, C)


# --------------------------------------------------------------------------------------------------------
# Launchers. Tiles by bytes of a number and by whether there are more than 128 channels; the first of each
# fits every GPU. Strict float32 has no matrix instructions on NVIDIA, hence small tiles.
# --------------------------------------------------------------------------------------------------------


def tiles(chunk, *rows):
    """Candidates from (BM, chunk, warps, stages)."""
    return [{"BM": m, chunk: n, "num_warps": warps, "num_stages": stages} for m, n, warps, stages in rows]


LEAST = 16  # channels that a product takes, no fewer
NAMES = ("BM", "BN", "num_warps", "num_stages", "STAY")
NORM_PROJECT = {
    (2, False): candidates(NAMES, *((*tile, False) for tile in (
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (128, 64, 8, 3))),
        (64, 128, 8, 3, True), (64, 64, 8, 3, True)),
    (2, True): candidates(NAMES, *((*tile, False) for tile in (
        (32, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 3), (128, 32, 8, 2)))),
    (4, False): candidates(NAMES, (32, 32, 8, 2, False), (64, 32, 8, 2, False)),
    (4, True): candidates(NAMES, (16, 16, 8, 2, False), (32, 16, 8, 2, False))}
NORM_PROJECT_BACKWARD = {
    (2, False): tiles("BN", (64, 64, 8, 2), (64, 32, 4, 2), (64, 128, 8, 2), (64, 64, 8, 3), (128, 32, 8, 2),
                      (32, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4)),
    (2, True): tiles("BN", (32, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3)),
    (4, False): tiles("BN", (32, 32, 8, 2), (64, 32, 8, 2)),
    (4, True): tiles("BN", (16, 16, 8, 2), (32, 16, 8, 2))}
OUTPUT_PROJECT = {
    (2, False): tiles("BK", (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (64, 128, 4, 2),
                      (64, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 4)),
    (2, True): tiles("BK", (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 3)),
    (4, False): tiles("BK", (32, 32, 8, 2), (64, 32, 8, 2)),
    (4, True): tiles("BK", (16, 16, 8, 2), (32, 16, 8, 2))}
CANDIDATES = dict(norm_project_kernel=NORM_PROJECT, norm_project_backward_kernel=NORM_PROJECT_BACKWARD,
                  output_project_kernel=OUTPUT_PROJECT)


def looked_up(name, positions, channels, other, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
    shape = f"{str(dtype)[6:]} P{triton.next_power_of_2(positions)} C{channels} N{other}"
    return name, shape, CANDIDATES[name][dtype.itemsize, channels > 128]


@sums.constant
def programs(name, positions, channels, other, dtype):
    """How many programs a kernel has with the tuner's choice."""
    return triton.cdiv(positions, tuner.chosen(*looked_up(name, positions, channels, other, dtype))["BM"])


def run(kernel, x, weight, other, launch):
    """launch(grid, options) with the tuner's choice, for x (..., c); other: the projection's other width."""
    channels, dtype = x.shape[-1], weight.dtype
    positions = x.numel() // channels
    if positions >= 1 << 31:
        raise ValueError(f"{tuple(x.shape)} are too many positions for one launch")
    options = dict(C=channels, PRECISION=precision(dtype))

    def fitted(chosen):
        chosen = {key: math.gcd(size, other) if key == "BK" else size for key, size in chosen.items()}
        launch((triton.cdiv(positions, chosen["BM"]),), dict(options, **chosen))
    tuner.launch(*looked_up(kernel.__name__, positions, channels, other, dtype), fitted)


def even(shape, width, options):
    """Whether tiles of positions (B, X, Y, .), of one sample each, and of so many outputs are whole."""
    return math.prod(shape[1:3]) % options["BM"] == 0 and width % options["BN"] == 0


def check(dtype, channels, heads=0):
    if message := unsupported(dtype, channels, heads):
        raise ValueError(message)


def norm_project_launch(x, norm_weight, norm_bias, weight, head_weight, eps, hidden_bias=None, after=None):
    """y and head_bias, empty where their weight is None. after: a tensor that must be there first, so that a
    compiler does not make them earlier and keep them."""
    y, head_bias = found = norm_project_sizes(x, norm_weight, norm_bias, weight, head_weight, eps)
    one = head_weight if weight is None else weight
    width, heads = y.shape[-1], 0 if head_weight is None else len(head_weight)
    check(one.dtype, x.shape[-1], heads)

    def launch(grid, options):
        stay = options["STAY"] and width % options["BN"] == 0 < width
        norm_project_kernel[(min(*grid, processors(x)),) if stay else grid](
            x, norm_weight, norm_bias, one, head_weight, hidden_bias, y, head_bias, x.numel() // x.shape[-1],
            x.shape[1] * x.shape[2], heads, eps, N=width, HEADS=padded_width(heads) if heads else 0,
            EVEN=even(x.shape, width, options), **dict(options, STAY=stay))
    run(norm_project_kernel, x, one, width, launch)
    return found


def norm_project_sizes(x, norm_weight, norm_bias, weight, head_weight, eps, hidden_bias=None, after=None):
    sample, X, Y, _ = x.shape
    return (x.new_empty(0) if weight is None else weight.new_empty(sample, X, Y, len(weight)),
            x.new_empty(0) if head_weight is None else head_weight.new_empty(sample, len(head_weight), X, Y))


def norm_project_backward_launch(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, residual, eps,
                                 parts, total):
    """dx, with the gradient `residual` added; normalised x (P, c), empty without weight; so many parts (n, 2
    + H [+ 1], c) of the gradients of norm_weight, norm_bias, head_weight [and, if total, of residual's sum
    over positions]."""
    found = norm_project_backward_sizes(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, residual,
                                        eps, parts, total)
    dx, normal, parts = found
    one = head_weight if weight is None else weight
    width, heads = 0 if weight is None else len(weight), 0 if head_weight is None else len(head_weight)
    check(one.dtype, x.shape[-1], heads)

    def launch(grid, options):
        with sums.room(parts, *grid) as to:
            norm_project_backward_kernel[grid](
                dy, dbias, x, norm_weight, norm_bias, one, head_weight, residual, dx, normal, to,
                x.numel() // x.shape[-1], x.shape[1] * x.shape[2], heads, eps, N=width,
                HEADS=padded_width(heads) if heads else 0, RESIDUAL=residual is not None, TOTAL=int(total),
                EVEN=even(x.shape, width, options), **options)
    run(norm_project_backward_kernel, x, one, width, launch)
    return found


def norm_project_backward_sizes(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, residual, eps,
                                parts, total):
    channels, heads = x.shape[-1], 0 if head_weight is None else len(head_weight)
    normal = (0,) if weight is None else (x.numel() // channels, channels)
    return (x.new_empty(x.shape), (head_weight if weight is None else weight).new_empty(normal),
            x.new_empty(parts, 2 + heads + total, channels, dtype=torch.float32))


def output_project_launch(og, weight, bias, residual, drop, scale=1.0):
    out = output_project_sizes(og, weight, bias, residual, drop)
    check(weight.dtype, out.shape[-1])
    positions, width = out.numel() // out.shape[-1], og.shape[-1]
    if not takes_inner(width):
        raise ValueError(f"no Triton output projection of {width} channels (but of multiples of {LEAST})")
    run(output_project_kernel, out, weight, width, lambda grid, options:
        output_project_kernel[grid](
            og, weight, bias, residual, drop, out, positions, *out.shape[1:3], *drop_strides(drop, out),
            scale, K=width, RESIDUAL=residual is not None, DROP=drop is not None,
            LINES=lines(*out.shape[1:3], options["BM"]), **options))
    return out


def takes_inner(width):
    """Whether tiles of an output projection divide this width k."""
    return width > 0 and width % LEAST == 0


def output_project_sizes(og, weight, bias, residual, drop, scale=1.0):
    return (weight if residual is None else residual).new_empty(*og.shape[:-1], len(weight))


def drop_strides(drop, out):
    """Along samples, X and Y, of factors broadcast to the shape of out."""
    return (0, 0, 0) if drop is None else drop.expand(out.shape).stride()[:3]


def widened(drop, channels):
    """Factors with as many channels as the kernels read, None for None."""
    return None if drop is None else drop.expand(*drop.shape[:-1], channels).contiguous()


def norm_project_flops(x, norm_weight, norm_bias, weight, head_weight, *_, **__):
    wide = sum(shape[0] for shape in (weight, head_weight) if shape is not None)
    return 2 * math.prod(x) * wide


def norm_project_backward_flops(dy, dbias, *forward, **_):
    return norm_project_flops(*forward[:5])  # dx; the weight's gradient is a product of its own


def output_project_flops(x, weight, *_, **__):
    return 2 * math.prod(x[:-1]) * math.prod(weight)


NORMS = "Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor? weight, Tensor? head_weight"
NORM_PROJECT_OP = operation(
    f"norm_project({NORMS}, float eps, Tensor? hidden_bias=None, Tensor? after=None) -> (Tensor, Tensor)",
    norm_project_launch, norm_project_sizes, norm_project_flops)
NORM_PROJECT_BACKWARD_OP = operation(
    f"norm_project_backward(Tensor? dy, Tensor? dbias, {NORMS}, Tensor? residual, float eps, "
    "int parts, bool total) -> (Tensor, Tensor, Tensor)", norm_project_backward_launch,
    norm_project_backward_sizes, norm_project_backward_flops)
OUTPUT_PROJECT_OP = operation(
    "output_project(Tensor og, Tensor weight, Tensor bias, Tensor? residual, Tensor? drop, float scale=1.0) "
    "-> Tensor", output_project_launch, output_project_sizes, output_project_flops)


# --------------------------------------------------------------------------------------------------------
# The derivative without autograd, for functions that hold a whole sub-layer. All tensors are contiguous.
# --------------------------------------------------------------------------------------------------------


def norm_project_backward(dy, dbias, x, norm_weight, norm_bias, weight, head_weight, eps, residual=None,
                          total=False):
    """Gradients of x (with that of a residual added), norm_weight, norm_bias, weight and head_weight from
    those of y and head_bias; if total, with the sum of the residual's over positions behind them."""
    parameters, channels = (norm_weight, norm_bias, weight, head_weight), x.shape[-1]
    width, dtype = (0, head_weight.dtype) if weight is None else (len(weight), weight.dtype)
    parts = programs("norm_project_backward_kernel", x.numel() // channels, channels, width, dtype)
    dx, normal, parts = NORM_PROJECT_BACKWARD_OP(dy, dbias, x, *parameters, residual, eps, parts, total)
    found = sums.OP(parts, shared_dtype((norm_weight, norm_bias, head_weight)))
    return (dx, found[0].to(norm_weight.dtype), found[1].to(norm_bias.dtype),
            None if weight is None else dy.flatten(0, -2).t() @ normal,
            None if head_weight is None else found[2:2 + len(head_weight)].to(head_weight.dtype),
            *[found[-1]] * total)


class NormProject(torch.autograd.Function):
    """norm_project() with its derivative; saves x. Whoever reads x behind it should read the x that it hands
    on: the gradient of that is then added by this one's kernel, where it would take a pass over both."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, head_weight, eps, hand_on):
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, head_weight)
        ctx.eps = eps
        y, head_bias = NORM_PROJECT_OP(x, norm_weight, norm_bias, weight, head_weight, eps)
        return (None if weight is None else y, None if head_weight is None else head_bias,
                x.view_as(x) if hand_on else None)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dbias, handed_on):
        *given, residual = [None if d is None else d.contiguous() for d in (dy, dbias, handed_on)]
        return *norm_project_backward(*given, *ctx.saved_tensors, ctx.eps, residual), None, None


def norm_project(x, norm_weight, norm_bias, weight, head_weight, eps, hand_on=False):
    """LayerNorm(x) weight^T (B, X, Y, n), LayerNorm(x) head_weight^T (B, H, X, Y); None where the weight is;
    if hand_on, x for who reads it behind this. Under autocast the products are made in its dtype."""
    c = x.shape[-1]
    check_shapes(("norm_weight", norm_weight, (c,)), ("norm_bias", norm_bias, (c,)),
                 ("weight", weight, (0 if weight is None else len(weight), c)),
                 ("head_weight", head_weight, (0 if head_weight is None else len(head_weight), c)))
    weight, head_weight = (None if t is None else t.to(product_dtype(x)).contiguous()
                           for t in (weight, head_weight))
    found = NormProject.apply(x.contiguous(), norm_weight.contiguous(), norm_bias.contiguous(), weight,
                              head_weight, eps, hand_on)
    return found if hand_on else found[:2]


def unsupported(dtype, channels, heads=0):
    """Why these kernels cannot take weights of this dtype, so many channels and heads; "" if they can."""
    if dtype not in DTYPES:
        return f"no Triton projection in {str(dtype)[6:]}"
    if channels not in CHANNELS:
        return f"no Triton projection of {channels} channels (but of {', '.join(map(str, CHANNELS))})"
    return f"no Triton projection for {heads} heads (at most {MOST_HEADS})" if heads > MOST_HEADS else ""
