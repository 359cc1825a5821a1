"""Summaries of profiler results: kinds of kernels, steps, counters, comparison."""
import json
import pathlib

import pytest

from fusion_lab.rocm import kernel_summary
from fusion_lab.rocm.kernel_summary import differences, main_figures, render, render_differences, summarize
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import csv, run_of, start

GOLDEN = pathlib.Path(common.__file__).with_name("golden_summary.txt").read_text()
SOURCES = {"7_kernel_stats.csv": common.write_stats, "7_results.db": common.write_rocpd,
           "7_kernel_trace.csv": common.write_trace,
           "pmc_perf.csv": lambda path: common.write_trace(path, "rocprof-compute")}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_text(name, tmp_path):
    SOURCES[name](tmp_path / name)
    (tmp_path / "manifest.json").write_text(json.dumps(dict(steps=13, steps_counted="13 steps")))
    summary = summarize(tmp_path)
    assert summary["files"] == [name]
    assert render({**summary, "directory": "DIR", "source": "SOURCE", "files": ["FILES"],
                   "gpu_busy_percent": None}) == GOLDEN


def test_the_program_prints_and_writes_nothing(tmp_path):
    run_of(tmp_path, ("k", 26, 400), steps=13)
    assert start("summary", tmp_path).stdout == render(summarize(tmp_path))
    done = start("summary", tmp_path, "--json", "--compare", tmp_path)
    assert json.loads(done.stdout)["compared"]["launches"] == [2, 2] and len(list(tmp_path.iterdir())) == 2


def test_totals_are_of_all_kernels_and_the_list_of_twenty(tmp_path):
    """k00 to k24 take 1 to 25 ms in two launches each: 325 ms of 50 launches in 5 steps."""
    run_of(tmp_path, *((f"k{i:02d}", 2, (i + 1) * 1_000_000) for i in range(25)), steps=5)
    csv(tmp_path / "7_memory_copy_trace.csv", "Direction,Start_Timestamp,End_Timestamp", ("H", 0, 2_000_000),
        ("D", 5, 1_000_005))
    summary = summarize(tmp_path)
    assert summary["memory_copies"] == dict(count=2, time_ms=3.0)
    assert (summary["distinct_kernels"], summary["launches"], summary["kernel_time_ms"]) == (25, 50, 325.0)
    assert [summary[f"{name}_per_step"] for name in ("launches", "kernel_time_ms")] == [10.0, 65.0]
    assert list(summary["kernels"]) == [f"k{i:02d}" for i in range(24, 4, -1)]
    (tmp_path / "manifest.json").write_text("[" * 100_000)  # what lies beside the records may be damaged
    assert summarize(tmp_path)["launches_per_step"] is None


def test_counts_are_summed_and_shares_are_means_by_time(tmp_path):
    """Two kernels of 100 and 300 ns: percentages are no sums, and 0/0 is no value."""
    run_of(tmp_path, ("k", 2, 400))
    csv(tmp_path / "7_counter_collection.csv", "Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp",
        ("SQ_WAVES", 3, 0, 100), ("SQ_WAVES", 4, 0, 300), ("OccupancyPercent", 20, 0, 100),
        ("OccupancyPercent", 60, 0, 300), ("OccupancyPercent", "-nan", 0, 300))
    summary = summarize(tmp_path)
    assert (summary["counters"], summary["counter_averages"]) == (dict(SQ_WAVES=7), dict(OccupancyPercent=50))
    assert "Caution" not in render(summary)


def test_which_counters_add_up_and_how_names_are_shown():
    additive = kernel_summary.ADDITIVE.fullmatch
    assert all(map(additive, ("SQ_WAVES", "TCC_HIT_sum", "TCC_HIT[3]", "GL2C_MISS", "FetchSize")))
    assert not any(map(additive, ("OccupancyPercent", "VALUBusy", "MeanOccupancyPerCU", "SQ_WAVES_avr")))
    assert kernel_summary.short_name("void at::native::(anonymous namespace)::f<at::native::g>.kd") == "f<g>"
    assert kernel_summary.short_name("a\n\x1b[2Jb" + "x" * 65) == r"a\n\x1b[2Jb" + "x" * 50 + "..."


def test_differences_are_per_step_where_both_runs_know_theirs(tmp_path):
    before, now = (summarize(run_of(tmp_path / name, *kernels, steps=steps)) for name, steps, *kernels in (
        ("before", 10, ("my_copy", 40, 2e7), ("other", 60, 3e7)), ("now", 5, ("other", 25, 5e7))))
    found = differences(now, before)
    assert found["launches"] == [10.0, 5.0] and found["kernel time ms"] == [5.0, 10.0]
    assert found["copy launches"] == [4.0, 0.0] and found["other ms"] == [3.0, 10.0]
    text = render_differences(now, before)
    assert "per step\n" in text and "      10.000       5.000    -50.0%\n" in text and "Caution" not in text
    now |= dict(launches_per_step=None, steps_counted="5 measured steps, nothing else")
    assert differences(now, before)["launches"] == [100, 25] and "Caution" in render_differences(now, before)


def test_main_figures_of_a_session_of_pytorch_s_profiler(tmp_path):
    csv(tmp_path / "fusion_analysis.json", '{"step": {"untraced_ms": 12.5}, "launches_per_step": 90}')
    assert main_figures(tmp_path) == [12.5, 90, None]
