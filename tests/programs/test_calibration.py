"""benchmarks/calibration.py: what it says of probabilities whose truth is known, and its card."""
import json
import sys

import numpy as np
import pytest

import tiny_openfold_v2 as tof
from fusion_lab.training.files import UserError
from fusion_lab.training.models import read_model, save_model
from proteins.files import Protein
from tests.support import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import calibration  # noqa: E402

SIZES = dict(num_blocks=1, msa_dim=8, pair_dim=8, msa_heads=2, pair_heads=2, outer_product_dim=4)


def test_reliability_by_hand():
    """Of 4 pairs of probability 0.25 one touches, of 2 of 0.95 one, of 10 of 0.01 none."""
    probability = np.array([0.25] * 4 + [0.95] * 2 + [0.01] * 10)
    touch = np.array([1, 0, 0, 0, 1, 0, *[0] * 10], bool)
    found = calibration.reliability(probability, touch)
    assert [(b["low"], b["high"], b["pairs"], b["touch"]) for b in found["bins"]] == [
        (0, 0.02, 10, 0), (0.2, 0.3, 4, 0.25), (0.9, 1, 2, 0.5)]
    assert [b["said"] for b in found["bins"]] == pytest.approx([0.01, 0.25, 0.95])
    assert found["error"] == pytest.approx((10 * 0.01 + 2 * 0.45) / 16) and found["pairs"] == 16
    assert calibration.reliability(np.array([1.0]), np.array([True]))["bins"][0]["high"] == 1  # the last edge


def test_it_measures_and_completes_the_card(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    families = [Protein(name, rng.integers(0, 20, (rows, 20)).astype(np.uint8),
                        rng.normal(0, 6, (20, 3)).astype(np.float32))
                for name, rows in (("known", 5), ("new", 9), ("other", 7))]
    monkeypatch.setattr(calibration.files, "load_families", lambda directory: families)
    config, path = tof.TinyOpenFoldConfig(**SIZES), tmp_path / "m.pt"
    save_model(path, tof.PROGRAM, tof.TinyOpenFoldV2(config).state_dict(), config,
               dict(trained_on=["known"], seed=1))
    before = read_model(path, tof.PROGRAM).weights
    flags = ["--data", "x", "--model", str(path), "--out", str(tmp_path / "c.json"), "--device", "cpu"]
    assert calibration.main([*flags, "--rows", "1", "100"]) == 0
    assert "8 rows (8 effective): P(L/2) " in capsys.readouterr().out
    measured = json.loads((tmp_path / "c.json").read_text())["by_rows"]
    assert [[(f["name"], f["rows"]) for f in found["families"]] for found in measured.values()] == [
        [("new", 1), ("other", 1)], [("new", 9), ("other", 7)]]
    assert measured["100"]["pairs"] == 2 * 15 * 14 / 2  # pairs at least 6 apart of 20 residues, twice
    assert calibration.main([*flags, "--card"]) == 0
    saved = read_model(path, tof.PROGRAM)
    assert all(saved.weights[name].equal(weight) for name, weight in before.items())
    card = saved.card
    assert card["seed"] == 1 and list(card["sequences"]) == ["known"]
    own, consensus = card["sequences"]["known"]
    assert own == families[0].sequence and len(consensus) == 20
    assert card["calibration"]["families"] == ["new", "other"]
    assert [rows["rows"] for rows in card["calibration"]["by_rows"]] == [1, 8]
    assert card["calibration"]["bins"] == measured["100"]["bins"]
    monkeypatch.setattr(calibration.files, "load_families", lambda directory: families[1:])
    with pytest.raises(UserError, match="--data: lacks known, which the model was trained on"):
        calibration.main([*flags, "--card"])
