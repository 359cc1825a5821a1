"""Attention sub-layers in Triton's interpreter: outputs, gradients by the 3x rule; mutants must fail."""
import pytest
import torch

from fusion_lab.kernels.attention import layer as attention_layer
from fusion_lab.kernels.attention import operator as attention_operator
from fusion_lab.kernels.attention import output_backward
from tests.kernels.rule import mutant, same_in_every_mode, violations

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

CASES = {  # B, X, Y, c, H, axis, what makes the bias, keys, x is the residual, dim that dropout shares
    "starting node": (2, 7, 7, 32, 2, 2, "own", True, True, 1),
    "ending node": (2, 7, 7, 32, 2, 1, "own", True, True, 2),
    "long rows": (1, 2, 67, 16, 1, 2, "given", True, True, None),
    "MSA rows": (2, 3, 11, 16, 2, 2, "given", True, True, 1),
    "columns": (1, 7, 5, 32, 2, 1, None, True, True, 3),
    "columns, no mask, update alone": (2, 5, 3, 16, 1, 1, None, False, False, None),
    "one wide head": (1, 3, 5, 64, 1, 2, None, True, True, 1),  # wider than a chunk of channels in float32
    "whole tiles": (2, 16, 16, 16, 1, 1, "own", True, True, 2),
    "wide heads": (1, 3, 5, 128, 2, 1, None, True, True, 2),
}
MUTANTS = {  # what is replaced by what, and the case that must notice
    "bias not transposed": ("own_bias.mT if axis == 1 else own_bias\n        padded",
                            "own_bias\n        padded", "ending node"),
    "its gradient not transposed": ("own_bias and ctx.settings[1] == 1", "False", "ending node"),
    "its gradient transposed": ("own_bias and ctx.settings[1] == 1", "own_bias", "starting node"),
    "a given bias's gradient transposed": ("own_bias and ctx.settings[1] == 1", "True", "long rows"),
    "bias without a gradient": ("(dbias, None) if own_bias", "(0 * dbias, None) if own_bias", "ending node"),
    "the residual's gradient forgotten": ("gradient if ctx.add else None", "None", "columns"),
    "no residual": ("x if add else None", "None", "columns"),
    "mask ignored": ("attention.padded_bias(bias, keys,", "attention.padded_bias(bias, None,", "columns"),
    "eps as an afterthought": ("head_weight, eps)\n        if", "head_weight, 0.1)\n        if", "columns"),
}
OF_THE_GATE = {  # the same in output_backward.py
    "gate bias forgotten": ("float32) + bias_tile", "float32) + 0 * bias_tile", "columns"),
    "derivative of the gate": ("dout_out * (1 - opening)", "dout_out * opening", "columns"),
    "gradient not gated": ("C, dout * opening)", "C, dout)", "columns"),
    "delta of the first head": ("h[None, :] * delta_strides[HEAD]", "0 * h[None, :]", "starting node"),
    "delta of the other axis": ("if axis == 1:", "if axis == 2:", "ending node"),
    "delta of a part of a head": ("delta_strides[HEAD], head_delta",
                                  "delta_strides[HEAD], tl.sum(dout_out, 1)", "one wide head"),
    "delta of all heads": ("head_delta = tl.zeros((BM,), tl.float32)\n\n", "\n\n", "wide heads"),
    "dropout forgotten": ("du_tile *= factors", "du_tile = du_tile + 0 * factors", "starting node"),
    "last position dropped": ("below(p, remaining)", "below(p, remaining - 1)", "columns"),
    "tiles: of the first line": ("(line % X).to(", "0 * (line % X).to(", "whole tiles"),
    "tiles: of one line": ("i // (BM // LINES) * delta_strides[ALONG_X]", "0 * i", "whole tiles"),
}


def problem(dtype, B, X, Y, c, heads, axis, maker, masked, add, shared, module=attention_layer):
    """(ours, plain, tensors) of a case; ours is the module's."""
    torch.manual_seed(0)
    length = (X, Y)[axis - 1]
    sizes = [(B, X, Y, c), (c,), (c,), (4 * c, c), (c,), (c, c), (c,), (heads, c), (B, heads, length, length)]
    scales = [1, 0.1, 0.1, c ** -0.5, 1, c ** -0.5, 1, c ** -0.5, 1]
    tensors = [scale * torch.randn(size) for size, scale in zip(sizes, scales, strict=True)]
    tensors[1] += 1
    keys = torch.rand(B, length) > 0.2 if masked else None
    drop = None if shared is None else (torch.rand([1 if d == shared else n for d, n in
                                                    enumerate((B, X, Y, c))]) > 0.3) / 0.7

    def run(function):
        def call(x, *rest):
            *weights, head_weight, bias = rest
            return function(x, *weights, heads, axis, bias if maker == "given" else None,
                            head_weight if maker == "own" else None, keys, 1e-5, x if add else None,
                            None if drop is None else drop.to(x.dtype))
        return call
    return run(module.attention_layer), run(attention_layer.reference), [t.to(dtype) for t in tensors]


@pytest.mark.sample
@pytest.mark.parametrize("dtype, case", [
    (torch.bfloat16, "ending node"), (torch.float32, "columns"),
    *(pytest.param(dtype, case, marks=pytest.mark.slow) for dtype, case in (
        *((torch.float32, case) for case in CASES if case != "columns"),
        (torch.bfloat16, "columns"), (torch.float16, "MSA rows")))])
def test_forward_and_gradients(dtype, case):
    assert not violations(*problem(dtype, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, tmp_path):
    old, new, case = MUTANTS[name]
    module = mutant(attention_layer, old, new, tmp_path)
    assert violations(*problem(torch.float32, *CASES[case], module=module))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_GATE)
def test_mutants_of_the_gate_s_backward_are_caught(name, tmp_path, monkeypatch):
    old, new, case = OF_THE_GATE[name]
    monkeypatch.setattr(attention_operator, "output_backward", mutant(output_backward, old, new, tmp_path))
    assert violations(*problem(torch.float32, *CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ending node", "long rows"])
def test_under_compile_checkpoint_and_no_grad(case):
    ours, _, tensors = problem(torch.float32, *CASES[case])
    assert same_in_every_mode(ours, tensors, unused=1)  # a bias, or what makes one


def test_autocast_rounds_products_and_not_the_residual():
    ours, plain, tensors = problem(torch.float32, *CASES["ending node"])
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        results = [function(*tensors) for function in (ours, plain)]
    errors = [(result - exact).abs().max() for result in results]
    assert results[0].dtype == torch.float32 and 1e-4 < errors[0] <= 3 * errors[1]


def test_flops_are_those_of_the_model():
    ours, _, tensors = problem(torch.float32, *CASES["columns, no mask, update alone"])
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        ours(*tensors)
    assert counter.get_total_flops() == 2 * 30 * 16 * (5 * 16) + 4 * 30 * 5 * 16
