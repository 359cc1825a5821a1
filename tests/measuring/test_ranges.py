"""Ranges round modules, attached from outside."""
import torch

from fusion_lab.measuring import ranges


def test_backward_of_a_module_fed_with_data(recwarn):
    """It ends with the gradients of its parameters: there is none of its input."""
    layers, opened, seen = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)], [], []
    model = torch.nn.Sequential(*layers)
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda _, number=number: seen.append((number, list(opened))))
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        for named in ([("whole", model)], [("first", model[0]), ("last", model[2])]):
            with ranges.ranges(named, opened.append, opened.pop, backward=True):
                for _ in range(2):
                    model(x).sum().backward()
            assert not opened
    whole, parts = [(n, ["whole.backward"]) for n in (3, 2, 1, 0)], [
        (n, ["last.backward" if n > 1 else "first.backward"]) for n in (3, 2, 1, 0)]
    assert sorted(seen) == sorted(4 * whole + 4 * parts) and not recwarn.list


def test_backward_of_a_module_without_parameters_of_its_own():
    """Fed with data, with another's weights: its backward ends at once, since nothing says when."""
    owner, opened = torch.nn.Linear(4, 4), []
    borrower = torch.nn.Sequential(torch.nn.Identity())
    borrower.forward = lambda x: torch.nn.functional.linear(x, owner.weight)
    with ranges.ranges([("borrower", borrower)], opened.append, opened.pop, backward=True):
        borrower(torch.ones(2, 4)).sum().backward()
    assert not opened and owner.weight.grad.any()
