"""What triangle multiplication keeps in memory, in Triton's interpreter."""
import pytest
import torch

from evoformer_kernels.triangle_multiplication import function as trimul
from fusion_lab.measuring.counters import OpCounter
from tests.kernels.problems import multiplication

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


@pytest.mark.parametrize("keep, passes", {True: 6, False: 4}.items())
def test_forward_holds_nothing_that_nobody_reads(keep, passes, monkeypatch):
    """x, product, both sides, LN(product), the result; without backward these come when sides are gone."""
    monkeypatch.setattr(trimul.MultiplicationPlan, "run", lambda *_, **__: None)  # which needs no memory
    _, _, (pair, *weights) = multiplication(torch.float32, 1, 16, 32, True, None, True, None, True)
    with OpCounter() as counter:
        trimul.triangle_forward(pair, None, None, pair, None, *weights, outgoing=True, eps=1e-5, save=keep)
    assert counter.peak == passes * pair.nbytes + 4 * 4 * 256
