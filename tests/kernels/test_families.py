"""What all functions of kernels keep, in Triton's interpreter: numbers and gradients by the 3x rule, with
every tile; the same bits however tensors lie and whoever calls; schemas, and looks on fake tensors."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from evoformer_kernels import outer_product_sides, transition, tuner
from evoformer_kernels.attention import plan
from evoformer_kernels.attention.function import gated_attention
from evoformer_kernels.common import NAMESPACE
from evoformer_kernels.reductions import sums, weight_gradients
from evoformer_kernels.triangle_multiplication.function import MultiplicationPlan
from tests.kernels.problems import FAMILIES, made
from tests.kernels.rule import equal, gradients, in_dtypes, saved_bytes, violations

pytestmark = pytest.mark.interpreted

MOST_TILES = 12  # the longest list of candidates; shorter ones begin again
LARGER = [  # cases that tiles of several sizes divide, and others
    ("attention", "two whole tiles"), ("attention from Python", "long"), ("sub-layer", "whole tiles"),
    ("head bias", "whole tiles"), ("sub-layer", "tiles of lines, rows dropped"),
    ("outer product", "whole tiles, few rows"), ("outer product", "many rows"), ("sides", "several tiles"),
    ("two layers", "several shares"), ("transition", "whole tiles"),
    ("transition", "several tiles a program, odd"),
    ("two layers", "wide, 192 units"), ("two layers", "wide, 256 units"), ("multiplication", "a whole tile")]


def tiles_of(number):
    """tuner.chosen() that takes the candidate of this number of every kernel; no Plan remembers another."""
    tuner.forget()
    return lambda kernel, shape, candidates: candidates[number % len(candidates)]


def first(family):
    return next(iter(FAMILIES[family][1]))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that small problems have several shares of several tiles, too."""
    monkeypatch.setattr(outer_product_sides, "PROGRAMS", 3)
    monkeypatch.setattr(transition, "PROGRAMS", 16)


@pytest.mark.full
@pytest.mark.parametrize("family, case, dtype", [
    each for family, (_, cases) in FAMILIES.items() for each in in_dtypes(cases, family)])
def test_numbers_and_gradients(family, case, dtype):
    assert not violations(*made(family, dtype, case))


@pytest.mark.full
@pytest.mark.parametrize("number", range(1, MOST_TILES))
@pytest.mark.parametrize("family, case", LARGER)
def test_with_every_tile(family, case, number, monkeypatch):
    monkeypatch.setattr(tuner, "chosen", tiles_of(number))
    assert not violations(*made(family, torch.bfloat16, case))


@pytest.mark.full
@pytest.mark.parametrize("family, case", [
    ("attention", "two whole tiles"), ("sub-layer", "long rows"), ("head bias", "whole tiles"),
    ("outer product", "whole tiles, few rows"), ("sides", "several tiles"), ("two layers", "several shares"),
    ("multiplication", "outgoing")])
def test_compiled_code_may_meet_other_tiles_than_it_was_made_with(family, case, monkeypatch):
    """So it may have fewer or more programs than its graph has room for partial sums."""
    ours, plain, tensors = made(family, torch.bfloat16, case)
    torch._dynamo.reset()
    function = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for number in (0, 1, 2, 5):
        monkeypatch.setattr(tuner, "chosen", tiles_of(number))
        assert not violations(function, plain, tensors)
    assert not violations(function, plain, tensors)  # by launches that are kept by now


@pytest.mark.full
@pytest.mark.parametrize("case, changes", [
    pytest.param("long rows, two tiles, a mask", dict(PROGRAMS=1), marks=pytest.mark.sample),  # sums all rows
    ("short", dict(MOST_SCORES=1)), ("short", dict(MOST_SCORES=2 * 2 * 2 * 16 ** 2 * 4)),  # rounds of 1 and 2
    ("long rows, two tiles, a mask", dict(STORED=[dict(STORED=1)])),  # of 5 rows; of stored scores
    ("two whole tiles", dict(STORED=[dict(STORED=1 << 20)])),
    ("ending node", dict(STORED=[dict(STORED=1 << 18)]))])
def test_attention_in_rounds_of_rows(case, changes, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setattr(plan, name, value)
    assert not violations(*made("attention", torch.float32, case))


def turned(t):
    """The same numbers, otherwise in memory; a vector between numbers that must not be read."""
    if t.dim() == 1:
        return torch.stack([t, torch.full_like(t, torch.nan)], 1)[:, 0]
    return t.mT.contiguous().mT


@pytest.mark.full
@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.sample] * (name == "transition"))
                                    for name in FAMILIES])
def test_the_same_bits_however_tensors_lie(family):
    """Attention of packed tensors refuses what it would misread (test_arguments.py)."""
    ours, _, tensors = made(family, torch.float32, first(family))
    kept = 1 if family == "attention" else 0
    given = [*tensors[:kept], *map(turned, tensors[kept:])]
    assert equal(gradients(ours, given), gradients(ours, tensors))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_compiled_with_a_checkpoint_and_without_gradients(family):
    ours, _, tensors = made(family, torch.float32, first(family))
    expected = gradients(ours, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for function in (compiled, lambda *t: checkpoint(ours, *t, use_reentrant=False)):
        assert equal(gradients(function, tensors), expected)
    with torch.no_grad():
        assert torch.equal(ours(*tensors), expected[0])


@pytest.mark.full
@pytest.mark.parametrize("family, case", [
    ("sub-layer", "ending node"), ("sub-layer", "MSA rows"),
    pytest.param("transition", "two samples, odd", marks=pytest.mark.sample), ("outer product", "added"),
    ("multiplication", "outgoing"), ("multiplication", "incoming")])
def test_recomputing_gives_the_same_bits_from_less_memory(family, case):
    results, kept = [], []
    for recompute in (False, True):
        ours, _, tensors = made(family, torch.float32, case, recompute=recompute)
        with saved_bytes() as saved:
            results.append(gradients(ours, tensors))
        kept.append(sum(saved))
    assert equal(*results) and kept[1] < 0.7 * kept[0]


@pytest.mark.full
@pytest.mark.parametrize("family, Kept", [("attention from Python", plan.AttentionPlan),
                                          ("multiplication from Python", MultiplicationPlan)])
def test_a_plan_that_was_kept_gives_the_bits_of_a_new_one(family, Kept):
    """Of other numbers in other places, too."""
    ours, _, tensors = made(family, torch.bfloat16, first(family))
    others = [t.flip(0) for t in tensors]
    Kept.cache.clear()
    gradients(ours, tensors)
    plans = len(Kept.cache)
    found = gradients(ours, others)
    assert len(Kept.cache) == plans == 2  # of forward and of backward
    Kept.cache.clear()
    assert equal(found, gradients(ours, others))


@pytest.mark.full
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "attention"])
def test_autocast_rounds_products_and_not_what_they_are_added_to(family, low):
    """Gradients have the dtypes of what they belong to."""
    ours, plain, tensors = made(family, torch.float32, first(family))
    exact = plain(*(t.double() for t in tensors))
    with torch.autocast("cpu", low):
        own = plain(*tensors)
        out = ours(*(t.requires_grad_() for t in tensors))
    error = (out - exact).abs().max()
    assert out.dtype == own.dtype and 1e-5 < error <= 3 * (own - exact).abs().max()
    found = torch.autograd.grad(out.float().sum(), tensors, allow_unused=True)
    assert all(g is None or g.dtype == torch.float32 for g in found)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_no_second_derivatives(family):
    ours, _, (x, *others) = made(family, torch.bfloat16, first(family))
    gradient, = torch.autograd.grad(ours(x.requires_grad_(), *others).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|has no second derivative"):
        gradient.sum().backward()
    if "from Python" in family:
        with pytest.raises(RuntimeError, match="does not run under torch.func"):
            torch.func.grad(lambda x: ours(x, *others).sum())(x)


class Calls(TorchDispatchMode):
    """Of our operators: [(operator, arguments, those by name)]."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == NAMESPACE:
            self.found.append((function, args, kwargs or {}))
        return function(*args, **kwargs or {})


def gathered(left, right):
    lefts, rights = [left, right[:, :16]], [right, left]
    return torch.cat([weight_gradients.OP(lefts, rights), sums.GATHERED_OP([left.float(), right.float()],
                                                                           torch.bfloat16)])


@pytest.mark.parametrize("family, case", [
    *((family, first(family)) for family in FAMILIES), ("attention", "columns, no mask"),
    ("attention", "two whole tiles"), ("sub-layer", "columns, no mask, update alone"),
    ("outer product", "one position, one row"), ("multiplication", "update alone"), ("gathered", "")])
def test_operators_keep_to_their_schemas_and_look_the_same_on_fake_tensors(family, case):
    """And change none of what they are given."""
    if family == "gathered":
        ours, tensors = gathered, [torch.randn(20, n).bfloat16() for n in (16, 32)]
    else:
        ours, _, tensors = made(family, torch.bfloat16, case)
    with Calls() as calls:
        out = ours(*(t.requires_grad_() for t in tensors))
        if out.requires_grad:
            out.float().sum().backward()
    assert calls.found
    for function, arguments, named in calls.found:
        torch.library.opcheck(function, arguments, named, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name, call", [
    ("attention", lambda x, S: gated_attention(
        [x.expand(1, 2, S, 64).contiguous()], 1, 2, x.new_zeros(1, 1, S, S))),
    ("sums", lambda x, S: sums.OP(x.expand(S, S, 4).contiguous(), torch.bfloat16))])
def test_sizes_may_be_symbols(name, call):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, other: call(x, other.shape[0]), dynamic=True, fullgraph=True,
                             backend="aot_eager")
    x = torch.ones(1, 1, 1, 1).bfloat16() if name == "attention" else torch.ones(1, 1, 1)
    for S in (5, 9, 70):
        assert torch.equal(compiled(x, torch.empty(S)), call(x, S))
