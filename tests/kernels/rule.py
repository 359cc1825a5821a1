"""The 3x rule for kernels: errors against float64 may be three times those of plain PyTorch."""
import contextlib
import itertools

import pytest
import torch


def results(function, tensors, gradient, cast):
    """[output, gradients of all floating-point tensors], computed in the precision that cast makes."""
    given = [cast(t).detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = function(*given)
    wanted = [t for t in given if t.is_floating_point()]
    return [out.detach(), *torch.autograd.grad(out, wanted, cast(gradient), allow_unused=True)]


def violations(ours, plain, tensors, gradient=None):
    """Lines on every result of ours(*tensors) that breaks the rule; plain is the same function in PyTorch."""
    dtype = tensors[0].dtype
    gradient = torch.randn_like(plain(*tensors)) if gradient is None else gradient
    exact = results(plain, tensors, gradient, torch.Tensor.double)
    runs = [results(function, tensors, gradient, torch.Tensor.clone) for function in (ours, plain)]
    largest = max(truth.abs().max().item() for truth in exact[1:] if truth is not None and truth.numel())
    found = []
    for number, (mine, own, truth) in enumerate(zip(*runs, exact, strict=True)):
        name = "output" if number == 0 else f"gradient {number - 1}"
        if (mine is None) != (truth is None) or truth is not None and mine.shape != truth.shape:
            found.append(f"{name}: missing, or of another shape")
        elif truth is not None and truth.numel():
            error, allowed = ((x.double() - truth).abs().max().item() for x in (mine, own))
            scale = truth.abs().max().item() or largest  # what vanishes is a difference of what does not
            roundings = 16 if dtype == torch.float32 else 2  # as in fusion_lab.measuring.accuracy
            allowed = 3 * allowed + roundings * torch.finfo(dtype).eps * scale
            if not error <= allowed:
                found.append(f"{name}: {error:.2e}, allowed {allowed:.2e}")
    return found


def gradients(call, tensors):
    """[output, gradients of all tensors, None where there is none], of an incoming gradient that is 0.5
    everywhere and expanded."""
    given = [t.detach().requires_grad_() for t in tensors]
    out = call(*given)
    return [out, *torch.autograd.grad(out, given, out.new_full((), 0.5).expand(out.shape), allow_unused=True)]


@contextlib.contextmanager
def saved_bytes():
    """Yields a list to which the bytes of every tensor that is saved for backward are added."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        yield saved


def packed_anew():
    """Within, what is saved for backward comes back contiguous, as save_on_cpu(pin_memory=True) hands it."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)


def equal(found, expected):
    """Whether two lists of tensors or None have the same bits."""
    return all(a is b is None or a is not None is not b and torch.equal(a, b)
               for a, b in zip(found, expected, strict=True))


def in_dtypes(cases, *before):
    """Parameters (*before, case, dtype): all cases in bfloat16 and float32, the first in float16 as well; the
    very first is a sample."""
    found = *itertools.product(cases, (torch.bfloat16, torch.float32)), (next(iter(cases)), torch.float16)
    return [pytest.param(*before, *each, marks=[pytest.mark.sample] * (each == found[0])) for each in found]
