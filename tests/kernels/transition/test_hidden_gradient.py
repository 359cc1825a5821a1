"""The gradient of a hidden layer in Triton's interpreter: the 3x rule."""
import pytest
import torch

from fusion_lab.kernels.transition import hidden_gradient
from tests.kernels import references
from tests.kernels.rule import violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # shape of x, hidden units
    "two tiles, odd": ((2, 5, 7, 32), 128),
    "fewest channels, several shares": ((1, 3, 130, 16), 64),
    "one position": ((1, 1, 1, 128), 512),
    "whole tiles": ((1, 16, 64, 16), 128),
}
def problem(dtype, shape, units):
    """(ours, plain, tensors) of a case"""
    torch.manual_seed(0)
    c = shape[-1]
    sizes, scales = [shape, (units, c), (units,), (c, units), (c,)], [1, c ** -0.5, 1, units ** -0.5, 1]
    tensors = [(scale * torch.randn(size)).to(dtype) for size, scale in zip(sizes, scales, strict=True)]
    return hidden_gradient.two_layers, references.two_layers, tensors


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that small problems have several shares of several tiles, too."""
    monkeypatch.setattr(hidden_gradient, "PROGRAMS", 16)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_three_times_the_error_of_plain_pytorch(name, dtype):
    assert not violations(*problem(dtype, *CASES[name]))


@pytest.mark.parametrize("units", [64, 192, 256])
def test_every_tile_fills_the_gradient(units, monkeypatch):
    """Also of numbers of units that are multiples of 64 alone, where a tuner must not choose wider chunks."""
    ours, plain, tensors = problem(torch.bfloat16, (1, 1, 5, 256), units)
    tiles = hidden_gradient.looked_up(5, 256, units, torch.bfloat16)[2]
    assert any(tile["BK"] == 128 for tile in tiles) == (units == 256)
    for tile in tiles:
        monkeypatch.setattr(hidden_gradient.tuner, "chosen", lambda *_, tile=tile: tile)
        assert not violations(ours, plain, tensors)


def test_no_position():
    x, w = torch.ones(0, 5, 16, requires_grad=True), torch.ones(64, 16)
    b = torch.ones(64, requires_grad=True)
    hidden_gradient.two_layers(x, w, b, w.t(), torch.ones(16)).sum().backward()
    assert x.grad.shape == x.shape and not b.grad.any()


def test_what_the_kernel_would_misread_is_refused():
    x, w = torch.ones(3, 48), torch.ones(64, 48)
    with pytest.raises(ValueError, match="from 48 channels"):
        hidden_gradient.two_layers(x, w, torch.ones(64), w.t(), torch.ones(48))
    x, w = torch.ones(3, 16), torch.ones(70, 16)
    with pytest.raises(ValueError, match="70 hidden units are no multiple of 64"):
        hidden_gradient.two_layers(x, w, torch.ones(70), w.t(), torch.ones(16))
    with pytest.raises(ValueError, match="b1 is"):
        hidden_gradient.two_layers(x, w[:64], torch.ones(70), w[:64].t(), torch.ones(16))
