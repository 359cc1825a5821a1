"""Triangle multiplication under cuEquivariance's name: by its definition, in the dimensions and
precisions that release 0.13 takes, and in PyTorch's operations."""
import pytest
import torch

from evoformer_kernels import family
from evoformer_kernels.triangle_multiplication import drop_in
from tests.kernels.problems import multiplication_from_python as problem
from tests.kernels.rule import equal, gradients, packed_anew, violations
from tests.programs.fake_peer.cuequivariance_torch import triangle_multiplicative_update as by_hand

pytestmark = [pytest.mark.interpreted, pytest.mark.full]
update = drop_in.triangle_multiplicative_update


@pytest.mark.parametrize("dtype, c", [(torch.bfloat16, 24), (torch.float32, 12), (torch.bfloat16, 300)])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_channels_without_a_kernel_take_pytorchs_operations(dtype, c, direction, monkeypatch):
    monkeypatch.setattr(drop_in.trimul, "triangle_multiplication", None)
    monkeypatch.setattr(family, "said", set())
    with pytest.warns(UserWarning, match=f"{c} channels"):
        assert not violations(*problem(dtype, 3, c, direction))


@pytest.mark.parametrize("c", [16, 24])
def test_weights_may_have_another_dtype_than_x(c):
    ours, _, (x, *weights) = problem(torch.float32, 5, c)
    mixed = [w.bfloat16().requires_grad_() for w in weights]
    out = ours(x, *mixed)
    assert torch.allclose(out, ours(x, *(w.float() for w in mixed)), atol=1e-5) and out.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.sum(), mixed))


def test_saved_tensors_may_come_back_contiguous():
    _, _, tensors = problem(torch.float32, 5)
    mask = torch.eye(5).cumsum(0)[None].mT

    def ours(x, *weights):
        return update(x, "outgoing", mask, *weights)
    with packed_anew():
        found = gradients(ours, tensors)
    assert equal(found, gradients(ours, tensors))


def drawn(d=16):
    """x, a mask, and all weights of hidden width d by their names."""
    torch.manual_seed(2)
    sizes = dict(norm_in=(16,), p_in=(2 * d, 16), g_in=(2 * d, 16), norm_out=(d,), p_out=(16, d),
                 g_out=(16, 16))
    given = {f"{name}_weight": torch.randn(size) / len(size) ** 2 for name, size in sizes.items()}
    given |= {f"{name}_bias": torch.randn(size[:1]) for name, size in sizes.items()}
    return torch.randn(2, 5, 5, 16), (torch.rand(2, 5, 5) > 0.3).float(), given


@pytest.mark.filterwarnings("ignore:.*and 24 within")
@pytest.mark.parametrize("direction, d", [("outgoing", 16), ("incoming", 16), ("incoming", 24)])
def test_the_names_of_cuequivariance(direction, d):
    x, mask, given = drawn(d)
    expected = by_hand(x, direction, mask, **given)
    assert torch.allclose(update(x, direction, mask, **given), expected, atol=1e-4)
    needed = {name: t for name, t in given.items() if t.dim() == 2}
    usual = {name: torch.full_like(t, name.startswith("norm") and name.endswith("weight"))
             for name, t in given.items() if name not in needed}
    expected = by_hand(x, direction, torch.ones(2, 5, 5), **needed, **usual)
    assert torch.allclose(update(x, direction, None, **needed), expected, atol=1e-4)


def test_x_and_mask_of_two_to_six_dimensions():
    x, mask, given = drawn()
    twice = [torch.stack([t, t]) for t in (x, mask)]
    expected, alike, one = (by_hand(some, "outgoing", present, **given) for some, present in (
        (x, mask), (x, mask[:1]), (x[1:, :1, :1], mask[1:, :1, :1])))
    for some, present, out in (
            (x[1], mask[1], expected[1]), (x[1], mask[None, None, 1], expected[1]), (x, mask[0], alike),
            (x[:, None], mask, expected[:, None]), (x[1, 0, :1], mask[1, 0, :1], one[0, 0]),
            (twice[0][None], twice[1], torch.stack([expected, expected])[None])):
        torch.testing.assert_close(update(some, "outgoing", present, **given), out, atol=1e-4, rtol=1e-4)


def test_precisions_and_what_is_refused():
    x, mask, given = drawn()
    expected = update(x, "outgoing", mask, **given)
    for precision in (None, "default", "NONE", 0, -1):
        assert torch.equal(update(x, "outgoing", mask, **given, precision=precision), expected)
    for precision in ("ieee", "bfloat16", "mxfp8", 3):
        with pytest.raises(ValueError, match=f"no precision {precision!r}"):
            update(x, "outgoing", mask, **given, precision=precision)
    for x_shape, mask_shape, match in (((2, 5, 5), (5, 4), "mask"), ((2, 5, 5), (4, 2, 5, 5), "mask"),
                                       ((1, 5, 5), (3, 5, 5), "mask"), ((2, 3, 5), (3, 5), "x is")):
        with pytest.raises(ValueError, match=match):
            update(torch.ones(*x_shape, 16), "outgoing", torch.ones(mask_shape), **given)
    with pytest.raises(ValueError, match="p_in_weight is missing"):
        update(x)


@pytest.mark.parametrize("B, S", [(0, 5), (1, 0)])
def test_of_nothing_there_is_nothing(B, S):
    ours, _, (x, *weights) = problem(torch.bfloat16, max(1, S), masked=False)
    out, *found = gradients(ours, [x.new_empty(B, S, S, x.shape[-1]), *weights])
    assert out.numel() == 0 and not any(each.any() for each in found)
