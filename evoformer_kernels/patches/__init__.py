"""Our kernels in the triangle layers of OpenFold, OpenFold3, Boltz-1, Boltz-2, BoltzGen and Protenix:

    from evoformer_kernels import patch

    patch(model)            # until .undo() of what it returns; or: with patch(model): ...

Parameters, names, checkpoints and random numbers stay. Nothing of these projects is imported: a layer is
known by its package and by the class that defines its forward.
"""
import contextlib
import inspect
import warnings

from torch import nn

from evoformer_kernels.patches.projects import BLOCKS, LAYERS, OPTIONAL, adds
from evoformer_kernels.patches.triangle import HOOKS, Unfit, require

CLASSES = {name for readers in LAYERS.values() for name in readers}
KNOWN = {  # arguments of their forwards: what is computed, and how, which is ours to choose
    "self", "input", "x", "z", "mask", "transpose_bias", "inplace_safe", "_add_with_inplace",
    "_inplace_chunk_size", "chunk_size", "use_kernels", "use_memory_efficient_kernel",
    "use_deepspeed_evo_attention", "use_cueq_triangle_kernels", "use_triton_triangle_kernels", "use_lma",
    "triangle_attention", "triangle_multiplicative"}


class Forward:
    """Stands in for a layer's forward, takes the same arguments and returns the same."""

    def __init__(self, layer, read, smallest, said=None):
        self.layer, self.read, self.smallest, self.said = layer, read, smallest, said
        self.why = "own code: not called yet"
        self.signature = inspect.signature(type(layer).forward)
        self.first = list(self.signature.parameters)[1]
        self.hooks = [getattr(m, name) for m in layer.modules() if m is not layer for name in HOOKS]

    def __call__(self, *arguments, **named):
        given = self.signature.bind(self.layer, *arguments, **named).arguments
        x = given[self.first]
        if x.shape[-2] < self.smallest:
            self.why = f"own code: fewer than {self.smallest} residues"
            return type(self.layer).forward(self.layer, *arguments, **named)
        try:
            require(not any(self.hooks), "a hook on a part of it")
            for name, value in given.items():
                default = self.signature.parameters[name].default
                usual = value is default or isinstance(value, (bool, int, float, str)) and value == default
                empty = isinstance(value, (dict, tuple)) and not value  # of *arguments and **named
                require(usual or empty or name in KNOWN, f"an argument that is not known here, {name}")
            turned = dict(transpose_bias=True) if given.get("transpose_bias") else {}
            update = self.read(self.layer).update(x, given.get("mask"), **turned)
        except (Unfit, ValueError) as reason:
            self.why = f"own code: {reason}"
            self.say(f"{type(self.layer).__name__}: {reason}; its own forward runs")
            return type(self.layer).forward(self.layer, *arguments, **named)
        self.why = "kernels"
        return x.add_(update) if adds(given) else update

    def say(self, message):
        """A warning, once for each message and patch; none from layers beside the triangles."""
        if self.said is not None and message not in self.said:
            self.said.add(message)
            warnings.warn(message, stacklevel=4)


class Patch:
    """What patch() did: `layers`, `blocks`, and how to undo it. As a context manager it is undone at the
    end."""

    def __init__(self, forwards, blocks, names):
        self.forwards, self.graphed, self.names = forwards, blocks, names
        self.layers: list[nn.Module] = [forward.layer for forward in forwards]
        self.blocks: list[nn.Module] = [graphed.block for graphed in blocks]

    def report(self) -> dict[str, str]:
        """What ran at the last call of each layer and block, by their names in the model: "kernels", "graph,
        kept", "own code: why"."""
        ran = [(forward.layer, forward.why) for forward in self.forwards]
        ran += [(graphed.block, graphed.why) for graphed in self.graphed]
        return {self.names[module]: why for module, why in ran}

    def undo(self) -> None:
        """Give every layer and block its own forward back; a second time does nothing."""
        for module, forward in [*zip(self.layers, self.forwards, strict=True),
                                *zip(self.blocks, self.graphed, strict=True)]:
            if vars(module).get("forward") is forward:
                del module.forward
        for graphed in self.graphed:
            graphed.forget()
            graphed.shared.rooms.clear()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def blocks_of(model):
    """The blocks of BLOCKS within a model, the outermost ones."""
    found, inner = [], set()
    for module in model.modules():
        own = type(module)
        if module not in inner and own.__name__ in BLOCKS.get(own.__module__.partition(".")[0], ()):
            found.append(module)
            inner |= set(module.modules())
    return found


def reader_of(layer):
    """The function that reads this layer, or None for a module that is no triangle layer."""
    own = type(layer)
    definer = next(base for base in own.__mro__ if "forward" in vars(base))
    read = LAYERS.get(definer.__module__.partition(".")[0], {}).get(definer.__name__)
    if read is not None:
        return read
    if CLASSES & {base.__name__ for base in own.__mro__}:
        raise ValueError(f"{own.__module__}.{own.__name__} is not a triangle layer of "
                         f"{', '.join(LAYERS)} as known here")
    return None


def beside(model, smallest):
    """A Forward for each layer beside the triangles that is as known here."""
    for module in list(model.modules()):
        own = type(module)
        part_of, read = OPTIONAL.get(own.__module__.partition(".")[0], {}).get(own.__name__, (None, None))
        with contextlib.suppress(AttributeError, ValueError):
            part = part_of and part_of(module)
            if part is not None and "forward" not in vars(part):
                check(part, read)
                yield Forward(part, read, smallest)


def check(layer, read):
    """ValueError for a layer whose weights are not those that its reader knows: it may do something else."""
    name = f"{type(layer).__module__}.{type(layer).__name__}"
    try:
        record = read(layer)
    except AttributeError as error:
        raise ValueError(f"{name} has no {error.name!r}: another release than is known here") from None
    given = [module for field in record for module in (field if isinstance(field, list) else [field])]
    known = {id(p) for module in given if isinstance(module, nn.Module) for p in module.parameters()}
    unknown = [n for n, p in layer.named_parameters() if id(p) not in known]
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r}: another release than is known here")


def patch(model: nn.Module, smallest: int = 0, graphs: bool = False) -> Patch:
    """Put our kernels into every triangle layer within a model, and where they fit into its SwiGLU
    transitions and Boltz' pair biases, which report() lists and no warning mentions; returns a Patch.

    smallest: residues below which a layer keeps its own forward. graphs: whether blocks that repeat are
    captured in CUDA graphs, by the signatures of their calls, and replayed (graphs.py). What is no argument,
    parameter or buffer of a block then stays as it was captured, such as a flag that is set later: undo() and
    patch again. Where a call does not fit the kernels (a CPU's tensors, float32, widths), the layer's own
    forward runs, and a warning says so once. Chunk sizes are ignored. Masked positions of the result are
    undefined, and there are no second derivatives.
    ValueError, with nothing changed, for a model without such layers, for one that is patched, and for a
    layer with such a name that is another, or has parameters that are not known here. An argument that is
    not known here leaves a call to the layer.
    """
    forwards, said = [], set()
    for layer in model.modules():
        read = reader_of(layer)
        if read is None:
            continue
        if "forward" in vars(layer):
            raise ValueError(f"forward of {type(layer).__name__} has been replaced already")
        check(layer, read)
        forwards.append(Forward(layer, read, smallest, said))
    if not forwards:
        raise ValueError(f"{type(model).__name__} has no triangle layer of {', '.join(LAYERS)}")
    forwards += list(beside(model, smallest))
    for forward in forwards:
        forward.layer.forward = forward
    blocks = []
    if graphs:
        from evoformer_kernels.patches.graph_memory import Shared
        from evoformer_kernels.patches.graphs import GraphedBlock
        shared = Shared()
        blocks = [GraphedBlock(block, shared) for block in blocks_of(model) if "forward" not in vars(block)]
        for graphed in blocks:
            graphed.block.forward = graphed
        if not blocks:
            warnings.warn(f"{type(model).__name__} has no block that is known here: no graphs", stacklevel=2)
    return Patch(forwards, blocks, {module: name or "model" for name, module in model.named_modules()})
