"""Backward of an attention sub-layer's output projection and of the gate before it, as one Triton kernel.

    o = softmax(q k^T scale + bias) v;  out = o sigmoid(gate + gate_bias);  update = drop * (out W^T + b)

    du = drop dupdate;  t = du W;  do = t sigmoid(.);  dgate = t out (1 - sigmoid(.))
    delta = sum over a head of do o = t out, which the softmax's derivative needs

out, gate, do, dgate (B, X, Y, c), gate and dgate as parts of wider tensors; W (c, c); delta (B, R, H, L).
Neither o nor t is ever written. The kernels of attention then read do and delta alone: made in there, gates
were a quarter of the instructions of the gradient of q at 256 keys (counted; LOG.md).
"""
import triton
import triton.language as tl

from fusion_lab.kernels import projection, sums, tuner
from fusion_lab.kernels.projection import factors, tiles
from fusion_lab.kernels.triton_parts import below, lines, precision, rows, sigmoid, store_rows, store_sums


@triton.jit
def statistic_places(X, Y, mb, mx, my, LINES: tl.constexpr, BM: tl.constexpr):
    """Offsets (BM,) of this program's positions in delta. LINES as in projection.factors()."""
    first, i = tl.program_id(0) * BM, tl.arange(0, BM)
    divided = first if LINES > 0 else first + i
    line, y = divided // Y, divided % Y
    at = (line // X).to(tl.int64) * mb + (line % X).to(tl.int64) * mx + y.to(tl.int64) * my
    if LINES > 0:
        at += i // (BM // LINES) * mx + i % (BM // LINES) * my
    return at


@triton.jit
def gated_output_backward_kernel(gradient, w, drop, out, gate, gate_bias, do, dgate, delta, du, bias_parts,
                                 gate_parts, P, X, Y, sb, sx, sy: tl.constexpr, sg, tg, mb, mx, my, mh,
                                 DROP: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
                                 C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """BM positions of P, in heads of D channels; LINES as in projection.factors(). du is stored with DROP;
    parts (programs, C) of the gradients of b and gate_bias. Strides: s* of drop, sg and tg of a position of
    gate and dgate, m* of delta."""
    first, p, c = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM), tl.arange(0, C)
    left = None if LINES > 0 else (P - first).to(tl.int32)
    dtype: tl.constexpr = w.dtype.element_ty
    d = rows(gradient + first * C, p, left, C).to(tl.float32)
    if DROP:
        d *= factors(drop, first + p, P, X, Y, sb, sx, sy, C, LINES)
    bias_parts += tl.program_id(0).to(tl.int64) * C
    gate_parts += tl.program_id(0).to(tl.int64) * C
    if DROP:  # with a product of ones, too, it spilled on sm_80 (LOG.md)
        tl.store(bias_parts + c, tl.sum(d, 0))
    else:
        store_sums(bias_parts, c, d, dtype, PRECISION, BM)
    d = d.to(dtype)
    if DROP:
        store_rows(du + first * C, p, left, d, C)
    out += first * C
    do += first * C
    gate += first * sg
    dgate += first * tg
    delta += statistic_places(X, Y, mb, mx, my, LINES, BM)
    row, here = tl.zeros((BM,), tl.float32), below(p, left)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        ot = tl.load(out + p[:, None] * C + k[None, :], mask=here[:, None], other=0.0)
        gt = tl.load(gate + p[:, None] * sg + k[None, :], mask=here[:, None], other=0.0)
        t = tl.dot(d, tl.load(w + c[:, None] * C + k[None, :]), input_precision=PRECISION)
        opening = sigmoid(gt.to(tl.float32) + tl.load(gate_bias + k).to(tl.float32)[None, :])
        product = t * ot.to(tl.float32)
        dg = product * (1 - opening)
        tl.store(do + p[:, None] * C + k[None, :], (t * opening).to(do.dtype.element_ty), mask=here[:, None])
        tl.store(dgate + p[:, None] * tg + k[None, :], dg.to(dgate.dtype.element_ty), mask=here[:, None])
        store_sums(gate_parts, k, dg, dtype, PRECISION, BM)
        if BK >= D:
            h, found = k0 // D + tl.arange(0, BK // D), tl.sum(tl.reshape(product, (BM, BK // D, D)), 2)
            tl.store(delta[:, None] + h[None, :] * mh, found, mask=here[:, None])
        else:
            row += tl.sum(product, 1)
            if (k0 + BK) % D == 0:
                tl.store(delta + k0 // D * mh, row, mask=here)
                row = tl.zeros((BM,), tl.float32)


TILES = {  # by bytes of a number and whether there are more than 128 channels
    (2, False): tiles("BK", (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2),
                      (32, 64, 4, 3), (128, 64, 8, 2)),
    (2, True): tiles("BK", (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)),
    (4, False): tiles("BK", (32, 32, 8, 2), (64, 32, 8, 2)),
    (4, True): tiles("BK", (16, 16, 8, 2), (32, 16, 8, 2))}


def looked_up(positions, channels, dtype):
    """What the tuner goes by: the kernel's name, the class of its arguments, its candidates."""
    shape = f"{str(dtype)[6:]} P{triton.next_power_of_2(positions)} C{channels}"
    return gated_output_backward_kernel.__name__, shape, TILES[dtype.itemsize, channels > 128]


@sums.constant
def programs(positions, channels, dtype):
    """How many programs, each with its parts of sums, the kernel has with the tuner's choice."""
    return triton.cdiv(positions, tuner.chosen(*looked_up(positions, channels, dtype))["BM"])


def launch(gradient, weight, drop, out, gate, gate_bias, do, dgate, delta, du, bias_parts, gate_parts, axis):
    """Fill do, dgate, delta, du (with drop), and the parts. out and do are contiguous; gate and dgate views
    (B, R, H, L, D) of tensors (B, X, Y, wide)."""
    projection.check(weight.dtype, len(weight))
    positions, (X, Y), C = gradient.numel() // len(weight), gradient.shape[1:3], len(weight)
    D, (_, per_x, per_h, per_y) = gate.shape[-1], delta.stride()
    if axis == 1:
        per_x, per_y = per_y, per_x

    def run(config):
        config = dict(config, BK=min(config["BK"], C))
        size = triton.cdiv(positions, config["BM"])
        with sums.room(bias_parts, size) as bias_sums, sums.room(gate_parts, size) as gate_sums:
            gated_output_backward_kernel[(size,)](
                gradient, weight, drop, out, gate, gate_bias, do, dgate, delta, du, bias_sums, gate_sums,
                positions, X, Y, *projection.drop_strides(drop, gradient), gate.stride(3 if axis == 2 else 1),
                dgate.stride(3 if axis == 2 else 1), delta.stride(0), per_x, per_y, per_h,
                DROP=drop is not None, LINES=lines(X, Y, config["BM"]), PRECISION=precision(weight.dtype),
                C=C, D=D, **config)
    tuner.launch(*looked_up(positions, C, weight.dtype), run)
