"""Attention sub-layers in Triton's interpreter: outputs, gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels.attention import layer as attention_layer
from tests.kernels import references
from tests.kernels.rule import same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, X, Y, c, H, axis, what makes the bias, keys, x is the residual, dim that dropout shares
    "starting node": (2, 7, 7, 32, 2, 2, "own", True, True, 1),
    "ending node": (2, 7, 7, 32, 2, 1, "own", True, True, 2),
    "long rows": (1, 2, 67, 16, 1, 2, "given", True, True, None),
    "MSA rows": (2, 3, 11, 16, 2, 2, "given", True, True, 1),
    "columns": (1, 7, 5, 32, 2, 1, None, True, True, 3),
    "columns, no mask, update alone": (2, 5, 3, 16, 1, 1, None, False, False, None),
    "one wide head": (1, 3, 5, 64, 1, 2, None, True, True, 1),  # wider than a chunk of channels in float32
    "whole tiles": (2, 16, 16, 16, 1, 1, "own", True, True, 2),
    "wide heads": (1, 3, 5, 128, 2, 1, None, True, True, 2),
}
def problem(dtype, B, X, Y, c, heads, axis, maker, masked, add, shared):
    """(ours, plain, tensors) of a case."""
    torch.manual_seed(0)
    length = (X, Y)[axis - 1]
    sizes = [(B, X, Y, c), (c,), (c,), (4 * c, c), (c,), (c, c), (c,), (heads, c), (B, heads, length, length)]
    scales = [1, 0.1, 0.1, c ** -0.5, 1, c ** -0.5, 1, c ** -0.5, 1]
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]
    tensors[1] += 1
    keys = torch.rand(B, length) > 0.2 if masked else None
    drop = None if shared is None else (torch.rand([1 if d == shared else n for d, n in
                                                    enumerate((B, X, Y, c))]) > 0.3) / 0.7

    def run(function):
        def call(x, *rest):
            *weights, head_weight, bias = rest
            return function(x, *weights, heads, axis, bias if maker == "given" else None,
                            head_weight if maker == "own" else None, keys, 1e-5, x if add else None,
                            None if drop is None else drop.to(x.dtype))
        return call
    tensors = [t.to(dtype) for t in tensors]
    return run(attention_layer.attention_layer), run(references.attention_layer), tensors


@pytest.mark.sample
@pytest.mark.parametrize("dtype, case", [
    (torch.bfloat16, "ending node"), (torch.float32, "columns"),
    *(pytest.param(dtype, case, marks=pytest.mark.slow) for dtype, case in (
        *((torch.float32, case) for case in CASES if case != "columns"),
        (torch.bfloat16, "columns"), (torch.float16, "MSA rows")))])
def test_forward_and_gradients(dtype, case):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ending node", "long rows"])
def test_under_compile_checkpoint_and_no_grad(case):
    ours, _, tensors = problem(torch.float32, *CASES[case])
    assert same_in_every_mode(ours, tensors, unused=1)  # a bias, or what makes one


def test_autocast_rounds_products_and_not_the_residual():
    ours, plain, tensors = problem(torch.float32, *CASES["ending node"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*tensors) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]
