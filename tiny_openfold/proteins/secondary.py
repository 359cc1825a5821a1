"""Helices and strands from backbone atoms, by the hydrogen bonds of Kabsch and Sander (1983).

Their definitions of H and E, less the rest: no 3-10 and pi helices, no bulges within a ladder. Good for
finding one's way on a fold; for publication, run DSSP. Letters in shapes: L residues of one whole chain.
"""
import numpy as np

HELIX, STRAND, OTHER = "H", "E", "-"
COUPLING, BOND = 27.9, -0.5  # kcal Å / mol, of the dipoles' partial charges; kcal / mol, the weakest bond


def hydrogen_bonds(backbone, donors):
    """(L, L) bool, [a, b]: C=O of residue a holds N-H of residue b. backbone (L, 4, 3): N, CA, C, O in Å;
    donors (L,) bool, all but proline."""
    nitrogen, _, carbon, oxygen = backbone.transpose(1, 0, 2)
    carbonyl = carbon - oxygen
    carbonyl /= np.linalg.norm(carbonyl, axis=1, keepdims=True)
    hydrogen = np.full_like(nitrogen, np.nan)
    hydrogen[1:] = nitrogen[1:] + carbonyl[:-1]

    def inverse(first, second):
        return 1 / np.linalg.norm(first[:, None] - second, axis=2).clip(0.5)

    energy = COUPLING * (inverse(oxygen, nitrogen) + inverse(carbon, hydrogen)
                         - inverse(oxygen, hydrogen) - inverse(carbon, nitrogen))
    position = np.arange(len(backbone))
    return (energy < BOND) & donors & (np.abs(position - position[:, None]) > 1)  # neighbours share the atoms


def shifted(bonds, down, across):
    """[i, j] of the result is bonds[i + down, j + across]; False outside."""
    size = len(bonds)
    padded = np.pad(bonds, 2)
    return padded[2 + down:2 + down + size, 2 + across:2 + across + size]


def secondary_structure(sequence, backbone):
    """L letters HELIX, STRAND or OTHER; sequence: L amino acids, backbone (L, 4, 3): N, CA, C, O in Å."""
    bonds = hydrogen_bonds(backbone, np.array([letter != "P" for letter in sequence]))
    turns = np.diagonal(bonds, 4)  # C=O of i holds N-H of i + 4
    helix, strand = np.zeros(len(bonds), bool), np.zeros(len(bonds), bool)
    for start in np.flatnonzero(turns[:-1] & turns[1:]) + 1:
        helix[start:start + 4] = True

    back = bonds.T  # [i, j]: C=O of j holds N-H of i
    parallel = (shifted(bonds, -1, 0) & shifted(back, 1, 0)) | (shifted(back, 0, -1) & shifted(bonds, 0, 1))
    antiparallel = (bonds & back) | (shifted(bonds, -1, 1) & shifted(back, 1, -1))
    position = np.arange(len(bonds))
    apart = np.abs(position - position[:, None]) > 2
    for bridges, step in ((parallel & apart, 1), (antiparallel & apart, -1)):
        ladder = bridges & (shifted(bridges, 1, step) | shifted(bridges, -1, -step))
        strand |= ladder.any(axis=1)
    return "".join(np.where(helix, HELIX, np.where(strand, STRAND, OTHER)))
