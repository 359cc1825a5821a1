"""The built-in proteins: compact random chains whose contacts co-vary in the alignment."""
import math

import numpy as np

from proteins.contacts import CONTACT_DISTANCE, SEPARATION
from proteins.files import AMINO_ACIDS, GAP

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
    position = np.arange(steps.shape[1])
    decay = np.tril((1.0 - COMPACTNESS) ** (position[:, None] - position[None, :]).clip(0))
    return decay @ steps


def match_contacts(coords, priority, rounds=4):
    """Match residues in contact at random, each at most once: partner (B, S), itself where there is none.
    In each round the pairs that prefer each other (by priority (B, S, S)) are taken."""
    position = np.arange(coords.shape[1])
    distances = np.linalg.norm(coords[:, :, None] - coords[:, None], axis=-1)  # (B, S, S)
    far_apart = np.abs(position[:, None] - position[None, :]) >= SEPARATION
    weight = (priority + priority.transpose(0, 2, 1)) * ((distances < CONTACT_DISTANCE) & far_apart)
    partner = np.broadcast_to(position, weight.shape[:2]).copy()
    for _ in range(rounds):
        best = weight.argmax(axis=2)  # (B, S)
        wanted = np.take_along_axis(weight, best[:, :, None], axis=2)[:, :, 0] > 0
        mutual = (np.take_along_axis(best, best, axis=1) == position) & wanted
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
