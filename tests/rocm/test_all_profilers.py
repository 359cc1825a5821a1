"""run_all_profilers.sh: every profiler in turn, and the page about them."""
import re
import sys

import pytest

from fusion_lab.rocm import all_profilers
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.errors import FAILED, MISSING, NO_GPU, OK
from tests.rocm.fake_rocm.machine import FAKES, ODD_FLAGS, recorded, start


@pytest.mark.parametrize("codes, only, expected", [
    ([OK, OK], None, OK), ([OK, MISSING], None, OK), ([OK, MISSING, NO_GPU], ["x"], MISSING),
    ([OK, FAILED, MISSING], ["x"], FAILED), ([NO_GPU, NO_GPU], None, NO_GPU), ([OK, 130], None, 130),
    ([143, None], None, 143)])
def test_exit_code_of_all_and_the_page(codes, only, expected, tmp_path):
    outcomes = {str(i): Outcome(code, "a|b") for i, code in enumerate(codes)}
    assert all_profilers.conclude(tmp_path, outcomes, ["--note", "`|`"], only) == expected
    page = (tmp_path / "PROFILING_SUMMARY.md").read_text()
    assert len(re.findall(r"^\| \d +\| (PASS|SKIP|FAIL) +\|", page, re.MULTILINE)) == len(codes)
    assert "a\\|b" in page


@pytest.fixture
def run_all(machine, tmp_path, monkeypatch):
    """run_all(release, environment, *arguments): start it with a stand-in for run_pytorch_profiler.sh;
    returns (exit code, {profiler: word}, the page)."""
    script = tmp_path / "run_pytorch_profiler.sh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKES / "trainer.py"} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(all_profilers, "PYTORCH", str(script))

    def run(release, environment, *arguments):
        machine(release, **environment)
        done = start("all", "-o", "all", "--force", *arguments)
        page = (tmp_path / "work place" / "all" / "PROFILING_SUMMARY.md").read_text()
        return done.returncode, dict(re.findall(r"^\| (\S+) +\| (PASS|SKIP|FAIL) ", page, re.MULTILINE)), page
    return run


def test_all_profilers(run_all, tmp_path):
    code, words, page = run_all("7.0", {}, "--quick", *ODD_FLAGS)
    assert code == 0 and words == dict.fromkeys(("pytorch", "rocprofv3", "rocprof-compute"), "PASS"), page
    for run in recorded(tmp_path):
        assert run["argv"][-len(ODD_FLAGS):] == ODD_FLAGS and "--num-blocks" in run["argv"]
    assert re.search(r"\| rocprofv3 +\| PASS +\| [\d.]+ s +\| 12.50 +\| 39.0 +\| 3.99 +\| rocprofv3 ", page)


def test_a_failure_does_not_stop_the_rest(run_all):
    code, words, page = run_all("7.0", dict(FAKE_FAIL="fatal"), "--skip", "rocprof-compute")
    assert code == 1 and words == {"pytorch": "PASS", "rocprofv3": "FAIL", "rocprof-sys": "PASS"}
    assert re.search(r"\| rocprofv3 +\| FAIL +\|.*librocprofiler-sdk-tool.so does not exist", page)
    assert run_all("7.0", dict(FAKE_TRAINER="raise"), "--only=pytorch")[:2] == (1, {"pytorch": "FAIL"})


def test_all_profilers_without_rocm(run_all):
    code, words, page = run_all(None, dict(FAKE_HIP=""), "--quick")
    assert code == 0 and list(words.values()) == ["PASS", "SKIP", "SKIP"]
    assert "rocprofv3 not found on PATH" in page and "not a ROCm build" in page
    assert run_all(None, {}, "--only", "pytorch,rocprof-sys")[0] == 3  # by name: it must run


def test_lists_of_profilers_and_what_is_only_shown(machine):
    workplace = machine("7.0")
    shown = start("all", "--dry-run", "--only", "pytorch,rocprofv3")
    assert shown.returncode == 0 and re.search("(?s)_profiler.sh --prof.*rocprofv3 --kernel-tr", shown.stdout)
    assert start("all", "--only=pytorch", "--preflight").returncode == 0
    for wrong in (["--only", "nonsense"], ["--only", "rocprof-sys", "--skip", "rocprof-sys"]):
        assert start("all", *wrong).returncode == 2
    assert not list(workplace.iterdir())
