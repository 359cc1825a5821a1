"""Triangle attention, MSA row and column attention: rows that share one bias, with the gate in the epilogue.

    out = softmax(q k^T scale + bias + key mask) v * sigmoid(gate + gate_bias)

Letters: B samples, R rows, H heads, L length of a row, D head width; LP is L rounded up to whole tiles. A
bias tile is loaded once for RU rows side by side. The bias, with a key mask that all rows share, is one
padded tensor. It holds PADDING beyond L, so that no kernel masks a score. The gradients of k and v read its
transpose. Scores are never written; ds, their gradients, may be.

Backward begins with the gate: do = dout sigmoid(.) and delta = rowsum(do o) = rowsum(dout out), so that o
itself is never stored. Behind an output projection that is one kernel with the projection's backward
(output_backward.py). The gradient of the bias is the sum of ds over rows. How backward goes on:

* up to SHORT keys: one kernel, of whole rows, which also stores ds;
* beyond: three kernels that recompute scores. One for dq; one for dk and dv; one for the bias, whose programs
  own a tile, sum a share of the rows in registers and store the partial sum once;
* or two kernels, where the tuner has found that it pays and a program can own all keys. One for dk and dv,
  which stores ds; one for dq and the bias from ds. They take rounds of as many rows as ds has memory for.

bias_gradient.py adds up the partial sums of the bias. Nothing is added atomically: every run gives the same
bits.

Sources: Dao et al. 2022 (arXiv:2205.14135) for attention in tiles; AlphaFold 2 supplement, Alg. 7, 8, 13, 14.
"""
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import is_fake
from fusion_lab.kernels.attention import bias_gradient, kernels, output_backward
from fusion_lab.kernels.attention import padded_bias as padding
from fusion_lab.kernels.attention.layout import as_rows, check, strides, views, with_gate
from fusion_lab.kernels.attention.padded_bias import MASKED, PADDING
from fusion_lab.kernels.attention.tile_candidates import (
    BACKWARD_BIAS,
    BACKWARD_KV,
    BACKWARD_Q,
    BACKWARD_SCORES,
    BACKWARD_SHORT,
    FORWARD,
    GATE,
    STORED,
)
from fusion_lab.kernels.common import (
    bind,
    check_shapes,
    operation,
    padded_width,
    products_in_registers,
)
from fusion_lab.kernels.precision import at_least_float32
from fusion_lab.kernels.reductions import sums

HOLD_PADDING = (torch.bfloat16, torch.float32, torch.float64)  # dtypes; float16 ends at 65504
TUNED_BY_ROWS = ("attention_backward_bias_kernel", "attention_backward")  # their programs pass over rows
TALLEST = 128  # positions of a tile, at most; within one, offsets have 32 bits
SHORT = 64  # keys that one tile holds, at most; half as many where registers hold operands of products
PROGRAMS = 512  # that sums over rows are spread over, at most: about four for each processor of a large GPU,
# which have room there
WIDEST_SUM = 256  # keys of which a program can sum gradients of scores; of twice as many it wins nothing
MOST_SCORES = 256 << 20  # bytes of ds of short rows; where it is more they are added up in rounds of rows


def reference(q, k, v, bias=None, keys=None, gate=None, gate_bias=None, scale=None):
    """The same in plain PyTorch.

    q, k, v, gate (B, R, H, L, D); bias (B, H, L, L); keys (B, L) or (B, R, L), 1 = present; gate_bias (H, D).
    """
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
# Launches. layout.py says what `qkvg` and `axis` are. key_mask (B or 1, R or 1, LP) is added to scores.
# --------------------------------------------------------------------------------------------------------


def padded_length(length):
    """LP: a multiple of every tile that the kernels use at this length."""
    return triton.cdiv(length, 128) * 128 if length > SHORT else max(16, triton.next_power_of_2(length))


@torch.compiler.assume_constant_result
def longest_short():
    """Keys up to which backward takes whole rows."""
    return SHORT // 2 if products_in_registers() else SHORT


def reads_transposed_bias(length):
    """Whether there will be a backward, of rows of this length, that reads the transposed bias."""
    return torch.is_grad_enabled() and length > longest_short()


class Sizes:
    """What follows from sizes alone: of q, (B, R, H, L, D), and its dtype."""

    def __init__(self, size, dtype):
        self.B, self.R, self.H, self.L, self.D = size
        self.dtype, self.short = dtype, self.L <= longest_short()
        self.LP, self.BD = padded_length(self.L), padded_width(self.D)
        self.shape = f"{str(dtype)[6:]} L{triton.next_power_of_2(self.L)} D{self.BD}"
        self.short_rounds = self.rounds(MOST_SCORES) if self.short else None

    def fitted(self, config):
        """The tuner's configuration for rows that may be shorter than its tiles, with WHOLE_TILES."""
        config = {key: min(value, self.LP) if key in ("BM", "BN") else value for key, value in config.items()}
        tiles = [config[key] for key in ("BM", "BN") if key in config]
        if self.L <= SHORT:  # a warp takes 16 rows of a tile; more warps would all do the same
            height = tiles[-1] if tiles and tiles[-1] > tiles[0] else min(tiles, default=self.LP)
            config["num_warps"] = max(1, min(config["num_warps"], height // 16))
        whole = self.D == self.BD and all(self.L % tile == 0 for tile in tiles or [self.LP])
        return dict(config, WHOLE_TILES=whole)

    def shares(self, stored=0):
        """How many shares rows are dealt into, each summed by a program of its own for a tile of the bias.

        stored: whether from ds, by tiles of 64 queries and all keys. In all these are a quarter of PROGRAMS:
        fewer partial sums to add up.
        """
        tiles = 4 * triton.cdiv(self.L, 64) if stored else triton.cdiv(self.L, 64) ** 2
        return triton.cdiv(self.R, triton.cdiv(self.R, max(1, PROGRAMS // (self.B * self.H * tiles))))

    def rounds(self, most):
        """[(first_row, end_row)] of rows whose ds has at most so many bytes."""
        rows = max(1, most // (self.B * self.H * self.LP ** 2 * self.dtype.itemsize))
        return [(first, min(first + rows, self.R)) for first in range(0, self.R, rows)]

    def new_dscores(self, like, first_row, end_row):
        """Memory for ds of these rows."""
        return like.new_empty(end_row - first_row, self.B, self.H, self.LP, self.LP)

    def dscores_are_sums(self):
        """Whether ds of all short rows fits MOST_SCORES. Each row's is then one of the partial sums."""
        return self.short and len(self.short_rounds) == 1

    def bias_sum_count(self):
        """How many partial sums of the bias's gradient backward makes with the tuner's choice."""
        if self.short:
            return self.R if self.dscores_are_sums() else len(self.short_rounds)
        return self.shares(tuner.chosen(*self.looked_up("attention_backward", STORED))["STORED"])

    def grid(self, along):
        """(tiles along L, heads of all samples, groups of rows), as a function of a configuration, in which
        `along` is the tile along L."""
        return lambda config: (triton.cdiv(self.L, config[along]), self.B * self.H,
                               triton.cdiv(self.R, config.get("RU", 1)))

    def looked_up(self, name, tiles):
        """What the tuner goes by: a kernel's name, the class of its arguments, its candidates."""
        if name == "attention_backward":
            tiles = tiles[:1] if self.LP > WIDEST_SUM else tiles
        elif self.BD > (32 if self.short else 64):  # whose tiles, loaded ahead, are more than 64 KB
            tiles = [dict(tiles[0], num_stages=1), *tiles]
        rows = f" R{triton.next_power_of_2(self.R)}" if name in TUNED_BY_ROWS else ""
        return name, self.shape + rows, tiles


@sums.constant
def bias_sum_count(B, R, H, L, D, dtype):
    """How many partial sums of the bias's gradient backward makes with the tuner's choice."""
    return Sizes((B, R, H, L, D), dtype).bias_sum_count()


@sums.constant
def gate_sum_count(B, R, H, L, D, dtype):
    """How many partial sums of the gate bias's gradient backward makes with the tuner's choice."""
    sizes = Sizes((B, R, H, L, D), dtype)
    config = tuner.chosen(*sizes.looked_up("attention_gate_backward_kernel", GATE))
    return math.prod(sizes.grid("BM")(sizes.fitted(config))) // H


class Given(NamedTuple):
    """What the kernels of backward read and write once the gate's has run."""
    qkv: list
    bias: torch.Tensor | None
    bias_transposed: torch.Tensor | None
    saved: tuple  # key_mask, do, lse, delta
    dq: torch.Tensor  # (B, R, H, L, D), as dk and dv
    dk: torch.Tensor
    dv: torch.Tensor
    strides: Callable  # returns those of do and dq, by their names


class Launch(Sizes):
    """What the launches of one call share: sizes, strides, flags. Kept, it also keeps them ready (bound)."""

    def __init__(self, qkvg, gate_bias, bias, key_mask, heads, axis, gated, scale):
        self.layout, self.fake = (heads, axis, gated), is_fake(qkvg[0])
        q, k, v, gate = with_gate(qkvg, heads, axis, gated)
        super().__init__(q.shape, q.dtype)
        check(q, k, v, gate)
        # Axes 1 and 2 of a grid end at 65535; offsets within a tile have 32 bits.
        position_stride = max(q.stride(3), gate.stride(3))
        if max(self.B * self.H, self.R) >= 1 << 16 or TALLEST * position_stride >= 1 << 31:
            raise ValueError(f"attention over {tuple(q.shape)} is too large for one launch")
        self.bound, self.stored = {}, None  # stored: the tuner's choice for backward, once it was asked
        self.sizes = (self.R, self.H, self.L, self.LP, self.D, scale)
        shared = (0, 0) if key_mask is None else tuple(
            key_mask.stride(i) if key_mask.shape[i] > 1 else 0 for i in (0, 1))
        self.strides = dict(mask_strides=shared, q_strides=strides(q))
        self.flags = dict(KEYS=key_mask is not None)
        self.bias_flag = dict(BIAS=bias is not None)
        self.gate_flags = dict(GATE=gated, GATE_BIAS=gated and gate_bias is not None)

    def run(self, kernel, tiles, grid, tensors, numbers, options, kind="", summed=False):
        """Launch with the tuner's choice for this kind of the kernel.

        grid: a function of a configuration, or what grid() takes. options: a function that returns them: a
        launch that is kept needs none. summed: the last of the tensors (n, H, D) gets the partial sums that
        the programs store. Nothing for fake tensors.
        """
        if self.fake:
            return None
        name = kernel.__name__ + kind
        if (ready := self.bound.get((name, numbers))) is not None:
            return ready(*tensors)
        grid = self.grid(grid) if isinstance(grid, str) else grid

        def launch(config):
            config = self.fitted(config)
            size = grid(config)
            ready = bind(None if summed else self.bound, (name, numbers), kernel, size, numbers, **options(),
                         BD=self.BD, **config)
            if not summed:
                return ready(*tensors)
            with sums.room(tensors[-1], math.prod(size) // self.H) as room:
                ready(*tensors[:-1], room)
        return tuner.launch(*self.looked_up(name, tiles), launch)

    def forward(self, qkvg, gate_bias, bias, key_mask):
        """out (B, X, Y, c), or (B, R, H, L, D) for axis 0; lse (B, R, H, L), log2 of the sums of
        exponentials."""
        (heads, axis, _), (q, k, v, gate) = self.layout, with_gate(qkvg, *self.layout)
        out = q.new_empty(q.shape if axis == 0 else (*qkvg[0].shape[:3], self.H * self.D))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        self.run(kernels.attention_forward_kernel, FORWARD, "BM",
                 (q, k, v, gate, gate_bias, bias, key_mask, out, lse), self.sizes,
                 lambda: dict(self.strides, gate_strides=strides(gate),
                              out_strides=strides(as_rows(out, heads, axis)), **self.gate_flags,
                              **self.bias_flag, **self.flags))
        return out, lse

    def backward(self, qkvg, gate_bias, bias, bias_transposed, key_mask, out, lse, gradient, weight, drop,
                 bias_sums, gate_bias_sums):
        """Gradients, in a list: those of qkvg, each as its tensor lies, and what is still to be added up.

        These are so many (bias_sums, B, H, LP, LP) partial sums of the bias's gradient, for bias_gradient.py;
        so many (gate_bias_sums, H, D) of the gate bias's; du, and (gate_bias_sums, c) of the gradient of the
        projection's bias. Partial sums are float32, unless they are ds. What is not there is empty.
        gradient: of the result or, with a weight, of its projection (output_backward.py).
        """
        heads, axis, gated = self.layout
        *qkv, gate = with_gate(qkvg, *self.layout)
        results = *grads, bias_sums, gate_bias_sums, du, out_bias_sums = [
            *(x.new_empty(x.shape) for x in qkvg),
            out.new_empty((bias_sums, self.B, self.H, self.LP, self.LP) if bias is not None else 0,
                          dtype=self.dtype if self.dscores_are_sums() else torch.float32),
            out.new_empty(gate_bias_sums, self.H, self.D, dtype=torch.float32),
            out.new_empty(0 if drop is None else gradient.shape),
            out.new_empty(0 if weight is None else (gate_bias_sums, len(weight)), dtype=torch.float32)]
        if self.fake:
            return results
        dq, dk, dv, *dgate = views(grads, *self.layout)
        dgate = (dgate or [dq])[0]
        delta, do = torch.empty_like(lse), torch.empty_like(out) if gated else gradient
        if weight is None:
            summed = gate_bias is not None
            self.run(kernels.attention_gate_backward_kernel, GATE, "BM",
                     (gate, gate_bias, out, gradient, dgate, do, delta, gate_bias_sums if summed else None),
                     (self.R, self.H, self.L, self.D),
                     lambda: dict(self.gate_flags, gate_strides=strides(gate), dgate_strides=strides(dgate),
                                  out_strides=strides(as_rows(out, heads, axis))), summed=summed)
        else:
            output_backward.launch(gradient, weight, drop, out, gate, gate_bias, do, dgate, delta, du,
                                   out_bias_sums, gate_bias_sums, axis)
        given = Given(qkv, bias, bias_transposed, (key_mask, do, lse, delta), dq, dk, dv,
                      lambda: dict(out_strides=strides(as_rows(out, heads, axis)), dq_strides=strides(dq)))
        if self.short:
            short_rows(self, given, bias_sums)
        elif bias is None:
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
                tuner.launch(*self.looked_up("attention_backward", STORED), launch)
            else:
                launch(dict(STORED=self.stored))
        if self.L == 1:
            dq.zero_(), dk.zero_()
        elif key_mask is not None and key_mask.shape[1] == self.R:
            self.zero_where_one_key_is(key_mask, dq, dk)
        return results

    def zero_where_one_key_is(self, key_mask, dq, dk):
        """dq and dk = 0 in rows with one key, of masks that rows have for themselves."""
        kernel, name = padding.attention_one_key_kernel, (padding.attention_one_key_kernel.__name__, ())
        ready = self.bound.get(name) or bind(
            self.bound, name, kernel, (self.B * self.R,), (self.R, self.H, self.L), D=self.D, BD=self.BD,
            T=min(self.LP, 64), mask_strides=self.strides["mask_strides"], dq_strides=strides(dq))
        ready(key_mask, dq, dk)


def short_rows(call, given, bias_sums):
    """dq, dk, dv and, with a bias, its partial sums: ds of each row, or the sums of rounds of rows."""
    for number, (first_row, end_row) in enumerate(call.short_rounds):
        in_place = given.bias is None or call.dscores_are_sums()
        dscores = bias_sums if in_place else call.new_dscores(given.dq, first_row, end_row)
        call.run(kernels.attention_backward_short_kernel, BACKWARD_SHORT,
                 lambda config, rows=end_row - first_row: (triton.cdiv(rows, config["ROWS"]),
                                                           call.B * call.H),
                 (*given.qkv, given.bias, *given.saved, given.dq, given.dk, given.dv, dscores),
                 (*call.sizes, first_row, end_row),
                 lambda: dict(call.strides, **given.strides(), **call.bias_flag, **call.flags, BL=call.LP))
        if not in_place:
            torch.sum(dscores, 0, dtype=torch.float32, out=bias_sums[number])


def key_gradients(call, given, dscores, first_row, end_row):
    """dk and dv of these rows, and ds where there is memory for it, dscores."""
    stored = dscores is not None
    call.run(kernels.attention_backward_kv_kernel, BACKWARD_KV,
             lambda config: (triton.cdiv(call.L, config["BN"]), call.B * call.H,
                             triton.cdiv(end_row - first_row, config["RU"])),
             (*given.qkv, given.bias_transposed, *given.saved, given.dk, given.dv, dscores),
             (*call.sizes, first_row, end_row),
             lambda: dict(call.strides, **given.strides(), **call.bias_flag, **call.flags, STORE=stored),
             kind=" stored" if stored else "")


def recompute_scores(call, given):
    """dq, dk and dv, by two kernels that recompute scores."""
    call.run(kernels.attention_backward_q_kernel, BACKWARD_Q, "BM",
             (*given.qkv, given.bias, *given.saved, given.dq), call.sizes,
             lambda: dict(call.strides, **given.strides(), **call.bias_flag, **call.flags))
    key_gradients(call, given, None, 0, call.R)


def sum_bias(call, given, bias_sums):
    """A partial sum of the bias's gradient for each share of the rows; scores are recomputed."""
    shares = len(bias_sums)
    call.run(kernels.attention_backward_bias_kernel, BACKWARD_BIAS,
             lambda config: (triton.cdiv(call.L, config["BM"]) * triton.cdiv(call.L, config["BN"]), shares,
                             call.B * call.H),
             (*given.qkv, given.bias, *given.saved, bias_sums),
             (*call.sizes, triton.cdiv(call.R, shares)),
             lambda: dict(call.strides, out_strides=given.strides()["out_strides"], **call.flags))


def store_dscores(call, given, bias_sums, most):
    """All gradients from stored ds, of which at most so many bytes are there at a time."""
    shares = len(bias_sums)
    for first_row, end_row in call.rounds(most):
        dscores = call.new_dscores(given.dq, first_row, end_row)
        key_gradients(call, given, dscores, first_row, end_row)
        call.run(kernels.attention_backward_scores_kernel, BACKWARD_SCORES,
                 lambda config: (triton.cdiv(call.L, config["BM"]), shares, call.B * call.H),
                 (given.qkv[1], dscores, given.dq, bias_sums),
                 (call.H, call.L, call.D, call.sizes[-1], first_row, end_row,
                  triton.cdiv(end_row - first_row, shares)),
                 lambda: dict(q_strides=call.strides["q_strides"], dq_strides=given.strides()["dq_strides"],
                              LP=call.LP, NO_PADDING=call.L == call.LP and call.D == call.BD))


def attention_forward(qkvg: list[Tensor], gate_bias: Tensor | None, bias: Tensor | None,
                      key_mask: Tensor | None, heads: int, axis: int, gated: bool,
                      scale: float) -> tuple[Tensor, Tensor]:
    """Launch.forward() as an operator."""
    return Launch(qkvg, gate_bias, bias, key_mask, heads, axis, gated, scale).forward(
        qkvg, gate_bias, bias, key_mask)


def attention_backward(qkvg: list[Tensor], gate_bias: Tensor | None, bias: Tensor | None,
                       bias_transposed: Tensor | None, key_mask: Tensor | None, out: Tensor, lse: Tensor,
                       gradient: Tensor, weight: Tensor | None, drop: Tensor | None, heads: int, axis: int,
                       gated: bool, scale: float, bias_sums: int, gate_bias_sums: int) -> list[Tensor]:
    """Launch.backward() as an operator."""
    return Launch(qkvg, gate_bias, bias, key_mask, heads, axis, gated, scale).backward(
        qkvg, gate_bias, bias, bias_transposed, key_mask, out, lse, gradient, weight, drop, bias_sums,
        gate_bias_sums)


FORWARD_OP = operation("attention_forward", attention_forward)
BACKWARD_OP = operation("attention_backward", attention_backward)


class BiasedAttention(torch.autograd.Function):
    """Attention with its derivative; saves qkvg, the output, lse and the padded bias."""

    @staticmethod
    def forward(ctx, bias, keys, gate_bias, heads, axis, gated, scale, transpose, *qkvg):
        ctx.settings = heads, axis, gated, scale
        *sizes, width = views(qkvg, heads, axis, gated)[0].shape
        check_shapes(("gate_bias", gate_bias, (sizes[2] * width,)))
        padded, transposed, key_mask = padded_bias(bias, keys, qkvg[0], sizes, transpose)
        out, lse = FORWARD_OP(qkvg, gate_bias, padded, key_mask, *ctx.settings)
        ctx.save_for_backward(bias, gate_bias, padded, transposed, key_mask, out, lse, *qkvg)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        bias, gate_bias, padded, transposed, key_mask, out, lse, *qkvg = ctx.saved_tensors
        q = views(qkvg, *ctx.settings[:3])[0]
        *grads, bias_sums, gate_bias_sums, _, _ = BACKWARD_OP(
            qkvg, gate_bias, padded, transposed, key_mask, out, lse, gradient.contiguous(), None, None,
            *ctx.settings, 0 if bias is None else bias_sum_count(*q.shape, q.dtype),
            0 if gate_bias is None else gate_sum_count(*q.shape, q.dtype))
        dbias = dgate_bias = None
        if bias is not None:
            dbias = bias_gradient.OP(bias_sums, bias.shape[-1], bias.dtype, False)
        if gate_bias is not None:
            dgate_bias = sums.OP(gate_bias_sums, gate_bias.dtype).view(gate_bias.shape)
        return dbias, None, dgate_bias, *[None] * 5, *grads


def padded_bias(bias, keys, like, sizes, transpose):
    """What the kernels add to scores: (bias (B, H, LP, LP), its transpose, key_mask (B or 1, R or 1, LP)).

    bias (B, H, L, L) or None; keys (B, L) or (B, R, L), 1 = present, whose B and R may be 1, or None; like: a
    tensor of the same device; sizes: B, R, H, L; transpose: whether the transpose is needed. What is not
    needed is None. A key mask that all rows share goes into the bias, if there is one.
    """
    samples, rows, heads, length = sizes
    check_shapes(("bias", bias, (samples, heads, length, length)),
                 ("keys", keys, (samples, length), (samples, rows, length), (1, length), (1, rows, length),
                  (samples, 1, length), (1, 1, length)))
    transposed, LP = None, padded_length(length)
    if bias is not None:
        dtype = bias.dtype if bias.dtype in HOLD_PADDING else torch.float32
        shared = None
        if keys is not None and keys.dim() == 2:
            shared, keys = keys, None
        if shared is None and LP == length:
            bias = bias.to(dtype)  # which often is one of these two already
            bias, transposed = bias.contiguous(), bias.mT.contiguous() if transpose else None
        else:
            bias, transposed = padding.OP(bias, shared, LP, dtype, transpose)
            transposed = transposed if transpose else None
    elif keys is None and LP > length:
        keys = like.new_ones(1, length)  # so that there is a mask, with PADDING beyond L
    key_mask = None
    if keys is not None:
        keys = keys[:, None] if keys.dim() == 2 else keys
        key_mask = F.pad((keys.float() - 1) * -MASKED, (0, LP - length), value=PADDING).contiguous()
    return bias, transposed, key_mask


def gated_attention(qkvg, heads, axis, bias=None, keys=None, gate_bias=None):
    """Gated attention along axis 1 or 2 of (B, X, Y, c), a row for each position on the other.

    qkvg: [packed], q, k, v and gate behind each other (B, X, Y, 4 c), or [q, k, v, gate]; bias (B, H, L, L),
    nowhere below -1e9; keys (B, L) or (B, R, L) for each row, 1 = present; gate_bias (c,), added to the gate.
    Returns (B, X, Y, c). Gradients for all but keys.
    """
    width = qkvg[-1].shape[-1] // (4 if len(qkvg) == 1 else 1) // heads
    length, gate_bias = qkvg[0].shape[axis], None if gate_bias is None else gate_bias.contiguous()
    return BiasedAttention.apply(bias, keys, gate_bias, heads, axis, True, width ** -0.5,
                                 reads_transposed_bias(length), *qkvg)


def row_attention(q, k, v, bias=None, keys=None, scale=None):
    """Attention without a gate for q, k, v (B, R, H, L, D), bias (B, H, L, L), keys (B, L) or (B, R, L).

    A bias below -1e9, or -inf, masks as much as that does, in float16 as much as its lowest number.
    """
    bias = None if bias is None else padding.lifted(bias)
    qkv = [x.contiguous() for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BiasedAttention.apply(bias, keys, None, q.shape[2], 0, False, scale,
                                 reads_transposed_bias(q.shape[3]), *qkv)
