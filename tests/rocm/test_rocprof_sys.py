"""rocprof-sys: how it is called, what its results are, and what it hides of the program."""
import os
import pathlib
import re
from dataclasses import replace

import pytest

from fusion_lab.rocm import rocprof_sys
from fusion_lab.training.files import NO_DATA, OK, PROGRAM_FAILED
from tests.rocm.fake_rocm.machine import everywhere, manifest, start, wrapper

LEFT_OUT = "rocprof-sys-python of ROCm {} writes no rocpd database, 7.2 does: left out"


FROM_START = ("from ROCm 7.13 on the GPU side covers the measured steps only, because rocprof-sys hears the "
              "program's start and stop")


@pytest.mark.parametrize("release, arguments, modules, rocpd, notes", [
    ("7.0", [], ["trainer", "torch/nn/modules", "torch/optim"], "OFF", []),
    ("7.0", ["--rocpd", "--modules", "a", "--modules", "b"], ["a", "b"], "OFF", [LEFT_OUT.format("7.0")]),
    ("7.1", ["--rocpd"], None, "OFF", [LEFT_OUT.format("7.1")]),
    ("7.2", ["--rocpd"], None, "ON", []), ("7.13", ["--rocpd"], None, "ON", [FROM_START])])
def test_how_rocprof_sys_is_called(release, arguments, modules, rocpd, notes, machine, monkeypatch):
    machine(release)
    found = wrapper("rocprof-sys", "-o", "out", *arguments, "--seed", "3")
    found.profiled = replace(found.profiled, path="/x/trainer.py",
                             answer=dict(torch_path="/t/torch/__init__.py"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    monkeypatch.setattr(rocprof_sys, "versioned_python", lambda: "/usr/bin/python3.11")
    command, = found.commands()
    modules = modules or ["trainer", "torch/nn/modules", "torch/optim"]
    assert command.argv == [found.tool.command, "--module-restrict", *modules, "--function-exclude",
                            "_call_impl", "--", "/x/trainer.py", *found.program_flags]
    assert command.argv[-2:] == ["--seed", "3"] and command.cwd is None
    assert command.set_env == dict(
        ROCPROFSYS_TRACE="ON", ROCPROFSYS_PROFILE="ON", ROCPROFSYS_USE_ROCPD=rocpd,
        ROCPROFSYS_TIMEMORY_COMPONENTS="wall_clock trip_count cpu_clock peak_rss page_rss",
        ROCPROFSYS_OUTPUT_PATH=found.directory, ROCPROFSYS_TIME_OUTPUT="OFF", ROCPROFSYS_USE_PID="ON",
        PYTHON_EXECUTABLE="/usr/bin/python3.11", LD_LIBRARY_PATH="/t/torch/lib:/own")
    assert command.unset_env == ("ROCPROFSYS_OUTPUT_PREFIX", "ROCPROFSYS_CONFIG_FILE")
    assert found.notes == notes
    assert list(found.facts())[-1] == "torch's own libraries will be found: LD_LIBRARY_PATH=/t/torch/lib:/own"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found.loader_path() == dict(LD_LIBRARY_PATH="/t/torch/lib")
    found.profiled = replace(found.profiled, answer={})
    assert found.loader_path() == {} and not any("libraries" in fact for fact in found.facts())


def test_what_the_program_itself_says_comes_first(machine):
    machine("7.0")
    found = wrapper("rocprof-sys", "-o", "out")
    name = os.path.basename(found.profiled.path)
    said = f"x\n{name}: error: {'a' * 201}\nException - b\n"
    assert found.judge(said) == (PROGRAM_FAILED, "a" * 200)
    assert found.judge(said.replace(name, f"not {name}")) == (PROGRAM_FAILED, "it raised an exception: b")


@pytest.mark.parametrize("name, words", [
    ("a.proto", "timeline, open at https://ui.perfetto.dev"), ("wall.txt", "call stack, read in any editor"),
    ("x y/a.db", "rocpd, read with: python profile_summary.py 'x y'"),
    ("wall.json", "the same for programs")])
def test_how_results_of_rocprof_sys_are_opened(name, words):
    assert rocprof_sys.how_to_open(pathlib.Path(name)) == words


@pytest.mark.parametrize("contents, seen", [
    (dict(), True), ({"a.txt": b"x"}, True), ({"a.proto": b"x"}, False), ({"a.txt": b"device_hip"}, True),
    ({"a.proto": b"x device_hip"}, True), ({"a.proto": b"x", "b.proto": b"kernel_dispatch"}, True)])
def test_kernels_in_a_timeline(contents, seen, tmp_path):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert rocprof_sys.sees_gpu([tmp_path / name for name in contents]) is seen


@pytest.fixture
def sys_run(machine):
    """A wrapper of rocprof-sys whose directory is there, and that began a second ago."""
    machine("7.0")
    found = wrapper("rocprof-sys", "-o", "out")
    os.makedirs(found.directory)
    return found


def test_an_exception_that_rocprof_sys_hides_is_told_in_its_own_words(sys_run):
    result = '\n{"performance_summary": {}}\n'
    assert sys_run.judge(f"ran\nException - HIP out of memory{result}") == (
        PROGRAM_FAILED, "it raised an exception: HIP out of memory")
    assert sys_run.judge(f"Traceback (most recent call last):\n  File{result}") == (
        PROGRAM_FAILED, "it raised an exception")
    assert sys_run.judge("no Exception - here\n")[1].startswith("it left no result")
    assert sys_run.judge(f"fine{result}") == (
        NO_DATA, "rocprof-sys-python wrote no trace, no profile and no database")


def test_a_result_counts_if_it_is_of_this_run(sys_run):
    """The clock of a file system may be behind by up to a second."""
    path = os.path.join(sys_run.directory, "performance_summary_v2.json")
    for age, found in ((0.5, True), (1.5, False)):
        open(path, "w").close()
        os.utime(path, (sys_run.started - age,) * 2)
        assert sys_run.left_result() is found


def test_results_of_rocprof_sys_are_listed_with_their_size(sys_run, capsys):
    for name, size in (("perfetto-trace-7.proto", 2_500_000), ("wall_clock-7.txt", 999_949),
                       ("wall_clock-7.json", 1_000_000), ("rocpd-7.db", 500_000_001), ("trip_count-7.txt", 0),
                       ("metadata-7.json", 5)):
        with open(os.path.join(sys_run.directory, name), "wb") as file:
            file.truncate(size)
    assert sys_run.judge("{}\n") == (OK, "4 result files, but no GPU kernel in the trace")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "  perfetto-trace-7.proto  2.5 MB  timeline, open at https://ui.perfetto.dev"
    assert lines[1].startswith("  rocpd-7.db  500.0 MB  rocpd, read with: python profile_summary.py ")
    assert lines[1].endswith("; large: use fewer steps or --modules")
    assert lines[2:] == ["  wall_clock-7.json  1.0 MB  the same for programs",
                         "  wall_clock-7.txt  999.9 kB  call stack, read in any editor"]
    pathlib.Path(sys_run.directory, "perfetto-trace-7.proto").write_bytes(b"x rocm_kernel_dispatch")
    with open(os.path.join(sys_run.directory, "rocpd-7.db"), "wb") as file:
        file.truncate(500_000_000)
    assert sys_run.judge("{}\n") == (OK, "4 result files")
    assert "large" not in capsys.readouterr().out


@everywhere
def test_rocprof_sys_writes_what_was_asked_for_whatever_the_defaults(generation, machine):
    workplace = machine(generation, ROCPROFSYS_OUTPUT_PREFIX="theirs", ROCPROFSYS_TIME_OUTPUT="ON")
    done = start("run_rocprof_sys.sh", "--rocpd", "--modules", "a b", "--modules", "c|d")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {re.sub(r"-\d+", "", path.name) for path in (workplace / "rocprof_sys_profiles_v2").iterdir()}
    wanted = {"perfetto-trace.proto", "wall_clock.txt", "wall_clock.json", "trip_count.txt"}
    assert wanted <= names and ("rocpd.db" in names) == (generation == "10.1")
    assert "ui.perfetto.dev" in done.stdout and " kB " in done.stdout
    argv = manifest(workplace / "rocprof_sys_profiles_v2")["commands"][0]["argv"]
    assert argv[:5] == ["rocprof-sys-python", "--module-restrict", "a b", "c|d", "--function-exclude"]
    assert argv[argv.index("--") + 1].endswith("trainer.py")  # never python
