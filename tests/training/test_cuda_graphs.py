"""A captured step, with a stand-in for CUDA that notes what it is asked for.

tests/model/test_evoformer.py has the same on a GPU.
"""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from fusion_lab.training import cuda_graphs
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.files import UserError


@pytest.fixture
def asked(monkeypatch):
    """What is asked of CUDA, in words."""
    words = []

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda on: words.append(f"{name} awaits {on.name}"))

    @contextlib.contextmanager
    def within(what):
        words.append(what)
        yield
        words.append("end")
    side, current = stream("side"), stream("current")
    fakes = dict(Stream=lambda device: side, current_stream=lambda device: current,
                 stream=lambda given: within(f"on {given.name}"), max_memory_allocated=lambda device: 7,
                 CUDAGraph=lambda keep_graph: SimpleNamespace(**{
                     word: lambda word=word: words.append(word) for word in ("replay", "instantiate")}),
                 graph=lambda graph, stream: within(f"capture on {stream.name}"))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        fakes[name] = lambda *device, name=name: words.append(name)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return words


@pytest.mark.parametrize("error, kind, words", [
    ("CUDA out of memory. Tried", RuntimeError, "CUDA out of memory"),
    ("not permitted\nmore", UserError, r"cannot be captured \(not permitted\); use --disable-cuda-graphs$")])
def test_a_step_that_cannot_be_captured(error, kind, words, asked):
    def run(inputs):
        if asked[-1] == "capture on side":
            raise RuntimeError(error)
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
