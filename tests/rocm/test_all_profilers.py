"""run_all_profilers.sh: every profiler in turn, and the page about them."""
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import all_profilers
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK
from tests.rocm.fake_rocm.machine import (
    FAKES,
    ODD_FLAGS,
    TINY,
    everywhere,
    interrupt,
    manifest,
    recorded,
    run_of,
    start,
    start_script,
)


def test_words_for_outcomes():
    word = all_profilers.result_word
    assert [word(Outcome(code, "")) for code in (OK, MISSING, NO_GPU, FAILED, 130)] == [
        "PASS", "SKIP", "SKIP", "FAIL", "FAIL"] and word(None) == "SKIP"
    assert [all_profilers.cell(value) for value in (None, 3, 0.123456, "a|b\nc*")] == [
        "not measured", "3", "0.1235", r"a|b\\nc\*"]  # markdown() escapes the bar


@pytest.mark.parametrize("codes, only, expected", [
    ([OK, OK], None, OK), ([OK, MISSING], None, OK), ([OK, MISSING], ["x"], FAILED),
    ([OK, FAILED], None, FAILED), ([MISSING, NO_GPU], None, MISSING), ([OK, 130], None, 130),
    ([FAILED, 128], None, FAILED),
    ([143, None], None, 143)])
def test_exit_code_of_all(codes, only, expected):
    outcomes = {str(i): code if code is None else Outcome(code, "") for i, code in enumerate(codes)}
    assert all_profilers.overall_code(SimpleNamespace(only=only), outcomes) == expected


def test_the_page_about_all(tmp_path):
    run_of(tmp_path / "rocprofv3", ("k", 6, 3_000_000), measured=2, warmup=1)
    page = all_profilers.summary_page(tmp_path, dict(
        rocprofv3=Outcome(OK, "", str(tmp_path / "rocprofv3"), 12.34), pytorch=Outcome(MISSING, "no|torch"),
        sys=None), "./x")
    assert "| rocprofv3 | PASS | 12.3 s | rocprofv3 |  |" in page and "`./x`" in page
    assert "| pytorch | SKIP | 0.0 s |  | no\\|torch |" in page
    assert "| sys | SKIP | 0.0 s |  | not started: interrupted |" in page
    assert "| figure | rocprofv3 |" in page and "| kernel time ms per step | 1 |" in page
    assert re.search(r"\| slowest kernel \| k \(100%\) \|", page)
    assert "Main figures" not in all_profilers.summary_page(tmp_path, dict(sys=None), "")


@pytest.fixture
def pytorch_profiler(tmp_path, monkeypatch):
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
def test_all_profilers(generation, machine, pytorch_profiler, tmp_path):
    workplace = machine(generation, PYTORCH_PROFILER_SCRIPT=pytorch_profiler)
    done = start_script("run_all_profilers.sh", "--quick", *ODD_FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, page, directory = results(workplace)
    assert rows == dict.fromkeys(("pytorch", "rocprofv3", "rocprof-sys", "rocprof-compute"), "PASS")
    assert all(run["argv"][-len(ODD_FLAGS):] == ODD_FLAGS for run in recorded(tmp_path))
    assert all("--num-steps 3 --warmup-steps 1" in " ".join(run["argv"]) for run in recorded(tmp_path))
    assert "| median step ms | 12.5 | 12.5 | 12.5 | 12.5 |" in page and "not measured" in page
    assert re.search(r"\| slowest kernel \|.*Cijk_", page) and "| rocprofv3 | PASS |" in page
    assert (directory / "rocprofv3" / "rocprofv3_summary.txt").exists()


def test_a_failure_does_not_stop_the_rest(machine, pytorch_profiler):
    workplace = machine("7.0", PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_FAIL="fatal")
    done = start("run_all_profilers.sh", "--skip", "compute", "-o", "complete_profiling_x")
    rows, page, _ = results(workplace)
    assert done.returncode == 1 and rows == {"pytorch": "PASS", "rocprofv3": "FAIL", "rocprof-sys": "PASS"}
    assert re.search(r"\| rocprofv3 \| FAIL \|.*librocprofiler-sdk-tool.so does not exist", page)
    assert start("run_all_profilers.sh", "-o", "complete_profiling_x").returncode == 2  # not empty


def test_all_profilers_without_rocm(machine, pytorch_profiler):
    workplace = machine(None, PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_HIP="",
                        KFD_DEVICE="/nonexistent")
    done = start("run_all_profilers.sh", "--quick")
    rows, page, _ = results(workplace)
    assert done.returncode == 0 and rows["pytorch"] == "PASS" and list(rows.values()).count("SKIP") == 3
    assert "rocprofv3 not found on PATH" in page and "not a ROCm build; no /nonexistent" in page


def test_profilers_asked_for_by_name_must_run(machine):
    workplace = machine(None)
    done = start("run_all_profilers.sh", "--only", "pytorch,sys")
    rows, page, _ = results(workplace)
    assert done.returncode == 1 and rows == {"pytorch": "SKIP", "rocprof-sys": "SKIP"}
    assert "run_pytorch_profiler.sh not found" in page


def test_all_profilers_failing_pytorch_and_dry_run(machine, pytorch_profiler):
    workplace = machine("7.0", PYTORCH_PROFILER_SCRIPT=pytorch_profiler, FAKE_TRAINER="raise")
    shown = start("run_all_profilers.sh", "--dry-run", "--only", "pytorch,rocprofv3,compute")
    assert shown.returncode == 0 and not list(workplace.iterdir())
    assert "run_pytorch_profiler.sh --profile-dir" in shown.stdout
    assert "rocprof-compute profile" in shown.stdout and "rocprofv3 --kernel-trace" in shown.stdout
    assert start("run_all_profilers.sh", "--only", "pytorch").returncode == 1
    assert results(workplace)[0] == {"pytorch": "FAIL"}
    assert start("run_all_profilers.sh", "--only", "nonsense").returncode == 2
    assert start("run_all_profilers.sh", "--only", "sys", "--skip", "rocprof-sys").returncode == 2


def test_words_from_elsewhere_do_not_break_the_page(tmp_path):
    outcome = Outcome(1, "operator| <b>*x*</b>\n| a | b |", str(tmp_path / "a|b"))
    page = all_profilers.summary_page(tmp_path, {"rocprofv3": outcome}, "x --note '`|`' '\n# y'")
    command, *_, row, end = page.split("\n")[2:]
    assert command.endswith(r", ``x --note '`|`' '\n# y'``") and not end
    assert row == r"| rocprofv3 | FAIL | 0.0 s | a\|b | operator\| \<b\>\*x\*\</b\>\\n\| a \| b \| |"


def test_interrupting_all_profilers(machine):
    code, out, _ = interrupt("run_all_profilers.sh", signal.SIGINT, machine, "--only", "rocprofv3,compute")
    assert code == 130
    rows = {name: entry["result"] for name, entry in manifest(out)["profilers"].items()}
    assert rows == {"rocprofv3": "FAIL", "rocprof-compute": "SKIP"}
    assert "not started: interrupted" in (out / "PROFILING_SUMMARY.md").read_text()


@pytest.mark.slow
def test_quick_on_a_machine_without_rocm(machine):
    """Its PyTorch session is the real one; AMD's wrappers ask the stand-in, which knows no GPU either."""
    workplace = machine(None, FAKE_HIP="", PYTHONPATH="", KFD_DEVICE="/nonexistent",
                        PYTORCH_PROFILER_SCRIPT="", PYTHONPYCACHEPREFIX="")
    done = start("run_all_profilers.sh", "--quick", *TINY)
    rows, page, _ = results(workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows == {"pytorch": "PASS", "rocprofv3": "SKIP", "rocprof-sys": "SKIP", "rocprof-compute": "SKIP"}
    assert "not a ROCm build" in page
