"""Weights of rows that are nearly empty."""
import torch

from proteins import coevolution
from proteins.files import GAP


def test_rows_of_gaps_share_no_weight_with_rows_that_are_nearly_such():
    """Padding is rows of gaps alone; a fragment is a gap nearly everywhere, too."""
    fragment = torch.full((1, 1, 10), GAP)
    fragment[..., 0] = 3
    padded = torch.cat([fragment, fragment, torch.full((1, 6, 10), GAP)], dim=1)
    assert coevolution.row_weights(padded, torch.ones(1, 10)).tolist() == [[0.5, 0.5, 0, 0, 0, 0, 0, 0]]
