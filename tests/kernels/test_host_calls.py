"""What the host does for a call from Python, counted, with launches that start nothing: it must not creep
back. Kernels are looked up as on a GPU, but not compiled."""
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
import triton
from triton.runtime import driver

from fusion_lab.kernels import triangle_attention, triangle_multiplicative_update
from fusion_lab.kernels.ahead_of_time import Absent

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


def attention(S):
    q, k, v = torch.zeros(3, 1, S, 4, S, 16).bfloat16()
    tensors = [t.requires_grad_() for t in (q, k, v, torch.zeros(1, 1, 4, S, S).bfloat16())]
    mask = torch.ones(1, S, 1, 1, S, dtype=torch.bool)
    return lambda: triangle_attention(*tensors, mask), tensors


def multiplication(S, c=16):
    sizes = dict(norm_in_weight=(c,), norm_in_bias=(c,), p_in_weight=(2 * c, c), g_in_weight=(2 * c, c),
                 norm_out_weight=(c,), norm_out_bias=(c,), p_out_weight=(c, c), g_out_weight=(c, c))
    weights = {name: torch.zeros(size).bfloat16().requires_grad_() for name, size in sizes.items()}
    x, mask = torch.zeros(1, S, S, c).bfloat16().requires_grad_(), torch.ones(1, S, S)
    return lambda: triangle_multiplicative_update(x, "outgoing", mask, **weights), [x, *weights.values()]


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


CASES = {  # the function's call, its size; launches and at most so many calls: forward, forward and backward
    "attention, short": (attention, 16, (3, 6), (90, 210)),
    "attention": (attention, 130, (3, 9), (90, 250)),
    "multiplication, short": (multiplication, 16, (3, 8), (145, 310)),
    "multiplication": (multiplication, 70, (2, 6), (140, 300)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_second_call_does_little(name):
    make, size, launches, most = CASES[name]
    call, tensors = make(size)
    gradient = torch.zeros_like(call())

    def both():
        torch.autograd.grad(call(), tensors, gradient)
    for step, number, limit in zip((call, both), launches, most, strict=True):
        step()
        launched.clear()
        assert counted(step) <= limit
        assert len(launched) == number and all(whole is True for _, whole in launched), launched
