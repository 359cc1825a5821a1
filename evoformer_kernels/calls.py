"""Calls of a family's kernels: what follows from how their tensors look, worked out once and kept.

A Call holds sizes, strides and flags, and its launches, compiled. Operators and calls from Python run the
same one. An operator is what torch.compile, fake tensors and counters look at (watched). A call from Python
does without: at 64 residues the GPU is done in 0.1 ms, so the host decides how long a call takes.
"""
import contextlib
import functools
import math
import warnings

import torch

from evoformer_kernels import tuner
from evoformer_kernels.common import bind, check_device, is_fake
from evoformer_kernels.reductions import sums

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
HERE, ON_AMD = contextlib.nullcontext(), bool(torch.version.hip)
said = set()  # what say_plain() has said


class Call:
    """What the launches of one call share, made of its tensors (None: not there) and settings.

    A subclass has a name, and says looked_up(kernel's name): what the tuner goes by, that name, the class of
    its arguments and its candidates; fitted(config): the configuration for these sizes, with constants; and
    programs(grid): how many programs store partial sums.
    """
    name, kept = "", {}  # of each subclass its own

    def __init_subclass__(cls):
        cls.kept = {}

    def __init__(self, x):
        self.fake, self.bound = is_fake(x), {}  # bound: launches that are ready, by name
        if not self.fake:
            check_device(self.name, x)

    @classmethod
    def of(cls, tensors, *settings):
        """The Call that is kept for tensors that look like these, or a new one; always a new one while tiles
        are measured, and for fake tensors."""
        if type(tensors[0]) not in PLAIN or tensors[0].is_meta:
            return cls(tensors, *settings)
        return tuner.plan(cls.kept, (*looks(tensors), *settings), lambda: cls(tensors, *settings))

    @classmethod
    def known(cls, tensors, *settings):
        """The Call that of() keeps for tensors that look like these, or None."""
        return None if tuner.found is not None else cls.kept.get((*looks(tensors), *settings))

    def programs(self, grid):
        return math.prod(grid)

    def run(self, kernel, tensors, grid, options, numbers=(), kind="", summed=False):
        """Launch with the tuner's choice for this kind of the kernel; nothing for fake tensors.

        numbers: the kernel's parameters behind its tensors, by position: sizes, and which rows. A launch is
        kept by them, since rounds of rows differ in nothing else. options: a function that returns all others
        by name, strides and flags; a kept launch needs none. grid: a function of a configuration. summed: the
        last of the tensors has a row for the partial sums of each program; where it has another number of
        rows, sums.room() adjusts.
        """
        if self.fake:
            return None
        name = kernel.__name__ + kind
        ready = self.bound.get((name, numbers))
        if ready is not None and not (summed and tensors[-1].shape[0] != self.programs(ready.grid)):
            return ready(*tensors)

        def launch(config):
            config = self.fitted(config)
            size = grid(config)
            ready = bind(self.bound, (name, numbers), kernel, size, numbers, **options(), **config)
            if not summed:
                return ready(*tensors)
            with sums.room(tensors[-1], self.programs(size)) as room:
                ready(*tensors[:-1], room)
        return tuner.launch(*self.looked_up(name), launch)


def looks(tensors):
    """What a Call may depend on of these tensors (None: not there): the key to keep it by. Triton compiles
    for addresses that 16 divides and, on AMD, for storages below 2 GB."""
    found = [t if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & 15)
             for t in tensors]
    if ON_AMD:
        found += [t is not None and t.untyped_storage().nbytes() >= 1 << 31 for t in tensors]
    return found


def watched(name, tensors):
    """Whether something looks at each operation on these tensors (None: not there): torch.compile, fake
    tensors, a counter. RuntimeError under torch.func's transforms, which need more than there is."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{name} does not run under torch.func.grad, vmap or the like: use torch.autograd")
    if torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


@torch.compiler.assume_constant_result
def say_plain(name, what):
    """Warn, once, that this function runs such input in PyTorch's operations."""
    if (name, what) not in said:
        said.add((name, what))
        warnings.warn(f"{name}: {what} runs in PyTorch's operations, which keep more memory than the kernels",
                      stacklevel=3)
    return True


def where(x):
    """A context in which launches go to x's device."""
    if not x.is_cuda or x.device.index == torch._C._cuda_getDevice():
        return HERE
    return torch.cuda.device_of(x)


def as_given(x):
    """A context in which products on x's device keep their dtype: without autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else HERE


def laid(x, stride):
    """x with these strides, by which kept launches read it. A saved tensor may come back from autograd with
    others: under torch.autograd.graph.save_on_cpu(pin_memory=True), for one."""
    own = x[tuple(slice(None if step else 1) for step in stride)]  # along what is expanded the first
    return torch.empty_strided(own.shape, stride, dtype=x.dtype, device=x.device).copy_(own).expand(x.shape)


class Refusal(torch.autograd.Function):
    """Gradients as they are, whose own derivative is an error."""

    @staticmethod
    def forward(ctx, anchor, name, *gradients):
        ctx.name = name
        return tuple(None if g is None else g.detach() for g in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} has no second derivative")


def once(backward):
    """A decorator for backward of an autograd.Function for calls from Python, whose ctx.call is its Call. It
    gets a contiguous gradient, at an address that compiled kernels take. A second derivative is a
    RuntimeError: torch's once_differentiable raises only if the gradient requires a gradient itself."""
    @functools.wraps(backward)
    def guarded(ctx, gradient):
        if torch.is_grad_enabled():
            with torch.no_grad():
                found = guarded(ctx, gradient)
            return Refusal.apply(torch.zeros((), requires_grad=True), ctx.call.name, *found)
        with where(gradient):
            gradient = gradient.contiguous()
            return backward(ctx, gradient.clone() if gradient.data_ptr() & 15 else gradient)
    return guarded
