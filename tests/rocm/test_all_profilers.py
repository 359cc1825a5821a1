"""run_all_profilers.sh: every profiler in turn, and the page about them."""
import re
import sys

import pytest

from fusion_lab.rocm import all_profilers
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK
from tests.rocm.fake_rocm.machine import FAKES, ODD_FLAGS, everywhere, recorded, start


@pytest.mark.parametrize("codes, only, expected", [
    ([OK, OK], None, OK), ([OK, MISSING], None, OK), ([OK, MISSING], ["x"], FAILED),
    ([OK, FAILED], None, FAILED), ([MISSING, NO_GPU], None, MISSING), ([OK, 130], None, 130),
    ([143, None], None, 143)])
def test_exit_code_of_all_and_the_page(codes, only, expected, tmp_path):
    outcomes = {str(i): Outcome(code, "a|b") for i, code in enumerate(codes)}
    assert all_profilers.conclude(tmp_path, outcomes, ["--note", "`|`"], only) == expected
    page = (tmp_path / "PROFILING_SUMMARY.md").read_text()
    assert len(re.findall(r"^\| \d \| (PASS|SKIP|FAIL) \|", page, re.MULTILINE)) == len(codes)
    assert "a\\|b" in page


@pytest.fixture
def run_all(machine, tmp_path):
    """run_all(release, environment, *arguments): start it with a stand-in for run_pytorch_profiler.sh;
    returns (exit code, {profiler: word}, the page)."""
    script = tmp_path / "run_pytorch_profiler.sh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKES / "trainer.py"} "$@"\n')
    script.chmod(0o755)

    def run(release, environment, *arguments):
        machine(release, PYTORCH_PROFILER_SCRIPT=str(script), **environment)
        done = start("all", "-o", "all", "--force", *arguments)
        page = (tmp_path / "work place" / "all" / "PROFILING_SUMMARY.md").read_text()
        return done.returncode, dict(re.findall(r"^\| (\S+) \| (PASS|SKIP|FAIL) ", page, re.MULTILINE)), page
    return run


@everywhere
def test_all_profilers(release, run_all, tmp_path):
    code, words, page = run_all(release, {}, "--quick", *ODD_FLAGS)
    assert code == 0 and words == dict.fromkeys(all_profilers.NAMES, "PASS"), page
    for run in recorded(tmp_path):
        assert run["argv"][-len(ODD_FLAGS):] == ODD_FLAGS and "--num-blocks" in run["argv"]
    assert re.search(r"\| rocprofv3 \| PASS \| [\d.]+ s \| 12.5 \| 39 \| 3.99\d \| rocprofv3 \|", page)


def test_a_failure_does_not_stop_the_rest(run_all):
    code, words, page = run_all("7.0", dict(FAKE_FAIL="fatal"), "--skip", "rocprof-compute")
    assert code == 1 and words == {"pytorch": "PASS", "rocprofv3": "FAIL", "rocprof-sys": "PASS"}
    assert re.search(r"\| rocprofv3 \| FAIL \|.*librocprofiler-sdk-tool.so does not exist", page)
    assert run_all("7.0", dict(FAKE_TRAINER="raise"), "--only=pytorch")[:2] == (1, {"pytorch": "FAIL"})


def test_a_preflight_of_pytorch_s_profiler_alone_is_refused(machine):
    machine("7.0")
    done = start("all", "--only=pytorch", "--preflight")
    assert done.returncode == 2 and "--preflight" in done.stderr


def test_all_profilers_without_rocm(run_all):
    code, words, page = run_all(None, dict(FAKE_HIP=""), "--quick")
    assert code == 0 and list(words.values()) == ["PASS", "SKIP", "SKIP", "SKIP"]
    assert "rocprofv3 not found on PATH" in page and "not a ROCm build" in page
    assert run_all(None, {}, "--only", "pytorch,rocprof-sys")[0] == 1  # by name: it must run


def test_lists_of_profilers(machine):
    workplace = machine("7.0")
    shown = start("all", "--dry-run", "--only", "pytorch,rocprofv3,rocprof-compute")
    assert shown.returncode == 0
    for words in ("run_pytorch_profiler.sh --prof", "rocprof-compute profile", "rocprofv3 --kernel-trace"):
        assert words in shown.stdout
    assert start("all", "--only", "nonsense").returncode == 2
    assert start("all", "--only", "rocprof-sys", "--skip", "rocprof-sys").returncode == 2
    assert not list(workplace.iterdir())
