"""Triangle attention under cuEquivariance's name, by the contract of its release 0.13: dimensions, masks,
lengths, rows with one key, and inputs for PyTorch's operations. (test_families.py has the rest.)"""
import pytest
import torch

from evoformer_kernels import family
from evoformer_kernels.attention import drop_in
from tests.kernels.problems import attention_from_python as problem
from tests.kernels.rule import equal, gradients, packed_anew, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]
S = 13


def attend(**given):
    return lambda *tensors: drop_in.triangle_attention(*tensors, **given)


@pytest.mark.parametrize("dims", [(3, 4, 5, 3, 1), (4, 5, 3, 4, 5), (5, 3, 4, 5, 2)], ids=str)
def test_each_tensor_is_lifted_by_itself_and_five_dimensions_come_back(dims):
    _, _, tensors = problem(torch.bfloat16, S, N=1)
    mask = torch.rand(1, 1, 1, 1, S) > 0.3
    *given, of_mask = (t.reshape(t.shape[5 - n:]) for t, n in zip((*tensors, mask), dims, strict=True))
    out, *found = gradients(attend(mask=mask), tensors)
    expected = out, *(g.view_as(t) for g, t in zip(found, given, strict=True))
    assert equal(gradients(attend(mask=of_mask), given), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)  # kernels, PyTorch's operations
def test_a_mask_other_than_0_is_present(dtype):
    _, _, tensors = problem(dtype, S)
    mask = torch.tensor([1, 0, -1, 0.3, 7]).repeat(8)[:3 * S].view(1, 3, 1, 1, S)
    assert equal(gradients(attend(mask=mask), tensors), gradients(attend(mask=mask != 0), tensors))


def test_views_are_read_as_they_lie(length=S, dtype=torch.float32):
    """Expanded, packed, heads behind positions, and q, k and v by strides that are not the same."""
    torch.manual_seed(0)
    expanded = torch.randn(1, 1, 2, length, 16).to(dtype).expand(2, 3, -1, -1, -1)
    packed = torch.randn(2, 3, 2, length, 48).to(dtype).chunk(3, -1)
    across = torch.randn(2, 3, length, 2, 16).to(dtype).transpose(2, 3)
    bias = torch.randn(2, 1, 2, length, length).to(dtype)
    of_more = torch.randn(2, 4, 2, length, 16).to(dtype)
    alone = torch.randn(1, 1, 2, length, 16).to(dtype)  # along dimensions of 1 it has other strides
    row = of_more[:1, :1], alone, of_more[1:, 1:2], bias[:1]
    for given in ((*[expanded] * 3, bias), (expanded, packed[1], across, bias.mT), (*packed, bias),
                  (*[across] * 3, bias), (packed[0], packed[1], across, bias), row):
        found = gradients(attend(), given)
        assert equal(found, gradients(attend(), [t.contiguous() for t in given]))
        with packed_anew():
            assert equal(found, gradients(attend(), given))


@pytest.mark.parametrize("B, length", [(0, S), (1, 0)])
def test_of_nothing_there_is_nothing(B, length):
    _, _, tensors = problem(torch.bfloat16, length, False, B=B)
    out, *found = gradients(attend(), tensors)
    assert out.numel() == 0 and not any(each.any() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lengths_of_keys(dtype):
    """Where q is 0 and the bias of key j log(j), its weight is j over the sum of those that are present."""
    lengths = torch.tensor([5, 0, S + 9], dtype=torch.int32)[None, :, None, None, None]
    key = torch.arange(1, S + 1, dtype=dtype)
    q, v = torch.zeros(1, 3, 2, S, 16, dtype=dtype), torch.eye(S, 16, dtype=dtype).expand(1, 3, 2, S, 16)
    out = attend(kv_lengths=lengths)(q, q, v, key.log().expand(1, 1, 2, S, S))
    for row, (there, total) in enumerate([(5, 15), (0, 1), (S, S * (S + 1) / 2)]):
        weights = torch.nn.functional.pad(key[:there] / total, (0, 16 - there))
        torch.testing.assert_close(out[0, row], weights.expand(2, S, 16))
    _, _, tensors = problem(dtype, S)
    found, expected = (gradients(attend(**given), tensors)[1:] for given in (
        dict(kv_lengths=lengths), dict(mask=key <= lengths)))
    assert equal(found, expected) and not any(g[0, 1].any() for g in found[:3])


@pytest.mark.parametrize("length", [1, S, 70])
def test_where_one_key_is_present_q_and_k_have_no_gradient(length):
    _, _, tensors = problem(torch.bfloat16, length, False)
    mask, v = torch.zeros(1, 3, 1, 1, length), tensors[2]
    mask[..., 0], mask[:, 1] = 1, 1
    for _ in range(2):
        out, dq, dk, dv, _ = gradients(attend(mask=mask), tensors)
        for row in range(3):
            several = row == 1 and length > 1
            assert bool(dq[0, row].any()) is bool(dk[0, row].any()) is several and dv[0, row].any()
            assert several or torch.equal(out[0, row], v[0, row][:, :1].expand_as(out[0, row]))


def fewer(ours, plain, tensors):
    q, k, v, bias = tensors
    return drop_in.triangle_attention, plain, [q[..., :4, :], k, v, bias[..., :4, :]]


@pytest.mark.parametrize("said, made", {
    "heads of 136": lambda: problem(torch.bfloat16, S, D=136),
    "float64": lambda: problem(torch.float64, S),
    "another number of keys": lambda: fewer(*problem(torch.float32, S, False))}.items())
def test_what_no_kernel_takes_is_said_and_runs_in_pytorchs_operations(said, made, monkeypatch):
    monkeypatch.setattr(drop_in, "row_attention", None)
    monkeypatch.setattr(family, "said", set())
    with pytest.warns(UserWarning, match=said):
        assert not violations(*made())


@pytest.mark.parametrize("present", [True, False])
def test_pytorchs_operations_in_float16(present):
    """More queries than keys; a row of scores without a key, by its bias and by its mask, is no NaN."""
    tensors = [torch.randn(shape, dtype=torch.float16) for shape in (
        (1, 2, 2, 6, 16), (1, 2, 2, 4, 16), (1, 2, 2, 4, 16), (1, 1, 2, 6, 4))]
    tensors[0] *= 9
    tensors[3][:, :, :, 1] = float("-inf")
    mask = torch.full((1, 2, 1, 1, 4), present)
    found = gradients(attend(mask=mask), tensors)
    assert all(x.isfinite().all() for x in found) and bool(found[3].any()) is present
    if present:
        exact = attend(mask=mask)(*(t.double() for t in tensors))
        assert torch.allclose(found[0].double(), exact, atol=0.02)


def test_pytorchs_operations_under_vmap():
    *tensors, bias = (t.double() for t in problem(torch.float32, S)[2])
    biases = torch.stack([bias, 2 * bias])
    both = torch.vmap(lambda bias: drop_in.triangle_attention(*tensors, bias))(biases)
    torch.testing.assert_close(both[1], drop_in.triangle_attention(*tensors, biases[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_may_be_minus_infinity(dtype):
    ours, plain, tensors = problem(dtype, S, False)
    tensors[3][..., :6] = -torch.inf
    tensors[3][:, :, 0, 2] = -torch.inf  # a query without any key
    v = tensors[2].double()
    out, *found = gradients(ours, tensors)
    exact = plain(*(t.double() for t in tensors))
    exact[:, :, 0, 2] = v.mean(3)[:, :, 0]  # every key counts the same
    assert torch.allclose(out.double(), exact, atol=2e-2)
    assert all(g.isfinite().all() for g in found) and not found[3][tensors[3] == -torch.inf].any()


def test_what_is_refused_in_one_line():
    _, _, (q, k, v, bias) = problem(torch.float32, S)
    mask, lengths = torch.ones(1, 3, 1, 1, S), torch.ones(1, 3, 1, 1, 1, dtype=torch.int32)
    for given, more, words in (
            ((q, k, v.half(), bias), {}, "v torch.float16, but"), ((q, k, v, None), {}, "bias is missing"),
            ((q, k, v[:, :2], bias), {}, r"v is \(1, 2"), ((q, k, v, bias.to("meta")), {}, "bias is on meta"),
            ((q, k, v, bias[:, :, :1]), {}, r"bias is \(1, 1, 1, 13, 13\), but"),
            ((q, k, v, bias.expand(1, 3, 2, S, S)), {}, r"bias is \(1, 3"),
            ((q[None], k, v, bias), {}, r"q is \(1, 1"),
            ((q[..., :0], k[..., :0], v[..., :0], bias), {}, "D at least 1"),
            ((q, k, v, bias), dict(mask=mask[:, :1]), r"mask is \(1, 1, 1, 1, 13\), but"),
            ((q, k, v, bias), dict(mask=mask[..., :1]), r"mask is \(1, 3, 1, 1, 1\), but"),
            ((q, k, v, bias), dict(kv_lengths=lengths[:, :1]), r"kv_lengths is \(1, 1, 1, 1, 1\), but"),
            ((q, k, v, bias), dict(kv_lengths=lengths.long()), "kv_lengths must be int32"),
            ((q, k, v, bias), dict(kv_lengths=lengths, mask=mask), "no mask beside"),
            ((q, k, v, bias), dict(return_aux=True), "return_aux")):
        with pytest.raises(ValueError, match=words) as caught:
            attend(**more)(*given)
        assert "\n" not in str(caught.value)
