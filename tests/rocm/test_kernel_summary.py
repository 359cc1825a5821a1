"""Summaries of profiler results: kinds of kernels, steps, counters, comparison."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from fusion_lab.measuring.trace.kinds import KINDS
from fusion_lab.rocm import kernel_summary
from fusion_lab.rocm.kernel_summary import differences, main_figures, render, render_differences, summarize
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import csv, run_of
from tests.support import ROOT

TOTALS = {"matrix product": (160, 5.074), "attention": (120, 7.41), "normalisation": (210, 1.308),
          "elementwise": (1050, 2.34), "reduction": (75, 0.66), "copy": (42, 0.228), "other": (6, 0.006)}
GOLDEN = pathlib.Path(common.__file__).with_name("golden_summary.txt").read_text()


@pytest.fixture
def run(tmp_path):
    """A result directory as the wrapper leaves it, without the profiler's own files."""
    steps = {"measured": 10, "warmup": 3, "selected_regions": False}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"steps": steps}))
    return tmp_path / "run"


@pytest.mark.parametrize("write", [
    lambda d: common.write_stats(d / "7_kernel_stats.csv"),
    lambda d: common.write_trace(d / "7_kernel_trace.csv", "6.3"),
    lambda d: common.write_trace(d / "7_kernel_trace.csv", "7.0"),
    lambda d: common.write_trace(d / "out_kernel_trace.csv", "rocpd convert"),
    lambda d: common.write_trace(d / "pmc_perf.csv", "rocprof-compute"),
    lambda d: common.write_rocpd(d / "7_results.db"),
], ids=["stats", "trace 6.3", "trace 7.0", "rocpd convert", "rocprof-compute", "rocpd"])
def test_every_source_gives_the_same_summary(write, run):
    write(run)
    summary = summarize(run)
    assert summary["launches"] == sum(calls for calls, _ in TOTALS.values())
    got = {row["kind"]: (row["launches"], round(row["time_ms"], 6)) for row in summary["by_kind"]}
    assert got == {**dict.fromkeys(KINDS, (0, 0.0)), **TOTALS}
    assert sum(row["percent"] for row in summary["by_kind"]) == pytest.approx(100)
    assert summary["launches_per_step"] == pytest.approx(1663 / 13)
    top = summary["top_kernels"][0]
    assert (top["calls"], top["kind"], top["average_us"]) == (120, "matrix product", pytest.approx(41.25))


def test_golden_text(run):
    common.write_stats(run / "tinyopenfold_7_kernel_stats.csv")
    assert render({**summarize(run), "directory": "DIR"}) == GOLDEN


def test_the_program_prints_and_writes_nothing_and_needs_the_standard_library_alone(run):
    common.write_stats(run / "7_kernel_stats.csv")
    before = sorted(run.iterdir())
    program = [sys.executable, "-S", ROOT / "profile_summary.py", run]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout == render(summarize(run)) and sorted(run.iterdir()) == before


def test_totals_are_of_all_kernels_and_the_list_of_twenty(tmp_path):
    """k00 to k24 take 1 to 25 ms in two launches each: 325 ms of 50 launches in 5 steps."""
    run_of(tmp_path, *((f"k{i:02d}", 2, (i + 1) * 1_000_000) for i in range(25)), measured=3, warmup=2)
    summary = summarize(tmp_path)
    assert (summary["distinct_kernels"], summary["launches"], summary["kernel_time_ms"]) == (25, 50, 325.0)
    assert [summary[f"{name}_per_step"] for name in ("launches", "kernel_time_ms")] == [10.0, 65.0]
    assert [row["name"] for row in summary["top_kernels"]] == [f"k{i:02d}" for i in range(24, 4, -1)]
    assert summary["top_kernels"][0] == dict(name="k24", kind="other", calls=2, time_ms=25.0,
                                             average_us=12500.0, percent=pytest.approx(100 * 25 / 325))


@pytest.mark.parametrize("steps, number, words", [
    (dict(measured=4, warmup=3, selected_regions=True), 4, "nothing else"),
    (dict(measured=4, warmup=0), 4, "start-up and evaluation are in the count"),
    (dict(measured=4, warmup=3, ends_with_steps=True), 7, "evaluation is not"),
    (dict(measured=4), None, "unknown"), (dict(measured=True, warmup="x"), None, "unknown")])
def test_steps_that_were_profiled(steps, number, words, tmp_path):
    found = kernel_summary.steps_profiled(run_of(tmp_path, ("k", 1, 1), **steps))
    assert found[0] == number and words in found[2]


def test_steps_and_the_program_s_summary_are_where_the_manifest_says(tmp_path):
    run_of(tmp_path, ("k", 6, 6))
    for name, steps in (("mine.json", 2), ("performance_summary_v2.json", 5)):
        (tmp_path / name).write_text(json.dumps(dict(training_params=dict(num_steps=steps, warmup_steps=1))))
    for manifest, steps in (("[1]", 6), ('{"summary": "mine.json"}', 3), ('{"steps": null}', None),
                            ("[" * 100_000, 6)):  # what lies beside the records may be damaged
        (tmp_path / "manifest.json").write_text(manifest)
        assert summarize(tmp_path)["steps"] == steps


def test_counts_are_summed_and_shares_are_means_by_time(tmp_path):
    """Two kernels of 100 and 300 ns: percentages are no sums, kilobytes by time are GB/s."""
    run_of(tmp_path, ("k", 2, 400))
    csv(tmp_path / "7_counter_collection.csv", "Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp",
        *((name, value, 0, time) for name, values in dict(
            SQ_WAVES=(3, 4), OccupancyPercent=(20, 60), FETCH_SIZE=(1, 2), WRITE_SIZE=(1, 0)).items()
          for value, time in zip(values, (100, 300), strict=True)))
    summary = summarize(tmp_path)
    assert summary["counters"] == dict(SQ_WAVES=7, FETCH_SIZE=3, WRITE_SIZE=1)
    assert summary["counter_averages"] == dict(OccupancyPercent=50)
    assert summary["memory_gb_per_s"] == pytest.approx(4 * 1024 / 400) and "GB/s" in render(summary)


@pytest.mark.parametrize("name, additive", [
    ("SQ_WAVES", True), ("TCC_HIT_sum", True), ("TCC_HIT[3]", True), ("GL2C_MISS", True),
    ("WRITE_SIZE", True), ("TOTAL_64_OPS", True), ("FetchSize", True),
    ("OccupancyPercent", False), ("VALUBusy", False), ("MeanOccupancyPerCU", False), ("SQ_WAVES_avr", False)])
def test_which_counters_add_up(name, additive):
    assert bool(kernel_summary.ADDITIVE.fullmatch(name)) is additive


def test_names_are_shortened_for_people_and_stay_on_their_line():
    assert kernel_summary.short_name("void at::native::(anonymous namespace)::f<at::native::g>.kd") == "f<g>"
    assert kernel_summary.short_name("x" * 65) == "x" * 61 + "..."
    assert kernel_summary.short_name("a\n\x1b[2Jb") == r"a\n\x1b[2Jb"


def summary_of(steps=None, **values):
    """A summary with one kind of kernel and a range."""
    usual = dict(directory="d", steps=steps, selected_regions=False, launches=100, kernel_time_ms=50.0,
                 by_kind=[dict(kind="copy", launches=40, time_ms=20.0),
                          dict(kind="fill", launches=0, time_ms=0.0)],
                 by_range=[dict(range="up", time_ms=10.0)], gpu_busy_percent=80.0, memory_gb_per_s=None)
    return {**usual, **values}


def figures_of(comparison):
    return {row["figure"]: (row["earlier"], row["current"], row["change_percent"])
            for row in comparison["rows"]}


def test_differences_are_per_step_where_both_runs_know_theirs():
    before, now = summary_of(10), summary_of(5, launches=25, by_range=[dict(range="down", time_ms=5.0)],
                                              gpu_busy_percent=60.0)
    found = differences(now, before)
    assert found["per_step"] and found["same_steps"] and figures_of(found) == {
        "launches": (10.0, 5.0, -50.0), "kernel time ms": (5.0, 10.0, 100.0),
        "copy launches": (4.0, 8.0, 100.0), "copy ms": (2.0, 4.0, 100.0),
        "down ms": (0.0, 1.0, None), "up ms": (1.0, 0.0, -100.0), "GPU busy %": (80.0, 60.0, -25.0)}
    text = render_differences(found)
    assert text.startswith("Compared with d, per step\n") and "       5.000    -50.0%\n" in text
    found = differences(summary_of(None, launches=25, selected_regions=True), before)
    assert not found["per_step"] and figures_of(found)["launches"] == (100, 25, -75.0)
    assert "Caution" in render_differences(found)


def test_main_figures_of_a_run_and_of_a_session_of_pytorch_s_profiler(tmp_path):
    (tmp_path / "performance_summary_v2.json").write_text(json.dumps(dict(performance_summary=dict(
        median_batch_time=0.0125, launches_per_step=90))))
    found = main_figures(tmp_path)
    assert found["median step ms"] == 12.5 and found["launches per step, recorded"] is None
    run_of(tmp_path, ("k" * 41, 6, 3_000_000), ("l", 2, 1_000_000), measured=2, warmup=2)
    assert main_figures(tmp_path) == {
        "median step ms": 12.5, "launches per step, by the trainer": 90, "launches per step, recorded": 2.0,
        "kernel time ms per step": 1.0, "slowest kernel": f"{'k' * 37}... (75%)"}
    session = tmp_path / "session"
    os.mkdir(session)
    (session / "fusion_analysis.json").write_text('{"step": {"untraced_ms": 12.5}, "launches_per_step": 90}')
    found = main_figures(session)
    assert (found["median step ms"], found["launches per step, by the trainer"]) == (12.5, 90)
