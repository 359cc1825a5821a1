"""Sums of parts in Triton's interpreter: exact ones of whole numbers; and where parts are stored."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.precision import HALF
from fusion_lab.kernels.reductions import sums
from tests.kernels.attention import test_layer as layers
from tests.kernels.outer_product_mean import test_layout as layouts
from tests.kernels.projections import test_projections as projections
from tests.kernels.rule import violations
from tests.kernels.transition import test_hidden_gradient as hidden
from tests.kernels.triangle_multiplication import test_operator as multiplication

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # sizes of each problem's parts
    "one": [(77, 33)],
    "one number, one row, no row": [(1, 1), (1, 40), (0, 5), (300, 2)],
    "several tiles": [(600, 3, 40), (257, 64), (2, 31), (300, 1)],
    "equal": [(300, 48)] * 3,
    "many columns": [(7, 9001), (21, 8200)],
    "more than one launch takes": [(65 + n, 16 + n) for n in range(9)],
}
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


@pytest.mark.sample
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact_for_whole_numbers(case, dtype):
    parts = problem(CASES[case])
    assert torch.equal(sums.GATHERED_OP(parts, dtype), expected(parts, dtype))
    assert all(torch.equal(sums.OP(part, dtype), part.sum(0).to(dtype)) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2 * sums.SHARE, sums.SHARE + 1])
def test_sums_over_rows_are_the_same_compiled(rows, dtype, monkeypatch):
    """There in parts, whose sum is an op's, where there are whole shares."""
    x, made, op = problem([(rows, 24)])[0].to(dtype), [], sums.OP
    monkeypatch.setattr(sums, "OP", lambda *given: made.append(given[0].shape) or op(*given))
    wanted = x.float().sum(0).to(dtype)
    assert torch.equal(sums.over_rows(x), wanted) and made == []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(sums.over_rows(x), wanted)
    assert made == ([] if rows % sums.SHARE else [(2, 24)])


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


PROBLEMS = {  # with how many sums each
    "norm and projection": (1, lambda: projections.norm_problem(torch.bfloat16, (1, 5, 70, 16), 48, 2)),
    "heads alone": (1, lambda: projections.norm_problem(torch.float32, (1, 5, 70, 16), 0, 2)),
    "hidden layer": (1, lambda: hidden.problem(torch.bfloat16, (1, 5, 70, 16), 128)),
    "multiplication": (2, lambda: multiplication.problem(
        torch.bfloat16, *multiplication.CASES["small"])),
    "columns": (3, lambda: layers.problem(torch.bfloat16, *layers.CASES["columns"])),
    "long rows": (4, lambda: layers.problem(torch.float16, *layers.CASES["long rows"])),
    "outer product": (1, lambda: layouts.problem(torch.bfloat16, *layouts.CASES["whole tiles, few rows"])),
}


@pytest.fixture
def watched(monkeypatch):
    """[(rows of parts, programs)] of launches."""
    found, room = [], sums.room
    monkeypatch.setattr(sums, "room", lambda parts, programs: (
        found.append((len(parts), programs)) or room(parts, programs)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", PROBLEMS)
def test_there_are_as_many_parts_as_programs_with_every_tile(name, number, watched, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", lambda kernel, shape, candidates: (
        candidates[number % len(candidates)]))
    monkeypatch.setattr(hidden.hidden_gradient, "PROGRAMS", 16)
    ours, _, tensors = PROBLEMS[name][1]()
    given = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = ours(*given)
    out.backward(torch.ones_like(out))
    assert len(watched) == PROBLEMS[name][0] and all(rows == programs for rows, programs in watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norm and projection", "hidden layer", "multiplication", "long rows",
                                  "outer product"])
def test_compiled_code_may_meet_another_tile_than_it_was_made_with(name, watched, monkeypatch):
    ours, plain, tensors = PROBLEMS[name][1]()
    torch._dynamo.reset()
    function, number = torch.compile(ours, fullgraph=True, backend="aot_eager"), [0]
    monkeypatch.setattr(tuner, "chosen", lambda kernel, shape, candidates: (
        candidates[number[0] % len(candidates)]))
    monkeypatch.setattr(hidden.hidden_gradient, "PROGRAMS", 16)
    assert not violations(function, plain, tensors)
    assert all(rows == programs for rows, programs in watched)
    for other in (1, 2, 4, 5):
        number[0] = other
        assert not violations(function, plain, tensors)
    assert any(rows != programs for rows, programs in watched)
