"""Sums of partial sums of a bias's gradient in Triton's interpreter: exact for whole numbers; mutants."""
import pytest
import torch

from fusion_lab.kernels import common
from fusion_lab.kernels.attention import bias_gradient
from tests.kernels.rule import mutant

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # n, B, H, LP, length
    "one partial sum": (1, 2, 3, 16, 13),
    "one partial sum, several tiles": (1, 1, 1, 128, 101),
    "two of whole tiles": (2, 1, 2, 128, 128),
    "few of long rows": (8, 1, 2, 128, 77),
    "rows of three tiles of 16": (5, 2, 1, 48, 35),
    "several whole iterations": (64, 1, 2, 32, 32),
    "one more": (65, 2, 1, 32, 27),
    "many": (300, 1, 1, 16, 1),
}
MUTANTS = {  # what is replaced by what, and the case that must notice; none leaves its memory
    "last ones dropped": ("range(0, N, BP", "range(0, N - BP, BP", "one more"),
    "last one dropped": ("n < N - n0", "n < N - n0 - 1", "few of long rows"),
    "always the first ones": ("tl.int64) * BP", "tl.int64) * 0", "one more"),
    "transposed without being asked": ("if TRANSPOSE else", "if not TRANSPOSE else", "few of long rows"),
    "crop ignored": ("length, LP),", "length, length),", "few of long rows"),
    "last query not stored": ("(i < L)", "(i < L - 1)", "few of long rows"),
    "last key not stored": ("(j < L)", "(j < L - 1)", "few of long rows"),
    "first rows alone": ("(bh * LP + i0)", "(bh * LP + 0 * i0)", "few of long rows"),
    "first head alone": ("(bh * LP + i0)", "(0 * bh * LP + i0)", "few of long rows"),
    "first columns alone": ("* LP + j0", "* LP + 0 * j0", "few of long rows"),
}


def problem(dtype, n, B, H, LP, length):
    """(partial_sums, length): whole numbers, whose sums float32 holds; NaN beyond length."""
    torch.manual_seed(0)
    partial_sums = torch.randint(-2, 3, (n, B, H, LP, LP)).to(dtype)
    partial_sums[..., length:, :] = partial_sums[..., length:] = torch.nan
    return partial_sums, length


def wrong(op, given, dtype, transpose):
    """Whether op's sum is another than that of plain PyTorch, or lies otherwise."""
    found, expected = (function(*given, dtype, transpose) for function in (op, bias_gradient.reference))
    return found.dtype != dtype or not found.is_contiguous() or not torch.equal(found, expected)


@pytest.mark.sample
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", common.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact_for_whole_numbers(case, dtype, transpose):
    given = problem(dtype, *CASES[case])
    assert not wrong(bias_gradient.OP, given, dtype, transpose)
    assert dtype != torch.float32 or not wrong(bias_gradient.OP, given, torch.bfloat16, transpose)


@pytest.mark.parametrize("dtype", common.DTYPES, ids=str)
def test_sums_are_rounded_once(dtype):
    """What 300 roundings would add up to is far beyond one, by which the interpreter cuts off in bfloat16."""
    partial_sums = torch.randn(300, 1, 1, 16, 16).to(dtype)
    exact, found = partial_sums.double().sum(0), bias_gradient.OP(partial_sums, 16, dtype, False)
    allowed = torch.finfo(dtype).eps * exact.abs() + 300 * torch.finfo(torch.float32).eps * 4
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, tmp_path):
    old, new, case = MUTANTS[name]
    module = mutant(bias_gradient, old, new, tmp_path)
    given = problem(torch.float32, *CASES[case])
    assert wrong(module.OP, given, torch.float32, False) and wrong(module.OP, given, torch.float32, True)


def test_tiles_are_whole_and_of_few_bytes():
    for n in (1, 2, 3, 8, 64, 300):
        for LP in (16, 32, 48, 64, 128, 384):
            for itemsize in (2, 4):
                together, BI, BJ = bias_gradient.tile_sizes(n, LP, itemsize)
                assert LP % BI == LP % BJ == 0 and BJ * itemsize <= bias_gradient.LINE
                assert BI * BJ <= bias_gradient.TILE and BI * BJ * together * itemsize <= bias_gradient.LOADED
                assert LP < 64 or BI * BJ == bias_gradient.TILE


def test_fake_tensors_have_the_same_size():
    partial_sums, length = problem(torch.bfloat16, *CASES["one more"])
    real, fake = (bias_gradient.OP(each, length, torch.float16, True)
                  for each in (partial_sums, partial_sums.to("meta")))
    assert real.shape == fake.shape and real.stride() == fake.stride()
    assert real.dtype == fake.dtype == torch.float16
