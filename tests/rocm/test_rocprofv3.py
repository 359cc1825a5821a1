"""rocprofv3: how it is called, what it recorded, what it left out."""
import pathlib
import sys

import pytest

from fusion_lab.training.errors import NO_DATA, OK
from tests.rocm.fake_rocm.machine import csv, everywhere, recorded, run_of, start, summary_of, wrapper


@pytest.mark.parametrize("release, arguments, expected", [
    ("7.0", [], []), ("7.0", ["--hip-trace", "--sys-trace"], ["--hip-trace", "--sys-trace"]),
    ("7.0", ["--memory-trace"], ["--memory-copy-trace", "--memory-allocation-trace"]),
    ("7.0", ["--pmc", " A, B "], ["--pmc", "A", "B"]),
    ("7.0", ["--selected-regions"], ["--marker-trace", "--selected-regions"]),  # 7.0 to 7.2 want both
    ("10.1", ["--pmc", "A B", "--pmc", "C"], ["--pmc", "A", "B", "--pmc", "C"]),
    ("6.3", ["--selected-regions"], []), (None, ["--dry-run", "--tool-option=--kernel-rename"], [])])
def test_how_rocprofv3_is_called(release, arguments, expected, machine):
    """CSV is asked for, which all releases write; --tool-option's words come last."""
    machine(release)
    found = wrapper("rocprofv3", "-o", "out", *arguments)
    command, = found.commands()
    assert command.argv == [
        found.tool.path or "rocprofv3", "--kernel-trace", "--stats", *expected, "--output-format", "csv",
        "--output-directory", found.directory, "--output-file", "process_%pid%", *found.options.tool_option,
        "--", sys.executable, found.program, *found.program_flags]
    assert any("whole run" in note for note in found.notes) == (release == "6.3")


@everywhere
def test_all_switches_at_once(release, machine):
    """Whatever the environment wants; 10.x writes a database as well, which is not counted again."""
    workplace = machine(release, ROCPROF_OUTPUT_FORMAT="json", ROCPROF_OUTPUT_PATH="/nonexistent",
                        ROCPROF_OUTPUT_FILE_NAME="theirs")
    done = start("rocprofv3", "--hip-trace", "--memory-trace", "--runtime-trace", "--sys-trace",
                 "--marker-trace", "--pftrace", "--pmc", "SQ_WAVES, GRBM_COUNT")
    assert done.returncode == 0, done.stdout + done.stderr
    out = workplace / "rocprofv3_profiles_v2"
    assert list(out.glob("process_[0-9]*_kernel_stats.csv")) and list(out.glob("*.pftrace"))
    assert bool(list(out.glob("*.db"))) == (release == "10.1")
    launches = 1488 if release == "7.0" else 1482  # 7.0 counts the evaluation as well, after the last pause
    summary = summary_of(out)
    assert summary["launches"] == 1482 and "evaluation not" in summary["steps_counted"]
    assert summary["counters"] == dict.fromkeys(("SQ_WAVES", "GRBM_COUNT"), 32 * launches)
    assert ("counts the whole run" in done.stdout) == (release == "7.0")


@pytest.mark.parametrize("release", ["7.0", "10.1"])
def test_selected_regions_record_the_measured_steps(release, machine):
    """7.0 to 7.2 listen to start and stop with marker tracing only; pip wheels have roctx as .so.1 only. 7.0
    to 7.12 count the whole run all the same, which is said."""
    workplace = machine(release)
    done = start("rocprofv3", "--selected-regions", "--pmc", "SQ_WAVES", "-o", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (summary_of(workplace / "x")["launches"], summary_of(workplace / "x")["steps"]) == (744, 10)
    counted = 1488 if release == "7.0" else 744
    assert f"summed over {counted} kernels" in done.stdout
    assert ("counts the whole run" in done.stdout) == (release == "7.0")


def test_one_run_for_each_pmc(machine, tmp_path):
    workplace = machine("10.1")
    done = start("rocprofv3", "-o", "x", "--pmc", "SQ_WAVES,FETCH_SIZE", "--pmc", "WRITE_SIZE SQ_WAVES")
    assert done.returncode == 0 and len(recorded(tmp_path)) == 2, done.stdout + done.stderr
    summary = summary_of(workplace / "x")
    assert (summary["launches"], summary["counters"]) == (1488, {
        "SQ_WAVES": 32 * 1488, "FETCH_SIZE": 2 * 1488, "WRITE_SIZE": 1488})


def test_a_trace_without_its_counters_or_kernels_is_no_result(machine):
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", "--pmc", "SQ_WAVES:device=0, GRBM_COUNT")
    place = pathlib.Path(found.directory)
    csv(place / "7_hip_api_trace.csv", "Function,Thread_Id,Correlation_Id,Start_Timestamp",
        ("hipLaunchKernel", 1, 1, 1))
    assert "1 launches without. Unset ROCPROFILER_REGISTER_LIBRARY" in found.judge("")[1]
    run_of(place, ("k", 3, 1_500_000))
    for value, words in ((None, "no value of GRBM_COUNT"), (0, "On RDNA GPUs"), (5, "3 kernel launches")):
        csv(place / "7_counter_collection.csv", "Counter_Name,Counter_Value", ("SQ_WAVES", 0),
            *([("GRBM_COUNT", value)] if value is not None else []))
        code, reason = found.judge("")
        assert code == (OK if value else NO_DATA) and words in reason
    found.selected = True
    assert found.why_no_kernel("no profiler start and stop (lib missing)").endswith("begin, lib missing")
