"""The outer product's layouts in Triton's interpreter: output and gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.outer_product_mean import layout as outer_layout
from fusion_lab.kernels.precision import product_dtype
from tests.kernels import references
from tests.kernels.rule import in_dtypes, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, N, S, h, c, packed[, scale[, whether there is a residual]]
    "two samples, odd": (2, 7, 9, 8, 12, True, 0.3),
    "many rows": (1, 77, 5, 16, 16, False),
    "usual width": (2, 16, 5, 32, 32, True),
    "odd widths": (1, 3, 13, 6, 20, False),
    "one position, one row": (1, 1, 1, 16, 128, True),
    "more channels than a tile sums": (1, 2, 3, 8, 80, True),
    "whole tiles": (2, 16, 8, 32, 16, True),
    "parts of lines": (1, 5, 2, 128, 8, False),
    "whole tiles, few rows": (1, 5, 16, 32, 24, True, 0.3),
    "residual": (2, 7, 9, 8, 16, True, 0.3, True),
    "residual, not by the kernel": (1, 3, 5, 8, 20, False, 0.3, True),
}
def problem(dtype, samples, rows, size, h, channels, packed, scale=1.0, adds=False):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    both = torch.randn(samples, rows, size, 2 * h)
    tensors = [*([both] if packed else both.chunk(2, -1)), torch.randn(channels, h * h) / h,
               torch.randn(channels), *[torch.randn(samples, size, size, channels)] * adds]

    def unpacked(function):
        def call(*given):
            sides, rest = (given[0].chunk(2, -1), given[1:]) if packed else (given[:2], given[2:])
            return function(*sides, *rest[:2], scale, *rest[2:])
        return call
    return (unpacked(outer_layout.outer_layout), unpacked(references.outer_layout),
            [t.to(dtype).contiguous() for t in tensors])


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", [
    pytest.param(case, dtype, marks=[pytest.mark.slow] * ((case, dtype) == ("parts of lines", torch.float32)))
    for case, dtype in in_dtypes(CASES)])
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


def several_tiles(kernel, shape, candidates, run):
    """tuner.launch() with the first candidate of several tiles of columns."""
    run(next(each for each in candidates if each["MANY"] > 1))


@pytest.mark.parametrize("case", ["many rows", "whole tiles", "whole tiles, few rows"])
@pytest.mark.parametrize("number", range(1, len(outer_layout.TILES)))
def test_every_candidate_of_the_tuner(number, case, monkeypatch):
    monkeypatch.setattr(tuner, "launch", lambda kernel, shape, candidates, run: run(candidates[number]))
    assert not violations(*problem(torch.bfloat16, *CASES[case]))


def test_autocast_rounds_products_and_not_the_residual():
    """Whose gradient is that of the result."""
    ours, plain, tensors = problem(torch.float32, *CASES["residual"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*(t.requires_grad_() for t in tensors)) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]
    gradient = torch.randn_like(results[0])
    results[0].backward(gradient)
    assert torch.equal(tensors[-1].grad, gradient) and all(t.grad.dtype == torch.float32 for t in tensors)


def test_a_bias_may_have_any_strides():
    ours, _, (both, weight, bias, residual) = problem(torch.float32, *CASES["residual"])
    strided = torch.stack([bias, -bias], -1)[:, 0]
    assert torch.equal(ours(both, weight, strided, residual), ours(both, weight, bias, residual))


def test_each_tensor_lies_as_its_reader_wants_it():
    left, right = torch.randint(-3, 4, (2, 2, 5, 6, 4)).float()  # whole numbers, which add exactly
    weight, gradient = torch.randint(-3, 4, (7, 16)).float(), torch.randint(-3, 4, (2, 6, 6, 7)).float()
    outer = torch.einsum("bnic,bnjd->bijcd", left, right)
    found = torch.ops.fusion_lab.outer_layout(left, right)
    assert found.is_contiguous() and torch.equal(found, outer.flatten(-2))
    assert torch.equal(torch.ops.fusion_lab.outer_layout(left, right, 0.5), found / 2)
    found, parts = torch.ops.fusion_lab.outer_layout_backward(gradient, weight, 0.5, 2)
    expected = (gradient @ weight).unflatten(-1, (4, 4)).permute(0, 1, 3, 2, 4) / 2  # (B, i, c, j, d)
    assert found.is_contiguous() and torch.equal(found.view(2, 6, 4, 6, 4), expected)
    assert torch.equal(parts, gradient.sum((1, 2)) / 2)  # one of each sample


def test_autocast_s_dtype_is_that_of_products():
    ours, _, tensors = problem(torch.float32, *CASES["two samples, odd"])
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*tensors).dtype == product_dtype(tensors[0]) == torch.bfloat16


def test_a_dtype_without_a_kernel_is_refused():
    ours, _, tensors = problem(torch.float64, *CASES["two samples, odd"])
    with pytest.raises(ValueError, match="no Triton outer product in float64"):
        ours(*tensors)


def test_compiles_in_one_piece():
    ours, plain, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
