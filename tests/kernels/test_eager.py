"""What a call from Python says of the path that it takes."""
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

from fusion_lab.kernels import eager


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(eager, "said", set())


def test_each_kind_of_input_is_said_once():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for what in ("float32", "float32", "24 channels"):
            eager.say_plain("some_name", what)
    assert len(found) == 2 and "some_name" in str(found[0].message) and "float32" in str(found[0].message)


def test_a_compiler_is_told_too():
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + 1 if eager.say_plain("compiled", "float32") else x
    with pytest.warns(UserWarning, match="compiled"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
