"""Which path a call from Python takes, and what it says of that."""
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

from fusion_lab.kernels import eager


def on(device, dtype):
    return SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)


@pytest.fixture
def nvidia(monkeypatch):
    """Of PyTorch for NVIDIA's GPUs, which has said nothing yet."""
    monkeypatch.setattr(eager, "said", set())
    monkeypatch.setattr(torch.version, "hip", None)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_strict_float32_takes_operations_and_says_so_once(nvidia):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert all(eager.plain_is_faster("some_name", on("cuda", torch.float32)) for _ in range(2))
    assert len(found) == 1 and str(found[0].message).startswith("some_name: float32 without TF32 runs in")
    with pytest.warns(UserWarning, match="another"):
        assert eager.plain_is_faster("another", on("cuda", torch.float32))


def test_all_else_takes_kernels(nvidia, monkeypatch):
    assert not eager.plain_is_faster("", on("cpu", torch.float32))
    assert not eager.plain_is_faster("", on("cuda", torch.bfloat16))
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not eager.plain_is_faster("", on("cuda", torch.float32))
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not eager.plain_is_faster("", on("cuda", torch.float32))
    assert not eager.said


def test_a_compiler_is_told_too(nvidia):
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + 1 if eager.say_plain("compiled") else x
    with pytest.warns(UserWarning, match="compiled: float32 without"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
