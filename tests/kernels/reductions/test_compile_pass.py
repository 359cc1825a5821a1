"""Gradients of weights that torch.compile gathers in one call: which, and that they are what they were."""
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._inductor import lowering
from torch.utils.checkpoint import checkpoint

import tiny_openfold_v2 as tof
from evoformer_kernels.common import NAMESPACE
from evoformer_kernels.reductions import compile_pass, sums
from fusion_lab.measuring import accuracy
from tests.kernels import test_whole_block as check_model
from tests.kernels.rule import saved_bytes
from tiny_openfold.proteins.fast_evoformer import compiler_options

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

aten = torch.ops.aten
GATHERS = tof.FusionConfig(enable_triton_weight_gradients=True)


KINDS = dict(products=(aten.mm.default, compile_pass.weight_gradients.OP.op),
             sums=(sums.OP.op, sums.GATHERED_OP.op))


def counted(graph, gather):
    """{kind: (nodes before gather(graph), after it, gathered)}"""
    def nodes(target):
        return graph.find_nodes(op="call_function", target=target)
    before = {kind: len(nodes(single)) for kind, (single, _) in KINDS.items()}
    gather(graph)
    graph.lint()
    return {kind: (before[kind], len(nodes(single)), sum(len(call.args[0]) for call in nodes(together)))
            for kind, (single, together) in KINDS.items()}


def of_graph(kind, function, *shapes, dtype=torch.float32, device="cpu", gathers=True):
    """counted() of a function's graph."""
    given = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given).graph
    return counted(graph, compile_pass.GatheredGradients(gathers, device))[kind]


@pytest.fixture(autouse=True)
def few_positions(monkeypatch):
    monkeypatch.setattr(compile_pass, "LEAST_POSITIONS", 12)
    torch._dynamo.reset()


class Watched(compile_pass.GatheredGradients):
    """The pass for a CPU, which keeps counted() of each graph in `graphs`, and our operators in them."""
    graphs, operators = [], set()

    def __call__(self, graph):
        self.operators |= {node.target for node in graph.nodes
                           if getattr(node.target, "namespace", "") == NAMESPACE}
        self.graphs.append(counted(graph, super().__call__))

    def uuid(self):
        return None  # compiled anew, so that it runs


def compiled(function, monkeypatch, gathers=True):
    """torch.compile as the model calls it, but for a CPU."""
    monkeypatch.setattr(compile_pass, "GatheredGradients", lambda gathers: Watched(gathers, "cpu"))
    Watched.graphs.clear(), Watched.operators.clear()
    options = compiler_options(replace(GATHERS, enable_triton_weight_gradients=gathers))
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def gradients(function, weights, *given):
    return torch.autograd.grad(function(*given).float().square().sum(), weights)


def near(ours, plain):
    """To some roundings of 16 bits; another weight's gradient would be off by its own size."""
    return all(((x - y).norm() / y.norm()).item() < 0.05 and x.dtype == y.dtype
               for x, y in zip(ours, plain, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_layers(autocast, monkeypatch):
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
    # 3 gradients of inputs, 4 of weights
    assert [each["products"] for each in Watched.graphs] == [(0, 0, 0), (7, 4, 3)]


def test_what_is_not_gathered(monkeypatch):
    """What is used again in the graph, is alone, has too few positions, reads or makes too much, is float32
    or lies elsewhere."""
    def gathered(*given, dtype=torch.bfloat16, **how):
        return of_graph("products", *given, dtype=dtype, **how)[2]

    def twice(x, y):
        return x.t() @ y, y.t() @ x
    both = (12, 16), (12, 32)
    assert gathered(twice, *both) == 2 and gathered(twice, *both, gathers=False) == 0
    assert gathered(lambda x, y: [(x.t() @ y)[:8], (y.t() @ x).reshape(-1)], *both) == 2
    assert gathered(lambda x, y: (x.t() @ y, (y.t() @ x) @ x.t()), *both) == 0
    assert gathered(lambda x, y: (x.t() @ y, (y.t() @ x) + 1), *both) == 0
    assert gathered(lambda x, y: x.t() @ y, *both) == 0
    assert gathered(twice, (11, 16), (11, 32)) == gathered(twice, (12, 16), (12, 24)) == 0
    assert gathered(lambda x, y: (x @ y.t(), y @ x.t()), *[(16, 16)] * 2) == 0
    assert gathered(lambda x, y: (x.t() @ y.t(), y.t() @ x.t()), *[(16, 16)] * 2) == 0
    assert gathered(twice, *both, dtype=torch.float32) == gathered(twice, *both, device="cuda") == 0
    for limit, most in (("MOST_NUMBERS", 16 * 32), ("MOST_BYTES", 2 * 12 * 48)):
        with monkeypatch.context() as limited:
            limited.setattr(compile_pass, limit, most)
            assert gathered(twice, *both) == 2
            limited.setattr(compile_pass, limit, most - 1)
            assert gathered(twice, *both) == 0


def test_which_sums_are_gathered(monkeypatch):
    """All of one dtype that are only handed on, the smallest as long as there is room; not one alone."""
    def graph_of(function, *rows, **how):
        return of_graph("sums", function, *((n, 8) for n in rows), **how)

    def each(*partial_sums, dtype=torch.bfloat16):
        return [sums.OP(each, dtype) for each in partial_sums]
    wide = torch.ops.prims.convert_element_type
    assert graph_of(each, 2, 3, 4) == (3, 0, 3) and graph_of(each, 2, 3, 4, gathers=False) == (3, 3, 0)
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


@pytest.fixture
def block(on_gpu):
    """A function that makes a block with all kernels, the same each time."""
    config = tof.TinyOpenFoldConfig(msa_dim=16, pair_dim=32, msa_heads=2, pair_heads=2, outer_product_dim=8)

    def make(**switches):
        torch._dynamo.reset()
        torch.manual_seed(0)
        made = tof.FusedEvoformerBlock(config, replace(tof.FusionConfig.ultra(), **switches))
        accuracy.shake(made)
        return made.bfloat16()
    return make


def through(block, msa, pair):
    return torch.cat([t.flatten() for t in block(msa, pair)])


def test_a_block_with_kernels(block, monkeypatch):
    """Gathered gradients are those of a block that gathers nothing, also under activation checkpointing. With
    selective checkpointing the compiler may not move what is made again into the forward pass, where it would
    be kept; all bits stay."""
    given, results, kept, operators = [t.bfloat16() for t in check_model.tensors()], [], [], set()
    for gathers, checkpoints in ((False, False), (False, True), (True, False)):
        ours = block(enable_selective_checkpointing=checkpoints)
        call, weights = partial(through, compiled(ours, monkeypatch, gathers)), list(ours.parameters())
        with saved_bytes() as saved:
            out = call(*given)
        results.append(torch.autograd.grad(out.float().square().sum(), weights))
        kept.append(sum(saved))
        operators |= Watched.operators
    assert all(map(torch.equal, *results[:2])) and kept[1] < 0.5 * kept[0]
    before, after, gathered = Watched.graphs[-1]["products"]
    assert before - after == gathered == 18 and Watched.graphs[-1]["sums"] == (22, 0, 22)
    assert len(operators) > 10 and operators <= set(lowering.lowerings)
    results.append(gradients(partial(checkpoint, call, use_reentrant=False), weights, *given))
    assert near(results[2], results[0]) and near(results[3], results[0])


def test_models_share_compiled_code_also_in_the_compilers_cache():
    """The compiler compares options: another one's would be another graph, and after eight it gives up."""
    assert compiler_options(GATHERS) == compiler_options(GATHERS) != {}
    passes = [compile_pass.GatheredGradients(*how) for how in (
        (True, "cpu"), (True, "cpu"), (True,), (False, "cpu"))]
    for kinds in (passes, [each.uuid() for each in passes]):
        assert kinds[0] == kinds[1] and len(set(kinds)) == 3
