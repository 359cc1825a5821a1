"""Each ROCm wrapper by itself, and run_all_profilers.sh, with strict stand-ins for the tools."""
import re
import signal
import sys

import pytest

from fusion_lab.rocm import all_profilers, kernel_summary
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm.machine import (
    FAKES,
    GENERATIONS,
    ODD_FLAGS,
    ROOT,
    interrupt,
    manifest,
    recorded,
    start,
    summary_of,
    wrapper,
)

everywhere = pytest.mark.parametrize("generation", GENERATIONS)


# rocprofv3

@everywhere
def test_rocprofv3_switches(generation, machine):
    workplace = machine(generation, ROCPROF_OUTPUT_FORMAT="json", ROCPROF_OUTPUT_PATH="/nonexistent",
                        ROCPROF_OUTPUT_FILE_NAME="theirs")
    done = start("run_rocprofv3.sh", "--hip-trace", "--memory-trace", "--runtime-trace", "--sys-trace",
                 "--marker-trace", "--truncate-kernels", "--pftrace", "--pmc", "SQ_WAVES, GRBM_COUNT")
    assert done.returncode == 0, done.stdout + done.stderr
    out = workplace / "rocprofv3_profiles_v2"
    argv = manifest(out)["commands"][0]["argv"]
    assert argv[argv.index("--pmc") + 1:][:2] == ["SQ_WAVES", "GRBM_COUNT"]
    assert {"--memory-copy-trace", "--memory-allocation-trace"} < set(argv)
    form = "rocpd" if generation == "10.1" else "csv"  # 7.0 counts on where recording has ended
    assert argv[argv.index("--output-format") + 1:][:2] == [form, "pftrace"]
    assert argv.index("--") < argv.index("--enable-rocm-profiling")  # ranges come from the trainer
    records = "results.db" if form == "rocpd" else "kernel_stats.csv"
    assert list(out.glob(f"trainer_[0-9]*_{records}")) and list(out.glob("*.pftrace"))
    launches = 1663 if generation == "7.0" else 1657  # 7.0 counts the evaluation as well
    assert summary_of(out)["counters"] == dict.fromkeys(("SQ_WAVES", "GRBM_COUNT"), 32 * launches)


def test_modes_of_the_trainer_have_no_steps(machine):
    workplace = machine("7.0")
    assert start("run_rocprofv3.sh", "-o", "x", "--compare-fusion").returncode == 0
    assert summary_of(workplace / "x")["launches_per_step"] is None


def test_an_option_that_the_release_lacks(machine):
    machine(None)
    dry = ["--dry-run", "--rocm", "6.2"]
    with pytest.raises(UserError, match="--runtime-trace: not an option of rocprofv3 of ROCm 6.2; it came"):
        wrapper("rocprofv3", *dry, "--runtime-trace").commands()
    newer = wrapper("rocprofv3", "--dry-run", "--selected-regions")
    assert "this is for ROCm 7.0 to" in newer.script_text(newer.commands())
    copies = wrapper("rocprofv3", "--dry-run", "--memory-trace").commands()[0].argv
    assert "--memory-copy-trace" in copies and "--memory-allocation-trace" not in copies  # accepted by all


# rocprof-sys

@everywhere
def test_rocprof_sys_writes_what_was_asked_for_whatever_the_defaults(generation, machine):
    workplace = machine(generation, ROCPROFSYS_OUTPUT_PREFIX="theirs", ROCPROFSYS_TIME_OUTPUT="ON")
    done = start("run_rocprof_sys.sh", "--rocpd", "--modules", "a b", "--modules", "c|d")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {re.sub(r"-\d+", "", path.name) for path in (workplace / "rocprof_sys_profiles_v2").iterdir()}
    wanted = {"perfetto-trace.proto", "wall_clock.txt", "wall_clock.json", "trip_count.txt"}
    assert wanted <= names and ("rocpd.db" in names) == (generation == "10.1")
    assert "ui.perfetto.dev" in done.stdout and " kB " in done.stdout
    argv = manifest(workplace / "rocprof_sys_profiles_v2")["commands"][0]["argv"]
    assert argv[:5] == ["rocprof-sys-python", "--module-restrict", "a b", "c|d", "--function-exclude"]
    assert argv[argv.index("--") + 1].endswith("trainer.py")  # never python


# rocprof-compute

@everywhere
def test_rocprof_compute_profile_then_analyze(generation, machine, tmp_path):
    workplace = machine(generation)
    done = start("run_rocprof_compute.sh", "--device", "1")
    assert done.returncode == 0 and "--list-stats" in done.stdout
    out = workplace / "rocprof_compute_profiles_v2"
    assert {path.name for path in out.glob("workloads/*")} == {"trainer_counters", "trainer_roof"}
    runs = 3 if generation == "6.3" else 4
    assert len(recorded(tmp_path)) == runs and recorded(tmp_path)[0]["argv"][-2:] == ["--device", "1"]
    assert "--deterministic" in recorded(tmp_path)[0]["argv"]
    listed = start("run_rocprof_compute.sh", "--list-stats", "--dispatch", "3", "--dispatch", "12")
    assert listed.returncode == 0 and "Dispatch list" in (out / "list_stats.txt").read_text()
    assert "12" in (out / "dispatch_12.txt").read_text() and (out / "dispatch_3.txt").exists()
    assert manifest(out)["reason"].startswith("counters") and manifest(out / "analysis")["exit_code"] == 0
    assert len(recorded(tmp_path)) == runs  # analyzing ran no trainer


def test_rocprof_compute_reports_are_set_aside(machine):
    out = machine("7.0") / "rocprof_compute_profiles_v2"
    for arguments in ([], ["--mode", "analyze"], ["--dispatch", "12"], ["--dispatch", "12"]):
        assert start("run_rocprof_compute.sh", *arguments).returncode == 0
    assert (out / "analysis_counters.txt").exists() and (out / "analysis_roof.txt").exists()
    assert len(list(out.glob("dispatch_12.txt.old-*"))) == 1 and len(list(out.glob("analysis.old-*"))) == 2


def test_rocprof_compute_spelling_follows_the_installed_tool(machine):
    machine("next")
    argv = [command.argv for command in wrapper("rocprof-compute").commands()]
    assert argv[1][4:7] == ["--roofline", "--roofline-device", "0"]
    assert start("run_rocprof_compute.sh").returncode == 0
    machine("10.1")  # the word --roofline-data-type or prose in its help must not mislead
    argv = [command.argv for command in wrapper("rocprof-compute", "--device", "2").commands()]
    assert argv[1][4:7] == ["--roof-only", "--device", "2"]


@everywhere
def test_rocprof_compute_into_a_directory_with_an_old_workload(generation, machine):
    """With --force; a release refuses, or mixes the old files in. A wrapper does neither."""
    workplace = machine(generation)
    old = workplace / "mine" / "workloads" / "trainer_counters" / "MI300X_A1" / "pmc_perf.csv"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert start("run_rocprof_compute.sh", "-o", "mine", "--force", "--no-roof").returncode == 0
    kept, = (workplace / "mine" / "workloads").glob("trainer_counters.old-*")
    assert (kept / "MI300X_A1" / "pmc_perf.csv").read_text() == "old"
    assert kernel_summary.summarize(workplace / "mine")["launches"] == 1663


# All of them

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
    done = start("run_all_profilers.sh", "--quick", *ODD_FLAGS)
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


# The real programs of the project, on CPU

TINY = ["--msa-dim", "8", "--pair-dim", "8", "--num-blocks", "1", "--num-seqs", "4", "--seq-len", "8",
        "--batch-size", "1", "--num-steps", "2", "--warmup-steps", "1"]


@pytest.mark.slow
def test_real_trainer(machine):
    """The flags of the wrapper are the trainer's, and its summary is found; torch here is no ROCm build."""
    workplace = machine("7.0", TINYOPENFOLD_SCRIPT=str(ROOT / "tiny_openfold_v2.py"), PYTHONPATH="",
                        PYTHONPYCACHEPREFIX="")
    done = start("run_rocprofv3.sh", "--skip-preflight", "-o", "out", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    record, summary = manifest(workplace / "out"), kernel_summary.summarize(workplace / "out")
    assert record["steps"] == {"measured": 2, "warmup": 1, "selected_regions": False,
                               "ends_with_steps": False}
    assert summary["steps"] == 3
    figures = kernel_summary.main_figures(workplace / "out")
    assert figures["median step ms"] > 0 and figures["samples/s"] > 0


@pytest.mark.slow
def test_quick_on_a_machine_without_rocm(machine):
    workplace = machine(None, TINYOPENFOLD_SCRIPT="", PYTHONPATH="", KFD_DEVICE="/nonexistent",
                        PYTORCH_PROFILER_SCRIPT="", PYTHONPYCACHEPREFIX="")
    done = start("run_all_profilers.sh", "--quick", *TINY)
    rows, page, _ = results(workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows == {"pytorch": "PASS", "rocprofv3": "SKIP", "rocprof-sys": "SKIP", "rocprof-compute": "SKIP"}
    assert "not a ROCm build" in page
