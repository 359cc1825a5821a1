"""What sub-layers of kernels make again in backward instead of keeping it: the same bits, from less memory,
and in compiled code, too, not before backward begins."""
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._inductor import lowering

import tiny_openfold_v2 as tof
from fusion_lab.kernels import dispatch
from fusion_lab.kernels.attention.layer import attention_layer
from fusion_lab.kernels.common import NAMESPACE
from fusion_lab.kernels.outer_product import outer_first
from fusion_lab.kernels.reductions import compile_pass
from fusion_lab.kernels.transition import layer as transition_layer
from fusion_lab.kernels.triangle_multiplication.operator import triangle_multiplication
from fusion_lab.measuring import accuracy
from tests.kernels import test_whole_block as check_model

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

S, C, HEADS = 12, 32, 4


def drawn(*size):
    return (torch.randn(size) * 0.3).requires_grad_()


def layers(pair):
    """{name: (layer of pair and weights, shapes of weights)}; the layer takes `again`, too."""
    mask, drop = torch.ones(1, S), torch.rand(1, 1, S, C)
    mask[0, 3] = 0
    square, wide, vector = (C, C), (4 * C, C), (C,)
    of_attention = vector, vector, wide, vector, square, vector, (HEADS, C)
    of_triangle = vector, vector, wide, (4 * C,), vector, vector, square, vector, square, vector

    def attention(axis, residual):
        return lambda again, *w: attention_layer(pair, *w[:6], HEADS, axis, None, w[6], mask, 1e-5,
                                                 pair if residual else None, drop, again)

    def triangle(outgoing):
        return lambda again, *w: triangle_multiplication(pair, *w, mask, outgoing, 1e-5, pair, drop, again)
    return {
        "attention, columns": (attention(1, True), of_attention),
        "attention, rows, no residual": (attention(2, False), of_attention),
        "transition": (lambda again, *w: transition_layer(pair, *w, 1e-5, again),
                       (vector, vector, wide, (4 * C,), (C, 4 * C), vector)),
        "outer product": (lambda again, left, right, *w: outer_first(left, right, *w, 0.1, pair, again),
                          ((1, 5, S, 8), (1, 5, S, 8), (C, 64), vector)),
        "triangle, outgoing": (triangle(True), of_triangle),
        "triangle, incoming": (triangle(False), of_triangle)}


@contextmanager
def counting():
    """Yields a list to which the bytes of every saved tensor are added."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.nbytes) or t, lambda t: t):
        yield found


@pytest.mark.parametrize("name", layers(None))
def test_a_layer_makes_the_same_again(name):
    torch.manual_seed(0)
    pair = drawn(1, S, S, C)
    layer, shapes = layers(pair)[name]
    weights, results, kept = [drawn(*shape) for shape in shapes], [], []
    for again in (False, True):
        with counting() as saved:
            out = layer(again, *weights)
        results.append([out, *torch.autograd.grad(out, [pair, *weights], out.detach() + 0.5)])
        kept.append(sum(saved))
    assert all(map(torch.equal, *results)) and kept[1] < 0.6 * kept[0]


def test_a_compiled_block_keeps_as_little_and_knows_its_operations(monkeypatch):
    """The compiler may not move what is made again into the forward pass, where it would be kept."""
    monkeypatch.setattr(dispatch, "runs", lambda x: True)
    monkeypatch.setattr(dispatch, "takes_attention", lambda x, heads: True)
    config = tof.TinyOpenFoldConfig(msa_dim=16, pair_dim=32, msa_heads=2, pair_heads=2, outer_product_dim=8)
    given, known, results, kept = [t.bfloat16() for t in check_model.tensors()], set(), [], []

    class Watched(compile_pass.GatheredGradients):
        def __call__(self, graph):
            super().__call__(graph)
            ours = {node.target for node in graph.nodes if getattr(node.target, "namespace", "") == NAMESPACE}
            assert ours <= set(lowering.lowerings)
            known.update(ours)

        def uuid(self):
            return None  # compiled anew, so that it runs
    for again in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = tof.FusedEvoformerBlock(config, replace(tof.FusionConfig.ultra(),
                                                        enable_selective_checkpointing=again))
        accuracy.shake(block)
        block = block.bfloat16()
        call = torch.compile(block, fullgraph=True, dynamic=False, options=dict(
            post_grad_custom_post_pass=Watched(False, "cpu")))
        with counting() as saved:
            out = torch.cat([t.flatten() for t in call(*given)])
        results.append(torch.autograd.grad(out.float().square().sum(), list(block.parameters())))
        kept.append(sum(saved))
    assert all(map(torch.equal, *results)) and kept[1] < 0.5 * kept[0] and len(known) > 10
