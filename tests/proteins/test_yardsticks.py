"""MI-APC and mean-field DCA: by hand, by a slow formula, and on real families against known figures."""
import numpy as np
import pytest
import torch

from proteins import files, yardsticks
from proteins.contacts import contact_precision
from proteins.yardsticks import STATES, mean_field_dca, mutual_information, sequence_weights, some_rows
from tests.support import require_shared

ACDE = {letter: token for token, letter in enumerate(files.LETTERS)}


def alignment(*rows):
    return np.array([[ACDE[letter] for letter in row] for row in rows], np.uint8)


def test_near_copies_share_their_weight(monkeypatch):
    rows = alignment("AAAAA", "AAAA-", "CCCCC", "AAA--", "CCCCA")
    expected = [1 / 2, 1 / 3, 1 / 2, 1 / 2, 1 / 2]  # 4 of 5 columns are enough, 3 are not
    assert sequence_weights(rows) == pytest.approx(expected)
    monkeypatch.setattr(yardsticks, "BLOCK", 2)
    assert sequence_weights(rows) == pytest.approx(expected)
    assert sequence_weights(rows, identity=1.0) == pytest.approx(np.ones(5))


def test_what_columns_share_is_taken_off():
    corrected = yardsticks.average_product_corrected
    assert corrected(np.array([[5.0, 2], [2, 7]])).tolist() == [[0, 0], [0, 0]]  # of two it is all
    found = corrected(np.array([[9.0, 4, 2], [4, 9, 0], [2, 0, 9]]))  # means 3, 2 and 1, of 2
    assert found.tolist() == [[0, 1, 0.5], [1, 0, -1], [0.5, -1, 0]]
    assert not corrected(np.zeros((3, 3))).any() and corrected(np.ones((1, 1))).tolist() == [[0]]


def test_mutual_information_by_hand():
    """Columns 0 and 1 say the same, ln 2; column 2 says nothing. Gap and unknown are one letter."""
    rows = alignment("ADE", "ADX", "CFE", "CF-")
    scores = mutual_information(rows, np.ones(4))
    mean, total = np.log(2) / 2, np.log(2) / 3
    assert scores[0, 1] == pytest.approx(np.log(2) - mean * mean / total, abs=1e-5)
    assert scores == pytest.approx(scores.T, abs=1e-12) and not np.diagonal(scores).any()
    assert scores[0, 2] == pytest.approx(0, abs=1e-6) and scores[1, 2] == pytest.approx(0, abs=1e-6)


def slow_dca(msa, weights, pseudocount=0.5):
    """Norms of couplings, every step as it stands in the papers; before the product correction."""
    size = msa.shape[1]
    hot = np.eye(STATES)[np.minimum(msa, STATES - 1)]  # (R, S, states)
    share = weights / weights.sum()
    single = pseudocount / STATES + (1 - pseudocount) * np.einsum("r,ria->ia", share, hot)
    pairs = pseudocount / STATES ** 2 + (1 - pseudocount) * np.einsum("r,ria,rjb->iajb", share, hot, hot)
    for i in range(size):
        pairs[i, :, i, :] = np.diag(single[i])
    covariance = pairs - single[:, :, None, None] * single
    used = STATES - 1
    inverse = np.linalg.inv(covariance[:, :used, :, :used].reshape(size * used, -1))
    couplings = np.zeros((size, STATES, size, STATES))
    couplings[:, :used, :, :used] = -inverse.reshape(size, used, size, used)
    norms = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            e = couplings[i, :, j]
            e = e - e.mean(0, keepdims=True) - e.mean(1, keepdims=True) + e.mean()
            norms[i, j] = np.linalg.norm(e[:used, :used])
    np.fill_diagonal(norms, 0)
    return norms


def test_dca_is_the_formula_and_explains_indirect_couplings_away():
    """Column 1 copies column 0 and column 2 copies column 1, each nine times in ten."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 20, 4000)]
    for _ in range(2):
        columns.append(np.where(rng.random(4000) < 0.9, columns[-1], rng.integers(0, 20, 4000)))
    msa = np.stack([*columns, rng.integers(0, 22, 4000)], axis=1).astype(np.uint8)
    weights = rng.random(4000)
    for pseudocount, indirect in ((0.5, 0.8), (0.05, 0.25)):  # the customary one blurs strong couplings
        norms = slow_dca(msa, weights, pseudocount)
        mean = norms.sum(0) / 3
        expected = norms - np.outer(mean, mean) / (norms.sum() / 12)
        np.fill_diagonal(expected, 0)
        found = mean_field_dca(msa, pseudocount, weights)
        assert found == pytest.approx(expected, abs=1e-4 * np.abs(expected).max())
        assert norms[0, 2] < indirect * norms[0, 1]


def test_rows_are_drawn_with_the_query_first():
    msa = np.arange(50, dtype=np.uint8)[:, None]
    drawn = some_rows(msa, 10)
    assert drawn[0] == 0 and len(np.unique(drawn)) == 10 and np.array_equal(drawn, some_rows(msa, 10))
    assert not np.array_equal(drawn, some_rows(msa, 10, seed=1)) and some_rows(msa, 50) is msa


def precision(scores, protein, separation):
    coords = torch.from_numpy(protein.coords)
    seen = coords.isfinite().all(dim=1).float()
    return contact_precision(torch.from_numpy(scores), coords.nan_to_num(), seen, separation)["p_l2"]


@pytest.mark.parametrize("name, at_6, at_24", [("1WVN_A", (0.459, 0.595), (0.432, 0.541)),
                                               ("2O9S_A", (0.758, 0.727), (0.212, 0.152))])
def test_precision_on_real_families_is_that_of_another_program(name, at_6, at_24):
    """P(L/2) of MI-APC and of mean-field DCA as ../shared/learning/yardstick.py prints it."""
    pytest.importorskip("gemmi")
    stem = require_shared("data", "families", f"{name}.a3m")
    protein = files.load_protein(stem, stem.with_suffix(".pdb"))
    msa = some_rows(protein.msa, 4000)
    weights = sequence_weights(msa)
    maps = mutual_information(msa, weights), mean_field_dca(msa, weights=weights)
    for separation, expected in ((6, at_6), (24, at_24)):
        assert [round(precision(scores, protein, separation), 3) for scores in maps] == list(expected)
