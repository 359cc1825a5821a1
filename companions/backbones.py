"""Protein backbones with sequences: what ProteinMPNN learns from, and which share it recovers.

They are made here, or read from a directory of structures. A made one is a compact random chain. How buried a
residue is and how the chain bends there choose one of the 20 amino acids; a tenth of the residues is drawn at
random, so the best possible recovery is known.

A batch holds the arguments of the model's forward: X (B, L, 4, 3) N, CA, C, O in Å; E_idx (B, L, k), the
neighbours; and, all (B, L): S, mask, residue_idx, chain, decoding_order, targets (-1 where nothing is asked).
"""
import hashlib
import math
import os
from typing import NamedTuple

import numpy as np
import torch

from fusion_lab.training.errors import UserError
from fusion_lab.training.evaluations import Evaluation, evaluating
from fusion_lab.training.feeding import to_device
from fusion_lab.training.program import Data
from fusion_lab.training.words import counted
from tiny_openfold.proteins.alignments import split_suffix
from tiny_openfold.proteins.files import LETTERS, STRUCTURE_SUFFIXES, UNKNOWN, read_structure
from tiny_openfold.proteins.synthetic import random_chains

NOISE = 0.1  # share of residues drawn at random
BEST_RECOVERY = 1 - NOISE + NOISE / 20
NEAR, BURIED, TURNED = 7.0, (6, 8, 11), (1.37, 1.83, 2.2, 2.53)  # Å; borders of neighbours, of angles in rad
HELD_OUT, BESIDE = range(16), range(16, 32)  # evaluated, and beside them; training has the others
ONE_IN = 4  # files of structures is held out
SHORTEST_BUCKET, BLOCK = 32, 16  # residues; batches whose chains are sorted by length together


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


class Chains(NamedTuple):
    """Chains padded to one width."""
    tokens: np.ndarray   # (B, L)
    atoms: np.ndarray    # (B, L, 4, 3) in Å
    places: np.ndarray   # (B, L), along the chain
    present: np.ndarray  # (B, L), whether there is a residue


def padded(chains, width):
    """Chains of at most `width` residues, each (tokens, atoms, places), as Chains."""
    parts = [np.stack([np.pad(x, [(0, width - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in part])
             for part in zip(*chains, strict=True)]
    return Chains(*parts, np.arange(width) < np.array([[len(tokens)] for tokens, *_ in chains]))


def bucket(length, longest):
    """The length to which a batch is padded: a power of two from SHORTEST_BUCKET on, at most the longest."""
    return min(max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()), longest)


def batch_of(rng, chains, neighbors, second=False):
    """A batch of Chains, to be decoded in a random order, in which missing residues come last. second (L,):
    which residues are of a second chain."""
    tokens, atoms, places, present = chains
    arrays = dict(X=np.where(present[:, :, None, None], atoms, 0), S=tokens * present,
                  mask=present.astype(np.float32), chain=(present & second).astype(np.int64),
                  residue_idx=places * present,
                  decoding_order=(rng.random(tokens.shape) + ~present).argsort(axis=1),
                  targets=np.where((tokens < UNKNOWN) & present, tokens, -1))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return batch | dict(E_idx=nearest(batch["X"], batch["mask"], neighbors))


class Backbones(Data):
    """An endless supply of them, and some that training never sees. A chain is (tokens (L,), atoms (L, 4, 3),
    places (L,))."""
    best = BEST_RECOVERY

    def __init__(self, settings):
        self.config, self.training, self.longest = settings.model, settings.training, settings.model.seq_len
        self.names, self.held_out = [], [f"synthetic-{i}" for i in HELD_OUT]

    def describe(self):
        return (f"built-in backbones, of whose residues {BEST_RECOVERY:.3f} can be known, {len(HELD_OUT)} "
                "held out")

    def length(self, number):
        if self.training.shortest is None:
            return self.longest
        rng = np.random.default_rng((self.training.seed, number, 2))
        return int(rng.integers(min(self.training.shortest, self.longest), self.longest + 1))

    def made(self, numbers):
        return [(*backbone(self.training.seed, number, length), np.arange(length))
                for number, length in ((number, self.length(number)) for number in numbers)]

    def seen(self, numbers):
        """Chains to learn from, by their numbers."""
        return self.made(BESIDE.stop + number for number in numbers)

    def unseen(self):
        return self.made(HELD_OUT)

    def beside(self):
        """Others, whose residues say which one is the commonest."""
        return self.made(BESIDE)

    def seen_length(self, number):
        return self.length(BESIDE.stop + number)

    def batch(self, step):
        count, width = self.training.batch_size, self.longest
        numbers = range(step * count, (step + 1) * count)
        if self.training.enable_bucketing:  # of BLOCK batches, sorted by length, the one whose turn it is
            block, place = divmod(step, BLOCK)
            of_block = sorted(range(block * BLOCK * count, (block + 1) * BLOCK * count), key=self.seen_length)
            place = np.random.default_rng((self.training.seed, block, 4)).permutation(BLOCK)[place]
            numbers = of_block[place * count:(place + 1) * count]
            width = bucket(max(map(self.seen_length, numbers)), self.longest)
        rng = np.random.default_rng((self.training.seed, step, 1))
        return batch_of(rng, padded(self.seen(numbers), width), self.config.neighbors)

    def evaluation(self):
        """Batches of one protein that is held out."""
        for chain in self.unseen():
            rng = np.random.default_rng((self.training.seed, 3))
            yield batch_of(rng, padded([chain], self.longest), self.config.neighbors)

    def constant(self):
        """(the commonest residue of other proteins, its share of the residues held out)"""
        beside, asked = (np.bincount(np.concatenate([chain[0] for chain in chains]), minlength=UNKNOWN + 1)
                         [:UNKNOWN] for chains in (self.beside(), self.unseen()))
        return LETTERS[beside.argmax()], float(asked[beside.argmax()] / asked.sum())

    def check_batch(self):
        """Backbones in two chains, the last one with padding, each with an unknown residue."""
        length = self.longest
        chains = padded(self.seen(range(self.training.batch_size)), length)
        chains.tokens[:, 1] = UNKNOWN
        chains.present[-1, length - length // 4:] = False
        return batch_of(np.random.default_rng(0), chains, self.config.neighbors,
                        second=np.arange(length) >= length // 2)

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
        line = ("Held-out recovery {recovery:.3f}{best}, perplexity {perplexity:.2f}, {residues} residues; "
                "always {constant}: {constant_recovery:.3f}")
        return Evaluation(line.format(best=f" of {self.best:.3f}" if self.best else "", **found),
                          {f"held-out {name}": found[name] for name in ("recovery", "perplexity")},
                          details=found)


class RealBackbones(Backbones):
    """Chains of the structures in a directory, some files of which are held out, by a hash of their names."""
    best = None  # nobody knows

    def __init__(self, settings):
        super().__init__(settings)
        place = self.training.data
        try:
            names = sorted(os.listdir(place))
        except OSError as error:
            raise UserError(f"--data {place}: {error.strerror}") from None
        self.chains, self.others, self.names, self.held_out = [], [], [], []
        for stem, name in ((split_suffix(name)[0], name) for name in names if name[0] != "."):
            if split_suffix(name)[1] not in STRUCTURE_SUFFIXES:
                continue
            held = int.from_bytes(hashlib.sha256(stem.encode()).digest(), "big") % ONE_IN == 0
            (self.held_out if held else self.names).append(stem)
            (self.others if held else self.chains).extend(chains_of(os.path.join(place, name)))
        if not (self.chains and self.others):
            raise UserError(f"--data {place}: {counted(len(self.names), 'structure')} to learn from, "
                            f"{len(self.held_out)} held out, which one in {ONE_IN} is by its name; NAME"
                            f"{', '.join(STRUCTURE_SUFFIXES)} with backbones are needed for both")

    def describe(self):
        return (f"{counted(len(self.chains), 'chain')} of {self.training.data}, {len(self.others)} held out, "
                f"none used beyond {self.longest} residues")

    def chain_of(self, number):
        """Every chain once, in another order each time."""
        turn, place = divmod(number, len(self.chains))
        order = np.random.default_rng((self.training.seed, turn, 5)).permutation(len(self.chains))
        return self.chains[order[place]]

    def seen_length(self, number):
        return min(len(self.chain_of(number)[0]), self.longest)

    def seen(self, numbers):
        """A stretch of each chain that is longer than a sample."""
        found = []
        for number in numbers:
            chain = self.chain_of(number)
            room = max(len(chain[0]) - self.longest, 0)
            start = np.random.default_rng((self.training.seed, number, 6)).integers(room + 1)
            found.append(tuple(part[start:start + self.longest] for part in chain))
        return found

    def unseen(self):
        return [tuple(part[:self.longest] for part in chain) for chain in self.others]

    def beside(self):
        return self.chains


def chains_of(path):
    """The chains of a structure, each sequence once, without residues that lack an atom of the backbone."""
    found = {}
    for chain in read_structure(path):
        whole = np.isfinite(chain.backbone).all((1, 2))
        if whole.sum() > 1:
            found.setdefault(chain.sequence[whole].tobytes(), (
                chain.sequence[whole].astype(np.int64), chain.backbone[whole], np.flatnonzero(whole)))
    return list(found.values())


def open_source(settings):
    return (RealBackbones if settings.training.data else Backbones)(settings)


def recovery(log_probs, targets):
    """Of log_probs (B, L, 21) and targets (B, L): of how many residues the letter is the most probable, the
    sum of the negative logarithms of their probabilities, and how many residues were asked for."""
    asked = targets >= 0
    nll = -log_probs[asked].gather(1, targets[asked][:, None])
    return torch.stack([(log_probs.argmax(-1) == targets)[asked].sum(), nll.sum(), asked.sum()]).double()
