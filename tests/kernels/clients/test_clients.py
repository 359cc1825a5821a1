"""Other projects' own blocks compute the same with our two functions under cuEquivariance's names, where the
projects call them, and with patch(): outputs, gradients of inputs and of every parameter."""
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.clients import sources
from tests.kernels.clients.blocks import BLOCKS, KERNELS, Problem, errors, wrong

EVERY = [(where, kind) for where, name in sources.PROJECTS.items() for kind in BLOCKS[name]]
CALLING = [(where, kind) for where, kind in EVERY if sources.PROJECTS[where] in KERNELS]
SIZES = (17, 33, 64)
LEAST = 2 ** -9  # half a rounding error of bfloat16, for what a project itself computes in float32


@pytest.fixture
def double(monkeypatch):
    """Projects compute in float64 also where they cast to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


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


@pytest.mark.interpreted
@pytest.mark.parametrize("by, where, kind, S", [
    ("names", "protenix-2.0.0", "pair", 17), ("names", "boltz-2.2.1", "templates", 5),
    ("patch", "commits/openfold", "MSA", 9), ("patch", "commits/openfold", "fused", 5),
    ("patch", "commits/openfold", "templates", 5), ("patch", "openfold3-0.5.0", "pair", 9),
    ("patch", "commits/openfold3", "MSA", 5), ("patch", "protenix-2.0.0", "MSA", 5),
    ("patch", "boltz-2.2.1", "pair", 5), ("patch", "boltzgen-0.3.2", "MSA", 5)])
def test_in_kernels(by, where, kind, S, on_gpu):
    """In float32, in the interpreter, which takes 15 s for 17 residues, from which on Protenix calls us;
    a GPU takes all blocks and larger ones."""
    problem = Problem(where, kind, S, True)
    assert not wrong(problem.results(torch.float32, by), problem.results(torch.float32), 5e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("where, kind", [("commits/openfold", "MSA"), ("openfold3-0.5.0", "pair"),
                                         ("protenix-2.0.0", "pair")])
def test_in_place(where, kind, on_gpu):
    """As these projects infer."""
    problem = Problem(where, kind, 5, True)
    problem.model.eval()
    found = problem.inference(torch.float32, "patch", inplace_safe=True)
    assert not wrong(found, problem.inference(torch.float32, inplace_safe=True), 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("by, where, kind", [
    *(("names", *each) for each in CALLING), *(("patch", *each) for each in EVERY)])
def test_on_a_gpu_in_bfloat16(by, where, kind):
    """Three times a project's own error is allowed."""
    for S, masked in ((17, True), (33, False), (64, True), (128, True), (128, False)):
        problem = Problem(where, kind, S, masked, "cuda")
        truth = problem.results(torch.float32)
        autocast = torch.autocast("cuda", torch.bfloat16)
        own, mine = (errors(problem.results(torch.float32, each, autocast), truth) for each in ("own", by))
        assert not {name: (error, own[name]) for name, error in mine.items()
                    if not error <= 3 * own[name] + LEAST}, (S, masked)
