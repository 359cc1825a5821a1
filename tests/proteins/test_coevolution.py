"""Statistics of alignments by hand: weights of rows, strengths of pairs; mean-field DCA by its papers, and on
real families against known figures."""
import numpy as np
import pytest
import torch

from tests.support import require_shared
from tiny_openfold.proteins import coevolution, files
from tiny_openfold.proteins.contacts import contact_precision
from tiny_openfold.proteins.files import GAP
from tiny_openfold.proteins.yardsticks import sequence_weights

A, C, D = range(3)


def test_rows_that_are_alike_share_their_weight():
    rows = torch.tensor([[[A, A, A, A, A, D], [A, A, A, A, C, D], [A, A, C, C, C, D], [GAP] * 6]])
    mask = torch.tensor([[1.0, 1, 1, 1, 1, 0]])  # the last column does not count: 4 of 5 are alike
    assert coevolution.row_weights(rows, mask).tolist() == [[0.5, 0.5, 1.0, 0.0]]
    assert coevolution.row_weights(rows, torch.ones(1, 6)).tolist() == [[0.5, 0.5, 1.0, 0.0]]  # 5 of 6
    narrow = torch.tensor([[1.0, 0, 1, 1, 1, 0]])  # 3 of 4
    assert coevolution.row_weights(rows, narrow).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_rows_of_gaps_share_no_weight_with_rows_that_are_nearly_such():
    """Padding is rows of gaps alone; a fragment is a gap nearly everywhere, too."""
    fragment = torch.full((1, 1, 10), GAP)
    fragment[..., 0] = 3
    padded = torch.cat([fragment, fragment, torch.full((1, 6, 10), GAP)], dim=1)
    assert coevolution.row_weights(padded, torch.ones(1, 10)).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0]]


# --- Direct coupling analysis ----------------------------------------------------------------------------

def slow_dca(msa, weights, pseudocount=0.5):
    """(S, S) norms of couplings, every step as it stands in the papers (Morcos et al. 2011, Ekeberg et al.
    2013); before the product correction."""
    size, states = msa.shape[1], coevolution.Q
    hot = np.eye(states)[np.minimum(msa, states - 1)]  # (R, S, states)
    share = weights / weights.sum()
    single = pseudocount / states + (1 - pseudocount) * np.einsum("r,ria->ia", share, hot)
    pairs = pseudocount / states ** 2 + (1 - pseudocount) * np.einsum("r,ria,rjb->iajb", share, hot, hot)
    for i in range(size):
        pairs[i, :, i, :] = np.diag(single[i])
    covariance = pairs - single[:, :, None, None] * single
    used = states - 1
    inverse = np.linalg.inv(covariance[:, :used, :, :used].reshape(size * used, -1))
    couplings = np.zeros((size, states, size, states))
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
    """Column 1 copies column 0 and column 2 copies column 1, each nine times in ten. Gap and unknown are one
    state."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 20, 4000)]
    for _ in range(2):
        columns.append(np.where(rng.random(4000) < 0.9, columns[-1], rng.integers(0, 20, 4000)))
    msa = np.stack([*columns, rng.integers(0, 22, 4000)], axis=1).astype(np.uint8)
    norms = slow_dca(msa, sequence_weights(msa))
    mean = norms.sum(0) / 3
    expected = norms - np.outer(mean, mean) / (norms.sum() / 12)
    np.fill_diagonal(expected, 0)
    expected /= np.sqrt((expected ** 2).sum() / 12)  # in standard deviations
    assert coevolution.mean_field_dca(msa).numpy() == pytest.approx(expected, abs=2e-3)
    assert norms[0, 2] < 0.8 * norms[0, 1]
    tables = coevolution.pair_features(torch.from_numpy(msa.astype(np.int64))[None])[0, ..., :-1]
    tables = tables.unflatten(-1, (21, 21))
    assert torch.allclose(tables, tables.permute(1, 0, 3, 2), atol=1e-2) and not tables.diagonal().any()


@pytest.mark.parametrize("name, expected", [("1WVN_A", (0.595, 0.541)), ("1PTF_A", (0.744, 0.651))])
def test_precision_of_dca_on_real_families_is_that_of_another_program(name, expected):
    """P(L/2) of pairs at least 6 and 24 apart, as ../shared/learning/yardstick.py prints it."""
    pytest.importorskip("gemmi")
    stem = require_shared("data", "families", f"{name}.a3m")
    protein = files.load_protein(stem, stem.with_suffix(".pdb"))
    scores, coords = coevolution.mean_field_dca(protein.msa), torch.from_numpy(protein.coords)
    seen = coords.isfinite().all(dim=1).float()
    found = [contact_precision(scores, coords.nan_to_num(), seen, apart)["p_l2"] for apart in (6, 24)]
    assert found == pytest.approx(expected, abs=5e-4)
