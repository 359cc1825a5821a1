"""Triangle multiplication under cuEquivariance's name: by its definition, under autocast, by kept plans."""
import pytest
import torch

from fusion_lab.kernels import eager
from fusion_lab.kernels.triangle_multiplication import drop_in
from fusion_lab.kernels.triangle_multiplication import operator as trimul
from tests.kernels.rule import a_plan_changes_no_bit, refuses_more_derivatives, same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]


def problem(dtype, S=5, c=16, direction="outgoing", masked=True):
    """(ours, plain, tensors): ours is the function; tensors: x and its weights in the order of WEIGHTS."""
    torch.manual_seed(3)
    sizes = [(c,), (c,), (2 * c, c), (2 * c,), (2 * c, c), (2 * c,), (c,), (c,), (c, c), (c,), (c, c), (c,)]
    tensors = [torch.randn(1, S, S, c), *(torch.randn(size) * size[-1] ** -0.5 for size in sizes)]
    mask = torch.rand(1, S, S) > 0.25 if masked else None

    def ours(x, *weights):
        return drop_in.triangle_multiplicative_update(x, direction, mask, *weights)

    def plain(x, *weights):
        (norm, norm_bias, p_in, p_in_bias, g_in, g_in_bias, center, center_bias, *out) = weights
        packed = torch.cat([p_in, g_in]), torch.cat([p_in_bias, g_in_bias])
        return trimul.reference(x, norm, norm_bias, *packed, center, center_bias, *out, mask,
                                direction == "outgoing")
    return ours, plain, [t.to(dtype) for t in tensors]


@pytest.mark.sample
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_forward_and_gradients_by_a_plan_and_by_the_one_that_was_kept(direction):
    drop_in.Plan.kept.clear()
    for _ in range(2):
        assert not violations(*problem(torch.bfloat16, direction=direction))
    assert len(drop_in.Plan.kept) == 1


@pytest.mark.parametrize("dtype, c", [(torch.bfloat16, 24), (torch.float32, 12), (torch.bfloat16, 300)])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_channels_without_a_kernel_take_pytorchs_operations(dtype, c, direction, monkeypatch):
    monkeypatch.setattr(drop_in, "planned", None)
    monkeypatch.setattr(eager, "said", set())
    with pytest.warns(UserWarning, match=f"{c} channels in .* runs in PyTorch's operations"):
        assert not violations(*problem(dtype, 3, c, direction))


def test_weights_of_another_dtype_take_pytorchs_operations_too():
    ours, _, (x, *weights) = problem(torch.float32, c=24)
    mixed = [w.bfloat16().requires_grad_() for w in weights]
    out = ours(x, *mixed)
    assert torch.equal(out, ours(x, *(w.float() for w in mixed))) and out.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(out.sum(), mixed))


def calls(dtype, S=5):
    """(function(x, *weights) by a plan, the same by operators, tensors)"""
    _, _, tensors = problem(dtype, S)
    mask = (torch.rand(1, S, S) > 0.25).float()

    def by_plan(x, *weights):
        return drop_in.triangle_multiplicative_update(x, "outgoing", mask, *weights)

    def by_operators(x, *weights):
        return drop_in.by_whole_function(trimul.triangle_multiplication, x, mask, weights, True, 1e-5)
    return by_plan, by_operators, tensors


def test_a_plan_gives_the_bits_of_the_operators():
    assert a_plan_changes_no_bit(*calls(torch.bfloat16))


@pytest.mark.slow
def test_under_compile_checkpoint_and_no_grad():
    ours, _, tensors = problem(torch.float32)
    assert same_in_every_mode(ours, tensors, unused=0)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low):
    ours, plain, tensors = problem(torch.float32)
    given = [t.requires_grad_() for t in tensors]
    with torch.autocast("cpu", low):
        out = ours(*given)
    assert out.dtype == low
    gradients = torch.autograd.grad(out.sum(), given)
    assert [g.dtype for g in gradients] == [torch.float32] * len(given)
    with torch.autocast("cpu", low):
        theirs = plain(*given)
    exact = plain(*(t.double() for t in given))
    assert (out - exact).abs().max() <= 3 * (theirs - exact).abs().max()


def test_second_derivatives_and_transforms_are_refused():
    ours, _, tensors = problem(torch.float32)
    assert refuses_more_derivatives(ours, tensors, drop_in.NAME)


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
    norms = [torch.randn(16) for _ in range(4)]
    matrices = [torch.randn(rows, 16) / 4 for rows in (32, 32, 16, 16)]

    def call(x, mask, **norms):
        names = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
        return drop_in.triangle_multiplicative_update(x, direction, mask, **norms,
                                                     **dict(zip(names, matrices, strict=True)))
    given = dict(norm_in_weight=norms[0], norm_in_bias=norms[1], norm_out_weight=norms[2],
                 norm_out_bias=norms[3])
    expected = by_hand(x, direction, mask, norms, *matrices)
    assert torch.allclose(call(x, mask, **given), expected, atol=1e-4)
    assert torch.allclose(call(x[1], mask[1], **given), expected[1], atol=1e-4)  # without a batch
    one, zero = torch.ones(16), torch.zeros(16)
    assert torch.allclose(call(x, None), by_hand(x, direction, torch.ones(2, 5, 5), [one, zero, one, zero],
                                                 *matrices), atol=1e-4)
    for x_shape, mask_shape, match in (((2, 5, 5), (5, 4), "mask"), ((2, 5, 5), (4, 2, 5, 5), "mask"),
                                       ((1, 5, 5), (3, 5, 5), "mask"), ((2, 3, 5), (3, 5), "x is")):
        with pytest.raises(ValueError, match=match):
            call(torch.ones(*x_shape, 16), torch.ones(mask_shape), **given)
    with pytest.raises(ValueError, match="p_in_weight is missing"):
        drop_in.triangle_multiplicative_update(x)


def test_biases_by_cuequivariances_names():
    x, zero, identity = torch.zeros(1, 3, 3, 16), torch.zeros(16, 16), torch.eye(16)
    p_in, right = torch.zeros(32), torch.arange(16.0)
    p_in[:16], p_in[16:] = 2, right
    out = drop_in.triangle_multiplicative_update(
        x, p_in_weight=torch.zeros(32, 16), g_in_weight=torch.zeros(32, 16), p_in_bias=p_in,
        p_out_weight=identity, p_out_bias=torch.full((16,), 3.0), g_out_weight=zero,
        g_out_bias=torch.full((16,), 50.0))
    product = 3 * (2 * 0.5) * (right * 0.5)  # three residues; gates of sigmoid(0)
    expected = (product - product.mean()) / product.std(correction=0) + 3
    assert torch.allclose(out, expected.expand_as(out), atol=1e-4)
