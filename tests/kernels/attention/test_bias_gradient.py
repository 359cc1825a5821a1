"""Sums of partial sums of a bias's gradient in Triton's interpreter: exact for whole numbers."""
import pytest
import torch

from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.precision import HALF
from tests.kernels import references

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # n, B, H, LP, length
    "one partial sum": (1, 2, 3, 16, 13),
    "one partial sum, several tiles": (1, 1, 1, 128, 101),
    "two of whole tiles": (2, 1, 2, 128, 128),
    "few of long rows": (8, 1, 2, 128, 77),
    "rows of three tiles of 16": (5, 2, 1, 48, 35),
    "several whole iterations": (64, 1, 2, 32, 32),
    "one more": (65, 2, 1, 32, 27),
    "many": (300, 1, 1, 16, 1)}


def problem(dtype, n, B, H, LP, length):
    """(partial_sums, length): whole numbers, whose sums float32 holds; NaN beyond length."""
    torch.manual_seed(0)
    partial_sums = torch.randint(-2, 3, (n, B, H, LP, LP)).to(dtype)
    partial_sums[..., length:, :] = partial_sums[..., length:] = torch.nan
    return partial_sums, length


def wrong(given, dtype, transpose):
    """Whether the operator's sum is another than that of plain PyTorch, or lies otherwise."""
    found, expected = (function(*given, dtype, transpose)
                       for function in (bias_gradient.OP, references.bias_gradient))
    return found.dtype != dtype or not found.is_contiguous() or not torch.equal(found, expected)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact_for_whole_numbers(case, dtype, transpose):
    assert not wrong(problem(dtype, *CASES[case]), torch.bfloat16, transpose)


@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
def test_sums_are_rounded_once(dtype):
    """What 300 roundings would add up to is far beyond one, by which the interpreter cuts off in bfloat16."""
    partial_sums = torch.randn(300, 1, 1, 16, 16).to(dtype)
    exact, found = partial_sums.double().sum(0), bias_gradient.OP(partial_sums, 16, dtype, False)
    allowed = torch.finfo(dtype).eps * exact.abs() + 300 * torch.finfo(torch.float32).eps * 4
    assert ((found.double() - exact).abs() <= allowed).all()
