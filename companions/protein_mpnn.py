#!/usr/bin/env python3
"""ProteinMPNN: which sequence folds into this backbone? In one file, with its algebra as switches.

    python companions/protein_mpnn.py                    # a small first run
    python companions/protein_mpnn.py --compare-fusion   # what a switch buys
    python companions/protein_mpnn.py --data DIR --seq-len 512 --enable-bucketing  # your structures

This companion shows that algebra comes before kernels, on a graph with gathers where the Evoformer is dense.
A message is W3 gelu(W2 gelu(W1 [h_i; e_ij; h_j])). W1 of a concatenation is a sum, and W3 may come after the
sum over neighbours, so half of the arithmetic was never needed. The model is that of Dauparas et al. 2022
(doi:10.1126/science.add2187) under its authors' parameter names; for its backbones see backbones.py.
Reading order: first_layer and Messages, fused and plain side by side, then EncLayer, DecLayer, ProteinMPNN.

Letters in shape comments: B proteins, L residues, k neighbours, D channels, n = B L.
"""
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fusion_lab.training import errors

errors.begin(__name__)

from evoformer_kernels.limits import CHANNELS, HAS_TRITON, runs
from fusion_lab.training import flags
from fusion_lab.training.options import Checked, Switches, TrainingConfig, option
from fusion_lab.training.program import Cost, Loss, Model, Program


@dataclass(frozen=True)
class MpnnConfig(Checked):
    """Sizes of the model and of its input."""
    hidden_dim: int = option(128, "channels D of residues and edges", low=1)
    num_layers: int = option(3, "layers of the encoder, and of the decoder", low=1)
    neighbors: int = option(48, "neighbours k of a residue; a chain has at most as many as residues", low=1)
    seq_len: int = option(128, "residues L of a sample", low=1, resized=True)
    dropout: float = option(0.1, "dropout in all layers", low=0.0, below=1.0, resized=True)


@dataclass(frozen=True)
class MpnnTraining(TrainingConfig):
    """Backbones, and how batches are made of them."""
    data: str = option(None, "directory of structures, NAME.pdb or NAME.cif; default: built-in backbones",
                       type=str, metavar="DIR", read=True)
    shortest: int = option(None, "built-in backbones have from so many residues on up to --seq-len; default: "
                                 "all have --seq-len", low=2, type=int)
    enable_bucketing: bool = option(False, "batches of chains of like lengths, padded to 32, 64, 128 ... "
                                           "residues instead of --seq-len; a CUDA graph for each length")


@dataclass(frozen=True)
class MpnnSwitches(Switches):
    """Which operations run fused."""
    enable_split_fusion: bool = option(
        True, "W1 of [h_i; e_ij; h_j] as a sum: residues projected once, not once a neighbour", preset=True,
        title="Split Fusion")
    enable_aggregate_fusion: bool = option(
        True, "the last layer of a message after the sum over neighbours", preset=True,
        title="Aggregate Fusion")
    enable_edge_fusion: bool = option(
        True, "edges projected for all decoder layers in one GEMM; the embedding of residues' offset folded "
        "into the first GEMM of edges", preset=True, title="Edge Fusion")
    enable_message_kernel: bool = option(
        False, "Triton between the products of messages, split and aggregated; gradients of neighbours "
        "summed in one order", preset=True)
    enable_activation_checkpointing: bool = option(
        False, "keep only the inputs of every layer, recompute the rest in backward", recomputes=True)

    def idle(self, settings, on_gpu):
        found = super().idle(settings, on_gpu)
        if self.enable_message_kernel and not (on_gpu and HAS_TRITON and settings.training.use_amp):
            found["enable_message_kernel"] = "the message kernel needs a GPU, Triton and --use-amp"
        elif self.enable_message_kernel and settings.model.hidden_dim not in CHANNELS:
            found["enable_message_kernel"] = (
                f"the message kernel is for {', '.join(map(str, CHANNELS))} channels")
        return found


WITHOUT_TORCH = dict(
    file=__file__, about=__doc__, suffix="protein_mpnn", version="protein_mpnn", model_config=MpnnConfig,
    training_config=MpnnTraining, fusion_config=MpnnSwitches, axes=dict(batch_size="B", seq_len="L"),
    demo=dict(hidden_dim=64, num_layers=2, neighbors=16, seq_len=64, batch_size=8, learning_rate=2e-3,
              num_steps=300, log_every=20, eval_every=100))

flags.judge(__name__, **WITHOUT_TORCH)  # before torch is imported, which takes seconds

import torch
import torch.nn as nn
import torch.nn.functional as F

from companions import backbones
from evoformer_kernels.precision import at_least_float32
from tiny_openfold.layers.custom_gradients import recomputed, stored
from tiny_openfold.proteins.files import UNKNOWN
from tiny_openfold_v2 import Trainer, main

if HAS_TRITON:
    from companions.kernels import messages

# --- Messages, fused and plain side by side -------------------------------------------------------------

SCALE = 30  # the sum over neighbours is divided by this


class Graph(NamedTuple):
    """Which rows of a table a residue hears."""
    index: torch.Tensor    # (B, L, k)
    attends: torch.Tensor  # (B, L, k, 1), 0 for a neighbour that is not there
    leading: tuple | None  # messages.incoming(index), where the message kernel runs


def gather(table, index):
    """Rows of table (n, c) for index (B, L, k): (B, L, k, c)."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


def parts(layer, h_V):
    """The weights of layer for a residue itself, for an edge, for what is known of a neighbour."""
    D = h_V.shape[-1]
    return layer.weight.split([D, D, layer.in_features - 2 * D], dim=1)


def first_layer(layer, h_V, h_E, table, graph, split, projected=None):
    """gelu(layer([h_i; e_ij; t_j])), (B, L, k, D): residues h_V (B, L, D), edges h_E (B, L, k, D), and of
    table (n, c) the rows of graph. projected: the edges' share, if somebody has it already."""
    own, edge, other = parts(layer, h_V)
    if split or graph.leading:
        own, table = F.linear(h_V, own, layer.bias), F.linear(table, other)
        edges = F.linear(h_E, edge) if projected is None else projected
        if graph.leading:
            return messages.first_layer(own, edges, table, graph.index, graph.leading)
        return F.gelu(own[:, :, None] + gather(table, graph.index) + edges)
    neighbours = gather(table, graph.index)
    own_rows = h_V[:, :, None].expand(*neighbours.shape[:-1], -1)
    if projected is None:
        return F.gelu(layer(torch.cat([own_rows, h_E, neighbours], dim=-1)))
    weight = torch.cat([own, other], 1)
    return F.gelu(F.linear(torch.cat([own_rows, neighbours], -1), weight, layer.bias) + projected)


class FeedForward(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.W_in, self.W_out = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        return self.W_out(F.gelu(self.W_in(x)))


class Messages(nn.Module):
    """What all layers share: a message and its update. context: channels of what is known of a neighbour."""

    def __init__(self, config, fusion, context):
        super().__init__()
        D = config.hidden_dim
        self.split, self.aggregate = fusion.enable_split_fusion, fusion.enable_aggregate_fusion
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(D), nn.LayerNorm(D), nn.Dropout(config.dropout)
        self.W1, self.W2, self.W3 = nn.Linear(2 * D + context, D), nn.Linear(D, D), nn.Linear(D, D)
        self.dense = FeedForward(D)

    def message(self, h_V, h_E, table, graph, projected=None):
        """(B, L, D), the sum over neighbours."""
        x = first_layer(self.W1, h_V, h_E, table, graph, self.split, projected)  # (B, L, k, D)
        if graph.leading:
            x, present = F.linear(x, self.W2.weight), graph.attends[..., 0]
            return self.third_layer(messages.sum_over_neighbours(x, self.W2.bias, present), graph)
        x = F.gelu(self.W2(x))
        if self.aggregate:
            return self.third_layer((graph.attends * x).sum(2), graph)
        return (graph.attends * self.W3(x)).sum(2) / SCALE

    def third_layer(self, summed, graph):
        """W3 after the sum, which its bias enters as often as there are neighbours."""
        return (F.linear(summed, self.W3.weight) + graph.attends.sum(2) * self.W3.bias) / SCALE

    def update(self, h_V, message, mask):
        h_V = self.norm1(h_V + self.dropout(message))
        h_V = self.norm2(h_V + self.dropout(self.dense(h_V)))
        return h_V * mask[:, :, None].to(h_V.dtype)


class EncLayer(Messages):
    """Residues hear from their neighbours, then edges from both of their ends."""

    def __init__(self, config, fusion):
        D = config.hidden_dim
        super().__init__(config, fusion, context=D)
        self.norm3 = nn.LayerNorm(D)
        self.W11, self.W12, self.W13 = nn.Linear(3 * D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h_V, h_E, graph, mask):
        """h_V (B, L, D), h_E (B, L, k, D), graph into n residues, mask (B, L)."""
        h_V = self.update(h_V, self.message(h_V, h_E, h_V.flatten(0, 1), graph), mask)
        x = first_layer(self.W11, h_V, h_E, h_V.flatten(0, 1), graph, self.split)
        x = messages.biased_gelu(F.linear(x, self.W12.weight), self.W12.bias) if graph.leading else F.gelu(
            self.W12(x))
        return h_V, self.norm3(h_E + self.dropout(self.W13(x)))


class DecLayer(Messages):
    """A decoded neighbour tells its letter and its state in this layer, another one the encoder's state."""

    def __init__(self, config, fusion):
        super().__init__(config, fusion, context=2 * config.hidden_dim)

    def forward(self, h_V, h_E, table, graph, mask, projected=None):
        """table (2 n, 2 D): [letter; state] of all residues as decoded, then as not decoded."""
        return self.update(h_V, self.message(h_V, h_E, table, graph, projected), mask)


class DecoderEdges(nn.Module):
    """The edges' share of first_layer for all decoder layers: they all hear the same edges."""

    def forward(self, h_V, h_E, layers, fused):
        weights = [parts(layer.W1, h_V)[1] for layer in layers]  # (D, D); to (B, L, k, D) for each layer
        return F.linear(h_E, torch.cat(weights)).chunk(len(layers), -1) if fused else (None,) * len(layers)


# --- The model: the graph and its features, encoder and decoder -----------------------------------------

ATOMS = ("N", "Ca", "C", "O", "Cb")
PAIRS = ("Ca-Ca N-N C-C O-O Cb-Cb Ca-N Ca-C Ca-O Ca-Cb N-C N-O N-Cb Cb-C Cb-O O-C "
         "N-Ca C-Ca O-Ca Cb-Ca C-N O-N Cb-N C-Cb O-Cb C-O").split()
PLACES = [5 * ATOMS.index(a) + ATOMS.index(b) for a, b in (pair.split("-") for pair in PAIRS)]
RBF, FURTHEST, MAX_OFFSET = 16, 22.0, 32
OFFSETS = 2 * MAX_OFFSET + 2  # the last one: another chain


class ProteinFeatures(nn.Module):
    """25 distances between backbone atoms of two residues, in radial bases, and their offset in the chain."""

    def __init__(self, D, fused):
        super().__init__()
        self.embeddings, self.fused = nn.ModuleDict(dict(linear=nn.Linear(OFFSETS, RBF))), fused
        self.edge_embedding = nn.Linear(RBF + 25 * RBF, D, bias=False)
        self.norm_edges = nn.LayerNorm(D)
        self.register_buffer("places", torch.tensor(PLACES), persistent=False)

    def forward(self, X, E_idx, index, residue_idx, chain):
        """(B, L, k, D), of X (B, L, 4, 3) in Å; 16 + 25 * 16 features of an edge."""
        N, Ca, C, _ = X.unbind(2)
        b, c = Ca - N, C - Ca
        Cb = -0.58273431 * torch.cross(b, c, dim=-1) + 0.56802827 * b - 0.54067466 * c + Ca
        atoms = torch.cat([X, Cb[:, :, None]], dim=2)  # (B, L, 5, 3)
        others = gather(atoms.flatten(2).flatten(0, 1), index).unflatten(-1, (5, 3))  # (B, L, k, 5, 3)
        square = (atoms[:, :, None, :, None] - others[:, :, :, None]).square().sum(-1)  # (B, L, k, 5, 5)
        distance = stored((square + 1e-6).sqrt().flatten(-2)[..., self.places])  # not made anew for each base
        centres = torch.linspace(2.0, FURTHEST, RBF, dtype=X.dtype, device=X.device)
        rbf = torch.exp(-((distance[..., None] - centres) / ((FURTHEST - 2.0) / RBF)).square())
        offset = (residue_idx[:, :, None] - residue_idx.flatten()[index]).clamp(-MAX_OFFSET, MAX_OFFSET)
        offset = (offset + MAX_OFFSET).where(chain[:, :, None] == chain.flatten()[index], OFFSETS - 1)
        linear = self.embeddings["linear"]
        rbf = rbf.flatten(-2).to(linear.weight.dtype)
        if not self.fused:
            places = F.embedding(offset, linear.weight.t()) + linear.bias  # (B, L, k, 16)
            return self.norm_edges(self.edge_embedding(torch.cat([places, rbf], -1)))
        chosen = offset[..., None] == torch.arange(OFFSETS + -OFFSETS % 8, device=X.device)  # by 8, for GEMMs
        position, distances = self.edge_embedding.weight.split([RBF, 25 * RBF], 1)
        table = F.pad(position @ linear.weight, (0, -OFFSETS % 8))  # a column for each offset
        features = torch.cat([chosen.to(rbf.dtype), rbf], -1)
        return self.norm_edges(F.linear(features, torch.cat([table, distances], 1), position @ linear.bias))


class ProteinMPNN(nn.Module, Model):
    """DISCREPANCY: the decoder's messages leave out residues that are not there, where the authors' code
    lets padding in if a chain has fewer residues than neighbours; so padding changes nothing."""
    SUBLAYERS = ("features", "W_e", "encoder", "decoder_edges", "decoder")

    def __init__(self, config, fusion):
        super().__init__()
        self.config, self.fusion, D = config, fusion, config.hidden_dim
        self.features = ProteinFeatures(D, fusion.enable_edge_fusion)
        self.W_e, self.W_s = nn.Linear(D, D), nn.Embedding(UNKNOWN + 1, D)
        self.encoder_layers = nn.ModuleList(EncLayer(config, fusion) for _ in range(config.num_layers))
        self.decoder_layers = nn.ModuleList(DecLayer(config, fusion) for _ in range(config.num_layers))
        self.W_out, self.decoder_edges = nn.Linear(D, UNKNOWN + 1), DecoderEdges()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if fusion.enable_torch_compile:  # all layers of a kind run the same code: one compilation each
            for module in (self.features, *self.encoder_layers, *self.decoder_layers):
                module.compile(dynamic=False, mode=fusion.compile_mode)

    def forward(self, X, S, mask, residue_idx, chain, decoding_order, E_idx=None, targets=None):
        """X (B, L, 4, 3) N, CA, C, O in Å; all else (B, L): residues S, mask (1 = present), residue_idx,
        chain, residues in decoding_order, targets (-1 where nothing is asked; default S); but E_idx (B, L, k)
        neighbours, default by distance. Returns dict(log_probs (B, L, 21), loss)."""
        h_V, h_E, graph = self.encode(X, mask, residue_idx, chain, E_idx)
        rank = decoding_order.argsort(dim=1)  # when a residue's turn is
        decoded = rank.flatten()[graph.index] < rank[:, :, None]  # (B, L, k)
        graph = self.graph(graph.index + S.numel() * ~decoded, graph.attends, h_E, 2 * S.numel())
        logits = self.decode(h_V, h_E, self.W_s(S), graph, mask)
        log_probs = logits.to(at_least_float32(logits.dtype)).log_softmax(-1)
        counts = self.asked(mask, targets)
        targets = S if targets is None else targets.clamp(min=0)
        nll = -log_probs.gather(2, targets[:, :, None])[:, :, 0]
        count = counts.sum()
        loss = (nll * counts).sum() / count.clamp(min=1)
        return dict(log_probs=log_probs, loss=loss, losses=dict(loss=Loss(loss, count)))

    @staticmethod
    def asked(mask, targets):
        return mask if targets is None else mask * (targets >= 0)

    def layer(self, module, *inputs):
        return recomputed(self.fusion.enable_activation_checkpointing, module, *inputs,
                          random=self.config.dropout > 0)

    def graph(self, index, attends, h_E, rows):
        kernel = self.fusion.enable_message_kernel and h_E.shape[-1] in CHANNELS and runs(h_E)
        return Graph(index, attends, messages.incoming(index, rows) if kernel else None)

    def encode(self, X, mask, residue_idx, chain, E_idx=None):
        """Residues h_V, edges h_E, the graph into all n residues."""
        E_idx = backbones.nearest(X, mask, self.config.neighbors) if E_idx is None else E_idx
        starts = X.shape[1] * torch.arange(len(X), device=X.device)
        index = E_idx + starts[:, None, None]  # (B, L, k)
        h_E = self.W_e(self.features(X, E_idx, index, residue_idx, chain))  # (B, L, k, D)
        h_V = torch.zeros_like(h_E[:, :, 0])  # (B, L, D)
        attends = (mask[:, :, None] * mask.flatten()[index])[..., None].to(h_E.dtype)
        graph = self.graph(index, attends, h_E, mask.numel())
        for layer in self.encoder_layers:
            h_V, h_E = self.layer(layer, h_V, h_E, graph, mask)
        return h_V, h_E, graph

    def decode(self, h_V, h_E, h_S, graph, mask):
        """Logits (B, L, 21); graph into the 2 n rows of a DecLayer's table."""
        projected = self.decoder_edges(h_V, h_E, self.decoder_layers, self.fusion.enable_edge_fusion)
        hidden = torch.cat([torch.zeros_like(h_S), h_V], dim=-1)
        for layer, edges in zip(self.decoder_layers, projected, strict=True):
            table = torch.stack([torch.cat([h_S, h_V], -1), hidden]).flatten(0, 2)  # (2 n, 2 D)
            h_V = self.layer(layer, h_V, h_E, table, graph, mask, edges)
        return self.W_out(h_V)

    def sublayers(self):
        if self.fusion.enable_torch_compile:
            return []
        return [*((name, getattr(self, name)) for name in ("features", "W_e", "decoder_edges")),
                *(("encoder", layer) for layer in self.encoder_layers),
                *(("decoder", layer) for layer in self.decoder_layers)]

    def defined(self, output, batch):
        return dict(log_probs=output["log_probs"] * batch["mask"][:, :, None], loss=output["loss"])

    @staticmethod
    def least_bytes(settings):
        """What is kept of edges: their features, and by an encoder's layer its input and three products, by a
        decoder's two; but where layers are recomputed only inputs, and one layer."""
        c, training, lean = settings.model, settings.training, settings.fusion.enable_activation_checkpointing
        length = min(c.seq_len, backbones.SHORTEST_BUCKET) if training.enable_bucketing else c.seq_len
        edges = training.batch_size * length * min(c.neighbors, length)
        products = c.num_layers + 4 if lean else 6 * c.num_layers
        return edges * (25 * RBF + products * c.hidden_dim) * (2 if training.use_amp else 4)

    def costs(self, training):
        """Of one ideal kernel for each of: features; W_e; a message with its update; an edge's update; the
        edges' share for all decoder layers. What is between their products stays on the chip, and backward
        computes it again."""
        c, element, layers = self.config, 2 if training.use_amp else 4, self.config.num_layers
        n = training.batch_size * c.seq_len
        k = min(c.neighbors, c.seq_len)
        node, index, atoms = n * c.hidden_dim * element, 8 * n * k, 48 * n  # one pass over each
        edge = k * node
        features = edge + index + atoms
        encoder = Cost.of(self.encoder_layers[0], 3 * edge + 4 * node + 2 * index,
                          6 * edge + 8 * node + 2 * index, element)
        decoder = Cost.of(self.decoder_layers[0], edge + 6 * node + index, 2 * edge + 12 * node + index,
                          element)
        shared = edge * self.fusion.enable_edge_fusion
        return dict(features=Cost.of(self.features, features, features, element),
                    W_e=Cost.of(self.W_e, 2 * edge, 3 * edge, element),
                    encoder=encoder.times(layers), decoder=decoder.times(layers),
                    decoder_edges=Cost(None, (1 + layers) * shared, (2 + layers) * shared))

    def in_words(self, dtype):
        return dict(sizes="{num_layers}+{num_layers} layers, D {hidden_dim}, k {neighbors}".format(
            **vars(self.config)))


class GraphsByLength(Trainer):
    """A captured step for each shape of batches, of which bucketing makes a few."""

    def graphed_step(self, batch, mark):
        graphs = vars(self).setdefault("graphs", {})
        self.graph = graphs.get(batch["E_idx"].shape)
        loss = super().graphed_step(batch, mark)
        graphs[batch["E_idx"].shape] = self.graph
        return loss


PROGRAM = Program(**WITHOUT_TORCH, model=ProteinMPNN, data=backbones.open_source, trainer=GraphsByLength)

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
