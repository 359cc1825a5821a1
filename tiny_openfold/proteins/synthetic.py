"""The built-in proteins: compact random chains whose contacts co-vary in the alignment."""
import numpy as np

from tiny_openfold.proteins.contacts import CONTACT_DISTANCE, SEPARATION
from tiny_openfold.proteins.files import AMINO_ACIDS

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


def match_contacts(coords, priority):
    """Match residues in contact at random, each at most once: partner (B, S), itself where there is none.
    In each of four rounds the pairs that prefer each other (by priority (B, S, S)) are taken."""
    position = np.arange(coords.shape[1])
    distances = np.linalg.norm(coords[:, :, None] - coords[:, None], axis=-1)  # (B, S, S)
    far_apart = np.abs(position[:, None] - position[None, :]) >= SEPARATION
    weight = (priority + priority.transpose(0, 2, 1)) * ((distances < CONTACT_DISTANCE) & far_apart)
    partner = np.broadcast_to(position, weight.shape[:2]).copy()
    for _ in range(4):
        best = weight.argmax(axis=2)  # (B, S)
        wanted = np.take_along_axis(weight, best[:, :, None], axis=2)[:, :, 0] > 0
        mutual = (np.take_along_axis(best, best, axis=1) == position) & wanted
        partner = np.where(mutual, best, partner)
        weight *= ~(mutual[:, :, None] | mutual[:, None, :])
    return partner


def paired_alignment(rng, partner, num_seqs):
    """(N, S) tokens: in every row matched residues hold partner amino acids, by one table for all proteins;
    all else is random."""
    msa = rng.integers(0, 20, (num_seqs, len(partner)))
    second = partner < np.arange(len(partner))  # of two partners, the second follows the first
    msa[:, second] = PARTNER[msa[:, partner[second]]]
    return msa


def synthetic_proteins(seed, indices, num_seqs, seq_len):
    """Proteins number `indices` of this seed: alignments (B, N, S), coordinates (B, S, 3)."""
    draws = [np.random.default_rng((seed, int(index))) for index in indices]
    coords = random_chains(np.stack([rng.standard_normal((seq_len + 1, 3)) for rng in draws]))
    priority = np.stack([rng.random((seq_len, seq_len), dtype=np.float32) for rng in draws])
    partners = match_contacts(coords, priority)
    msa = np.stack([paired_alignment(rng, partner, num_seqs)
                    for rng, partner in zip(draws, partners, strict=True)])
    return msa, coords.astype(np.float32)
