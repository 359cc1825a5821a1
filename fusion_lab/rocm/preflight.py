"""What stands in the way of a profiler on this machine: every problem at once, each with what to do."""
import os
import pathlib
import re
import shlex
import shutil
import sys
from dataclasses import dataclass

from fusion_lab.rocm import machine
from fusion_lab.rocm.failures import STABLE_CLOCKS, TWO_ROCMS, known_failure
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK, UserError

CHOOSE_TOOL = TWO_ROCMS.partition(". ")[2]
JOIN_GROUPS = ("Join its groups (sudo usermod -aG render,video $USER) and log in again; in a container, "
               "--group-add video --group-add render")


@dataclass
class Problem:
    code: int
    what: str
    advice: str


def tool_problems(tool, install_hint):
    if tool.path is None:
        yield Problem(MISSING, f"{tool.name} not found on PATH and in "
                      f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/bin", install_hint)
    elif tool.trouble:
        said, _, advice = known_failure(tool.trouble) or (
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
        yield Problem(NO_GPU, f"no permission for {kfd}", f"{JOIN_GROUPS}.")


def bindings_problems(tool):
    """rocprof-sys-python runs the script in-process, by bindings compiled for one Python minor version."""
    minor = sys.version_info.minor
    yield from interpreter_problems("rocprof-sys-python", machine.versioned_python())
    libraries = pathlib.Path(tool.path or "").resolve().parent.parent.glob(
        "lib*/python*/site-packages/rocprofsys/libpyrocprofsys.cpython-3*.so")
    minors = sorted({int(re.search(r"cpython-3(\d*)", path.name)[1] or 0) for path in libraries})
    if minors and minor not in minors and not tool.trouble:
        yield Problem(MISSING, "the Python bindings of rocprof-sys are for Python "
                      f"{', '.join(f'3.{version}' for version in minors)}, {sys.executable} is 3.{minor}",
                      "Set PYTHON to a matching one that has torch, or sample without bindings: "
                      "rocprof-sys-sample -- python3 PROGRAM")


def render_problems():
    """Torch opens these nodes beside /dev/kfd."""
    nodes = sorted(pathlib.Path(os.environ.get("DRI_DEVICES", "/dev/dri")).glob("renderD*"))
    if nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        yield Problem(NO_GPU, f"no permission for {nodes[0]}", f"{JOIN_GROUPS}.")


# The first release of rocprof-compute that knows the GPU of a Ryzen processor; it knows no other RDNA, and
# every Instinct. Then the first that draws its roofline; None: none does so far.
RYZEN = {"gfx1150": "7.14", "gfx1151": "7.13", "gfx1152": "7.14", "gfx1153": "10.0"}
ROOFLINE = {"gfx908": None, "gfx942": "6.4", "gfx1150": "10.0", "gfx1151": "10.0", "gfx1152": "10.0",
            "gfx1153": None, "gfx1250": None}


def lacking(first, before):
    """The GPUs here, in words, if the tool is for none of them; first: {name: first release, or None}."""
    names = sorted(set(machine.architectures()))
    there = [name for name in names if name not in first or first[name] and not before(first[name])]
    return "" if there else ", ".join(names)


def architecture_problems(wrapper):
    rdna = dict.fromkeys(filter(machine.is_rdna, machine.architectures()))
    if names := lacking(rdna | RYZEN, wrapper.before):
        yield Problem(FAILED, f"{wrapper.tool_and_release()} does not know {names}",
                      "./run_rocprofv3.sh --pmc counts on this GPU.")


def pandas_problems(tool):
    """Releases before 7.13 lose every counter with pandas 3, which their own list of packages allows."""
    python = machine.own_interpreter(tool.path or "")
    question = "import pandas; print(pandas.__version__)"
    code, text = machine.output_of(*python, "-c", question) if python else (1, "")
    if code == 0 and int(re.match(r"\d+|", text)[0] or 0) >= 3:
        yield Problem(MISSING, f"{tool.name} would lose its counters with pandas {text.strip()}",
                      f"{shlex.join(python)} -m pip install 'pandas<3'")


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


def mismatch_warnings(tool, torch):
    """GPUs that vanish, crashes and empty traces come from two ROCms in one process."""
    hip = re.match(r"\d+\.\d+", torch.get("hip") or "")
    if hip and tool.rocm and hip[0] != tool.rocm:
        yield (f"torch is built for ROCm {hip[0]} ({torch['path']}), {tool.name} belongs to ROCm {tool.rocm} "
               f"({tool.path}). {CHOOSE_TOOL}")
    wheels = any(pathlib.Path(torch.get("path") or "").parent.parent.glob("_rocm_sdk*"))
    if tool.path and hip and wheels != machine.from_wheels(tool.path):
        places = ("packages of the system", "pip wheels")
        yield (f"torch has its ROCm from {places[wheels]}, {tool.name} ({tool.path}) is from "
               f"{places[not wheels]}. {CHOOSE_TOOL}")


def clock_warnings():
    """Counters of RDNA stay 0 while the driver moves the clocks."""
    moving = sorted(level for level in set(machine.performance_levels()) if not level.startswith("profile_"))
    if moving and any(map(machine.is_rdna, machine.architectures())):
        yield f"performance level {', '.join(moving)}. {STABLE_CLOCKS}"


def environment_warnings(handled):
    """handled: variables that the commands set anew."""
    stale = sorted(name for name in set(os.environ) - set(handled)
                   if name.startswith(("ROCPROF", "ROCP_", "HSA_TOOLS", "LD_PRELOAD")))
    if stale:
        yield (f"set in the environment, able to change the profile: {', '.join(stale)}. To run without: "
               f"env -u {' -u '.join(stale)}")


def worst_code(problems):
    """The exit code for all of them: what is missing comes first, then the GPU."""
    codes = {problem.code for problem in problems}
    return next((code for code in (MISSING, NO_GPU, FAILED) if code in codes), OK)


def refuse(problems):
    """Raise UserError with every problem, or return."""
    if problems:
        raise UserError("; ".join(problem.what for problem in problems), worst_code(problems),
                        (f"cannot profile here, {len(problems)} problem(s); nothing was run:",
                         *(f"  - {problem.what}. {problem.advice}" for problem in problems),
                         "--dry-run shows the commands, --skip-preflight skips these checks."))
