"""What the tests of the ROCm wrappers share: start a wrapper, read what it and the stand-ins recorded."""
import contextlib
import io
import json
import pathlib
import subprocess

import pytest

from fusion_lab.rocm import all_profilers, kernel_summary

from . import common

FAKES = pathlib.Path(common.__file__).parent
RELEASES = ("6.3", "7.0", "10.1")
everywhere = pytest.mark.parametrize("release", RELEASES)
TOOLS = {"rocprofv3": "rocprofv3", "rocprof-sys": "rocprof-sys-python", "rocprof-compute": "rocprof-compute"}
every_tool = pytest.mark.parametrize("name", TOOLS)
ODD_FLAGS = ["--data", "my files/a b", "--title=x  y", "--note", "it's \"quoted\" $HOME *", "-5",
             "--empty", "", "--text", "a\nEND_OF_FILE\ntouch PWNED\n"]


def start(name, *arguments):
    """A wrapper, "all" or "summary" in this process, which spares two shells and two Pythons."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = kernel_summary.main(list(map(str, arguments))) if name == "summary" else \
                all_profilers.main([name, *map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
    for stream in streams:
        stream.seek(0)
    return subprocess.CompletedProcess(name, code, *(stream.read() for stream in streams))


def wrapper(name, *arguments):
    """The wrapper of this tool, as a command line makes it."""
    return all_profilers.WRAPPERS[name].from_arguments(list(arguments))


def summary_of(directory, name="rocprofv3_summary.json"):
    return json.loads((directory / name).read_text())


def manifest(directory):
    return summary_of(directory, "manifest.json")


def recorded(tmp_path):
    """argv, cwd and inherited of every run of the stand-in for the trainer."""
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


def csv(path, header, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def run_of(directory, *kernels, **steps):
    """A result directory with these (name, calls, nanoseconds in all), and a manifest with its steps."""
    csv(directory / "7_kernel_stats.csv", "Name,Calls,TotalDurationNs", *kernels)
    if steps:
        (directory / "manifest.json").write_text(json.dumps(dict(steps_counted="these", **steps)))
    return directory
