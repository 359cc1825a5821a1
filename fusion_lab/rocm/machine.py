"""The tool on this machine: where it is, which release, which options it has. Runs no program."""
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass


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


def release_of_tree(tool_path):
    """'7.0' for a tool in a ROCm tree, or None, as for one in a virtual environment."""
    with contextlib.suppress(OSError):
        text = (pathlib.Path(tool_path).resolve().parent.parent / ".info" / "version").read_text()
        start = re.match(r"\d+\.\d+", text)
        return start and start[0]
    return None


def find_tool(name, *help_arguments):
    """The tool on PATH, or in the ROCm tree, and what it says of itself."""
    rocm_bin = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "bin")
    path = shutil.which(name) or shutil.which(name, path=rocm_bin)
    if not path:
        return Tool(name)
    tool = Tool(name, path, rocm=release_of_tree(path))
    code, text = output_of(path, *help_arguments)
    if code:
        tool.trouble = text.strip()
        return tool
    tool.options = options_in(text)
    if "--version" in tool.options:  # rocprofv3 has it from ROCm 7.0 on, rocprof-sys-python never
        _, text = output_of(path, "--version")
        version = re.search(r"version:?\s*v?(\d[\w.]*)", text)
        rocm = re.search(r"rocm_version:\s*(\d+\.\d+)", text)
        tool.version = version[1] if version else "unknown"
        tool.rocm = tool.rocm or (rocm[1] if rocm else None)
    return tool
