"""What the kernels are given: vectors with gaps count as they are, wrong shapes are refused; the README's
example runs."""
import re

import pytest
import torch

from tests.kernels.attention import test_layer as layers
from tests.kernels.attention import test_operator as attention
from tests.kernels.outer_product_mean import test_layout as layouts
from tests.kernels.projections import test_projections as projections
from tests.kernels.rule import violations
from tests.kernels.transition import test_layer as transitions
from tests.kernels.triangle_multiplication import test_operator as multiplication
from tests.support import ROOT

pytestmark = [pytest.mark.interpreted, pytest.mark.full]

PROBLEMS = {
    "attention": attention.problem(torch.float32, *attention.CASES["columns"]),
    "sub-layer": layers.problem(torch.float32, *layers.CASES["columns"]),
    "norm and projection": projections.norm_problem(torch.float32, (1, 3, 4, 16), 16, 2),
    "outer layout": layouts.problem(torch.float32, 2, 3, 3, 8, 16, True),
    "transition": transitions.problem(torch.float32, (1, 3, 5, 16), 64, "own"),
    "multiplication": multiplication.problem(torch.float32, *multiplication.CASES["small"]),
}


def with_gaps(vector):
    """The same numbers, between those that must not be read."""
    return torch.stack([vector, torch.full_like(vector, torch.nan)], 1)[:, 0]


@pytest.mark.sample
@pytest.mark.parametrize("name", PROBLEMS)
def test_vectors_may_have_gaps(name):
    ours, plain, tensors = PROBLEMS[name]
    assert any(t.dim() == 1 for t in tensors)
    assert not violations(lambda *given: ours(*(with_gaps(t) if t.dim() == 1 else t for t in given)), plain,
                          tensors)


def empty(*sizes):
    return [torch.zeros(size) for size in sizes]


def layer(x=(1, 3, 3, 16), **wrong):
    """An attention sub-layer of two heads."""
    right = dict(norm_weight=(16,), norm_bias=(16,), weight=(64, 16), gate_bias=(16,), out_weight=(16, 16),
                 out_bias=(16,))
    given = {name: torch.zeros(size) for name, size in {**right, **wrong}.items()}
    return layers.attention_layer.attention_layer(torch.zeros(x), heads=2, axis=2, **given)


def attend(bias, keys):
    q, *given = empty((2, 3, 2, 5, 16), bias, keys)
    return attention.attention_operator.row_attention(q, q, q, *given)


def laid_out(**wrong):
    right = dict(left=(2, 3, 4, 8), right=(2, 3, 4, 8), weight=(16, 64), bias=(16,))
    return layouts.outer_layout.outer_layout(*(torch.zeros(size) for size in {**right, **wrong}.values()))


def norms(width=16, heads=16):
    x, vector, *weights = empty((1, 3, 4, 16), 16, (32, width), (2, heads))
    return projections.projections.norm_project(x, vector, vector, *weights, 1e-5)


BIAS, KEYS = (2, 2, 5, 5), (2, 5)
REFUSED = {  # what is wrong: the call, what is said to be what, and what it must be
    "bias of one sample": (lambda: attend((1, 2, 5, 5), KEYS), "bias", (1, 2, 5, 5), BIAS),
    "bias of one head": (lambda: attend((2, 1, 5, 5), KEYS), "bias", (2, 1, 5, 5), BIAS),
    "bias of other rows": (lambda: attend((2, 2, 4, 4), KEYS), "bias", (2, 2, 4, 4), BIAS),
    "other keys": (lambda: attend(BIAS, (2, 4)), "keys", (2, 4), KEYS),
    "keys of other rows": (lambda: attend(BIAS, (2, 4, 5)), "keys", (2, 4, 5), KEYS),
    "layer: bias": (lambda: layer(bias=(1, 2, 4, 4)), "bias", (1, 2, 4, 4), (1, 2, 3, 3)),
    "layer: keys": (lambda: layer(keys=(1, 4)), "keys", (1, 4), (1, 3)),
    "layer: gate": (lambda: layer(gate_bias=(8,)), "gate_bias", (8,), (16,)),
    "layer: packing": (lambda: layer(weight=(48, 16)), "weight", (48, 16), (64, 16)),
    "layer: heads": (lambda: layer(head_weight=(3, 16)), "head_weight", (3, 16), (2, 16)),
    "layer: oblong": (lambda: layer((1, 3, 5, 16), head_weight=(2, 16)), "x", (1, 3, 5, 16), "(B, X, X, c)"),
    "layout: positions": (lambda: laid_out(right=(2, 3, 5, 8)), "right", (2, 3, 5, 8), (2, 3, 4, 8)),
    "layout: weight": (lambda: laid_out(weight=(16, 32)), "weight", (16, 32), (16, 64)),
    "layout: bias": (lambda: laid_out(bias=(8,)), "bias", (8,), (16,)),
    "norm: width": (lambda: norms(width=8), "weight", (32, 8), (32, 16)),
    "norm: width of heads": (lambda: norms(heads=32), "head_weight", (2, 32), (2, 16)),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_shapes_that_would_be_misread_are_refused(wrong):
    call, name, given, right = REFUSED[wrong]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name} is {given}, but must be {right}')}"):
        call()


def test_the_same_calls_with_right_shapes():
    assert attend(BIAS, KEYS).shape == attend(BIAS, (2, 1, 5)).shape == (2, 3, 2, 5, 16)
    assert layer(head_weight=(2, 16)).shape == (1, 3, 3, 16) == layer(bias=(1, 2, 3, 3), keys=(1, 3)).shape
    assert laid_out().shape == (2, 4, 4, 16)
    assert norms()[0].shape[-1] == 32


def test_the_readme_s_example_runs():
    """The second one, on a CPU and of shorter rows; the first needs no kernel."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    found = {}
    exec(example.replace("cuda", "cpu").replace("128", "16"), found)
    assert found["out"].shape == found["q"].shape and found["update"].shape == found["pair"].shape
    for name in ("bias", "pair", "a", "b", "q"):
        assert found[name].grad.isfinite().all(), name
