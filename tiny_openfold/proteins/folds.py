"""Built-in folds for the world `natural`: helices and strands packed in layers, joined by loops.

The layout is that of ideal forms (Taylor 2002, doi:10.1038/416657a): sheets and layers of helices 10 Å apart,
strands 4.8 Å and helices 10 Å beside each other, neighbours along the chain in opposite directions, which
makes hairpins antiparallel and strands joined by a helix parallel. Lengths in Å.
"""
from typing import NamedTuple

import numpy as np

from tiny_openfold.proteins.contacts import CONTACT_DISTANCE, SEPARATION

STRAND_GAP, HELIX_GAP, LAYER_GAP = 4.8, 9.6, 9.8
STRAND_RISE, HELIX_RISE, HELIX_RADIUS = 3.3, 1.5, 2.3
HELIX_TURN = np.deg2rad(100)
TWIST = np.deg2rad(-20)  # of a strand against the one beside it
CB_LENGTH = 1.53  # CA to CB
LAYOUTS = (("e", "e"), ("h", "e"), ("h", "e", "h"), ("h", "h"), ("e",))  # layers from bottom to top
SHARES = (0.27, 0.25, 0.27, 0.14, 0.07)
DENSITY = (0.9, 2.2)  # contacts of a residue, from the least to the most that a fold should have


def helix(length):
    """(length, 3) CA atoms along y, centred."""
    angle = np.arange(length) * HELIX_TURN
    rise = (np.arange(length) - (length - 1) / 2) * HELIX_RISE
    return np.stack([HELIX_RADIUS * np.cos(angle), rise, HELIX_RADIUS * np.sin(angle)], axis=1)


def strand(length):
    """(length, 3) CA atoms along y, centred; their side chains point to +z and -z in turn."""
    place = np.arange(length)
    rise = (place - (length - 1) / 2) * STRAND_RISE
    return np.stack([np.zeros(length), rise, 0.9 * (-1.0) ** place], axis=1)


def loop(start, end, rng):
    """CA atoms between two others, over an arc outwards, about a bond apart."""
    gap = np.linalg.norm(end - start)
    count = max(int(np.ceil(gap / 3.2)) - 1, 2) + int(rng.integers(0, 4))
    middle = (start + end) / 2
    outwards = middle * [0.3, 1.0, 0.5]
    outwards /= np.linalg.norm(outwards) + 1e-6
    bulge = np.sqrt(max(((count + 1) * 3.4) ** 2 - gap ** 2, 0)) * 0.45
    t = np.linspace(0, 1, count + 2)[1:-1, None]
    arc = start * (1 - t) + end * t + 4 * t * (1 - t) * bulge * outwards
    return arc + 0.6 * rng.standard_normal((count, 3))


def slots(rng, residues):
    """The layers of a fold for about this many residues: [(kind, x, z)] of its helices and strands."""
    layers = LAYOUTS[rng.choice(len(LAYOUTS), p=SHARES)]
    room = dict(e=9.5, h=17.0)  # residues that one takes with its loop
    width = max(residues / sum(room[kind] / dict(e=STRAND_GAP, h=HELIX_GAP)[kind] for kind in layers), 10.0)
    positions = []
    for level, kind in enumerate(layers):
        gap = dict(e=STRAND_GAP, h=HELIX_GAP)[kind]
        count = max(int(round(width / gap)), 2)
        x = (np.arange(count) - (count - 1) / 2) * gap
        positions += [(kind, at, (level - (len(layers) - 1) / 2) * LAYER_GAP) for at in x]
    return positions


def route(rng, positions):
    """An order in which a chain visits the positions: mostly to one that is near."""
    remaining = list(range(len(positions)))
    order = [remaining.pop(int(rng.integers(len(remaining))))]
    while remaining:
        _, x, z = positions[order[-1]]
        far = np.array([abs(positions[i][1] - x) + 0.7 * abs(positions[i][2] - z) for i in remaining])
        chance = np.exp(-far / 5.0)
        order.append(remaining.pop(int(rng.choice(len(remaining), p=chance / chance.sum()))))
    return order


def backbone(rng, residues):
    """(about residues, 3) CA atoms of one random fold."""
    positions, chain = slots(rng, residues), []
    for number, i in enumerate(route(rng, positions)):
        kind, x, z = positions[i]
        piece = helix(int(rng.integers(9, 19))) if kind == "h" else strand(int(rng.integers(4, 9)))
        if number % 2:
            piece = piece * [1, -1, -1]  # half a turn about x: upside down, and of the same hand
        angle = TWIST * x / STRAND_GAP + rng.normal(0, 0.12) + (0.7 if kind == "h" else 0) * np.sign(z)
        cos, sin = np.cos(angle), np.sin(angle)
        rotation = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
        if kind == "h":  # a helix lies across its layer, turned about z
            rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        piece = piece @ rotation.T + [x, 0, z] + rng.normal(0, 0.5, 3)
        if chain:
            chain.append(loop(chain[-1][-1], piece[0], rng))
        chain.append(piece)
    return np.concatenate(chain)


def side_chains(ca):
    """CB atoms (S, 3) of CA atoms (S, 3): away from both neighbours, to the side that L-amino acids have."""
    before = np.diff(ca, axis=0, prepend=2 * ca[:1] - ca[1:2])
    after = np.diff(ca, axis=0, append=2 * ca[-1:] - ca[-2:-1])
    away, side = before - after, np.cross(before, after)
    away, side = (v / (np.linalg.norm(v, axis=1, keepdims=True) + 1e-6) for v in (away, side))
    return ca + CB_LENGTH * (0.8 * away + 0.6 * side)


def contacts_per_residue(cb):
    apart = np.linalg.norm(cb[:, None] - cb, axis=-1)
    return np.triu(apart < CONTACT_DISTANCE, SEPARATION).sum() / len(cb)


class Piece(NamedTuple):
    """What a model is asked of S residues; with B in front, of a batch."""
    coords: np.ndarray    # (S, 3) CB atoms, Å; finite
    known: np.ndarray     # (S,) 1 where coords mean something
    backbone: np.ndarray  # (S, 3, 3) N, CA, C; NaN where there is none

    @classmethod
    def of(cls, coords):
        """CB atoms (..., S, 3) alone, all known."""
        return cls(coords, np.ones(coords.shape[:-1], np.float32),
                   np.full((*coords.shape[:-1], 3, 3), np.nan, np.float32))


class Folds:
    """A seeded collection of long chains; what a world asks for are pieces of them."""
    CHAINS, TRIES = 512, 6

    def __init__(self, seed, length):
        self.seed, self.length, self.made = seed, length, {}

    def chain(self, number):
        """(at least length, 3) CB atoms, always the same for one number."""
        if number not in self.made:
            rng, found = np.random.default_rng((self.seed, 5, number)), ()
            while len(found) < self.length:
                found = side_chains(backbone(rng, self.length * rng.uniform(1.2, 2.0)))
            self.made[number] = found
        return self.made[number]

    def piece(self, rng):
        """(length, 3) CB atoms, in either direction, as dense in contacts as domains are if a few tries find
        such a piece."""
        for _ in range(self.TRIES):
            chain = self.chain(int(rng.integers(self.CHAINS)))
            start = int(rng.integers(len(chain) - self.length + 1))
            found = chain[start:start + self.length]
            if contacts_per_residue(found) > rng.uniform(*DENSITY):
                break
        found = found[::-1] if rng.random() < 0.5 else found
        return (found + rng.normal(0, 0.2, found.shape)).astype(np.float32)
