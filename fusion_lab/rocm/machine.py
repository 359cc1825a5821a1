"""The tool on this machine: where it is, which release, which options it has. Runs no program."""
import contextlib
import importlib.metadata
import os
import pathlib
import re
import shlex
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


def architectures():
    """GPUs by the driver's own records: ["gfx942"]; empty where it has none."""
    nodes = pathlib.Path(os.environ.get("KFD_TOPOLOGY", "/sys/class/kfd/kfd/topology/nodes"))
    names = []
    for path in sorted(nodes.glob("*/properties")):
        with contextlib.suppress(OSError, ValueError):
            version = re.search(r"^gfx_target_version ([1-9]\d+)$", path.read_text(), re.MULTILINE)
            if version:  # 90402 is 9.4.2, 90010 is 9.0.10: hexadecimal in the name, gfx90a
                digits = int(version[1])
                names.append(f"gfx{digits // 10000}{digits // 100 % 100:x}{digits % 100:x}")
    return names


def is_rdna(architecture):
    """gfx1250 is an Instinct."""
    return re.fullmatch(r"gfx1[0-2]\w\w", architecture) is not None and architecture != "gfx1250"


def performance_levels():
    """What the driver does with the clocks of each GPU: ["auto"], or ["profile_standard"]."""
    levels = []
    for path in pathlib.Path(os.environ.get("DRM_DEVICES", "/sys/class/drm")).glob("card*/device"):
        with contextlib.suppress(OSError, ValueError):
            levels.append((path / "power_dpm_force_performance_level").read_text().strip())
    return levels


def wheel_folders():
    """Where this interpreter's ROCm from pip wheels has its tools: console scripts beside it, or inside."""
    wheels = sorted({path for place in filter(None, sys.path)
                     for path in pathlib.Path(place).glob("_rocm_*/bin")},
                    key=lambda path: "_core" not in str(path))
    return [os.path.dirname(sys.executable), *map(str, wheels)] if wheels else []


def from_wheels(path):
    """Does a tool belong to the ROCm that pip installs? Its console scripts stand in bin, beside lib."""
    path = pathlib.Path(path or "")
    return "_rocm_" in str(path.resolve()) or any(path.parent.parent.glob(
        "lib/python3*/*-packages/_rocm_sdk_core"))


def own_interpreter(tool_path):
    """Words that start the Python that a tool names in its first line; empty where it is no Python script."""
    with contextlib.suppress(OSError, ValueError):  # bytes or quotes that make no words
        with open(tool_path, "rb") as file:
            start = re.match(rb"#!\s*(.*python[\d.]*)\s*$", file.readline(200))
        return shlex.split(start[1].decode()) if start else []
    return []


def release_of_tree(tool_path):
    """'7.0' for a tool in a ROCm tree, or of pip wheels; None for any other."""
    with contextlib.suppress(OSError, ValueError, importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.version("rocm-sdk-core") if from_wheels(tool_path) else (
            pathlib.Path(tool_path).resolve().parents[1] / ".info" / "version").read_text()
        return re.match(r"\d+\.\d+|", text)[0] or None
    return None


def find_tool(name, *help_arguments):
    """The tool of this interpreter's wheels, on PATH or in the ROCm tree, and what it says of itself."""
    tree = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "bin")
    path = shutil.which(name, path=os.pathsep.join([*wheel_folders(), os.environ.get("PATH") or tree, tree]))
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
        tool.version = (re.search(r"version:?\s*v?(\d[\w.]*)", text) or ["", "unknown"])[1]
        tool.rocm = tool.rocm or (re.search(r"rocm_version:\s*(\d+\.\d+)", text) or ["", None])[1]
    return tool
