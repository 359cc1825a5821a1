"""Sums over rows. Whether sums of partial sums are right: tests/kernels/test_exact.py."""
import pytest
import torch

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
