"""Real chains as folds for the world `natural` (--real-folds): crops of them, which get made-up alignments.

The file is an NPZ as docs/learning.md describes it: atoms N, CA, C, O, CB of many chains. Chains that are
marked as related to families that a model may be tested on are never drawn. Letters in shapes: S residues of
a piece, n of a chain. Lengths in Å.
"""

import numpy as np

from fusion_lab.training.files import UserError, counted
from tiny_openfold.proteins.folds import Piece
from tiny_openfold.proteins.geometry import CA, CB, C, N

UNIT = 0.01             # Å, of the integers in the file
MISSING = -32768        # no such atom; only O may be missing
EVERY = 16              # of so many chains, one is held out
APART = 50.0            # Å between residues of a disordered tail, and from it to the chain


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
        """A folds.Piece of a chain, drawn by its length, so that every residue is as likely. A crop has no
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
    """(offset (chains + 1,), xyz (residues, 5, 3), index (residues,), near_families (chains,)) of a file.
    Raises UserError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            offset, xyz, index, near = (file[key] for key in ("offset", "xyz", "index", "near_families"))
            offset, near = offset.astype(np.int64), near.astype(bool)
    except OSError as error:
        raise UserError(f"--real-folds {path}: {error.strerror or 'not an NPZ file'}") from None
    except Exception as error:  # a damaged or foreign file raises whatever its first bad byte leads to
        reason = " ".join(str(error).split())[:100] or "no content"
        raise UserError(f"--real-folds {path}: not an NPZ file of chains: {reason}") from None
    whole = (xyz.shape == (len(index), 5, 3) and index.ndim == 1 and offset.shape == (len(near) + 1,)
             and offset[0] == 0 and offset[-1] == len(xyz) and (np.diff(offset) >= 2).all())
    if not whole or (xyz[:, [N, CA, C, CB]] == MISSING).any():
        raise UserError(f"--real-folds {path}: its arrays are not those that docs/learning.md describes")
    return offset, xyz, index, near
