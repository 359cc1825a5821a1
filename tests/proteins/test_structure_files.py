"""Predicted structures as files: read back by gemmi and by the project's own reader."""
import numpy as np
import pytest

from tests.proteins.folds_at_hand import SEQUENCE, a_fold
from tiny_openfold.proteins import files, structure_files

PLDDT = np.linspace(3, 97, len(SEQUENCE))


def test_what_is_written_is_read_back(tmp_path):
    gemmi = pytest.importorskip("gemmi")
    path, atoms = tmp_path / "x.pdb", a_fold().numpy()
    structure_files.write_pdb(path, "a name, 'quoted'\n", SEQUENCE, atoms, PLDDT)
    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    model_chain, = structure[0]
    assert model_chain.name == "A" and gemmi.one_letter_code(
        [residue.name for residue in model_chain]) == SEQUENCE
    for number, residue in enumerate(model_chain):
        names = ["N", "CA", "C", "O", *["CB"] * (SEQUENCE[number] != "G")]
        assert [atom.name for atom in residue] == names and residue.seqid.num == number + 1
        for atom, place in zip(residue, atoms[number], strict=False):
            assert np.abs(np.array(atom.pos.tolist()) - place).max() < 6e-4
            assert atom.b_iso == pytest.approx(PLDDT[number], abs=6e-3) and atom.occ == 1
            assert atom.element.name == atom.name[0]
    found, = files.read_structure(path)
    assert found.sequence.tolist() == ["ACDEFGHIKLMNPQRSTVWY".index(letter) for letter in SEQUENCE]
    assert found.backbone == pytest.approx(atoms[:, :4], abs=1e-3) and found.numbers[0] == "1"


def test_lines_have_the_formats_columns(tmp_path):
    atoms = -999.5 + 0 * a_fold().numpy()[:2]
    structure_files.write_pdb(tmp_path / "x.pdb", "\u00e9" * 99, "XG", atoms, [7.0, 100.0], ["y" * 99])
    lines = (tmp_path / "x.pdb").read_text(encoding="utf-8").splitlines()
    assert f"{'TITLE':10}{60 * chr(0xc9)}" in lines  # a name keeps its letters
    assert lines[-1] == f"{'END':80}" and lines[-2].startswith("TER")
    assert all(len(line) <= 80 for line in lines)
    first, *_, last = [line for line in lines if line.startswith("ATOM")]
    assert first[12:16] == " N  " and first[17:20] == "UNK" and first[30:54] == "-999.500" * 3
    assert first[60:66] == "  7.00" and last[60:66] == "100.00"
    assert last[22:26] == "   2" and last[76:78] == " O"
    structure_files.write_pdb(tmp_path / "y.pdb", "y", SEQUENCE, a_fold().numpy(), PLDDT)
    rows = [line[6:19] for line in (tmp_path / "y.pdb").read_text().splitlines() if line[:6] == "SEQRES"]
    assert rows == ["   1 A   24  ", "   2 A   24  "]
