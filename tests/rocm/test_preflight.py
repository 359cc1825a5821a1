"""--preflight, and what it looks at: tool, torch, GPU, permissions, clocks, packages."""
import os
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import machine as rocm_machine
from fusion_lab.rocm import preflight
from fusion_lab.rocm.machine import Tool
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK, UserError
from tests.rocm.fake_rocm.machine import FAKES, RELEASES, WRAPPERS, start


@pytest.mark.parametrize("version, name, rdna", [
    (90402, "gfx942", False), (90010, "gfx90a", False), (90500, "gfx950", False), (90008, "gfx908", False),
    (100300, "gfx1030", True), (110000, "gfx1100", True), (110501, "gfx1151", True),
    (120001, "gfx1201", True), (120500, "gfx1250", False),
])
def test_architecture_by_the_drivers_number(version, name, rdna, gpu, machine):
    machine(None)
    gpu(version)
    assert rocm_machine.architectures() == [name] and rocm_machine.is_rdna(name) == rdna


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("script", WRAPPERS)
def test_a_machine_on_which_all_is_well(script, release, machine, gpu):
    workplace = machine(release)
    gpu(90402)
    done = start(script, "--preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(WRAPPERS[script]) and "gfx942" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("  can profile")
    assert not list(workplace.iterdir())
    assert "problem" not in done.stdout and "torch 2.13.0" in done.stdout


def test_every_problem_of_every_tool_at_once(machine, gpu):
    workplace = machine(None, KFD_DEVICE="/nonexistent/kfd", FAKE_HIP="")
    done = start("run_all_profilers.sh", "--preflight")
    assert done.returncode == 3 and not list(workplace.iterdir())
    for tool in WRAPPERS.values():
        assert f"{tool} not found on PATH" in done.stdout
    assert done.stdout.count("is not a ROCm build") == done.stdout.count("no /nonexistent/kfd") == 3
    assert done.stdout.count("cannot profile here") == 3


@pytest.mark.parametrize("script, release, version, code", [
    ("run_rocprof_compute.sh", "7.2", 110000, 1), ("run_rocprof_compute.sh", "7.2", 110501, 1),
    ("run_rocprof_compute.sh", "7.13", 110501, 0), ("run_rocprof_compute.sh", "7.13", 110500, 1),
    ("run_rocprof_compute.sh", "7.14", 110500, 0), ("run_rocprof_compute.sh", "7.14", 110502, 0),
    ("run_rocprof_compute.sh", "7.14", 110503, 1), ("run_rocprof_compute.sh", "10.0", 110503, 0),
    ("run_rocprof_compute.sh", "7.2", 120500, 0), ("run_rocprof_compute.sh", "10.1", 110000, 1),
    ("run_rocprof_compute.sh", "next", 110000, 0),
    ("run_rocprofv3.sh", "7.2", 110000, 0),
])
def test_architectures_that_rocprof_compute_does_not_know(script, release, version, code, machine, gpu):
    machine(release)
    gpu(version)
    done = start(script, "--preflight")
    assert done.returncode == code and ("does not know gfx11" in done.stdout) == bool(code)


@pytest.mark.parametrize("version, level, warned", [
    (110000, "auto", True), (110000, "profile_standard", False), (90402, "auto", False)])
def test_clocks_that_make_counters_zero(version, level, warned, machine, gpu):
    machine("7.2")
    gpu(version, level)
    assert any(preflight.clock_warnings()) == warned
    done = start("run_rocprofv3.sh", "--pmc", "SQ_WAVES")
    assert done.returncode == 0 and ("amd-smi set" in done.stdout) == warned
    assert "amd-smi set" not in start("run_rocprofv3.sh").stdout  # nothing to do with a plain trace


def test_permissions_of_the_render_nodes(machine, tmp_path, monkeypatch):
    machine("7.2")
    node = tmp_path / "driver" / "DRI_DEVICES" / "renderD128"
    node.parent.mkdir(parents=True)
    node.touch()
    assert not list(preflight.render_problems())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem, = preflight.render_problems()
    assert "renderD128" in problem.what and "usermod -aG render,video" in problem.advice


@pytest.mark.parametrize("pandas, problems", [("2.3.3", 0), ("3.1.1", 1)])
def test_pandas_of_the_tools_own_interpreter(pandas, problems, tmp_path):
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\necho {pandas}\n")
    python.chmod(0o755)
    tool = tmp_path / "rocprof-compute"
    tool.write_text(f"#!{python}\n")
    assert rocm_machine.own_interpreter(tool) == [str(python)]
    listed = list(preflight.pandas_problems(rocm_machine.Tool("rocprof-compute", str(tool))))
    assert len(listed) == problems and all("pip install 'pandas<3'" in problem.advice for problem in listed)
    assert rocm_machine.own_interpreter(FAKES / "common.py") == []


def test_disk_space_is_in_units_of_a_billion(tmp_path, monkeypatch):
    monkeypatch.setenv("MIN_FREE_GB", "2.5")
    for free, wanted in ((2.4e9, ["only 2.4 GB free"]), (2.5e9, [])):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place, usage=usage: usage)
        problems = list(preflight.disk_problems(tmp_path / "not" / "there"))
        assert [problem.what.partition(" in ")[0] for problem in problems] == wanted
    monkeypatch.setattr(os, "access", lambda *_: False)
    problem, = preflight.disk_problems(tmp_path)
    assert problem.what == f"{tmp_path} is not writable"


def test_what_is_missing_comes_before_the_gpu():
    def worst(*codes):
        return preflight.worst_code([preflight.Problem(code, "", "") for code in codes])
    assert (worst(FAILED, NO_GPU, MISSING), worst(FAILED, NO_GPU), worst(FAILED), worst()) == (
        MISSING, NO_GPU, FAILED, OK)
    with pytest.raises(UserError) as caught:
        preflight.refuse([preflight.Problem(NO_GPU, "a", "b"), preflight.Problem(MISSING, "c", "d")])
    assert caught.value.code == MISSING and str(caught.value) == "a; c"
    first, *problems, _ = caught.value.lines
    assert first == "cannot profile here, 2 problem(s); nothing was run:"
    assert problems == ["  - a. b", "  - c. d"]


def test_two_roccms_in_one_process_are_warned_of(tmp_path):
    torch = dict(hip="6.4.1", path=str(tmp_path / "torch" / "__init__.py"))
    tool = Tool("rocprofv3", "/opt/bin/rocprofv3", rocm="7.0")
    first, = preflight.mismatch_warnings(tool, torch)
    assert first.startswith("torch is built for ROCm 6.4 (") and "belongs to ROCm 7.0" in first
    assert not list(preflight.mismatch_warnings(Tool("x", "/opt/x", rocm="6.4"), torch))
    assert not list(preflight.mismatch_warnings(tool, dict(hip=None)))
