#!/usr/bin/env python3
"""TinyOpenFold V2: AlphaFold 2's Evoformer in one file, with every kernel fusion as a switch.

    python tiny_openfold_v2.py                              # a small first run
    python tiny_openfold_v2.py --demo --disable-all-fusion  # nothing fused
    python tiny_openfold_v2.py --verify-accuracy            # the same numbers?
    python tiny_openfold_v2.py --data DIR                   # your alignments

Read FusedEvoformerBlock first, then the sub-layers above it in the order in which it calls them. Fused and
plain code stand side by side in attend(), in the sub-layers and in PackedProjections, which is in
tiny_openfold/layers/packing.py. What PyTorch cannot show side by side, such as our Triton kernels,
is in tiny_openfold/proteins/fast_evoformer.py.

Letters in shape comments: B samples, N alignment rows, S residues, c_m and c_z channels of `msa` and `pair`,
H heads, D head width, h hidden width of the outer product mean; attention has R rows of length L. "Alg." is
an algorithm of the AlphaFold 2 supplement (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2).
"""
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which `python -I` leaves out
from fusion_lab.training import errors

errors.begin(__name__)  # Ctrl-C is one line, during the imports, too
if __name__ == "__main__":  # an import of this file gives what runs, so there is one set of classes
    sys.modules["tiny_openfold_v2"] = sys.modules["__main__"]

from dataclasses import dataclass

from fusion_lab.training import flags
from fusion_lab.training.options import Checked, ProfilerConfig, Switches, option, shared
from fusion_lab.training.program import Program
from tiny_openfold.layers import kernel_switches
from tiny_openfold.proteins.options import TrainingConfig, arithmetic_of

# --------------------------------------------------------------------------------------------------------
# Configs of model and fusion; each field is a command-line flag
# --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyOpenFoldConfig(Checked):
    """Sizes of the model and of its input."""
    msa_dim: int = option(64, "MSA channels c_m", low=1)
    pair_dim: int = option(128, "pair channels c_z", low=1)
    num_blocks: int = option(4, "Evoformer blocks", low=1)
    num_seqs: int = option(16, "alignment rows N of a sample", low=1, resized=True)
    seq_len: int = option(64, "residues S of a sample (crop length)", low=1, resized=True)
    msa_heads: int = option(4, "heads of MSA attention; must divide --msa-dim", low=1)
    pair_heads: int = option(4, "heads of triangle attention; must divide --pair-dim", low=1)
    outer_product_dim: int = option(32, "hidden width of the outer product mean", low=1)
    dropout: float = option(0.0, "AF2's shared dropout, one rate for all sub-layers that have it", low=0.0,
                            below=1.0, resized=True)
    coevolution: str = option("none", "residue pairs start from the sequence alone: none (AF2); or from all "
                              "rows too: couplings, the inverse of their covariance",
                              choices=("none", "couplings"))
    orientations: bool = option(False, "also predict how residues are turned to each other, for --fold")

    def __post_init__(self):
        super().__post_init__()
        for channels, heads in (("msa_dim", "msa_heads"), ("pair_dim", "pair_heads")):
            if getattr(self, channels) % getattr(self, heads):
                self.refuse(heads, f"must divide {channels} = {getattr(self, channels)}")


@dataclass(frozen=True)
class FusionConfig(Switches):
    """Which operations run fused. Every bool becomes an --enable-X/--disable-X pair. preset: part of
    --enable-all-fusion. ultra: our Triton kernels, for a GPU, which only --enable-ultra adds."""
    enable_qkv_fusion_msa: bool = option(True, "Q, K, V of MSA attention in one GEMM", preset=True,
                                        title="MSA QKV Fusion", acts_on=("msa_row", "msa_column"))
    enable_qkv_fusion_triangle: bool = option(True, "Q, K, V of triangle attention in one GEMM", preset=True,
                                             title="Triangle QKV Fusion", acts_on=("triangle_attn",))
    enable_flash_attention: bool = option(True, "fused attention instead of matmul, softmax, matmul",
                                         preset=True, title="Flash Attention",
                                         acts_on=("msa_row", "msa_column", "triangle_attn"))
    enable_triangle_fusion: bool = option(True, "triangle multiplication: projections in one GEMM, gates in "
                                          "one GEMM", preset=True, title="Triangle Gate/Proj Fusion",
                                          acts_on=("triangle_mult",))
    enable_opm_fusion: bool = option(True, "outer product mean re-associated where cheaper", preset=True,
                                     acts_on=("outer_product",))
    enable_projection_fusion: bool = option(
        False, "more in one GEMM: gates with Q, K, V and with left, right; gradients of embeddings",
        preset=True, acts_on=(
            "outer_product", "msa_row with qkv_fusion_msa", "msa_column with qkv_fusion_msa",
            "triangle_attn with qkv_fusion_triangle", "triangle_mult with triangle_fusion"))
    enable_transition_fusion: bool = option(False, "bias and ReLU of transitions within their GEMM",
                                            preset=True, acts_on=("msa_transition", "pair_transition"))
    enable_activation_checkpointing: bool = option(False, "recompute blocks in backward", recomputes=True)
    enable_selective_checkpointing: bool = option(False, "recompute sub-layers; our kernels keep the "
                                                  "output of attention", recomputes=True)
    attention_backend: str = option("auto", "implementation of fused attention; math is plain",
                                   choices=("auto", "math", "sdpa", "flex"))
    enable_torch_compile: bool = shared("enable_torch_compile")  # what any program has
    torch_compile_mode: str = shared("torch_compile_mode")
    enable_cuda_graphs: bool = shared("enable_cuda_graphs")
    enable_master_weights: bool = shared("enable_master_weights")
    enable_triton_adamw: bool = shared("enable_triton_adamw")
    enable_triton_attention: bool = option(False, "attention, its gate and, where widths fit, the whole "
                                           "sub-layer round it", ultra=True)
    enable_triton_triangle: bool = option(False, "triangle multiplication but for its large GEMM", ultra=True)
    enable_triton_outer_layout: bool = option(False, "outer product without (S, S, h*h) copies", ultra=True)
    enable_triton_relu: bool = option(False, "transitions, from LayerNorm to residual", ultra=True)
    enable_triton_weight_gradients: bool = option(False, "adds a block's small gradients and partial sums in "
                                                  "one launch each", ultra=True)

    def weight_first(self, samples, rows, residues, hidden, arithmetic):
        """Whether the outer product mean multiplies by its weight before it sums over rows. arithmetic: on a
        GPU "half" (16 bits) or "float32" (without TF32); None in any other way. With 4 N <= S the largest
        tensor, (h, N, S, c_z), is no larger than the other order's, (S, S, h * h), for c_z up to 4 h; at
        4 N = S our kernel for that order is as fast. It takes about N / h times the multiplications, which
        set float32's time on a GPU: there it must save half of them. It loops over samples, and for several
        small ones the launches cost more than it saves."""
        kernel = arithmetic == "half" and self.enable_triton_outer_layout
        few = 4 * rows < residues or 4 * rows == residues and not kernel
        many_multiplications = arithmetic == "float32" and 2 * rows > hidden
        return (self.enable_opm_fusion and few and not many_multiplications
                and (samples == 1 or residues >= 128))

    def idle(self, settings, on_gpu):
        c, training, arithmetic = settings.model, settings.training, arithmetic_of(settings.training, on_gpu)
        first = self.weight_first(training.batch_size, c.num_seqs, c.seq_len, c.outer_product_dim, arithmetic)
        auto = self.enable_flash_attention and self.attention_backend == "auto"
        reasons = super().idle(settings, on_gpu) | {name: why for name, holds, why in (
            ("enable_opm_fusion", self.enable_opm_fusion and not first,
             "opm-fusion changes nothing at these sizes"),
            ("attention_backend", self.attention_backend != "auto" and not self.enable_flash_attention,
             "--attention-backend is for fused attention"),
            ("enable_triton_attention", self.enable_triton_attention and not auto,
             "triton-attention gives way to the attention that was asked for"),
            ("enable_triton_outer_layout", self.enable_triton_outer_layout and first and arithmetic == "half",
             "triton-outer-layout is for outer products that are not re-associated"),
            ("enable_triton_weight_gradients",
             self.enable_triton_weight_gradients and not self.enable_torch_compile,
             "triton-weight-gradients needs torch.compile")) if holds}
        return reasons | kernel_switches.idle_kernels(self, dict(
            enable_triton_attention=(c.msa_dim // c.msa_heads, c.pair_dim // c.pair_heads),
            enable_triton_triangle=(c.pair_dim,), enable_triton_outer_layout=(c.outer_product_dim,),
            enable_triton_weight_gradients=(c.pair_dim,), enable_triton_relu=(c.msa_dim, c.pair_dim)),
            (c.pair_dim, c.msa_heads), training.use_amp, on_gpu)


WITHOUT_TORCH = dict(  # of PROGRAM, the parts that need no torch
    file=__file__, about=__doc__, suffix="v2", version="v2_fused", model_config=TinyOpenFoldConfig,
    training_config=TrainingConfig, fusion_config=FusionConfig,
    axes=dict(batch_size="B", seq_len="S", num_seqs="N"),
    demo=dict(num_blocks=1, seq_len=32, batch_size=8, learning_rate=2e-3, num_steps=120, log_every=10,
              eval_every=30))

flags.judge(__name__, **WITHOUT_TORCH)  # before torch is imported, which takes seconds

import contextlib
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from evoformer_kernels.precision import at_least_float32
from fusion_lab.training import distributed, machine, recipe
from fusion_lab.training.master_weights import optimized_weights
from tiny_openfold.layers import attention_choice
from tiny_openfold.layers.custom_gradients import LinearReLU, TriangleProduct, recomputed, summed_rows
from tiny_openfold.layers.packing import PackedProjections
from tiny_openfold.proteins import CONTACT_DISTANCE, TOKENS, coevolution, fast_evoformer
from tiny_openfold.proteins.orientations import OrientationHead, mean, orientation_loss
from tiny_openfold.proteins.seam import EvoformerForLab

# --------------------------------------------------------------------------------------------------------
# Primitives: a linear layer, and attention, fused and plain side by side
# --------------------------------------------------------------------------------------------------------


def linear(c_in, c_out, bias=True, init="default"):
    """nn.Linear with AF2's initialisation (supplement 1.11.4): LeCun, He for ReLU, zeros for the last layer
    of a residual branch, gates open."""
    layer = nn.Linear(c_in, c_out, bias=bias)
    if init in ("zero", "gate"):
        nn.init.zeros_(layer.weight)
    else:
        # Cutting a normal distribution off at two standard deviations lowers its deviation to 0.88
        std = ({"default": 1.0, "relu": 2.0}[init] / c_in) ** 0.5 / 0.87962566
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if bias:
        nn.init.constant_(layer.bias, 1.0 if init == "gate" else 0.0)
    return layer


def attend(q, k, v, bias=None, key_mask=None, backend="auto"):
    """softmax(q k^T / sqrt(D) + bias) v over R independent rows that share one bias. q, k, v and the
    result (B, R, H, L, D); bias (B, H, L, L) or None; key_mask (B, L), 1 = present, or None."""
    backend = attention_choice.chosen(backend, q, biased=bias is not None)
    if key_mask is not None:  # folded into the bias; half of the lowest number cannot overflow when added
        bias = q.new_zeros(1, 1, 1, 1) if bias is None else bias  # broadcasts to (B, H, L, L)
        bias = bias.masked_fill(~key_mask.bool()[:, None, None, :], torch.finfo(bias.dtype).min / 2)
    if backend == "flex":
        return attention_choice.flex_attend(q, k, v, bias)
    if backend == "sdpa":
        return attention_choice.sdpa_attend(q, k, v, bias)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, R, H, L, L)
    scores = scores if bias is None else scores + bias[:, None]
    weights = scores.softmax(dim=-1, dtype=at_least_float32(scores.dtype))  # not in 16 bits
    return weights.to(v.dtype) @ v  # (B, R, H, L, D)


# --------------------------------------------------------------------------------------------------------
# The Evoformer's sub-layers, in the order in which the block calls them; each returns its update
# --------------------------------------------------------------------------------------------------------


class GatedAttention(PackedProjections):
    """Multi-head attention over one axis of a (B, X, Y, c) tensor, with a sigmoid gate on its output."""

    QKV = ("q_proj", "k_proj", "v_proj")
    PACKINGS = dict(qkv_proj=QKV, qkv_gate_proj=(*QKV, "gate_proj"))

    def __init__(self, channels, heads, packed, fusion):
        super().__init__()
        self.heads = heads
        self.backend = fusion.attention_backend if fusion.enable_flash_attention else "math"
        self.layer_norm = nn.LayerNorm(channels)
        layers = {name: linear(channels, channels, bias=False) for name in self.QKV}
        layers["gate_proj"] = linear(channels, channels, init="gate")
        # packed: q, k, v (and the gate) are one wide GEMM, x is read once; else one GEMM for each
        packing = "qkv_gate_proj" if fusion.enable_projection_fusion else "qkv_proj"
        self.add_projections(layers, [packing] if packed else [])
        self.o_proj = linear(channels, channels, init="zero")

    def attention(self, x, axis, key_mask=None, bias=None):
        """Attention along axis 1 or 2 of normalised x (B, X, Y, c): independent rows, one for each place on
        the other axis, which share one bias (B, H, L, L)."""
        q, k, v, gate = self.project(x)  # each (B, X, Y, c)
        q, k, v = (self.to_heads(p, axis) for p in (q, k, v))  # (B, rows, H, L, D)
        out = attend(q, k, v, bias, key_mask, self.backend)  # (B, rows, H, L, D)
        out = self.from_heads(out, axis)  # (B, X, Y, c)
        return self.o_proj(out * gate.sigmoid())

    def to_heads(self, x, axis):
        """(B, X, Y, c) -> (B, rows, H, L, D), L along axis. Permuting heads, not x, spares copies of x."""
        return x.unflatten(-1, (self.heads, -1)).permute((0, 2, 3, 1, 4) if axis == 1 else (0, 1, 3, 2, 4))

    def from_heads(self, x, axis):
        """(B, rows, H, L, D) -> (B, X, Y, c), the reverse of to_heads()."""
        return x.permute((0, 3, 1, 2, 4) if axis == 1 else (0, 1, 3, 2, 4)).flatten(-2)


def head_bias(projection, x):
    """One bias per head from normalised x (B, S, S, c), in the layout attention wants: (B, H, S, S)."""
    return (projection.weight @ x.flatten(1, 2).mT).unflatten(-1, x.shape[1:3])


class FusedMSARowAttention(GatedAttention):
    """Alg. 7: attention within each alignment row, biased by the pair representation."""
    dropout_dim = 1  # all rows share what is dropped, see FusedEvoformerBlock.drop

    def __init__(self, config, fusion):
        super().__init__(config.msa_dim, config.msa_heads, fusion.enable_qkv_fusion_msa, fusion)
        self.pair_norm = nn.LayerNorm(config.pair_dim)
        self.pair_bias_proj = linear(config.pair_dim, config.msa_heads, bias=False)

    def forward(self, msa, pair, seq_mask=None):
        return self.attention(self.layer_norm(msa), 2, seq_mask, self.bias(pair))  # (B, N, S, c_m)

    def bias(self, pair):
        return head_bias(self.pair_bias_proj, self.pair_norm(pair))  # (B, H, S, S), shared by all N rows


class FusedMSAColumnAttention(GatedAttention):
    """Alg. 8: attention within each alignment column."""

    def __init__(self, config, fusion):
        super().__init__(config.msa_dim, config.msa_heads, fusion.enable_qkv_fusion_msa, fusion)

    def forward(self, msa, row_mask=None):
        return self.attention(self.layer_norm(msa), 1, row_mask)  # (B, N, S, c_m)


class Transition(nn.Module):
    """Alg. 9 and 15: a two-layer perceptron on every position, four times as wide inside."""

    def __init__(self, channels, fusion):
        super().__init__()
        self.fused = fusion.enable_transition_fusion
        self.layer_norm = nn.LayerNorm(channels)
        self.linear1 = linear(channels, 4 * channels, init="relu")
        self.linear2 = linear(4 * channels, channels, init="zero")

    def forward(self, x):
        return self.two_layers(self.layer_norm(x))

    def two_layers(self, x):
        if self.fused:  # the GEMM adds the bias and clips at 0 before it writes
            hidden = LinearReLU.of(x, self.linear1)  # (..., 4 c)
        else:  # one more pass over the widest tensor of the sub-layer
            hidden = self.linear1(x).relu()  # (..., 4 c)
        return self.linear2(hidden)  # (..., c)


class MSATransition(Transition):
    """Alg. 9."""

    def __init__(self, config, fusion):
        super().__init__(config.msa_dim, fusion)


class OuterProductMean(PackedProjections):
    """Alg. 10: how residues i and j vary together over the rows becomes an update of pair (i, j)."""
    SIDES = ("left_proj", "right_proj")
    PACKINGS = dict(left_right_proj=SIDES)

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion, self.counted_as = fusion, None
        self.layer_norm = nn.LayerNorm(config.msa_dim)
        layers = {name: linear(config.msa_dim, config.outer_product_dim) for name in self.SIDES}
        self.add_projections(layers, ["left_right_proj"] if fusion.enable_projection_fusion else [])
        self.output_proj = linear(config.outer_product_dim ** 2, config.pair_dim, init="zero")

    def forward(self, msa, row_mask=None):
        left, right = self.project(self.layer_norm(msa))  # each (B, N, S, h)
        left, rows = self.present(left, row_mask)
        update = self.products(left, right)  # (B, S, S, c_z)
        return (update / (rows + 1e-3)).to(update.dtype)  # the bias is divided, too, as in AlphaFold's code

    def present(self, left, row_mask):
        """left with missing rows at 0, so that they drop out of every sum, and the number of present rows:
        N, or (B, 1, 1, 1)."""
        if row_mask is None:
            return left, left.shape[1]
        count = row_mask.sum(dim=1, dtype=at_least_float32(left.dtype))
        return left * row_mask[:, :, None, None].to(left.dtype), count[:, None, None, None]

    def products(self, left, right):
        """output_proj of the sum over rows n of left[n, i, c] right[n, j, d]: (B, S, S, c_z)."""
        if self.weight_first(right):
            return self.products_weight_first(left, right)
        outer = torch.einsum("bnic,bnjd->bijcd", left, right)  # (B, S, S, h, h), the largest tensor here
        return self.output_proj(outer.flatten(-2))

    def weight_first(self, x):
        """FusionConfig's rule for the MSA x (B, N, S, c_m), or for its sides."""
        arithmetic = self.counted_as[0] if self.counted_as else fast_evoformer.gpu_arithmetic(x)
        return self.fusion.weight_first(*x.shape[:3], self.widths["left_proj"], arithmetic)

    def products_weight_first(self, left, right):
        """The same sums in another order: the tensor in the middle is (h, N, S, c_z), not (S, S, h, h)."""
        h, residues = left.shape[-1], right.shape[2]
        weight = self.output_proj.weight.unflatten(1, (h, h)).permute(1, 2, 0)  # (c, d, c_z)
        updates = []
        for a, b in zip(left, right, strict=True):  # (N, S, h) each; one sample at a time copies no operand
            weighed = torch.bmm(b.flatten(0, 1).expand(h, -1, -1), weight)  # (c, N S, c_z): summed over d
            weighed = weighed.view(h * len(b), -1)  # (c N, S c_z)
            update = a.permute(1, 2, 0).flatten(1) @ weighed  # (S, S c_z): summed over c and n
            updates.append(update.unflatten(1, (residues, -1)))
        return torch.stack(updates) + self.output_proj.bias  # (B, S, S, c_z)


class FusedTriangleMultiplication(PackedProjections):
    """Alg. 11 (outgoing edges) and 12 (incoming): pair (i, j) sees every triangle i, j, k.
    DISCREPANCY: the hidden width is pair_dim (AF2: 128, which is also its pair_dim)."""
    SIDES, GATES = ("left_proj", "right_proj"), ("left_gate", "right_gate")
    PACKINGS = dict(left_right_proj=SIDES, left_right_gate=GATES, left_right_all=(*SIDES, *GATES))
    dropout_dim = 1

    def __init__(self, config, fusion, outgoing):
        super().__init__()
        c, self.outgoing = config.pair_dim, outgoing
        self.layer_norm = nn.LayerNorm(c)
        layers = {name: linear(c, c) for name in self.SIDES}
        layers |= {name: linear(c, c, init="gate") for name in self.GATES}
        self.center_norm = nn.LayerNorm(c)
        self.output_proj = linear(c, c, init="zero")
        self.output_gate = linear(c, c, init="gate")
        packings = ["left_right_proj", "left_right_gate"] if fusion.enable_triangle_fusion else []
        self.add_projections(layers, ["left_right_all"] if packings and fusion.enable_projection_fusion
                             else packings)

    def forward(self, pair, seq_mask=None):
        x = self.layer_norm(pair)
        left, right = self.sides(x)  # each (c_z, B, S, S): one S x S matrix per channel
        product = self.product(left, right, seq_mask).permute(1, 2, 3, 0)  # (B, S, S, c_z)
        return self.output_proj(self.center_norm(product)) * self.output_gate(x).sigmoid()

    def sides(self, x):
        """Projections times their gates. The projections write channels first, since batched GEMMs would copy
        operands in any other layout, in forward once and in backward again."""
        if self.packings:  # packed: one operation gates both sides, which lie next to each other
            sides, gates = self.project(x, self.SIDES, self.GATES, dim=0)  # (2 c_z, B, S, S)
            return (sides * gates.sigmoid()).chunk(2, dim=0)
        left, right, left_gate, right_gate = self.project(x, dim=0)
        return left * left_gate.sigmoid(), right * right_gate.sigmoid()

    def product(self, left, right, seq_mask=None):
        """Outgoing: result[i, j] = sum over k of left[i, k] right[j, k]; incoming: of left[k, i] right[k, j].
        All (c_z, B, S, S)."""
        if seq_mask is not None:  # a missing residue k must drop out of the sum: one factor 0 is enough
            mask = seq_mask[:, None, :] if self.outgoing else seq_mask[:, :, None]
            left = left * mask.to(left.dtype)
        return TriangleProduct.apply(left, right, self.outgoing)  # with gradients in the operands' layout


class FusedTriangleAttention(GatedAttention):
    """Alg. 13 (starting node) and 14 (ending node): pair (i, j) attends to (i, k), biased by (j, k); for the
    ending node to (k, j), biased by (k, i)."""

    def __init__(self, config, fusion, starting):
        super().__init__(config.pair_dim, config.pair_heads, fusion.enable_qkv_fusion_triangle, fusion)
        self.starting, self.dropout_dim = starting, 1 if starting else 2
        self.triangle_bias_proj = linear(config.pair_dim, config.pair_heads, bias=False)

    def forward(self, pair, seq_mask=None):
        x = self.layer_norm(pair)
        bias = head_bias(self.triangle_bias_proj, x)  # (B, H, S, S)
        # Ending node: along columns, by permuted heads, no copy of pair; (i, j), (k, j) are biased by (k, i).
        axis, bias = (2, bias) if self.starting else (1, bias.mT)
        return self.attention(x, axis, seq_mask, bias)  # (B, S, S, c_z)


class PairTransition(Transition):
    """Alg. 15."""

    def __init__(self, config, fusion):
        super().__init__(config.pair_dim, fusion)


SUBLAYERS = ("msa_row_attention", "msa_column_attention", "msa_transition", "outer_product_mean",
             "triangle_mult_outgoing", "triangle_mult_incoming", "triangle_attn_starting",
             "triangle_attn_ending", "pair_transition")


class FusedEvoformerBlock(nn.Module):
    """Alg. 6: one Evoformer block; Triton switches give it fast sub-layers (proteins/fast_evoformer.py)."""

    def __init__(self, config, fusion_config=None):
        super().__init__()
        fusion = fusion_config or FusionConfig()
        self.dropout, self.fast = config.dropout, fast_evoformer.wanted(fusion)
        make = partial(fast_evoformer.make, config=config, fusion=fusion)  # of this class or its fast form
        self.msa_row_attention = make(FusedMSARowAttention)
        self.msa_column_attention = make(FusedMSAColumnAttention)
        self.msa_transition = make(MSATransition)
        self.outer_product_mean = make(OuterProductMean)
        self.triangle_mult_outgoing = make(FusedTriangleMultiplication, outgoing=True)
        self.triangle_mult_incoming = make(FusedTriangleMultiplication, outgoing=False)
        self.triangle_attn_starting = make(FusedTriangleAttention, starting=True)
        self.triangle_attn_ending = make(FusedTriangleAttention, starting=False)
        self.pair_transition = make(PairTransition)

    def forward(self, msa, pair, seq_mask=None, row_mask=None):
        """msa (B, N, S, c_m), pair (B, S, S, c_z), seq_mask (B, S), row_mask (B, N); returns (msa, pair)."""
        if self.fast:
            return fast_evoformer.run_block(self, msa, pair, seq_mask, row_mask)
        msa = msa + self.drop(self.msa_row_attention, msa, pair, seq_mask)
        msa = msa + self.msa_column_attention(msa, row_mask)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer_product_mean(msa, row_mask)
        pair = pair + self.drop(self.triangle_mult_outgoing, pair, seq_mask)
        pair = pair + self.drop(self.triangle_mult_incoming, pair, seq_mask)
        pair = pair + self.drop(self.triangle_attn_starting, pair, seq_mask)
        pair = pair + self.drop(self.triangle_attn_ending, pair, seq_mask)
        pair = pair + self.pair_transition(pair)
        return msa, pair

    def drop(self, layer, *inputs):
        """The layer's update after AF2's dropout: all positions along the layer's dropout_dim share what is
        dropped; 1 is row-wise, 2 column-wise."""
        update = layer(*inputs)
        factors = self.dropout_factors(update, layer.dropout_dim)
        return update if factors is None else update * factors

    def dropout_factors(self, x, dim):
        """Dropout's 0 or 1 / (1 - rate) for x, of size 1 along dim; None where nothing is dropped."""
        if not self.training or self.dropout == 0.0:
            return None
        return F.dropout(torch.ones_like(x.narrow(dim, 0, 1)), self.dropout)


# --------------------------------------------------------------------------------------------------------
# The model: embedding, blocks, heads, losses
# --------------------------------------------------------------------------------------------------------

MAX_OFFSET = 32  # relative positions are clipped here: 65 bins
DISTANCE_BREAKS = np.linspace(2.3125, 21.6875, 63)  # Å; 64 bins
DISTANCE_CENTRES = np.append(DISTANCE_BREAKS - 0.15625, DISTANCE_BREAKS[-1] + 0.15625)  # Å
CONTACT_BINS = int((DISTANCE_BREAKS <= CONTACT_DISTANCE).sum())  # bins that lie wholly below it


class TinyOpenFoldV2(nn.Module, EvoformerForLab):  # which answers the lab's questions and computes nothing
    """Input embedding (Alg. 3), Evoformer blocks, distogram and masked-MSA heads (supplement 1.9.8, 1.9.9).
    DISCREPANCY: no templates, no extra MSA stack, no recycling, no structure module."""
    SUBLAYERS, DISTANCE_CENTRES = SUBLAYERS, DISTANCE_CENTRES

    def __init__(self, config, fusion_config=None):
        super().__init__()
        self.config, self.fusion = config, fusion_config or FusionConfig()
        self.msa_embedding = nn.Embedding(TOKENS, config.msa_dim)
        self.target_embedding = nn.Embedding(TOKENS, config.msa_dim)
        self.left_embedding = nn.Embedding(TOKENS, config.pair_dim)
        self.right_embedding = nn.Embedding(TOKENS, config.pair_dim)
        self.position_embedding = nn.Embedding(2 * MAX_OFFSET + 1, config.pair_dim)
        if config.coevolution != "none":
            self.coevolution_embedding = linear(coevolution.FEATURES, config.pair_dim, bias=False)
        blocks = (FusedEvoformerBlock(config, self.fusion) for _ in range(config.num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.distogram_head = linear(config.pair_dim, len(DISTANCE_CENTRES), init="zero")
        self.masked_msa_head = linear(config.msa_dim, TOKENS, init="zero")
        self.orientation_head = OrientationHead(config.pair_dim) if config.orientations else None
        self.register_buffer("breaks", torch.tensor(DISTANCE_BREAKS, dtype=torch.float32), persistent=False)
        self.register_buffer("centres", torch.tensor(DISTANCE_CENTRES, dtype=torch.float32), persistent=False)
        if self.fusion.enable_selective_checkpointing:
            fast_evoformer.keep_the_last(self.blocks[-1])
        if self.fusion.enable_torch_compile:
            how = self.compile_options()
            for block in self.blocks:  # they run the same code: one compiles for all
                block.compile(**how)

    def compile_options(self):
        """Arguments of torch.compile for blocks and compiled_ends."""
        return dict(fullgraph=True, dynamic=False, options=dict(
            torch._inductor.list_mode_options(self.fusion.compile_mode),
            combo_kernels=self.config.seq_len <= 128,  # fewer launches: 4% faster at 64, 1.5% slower at 256
            **fast_evoformer.compiler_options(self.fusion)))

    @cached_property
    def compiled_ends(self):
        """(embed, heads), compiled if asked; a GPU uses them, where fewer launches are worth compiling."""
        if not self.fusion.enable_torch_compile:
            return self.embed, self.heads
        return tuple(torch.compile(end, **self.compile_options()) for end in (self.embed, self.heads))

    def forward(self, msa_tokens, target_tokens=None, seq_mask=None, row_mask=None, extra_msa=None,
                only_loss=False, **targets):
        """msa_tokens (B, N, S), possibly corrupted; target_tokens (B, S), default the first row; masks (B, S)
        and (B, N), 1 = present; extra_msa (B, M, S), default msa_tokens, for --coevolution. targets:
        msa_targets (B, N, S), -100 where nothing is asked; coords (B, S, 3) in Å with coord_mask (B, S);
        orientations (B, S, S, 3), bins. Returns a dict: with targets, loss and its parts, and these again as
        `losses` {name: Loss}; unless only_loss, distances (Å), contact_probability (B, S, S),
        distogram_logits, msa_repr, pair_repr; with --orientations omega, theta, phi (B, S, S, bins)."""
        attention_choice.prepare_flex_attention(msa_tokens.device)
        target = msa_tokens[:, 0] if target_tokens is None else target_tokens
        features = None
        if self.config.coevolution != "none":  # outside of compiled code, in float32
            rows = msa_tokens if extra_msa is None else extra_msa
            features = coevolution.pair_features(rows.long(), seq_mask)
        embed, heads = self.compiled_ends if msa_tokens.is_cuda else (self.embed, self.heads)
        msa, pair = self.run_blocks(*embed(msa_tokens, target, features), seq_mask, row_mask)
        return heads(msa, pair, only_loss, **targets)

    def embed(self, msa_tokens, target, features=None):
        """(B, N, S) and (B, S) tokens, (B, S, S, FEATURES) -> msa (B, N, S, c_m), pair (B, S, S, c_z)."""
        embed = partial(summed_rows, fused=self.fusion.enable_projection_fusion)
        msa = embed((self.msa_embedding, msa_tokens), (self.target_embedding, target[:, None]))
        place = torch.arange(target.shape[1], device=target.device)
        offset = (place[:, None] - place).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET  # (S, S)
        pair = embed((self.left_embedding, target[:, :, None]), (self.right_embedding, target[:, None]),
                     (self.position_embedding, offset))
        if features is not None:
            pair = pair + self.coevolution_embedding(features.to(pair.dtype))
        return msa, pair

    def run_blocks(self, msa, pair, seq_mask, row_mask):
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            # backward begins with the last block of several: it keeps what backward needs
            recompute = self.fusion.enable_activation_checkpointing and (number < last or last == 0)
            msa, pair = recomputed(recompute, block, msa, pair, seq_mask, row_mask,
                                   random=self.config.dropout > 0)
        return msa, pair

    def heads(self, msa, pair, only_loss=False, coords=None, coord_mask=None, msa_targets=None,
              orientations=None):
        """What forward() returns, from the last block's output. `losses` are the summands of `loss`."""
        logits = self.distogram_head(pair)  # (B, S, S, 64), a bin each
        logits = (logits + logits.transpose(1, 2)).to(at_least_float32(logits.dtype))
        result = {} if only_loss else self.predictions(msa, pair, logits, differentiable=coords is None)
        losses = {}
        if coords is not None:
            losses["distogram_loss"] = self.distogram_loss(logits, coords, coord_mask)
        if self.orientation_head:
            angles = self.orientation_head(pair)
            result |= {} if only_loss else angles
            if orientations is not None:
                losses["orientation_loss"] = orientation_loss(angles, orientations)
        if msa_targets is not None:
            losses["masked_msa_loss"] = self.masked_msa_loss(msa, msa_targets, logits.dtype)
        if losses:
            first, *others = (each.weighted() for each in losses.values())
            result |= dict({name: each.value for name, each in losses.items()}, loss=sum(others, first),
                           losses=losses)
        return result

    def predictions(self, msa, pair, logits, differentiable):
        """All but losses; without gradients where a distogram loss has them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
            probability = logits.softmax(dim=-1)
            return dict(msa_repr=msa, pair_repr=pair, distogram_logits=logits,
                        distances=probability @ self.centres.to(probability.dtype),
                        contact_probability=probability[..., :CONTACT_BINS].sum(dim=-1))

    def distogram_loss(self, logits, coords, coord_mask):
        """Cross entropy of the bins of true distances, a mean over the pairs whose distance is known."""
        distances = (coords[:, :, None] - coords[:, None]).norm(dim=-1)  # (B, S, S)
        bins, known = torch.bucketize(distances, self.breaks), coord_mask[:, :, None] * coord_mask[:, None]
        nll = F.cross_entropy(logits.flatten(0, 2), bins.flatten(), reduction="none").view_as(known)
        return mean((nll * known).sum(-1), known.sum(-1))  # in two sums: one over S * S numbers is slow

    def masked_msa_loss(self, msa, msa_targets, dtype):
        """Cross entropy of the hidden letters, a mean over them; it counts a tenth."""
        logits = self.masked_msa_head(msa).flatten(0, 2).to(dtype)  # (B * N * S, 23)
        return mean(F.cross_entropy(logits, msa_targets.flatten(), reduction="sum"), msa_targets >= 0, 0.1)


# --------------------------------------------------------------------------------------------------------
# Training; Trainer, run_steps and train serve any Program
# --------------------------------------------------------------------------------------------------------


class Trainer:
    """The state of a run, which a checkpoint holds, and one step of it; process_settings() comes first."""

    def __init__(self, program, settings, device, world=distributed.ALONE):
        self.program, self.settings, self.device, self.world = program, settings, device, world
        training, fusion = settings.training, settings.fusion
        self.amp_dtype = machine.amp_dtype(training, device)  # None without --use-amp
        torch.manual_seed(training.seed)
        self.model = program.model(settings.model, fusion).to(device)
        world.reseed(training.seed)  # the same weights on all ranks, but other dropout

        # The optimizer updates the model's parameters or, where these are low-precision, float32 masters
        low = self.amp_dtype if fusion.enable_master_weights else None
        self.autocasts = self.amp_dtype is not None and low is None
        self.weights = optimized_weights(self.model, low, world, fusion.enable_triton_adamw)
        self.use_graph, self.graph = fusion.enable_cuda_graphs and device.type == "cuda", None
        self.optimizer = recipe.optimizer(self.weights, training, self.use_graph)
        self.average = recipe.Average(self.weights, training.ema_decay) if training.ema_decay else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp_dtype == torch.float16)
        self.gradient_norm = torch.zeros((), device=device)  # of the last step, before clipping
        self.step_number = 0  # steps that were made
        self.best = dict(score=None, step=None, since=0)  # evaluation, and how many came after it
        self.trained_on, self.chosen_by = set(), set()  # names on which the model must not be tested
        self.sequences = {}  # of trained_on, to find their relatives

    def forward(self, batch, only_loss=False):
        """The model's output for a batch, or as much of it as a training step needs."""
        with torch.autocast(self.device.type, self.amp_dtype, enabled=self.autocasts):
            return (self.model.for_loss if only_loss else self.model)(**batch)

    def step(self, batch, mark=lambda: None):
        """One optimizer step; returns the loss, still on the device. mark() is called after each phase:
        forward, backward, optimizer. A CUDA graph has no phases: all of its time goes to the first."""
        rate = recipe.learning_rate(self.settings.training, self.step_number)
        recipe.set_learning_rate(self.optimizer, rate)
        loss = self.graphed_step(batch, mark) if self.use_graph else self.eager_step(batch, mark)
        if self.average:
            self.average.update()
        mark()
        return loss

    def graphed_step(self, batch, mark):
        if self.graph is None:
            from fusion_lab.training.cuda_graphs import GraphedStep
            with self.preserved():
                self.graph = GraphedStep(self.eager_step, batch, self.device)
        loss = self.graph(batch)
        mark()  # after forward, which here is the whole step
        mark()  # after backward
        return loss

    def eager_step(self, batch, mark=lambda: None):
        loss = self.world.share(self.forward(batch, only_loss=True))  # all of it, in one process
        mark()
        self.scaler.scale(loss).backward()
        mark()
        self.weights.take_gradients()  # from the model
        loss = loss.detach()
        self.world.add_up([loss, *(w.grad for w in self.weights.tensors if w.grad is not None)])
        self.scaler.unscale_(self.optimizer)
        self.gradient_norm.copy_(self.weights.clip(self.settings.training.grad_clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.weights.after_step()  # back to the model
        return loss.clone()  # CUDA graphs of torch.compile's own overwrite what they returned

    def averaged(self):
        """Within, the model has the weights to be evaluated: averaged ones, if there are."""
        return self.average.swapped_in() if self.average else contextlib.nullcontext()

    def preserved(self):
        """Whatever runs within leaves weights, optimizer, scaler and random numbers as they were."""
        from fusion_lab.training.checkpoints import preserving
        return preserving(self)


def run_steps(trainer, source, profiling, counts, metrics, stop):
    """Steps up to --num-steps, until a signal, or until --early-stopping has had enough. counts are what
    warm_up() measured. Returns (steps, 4) seconds by phase; metrics has the losses."""
    from fusion_lab.measuring import clocks, probe, ranges
    from fusion_lab.training import checkpoints, evaluations, feeding, reporting
    training, world = trainer.settings.training, trainer.world
    intervals = dict(log=training.log_every, evaluate=training.eval_every, save=training.save_every)
    timer = clocks.PhaseTimer(trainer.device, ranges.PHASES, profiling.enter, profiling.leave)
    steps = range(trainer.step_number, training.num_steps)
    supply = feeding.batches(source, steps, trainer.device, world)  # each made while the step before it runs
    with tqdm(total=len(steps), disable=not world.first or None, unit="step", leave=False) as bar:  # on a TTY
        say = partial(bar.write, file=sys.stdout)
        for done in range(steps.start + 1, steps.stop + 1):
            # A step, which the host only queues: it runs ahead of the GPU
            timer.start()
            batch = next(supply)
            timer.mark()
            loss = trainer.step(batch, timer.mark)
            trainer.step_number = done
            metrics.step(done, loss, trainer)
            profiling.step()
            bar.update()

            # Is anything due? A process alone may stop after any step. Several have to stop together, so they
            # ask each other for signals, but only at steps at which something is due for all of them
            due = {what for what, every in intervals.items() if every and done % every == 0}
            if done == steps.stop:
                due = {"log", "save"}  # never evaluate: train() makes the last evaluation
            if not due and not (stop.signal and world.size == 1):
                continue

            # Here the host looks, for which it waits for the GPU: log, evaluate, save, stop
            metrics.flush()  # first, so that a checkpoint has no step that the metrics lack
            reporting.require_finite(metrics.losses[-1], done)
            if "log" in due or stop.signal:
                peak = probe.peak_megabytes(trainer.device, counts)
                say(reporting.step_line(trainer, metrics.losses[-1], timer, peak))
            if "evaluate" in due:
                with profiling.paused(), probe.unmeasured_memory(trainer.device, counts):
                    evaluations.evaluate(trainer, source, metrics, stop, say)
            ending = world.agreed_signal(stop) or checkpoints.out_of_patience(trainer)
            if training.save_checkpoint and ("save" in due or ending):
                checkpoints.save(trainer, training.save_checkpoint)
            if ending:
                break
    return timer.seconds()


def train(program, settings, compare_with=None, min_speedup=None):
    """A training run from its start-up lines to its summary; returns its exit code. compare_with: the file of
    an earlier summary; min_speedup: over it, for exit code 0 (summary.too_slow). Raises UserError."""
    from fusion_lab.measuring import analysis, probe, summary
    from fusion_lab.measuring.metrics import Metrics, resumes
    from fusion_lab.measuring.recorders import Profiling
    from fusion_lab.training import checkpoints, directory, evaluations, models, reporting
    # Make everything that a run needs. Whatever can be refused is refused here, before the first step
    earlier = summary.read_summary(compare_with) if compare_with else None
    training, device = settings.training, machine.choose_device(settings.training.device)
    machine.process_settings(settings, device)
    machine.require_memory(program, device, settings)
    world = distributed.begin(device)
    source = program.data(settings.having(batch_size=training.batch_size * world.size))  # of all ranks
    trainer = program.trainer(program, settings, device, world)
    models.begin_from_files(trainer, source)  # --resume, --init-from
    folder = directory.RunDirectory(program, settings, writes=world.first)
    world.from_first(lambda: folder.claim_outputs(resumes(trainer, folder), checkpoints.outputs(trainer)))
    reporting.describe_start(trainer, source)

    with errors.StopRequest(patient=world.size > 1) as stop:  # a signal only asks to stop
        counts, metrics = probe.warm_up(trainer, source, stop), Metrics(trainer, folder)
        recorded = settings.profiler if world.first else ProfilerConfig()  # one rank records
        steps_left = training.num_steps - trainer.step_number
        with Profiling(recorded, device, trainer.model.sublayers(), counts, steps_left) as profiling:
            times = run_steps(trainer, source, profiling, counts, metrics, stop)
        # Write the summary before the last evaluation, which may fail, and again with it; say how it ended
        result = summary.summarise(trainer, counts, metrics.losses, profiling.untraced(times), stop.signal)
        path = folder.write("performance_summary", result)
        evaluations.evaluate(trainer, source, metrics, stop, print, final=True)
        signal = world.agreed_signal(stop)
        folder.write("performance_summary", summary.complete_and_print(result, metrics.by_step, earlier))
        code = summary.too_slow(result, min_speedup) or profiling.code
        peak = result["performance_summary"]["peak_memory_mb"]
        report = analysis.write_analysis(trainer, counts, times, peak, profiling)
        reporting.print_ending(trainer, [path, metrics.path, metrics.draw(signal), report], signal)
        if world.first:
            with trainer.averaged():
                source.finish(trainer, metrics.by_step)  # last words and pictures
    summary.print_summary(trainer, result, path)
    return 128 + signal if signal else code


# --------------------------------------------------------------------------------------------------------
# What the lab must know of this model, and the command line
# --------------------------------------------------------------------------------------------------------


def open_source(settings):
    """Real proteins or built-in ones, as the flags say."""
    from tiny_openfold.proteins import batches
    return batches.open_source(settings)


PROGRAM = Program(
    **WITHOUT_TORCH,  # names, configs and sizes
    model=TinyOpenFoldV2, trainer=Trainer, data=open_source,  # the lab imports no model: it is handed them
    modes={"--contacts": "tiny_openfold.proteins.prediction:contacts",
           "--fold": "tiny_openfold.proteins.fold_prediction:fold"})


def run(argv=None, program=PROGRAM):
    """Do what the command line asks, of whichever program; returns the exit code. Raises UserError."""
    program, arguments, settings, mode = flags.asked(argv, program)
    if function := flags.mode_function(program, arguments, mode):
        return function(program, settings)
    return train(program, settings, arguments.compare_with_v1, arguments.min_speedup)


def main(argv=None, program=PROGRAM):
    """run(), with every expected failure as one line on stderr; returns the exit code."""
    return distributed.leave(lambda: errors.exit_code(partial(run, program=program), argv, program.name))


if __name__ == "__main__":
    sys.exit(main())
