"""What the ROCm wrappers have in common, with stand-ins (fake_rocm/) as strict as the tools of a release."""
import os
import re
import shlex
import subprocess
import sys

import pytest

from fusion_lab.rocm import machine as rocm_machine
from fusion_lab.rocm import preflight, session, wrappers
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm.machine import (
    FAKES,
    GENERATIONS,
    ODD_FLAGS,
    WRAPPERS,
    manifest,
    recorded,
    start,
    start_script,
    wrapper,
)
from tests.support import complaint

everywhere = pytest.mark.parametrize("generation", GENERATIONS)
every_wrapper = pytest.mark.parametrize("script", WRAPPERS)


# What works

@everywhere
@every_wrapper
def test_session(script, generation, machine, tmp_path):
    workplace = machine(generation)
    done = start_script(script, "-o", "out put", *ODD_FLAGS, "--num-steps", "4", "--", "-o", "theirs")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = recorded(tmp_path)
    flags = [*ODD_FLAGS, "--num-steps", "4", "-o", "theirs"]
    assert all(run == {"argv": run["argv"][:-len(flags)] + flags, "cwd": str(workplace)} for run in runs)
    out = workplace / "out put"
    assert runs[0]["argv"][:2] == ["--profile-dir", str(out)]
    assert (out / "performance_summary_v2.json").exists() and (out / "run.log").stat().st_size
    record = manifest(out)
    assert (record["exit_code"], record["status"], record["rocm"]) == (0, "done", generation)
    assert WRAPPERS[script] in (out / "command.txt").read_text()
    assert f"# torch hip: {generation}.1" in (out / "env.txt").read_text()
    assert {"path": "run.log", "bytes": (out / "run.log").stat().st_size} in record["files"]
    assert not list(workplace.glob("*_profiles_v2*")) and not list(out.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "6.3", "10.1"])
@every_wrapper
def test_dry_run_without_the_tool_is_a_script_that_the_tools_accept(script, chosen, machine, tmp_path):
    """What is printed on a machine without ROCm is run, as it is, on machines with one."""
    workplace = machine(None)
    done = start(script, "--dry-run", *(["--rocm", chosen] if chosen else []), *ODD_FLAGS)
    assert done.returncode == 0 and not list(workplace.iterdir())
    assert (f"for {WRAPPERS[script]} of ROCm {chosen}" if chosen else "is not installed") in done.stdout
    for generation in [chosen] if chosen else GENERATIONS:
        machine(generation)
        copied = subprocess.run(["bash", "-e"], input=done.stdout, capture_output=True, text=True)
        assert copied.returncode == 0, copied.stderr
        assert recorded(tmp_path)[-1]["argv"][-len(ODD_FLAGS):] == ODD_FLAGS
        subprocess.run(["rm", "-rf", *map(str, workplace.iterdir())], check=True)


@pytest.mark.parametrize("name", wrappers.WRAPPERS)
def test_nothing_breaks_out_of_the_script(name, machine):
    """Neither a path in a remark nor the content of a file is run."""
    workplace = machine(None)
    made = wrapper(name, "--dry-run", "-o", "o", "--program", "x\ntouch PWNED")
    made.notes.append("y\ntouch PWNED")
    content = "END_OF_FILE\ntouch PWNED\nEND_OF_FILE_\n"
    made.files = lambda: {"z": content}
    text = made.script_text([])
    subprocess.run(["bash", "-e"], input=text, text=True, check=True)
    assert [path.name for path in workplace.iterdir()] == ["o"] and "PWNED" in text
    assert (workplace / "o" / "z").read_text() == content


@every_wrapper
def test_dry_run_shows_what_a_run_runs(script, machine):
    workplace = machine("10.1")
    shown = start(script, "--dry-run", "-o", "x").stdout
    assert not list(workplace.iterdir())
    assert start(script, "-o", "x").returncode == 0
    assert (workplace / "x" / "command.txt").read_text() == shown


@every_wrapper
def test_help(script, machine):
    machine(None)
    done = start(script, "--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "default" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 112 and len(done.stdout.splitlines()) < 60


# What fails

@pytest.mark.parametrize("behaviour,words", [("exit3", "exit code|no result|Profiling execution failed"),
                                             ("segv", "SIGSEGV|failed|segv")])
@every_wrapper
def test_failing_program(script, behaviour, words, machine):
    """Ways to fail beside those of test_rocm_outcomes.py."""
    if behaviour == "segv" and "sys" in script:
        words = "SIGSEGV"  # in-process: the launcher dies as well
    workplace = machine("7.0", FAKE_TRAINER=behaviour)
    done = start(script, "-o", "out")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "the profiled program failed" in done.stderr and "run.log" in done.stderr
    assert re.search(words, done.stdout + done.stderr)
    assert manifest(workplace / "out")["exit_code"] == 5
    assert "done in" not in done.stdout


@pytest.mark.parametrize("script,trap,code,words", [
    ("run_rocprofv3.sh", "fatal", 1, "librocprofiler-sdk-tool.so does not exist"),
    ("run_rocprof_sys.sh", "bindings", 3, "rocprof-sys-sample"),
    ("run_rocprof_compute.sh", "packages", 3, "pip install 'pandas<3' -r"),
])
def test_broken_tool(script, trap, code, words, machine):
    machine("7.0", FAKE_FAIL=trap)
    done = start(script)
    assert done.returncode == code and words in done.stderr, done.stderr
    if code == 3:  # found by the preflight; without it, by reading the log
        done = start(script, "--skip-preflight")
        assert done.returncode == code and words in done.stderr


@every_wrapper
def test_preflight_lists_every_problem_at_once(script, machine):
    workplace = machine(None, KFD_DEVICE="/nonexistent/kfd", FAKE_HIP="", MIN_FREE_GB="1e9",
                        TINYOPENFOLD_SCRIPT="absent.py")
    done = start(script)
    assert done.returncode == 3 and not list(workplace.iterdir())
    for words in (f"{WRAPPERS[script]} not found", "is not a ROCm build", "no /nonexistent/kfd", "GB free",
                  "cannot read", "5 problem(s)"):
        assert words in done.stderr
    assert len(done.stderr.splitlines()) < 12


@pytest.mark.parametrize("script", [*WRAPPERS, "run_all_profilers.sh"])
def test_flags_that_the_program_refuses(script, machine, tmp_path):
    """Its one line and its code, under the wrapper's name; nothing ran, nothing was written."""
    workplace = machine("7.0")
    for done in (start(script, "--bad-flag"), start(script, "--dry-run", "--", "--bad-flag")):
        assert done.returncode == 2 and done.stdout == ""
        assert complaint(done.stderr) == f"{script}: error: unrecognized arguments: --bad-flag\n"
    assert not list(workplace.iterdir()) and not (tmp_path / "record").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", [*WRAPPERS, "run_all_profilers.sh"])
def test_program_that_cannot_judge_its_flags(script, machine, tmp_path):
    machine("7.0", FAKE_TRAINER="unaware")
    several = "all" in script
    only = ["--only=rocprofv3"] * several
    shown = start(script, "--dry-run", "--bad-flag")
    assert shown.returncode == 0
    assert "flags were not judged: trainer.py does not know --check-flags" in shown.stdout
    assert start(script, "--bad-flag", *only).returncode == (1 if several else 5)
    machine("7.0", FAKE_TRAINER="no_torch")
    shown = start(script, "--dry-run")
    assert shown.returncode == 0 and "flags were not judged: needs torch" in shown.stdout
    done = start(script, *only)
    assert done.returncode == (1 if several else 3)
    assert "cannot import torch (needs torch" in done.stdout + done.stderr


@pytest.mark.parametrize("script", WRAPPERS)
def test_modes_of_the_program_are_not_refused(script, machine, tmp_path):
    machine("7.0")
    done = start(script, "--dry-run", "--compare-fusion")
    assert done.returncode == 0 and "--compare-fusion" in done.stdout and "not judged" not in done.stdout
    assert start(script, "--dry-run", "--compare-fusion", "--bad-flag").returncode == 2


def test_the_program_is_asked_once(machine, tmp_path):
    """One import of torch serves flags, preflight, steps and names; FAKE_QUESTIONS counts the questions."""
    workplace = machine("7.0", FAKE_QUESTIONS=str(tmp_path / "questions"))
    assert start("run_rocprofv3.sh", "-o", "x").returncode == 0
    assert (tmp_path / "questions").read_text().count("asked") == 1
    assert manifest(workplace / "x")["summary"] == "performance_summary_v2.json"
    assert manifest(workplace / "x")["torch"]["hip"] == "7.0.1"


@pytest.mark.parametrize("script", [*WRAPPERS, "run_all_profilers.sh"])
def test_another_program(script, machine, tmp_path, monkeypatch):
    """--program, before TINYOPENFOLD_SCRIPT; its results may have other names."""
    workplace = machine("7.0", FAKE_SUMMARY="performance_summary_mlp.json")
    other = tmp_path / "other place" / "mlp.py"
    other.parent.mkdir()
    other.write_text((FAKES / "trainer.py").read_text())
    shown = start(script, "--dry-run", "--program", other).stdout
    assert shlex.quote(str(other)) in shown and "fake_rocm/trainer.py" not in shown
    monkeypatch.setenv("TINYOPENFOLD_SCRIPT", "/nonexistent.py")
    done = start(script, "--program", other, "-o", "out", *["--only=sys"] * ("all" in script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((workplace / "out").rglob("performance_summary_mlp.json"))


@pytest.mark.slow
def test_the_real_program_judges_its_flags(machine, monkeypatch):
    workplace = machine("7.0", PYTHONPATH="")
    monkeypatch.delenv("TINYOPENFOLD_SCRIPT")
    for flags, named in ((["--no-flag-of-ours"], "--no-flag"), (["--", "--num-steps", "0"], "--num-steps"),
                         (["--amp-dtype", "bfloat16"], "--use-amp")):
        done = start("run_rocprofv3.sh", "--dry-run", *flags)
        assert done.returncode == 2 and complaint(done.stderr).count("\n") == 1
        assert complaint(done.stderr).startswith("run_rocprofv3.sh: error: ") and named in done.stderr
    shown = start("run_rocprofv3.sh", "--dry-run", "--save-checkpoint", "x.pt")  # what training accepts
    assert shown.returncode == 0 and "not judged" not in shown.stdout and not list(workplace.iterdir())


@every_wrapper
def test_no_gpu(script, machine):
    machine("7.0", KFD_DEVICE="/nonexistent/kfd", FAKE_GPUS="0")
    done = start(script)
    assert done.returncode == 4 and "sees no GPU" in done.stderr and "--device=/dev/kfd" in done.stderr
    assert start(script, "--skip-preflight").returncode == 0


def test_preflight_without_permission_or_torch(machine, monkeypatch, tmp_path):
    machine("7.0")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "no permission" in next(preflight.kfd_problems()).what
    assert [problem.code for problem in preflight.torch_problems({"error": "No module"})] == [3]


def test_bindings_for_another_python(machine, tmp_path):
    machine("7.0")
    tool = rocm_machine.find_tool("rocprof-sys-python", "--help")
    assert not list(preflight.bindings_problems(tool))
    prefix = tmp_path / "rocm"
    place = prefix / "lib" / "python3.6" / "site-packages" / "rocprofsys"
    place.mkdir(parents=True)
    (place / "libpyrocprofsys.cpython-36-x86_64-linux-gnu.so").touch()
    problem, = preflight.bindings_problems(rocm_machine.Tool("x", str(prefix / "bin" / "x")))
    assert "for Python 3.6" in problem.what and "rocprof-sys-sample" in problem.advice and problem.code == 3


def test_rocm_of_torch_against_rocm_of_the_tool_and_stale_variables(machine):
    machine("7.0", FAKE_HIP="6.3.42", ROCPROF_PRELOAD="x.so", ROCPROF_OUTPUT_FORMAT="json")
    done = start("run_rocprofv3.sh")
    assert done.returncode == 0
    assert "torch is built for ROCm 6.3" in done.stdout and "belongs to ROCm 7.0" in done.stdout
    assert "able to change the profile: ROCPROF_PRELOAD. To run without: env -u" in done.stdout


def test_python_that_cannot_run_the_wrappers(machine):
    machine(None, PYTHON="/nonexistent/python")
    done = start_script("run_rocprofv3.sh", "--dry-run")
    assert done.returncode == 3 and "set PYTHON" in done.stderr


@pytest.mark.parametrize("script", ["launch_performance_study.sh", "run_pytorch_profiler.sh"])
def test_python_without_torch(script, machine, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')
    bare.chmod(0o755)
    machine(None, PYTHON=str(bare))
    assert start_script(script, "--help").returncode == 0
    done = start_script(script, "--num-steps", "3")
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "lacks torch, numpy" in done.stderr


@pytest.mark.parametrize("name,arguments,words", [
    ("rocprofv3", ["--timeout", "soon"], "--timeout: 'soon': must be a whole number"),
    ("rocprofv3", ["--rocm", "7"], "--rocm: '7' is not a ROCm release"),
    ("rocprofv3", ["--hip-trace=yes"], "--hip-trace: ignored explicit argument"),
    ("rocprof-sys", ["--modules"], "--modules: expected one argument"),
    ("rocprof-compute", ["--mode", "all"], "--mode: invalid choice: 'all'"),
    ("rocprof-compute", ["--device", "cpu"], "--device: 'cpu': must be a whole number"),
    ("rocprof-compute", ["--dispatch", "-1"], "--dispatch: '-1': must be a whole number"),
    ("rocprof-compute", ["--list-stats", "--seed", "3"], "--seed 3: --mode analyze runs no trainer"),
])
def test_wrong_use_is_one_line(name, arguments, words, machine, capsys):
    machine(None)
    assert session.main(wrappers.WRAPPERS[name], arguments) == 2
    error = capsys.readouterr().err
    assert words in error and complaint(error).count("\n") == 1


@pytest.mark.parametrize("name, flags", [
    ("rocprofv3", ["--num-steps", "10", "--warmup-steps", "3"]),
    ("rocprof-sys", ["--batch-size", "2", "--num-steps", "3", "--warmup-steps", "1", "--seq-len", "16"]),
    ("rocprof-compute", ["--batch-size", "2", "--num-steps", "2", "--warmup-steps", "1", "--seed", "42",
                         "--deterministic", "--seq-len", "32"])])
def test_which_flags_the_program_gets(name, flags, machine):
    """Those of the user come last, so that they win."""
    machine("7.0")
    found = wrapper(name, "-o", "out", "--num-steps", "7", "--", "--force")
    assert found.program_flags == ["--profile-dir", found.directory, "--enable-rocm-profiling", *flags,
                                   "--num-steps", "7", "--force"]
    assert found.own_flags == ["--num-steps", "7", "--force"] and not found.options.force


def test_releases_are_compared_as_numbers(machine):
    machine("7.2")
    found = wrapper("rocprofv3")
    assert [found.before(release) for release in ("6.4", "7.2", "7.13", "10.0")] == [False, False, True, True]
    assert found.tool_and_release() == "rocprofv3 of ROCm 7.2" and found.has("--kernel-trace")
    assert found.has("--selected-regions") and not found.has("--no-such-option")
    found.tool.rocm = None  # of a tool that does not say, the worst is assumed
    assert found.before("6.3") and found.tool_and_release() == "rocprofv3"
    dry = wrapper("rocprofv3", "--dry-run", "--rocm", "6.4")
    assert dry.release() == "6.4" and dry.has("--pmc") and not dry.has("--selected-regions")
    with pytest.raises(UserError, match="--rocm: chooses what --dry-run prints"):
        wrapper("rocprofv3", "--rocm", "6.4")


@pytest.mark.parametrize("release, known", [("5.7", False), ("6.3", True), ("10.1", True), ("11.0", False)])
def test_releases_that_nobody_knows_are_said_to_be_unknown(release, known, machine):
    machine(None)
    shown = start("run_rocprofv3.sh", "--dry-run", "--rocm", release)
    assert shown.returncode == 0
    assert ("is not among those known here (6.3 to 10.1)" in shown.stdout) == (not known)
