"""Where partial sums are stored, and sums over rows, in Triton's interpreter. Whether sums are right:
tests/kernels/test_exact.py."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.reductions import sums

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, ours", [(2 * sums.SHARE, 1), (sums.SHARE + 1, 0)])
def test_sums_over_rows_are_the_same_compiled(rows, ours, dtype):
    """There in parts, whose sum is our operator's, where there are whole shares."""
    x, graphs = torch.randint(-2, 3, (rows, 24)).to(dtype), []
    torch._dynamo.reset()
    compiled = torch.compile(sums.over_rows, backend=lambda graph, _: graphs.append(graph.graph) or graph)
    assert torch.equal(sums.over_rows(x), x.float().sum(0).to(dtype))
    assert torch.equal(sums.over_rows(x), compiled(x))
    assert len(graphs[0].find_nodes(op="call_function", target=sums.OP)) == ours


@pytest.mark.parametrize("programs", [1, 3, 7])
@pytest.mark.parametrize("tuning", [False, True])
def test_whatever_number_of_programs_is_launched_the_sum_is_the_same(programs, tuning, monkeypatch):
    """And while tiles are measured none has a way of its own."""
    monkeypatch.setattr(tuner, "found", {} if tuning else None)
    partial_sums = torch.full((3, 2, 5), torch.nan)
    stored = torch.randint(-2, 3, (programs, 2, 5)).float()
    with sums.room(partial_sums, programs) as room:
        assert (room is partial_sums) == (programs == 3 and not tuning) and room.shape == stored.shape
        room.copy_(stored)
    assert torch.equal(partial_sums.sum(0), stored.sum(0))
