"""A step that cannot be captured, and the count of a graph's kernels, with a stand-in for CUDA.

tests/model/test_evoformer.py has a captured step on a GPU.
"""
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from fusion_lab.training import cuda_graphs
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.errors import UserError


@pytest.mark.parametrize("error, kind, words", [
    ("CUDA out of memory. Tried", RuntimeError, "CUDA out of memory"),
    ("not permitted\nmore", UserError, r"cannot be captured \(not permitted\); use --disable-cuda-graphs$")])
def test_a_step_that_cannot_be_captured(error, kind, words, monkeypatch):
    def run(inputs):
        if cuda.graph.called:
            raise RuntimeError(error)
    cuda = MagicMock()
    cuda.graph.return_value.__exit__.return_value = None
    monkeypatch.setattr(torch, "cuda", cuda)
    with pytest.raises(kind, match=words) as caught:
        GraphedStep(run, {}, "cuda")
    assert kind is RuntimeError or caught.value.code == 1


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_kernels_of_a_graph_are_counted_by_the_runtime(hip, monkeypatch):
    """Two kernels and a copy; only what knows both functions can tell."""
    def list_nodes(handle, nodes, count):
        count._obj.value = 3
        for place in range(3 if nodes else 0):
            nodes[place] = place + 1

    def type_of(node, kind):
        kind._obj.value = int(node.value == 2)
    kind = "hip" if hip else "cuda"
    library = SimpleNamespace(**{f"{kind}GraphGetNodes": list_nodes, f"{kind}GraphNodeGetType": type_of})
    graph = SimpleNamespace(raw_cuda_graph=lambda: 5)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(cuda_graphs.ctypes, "CDLL", lambda path: library)
    assert cuda_graphs.kernels_in(graph) == 2
    del library.__dict__[f"{kind}GraphGetNodes"]
    assert cuda_graphs.kernels_in(graph) is None
