"""The six scripts start from anywhere: by a link, with blanks in paths, beside folders of the same names."""
import os
import shutil
import subprocess
import sys

import pytest

from tests.support import PATIENCE, ROOT

AMD = ["run_rocprofv3.sh", "run_rocprof_sys.sh", "run_rocprof_compute.sh", "run_all_profilers.sh"]
SCRIPTS = [*AMD, "run_pytorch_profiler.sh", "launch_performance_study.sh"]
TRAPS = ["study", "rocm", "fusion_lab", "tiny_openfold", "torch", "tests"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project under a name with blanks."""
    place = tmp_path_factory.mktemp("home") / "my pro ject"
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(
        ".*", "tests", "benchmarks", "__pycache__", "*profiles_v2*", "*.old-*"))
    return place


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The user's own directory, where everything is called as something of ours or of Python's."""
    place = tmp_path / "their own directory"
    for name in TRAPS:
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text(f"raise SystemExit('{name} of the user was imported')\n")
    for name in ("statistics.py", "random.py", "tiny_openfold_v2.py", "json.py"):
        (place / name).write_text(f"raise SystemExit('{name} of the user was imported')\n")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return place


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_from_anywhere(script, project, elsewhere):
    os.symlink(project / script, elsewhere / "a link.sh")
    away = run("./a link.sh", "--help")
    assert away.returncode == 0 and away.stdout.startswith("usage: "), away.stderr
    assert "of the user" not in away.stdout + away.stderr


def test_an_interpreter_that_cannot_run_them(monkeypatch):
    monkeypatch.setenv("PYTHON", "/nonexistent/python")
    done = run(ROOT / "run_rocprofv3.sh", "--dry-run")
    assert done.returncode == 3 and "set PYTHON" in done.stderr and not done.stdout


@pytest.mark.slow
def test_dry_run_from_anywhere(project, elsewhere):
    """Also the process that judges the flags sees the project, not the directory of the user."""
    os.symlink(project / "run_rocprofv3.sh", elsewhere / "a link.sh")
    done = run("./a link.sh", "--dry-run", "--num-steps", "3", "--enable-all-fusion", "-o", "out put")
    assert done.returncode == 0, done.stderr
    assert "of the user" not in done.stdout and "not judged" not in done.stdout
    assert str(project / "tiny_openfold_v2.py") in done.stdout and not (elsewhere / "out put").exists()
    assert "--disable-cuda-graphs" in done.stdout
