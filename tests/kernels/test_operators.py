"""Every operator on fake tensors: its results look as they do where kernels run, and nothing is launched."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fusion_lab.kernels.common import NAMESPACE
from fusion_lab.kernels.reductions import sums, weight_gradients
from tests.kernels.attention import test_drop_in as called
from tests.kernels.attention import test_layer as layers
from tests.kernels.attention import test_operator as attention
from tests.kernels.outer_product_mean import test_layout as layouts
from tests.kernels.outer_product_mean import test_sides as sides
from tests.kernels.projections import test_projections as projections
from tests.kernels.transition import test_hidden_gradient as hidden
from tests.kernels.transition import test_layer as transitions
from tests.kernels.triangle_multiplication import test_operator as multiplication

pytestmark = pytest.mark.interpreted


class Calls(TorchDispatchMode):
    """Of our operators: [(operator, arguments, results)]."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        if function.namespace == NAMESPACE:
            self.found.append((function, args, results))
        return results


def gathered(left, right):
    lefts, rights = [left, right[:, :16]], [right, left]
    return torch.cat([weight_gradients.OP(lefts, rights), sums.GATHERED_OP([left.float(), right.float()],
                                                                           torch.bfloat16)])


PROBLEMS = {
    **{f"attention, {case}": attention.problem(torch.bfloat16, *attention.CASES[case]) for case in (
        "short", "columns, no mask", "two whole tiles")},
    "attention, from Python": called.problem(torch.bfloat16),
    **{f"sub-layer, {case}": layers.problem(torch.bfloat16, *layers.CASES[case]) for case in (
        "ending node", "columns, no mask, update alone")},
    "projections": projections.norm_problem(torch.bfloat16, (1, 3, 4, 16), 16, 2),
    **{f"outer product, {case}": layouts.problem(torch.bfloat16, *layouts.CASES[case]) for case in (
        "residual", "one position, one row")},
    "sides": sides.problem(torch.bfloat16, *sides.CASES["two samples, odd"]),
    "two layers": hidden.problem(torch.bfloat16, *hidden.CASES["two tiles, odd"]),
    "transition": transitions.problem(torch.bfloat16, *transitions.CASES["two samples, odd"]),
    **{f"multiplication, {case}": multiplication.problem(torch.bfloat16, *multiplication.CASES[case])
       for case in ("small", "update alone")},
    "gathered": (gathered, None, [torch.randn(20, n).bfloat16() for n in (16, 32)]),
}


def looks(results):
    listed = results if isinstance(results, (list, tuple)) else [results]
    return [(t.shape, t.stride(), t.dtype) for t in listed]


@pytest.mark.parametrize("name", PROBLEMS)
def test_on_fake_tensors(name):
    ours, _, tensors = PROBLEMS[name]
    with Calls() as calls:
        out = ours(*(t.requires_grad_() for t in tensors))
        if out.requires_grad:
            out.float().sum().backward()
    assert calls.found
    for function, arguments, results in calls.found:
        fake = function(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), arguments))
        assert looks(fake) == looks(results), function


@pytest.mark.parametrize("name, call", [
    ("attention", lambda x, S: attention.attention_operator.gated_attention(
        [x.expand(2, S, S, 64).contiguous()], 2, 2, x.new_zeros(2, 2, S, S))),
    ("sums", lambda x, S: sums.OP(x.expand(S, S, 4).contiguous(), torch.bfloat16))])
def test_sizes_may_be_symbols(name, call):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, other: call(x, other.shape[0]), dynamic=True, fullgraph=True,
                             backend="aot_eager")
    x = torch.ones(1, 1, 1, 1).bfloat16() if name == "attention" else torch.ones(1, 1, 1)
    for S in (5, 9, 70):
        assert torch.equal(compiled(x, torch.empty(S)), call(x, S))
