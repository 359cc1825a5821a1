"""Folds for the world `natural`: built-in ones, helices and strands packed in layers and joined by loops, and
real chains of a file (--real-folds).

The layout is that of ideal forms (Taylor 2002, doi:10.1038/416657a): sheets and layers of helices 10 Å apart,
strands 4.8 Å and helices 10 Å beside each other, neighbours along the chain in opposite directions, which
makes hairpins antiparallel and strands joined by a helix parallel. read() describes the file of real chains.
Letters in shapes: S residues of a piece, n of a chain. Lengths in Å.
"""
from typing import NamedTuple

import numpy as np

from fusion_lab.training.errors import UserError
from fusion_lab.training.words import counted
from tiny_openfold.proteins.contacts import CONTACT_DISTANCE, SEPARATION
from tiny_openfold.proteins.geometry import CA, CB, C, N

STRAND_GAP, HELIX_GAP, LAYER_GAP = 4.8, 9.6, 9.8
STRAND_RISE, HELIX_RISE, HELIX_RADIUS = 3.3, 1.5, 2.3
HELIX_TURN = np.deg2rad(100)
TWIST = np.deg2rad(-20)  # of a strand against the one beside it
CB_LENGTH = 1.53  # CA to CB
LAYOUTS = (("e", "e"), ("h", "e"), ("h", "e", "h"), ("h", "h"), ("e",))  # layers from bottom to top
SHARES = (0.27, 0.25, 0.27, 0.14, 0.07)
DENSITY = (0.9, 2.2)  # contacts of a residue, from the least to the most that a fold should have

UNIT = 0.01             # Å, of the integers in the file
MISSING = -32768        # no such atom; only O may be missing
EVERY = 16              # of so many chains, one is held out
APART = 50.0            # Å between residues of a disordered tail, and from it to the chain


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
    """CB atoms (S, 3) of CA atoms (S, 3): away from both neighbours, and to the side that D-amino acids have,
    since helix() is left-handed: the mirror image of nature, with the same distances."""
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
            rng, chain = np.random.default_rng((self.seed, 5, number)), ()
            while len(chain) < self.length:
                chain = side_chains(backbone(rng, self.length * rng.uniform(1.2, 2.0)))
            self.made[number] = chain
        return self.made[number]

    def piece(self, rng):
        """(length, 3) CB atoms, in either direction, as dense in contacts as domains are if a few tries find
        such a piece."""
        for _ in range(self.TRIES):
            chain = self.chain(int(rng.integers(self.CHAINS)))
            start = int(rng.integers(len(chain) - self.length + 1))
            piece = chain[start:start + self.length]
            if contacts_per_residue(piece) > rng.uniform(*DENSITY):
                break
        piece = piece[::-1] if rng.random() < 0.5 else piece
        return (piece + rng.normal(0, 0.2, piece.shape)).astype(np.float32)


# --- Real chains ----------------------------------------------------------------------------------------


class RealFolds:
    """Pieces of `length` residues of the chains in a file. Raises UserError if it cannot be used."""

    def __init__(self, path, length):
        self.length = length
        offset, self.xyz, self.index, near = read(path)
        allowed = np.flatnonzero(~near)
        held_out = np.arange(len(allowed)) % EVERY == 0
        self.chains = {unseen: [(offset[i], offset[i + 1]) for i in allowed[held_out == unseen]]
                       for unseen in (False, True)}
        if not all(self.chains.values()):
            raise UserError(f"--real-folds {path}: {counted(len(allowed), 'chain')} without relatives among "
                            "the families: at least 2 are needed")
        self.ends = {unseen: np.cumsum([end - start for start, end in chains])
                     for unseen, chains in self.chains.items()}
        self.left_out = int(near.sum())

    def __str__(self):
        return (f"pieces of {len(self.chains[False])} real chains, {len(self.chains[True])} held out; "
                f"{self.left_out} related to families are left out")

    def piece(self, rng, held_out=False):
        """A Piece of a chain, drawn by its length, so that every residue is as likely. A crop has no
        break of the chain, if there is such a crop. A short chain is followed by a disordered tail."""
        ends = self.ends[held_out]
        start, end = self.chains[held_out][int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))]
        if end - start > self.length:
            start += int(rng.choice(self.unbroken(self.index[start:end])))
            end = start + self.length
        atoms = UNIT * self.xyz[start:end].astype(np.float32)  # (n, 5, 3)
        return Piece(*padded(atoms[:, CB], atoms[:, :C + 1], self.length))

    def unbroken(self, numbers):
        """First residues of crops without a break in a chain of these residue numbers (n,); if there are
        none, of all crops."""
        breaks = np.append(0, np.cumsum(np.diff(numbers) != 1))  # how many lie before each residue
        last = self.length - 1
        whole = np.flatnonzero(breaks[last:] == breaks[:len(breaks) - last])
        return whole if whole.size else np.arange(len(breaks) - last)


def padded(coords, backbone, length):
    """(coords, known, backbone) of a Piece of so many residues. The tail's are far from everything: the world
    couples no residue of it, and nothing of it is known."""
    missing = length - len(coords)
    tail = coords.max(0) + APART * (1 + np.arange(missing, dtype=np.float32))[:, None]
    return (np.concatenate([coords, tail]), np.repeat(np.float32([1, 0]), [len(coords), missing]),
            np.pad(backbone, ((0, missing), (0, 0), (0, 0)), constant_values=np.nan))


def read(path):
    """The arrays of an NPZ file with the backbones of all chains, one after another. Raises UserError.

    offset (chains + 1,): integers, chain k has residues offset[k] to offset[k + 1] - 1
    xyz (residues, 5, 3): integers in 0.01 Å, atoms N, CA, C, O and CB, also for glycine; -32768: a missing O
    index (residues,): integers, residue numbers, which jump where the chain is broken
    near_families (chains,): bool, whether a chain is related to a test family; such chains are never drawn
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            offset, xyz, index, near = (file[key] for key in ("offset", "xyz", "index", "near_families"))
            offset, near = offset.astype(np.int64), near.astype(bool)
        if not (xyz.shape == (len(index), 5, 3) and index.ndim == 1 and offset.shape == (len(near) + 1,)
                and offset[0] == 0 and offset[-1] == len(xyz) and (np.diff(offset) >= 2).all()
                and (xyz[:, [N, CA, C, CB]] != MISSING).all()):
            raise ValueError("its arrays are not those of read() in tiny_openfold/proteins/folds.py")
    except Exception as error:  # a damaged or foreign file raises whatever its first bad byte leads to
        reason = " ".join(str(error).split())[:100] or "no content"
        raise UserError(f"--real-folds {path}: not an NPZ file of chains: {reason}") from None
    return offset, xyz, index, near
