"""Where a tool is found: pip wheels of ROCm before the system's, without an activated environment."""
import os
import shutil
import sys
import venv

import pytest

from fusion_lab.rocm import machine as rocm_machine
from fusion_lab.rocm import preflight
from fusion_lab.rocm.machine import Tool, options_in
from tests.rocm.fake_rocm.machine import FAKES, WRAPPERS, manifest, start, start_script


@pytest.fixture
def environment(installations, tmp_path):
    """A virtual environment with torch and the wheels of ROCm 7.14: console scripts in bin, tools inside."""
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    site = place / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(installations / "rocm-wheels" / "site-packages", site, dirs_exist_ok=True)
    for tool in WRAPPERS.values():
        inside, = site.glob(f"_rocm_*/bin/{tool}")
        script = place / "bin" / tool
        script.write_text(f'#!/bin/sh\nexec {inside} "$@"\n')
        script.chmod(0o755)
    (site / "torch").mkdir()
    shutil.copy(FAKES / "torch" / "__init__.py", site / "torch")
    shutil.copy(FAKES / "trainer.py", place)  # where no other torch lies beside it
    (place / "roctx.py").symlink_to(FAKES / "roctx.py")
    return place


@pytest.mark.parametrize("script, tool", WRAPPERS.items())
def test_an_environment_with_wheels_needs_no_activation(script, tool, environment, machine):
    """Its tool is taken although another ROCm is on PATH, its release is known, and nothing is warned of."""
    workplace = machine("7.0", PYTHON=str(environment / "bin" / "python"), PYTHONPATH="",
                        FAKE_HIP="7.14.1", TINYOPENFOLD_SCRIPT=str(environment / "trainer.py"))
    done = start_script(script, "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    record = manifest(workplace / "x")
    assert (record["tool"], record["rocm"]) == (str(environment / "bin" / tool), "7.14")
    assert record["commands"][0]["argv"][0] == record["tool"] and "warning" not in done.stdout


def test_wheels_without_console_scripts_and_of_another_python(environment, machine, monkeypatch):
    machine("7.0")
    assert rocm_machine.wheel_folders() == []  # of this Python, which has none
    assert rocm_machine.find_tool("rocprofv3", "--help").rocm == "7.0"
    site, = (environment / "lib").glob("*/site-packages")
    monkeypatch.syspath_prepend(site)
    folders = rocm_machine.wheel_folders()
    assert folders == [os.path.dirname(sys.executable), f"{site}/_rocm_sdk_core/bin",
                       f"{site}/_rocm_profiler/bin"]
    found = rocm_machine.find_tool("rocprof-compute", "profile", "--help")
    assert (found.path, found.rocm) == (f"{site}/_rocm_profiler/bin/rocprof-compute", "7.14")
    monkeypatch.setenv("PATH", "")
    assert rocm_machine.find_tool("no-such-tool").path is None


def test_only_a_tool_from_elsewhere_is_a_second_rocm(environment):
    """Not one inside a wheel beside torch, nor a console script of such a wheel."""
    torch_file = next(environment.glob("lib/*/site-packages/torch/__init__.py"))
    torch = {"hip": "7.14.1", "path": str(torch_file)}
    script, inside, system = (
        list(preflight.mismatch_warnings(Tool("rocprofv3", f"{place}/rocprofv3", rocm="7.14"), torch))
        for place in (environment / "bin", torch_file.parents[1] / "_rocm_sdk_core/bin", "/opt/rocm/bin"))
    assert script == inside == []
    warning, = system
    assert "torch has its ROCm from pip wheels" in warning and "PYTHON=venv/bin/python" in warning
    assert "packages of the system" in warning and "rocm-sdk" not in warning  # which needs rocm[devel]


@pytest.mark.parametrize("script", ["run_rocprof_compute.sh", "run_rocprof_sys.sh"])
def test_the_wheel_that_has_the_other_profilers_is_named(script, machine):
    machine(None)
    done = start(script)
    assert done.returncode == 3 and "the wheel rocm-profiler (7.13 or newer)" in done.stderr


def test_options_of_a_help_text():
    text = ("usage: tool [--not-this]\n  -k, --kernel-trace    see --pmc\n  --stats\twords --none\n"
            "  --a-b [FILE]   x\n")
    assert options_in(text) == {"--kernel-trace", "--stats", "--a-b"}
