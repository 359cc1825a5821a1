"""Predicted structures as files: read back by gemmi and by the project's own reader."""
import numpy as np
import pytest

from proteins import files, structure_files
from tests.proteins.folds_at_hand import SEQUENCE, a_fold, chain

PLDDT = np.linspace(3, 97, len(SEQUENCE))


@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_what_is_written_is_read_back(tmp_path, suffix):
    gemmi = pytest.importorskip("gemmi")
    write = dict([(".pdb", structure_files.write_pdb), (".cif", structure_files.write_cif)])[suffix]
    path, atoms = tmp_path / f"x{suffix}", a_fold().numpy()
    assert write(path, "a name, 'quoted'\n", SEQUENCE, atoms, PLDDT) == path
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
    assert "".join(found.secondary).count("H") >= 12  # a viewer sees the helices, too


def test_a_cif_file_says_what_its_figures_are(tmp_path):
    gemmi = pytest.importorskip("gemmi")
    structure_files.write_cif(tmp_path / "x.cif", "x", SEQUENCE, a_fold().numpy(), PLDDT)
    block = gemmi.cif.read(str(tmp_path / "x.cif")).sole_block()
    assert [float(x) for x in block.find_values("_ma_qa_metric_local.metric_value")] == pytest.approx(
        PLDDT.round(2).tolist())
    assert block.find_values("_ma_qa_metric.name")[0] == "pLDDT"
    sequence = [row[0] for row in block.find("_entity_poly_seq.", ["mon_id"])]
    assert gemmi.one_letter_code(sequence) == SEQUENCE
    numbers = [row[0] for row in block.find("_entity_poly_seq.", ["num", "entity_id"])]
    assert numbers == [str(number) for number in range(1, len(SEQUENCE) + 1)]
    assert [[*row] for row in block.find("_struct_asym.", ["id", "entity_id"])] == [["A", "1"]]


def test_lines_have_the_formats_columns(tmp_path):
    atoms = -999.5 + 0 * a_fold().numpy()[:2]
    structure_files.write_pdb(tmp_path / "x.pdb", "\u00e9" * 99, "XG", atoms, [7.0, 100.0], ["y" * 99])
    lines = (tmp_path / "x.pdb").read_text(encoding="ascii").splitlines()
    assert lines[-1] == "END" and lines[-2].startswith("TER") and all(len(line) <= 80 for line in lines)
    first, *_, last = [line for line in lines if line.startswith("ATOM")]
    assert first[12:16] == " N  " and first[17:20] == "UNK" and first[30:54] == "-999.500" * 3
    assert first[60:66] == "  7.00" and last[60:66] == "100.00"
    assert last[22:26] == "   2" and last[76:78] == " O"
    structure_files.write_pdb(tmp_path / "y.pdb", "y", SEQUENCE, a_fold().numpy(), PLDDT)
    rows = [line[6:19] for line in (tmp_path / "y.pdb").read_text().splitlines() if line[:6] == "SEQRES"]
    assert rows == ["   1 A   24  ", "   2 A   24  "]


def test_a_chain_too_long_for_pdb_has_mmcif_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(structure_files, "LONGEST", 3)
    atoms = chain([(-60, -45)] * 4).numpy()
    assert structure_files.write_pdb(tmp_path / "x.pdb", "x", "AAAA", atoms, PLDDT) is None
    assert not (tmp_path / "x.pdb").exists()
    assert structure_files.write_cif(tmp_path / "x.cif", "x", "AAAA", atoms, PLDDT)
