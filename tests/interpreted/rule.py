"""The 3x rule for kernels: errors against float64 may be three times those of plain PyTorch."""
import torch


def results(function, tensors, gradient, cast):
    """[output, gradients of all tensors that are floating point], computed in the precision that cast makes."""
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
            scale = truth.abs().max().item() or largest  # what vanishes is a difference of numbers that do not
            allowed = 3 * allowed + 2 * torch.finfo(dtype).eps * scale
            if not error <= allowed:
                found.append(f"{name}: {error:.2e}, allowed {allowed:.2e}")
    return found
