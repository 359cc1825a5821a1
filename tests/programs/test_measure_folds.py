"""benchmarks/measure_folds.py: the line of pLDDT, and what is said of families."""
import json
import sys
import types

import numpy as np
import pytest
import torch

from fusion_lab.training.files import UserError
from fusion_lab.training.models import read_model, save_model
from proteins import files, prediction
from proteins.confidence import line_of
from proteins.orientations import BINS
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import measure_folds  # noqa: E402

import tiny_openfold_v2 as tof  # noqa: E402


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
    families = [dict(tm_score=tm, lddt_ca=tm / 2, rmsd=10 * tm, right_hand=tm > 0.3)
                for tm in (0.2, 0.6, 0.7)]
    assert measure_folds.summary(families) == pytest.approx(dict(
        families=3, median_tm_score=0.6, median_lddt_ca=0.3, median_rmsd=6,
        above_half=2 / 3, right_hand=2 / 3))


def test_folds_of_another_model_are_not_mixed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_folds, "read_model", lambda *_: types.SimpleNamespace(card={}))
    (tmp_path / "f.json").write_text(json.dumps(dict(model="x/contacts.pt", seed=42, families={})))
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "f.json"), "--device", "cpu", "--model"]
    with pytest.raises(UserError, match="made with model x/contacts.pt; take another --out"):
        measure_folds.main([*given, "y/folds.pt"])
    with pytest.raises(UserError, match="made with seed 42"):
        measure_folds.main([*given, "y/contacts.pt", "--seed", "1"])


def test_the_line_goes_into_the_card_and_nothing_else_changes(tmp_path):
    sizes = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4)
    config = tof.TinyOpenFoldConfig(**sizes)
    weights = tof.TinyOpenFoldV2(config, tof.FusionConfig()).state_dict()
    save_model(tmp_path / "m.pt", tof.PROGRAM, weights, config, dict(step=3))
    before = read_model(tmp_path / "m.pt", tof.PROGRAM)
    measure_folds.write_line(tmp_path / "m.pt", dict(intercept=0.1, slope=0.8, families=5), "of mine")
    after = read_model(tmp_path / "m.pt", tof.PROGRAM)
    assert line_of(after.card) == (0.1, 0.8, "5 families of mine") and after.card["step"] == 3
    assert all(torch.equal(after.weights[name], weight) for name, weight in before.weights.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_shipped_model_predicts_what_folding_needs(device):
    """Twelve residues; what is found comes back to the CPU."""
    msa = np.random.default_rng(0).integers(0, 20, (9, 12)).astype(np.uint8)
    family = files.Protein("x", msa, np.full((12, 3), np.nan, np.float32))
    saved = read_model(prediction.MODEL, tof.PROGRAM)
    logits, orientations, seconds = measure_folds.predicted(saved, family, 1, torch.device(device))
    assert logits.shape == (12, 12, len(tof.DISTANCE_CENTRES)) and logits.isfinite().all() and seconds > 0
    assert {name: found.shape[-1] for name, found in orientations.items()} == BINS
    assert {found.device.type for found in (logits, *orientations.values())} == {"cpu"}
