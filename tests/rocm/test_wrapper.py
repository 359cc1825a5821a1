"""What the ROCm wrappers have in common, with stand-ins (fake_rocm/) as strict as the tools of a release."""
import shutil
import subprocess

import pytest

from tests.rocm.fake_rocm import machine as fakes
from tests.rocm.fake_rocm.machine import ODD_FLAGS, TOOLS, every_tool, everywhere, start, wrapper

every_door = pytest.mark.parametrize("name", [*TOOLS, "all"])


@everywhere
@every_tool
def test_session(name, release, machine, tmp_path):
    """A user's flags arrive as they are, last, so that they win; records tell what was run."""
    workplace = machine(release)
    checked = start(name, "--preflight").stdout
    assert checked.endswith("\ncan profile here\n") and "problem" not in checked
    arguments = ["-o", "out put", *ODD_FLAGS, "--num-steps", "4", "--", "-o", "theirs"]
    done = start(name, *arguments)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    runs, out = fakes.recorded(tmp_path), workplace / "out put"
    flags = [*ODD_FLAGS, "--num-steps", "4", "-o", "theirs"]
    assert all(run["argv"][-len(flags):] == flags and run["cwd"] == str(workplace) for run in runs)
    workload = ["--enable-rocm-profiling", "--force", *wrapper(name, "--dry-run").workload]
    assert runs[0]["argv"][:2 + len(workload)] == ["--profile-dir", str(out / "program"), *workload]
    assert (out / "program" / "performance_summary_v2.json").exists() and (out / "run.log").stat().st_size
    record = fakes.manifest(out)
    assert record["exit_code"] == 0 and f"of ROCm {release}: /" in record["about"][0]
    assert f"torch 2.13.0, ROCm {release}.1" in record["about"][1]
    assert "ROCM_PATH=" in (out / "env.txt").read_text()
    assert (out / "command.txt").read_text() == start(name, "--dry-run", *arguments).stdout
    assert start(name, "-o", "out put").returncode == 2  # not empty


@every_tool
def test_dry_run_without_the_tool_is_a_script_that_the_tools_accept(name, machine, tmp_path):
    """What is printed on a machine without ROCm is run, as it is, on machines with one."""
    workplace = machine(None)
    done = start(name, "--dry-run", *ODD_FLAGS)
    assert done.returncode == 0 and not list(workplace.iterdir()) and "not installed" in done.stdout
    for release in fakes.RELEASES:
        machine(release)
        copied = subprocess.run(["bash", "-e"], input=done.stdout, capture_output=True, text=True)
        assert copied.returncode == 0, copied.stderr
        assert fakes.recorded(tmp_path)[-1]["argv"][-len(ODD_FLAGS):] == ODD_FLAGS
        directory, = workplace.iterdir()  # ODD_FLAGS are no commands
        shutil.rmtree(directory)


@every_door
def test_flags_that_the_program_refuses(name, machine, tmp_path):
    """Its one line and its code; nothing ran, nothing was written."""
    workplace = machine("7.0")
    for done in (start(name, "--bad-flag"), start(name, "--dry-run", "--", "--bad-flag")):
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.endswith(": error: unrecognized arguments: --bad-flag\n")
    assert not list(workplace.iterdir()) and not (tmp_path / "record").exists()


def test_an_option_that_the_tools_help_lacks_is_said(machine):
    machine("7.0")
    for option, listed in (("--no-such-option=1", False), ("--help", True), ("word", True)):
        said = [*wrapper("rocprofv3", "--dry-run", f"--tool-option={option}").warnings()]
        assert any(f"--tool-option={option}" in text for text in said) != listed


@pytest.mark.parametrize("asked", [
    [], ["--enable-cuda-graphs"], ["--enable-torch-compile", "--torch-compile-mode", "reduce-overhead"],
    ["--torch-compile-mode=max-autotune"]])
def test_graphs_run_only_where_they_were_asked_for(asked, machine):
    """ROCm 7.0 to 7.14 lose kernels of graphs: each tool says so, and rocprofv3 traces HIP calls as well, to
    count each replay's kernels."""
    machine("7.0")
    for name in TOOLS:
        found = wrapper(name, "--dry-run", *asked)
        assert any("of graphs" in text for text in found.warnings()) == bool(asked)
        before = found.program_flags[:-len(asked) or None]
        assert found.program_flags == [*before, *asked] and "--disable-cuda-graphs" in before
        if name == "rocprofv3":
            assert ("--hip-trace" in found.commands()[0].argv) == bool(asked)
