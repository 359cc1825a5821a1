"""The projections in Triton's interpreter: what is no number, and how a tile finds its lines."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.common import lines
from tests.kernels.problems import made

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


@pytest.mark.parametrize("number", [0, 6])  # 6: weights stay in shared memory
def test_what_is_not_a_number_stays_so(number, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", lambda kernel, shape, candidates: candidates[number])
    ours, plain, (x, *weights) = made("transition", torch.bfloat16, "whole tiles")
    x[0, 1, 2, 3] = float("nan")
    assert torch.equal(ours(x, *weights).isnan(), plain(x, *weights).isnan())


@pytest.mark.parametrize("X, Y, expected", [(3, 192, 1), (3, 64, 1), (4, 32, 2), (64, 1, 64), (3, 32, 0),
                                            (4, 48, 0), (5, 7, 0)])
def test_lines_of_a_tile_of_64(X, Y, expected):
    assert lines(X, Y, 64) == expected
