"""Attention where numbers are extreme, in Triton's interpreter: masks, rows without keys, far addresses."""
import pytest
import torch

from fusion_lab.kernels.attention import call, padded_bias
from fusion_lab.kernels.attention import operator as attention_operator

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_may_be_minus_infinity(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1, 70, 16).to(dtype)
    bias = torch.randn(1, 1, 70, 70).to(dtype)
    bias[..., :64] = -torch.inf
    exact = attention_operator.reference(*(t.double() for t in (q, k, v, bias)))
    assert torch.allclose(attention_operator.row_attention(q, k, v, bias).double(), exact, atol=2e-2)


def test_a_row_without_any_key_is_finite_and_has_no_gradient():
    q, k, v = (torch.randn(1, 1, 1, 5, 8).requires_grad_() for _ in range(3))
    out = attention_operator.row_attention(q, k, v, torch.zeros(1, 1, 5, 5), torch.zeros(1, 5))
    assert torch.allclose(out, v.mean(3, keepdim=True).expand_as(v), atol=1e-5)  # every key counts the same
    out.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))  # and it teaches nothing


def test_zeros_are_written_where_a_row_has_one_key():
    """On a GPU; in the interpreter what they replace is 0, too."""
    q, keys = torch.ones(1, 3, 2, 70, 16), torch.zeros(1, 3, 70)
    keys[:, 0, 69] = keys[:, 1, :2] = 1
    key_bias, found = padded_bias.launch_key_bias(keys, 128), [q.clone(), q.clone()]
    attention = call.Attention(call.listed([q, q, q], None, None, key_bias), 2, 0, 1.0)
    attention.zero_where_one_key_is(key_bias, *found)
    assert all(each[:, 1:].eq(1).all() and not each[:, 0].any() for each in found)


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
        out = attention_operator.gated_attention([x], 1, 1, torch.ones(1, 1, length, length).bfloat16())
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert results[0][0].any() and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="too large for one launch"):
        attention_operator.gated_attention([far[:, ::2]], 1, 1)


def test_a_bias_is_not_copied_where_it_lies_as_it_is_read():
    q, own = torch.randn(1, 1, 1, 128, 16), torch.randn(1, 1, 128, 128)
    for bias, number in ((own, 0), (own.mT, 1)):  # as it is; as attention along axis 1 takes it
        found = attention_operator.padded_bias(bias, None, q, (1, 1, 1, 128), True)[:2]
        assert found[number].data_ptr() == own.data_ptr()
        assert torch.equal(found[0], bias) and torch.equal(found[1], bias.mT)


def test_a_bias_of_whole_numbers():
    q, keys = torch.randn(1, 1, 1, 65, 16), torch.ones(1, 65, dtype=torch.bool)
    bias = torch.randint(-2, 3, (1, 1, 65, 65))
    for mask in (keys, None):
        padded, _, _ = attention_operator.padded_bias(bias, mask, q, (1, 1, 1, 65), False)
        assert torch.equal(padded[..., :65, :65], bias.float()) and (padded[..., 65:] < -1e29).all()
