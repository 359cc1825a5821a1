"""What the kernels are given: vectors with gaps count as they are, wrong shapes are refused."""
import check_attention_layer as layers
import check_biased_attention as attention
import check_outer_product as outer
import check_projection as projections
import check_transition as transitions
import check_triangle_multiplication as multiplication
import pytest
import torch
from rule import violations

PROBLEMS = {
    "attention": attention.problem(torch.float32, *attention.CASES["columns"]),
    "sub-layer": layers.problem(torch.float32, *layers.CASES["columns"]),
    "norm and projection": projections.norm_problem(torch.float32, (1, 3, 4, 16), 16, 2),
    "output projection": projections.output_problem(torch.float32, (1, 3, 4, 16), 16, True, 1),
    "outer product": outer.problem(torch.float32, 2, 3, 3, 8, 16, True, True),
    "transition": transitions.problem(torch.float32, (1, 3, 5, 16), 64, "own"),
    "multiplication": multiplication.problem(torch.float32, *multiplication.CASES["small"]),
}


def with_gaps(vector):
    """The same numbers, between those that must not be read."""
    return torch.stack([vector, torch.full_like(vector, torch.nan)], 1)[:, 0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_vectors_may_have_gaps(name):
    ours, plain, tensors = PROBLEMS[name]
    assert any(t.dim() == 1 for t in tensors)
    assert not violations(lambda *given: ours(*(with_gaps(t) if t.dim() == 1 else t for t in given)), plain,
                          tensors)


def test_the_number_of_rows_may_have_gaps():
    sides, weight, bias = torch.randn(2, 3, 4, 8), torch.randn(16, 64), torch.randn(16)
    norm = torch.tensor([2.0, 3.0])
    results = [outer.outer_product.outer_product(sides, sides, weight, bias, n)
               for n in (norm, with_gaps(norm))]
    assert torch.equal(*results)
