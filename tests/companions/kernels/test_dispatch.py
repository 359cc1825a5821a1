"""Where the companions' kernels run."""
from types import SimpleNamespace

import pytest
import torch

dispatch = pytest.importorskip("companions.kernels.dispatch", reason="this companion was deleted")


@pytest.mark.parametrize("triton_is_there", [True, False])
def test_on_a_gpu_in_float32_and_16_bits(monkeypatch, triton_is_there):
    monkeypatch.setattr(dispatch, "HAS_TRITON", triton_is_there)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        there = SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda"), dtype=dtype)
        assert dispatch.takes(there) == (triton_is_there and dtype != torch.float64)
    assert not dispatch.takes(torch.zeros(4))
