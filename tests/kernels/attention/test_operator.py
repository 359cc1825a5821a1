"""Biased attention in Triton's interpreter: outputs and gradients by the 3x rule."""
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.kernels.attention import operator as attention_operator
from tests.kernels.rule import violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, X, Y, H, D, axis, bias, keys, packed
    "long rows, two tiles, a mask": (1, 3, 77, 2, 16, 2, True, True, True),
    "ending node": (2, 70, 3, 2, 8, 1, True, True, True),
    "short": (2, 5, 13, 2, 16, 2, True, True, True),
    "columns": (2, 7, 5, 4, 8, 1, False, True, False),
    "columns, no mask": (1, 33, 2, 1, 32, 1, False, False, True),
    "a whole tile": (1, 2, 64, 2, 16, 2, True, False, False),
    "two whole tiles": (1, 2, 128, 1, 16, 2, True, False, True),
    "one residue": (1, 1, 1, 2, 8, 2, True, False, True),
}


def problem(dtype, B, X, Y, H, D, axis, biased, masked, packed):
    """(ours, plain, tensors) of a case."""
    torch.manual_seed(0)
    c, length = H * D, X if axis == 1 else Y
    x = torch.randn(B, X, Y, 4 * c).to(dtype)
    gate_bias, bias = torch.randn(c).to(dtype), torch.randn(B, H, length, length).to(dtype)
    keys = torch.rand(B, length) > 0.2 if masked else None

    def ours(x, gate_bias, bias):
        parts = [x] if packed else [part.contiguous() for part in x.chunk(4, dim=-1)]
        return attention_operator.gated_attention(parts, H, axis, bias if biased else None, keys, gate_bias)

    def plain(x, gate_bias, bias):
        q, k, v, g = attention_operator.views([x], H, axis, True)
        out = attention_operator.reference(q, k, v, bias if biased else None, keys, g, gate_bias.view(H, D))
        return out.permute((0, 3, 1, 2, 4) if axis == 1 else (0, 1, 3, 2, 4)).flatten(-2)
    return ours, plain, [x, gate_bias, bias]


@pytest.mark.sample
@pytest.mark.parametrize("dtype, case", [
    *(pytest.param(torch.bfloat16, case, marks=[pytest.mark.slow] * (case == "ending node"))
      for case in CASES),
    (torch.float16, "short"), (torch.float32, "short"),
    pytest.param(torch.float16, "ending node", marks=pytest.mark.slow),
    *(pytest.param(torch.float32, case, marks=pytest.mark.slow) for case in CASES if case != "short")])
def test_forward_and_gradients(dtype, case):
    assert not violations(*problem(dtype, *CASES[case]))


def key_masked(length, dtype):
    """(ours, plain, tensors) as other projects call it: heads before residues, a mask for every row, a
    scale."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 2, length, 8).to(dtype) for _ in range(3))
    bias, keys = torch.randn(2, 2, length, length).to(dtype), torch.rand(2, 3, length) > 0.3

    def run(function):
        return lambda q, k, v, bias: function(q, k, v, bias, keys, scale=0.3)
    return run(attention_operator.row_attention), run(attention_operator.reference), [q, k, v, bias]


@pytest.mark.parametrize("length", [19, pytest.param(70, marks=pytest.mark.slow)])
def test_full_key_mask_and_no_gate(length):
    assert not violations(*key_masked(length, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_may_be_minus_infinity(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1, 70, 16).to(dtype)
    bias = torch.randn(1, 1, 70, 70).to(dtype)
    bias[..., :64] = -torch.inf
    exact = attention_operator.reference(*(t.double() for t in (q, k, v, bias)))
    assert torch.allclose(attention_operator.row_attention(q, k, v, bias).double(), exact, atol=2e-2)


@pytest.mark.slow
def test_rows_side_by_side(monkeypatch):
    """Two of three rows in a program, and the third, as some candidates of the tuner have it."""
    monkeypatch.setattr(attention_operator.tuner, "launch", lambda kernel, shape, candidates, run: run(next(
        (each for each in candidates if each.get("RU") == 2), candidates[0])))
    assert not violations(*key_masked(70, torch.bfloat16))


@pytest.mark.parametrize("length", [50, pytest.param(70, marks=pytest.mark.slow)])
def test_a_program_of_several_rows(length, monkeypatch):
    monkeypatch.setattr(attention_operator, "PROGRAMS", 1)
    assert not violations(*key_masked(length, torch.float32))


def stored(most, number=0):
    """A tuner that has found that dS is to be stored, in rounds of so many bytes, and is best read with this
    candidate's tiles."""
    def launch(kernel, shape, candidates, run):
        run(chosen(kernel, shape, candidates))

    def chosen(kernel, shape, candidates):
        if kernel == "attention_backward":
            return dict(STORED=most)
        return candidates[number if kernel == "attention_backward_scores_kernel" else 0]
    return SimpleNamespace(launch=launch, chosen=chosen)


@pytest.mark.parametrize("dtype, case, bytes_of_a_round", [
    (torch.bfloat16, "two whole tiles", 1 << 20), (torch.bfloat16, "long rows, two tiles, a mask", 1),
    *(pytest.param(torch.float32, case, most, marks=pytest.mark.slow) for case, most in (
        ("long rows, two tiles, a mask", 1 << 20), ("two whole tiles", 1), ("ending node", 1 << 18)))])
def test_stored_scores(dtype, case, bytes_of_a_round, monkeypatch):
    """All rows in one round, one row a round, and 2 of 3 rows."""
    monkeypatch.setattr(attention_operator, "tuner", stored(bytes_of_a_round))
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.parametrize("number", [
    pytest.param(number, marks=[pytest.mark.slow] * (number != 2))
    for number in range(len(attention_operator.BACKWARD_SCORES))])
def test_stored_scores_by_every_tile(number, monkeypatch):
    """Rows of three tiles of 64, for which four are stored."""
    monkeypatch.setattr(attention_operator, "tuner", stored(1 << 30, number))
    assert not violations(*problem(torch.bfloat16, 1, 2, 192, 1, 16, 2, True, False, True))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_short_rows_in_rounds(rows, monkeypatch):
    """Of one row each, and of 2 of 5 rows, which leave partial sums of the bias's gradient."""
    monkeypatch.setattr(attention_operator, "MOST_SCORES", rows * 2 * 2 * 16 ** 2 * 4)
    assert not violations(*problem(torch.float32, *CASES["short"]))


def test_row_without_any_key_is_finite_and_has_no_gradient():
    q, k, v = (torch.randn(1, 1, 1, 5, 8).requires_grad_() for _ in range(3))
    out = attention_operator.row_attention(q, k, v, torch.zeros(1, 1, 5, 5), torch.zeros(1, 5))
    assert torch.allclose(out, v.mean(3, keepdim=True).expand_as(v), atol=1e-5)  # every key counts the same
    out.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))  # and it teaches nothing


def test_what_would_be_misread_is_refused():
    q, k, v, gate = (torch.zeros(1, 3, 5, 16) for _ in range(4))
    for wrong, message in ((k.transpose(1, 2).contiguous().transpose(1, 2), "k has strides"),
                           (k[..., :8], r"k is \(1, 3, 2, 5, 4\)"), (k.half(), "k is .*float16")):
        with pytest.raises(ValueError, match=message):
            attention_operator.gated_attention([q, wrong, v, gate], 2, 2)
    with pytest.raises(ValueError, match="heads of 256 channels"):
        attention_operator.row_attention(*(torch.zeros(1, 1, 1, 5, 256) for _ in range(3)))
    with pytest.raises(ValueError, match="float64"):
        attention_operator.row_attention(*(torch.zeros(1, 1, 1, 5, 16).double() for _ in range(3)))


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


def test_the_bias_is_transposed_only_where_backward_reads_it():
    q, bias = torch.randn(1, 1, 1, 65, 16), torch.randn(1, 1, 65, 65)
    assert attention_operator.reads_transposed_bias(65) and not attention_operator.reads_transposed_bias(64)
    with torch.no_grad():
        assert not attention_operator.reads_transposed_bias(65)
    for transpose in (True, False):
        padded, transposed, mask = attention_operator.padded_bias(bias, None, q, (1, 1, 1, 65), transpose)
        assert mask is None and (transposed is not None) == transpose
        assert transposed is None or torch.equal(transposed, padded.mT)


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


def test_second_derivatives_are_refused():
    q, k, v = (torch.randn(1, 1, 1, 5, 16).requires_grad_() for _ in range(3))
    out = attention_operator.row_attention(q, k, v)
    gradient, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
