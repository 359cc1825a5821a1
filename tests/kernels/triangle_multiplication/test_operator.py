"""Triangle multiplication in Triton's interpreter: output, gradients by the 3x rule."""
import pytest
import torch

from fusion_lab.kernels.triangle_multiplication import operator as trimul
from fusion_lab.measuring.counters import OpCounter
from tests.kernels.rule import same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, S, c, outgoing, dims of the mask, residual, dim that dropout shares, biases
    "outgoing": (2, 13, 32, True, 2, "own", 1, True),
    "incoming": (1, 13, 32, False, 2, "own", 2, True),
    "both sides masked": (2, 5, 16, True, 3, "other", None, True),
    "update alone": (1, 17, 16, False, 3, None, None, False),
    "no mask": (1, 16, 64, True, None, "own", None, True),
    "small": (1, 5, 16, True, 2, "own", 1, True),
    "one residue": (1, 1, 16, False, 2, None, 1, True),
    "a whole tile": (2, 16, 16, False, 2, "own", 1, True),
    "parts of lines": (1, 64, 16, True, 2, "own", 2, True),
    "whole tiles, but not of lines": (1, 48, 16, False, 3, "own", 1, True),
}
RARER = ("both sides masked", "update alone", "parts of lines", "whole tiles, but not of lines")


def problem(dtype, B, S, c, outgoing, masked, kind, shared, biased):
    """(ours, plain, tensors) of a case."""
    torch.manual_seed(0)

    def near(mean, *size, spread=0.3):
        return (mean + spread * torch.randn(size)).to(dtype)
    matrices = [near(0, rows, c, spread=c ** -0.5) for rows in (4 * c, c, c)]
    tensors = [near(0, B, S, S, c, spread=1), near(1, c), near(0, c), matrices[0], near(0, 4 * c),
               near(1, c), near(0, c), matrices[1], near(0, c), matrices[2], near(0, c),
               near(0, B, S, S, c, spread=1)]
    mask = None if masked is None else torch.rand([B, S, S][:masked]) > 0.25
    drop = None if shared is None else (torch.rand([(B, 1, S, c), (B, S, 1, c)][shared - 1]) > 0.3) / 0.7

    def run(function):
        def call(pair, *rest):
            *weights, other = rest
            weights = [w if biased or n not in (3, 7, 9) else None for n, w in enumerate(weights)]
            residual = {"own": pair, "other": other, None: None}[kind]
            return function(pair, *weights, mask, outgoing, 1e-5, residual,
                            None if drop is None else drop.to(pair.dtype))
        return call
    return run(trimul.triangle_multiplication), run(trimul.reference), tensors


@pytest.mark.sample
@pytest.mark.parametrize("dtype, case", [
    *((torch.bfloat16, case) for case in CASES if case not in RARER), (torch.float16, "small"),
    (torch.float32, "small"), *(pytest.param(torch.bfloat16, case, marks=pytest.mark.slow) for case in RARER),
    *(pytest.param(torch.float32, case, marks=pytest.mark.slow) for case in CASES if case != "small")])
def test_forward_and_gradients(dtype, case):
    assert not violations(*problem(dtype, *CASES[case]))


def test_autocast_rounds_products_and_not_the_residual():
    ours, plain, tensors = problem(torch.float32, *CASES["small"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*tensors) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]


@pytest.mark.slow
def test_under_compile_checkpoint_and_no_grad():
    ours, _, tensors = problem(torch.float32, *CASES["small"])
    assert same_in_every_mode(ours, tensors, unused=1)


def test_saves_what_it_says():
    """pair, LN(pair), LN(product); product and sides on planes of 16 by 16, as statistics are."""
    ours, _, tensors = problem(torch.float32, 1, 13, 32, True, None, "own", None, True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()), lambda t: t):
        ours(*(t.requires_grad_() for t in tensors))
    weights = sum(t.numel() for t in tensors[1:-1])
    assert sum(sizes) == 3 * tensors[0].numel() + weights + (3 * 32 + 4) * 256


@pytest.mark.parametrize("keep, passes", {True: 6, False: 4}.items())
def test_forward_holds_nothing_that_nobody_reads(keep, passes, monkeypatch):
    """x, product, both sides, LN(product), the result; without backward these come when sides are gone."""
    monkeypatch.setattr(trimul.Call, "run", lambda *_, **__: None)
    pair, weights = torch.zeros(1, 16, 16, 32), [torch.zeros(32, 32)] * 10
    with OpCounter() as counter:
        trimul.forward(pair, weights, None, None, pair, True, 1e-5, keep)
    assert counter.peak == passes * pair.nbytes + 4 * 4 * 256


def test_bad_arguments_are_named():
    pair, weights = torch.zeros(1, 4, 4, 16), [torch.zeros(s) for s in (
        16, 16, (64, 16), 64, 16, 16, (16, 16), 16, (16, 16), 16)]
    for wrong, message in [(dict(mask=torch.ones(1, 5)), r"mask is \(1, 5\), but must be \(1, 4\) or"),
                           (dict(residual=torch.zeros(1, 4, 4, 8)), "residual is"),
                           (dict(drop=torch.ones(1, 4, 4, 16)), "drop is")]:
        with pytest.raises(ValueError, match=message):
            trimul.triangle_multiplication(pair, *weights, **wrong)
    with pytest.raises(ValueError, match="no Triton triangle multiplication of 24 channels"):
        trimul.triangle_multiplication(torch.zeros(1, 4, 4, 24), *weights)
