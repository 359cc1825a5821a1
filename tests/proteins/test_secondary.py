"""Helices and strands: against the records of real files, and by hand."""
import numpy as np
import pytest

from tests.support import require_shared
from tiny_openfold.proteins import files
from tiny_openfold.proteins.secondary import secondary_structure


def recorded(path, chain):
    """{residue number: "H" or "E"} of a PDB file's HELIX records of class 1 (alpha) and its SHEET records."""
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("HELIX ") and line[19] == chain and line[38:40].strip() == "1":
            found |= {str(n): "H" for n in range(int(line[21:25]), int(line[33:37]) + 1)}
        if line.startswith("SHEET ") and line[21] == chain:
            found |= {str(n): "E" for n in range(int(line[22:26]), int(line[33:37]) + 1)}
    return found


@pytest.mark.parametrize("folder, file, kind, share", [
    ("pairs", "1a3a.pdb", "H", 1), ("nasty", "1pko.pdb", "E", 0.95)])
def test_helices_and_strands_are_those_of_the_files_records(folder, file, kind, share):
    pytest.importorskip("gemmi")
    path = require_shared("data", folder, file)
    chain, = files.read_structure(path, "A")
    records = recorded(path, "A")
    expected = np.array([records.get(number, "-") for number in chain.numbers[chain.seen]]) == kind
    sequence = "".join(files.LETTERS[token] for token in chain.sequence[chain.seen])
    found = np.array([*secondary_structure(sequence, chain.backbone[chain.seen].astype(float))]) == kind
    assert expected.sum() > 40 and found[expected].mean() >= share
    if kind == "E":
        assert expected[found].mean() >= share


def chain_of(size, phi, psi):
    """(size, 4, 3) backbone N, CA, C, O with these torsion angles in degrees."""
    atoms = [np.array(p, float) for p in ((0, 0, 0), (1.46, 0, 0), (2, 1.42, 0))]

    def add(a, b, c, length, angle, torsion):
        """Position of an atom bound to c, from bond length, angle b-c-new and torsion a-b-c-new."""
        angle, torsion = np.radians(180 - angle), np.radians(torsion)
        along = (c - b) / np.linalg.norm(c - b)
        normal = np.cross(b - a, along)
        normal /= np.linalg.norm(normal)
        return c + length * (np.cos(angle) * along + np.sin(angle) * np.cos(torsion) * np.cross(normal, along)
                             + np.sin(angle) * np.sin(torsion) * normal)

    for _ in range(size):
        atoms.append(add(*atoms[-3:], 1.33, 116.6, psi))    # N
        atoms.append(add(*atoms[-3:], 1.46, 121.7, 180.0))  # CA
        atoms.append(add(*atoms[-3:], 1.53, 111.0, phi))    # C
    residues = np.stack(atoms[:3 * size]).reshape(size, 3, 3)
    oxygen = [add(*residue, 1.23, 120.5, psi + 180) for residue in residues]
    return np.concatenate([residues, np.stack(oxygen)[:, None]], axis=1)


def test_a_helix_is_bonds_four_residues_apart():
    backbone = chain_of(14, -57, -47)
    assert secondary_structure("A" * 14, backbone) == "-HHHHHHHHHHHH-"
    assert secondary_structure("P" * 14, backbone) == 14 * "-"  # proline gives no bond
    assert secondary_structure("A" * 14, chain_of(14, -120, 130)) == 14 * "-"  # one strand has no partner
    for size in (1, 2, 4):
        assert secondary_structure("A" * size, backbone[:size]) == size * "-"
