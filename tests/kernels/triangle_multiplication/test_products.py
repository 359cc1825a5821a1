"""Products of short sides in Triton's interpreter: numbers, gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.triangle_multiplication import products as triangle_products
from tests.kernels.rule import violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {"outgoing": (16, 64, True), "incoming": (16, 64, False), "outgoing, odd": (32, 13, True),
         "incoming, odd": (32, 33, False), "outgoing, long": (2, 65, True),
         "incoming, long": (2, 65, False)}  # matrices, S, outgoing
def problem(dtype, matrices, length, outgoing):
    """(ours, plain, tensors); of matrices with zeros beyond S, which all results must have, too."""
    torch.manual_seed(0)
    side = -(-length // 16) * 16
    inside = torch.zeros(side, side, dtype=dtype)
    inside[:length, :length] = 1
    tensors = [torch.randn(matrices, side, side).to(dtype) * inside for _ in range(2)]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, left, right):
            ctx.save_for_backward(left, right)
            return triangle_products.multiply(left, right, outgoing)

        @staticmethod
        def backward(ctx, gradient):
            found = [torch.full_like(t, torch.nan) for t in ctx.saved_tensors]
            triangle_products.multiply_backward(*ctx.saved_tensors, gradient * inside, *found, outgoing)
            return tuple(found)

    def plain(left, right):
        return triangle_products.reference(left, right, outgoing) * inside
    return Product.apply, plain, tensors


def tiles(number):
    """In the tuner's place: it always takes this candidate."""
    def launch(kernel, shape, candidates, run):
        run(candidates[number])
    return launch


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", [
    *((case, torch.bfloat16) for case in CASES), ("outgoing, odd", torch.float16)])
def test_products_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(triangle_products.CANDIDATES)))
def test_every_candidate_of_the_tuner(number, monkeypatch):
    monkeypatch.setattr(tuner, "launch", tiles(number))
    assert not violations(*problem(torch.bfloat16, *CASES["outgoing, odd"]))


@pytest.mark.parametrize("dtype, length, kernels", [
    (torch.bfloat16, 64, 2), (torch.float16, 1, 2), (torch.bfloat16, 65, 0), (torch.float32, 64, 0)])
def test_the_library_has_longer_sides_and_float32(dtype, length, kernels, monkeypatch):
    launched = []
    monkeypatch.setattr(tuner, "launch", lambda *given: launched.append(given) or tiles(0)(*given))
    for outgoing in (True, False):
        launched.clear()
        assert not violations(*problem(dtype, 1, length, outgoing))
        assert len(launched) == kernels
