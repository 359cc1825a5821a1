#!/usr/bin/env python3
"""TinyOpenFold V2: AlphaFold 2's Evoformer in one file, with every kernel fusion as a switch.

    python tiny_openfold_v2.py                       # train, built-in proteins
    python tiny_openfold_v2.py --disable-all-fusion  # the same, nothing fused
    python tiny_openfold_v2.py --verify-accuracy     # fusion keeps all numbers
    python tiny_openfold_v2.py --data DIR            # train on your alignments

Reading order: FusedEvoformerBlock, then the sub-layers above it in the order it calls them, then attend() and
PackedProjections (fusion_lab/kernels/packing.py), the places where fused and plain code stand side by side.

Letters in shape comments: B samples, N alignment rows, S residues, c_m and c_z channels of `msa` and
`pair`, H heads, D head width, h hidden width of the outer product mean. "Alg." is an algorithm of the
AlphaFold 2 supplement (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2).
"""
from fusion_lab.training import interrupts

interrupts.quiet(__name__)  # Ctrl-C during the imports is one line

from dataclasses import dataclass

from fusion_lab.training import start
from fusion_lab.training.options import Checked, ProfilerConfig, option  # noqa: F401  for importers
from fusion_lab.training.program import CommandLine, Program
from proteins.options import TrainingConfig, TritonSwitches

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
                              "rows too: their covariance, or couplings, which are its inverse",
                              choices=("none", "covariance", "couplings"))

    def __post_init__(self):
        super().__post_init__()
        for channels, heads in (("msa_dim", "msa_heads"), ("pair_dim", "pair_heads")):
            if getattr(self, channels) % getattr(self, heads):
                self.refuse(heads, f"must divide {channels} = {getattr(self, channels)}")


COMBO_KERNELS_UP_TO = 128  # residues: gains 4% at 64, costs 1.5% at 256, 2% at 384 (benchmarks/LOG.md)


@dataclass(frozen=True)
class FusionConfig(TritonSwitches):
    """Which operations run fused. Every bool becomes an --enable-X/--disable-X pair."""
    enable_qkv_fusion_msa: bool = option(
        True, "Q, K, V of MSA row and column attention in one GEMM", preset=True)
    enable_qkv_fusion_triangle: bool = option(
        True, "Q, K, V of both triangle attentions in one GEMM", preset=True)
    enable_flash_attention: bool = option(
        True, "fused attention instead of matmul, softmax, matmul", preset=True)
    enable_triangle_fusion: bool = option(
        True, "left and right of triangle multiplication: projections in one GEMM, gates in one GEMM",
        preset=True)
    enable_opm_fusion: bool = option(
        True, "outer product mean re-associated where that is cheaper (few rows, many residues), without "
        "the (S, S, h*h) tensor", preset=True)
    enable_projection_fusion: bool = option(
        False, "gates in one GEMM with Q, K, V and with left and right, where those are packed; the outer "
        "product's left with right; embeddings differentiated by one GEMM a tensor", preset=True, rung=4)
    enable_transition_fusion: bool = option(
        False, "bias and ReLU of the transitions in the epilogue of their GEMM", preset=True, rung=5)
    enable_combo_kernels: bool = option(
        False, f"with --enable-torch-compile on a GPU, up to {COMBO_KERNELS_UP_TO} residues: independent "
        "small kernels, such as sums for bias gradients, share launches", preset=True, rung=6, alone=False)
    enable_activation_checkpointing: bool = option(
        False, "recompute all but the last of several blocks in backward: less memory, more time", rung=7)
    enable_selective_checkpointing: bool = option(
        False, "recompute sub-layers, but (of our kernels) attention's output, in backward", rung=18)
    attention_backend: str = option("auto", "implementation of fused attention",
                                   choices=("auto", "math", "sdpa", "flex"))

    def combo_kernels_at(self, seq_len):
        return self.enable_combo_kernels and seq_len <= COMBO_KERNELS_UP_TO

    def reassociates(self, samples, rows, residues, laid_out):
        """Whether such a batch's outer product mean is re-associated; OuterProductMean says why. laid_out:
        else it has kernels, with which it is as fast at 4 N = S (LOG.md)."""
        most = residues - 1 if laid_out else residues
        return self.enable_opm_fusion and 4 * rows <= most and (samples == 1 or residues >= 128)

    def idle(self, settings, on_gpu):
        found = super().idle(settings, on_gpu)
        if self.enable_combo_kernels and not (self.enable_torch_compile and on_gpu):
            found.append("combo kernels need torch.compile on a GPU")
        elif self.enable_combo_kernels and not self.combo_kernels_at(settings.model.seq_len):
            found.append(f"combo kernels cost time above {COMBO_KERNELS_UP_TO} residues")
        asked = self.attention_backend if self.enable_flash_attention else "math"
        if self.enable_triton_attention and asked != "auto":
            names = ("triton-attention", *["triton-projection"] * self.enable_triton_projection)
            found += [f"{name} gives way to the attention that was asked for" for name in names]
        if self.enable_triton_outer_layout and self.reassociates(
                settings.training.batch_size, settings.model.num_seqs, settings.model.seq_len, True):
            found.append("triton-outer-layout is for outer products that are not re-associated")
        if self.attention_backend != "auto" and not self.enable_flash_attention:
            found.append("--attention-backend is for fused attention")
        return found


COMMAND_LINE = CommandLine(
    file=__file__, about=__doc__, model_config=TinyOpenFoldConfig, training_config=TrainingConfig,
    fusion_config=FusionConfig, headline=("enable_qkv_fusion_msa", "enable_qkv_fusion_triangle",
                                          "enable_flash_attention", "enable_triangle_fusion"),
    demo=dict(num_blocks=1, seq_len=32, batch_size=8, learning_rate=2e-3, num_steps=120, log_every=10,
              eval_every=30), axes=dict(batch_size="B", seq_len="S", num_seqs="N"),
    study_sizes=dict(batch_size=(2, 4), seq_len=(32, 64)))

start.begin(COMMAND_LINE, __name__)  # before torch is imported, which takes seconds

import contextlib
import os
import sys
from functools import partial

import numpy as np
import torch
import torch._inductor
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from fusion_lab.kernels import attention, triton
from fusion_lab.kernels.custom_gradients import LinearReLU, recomputed, summed_rows
from fusion_lab.kernels.exchanges import ALONE
from fusion_lab.kernels.packing import PackedProjections
from fusion_lab.kernels.precision import amp_dtype, at_least_float32, strict_float32
from fusion_lab.measuring import accuracy, comparison, retune, summary, turns
from fusion_lab.measuring.attribution import write_analysis
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.metrics import Metrics
from fusion_lab.measuring.probe import peak_megabytes, unmeasured_memory, warm_up
from fusion_lab.measuring.ranges import Profiling
from fusion_lab.training import distributed, files, recipe, reporting, torchrun
from fusion_lab.training.checkpoints import load_run, preserving, save
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.evaluations import Evaluations, require_score
from fusion_lab.training.feeding import batches
from fusion_lab.training.flags import make_parser, named_program, parse, with_demo
from fusion_lab.training.machine import choose_device, process_settings
from fusion_lab.training.master_weights import master_weights
from fusion_lab.training.models import load_weights
from proteins import batches as proteins
from proteins import coevolution, contacts, prediction, splitting
from proteins.costs import costs, statistics
from proteins.files import TOKENS
from proteins.seam import attention_in_words, defined, move_kinks_away, start_lines

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
        std = ({"default": 1.0, "relu": 2.0}[init] / c_in) ** 0.5 / 0.87962566  # which truncation takes away
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if bias:
        nn.init.constant_(layer.bias, 1.0 if init == "gate" else 0.0)
    return layer


def attend(q, k, v, bias=None, key_mask=None, backend="auto"):
    """softmax(q k^T / sqrt(D) + bias) v over R independent rows that share one bias. q, k, v and the
    result (B, R, H, L, D); bias (B, H, L, L) or None; key_mask (B, L), 1 = present, or None."""
    backend = attention.attention_backend(
        backend, on_gpu=q.is_cuda, dtype=q.dtype, strict=strict_float32(q.dtype), width=q.shape[-1],
        length=q.shape[-2], biased=bias is not None, training=torch.is_grad_enabled(),
        arch=attention.architecture(q.is_cuda))
    if key_mask is not None:  # folded into the bias; half of the lowest number cannot overflow when added
        bias = q.new_zeros(1, 1, 1, 1) if bias is None else bias  # (B, H, L, L); sizes of 1 are shared
        bias = bias.masked_fill(~key_mask.bool()[:, None, None, :], torch.finfo(bias.dtype).min / 2)
    if backend == "math":
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, R, H, L, L)
        scores = scores if bias is None else scores + bias[:, None]
        return scores.softmax(dim=-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v
    if backend == "flex":
        return attention.flex_attend(q, k, v, bias)
    bias = None if bias is None else bias[:, None].to(q.dtype).contiguous()  # (B, 1, H, L, L)
    if bias is None or bias.shape[2:4] == (1, 1):  # a mask of keys is small enough to be copied to every row
        mask = None if bias is None else bias.expand(-1, q.shape[1], -1, -1, -1).flatten(0, 1)
        out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask)  # (B*R, H, L, D)
        return out.unflatten(0, q.shape[:2])  # SDPA's fused kernels take 4-D input only
    # Sample by sample, because over (B*R, ...) the expanded bias would have to be copied.
    bias = bias.expand(len(q), *q.shape[1:4], -1)  # (B, R, H, L, L), a view
    return torch.stack([F.scaled_dot_product_attention(*x) for x in zip(q, k, v, bias, strict=True)])


# --------------------------------------------------------------------------------------------------------
# The Evoformer's sub-layers, in the order the block calls them. Each returns its update, residual not added.
# --------------------------------------------------------------------------------------------------------


class GatedAttention(PackedProjections):
    """Multi-head attention over one axis of a (B, X, Y, c) tensor, with a sigmoid gate on its output."""

    QKV = ("q_proj", "k_proj", "v_proj")
    PACKINGS = dict(qkv_proj=QKV, qkv_gate_proj=(*QKV, "gate_proj"))

    def __init__(self, channels, heads, packed, fusion):
        super().__init__()
        self.heads, self.again = heads, fusion.enable_selective_checkpointing
        self.backend = fusion.attention_backend if fusion.enable_flash_attention else "math"
        self.triton = fusion.enable_triton_attention and self.backend == "auto"
        self.whole = self.triton and fusion.enable_triton_projection
        self.layer_norm = nn.LayerNorm(channels)
        layers = {name: linear(channels, channels, bias=False) for name in self.QKV}
        layers["gate_proj"] = linear(channels, channels, init="gate")
        packing = "qkv_gate_proj" if fusion.enable_projection_fusion else "qkv_proj"
        self.add_projections(layers, *[packing] * packed)
        self.o_proj = linear(channels, channels, init="zero")

    def adds(self, x):
        return self.whole and triton.projects(x, self.heads)

    def attention(self, x, axis, key_mask, bias=None, head=None, residual=None, drop=None):
        """Attention over axis 1 or 2 of x (B, X, Y, c), a row for each place on the other. The bias
        (B, H, L, L) is given, or `head` projects it from normalised x: b(j, k), for axis 1 b(k, j)."""
        if self.adds(x):
            if self.ranks.size > 1 and head is not None:  # the kernel makes biases of whole tensors alone
                bias, head = triton.head_bias(head, x, self.layer_norm)[0], None
                bias = self.ranks.gather(bias if axis == 2 else bias.mT, 2)
            return triton.attention_layer(x, self.layer_norm, *self.packed(*self.QKV, "gate_proj"),
                                          self.o_proj, self.heads, axis, bias, head, key_mask, residual, drop,
                                          self.again)
        return recomputed(self.again, self.by_library, x, axis, key_mask, bias, head)

    def by_library(self, x, axis, key_mask, bias, head):
        x = self.layer_norm(x)
        if head is not None:
            bias, _ = head_bias(head, x)
            bias = self.ranks.gather(bias if axis == 2 else bias.mT, 2)  # (B, H, L, L)
        if self.triton and triton.attends(x, self.heads):
            wide = getattr(self, "qkv_gate_proj", None)
            parts, gate_bias = ([wide(x)], wide.bias) if wide else (self.project(x), None)
            return self.o_proj(triton.gated_attention(parts, self.heads, axis, bias, key_mask, gate_bias))
        q, k, v, gate = self.project(x)  # each (B, X, Y, c)
        q, k, v = (self.to_heads(p, axis) for p in (q, k, v))  # (B, rows, H, L, D)
        out = self.from_heads(attend(q, k, v, bias, key_mask, self.backend), axis)  # (B, X, Y, c)
        return self.o_proj(out * gate.sigmoid())

    def to_heads(self, x, axis):
        """(B, X, Y, c) -> (B, rows, H, L, D), L along axis. Permuting heads, not x, spares copies of x."""
        return x.unflatten(-1, (self.heads, -1)).permute((0, 2, 3, 1, 4) if axis == 1 else (0, 1, 3, 2, 4))

    def from_heads(self, x, axis):
        """The reverse."""
        return x.permute((0, 3, 1, 2, 4) if axis == 1 else (0, 1, 3, 2, 4)).flatten(-2)


def head_bias(projection, x, norm=None):
    """One bias per head from x (B, S, S, c), in the layout attention wants: (B, H, S, S); and x itself."""
    normal = x if norm is None else norm(x)
    return (projection.weight @ normal.flatten(1, 2).mT).unflatten(-1, x.shape[1:3]), x


class FusedMSARowAttention(GatedAttention):
    """Alg. 7: attention within each alignment row, biased by the pair representation."""

    def __init__(self, config, fusion):
        super().__init__(config.msa_dim, config.msa_heads, fusion.enable_qkv_fusion_msa, fusion)
        self.pair_norm = nn.LayerNorm(config.pair_dim)
        self.pair_bias_proj = linear(config.pair_dim, config.msa_heads, bias=False)

    def forward(self, msa, pair, seq_mask=None, handed_on=None, residual=None, drop=None):
        """handed_on: a list that gets pair for what follows; the bias's kernel then adds up its gradients."""
        project = triton.head_bias if self.whole and triton.projects_bias(pair, self.heads) else head_bias
        bias, pair = project(self.pair_bias_proj, pair, self.pair_norm)
        if handed_on is not None:
            handed_on.append(pair)
        bias = self.ranks.gather(bias, 2)  # (B, H, S, S)
        return self.attention(msa, 2, seq_mask, bias, None, residual, drop)  # (B, N, S, c_m)


class FusedMSAColumnAttention(GatedAttention):
    """Alg. 8: attention within each alignment column."""

    def __init__(self, config, fusion):
        super().__init__(config.msa_dim, config.msa_heads, fusion.enable_qkv_fusion_msa, fusion)

    def forward(self, msa, row_mask=None, residual=None, drop=None):
        return self.attention(msa, 1, row_mask, residual=residual, drop=drop)  # (B, N, S, c_m)


class Transition(nn.Module):
    """A two-layer perceptron on every position, four times as wide inside."""

    def __init__(self, channels, fusion):
        super().__init__()
        self.fused, self.triton = fusion.enable_transition_fusion, fusion.enable_triton_transition
        self.relu, self.again = fusion.enable_triton_relu, fusion.enable_selective_checkpointing
        self.layer_norm = nn.LayerNorm(channels)
        self.linear1 = linear(channels, 4 * channels, init="relu")
        self.linear2 = linear(4 * channels, channels, init="zero")

    def adds(self, x):
        return self.triton and triton.fits(x) or self.relu and triton.wraps(x)

    def forward(self, x, residual=None, drop=None):
        if self.adds(x):
            whole = triton.transition if self.triton else triton.transition_layer
            return whole(x, self.layer_norm, self.linear1, self.linear2, residual, self.again)
        return recomputed(self.again, self.by_library, x)

    def by_library(self, x):
        x, layer = self.layer_norm(x), self.linear1
        if self.relu and triton.fits(x):
            return triton.two_layers(x, layer, self.linear2)
        return self.linear2(LinearReLU.of(x, layer) if self.fused else layer(x).relu())


class MSATransition(Transition):
    """Alg. 9."""


class OuterProductMean(PackedProjections):
    """Alg. 10: how residues i and j vary together over the rows becomes an update of pair (i, j)."""
    SIDES = ("left_proj", "right_proj")
    PACKINGS = dict(left_right_proj=SIDES)

    def __init__(self, config, fusion):
        super().__init__()
        self.fusion, self.triton = fusion, fusion.enable_triton_outer_product
        self.layer_norm = nn.LayerNorm(config.msa_dim)
        layers = {name: linear(config.msa_dim, config.outer_product_dim) for name in self.SIDES}
        self.add_projections(layers, *["left_right_proj"] * fusion.enable_projection_fusion)
        self.output_proj = linear(config.outer_product_dim ** 2, config.pair_dim, init="zero")

    def adds(self, x):
        return self.lays_out(x) or self.multiplies_out(x)

    def multiplies_out(self, x):
        return self.triton and triton.multiplies_out(x, self.output_proj)

    def sides(self, msa):
        """left and right, (B, N, S, h); msa for what follows, whose gradients their kernel then adds up."""
        if (self.lays_out(msa) and triton.projects_sides(msa, self.widths["left_proj"])
                and not (self.multiplies_out(msa) or self.fusion.reassociates(*msa.shape[:3], True))):
            return triton.sides(msa, self.layer_norm, *self.packed(*self.SIDES))
        return *self.project(self.layer_norm(msa)), msa

    def forward(self, msa, row_mask=None, handed_on=None, residual=None, drop=None):
        (left, right, msa), rows = self.sides(msa), msa.shape[1]
        if handed_on is not None:
            handed_on.append(msa)
        if row_mask is not None:
            left = left * row_mask[:, :, None, None].to(left.dtype)
            rows = row_mask.sum(dim=1, dtype=at_least_float32(left.dtype))[:, None, None, None]
        right, again = self.ranks.gather(right, 2), self.fusion.enable_selective_checkpointing
        if self.multiplies_out(msa):
            return triton.outer_product(left, right, self.output_proj, rows, residual)
        if self.reassociates(right):
            update = self.project_one_first(left, right)
        elif self.lays_out(msa):
            if row_mask is None:
                return triton.outer_layout(left, right, self.output_proj, again, 1 / (rows + 1e-3), residual)
            update = triton.outer_layout(left, right, self.output_proj, again)
        else:
            update = recomputed(again, lambda *sides: self.output_proj(
                torch.einsum("bnic,bnjd->bijcd", *sides).flatten(-2)), left, right)
        update = (update / (rows + 1e-3)).to(update.dtype)  # (B, S, S, c_z)
        return update if residual is None else residual + update

    def lays_out(self, x):
        return self.fusion.enable_triton_outer_layout and self.ranks.size == 1 and triton.runs(x)

    def reassociates(self, whole):
        """For few rows: 4 N <= S keeps the tensor in the middle at or below (S, S, h*h) for c_z up to 4 h. A
        loop over samples costs launches, which small proteins do not win back; strict float32 on a GPU is
        bound by multiplications, of which N = h / 2 saves about half (LOG.md; not tried on AMD)."""
        multiplications_count = whole.is_cuda and strict_float32(whole.dtype)
        return (self.fusion.reassociates(*whole.shape[:3], self.lays_out(whole))
                and not (multiplications_count and 2 * whole.shape[1] > whole.shape[3]))

    def project_one_first(self, left, right):
        """The same sums in another order: W is applied to right, (h, N, S, c_z), before left multiplies it, a
        tensor h*N / S times the pair tensor instead of h*h / c_z times; of ranks that share a sample, each to
        its part of left, before right, which is whole, multiplies that."""
        h, samples, alone = left.shape[-1], [], self.ranks.size == 1
        weight = self.output_proj.weight.unflatten(1, (h, h)).permute(1, 2, 0)  # (c, d, c_z)
        sides, weight = ((left, right), weight) if alone else ((right, left), weight.transpose(0, 1))
        for a, b in zip(*sides, strict=True):  # (N, S, h); sample by sample no operand is copied
            projected = torch.bmm(b.flatten(0, 1).expand(h, -1, -1), weight).view(h * len(b), -1)
            samples.append((a.permute(1, 2, 0).flatten(1) @ projected).unflatten(1, (b.shape[1], -1)))
        update = torch.stack(samples) + self.output_proj.bias  # (B, S, S, c_z)
        return update if alone else update.transpose(1, 2)


class FusedTriangleMultiplication(PackedProjections):
    """Alg. 11 (outgoing edges) and 12 (incoming): pair (i, j) sees every triangle i, j, k.
    DISCREPANCY: the hidden width is pair_dim (AF2: 128, which is also its pair_dim)."""
    SIDES, GATES = ("left_proj", "right_proj"), ("left_gate", "right_gate")
    PACKINGS = dict(left_right_proj=SIDES, left_right_gate=GATES, left_right_all=(*SIDES, *GATES))

    def __init__(self, config, fusion, outgoing):
        super().__init__()
        c, self.outgoing = config.pair_dim, outgoing
        self.triton, self.again = fusion.enable_triton_triangle, fusion.enable_selective_checkpointing
        self.layer_norm = nn.LayerNorm(c)
        layers = {name: linear(c, c) for name in self.SIDES}
        layers |= {name: linear(c, c, init="gate") for name in self.GATES}
        self.center_norm = nn.LayerNorm(c)
        self.output_proj = linear(c, c, init="zero")
        self.output_gate = linear(c, c, init="gate")
        packings = ["left_right_proj", "left_right_gate"] if fusion.enable_triangle_fusion else []
        self.add_projections(layers, *["left_right_all"] if packings and fusion.enable_projection_fusion
                             else packings)

    def adds(self, pair):
        return self.triton and triton.fits(pair)

    def forward(self, pair, seq_mask=None, residual=None, drop=None):
        if self.adds(pair):
            return triton.triangle_multiplication(
                pair, self.layer_norm, *self.packed(*self.SIDES, *self.GATES), self.center_norm,
                self.output_proj, self.output_gate, seq_mask, self.outgoing, residual, drop, self.again)
        return recomputed(self.again, self.by_library, pair, seq_mask)

    def by_library(self, pair, seq_mask):
        x = self.layer_norm(pair)
        # One S x S matrix per channel, written so by the projections: batched GEMMs would copy operands in
        # any other layout, in forward once and in backward again.
        if self.active:  # packed: one kernel gates both sides, next to each other
            sides, gates = self.project(x, self.SIDES, self.GATES, dim=0)  # (2 c_z, B, S, S)
            left, right = (sides * gates.sigmoid()).chunk(2, dim=0)  # (c_z, B, S, S)
        else:
            left, right, left_gate, right_gate = self.project(x, dim=0)  # (c_z, B, S, S)
            left, right = left * left_gate.sigmoid(), right * right_gate.sigmoid()
        if seq_mask is not None:  # a missing residue k must drop out of the sum: one factor 0 is enough
            mask = seq_mask[:, None, :] if self.outgoing else self.ranks.own(seq_mask, 1)[:, :, None]
            left = left * mask.to(left.dtype)
        # outgoing: product[i, j] = sum over k of left[i, k] right[j, k]; incoming: of left[k, i] right[k, j]
        product = self.ranks.triangle_product(left, right, self.outgoing)  # (c_z, B, S, S)
        product = product.permute(1, 2, 3, 0)  # (B, S, S, c_z)
        return self.output_proj(self.center_norm(product)) * self.output_gate(x).sigmoid()


class FusedTriangleAttention(GatedAttention):
    """Alg. 13 (starting node) and 14 (ending node): pair (i, j) attends to (i, k), biased by (j, k); for the
    ending node to (k, j), biased by (k, i)."""

    def __init__(self, config, fusion, starting):
        super().__init__(config.pair_dim, config.pair_heads, fusion.enable_qkv_fusion_triangle, fusion)
        self.starting = starting
        self.triangle_bias_proj = linear(config.pair_dim, config.pair_heads, bias=False)

    def forward(self, pair, seq_mask=None, residual=None, drop=None):
        axis, head = 2 if self.starting else 1, self.triangle_bias_proj
        return self.attention(pair, axis, seq_mask, None, head, residual, drop)  # (B, S, S, c_z)


class PairTransition(Transition):
    """Alg. 15."""


def dropout_factors(x, rate, dim, training):
    """AF2's dropout: what multiplies x, the same for all positions along dim; None: nothing."""
    if not training or rate == 0.0:
        return None
    return F.dropout(torch.ones_like(x.narrow(dim, 0, 1)), rate)


SUBLAYERS = ("msa_row_attention", "msa_column_attention", "msa_transition", "outer_product_mean",
             "triangle_mult_outgoing", "triangle_mult_incoming", "triangle_attn_starting",
             "triangle_attn_ending", "pair_transition")


class FusedEvoformerBlock(nn.Module):
    """Alg. 6: one Evoformer block."""

    ranks = ALONE

    def __init__(self, config, fusion_config=None):
        super().__init__()
        fusion = fusion_config or FusionConfig()
        self.dropout = config.dropout
        self.msa_row_attention = FusedMSARowAttention(config, fusion)
        self.msa_column_attention = FusedMSAColumnAttention(config, fusion)
        self.msa_transition = MSATransition(config.msa_dim, fusion)
        self.outer_product_mean = OuterProductMean(config, fusion)
        self.triangle_mult_outgoing = FusedTriangleMultiplication(config, fusion, outgoing=True)
        self.triangle_mult_incoming = FusedTriangleMultiplication(config, fusion, outgoing=False)
        self.triangle_attn_starting = FusedTriangleAttention(config, fusion, starting=True)
        self.triangle_attn_ending = FusedTriangleAttention(config, fusion, starting=False)
        self.pair_transition = PairTransition(config.pair_dim, fusion)

    def add(self, x, layer, *inputs, dim=None):
        """x plus the layer's update of it, with dropout shared along dim; in one kernel where it can."""
        rate = 0.0 if dim is None else self.dropout
        if layer.adds(x):
            return layer(*inputs, residual=x, drop=dropout_factors(x, rate, dim, self.training))
        update = layer(*inputs)
        factors = dropout_factors(update, rate, dim, self.training)
        return x + (update if factors is None else update * factors)

    def forward(self, msa, pair, seq_mask=None, row_mask=None):
        """msa (B, N, S, c_m), pair (B, S, S, c_z), seq_mask (B, S), row_mask (B, N); returns (msa, pair).
        Ranks that share a sample have S / K columns of msa and S / K rows of pair each, masks whole; turn()
        exchanges columns for rows, so that attention finds its axis whole."""
        rows, handed_on = msa.shape[1], []
        msa = self.ranks.turn(msa, 2, 1)  # (B, N / K, S, c_m)
        msa = self.add(msa, self.msa_row_attention, msa, pair, seq_mask, handed_on, dim=1)
        pair = handed_on.pop()
        msa = self.ranks.turn(msa, 1, 2, rows)  # (B, N, S / K, c_m)
        msa = self.add(msa, self.msa_column_attention, msa, row_mask)
        msa = self.add(msa, self.msa_transition, msa)
        pair, msa = self.add(pair, self.outer_product_mean, msa, row_mask, handed_on), handed_on.pop()
        pair = self.add(pair, self.triangle_mult_outgoing, pair, seq_mask, dim=1)
        pair = self.add(pair, self.triangle_mult_incoming, pair, seq_mask, dim=1)
        pair = self.add(pair, self.triangle_attn_starting, pair, seq_mask, dim=1)
        pair = self.ranks.turn(pair, 1, 2)  # (B, S, S / K, c_z)
        pair = self.add(pair, self.triangle_attn_ending, pair, seq_mask, dim=2)
        pair = self.ranks.turn(pair, 2, 1)  # (B, S / K, S, c_z)
        pair = self.add(pair, self.pair_transition, pair)
        return msa, pair


# --------------------------------------------------------------------------------------------------------
# The model: embedding, blocks, heads, losses
# --------------------------------------------------------------------------------------------------------

MAX_OFFSET = 32  # relative positions are clipped here: 65 bins
DISTANCE_BREAKS = np.linspace(2.3125, 21.6875, 63)  # Å; 64 bins
DISTANCE_CENTRES = np.append(DISTANCE_BREAKS - 0.15625, DISTANCE_BREAKS[-1] + 0.15625)  # Å
MASKED_MSA_WEIGHT = 0.1
CONTACT_BINS = int((DISTANCE_BREAKS <= contacts.CONTACT_DISTANCE).sum())  # bins that lie wholly below it


class TinyOpenFoldV2(nn.Module):
    """Input embedding (Alg. 3), Evoformer blocks, distogram and masked-MSA heads (supplement 1.9.8, 1.9.9).
    DISCREPANCY: no templates, no extra MSA stack, no recycling, no structure module."""
    ranks = ALONE  # or those that share every sample with this one
    attention_kernel = attention_in_words

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
        for name in SUBLAYERS[-2:]:  # backward begins with them: to make them again would spare nothing
            getattr(self.blocks[-1], name).again = False
        self.distogram_head = linear(config.pair_dim, len(DISTANCE_CENTRES), init="zero")
        self.masked_msa_head = linear(config.msa_dim, TOKENS, init="zero")
        self.register_buffer("breaks", torch.tensor(DISTANCE_BREAKS, dtype=torch.float32), persistent=False)
        self.register_buffer("centres", torch.tensor(DISTANCE_CENTRES, dtype=torch.float32), persistent=False)
        self.gpu_ends = self.embed, self.heads
        if self.fusion.enable_torch_compile:  # blocks run the same code: one compiles for all
            how = dict(fullgraph=True, dynamic=False, options=dict(
                torch._inductor.list_mode_options(self.fusion.torch_compile_mode),
                combo_kernels=self.fusion.combo_kernels_at(config.seq_len),
                **triton.gathered_gradients(self.fusion.enable_triton_weight_gradients,
                                            self.fusion.enable_triton_sums)))
            for block in self.blocks:
                block.compile(**how)
            self.gpu_ends = torch.compile(self.embed, **how), torch.compile(self.heads, **how)

    def forward(self, msa_tokens, target_tokens=None, seq_mask=None, row_mask=None, msa_targets=None,
                coords=None, coord_mask=None, extra_msa=None, only_loss=False):
        """msa_tokens (B, N, S), possibly corrupted; target_tokens (B, S), default the first row; masks (B, S)
        and (B, N), 1 = present; extra_msa (B, M, S), default msa_tokens, for --coevolution. Targets:
        msa_targets (B, N, S), -100 where nothing is asked; coords (B, S, 3) in Å with coord_mask (B, S).
        Returns a dict: unless only_loss, distances (B, S, S; Å), contact_probability (B, S, S),
        distogram_logits, msa_repr, pair_repr; with targets, loss and its parts."""
        attention.prepare_flex_attention(msa_tokens.device)
        kind, rows = self.config.coevolution, msa_tokens if extra_msa is None else extra_msa
        features = [] if kind == "none" else [coevolution.pair_features(rows.long(), kind, seq_mask)]
        features = [self.ranks.own(whole, 1) for whole in features]
        embed, heads = self.gpu_ends if msa_tokens.is_cuda else (self.embed, self.heads)  # for few launches
        target = msa_tokens[:, 0] if target_tokens is None else target_tokens
        msa, pair = embed(msa_tokens, target, *features)
        for n, block in enumerate(self.blocks, 1):  # of several the last is kept: backward begins with it
            on = self.fusion.enable_activation_checkpointing and not 1 < n == len(self.blocks)
            msa, pair = recomputed(on, block, msa, pair, seq_mask, row_mask, random=self.config.dropout > 0)
        return heads(msa, pair, msa_targets, coords, coord_mask, only_loss)

    def embed(self, msa_tokens, target, features=None):
        """(B, N, S) and (B, S) tokens -> msa (B, N, S, c_m), pair (B, S, S, c_z)."""
        own, fused = self.ranks.own(target, 1), self.fusion.enable_projection_fusion
        msa = summed_rows((self.msa_embedding, self.ranks.own(msa_tokens, 2)),
                          (self.target_embedding, own[:, None]), fused=fused)
        place = torch.arange(target.shape[1], device=target.device)
        offset = (self.ranks.own(place, 0)[:, None] - place).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        pair = summed_rows((self.left_embedding, own[:, :, None]), (self.right_embedding, target[:, None]),
                           (self.position_embedding, offset), fused=fused)
        if features is not None:
            pair = pair + self.coevolution_embedding(features.to(pair.dtype))
        return msa, pair

    def heads(self, msa, pair, msa_targets, coords, coord_mask, only_loss=False):
        """What forward returns, from the last block's output."""
        result, logits = {}, self.distogram_head(pair)  # (B, S, S, 64), not symmetric yet
        logits = (logits + self.ranks.turn(logits, 1, 2).transpose(1, 2)).to(at_least_float32(logits.dtype))
        if not only_loss:
            with torch.set_grad_enabled(torch.is_grad_enabled() and coords is None):
                probability = logits.softmax(dim=-1)
                result = dict(msa_repr=msa, pair_repr=pair, distogram_logits=logits,
                              distances=probability @ self.centres.to(probability.dtype),
                              contact_probability=probability[..., :CONTACT_BINS].sum(dim=-1))
        if coords is not None:
            own, own_mask = self.ranks.own(coords, 1), self.ranks.own(coord_mask, 1)
            true_distances = (own[:, :, None] - coords[:, None]).norm(dim=-1)
            bins = torch.bucketize(true_distances, self.breaks)  # (B, S, S)
            known = own_mask[:, :, None] * coord_mask[:, None, :]
            nll = F.cross_entropy(logits.flatten(0, 2), bins.flatten(), reduction="none").view_as(known)
            nll, known = (self.ranks.sum(t.sum(-1).sum()) for t in (nll * known, known))  # at once is slow
            result["loss"] = result["distogram_loss"] = nll / known.clamp(min=1)
        if msa_targets is not None:
            letters, own = self.masked_msa_head(msa).flatten(0, 2), self.ranks.own(msa_targets, 2)
            nll = F.cross_entropy(letters.to(logits.dtype), own.flatten(), reduction="sum")
            asked = (msa_targets >= 0).sum()
            result["masked_msa_loss"] = self.ranks.sum(nll) / asked.clamp(min=1)
            result["loss"] = result.get("loss", 0.0) + MASKED_MSA_WEIGHT * result["masked_msa_loss"]
            if coords is not None:  # for several ranks: summands of the loss, of loss_counts() each
                result["loss_terms"] = torch.stack(
                    [result["distogram_loss"], MASKED_MSA_WEIGHT * result["masked_msa_loss"]])
        return result

    @staticmethod
    def loss_counts(msa_targets=None, coords=None, coord_mask=None, **_):
        """Of a batch: of how many pairs and letters the summands of the loss are means."""
        pairs = [] if coords is None else [coord_mask.sum(dim=1).square().sum()]
        letters = [] if msa_targets is None else [(msa_targets >= 0).sum()]
        return torch.stack(pairs + letters)

    def sublayers(self):
        """(name, module) of all sub-layers, for hooks; none where blocks are compiled."""
        blocks = [] if self.fusion.enable_torch_compile else self.blocks
        return [(name, getattr(block, name)) for block in blocks for name in SUBLAYERS]

    def get_fusion_statistics(self):
        """The switches, nominal kernel counts, and GEMMs for the projections (proteins/costs.py)."""
        return statistics(self.fusion, self.config.num_blocks)


# --------------------------------------------------------------------------------------------------------
# Training; Trainer, run_steps and train serve any Program
# --------------------------------------------------------------------------------------------------------


class Trainer:
    """A model with its optimizer and gradient scaler: the state of a run, and one step of it. Whoever makes
    one calls process_settings() first."""

    def __init__(self, program, settings, device):
        self.program, self.settings, self.device = program, settings, device
        self.training, fusion, self.world = settings.training, settings.fusion, distributed.world()
        torch.manual_seed(self.training.seed)
        self.model = program.model(settings.model, fusion).to(device)
        self.world.reseed(self.training.seed)
        if self.world.sequence_size > 1:
            program.split(self.model, self.world.mesh["sequence"].get_group())
        self.amp_dtype = amp_dtype(self.training, device)
        graphs = fusion.enable_cuda_graphs and device.type == "cuda"
        low = self.amp_dtype if fusion.enable_master_weights else None
        self.masters = master_weights(self.model, low, self.training.shard_optimizer, self.world,
                                      fusion.enable_triton_adamw)
        self.updated = [self.masters.flat] if self.masters else list(self.weights.values())
        self.optimizer = recipe.optimizer(self.updated, self.training, self.masters, graphs)
        self.average = recipe.average(self.updated, self.training.ema_decay)
        self.use_graph, self.graph, self.gradient_norm = graphs, None, torch.zeros((), device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp_dtype == torch.float16)
        self.step_number, self.trained_on = 0, set()  # names of what it learned from, if that has names
        self.chosen_by = set()  # of what chose between its evaluations
        self.best = dict(score=None, step=None, since=0)  # evaluation, and how many came after it

    @property
    def weights(self):
        """{parameter name: what the optimizer updates}; of several ranks all must ask."""
        masters = self.masters
        return masters.views(masters.whole(masters.flat)) if masters else dict(self.model.named_parameters())

    def forward(self, batch):
        cast = self.amp_dtype is not None and not (self.masters and self.masters.low.dtype == self.amp_dtype)
        with torch.autocast(self.device.type, self.amp_dtype, enabled=cast):
            return self.model(**batch)

    def step(self, batch, mark=lambda: None):
        """One optimizer step; returns the loss, still on the device. mark() is called after each phase; a
        graph has but one."""
        recipe.set_learning_rate(self.optimizer, recipe.learning_rate(self.training, self.step_number))
        loss = self.graphed_step(batch, mark) if self.use_graph else self.eager_step(batch, mark)
        if self.average:
            self.average.update()
        return loss

    def graphed_step(self, batch, mark):
        if self.graph is None:
            with self.preserved():
                self.graph = GraphedStep(self.eager_step, batch, self.device)
        loss = self.graph(batch)
        for _ in ("forward", "backward", "optimizer"):
            mark()
        return loss

    def eager_step(self, batch, mark=lambda: None):
        weight = self.world.weight(self.model, batch)
        loss = self.world.share(self.forward(batch | self.program.in_a_step), weight)
        mark()
        self.scaler.scale(loss).backward()
        mark()
        if self.masters:
            self.masters.take_gradients()
        loss = self.world.reduce(self.updated, loss, self.masters)
        self.scaler.unscale_(self.optimizer)
        self.gradient_norm.copy_(self.world.clip(self.updated, self.training.grad_clip, self.masters))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            self.masters.after_step()
        loss = loss.clone()  # CUDA graphs of torch.compile's own overwrite what they returned
        mark()
        return loss

    def publish(self):
        """Let the model see what the optimizer updates."""
        if self.masters:
            self.masters.publish()

    def averaged(self):
        """Within, the model has the weights to be evaluated: averaged ones, if there are."""
        return self.average.swapped_in(self.publish, self.world) if self.average else contextlib.nullcontext()

    def preserved(self):
        """Whatever runs within leaves weights, optimizer, scaler and random numbers as they were."""
        return preserving(self)


def run_steps(trainer, source, profiling, found, stop, metrics):
    """The measured steps. Returns (losses, (steps, 4) seconds for data, forward, backward, optimizer,
    evaluations by step)."""
    program, training, device = trainer.program, trainer.training, trainer.device
    timer = PhaseTimer(device, ("data", "forward", "backward", "optimizer"), profiling.enter, profiling.leave)
    losses, checked, evaluations = [], 0, Evaluations(trainer, source, metrics)
    steps = range(trainer.step_number, training.num_steps)
    supply = batches(source, steps, device, trainer.world)
    with tqdm(total=training.num_steps, initial=steps.start, disable=not trainer.world.first or None,
              unit="step", leave=False) as bar:
        for step in steps:
            timer.start()
            batch = next(supply)
            timer.mark()
            losses.append(trainer.step(batch, timer.mark))
            trainer.step_number = done = step + 1
            metrics.step(done, losses[-1], trainer)
            profiling.step()
            bar.update()
            stopping = trainer.world.heard(stop.signal) is not None  # read once: it may come at any moment
            ending = stopping or done == steps.stop
            saving = training.save_every and done % training.save_every == 0 and not ending
            evaluating = program.evaluate and not ending and done % training.eval_every == 0
            if ending or saving or evaluating or done % training.log_every == 0 or device.type == "cpu":
                with trainer.world.waiting():  # a captured collective has no time limit of its own
                    checked = reporting.require_finite(losses, checked, steps.start)
            if ending or done % training.log_every == 0:
                metrics.flush()
                times = timer.seconds()[-training.log_every:].sum(axis=1)
                bar.write(reporting.step_line(done, training, losses[-1].item(), float(np.median(times)),
                                              peak_megabytes(device, found), trainer.world), file=sys.stdout)
            if saving:
                save(trainer, training.save_checkpoint)
            if evaluating:
                with profiling.paused(), unmeasured_memory(device, found):
                    bar.write(evaluations.take(done, stop), file=sys.stdout)
            if stopping or evaluations.stopped:
                break
    stop.signal = trainer.world.settled(stop.signal)
    if training.save_checkpoint:
        save(trainer, training.save_checkpoint)
    return [loss.item() for loss in losses], timer.seconds(), evaluations


def train(program, settings, compare_with=None):
    """A training run from start-up lines to summary; returns its exit code."""
    training, profiler = settings.training, settings.profiler
    earlier = summary.read_summary(compare_with) if compare_with else None
    device = choose_device(training.device)
    world = distributed.begin(settings, device)
    process_settings(settings, device)
    path = os.path.join(profiler.profile_dir, program.result("performance_summary"))
    world.from_first(partial(files.results_directory, settings, path))
    for name in (training.save_checkpoint, training.save_best):
        world.from_first(partial(files.require_writable, name))
    require_score(program, training)
    source = program.open_source(world.whole(settings))
    program.before_training(settings, source)
    trainer = program.trainer(program, settings, device)
    if training.resume:
        load_run(trainer, training.resume, source)
    elif training.init_from:
        load_weights(trainer, training.init_from, source)
    trainer.trained_on.update(source.names)
    trainer.chosen_by.update(getattr(source, "choosing", ()))
    metrics = Metrics(settings, writes=world.first)
    reporting.describe_start(trainer, source)
    with files.StopRequest(patient=world.size > 1) as stop:
        found = warm_up(trainer, source, stop)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        left = training.num_steps - trainer.step_number
        with turns.turn(), Profiling(profiler, device, trainer.model.sublayers(), found, left) as profiling:
            losses, times, evaluations = run_steps(trainer, source, profiling, found, stop, metrics)
        with unmeasured_memory(device, found):
            result = summary.summarise(trainer, found, losses, times, evaluations.by_step)
            if world.first:  # before anything that can fail: evaluation, comparison, pictures
                files.write_json(path, result)
            if program.evaluate and world.from_first(lambda: stop.signal) is None:
                print(evaluations.take("final", stop))
        if world.first:
            summary.complete(path, result, earlier)
        analysis = None
        if profiler.enable_pytorch_profiler:
            analysis = write_analysis(trainer, source, found, times, profiling)
        reporting.print_ending(trainer, [path, metrics.path, metrics.draw(), analysis], evaluations)
        with trainer.averaged():
            if world.data_rank == 0:
                program.closing(trainer, source, evaluations.by_step)
    summary.print_summary(result, path, settings)
    ended_by = world.from_first(lambda: stop.signal)
    return 128 + ended_by if ended_by is not None else 0


# --------------------------------------------------------------------------------------------------------
# What the lab must know of this model, and the command line
# --------------------------------------------------------------------------------------------------------


PROGRAM = Program(
    **vars(COMMAND_LINE), version="v2_fused", suffix="v2", model=TinyOpenFoldV2, trainer=Trainer,
    open_source=proteins.open_source, check_batch=proteins.masked_batch, in_a_step=dict(only_loss=True),
    defined=defined, split=splitting.split_over, shake=move_kinks_away, sublayers=SUBLAYERS, costs=costs,
    blocks=lambda settings: settings.model.num_blocks, tiny=dict(num_blocks=1, num_seqs=8, seq_len=24),
    statistics=lambda settings: statistics(settings.fusion, settings.model.num_blocks),
    before_training=contacts.require_plots, start_lines=start_lines, evaluate=contacts.evaluate,
    evaluation_name="contact_precision", evaluation_line=contacts.contact_line, scores=contacts.scores,
    score=contacts.validation_score, closing=contacts.closing, modes={"--contacts": prediction.contacts},
    titles={"MSA QKV Fusion": "enable_qkv_fusion_msa", "Triangle QKV Fusion": "enable_qkv_fusion_triangle",
            "Flash Attention": "enable_flash_attention",
            "Triangle Gate/Proj Fusion": "enable_triangle_fusion", "Torch Compile": "enable_torch_compile"},
    success="V2 validation successful! Fusion setup working properly.", failure="V2 validation failed")


def run(argv=None, program=PROGRAM):
    """Parse the command line and do what it asks; returns the exit code. Raises UserError."""
    turns.die_with_parent()
    argv = with_demo(sys.argv[1:] if argv is None else argv)
    program = named_program(argv, program)
    arguments, settings, mode = parse(make_parser(program), program, argv)
    if arguments.check_flags:
        return reporting.print_settings(program, settings, mode)
    if mode is None:
        done = program.instead(program, settings)
        return train(program, settings, arguments.compare_with_v1) if done is None else done
    torchrun.require_alone(mode)
    if mode in program.modes:
        return program.modes[mode](program, settings)
    files.require_directory(settings.profiler.profile_dir)
    if mode == "--compare-fusion":
        return comparison.compare_fusion(program, settings, arguments.variants, arguments.combinations)
    modes = {"--validate-setup": accuracy.validate_setup, "--verify-accuracy": accuracy.verify_accuracy,
             "--retune": retune.retune}
    return modes[mode](program, settings)


def main(argv=None, program=PROGRAM):
    """run(), with every expected failure as one line on stderr; returns the exit code."""
    return distributed.exit_code(partial(run, program=program), argv, program.name)


if __name__ == "__main__":
    import tiny_openfold_v2  # as a module, so that every file of the project sees one set of classes

    sys.exit(tiny_openfold_v2.main())
