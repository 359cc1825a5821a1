"""The graphs of one block for one signature, and the autograd Function that replays them."""
import weakref
from itertools import accumulate

import torch
from torch.utils import _pytree as pytree

import evoformer_kernels.patches.triangle as triangle  # not from the package, which imports graphs.py
from evoformer_kernels.family import once
from evoformer_kernels.patches.graph_memory import recording, room_for


class Uncapturable(Exception):
    """Why a block runs as before."""


class BlockGraphs:
    """The graphs of a block for one signature, and the tensors that they read and write.

    What is valid for how long:
        inputs of kept graphs, and their activations    until the next call of this block; so one call at a
                                                        time may be awaiting its backward
        other inputs, all outputs and gradients         until the next call of any block; copied out at once

    tensors: of the call, which any later ones of the signature resemble; call(tensors): the block's own
    forward, [outputs]; weights: parameters; kind: "forward only", "kept" or "recomputed".
    """

    def __init__(self, shared, call, tensors, weights, kind):
        self.shared, self.kind, self.weights = shared, kind, weights
        keeps = kind == "kept"  # for its backward
        self.inputs = [room_for(t) if keeps else shared.room("in", n, t) for n, t in enumerate(tensors)]
        self.wanted = [n for n, t in enumerate(tensors) if t.requires_grad]
        self.learned = [n for n, w in enumerate(weights) if w.requires_grad]
        self.awaiting, self.replays = lambda: None, 0  # whose activations a kept graph holds; how many so far
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, [t.detach() for t in tensors])
        self.graphs = [torch.cuda.CUDAGraph() for _ in range(1 + (kind != "forward only"))]
        random, before = torch.cuda.get_rng_state(), triangle.in_graph
        triangle.in_graph = True
        try:
            pool, stream = shared.pool_and_stream(self.inputs[0].device)
            self.record(call, torch.cuda.graph_pool_handle() if keeps else pool, stream)
        finally:
            triangle.in_graph = before
            torch.cuda.set_rng_state(random)

    def record(self, call, pool, stream):
        """Run everything once, so that kernels are compiled and loaded, then capture."""
        shared = self.shared
        stream.wait_stream(torch.cuda.current_stream())
        versions = [t._version for t in self.inputs]
        with torch.cuda.stream(stream):
            outs = self.forward(call, self.kind != "forward only")
            self.outs = [shared.room("out", n, t.detach()) for n, t in enumerate(outs)]
            self.grads_of = [n for n, t in enumerate(outs) if t.requires_grad]
            self.douts = [shared.room("gradient in", n, outs[n].detach()) for n in self.grads_of]
            if self.kind != "forward only":
                self.backward(outs)
                self.forward(call, False)  # without gradients other kernels may run
            del outs
        torch.cuda.current_stream().wait_stream(stream)
        if versions != [t._version for t in self.inputs]:
            raise Uncapturable("it changes its inputs in place")
        with recording(self.graphs[0], pool, stream):
            outs = self.forward(call, self.kind == "kept")
            with torch.no_grad():
                torch._foreach_copy_(self.outs, [t.detach() for t in outs])
            if self.kind != "kept":
                del outs
        if self.kind == "forward only":
            return
        with recording(self.graphs[1], pool, stream):
            if self.kind == "recomputed":
                outs = self.forward(call, True)
            self.backward(outs)
            del outs

    def forward(self, call, learns):
        """The block's outputs of self.inputs, with gradients for what wants them or without. Leaves in
        self.given what backward() asks gradients of."""
        wanted = self.wanted if learns else []
        given = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(self.inputs)]
        self.given = [given[n] for n in wanted]
        with torch.set_grad_enabled(learns):
            return call(given)

    def backward(self, outs):
        """Fill self.dinputs and self.dweights, one tensor for each dtype."""
        learned = [self.weights[n] for n in self.learned]
        with torch.autocast("cuda", enabled=False):
            found = torch.autograd.grad([outs[n] for n in self.grads_of], [*self.given, *learned], self.douts,
                                        allow_unused=True)
        of_inputs, of_weights = found[:len(self.given)], found[len(self.given):]
        self.dinputs = [None if d is None else self.shared.room("gradient out", n, d)
                        for n, d in enumerate(of_inputs)]
        for room, d in zip(self.dinputs, of_inputs, strict=True):
            if room is not None:
                room.copy_(d)
        groups = {}
        for n, d in zip(self.learned, of_weights, strict=True):
            if d is not None:
                groups.setdefault(d.dtype, []).append((n, d.contiguous()))
        self.dweights = []
        for dtype, group in groups.items():
            flat = torch.cat([d.flatten() for _, d in group])
            room = self.shared.room("weights", dtype, flat)
            room.copy_(flat)
            starts = accumulate((d.numel() for _, d in group[:-1]), initial=0)
            self.dweights.append((room, [(n, d.shape, d.stride(), start)
                                         for (n, d), start in zip(group, starts, strict=True)]))
        self.given = None

    def as_the_block_returns(self, tensors):
        """Outputs, between them what is no tensor, as the block returns them. form: None for a tensor, (x,)
        for another x."""
        rest = iter(tensors)
        outs = [next(rest) if constant is None else constant[0] for constant in self.form]
        return pytree.tree_unflatten(outs, self.out_spec)

    def run(self, tensors):
        """([outputs] of a call, new tensors; the number of this replay)"""
        with self.shared.alone(self.inputs[0].device):
            torch._foreach_copy_(self.inputs, tensors)
            self.replays += 1
            self.graphs[0].replay()
            return [t.clone() for t in self.outs], self.replays

    def run_backward(self, tensors, gradients):
        """Gradients of all tensors and weights; tensors: inputs of the call, None where they are kept."""
        of_inputs, of_weights = [None] * len(self.inputs), [None] * len(self.weights)
        with self.shared.alone(self.inputs[0].device):
            if tensors is not None:
                torch._foreach_copy_(self.inputs, tensors)
            torch._foreach_copy_(self.douts, [gradients[n] for n in self.grads_of])
            self.graphs[1].replay()
            for n, d in zip(self.wanted, self.dinputs, strict=True):
                of_inputs[n] = None if d is None else d.clone()
            flats = [room.clone() for room, _ in self.dweights]
        for flat, (_, group) in zip(flats, self.dweights, strict=True):
            for n, shape, stride, start in group:  # faster for the host than split() and view()
                of_weights[n] = flat.as_strided(shape, stride, start)
        return [*of_inputs, *of_weights]


class Replay(torch.autograd.Function):
    """A block by its graphs. What is recomputed keeps its inputs by itself: saved for backward, a checkpoint
    round the block would take them away and run the block once more."""

    @staticmethod
    def forward(ctx, graphs, count, *tensors):
        inputs = tensors[:count]
        generator = torch.cuda.default_generators[inputs[0].device.index]
        ctx.graphs, ctx.random = graphs, (generator.get_offset(), generator.initial_seed())
        if graphs.kind == "kept":
            graphs.awaiting, tensors = weakref.ref(ctx), tensors[count:]
        ctx.tensors, ctx.versions, ctx.count = tensors, [t._version for t in tensors], count
        outs, ctx.replay = graphs.run(inputs)
        ctx.mark_non_differentiable(*[t for n, t in enumerate(outs) if n not in graphs.grads_of])
        return tuple(outs)

    @staticmethod
    @once("a block in a graph")
    def backward(ctx, *gradients):
        graphs, tensors = ctx.graphs, ctx.tensors
        if tensors is None or graphs.kind == "kept" and ctx.replay != graphs.replays:
            raise RuntimeError("a block in a graph has one backward pass for each forward")
        if ctx.versions != [t._version for t in tensors]:
            raise RuntimeError("what a block in a graph reads was changed in place before its backward")
        ctx.tensors = None
        if graphs.kind == "kept":
            found = graphs.run_backward(None, gradients)
            graphs.awaiting = lambda: None
            return None, None, *found
        generator = torch.cuda.default_generators[tensors[0].device.index]
        now = generator.get_offset(), generator.initial_seed()
        rewind(generator, *ctx.random)
        try:
            found = graphs.run_backward([t.detach() for t in tensors[:ctx.count]], gradients)
        finally:
            rewind(generator, *now)
        return None, None, *found


def rewind(generator, offset, seed):
    """Let random numbers go on from there."""
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(offset)
