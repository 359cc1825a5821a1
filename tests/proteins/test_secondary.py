"""Helices and strands: against the records of real files, and by hand."""
import numpy as np
import pytest

from tests.proteins.folds_at_hand import chain
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


def test_a_helix_is_bonds_four_residues_apart():
    backbone = chain([(-57, -47)] * 14)[:, :4].numpy()
    assert secondary_structure("A" * 14, backbone) == "-HHHHHHHHHHHH-"
    assert secondary_structure("P" * 14, backbone) == 14 * "-"  # proline gives no bond
    strand = chain([(-120, 130)] * 14)[:, :4].numpy()
    assert secondary_structure("A" * 14, strand) == 14 * "-"  # it has no partner
    for size in (1, 2, 4):
        assert secondary_structure("A" * size, backbone[:size]) == size * "-"
