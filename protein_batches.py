"""Synthetic and real proteins in one batch format; contact precision, the metric of the project.

Every batch is a pure function of (seed, step): a resumed run sees the data it would have seen. A batch is a
dict of CPU tensors, the keyword arguments of TinyOpenFoldV2.forward: msa_tokens (B, N, S), target_tokens
(B, S), coords (B, S, 3) in Å, coord_mask (B, S); msa_targets (B, N, S) in training; seq_mask (B, S) and
row_mask (B, N) for real proteins, which may be padded.
"""
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from run_files import UserError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"  # tokens 0 to 19
UNKNOWN, GAP, MASK = 20, 21, 22
TOKENS = 23
CONTACT_DISTANCE = 8.0  # Å, between CB atoms (CA for glycine)
SEPARATION = 6  # contacts between residues nearer along the chain say nothing about the fold
BOND_LENGTH = 3.8  # Å, between neighbouring CA atoms
STIFFNESS, COMPACTNESS = 0.5, 0.06  # memory of the last direction, pull towards the centre: chance that two
# residues touch 0.20 at S 32, 0.14 at S 64, 0.11 at S 128
PARTNER = np.array([AMINO_ACIDS.index(pair[1 - pair.index(a)]) for a in AMINO_ACIDS
                    for pair in ("AW", "CY", "DK", "ER", "FL", "GP", "HN", "IV", "MQ", "ST") if a in pair])


def random_chains(noise):
    """Compact random chains: walks of BOND_LENGTH steps, pulled towards the origin. noise (B, S+1, 3) normal
    deviates; returns coordinates (B, S, 3) in Å. All steps at once, as a product with a (S, S) matrix."""
    steps = noise[:, 1:] + STIFFNESS * noise[:, :-1]
    steps *= BOND_LENGTH / np.linalg.norm(steps, axis=-1, keepdims=True)
    place = np.arange(steps.shape[1])
    decay = np.tril((1.0 - COMPACTNESS) ** (place[:, None] - place[None, :]).clip(0))
    return decay @ steps


def match_contacts(coords, priority, rounds=4):
    """Match residues in contact at random, each at most once: partner (B, S), itself where there is none.
    In each round the pairs that prefer each other (by priority (B, S, S)) are taken."""
    place = np.arange(coords.shape[1])
    distances = np.linalg.norm(coords[:, :, None] - coords[:, None], axis=-1)  # (B, S, S)
    far_apart = np.abs(place[:, None] - place[None, :]) >= SEPARATION
    weight = (priority + priority.transpose(0, 2, 1)) * ((distances < CONTACT_DISTANCE) & far_apart)
    partner = np.broadcast_to(place, weight.shape[:2]).copy()
    for _ in range(rounds):
        best = weight.argmax(axis=2)  # (B, S)
        wanted = np.take_along_axis(weight, best[:, :, None], axis=2)[:, :, 0] > 0
        mutual = (np.take_along_axis(best, best, axis=1) == place) & wanted
        partner = np.where(mutual, best, partner)
        weight *= ~(mutual[:, :, None] | mutual[:, None, :])
    return partner


def paired_alignment(rng, partner, num_seqs):
    """The easy world, (N, S) tokens: in every row matched residues hold partner amino acids, by one table for
    all proteins; all else is random."""
    msa = rng.integers(0, 20, (num_seqs, len(partner)))
    second = partner < np.arange(len(partner))  # of two partners, the second follows the first
    msa[:, second] = PARTNER[msa[:, partner[second]]]
    return msa


def covarying_alignment(rng, partner, num_seqs, letters=4, noise=0.1, gaps=0.05):
    """The hard world, nearer to real alignments, (N, S) tokens: each column has a few amino acids of its own,
    matched columns choose among theirs together, rows inherit half of their choices from a clade's ancestor;
    then noise and gaps. No table says which amino acids match: only the variation over the rows does."""
    shape = (num_seqs, len(partner))
    clade = rng.integers(0, math.ceil(num_seqs ** 0.5), num_seqs)
    choice, ancestor = rng.integers(0, letters, shape), rng.integers(0, letters, shape)[clade]
    inherited = rng.random(shape) < 0.5
    second = partner < np.arange(len(partner))
    for array in (choice, ancestor, inherited):
        array[:, second] = array[:, partner[second]]
    alphabet = rng.integers(0, 20, (len(partner), letters))
    msa = alphabet[np.arange(len(partner)), np.where(inherited, ancestor, choice)]
    msa = np.where(rng.random(shape) < noise, rng.integers(0, 20, shape), msa)
    msa[1:] = np.where(rng.random(shape) < gaps, GAP, msa)[1:]
    return msa


ALIGNMENTS = dict(paired=paired_alignment, covarying=covarying_alignment)


def synthetic_proteins(seed, indices, num_seqs, seq_len, world="paired"):
    """Proteins number `indices` of the world `seed`: alignments (B, N, S), coordinates (B, S, 3)."""
    draws = [np.random.default_rng((seed, int(index))) for index in indices]
    coords = random_chains(np.stack([rng.standard_normal((seq_len + 1, 3)) for rng in draws]))
    priority = np.stack([rng.random((seq_len, seq_len), dtype=np.float32) for rng in draws])
    partners = match_contacts(coords, priority)
    msa = np.stack([ALIGNMENTS[world](rng, partner, num_seqs)
                    for rng, partner in zip(draws, partners, strict=True)])
    return msa, coords.astype(np.float32)


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

    def __init__(self, config, training):
        self.config, self.training = config, training
        self.names, self.held_out = [], [f"synthetic-{i}" for i in self.HELD_OUT]

    def describe(self):
        return f"synthetic proteins ({self.training.synthetic_world}), {len(self.HELD_OUT)} held out"

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


class RealProteins:
    """Alignments with structures: random families, crops and rows in training, whole chains in evaluation."""

    def __init__(self, config, training):
        import protein_data
        self.config, self.training = config, training
        try:
            if training.data:
                families = protein_data.load_families(training.data)
            else:
                path, chain = protein_data.split_structure_argument(training.structure)
                families = [protein_data.load_protein(training.msa, path, chain, training.query)]
        except protein_data.DataError as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}") from None
        except protein_data.MissingPackageError as error:
            raise UserError(str(error), code=3) from None
        self.held_out = self.choose_held_out([family.name for family in families])
        self.families = [family for family in families if family.name not in self.held_out]
        self.unseen = [family for family in families if family.name in self.held_out]
        self.names = [family.name for family in self.families]

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

    def describe(self):
        return f"{len(self.families)} real proteins, {len(self.held_out)} held out"

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


def to_device(batch, device):
    if device.type == "cuda":
        return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
    return batch


def batches(source, steps, device):
    """Batches of the given steps, each made by a second thread while the step before it runs."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = None
        for step in steps:
            batch = pending.result() if pending else source.batch(step)
            pending = pool.submit(source.batch, step + 1) if step + 1 in steps else None
            yield to_device(batch, device)


def open_source(config, training):
    """The proteins that the flags ask for."""
    return (RealProteins if training.data or training.msa else SyntheticProteins)(config, training)


def contact_precision(probability, coords, coord_mask):
    """Share of true contacts among the L/2 and L most probable pairs at least SEPARATION apart (L residues
    with coordinates), and among all such pairs. probability (S, S), coords (S, 3), coord_mask (S,)."""
    seen = coord_mask.bool()
    i, j = torch.triu_indices(len(seen), len(seen), SEPARATION, device=seen.device)
    both = seen[i] & seen[j]
    i, j = i[both], j[both]
    contact = ((coords[i] - coords[j]).norm(dim=-1) < CONTACT_DISTANCE).float()
    ranked = contact[probability[i, j].argsort(descending=True)]
    length = int(seen.sum())
    return dict(p_l2=ranked[:max(length // 2, 1)].mean().item(), p_l=ranked[:length].mean().item(),
                chance=contact.mean().item())


@torch.no_grad()
def evaluate(model, source, device, stop=None, plot_directory=None):
    """contact_precision() by protein: {"training": {name: ...}, "held_out": {name: ...}}. The model runs
    uncompiled here, since whole chains differ in length. A signal in stop ends it early. With plot_directory,
    maps of the held-out proteins are written there."""
    was_training = model.training
    model.eval()
    results = {}
    with torch.compiler.set_stance("force_eager"):
        for group, proteins in source.evaluation().items():
            results[group] = {}
            for name, batch in proteins:
                if stop and stop.signal is not None:
                    break
                batch = to_device(batch, device)
                coords, coord_mask = batch.pop("coords")[0], batch.pop("coord_mask")[0]
                if coord_mask.sum() <= SEPARATION:
                    continue
                output = model(**batch)
                probability, distances = output["contact_probability"][0], output["distances"][0]
                results[group][name] = contact_precision(probability, coords, coord_mask)
                if plot_directory and group == "held_out":
                    plot_contacts(plot_directory, name, probability, distances, coords, coord_mask,
                                  results[group][name])
    model.train(was_training)
    return results


def require_matplotlib():
    """matplotlib's pyplot, drawing into files. Raises UserError (code 3) where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib", code=3) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def plot_contacts(directory, name, probability, distances, coords, coord_mask, precision):
    """Write NAME.png: prediction above the diagonal and truth below it, as contacts and as distances (Å)."""
    pyplot = require_matplotlib()
    os.makedirs(directory, exist_ok=True)
    true = (coords[:, None] - coords[None]).norm(dim=-1)
    true[~(coord_mask[:, None] * coord_mask[None]).bool()] = float("nan")
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    true_contacts = (true < CONTACT_DISTANCE).where(~true.isnan(), float("nan"))
    panels = (("contact probability", probability, true_contacts, dict(cmap="Greys", vmin=0, vmax=1)),
              ("CB distance, Å", distances, true, dict(cmap="viridis_r", vmin=2, vmax=22)))
    for axis, (title, predicted, truth, style) in zip(axes, panels, strict=True):
        both = torch.triu(predicted.float(), 1).nan_to_num() + torch.tril(truth.float(), -1)
        image = axis.imshow(both.cpu(), origin="upper", **style)
        axis.axline((0, 0), slope=1, color="0.6", linewidth=0.7)
        axis.set(title=f"{title}: predicted above, true below", xlabel="residue", ylabel="residue")
        figure.colorbar(image, ax=axis, shrink=0.85)
    figure.suptitle(f"{name}: P(L/2) {precision['p_l2']:.2f}, P(L) {precision['p_l']:.2f}, "
                    f"chance {precision['chance']:.2f}")
    figure.savefig(os.path.join(directory, f"{name}.png"), dpi=110)
    pyplot.close(figure)
