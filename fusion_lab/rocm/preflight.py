"""What is asked before a run of the tool and of the program with its torch; and what stands in the way, every
problem at once, each with what to do."""
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from fusion_lab.rocm.failures import OLD_PANDAS, TWO_ROCMS, known_failure
from fusion_lab.training.errors import MISSING, NO_GPU, OK, USAGE, UserError
from fusion_lab.training.flags import QUESTION


@dataclass
class Tool:
    name: str
    path: str | None = None
    wheels: bool = False              # of ROCm from pip, else of a ROCm tree
    rocm: str | None = None           # "7.0"
    options: frozenset | None = None  # what its --help lists; None: not known
    trouble: str = ""                 # output of a --help that failed

    def __str__(self):
        return f"{self.name} of ROCm {self.rocm}" if self.rocm else self.name


def versioned_python():
    """This interpreter as .../bin/python3.11: rocprof-sys-python derives its library paths from that name."""
    versioned = f"{os.path.dirname(sys.executable)}/python3.{sys.version_info.minor}"
    return versioned if os.path.exists(versioned) else sys.executable


def answer_of(*argv):
    """The CompletedProcess of a short question to a tool, or to the program, which may take half a minute to
    import torch."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHON_EXECUTABLE": versioned_python()}
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
                              errors="replace", env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def ask(program, flags):
    """(a program's answer to --check-flags, ""), or ({}, why there is none). Raises UserError where it
    refuses its flags, or cannot be read."""
    done = answer_of(sys.executable, program, *flags, QUESTION)
    with contextlib.suppress(ValueError, IndexError):
        if done.returncode == OK:
            return json.loads(done.stdout.splitlines()[-1]), ""
    said = (done.stderr.splitlines() or [f"{program} does not answer {QUESTION}"])[-1]
    said = re.sub(r"^\S+: (error: )?", "", said)
    if done.returncode == USAGE:
        raise UserError(said)
    return {}, said


def known(answer, flags):
    """Words of those flags, (name, value) or (name,), that the program has; of all if it did not answer."""
    own = {name for part in ("config", "training_params", "fusion_config") for name in answer.get(part, {})}
    return [word for words in flags for word in words
            if not own or words[0][2:].replace("-", "_").replace("disable_", "enable_") in own]


def options_in(help_text):
    """Long options that a help text defines, not those that its prose mentions."""
    heads = (re.split(r"\t|\s{2,}", line.strip())[0] for line in help_text.splitlines())
    return frozenset(option for head in heads if head.startswith("-")
                     for option in re.findall(r"--[a-z][\w-]*", head))


def find_tool(name, *help_arguments):
    """The tool of this interpreter's wheels (console scripts beside it, or inside), on PATH or in the ROCm
    tree, and what it says of itself."""
    inside = [str(path) for place in filter(None, sys.path)
              for path in sorted(pathlib.Path(place).glob("_rocm_*/bin"))]
    wheels = inside and shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), *inside]))
    tree = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "bin")
    path = wheels or shutil.which(name, path=f"{os.environ.get('PATH') or tree}{os.pathsep}{tree}")
    tool = Tool(name, path, bool(wheels))
    if path:
        about = pathlib.Path(path).resolve().parents[1] / ".info" / "version"
        with contextlib.suppress(OSError, ValueError, importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.version("rocm-sdk-core") if wheels else about.read_text()
            tool.rocm = re.match(r"\d+\.\d+|", text)[0] or None
        done = answer_of(path, *help_arguments)
        said = done.stdout + done.stderr
        if done.returncode:
            tool.trouble = said.strip() or f"exit code {done.returncode}"
        else:
            tool.options = options_in(said)
    return tool


def tool_problems(tool, package):
    """(exit code, what is wrong, what to do) of each problem; so do the following."""
    if tool.path is None:
        tree = os.environ.get("ROCM_PATH", "/opt/rocm")
        yield (MISSING, f"{tool.name} not found on PATH and in {tree}/bin",
               f"Install the package {package} (ROCm 6.3 or newer), or rocm-profiler by pip beside ROCm's "
               "other wheels (7.13 or newer), or set ROCM_PATH.")
    elif tool.trouble:
        said, _, advice = known_failure(tool.trouble) or (
            tool.trouble.splitlines()[-1], MISSING, f"See what {shlex.join([tool.path, '--help'])} prints.")
        yield (MISSING, f"{tool.path} does not start ({said})", advice)


def program_problems(torch, trouble):
    """Of the program, of the torch that it runs with, and of the GPUs that this one sees."""
    if trouble:
        yield (MISSING, trouble,
               "--program names the program, PYTHON the interpreter that has torch.")
    elif not torch["hip"]:
        yield (MISSING, f"torch {torch['torch']} is not a ROCm build",
               f"Install one for {sys.executable} (https://pytorch.org, choose ROCm), or set PYTHON.")
    elif not torch["gpus"]:
        yield (NO_GPU, f"torch {torch['torch']} sees no GPU", "Look at HIP_VISIBLE_DEVICES, "
               "ROCR_VISIBLE_DEVICES and rocminfo. /dev/kfd is for the groups render and video, of a "
               "container with --device=/dev/kfd --device=/dev/dri --group-add video --group-add render.")


def mismatch_warnings(tool, torch):
    """GPUs that vanish, crashes and empty traces come from two ROCms in one process."""
    hip = re.match(r"\d+\.\d+", torch.get("hip") or "")
    if tool.path and hip:
        wheels = any(pathlib.Path(torch["torch_path"]).parent.parent.glob("_rocm_sdk*"))
        if tool.rocm and hip[0] != tool.rocm or wheels != tool.wheels:
            yield (f"torch is built for ROCm {hip[0]} ({torch['torch_path']}), {tool} is {tool.path}. "
                   f"{TWO_ROCMS}")


def pandas_warnings(tool):
    """Of the Python that rocprof-compute names in its first line."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # no tool, or no script
        python = re.match(r"#!\s*(.*python[\d.]*)\n", pathlib.Path(tool.path).read_text(errors="replace"))
        question = [*shlex.split(python[1]), "-c", "import pandas; print(pandas.__version__)"]
        if re.match(r"[3-9]\.", version := answer_of(*question).stdout):
            yield f"{python[1]} has pandas {version.strip()}. {OLD_PANDAS}"


def worst_code(codes):
    """The exit code for all of them: what is missing (3) comes before the GPU (4)."""
    return min(filter(None, codes), default=OK)
