"""Gradients of weights that torch.compile gathers in one call: which, and that they are what they were."""
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny_openfold_v2 as tof
from fusion_lab.kernels import dispatch
from fusion_lab.kernels.reductions import compile_pass, sums
from fusion_lab.measuring import accuracy
from tests.kernels import test_whole_block as check_model

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

aten = torch.ops.aten


class Found(list):
    def __init__(self):
        self.sums = []


@pytest.fixture
def made(monkeypatch):
    """What the pass finds and leaves: [(matrix products before, after, gathered)] of each graph, and under
    `sums` the same of these."""
    monkeypatch.setattr(compile_pass, "LEAST_POSITIONS", 12)
    found, kinds = Found(), (
        (aten.mm.default, compile_pass.weight_gradients.OP), (sums.OP, sums.GATHERED_OP))

    class Watched(compile_pass.GatheredGradients):
        def __call__(self, graph):
            def nodes(target):
                return graph.find_nodes(op="call_function", target=target)
            before = [len(nodes(single)) for single, _ in kinds]
            super().__call__(graph)
            graph.lint()
            for into, number, (single, together) in zip((found, found.sums), before, kinds, strict=True):
                gathered = sum(len(call.args[0]) for call in nodes(together))
                into.append((number, len(nodes(single)), gathered))

        def uuid(self):
            return None  # compiled anew, so that it runs

    monkeypatch.setattr(compile_pass, "GatheredGradients", Watched)
    torch._dynamo.reset()
    return found


def compiled(function, monkeypatch):
    """torch.compile as the model calls it, but for a CPU."""
    made = compile_pass.GatheredGradients(True, "cpu")
    monkeypatch.setattr(compile_pass, "GatheredGradients", lambda which: made)
    options = dispatch.gathered_gradients(True)
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def gradients(function, weights, *given):
    return torch.autograd.grad(function(*given).float().square().sum(), weights)


def near(ours, plain):
    """To some roundings of 16 bits; another weight's gradient would be off by its own size."""
    return all(((x - y).norm() / y.norm()).item() < 0.05 and x.dtype == y.dtype
               for x, y in zip(ours, plain, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_layers(autocast, made, monkeypatch):
    """Of four layers three: one has 23 results. Under autocast gradients are cast behind their products."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 48), nn.Linear(48, 16),
                           nn.Linear(16, 23)).to(torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(3, 5, 16).to(layers[0].weight.dtype)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layers(x)
    weights = list(layers.parameters())
    plain = gradients(run, weights, x)
    assert near(gradients(compiled(run, monkeypatch), weights, x), plain)
    assert made == [(0, 0, 0), (7, 4, 3)]  # 3 gradients of inputs, 4 of weights


def test_what_is_not_gathered(made, monkeypatch):
    """What is used again in the graph, is alone, has too few positions, reads or makes too much, is float32
    or lies elsewhere."""
    def graph_of(function, *shapes, dtype=torch.bfloat16, device="cpu", which=True):
        given = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given).graph
        compile_pass.GatheredGradients(which, device)(graph)
        return made.pop()[2]

    def twice(x, y):
        return x.t() @ y, y.t() @ x
    both = (12, 16), (12, 32)
    assert graph_of(twice, *both) == 2 and graph_of(twice, *both, which=False) == 0
    assert graph_of(lambda x, y: [(x.t() @ y)[:8], (y.t() @ x).reshape(-1)], *both) == 2
    assert graph_of(lambda x, y: (x.t() @ y, (y.t() @ x) @ x.t()), *both) == 0
    assert graph_of(lambda x, y: (x.t() @ y, (y.t() @ x) + 1), *both) == 0
    assert graph_of(lambda x, y: x.t() @ y, *both) == 0
    assert graph_of(twice, (11, 16), (11, 32)) == graph_of(twice, (12, 16), (12, 24)) == 0
    assert graph_of(lambda x, y: (x @ y.t(), y @ x.t()), *[(16, 16)] * 2) == 0
    assert graph_of(lambda x, y: (x.t() @ y.t(), y.t() @ x.t()), *[(16, 16)] * 2) == 0
    assert graph_of(twice, *both, dtype=torch.float32) == graph_of(twice, *both, device="cuda") == 0
    for limit, most in (("MOST_NUMBERS", 16 * 32), ("MOST_BYTES", 2 * 12 * 48)):
        with monkeypatch.context() as limited:
            limited.setattr(compile_pass, limit, most)
            assert graph_of(twice, *both) == 2
            limited.setattr(compile_pass, limit, most - 1)
            assert graph_of(twice, *both) == 0


def test_which_sums_are_gathered(made, monkeypatch):
    """All of one dtype that are only handed on, the smallest as long as there is room; not one alone."""
    def graph_of(function, *rows, device="cpu", which=True):
        given = [torch.zeros(n, 8) for n in rows]
        graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given).graph
        compile_pass.GatheredGradients(which, device)(graph)
        return made.sums.pop()

    def each(*parts, dtype=torch.bfloat16):
        return [sums.OP(part, dtype) for part in parts]
    wide = torch.ops.prims.convert_element_type
    assert graph_of(each, 2, 3, 4) == (3, 0, 3) and graph_of(each, 2, 3, 4, which=False) == (3, 3, 0)
    assert graph_of(each, 2) == (1, 1, 0) == graph_of(lambda x: sums.OP(x, torch.half)[0].float(), 2)
    assert graph_of(each, 2, 3, device="cuda") == (2, 2, 0)
    assert graph_of(lambda x, y: (sums.OP(x, torch.half), sums.OP(y, torch.float32)), 2, 2) == (2, 2, 0)
    assert graph_of(lambda x, y: [*each(x, y), *each(x, y, dtype=torch.half)], 2, 2) == (4, 0, 4)
    assert graph_of(lambda x, y, z: [*each(x, y), sums.OP(z, torch.half) + 1], 2, 2, 2) == (3, 1, 2)
    assert graph_of(lambda x, y: [wide(t[0], torch.float32) for t in each(x, y)], 2, 2) == (2, 0, 2)
    monkeypatch.setattr(compile_pass, "MOST_TO_ADD_UP", 4 * 8 * (2 + 3))
    assert graph_of(each, 2, 3) == (2, 0, 2) and graph_of(each, 3, 4, 2) == (3, 1, 2)
    monkeypatch.setattr(compile_pass, "MOST_TO_ADD_UP", 4 * 8 * (2 + 3) - 1)
    assert graph_of(each, 2, 3) == (2, 2, 0)


def test_long_sums_come_first(made):
    parts = [torch.randint(9, size=(n, 8)).float() for n in (2, 300, 3)]
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda *parts: [sums.OP(part, torch.float32) for part in parts], tracing_mode="fake")(*parts)
    compile_pass.GatheredGradients(True, "cpu")(graph.graph)
    graph.recompile()
    call, = graph.graph.find_nodes(op="call_function", target=sums.GATHERED_OP)
    assert [len(node.meta["val"]) for node in call.args[0]] == [300, 3, 2]
    assert all(map(torch.equal, graph(*parts), [part.sum(0) for part in parts]))


def test_a_block_with_kernels(made, monkeypatch):
    """Also under activation checkpointing, beside compiled code that gathers nothing."""
    monkeypatch.setattr(dispatch, "runs", lambda x: True)
    monkeypatch.setattr(dispatch, "takes_attention", lambda x, heads: True)
    torch.manual_seed(0)
    config = tof.TinyOpenFoldConfig(msa_dim=16, pair_dim=32, msa_heads=2, pair_heads=2, outer_product_dim=8)
    block = tof.FusedEvoformerBlock(config, tof.FusionConfig.ultra())
    accuracy.shake(block)
    block, given = block.bfloat16(), [t.bfloat16() for t in check_model.tensors()]
    weights = list(block.parameters())

    def through(block, msa, pair):
        return torch.cat([t.flatten() for t in block(msa, pair)])
    plain = gradients(partial(through, torch.compile(block, fullgraph=True, dynamic=False)), weights, *given)
    assert made == []
    torch._dynamo.reset()
    gathering = partial(through, compiled(block, monkeypatch))
    for call in (gathering, partial(checkpoint, gathering, use_reentrant=False)):
        assert near(gradients(call, weights, *given), plain)
    before, after, gathered = made[-1]
    assert before - after == gathered == 18 and made.sums[-1] == (22, 0, 22)


def test_models_share_compiled_code_also_in_the_compilers_cache():
    """The compiler compares options: another one's would be another graph, and after eight it gives up."""
    assert dispatch.gathered_gradients(True) == dispatch.gathered_gradients(True) != {}
    made = [compile_pass.GatheredGradients(*how) for how in (
        (True, "cpu"), (True, "cpu"), (True,), (False, "cpu"))]
    for kinds in (made, [each.uuid() for each in made]):
        assert kinds[0] == kinds[1] and len(set(kinds)) == 3
