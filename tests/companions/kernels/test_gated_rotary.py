"""SwiGLU and rotary positions of packed projections: numbers and derivatives, in Triton's interpreter."""
import pytest
import torch
import torch.nn.functional as F

from companions.kernels import gated_rotary
from evoformer_kernels.swiglu import swiglu
from tests.kernels.rule import in_dtypes, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.slow, pytest.mark.full]

CASES = {  # rows and channels F; or B, S, heads H and G, width D
    "odd": ("swiglu", (2, 3), 77), "two tiles": ("swiglu", (3,), 1100), "one channel": ("swiglu", (5,), 1),
    "grouped, odd": ("rotary", 2, 7, 3, 1, 6), "several tiles": ("rotary", 2, 37, 4, 2, 32),
    "one pair": ("rotary", 1, 5, 2, 2, 2), "12 pairs": ("rotary", 1, 9, 4, 1, 24),
}
SWIGLU, GROUPED = "odd", "grouped, odd"


def plain_swiglu(packed):
    gate, up = packed.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotary(packed, angles, heads, kv_heads):
    q, k, v = packed.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2).split(
        [heads, kv_heads, kv_heads], dim=1)
    cos, sin = angles.to(packed.dtype)

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated(q), rotated(k), v


def problem(dtype, function, *sizes):
    """(ours, plain, tensors)"""
    torch.manual_seed(0)
    if function == "swiglu":
        shape, channels = sizes
        packed = 3 * torch.randn(*shape, 2 * channels).to(dtype)
        return swiglu, plain_swiglu, [packed]
    B, S, H, G, D = sizes
    angles = 6 * torch.rand(S, D // 2)
    angles = torch.stack([angles.cos(), angles.sin()])

    def joined(rotary):
        return lambda packed: torch.cat([x.flatten() for x in rotary(packed, angles, H, G)])
    return (joined(gated_rotary.rotary), joined(plain_rotary),
            [torch.randn(B, S, (H + 2 * G) * D).to(dtype)])


@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


def test_gates_far_from_zero():
    """Where exponentials overflow, silu is 0 or the gate, and its slope 0 or 1."""
    gate = torch.tensor([-3e38, -1000.0, -90.0, 90.0, 1000.0], requires_grad=True)
    found = swiglu(torch.stack([gate, torch.ones(5)], 1))[:, 0]
    slopes, = torch.autograd.grad(found.sum(), gate)
    assert found.tolist() == [0, 0, 0, 90, 1000] and slopes.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("layout", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # heads before positions
    lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),  # channels apart
    lambda x: x[:1, :1, :1, :1].expand(x.shape)])
def test_gradients_of_any_layout(layout):
    _, B, S, H, G, D = CASES["several tiles"]
    given, angles = [layout(torch.randn(B, S, heads, D)) for heads in (H, G, G)], torch.randn(2, S, D // 2)
    found = gated_rotary.rotated_backward(*given, angles)
    assert not any(x.is_contiguous() for x in given)
    assert torch.equal(found, gated_rotary.rotated_backward(*(x.contiguous() for x in given), angles))


def test_heads_lie_behind_positions():
    """So that attention's result does, too, and no copy stands before the projection of it."""
    q, k, v = gated_rotary.rotary(torch.randn(2, 5, 4 * 8), torch.randn(2, 5, 4), 2, 1)
    assert q.shape == (2, 2, 5, 8) and k.shape == v.shape == (2, 1, 5, 8)
    assert q.stride() == (80, 8, 16, 1) and k.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("case", [SWIGLU, GROUPED])
def test_second_derivatives_are_refused(case):
    ours, _, [packed] = problem(torch.float32, *CASES[case])
    gradient, = torch.autograd.grad(ours(packed.requires_grad_()).square().sum(), packed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|swiglu has no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("case", [SWIGLU, GROUPED])
def test_compiles_in_one_piece(case):
    ours, plain, tensors = problem(torch.float32, *CASES[case])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
