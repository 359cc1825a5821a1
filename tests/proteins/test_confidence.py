"""pLDDT: what a distogram leads one to expect."""
import math

import pytest
import torch

from tests.proteins.folds_at_hand import CENTRES, a_fold
from tiny_openfold.proteins import confidence


def test_expected_is_what_it_comes_to_if_the_distogram_is_true():
    """Two equally probable distances for each pair: the mean of the lDDT by the one and by the other."""
    true = a_fold()[:, 4]
    size = len(true)
    distances = torch.cdist(true, true)
    bins = (distances[..., None] - CENTRES).abs().argmin(-1)
    p = torch.zeros(size, size, len(CENTRES), dtype=torch.float64)
    for other in (bins, (bins + 5).clamp(max=len(CENTRES) - 1)):  # 1.56 Å apart
        p.scatter_add_(2, other[..., None], torch.full((size, size, 1), 0.5, dtype=torch.float64))
    found = confidence.expected_lddt(p, CENTRES, true)
    by_hand = []
    for i in range(size):
        kept = weight = 0
        for j in set(range(size)) - {i}:
            for centre in (CENTRES[bins[i, j]].item(), CENTRES[min(bins[i, j] + 5, 63)].item()):
                if centre < 15:
                    weight += 0.5
                    error = abs(centre - distances[i, j].item())
                    kept += 0.5 * sum(error < cutoff for cutoff in (0.5, 1, 2, 4)) / 4
        by_hand.append(kept / weight)
    assert found.tolist() == pytest.approx(by_hand) and 0.6 < found.mean() < 0.9


def test_plddt_lies_between_0_and_100_and_is_0_without_neighbours():
    alone = confidence.expected_lddt(torch.full((1, 1, 64), 1 / 64), CENTRES, torch.zeros(1, 3))
    assert math.isnan(alone.item())
    for share, expected in ((0.625, 0.5), (0.5, math.nan)):  # of a neighbour; 1 Å is not within 1 Å
        pair = torch.tensor([share, 1 - share]).expand(2, 2, 2)
        places = torch.tensor([[0.0, 0, 0], [3, 0, 0]])
        found = confidence.expected_lddt(pair, torch.tensor([2.0, 30.0]), places)
        assert found.tolist() == pytest.approx([expected] * 2, nan_ok=True)
    found = confidence.plddt(torch.tensor([float("nan"), 0.0, 0.3, 0.5, 5.0]), -0.05, 1.2)
    assert found.tolist() == pytest.approx([0, 0, 31, 55, 100])
    assert confidence.plddt(torch.tensor([0.25])).item() == 25
    low = confidence.plddt(torch.tensor([0.5, 0.6, 0.7]), uncertain_share=0.8, uncertain=[1]).tolist()
    assert low == pytest.approx([50, 48, 70])
