"""Gradients of many weights in Triton's interpreter: the 3x rule for each of them."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.precision import HALF
from fusion_lab.kernels.reductions import weight_gradients
from tests.kernels import references

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # P, n, m of each problem
    "one": [(77, 32, 16)],
    "narrow and odd": [(77, 8, 4), (1, 16, 23), (385, 4, 64), (385, 1, 1)],
    "several tiles and shares": [(130, 16, 16), (600, 64, 72), (1100, 80, 130)],
    "equal": [(300, 48, 48)] * 3,
    "more than one launch takes": [(65 + n, 16 + n, 20) for n in range(7)],
}
def problem(case, dtype):
    """(lefts, rights)"""
    torch.manual_seed(0)
    return [[torch.randn(each[0], each[side]).to(dtype) for each in CASES[case]] for side in (1, 2)]


def wrong(call, lefts, rights):
    """Which results break the rule: errors against float64 may be three times those of plain PyTorch."""
    exact = references.weight_gradients(*([t.double() for t in side] for side in (lefts, rights)))
    widths = [left.shape[1] * right.shape[1] for left, right in zip(lefts, rights, strict=True)]
    found = []
    for number, (mine, own, truth) in enumerate(zip(*(result.split(widths) for result in (
            call(lefts, rights), references.weight_gradients(lefts, rights), exact)), strict=True)):
        error, allowed = ((x.double() - truth).abs().max() for x in (mine, own))
        if not error <= 3 * allowed + 2 * torch.finfo(lefts[0].dtype).eps * truth.abs().max():
            found.append(number)
    return found


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """So that small problems need several launches and shares."""
    monkeypatch.setattr(weight_gradients, "MOST", 4)
    monkeypatch.setattr(weight_gradients, "LEAST", 200)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_three_times_the_error_of_plain_pytorch(case, dtype):
    assert wrong(weight_gradients.OP, *problem(case, dtype)) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 6))
def test_every_tile_of_the_tuner(number, monkeypatch):
    monkeypatch.setattr(tuner, "launch", lambda kernel, shape, candidates, run: run(candidates[number]))
    assert wrong(weight_gradients.OP, *problem("several tiles and shares", torch.bfloat16)) == []


@pytest.mark.slow
def test_rows_may_have_gaps_or_be_columns():
    lefts, rights = problem("equal", torch.bfloat16)
    gaps = [torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, :t.shape[1]] for t in lefts]
    columns = [t.t().contiguous().t() for t in rights]
    expected = weight_gradients.OP(lefts, rights)
    assert torch.equal(weight_gradients.OP(gaps, columns), expected)


def test_no_position():
    assert not weight_gradients.OP([torch.ones(0, 16).bfloat16()], [torch.ones(0, 5).bfloat16()]).any()


def test_what_the_kernel_would_misread_is_refused():
    x = torch.ones(5, 16).bfloat16()
    for lefts, rights, message in (
            ([x], [x, x], "1 left and 2 right"), ([x], [x.float()], "from torch.bfloat16 and torch.float32"),
            ([x.float()], [x.float()], "from torch.float32, but"), ([x], [x[:4]], r"right 0 is \(4, 16\)"),
            ([x[None]], [x], r"left 0 is \(1, 5, 16\)")):
        with pytest.raises(ValueError, match=message):
            weight_gradients.launch(lefts, rights)
