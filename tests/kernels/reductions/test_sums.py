"""Sums of parts in Triton's interpreter: exact ones of whole numbers; and where parts are stored."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.precision import HALF
from fusion_lab.kernels.reductions import sums

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # sizes of each problem's parts
    "one": [(77, 33)],
    "one number, one row, no row": [(1, 1), (1, 40), (0, 5), (300, 2)],
    "several tiles": [(600, 3, 40), (257, 64), (2, 31), (300, 1)],
    "many columns": [(7, 9001), (21, 8200)],
    "more than one launch takes": [(65 + n, 16 + n) for n in range(9)]}


def problem(sizes):
    """Parts whose sums all dtypes hold."""
    torch.manual_seed(0)
    return [torch.randint(-2, 3, size).float() for size in sizes]


def expected(parts, dtype):
    return torch.cat([part.sum(0).flatten() for part in parts]).to(dtype)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """So that a few problems need several launches."""
    monkeypatch.setattr(sums, "MOST", 4)


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.sample] * (case == "several tiles"))
                                  for case in CASES])
def test_sums_are_exact_for_whole_numbers(case, dtype):
    parts = problem(CASES[case])
    assert torch.equal(sums.GATHERED_OP(parts, dtype), expected(parts, dtype))
    assert all(torch.equal(sums.OP(part, dtype), part.sum(0).to(dtype)) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, ours", [(2 * sums.SHARE, 1), (sums.SHARE + 1, 0)])
def test_sums_over_rows_are_the_same_compiled(rows, ours, dtype):
    """There in parts, whose sum is our operator's, where there are whole shares."""
    x, graphs = problem([(rows, 24)])[0].to(dtype), []
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
    parts, stored = torch.full((3, 2, 5), torch.nan), problem([(programs, 2, 5)])[0]
    with sums.room(parts, programs) as to:
        assert (to is parts) == (programs == 3 and not tuning) and to.shape == stored.shape
        to.copy_(stored)
    assert torch.equal(parts.sum(0), stored.sum(0))
