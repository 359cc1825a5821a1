"""Triton kernels without a GPU: right in the interpreter, and compiled for GPUs that are not here."""
import importlib
import itertools
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")
import torch  # noqa: E402
from triton_targets import SHARED, TARGETS, compiled_for  # noqa: E402

CHECKS = ROOT / "tests" / "interpreted"
NAMES = sorted(path.stem for path in CHECKS.glob("check_*.py"))  # each has a compile_all()


def test_all_kernels_in_the_interpreter():
    """One process for all: it must set a variable before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS.glob("check_*.py")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_the_transition_compiles():
    compile_and_judge("check_transition", 32, ["gfx942"], [torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_all_kernels_compile(name, channels):
    fitting = compile_and_judge(name, channels, TARGETS, [torch.bfloat16, torch.float32])
    assert all(fitting.values()), [launch for launch in fitting if not fitting[launch]]


def compile_and_judge(name, channels, targets, dtypes):
    """{launch in 16 bits: whether it fits a target}. The first candidate of each kernel must fit all of them,
    without spills, and every one multiplies by matrix instructions. float32 must compile."""
    sys.path.insert(0, str(CHECKS))
    compile_all, fitting = importlib.import_module(name).compile_all, {}
    for target, dtype in itertools.product(targets, dtypes):
        with compiled_for(target) as found:
            compile_all(channels, dtype)
        seen = set()
        for launch, needs in found.items() if dtype != torch.float32 else ():
            fits = needs["spills"] == 0 and needs["shared"] <= SHARED[target]
            fitting[launch] = fitting.get(launch, False) or fits
            assert needs["mma"] > 0 and (fits or launch.split()[0] in seen), (target, launch, needs)
            seen.add(launch.split()[0])
    return fitting
