"""run_all_profilers.sh: every profiler in turn, and the page about them."""
import re
import sys

import pytest

from fusion_lab.rocm import all_profilers
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK
from tests.rocm.fake_rocm.machine import FAKES, ODD_FLAGS, everywhere, manifest, recorded, start


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
def pytorch_profiler(tmp_path):
    """A stand-in for run_pytorch_profiler.sh; returns its path."""
    script = tmp_path / "run_pytorch_profiler.sh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKES / "trainer.py"} "$@"\n')
    script.chmod(0o755)
    return str(script)


def results(workplace):
    directory = next(workplace.glob("complete_profiling_*"))
    rows = {name: entry["result"] for name, entry in manifest(directory)["profilers"].items()}
    return rows, (directory / "PROFILING_SUMMARY.md").read_text(), directory


@everywhere
def test_all_profilers(release, machine, pytorch_profiler, tmp_path):
    workplace = machine(release, PYTORCH_PROFILER_SCRIPT=pytorch_profiler)
    done = start("all", "--quick", *ODD_FLAGS)
    rows, page, directory = results(workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows == dict.fromkeys(all_profilers.NAMES, "PASS")
    for run in recorded(tmp_path):
        assert run["argv"][-len(ODD_FLAGS):] == ODD_FLAGS and "--num-blocks" in run["argv"]
    assert re.search(r"\| rocprofv3 \| PASS \| [\d.]+ s \| 12.5 \| 39 \| 3.99\d \| rocprofv3 \|", page)
    assert (directory / "rocprofv3" / "rocprofv3_summary.txt").exists()


def test_a_failure_does_not_stop_the_rest(machine, pytorch_profiler):
    workplace = machine("7.0", PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_FAIL="fatal")
    done = start("all", "--skip", "compute")
    rows, page, _ = results(workplace)
    assert done.returncode == 1 and rows == {"pytorch": "PASS", "rocprofv3": "FAIL", "rocprof-sys": "PASS"}
    assert re.search(r"\| rocprofv3 \| FAIL \|.*librocprofiler-sdk-tool.so does not exist", page)


def test_all_profilers_without_rocm(machine, pytorch_profiler):
    workplace = machine(None, PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_HIP="",
                        KFD_DEVICE="/nonexistent")
    done = start("all", "--quick")
    rows, page, _ = results(workplace)
    assert done.returncode == 0 and list(rows.values()) == ["PASS", "SKIP", "SKIP", "SKIP"]
    assert "rocprofv3 not found on PATH" in page and "not a ROCm build; no /nonexistent" in page
    assert start("all", "--only", "pytorch,sys", "-o", "named").returncode == 1  # by name: it must run
    assert start("all", "--only", "nonsense").returncode == 2
    assert start("all", "--only", "sys", "--skip", "rocprof-sys").returncode == 2


def test_a_dry_run_and_a_session_of_pytorch_that_fails(machine, pytorch_profiler):
    workplace = machine("7.0", PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_TRAINER="raise")
    shown = start("all", "--dry-run", "--only", "pytorch,rocprofv3,compute")
    assert shown.returncode == 0 and not list(workplace.iterdir())
    for words in ("run_pytorch_profiler.sh --prof", "rocprof-compute profile", "rocprofv3 --kernel-trace"):
        assert words in shown.stdout
    assert start("all", "--only", "pytorch").returncode == 1 and results(workplace)[0] == {"pytorch": "FAIL"}
