"""The fusion patterns in Triton's interpreter: results, and gradients of residual + norm, by the 3x rule."""
import pytest
import torch

from companions import fusion_patterns as lab
from companions.kernels import patterns
from tests.kernels.rule import in_dtypes

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


CASES = {  # a pattern and its sizes
    "linear": ("gelu", 70, 80, 40), "ReLU": ("relu", 20, 70, 40), "SiLU": ("silu", 20, 70, 40),
    "causal": ("causal", 2, 70, 16), "scores": ("scores", 2, 40, 16),
    "residual and LayerNorm": ("add_norm", 5, 100), "residual and RMSNorm": ("add_rms", 3, 64),
    "LayerNorm, a tile and a bit": ("wide", 3, 1030), "LayerNorm, narrow": ("wide", 20, 1),
    "softmax and top-k": ("topk", 3, 1100),
}


@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_results_and_gradients(case, dtype):
    """Gradients of residual + norm, which alone has a backward pass."""
    name, *sizes = CASES[case]
    pattern = lab.PATTERNS[name]
    tensors = lab.tensors_of(pattern, sizes, dtype, torch.device("cpu"))
    assert not lab.faults(dict(plain=pattern.plain, ours=pattern.ours), tensors, dtype)
    assert lab.outputs(pattern.ours, tensors)[0].requires_grad == name.startswith("add")


def test_the_chosen_entries_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 1500)
    x[1, 1::7] = -float("inf")
    values, indices = patterns.softmax_topk(x, 64)
    expected = x.softmax(-1).topk(64)
    assert torch.equal(indices, expected.indices) and torch.allclose(values, expected.values, rtol=1e-5)
    assert patterns.softmax_topk(x[:, :1], 1)[0].eq(1).all()  # the only entry


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
