"""AF2's outer product mean with its projection, as Triton kernels with derivatives.

    out[i, j] = residual[i, j] + (W vec(sum over n of left[n, i] right[n, j]^T) + b) / norm

left, right (B, N, S, h); W (c, h*h); b (c,); norm (B,) float32; residual, out (B, S, S, c). The tensor in
the middle, h*h numbers for every pair of positions, exists only as tiles: CC channels of left at a time, TI
x TJ pairs of positions. A tile comes out of its product as ((i, c), (j, d)) and goes into the next as ((i,
j), (c, d)), or the other way round in backward. It is divided by norm before it is rounded, which keeps
float16 in range.

Backward: the gradient of left needs the tensor's gradient G = dout W, summed over j and d against right;
that of right the same with i and j, c and d exchanged, so one kernel makes both: a program owns TI
positions and CC channels and walks over the others, so that nothing is added atomically. G is made twice
for that, and the tensor itself once more for the gradient of W. What is summed in shares is stored in
float32, one part a share.

Sources: AlphaFold 2 supplement, Alg. 10.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import tuner
from fusion_lab.kernels.limits import CHANNELS, OUTER_WIDTHS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import DTYPES, add_up, check_shapes, operation, precision

PROGRAMS = 512  # over which long sums are spread: about four for each processor of a large GPU


def reference(left, right, weight, bias, norm, residual=None):
    """The same in plain PyTorch."""
    outer = torch.einsum("bnic,bnjd->bijcd", left, right).flatten(-2)  # (B, S, S, h*h)
    update = (F.linear(outer, weight, bias) / norm[:, None, None, None]).to(outer.dtype)
    return update if residual is None else residual + update


@triton.jit
def operands(left, right, i0, j0, c0, n0, S, N, sln, sli, srn, srj, EVEN: tl.constexpr, H: tl.constexpr,
             TI: tl.constexpr, TJ: tl.constexpr, CC: tl.constexpr, BN: tl.constexpr):
    """left as ((i, c), n), right as (n, (j, d)); positions from i0 and j0, channels from c0, rows from n0.
    Positions beyond S are read from within, for nobody uses them; rows beyond N count 0. EVEN: none are."""
    ic, jd, n = tl.arange(0, TI * CC), tl.arange(0, TJ * H), n0 + tl.arange(0, BN)
    i, j = tl.minimum(i0 + ic // CC, S - 1), tl.minimum(j0 + jd // H, S - 1)
    at = left + (i * sli + c0 + ic % CC)[:, None] + n[None, :] * sln
    if EVEN:
        lt = tl.load(at)
    else:
        lt = tl.load(at, mask=n[None, :] < N, other=0.0)
        n = tl.minimum(n, N - 1)
    return lt, tl.load(right + (j * srj + jd % H)[None, :] + n[:, None] * srn)


@triton.jit
def outer_tile(left, right, i0, j0, c0, S, N, scale, sln, sli, srn, srj, EVEN: tl.constexpr,
               ONE: tl.constexpr, PRECISION: tl.constexpr, H: tl.constexpr, TI: tl.constexpr,
               TJ: tl.constexpr, CC: tl.constexpr, BN: tl.constexpr):
    """scale times the sum over n, as ((i, j), (c, d)) in the dtype of left. ONE: N <= BN, so that what the
    callers loop over is the innermost loop, whose loads are prefetched."""
    if ONE:
        lt, rt = operands(left, right, i0, j0, c0, 0, S, N, sln, sli, srn, srj, EVEN, H, TI, TJ, CC, BN)
        outer = tl.dot(lt, rt, input_precision=PRECISION)
    else:
        outer = tl.zeros((TI * CC, TJ * H), tl.float32)
        for n0 in range(0, N, BN):
            lt, rt = operands(left, right, i0, j0, c0, n0, S, N, sln, sli, srn, srj, EVEN, H, TI, TJ, CC, BN)
            outer = tl.dot(lt, rt, outer, input_precision=PRECISION)
    outer = tl.reshape((outer * scale).to(left.dtype.element_ty), (TI, CC, TJ, H))
    return tl.reshape(tl.permute(outer, (0, 2, 1, 3)), (TI * TJ, CC * H))


@triton.jit
def pairs(i0, j0, si, sj, S, TI: tl.constexpr, TJ: tl.constexpr):
    """Offsets (TI TJ,) of positions (i, j) in one sample of a pair tensor with these strides; which exist."""
    ij = tl.arange(0, TI * TJ)
    i, j = i0 + ij // TJ, j0 + ij % TJ
    return i.to(tl.int64) * si + j.to(tl.int64) * sj, (i < S) & (j < S)


@triton.jit
def outer_forward_kernel(left, right, w, bias, norm, residual, out, S, N, slb, sln, sli, srb, srn, srj,
                         RESIDUAL: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr,
                         PRECISION: tl.constexpr, H: tl.constexpr, C: tl.constexpr, TI: tl.constexpr,
                         TJ: tl.constexpr, CC: tl.constexpr, BN: tl.constexpr):
    """TI x TJ pairs of positions of sample b."""
    b, across = tl.program_id(1).to(tl.int64), tl.cdiv(S, TJ)
    i0, j0 = tl.program_id(0) // across * TI, tl.program_id(0) % across * TJ
    c, f = tl.arange(0, C), tl.arange(0, CC * H)
    scale = 1 / tl.load(norm + b)
    acc = tl.zeros((TI * TJ, C), tl.float32)
    for c0 in range(0, H, CC):
        outer = outer_tile(left + b * slb, right + b * srb, i0, j0, c0, S, N, scale, sln, sli, srn, srj, EVEN,
                           ONE, PRECISION, H, TI, TJ, CC, BN)
        wt = tl.load(w + c[:, None] * (H * H) + (c0 * H + f)[None, :])
        acc = tl.dot(outer, tl.trans(wt), acc, input_precision=PRECISION)
    acc += tl.load(bias + c).to(tl.float32)[None, :] * scale
    at, inside = pairs(i0, j0, S * C, C, S, TI, TJ)
    at = (b * S * S * C + at)[:, None] + c[None, :]
    if RESIDUAL:
        acc += tl.load(residual + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def outer_backward_side_kernel(gradient, other, w, norm, result, S, N, steps, B, sgi, sgj, swc, swd, sob, son,
                               soj, PRECISION: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
                               TI: tl.constexpr, TJ: tl.constexpr, CC: tl.constexpr, BN: tl.constexpr):
    """A share of the gradient (B, N, S, H) of one side, TI positions, CC channels and BN rows of it: the sum
    over `steps` tiles of positions j and all channels d of the other side. result (shares, B, N, S, H)."""
    i0, c0, share = tl.program_id(0) * TI, tl.program_id(1) * CC, tl.program_id(2) // (B * tl.cdiv(N, BN))
    b, n0 = (tl.program_id(2) % B).to(tl.int64), tl.program_id(2) // B % tl.cdiv(N, BN) * BN
    c, n, cd = tl.arange(0, C), n0 + tl.arange(0, BN), tl.arange(0, CC * H)
    wt = tl.load(w + c[:, None] * (H * H) + ((c0 + cd // H) * swc + cd % H * swd)[None, :])
    jd, acc, row = tl.arange(0, TJ * H), tl.zeros((TI * CC, BN), tl.float32), tl.minimum(n, N - 1) * son
    other += b * sob
    for j0 in range(share * steps * TJ, tl.minimum((share + 1) * steps * TJ, S), TJ):
        at, inside = pairs(i0, j0, sgi, sgj, S, TI, TJ)
        dt = tl.load(gradient + (b * S * S * C + at)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        d = tl.dot(dt.to(wt.dtype), wt, input_precision=PRECISION).to(wt.dtype)
        d = tl.permute(tl.reshape(d, (TI, TJ, CC, H)), (0, 2, 1, 3))
        rt = tl.load(other + (tl.minimum(j0 + jd // H, S - 1) * soj + jd % H)[:, None] + row[None, :])
        acc = tl.dot(tl.reshape(d, (TI * CC, TJ * H)), rt, acc, input_precision=PRECISION)
    ic = tl.arange(0, TI * CC)
    i = i0 + ic // CC
    at = (share * B + b) * N * S * H + (i * H + c0 + ic % CC)[:, None] + n[None, :].to(tl.int64) * S * H
    tl.store(result + at, (acc / tl.load(norm + b)).to(result.dtype.element_ty),
             mask=(i[:, None] < S) & (n[None, :] < N))


@triton.jit
def outer_backward_weight_kernel(gradient, left, right, norm, dw, dbias, S, N, B, slb, sln, sli, srb, srn,
                                 srj, EVEN: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr,
                                 H: tl.constexpr, C: tl.constexpr, TI: tl.constexpr, TJ: tl.constexpr,
                                 CC: tl.constexpr, BN: tl.constexpr):
    """The gradient of CC H columns of W over a share of the pairs: dw (shares, C, H H); dbias (shares, C)."""
    c0, share, shares = tl.program_id(0) * CC, tl.program_id(1), tl.num_programs(1)
    c, f, across, down = tl.arange(0, C), tl.arange(0, CC * H), tl.cdiv(S, TJ), tl.cdiv(S, TI)
    acc, db = tl.zeros((C, CC * H), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(share, B * across * down, shares):
        b, i0, j0 = (tile // (across * down)).to(tl.int64), tile // across % down * TI, tile % across * TJ
        scale = 1 / tl.load(norm + b)
        outer = outer_tile(left + b * slb, right + b * srb, i0, j0, c0, S, N, scale, sln, sli, srn, srj, EVEN,
                           ONE, PRECISION, H, TI, TJ, CC, BN)
        at, inside = pairs(i0, j0, S * C, C, S, TI, TJ)
        dt = tl.load(gradient + (b * S * S * C + at)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(tl.trans(dt.to(outer.dtype)), outer, acc, input_precision=PRECISION)
        if c0 == 0:
            db += tl.sum(dt.to(tl.float32), 0) * scale
    dw += share.to(tl.int64) * C * H * H
    tl.store(dw + c[:, None] * (H * H) + (c0 * H + f)[None, :], acc)
    if c0 == 0:
        tl.store(dbias + share * C + c, db)


# --------------------------------------------------------------------------------------------------------
# Launchers. Tiles: PAIRS = TI TJ pairs of positions, RIGHT = TJ H columns of right, CHUNK = CC H columns of
# W; by bytes of a number and by whether there are more than 128 channels. The first of each fits every GPU.
# --------------------------------------------------------------------------------------------------------


def tiles(*rows):
    """Candidates from (pairs, right, chunk, warps, stages[, True: one tile of rows where N allows it])."""
    names = "PAIRS", "RIGHT", "CHUNK", "num_warps", "num_stages", "ONE"
    return [dict(zip(names, (*row, False), strict=False)) for row in rows]


FORWARD = {
    (2, False): tiles((64, 128, 64, 4, 2), (64, 128, 128, 4, 2, True), (64, 128, 128, 8, 2, True),
                      (128, 128, 128, 8, 2, True), (64, 128, 128, 8, 2), (128, 256, 128, 8, 2)),
    (2, True): tiles((32, 64, 64, 4, 2), (64, 128, 64, 8, 2), (64, 128, 64, 8, 2, True)),
    (4, False): tiles((32, 64, 64, 8, 2)), (4, True): tiles((16, 64, 32, 8, 2))}
SIDE = {
    (2, False): tiles((64, 64, 64, 4, 2), (64, 128, 64, 4, 2), (64, 128, 64, 4, 1), (64, 128, 128, 4, 2),
                      (64, 128, 128, 8, 2), (128, 128, 128, 8, 2)),
    (2, True): tiles((32, 64, 32, 4, 2), (32, 64, 64, 4, 2), (64, 128, 64, 8, 2), (64, 128, 128, 8, 2)),
    (4, False): tiles((32, 64, 64, 8, 2)), (4, True): tiles((16, 64, 32, 8, 2))}
WEIGHT = {
    (2, False): tiles((64, 128, 128, 8, 2), (64, 128, 128, 8, 2, True), (64, 128, 64, 4, 2),
                      (128, 128, 128, 8, 2, True)),
    (2, True): tiles((64, 128, 64, 8, 2), (64, 128, 64, 8, 2, True), (32, 64, 64, 4, 2)),
    (4, False): tiles((32, 64, 64, 8, 2)), (4, True): tiles((16, 64, 32, 8, 2))}


def fitted(chosen, h, rows):
    """The kernel's tile sizes for h channels a side and so many rows; what holds for the rows."""
    tj, cc = max(1, chosen["RIGHT"] // h), min(h, max(1, chosen["CHUNK"] // h))
    ti = max(chosen["PAIRS"] // tj, triton.cdiv(16, cc), 1)
    bn = max(16, min(64, triton.next_power_of_2(rows)))
    options = {key: chosen[key] for key in ("num_warps", "num_stages")}
    flags = dict(EVEN=rows % bn == 0, ONE=chosen["ONE"] and rows <= bn)
    return dict(options, TI=ti, TJ=tj, CC=cc, BN=bn), flags


def run(kernel, candidates, left, weight, launch):
    """launch(tile sizes, flags) with the tuner's choice."""
    (_, rows, size, h), channels, dtype = left.shape, len(weight), weight.dtype
    if message := unsupported(dtype, channels, h):
        raise ValueError(message)
    N, S = (triton.next_power_of_2(n) for n in (rows, size))
    shape = f"{str(dtype)[6:]} N{N} S{S} H{h} C{channels}"
    options = dict(H=h, C=channels, PRECISION=precision(dtype))

    def launch_chosen(chosen):
        sizes, flags = fitted(chosen, h, rows)
        launch(dict(options, **sizes), flags)
    tuner.launch(kernel.__name__, shape, candidates[weight.element_size(), channels > 128], launch_chosen)


def forward(left, right, weight, bias, norm, residual):
    out = forward_sizes(left, right, weight, bias, norm, residual)
    sample, rows, size, _ = left.shape

    def launch(t, flags):
        grid = triton.cdiv(size, t["TI"]) * triton.cdiv(size, t["TJ"]), sample
        strides = *left.stride()[:3], *right.stride()[:3]
        outer_forward_kernel[grid](left, right, weight, bias, norm, residual, out, size, rows, *strides,
                                   RESIDUAL=residual is not None, **flags, **t)
    run(outer_forward_kernel, FORWARD, left, weight, launch)
    return out


def forward_sizes(left, right, weight, bias, norm, residual):
    sample, _, size, _ = left.shape
    return (weight if residual is None else residual).new_empty(sample, size, size, len(weight))


def backward(gradient, left, right, weight, norm):
    """Gradients of left, right, weight and bias."""
    dleft, dright, dweight, dbias = found = backward_sizes(gradient, left, right, weight, norm)
    (sample, rows, size, h), channels = left.shape, len(weight)
    line = size * channels
    backward_side(gradient, right, weight, norm, dleft, (line, channels, h, 1))
    backward_side(gradient, left, weight, norm, dright, (channels, line, 1, h))

    def launch(t, flags):
        tiles_in_all = sample * triton.cdiv(size, t["TI"]) * triton.cdiv(size, t["TJ"])
        shares = min(tiles_in_all, max(1, PROGRAMS // 2 // (h // t["CC"])))
        parts, bias_parts = (norm.new_empty(shares, *d.shape) for d in (dweight, dbias))
        outer_backward_weight_kernel[h // t["CC"], shares](
            gradient, left, right, norm, parts, bias_parts, size, rows, sample, *left.stride()[:3],
            *right.stride()[:3], **flags, **t)
        add_up(parts, dweight)
        add_up(bias_parts, dbias)
    run(outer_backward_weight_kernel, WEIGHT, left, weight, launch)
    return found


def backward_side(gradient, other, weight, norm, result, strides):
    """Into result the gradient of the side that faces `other`; strides: those of gradient along result's
    positions and other's, and of a row of weight along result's channels and other's."""
    sample, rows, size, h = other.shape

    def launch(t, flags):
        across, chunks = triton.cdiv(size, t["TJ"]), sample * triton.cdiv(rows, t["BN"])
        blocks = triton.cdiv(size, t["TI"]), h // t["CC"]
        steps = triton.cdiv(across, max(1, min(8, PROGRAMS // (blocks[0] * blocks[1] * chunks))))
        shares = triton.cdiv(across, steps)
        target = result if shares == 1 else norm.new_empty(shares, *result.shape)
        outer_backward_side_kernel[(*blocks, shares * chunks)](
            gradient, other, weight, norm, target, size, rows, steps, sample, *strides, *other.stride()[:3],
            **t)
        if shares > 1:
            add_up(target, result)
    run(outer_backward_side_kernel, SIDE, other, weight, launch)


def backward_sizes(gradient, left, right, weight, norm):
    return (left.new_empty(left.shape), right.new_empty(right.shape),
            *(weight.new_empty(size) for size in (weight.shape, len(weight))))


def flops(sides, weight):
    """Of the model: the sum over rows and the projection."""
    samples, rows, size, h = sides
    return 2 * samples * size ** 2 * h ** 2 * (rows + weight[0])


def forward_flops(left, right, weight, *_, **__):
    return flops(left, weight)


def backward_flops(gradient, left, right, weight, norm, **_):
    return 2 * flops(left, weight)


FORWARD_OP = operation("outer_forward(Tensor left, Tensor right, Tensor weight, Tensor bias, Tensor norm, "
                       "Tensor? residual) -> Tensor", forward, forward_sizes, forward_flops)
BACKWARD_OP = operation("outer_backward(Tensor gradient, Tensor left, Tensor right, Tensor weight, "
                        "Tensor norm) -> (Tensor, Tensor, Tensor, Tensor)", backward, backward_sizes,
                        backward_flops)


class OuterProduct(torch.autograd.Function):
    """outer_product() with its derivative; saves left and right."""

    @staticmethod
    def forward(ctx, left, right, weight, bias, norm, residual):
        ctx.save_for_backward(left, right, weight, norm)
        ctx.residual = residual is not None
        return FORWARD_OP(left, right, weight, bias, norm, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        left, right, weight, norm = ctx.saved_tensors
        gradient = gradient.contiguous()
        dleft, dright, dweight, dbias = BACKWARD_OP(gradient, left, right, weight, norm)
        return dleft, dright, dweight, dbias, None, gradient if ctx.residual else None


def outer_product(left, right, weight, bias, norm, residual=None):
    """[residual +] (weight vec(sum over n of left[n, i] right[n, j]^T) + bias) / norm, (B, S, S, c). norm
    gets no gradient. Under autocast products are made in its dtype, and the sum in that of the residual."""
    (samples, _, size, h), c, dtype = left.shape, len(weight), product_dtype(left)
    check_shapes(("right", right, tuple(left.shape)), ("weight", weight, (c, h * h)), ("bias", bias, (c,)),
                 ("norm", norm, (samples,)), ("residual", residual, (samples, size, size, c)))
    left, right, weight, bias = (t.to(dtype) for t in (left, right, weight, bias))
    left, right = (t if t.stride(-1) == 1 else t.contiguous() for t in (left, right))
    residual = None if residual is None else residual.contiguous()
    return OuterProduct.apply(left, right, weight.contiguous(), bias.contiguous(), norm.float().contiguous(),
                              residual)


def unsupported(dtype, channels, width):
    """Why these kernels cannot take weights of this dtype, c channels and h = width; "" if they can."""
    if dtype not in DTYPES:
        return f"no Triton outer product in {str(dtype)[6:]}"
    if channels not in CHANNELS:
        return f"no Triton outer product for {channels} channels (but for {', '.join(map(str, CHANNELS))})"
    if width not in OUTER_WIDTHS:
        return f"no Triton outer product of width {width} (but of {', '.join(map(str, OUTER_WIDTHS))})"
    return ""
