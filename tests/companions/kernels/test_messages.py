"""Messages between neighbours: numbers and derivatives, in Triton's interpreter."""
import pytest
import torch
import torch.nn.functional as F

from companions.kernels import messages
from tests.kernels.rule import in_dtypes, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.slow, pytest.mark.full]

CASES = {"odd": (5, 131, 7, 16), "whole tiles": (6, 16, 9, 256), "more rows than nodes": (3, 20, 40, 128)}


def plain_first(own, edges, table, index):
    return F.gelu(own[:, None] + edges + table[index])


def plain_sum(y, bias, mask):
    return (mask[:, :, None] * F.gelu(y + bias)).sum(1)


def problem(dtype, function, nodes, neighbours, table_rows, channels):
    """(ours, plain, tensors)"""
    torch.manual_seed(0)
    c, index = channels, torch.randint(table_rows, (nodes, neighbours))
    index[index == 1] = 0  # a row to which no edge leads
    leading = messages.incoming(index, table_rows)
    mask = torch.ones(nodes, neighbours)
    mask[-1, neighbours // 2:] = 0
    edges = torch.randn(nodes, neighbours, 2 * c).to(dtype)  # of which the second half: rows that lie apart
    bias = torch.randn(c).to(dtype)
    if function == "gelu":
        return (lambda y, bias: messages.biased_gelu(y[..., c:], bias),
                lambda y, bias: F.gelu(y[..., c:] + bias), [edges, bias])
    if function == "sum":
        return (lambda y, bias: messages.sum_over_neighbours(y[..., c:], bias, mask),
                lambda y, bias: plain_sum(y[..., c:], bias, mask.to(y.dtype)), [edges, bias])
    nodes, table = (2 * torch.randn(size, c).to(dtype) for size in (nodes, table_rows))
    return (lambda own, edges, table: messages.first_layer(own, edges[..., c:], table, index, leading),
            lambda own, edges, table: plain_first(own, edges[..., c:], table, index),
            [nodes, edges, table])


@pytest.mark.parametrize("function", ["first", "gelu", "sum"])
@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_forward_and_gradients(function, case, dtype):
    assert not violations(*problem(dtype, function, *CASES[case]))


def test_the_normal_distribution_is_exact():
    """To float32's last digits; and to 2% far from 0, where its share vanishes."""
    x = torch.linspace(-9, 9, 301)[:, None].repeat(1, 16)
    found = messages.biased_gelu(x[:, None], torch.zeros(16))[:, 0]
    exact = x.double() * torch.special.erfc(-x.double() * 0.5 ** 0.5) / 2
    assert (found - exact).abs().max() < 1e-6 and ((found - exact) / exact)[x != 0].abs().max() < 0.02


@pytest.mark.parametrize("function", ["first", "gelu", "sum"])
def test_compiles_in_one_piece(function):
    ours, plain, tensors = problem(torch.float32, function, *CASES["odd"])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
