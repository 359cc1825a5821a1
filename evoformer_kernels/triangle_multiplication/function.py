"""AlphaFold 2's triangle multiplication (supplement, Alg. 11, 12) as Triton kernels round a batched GEMM.

    x = LN(pair);  side = (x W^T + b) * sigmoid(x G^T + g) * mask    for left and right
    product[i, j] = sum over k of left[i, k] right[j, k]             incoming: left[k, i] right[k, j]
    out = [onto +] drop * (LN(product) Wo^T + bo) * sigmoid(x Wg^T + bg)

Letters: B samples, S residues, c channels, P = B S S positions; SP is S rounded up to 16. What the batched
GEMM multiplies lies channel first, (., B, SP, SP), with zeros beyond S: every row is aligned and every tile
whole. Programs own BM positions of these planes and take BC channels at a time.

Forward, 12 passes over a tensor of pair's size:
    front                   LayerNorm, projections, gates: both sides
    product                 by the BLAS library, or products.py where S is short
    back                    LayerNorm, projection, gate, dropout, what it adds to: out
Backward, 34 passes (33 where S is short, whose two products are one kernel):
    back_backward           the product's gradient
    two products            the sides' gradients
    front_backward          pair's gradient
    two GEMMs               gradients of weights, from what the kernels wrote

Gradients of weights need LN(pair) and LN(product) in memory. So forward writes them, and their readers have
an operand without arithmetic. Backward does not recompute the projection of a side. With
side = value * sigmoid(gate), which is saved, value's gradient is dside sigmoid(gate), and its gate's
dside side (1 - sigmoid(gate)).
Sums over positions are one partial sum a program, so every run gives the same bits.
"""
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evoformer_kernels import tuner
from evoformer_kernels.common import (
    candidates,
    cdiv,
    check_onto,
    check_part,
    check_shapes,
    lines,
    operation,
    shared_dtype,
)
from evoformer_kernels.family import Plan, aligned, once, refuse_transforms
from evoformer_kernels.precision import product_dtype
from evoformer_kernels.reductions import sums
from evoformer_kernels.triangle_multiplication import kernels
from evoformer_kernels.triangle_multiplication import products as triangle_products


class Weights(NamedTuple):
    """Parameters. in_weight, in_bias: of left, right, left gate and right gate, below each other. Biases of
    projections may be None."""
    norm_weight: Tensor  # (c,)
    norm_bias: Tensor  # (c,)
    in_weight: Tensor  # (4 c, c)
    in_bias: Tensor | None  # (4 c,)
    center_weight: Tensor  # (c,)
    center_bias: Tensor  # (c,)
    out_weight: Tensor  # (c, c)
    out_bias: Tensor | None  # (c,)
    gate_weight: Tensor  # (c, c)
    gate_bias: Tensor | None  # (c,)

    def check(self, c):
        """ValueError with what is wrong."""
        check_part("triangle multiplication", self.in_weight, c)
        sizes = (c,), (c,), (4 * c, c), (4 * c,), (c,), (c,), (c, c), (c,), (c, c), (c,)
        check_shapes(*zip(self._fields, self, sizes, strict=True))

    def cast(self, dtype):
        """All contiguous, and in this dtype but those of LayerNorms, which compute in float32 anyway."""
        return Weights(*[w if w is None else (w if name in NORMS else w.to(dtype)).contiguous()
                         for name, w in zip(self._fields, self, strict=True)])

    def of_sums(self):
        """Those whose gradients are sums over positions, which kernels leave as partial sums."""
        return [w for name, w in zip(self._fields, self, strict=True)
                if name.endswith("bias") or name in NORMS]


NORMS = ("norm_weight", "norm_bias", "center_weight", "center_bias")

# BM positions and BC channels of a tile. The first of each needs no more than any GPU has; the tuner chooses
# (tuner.py).
TILES = ("BM", "BC", "num_warps", "num_stages")
FRONT = candidates(TILES, (32, 32, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2),
                   (128, 64, 8, 2), (128, 64, 8, 3))
BACK = candidates(TILES, (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 32, 8, 3),
                  (128, 64, 8, 2))
BACK_BACKWARD = candidates(TILES, (64, 32, 4, 2), (32, 32, 4, 2), (64, 16, 4, 2), (64, 32, 4, 3),
                           (128, 16, 8, 2), (128, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2), (32, 64, 4, 3))
FRONT_BACKWARD = candidates(TILES, (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2))
WIDE = candidates(TILES, (32, 64, 4, 2))  # of that above 128 channels, where it becomes 16 positions
SUMMING = "triangle_multiplication_front_backward_kernel", "triangle_multiplication_back_backward_kernel"
CANDIDATES = dict(triangle_multiplication_front_kernel=FRONT, triangle_multiplication_back_kernel=BACK,
                  triangle_multiplication_back_backward_kernel=BACK_BACKWARD,
                  triangle_multiplication_front_backward_kernel=FRONT_BACKWARD)



def reference(pair, weights, mask=None, outgoing=True, eps=1e-5, onto=None, drop=None):
    """The same in plain PyTorch; arguments as in triangle_multiplication()."""
    c, w = pair.shape[-1], Weights(*weights)
    x = F.layer_norm(pair, (c,), w.norm_weight, w.norm_bias, eps)
    left, right, left_gate, right_gate = F.linear(x, w.in_weight, w.in_bias).chunk(4, dim=-1)
    left, right = left * left_gate.sigmoid(), right * right_gate.sigmoid()
    if mask is not None:
        keep = mask.to(left.dtype)[..., None]
        if mask.dim() == 3:
            left, right = left * keep, right * keep
        else:
            left = left * (keep[:, None] if outgoing else keep[:, :, None])
    product = torch.einsum("bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc", left, right)
    product = F.layer_norm(product, product.shape[-1:], w.center_weight, w.center_bias, eps)
    update = F.linear(product, w.out_weight, w.out_bias) * F.linear(x, w.gate_weight, w.gate_bias).sigmoid()
    update = update if drop is None else update * drop
    return update if onto is None else onto + update


def padded(S):
    """SP: 16 numbers of 16 bits are 32 bytes, so that every row of a plane is aligned."""
    return cdiv(S, 16) * 16


def looked_up(name, S, C, dtype):
    """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
    wide = C > 128 and name == "triangle_multiplication_front_backward_kernel"
    return name, tuner.class_of(dtype, C=C, S=S), WIDE if wide else CANDIDATES[name]


def fitted(config, C):
    """The configuration, with smaller tiles above 128 channels, and no more channels than there are; at least
    16, which is the least that a product takes."""
    wider = max(1, C // 128)  # tiles hold all channels of a position: twice as many, half the positions
    return {**config, "BM": max(16, config["BM"] // wider), "BC": max(16, min(C, config["BC"] // wider))}


@sums.constant
def programs(name, B, S, C, dtype):
    """How many programs a kernel has with the tuner's choice."""
    config = fitted(tuner.chosen(*looked_up(name, S, C, dtype)), C)
    return B * padded(S) ** 2 // config["BM"]


class Inputs(NamedTuple):
    """The tensors of an operator, without weights. after: what has to be there before backward recomputes
    (see projections.norm_project()); out is empty then."""
    pair: Tensor
    mask: Tensor | None
    drop: Tensor | None
    onto: Tensor | None = None
    after: Tensor | None = None


class Kept(NamedTuple):
    """What forward leaves for backward, without out: see MultiplicationPlan.forward()."""
    statistics: Tensor
    normed: Tensor
    normed_product: Tensor
    product: Tensor
    sides: Tensor


class Settings(NamedTuple):
    """save: whether there will be a backward, for forward; adds: whether the update is added to pair, for
    backward."""
    outgoing: bool
    eps: float = 0.0
    save: bool = False
    adds: bool = False


class MultiplicationPlan(Plan):
    """The launches of triangle multiplication for Inputs and Weights, one behind the other, that look alike:
    sizes, strides, flags, each a group of keywords."""
    name = "triangle multiplication"

    def __init__(self, tensors, *settings):
        (pair, mask, drop, *_), weights = Inputs(*tensors[:INPUTS]), Weights(*tensors[INPUTS:])
        super().__init__(pair)
        settings = self.settings = Settings(*settings)
        self.B, self.S, _, self.C = pair.shape
        self.SP, self.dtype, self.outgoing = padded(self.S), weights.in_weight.dtype, settings.outgoing
        self.P, self.positions = self.B * self.S * self.S, self.B * self.SP * self.SP
        if self.positions >= 1 << 31:  # a program counts positions in 32 bits
            raise ValueError(f"{tuple(pair.shape)} are too many positions for one launch")
        self.biases = {name.upper(): getattr(weights, name) is not None
                       for name in ("in_bias", "out_bias", "gate_bias")}
        self.new = partial(torch.empty, dtype=self.dtype, device=pair.device)  # room for a tensor
        self.mask = dict(named_strides("mask", mask_strides(mask, self.outgoing)), MASK=mask is not None,
                         MASK_BOTH=mask is not None and mask.dim() == 3)
        strides = (0, 0, 0) if drop is None else drop.expand(pair.shape).stride()
        self.drop = dict(named_strides("drop", strides), DROP=drop is not None)
        self.sizes = dict(S=self.S, SP=self.SP, channel_stride=self.positions)
        self.flags = dict(C=self.C, NO_PADDING=self.S == self.SP)

    def looked_up(self, name):
        return looked_up(name, self.S, self.C, self.dtype)

    def fitted(self, config):
        config = fitted(config, self.C)
        return dict(config, LINES=lines(self.S, self.S, config["BM"]) if self.S == self.SP else 0)

    def grid(self, config):
        return (self.positions // config["BM"],)

    def result(self, pair, onto, exists):
        """Room for out, or for nothing."""
        return pair.new_empty(pair.shape if exists else 0,
                              dtype=self.dtype if onto is None else onto.dtype)

    def planes(self, number):
        """Room for so many tensors of C channels, channel first: (number C, B, SP, SP)."""
        return self.new(number * self.C, self.B, self.SP, self.SP)

    def start(self, kernel, tensors, options, summed=False):
        """Plan.run() with the constants that all kernels take, and the biases that this one reads."""
        self.run(kernel, tensors, self.grid, lambda: dict(
            options(), **{flag: there for flag, there in self.biases.items() if flag in kernel.arg_names},
            **self.sizes, **self.flags), summed=summed)

    def forward(self, inputs, weights):
        """[out; for backward statistics, LN(pair), LN(product), the product, both sides].

        LN(product) and the sides are empty unless settings say save; out is, if there is inputs.after."""
        pair, mask, drop, onto, after = inputs
        norm_weight, norm_bias, in_weight, in_bias, *behind = weights
        save, makes_out = self.settings.save, after is None
        normed, sides = self.new(self.P, self.C), self.planes(2)
        statistics = self.new(4, self.positions, dtype=torch.float32)  # mean, 1 / std of pair, of the product
        self.start(kernels.triangle_multiplication_front_kernel,
                   (pair, norm_weight, norm_bias, in_weight, in_bias, mask, sides, normed, statistics),
                   lambda: dict(self.mask, eps=self.settings.eps))
        product = triangle_products.multiply(sides, self.outgoing, self.bound)
        sides = sides if save else self.planes(0)  # their memory may be out's
        out, normed_product = self.result(pair, onto, makes_out), self.new(self.P, self.C * save)
        self.start(kernels.triangle_multiplication_back_kernel,
                   (product, normed, *behind, drop, onto, out, normed_product, statistics[2:]),
                   lambda: dict(self.drop, eps=self.settings.eps, ONTO=onto is not None, SAVE=save,
                                OUT=makes_out))
        return [out, statistics, normed, normed_product, product, sides]

    def backward(self, inputs, weights, kept, gradient, programs):
        """The five results, of P = B S S positions:

            dpair               like pair
            dprojected (P, 5 c) gradients of left, right, their gates and the output gate, before sigmoids
            dout (P, c)         gradient of the output projection's result
            front_sums          (programs, 6 c) partial sums: norm_weight's, norm_bias's, in_bias's
            back_sums           (programs, 4 c): center_weight's, center_bias's, out_bias's, gate_bias's

        programs: how many of both. Products of the (P, .) are left to the caller, where torch.compile sees
        them; so those outlive their use here."""
        (pair, mask, drop, *_), (statistics, normed, normed_product, product, sides) = inputs, kept
        norm_weight, _, in_weight, in_bias, center_weight, _, *behind = weights
        dpair, dprojected = pair.new_empty(pair.shape), self.new(self.P, 5 * self.C)
        dout, dproduct = self.new(self.P, self.C), self.planes(1)
        front_sums, back_sums = [self.new(count, width * self.C, dtype=torch.float32)
                                 for count, width in zip(programs, (6, 4), strict=True)]
        self.start(kernels.triangle_multiplication_back_backward_kernel,
                   (product, normed, normed_product, center_weight, *behind, drop, statistics[2:], gradient,
                    dproduct, dout, dprojected, back_sums), lambda: self.drop, summed=True)
        dsides = triangle_products.multiply_backward(sides, dproduct, self.outgoing, self.bound)
        del dproduct
        self.start(kernels.triangle_multiplication_front_backward_kernel,
                   (pair, normed, norm_weight, behind[2], in_weight, in_bias, mask, sides, dsides,
                    statistics, gradient, dprojected, dpair, front_sums),
                   lambda: dict(self.mask, ADD_GRADIENT=self.settings.adds), summed=True)
        return [dpair, dprojected, dout, front_sums, back_sums]


INPUTS = len(Inputs._fields)


def named_strides(name, strides):
    """The first three strides, of sample b, row i and column j, by the names that kernels give them."""
    return {f"{name}_stride_{axis}": stride for axis, stride in zip("bij", strides, strict=False)}


def mask_strides(mask, outgoing):
    """For sample, row and column of left. The product sums over its columns; incoming: over its rows."""
    if mask is None:
        return 0, 0, 0
    return mask.stride() if mask.dim() == 3 else (mask.stride(0), *((0, 1) if outgoing else (1, 0)))


def triangle_forward(
        pair: Tensor, mask: Tensor | None, drop: Tensor | None, onto: Tensor | None, after: Tensor | None,
        norm_weight: Tensor, norm_bias: Tensor, in_weight: Tensor, in_bias: Tensor | None,
        center_weight: Tensor, center_bias: Tensor, out_weight: Tensor, out_bias: Tensor | None,
        gate_weight: Tensor, gate_bias: Tensor | None, *, outgoing: bool, eps: float,
        save: bool) -> list[Tensor]:
    """MultiplicationPlan.forward(): Inputs, Weights and Settings by their names."""
    inputs = Inputs(pair, mask, drop, onto, after)
    weights = Weights(norm_weight, norm_bias, in_weight, in_bias, center_weight, center_bias, out_weight,
                      out_bias, gate_weight, gate_bias)
    return MultiplicationPlan.of((*inputs, *weights), outgoing, eps, save).forward(inputs, weights)


def triangle_backward(
        pair: Tensor, mask: Tensor | None, drop: Tensor | None, norm_weight: Tensor, norm_bias: Tensor,
        in_weight: Tensor, in_bias: Tensor | None, center_weight: Tensor, center_bias: Tensor,
        out_weight: Tensor, out_bias: Tensor | None, gate_weight: Tensor, gate_bias: Tensor | None,
        statistics: Tensor, normed: Tensor, normed_product: Tensor, product: Tensor, sides: Tensor,
        gradient: Tensor, *, outgoing: bool, adds: bool, programs: list[int]) -> list[Tensor]:
    """MultiplicationPlan.backward(): Inputs, Weights, Kept and the rest by their names."""
    inputs, kept = Inputs(pair, mask, drop), Kept(statistics, normed, normed_product, product, sides)
    weights = Weights(norm_weight, norm_bias, in_weight, in_bias, center_weight, center_bias, out_weight,
                      out_bias, gate_weight, gate_bias)
    return MultiplicationPlan.of((*inputs, *weights), outgoing, 0.0, False, adds).backward(
        inputs, weights, kept, aligned(gradient), programs)


FORWARD = operation("triangle_forward", triangle_forward)
BACKWARD = operation("triangle_backward", triangle_backward)


class TriangleMultiplication(torch.autograd.Function):
    """triangle_multiplication() with its derivative. Saves pair and, unless recompute, 3 tensors of its size
    and both sides. settings: Settings, recompute."""

    @staticmethod
    def forward(ctx, pair, mask, drop, settings, *weights):
        ctx.settings, recompute = settings
        outgoing, eps, save, adds = ctx.settings
        inputs = Inputs(pair, mask, drop, pair if adds else None)
        out, *kept = FORWARD(*inputs, *weights, outgoing=outgoing, eps=eps, save=save and not recompute)
        ctx.save_for_backward(pair, mask, drop, *([None] * 5 if recompute else kept), *weights)
        return out

    @staticmethod
    @once("triangle multiplication")
    def backward(ctx, gradient):
        pair, mask, drop, *kept = ctx.saved_tensors
        kept, weights = kept[:5], Weights(*kept[5:])
        outgoing, eps, _, adds = ctx.settings
        if kept[0] is None:  # recompute
            _, *kept = FORWARD(pair, mask, None, None, gradient, *weights, outgoing=outgoing, eps=eps,
                               save=True)
        (B, S, _, c), dtype = pair.shape, shared_dtype(weights.of_sums())
        counts = [programs(name, B, S, c, weights.in_weight.dtype) for name in SUMMING]
        dpair, dprojected, dout, *partial_sums = BACKWARD(
            pair, mask, drop, *weights, *kept, gradient, outgoing=outgoing, adds=adds, programs=counts)
        _, normed, normed_product, _, _ = kept
        # Gradients of all weights: two products over positions, and the partial sums added up
        din_weight, dgate_weight = (dprojected.t() @ normed).split([4 * c, c])  # (4 c, c), (c, c)
        dout_weight = dout.t() @ normed_product  # (c, c)
        front, back = [sums.OP(each, dtype) for each in partial_sums]  # (6 c,), (4 c,)
        dnorm_weight, dnorm_bias, din_bias = front.split([c, c, 4 * c])
        dcenter_weight, dcenter_bias, dout_bias, dgate_bias = back.split([c, c, c, c])
        found = Weights(dnorm_weight, dnorm_bias, din_weight, din_bias, dcenter_weight, dcenter_bias,
                        dout_weight, dout_bias, dgate_weight, dgate_bias)
        dweights = [None if w is None else d.to(w.dtype) for d, w in zip(found, weights, strict=True)]
        return dpair, None, None, None, *dweights


def triangle_multiplication(pair, weights, mask=None, outgoing=True, eps=1e-5, onto=None, drop=None,
                            recompute=False):
    """The update of pair (B, S, S, c), or onto + drop * update; see the formula above.

    weights: Weights. mask (B, S), 0 = missing, takes residues out of the sum; a mask (B, S, S) multiplies
    both sides. onto: pair itself, or None; drop (B, 1, S, c) or (B, S, 1, c): factors.
    recompute: save pair alone and run forward once more in backward. No gradients for mask and drop, no
    second derivatives. ValueError for what the kernels cannot take.
    """
    refuse_transforms("triangle multiplication")
    check_onto(onto, pair)
    dtype, (B, S, _, c) = product_dtype(pair), pair.shape
    weights = Weights(*weights).cast(dtype)
    weights.check(c)
    check_shapes(("pair", pair, (B, S, S, c)), ("mask", mask, (B, S), (B, S, S)),
                 ("drop", drop, (B, 1, S, c), (B, S, 1, c)))
    mask, drop = (None if t is None else t.to(dtype).contiguous() for t in (mask, drop))
    settings = Settings(outgoing, eps, torch.is_grad_enabled(), onto is pair)
    return TriangleMultiplication.apply(pair.contiguous(), mask, drop, (settings, recompute), *weights)
