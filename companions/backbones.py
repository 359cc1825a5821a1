"""Protein backbones with sequences, made here: what ProteinMPNN learns from, and which share it recovers.

A backbone is a compact random chain. How buried a residue is and how the chain bends there choose one of the
20 amino acids; a tenth of the residues is drawn at random, so the best possible recovery is known.

A batch holds the arguments of the model's forward: X (B, L, 4, 3) N, CA, C, O in Å; E_idx (B, L, k), the
neighbours; and, all (B, L): S, mask, residue_idx, chain, decoding_order, targets (-1 where nothing is asked).
"""
import math

import numpy as np
import torch

from fusion_lab.training.evaluations import Evaluation, evaluating
from fusion_lab.training.feeding import to_device
from fusion_lab.training.program import Data
from tiny_openfold.proteins.files import LETTERS, UNKNOWN
from tiny_openfold.proteins.synthetic import random_chains

NOISE = 0.1  # share of residues drawn at random
BEST_RECOVERY = 1 - NOISE + NOISE / 20
NEAR, BURIED, TURNED = 7.0, (6, 8, 11), (1.37, 1.83, 2.2, 2.53)  # Å; borders of neighbours, of angles in rad
HELD_OUT, BESIDE = range(16), range(16, 32)  # evaluated, and beside them; training has the others


def backbone(seed, index, length):
    """Backbone number `index` of a seed: tokens (L,), atoms (L, 4, 3) in Å."""
    rng = np.random.default_rng((seed, int(index)))
    alpha = random_chains(rng.standard_normal((1, length + 3, 3)))[0]  # a residue more at either end
    before, here, after = alpha[:-2], alpha[1:-1], alpha[2:]
    back, ahead = ((x - here) / np.linalg.norm(x - here, axis=1, keepdims=True) for x in (before, after))
    carbon = here + 1.52 * ahead
    side = np.cross(back, ahead)
    oxygen = carbon + 1.23 * side / np.linalg.norm(side, axis=1, keepdims=True).clip(1e-6)
    bend = np.digitize(np.arccos((back * ahead).sum(1).clip(-1, 1)), TURNED)
    near = (np.linalg.norm(here[:, None] - here, axis=2) < NEAR).sum(1)
    tokens = 5 * np.digitize(near, BURIED) + bend
    tokens = np.where(rng.random(len(here)) < NOISE, rng.integers(0, 20, len(here)), tokens)
    atoms = np.stack([here + 1.46 * back, here, carbon, oxygen], axis=1).astype(np.float32)
    return tokens[:length], atoms[:length]


def nearest(X, mask, k):
    """E_idx (B, L, k): the residues with the nearest CA, itself the first; missing ones come last."""
    distance = ((X[:, None, :, 1] - X[:, :, None, 1]).square().sum(-1) + 1e-6).sqrt()
    distance = distance + (1 - mask[:, None]) * 1e6
    return distance.topk(min(k, X.shape[1]), largest=False).indices


def batch_of(rng, backbones, neighbors, present=None, chain=False):
    """A batch of backbones of one length, to be decoded in a random order. present (B, L): which residues are
    there, default all; missing ones come last in the order."""
    tokens, atoms = (np.stack(part) for part in zip(*backbones, strict=True))
    present = np.ones(tokens.shape, bool) if present is None else present
    arrays = dict(X=np.where(present[:, :, None, None], atoms, 0), S=tokens * present,
                  mask=present.astype(np.float32), chain=(present & chain).astype(np.int64),
                  residue_idx=np.arange(tokens.shape[1]) * present,
                  decoding_order=(rng.random(tokens.shape) + ~present).argsort(axis=1),
                  targets=np.where((tokens < UNKNOWN) & present, tokens, -1))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return batch | dict(E_idx=nearest(batch["X"], batch["mask"], neighbors))


class Backbones(Data):
    """An endless supply of them, and some that training never sees."""

    def __init__(self, settings):
        self.config, self.training = settings.model, settings.training
        self.names, self.held_out = [], [f"synthetic-{i}" for i in HELD_OUT]

    def describe(self):
        return (f"built-in backbones, of whose residues {BEST_RECOVERY:.3f} can be known, {len(HELD_OUT)} "
                "held out")

    def made(self, numbers):
        return [backbone(self.training.seed, number, self.config.seq_len) for number in numbers]

    def batch(self, step):
        count = self.training.batch_size
        first = BESIDE.stop + step * count
        rng = np.random.default_rng((self.training.seed, step, 1))
        return batch_of(rng, self.made(range(first, first + count)), self.config.neighbors)

    def evaluation(self):
        """Batches of one protein that is held out."""
        for each in self.made(HELD_OUT):
            yield batch_of(np.random.default_rng((self.training.seed, 3)), [each], self.config.neighbors)

    def constant(self):
        """(the commonest residue of other proteins, its share of the residues held out)"""
        beside, asked = (np.bincount(np.concatenate([tokens for tokens, _ in self.made(numbers)]),
                                     minlength=20) for numbers in (BESIDE, HELD_OUT))
        return LETTERS[beside.argmax()], float(asked[beside.argmax()] / asked.sum())

    def check_batch(self):
        """Backbones in two chains, the last one with padding, each with an unknown residue."""
        length, count = self.config.seq_len, self.training.batch_size
        found, present = self.made(range(count)), np.ones((count, length), bool)
        for tokens, _ in found:
            tokens[1] = UNKNOWN
        present[-1, length - length // 4:] = False
        return batch_of(np.random.default_rng(0), found, self.config.neighbors, present,
                        chain=np.arange(length) >= length // 2)

    def evaluate(self, trainer, stop):
        """Each residue held out is predicted from the backbone and the native residues before it in a random
        order."""
        total = torch.zeros(3, dtype=torch.float64)
        with evaluating(trainer.model):
            for batch in self.evaluation():
                if stop.signal:
                    break
                log_probs = trainer.model(**to_device(batch, trainer.device))["log_probs"].float().cpu()
                total += recovery(log_probs, batch["targets"])
        right, nll, count = total.tolist()
        letter, share = self.constant()
        found = dict(recovery=right / max(count, 1), perplexity=math.exp(min(nll / max(count, 1), 100.0)),
                     residues=int(count), constant=letter, constant_recovery=share)
        line = ("Held-out recovery {recovery:.3f} of {best:.3f}, perplexity {perplexity:.2f}, {residues} "
                "residues; always {constant}: {constant_recovery:.3f}")
        return Evaluation(line.format(best=BEST_RECOVERY, **found),
                          {f"held-out {name}": found[name] for name in ("recovery", "perplexity")},
                          details=found)


def recovery(log_probs, targets):
    """Of log_probs (B, L, 21) and targets (B, L): of how many residues the letter is the most probable, the
    sum of the negative logarithms of their probabilities, and how many residues were asked for."""
    asked = targets >= 0
    nll = -log_probs[asked].gather(1, targets[asked][:, None])
    return torch.stack([(log_probs.argmax(-1) == targets)[asked].sum(), nll.sum(), asked.sum()]).double()
