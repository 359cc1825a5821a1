"""What every family of kernels is: named inputs, a plan of launches, one autograd Function.

A Plan holds what follows from how its inputs look: sizes, strides, flags, and launches that are ready. It is
worked out once and kept. Forward and backward are operators (common.operation), whose launchers ask for the
plan of their inputs. So the way is the same from Python, compiled, and with a counter watching.
"""
import functools
import math
import warnings

import torch

from evoformer_kernels import tuner
from evoformer_kernels.common import bind, check_device, is_fake, where
from evoformer_kernels.reductions import sums

ON_AMD = bool(torch.version.hip)
said = set()  # what say_plain() has said


class Plan:
    """What the launches of one call share, made of its inputs (a named tuple; None: not there) and settings.

    A subclass has a name, and says looked_up(kernel's name): what the tuner goes by, that name, the class of
    its arguments and its candidates; fitted(config): the configuration for these sizes, with constants; and
    programs(grid): how many programs store partial sums.
    """
    name, cache = "", {}  # of each subclass its own

    def __init_subclass__(cls):
        cls.cache = {}

    def __init__(self, x):
        self.fake, self.bound = is_fake(x), {}  # bound: launches that are ready, by name
        if not self.fake:
            check_device(self.name, x)

    @classmethod
    def of(cls, inputs, *settings):
        """The Plan that is kept for inputs that look like these, or a new one; always a new one while tiles
        are measured, and for fake tensors."""
        if is_fake(inputs[0]):
            return cls(inputs, *settings)
        return tuner.plan(cls.cache, (*looks(inputs), *settings), lambda: cls(inputs, *settings))

    def programs(self, grid):
        return math.prod(grid)

    def run(self, kernel, tensors, grid, options, numbers=(), kind="", summed=False):
        """Launch with the tuner's choice for this kind of the kernel; nothing for fake tensors.

        numbers: the kernel's parameters behind its tensors, by position: sizes, and which rows. A launch is
        kept by them, since rounds of rows differ in nothing else. options: a function that returns all others
        by name, strides and flags. They must follow from the plan's key and the numbers: a kept launch does
        not look at them again. grid: a function of a configuration. summed: the
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
    """What a Plan may depend on of these tensors (None: not there): the key to keep it by. Triton compiles
    for addresses that 16 divides and, on AMD, for storages below 2 GB."""
    found = [t if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() & 15)
             for t in tensors]
    if ON_AMD:
        found += [t is not None and t.untyped_storage().nbytes() >= 1 << 31 for t in tensors]
    return found


def aligned(x):
    """x at an address that 16 divides, for which kept launches are compiled."""
    return x if is_fake(x) or not x.data_ptr() & 15 else x.clone()


def refuse_transforms(name):
    """RuntimeError under torch.func's transforms, which need more than there is."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{name} does not run under torch.func.grad, vmap or the like: use torch.autograd")


@torch.compiler.assume_constant_result
def say_plain(name, what):
    """Warn, once, that this function runs such input in PyTorch's operations."""
    if (name, what) not in said:
        said.add((name, what))
        warnings.warn(f"{name}: {what} runs in PyTorch's operations, which keep more memory than the kernels",
                      stacklevel=3)
    return True


class Refusal(torch.autograd.Function):
    """Gradients as they are, whose own derivative is an error."""

    @staticmethod
    def forward(ctx, anchor, name, *gradients):
        ctx.name = name
        return tuple(None if g is None else g.detach() for g in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} has no second derivative")


def once(name):
    """A decorator for backward of an autograd.Function of this name. It gets contiguous gradients. A second
    derivative is a RuntimeError: torch's once_differentiable raises only if the gradient requires a gradient
    itself."""
    def guard(backward):
        @functools.wraps(backward)
        def guarded(ctx, *gradients):
            if torch.compiler.is_compiling():
                return backward(ctx, *(g.contiguous() for g in gradients))
            if torch.is_grad_enabled():
                with torch.no_grad():
                    found = guarded(ctx, *gradients)
                return Refusal.apply(torch.zeros((), requires_grad=True), name, *found)
            with where(gradients[0]):
                return backward(ctx, *(g.contiguous() for g in gradients))
        return guarded
    return guard
