"""Which float32 products are exact, and which are TF32."""
from types import SimpleNamespace

import torch

from fusion_lab.kernels.precision import runs_in_tf32


def truncated(x):
    """float32 -> TF32 (ten bits of mantissa), towards zero."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def three_products(a, b):
    """A float32 matrix product as three in TF32, the way of SDPA's memory-efficient kernel on NVIDIA."""
    big_a, big_b = truncated(a), truncated(b)
    return truncated(a - big_a) @ big_b + big_a @ truncated(b - big_b) + big_a @ big_b


def test_three_truncated_products_are_not_float32():
    """Why strict float32 on NVIDIA keeps to plain attention: single products are nearly float32's, but all
    err to the same side, and gradients of weights sum thousands of them (GPU: test_strict_float32...)."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(256, 4, 64, 64, generator=generator).softmax(-1)
    v = torch.randn(256, 4, 64, 16, generator=generator) + 1
    exact = p.double() @ v.double()
    plain, three = p @ v - exact, three_products(p, v) - exact
    assert three.abs().max() < 5 * plain.abs().max() and three.sum().abs() > 50 * plain.sum().abs()


def test_tf32_is_on_where_the_gpu_has_it(monkeypatch):
    wanted = SimpleNamespace(use_tf32=True)
    for expected in (False, True):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda expected=expected: expected)
        assert runs_in_tf32(wanted, torch.device("cuda")) is expected
    assert not runs_in_tf32(wanted, torch.device("cpu"))
    assert not runs_in_tf32(SimpleNamespace(use_tf32=False), torch.device("cuda"))
