"""Calls from Python, operation by operation: what spends the host's time there, and what need not.

At 64 residues the GPU is done in 0.1 ms, so the host decides how long a call takes. A function that is called
so works out once what follows from shapes, strides and dtypes alone, and keeps it as a plan (planned). It
calls launchers itself instead of operators, unless torch.compile, fake tensors or a counter want operators
(watched).
"""
import contextlib
import warnings

import torch

from fusion_lab.kernels import tuner
from fusion_lab.kernels.common import alike

PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
HERE = contextlib.nullcontext()
said = set()  # what say_plain() has said


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


def looks(tensors):
    """What a plan may depend on of these tensors (None: not there): the key to keep it by."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
                  for t in tensors])


def where(x):
    """A context in which launches go to x's device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device_of(x)


def as_given(x):
    """A context in which products on x's device keep their dtype: without autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else HERE


class Refusal(torch.autograd.Function):
    """Gradients as they are, whose own derivative is an error."""

    @staticmethod
    def forward(ctx, anchor, name, *gradients):
        ctx.name = name
        return tuple(None if g is None else g.detach() for g in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} has no second derivative")


class Planned(torch.autograd.Function):
    """A plan's forward and backward. A second derivative is a RuntimeError: torch's
    once_differentiable raises only if the incoming gradient requires a gradient."""

    @staticmethod
    def forward(ctx, plan, *tensors):
        ctx.plan = plan
        out, saved = plan.forward(*tensors)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            with torch.no_grad():
                found = Planned.backward(ctx, gradient)
            return Refusal.apply(torch.zeros((), requires_grad=True), ctx.plan.name, *found)
        with where(gradient):
            gradient = gradient.contiguous()
            gradient = gradient if alike(gradient) else gradient.clone()
            return None, *ctx.plan.backward(gradient, *ctx.saved_tensors)


def planned(Plan, tensors, dtype, *settings):
    """A plan's result for these tensors (None: not there), whose products are in dtype; differentiable once.

    Plan: a class with a `name`, plans by what they follow from (`kept`), and
    Plan(tensors, learns, *settings)    learns: there will be a backward
    .forward(*tensors)                  the result, and a tuple of what backward reads
    .backward(gradient, *read)          a gradient for each of the tensors, or None
    """
    with where(tensors[0]):
        def make():
            learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors if t is not None)
            return Plan(tensors, learns, *settings), learns
        key = (*looks(tensors), torch.is_grad_enabled(), dtype, *settings)
        plan, learns = tuner.plan(Plan.kept, key, make) if alike(*tensors) else make()
        return Planned.apply(plan, *tensors) if learns else plan.forward(*tensors)[0]
