"""Attention whose rows share one bias, with the gate in its epilogue, as Triton kernels with derivatives.

    out = softmax(q k^T scale + bias + key mask) v * sigmoid(gate + gate_bias)

Letters: B samples, R rows, H heads, L length of a row, D head width; LP is L rounded up to whole tiles. A
bias tile is loaded once for RU rows side by side. Bias and key mask together are one padded tensor that holds
PADDING beyond L, so that no kernel masks a score; a second one is its transpose, which the gradients of k and
v read. Scores are never written; their gradients may be.

Backward begins with the gate: do = dout sigmoid(g) and delta = rowsum(do o) = rowsum(dout out), so that o
itself is never stored; behind an output projection that is one kernel with the projection's backward
(gated_output.py). Then, with dS the gradient of scores, whose sum over rows is that of the bias:

* up to SHORT keys one kernel, of whole rows, which writes dS;
* beyond, three kernels that make scores again: dq; dk and dv; the bias's gradient, whose programs own a tile,
  sum a share of the rows in registers and store it once;
* or two, where the tuner has found that it pays and a program can own all keys: dk and dv, with dS written;
  dq and the bias's gradient from that, in as many rounds of rows as its memory takes.

Nothing is added atomically: every run gives the same bits.

Sources: Dao et al. 2022 (arXiv:2205.14135) for attention in tiles; AlphaFold 2 supplement, Alg. 7, 8, 13, 14.
"""
import math

import torch
import torch.nn.functional as F
import triton
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import added_bias, attention_bias, gated_output, sums, tuner
from fusion_lab.kernels import attention_kernels as kernels
from fusion_lab.kernels.attention_bias import MASKED, PADDING
from fusion_lab.kernels.limits import WIDEST_HEAD
from fusion_lab.kernels.precision import at_least_float32
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    candidates,
    check_shapes,
    operation,
    padded_width,
    precision,
    products_in_registers,
)

HOLD_PADDING = (torch.bfloat16, torch.float32, torch.float64)
OVER_ROWS = ("backward_bias_kernel", "attention_backward")  # whose time depends on how many there are
TALLEST = 128  # positions of a tile, at most; within one offsets have 32 bits
SHORT = 64  # keys that one tile holds, at most; half as many where registers hold operands of products
PROGRAMS = 512  # that sums over rows are spread over, at most: about four for each processor of a large GPU,
# which have room there
WIDEST_SUM = 256  # keys of which a program can sum gradients of scores; of twice as many it wins nothing
MOST_SCORES = 256 << 20  # bytes of dS of short rows; where it is more they are added up in rounds of rows

# The first of each needs no more than any GPU has; the tuner chooses (tuner.py).
TILES = ("BM", "BN", "RU", "num_warps", "num_stages")
FORWARD = candidates(TILES, (64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (128, 64, 1, 8, 3), (64, 64, 2, 4, 3),
                     (64, 32, 1, 4, 3))
GATE = candidates(("BM", "num_warps"), (64, 4), (128, 4), (64, 2), (32, 1))
BACKWARD_Q = candidates(TILES, (64, 64, 1, 4, 2), (64, 64, 1, 4, 3), (64, 32, 2, 4, 3), (64, 32, 1, 4, 3),
                        (128, 64, 1, 8, 3))
BACKWARD_KV = candidates(TILES, (32, 64, 1, 4, 2), (32, 64, 1, 4, 3), (32, 64, 1, 4, 4), (64, 64, 1, 4, 3),
                         (32, 128, 1, 8, 3), (32, 64, 2, 4, 2))
SUM_TILES = ("BM", "BN", "num_warps", "num_stages")
BACKWARD_BIAS = candidates(SUM_TILES, (64, 32, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2),
                           (64, 64, 4, 4), (128, 64, 8, 3))
BACKWARD_SCORES = candidates(SUM_TILES, (64, 128, 8, 1), (64, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3))
SHORT_TILES = ("ROWS", "num_warps", "num_stages")
BACKWARD_SHORT = candidates(SHORT_TILES, (2, 4, 2), (1, 4, 1), (4, 4, 2))
if not torch.version.hip:  # fewer registers, so that more programs share a processor: NVIDIA's option
    BACKWARD_KV += candidates((*TILES, "maxnreg"), (32, 64, 1, 4, 3, 128), (64, 64, 1, 4, 3, 168))
    BACKWARD_BIAS += candidates((*SUM_TILES, "maxnreg"), (64, 32, 4, 3, 128), (64, 64, 4, 3, 168),
                                (64, 64, 4, 4, 168))
    BACKWARD_SCORES += candidates((*SUM_TILES, "maxnreg"), (64, 64, 8, 2, 128), (64, 128, 8, 1, 128))
    BACKWARD_SHORT += candidates((*SHORT_TILES, "maxnreg"), (2, 4, 2, 168), (1, 4, 1, 168), (4, 4, 2, 168))
STORED = candidates(("STORED",), (0,), *((n << 20,) for n in (64, 256)))  # bytes of dS at a time, or 0:
# scores are made again
SMALL = dict(BM=32, BN=32, RU=1, ROWS=2, STORED=0, num_warps=4, num_stages=1)  # for float32: twice the bytes


def reference(q, k, v, bias=None, keys=None, gate=None, gate_bias=None, scale=None):
    """The same in plain PyTorch. q, k, v, gate (B, R, H, L, D); bias (B, H, L, L); keys (B, L) or (B, R, L),
    1 = present; gate_bias (H, D)."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias[:, None]
    if keys is not None:
        keys = keys[:, None] if keys.dim() == 2 else keys
        lowest = torch.finfo(torch.float16).min / 2 if scores.dtype == torch.float16 else MASKED
        scores = scores.masked_fill(~keys.bool()[:, :, None, None, :], lowest)
    out = scores.softmax(-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v
    if gate is None:
        return out
    return out * (gate if gate_bias is None else gate + gate_bias[:, None]).sigmoid()


# --------------------------------------------------------------------------------------------------------
# Launchers. `parts` is [packed] (B, X, Y, 3 c or 4 c): q, k, v and the gate behind each other; or [q, k, v]
# or [q, k, v, gate], each (B, X, Y, c) with attention along `axis` 1 or 2, or, with axis 0, (B, R, H, L, D).
# --------------------------------------------------------------------------------------------------------


def padded_length(length):
    """LP: a multiple of every tile that the kernels use at this length."""
    return triton.cdiv(length, 128) * 128 if length > SHORT else max(16, triton.next_power_of_2(length))


def as_rows(x, heads, axis):
    """(B, X, Y, c) -> a view (B, R, H, L, D); for axis 0 x itself."""
    if axis == 0:
        return x
    return x.unflatten(-1, (heads, -1)).permute((0, 2, 3, 1, 4) if axis == 1 else (0, 1, 3, 2, 4))


def views(parts, heads, axis, gated):
    """[q, k, v] or [q, k, v, gate], each (B, R, H, L, D)."""
    parts = parts[0].chunk(3 + gated, dim=-1) if len(parts) == 1 else parts
    return [as_rows(part, heads, axis) for part in parts]


def strides(x):
    return x.stride()[:4]


@torch.compiler.assume_constant_result
def longest_short():
    """Keys up to which backward takes whole rows."""
    return SHORT // 2 if products_in_registers() else SHORT


def turns(length):
    """Whether backward of rows of this length will read the transposed bias."""
    return torch.is_grad_enabled() and length > longest_short()


def check(q, k, v, gate):
    """ValueError for what the kernels would misread: they take k's and v's strides and dtype to be q's."""
    for name, x in (("k", k), ("v", v), ("gate", gate)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {tuple(x.shape)}, {x.dtype} on {x.device}, but q {tuple(q.shape)}, "
                             f"{q.dtype} on {q.device}")
        if x.stride(-1) != 1 or name != "gate" and strides(x) != strides(q):
            raise ValueError(f"{name} has strides {x.stride()} and q {q.stride()}: they must be equal, and 1 "
                             "along channels")
    if q.dtype not in DTYPES or not 1 <= q.shape[-1] <= WIDEST_HEAD:
        raise ValueError(f"no Triton attention for heads of {q.shape[-1]} channels in {q.dtype}, but for up "
                         f"to {WIDEST_HEAD} in float16, bfloat16 and float32")


class Sizes:
    """What follows from sizes alone: of q, (B, R, H, L, D), and its dtype."""

    def __init__(self, size, dtype):
        self.B, self.R, self.H, self.L, self.D = size
        self.dtype, self.short = dtype, self.L <= longest_short()
        self.LP, self.BD = padded_length(self.L), padded_width(self.D)
        self.shape = f"{str(dtype)[6:]} L{triton.next_power_of_2(self.L)} D{self.BD}"

    def fitted(self, config):
        """The configuration for rows that may be shorter than its tiles, and whether nothing needs masks."""
        config = {key: min(value, self.LP) if key in ("BM", "BN") else value for key, value in config.items()}
        tiles = [config[key] for key in ("BM", "BN") if key in config]
        if self.L <= SHORT:  # more warps than a tile has rows for would all do the same; rows may be keys
            rows = tiles[-1] if tiles and tiles[-1] > tiles[0] else min(tiles, default=self.LP)
            config["num_warps"] = max(1, min(config["num_warps"], rows // 16))
        return dict(config, EVEN=self.D == self.BD and all(self.L % t == 0 for t in tiles or [self.LP]))

    def shares(self, stored=0):
        """How many programs sum a tile of the bias's gradient over rows; stored: whether from dS, by tiles of
        64 queries and all keys, in all a quarter of PROGRAMS: fewer parts to add up."""
        tiles = 4 * triton.cdiv(self.L, 64) if stored else triton.cdiv(self.L, 64) ** 2
        return triton.cdiv(self.R, triton.cdiv(self.R, max(1, PROGRAMS // (self.B * self.H * tiles))))

    def rounds(self, most):
        """[(first, end)] of rows whose dS has at most so many bytes."""
        rows = max(1, most // (self.B * self.H * self.LP ** 2 * self.dtype.itemsize))
        return [(first, min(first + rows, self.R)) for first in range(0, self.R, rows)]

    def scores(self, like, begin, end):
        return like.new_empty(end - begin, self.B, self.H, self.LP, self.LP)

    def whole(self):
        """Whether dS of all rows is what parts of the bias's gradient are."""
        return self.short and len(self.rounds(MOST_SCORES)) == 1

    def bias_parts(self):
        """How many parts of the bias's gradient backward makes with the tuner's choice."""
        if self.short:
            return self.R if self.whole() else len(self.rounds(MOST_SCORES))
        return self.shares(tuner.chosen(*self.looked_up("attention_backward", STORED))["STORED"])

    def rows(self, tile):
        """A grid: a function of a configuration whose `tile` is along L."""
        return lambda t: (triton.cdiv(self.L, t[tile]), self.B * self.H, triton.cdiv(self.R, t.get("RU", 1)))

    def looked_up(self, name, tiles):
        """What the tuner goes by: a kernel's name, the class of its arguments, its candidates. Programs of
        the bias's gradient pass over rows, so there their number counts."""
        if self.dtype == torch.float32:
            tiles = [{key: SMALL[key] for key in tiles[0]}]
        elif name == "attention_backward":
            tiles = tiles[:1] if self.LP > WIDEST_SUM else tiles
        elif self.BD > (32 if self.short else 64):  # whose tiles, loaded ahead, are more than 64 KB
            tiles = [dict(tiles[0], num_stages=1), *tiles]
        rows = f" R{triton.next_power_of_2(self.R)}" if name in OVER_ROWS else ""
        return name, self.shape + rows, tiles


@sums.constant
def bias_parts(B, R, H, L, D, dtype):
    return Sizes((B, R, H, L, D), dtype).bias_parts()


@sums.constant
def gate_parts(B, R, H, L, D, dtype):
    """How many parts of the gate bias's gradient backward makes with the tuner's choice."""
    sizes = Sizes((B, R, H, L, D), dtype)
    config = tuner.chosen(*sizes.looked_up("gate_backward_kernel", GATE))
    return math.prod(sizes.rows("BM")(sizes.fitted(config))) // H


class Launch(Sizes):
    """What the launches of one call share: views, sizes, flags."""

    def __init__(self, parts, gate_bias, bias, keys, heads, axis, gated, scale):
        self.q, self.k, self.v, *gate = views(parts, heads, axis, gated)
        self.gate = (gate or [self.q])[0]
        super().__init__(self.q.shape, self.q.dtype)
        check(self.q, self.k, self.v, self.gate)
        apart = max(self.q.stride(3), self.gate.stride(3))
        if max(self.B * self.H, self.R) >= 1 << 16 or TALLEST * apart >= 1 << 31:
            raise ValueError(f"attention over {tuple(self.q.shape)} is too large for one launch")
        shared = (0, 0) if keys is None else [keys.stride(i) * (keys.shape[i] > 1) for i in (0, 1)]
        self.sizes = (self.R, self.H, self.L, self.LP, self.D, scale)
        self.where = (*shared, *strides(self.q))
        self.inputs = (self.q, self.k, self.v, self.gate, gate_bias, bias, keys)
        self.flags = dict(KEYS=keys is not None, PRECISION=precision(self.q.dtype))
        self.bias_flag = dict(BIAS=bias is not None)
        self.gate_flags = dict(GATE=gated, GATE_BIAS=gated and gate_bias is not None)

    def run(self, kernel, tiles, grid, arguments, dgb=None, kind="", **flags):
        """Launch with the tuner's choice for this kind of the kernel; grid is a function of a configuration.
        dgb (n, H, D), if given, gets what the programs store to be added up."""
        def launch(config):
            config = self.fitted(config)
            size = grid(config)
            if dgb is None:
                return kernel[size](*arguments, **flags, BD=self.BD, **config)
            with sums.room(dgb, math.prod(size) // self.H) as to:
                kernel[size](*arguments, dgb=to, **flags, BD=self.BD, **config)
        tuner.launch(*self.looked_up(kernel.__name__ + kind, tiles), launch)


def forward(parts, gate_bias, bias, keys, heads, axis, gated, scale):
    """out (B, X, Y, c), or (B, R, H, L, D) for axis 0; lse (B, R, H, L), log2 of the sums of exponentials."""
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    out, lse = forward_sizes(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    c.run(kernels.forward_kernel, FORWARD, c.rows("BM"),
          (*c.inputs, out, lse, *c.sizes, *c.where, *strides(c.gate), *strides(as_rows(out, heads, axis))),
          **c.gate_flags, **c.bias_flag, **c.flags)
    return out, lse


def forward_sizes(parts, gate_bias, bias, keys, heads, axis, gated, scale):
    q = views(parts, heads, axis, gated)[0]
    out = q.new_empty(q.shape if axis == 0 else (*parts[0].shape[:3], q.shape[2] * q.shape[4]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def backward(parts, gate_bias, bias, turned, keys, out, lse, gradient, weight, drop, heads, axis, gated,
             scale, dbias, dgb):
    """[gradients of parts, each as its part lies; so many parts (dbias, B, H, LP, LP) of the bias's, to be
    added up by added_bias.py; so many (dgb, H, D) of the gate bias's; du and parts (dgb, c) of the gradient
    of the projection's bias]. What is to be added up is float32, but dS; what is not there is empty.
    gradient: of the result or, with a weight, of its projection (gated_output.py)."""
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    found = backward_sizes(parts, gate_bias, bias, turned, keys, out, lse, gradient, weight, drop, heads,
                           axis, gated, scale, dbias, dgb)
    *grads, dbias, dgb, du, projected = found
    dq, dk, dv, *dg = views(grads, heads, axis, gated)
    dg, o = (dg or [dq])[0], strides(as_rows(out, heads, axis))
    delta, do = torch.empty_like(lse), torch.empty_like(out) if gated else gradient
    if weight is None:
        c.run(kernels.gate_backward_kernel, GATE, c.rows("BM"),
              (c.gate, gate_bias, out, gradient, dg, do, delta, c.R, c.H, c.L, c.D, *strides(c.gate), *o,
               *strides(dg)), None if gate_bias is None else dgb, **c.gate_flags)
    else:
        gated_output.launch(gradient, weight, drop, out, c.gate, gate_bias, do, dg, delta, du, projected, dgb,
                            axis)
    inner, where = (keys, do, lse, delta), (*c.where, *o, *strides(dq))
    if c.short:
        short_rows(c, bias, inner, where, dq, dk, dv, dbias)
    elif bias is None:
        long_rows(c, bias, turned, inner, where, dq, dk, dv)
    else:
        def launch(config):
            shares = c.shares(config["STORED"])
            with sums.room(dbias, shares) as to:
                if config["STORED"]:
                    stored_rows(c, turned, inner, where, dq, dk, dv, to, config["STORED"])
                else:
                    long_rows(c, bias, turned, inner, where, dq, dk, dv)
                    summed_bias(c, bias, inner, where, to)
        tuner.launch(*c.looked_up("attention_backward", STORED), launch)
    return found


def short_rows(c, bias, inner, where, dq, dk, dv, dbias):
    for number, (first, end) in enumerate(c.rounds(MOST_SCORES)):
        scores = dbias if bias is None or c.whole() else c.scores(dq, first, end)
        c.run(kernels.backward_short_kernel, BACKWARD_SHORT,
              lambda t, rows=end - first: (triton.cdiv(rows, t["ROWS"]), c.B * c.H),
              (c.q, c.k, c.v, bias, *inner, dq, dk, dv, scores, *c.sizes, first, end, *where), **c.bias_flag,
              **c.flags, BL=c.LP)
        if scores is not dbias:
            torch.sum(scores, 0, dtype=torch.float32, out=dbias[number])


def key_gradients(c, turned, inner, where, dk, dv, scores, first, end):
    """dk and dv of the rows from first to end, and dS where scores are given."""
    c.run(kernels.backward_kv_kernel, BACKWARD_KV,
          lambda t: (triton.cdiv(c.L, t["BN"]), c.B * c.H, triton.cdiv(end - first, t["RU"])),
          (c.q, c.k, c.v, turned, *inner, dk, dv, scores, *c.sizes, first, end, *where), **c.bias_flag,
          **c.flags, STORE=scores is not None, kind=" stored" if scores is not None else "")


def long_rows(c, bias, turned, inner, where, dq, dk, dv):
    c.run(kernels.backward_q_kernel, BACKWARD_Q, c.rows("BM"),
          (c.q, c.k, c.v, bias, *inner, dq, *c.sizes, *where), **c.bias_flag, **c.flags)
    key_gradients(c, turned, inner, where, dk, dv, None, 0, c.R)


def summed_bias(c, bias, inner, where, dbias):
    c.run(kernels.backward_bias_kernel, BACKWARD_BIAS,
          lambda t: (triton.cdiv(c.L, t["BM"]) * triton.cdiv(c.L, t["BN"]), len(dbias), c.B * c.H),
          (c.q, c.k, c.v, bias, *inner, dbias, *c.sizes, triton.cdiv(c.R, len(dbias)), *where[:10]),
          **c.flags)


def stored_rows(c, turned, inner, where, dq, dk, dv, dbias, most):
    """dS is written and read, most bytes at a time."""
    for first, end in c.rounds(most):
        scores = c.scores(dq, first, end)
        key_gradients(c, turned, inner, where, dk, dv, scores, first, end)
        c.run(kernels.backward_scores_kernel, BACKWARD_SCORES,
              lambda t: (triton.cdiv(c.L, t["BM"]), len(dbias), c.B * c.H),
              (c.k, scores, dq, dbias, c.H, c.L, c.D, c.sizes[-1], first, end,
               triton.cdiv(end - first, len(dbias)), *where[2:6], *where[10:]), LP=c.LP,
              FULL=c.L == c.LP and c.D == c.BD, PRECISION=c.flags["PRECISION"])


def backward_sizes(parts, gate_bias, bias, turned, keys, out, lse, gradient, weight, drop, heads, axis, gated,
                   scale, dbias, dgb):
    c = Launch(parts, gate_bias, bias, keys, heads, axis, gated, scale)
    summands = (dbias, c.B, c.H, c.LP, c.LP) if bias is not None else 0
    return [*(part.new_empty(part.shape) for part in parts),
            out.new_empty(summands, dtype=c.dtype if c.whole() else torch.float32),
            out.new_empty(dgb, c.H, c.D, dtype=torch.float32),
            out.new_empty(0 if drop is None else gradient.shape),
            out.new_empty(0 if weight is None else (dgb, len(weight)), dtype=torch.float32)]


def flops(shapes, axis, gated, products):
    """Of so many products of attention over parts of these shapes."""
    own = shapes[0]
    length = own[3] if axis == 0 else own[axis]
    return products * 2 * math.prod(own) // (3 + gated if len(shapes) == 1 and axis else 1) * length


def forward_flops(parts, gate_bias, bias, keys, heads, axis, gated, scale, **_):
    return flops(parts, axis, gated, 2)


def backward_flops(parts, gate_bias, bias, turned, keys, out, lse, gradient, weight, drop, heads, axis, gated,
                   *_, **__):
    projection = 0 if weight is None else 2 * math.prod(gradient[:-1]) * math.prod(weight)
    return flops(parts, axis, gated, 4) + projection  # scores made again are none of the model's


HOW = "int heads, int axis, bool gated, float scale"
FORWARD_OP = operation("attention_forward(Tensor[] parts, Tensor? gate_bias, Tensor? bias, Tensor? keys, "
                       f"{HOW}) -> (Tensor, Tensor)", forward, forward_sizes, forward_flops)
BACKWARD_OP = operation("attention_backward(Tensor[] parts, Tensor? gate_bias, Tensor? bias, Tensor? turned, "
                        "Tensor? keys, Tensor out, Tensor lse, Tensor gradient, Tensor? weight, "
                        f"Tensor? drop, {HOW}, int dbias, int dgb) -> Tensor[]", backward, backward_sizes,
                        backward_flops)


class BiasedAttention(torch.autograd.Function):
    """Attention with its derivative; saves parts, the output, lse and the padded bias."""

    @staticmethod
    def forward(ctx, bias, keys, gate_bias, heads, axis, gated, scale, turn, *parts):
        ctx.how = heads, axis, gated, scale
        *sizes, width = views(parts, heads, axis, gated)[0].shape
        check_shapes(("gate_bias", gate_bias, (sizes[2] * width,)))
        padded, turned, summand = padded_bias(bias, keys, parts[0], sizes, turn)
        out, lse = FORWARD_OP(parts, gate_bias, padded, summand, *ctx.how)
        ctx.save_for_backward(bias, gate_bias, padded, turned, summand, out, lse, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        bias, gate_bias, padded, turned, summand, out, lse, *parts = ctx.saved_tensors
        q = views(parts, *ctx.how[:3])[0]
        *grads, dbias, dgb, _, _ = BACKWARD_OP(parts, gate_bias, padded, turned, summand, out, lse,
                                               gradient.contiguous(), None, None, *ctx.how,
                                               0 if bias is None else bias_parts(*q.shape, q.dtype),
                                               0 if gate_bias is None else gate_parts(*q.shape, q.dtype))
        dbias = None if bias is None else added_bias.OP(dbias, bias.shape[-1], bias.dtype, False)
        dgb = None if gate_bias is None else sums.OP(dgb, gate_bias.dtype).view(gate_bias.shape)
        return dbias, None, dgb, *[None] * 5, *grads


def padded_bias(bias, keys, part, sizes, turn):
    """(bias with the key mask, (B, H, LP, LP); its transpose, if turn; summands of keys, (B or 1, R or 1,
    LP)), None where not needed, from bias (B, H, L, L) or None and keys (B, L) or (B, R, L), 1 = present, or
    None, whose B and R may be 1; part: a tensor of the same device; sizes: B, R, H, L."""
    samples, rows, heads, length = sizes
    check_shapes(("bias", bias, (samples, heads, length, length)),
                 ("keys", keys, (samples, length), (samples, rows, length), (1, length), (1, rows, length),
                  (samples, 1, length), (1, 1, length)))
    turned, LP = None, padded_length(length)
    if bias is not None:
        dtype = bias.dtype if bias.dtype in HOLD_PADDING else torch.float32
        shared = None  # a mask that all rows share goes into the bias
        if keys is not None and keys.dim() == 2:
            shared, keys = keys, None
        if shared is None and LP == length:
            bias = bias.to(dtype)  # which often is one of these two already
            bias, turned = bias.contiguous(), bias.mT.contiguous() if turn else None
        else:
            bias, turned = attention_bias.OP(bias, shared, LP, dtype, turn)
            turned = turned if turn else None
    elif keys is None and LP > length:
        keys = part.new_ones(1, length)
    if keys is not None:
        keys = keys[:, None] if keys.dim() == 2 else keys
        keys = F.pad((keys.float() - 1) * -MASKED, (0, LP - length), value=PADDING).contiguous()
    return bias, turned, keys


def gated_attention(parts, heads, axis, bias=None, keys=None, gate_bias=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each place on the other.

    parts: [packed], q, k, v and gate behind each other (B, X, Y, 4 c), or [q, k, v, gate]; bias (B, H, L, L),
    nowhere below -1e9; keys (B, L), 1 = present; gate_bias (c,), added to the gate. Returns (B, X, Y, c).
    Gradients for all but keys.
    """
    width = parts[-1].shape[-1] // (4 if len(parts) == 1 else 1) // heads
    length, gate_bias = parts[0].shape[axis], None if gate_bias is None else gate_bias.contiguous()
    return BiasedAttention.apply(bias, keys, gate_bias, heads, axis, True, width ** -0.5, turns(length),
                                 *parts)


def triangle_attention(q, k, v, bias, mask=None, scale=None):
    """cuEquivariance's function of this name: softmax(scale q k^T + bias, masked) v.

    q, k, v (B, N, H, S, D); bias (B, 1, H, S, S); mask (B, N, 1, 1, S), True = present, or None; scale:
    default D^-0.5. Returns (B, N, H, S, D). Gradients for q, k, v and bias, none from rows whose keys are all
    masked. Raises ValueError for another shape, and for more keys than queries.
    """
    B, N, H, S, _ = q.shape
    check_shapes(("k", k, tuple(q.shape)), ("v", v, tuple(q.shape)), ("bias", bias, (B, 1, H, S, S)),
                 ("mask", mask, (B, N, 1, 1, S)))
    return row_attention(q, k, v, bias[:, 0], None if mask is None else mask[:, :, 0, 0], scale)


def row_attention(q, k, v, bias=None, keys=None, scale=None):
    """Attention without a gate for q, k, v (B, R, H, L, D), bias (B, H, L, L), keys (B, L) or (B, R, L). A
    bias below -1e9, or -inf, masks as much as that does, in float16 as much as its lowest number."""
    bias = None if bias is None else bias.clamp(min=max(MASKED, torch.finfo(bias.dtype).min))
    parts = [x.contiguous() for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BiasedAttention.apply(bias, keys, None, q.shape[2], 0, False, scale, turns(q.shape[3]), *parts)
