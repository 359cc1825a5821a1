"""Attention where numbers are extreme, in Triton's interpreter: masks, rows without keys, far addresses."""
import pytest
import torch

from evoformer_kernels.attention import padded_bias, plan
from evoformer_kernels.attention.function import gated_attention, row_attention
from tests.kernels import references
from tests.kernels.problems import sub_layer
from tests.kernels.rule import violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [5, 70])
def test_rows_without_any_key_are_finite_and_have_no_gradient(length, dtype):
    """Nor do tiles without any key before the first one disturb a row: their maximum is -1e9."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 2, length, 16).to(dtype).requires_grad_() for _ in range(3))
    keys, bias = torch.ones(1, 3, length), torch.randn(1, 2, length, length).to(dtype)
    keys[:, 1], keys[:, 2, :-3] = 0, 0
    out = row_attention(q, k, v, bias, keys)
    exact = references.attention(*(t.detach().double() for t in (q, k, v, bias)), keys)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # some are of three keys
    assert torch.allclose(out.double(), exact, rtol=tolerance, atol=tolerance)
    out.sum().backward()
    assert not any(x.grad[:, 1].any() for x in (q, k, v)) and v.grad[:, 0].any()


@pytest.mark.parametrize("lowest", [-1e30, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [5, 70])
def test_a_bias_that_masks(length, dtype, lowest):
    """All keys of the first tiles: whatever their maximum is, it leaves no trace."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 2, length, 16).to(dtype).requires_grad_() for _ in range(3))
    bias, masked = torch.randn(1, 2, length, length), length - 3
    bias[..., :masked] = lowest
    bias = bias.to(dtype)  # float16 has -inf for all of them
    out = row_attention(q, k, v, bias)
    exact = references.attention(*(t.detach().double() for t in (q, k, v, bias)))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(out.double(), exact, rtol=tolerance, atol=tolerance)
    out.sum().backward()
    assert not v.grad[..., :masked, :].any() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_zeros_are_written_where_a_row_has_one_key():
    """On a GPU; in the interpreter what they replace is 0, too."""
    q, keys = torch.ones(1, 3, 2, 70, 16), torch.zeros(1, 3, 70)
    keys[:, 0, 69] = keys[:, 1, :2] = 1
    key_bias, found = padded_bias.launch_key_bias(keys, 128), [q.clone(), q.clone()]
    attention = plan.AttentionPlan(plan.Inputs(q, q, q, key_mask=key_bias), 2, 0, 1.0)
    attention.zero_where_one_key_is(key_bias, *found)
    assert all(each[:, 1:].eq(1).all() and not each[:, 0].any() for each in found)


def test_a_plan_serves_both_orders_of_a_bias():
    """The gradient of what makes the bias is transposed for one of two layers that look alike."""
    for turned in (True, False, True):
        problem = sub_layer(torch.float32, 1, 7, 7, 16, 2, 1, "own", False, False, None, turned=turned)
        assert not violations(*problem)


@pytest.mark.parametrize("turn", ["bias", "mask"])
def test_a_bias_and_a_mask_of_other_strides_at_every_call(turn):
    """Of whole tiles, where a bias is read as it is; a kept launch reads the second mask as the first one."""
    torch.manual_seed(0)
    x, bias, mask = torch.randn(2, 3, 16, 64), torch.randn(2, 2, 16, 16), torch.rand(2, 16) > 0.3
    mask[:, 0] = True
    mask = mask if turn == "mask" else None

    def call(function):
        return lambda x, bias: function(
            x, 2, 2, bias.mT.contiguous().mT if turn == "bias" else bias, turned(mask))

    def turned(mask):
        return None if mask is None else mask.t().contiguous().t()
    for _ in range(2):
        assert not violations(call(lambda x, *rest: gated_attention([x], *rest)),
                              call(references.gated_attention), [x, bias])


def test_offsets_beyond_32_bits():
    """Positions of which the last lies 2^31 numbers behind the first, as columns of 2,752 residues do. Of all
    that memory nothing but the positions is ever touched."""
    length, apart, width = 160, (1 << 24) - 16, 4 * 16
    far = torch.empty(length * apart, dtype=torch.bfloat16)
    far = far.as_strided((1, length, 1, width), (1, apart, 1, 1))
    near = far.copy_(torch.randn(far.shape)).clone()
    results = []
    for x in (far, near):
        x = x.detach().requires_grad_()
        out = gated_attention([x], 1, 1, torch.ones(1, 1, length, length).bfloat16())
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert results[0][0].any() and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="too large for one launch"):
        gated_attention([far[:, ::2]], 1, 1)


def test_a_bias_is_not_copied_where_it_lies_as_it_is_read():
    q, bias = torch.randn(1, 1, 1, 128, 16), torch.randn(1, 1, 128, 128)
    inputs = plan.Inputs(q, q, q, bias=bias)
    own, transposed, _ = plan.AttentionPlan(inputs, 1, 0, 1.0, False, True).added(inputs)
    assert own.data_ptr() == bias.data_ptr() and torch.equal(transposed, bias.mT)
