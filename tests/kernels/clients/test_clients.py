"""Other projects' own blocks compute the same with our two functions under cuEquivariance's names, where the
projects call them, and with patch(): outputs, gradients of inputs and of every parameter."""
import re
import warnings

import pytest
import torch

pytest.importorskip("triton")

from fusion_lab.kernels import limits
from tests.kernels.clients import sources
from tests.kernels.clients.blocks import BLOCKS, KERNELS, Problem, errors

EVERY = [(where, kind) for where, name in sources.PROJECTS.items() for kind in BLOCKS[name]]
CALLING = [(where, kind) for where, kind in EVERY if sources.PROJECTS[where] in KERNELS]
SIZES = (17, 33, 64)


def wrong(found, truth, allowed):
    return {name: error for name, error in errors(found, truth).items() if not error <= allowed}


@pytest.fixture
def double(monkeypatch):
    """Projects compute in float64 also where they cast to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture
def on_gpu(monkeypatch):
    """As if tensors lay on a GPU."""
    monkeypatch.setattr(limits, "runs", lambda x: True)


def called(problem):
    """How often our two functions have been called, as it must be."""
    counted = tuple(sources.CALLED[name] for name in sources.NAMES)
    return counted == problem.block.calls


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch's operations")
@pytest.mark.parametrize("masked", [False, True], ids=["all present", "padded"])
@pytest.mark.parametrize("number, where, kind", [(n, *each) for n, each in enumerate(CALLING)])
def test_under_cuequivariances_names(number, where, kind, masked, double):
    """In float64, which our functions compute by PyTorch's operations."""
    problem = Problem(where, kind, SIZES[(number + masked) % 3], masked)
    truth = problem.results(torch.float64)
    sources.CALLED.clear()
    assert not wrong(problem.results(torch.float64, "names"), truth, 1e-9) and called(problem)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch's operations")
@pytest.mark.parametrize("where, kind", [each for each in CALLING if "boltz" not in each[0]])
def test_under_cuequivariances_names_in_chunks(where, kind, double):
    """OpenFold3 hands over a chunk of rows as it hands over templates: without the dimension in front."""
    problem = Problem(where, kind, 17, True)
    truth = problem.inference(torch.float64, chunk_size=4)
    sources.CALLED.clear()
    assert not wrong(problem.inference(torch.float64, "names", chunk_size=4), truth, 1e-9)
    assert sources.CALLED["triangle_attention"] > problem.block.calls[0]
