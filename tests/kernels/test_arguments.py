"""What kernels would misread is refused; the documents' example runs."""
import re

import pytest
import torch

from evoformer_kernels.attention import function as attention
from evoformer_kernels.outer_product import outer_first
from evoformer_kernels.outer_product_sides import sides
from evoformer_kernels.projections import OUTPUT_PROJECT_OP, head_bias
from evoformer_kernels.transition import layer as transition_layer
from evoformer_kernels.transition import two_layers
from evoformer_kernels.triangle_multiplication.function import Weights, triangle_multiplication
from tests.support import ROOT

pytestmark = pytest.mark.interpreted

ATTENTION = dict(q=(2, 3, 2, 5, 16), k=(2, 3, 2, 5, 16), v=(2, 3, 2, 5, 16), bias=(2, 2, 5, 5),
                 key_mask=(2, 5))
PARTS = dict.fromkeys("qkvg", (1, 3, 5, 16))
LAYER = dict(x=(1, 3, 3, 16), norm_weight=(16,), norm_bias=(16,), weight=(64, 16), gate_bias=(16,),
             out_weight=(16, 16), out_bias=(16,), head_weight=None, bias=None, key_mask=None)
LAYOUT = dict(left=(2, 3, 4, 8), right=(2, 3, 4, 8), weight=(16, 64), bias=(16,))
HEADS = dict(x=(1, 3, 4, 16), norm_weight=(16,), norm_bias=(16,), head_weight=(2, 16))
OUTPUT = dict(og=(1, 2, 3, 48), weight=(16, 48), bias=(16,))
SIDES = dict(x=(1, 2, 3, 16), norm_weight=(16,), norm_bias=(16,), weight=(32, 16), bias=(32,))
TWO = dict(x=(3, 16), w1=(64, 16), b1=(64,), w2=(16, 64), b2=(16,))
TRANSITION = dict(TWO, x=(1, 2, 3, 16), norm_weight=(16,), norm_bias=(16,))
TRIANGLE = dict(pair=(1, 4, 4, 16), norm_weight=(16,), norm_bias=(16,), in_weight=(64, 16), in_bias=(64,),
                center_weight=(16,), center_bias=(16,), out_weight=(16, 16), out_bias=(16,),
                gate_weight=(16, 16), gate_bias=(16,), mask=(1, 4), drop=None)


def attend(**given):
    return attention.row_attention(*given.values())


def sub_layer(x, bias, key_mask, **weights):
    return attention.attention_layer(x, attention.Weights(**weights), 2, 2, bias, key_mask)


def attend_parts(**given):
    return attention.gated_attention([given.pop(name) for name in "qkvg"], 2, 2)


def multiply(pair, mask, drop, **weights):
    return triangle_multiplication(pair, Weights(**weights), mask, drop=drop)


CALLS = {  # name: the call, sizes that it takes
    "attention": (attend, ATTENTION), "attention of parts": (attend_parts, PARTS),
    "layer": (sub_layer, LAYER), "outer product": (outer_first, LAYOUT),
    "heads": (lambda **given: head_bias(eps=1e-5, **given)[0], HEADS),
    "output": (lambda **given: OUTPUT_PROJECT_OP(*given.values(), None, None), OUTPUT),
    "sides": (lambda **given: sides(**given)[0], SIDES), "two layers": (two_layers, TWO),
    "transition": (transition_layer, TRANSITION), "triangle": (multiply, TRIANGLE),
}


def call(name, dtype=torch.bfloat16, **changes):
    function, sizes = CALLS[name]
    made = {each: None if size is None else size if isinstance(size, torch.Tensor) else
            torch.zeros(size).to(dtype) for each, size in {**sizes, **changes}.items()}
    return function(**made)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_right_is_taken_and_float64_refused(name):
    assert call(name).isfinite().all()
    with pytest.raises(ValueError, match="float64"):
        call(name, torch.float64)


REFUSED = [  # a call, sizes that are wrong, how the line begins
    ("attention", dict(bias=(2, 1, 5, 5)), "bias is (2, 1, 5, 5), but must be (2, 2, 5, 5)"),
    ("attention", dict(key_mask=(2, 4)), "key_mask is (2, 4), but must be (2, 5)"),
    ("attention", dict.fromkeys("qkv", (2, 3, 2, 5, 256)), "no Triton attention for heads of 256 channels"),
    ("attention of parts", dict(k=(1, 3, 5, 8)), "k is (1, 3, 2, 5, 4)"),
    ("attention of parts", dict(k=torch.zeros(1, 3, 5, 16).half()), "k is (1, 3, 2, 5, 8), torch.float16"),
    ("attention of parts", dict(k=torch.zeros(1, 5, 3, 16).bfloat16().transpose(1, 2)), "k has strides"),
    ("layer", dict(weight=(48, 16)), "weight is (48, 16), but must be (64, 16)"),
    ("layer", dict(head_weight=(3, 16)), "head_weight is (3, 16), but must be (2, 16)"),
    ("layer", dict(x=(1, 3, 5, 16), head_weight=(2, 16)), "x is (1, 3, 5, 16), but must be (B, X, X, c)"),
    ("layer", dict(bias=(1, 2, 3, 3), head_weight=(2, 16)), "bias and head_weight"),
    ("outer product", dict(right=(2, 3, 5, 8)), "right is (2, 3, 5, 8), but must be (2, 3, 4, 8)"),
    ("outer product", dict(weight=(16, 32)), "weight is (16, 32), but must be (16, 64)"),
    ("heads", dict(head_weight=(2, 32)), "head_weight is (2, 32), but must be (2, 16)"),
    ("heads", dict(head_weight=(65, 16)), "no Triton head bias of 16 channels for 65 heads"),
    ("output", dict(og=(1, 2, 3, 40), weight=(16, 40)), "no Triton projection from 40 channels"),
    ("sides", dict(x=(1, 2, 3, 32)), "x is (1, 2, 3, 32), but must be (1, 2, 3, 16)"),
    ("sides", dict(norm_weight=(8,)), "norm_weight is (8,)"), ("sides", dict(bias=(16,)), "bias is (16,)"),
    ("sides", dict(weight=(16, 16), bias=(16,)), "no Triton sides of 16 channels to sides of 8"),
    ("two layers", dict(b1=(70,)), "b1 is (70,), but must be (64,)"),
    ("two layers", dict(w1=(70, 16), b1=(70,), w2=(16, 70)), "70 hidden units are no multiple of 64"),
    ("two layers", dict(x=(3, 48), w1=(64, 48), w2=(48, 64), b2=(48,)),
     "no Triton two layers of 48 channels"),
    ("transition", dict(norm_weight=(32,)), "norm_weight is (32,), but must be (16,)"),
    ("triangle", dict(mask=(1, 5)), "mask is (1, 5), but must be (1, 4) or (1, 4, 4)"),
    ("triangle", dict(drop=(1, 4, 4, 16)), "drop is (1, 4, 4, 16)"),
    ("triangle", dict(in_bias=(16,)), "in_bias is (16,), but must be (64,)"),
]


@pytest.mark.parametrize("name, changes, words", REFUSED)
def test_what_would_be_misread_is_refused(name, changes, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        call(name, **changes)


def test_the_documents_example_runs():
    """On a CPU, and of shorter rows."""
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    found = {}
    exec(example.replace("cuda", "cpu").replace("128", "16"), found)
    assert found["out"].shape == found["q"].shape and found["update"].shape == found["pair"].shape
    for name in ("bias", "pair", "a", "b", "q"):
        assert found[name].grad.isfinite().all(), name
