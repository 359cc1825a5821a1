"""Machines for the tests of the ROCm wrappers, with a ROCm of some release or without."""
import os
import shlex
import sys

import pytest

from fusion_lab.rocm import wrapper
from fusion_lab.training import errors
from tests.rocm.fake_rocm.machine import FAKES, RELEASES, TOOLS


@pytest.fixture(scope="session")
def installations(tmp_path_factory):
    """A ROCm tree of each release, with launchers of the stand-ins: bin/ and .info/version."""
    root = tmp_path_factory.mktemp("rocm")
    for release in RELEASES:
        prefix = root / f"rocm-{release}"
        for folder in ("bin", ".info"):
            (prefix / folder).mkdir(parents=True)
        (prefix / ".info" / "version").write_text(f"{release}.0-56\n")
        for tool in TOOLS.values():
            python = "$PYTHON_EXECUTABLE" if "sys" in tool else shlex.quote(sys.executable)
            program = shlex.quote(str(FAKES / (tool.replace("-", "_") + ".py")))
            (prefix / "bin" / tool).write_text(
                f'#!/bin/sh\nFAKE_ROCM={release} exec {python} -S -E {program} "$@"\n')
            (prefix / "bin" / tool).chmod(0o755)
    return root


@pytest.fixture
def machine(tmp_path, installations, monkeypatch):
    """machine(release) prepares the environment of a machine with that ROCm; None: without any."""
    def prepare(release, **environment):
        prefix = installations / f"rocm-{release}" if release else tmp_path / "no-rocm"
        settings = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "ROCM_PATH": str(prefix), "PYTHON": sys.executable,
                    "PYTHONPATH": str(FAKES), "PYTHONDONTWRITEBYTECODE": "",
                    "PYTHONPYCACHEPREFIX": str(installations / "pycache"), "FAKE_HIP": f"{release}.1",
                    "FAKE_RECORD": str(tmp_path / "record")}
        monkeypatch.setattr(wrapper, "DEFAULT_PROGRAM", str(FAKES / "trainer.py"))
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
    errors.at_end.close()  # what wrappers hold in this process
