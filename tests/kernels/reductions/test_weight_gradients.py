"""Gradients of many weights in Triton's interpreter: the 3x rule for each of them."""
import pytest
import torch

from evoformer_kernels import tuner
from evoformer_kernels.precision import HALF
from evoformer_kernels.reductions import weight_gradients

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # P, n, m of each problem
    "one": [(77, 32, 16)],
    "narrow and odd": [(77, 8, 4), (1, 16, 23), (385, 4, 64), (385, 1, 1), (0, 16, 5)],
    "several tiles and shares": [(130, 16, 16), (600, 64, 72), (1100, 80, 130)],
    "more than one launch takes": [(65 + n, 16 + n, 20) for n in range(7)]}


def problem(case, dtype):
    """(lefts, rights)"""
    torch.manual_seed(0)
    return [[torch.randn(each[0], each[side]).to(dtype) for each in CASES[case]] for side in (1, 2)]


def wrong(lefts, rights):
    """Which results break the rule: errors against float64 may be three times those of plain PyTorch."""
    widths = [left.shape[1] * right.shape[1] for left, right in zip(lefts, rights, strict=True)]
    found = []
    for number, (mine, left, right) in enumerate(zip(weight_gradients.OP(lefts, rights).split(widths), lefts,
                                                     rights, strict=True)):
        own, exact = (left.t() @ right).flatten(), (left.double().t() @ right.double()).flatten()
        error, allowed = ((x.double() - exact).abs().max() for x in (mine, own))
        if not error <= 3 * allowed + 2 * torch.finfo(left.dtype).eps * exact.abs().max():
            found.append(number)
    return found


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """So that small problems need several launches and shares."""
    monkeypatch.setattr(weight_gradients, "MOST", 4)
    monkeypatch.setattr(weight_gradients, "LEAST", 200)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.sample] * (case == "narrow and odd"))
                                  for case in CASES])
def test_three_times_the_error_of_plain_pytorch(case, dtype):
    assert wrong(*problem(case, dtype)) == []


@pytest.mark.parametrize("number", range(1, 6))
def test_every_tile_of_the_tuner(number, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", lambda kernel, shape, candidates: candidates[number])
    assert wrong(*problem("several tiles and shares", torch.bfloat16)) == []


def test_rows_may_have_gaps_or_be_columns():
    lefts, rights = problem("more than one launch takes", torch.bfloat16)
    gaps = [torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, :t.shape[1]] for t in lefts]
    columns = [t.t().contiguous().t() for t in rights]
    assert torch.equal(weight_gradients.OP(gaps, columns), weight_gradients.OP(lefts, rights))
