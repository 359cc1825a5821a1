"""Which implementation and dtype is chosen, and what FlexAttention computes; also without Triton."""
import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from evoformer_kernels import HOME, limits, precision
from fusion_lab.training import machine
from tests.support import ROOT
from tiny_openfold.layers import attention_choice, kernel_switches

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")


@pytest.mark.parametrize("asked, device, found", [
    (None, CPU, torch.bfloat16), (None, GPU, torch.float16), ("bfloat16", GPU, torch.bfloat16),
    ("float16", CPU, torch.float16)])
def test_dtype_of_amp(asked, device, found):
    assert machine.amp_dtype(SimpleNamespace(use_amp=True, amp_dtype=asked), device) == found
    assert machine.amp_dtype(SimpleNamespace(use_amp=False, amp_dtype=asked), device) is None


def test_tf32_is_on_where_the_gpu_has_it(monkeypatch):
    wanted = SimpleNamespace(use_tf32=True)
    for expected in (False, True):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda expected=expected: expected)
        assert machine.runs_in_tf32(wanted, torch.device("cuda")) is expected
    assert not machine.runs_in_tf32(wanted, CPU)
    assert not machine.runs_in_tf32(SimpleNamespace(use_tf32=False), torch.device("cuda"))


def test_amds_architecture_goes_without_its_features(monkeypatch):
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.get)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    precision.amd_architecture.cache_clear()
    assert precision.architecture(True) == "gfx942" and precision.architecture(False) == ""
    precision.amd_architecture.cache_clear()
    cores = {name: attention_choice.has_matrix_cores(name) for name in (
        "gfx906", "gfx908", "gfx90a", "gfx90c", "gfx942", "gfx950", "gfx1100", "")}
    assert [name for name, found in cores.items() if found] == ["gfx908", "gfx90a", "gfx942", "gfx950"]


ROWS, COLUMNS = (64, 32, True), (16, 32, False)  # length, width of a head, whether there is a bias
AMD_ROWS = dict(rows=ROWS, columns=(64, 32, False))


@pytest.mark.parametrize("arch, requested, kernels, on_gpu, given, words", [
    ("", "auto", False, False, dict(rows=ROWS, columns=COLUMNS), "math on CPU; columns: sdpa: flash on CPU"),
    ("", "auto", True, True, dict(rows=ROWS, columns=COLUMNS), "triton_attention"),
    ("", "auto", True, True, dict(rows=(64, 129, True)), "sdpa"),
    ("", "auto", True, True, dict(rows=ROWS, dtype=torch.float32), "math"),
    ("gfx942", "auto", False, True, AMD_ROWS, "flex_attention; columns: sdpa; gfx942: CDNA, not measured")])
def test_what_the_start_up_line_calls_it(arch, requested, kernels, on_gpu, given, words, monkeypatch):
    monkeypatch.setattr(attention_choice, "HAS_TRITON", True)
    monkeypatch.setattr(attention_choice, "architecture", lambda on_gpu: arch)
    given = dict(dtype=torch.bfloat16) | given
    assert attention_choice.in_words(requested, kernels, on_gpu, **given) == words


@pytest.mark.parametrize("biased", [True, False])
def test_flex_attention_is_attention(biased, monkeypatch):
    """By PyTorch's own code of it, which is not compiled."""
    monkeypatch.setattr(attention_choice, "compiled_flex_attention", lambda: flex_attention)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 4, 5, 16)
    bias = torch.randn(2, 1, 5, 5) if biased else None
    exact = (q @ k.mT / 4 + (0 if bias is None else bias[:, None])).softmax(-1) @ v
    assert torch.allclose(attention_choice.flex_attend(q, k, v, bias), exact, atol=1e-5)


def sizes(tensors):
    return [x if x is None else (*x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("biased", [True, False])
def test_what_flex_attention_keeps_for_backward(biased):
    """On tensors without values, from which memory is estimated."""
    half, single = torch.bfloat16, torch.float32
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, 3, 4, 5, width, dtype=half, requires_grad=True) for width in (16, 17, 18))
        bias = torch.zeros(1, 1, 5, 5, dtype=half, requires_grad=True) if biased else None
        out = attention_choice.flex_attend(q, k, v, bias)
        assert sizes(out.grad_fn.saved_tensors) == [
            (2, 3, 4, 5, 16, half), (2, 3, 4, 5, 17, half), (2, 3, 4, 5, 18, half),
            (1, 4, 5, 5, single) if biased else None, (2, 3, 4, 5, 16, half), (2, 3, 4, 5, single)]
        out.sum().backward()
        assert sizes(x.grad for x in (q, k, v)) == sizes((q, k, v))
        assert not biased or sizes([bias.grad]) == sizes([bias])


def there(*shape, gpu=True, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=gpu, device=GPU if gpu else CPU, shape=shape, dtype=dtype)


@pytest.mark.parametrize("ask, fits, does_not", [
    (limits.runs, [(7,)], []),
    *[(partial(limits.fits, part), [(7, 64), (7, 256)], [(64, 7), (64, 512)])
      for part in ("two layers", "triangle multiplication", "head bias")],
    (partial(limits.fits, "transition"), [(7, 128)], [(128, 7), (7, 256)]),
    (partial(limits.fits, "attention", heads=4), [(7, 512)], [(512, 520)]),
    (partial(limits.fits, "attention sub-layer", heads=4), [(7, 128)], [(128, 7), (128, 256)]),
    (partial(limits.fits, "attention sub-layer", heads=65), [], [(7, 64)]),
    (partial(limits.fits, "head bias", heads=64), [(7, 256)], [(256, 7)]),
    (partial(limits.fits, "sides", side=32), [(7, 16), (7, 128)], [(16, 7), (7, 256)]),
    (partial(limits.fits, "sides", side=8), [], [(7, 64)])])
def test_which_sub_layers_are_given_to_kernels(ask, fits, does_not, monkeypatch):
    for triton_is_there in (True, False):
        monkeypatch.setattr(limits, "HAS_TRITON", triton_is_there)
        assert all(ask(there(2, 3, *shape)) == triton_is_there for shape in fits)
        assert not any(ask(there(2, 3, *shape)) for shape in does_not)
        for other in (dict(gpu=False), dict(dtype=torch.float32)):
            assert not any(ask(there(2, 3, *shape, **other)) for shape in fits)


def test_autocast_says_in_which_precision_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.float16}.get)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    assert limits.fits("two layers", there(2, 128, dtype=torch.float32))


def test_which_projections_stay_with_the_library():
    parts = dict(MSA=(64, 4), pair=(256, 4), table=(64, 65))
    assert kernel_switches.projections_by_library(**parts) == "; pair, table: projections by the library"
    assert kernel_switches.projections_by_library(MSA=(64, 4)) == ""


def test_a_path_without_kernels_is_said_once_for_each_kind_of_input(monkeypatch):
    pytest.importorskip("triton")
    from evoformer_kernels import family
    monkeypatch.setattr(family, "said", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for what in ("float32", "float32", "24 channels"):
            family.say_plain("some_name", what)
    assert len(found) == 2 and "some_name" in str(found[0].message) and "float32" in str(found[0].message)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import evoformer_kernels
for name in ("triangle_attention", "triangle_multiplicative_update"):
    assert name in dir(evoformer_kernels) and not hasattr(evoformer_kernels, name)
    try:
        exec(f"from evoformer_kernels import {name}")
    except ImportError:
        pass
"""


def test_functions_say_that_triton_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"{name} needs Triton: pip install triton" in done.stderr for name in list(HOME)[::2])
