"""What holds for all tests of kernels."""
import pytest

from evoformer_kernels.limits import HAS_TRITON


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """No test runs by what another has looked up or set."""
    if HAS_TRITON:
        from evoformer_kernels import tuner
        tuner.forget()
