"""Real chains as folds for the world `natural` (--real-folds): crops of them, which get made-up alignments.

The file is an NPZ as docs/learning.md describes it: atoms N, CA, C, O, CB of many chains. Chains that are
marked as related to families that a model may be tested on are never drawn. Letters in shapes: S residues of
a piece, n of a chain. Lengths in Å.
"""
import zipfile
import zlib

import numpy as np

from fusion_lab.training.files import UserError, counted
from proteins.folds import Piece
from proteins.geometry import CB, C

UNIT = 0.01             # Å, of the integers in the file
MISSING = -32768        # no such atom; only O may be missing
EVERY = 16              # of so many chains, one is held out
APART = 50.0            # Å between residues of a disordered tail, and from it to the chain
KEYS = dict(offset=(1, "iu"), xyz=(3, "iu"), index=(1, "iu"), near_families=(1, "b"))  # dimensions, kinds


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
    """(offset (chains + 1,), xyz (residues, 5, 3) integers, index (residues,), near_families (chains,)) of a
    file. Raises UserError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in KEYS if key in file}
    except OSError as error:
        raise UserError(f"--real-folds {path}: {error.strerror or 'not an NPZ file'}") from None
    except (AttributeError, EOFError, MemoryError, TypeError, ValueError, zipfile.BadZipFile,
            NotImplementedError, zlib.error) as error:
        reason = " ".join(str(error).split())[:100] or "no content"
        reason = "no archive of plain arrays" if "pickle" in reason else reason  # numpy advises to load them
        raise UserError(f"--real-folds {path}: not an NPZ file of chains: {reason}") from None
    if fault := next(faults(found), None):
        raise UserError(f"--real-folds {path}: {fault}; docs/learning.md says what it must hold")
    return [found[key] for key in KEYS]


def faults(found):
    """What is wrong with the arrays, as it is come upon."""
    if absent := [key for key in KEYS if key not in found]:
        yield f"it lacks {', '.join(absent)}"
        return
    for key, (dimensions, kinds) in KEYS.items():
        if found[key].ndim != dimensions or found[key].dtype.kind not in kinds:
            yield f"{key} has the wrong shape or type"
            return
    offset, xyz, index, near = (found[key] for key in KEYS)
    if xyz.shape[1:] != (5, 3) or len(index) != len(xyz) or len(near) != len(offset) - 1:
        yield "the shapes of offset, xyz, index and near_families do not go together"
    elif offset[0] != 0 or offset[-1] != len(xyz) or (np.diff(offset.astype(np.int64)) < 2).any():
        yield "offset does not rise from 0 to the number of residues"
    elif (xyz[:, [0, 1, 2, 4]] == MISSING).any():
        yield "N, CA, C or CB is missing"
