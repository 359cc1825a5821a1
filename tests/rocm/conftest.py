"""Machines for the tests of the ROCm wrappers, with a ROCm of some generation or without."""
import os
import shlex
import subprocess
import sys

import pytest

from fusion_lab.training import locks
from tests.rocm.fake_rocm.machine import FAKES, RELEASES, WRAPPERS


def write_tool(path, generation):
    """A launcher of the stand-in. Every session asks for --help, so that answer is kept in a file."""
    python = "$PYTHON_EXECUTABLE" if "sys" in path.name else shlex.quote(sys.executable)
    program = shlex.quote(str(FAKES / (path.name.replace("-", "_") + ".py")))
    start = f"FAKE_ROCM={generation} exec {python} -S -E {program}"
    question = "profile --help" if "compute" in path.name else "--help"
    answer = subprocess.run(["sh", "-c", f"{start} {question}"], stdout=subprocess.PIPE, check=True,
                            env={"PYTHON_EXECUTABLE": sys.executable, "COLUMNS": "200"}).stdout
    kept = path.with_suffix(".help")
    kept.write_bytes(answer)
    path.write_text(f"""#!/bin/sh
case "$FAKE_FAIL:$*" in ":{question}") exec cat {shlex.quote(str(kept))};; esac
{start} "$@"
""")
    path.chmod(0o755)


@pytest.fixture(scope="session")
def installations(tmp_path_factory):
    """A ROCm tree of each release: bin/, .info/version and the Python bindings of rocprof-sys. Pip wheels are
    in site-packages, without .info, their profilers in a wheel of their own."""
    root = tmp_path_factory.mktemp("rocm")
    site = root / "rocm-wheels" / "site-packages"
    about = site / "rocm_sdk_core-7.14.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rocm-sdk-core\nVersion: 7.14.0\n")
    for tool in WRAPPERS.values():
        folder = site / ("_rocm_sdk_core" if tool == "rocprofv3" else "_rocm_profiler") / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        write_tool(folder / tool, "wheels")
    for generation in (*RELEASES[:-1], "next"):
        prefix = root / f"rocm-{generation}"
        (prefix / "bin").mkdir(parents=True)
        (prefix / ".info").mkdir()
        (prefix / ".info" / "version").write_text(f"{generation.replace('next', '10.2')}.0-56\n")
        bindings = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "rocprofsys"
        bindings.mkdir(parents=True)
        (bindings / f"libpyrocprofsys.cpython-3{sys.version_info.minor}-x86_64-linux-gnu.so").touch()
        for tool in WRAPPERS.values():
            write_tool(prefix / "bin" / tool, generation)
    return root


@pytest.fixture
def machine(tmp_path, installations, monkeypatch):
    """machine(generation) prepares the environment of a machine with that ROCm; None: without any."""
    def prepare(generation, **environment):
        prefix = installations / f"rocm-{generation}" if generation else tmp_path / "no-rocm"
        kfd = tmp_path / "kfd"
        kfd.touch()
        settings = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "ROCM_PATH": str(prefix), "KFD_DEVICE": str(kfd),
                    "PYTHON": sys.executable, "PYTHONPATH": str(FAKES), "MIN_FREE_GB": "0",
                    "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(installations / "pycache"),
                    "FAKE_HIP": f"{ {'next': '10.2', 'wheels': '7.14'}.get(generation, generation)}.1",
                    "TINYOPENFOLD_SCRIPT": str(FAKES / "trainer.py"), "FAKE_RECORD": str(tmp_path / "record"),
                    **{name: str(tmp_path / "driver" / name) for name in (
                        "KFD_TOPOLOGY", "DRM_DEVICES", "DRI_DEVICES")},
                    "PYTORCH_PROFILER_SCRIPT": str(tmp_path / "absent" / "run_pytorch_profiler.sh")}
        if generation == "wheels":  # not on PATH: the environment is not activated
            settings["PYTHONPATH"] += f"{os.pathsep}{prefix / 'site-packages'}"
            monkeypatch.syspath_prepend(prefix / "site-packages")
        for name in list(os.environ):
            if name.startswith(("ROCP", "HSA_", "FAKE_")):
                monkeypatch.delenv(name)
        for name, value in {**settings, **environment}.items():
            monkeypatch.setenv(name, value)
        workplace = tmp_path / "work place"
        workplace.mkdir(exist_ok=True)
        monkeypatch.chdir(workplace)
        return workplace
    yield prepare
    locks.release()  # what wrappers hold in this process


@pytest.fixture
def gpu(tmp_path):
    """gpu(version, level) makes the driver's records of a GPU; version as the kernel writes it, 90402."""
    def make(version, level="auto"):
        node = tmp_path / "driver" / "KFD_TOPOLOGY" / "1"
        device = tmp_path / "driver" / "DRM_DEVICES" / "card1" / "device"
        node.mkdir(parents=True, exist_ok=True)
        device.mkdir(parents=True, exist_ok=True)
        (node / "properties").write_text(f"simd_count 304\ngfx_target_version {version}\nvendor_id 4098\n")
        (device / "power_dpm_force_performance_level").write_text(f"{level}\n")
    return make
