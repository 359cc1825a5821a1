"""Machines for the tests of the ROCm wrappers, with a ROCm of some release or without."""
import os
import shlex
import subprocess
import sys

import pytest

from fusion_lab.training import files
from tests.rocm.fake_rocm.machine import FAKES, RELEASES, TOOLS


def write_tool(path, release):
    """A launcher of the stand-in. Every session asks for --help, so that answer is kept in a file."""
    python = "$PYTHON_EXECUTABLE" if "sys" in path.name else shlex.quote(sys.executable)
    program = shlex.quote(str(FAKES / (path.name.replace("-", "_") + ".py")))
    start = f"FAKE_ROCM={release} exec {python} -S -E {program}"
    question = "profile --help" if "compute" in path.name else "--help"
    kept = path.with_suffix(".help")
    kept.write_bytes(subprocess.run(["sh", "-c", f"{start} {question}"], stdout=subprocess.PIPE, check=True,
                                    env={"PYTHON_EXECUTABLE": sys.executable, "COLUMNS": "200"}).stdout)
    path.write_text(f"""#!/bin/sh
case "$FAKE_FAIL:$*" in ":{question}") exec cat {shlex.quote(str(kept))};; esac
{start} "$@"
""")
    path.chmod(0o755)


@pytest.fixture(scope="session")
def installations(tmp_path_factory):
    """A ROCm tree of each release: bin/, .info/version and the Python bindings of rocprof-sys."""
    root = tmp_path_factory.mktemp("rocm")
    for release in RELEASES:
        prefix, minor = root / f"rocm-{release}", sys.version_info.minor
        bindings = prefix / "lib" / f"python3.{minor}" / "site-packages" / "rocprofsys"
        for folder in (prefix / "bin", prefix / ".info", bindings):
            folder.mkdir(parents=True)
        (prefix / ".info" / "version").write_text(f"{release}.0-56\n")
        (bindings / f"libpyrocprofsys.cpython-3{minor}-x86_64-linux-gnu.so").touch()
        for tool in TOOLS.values():
            write_tool(prefix / "bin" / tool, release)
    return root


@pytest.fixture
def machine(tmp_path, installations, monkeypatch):
    """machine(release) prepares the environment of a machine with that ROCm; None: without any."""
    def prepare(release, **environment):
        prefix = installations / f"rocm-{release}" if release else tmp_path / "no-rocm"
        (tmp_path / "kfd").touch()
        settings = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "ROCM_PATH": str(prefix),
                    "KFD_DEVICE": str(tmp_path / "kfd"), "PYTHON": sys.executable, "PYTHONPATH": str(FAKES),
                    "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(installations / "pycache"),
                    "FAKE_HIP": f"{release}.1", "FAKE_RECORD": str(tmp_path / "record"),
                    "TINYOPENFOLD_SCRIPT": str(FAKES / "trainer.py"),
                    "PYTORCH_PROFILER_SCRIPT": str(tmp_path / "absent" / "run_pytorch_profiler.sh")}
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
    files.release()  # what wrappers hold in this process
