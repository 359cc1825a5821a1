"""The launches of attention: triangles', MSA rows' and columns', rows that share one bias, with a gate.

    out = softmax(q k^T scale + bias + key_bias) v * sigmoid(gate + gate_bias)

Letters: B samples, R rows, H heads, L length of a row, D head width; LP is L rounded up to whole tiles. A
bias tile is loaded once for RU rows side by side. The bias, with a key mask that all rows share, is one
padded tensor. It holds PADDING beyond L, so that no kernel masks a score. The gradients of k and v read its
transpose. Scores are never written; ds, their gradients, may be.

Backward begins with the gate: do = dout sigmoid(.) and delta = rowsum(do o) = rowsum(dout out), so that o
itself is never stored. Behind an output projection that is one kernel with the projection's backward
(output_backward.py). The gradient of the bias is the sum of ds over rows. How backward goes on:

* up to longest_short() keys: one kernel, of whole rows, which also stores ds;
* beyond: three kernels that recompute scores. One for dq; one for dk and dv; one for the bias, whose programs
  own a tile, sum a share of the rows in registers and store the partial sum once;
* or two kernels, where the tuner has found that it pays and a program can own all keys. One for dk and dv,
  which stores ds; one for dq and the bias from ds. They take rounds of as many rows as ds has memory for.

bias_gradient.py then adds up the partial sums of the bias. Nothing is added atomically: every run gives
the same bits.

Sources: Dao et al. 2022 (arXiv:2205.14135) for attention in tiles; AlphaFold 2 supplement, Alg. 7, 8, 13, 14.
"""
import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from evoformer_kernels import tuner
from evoformer_kernels.attention import bias_gradient, kernels, output_backward
from evoformer_kernels.attention import padded_bias as padding
from evoformer_kernels.attention.layout import as_rows, check, strides, views, with_gate
from evoformer_kernels.attention.padded_bias import HOLD_PADDING
from evoformer_kernels.attention.tile_candidates import CANDIDATES, STORED
from evoformer_kernels.common import bind, cdiv, operation, padded_width, products_in_registers
from evoformer_kernels.family import Plan, aligned
from evoformer_kernels.reductions import sums

BLIND = ("attention_gate_backward_kernel", "attention_backward_bias_kernel", "attention_backward",
         "attention_backward_scores_kernel")  # all the same to them whether there is a bias, or it always is
GATING = "attention_forward_kernel"  # with the gate in it
AND_STORES = " stored"  # kind of the kernel for dk and dv that stores ds
TALLEST = 128  # positions of a tile, at most; within one, offsets have 32 bits
SHORT = 64  # keys that one tile holds, at most; half as many where registers hold operands of products
PROGRAMS = 512  # that sums over rows are spread over, at most: about four for each processor of a large GPU,
# which have room there
WIDEST_SUM = 256  # keys of which a program can sum gradients of scores; of twice as many it wins nothing
MOST_SCORES = 256 << 20  # bytes of ds of short rows; where it is more they are added up in rounds of rows


def padded_length(length):
    """LP: a multiple of every tile that the kernels use at this length."""
    return cdiv(length, 128) * 128 if length > SHORT else max(16, triton.next_power_of_2(length))


@torch.compiler.assume_constant_result
def longest_short():
    """Keys up to which backward takes whole rows."""
    return SHORT // 2 if products_in_registers() else SHORT


class Sizes:
    """What follows from sizes alone: of q, (B, R, H, L, D), and its dtype."""

    biased = gated = False  # whether there is a bias and a gate

    def __init__(self, size, dtype):
        self.B, self.R, self.H, self.L, self.D = size
        self.dtype, self.short = dtype, self.L <= longest_short()
        self.LP, self.BD = padded_length(self.L), padded_width(self.D)
        self.shape = tuner.class_of(dtype, L=self.L, D=self.BD)
        self.short_rounds = self.rounds(MOST_SCORES) if self.short else None
        # Whether ds of all short rows fits MOST_SCORES: each row's is then one of the partial sums.
        self.dscores_are_sums = self.short and len(self.short_rounds) == 1

    def fitted(self, config):
        """The tuner's configuration for rows that may be shorter than its tiles, with what else
        is constant: WHOLE_TILES and BD."""
        config = {key: min(value, self.LP) if key in ("BM", "BN") else value for key, value in config.items()}
        tiles = [config[key] for key in ("BM", "BN") if key in config]
        if self.L <= SHORT:  # a warp takes 16 rows of a tile; more warps would all do the same
            height = tiles[-1] if tiles and tiles[-1] > tiles[0] else min(tiles, default=self.LP)
            config["num_warps"] = max(1, min(config["num_warps"], height // 16))
        whole = self.D == self.BD and all(self.L % tile == 0 for tile in tiles or [self.LP])
        return dict(config, WHOLE_TILES=whole, BD=self.BD)

    def shares(self, stored=0):
        """How many shares rows are dealt into, each summed by a program of its own for a tile of the bias.

        stored: whether from ds, by tiles of 64 queries and all keys. In all these are a quarter of PROGRAMS:
        fewer partial sums to add up.
        """
        tiles = 4 * cdiv(self.L, 64) if stored else cdiv(self.L, 64) ** 2
        return cdiv(self.R, cdiv(self.R, max(1, PROGRAMS // (self.B * self.H * tiles))))

    def rounds(self, most):
        """[(first_row, end_row)] of rows whose ds has at most so many bytes."""
        rows = max(1, most // (self.B * self.H * self.LP ** 2 * self.dtype.itemsize))
        return [(first, min(first + rows, self.R)) for first in range(0, self.R, rows)]

    def new_dscores(self, like, first_row, end_row):
        """Memory for ds of these rows."""
        return like.new_empty(end_row - first_row, self.B, self.H, self.LP, self.LP)

    @cached_property
    def bias_sum_count(self):
        """How many partial sums of the bias's gradient backward makes with the tuner's choice."""
        if self.short:
            return self.R if self.dscores_are_sums else len(self.short_rounds)
        return self.shares(tuner.chosen(*self.looked_up("attention_backward"))["STORED"])

    def grid(self, config):
        """(tiles of queries, heads of all samples, groups of rows)."""
        return (cdiv(self.L, config["BM"]), self.B * self.H,
                cdiv(self.R, config.get("RU", 1)))

    def programs(self, grid):
        """How many programs of the gate's kernel store partial sums: those of one head."""
        return math.prod(grid) // self.H

    def looked_up(self, name):
        """What the tuner goes by: a kernel's name and kind, the class of its arguments, its candidates."""
        if name == "attention_backward":
            tiles = STORED[:1] if self.LP > WIDEST_SUM else STORED
        else:
            tiles = CANDIDATES[name.removesuffix(AND_STORES)]
            if self.BD > (32 if self.short else 64):  # whose tiles, loaded ahead, are more than 64 KB
                tiles = [dict(tiles[0], num_stages=1), *tiles]
        words = [self.shape, f"R{triton.next_power_of_2(self.R)}"]
        words += ["bias"] * (self.biased and name not in BLIND) + ["gate"] * (self.gated and name == GATING)
        return name, " ".join(words), tiles


@sums.constant
def gate_sum_count(B, R, H, L, D, dtype):
    """How many partial sums of the gate bias's gradient backward makes with the tuner's choice."""
    sizes = Sizes((B, R, H, L, D), dtype)
    config = tuner.chosen(*sizes.looked_up("attention_gate_backward_kernel"))
    return sizes.programs(sizes.grid(sizes.fitted(config)))


class Inputs(NamedTuple):
    """The tensors of attention: q alone is all of qkvg, packed."""
    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None  # (c,)
    bias: Tensor | None = None  # (B, H, L, L) or (B, 1, H, L, L); in backward as kernels read it
    # (B, L) of all rows, (B, R, L) or (B, R, 1, 1, L), B and R may be 1; in backward key_bias (B, R, LP)
    key_mask: Tensor | None = None

    @classmethod
    def of(cls, qkvg, **others):
        """From [packed] or [q, k, v] or [q, k, v, gate]."""
        return cls(**dict(zip("qkv", qkvg, strict=False)), gate=qkvg[3] if len(qkvg) > 3 else None, **others)


class Settings(NamedTuple):
    heads: int
    axis: int  # 1 or 2, or 0 where q, k and v are (B, R, H, L, D)
    scale: float
    lift: bool = False  # whether a bias may be below MASKED, or lie in another order than its shape has
    learns: bool = False  # whether there may be a backward


class Kept(NamedTuple):
    """What forward leaves for backward beside its inputs. bias is padded, None where it is read as it is,
    because the Function keeps the input then; its
    transpose None where backward does not read that; key_bias None where nothing is added for keys."""
    out: Tensor
    lse: Tensor
    bias: Tensor | None
    bias_transposed: Tensor | None
    key_bias: Tensor | None


class Behind(NamedTuple):
    """The output projection behind attention, and factors of dropout, which broadcast to its result. With it
    the gradient that backward begins with is that of its result."""
    weight: Tensor | None = None  # (c, c)
    bias: Tensor | None = None  # (c,)
    drop: Tensor | None = None


class Gradients(NamedTuple):
    """Of Inputs, and what is still to be added up: partial sums of the gate bias's gradient (programs, H, D)
    and of the projection's bias (programs, c), and du, the gradient behind the dropout."""
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gate: Tensor | None
    bias: Tensor | None
    gate_bias_sums: Tensor | None
    du: Tensor | None
    out_bias_sums: Tensor | None


class Read(NamedTuple):
    """How kernels read what is added to scores."""
    folds: bool  # the key mask goes into the bias
    as_it_is: bool  # the bias needs no padding
    for_keys: bool  # something is added to scores by key
    transposed: bool  # backward reads a transpose of the bias


def how_read(inputs, length, settings):
    """Read, from what the Function and the plan both know."""
    biased, mask = inputs.bias is not None, inputs.key_mask
    folds = biased and mask is not None and mask.dim() == 2
    exact = padded_length(length) == length
    as_it_is = biased and not folds and not settings.lift and exact and inputs.bias.dtype in HOLD_PADDING
    for_keys = not folds and (mask is not None or not biased and not exact)
    return Read(folds, as_it_is, for_keys, biased and settings.learns and length > longest_short())


class OfScores(NamedTuple):
    """What the kernels of backward read and write once the gate's has run."""
    qkv: list
    bias: torch.Tensor | None
    bias_transposed: torch.Tensor | None
    saved: tuple  # key_bias, do, lse, delta
    dq: torch.Tensor  # (B, R, H, L, D), as dk and dv
    dk: torch.Tensor
    dv: torch.Tensor
    strides: Callable  # returns those of do and dq, by their names


class AttentionPlan(Sizes, Plan):
    """The launches of attention for Inputs that look alike: sizes, strides, flags."""
    name = "attention"

    def __init__(self, inputs, *settings):
        settings = self.settings = Settings(*settings)
        self.parts = sum(x is not None for x in inputs[:4])  # tensors of qkvg
        Plan.__init__(self, inputs.q)
        q, k, v, gate = with_gate(inputs[:self.parts], settings.heads, settings.axis)
        Sizes.__init__(self, q.shape, q.dtype)
        check(q, k, v, gate)
        # Axes 1 and 2 of a grid end at 65535; offsets within a tile have 32 bits.
        position_stride = max(q.stride(3), gate.stride(3))
        if max(self.B * self.H, self.R) >= 1 << 16 or TALLEST * position_stride >= 1 << 31:
            raise ValueError(f"attention over {tuple(q.shape)} is too large for one launch")
        self.stored = None  # the tuner's choice for backward, once it was asked
        self.read = how_read(inputs, self.L, settings)
        # Numbers of five kernels, behind their tensors and in their order (see run()):
        self.scale, self.sizes = settings.scale, (self.R, self.H, self.L, self.LP, self.D, settings.scale)
        mask = inputs.key_mask if self.read.for_keys else None
        samples, rows = (1, 1) if mask is None else (len(mask), 1 if mask.dim() == 2 else mask.shape[1])
        apart = rows * self.LP if samples > 1 else 0, self.LP if rows > 1 else 0
        self.own_masks = mask is not None and rows == self.R  # whether rows have masks of their own
        self.strides = dict(key_bias_strides=apart, q_strides=strides(q))
        self.flags, self.bias_flag = dict(KEY_BIAS=self.read.for_keys), dict(BIAS=inputs.bias is not None)
        self.biased, self.gated = inputs.bias is not None, settings.axis > 0
        self.gate_flags = dict(GATE=self.gated, GATE_BIAS=self.gated and inputs.gate_bias is not None)

    def added(self, inputs):
        """What is added to scores, as kernels read it: the bias, its transpose and key_bias, or None."""
        bias, mask, transposed, key_bias = inputs.bias, inputs.key_mask, None, None
        if self.read.as_it_is:
            bias = bias.contiguous()
            transposed = bias.mT.contiguous() if self.read.transposed else None
        elif bias is not None:
            dtype = bias.dtype if bias.dtype in HOLD_PADDING else torch.float32
            bias, transposed = padding.launch(bias, mask if self.read.folds else None, self.LP, dtype,
                                              self.read.transposed, self.settings.lift, self.bound)
        if self.read.for_keys:
            mask = inputs.q.new_ones(1, self.L) if mask is None else mask
            mask = mask[:, None] if mask.dim() == 2 else mask
            key_bias = padding.launch_key_bias(mask, self.LP, self.bound)
        return bias, transposed, key_bias

    def forward(self, inputs):
        """Kept; out (B, X, Y, c), or (B, R, H, L, D) for axis 0; lse (B, R, H, L), log2 of the sums of
        exponentials."""
        heads, axis = self.settings[:2]
        q, k, v, gate = with_gate(inputs[:self.parts], heads, axis)
        bias, transposed, key_bias = self.added(inputs)
        out = q.new_empty(q.shape if axis == 0 else (*inputs.q.shape[:3], self.H * self.D))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        self.run(kernels.attention_forward_kernel,
                 (q, k, v, gate, inputs.gate_bias, bias, key_bias, out, lse), self.grid,
                 lambda: dict(self.strides, gate_strides=strides(gate),
                              out_strides=strides(as_rows(out, heads, axis)), **self.gate_flags,
                              **self.bias_flag, **self.flags), self.sizes)
        return Kept(out, lse, None if self.read.as_it_is else bias, transposed, key_bias)

    def backward(self, inputs, kept, behind, gradient, gate_sums, bias_dtype, turned):
        """Gradients. This plan is of inputs with the bias and the key_bias that forward kept. gate_sums: how
        many partial sums there shall be of those; bias_dtype: of the bias's gradient; turned: whether that is
        transposed."""
        out, grads = kept.out, [x.new_empty(x.shape) for x in inputs[:self.parts]]
        gate_bias_sums = None if inputs.gate_bias is None else out.new_empty(
            gate_sums, self.H, self.D, dtype=torch.float32)
        out_bias_sums = None if behind.weight is None else out.new_empty(
            gate_sums, len(behind.weight), dtype=torch.float32)
        du = None if behind.drop is None else out.new_empty(gradient.shape)
        bias_sums = None if inputs.bias is None else out.new_empty(
            (self.bias_sum_count, self.B, self.H, self.LP, self.LP),
            dtype=self.dtype if self.dscores_are_sums else torch.float32)
        made = Gradients(*grads, *[None] * (4 - self.parts), None, gate_bias_sums, du, out_bias_sums)
        if not self.fake:
            self.launch_backward(inputs, kept, behind, gradient, made, bias_sums)
        return made if bias_sums is None else made._replace(bias=bias_gradient.launch(
            bias_sums, self.L, bias_dtype, turned, self.bound))

    def launch_backward(self, inputs, kept, behind, gradient, made, bias_sums):
        """Fill what backward() has made."""
        heads, axis = self.settings[:2]
        *qkv, gate = with_gate(inputs[:self.parts], heads, axis)
        dq, dk, dv, *dgate = views(made[:self.parts], heads, axis)
        dgate, out, lse = (dgate or [dq])[0], kept.out, kept.lse
        delta, do = torch.empty_like(lse), torch.empty_like(out) if axis else gradient
        if behind.weight is None:
            self.run(kernels.attention_gate_backward_kernel,
                     (gate, inputs.gate_bias, out, gradient, dgate, do, delta, made.gate_bias_sums),
                     self.grid, lambda: dict(self.gate_flags, gate_strides=strides(gate),
                                  dgate_strides=strides(dgate),
                                  out_strides=strides(as_rows(out, heads, axis))),
                     (self.R, self.H, self.L, self.D), summed=made.gate_bias_sums is not None)
        else:
            written = output_backward.Results(do, dgate, delta, made.du, made.out_bias_sums,
                                              made.gate_bias_sums)
            output_backward.launch(gradient, behind.weight, behind.drop, out, gate, inputs.gate_bias, written,
                                   axis)
        of_scores = OfScores(
            qkv, inputs.bias, kept.bias_transposed, (kept.key_bias, do, lse, delta), dq, dk, dv,
            lambda: dict(out_strides=strides(as_rows(out, heads, axis)), dq_strides=strides(dq)))
        self.backward_of_scores(of_scores, bias_sums)
        if self.L == 1:
            dq.zero_()
            dk.zero_()
        elif self.own_masks and not self.short:  # whose kernel does it by itself
            self.zero_where_one_key_is(kept.key_bias, dq, dk)

    def backward_of_scores(self, given, bias_sums):
        """dq, dk, dv and the partial sums of the bias, in one of three ways."""
        if self.short:
            short_rows(self, given, bias_sums)
        elif given.bias is None:
            recompute_scores(self, given)
        else:
            def launch(config):
                self.stored = config["STORED"]
                with sums.room(bias_sums, self.shares(self.stored)) as room:
                    if self.stored:
                        store_dscores(self, given, room, self.stored)
                    else:
                        recompute_scores(self, given)
                        sum_bias(self, given, room)
            if self.stored is None:
                tuner.launch(*self.looked_up("attention_backward"), launch)
            else:
                launch(dict(STORED=self.stored))

    def zero_where_one_key_is(self, key_bias, dq, dk):
        """dq and dk = 0 in rows with one key, of masks that rows have for themselves."""
        ready = self.bound.get("one_key") or bind(
            self.bound, "one_key", padding.attention_one_key_kernel, (self.B * self.R,),
            (self.R, self.H, self.L), D=self.D, BD=self.BD, T=min(self.LP, 64),
            key_bias_strides=self.strides["key_bias_strides"], dq_strides=strides(dq))
        ready(key_bias, dq, dk)


def short_rows(plan, given, bias_sums):
    """dq, dk, dv and, with a bias, its partial sums: ds of each row, or the sums of rounds of rows."""
    for number, (first_row, end_row) in enumerate(plan.short_rounds):
        in_place = given.bias is None or plan.dscores_are_sums
        dscores = bias_sums if in_place else plan.new_dscores(given.dq, first_row, end_row)
        plan.run(kernels.attention_backward_short_kernel,
                 (*given.qkv, given.bias, *given.saved, given.dq, given.dk, given.dv, dscores),
                 lambda config, rows=end_row - first_row: (cdiv(rows, config["ROWS"]),
                                                           plan.B * plan.H),
                 lambda: dict(plan.strides, **given.strides(), **plan.bias_flag, **plan.flags, BL=plan.LP),
                 (*plan.sizes, first_row, end_row))
        if not in_place:
            torch.sum(dscores, 0, dtype=torch.float32, out=bias_sums[number])


def key_gradients(plan, given, dscores, first_row, end_row):
    """dk and dv of these rows, and ds where there is memory for it, dscores."""
    stored = dscores is not None
    plan.run(kernels.attention_backward_kv_kernel,
             (*given.qkv, given.bias_transposed, *given.saved, given.dk, given.dv, dscores),
             lambda config: (cdiv(plan.L, config["BN"]), plan.B * plan.H,
                             cdiv(end_row - first_row, config["RU"])),
             lambda: dict(plan.strides, **given.strides(), **plan.bias_flag, **plan.flags, STORE=stored),
             (*plan.sizes, first_row, end_row), kind=AND_STORES if stored else "")


def recompute_scores(plan, given):
    """dq, dk and dv, by two kernels that recompute scores."""
    plan.run(kernels.attention_backward_q_kernel, (*given.qkv, given.bias, *given.saved, given.dq),
             plan.grid, lambda: dict(plan.strides, **given.strides(), **plan.bias_flag, **plan.flags),
             plan.sizes)
    key_gradients(plan, given, None, 0, plan.R)


def sum_bias(plan, given, bias_sums):
    """A partial sum of the bias's gradient for each share of the rows; scores are recomputed."""
    shares = bias_sums.shape[0]
    plan.run(kernels.attention_backward_bias_kernel, (*given.qkv, given.bias, *given.saved, bias_sums),
             lambda config: (cdiv(plan.L, config["BM"]) * cdiv(plan.L, config["BN"]), shares,
                             plan.B * plan.H),
             lambda: dict(plan.strides, out_strides=given.strides()["out_strides"], **plan.flags),
             (*plan.sizes, cdiv(plan.R, shares)))


def store_dscores(plan, given, bias_sums, most):
    """All gradients from stored ds, of which at most so many bytes are there at a time."""
    shares = bias_sums.shape[0]
    for first_row, end_row in plan.rounds(most):
        dscores = plan.new_dscores(given.dq, first_row, end_row)
        key_gradients(plan, given, dscores, first_row, end_row)
        plan.run(kernels.attention_backward_scores_kernel, (given.qkv[1], dscores, given.dq, bias_sums),
                 lambda config: (cdiv(plan.L, config["BM"]), shares, plan.B * plan.H),
                 lambda: dict(q_strides=plan.strides["q_strides"], dq_strides=given.strides()["dq_strides"],
                              LP=plan.LP, NO_PADDING=plan.L == plan.LP and plan.D == plan.BD),
                 (plan.H, plan.L, plan.D, plan.scale, first_row, end_row,
                  cdiv(end_row - first_row, shares)))


def attention_forward(q: Tensor, k: Tensor | None, v: Tensor | None, gate: Tensor | None,
                      gate_bias: Tensor | None, bias: Tensor | None, key_mask: Tensor | None, *, heads: int,
                      axis: int, scale: float, lift: bool, learns: bool) -> list[Tensor]:
    """AttentionPlan.forward(): Inputs and Settings by their names; returns Kept, where None is empty."""
    inputs = Inputs(q, k, v, gate, gate_bias, bias, key_mask)
    return listed(AttentionPlan.of(inputs, heads, axis, scale, lift, learns).forward(inputs), q)


def attention_backward(
        q: Tensor, k: Tensor | None, v: Tensor | None, gate: Tensor | None, gate_bias: Tensor | None,
        bias: Tensor | None, out: Tensor, lse: Tensor, bias_transposed: Tensor | None,
        key_bias: Tensor | None, weight: Tensor | None, drop: Tensor | None, gradient: Tensor, *, heads: int,
        axis: int, scale: float, gate_sums: int, bias_dtype: torch.dtype, turned: bool) -> list[Tensor]:
    """AttentionPlan.backward(): Inputs, Kept, Behind and the rest by their names; bias as it was added.
    Returns Gradients, where None is empty."""
    inputs = Inputs(q, k, v, gate, gate_bias, bias, key_bias)
    return listed(AttentionPlan.of(inputs, heads, axis, scale).backward(
        inputs, Kept(out, lse, bias, bias_transposed, key_bias), Behind(weight, None, drop),
        aligned(gradient), gate_sums, bias_dtype, turned), q)


def listed(tensors, like):
    """An operator's results: no tensor may be None."""
    return [like.new_empty(0) if x is None else x for x in tensors]


FORWARD = operation("attention_forward", attention_forward)
BACKWARD = operation("attention_backward", attention_backward)
