"""Synthetic and real proteins in one batch format.

Every batch is a pure function of (seed, step): a resumed run sees the data it would have seen. A batch is a
dict of CPU tensors, the keyword arguments of TinyOpenFoldV2.forward: msa_tokens (B, N, S), target_tokens
(B, S), coords (B, S, 3) in Å, coord_mask (B, S); msa_targets (B, N, S) in training; seq_mask (B, S) and
row_mask (B, N) for real proteins, which may be padded; extra_msa (B, M, S) for models that read it, padded
with rows of gaps; orientations (B, S, S, 3) in training of models with --orientations, for every protein, so
that all batches have one shape: IGNORED where there is no backbone.
"""
import math
import sys

import numpy as np
import torch

from fusion_lab.training import torchrun
from fusion_lab.training.errors import UserError
from fusion_lab.training.machine import choose_device
from fusion_lab.training.program import Data
from fusion_lab.training.words import printable
from tiny_openfold.proteins import evaluation, files
from tiny_openfold.proteins.files import GAP, MASK, Protein
from tiny_openfold.proteins.folds import Folds, Piece, RealFolds
from tiny_openfold.proteins.natural import GraphedWorld, natural_alignments
from tiny_openfold.proteins.orientations import BINS, IGNORED, bins_of
from tiny_openfold.proteins.relatives import learned_from
from tiny_openfold.proteins.synthetic import synthetic_proteins

MOST_EXTRA = 4096  # rows of extra_msa in an evaluation
FEW_COORDINATES = 0.5  # share of a protein's residues, below which there is a warning: nobody would see it
FEW = 8  # training families, at least, that an evaluation looks at beside those for validation


def corrupt(rng, msa, row_mask=None, part=(0, 1)):
    """AF2's masked-MSA task (supplement 1.2.7): of 15% of the positions, 10% become a random amino acid, 10%
    one drawn from their column, 10% stay, 70% are masked. Returns (corrupted, targets), targets -100
    elsewhere; both (B, N, S). Rows that row_mask (B, N) marks as missing stand last and are not drawn. With
    several ranks, numbers are drawn for the samples of all, and these take their part, (rank, ranks)."""
    own, size = slice(part[0] * len(msa), (part[0] + 1) * len(msa)), (part[1] * len(msa), *msa.shape[1:])
    chosen, kind = rng.random(size)[own] < 0.15, rng.random(size)[own]
    chosen &= msa != MASK
    rows = msa.shape[1] if row_mask is None else row_mask.sum(axis=1).astype(int)[:, None, None]
    other_row = rng.integers(0, rows, size)[own]
    choices = [rng.integers(0, 20, size)[own], np.take_along_axis(msa, other_row, axis=1), msa]
    replacement = np.select([kind < 0.1, kind < 0.2, kind < 0.3], choices, MASK)
    return np.where(chosen, replacement, msa), np.where(chosen, msa, -100)


def assemble(rng, msa, coords, coord_mask, seq_mask=None, row_mask=None, extra=None, backbone=None,
             clean=False, part=(0, 1)):
    """Numpy arrays of one batch -> the keyword arguments of TinyOpenFoldV2.forward, as CPU tensors. backbone:
    N, CA, C (B, S, 3, 3), NaN where there is none, for models that learn orientations."""
    corrupted, targets = (msa, None) if clean else corrupt(rng, msa, row_mask, part)
    if targets is not None and seq_mask is not None:
        targets = np.where(seq_mask[:, None] * row_mask[:, :, None] > 0, targets, -100)
    arrays = dict(msa_tokens=corrupted, target_tokens=msa[:, 0], seq_mask=seq_mask, row_mask=row_mask,
                  msa_targets=targets, coords=coords, coord_mask=coord_mask,
                  extra_msa=None if extra is None else extra.astype(np.uint8),
                  orientations=None if clean or backbone is None else bins_of(backbone).numpy())
    return {key: torch.from_numpy(np.ascontiguousarray(a)) for key, a in arrays.items() if a is not None}


class Proteins(Data):
    """What all proteins have in common."""
    chooses = True  # by validation families

    def __init__(self, settings):
        self.settings, self.config, self.training = settings, settings.model, settings.training
        # Alignment rows that a model reads beside those of its MSA representation; 0: none.
        self.extra = self.training.extra_seqs if self.config.coevolution != "none" else 0

    def batch(self, step):
        return self.part(step, 0, 1)

    def check_batch(self):
        """A synthetic batch whose last sample lacks its last residues and rows."""
        residues, rows = self.config.seq_len, self.config.num_seqs
        batch = SyntheticProteins(self.settings.having(synthetic_world="paired", real_folds=None)).batch(0)
        samples = len(batch["coords"])
        batch["seq_mask"], batch["row_mask"] = torch.ones(samples, residues), torch.ones(samples, rows)
        batch["seq_mask"][-1, residues - residues // 4:] = 0
        batch["row_mask"][-1, rows - rows // 4:] = 0
        batch["coord_mask"] = batch["coord_mask"] * batch["seq_mask"]
        batch["msa_targets"][(batch["seq_mask"][:, None] * batch["row_mask"][:, :, None]) == 0] = -100
        if self.config.orientations:  # any bins, since these proteins have no backbone
            bins = np.random.default_rng(0).integers(0, min(BINS.values()), batch["orientations"].shape)
            known = batch["seq_mask"][:, :, None] * batch["seq_mask"][:, None]
            batch["orientations"] = torch.from_numpy(bins).masked_fill(known[..., None] == 0, IGNORED)
        return batch

    def evaluate(self, trainer, stop):
        return evaluation.evaluate(trainer, self, stop)

    def finish(self, trainer, evaluations):
        evaluation.closing(trainer, self, evaluations)


HELD_OUT, TRAINED_ON = range(16), range(16, 32)  # numbers of built-in proteins; training goes on from 16


class SyntheticProteins(Proteins):
    """The built-in proteins of a world: an endless supply for training, a fixed set that training never
    sees."""

    def __init__(self, settings):
        super().__init__(settings)
        world = NaturalWorld if self.training.synthetic_world == "natural" else PairedWorld
        self.world, self.kept = world(self.training, self.config.seq_len), {}
        self.names, self.held_out = [], [f"synthetic-{i}" for i in HELD_OUT]

    def describe(self):
        idle = "; they have no backbone, so --orientations learns nothing from them"
        return (f"synthetic proteins ({self.training.synthetic_world}), {len(HELD_OUT)} held out"
                f"{idle * (self.config.orientations and self.training.real_folds is None)}{self.world}")

    def make(self, indices, rng=None, clean=False, part=(0, 1)):
        """A batch of the proteins of these numbers."""
        num_seqs = self.config.num_seqs
        msa, fold = self.world.draw(indices, num_seqs, max(num_seqs, self.extra), not clean)
        return assemble(rng, msa[:, :num_seqs], fold.coords, fold.known, clean=clean, part=part,
                        extra=msa[:, :self.extra] if self.extra else None,
                        backbone=fold.backbone if self.config.orientations else None)

    def part(self, step, rank, size):
        """The samples of one of `size` ranks, which together have those of batch(step)."""
        count = self.training.batch_size // size
        first = TRAINED_ON.start + step * self.training.batch_size + rank * count
        return self.make(range(first, first + count), np.random.default_rng((self.training.seed, step, 1)),
                         part=(rank, size))

    def evaluation(self):
        """{"training": ..., "held_out": ...}, each an iterator over (Protein, batch of one)."""
        return dict(training=self.one_by_one(TRAINED_ON), held_out=self.one_by_one(HELD_OUT))

    def one_by_one(self, indices):
        if indices not in self.kept:
            self.kept[indices] = self.make(indices, clean=True)  # all of a group at once
        for k, i in enumerate(indices):
            batch = {key: value[k:k + 1] for key, value in self.kept[indices].items()}
            yield as_protein(f"synthetic-{i}", batch), batch


class PairedWorld:
    """The world `paired` of synthetic.py: every protein follows from the seed and its own number."""

    def __init__(self, training, length):
        self.seed, self.length = training.seed, length

    def __str__(self):
        return ""

    def draw(self, indices, least, rows, graphed):
        """Alignments (B, rows, length), of which the first `least` rows are never gaps alone, and folds.Piece
        of the proteins of these numbers. graphed: a CUDA graph may make them."""
        msa, coords = synthetic_proteins(self.seed, indices, rows, self.length)
        return msa, Piece.of(coords)


class NaturalWorld:
    """The world `natural`. Its alignments are made on a CUDA GPU beside the training, else on the CPU, each
    rank's by themselves, and differ in depth: extra_msa has all rows, or a half, a quarter or an eighth of
    them. A seed gives the same ones every time on one kind of device, and others on another. In an evaluation
    "training" are new alignments of folds that are trained on, "held_out" are other folds. With --real-folds
    half of the folds are pieces of real chains."""
    REAL = 0.5

    def __init__(self, training, length):
        device, path = choose_device(training.device), training.real_folds
        self.seed, self.graph = training.seed, None
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self.folds, self.unseen = (Folds(self.seed + other, length) for other in (0, 1))
        self.real = RealFolds(path, length) if path else None

    def __str__(self):
        return f"; {self.REAL:.0%} of the folds are {self.real}" if self.real else ""

    def draw(self, indices, least, rows, graphed):
        """As PairedWorld.draw()."""
        rng = np.random.default_rng((self.seed, indices[0]))
        pieces = [self.piece(rng, indices[0] in HELD_OUT) for _ in indices]
        fold = Piece(*map(np.stack, zip(*pieces, strict=True)))
        seed, coords = int(rng.integers(2 ** 62)), torch.from_numpy(fold.coords)
        msa = self.align(seed, coords, rows, graphed).numpy().astype(np.int64)
        msa[:, max(rows >> int(rng.integers(4)), min(least, rows)):] = GAP
        return msa, fold

    def piece(self, rng, held_out):
        if self.real and rng.random() < self.REAL:
            return self.real.piece(rng, held_out)
        return Piece.of((self.unseen if held_out else self.folds).piece(rng))

    def align(self, seed, coords, rows, graphed):
        """(B, rows, length) tokens on the CPU; the graph is that of the first training batch's shape."""
        if graphed and self.device.type == "cuda":
            if self.graph is None:
                self.graph = GraphedWorld(self.device, coords, rows)
            if self.graph.coords.shape == coords.shape:
                return self.graph(seed, coords)
        generator = torch.Generator(self.device).manual_seed(seed)
        return natural_alignments(generator, coords.to(self.device), rows).cpu()


def as_protein(name, batch):
    """The Protein of a clean batch of one."""
    coords, seen = batch["coords"][0].numpy(), batch["coord_mask"][0].numpy()
    return Protein(name, batch["target_tokens"].numpy(), np.where(seen[:, None] > 0, coords, np.nan))


def held_out_of(names, training):
    """Set of the names that the flags keep out of training."""
    if training.holdout:
        chosen = training.holdout.split(",")
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise UserError(f"--holdout {','.join(unknown)}: no such family in {training.data}; "
                            f"there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    else:
        count = math.ceil(len(names) * (training.holdout_fraction or 0.0))
        order = np.random.default_rng((training.seed, 2)).permutation(len(names))
        chosen = [names[i] for i in order[:count]]
    if len(set(chosen)) == len(names):
        raise UserError("every family is held out: nothing is left to train on")
    return set(chosen)


def located(protein):
    """How many residues have coordinates."""
    return int(np.isfinite(protein.coords).all(axis=1).sum())


def below(proteins, share):
    """The proteins less than such a share of which has coordinates, in words; "" if there are none."""
    return ", ".join(f"{printable(protein.name)} ({located(protein)} of {protein.length} residues)"
                     for protein in proteins if located(protein) < share * protein.length)


def require_coordinates(proteins, least):
    """One line on stderr for proteins less than half of which has coordinates. Raises UserError where it is
    less than `least`, --min-coordinates."""
    if bare := below(proteins, least):
        raise UserError(f"too few coordinates in {bare}: fewer than --min-coordinates {least:g}; "
                        "is it the right structure? A lower --min-coordinates takes it as it is")
    if torchrun.first() and (few := below(proteins, FEW_COORDINATES)):
        print(f"warning: less than half has coordinates in {few}", file=sys.stderr)


class RealProteins(Proteins):
    """Alignments with structures: random families, crops and rows in training, whole chains in evaluation."""

    def __init__(self, settings):
        super().__init__(settings)
        training, self.left_out = settings.training, []  # files without a partner
        if training.data:
            families, self.left_out = files.load_families(training.data)
        else:
            path, chain = files.split_structure_argument(training.structure)
            families = [files.load_protein(training.msa, path, chain, training.query)]
        require_coordinates(families, training.min_coordinates)
        self.by_name = {family.name: family for family in families}
        self.held_out = held_out_of(list(self.by_name), training)
        rest = [family for family in families if family.name not in self.held_out]
        count = math.ceil(len(rest) * (training.validate_fraction or 0.0))
        order = np.random.default_rng((training.seed, 4)).permutation(len(rest))
        self.validation = [rest[i] for i in sorted(order[:count])]
        self.families = [rest[i] for i in sorted(order[count:])]
        if not self.families:
            raise UserError("--validate-fraction leaves no family to train on")
        self.unseen = [family for family in families if family.name in self.held_out]
        self.names = [family.name for family in self.families]
        self.choosing = {family.name for family in self.validation}
        self.sequences = learned_from(self.families)

    def describe(self):
        names = ", ".join(map(printable, self.left_out))
        strays = f"; left out for want of a partner: {names}" if names else ""
        validated = f", {len(self.validation)} for validation" if self.validation else ""
        families = self.by_name.values()
        remarks = [printable(remark) for family in families for remark in family.remarks]
        strays += "".join(f"; {remark}" for remark in remarks[:2])
        strays += f"; {len(remarks) - 2} more of this kind" * (len(remarks) > 2)
        return (f"{len(self.families)} real proteins{validated}, {len(self.held_out)} held out; "
                f"{sum(map(located, families))} of {sum(one.length for one in families)} residues have "
                f"coordinates{strays}")

    def take(self, rng, family, seq_len, num_seqs, extra=0):
        """{argument of assemble(): array} of one sample, padded to (num_seqs, seq_len): a crop with
        coordinates, the query and other rows; then, if the model reads them, extra rows, those among them; if
        it learns orientations, the backbone."""
        start = 0
        if family.length > seq_len:  # centred on a residue with coordinates, so that no crop is empty
            centre = rng.choice(np.flatnonzero(np.isfinite(family.coords[:, 0])))
            start = int(np.clip(centre - rng.integers(seq_len), 0, family.length - seq_len))
        rows = np.append(0, rng.permutation(np.arange(1, len(family.msa))))
        crop = slice(start, start + seq_len)
        msa, coords = family.msa[rows[:num_seqs], crop].astype(np.int64), family.coords[crop]
        sample = dict(msa=padded(msa, (num_seqs, seq_len), GAP),
                      coords=padded(np.nan_to_num(coords), (seq_len, 3)),
                      coord_mask=padded(np.isfinite(coords[:, 0]).astype(np.float32), (seq_len,)),
                      seq_mask=padded(np.ones(msa.shape[1], np.float32), (seq_len,)),
                      row_mask=padded(np.ones(msa.shape[0], np.float32), (num_seqs,)))
        if extra:
            sample["extra"] = padded(family.msa[rows[:extra], crop], (extra, seq_len), GAP)
        if self.config.orientations:
            sample["backbone"] = padded(family.backbone[crop, :3], (seq_len, 3, 3), np.nan)  # N, CA, C
        return sample

    def batch(self, step):
        """What is drawn for a sample depends on those before it, so every rank draws those of all."""
        rng = np.random.default_rng((self.training.seed, step, 1))
        chosen = rng.choice(len(self.families), self.training.batch_size,
                            replace=self.training.batch_size > len(self.families))
        samples = [self.take(rng, self.families[i], self.config.seq_len, self.config.num_seqs, self.extra)
                   for i in chosen]
        return assembled(rng, samples)

    def evaluation(self):
        """As SyntheticProteins.evaluation: whole chains, --eval-seqs rows, the same ones every time."""
        def batches(families):
            for family in families:
                rng = np.random.default_rng((self.training.seed, 3))
                rows = min(self.training.eval_seqs or self.config.num_seqs, len(family.msa))
                extra = min(len(family.msa), MOST_EXTRA) if self.extra else 0
                sample = self.take(rng, family, family.length, rows, extra)
                yield family, assembled(rng, [sample], clean=True)
        few = max(len(self.validation) + len(self.unseen), FEW) if self.validation else None
        groups = dict(training=self.families[:few], validation=self.validation, held_out=self.unseen)
        return {key: batches(families) for key, families in groups.items()
                if key != "validation" or families}


def padded(array, shape, value=0):
    return np.pad(array, [(0, size - there) for size, there in zip(shape, array.shape, strict=True)],
                  constant_values=value)


def assembled(rng, samples, clean=False):
    """assemble() for what RealProteins.take() returns."""
    return assemble(rng, clean=clean, **{key: np.stack([sample[key] for sample in samples])
                                         for key in samples[0]})


def open_source(settings):
    """The proteins that the flags ask for. Raises UserError, also where --plot-contacts cannot be obeyed."""
    training = settings.training
    source = (RealProteins if training.data or training.msa else SyntheticProteins)(settings)
    if training.plot_contacts:
        evaluation.require_plots(training.plot_contacts, source.held_out)
    return source
