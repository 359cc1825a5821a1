"""Sums of the parts of a bias's gradient in Triton's interpreter: exact ones of whole numbers; mutants."""
import pytest
import torch
from rule import mutant

from fusion_lab.kernels import added_bias, triton_parts

CASES = {  # n, B, H, LP, length
    "one part": (1, 2, 3, 16, 13),
    "one part, several tiles": (1, 1, 1, 128, 101),
    "two of whole tiles": (2, 1, 2, 128, 128),
    "few of long rows": (8, 1, 2, 128, 77),
    "rows of three tiles of 16": (5, 2, 1, 48, 35),
    "several whole turns": (64, 1, 2, 32, 32),
    "one more": (65, 2, 1, 32, 27),
    "many": (300, 1, 1, 16, 1),
}
MUTANTS = {  # what is replaced by what, and the case that must notice; none leaves its memory
    "last parts dropped": ("range(0, N, RN", "range(0, N - RN, RN", "one more"),
    "last part dropped": ("r < N - r0", "r < N - r0 - 1", "few of long rows"),
    "always the first parts": ("tl.int64) * RN", "tl.int64) * 0", "one more"),
    "turned without being asked": ("if TURNED else", "if not TURNED else", "few of long rows"),
    "crop ignored": ("LP, TURNED=turned", "length, TURNED=turned", "few of long rows"),
    "last query not stored": ("(i < L)", "(i < L - 1)", "few of long rows"),
    "last key not stored": ("(j < L)", "(j < L - 1)", "few of long rows"),
    "first rows alone": ("(head * LP + i0)", "(head * LP + 0 * i0)", "few of long rows"),
    "first head alone": ("(head * LP + i0)", "(0 * head * LP + i0)", "few of long rows"),
    "first columns alone": ("* LP + j0", "* LP + 0 * j0", "few of long rows"),
}


def problem(dtype, n, B, H, LP, length):
    """(parts, length): whole numbers, whose sums float32 holds, and beyond length what nobody may read."""
    torch.manual_seed(0)
    parts = torch.randint(-2, 3, (n, B, H, LP, LP)).to(dtype)
    parts[..., length:, :] = parts[..., length:] = torch.nan
    return parts, length


def wrong(op, given, dtype, turned):
    """Whether op's sum is another than that of plain PyTorch, or lies otherwise."""
    found, expected = (function(*given, dtype, turned) for function in (op, added_bias.reference))
    return found.dtype != dtype or not found.is_contiguous() or not torch.equal(found, expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", triton_parts.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact_for_whole_numbers(case, dtype, turned):
    given = problem(dtype, *CASES[case])
    assert not wrong(added_bias.OP, given, dtype, turned)
    assert dtype != torch.float32 or not wrong(added_bias.OP, given, torch.bfloat16, turned)


@pytest.mark.parametrize("dtype", triton_parts.DTYPES, ids=str)
def test_sums_are_rounded_once(dtype):
    """What 300 roundings would add up to is far beyond one, by which the interpreter cuts off in bfloat16."""
    parts = torch.randn(300, 1, 1, 16, 16).to(dtype)
    exact, found = parts.double().sum(0), added_bias.OP(parts, 16, dtype, False)
    allowed = torch.finfo(dtype).eps * exact.abs() + 300 * torch.finfo(torch.float32).eps * 4
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, tmp_path):
    old, new, case = MUTANTS[name]
    module = mutant(added_bias, old, new, tmp_path)
    given = problem(torch.float32, *CASES[case])
    assert wrong(module.OP, given, torch.float32, False) and wrong(module.OP, given, torch.float32, True)


def test_tiles_are_whole_and_of_few_bytes():
    for n in (1, 2, 3, 8, 64, 300):
        for LP in (16, 32, 48, 64, 128, 384):
            for itemsize in (2, 4):
                together, BI, BJ = added_bias.tile(n, LP, itemsize)
                assert LP % BI == LP % BJ == 0 and BJ * itemsize <= added_bias.LINE
                assert BI * BJ <= added_bias.PLACES and BI * BJ * together * itemsize <= added_bias.TURN
                assert LP < 64 or BI * BJ == added_bias.PLACES


def test_fake_tensors_have_the_same_size():
    parts, length = problem(torch.bfloat16, *CASES["one more"])
    real, fake = (added_bias.OP(each, length, torch.float16, True) for each in (parts, parts.to("meta")))
    assert real.shape == fake.shape and real.stride() == fake.stride()
    assert real.dtype == fake.dtype == torch.float16
