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
one block runs at a time; other streams wait, and other threads while one replays or captures what has no
backward. So a stack of recomputed blocks needs the memory of
one. Random numbers go on with each replay; a backward that recomputes replays those of its forward.
"""
import contextlib
import copy
import inspect
import weakref
from collections import OrderedDict
from itertools import chain

import torch
from torch.utils import _pytree as pytree

import evoformer_kernels.patches.triangle as triangle  # not from the package, which imports this file
from evoformer_kernels.patches.block_graphs import BlockGraphs, Replay, Uncapturable

MOST = 8  # graphs of one block: the one not used for longest goes; what went in and out of it stays, shared
MOST_MOVES = 3  # new captures because weights have moved, as sharded ones do at each step
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def form_of(t):
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


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
        return [*chain.from_iterable(map(dict.values, self.children)),
                *[vars(module).get("forward") for module in self.modules],
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
        if torch.compiler.is_compiling():
            return run_own("torch.compile looks at it")
        if torch._C._len_torch_dispatch_stack():
            decided_in_frame()[id(self)] = None  # the counter may have ended when the call runs again
            return run_own("a counter looks at it")
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
            key = id(self) if id(self) in decided else (id(self), signature)
            if key not in decided:
                decided[key] = self.graphs_for(signature, flat, spec, places, tensors, weights)
            graphs = decided[key]
        except Uncapturable as reason:
            self.shared.say(f"{type(self.block).__name__}: {reason}; it runs without a graph")
            return run_own(reason)
        if graphs is None:
            return run_own("a signature that did not come twice yet")
        if graphs.kind == "kept" and graphs.awaiting() is not None:
            return run_own("the backward of an earlier call is still to come")
        self.why = f"graph, {graphs.kind}"
        if not torch.is_grad_enabled() or graphs.kind == "forward only":
            outs, _ = graphs.run(tensors)
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
        alone = self.shared.alone(tensors[0].device)
        if kind != "forward only":  # a backward may have to wait for another thread's, which waits for us
            with alone:
                alone = contextlib.nullcontext()
        with alone, torch.inference_mode(False), torch.cuda.device(tensors[0].device), \
                torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            graphs = BlockGraphs(self.shared, call, tensors, aliases, kind)
        graphs.form, graphs.out_spec = form, out_spec
        return graphs
