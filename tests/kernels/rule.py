"""The 3x rule for kernels: errors against float64 may be three times those of plain PyTorch."""
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
    largest = max(truth.abs().max().item() for truth in exact[1:] if truth is not None)
    found = []
    for number, (mine, own, truth) in enumerate(zip(*runs, exact, strict=True)):
        name = "output" if number == 0 else f"gradient {number - 1}"
        if (mine is None) != (truth is None):
            found.append(f"{name}: missing")
        elif truth is not None:
            error, allowed = ((x.double() - truth).abs().max().item() for x in (mine, own))
            scale = truth.abs().max().item() or largest  # what vanishes is a difference of what does not
            roundings = 16 if dtype == torch.float32 else 2  # as in fusion_lab.measuring.accuracy
            allowed = 3 * allowed + roundings * torch.finfo(dtype).eps * scale
            if not error <= allowed:
                found.append(f"{name}: {error:.2e}, allowed {allowed:.2e}")
    return found


def gradients(call, tensors):
    """[output, gradients of all tensors] of call(*tensors)."""
    given = [t.detach().requires_grad_() for t in tensors]
    out = call(*given)
    return [out, *torch.autograd.grad(out.float().square().sum(), given)]


def a_plan_changes_no_bit(by_plan, by_operators, tensors):
    """Whether a function called from Python, twice, so that its plan was kept, has the operators' bits."""
    expected, *found = (gradients(call, tensors) for call in (by_operators, by_plan, by_plan))
    return all(torch.equal(a, b) for each in found for a, b in zip(each, expected, strict=True))


def refuses_more_derivatives(function, tensors, name):
    """Whether second derivatives of function(*tensors) and torch.func's transforms are RuntimeErrors."""
    x, *others = tensors
    x = x.detach().requires_grad_()
    gradient, = torch.autograd.grad(function(x, *others).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=f"{name} does not run under torch.func"):
        torch.func.grad(lambda x: function(x, *others).sum())(x)
    return True


def same_in_every_mode(ours, tensors, unused):
    """Whether ours(*tensors) has the same bits, and all its gradients have, compiled in one piece and with a
    checkpoint, and its result has without gradients. So many tensors, unused, must have no gradient."""
    given = [t.requires_grad_() for t in tensors]

    def gradients(function):
        out = function(*given)
        return [out, *torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True)]
    expected, same = gradients(ours), []
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for function in (compiled, lambda *t: torch.utils.checkpoint.checkpoint(ours, *t, use_reentrant=False)):
        found = gradients(function)
        same += [a is b is None or torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
    with torch.no_grad():
        same.append(torch.equal(ours(*given), expected[0]))
    return all(same) and sum(gradient is None for gradient in expected) == unused


def in_dtypes(cases):
    """(case, dtype): all in float32 and bfloat16, the first in float16 as well."""
    return [*itertools.product(cases, (torch.float32, torch.bfloat16)), (next(iter(cases)), torch.float16)]
