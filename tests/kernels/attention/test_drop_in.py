"""Triangle attention under cuEquivariance's name: by the 3x rule, under autocast, by kept plans."""
import pytest
import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.attention import drop_in
from fusion_lab.kernels.attention import operator as attention
from tests.kernels.rule import a_plan_changes_no_bit, refuses_more_derivatives, same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


def problem(dtype, S=13, masked=True, bias_dtype=None, B=1, N=3, H=2, D=16):
    """(ours, plain, tensors): q, k, v and the bias."""
    torch.manual_seed(2)
    tensors = [*torch.randn(3, B, N, H, S, D).to(dtype), torch.randn(B, 1, H, S, S).to(bias_dtype or dtype)]
    mask = torch.rand(B, N, 1, 1, S) > 0.3 if masked else None
    if masked:
        mask[..., 0] = True

    def ours(q, k, v, bias):
        return drop_in.triangle_attention(q, k, v, bias, mask)

    def plain(q, k, v, bias):
        return attention.reference(q, k, v, bias[:, 0], None if mask is None else mask[:, :, 0, 0])
    return ours, plain, tensors


@pytest.mark.sample
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [13, pytest.param(70, marks=pytest.mark.slow)])
def test_forward_and_gradients_by_a_plan_and_by_the_one_that_was_kept(length, masked):
    drop_in.Plan.kept.clear()
    for _ in range(2):
        assert not violations(*problem(torch.bfloat16, length, masked))
    assert len(drop_in.Plan.kept) == 1


@pytest.mark.parametrize("dtype, width", [
    (torch.bfloat16, 24), (torch.float32, 48), *(pytest.param(dtype, width, marks=pytest.mark.slow)
    for dtype, width in ((torch.float16, 96), (torch.float32, 24), (torch.bfloat16, 48)))])
def test_heads_that_are_no_power_of_two(dtype, width):
    assert not violations(*problem(dtype, D=width))


def run(function, q, k, v, bias, **more):
    """[output, gradients] with an incoming gradient that is expanded."""
    given = [t.detach().requires_grad_() for t in (q, k, v, bias)]
    out = function(*given, **more)
    return [out, *torch.autograd.grad(out, given, torch.full_like(out[..., :1], 0.5).expand(out.shape))]


def test_samples_may_be_missing():
    """As OpenFold3 and Protenix call it."""
    _, _, tensors = problem(torch.bfloat16)
    mask = torch.rand(1, 3, 1, 1, 13) > 0.3
    expected = run(drop_in.triangle_attention, *tensors, mask=mask)
    found = run(drop_in.triangle_attention, *(t[0] for t in tensors), mask=mask[0])
    assert all(torch.equal(a, b[0]) for a, b in zip(found, expected, strict=True))


SPREAD = {  # shapes of bias and mask
    "samples": ((1, 1, 2, 13, 13), (1, 3, 1, 1, 13)), "heads": ((2, 1, 1, 13, 13), (2, 1, 1, 1, 13)),
    "queries": ((2, 1, 2, 1, 13), (2, 3, 1, 1, 13)),
    "all": ((1, 1, 1, 1, 13), (1, 1, 1, 1, 1))}


def spread(of_bias, of_mask):
    """Attention with such a bias and mask, ours and plain, and their tensors."""
    torch.manual_seed(0)
    mask = torch.rand(of_mask) > 0.3
    mask[..., 0] = True

    def ours(*given):
        return drop_in.triangle_attention(*given, mask)

    def plain(q, k, v, bias):
        scores = 0.25 * q @ k.mT + bias.expand(2, 1, 2, 13, 13)
        return scores.masked_fill(~mask, -1e9).softmax(-1) @ v
    return ours, plain, [*torch.randn(3, 2, 3, 2, 13, 16), torch.randn(of_bias)]


@pytest.mark.parametrize("name", SPREAD)
def test_bias_and_mask_are_spread_over(name):
    assert not violations(*spread(*SPREAD[name]))


def test_a_bias_of_one_number():
    """Softmax does not see it, so its gradient is 0: both have only rounding there, a sum of 2,028 terms."""
    ours, plain, (*tensors, bias) = spread((1,) * 5, (1,) * 5)
    assert not violations(lambda *given: ours(*given, bias), lambda *given: plain(*given, bias), tensors)
    gradient, = torch.autograd.grad(ours(*tensors, bias.requires_grad_()).square().sum(), bias)
    assert gradient.shape == bias.shape and gradient.abs().item() < 1e-4


def test_tensors_that_are_expanded_views():
    torch.manual_seed(0)
    q, bias = torch.randn(1, 1, 2, 13, 16).expand(2, 3, -1, -1, -1), torch.randn(2, 1, 2, 13, 13)
    across = torch.randn(2, 3, 13, 2, 16).transpose(2, 3)
    for given in ((q, q, q, bias), (q, across, across, bias.mT), (across, across, across, bias)):
        expected = run(drop_in.triangle_attention, *(t.contiguous() for t in given))
        assert all(map(torch.equal, run(drop_in.triangle_attention, *given), expected))


def test_lengths_of_keys():
    _, _, tensors = problem(torch.bfloat16)
    lengths = torch.tensor([5, 1, 13])[None, :, None, None, None]
    mask = torch.arange(13) < lengths
    expected = run(drop_in.triangle_attention, *tensors, mask=mask)
    for more in (dict(kv_lengths=lengths), dict(kv_lengths=lengths, mask=torch.ones_like(mask))):
        assert all(map(torch.equal, run(drop_in.triangle_attention, *tensors, **more), expected))


@pytest.mark.parametrize("length", [1, 13, pytest.param(70, marks=pytest.mark.slow)])
def test_where_one_key_is_present_q_and_k_have_no_gradient(length):
    ours, _, (q, k, v, bias) = problem(torch.bfloat16, length, masked=False)
    mask = torch.zeros(1, 3, 1, 1, length)
    mask[..., 0], mask[:, 1] = 1, 1
    for _ in range(2):
        out, dq, dk, dv, _ = run(drop_in.triangle_attention, q, k, v, bias, mask=mask)
        for row in range(3):
            several = row == 1 and length > 1
            assert bool(dq[0, row].any()) is bool(dk[0, row].any()) is several and dv[0, row].any()
            assert several or torch.equal(out[0, row], v[0, row][:, :1].expand_as(out[0, row]))


def test_fewer_queries_than_keys_take_pytorchs_operations():
    _, plain, (q, k, v, bias) = problem(torch.float32, masked=False)
    fewer = [q[..., :4, :], k, v, bias[..., :4, :]]
    assert not violations(drop_in.triangle_attention, plain, fewer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wider_heads_take_pytorchs_operations(dtype):
    assert not violations(*problem(dtype, D=136))


@pytest.mark.parametrize("masked", [True, False])
def test_the_plain_path_is_the_same_function(masked, monkeypatch):
    monkeypatch.setattr(drop_in, "WIDEST_HEAD", 0)
    monkeypatch.setattr(drop_in, "planned", None)
    assert not violations(*problem(torch.float32, masked=masked))
    ours, _, (q, k, v, bias) = problem(torch.float32)
    v.requires_grad_()
    nobody = torch.zeros(1, 3, 1, 1, 13, dtype=torch.bool)
    out = drop_in.triangle_attention(q, k, v, torch.full_like(bias, -torch.inf), nobody)
    assert torch.allclose(out, v.mean(3, keepdim=True).expand_as(v), atol=1e-5)
    assert not torch.autograd.grad(out.sum(), v)[0].any()  # no gradient from rows without any key
    biases = torch.stack([bias, 2 * bias])
    both = torch.vmap(lambda bias: drop_in.triangle_attention(q, k, v, bias, nobody))(biases)
    torch.testing.assert_close(both[1], drop_in.triangle_attention(q, k, v, biases[1], nobody))


def calls(dtype, S=13):
    """(function(q, k, v, bias) by a plan, the same by operators, tensors)"""
    _, _, tensors = problem(dtype, S)
    mask = torch.rand(1, 3, 1, 1, S) > 0.3

    def by_plan(*given):
        return drop_in.triangle_attention(*given, mask)

    def by_operators(q, k, v, bias):
        return attention.row_attention(q, k, v, bias[:, 0], mask[:, :, 0, 0])
    return by_plan, by_operators, tensors


def test_a_plan_gives_the_bits_of_the_operators():
    assert a_plan_changes_no_bit(*calls(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("present", [True, False])
def test_the_plain_path_in_float16(present):
    """More queries than keys; a row of scores without a key, by its bias and by its mask, is no NaN."""
    q, k, v, bias = (torch.randn(shape, dtype=torch.float16) for shape in (
        (1, 2, 2, 6, 16), (1, 2, 2, 4, 16), (1, 2, 2, 4, 16), (1, 1, 2, 6, 4)))
    bias[:, :, :, 1] = float("-inf")
    mask = torch.full((1, 2, 1, 1, 4), present)
    found = run(drop_in.triangle_attention, 9 * q, k, v, bias, mask=mask)
    assert all(x.isfinite().all() for x in found)
    if present:
        exact = run(drop_in.triangle_attention, *(t.double() for t in (9 * q, k, v, bias)), mask=mask)
        assert torch.allclose(found[0].double(), exact[0], atol=0.02)


def test_float64_takes_pytorchs_operations():
    _, _, tensors = problem(torch.float64)
    assert not violations(drop_in.triangle_attention, lambda q, k, v, bias: (
        (0.25 * q @ k.mT + bias).softmax(-1) @ v), [t.detach() for t in tensors])


def test_under_compile_checkpoint_and_no_grad():
    ours, _, tensors = problem(torch.float32)
    assert same_in_every_mode(ours, tensors, unused=0)


def test_views_are_read_as_they_lie():
    ours, _, (q, k, v, bias) = problem(torch.float32)
    packed = torch.cat([q, k, v], -1)
    assert torch.equal(ours(*packed.chunk(3, -1), bias), ours(q, k, v, bias))
    across = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(ours(*across, bias), ours(q, k, v, bias))
    assert torch.equal(ours(across[0], k, v, bias), ours(q, k, v, bias))  # not all alike


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_may_be_minus_infinity(dtype):
    ours, plain, tensors = problem(dtype, masked=False)
    tensors[3][..., :6] = -torch.inf
    tensors[3][:, :, 0, 2] = -torch.inf  # a query without any key
    q, k, v, bias = (t.requires_grad_() for t in tensors)
    out = ours(q, k, v, bias)
    exact = plain(*(t.detach().double() for t in (q, k, v, bias)))
    exact[:, :, 0, 2] = v.detach().double().mean(3)[:, :, 0]  # every key counts the same
    assert torch.allclose(out.double(), exact, atol=2e-2)
    gradients = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert all(g.isfinite().all() for g in gradients) and not gradients[3][bias == -torch.inf].any()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low):
    ours, _, tensors = problem(torch.float32)
    given = [t.requires_grad_() for t in tensors]
    with torch.autocast("cpu", low):
        out = ours(*given)
    assert out.dtype == low
    assert [g.dtype for g in torch.autograd.grad(out.sum(), given)] == [torch.float32] * 4
    q, k, v, bias = given
    assert torch.equal(out, ours(q.to(low), k.to(low), v.to(low), bias))


def test_what_is_refused_in_one_line():
    ours, _, (q, k, v, bias) = problem(torch.float32)
    with pytest.raises(ValueError, match="v torch.float16, but"):
        ours(q, k, v.half(), bias)
    with pytest.raises(ValueError, match="return_aux"):
        drop_in.triangle_attention(q, k, v, bias, return_aux=True)
    with pytest.raises(ValueError, match=r"v is \(1, 2, 2, 13, 16\)"):
        ours(q, k, v[:, :2], bias)
    with pytest.raises(ValueError, match=r"bias is \(1, 2, 13, 13\)"):
        ours(q, k, v, bias[:, 0])
    assert refuses_more_derivatives(ours, (q, k, v, bias), "triangle_attention")


def test_plans_are_made_anew_when_tiles_were_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "cache_file", lambda: tmp_path / "tiles.json")
    monkeypatch.setattr(tuner, "fastest", lambda key, candidates, run: candidates[0])
    ours, _, tensors = problem(torch.bfloat16)
    ours(*tensors)
    assert drop_in.Plan.kept
    with tuner.retuning() as found:
        ours(*tensors)
        assert any(key.startswith("attention_forward_kernel") for key in found)
    assert not drop_in.Plan.kept
