"""Helices and strands from backbone atoms, by the hydrogen bonds of Kabsch and Sander (1983).

Their definitions of H and E, less the rest: no 3-10 and pi helices, no bulges within a ladder, bonds within
the one chain only. Good for finding one's way on a map; for publication, run DSSP.
"""
import numpy as np

HELIX, STRAND, OTHER, UNKNOWN = "H", "E", "-", " "
COUPLING, BOND = 27.9, -0.5  # kcal Å / mol, of the dipoles' partial charges; kcal / mol, the weakest bond
SKIPPED = 6  # empty places at a break of the chain, so that no pattern reaches across it


def hydrogen_bonds(backbone, donors):
    """(C, C) bool, [a, b]: C=O of residue a holds N-H of residue b. backbone (C, 4, 3): N, CA, C, O in Å, NaN
    where unknown; donors (C,) bool, all but proline."""
    nitrogen, _, carbon, oxygen = backbone.transpose(1, 0, 2)
    carbonyl = carbon - oxygen
    carbonyl /= np.linalg.norm(carbonyl, axis=1, keepdims=True).clip(0.5)
    hydrogen = np.full_like(nitrogen, np.nan)
    hydrogen[1:] = nitrogen[1:] + carbonyl[:-1]
    position = np.arange(len(backbone))
    bonds = np.zeros((len(position), len(position)), bool)
    # Some rows at a time: a ribosome's chains have to fit into memory
    for rows in np.array_split(position, len(position) // 256 + 1):
        def inverse(first, second, rows=rows):
            return 1 / np.linalg.norm(first[rows, None] - second, axis=2).clip(0.5)

        energy = COUPLING * (inverse(oxygen, nitrogen) + inverse(carbon, hydrogen)
                             - inverse(oxygen, hydrogen) - inverse(carbon, nitrogen))
        apart = np.abs(position - position[rows, None]) > 1  # neighbours share the atoms
        bonds[rows] = (energy < BOND) & donors & apart
    return bonds


def shifted(bonds, down, across):
    """[i, j] of the result is bonds[i + down, j + across]; False outside."""
    size = len(bonds)
    padded = np.pad(bonds, 2)
    return padded[2 + down:2 + down + size, 2 + across:2 + across + size]


def secondary_structure(backbone, donors, broken):
    """(C,) letters HELIX, STRAND, OTHER or, without a full backbone, UNKNOWN. backbone and donors as for
    hydrogen_bonds(); broken (C-1,) bool, the chain is open between a residue and the next."""
    unknown = np.isnan(backbone).any(axis=(1, 2))
    if unknown.all():
        return np.full(len(backbone), UNKNOWN)
    position = np.arange(len(backbone)) + SKIPPED * np.r_[0, np.cumsum(broken)].astype(int)
    spread, able = np.full((position[-1] + 1, 4, 3), np.nan), np.zeros(position[-1] + 1, bool)
    spread[position], able[position] = backbone, donors
    bonds = hydrogen_bonds(spread, able)

    turns = np.diagonal(bonds, 4)  # C=O of i holds N-H of i + 4
    helix, strand = np.zeros(len(spread), bool), np.zeros(len(spread), bool)
    for start in np.flatnonzero(turns[:-1] & turns[1:]) + 1:
        helix[start:start + 4] = True

    back = bonds.T  # [i, j]: C=O of j holds N-H of i
    parallel = (shifted(bonds, -1, 0) & shifted(back, 1, 0)) | (shifted(back, 0, -1) & shifted(bonds, 0, 1))
    antiparallel = (bonds & back) | (shifted(bonds, -1, 1) & shifted(back, 1, -1))
    apart = np.abs(np.subtract.outer(np.arange(len(spread)), np.arange(len(spread)))) > 2
    for bridges, step in ((parallel & apart, 1), (antiparallel & apart, -1)):
        ladder = bridges & (shifted(bridges, 1, step) | shifted(bridges, -1, -step))
        strand |= ladder.any(axis=1)
    letters = np.where(helix, HELIX, np.where(strand, STRAND, OTHER))[position]
    return np.where(unknown, UNKNOWN, letters)
