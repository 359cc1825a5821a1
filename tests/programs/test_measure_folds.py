"""benchmarks/measure_folds.py: the line of pLDDT, and what is said of families."""
import json
import sys
import types

import numpy as np
import pytest

from fusion_lab.training.files import UserError
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import measure_folds  # noqa: E402


def a_family(seed, shift=0.0):
    """Residues whose lDDT is 0.1 + 0.8 of what is expected; one unknown."""
    expected = np.random.default_rng(seed).uniform(0.2, 0.9, 50)
    measured = [*(0.1 + 0.8 * expected + shift)[:-1].tolist(), None]
    return dict(expected=[*expected[:-1].tolist(), float("nan")], measured=measured)


def test_the_line_is_the_one_that_the_residues_lie_on():
    found = measure_folds.calibration([a_family(0), a_family(1), a_family(2)])
    assert (found["intercept"], found["slope"]) == pytest.approx((0.1, 0.8))
    assert found["correlation"] == pytest.approx(1) and found["residues"] == 147 and found["families"] == 3
    assert found["mean_error_by_residue"] == pytest.approx(0, abs=1e-9)


def test_a_family_is_judged_by_the_line_of_the_others():
    """Of two families that lie 0.1 apart each is 0.1 off, by the line of the other."""
    found = measure_folds.calibration([a_family(0), a_family(0, shift=0.1)])
    assert (found["mean_error_by_residue"], found["mean_error_by_family"]) == pytest.approx((0.1, 0.1))
    assert found["intercept"] == pytest.approx(0.15)


def test_a_summary_counts_and_takes_medians():
    families = [dict(tm_score=tm, lddt_ca=tm / 2, gdt_ts=tm, rmsd=10 * tm, right_hand=tm > 0.3)
                for tm in (0.2, 0.6, 0.7)]
    assert measure_folds.summary(families) == pytest.approx(dict(
        families=3, median_tm_score=0.6, median_lddt_ca=0.3, median_gdt_ts=0.6, median_rmsd=6,
        above_half=2 / 3, right_hand=2 / 3))


def test_folds_of_another_model_are_not_mixed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_folds, "read_model", lambda *_: types.SimpleNamespace(card={}))
    (tmp_path / "f.json").write_text(json.dumps(dict(model="x/contacts.pt", seed=42, families={})))
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "f.json"), "--device", "cpu", "--model"]
    with pytest.raises(UserError, match="made with model x/contacts.pt; take another --out"):
        measure_folds.main([*given, "y/folds.pt"])
    with pytest.raises(UserError, match="made with seed 42"):
        measure_folds.main([*given, "y/contacts.pt", "--seed", "1"])
