"""CUDA graphs on a CPU: what patches/graphs.py and its two parts do around a graph is tried without a GPU.

A graph records each operator between its capture's begin and end, and calls them again when it is replayed,
into the same memory. As on a GPU, what it computed on the way is gone afterwards, unless its pool is its own;
and no number may be read on the way.
"""
import contextlib
import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from evoformer_kernels.patches import block_graphs, graph_memory, graphs


def tensors_of(values):
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


class Recording(TorchDispatchMode):
    """Calls: [(operator, arguments, named arguments, what it returned)]."""

    def __init__(self):
        super().__init__()
        self.calls, self.failed = [], False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            self.failed = True
            raise RuntimeError("operation not permitted when stream is capturing")
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, tensors_of(out)))
        return out


def memory(t):
    return t.untyped_storage().data_ptr()


class Pool:
    def __init__(self):
        self.graphs, self.used = weakref.WeakSet(), False


class Graph:
    def capture_begin(self, pool=None, capture_error_mode=None):
        if pool.used and not pool.graphs:
            raise RuntimeError("INTERNAL ASSERT: a pool whose graphs have all gone takes no other")
        pool.graphs.add(self)
        pool.used = True
        self.shares, self.mode = pool is Cuda.shared, Recording()
        self.mode.__enter__()

    def capture_end(self):
        self.mode.__exit__(None, None, None)
        if self.mode.failed:
            raise RuntimeError("the capture failed")
        self.before = [{*map(memory, tensors_of((args, named)))} for _, args, named, _ in self.mode.calls]
        self.forget()

    @torch.no_grad()
    def replay(self):
        for (operator, args, named, outs), before in zip(self.mode.calls, self.before, strict=True):
            for old, new in zip(outs, tensors_of(operator(*args, **named)), strict=True):
                if memory(old) not in before:
                    old.copy_(new)
        self.forget()

    def forget(self):
        """Memory of a shared pool belongs to the next graph."""
        if self.shares:
            for (_, _, _, outs), before in zip(self.mode.calls, self.before, strict=True):
                for t in outs:
                    if memory(t) not in before and t.is_floating_point():
                        t.fill_(float("nan"))


class Generator:
    """The CPU's random numbers, whose place is all of their state."""
    get_offset = staticmethod(torch.get_rng_state)
    set_offset = staticmethod(torch.set_rng_state)
    initial_seed = staticmethod(lambda: 0)


class Stream:
    def wait_stream(self, other):
        pass


ONLY_STREAM = Stream()


class Cuda:
    """What graphs.py calls of torch.cuda."""
    CUDAGraph, shared = Graph, None
    default_generators = {None: Generator}
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    current_stream = staticmethod(lambda device=None: ONLY_STREAM)
    stream = device = staticmethod(lambda _: contextlib.nullcontext())
    synchronize = staticmethod(lambda: None)

    graph_pool_handle = Pool

    @classmethod
    def Stream(cls, device):  # of the shared pool alone
        return Stream()


class Torch:
    """torch with another torch.cuda."""
    cuda = Cuda

    def __getattr__(self, name):
        return getattr(torch, name)


def emulate(monkeypatch):
    for module in (graphs, block_graphs, graph_memory):
        monkeypatch.setattr(module, "torch", Torch())
    monkeypatch.setattr(graphs, "capturable", lambda tensors: True)
    monkeypatch.setattr(graph_memory, "end_capture", lambda stream, pool: None)
    made = graph_memory.Shared.pool_and_stream

    def pool_and_stream(self, device):
        Cuda.shared, stream = made(self, device)
        return Cuda.shared, stream
    monkeypatch.setattr(graph_memory.Shared, "pool_and_stream", pool_and_stream)
