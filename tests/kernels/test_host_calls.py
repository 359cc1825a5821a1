"""What the host does for a call from Python, counted, with launches that start nothing: it must not creep
back. Kernels are looked up as on a GPU, but not compiled."""
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
import triton
from triton.runtime import driver

from evoformer_kernels.ahead_of_time import Absent
from tests.kernels.problems import attention_from_python, multiplication_from_python

launched = []


class Started:
    """In the place of a compiled kernel."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        assert len(grid) == 3
        parameters = len(self.kernel.arg_names)
        return lambda *given, stream: launched.append((self.kernel.__name__, len(given) == parameters))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    def run(self, *arguments, grid, warmup, **options):
        launched.append((self.__name__, "by Triton"))
        return Started(self)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    before = driver._active
    driver.set_active(Absent("sm_90"))
    yield
    driver._active = before


def counted(step):
    """Calls of functions, Python's and C's, in step()."""
    found = []

    def note(frame, event, argument):
        found.append(event in ("call", "c_call"))
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return sum(found)


CASES = {  # a problem of this size; of forward, and of forward and backward: launches, how many Triton
    # looks at each time (sums of partial sums), and calls at most: 2% above those of Python 3.11
    "attention, short": (attention_from_python, 16, (3, 0, 280), (6, 0, 546)),
    "attention": (attention_from_python, 130, (3, 0, 270), (9, 0, 573)),
    "multiplication, short": (multiplication_from_python, 16, (3, 0, 368), (8, 2, 915)),
    "multiplication": (multiplication_from_python, 70, (2, 0, 362), (6, 2, 902)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_second_call_does_little(name):
    problem, size, *expected = CASES[name]
    ours, _, tensors = problem(torch.bfloat16, size)
    tensors = [t.requires_grad_() for t in tensors]
    gradient = torch.zeros_like(ours(*tensors))

    def call():
        ours(*tensors)

    def both():
        torch.autograd.grad(ours(*tensors), tensors, gradient)
    for step, (number, anew, limit) in zip((call, both), expected, strict=True):
        step()
        launched.clear()
        calls, ready = counted(step), [how for _, how in launched if how != "by Triton"]
        assert calls <= limit
        assert len(launched) == number and len(ready) == number - anew and all(ready), launched
