"""Two sessions of pytest (tests/conftest.py): no test is in neither, and no failure of one is lost."""
import os
import subprocess
import sys

import pytest

from tests.support import ROOT

CASES = {  # what a plain test and an interpreted one do, and how pytest ends
    "both pass": ("pass", "pass", 0), "plain": ("assert False", "pass", 1),
    "interpreted": ("pass", "assert False", 1), "ended within": ("pass", "os._exit(0)", 3)}
FILE = """import os
import pytest

def test_plain():
    assert "TRITON_INTERPRET" not in os.environ
    {}

@pytest.mark.interpreted
def test_interpreted():
    {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_failure_of_either_session_is_one_of_both(tmp_path, case, workers):
    plain, interpreted, code = CASES[case]
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_both.py").write_text(FILE.format(plain, interpreted))
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider",
               "--junitxml=report.xml"]
    done = subprocess.run([*command, "-o", "addopts=", "--rootdir", tmp_path, tmp_path], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, check=False)
    if workers == 0 and case != "ended within":
        for name in ("report", "report.interpreted"):
            assert 'tests="1"' in (tmp_path / f"{name}.xml").read_text()
    assert done.returncode == code or case == "ended within" and done.returncode, done.stdout + done.stderr
