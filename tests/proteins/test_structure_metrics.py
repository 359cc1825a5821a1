"""TM-score, lDDT, RMSD: by hand, by definition."""
import numpy as np
import pytest

from tiny_openfold.proteins import structure_metrics as sm


def a_trace(size=80, seed=0):
    """CA atoms of a chain that folds back on itself."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(size, 3))
    walk = np.cumsum(3.8 * steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0)
    return walk - 0.1 * np.arange(size)[:, None] * walk.mean(0) / size


def rotated(points, seed=1):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return points @ (q * np.sign(np.linalg.det(q))) + [10, -20, 30]


def test_a_mirror_image_is_not_but_for_lddt():
    true = a_trace()
    found = sm.compared(true * [1, 1, -1], true)
    assert found["lddt_ca"] == 1 and found["tm_score"] < 0.6 and found["rmsd"] > 3


def test_two_halves_that_were_moved_apart():
    """TM-score superposes the one half, RMSD has to take both; half of the pairs within 15 Å cross at
    most."""
    true = a_trace(100)
    model = true.copy()
    model[50:] = rotated(model[50:])
    found = sm.compared(model, true)
    assert 0.5 <= found["tm_score"] < 0.75 and found["rmsd"] > 8
    wanted = np.linalg.norm(true[:, None] - true, axis=-1)
    within = (wanted < 15) & ~np.eye(100, dtype=bool)
    error = np.abs(np.linalg.norm(model[:, None] - model, axis=-1) - wanted)
    by_hand = [np.mean([(error[i, within[i]] < cutoff).mean() for cutoff in (0.5, 1, 2, 4)])
               for i in range(100)]
    assert sm.lddt(model, true) == pytest.approx(by_hand)


def test_definitions():
    assert sm.tm_scale(100) == pytest.approx(1.24 * 85 ** (1 / 3) - 1.8) and sm.tm_scale(10) == 0.5
    line = np.zeros((300, 3))
    line[:, 0] = 3.8 * np.arange(300)
    shifted = line.copy()
    shifted[:5, 1] += 1000 + 2 * np.arange(5)  # five of 300 are far away: the others fit exactly
    assert sm.tm_score(shifted, line) == pytest.approx(295 / 300, abs=1e-3)
    true = a_trace(50)
    noise = np.random.default_rng(2).normal(size=(50, 3))
    best = np.sqrt((sm.superposed(true + noise, true, np.ones((1, 50), bool)) ** 2).mean())
    assert sm.rmsd(true + noise, true) == pytest.approx(best)
    assert best <= np.sqrt((noise ** 2).sum(1).mean())  # this one is the least squares'


def test_tm_score_finds_what_only_its_narrowest_search_finds():
    """Of 48 residues every second one fits exactly, the others are 3.5 Å off, each to another side: on the
    exact half alone, which no piece of the chain is, the score is 0.5 and what 3.5 Å are worth."""
    true = a_trace(48)
    model, sides = true.copy(), np.random.default_rng(0).normal(size=(24, 3))
    model[1::2] += 3.5 * sides / np.linalg.norm(sides, axis=1, keepdims=True)
    scale = 1.24 * 33 ** (1 / 3) - 1.8
    assert sm.tm_score(rotated(model), true) >= 0.5 + 0.5 / (1 + (3.5 / scale) ** 2) - 1e-6


def test_residues_without_coordinates_are_left_out():
    true, model = a_trace(), a_trace() + np.random.default_rng(3).normal(size=(80, 3))
    true[10:20] = np.nan
    known = np.isfinite(true[:, 0])
    assert sm.compared(model, true) == sm.compared(model[known], true[known])
    assert sm.compared(model, true)["residues_compared"] == 70
    true[0] += 100  # a residue without neighbours has no lDDT, which does not count
    assert sm.compared(true, true)["lddt_ca"] == 1
    true[2:] = np.nan
    assert sm.compared(model, true) is None
