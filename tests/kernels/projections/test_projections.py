"""The projections in Triton's interpreter: outputs and gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels import projections, tuner
from fusion_lab.kernels.common import lines
from tests.kernels import references
from tests.kernels.rule import in_dtypes, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

NORM_CASES = {  # B, X, Y, c; n; H
    "two samples, odd": ((2, 5, 7, 32), 128, 4),
    "width no multiple of a tile": ((1, 3, 11, 16), 48, 2),
    "no heads": ((2, 3, 5, 64), 192, 0),
    "heads alone": ((2, 7, 5, 16), 0, 3),
    "many heads, one position": ((1, 1, 1, 128), 256, 17),
    "part of a tile": ((2, 4, 12, 32), 64, 2),
    "whole tiles": ((2, 8, 16, 32), 64, 4),
}
OUTPUT_CASES = {  # shape of og; c; residual; dropout shared along this dimension
    "rows dropped": ((2, 5, 7, 32), 32, True, 1),
    "columns dropped": ((2, 7, 5, 16), 16, True, 2),
    "no dropout": ((1, 3, 13, 64), 128, True, 0),
    "update alone": ((1, 3, 5, 128), 16, False, 0),
    "dropped update": ((1, 3, 5, 32), 16, False, 1),
    "positions dropped": ((2, 3, 5, 32), 16, True, 3),
    "tiles of lines, rows dropped": ((2, 16, 8, 16), 16, True, 1),
    "tiles of lines, columns dropped": ((2, 8, 16, 16), 16, True, 2),
    "lines of tiles, rows dropped": ((2, 3, 128, 32), 16, True, 1),
    "lines of tiles, columns dropped": ((2, 3, 128, 16), 32, True, 2),
    "scaled bias, wide": ((2, 3, 5, 256), 16, True, 0, 0.3),
    "scaled bias, odd width": ((1, 4, 7, 48), 32, False, 1, 0.3),
}
HIDDEN_CASES = {  # shape of x; hidden units; heads
    "two samples, odd": ((2, 5, 7, 32), 128, 0),
    "whole tiles": ((2, 8, 16, 16), 256, 3),
    "units no multiple of a tile": ((1, 3, 11, 16), 48, 0),
    "several tiles a program, odd": ((3, 9, 13, 16), 256, 5),
}
def norm_problem(dtype, shape, width, heads):
    """(ours, plain, tensors) of a case; outputs behind each other in one tensor"""
    torch.manual_seed(0)
    c = shape[-1]
    x, norm_weight, norm_bias = torch.randn(shape), 1 + 0.1 * torch.randn(c), 0.1 * torch.randn(c)
    weights = [c ** -0.5 * torch.randn(n, c) for n in (width, heads) if n]

    def joined(function):
        def run(x, norm_weight, norm_bias, *weights):
            weights = iter(weights)
            pair = [next(weights) if n else None for n in (width, heads)]
            found = function(x, norm_weight, norm_bias, *pair, 1e-5)
            return torch.cat([t.flatten() for t in found if t is not None])
        return run
    tensors = [t.to(dtype) for t in (x, norm_weight, norm_bias, *weights)]
    return joined(projections.norm_project), joined(references.norm_project), tensors


class WithPlainGradients(torch.autograd.Function):
    """A result of a kernel without a derivative of its own, with that of plain."""

    @staticmethod
    def forward(ctx, found, plain):
        return found.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def hidden_problem(dtype, shape, units, heads):
    """(ours, plain, tensors) of a hidden layer, beside which heads make a bias."""
    torch.manual_seed(0)
    c = shape[-1]
    tensors = [torch.randn(shape), 1 + 0.1 * torch.randn(c), 0.1 * torch.randn(c),
               c ** -0.5 * torch.randn(units, c), torch.randn(units),
               *[c ** -0.5 * torch.randn(heads, c)] * (heads > 0)]

    def joined(x, *weights, op=references.norm_project):
        *norm, weight, bias, head_weight = (*weights, None)[:5]
        found = op(x, *norm, weight, head_weight, 1e-5, bias)
        return torch.cat([t.flatten() for t in found if t is not None])

    def ours(*given):
        found = joined(*(t.detach() for t in given), op=projections.NORM_PROJECT_OP)
        return WithPlainGradients.apply(found, joined(*given))
    return ours, joined, [t.to(dtype) for t in tensors]


def output_problem(dtype, shape, channels, residual, dim, scale=1.0):
    torch.manual_seed(0)
    k, out = shape[-1], (*shape[:3], channels)
    drop = (torch.rand([1 if d == dim else n for d, n in enumerate(out)]) > 0.3) / 0.7 if dim else None
    sizes, scales = (shape, (channels, k), channels, out), (1, k ** -0.5, 1, 1)
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]

    def plain(*given):
        factors = None if drop is None else drop.to(given[0].dtype)
        return references.output_project(*given, *[None] * (4 - len(given)), factors, scale)

    def ours(*given):
        factors = projections.widened(None if drop is None else drop.to(dtype), channels)
        found = projections.OUTPUT_PROJECT_OP(*(t.detach() for t in given), *[None] * (4 - len(given)),
                                              factors, scale)
        return WithPlainGradients.apply(found, plain(*given))
    return ours, plain, [t.to(dtype) for t in tensors[:4 if residual else 3]]


def sharpest_first(cases):
    """The first case in bfloat16 and all in float32; the rest is slow."""
    return [pytest.param(case, dtype, marks=[pytest.mark.slow] * (
        dtype == torch.float16 or dtype == torch.bfloat16 and case != next(iter(cases))))
        for case, dtype in in_dtypes(cases)]


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", sharpest_first(NORM_CASES))
def test_norm_project(case, dtype):
    assert not violations(*norm_problem(dtype, *NORM_CASES[case]))


def handing_on(dtype=torch.float32):
    """(ours, plain, tensors): a bias, and x, handed on, with what follows it."""
    _, _, tensors = norm_problem(dtype, (2, 5, 7, 32), 0, 4)

    def ours(x, norm_weight, norm_bias, head_weight):
        _, bias, x = projections.norm_project(x, norm_weight, norm_bias, None, head_weight, 1e-5, True)
        return torch.cat([bias.flatten(), (x * x).flatten()])

    def plain(x, norm_weight, norm_bias, head_weight):
        _, bias = references.norm_project(x, norm_weight, norm_bias, None, head_weight, 1e-5)
        return torch.cat([bias.flatten(), (x * x).flatten()])
    return ours, plain, tensors


@pytest.mark.parametrize("dtype", [
    torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_x_handed_on_has_its_gradient_added_by_the_kernel(dtype):
    ours, plain, tensors = handing_on(dtype)
    assert not violations(ours, plain, tensors)
    with torch.no_grad():
        assert torch.equal(ours(*tensors), ours(*(t.requires_grad_() for t in tensors)))


@pytest.mark.slow
def test_x_handed_on_by_compiled_code():
    ours, plain, tensors = handing_on()
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)


@pytest.mark.parametrize("case, dtype", sharpest_first(OUTPUT_CASES))
def test_output_project(case, dtype):
    assert not violations(*output_problem(dtype, *OUTPUT_CASES[case]))


@pytest.fixture
def weights_stay(monkeypatch):
    """A tuner that has found that they had better."""
    def launch(kernel, shape, candidates, run):
        run(next((each for each in candidates if each.get("STAY") and each["BN"] == 64), candidates[0]))
    monkeypatch.setattr(tuner, "launch", launch)


@pytest.mark.parametrize("case, dtype", sharpest_first(HIDDEN_CASES))
def test_hidden_layer(case, dtype):
    assert not violations(*hidden_problem(dtype, *HIDDEN_CASES[case]))


@pytest.mark.parametrize("case", HIDDEN_CASES)
def test_hidden_layer_by_weights_that_stay(case, weights_stay):
    assert not violations(*hidden_problem(torch.bfloat16, *HIDDEN_CASES[case]))


@pytest.mark.parametrize("case", NORM_CASES)
def test_norm_project_by_weights_that_stay(case, weights_stay):
    assert not violations(*norm_problem(torch.bfloat16, *NORM_CASES[case]))


@pytest.mark.parametrize("stay", [False, True])
def test_what_is_not_a_number_stays_so(stay, request):
    if stay:
        request.getfixturevalue("weights_stay")
    ours, plain, (x, *weights) = hidden_problem(torch.bfloat16, *HIDDEN_CASES["whole tiles"])
    x[0, 1, 2, 3] = float("nan")
    assert torch.equal(ours(x, *weights).isnan(), plain(x, *weights).isnan())


def test_widths_that_no_tile_divides_are_refused():
    given = torch.ones(1, 2, 3, 40), torch.ones(16, 40), torch.ones(16)
    with pytest.raises(ValueError, match="of 40 channels"):
        projections.OUTPUT_PROJECT_OP(*given, None, None)


@pytest.mark.parametrize("X, Y, expected", [(3, 192, 1), (3, 64, 1), (4, 32, 2), (64, 1, 64), (3, 32, 0),
                                            (4, 48, 0), (5, 7, 0)])
def test_lines_of_a_tile_of_64(X, Y, expected):
    assert lines(X, Y, 64) == expected


@pytest.mark.slow
def test_compiles_in_one_piece():
    ours, plain, tensors = norm_problem(torch.float32, *NORM_CASES["two samples, odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
