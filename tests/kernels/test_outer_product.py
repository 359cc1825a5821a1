"""The outer product's layouts in Triton's interpreter: each tensor lies as its reader wants it."""
import pytest
import torch

from fusion_lab.kernels import outer_product

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


def test_each_tensor_lies_as_its_reader_wants_it():
    left, right = torch.randint(-3, 4, (2, 2, 5, 6, 4)).float()  # whole numbers, which add exactly
    weight, gradient = torch.randint(-3, 4, (7, 16)).float(), torch.randint(-3, 4, (2, 6, 6, 7)).float()
    outer = torch.einsum("bnic,bnjd->bijcd", left, right)
    found = outer_product.FORWARD_OP(left, right, 0.5)
    assert found.is_contiguous() and torch.equal(found, outer.flatten(-2) / 2)
    found, parts = outer_product.BACKWARD_OP(gradient, weight, 0.5, 2)
    expected = (gradient @ weight).unflatten(-1, (4, 4)).permute(0, 1, 3, 2, 4) / 2  # (B, i, c, j, d)
    assert found.is_contiguous() and torch.equal(found.view(2, 6, 4, 6, 4), expected)
    assert torch.equal(parts, gradient.sum((1, 2)) / 2)  # one of each sample
