"""`pip install .` holds everything, and its console commands work from elsewhere."""
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from fusion_lab import commands
from tests.support import PATIENCE, ROOT

COMMANDS = dict(re.findall(r'^(tinyopenfold[\w-]*) = "fusion_lab.commands:(\w+)"$',
                           (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
ALIGNMENT = "".join(f">row{i}\nMQIFVKTLTGKTITLEVEPSDTIEN{letters}IQDKEGIPPDQQRLIFAGKQL\n"
                    for i, letters in enumerate(("VKAK", "VRAK", "IKAR")))


def test_every_command_runs_a_file_that_is_there(monkeypatch):
    assert set(COMMANDS) == {"tinyopenfold", "tinyopenfold-profile", "tinyopenfold-study"}
    for function in COMMANDS.values():
        run = []
        monkeypatch.setattr(commands.runpy, "run_path", lambda path, run_name, run=run: run.append(path))
        monkeypatch.setattr(sys, "argv", ["command", "--help"])
        getattr(commands, function)()
        assert os.path.isfile(run[0]) and sys.argv[-1] == "--help"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with the installed wheel, which was built from a copy without network."""
    for name in ("pip", "setuptools"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"this Python has no {name}")
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, place / "copy", symlinks=True, ignore=shutil.ignore_patterns(
        ".*", "tests", "benchmarks", "docs", "build", "*.egg-info", "__pycache__", "*_profiles_v2*"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for step in ([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, "."],
                 [*pip, "install", "--no-deps", "--no-index", "--target", place / "site",
                  place / "tinyopenfold-2.0.0-py3-none-any.whl"]):
        done = subprocess.run(step, cwd=place / "copy", capture_output=True, text=True, timeout=PATIENCE,
                              check=False)
        assert done.returncode == 0, done.stderr
    shutil.rmtree(place / "copy")
    return place / "site"


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    ["tinyopenfold", "--contacts", "x.a3m", "--device", "cpu"],
    ["tinyopenfold", "--fold", "x.a3m", "--device", "cpu"],
    ["tinyopenfold", "--num-blocks", 1, "--seq-len", 16, "--batch-size", 1, "--num-steps", 1,
     "--device", "cpu"],
    ["tinyopenfold-profile", "--num-blocks", 1, "--seq-len", 16, "--batch-size", 1, "--profile-steps", 1,
     "--device", "cpu"],
    ["tinyopenfold-study", "--batch-sizes", 1, "--seq-lens", 16, "--dry-run", "--device", "cpu"],
    ["tinyopenfold-study", "--batch-sizes", 1, "--seq-lens", 16, "--num-runs", 1, "--num-steps", 1,
     "--no-plots", "--device", "cpu", "--", "--num-blocks", 1],
    ["-m", "tiny_openfold_v2", "--version"], ["-m", "companions.protein_mpnn", "--version"],
    ["-m", "companions.fusion_patterns", "--help"]], ids=lambda command: "_".join(map(str, command[:2])))
def test_it_runs_from_elsewhere(site, tmp_path, command):
    program, *flags = map(str, command)
    (tmp_path / "x.a3m").write_text(ALIGNMENT)
    start = [site / "bin" / program] if program in COMMANDS else [sys.executable, program]
    done = subprocess.run([*start, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout + done.stderr
    if "--contacts" in flags:
        result = json.loads((tmp_path / "contacts" / "x.json").read_text())
        assert result["model"].startswith(str(site)) and result["residues"] == 50
    if "--fold" in flags:  # the page is made from a file of the package
        assert "<canvas" in (tmp_path / "fold" / "x.html").read_text(encoding="utf-8")
