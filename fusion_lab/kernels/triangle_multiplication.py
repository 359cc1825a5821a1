"""AlphaFold 2's triangle multiplication (supplement, Alg. 11, 12) as Triton kernels round a batched GEMM.

    x = LN(pair);  side = (x W^T + b) * sigmoid(x G^T + g) * mask    for left and right
    product[i, j] = sum over k of left[i, k] right[j, k]             incoming: left[k, i] right[k, j]
    out = residual + drop * (LN(product) Wo^T + bo) * sigmoid(x Wg^T + bg)

Letters: B samples, S residues, c channels, P = B S S positions; SP is S rounded up to 16. What the batched
GEMM multiplies lies channel first, (., B, SP, SP), with zeros beyond S: every row is aligned and every tile
whole. Programs own BM positions of these planes and pass BC channels at a time. Gradients of weights need x
and LN(product) in memory; so forward writes them, and who reads them has an operand without arithmetic.

Forward: front_kernel (LayerNorm, projections, gates), the product, back_kernel (LayerNorm, projection, gate,
dropout, residual): 12 passes over a tensor of pair's size. Backward: back_backward_kernel, two products
(triangle_products.py has all three), front_backward_kernel, and two GEMMs over what these write for the
gradients of weights: 34 passes, 33 for short sides, whose two products are one kernel. No projection of a
side is made again: with y = value * sigmoid(gate), which is kept, the gradients are dy sigmoid(gate) and
dy y (1 - sigmoid(gate)). Sums over positions are one part a program, and every run gives the same bits.
"""
import torch
import torch.nn.functional as F
import triton
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import sums, triangle_products, tuner
from fusion_lab.kernels import triangle_multiplication_kernels as kernels
from fusion_lab.kernels.limits import CHANNELS
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.kernels.triton_parts import (
    DTYPES,
    candidates,
    check_shapes,
    lines,
    operation,
    precision,
    shared_dtype,
)

PARAMETERS = ("norm_weight", "norm_bias", "in_weight", "in_bias", "center_weight", "center_bias",
              "out_weight", "out_bias", "gate_weight", "gate_bias")

# The first of each needs no more than any GPU has; the tuner chooses (tuner.py).
TILES = ("BM", "BC", "num_warps", "num_stages")
FRONT = candidates(TILES, (32, 32, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2),
                   (128, 64, 8, 2), (128, 64, 8, 3))
BACK = candidates(TILES, (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 32, 8, 3),
                  (128, 64, 8, 2))
BACK_BACKWARD = candidates(TILES, (64, 32, 4, 2), (32, 32, 4, 2), (64, 16, 4, 2), (64, 32, 4, 3),
                           (128, 16, 8, 2), (128, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2), (32, 64, 4, 3))
FRONT_BACKWARD = candidates(TILES, (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2))
WIDE = candidates(TILES, (32, 64, 4, 2))  # of that above 128 channels, where it becomes 16 positions
SMALL = candidates(TILES, (32, 16, 8, 2))  # for float32, whose products hold whole rows in registers
CANDIDATES = dict(front_kernel=FRONT, back_kernel=BACK, back_backward_kernel=BACK_BACKWARD,
                  front_backward_kernel=FRONT_BACKWARD)


def reference(pair, norm_weight, norm_bias, in_weight, in_bias, center_weight, center_bias, out_weight,
              out_bias, gate_weight, gate_bias, mask=None, outgoing=True, eps=1e-5, residual=None, drop=None):
    """The same in plain PyTorch; arguments as in triangle_multiplication()."""
    c = pair.shape[-1]
    x = F.layer_norm(pair, (c,), norm_weight, norm_bias, eps)
    left, right, left_gate, right_gate = F.linear(x, in_weight, in_bias).chunk(4, dim=-1)
    left, right = left * left_gate.sigmoid(), right * right_gate.sigmoid()
    if mask is not None:
        keep = mask.to(left.dtype)[..., None]
        if mask.dim() == 3:
            left, right = left * keep, right * keep
        else:
            left = left * (keep[:, None] if outgoing else keep[:, :, None])
    product = torch.einsum("bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc", left, right)
    update = F.linear(F.layer_norm(product, (c,), center_weight, center_bias, eps), out_weight, out_bias)
    update = update * F.linear(x, gate_weight, gate_bias).sigmoid()
    update = update if drop is None else update * drop
    return update if residual is None else residual + update


def padded(S):
    """SP"""
    return triton.cdiv(S, 16) * 16


def looked_up(name, S, C, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
    wide = C > 128 and name == "front_backward_kernel"
    return (name, f"{str(dtype)[6:]} C{C} S{triton.next_power_of_2(S)}",
            SMALL if dtype == torch.float32 else WIDE if wide else CANDIDATES[name])


def fitted(config, C):
    """The configuration: fewer positions where there are more than 128 channels, and no more channels than
    there are."""
    wider = max(1, C // 128)
    return {**config, "BM": max(16, config["BM"] // wider), "BC": max(16, min(C, config["BC"] // wider))}


@sums.constant
def programs(name, B, S, C, dtype):
    """How many programs a kernel has with the tuner's choice."""
    config = fitted(tuner.chosen(*looked_up(name, S, C, dtype)), C)
    return B * padded(S) ** 2 // config["BM"]


class Call:
    """What the launches of one call share: arguments, sizes, strides, flags, the class of shape. weights: of
    PARAMETERS, None for a bias that there is not."""

    def __init__(self, pair, weights, mask, drop, outgoing):
        self.B, self.S, _, self.C = pair.shape
        self.SP = padded(self.S)
        self.plane = self.B * self.SP * self.SP
        if self.plane >= 1 << 31:
            raise ValueError(f"{tuple(pair.shape)} are too many positions for one launch")
        self.norm, project, self.center, out, self.gate = (weights[n:n + 2] for n in range(0, 10, 2))
        self.outgoing, self.dtype, self.new = outgoing, project[0].dtype, project[0].new_empty
        self.front, self.back = (*project, mask), (*out, *self.gate, drop)
        self.sizes = (self.S, self.SP, self.plane)
        self.mask_strides = mask_strides(mask, outgoing)
        self.drop_strides = (0, 0, 0) if drop is None else drop.expand(pair.shape).stride()[:3]
        self.front_flags = dict(BIAS=project[1] is not None, MASK=mask is not None,
                                BOTH=mask is not None and mask.dim() == 3)
        self.back_flags = dict(OUT_BIAS=out[1] is not None, GATE_BIAS=self.gate[1] is not None,
                               DROP=drop is not None)
        self.flags = dict(PRECISION=precision(self.dtype), C=self.C, EVEN=self.S == self.SP)

    def result(self, pair, residual, there):
        return pair.new_empty(pair.shape if there else 0,
                              dtype=self.dtype if residual is None else residual.dtype)

    def planes(self, number):
        return self.new(number * self.C, self.B, self.SP, self.SP)

    def rows(self, width):
        return self.new(self.B * self.S * self.S, width)

    def parts(self, number, width):
        return self.new(number, width * self.C, dtype=torch.float32)

    def run(self, kernel, *arguments, parts=None, **flags):
        """Launch with the tuner's choice. parts, if given, gets what the programs store to be added up."""
        def launch(config):
            config = fitted(config, self.C)
            many = self.plane // config["BM"]
            whole = lines(self.S, self.S, config["BM"]) if self.S == self.SP else 0
            if parts is None:
                return kernel[(many,)](*arguments, **flags, **self.flags, LINES=whole, **config)
            with sums.room(parts, many) as to:
                kernel[(many,)](*arguments, to, **flags, **self.flags, LINES=whole, **config)
        tuner.launch(*looked_up(kernel.__name__, self.S, self.C, self.dtype), launch)

    def statistics(self):
        """Mean and 1 / standard deviation of pair, then of the product, at each position."""
        return self.new(4, self.plane, dtype=torch.float32)

    def matrices(self, planes):
        """[(c B, SP, SP)] of a side each."""
        return planes.view(-1, self.C * self.B, self.SP, self.SP)

    def multiply(self, sides):
        """The product, (c, B, SP, SP)."""
        product = triangle_products.multiply(*self.matrices(sides), self.outgoing)
        return product.view(self.C, *sides.shape[1:])

    def multiply_backward(self, sides, dproduct):
        """The gradient of sides."""
        dsides = torch.empty_like(sides)
        given = (each for planes in (sides, dproduct, dsides) for each in self.matrices(planes))
        triangle_products.multiply_backward(*given, self.outgoing)
        return dsides


def mask_strides(mask, outgoing):
    """For sample, row and column of left. The product sums over its columns; incoming: over its rows."""
    if mask is None:
        return 0, 0, 0
    return mask.stride() if mask.dim() == 3 else (mask.stride(0), *((0, 1) if outgoing else (1, 0)))


def forward(pair, weights, mask, drop, residual, outgoing, eps, keep, after=None):
    """[out; for backward statistics, LN(pair), LN(product), the product, both sides]. LN(product) and the
    sides are empty unless keep. With `after` (see projection.norm_project_launch()) out is empty."""
    call, makes_out = Call(pair, weights, mask, drop, outgoing), after is None
    statistics, x, sides = call.statistics(), call.rows(call.C), call.planes(2)
    call.run(kernels.front_kernel, pair, *call.norm, *call.front, sides, x, statistics[:2], *call.sizes, eps,
             *call.mask_strides, **call.front_flags)
    product = call.multiply(sides)
    sides = sides if keep else call.planes(0)  # their memory may be out's
    out, centered = call.result(pair, residual, makes_out), call.rows(call.C * keep)
    call.run(kernels.back_kernel, product, x, *call.center, *call.back, residual, out, centered,
             statistics[2:], *call.sizes, eps, *call.drop_strides, RESIDUAL=residual is not None, KEEP=keep,
             OUT=makes_out, **call.back_flags)
    return [out, statistics, x, centered, product, sides]


def forward_sizes(pair, weights, mask, drop, residual, outgoing, eps, keep, after=None):
    call = Call(pair, weights, mask, drop, outgoing)
    return [call.result(pair, residual, after is None), call.statistics(), call.rows(call.C),
            call.rows(call.C * keep), call.planes(1), call.planes(2 * keep)]


def backward(gradient, pair, weights, mask, drop, statistics, x, centered, product, sides, add, outgoing,
             front, back):
    """[Gradient of pair; of left, right, their gates and the output gate before their sigmoids, (P, 5 c); of
    the output projection, (P, c); so many parts (front, 6 c) of the gradients of norm_weight, norm_bias and
    in_bias, (back, 4 c) of those of center_weight, center_bias, out_bias and gate_bias]. add: pair was the
    residual. Products of the (P, .) are left to the caller, where torch.compile sees them; they outlive what
    they are needed for here."""
    call = Call(pair, weights, mask, drop, outgoing)
    found = backward_sizes(gradient, pair, weights, mask, drop, statistics, x, centered, product, sides, add,
                           outgoing, front, back)
    dpair, dgates, dout, front, back = found
    dproduct = call.planes(1)
    call.run(kernels.back_backward_kernel, product, x, call.center[0], *call.back, centered, statistics[2:],
             gradient, dproduct, dout, dgates, *call.sizes, *call.drop_strides, parts=back, **call.back_flags)
    dsides = call.multiply_backward(sides, dproduct)
    del dproduct
    call.run(kernels.front_backward_kernel, pair, call.norm[0], *call.front, sides, x, statistics[:2], dsides,
             call.gate[0], gradient, dgates, dpair, *call.sizes, *call.mask_strides, parts=front, ADD=add,
             **call.front_flags)
    return found


def backward_sizes(gradient, pair, weights, mask, drop, statistics, x, centered, product, sides, add,
                   outgoing, front, back):
    call, c = Call(pair, weights, mask, drop, outgoing), pair.shape[-1]
    return [pair.new_empty(pair.shape), call.rows(5 * c), call.rows(c), call.parts(front, 6),
            call.parts(back, 4)]


def flops(shape, second, *others, **_):
    """Of the model: six projections and the product, which has two gradients; not what is made again."""
    b, s, _, c = shape
    in_backward = isinstance(second, torch.Size)  # of pair; in forward, weights
    return 2 * b * s * s * c * (6 * c + (2 if in_backward else 1) * s)


FORWARD_OP = operation("triangle_forward(Tensor pair, Tensor?[] weights, Tensor? mask, Tensor? drop, "
                       "Tensor? residual, bool outgoing, float eps, bool keep, Tensor? after=None) "
                       "-> Tensor[]", forward, forward_sizes, flops)
BACKWARD_OP = operation("triangle_backward(Tensor gradient, Tensor pair, Tensor?[] weights, Tensor? mask, "
                        "Tensor? drop, Tensor statistics, Tensor x, Tensor centered, Tensor product, "
                        "Tensor sides, bool add, bool outgoing, int front, int back) -> Tensor[]", backward,
                        backward_sizes, flops)


class TriangleMultiplication(torch.autograd.Function):
    """triangle_multiplication() with its derivative; saves pair and, unless again, 3 tensors of its
    size and both sides."""

    @staticmethod
    def forward(ctx, pair, mask, drop, residual, add, outgoing, eps, keep, again, *weights):
        ctx.how, ctx.eps = (add, outgoing), eps
        keep = keep and not again
        out, *kept = FORWARD_OP(pair, weights, mask, drop, pair if add else residual, outgoing, eps, keep)
        ctx.save_for_backward(pair, mask, drop, *([None] * 5 if again else kept), *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        pair, mask, drop, statistics, x, centered, product, sides, *weights = ctx.saved_tensors
        if sides is None:
            _, statistics, x, centered, product, sides = FORWARD_OP(
                pair, weights, mask, None, None, ctx.how[1], ctx.eps, True, gradient)
        (B, S, _, c), dtype = pair.shape, shared_dtype([weights[n] for n in (0, 1, 3, 4, 5, 7, 9)])
        many = [programs(name, B, S, c, weights[2].dtype) for name in (
            "front_backward_kernel", "back_backward_kernel")]
        dpair, dgates, dout, *parts = BACKWARD_OP(
            gradient.contiguous(), pair, weights, mask, drop, statistics, x, centered, product, sides,
            *ctx.how, *many)
        din, dgate = (dgates.t() @ x).split([4 * c, c])
        front, back = [sums.OP(each, dtype) for each in parts]
        norm, norm_bias, in_bias = front.split([c, c, 4 * c])
        center, center_bias, out_bias, gate_bias = back.split([c, c, c, c])
        dout_weight = dout.t() @ centered
        grads = norm, norm_bias, din, in_bias, center, center_bias, dout_weight, out_bias, dgate, gate_bias
        grads = [None if w is None else d.to(w.dtype) for d, w in zip(grads, weights, strict=True)]
        return dpair, None, None, gradient if ctx.needs_input_grad[3] else None, *[None] * 5, *grads


def check(pair, weights, mask, drop, residual):
    """ValueError with what is wrong."""
    B, S, _, c = pair.shape
    if product_dtype(pair) not in DTYPES or c not in CHANNELS:
        raise ValueError(f"no Triton kernels for {c} channels in {product_dtype(pair)}, but for "
                         f"{', '.join(map(str, CHANNELS))} in float16, bfloat16 and float32")
    sizes = (c,), (c,), (4 * c, c), (4 * c,), (c,), (c,), (c, c), (c,), (c, c), (c,)
    check_shapes(("pair", pair, (B, S, S, c)), ("mask", mask, (B, S), (B, S, S)),
                 ("drop", drop, (B, 1, S, c), (B, S, 1, c)), ("residual", residual, (B, S, S, c)),
                 *zip(PARAMETERS, weights, sizes, strict=True))


def triangle_multiplication(pair, norm_weight, norm_bias, in_weight, in_bias, center_weight, center_bias,
                            out_weight, out_bias, gate_weight, gate_bias, mask=None, outgoing=True, eps=1e-5,
                            residual=None, drop=None, again=False):
    """The update of pair (B, S, S, c), or residual + drop * update; see the formula above.

    in_weight (4 c, c), in_bias: left, right, left gate, right gate; out_weight, gate_weight (c, c); biases of
    projections may be None. mask (B, S), 0 = missing, takes residues out of the sum; a mask (B, S, S)
    multiplies both sides. residual: pair itself or a tensor like it; drop (B, 1, S, c) or (B, S, 1, c):
    factors. No gradients for mask and drop, no second derivatives. ValueError for what the kernels cannot
    take.
    """
    weights = [norm_weight, norm_bias, in_weight, in_bias, center_weight, center_bias, out_weight, out_bias,
               gate_weight, gate_bias]
    check(pair, weights, mask, drop, residual)
    dtype, add = product_dtype(pair), residual is pair
    for n, w in enumerate(weights):  # LayerNorms compute in float32 anyway
        weights[n] = None if w is None else (w if n in (0, 1, 4, 5) else w.to(dtype)).contiguous()
    mask, drop = (None if t is None else t.to(dtype).contiguous() for t in (mask, drop))
    residual = None if add or residual is None else residual.contiguous()
    return TriangleMultiplication.apply(pair.contiguous(), mask, drop, residual, add, outgoing, eps,
                                        torch.is_grad_enabled(), again, *weights)


def triangle_multiplicative_update(x, direction="outgoing", mask=None, norm_in_weight=None, norm_in_bias=None,
                                   p_in_weight=None, p_in_bias=None, g_in_weight=None, g_in_bias=None,
                                   norm_out_weight=None, norm_out_bias=None, p_out_weight=None,
                                   p_out_bias=None, g_out_weight=None, g_out_bias=None, eps=1e-5):
    """cuEquivariance's function of this name: the update of x (B, N, N, D) or (N, N, D), without residual.

    mask (B, N, N) or (N, N), 1 = present; p_in_weight, g_in_weight (2 D, D): left, then right; p_out_weight,
    g_out_weight (D, D); biases (2 D,) and (D,). Norms default to 1 and 0, biases of projections to none.
    Weights of projections must be given: there they would be drawn at random. ValueError for what the kernels
    cannot take; nothing falls back unseen.
    """
    for name, value in dict(p_in_weight=p_in_weight, g_in_weight=g_in_weight, p_out_weight=p_out_weight,
                            g_out_weight=g_out_weight).items():
        if value is None:
            raise ValueError(f"{name} is missing")
    if direction not in ("outgoing", "incoming"):
        raise ValueError(f"direction is {direction!r}, but must be 'outgoing' or 'incoming'")
    pair, c = x if x.dim() == 4 else x[None], x.shape[-1]
    mask = None if mask is None else mask.expand(pair.shape[:3])
    one, zero = x.new_ones(c), x.new_zeros(c)
    in_bias = None
    if p_in_bias is not None or g_in_bias is not None:
        in_bias = torch.cat([x.new_zeros(2 * c) if b is None else b for b in (p_in_bias, g_in_bias)])
    norms = [default if given is None else given for default, given in (
        (one, norm_in_weight), (zero, norm_in_bias), (one, norm_out_weight), (zero, norm_out_bias))]
    out = triangle_multiplication(
        pair, *norms[:2], torch.cat([p_in_weight, g_in_weight]), in_bias, *norms[2:], p_out_weight,
        p_out_bias, g_out_weight, g_out_bias, mask, direction == "outgoing", eps)
    return out.view(x.shape)
