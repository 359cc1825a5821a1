"""What holds for all tests of kernels."""
import pytest

from evoformer_kernels import limits


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """No test runs by what another has looked up or set."""
    if limits.HAS_TRITON:
        from evoformer_kernels import tuner
        tuner.forget()


@pytest.fixture
def on_gpu(monkeypatch):
    """As if tensors lay on a GPU."""
    monkeypatch.setattr(limits, "runs", lambda x: True)
