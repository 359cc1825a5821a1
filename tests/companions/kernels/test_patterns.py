"""The fusion patterns in Triton's interpreter: results and gradients by the 3x rule."""
import pytest
import torch

from tests.kernels.rule import violations

pytest.importorskip("companions.kernels", reason="this companion was deleted")
from companions.kernels import pattern_linear, pattern_norms, pattern_softmax
from companions.kernels import pattern_references as plain_code

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

DTYPES = [torch.float32, torch.bfloat16]


def rand(*sizes, dtype=torch.float32):
    return [torch.randn(size).to(dtype) for size in sizes]


def linear(kind, M, N, K):
    return (lambda *t: pattern_linear.linear_activation(*t, kind),
            lambda *t: plain_code.plain_linear_activation(*t, kind), [(M, K), (N, K), (N,)])


def norm(rows, width, biased):
    sizes = [(rows, width)] * 2 + [(width,)] * (1 + biased)
    return (lambda *t: torch.cat(pattern_norms.add_norm(*t)),
            lambda *t: torch.cat(plain_code.plain_add_norm(*t)), sizes)


def wide(rows, width):
    return pattern_norms.wide_layer_norm, plain_code.plain_layer_norm, [(rows, width), (width,), (width,)]


def topk(rows, width, k):
    """The k largest are far apart, the largest of them last, since bfloat16 has many equal numbers."""
    apart = torch.zeros(width)
    apart[width - 1 - 7 * torch.arange(k)] = 6.0 + torch.arange(k, 0, -1)
    return (lambda x: pattern_softmax.softmax_topk(x + apart.to(x), k)[0],
            lambda x: plain_code.plain_softmax_topk(x + apart.to(x), k)[0], [(rows, width)])


def scores(heads, L, D):
    mask = torch.ones(heads, L)
    mask[-1, L // 2:] = 0
    return (lambda q, k: pattern_softmax.masked_softmax(q, k, mask),
            lambda q, k: plain_code.plain_masked_softmax(q, k, mask), [(heads, L, D)] * 2)


CASES = {
    **{f"linear, {kind}": (linear, kind, 70, 80, 40) for kind in ("relu", "gelu", "silu")},
    "residual and LayerNorm": (norm, 5, 100, True), "residual and RMSNorm": (norm, 3, 64, False),
    "LayerNorm, a tile and a bit": (wide, 3, 1030), "LayerNorm, narrow": (wide, 20, 1),
    "softmax and top-k": (topk, 3, 1100, 5), "the only entry": (topk, 2, 1, 1),
    "scores": (scores, 2, 40, 16),
}
@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, dtype):
    torch.manual_seed(0)
    make, *sizes = CASES[case]
    ours, plain, shapes = make(*sizes)
    assert not violations(ours, plain, rand(*shapes, dtype=dtype))


def test_the_chosen_entries_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 1500)
    x[1, ::7] = -float("inf")
    values, indices = pattern_softmax.softmax_topk(x, 64)
    expected = x.softmax(-1).topk(64)
    assert torch.equal(indices, expected.indices) and torch.allclose(values, expected.values, rtol=1e-5)


def test_ties_go_to_the_earlier_and_nan_is_everywhere():
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, float("nan"), 1.0, 2.0, 3.0], [-float("inf")] * 5])
    values, indices = pattern_softmax.softmax_topk(x, 3)
    assert indices[0].tolist() == [1, 2, 3] and torch.allclose(values[0], x[0].softmax(-1).topk(3).values)
    assert values[1:].isnan().all() and x[1:].softmax(-1).isnan().all()
    assert indices[1, 0] == 1  # NaN is the largest, as for torch


def test_a_mean_far_from_zero_does_not_cancel():
    x, ones, zeros = 1e4 + torch.randn(2, 2500), torch.ones(2500), torch.zeros(2500)
    exact = torch.nn.functional.layer_norm(x.double(), (2500,))
    assert (pattern_norms.wide_layer_norm(x, ones, zeros) - exact).abs().max() < 2e-3


def test_rows_without_a_key_are_nan_as_torchs():
    q, k = rand((1, 8, 16), (1, 8, 16))
    assert pattern_softmax.masked_softmax(q, k, torch.zeros(1, 8)).isnan().all()


def test_what_no_kernel_takes_is_said():
    with pytest.raises(ValueError, match="k = 65"):
        pattern_softmax.softmax_topk(torch.zeros(1, 100), 65)
    with pytest.raises(ValueError, match="width 24"):
        pattern_softmax.masked_softmax(torch.zeros(1, 4, 24), torch.zeros(1, 4, 24), torch.ones(1, 4))
