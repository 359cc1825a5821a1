"""Statistics of alignments by hand: weights of rows, strengths of pairs."""
import numpy as np
import pytest
import torch

from proteins import coevolution
from proteins.files import GAP

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


def test_strengths_are_norms_without_what_sites_share():
    tables = torch.randn(1, 3, 21, 3, 21, generator=torch.Generator().manual_seed(0))
    tables = tables * (1 - torch.eye(3))[None, :, None, :, None]
    norm = np.sqrt((tables[0, :, :-1, :, :-1].numpy() ** 2).sum(axis=(1, 3)))
    mean = norm.sum(axis=1, keepdims=True) / 2
    rest = (norm - mean * mean.T / (norm.sum() / 6)) * (norm > 0)
    expected = rest / np.sqrt((rest ** 2).sum() / 6)
    found = coevolution.strengths(tables, torch.tensor([[[3]]]))
    assert found[0].numpy() == pytest.approx(expected, abs=1e-4)


def test_two_sites_share_all_that_they_have():
    tables = torch.zeros(1, 2, 21, 2, 21)
    tables[0, 0, 3, 1, 4] = tables[0, 1, 4, 0, 3] = 2
    assert not coevolution.strengths(tables, torch.tensor([[[2]]])).any()


def test_features_of_one_row_and_under_autocast():
    rows = torch.randint(0, 20, (2, 1, 7), generator=torch.Generator().manual_seed(0))
    found = coevolution.pair_features(rows)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert torch.equal(found, coevolution.pair_features(rows, torch.ones(2, 7)))
    deep = torch.cat([rows, rows.flip(2), rows.roll(1, 2)], dim=1)
    expected = coevolution.pair_features(deep)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(coevolution.pair_features(deep), expected)
