"""The machine a profiler wrapper runs on: the tool and its options, torch, the GPU, disk; what fails and why.

Nothing here runs the profiled program. Standard library only, Linux only.
"""
import contextlib
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

# Exit codes of every program of this project.
OK, FAILED, USAGE, MISSING, NO_GPU, PROGRAM_FAILED, NO_DATA, TIMEOUT = 0, 1, 2, 3, 4, 5, 6, 124
MEANING = {OK: "done", FAILED: "the profiler failed", USAGE: "wrong use", MISSING: "something is missing",
           NO_GPU: "no usable GPU", PROGRAM_FAILED: "the profiled program failed",
           NO_DATA: "the profiler produced no data", TIMEOUT: "time limit", 130: "interrupted",
           143: "terminated"}


class Stop(Exception):
    """Ends a wrapper before anything ran: exit code, the reason in short, and lines of detail."""

    def __init__(self, code, reason, *details):
        super().__init__(reason)
        self.code, self.reason, self.lines = code, reason, details or (reason,)


@dataclass
class Problem:
    code: int
    what: str
    advice: str


KNOWN_FAILURES = [(re.compile(pattern, re.MULTILINE), code, advice) for pattern, code, advice in (
    (r"No module named '?rocprofsys", MISSING,
     "It has no bindings for this Python. Set PYTHON to the version it was built for, or sample without "
     "bindings: rocprof-sys-sample -- python3 tiny_openfold_v2.py"),
    (r"The '.*' package was not found", MISSING,
     "Install its Python packages, best in a virtual environment of their own: python3 -m pip install -r "
     "$ROCM_PATH/libexec/rocprofiler-compute/requirements.txt"),
    (r"No HIP GPUs are available", NO_GPU,
     "Torch sees no GPU under the profiler: its ROCm differs from the profiler's, or the GPU is hidden."),
    (r"CONFIGURATION_LOCKED", FAILED,
     "Two copies of rocprofiler-sdk were loaded, or torch.profiler ran as well. Use the profiler of torch's "
     "own ROCm, and no --enable-pytorch-profiler."),
    (r"^(rocprofv3(\.py)?|rocprofsys|tool|rocprof-compute): error: .*", FAILED,
     "The tool refused its command line; please report it, with command.txt and env.txt."),
    (r"Fatal error: .*", FAILED, "The profiler stopped before the program ran."),
)]


def known_failure(text):
    """(what the tool said, exit code, advice) for the first known message in its output, or None."""
    for pattern, code, advice in KNOWN_FAILURES:
        found = pattern.search(text)
        if found:
            return found[0].strip()[:200], code, advice
    return None


# ---------------------------------------------------------------------------------------------------------
# The tool: where it is, what it can do

def versioned_python():
    """This interpreter as .../bin/python3.11: rocprof-sys-python derives its library paths from that name."""
    versioned = f"{os.path.dirname(sys.executable)}/python3.{sys.version_info.minor}"
    return versioned if os.path.exists(versioned) else sys.executable


@dataclass
class Tool:
    name: str
    path: str | None = None
    options: frozenset | None = None  # what its --help lists; None: not known
    version: str = "unknown"
    rocm: str | None = None  # "7.0"
    trouble: str = ""  # output of a --help that failed

    @property
    def command(self):
        """As the user would type it."""
        return self.path if self.path and shutil.which(self.name) != self.path else self.name


def output_of(*argv):
    """(exit code, stdout and stderr) of a short question to a tool."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHON_EXECUTABLE": versioned_python()}
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
                              errors="replace", env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout + done.stderr


def options_in(help_text):
    """Long options that a help text defines, not those that its prose mentions."""
    heads = (re.split(r"\t|\s{2,}", line.strip())[0] for line in help_text.splitlines())
    return frozenset(option for head in heads if head.startswith("-")
                     for option in re.findall(r"--[a-z][\w-]*", head))


def rocm_release(tool_path):
    """'7.0' for a tool in a ROCm tree, or None, as for one in a virtual environment."""
    with contextlib.suppress(OSError):
        text = (pathlib.Path(tool_path).resolve().parent.parent / ".info" / "version").read_text()
        found = re.match(r"\d+\.\d+", text)
        return found and found[0]
    return None


def find_tool(name, *help_arguments):
    """The tool on PATH, or in the ROCm tree, and what it says of itself."""
    rocm_bin = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "bin")
    path = shutil.which(name) or shutil.which(name, path=rocm_bin)
    if not path:
        return Tool(name)
    tool = Tool(name, path, rocm=rocm_release(path))
    code, text = output_of(path, *help_arguments)
    if code:
        tool.trouble = text.strip()
        return tool
    tool.options = options_in(text)
    if "--version" in tool.options:  # rocprofv3 has it from ROCm 7.0 on, rocprof-sys-python never
        _, text = output_of(path, "--version")
        found = re.search(r"version:?\s*v?(\d[\w.]*)", text)
        rocm = re.search(r"rocm_version:\s*(\d+\.\d+)", text)
        tool.version = found[1] if found else "unknown"
        tool.rocm = tool.rocm or (rocm[1] if rocm else None)
    return tool


# ---------------------------------------------------------------------------------------------------------
# Preflight: every problem at once, each with what to do

PROBE = """import json, torch
hip = torch.version.hip
print(json.dumps({"version": torch.__version__, "hip": hip, "path": torch.__file__,
                  "gpus": torch.cuda.device_count() if hip else 0}))"""


@functools.cache
def probe_torch():
    """What the interpreter's torch is; {'error': ...} when it does not import."""
    code, text = output_of(sys.executable, "-c", PROBE)
    with contextlib.suppress(ValueError, IndexError):
        return json.loads(text.strip().splitlines()[-1])
    return {"error": text.strip().splitlines()[-1] if text.strip() else f"exit code {code}"}


def tool_problems(tool, install_hint):
    if tool.path is None:
        rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
        yield Problem(MISSING, f"{tool.name} not found on PATH and in {rocm}/bin", install_hint)
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
        yield Problem(NO_GPU, f"no permission for {kfd}", "Join its groups (sudo usermod -aG render,video "
                      "$USER) and log in again; in a container, --group-add video --group-add render.")


def bindings_problems(tool):
    """rocprof-sys-python runs the script in-process, by bindings compiled for one Python minor version."""
    python, minor = versioned_python(), sys.version_info.minor
    if " " in python:
        yield Problem(FAILED, f"rocprof-sys-python cannot start {python}", "It has a space: set PYTHON.")
    libraries = pathlib.Path(tool.path or "").resolve().parent.parent.glob(
        "lib*/python*/site-packages/rocprofsys/libpyrocprofsys.*.so")
    built = [re.search(r"cpython-3(\d+)", path.name) for path in libraries]
    minors = sorted({int(found[1]) for found in built if found})
    if minors and minor not in minors and not tool.trouble:
        yield Problem(MISSING, "the Python bindings of rocprof-sys are for Python "
                      f"{', '.join(f'3.{number}' for number in minors)}, {sys.executable} is 3.{minor}",
                      "Set PYTHON to a matching one that has torch, or sample without bindings: "
                      "rocprof-sys-sample -- python3 tiny_openfold_v2.py")


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
    found = []
    hip = re.match(r"\d+\.\d+", torch.get("hip") or "")
    if hip and tool.rocm and hip[0] != tool.rocm:
        found.append(f"warning: torch is built for ROCm {hip[0]} ({torch['path']}), {tool.name} belongs to "
                     f"ROCm {tool.rocm} ({tool.path}). GPUs that vanish, crashes and empty traces come from "
                     "this; with ROCm wheels, use the tool in $(rocm-sdk path --bin).")
    stale = sorted(name for name in set(os.environ) - set(handled)
                   if name.startswith(("ROCPROF", "ROCP_", "HSA_TOOLS", "LD_PRELOAD")))
    if stale:
        found.append(f"warning: set in the environment, able to change the profile: {', '.join(stale)}")
    return found


def refuse(problems):
    """Stop with every problem, or return. For the exit code, something missing comes before no GPU."""
    if problems:
        found = {problem.code for problem in problems}
        raise Stop(next(code for code in (MISSING, NO_GPU, FAILED) if code in found),
                   "; ".join(problem.what for problem in problems),
                   f"cannot profile here, {len(problems)} problem(s); nothing was run:",
                   *(f"  - {problem.what}. {problem.advice}" for problem in problems),
                   "--dry-run shows the commands without running them, --skip-preflight skips these checks.")
