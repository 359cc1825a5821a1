"""Whole transitions round library products in Triton's interpreter: outputs and gradients by the 3x
rule."""
import pytest
import torch

from fusion_lab.kernels.transition import hidden_gradient
from fusion_lab.kernels.transition import layer as transition_layer
from tests.kernels import references
from tests.kernels.rule import same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # shape of x, hidden units, what is the residual
    "two samples, odd": ((2, 5, 7, 32), 128, "x"),
    "several shares": ((1, 3, 130, 16), 64, "x"),
    "another residual": ((1, 3, 5, 16), 64, "another"),
    "update alone": ((1, 3, 5, 32), 64, None),
}
def problem(dtype, shape, units, residual):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    c = shape[-1]
    sizes = shape, (c,), (c,), (units, c), (units,), (c, units), (c,), shape
    scales = 1, 0.1, 0.1, c ** -0.5, 1, units ** -0.5, 1, 1
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]
    tensors[1] += 1

    def run(function):
        def call(x, *given):
            *weights, another = given
            return function(x, *weights, 1e-5, dict(x=x, another=another).get(residual))
        return call
    tensors = [t.to(dtype) for t in tensors]
    return run(transition_layer.transition_layer), run(references.transition_layer), tensors


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that small problems have several shares of several tiles, too."""
    monkeypatch.setattr(hidden_gradient, "PROGRAMS", 16)


@pytest.mark.sample
@pytest.mark.parametrize("dtype, case", [
    (torch.bfloat16, "two samples, odd"), (torch.float32, "several shares"),
    *(pytest.param(dtype, case, marks=pytest.mark.slow) for dtype, case in (
        (torch.float32, "two samples, odd"), (torch.bfloat16, "several shares"),
        (torch.float32, "another residual"), (torch.float32, "update alone"),
        (torch.bfloat16, "update alone"), (torch.float16, "two samples, odd")))])
def test_forward_and_gradients(dtype, case):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
def test_under_compile_checkpoint_and_no_grad():
    ours, _, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert same_in_every_mode(ours, tensors, unused=1)


def test_autocast_rounds_products_and_not_the_residual():
    ours, plain, tensors = problem(torch.float32, *CASES["two samples, odd"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*tensors) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]


def test_what_the_kernels_would_misread_is_refused():
    x, w = torch.ones(1, 2, 3, 48), torch.ones(64, 48)
    rest = torch.ones(64), w.t(), torch.ones(48)
    with pytest.raises(ValueError, match="from 48 channels"):
        transition_layer.transition_layer(x, torch.ones(48), torch.ones(48), w, *rest)
    with pytest.raises(ValueError, match="norm_weight is"):
        transition_layer.transition_layer(x, torch.ones(32), torch.ones(48), w, *rest)
