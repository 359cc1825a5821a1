"""Synthetic and real proteins in one batch format.

Every batch is a pure function of (seed, step): a resumed run sees the data it would have seen. A batch is a
dict of CPU tensors, the keyword arguments of TinyOpenFoldV2.forward: msa_tokens (B, N, S), target_tokens
(B, S), coords (B, S, 3) in Å, coord_mask (B, S); msa_targets (B, N, S) in training; seq_mask (B, S) and
row_mask (B, N) for real proteins, which may be padded.
"""
import math

import numpy as np
import torch

from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import MISSING, UserError, printable
from proteins import files
from proteins.files import GAP, MASK
from proteins.synthetic import synthetic_proteins


def corrupt(rng, msa, row_mask=None):
    """AF2's masked-MSA task (supplement 1.2.7): of 15% of the positions, 10% become a random amino acid, 10%
    one drawn from their column, 10% stay, 70% are masked. Returns (corrupted, targets), targets -100
    elsewhere; both (B, N, S). Rows that row_mask (B, N) marks as missing stand last and are not drawn."""
    chosen, kind = rng.random(msa.shape) < 0.15, rng.random(msa.shape)
    chosen &= msa != MASK
    rows = msa.shape[1] if row_mask is None else row_mask.sum(axis=1).astype(int)[:, None, None]
    other_row = rng.integers(0, rows, msa.shape)
    choices = [rng.integers(0, 20, msa.shape), np.take_along_axis(msa, other_row, axis=1), msa]
    replacement = np.select([kind < 0.1, kind < 0.2, kind < 0.3], choices, MASK)
    return np.where(chosen, replacement, msa), np.where(chosen, msa, -100)


def assemble(rng, msa, coords, coord_mask, seq_mask=None, row_mask=None, clean=False):
    """Numpy arrays of one batch -> the keyword arguments of TinyOpenFoldV2.forward, as CPU tensors."""
    corrupted, targets = (msa, None) if clean else corrupt(rng, msa, row_mask)
    if targets is not None and seq_mask is not None:
        targets = np.where(seq_mask[:, None] * row_mask[:, :, None] > 0, targets, -100)
    arrays = dict(msa_tokens=corrupted, target_tokens=msa[:, 0], seq_mask=seq_mask, row_mask=row_mask,
                  msa_targets=targets, coords=coords, coord_mask=coord_mask)
    return {key: torch.from_numpy(np.ascontiguousarray(a)) for key, a in arrays.items() if a is not None}


class SyntheticProteins:
    """The built-in proteins: an endless supply for training, a fixed set that training never sees."""
    HELD_OUT, TRAINED_ON = range(16), range(16, 32)

    def __init__(self, settings):
        self.config, self.training = settings.model, settings.training
        self.names, self.held_out = [], [f"synthetic-{i}" for i in self.HELD_OUT]

    def describe(self):
        return f"synthetic proteins ({self.training.synthetic_world}), {len(self.HELD_OUT)} held out"

    def structure(self, name):
        """What a structure file says of a protein, a files.Protein: here there is no file."""

    def make(self, indices, rng=None, clean=False):
        msa, coords = synthetic_proteins(self.training.seed, indices, self.config.num_seqs,
                                         self.config.seq_len, self.training.synthetic_world)
        return assemble(rng, msa, coords, np.ones(coords.shape[:2], np.float32), clean=clean)

    def batch(self, step):
        first = self.TRAINED_ON.start + step * self.training.batch_size
        return self.make(range(first, first + self.training.batch_size),
                         np.random.default_rng((self.training.seed, step, 1)))

    def evaluation(self):
        """{"training": ..., "held_out": ...}, each an iterator over (name, batch of one)."""
        return {key: ((f"synthetic-{i}", self.make([i], clean=True)) for i in indices)
                for key, indices in (("training", self.TRAINED_ON), ("held_out", self.HELD_OUT))}


class HoldsOut:
    """What sources of real proteins share: which are held out."""

    def choose_held_out(self, names):
        if self.training.holdout:
            chosen = self.training.holdout.split(",")
            unknown = [name for name in chosen if name not in names]
            if unknown:
                raise UserError(f"--holdout {','.join(unknown)}: no such family in {self.training.data}; "
                                f"there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
        else:
            count = math.ceil(len(names) * (self.training.holdout_fraction or 0.0))
            order = np.random.default_rng((self.training.seed, 2)).permutation(len(names))
            chosen = [names[i] for i in order[:count]]
        if len(set(chosen)) == len(names):
            raise UserError("--holdout keeps every family out: nothing is left to train on")
        return set(chosen)


class RealProteins(HoldsOut):
    """Alignments with structures: random families, crops and rows in training, whole chains in evaluation."""

    def __init__(self, settings):
        self.config, self.training = settings.model, settings.training
        training, self.left_out = settings.training, []  # files without a partner
        try:
            if training.data:
                families = files.load_families(training.data, self.left_out)
            else:
                path, chain = files.split_structure_argument(training.structure)
                families = [files.load_protein(training.msa, path, chain, training.query)]
        except files.DataError as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from None
        except files.MissingPackageError as error:
            raise UserError(str(error), code=MISSING) from None
        self.held_out = self.choose_held_out([family.name for family in families])
        self.families = [family for family in families if family.name not in self.held_out]
        self.unseen = [family for family in families if family.name in self.held_out]
        self.names = [family.name for family in self.families]

    def describe(self):
        names = ", ".join(map(printable, self.left_out))
        strays = f", left out for want of a partner: {names}" if names else ""
        return f"{len(self.families)} real proteins, {len(self.held_out)} held out{strays}"

    def structure(self, name):
        return next(family for family in self.families + self.unseen if family.name == name)

    def take(self, rng, family, seq_len, num_seqs):
        """One sample, padded to (num_seqs, seq_len): a crop with coordinates, the query and other rows."""
        start = 0
        if family.length > seq_len:  # centred on a residue with coordinates, so that no crop is empty
            centre = rng.choice(np.flatnonzero(np.isfinite(family.coords[:, 0])))
            start = int(np.clip(centre - rng.integers(seq_len), 0, family.length - seq_len))
        rows = rng.permutation(np.arange(1, len(family.msa)))[:num_seqs - 1]
        msa = family.msa[np.append(0, rows), start:start + seq_len]
        coords = family.coords[start:start + seq_len]
        pad_n, pad_s = num_seqs - msa.shape[0], seq_len - msa.shape[1]
        seen = np.isfinite(coords[:, 0])
        return (np.pad(msa, ((0, pad_n), (0, pad_s)), constant_values=GAP).astype(np.int64),
                np.pad(np.nan_to_num(coords), ((0, pad_s), (0, 0))).astype(np.float32),
                np.pad(seen, (0, pad_s)).astype(np.float32),
                np.pad(np.ones(msa.shape[1], np.float32), (0, pad_s)),
                np.pad(np.ones(msa.shape[0], np.float32), (0, pad_n)))

    def batch(self, step):
        rng = np.random.default_rng((self.training.seed, step, 1))
        chosen = rng.choice(len(self.families), self.training.batch_size,
                            replace=self.training.batch_size > len(self.families))
        samples = [self.take(rng, self.families[i], self.config.seq_len, self.config.num_seqs)
                   for i in chosen]
        return assemble(rng, *(np.stack(part) for part in zip(*samples, strict=True)))

    def evaluation(self):
        """As SyntheticProteins.evaluation: whole chains, --eval-seqs rows, the same ones every time."""
        def batches(families):
            for family in families:
                rng = np.random.default_rng((self.training.seed, 3))
                rows = min(self.training.eval_seqs or self.config.num_seqs, len(family.msa))
                sample = self.take(rng, family, family.length, rows)
                yield family.name, assemble(rng, *(part[None] for part in sample), clean=True)
        return {"training": batches(self.families), "held_out": batches(self.unseen)}


def open_source(settings):
    """The proteins that the flags ask for."""
    real = settings.training.data or settings.training.msa
    return (RealProteins if real else SyntheticProteins)(settings)


def masked_batch(settings, device):
    """A synthetic batch whose last sample lacks its last residues and rows, so that masks are checked too."""
    residues, rows = settings.model.seq_len, settings.model.num_seqs
    batch = SyntheticProteins(settings).batch(0)
    samples = len(batch["coords"])
    batch["seq_mask"], batch["row_mask"] = torch.ones(samples, residues), torch.ones(samples, rows)
    batch["seq_mask"][-1, residues - residues // 4:] = 0
    batch["row_mask"][-1, rows - rows // 4:] = 0
    batch["coord_mask"] = batch["coord_mask"] * batch["seq_mask"]
    batch["msa_targets"][(batch["seq_mask"][:, None] * batch["row_mask"][:, :, None]) == 0] = -100
    return to_device(batch, device)
