"""Backbones with sequences: what structure files say of N, CA, C and O, for models that read no side chains.

    backbone = read_backbone("1a3a.pdb", "A")    # backbone.atoms (L, 4, 3), backbone.tokens (L,)
    backbones = load_backbones("families/")      # every NAME.pdb or NAME.cif, with NAME.a3m if that is there

A missing O is put into the plane of its peptide bond; residues that lack another atom are left out, and
`positions` says how far apart the others are. Letters in shapes: L residues, R
sequences that are said to fold like this.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proteins import files
from proteins.files import GAP, LETTERS, UNKNOWN, DataError
from proteins.synthetic import random_chains

BETWEEN_CHAINS = 100  # positions


@dataclass
class Backbone:
    """One protein, or several chains of one file; built-in ones have no numbers."""
    name: str
    tokens: np.ndarray  # (L,) int64, 0..19 or UNKNOWN
    atoms: np.ndarray   # (L, 4, 3) float32: N, CA, C, O, Å
    positions: np.ndarray  # (L,) int64, along the sequence
    chains: np.ndarray  # (L,) int64, 0 for the first chain
    rows: np.ndarray    # (R, L) int64 sequences, the protein's own first; UNKNOWN where there is a gap
    labels: tuple = ()  # (L,) chain and residue number as in the file: "A52"

    def __len__(self):
        return len(self.tokens)


def known(tokens):
    """Tokens of an alignment as those of a sequence: a gap says nothing."""
    return np.where(tokens == GAP, UNKNOWN, tokens).astype(np.int64)


def with_oxygen(atoms):
    """Backbone (L, 4, 3) with O where only that was missing: in the plane of the bond to the next N."""
    alpha, carbon, following = atoms[:-1, 1], atoms[:-1, 2], atoms[1:, 0]
    with np.errstate(invalid="ignore"):
        away = sum((carbon - x) / np.linalg.norm(carbon - x, axis=1, keepdims=True)
                   for x in (alpha, following))
        placed = carbon + 1.23 * away / np.linalg.norm(away, axis=1, keepdims=True)
        bonded = np.linalg.norm(carbon - following, axis=1, keepdims=True) < 2.0  # Å; the bond has 1.33
    atoms, absent = atoms.copy(), np.isnan(atoms[:-1, 3])
    atoms[:-1, 3] = np.where(absent & bonded, placed, atoms[:-1, 3])
    return atoms


def read_backbone(path, chain=None):
    """Backbone of all protein chains of a PDB or mmCIF file, or of the one named. Raises DataError."""
    parts, start = [], 0
    for number, found in enumerate(files.read_structure(path, chain)):
        backbone = with_oxygen(found.backbone)
        whole = np.flatnonzero(np.isfinite(backbone).all((1, 2)))
        parts.append((found.sequence[whole], backbone[whole], start + whole,
                      np.full(len(whole), number), [found.name + str(found.numbers[i]) for i in whole]))
        start += len(found.sequence) + BETWEEN_CHAINS
    tokens, atoms, positions, chains, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not len(tokens):
        raise DataError(f"{path}: no residue has all of N, CA, C and O")
    tokens = known(tokens)
    return Backbone(files.split_suffix(path)[0], tokens, atoms, positions, chains, tokens[None],
                    tuple(labels))


def of_family(protein):
    """files.Protein -> Backbone; rows that are half gaps or more are left out."""
    backbone = with_oxygen(protein.backbone)
    whole = np.flatnonzero(np.isfinite(backbone).all((1, 2)))
    rows = known(protein.msa[:, whole])
    rows = rows[(rows < UNKNOWN).mean(1) > 0.5] if len(whole) else rows[:0]
    if not len(rows):
        raise DataError(f"{protein.name}: no residue of the alignment has all of N, CA, C and O")
    labels = tuple(protein.chain + protein.numbers[i] for i in whole)
    return Backbone(protein.name, known(protein.msa[0, whole]), backbone[whole], whole,
                    np.zeros(len(whole), np.int64), rows, labels)


def load_backbones(directory):
    """Directory -> list of Backbone sorted by name, of each structure file in it: the chain that an alignment
    beside it is about, with its sequences; without one the first chain. Raises DataError."""
    directory, found = Path(directory), {}
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory")
    for path in sorted(directory.iterdir()):
        stem, suffix = files.split_suffix(path)
        kinds = (files.STRUCTURE_SUFFIXES, files.ALIGNMENT_SUFFIXES)
        for number, suffixes in enumerate(kinds):
            if path.is_file() and suffix in suffixes and path.name[0] != ".":
                found.setdefault(stem, ([], []))[number].append(path)
    found = {stem: kinds for stem, kinds in sorted(found.items()) if kinds[0]}
    if not found:
        raise DataError(f"{directory}: no structures; needed are files NAME.cif or NAME.pdb")
    for paths in (paths for kinds in found.values() for paths in kinds if len(paths) > 1):
        raise DataError(f"{directory}: keep one of {' and '.join(path.name for path in paths)}")
    return [load_one(stem, *structures, *alignments) for stem, (structures, alignments) in found.items()]


def load_one(name, structure, alignment=None):
    if alignment:
        return of_family(files.load_protein(alignment, structure, name=name))
    return read_backbone(structure, files.read_structure(structure)[0].name)


# --- Built-in backbones: residues follow from the fold, all but a tenth of them -------------------------

NOISE = 0.1                         # share of residues drawn at random
NEAR, BURIED, TURNED = 7.0, (6, 8, 11), (1.37, 1.83, 2.2, 2.53)  # Å; borders of neighbours, of angles in rad
BEST_RECOVERY = 1 - NOISE + NOISE / 20


def built_in(seed, index, length):
    """Backbone number `index` of the world `seed`: a compact random chain, in which burial and the bend at
    each CA atom choose one of the 20 residues."""
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
    tokens = np.where(rng.random(len(here)) < NOISE, rng.integers(0, 20, len(here)), tokens)[:length]
    atoms = np.stack([here + 1.46 * back, here, carbon, oxygen], axis=1).astype(np.float32)[:length]
    return Backbone(f"synthetic-{index}", tokens, atoms, np.arange(length), np.zeros(length, np.int64),
                    tokens[None])


# --- Sequences for people -------------------------------------------------------------------------------


def fixed_residues(backbone, text):
    """(L,) bool of residues that "A10-20,A35" names, by chain and number as in the file. Raises DataError."""
    chosen, numbers = np.zeros(len(backbone), bool), {label: i for i, label in enumerate(backbone.labels)}
    for word in filter(None, text.split(",")):
        parts = re.fullmatch(r"(\D*)(-?\d+\w*)(?:-(-?\d+\w*))?", word.strip())
        ends = [numbers.get(f"{parts[1]}{number}") for number in (parts[2], parts[3] or parts[2])
                ] if parts else [None]
        if None in ends or ends[0] > ends[1]:
            raise DataError(f"--fixed {word}: no such residues in {backbone.name}; they are called "
                            f"{', '.join(backbone.labels[:3])}, ... {backbone.labels[-1]}")
        chosen[ends[0]:ends[1] + 1] = True
    return chosen


def fasta(title, backbone, tokens):
    """A FASTA record; chains are told apart by "/"."""
    letters = [LETTERS[token] for token in tokens]
    parts = ["".join(letter for letter, own in zip(letters, backbone.chains, strict=True) if own == chain)
             for chain in range(int(backbone.chains.max()) + 1)]
    return f">{title}\n{'/'.join(parts)}"
