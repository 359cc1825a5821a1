"""The fusion patterns in Triton's interpreter: results, and gradients of residual + norm, by the 3x rule."""
import pytest
import torch

from companions import fusion_patterns as plain
from companions.kernels import patterns
from tests.kernels.rule import in_dtypes, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


def linear(M, N, K, activation):
    return (lambda *t: patterns.linear(*t, activation), plain.PATTERNS[activation].plain,
            [(M, K), (N, K), (N,)])


def norm(rows, width, biased):
    return (lambda *t: torch.cat(patterns.add_norm(*t)), lambda *t: torch.cat(plain.plain_add_norm(*t)),
            [(rows, width)] * 2 + [(width,)] * (1 + biased))


def wide(rows, width):
    return patterns.wide_layer_norm, plain.plain_norm, [(rows, width), (width,), (width,)]


def topk(rows, width, k):
    """The k largest are far apart, the largest of them last, since bfloat16 has many equal numbers."""
    apart = torch.zeros(width)
    apart[width - 1 - 7 * torch.arange(k)] = 6.0 + torch.arange(k, 0, -1)
    return (lambda x: patterns.softmax_topk(x + apart.to(x), k)[0],
            lambda x: (x + apart.to(x)).softmax(-1).topk(k).values, [(rows, width)])


def scores(heads, L, D):
    mask = torch.ones(heads, L)
    mask[-1, L // 2:] = 0
    return (lambda q, k: patterns.masked_softmax(q, k, mask),
            lambda q, k: plain.plain_masked_softmax(q, k, mask), [(heads, L, D)] * 2)


def causal(heads, L, D):
    return patterns.masked_softmax, plain.plain_causal_softmax, [(heads, L, D)] * 2


CASES = {
    "linear": (linear, 70, 80, 40, "gelu"), "ReLU": (linear, 20, 70, 40, "relu"),
    "SiLU": (linear, 20, 70, 40, "silu"), "causal": (causal, 2, 70, 16),
    "residual and LayerNorm": (norm, 5, 100, True), "residual and RMSNorm": (norm, 3, 64, False),
    "LayerNorm, a tile and a bit": (wide, 3, 1030), "LayerNorm, narrow": (wide, 20, 1),
    "softmax and top-k": (topk, 3, 1100, 5), "the only entry": (topk, 2, 1, 1),
    "scores": (scores, 2, 40, 16),
}


@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_results_and_gradients(case, dtype):
    torch.manual_seed(0)
    make, *sizes = CASES[case]
    ours, plain_way, shapes = make(*sizes)
    tensors = [torch.randn(size).to(dtype) for size in shapes]
    if make is norm:
        assert not violations(ours, plain_way, tensors)
    else:  # a forward pass alone
        ways = dict(plain=plain_way, ours=ours)
        assert not plain.faults(ways, [t.requires_grad_() for t in tensors], dtype)


def test_the_chosen_entries_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 1500)
    x[1, ::7] = -float("inf")
    values, indices = patterns.softmax_topk(x, 64)
    expected = x.softmax(-1).topk(64)
    assert torch.equal(indices, expected.indices) and torch.allclose(values, expected.values, rtol=1e-5)


def test_ties_go_to_the_earlier_and_nan_is_everywhere():
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, float("nan"), 1.0, 2.0, 3.0], [-float("inf")] * 5])
    values, indices = patterns.softmax_topk(x, 3)
    assert indices[0].tolist() == [1, 2, 3] and torch.allclose(values[0], x[0].softmax(-1).topk(3).values)
    assert values[1:].isnan().all() and x[1:].softmax(-1).isnan().all()
    assert indices[1, 0] == 1  # NaN is the largest, as for torch


def test_a_mean_far_from_zero_does_not_cancel():
    x, ones, zeros = 1e4 + torch.randn(2, 2500), torch.ones(2500), torch.zeros(2500)
    exact = torch.nn.functional.layer_norm(x.double(), (2500,))
    assert (patterns.wide_layer_norm(x, ones, zeros) - exact).abs().max() < 2e-3


def test_rows_without_a_key_are_nan_as_torchs():
    q, k = torch.randn(2, 1, 8, 16)
    assert patterns.masked_softmax(q, k, torch.zeros(1, 8)).isnan().all()
