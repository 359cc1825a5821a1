"""SwiGLU and rotary positions of packed projections: numbers and derivatives, in Triton's
interpreter."""

import pytest
import torch

from tests.kernels.rule import in_dtypes, violations

pytest.importorskip("companions.kernels", reason="this companion was deleted")
from companions.kernels import gated_rotary

pytestmark = [pytest.mark.interpreted, pytest.mark.slow, pytest.mark.full]

CASES = {  # rows and channels F; or B, S, heads H and G, width D
    "odd": ("swiglu", (2, 3), 77), "two tiles": ("swiglu", (3,), 1100), "one channel": ("swiglu", (5,), 1),
    "grouped, odd": ("rotary", 2, 7, 3, 1, 6), "several tiles": ("rotary", 2, 37, 4, 2, 32),
    "one pair": ("rotary", 1, 5, 2, 2, 2), "12 pairs": ("rotary", 1, 9, 4, 1, 24),
}
SWIGLU, GROUPED = "odd", "grouped, odd"
def problem(dtype, function, *sizes):
    """(ours, plain, tensors)"""
    torch.manual_seed(0)
    if function == "swiglu":
        shape, channels = sizes
        packed = 3 * torch.randn(*shape, 2 * channels).to(dtype)
        return gated_rotary.swiglu, gated_rotary.reference_swiglu, [packed]
    B, S, H, G, D = sizes
    angles = 6 * torch.rand(S, D // 2)
    angles = torch.stack([angles.cos(), angles.sin()])

    def joined(rotary):
        return lambda packed: torch.cat([x.flatten() for x in rotary(packed, angles, H, G)])
    return (joined(gated_rotary.rotary), joined(gated_rotary.reference_rotary),
            [torch.randn(B, S, (H + 2 * G) * D).to(dtype)])


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", in_dtypes(CASES))
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


def test_gates_far_from_zero():
    """Where exponentials overflow, silu is 0 or the gate, and its slope 0 or 1."""
    gate = torch.tensor([-3e38, -1000.0, -90.0, 90.0, 1000.0], requires_grad=True)
    found = gated_rotary.swiglu(torch.stack([gate, torch.ones(5)], 1))[:, 0]
    slopes, = torch.autograd.grad(found.sum(), gate)
    assert found.tolist() == [0, 0, 0, 90, 1000] and slopes.tolist() == [0, 0, 0, 1, 1]


LAYOUTS = {
    "heads before positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every second position": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
    "one number for all": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout(layout):
    """Of one of them, or all."""
    (_, B, S, H, G, D), change = CASES["several tiles"], LAYOUTS[layout]
    plain, angles = [torch.randn(B, S, heads, D) for heads in (H, G, G)], torch.randn(2, S, D // 2)
    changed = [change(x) for x in plain]
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        given = [changed[i] if i in which else plain[i] for i in range(3)]
        found = gated_rotary.rotated_backward(*given, angles)
        assert not all(x.is_contiguous() for x in given) and found.shape == (B, S, (H + 2 * G) * D)
        assert torch.equal(found, gated_rotary.rotated_backward(*(x.contiguous() for x in given), angles))


def test_layouts_of_what_is_given():
    packed, angles = torch.randn(3, 24, 5).mT, torch.randn(2, 9, 3)[:, :5]
    found = gated_rotary.rotary(packed, angles, 2, 1)
    for x, plain in zip(found, gated_rotary.reference_rotary(packed, angles, 2, 1), strict=True):
        torch.testing.assert_close(x, plain)
    torch.testing.assert_close(gated_rotary.swiglu(packed), gated_rotary.reference_swiglu(packed))


def test_heads_lie_behind_positions():
    """So that attention's result does, too, and no copy stands before the projection of it."""
    q, k, v = gated_rotary.rotary(torch.randn(2, 5, 4 * 8), torch.randn(2, 5, 4), 2, 1)
    assert q.shape == (2, 2, 5, 8) and k.shape == v.shape == (2, 1, 5, 8)
    assert q.stride() == (80, 8, 16, 1) and k.transpose(1, 2).is_contiguous()


def test_no_position():
    for shape in ((0, 5, 16), (2, 0, 16)):
        packed = torch.ones(shape, requires_grad=True)
        found = gated_rotary.swiglu(packed), *gated_rotary.rotary(packed, torch.ones(2, shape[1], 2), 2, 1)
        sum(x.sum() for x in found).backward()
        assert packed.grad.shape == shape


def test_what_would_be_misread_is_refused():
    packed, angles = torch.zeros(2, 5, 24), torch.zeros(2, 5, 3)
    for call, message in (
            (lambda: gated_rotary.swiglu(packed[..., :23]), "23 channels, an odd number"),
            (lambda: gated_rotary.swiglu(packed.double()), "in float64"),
            (lambda: gated_rotary.rotary(packed.double(), angles, 2, 1), "in float64"),
            (lambda: gated_rotary.rotary(packed, angles, 3, 1), "no 5 heads of even width"),
            (lambda: gated_rotary.rotary(packed, angles, 4, 2), "no 8 heads of even width"),
            (lambda: gated_rotary.rotary(packed, angles[:, :4], 2, 1), r"angles is \(2, 4, 3\)"),
            (lambda: gated_rotary.rotary(packed, angles, 4, 1), r"but must be \(2, 5, 2\)")):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("case", [SWIGLU, GROUPED])
def test_second_derivatives_are_refused(case):
    ours, _, [packed] = problem(torch.float32, *CASES[case])
    gradient, = torch.autograd.grad(ours(packed.requires_grad_()).square().sum(), packed, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("case", [SWIGLU, GROUPED])
def test_compiles_in_one_piece(case):
    ours, plain, tensors = problem(torch.float32, *CASES[case])
    assert not violations(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, tensors)
