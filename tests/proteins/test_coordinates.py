"""A structure with few residues is warned of or refused."""
import numpy as np
import pytest

from fusion_lab.training.files import UserError
from tiny_openfold.proteins import batches
from tiny_openfold.proteins.coordinates import require_coordinates
from tiny_openfold.proteins.files import Protein
from tiny_openfold_v2 import PROGRAM


def a_protein(name, known, length=20):
    coords = np.full((length, 3), np.nan, np.float32)
    coords[:known] = np.arange(3 * known).reshape(known, 3)
    return Protein(name, np.zeros((3, length), np.uint8), coords)


def test_few_are_one_warning_and_next_to_none_are_refused(capsys, monkeypatch):
    require_coordinates([a_protein("a", 20), a_protein("b", 10)], 0.1)
    assert capsys.readouterr().err == ""
    families = [a_protein("a", 20), a_protein("bare", 2), a_protein("c", 9)]
    require_coordinates(families, 0.1)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "bare (2 of 20 residues), c (9 of 20 residues)" in warning
    with pytest.raises(UserError, match=r"bare \(2 of 20 residues\).*--min-coordinates 0.11"):
        require_coordinates(families, 0.11)
    monkeypatch.setattr(batches.files, "load_families", lambda path: (families, []))
    with pytest.raises(UserError, match="bare"):
        batches.open_source(PROGRAM.settings(data="x", min_coordinates=0.2))
    assert "31 of 60 residues" in batches.open_source(PROGRAM.settings(data="x", holdout="c")).describe()
