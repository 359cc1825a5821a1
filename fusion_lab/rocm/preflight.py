"""What stands in the way of a profiler on this machine: every problem at once, each with what to do."""
import os
import pathlib
import re
import shlex
import shutil
import sys
from dataclasses import dataclass

from fusion_lab.rocm.failures import known_failure
from fusion_lab.rocm.machine import versioned_python
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, UserError


@dataclass
class Problem:
    code: int
    what: str
    advice: str


def tool_problems(tool, install_hint, old_pandas=True):
    if tool.path is None:
        rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
        yield Problem(MISSING, f"{tool.name} not found on PATH and in {rocm}/bin", install_hint)
    elif tool.trouble:
        said, _, advice = known_failure(tool.trouble, old_pandas) or (
            tool.trouble.splitlines()[-1], MISSING, f"See what {shlex.join([tool.path, '--help'])} prints.")
        yield Problem(MISSING, f"{tool.path} does not start ({said})", advice)


def torch_problems(torch):
    if "error" in torch:
        yield Problem(MISSING, f"{sys.executable} cannot import torch ({torch['error']})",
                      "Activate the environment that has it, or set PYTHON to its interpreter.")
    elif not torch["hip"]:
        yield Problem(MISSING, f"torch {torch['version']} is not a ROCm build",
                      f"Install one for {sys.executable} (https://pytorch.org, choose ROCm), or set PYTHON.")
    elif not torch["gpus"]:
        yield Problem(NO_GPU, f"torch {torch['version']} sees no GPU",
                      "Look at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and at what rocminfo says.")


def kfd_problems():
    kfd = os.environ.get("KFD_DEVICE", "/dev/kfd")
    if not os.path.exists(kfd):
        yield Problem(NO_GPU, f"no {kfd}", "No AMD GPU, the amdgpu driver is not loaded, or a container "
                      "without --device=/dev/kfd --device=/dev/dri --group-add video --group-add render.")
    elif not os.access(kfd, os.R_OK | os.W_OK):
        yield Problem(NO_GPU, f"no permission for {kfd}", "Join its groups (sudo usermod -aG render,video "
                      "$USER) and log in again; in a container, --group-add video --group-add render.")


def bindings_problems(tool):
    """rocprof-sys-python runs the script in-process, by bindings compiled for one Python minor version."""
    minor = sys.version_info.minor
    yield from interpreter_problems("rocprof-sys-python", versioned_python())
    libraries = pathlib.Path(tool.path or "").resolve().parent.parent.glob(
        "lib*/python*/site-packages/rocprofsys/libpyrocprofsys.*.so")
    built = [re.search(r"cpython-3(\d+)", path.name) for path in libraries]
    minors = sorted({int(version[1]) for version in built if version})
    if minors and minor not in minors and not tool.trouble:
        yield Problem(MISSING, "the Python bindings of rocprof-sys are for Python "
                      f"{', '.join(f'3.{version}' for version in minors)}, {sys.executable} is 3.{minor}",
                      "Set PYTHON to a matching one that has torch, or sample without bindings: "
                      "rocprof-sys-sample -- python3 PROGRAM")


def interpreter_problems(executable, python):
    if " " in python:
        yield Problem(FAILED, f"{executable} cannot start {python}",
                      "Its path has a blank: set PYTHON to an interpreter without, or to a link to this one.")


def disk_problems(directory):
    wanted = float(os.environ.get("MIN_FREE_GB", "1"))
    place = pathlib.Path(directory).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < wanted:
        yield Problem(FAILED, f"only {free:.1f} GB free in {place}, wanted {wanted:g}",
                      "Choose another place with -o, or lower MIN_FREE_GB.")
    if not os.access(place, os.W_OK):
        yield Problem(FAILED, f"{place} is not writable", "Choose another place with -o.")


def warnings_for(tool, torch, handled):
    """Things that may be right, but explain many a failure; handled: variables that the commands set anew."""
    warnings = []
    hip = re.match(r"\d+\.\d+", torch.get("hip") or "")
    if hip and tool.rocm and hip[0] != tool.rocm:
        warnings.append(f"warning: torch is built for ROCm {hip[0]} ({torch['path']}), {tool.name} belongs "
                        f"to ROCm {tool.rocm} ({tool.path}). GPUs that vanish, crashes and empty traces come "
                        "from this; with ROCm wheels, use the tool in $(rocm-sdk path --bin).")
    stale = sorted(name for name in set(os.environ) - set(handled)
                   if name.startswith(("ROCPROF", "ROCP_", "HSA_TOOLS", "LD_PRELOAD")))
    if stale:
        warnings.append(f"warning: set in the environment, able to change the profile: {', '.join(stale)}")
    return warnings


def refuse(problems):
    """Raise UserError with every problem, or return. For the exit code, something missing comes first."""
    if problems:
        codes = {problem.code for problem in problems}
        raise UserError("; ".join(problem.what for problem in problems),
                        next(code for code in (MISSING, NO_GPU, FAILED) if code in codes),
                        (f"cannot profile here, {len(problems)} problem(s); nothing was run:",
                         *(f"  - {problem.what}. {problem.advice}" for problem in problems),
                         "--dry-run shows the commands without running them, --skip-preflight skips these "
                         "checks."))
