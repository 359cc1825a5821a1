"""rocprof-sys: how it is called, what its results are, and what it hides of the program."""
import os
import pathlib
import re

import pytest

from fusion_lab.rocm import preflight
from fusion_lab.training.errors import NO_DATA, OK, PROGRAM_FAILED
from tests.rocm.fake_rocm.machine import everywhere, start, wrapper


@pytest.mark.parametrize("arguments, modules, rocpd", [
    ([], ["trainer", "torch/nn/modules", "torch/optim"], "OFF"),
    (["--rocpd", "--modules", "a", "--modules", "b"], ["a", "b"], "ON")])
def test_how_rocprof_sys_is_called(arguments, modules, rocpd, machine, monkeypatch):
    machine("7.0", LD_LIBRARY_PATH="/own")
    monkeypatch.setattr(preflight, "versioned_python", lambda: "/usr/bin/python3.11")
    found = wrapper("rocprof-sys", "-o", "out", *arguments, "--seed", "3")
    command, = found.commands()
    assert command.argv == [found.tool.path, "--module-restrict", *modules, "--function-exclude",
                            "_call_impl", "--", found.program, *found.program_flags]  # never python
    assert command.set_env == dict(
        ROCPROFSYS_TRACE="ON", ROCPROFSYS_PROFILE="ON", ROCPROFSYS_USE_ROCPD=rocpd,
        ROCPROFSYS_TIMEMORY_COMPONENTS="wall_clock trip_count cpu_clock peak_rss page_rss",
        ROCPROFSYS_OUTPUT_PATH=found.directory, ROCPROFSYS_TIME_OUTPUT="OFF", ROCPROFSYS_USE_PID="ON",
        PYTHON_EXECUTABLE="/usr/bin/python3.11", LD_LIBRARY_PATH="/site/torch/lib:/own")


@everywhere
def test_it_writes_what_was_asked_for_whatever_the_defaults(release, machine):
    """Before 7.2 there is no database, which is said; torch's own libraries let it see the GPU."""
    workplace = machine(release, ROCPROFSYS_OUTPUT_PREFIX="theirs", ROCPROFSYS_TIME_OUTPUT="ON")
    done = start("rocprof-sys", "--rocpd")
    assert done.returncode == 0, done.stdout + done.stderr
    out = workplace / "rocprof_sys_profiles_v2"
    names = {re.sub(r"-\d+", "", path.name) for path in out.iterdir()}
    assert {"perfetto-trace.proto", "wall_clock.txt", "wall_clock.json", "trip_count.txt"} <= names
    assert ("rocpd.db" in names) == (release == "10.1")
    assert ("but no rocpd database, which comes with ROCm 7.2" in done.stdout) == (release != "10.1")
    assert "ui.perfetto.dev" in done.stdout and "no GPU kernel" not in done.stdout


@pytest.mark.parametrize("said, results, code, reason", [
    ("x\ntrainer.py: error: no\nException - b\n{}\n", {}, PROGRAM_FAILED, "no"),
    ("ran\nException - HIP out of memory\n{}\n", {}, PROGRAM_FAILED, "HIP out of memory"),
    ("Traceback (most recent call last):\n  File\nKeyError: 1\n", {}, PROGRAM_FAILED, "KeyError: 1"),
    ("no Exception - here\n", {}, PROGRAM_FAILED, "it left no result"),
    ("fine\n{}\n", {"trip_count-7.txt": "", "metadata-7.json": "{}"}, NO_DATA, "wrote no trace"),
    ("fine\n{}\n", {"perfetto-trace-7.proto": "x", "wall_clock-7.txt": "x"}, OK,
     "2 result files, but no GPU kernel in the trace")])
def test_what_the_launcher_hides_of_the_program_is_told(said, results, code, reason, machine):
    """It returns 0 whatever becomes of the script, and where its trace saw nothing of the GPU."""
    machine("7.0")
    found = wrapper("rocprof-sys", "-o", "out")
    os.makedirs(found.directory)
    for name, content in results.items():
        pathlib.Path(found.directory, name).write_text(content)
    judged = found.judge(said)
    assert judged[0] == code and reason in judged[1]
