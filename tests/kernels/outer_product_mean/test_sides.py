"""Both sides of an outer product in Triton's interpreter: outputs and gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels.outer_product_mean import sides as outer_sides
from tests.kernels import references
from tests.kernels.rule import in_dtypes, same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # shape of x, channels of a side
    "two samples, odd": ((2, 3, 7, 32), 16),
    "several tiles": ((1, 3, 70, 16), 32),
    "many channels": ((1, 2, 37, 128), 16),
}
def problem(dtype, shape, h):
    """(ours, plain, tensors) of a case; the result is both sides and what is handed on, squared."""
    torch.manual_seed(0)
    c = shape[-1]
    sizes, scales = (shape, (c,), (c,), (2 * h, c), (2 * h,)), (1, 0.1, 0.1, c ** -0.5, 1)
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]
    tensors[1] += 1

    def joined(function):
        def call(*given):
            left, right, x = function(*given)
            return torch.cat([left, right, x.square().to(left.dtype)], -1)
        return call
    tensors = [t.to(dtype) for t in tensors]
    return joined(outer_sides.side_projection), joined(references.side_projection), tensors


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that small problems have several shares of several tiles, too."""
    monkeypatch.setattr(outer_sides, "PROGRAMS", 3)


@pytest.mark.sample
@pytest.mark.parametrize("case, dtype", [
    pytest.param(case, dtype, marks=[pytest.mark.slow] * (case == "many channels"))
    for case, dtype in in_dtypes(CASES)])
def test_forward_and_gradients(case, dtype):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 5))
def test_every_tile(number, monkeypatch):
    def chosen(kernel, shape, candidates):
        return candidates[number % len(candidates)]
    monkeypatch.setattr(outer_sides.tuner, "chosen", chosen)
    monkeypatch.setattr(outer_sides.tuner, "launch", lambda *given: given[-1](chosen(*given[:-1])))
    assert not violations(*problem(torch.bfloat16, *CASES["several tiles"]))


def test_tiles_that_were_measured_after_the_graph_was_made(monkeypatch):
    """As many parts as the graph has room for, which have the same sum."""
    monkeypatch.setattr(outer_sides, "shares", lambda *_: 2)
    assert not violations(*problem(torch.float32, *CASES["several tiles"]))


def test_shares_hold_all_positions():
    for positions in (0, 1, 16, 17, 48, 49, 1000):
        share, many = outer_sides.split_positions(positions, dict(BM=16))
        assert share % 16 == 0 and 1 <= many <= 3 and (many - 1) * share < max(1, positions) <= many * share


@pytest.mark.slow
def test_under_compile_checkpoint_and_no_grad():
    ours, _, tensors = problem(torch.float32, *CASES["two samples, odd"])
    assert same_in_every_mode(ours, tensors, unused=0)


def test_autocast_rounds_the_sides_and_not_what_is_handed_on():
    *_, tensors = problem(torch.float32, *CASES["two samples, odd"])
    given = [t.requires_grad_() for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        left, right, x = outer_sides.side_projection(*given)
    assert left.dtype == right.dtype == torch.bfloat16 and torch.equal(x, given[0])
    found = torch.autograd.grad((left + right).sum().float() + x.sum(), given)
    assert all(d.dtype == torch.float32 for d in found)


def test_what_the_kernels_would_misread_is_refused():
    def call(c=16, h=16, x=None, **wrong):
        sizes = dict(norm_weight=c, norm_bias=c, weight=(2 * h, c), bias=2 * h) | wrong
        given = [torch.ones(size) for size in (x or (1, 2, 3, c), *sizes.values())]
        return outer_sides.side_projection(*given)
    call()
    for wrong, message in ((dict(c=48), "48 channels to sides of 16"), (dict(h=8), "channels to sides of 8"),
                           (dict(h=64), "channels to sides of 64"),
                           (dict(c=256), "256 channels"), (dict(weight=(33, 16), bias=33), "sides of 16.5"),
                           (dict(x=(1, 2, 3, 32)), "x is"), (dict(norm_weight=8), "norm_weight is"),
                           (dict(norm_bias=8), "norm_bias is"), (dict(bias=16), "bias is")):
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    with pytest.raises(ValueError, match="float64"):
        outer_sides.side_projection(*problem(torch.float64, *CASES["many channels"])[2])
