"""A structure with few residues is said, warned of or refused; a directory that is a file is called one."""
import numpy as np
import pytest

from fusion_lab.training.files import UserError
from tiny_openfold.proteins import batches
from tiny_openfold.proteins.coordinates import require_coordinates, sentence
from tiny_openfold.proteins.files import Protein, load_families
from tiny_openfold_v2 import PROGRAM


def a_protein(name, known, length=20):
    coords = np.full((length, 3), np.nan, np.float32)
    coords[:known] = np.arange(3 * known).reshape(known, 3)
    return Protein(name, np.zeros((3, length), np.uint8), coords)


def test_residues_with_coordinates_are_counted():
    half = a_protein("b", 10)
    half.coords[0, 1] = np.nan  # a third of a place is no place
    assert sentence([a_protein("a", 20), half]) == "29 of 40 residues have coordinates"


def test_few_are_one_warning_and_next_to_none_are_refused(capsys):
    require_coordinates([a_protein("a", 20), a_protein("b", 10)], 0.1)
    assert capsys.readouterr().err == ""
    few = [a_protein(name, known) for name, known in zip("abcdefg", (9, 10, 2, 3, 4, 5, 6), strict=True)]
    require_coordinates(few, 0.1)
    assert capsys.readouterr().err == (
        "warning: less than half has coordinates in a (9 of 20 residues), c (2 of 20 residues), d (3 of 20 "
        "residues), e (4 of 20 residues) and 2 more\n")
    require_coordinates(few[:5], 0.1)
    assert capsys.readouterr().err.endswith(" e (4 of 20 residues)\n")
    with pytest.raises(UserError, match=r"too few coordinates in c \(2 of 20 residues\): fewer than "
                       r"--min-coordinates 0.11; .*A lower --min-coordinates") as caught:
        require_coordinates(few, 0.11)
    assert caught.value.code == 2


def test_training_reads_families_through_it(monkeypatch, capsys):
    monkeypatch.setattr(batches.files, "load_families", lambda *_: [a_protein("a", 1), a_protein("b", 20)])
    with pytest.raises(UserError, match=r"too few coordinates in a \(1 of 20 residues\)"):
        batches.open_source(PROGRAM.settings(data="x"))
    source = batches.open_source(PROGRAM.settings(data="x", min_coordinates=0.05, holdout="b"))
    assert "; 21 of 40 residues have coordinates" in source.describe()
    assert capsys.readouterr().err == "warning: less than half has coordinates in a (1 of 20 residues)\n"


def test_a_file_is_not_called_a_missing_directory(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(UserError, match="README.md: Not a directory"):
        load_families(tmp_path / "README.md")
