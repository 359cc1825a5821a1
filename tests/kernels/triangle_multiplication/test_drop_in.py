"""Triangle multiplication under cuEquivariance's name: by its definition, and in PyTorch's operations."""
import pytest
import torch

from fusion_lab.kernels import calls
from fusion_lab.kernels.triangle_multiplication import drop_in
from tests.kernels.problems import multiplication_from_python as problem
from tests.kernels.rule import equal, gradients, packed_anew, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]
update = drop_in.triangle_multiplicative_update


@pytest.mark.parametrize("dtype, c", [(torch.bfloat16, 24), (torch.float32, 12), (torch.bfloat16, 300)])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_channels_without_a_kernel_take_pytorchs_operations(dtype, c, direction, monkeypatch):
    monkeypatch.setattr(drop_in, "FromPython", None)
    monkeypatch.setattr(calls, "said", set())
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


def by_hand(x, direction, mask, norms, p_in, g_in, p_out, g_out):
    """The definition, element by element of the sum."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], *norms[:2])
    sides = (y @ p_in.T * (y @ g_in.T).sigmoid() * mask[..., None]).chunk(2, dim=-1)
    if direction == "incoming":
        sides = [side.transpose(1, 2) for side in sides]
    product = sum(sides[0][:, :, None, k] * sides[1][:, None, :, k] for k in range(x.shape[1]))
    product = torch.nn.functional.layer_norm(product, x.shape[-1:], *norms[2:])
    return product @ p_out.T * (y @ g_out.T).sigmoid()


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_the_names_of_cuequivariance(direction):
    torch.manual_seed(2)
    x, mask = torch.randn(2, 5, 5, 16), (torch.rand(2, 5, 5) > 0.3).float()
    norms, matrices = torch.randn(4, 16), [torch.randn(rows, 16) / 4 for rows in (32, 32, 16, 16)]
    names = "p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight"
    products = dict(zip(names, matrices, strict=True))
    given = dict(norm_in_weight=norms[0], norm_in_bias=norms[1], norm_out_weight=norms[2],
                 norm_out_bias=norms[3], **products)
    expected = by_hand(x, direction, mask, norms, *matrices)
    assert torch.allclose(update(x, direction, mask, **given), expected, atol=1e-4)
    without_batch = update(x[1], direction, mask[1], **given)
    assert torch.allclose(without_batch, expected[1], atol=1e-4)
    one, zero = torch.ones(16), torch.zeros(16)
    expected = by_hand(x, direction, torch.ones(2, 5, 5), [one, zero, one, zero], *matrices)
    assert torch.allclose(update(x, direction, None, **products), expected, atol=1e-4)
    for x_shape, mask_shape, match in (((2, 5, 5), (5, 4), "mask"), ((2, 5, 5), (4, 2, 5, 5), "mask"),
                                       ((1, 5, 5), (3, 5, 5), "mask"), ((2, 3, 5), (3, 5), "x is")):
        with pytest.raises(ValueError, match=match):
            update(torch.ones(*x_shape, 16), direction, torch.ones(mask_shape), **given)
    with pytest.raises(ValueError, match="p_in_weight is missing"):
        update(x)


def test_biases_by_cuequivariances_names():
    x, zero, identity = torch.zeros(1, 3, 3, 16), torch.zeros(16, 16), torch.eye(16)
    p_in, right = torch.zeros(32), torch.arange(16.0)
    p_in[:16], p_in[16:] = 2, right
    out = update(x, p_in_weight=torch.zeros(32, 16), g_in_weight=torch.zeros(32, 16), p_in_bias=p_in,
                 p_out_weight=identity, p_out_bias=torch.full((16,), 3.0), g_out_weight=zero,
                 g_out_bias=torch.full((16,), 50.0))
    product = 3 * (2 * 0.5) * (right * 0.5)  # three residues; gates of sigmoid(0)
    expected = (product - product.mean()) / product.std(correction=0) + 3
    assert torch.allclose(out, expected.expand_as(out), atol=1e-4)


@pytest.mark.parametrize("B, S", [(0, 5), (1, 0)])
def test_of_nothing_there_is_nothing(B, S):
    ours, _, (x, *weights) = problem(torch.bfloat16, max(1, S), masked=False)
    out, *found = gradients(ours, [x.new_empty(B, S, S, x.shape[-1]), *weights])
    assert out.numel() == 0 and not any(each.any() for each in found)
