"""Whole blocks of other projects in CUDA graphs: patch(model, graphs=True).

A pair block starts some 300 kernels, and the host takes longer to start them than the GPU to run them. A
graph starts all of them at once. Each block is captured by the signature of its call, the second time that it
comes: shapes and dtypes of tensors, other arguments, autocast, training flags, which tensors want a gradient.
Graphs read weights where they lie, so an optimizer's steps are seen; weights that have moved lead to a new
capture. What a block reads beside its arguments, parameters and buffers, such as a dropout's p or another
attribute, is read when it is captured: undo() and patch again. Within a graph attention runs all of its layer
in kernels, as it does from WHOLE_FROM residues on, so results differ from those of the first call by
roundings.

    forward only         without gradients
    kept                 forward keeps what its backward graph reads, in memory of this block
    recomputed           within torch.utils.checkpoint: forward keeps nothing, backward's graph runs it again

All graphs but the kept ones share one pool of memory, and blocks share the tensors that go in and out, since
one block runs at a time; other threads and streams wait. So a stack of recomputed blocks needs the memory of
one. Random numbers go on with each replay; a backward that recomputes replays those of its forward.
"""
import contextlib
import copy
import gc
import inspect
import threading
import warnings
import weakref
from collections import OrderedDict
from itertools import accumulate, chain

import torch
from torch.utils import _pytree as pytree

import evoformer_kernels.patches.triangle as triangle  # not from the package, which imports this file
from evoformer_kernels.family import once

MOST = 8  # graphs of one block: the one not used for longest goes; what went in and out of it stays, shared
MOST_MOVES = 3  # new captures because weights have moved, as sharded ones do at each step
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Uncapturable(Exception):
    """Why a block runs as before."""


def form_of(t):
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def room_for(t):
    """Memory for numbers as t has them, without what t repeats."""
    dense = all(t.stride()) or not t.numel()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if dense else torch.empty(
        t.shape, dtype=t.dtype, device=t.device)


def capturable(tensors):
    """Whether a call of these can be captured here and now."""
    return tensors and all(t.is_cuda for t in tensors) and not torch.cuda.is_current_stream_capturing()


def in_backward():
    """Whether a backward pass is under way, in which a checkpoint runs its forward again."""
    return torch._C._current_graph_task_id() != -1


def checkpoint_frame():
    """What a checkpoint remembers of the region that runs, or runs again, if its hooks take what is saved for
    backward: the object that both of its runs share. Else None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = hooks and inspect.unwrap(hooks[0])  # torch 2.12 wraps it
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if type(held).__name__ == "_CheckpointFrame":
            return held
    return None


def decided_in_frame():
    """{(block, signature): the graphs, or None, by which it runs} of the checkpoint under way. All its calls
    of one signature run as the first one did, also those that run again when graphs have been dropped since:
    what they save for backward is told apart by its order alone. A new dict without a checkpoint."""
    frame = checkpoint_frame()
    return {} if frame is None else vars(frame).setdefault("evoformer_kernels_graphs", {})


def kind_of(tensors, weights, training):
    """Which graphs a call takes. A checkpoint's forward saves tensors by hooks of its own, or runs without
    gradients within an autograd.Function, whose inputs still ask for them."""
    wants = any(t.requires_grad for t in tensors)
    if not torch.is_grad_enabled():
        return "recomputed" if wants and training else "forward only"
    if not wants and not any(w.requires_grad for w in weights):
        return "forward only"
    return "recomputed" if checkpoint_frame() is not None or in_backward() else "kept"


class Shared:
    """What the graphs of one patch share: of each GPU a pool and a stream, tensors that go in and out, what
    was said."""

    def __init__(self):
        self.of_gpu, self.rooms, self.said = {}, {}, set()
        self.lock, self.last = threading.Lock(), {}  # the stream of each GPU's last replay

    @contextlib.contextmanager
    def alone(self, device):
        """Within, nobody else writes into the rooms: no other thread, and what other streams replay has
        ended on the GPU."""
        with self.lock:
            stream = torch.cuda.current_stream(device)
            last = self.last.get(device, stream)
            if last != stream:
                stream.wait_stream(last)
            self.last[device] = stream
            yield

    def pool_and_stream(self, device):
        if device not in self.of_gpu:
            gc.collect()
            self.of_gpu[device] = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        return self.of_gpu[device]

    def room(self, kind, number, t):
        """The tensor of this kind and number for numbers as t has them."""
        key = kind, number, t.shape, t.stride(), t.dtype, t.device
        if key not in self.rooms:
            self.rooms[key] = room_for(t)
        return self.rooms[key]

    def say(self, message):
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, stacklevel=5)


@contextlib.contextmanager
def recording(graph, pool, stream):
    """Within, launches go into the graph. Not torch.cuda.graph, which collects garbage each time: a stack of
    48 blocks has 96 graphs."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:  # what ends with a capture is still to be ended
                    end_capture(stream, pool)
                    raise
    finally:
        if collects:
            gc.enable()


def end_capture(stream, pool):
    """After a capture that failed: memory and random numbers are as outside of captures again."""
    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=stream.device)
    empty.capture_end()


class BlockGraphs:
    """The graphs of a block for one signature, and the tensors that they read and write.

    What is valid when: inputs hold a call's numbers from run() until the next call of any block; those of
    kept graphs, and their activations, until the next call of this block. So a kept graph has one holder, the
    call whose backward is to come. Outputs and gradients are copied out at once: the next block writes there.

    tensors: of the call, which any later ones of the signature resemble; call(tensors): the block's own
    forward, [outputs]; weights: parameters; kind: "forward only", "kept" or "recomputed".
    """

    def __init__(self, shared, call, tensors, weights, kind):
        self.shared, self.kind, self.weights = shared, kind, weights
        keeps = kind == "kept"  # for its backward
        self.inputs = [room_for(t) if keeps else shared.room("in", n, t) for n, t in enumerate(tensors)]
        self.wanted = [n for n, t in enumerate(tensors) if t.requires_grad]
        self.learned = [n for n, w in enumerate(weights) if w.requires_grad]
        self.holder, self.replays = lambda: None, 0  # whose activations a kept graph holds; how many so far
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
        """[outputs] of a call, new tensors."""
        with self.shared.alone(self.inputs[0].device):
            torch._foreach_copy_(self.inputs, tensors)
            self.replays += 1
            self.graphs[0].replay()
            return [t.clone() for t in self.outs]

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
            graphs.holder, tensors = weakref.ref(ctx), tensors[count:]
        ctx.tensors, ctx.versions, ctx.count = tensors, [t._version for t in tensors], count
        outs = graphs.run(inputs)
        ctx.replay = graphs.replays
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
            graphs.holder = lambda: None
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


class GraphedBlock:
    """Stands in for a block's forward, takes the same arguments and returns the same."""

    def __init__(self, block, shared):
        self.block, self.shared = block, shared
        self.parts, self.modules, self.children, self.held = None, [], [], []
        self.why = "own code: no signature came twice yet"

    def look(self):
        """Look at the block's parts, at first and where one was exchanged since: what was captured goes."""
        if self.parts is not None and self.parts == self.all_parts():
            return
        self.modules = list(self.block.modules())
        self.children = [module._modules for module in self.modules]
        self.held = [each for module in self.modules for each in (module._parameters, module._buffers)]
        self.parts = self.all_parts()
        self.hooks = [getattr(module, name) for module in self.modules for name in triangle.HOOKS]
        self.weights = [(module._parameters, n) for module in self.modules
                        for n, w in module._parameters.items() if w is not None]
        self.buffers = [(module._buffers, n) for module in self.modules
                        for n, t in module._buffers.items() if t is not None]
        self.forget()

    def all_parts(self):
        """What changes where a part is exchanged: modules, forwards that somebody sets, and which parameters
        and buffers there are. Looked at before each replay, while the GPU waits."""
        return [*map(id, chain.from_iterable(map(dict.values, self.children))),
                *[id(vars(module).get("forward")) for module in self.modules],
                *[w is None for held in self.held for w in held.values()]]

    def __deepcopy__(self, memo):
        """Of a copied model, as for a moving average of weights: its block, without graphs."""
        return GraphedBlock(copy.deepcopy(self.block, memo), self.shared)

    def forget(self):
        """Drop all graphs."""
        self.seen, self.failed, self.by_signature, self.moves = set(), {}, OrderedDict(), {}

    def __call__(self, *arguments, **named):
        def run_own(why):
            self.why = f"own code: {why}"
            return type(self.block).forward(self.block, *arguments, **named)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return run_own("torch.compile or a counter looks at it")
        flat, spec = pytree.tree_flatten((arguments, named))
        places = [n for n, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        tensors = [flat[n] for n in places]
        if not capturable(tensors):
            return run_own("no GPU, or within another graph")
        self.look()
        weights = [parameters[n] for parameters, n in self.weights]
        try:
            signature = self.signature(flat, spec, places, tensors, weights)
            decided = decided_in_frame()
            key = id(self), signature
            if key not in decided:
                decided[key] = self.graphs_for(signature, flat, spec, places, tensors, weights)
            graphs = decided[key]
        except Uncapturable as reason:
            self.shared.say(f"{type(self.block).__name__}: {reason}; it runs without a graph")
            return run_own(reason)
        if graphs is None:
            return run_own("a signature that did not come twice yet")
        if graphs.kind == "kept" and graphs.holder() is not None:
            return run_own("the backward of an earlier call is still to come")
        self.why = f"graph, {graphs.kind}"
        if not torch.is_grad_enabled() or graphs.kind == "forward only":
            outs = graphs.run(tensors)
        else:
            outs = Replay.apply(graphs, len(tensors), *tensors, *weights)
        return graphs.as_the_block_returns(outs)

    def signature(self, flat, spec, places, tensors, weights):
        """What decides which graphs a call may take. Raises Uncapturable."""
        if any(self.hooks):
            raise Uncapturable("a hook on a part of it")
        others = [x for n, x in enumerate(flat) if n not in set(places)]
        if not all(isinstance(x, CONSTANTS) for x in others):
            raise Uncapturable("an argument that is neither a tensor nor a number")
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return (kind_of(tensors, weights, self.block.training), autocast, spec, tuple(places),
                torch.is_inference_mode_enabled(), *map(form_of, tensors), *others, *map(type, others),
                *(module.training for module in self.modules), *(w.requires_grad for w in weights))

    def graphs_for(self, signature, flat, spec, places, tensors, weights):
        """The BlockGraphs for a call, captured now if its signature came before; None where it runs as
        before. Raises Uncapturable."""
        if signature in self.failed:
            raise Uncapturable(self.failed[signature])
        addresses = [w.data_ptr() for w in (*weights, *(buffers[n] for buffers, n in self.buffers))]
        held = self.by_signature.get(signature)
        if held is None or held[0] != addresses:
            if held is not None:
                self.moves[signature] = self.moves.get(signature, 0) + 1
            if self.moves.get(signature, 0) > MOST_MOVES:
                raise Uncapturable("its weights move, as sharded ones do")
            if signature not in self.seen or in_backward():  # where nothing can be captured
                self.seen.add(signature)
                return None
            try:
                made = self.capture(flat, spec, places, tensors, weights, *signature[:2])
            except Exception as error:  # whatever it is: the block's own forward says it, too, or runs
                first = str(error).partition("\n")[0][:150]
                words = first if isinstance(error, Uncapturable) else (
                    f"it cannot be captured ({type(error).__name__}: {first})")
                self.failed[signature] = words
                raise Uncapturable(words) from error
            held = self.by_signature[signature] = addresses, made
            if len(self.by_signature) > MOST:
                self.by_signature.popitem(last=False)
        self.by_signature.move_to_end(signature)
        return held[1]

    @contextlib.contextmanager
    def holding(self, aliases, weights):
        """Within, the block's parameters are the aliases."""
        for (parameters, name), alias in zip(self.weights, aliases, strict=True):
            parameters[name] = alias
        try:
            yield
        finally:
            for (parameters, name), weight in zip(self.weights, weights, strict=True):
                parameters[name] = weight

    def capture(self, flat, spec, places, tensors, weights, kind, autocast):
        """The BlockGraphs of a call."""
        form, out_spec = [], None
        # New leaves at the same addresses: gradients of the old ones belong to the stream of the last step,
        # as long as anything of it is alive.
        aliases = [torch.nn.Parameter(w.detach(), w.requires_grad) for w in weights]

        def call(given):
            nonlocal out_spec
            values = list(flat)
            for n, t in zip(places, given, strict=True):
                values[n] = t
            arguments, named = pytree.tree_unflatten(values, spec)
            cast = torch.autocast("cuda", dtype=autocast, enabled=autocast is not None, cache_enabled=False)
            with self.holding(aliases, weights), cast:
                outs = type(self.block).forward(self.block, *arguments, **named)
            outs, out_spec = pytree.tree_flatten(outs)
            form[:] = [None if isinstance(x, torch.Tensor) else (x,) for x in outs]
            return [x for x in outs if isinstance(x, torch.Tensor)]
        # Of a checkpoint's hooks for what is saved: here autograd saves for itself.
        with torch.inference_mode(False), torch.cuda.device(tensors[0].device), \
                torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            graphs = BlockGraphs(self.shared, call, tensors, aliases, kind)
        graphs.form, graphs.out_spec = form, out_spec
        return graphs
