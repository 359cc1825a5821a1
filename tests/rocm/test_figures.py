"""Figures and verdicts of the ROCm wrappers by hand: on small files, in this process."""
import json
import os
import pathlib
import re
from types import SimpleNamespace

import pytest

from fusion_lab.rocm import all_profilers, failures, kernel_summary, preflight, process, records, timeline
from fusion_lab.rocm.kernel_summary import differences, main_figures, render, render_differences, summarize
from fusion_lab.rocm.machine import Tool, options_in
from fusion_lab.rocm.session import Outcome
from fusion_lab.training.files import FAILED, MISSING, NO_DATA, NO_GPU, OK, PROGRAM_FAILED, TIMEOUT, UserError
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import wrapper


def csv(path, header, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


STATS = "Name,Calls,TotalDurationNs"


def run_of(directory, *kernels, **steps):
    """A result directory with these (name, calls, nanoseconds in all), and a manifest with its steps."""
    csv(directory / "7_kernel_stats.csv", STATS, *kernels)
    if steps:
        (directory / "manifest.json").write_text(json.dumps(dict(steps=steps)))
    return directory


# Summaries


def test_totals_are_of_all_kernels_and_the_list_of_twenty(tmp_path):
    """k00 to k24 take 1 to 25 ms in two launches each: 325 ms of 50 launches in 5 steps."""
    run_of(tmp_path, *((f"k{i:02d}", 2, (i + 1) * 1_000_000) for i in range(25)), measured=3, warmup=2)
    summary = summarize(tmp_path)
    assert (summary["distinct_kernels"], summary["launches"], summary["kernel_time_ms"]) == (25, 50, 325.0)
    assert [summary[f"{name}_per_step"] for name in ("launches", "kernel_time_ms")] == [10.0, 65.0]
    assert [row["name"] for row in summary["top_kernels"]] == [f"k{i:02d}" for i in range(24, 4, -1)]
    assert summary["top_kernels"][0] == dict(name="k24", kind="other", calls=2, time_ms=25.0,
                                             average_us=12500.0, percent=pytest.approx(100 * 25 / 325))
    assert summary["by_kind"][-1] == dict(kind="other", launches=50, time_ms=325.0, percent=100.0)
    text = render(summary)
    assert "GPU kernel time       325.000 ms\nKernel launches            50    of 25 kernels\n" in text
    assert "Launches per step        10.0    (3 measured + 2 warm-up steps; " in text
    assert "Time per step          65.000 ms\n" in text and "\nTop 20 kernels by total time\n" in text


def test_kernels_of_equal_time_stand_by_name(tmp_path):
    run_of(tmp_path, ("b", 1, 5), ("a", 1, 5), ("c", 1, 0))
    assert [row["name"] for row in summarize(tmp_path)["top_kernels"]] == ["a", "b", "c"]
    run_of(tmp_path, ("c", 1, 0))
    summary = summarize(tmp_path)
    assert summary["top_kernels"][0]["percent"] == summary["by_kind"][-1]["percent"] == 0.0


@pytest.mark.parametrize("steps, expected", [
    (dict(measured=4, warmup=3, selected_regions=True), (4, True, "4 measured steps, nothing else")),
    (dict(measured=4, warmup=0),
     (4, False, "4 measured + 0 warm-up steps; start-up and evaluation are in the count")),
    (dict(measured=4, warmup=3, ends_with_steps=True),
     (7, False, "4 measured + 3 warm-up steps; start-up is in the count, evaluation is not")),
    (dict(measured=4), (None, False, "the number of steps is unknown")),
    (dict(warmup=4, selected_regions=True), (None, True, "the number of steps is unknown"))])
def test_steps_in_words(steps, expected, tmp_path):
    assert kernel_summary.steps_profiled(run_of(tmp_path, ("k", 1, 1), **steps)) == expected


def test_steps_and_the_program_s_summary_are_where_the_manifest_says(tmp_path):
    run_of(tmp_path, ("k", 6, 6))
    for name, steps in (("mine.json", 2), ("performance_summary_v2.json", 5)):
        training = dict(num_steps=steps, warmup_steps=1)
        (tmp_path / name).write_text(json.dumps(dict(training_params=training)))
    for manifest, steps in (("[1]", 6), ('{"summary": "mine.json"}', 3), ('{"steps": null}', None)):
        (tmp_path / "manifest.json").write_text(manifest)
        summary = summarize(tmp_path)
        assert summary["steps"] == steps and summary["selected_regions"] is False


def test_ranges_of_a_run_the_longest_first(tmp_path):
    csv(tmp_path / "7_marker_api_trace.csv", "Function,Thread_Id,Start_Timestamp,End_Timestamp",
        ("up", 1, 0, 10), ("down", 1, 10, 20))
    csv(tmp_path / "7_hip_api_trace.csv", "Function,Thread_Id,Correlation_Id,Start_Timestamp",
        *(("launch", 1, i, i) for i in (5, 15, 16)))
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp",
        ("k", 5, 0, 1_000_000), ("k", 15, 1_000_000, 2_500_000), ("k", 16, 4_000_000, 5_500_000))
    summary = summarize(tmp_path)
    assert summary["by_range"] == [dict(range="down", launches=2, time_ms=3.0, percent=75.0),
                                   dict(range="up", launches=1, time_ms=1.0, percent=25.0)]
    assert summary["gpu_busy_percent"] == pytest.approx(100 * 4 / 5.5)
    text = render(summary)
    assert f"\n{'range':<34}  launches          ms   share\n" in text
    assert f"\n{'down':<34}         2       3.000   75.0%\n" in text
    assert "GPU busy                 72.7 %  of the time from first to last kernel\n" in text
    assert text.startswith(f"Kernels of {tmp_path}\nread from kernel trace CSV: 7_kernel_trace.csv\n\n")


def test_counters_add_up_or_are_averaged_by_time(tmp_path):
    """SQ_WAVES is a count; OccupancyPercent 10 for 1 µs and 40 for 3 µs; 4 kB moved in 4 µs."""
    run_of(tmp_path, ("k", 2, 4000))
    csv(tmp_path / "7_counter_collection.csv", "Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,"
        "End_Timestamp", *(("k", name, value, 0, nanoseconds) for name, values in (
            ("SQ_WAVES", (8, 4)), ("OccupancyPercent", (10, 40)), ("FETCH_SIZE", (2, 1)),
            ("WriteSize", (1,))) for value, nanoseconds in zip(values, (1000, 3000), strict=False)))
    found = summarize(tmp_path)
    assert found["counters"] == dict(SQ_WAVES=12, FETCH_SIZE=3, WriteSize=1)
    assert found["counter_averages"] == dict(OccupancyPercent=32.5)
    assert found["memory_gb_per_s"] == pytest.approx(4 * 1024 / 4000)
    text = render(found)
    assert "Memory traffic            1.0 GB/s while kernels ran\n" in text and text.startswith("Kernels of")
    assert f"{'SQ_WAVES':<32}{12:>20}\n" in text
    assert f"{'OccupancyPercent':<32}                32.5 mean\n" in text
    csv(tmp_path / "7_counter_collection.csv", "Counter_Name,Counter_Value", ("SQ_WAVES", 8), ("Mean", 1),
        ("Mean", 2), ("FETCH_SIZE", 1), ("WRITE_SIZE", 1))
    found = summarize(tmp_path)  # without times
    assert found["counter_averages"] == dict(Mean=1.5) and found["memory_gb_per_s"] is None


def test_what_the_command_prints(tmp_path, capsys):
    for name, calls in (("now", 4), ("before", 2)):
        run_of(tmp_path / name, ("k", calls, 1000))
    now, before = str(tmp_path / "now"), str(tmp_path / "before")
    assert kernel_summary.run([now]) == 0 and capsys.readouterr().out == render(summarize(now))
    compared = differences(summarize(now), summarize(before))
    assert kernel_summary.run([now, "--compare", before]) == 0
    assert capsys.readouterr().out == f"{render(summarize(now))}\n{render_differences(compared)}"
    assert kernel_summary.run([now, "--compare", before, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**summarize(now), "comparison": compared}


@pytest.mark.parametrize("name, additive", [
    ("SQ_WAVES", True), ("TCC_HIT_sum", True), ("TCC_HIT[3]", True), ("GL2C_MISS", True),
    ("WRITE_SIZE", True), ("TOTAL_64_OPS", True), ("FetchSize", True),
    ("OccupancyPercent", False), ("VALUBusy", False), ("MeanOccupancyPerCU", False), ("SQ_WAVES_avr", False)])
def test_which_counters_add_up(name, additive):
    assert bool(kernel_summary.ADDITIVE.fullmatch(name)) is additive


def test_names_are_shortened_for_people():
    assert kernel_summary.short_name("void at::native::(anonymous namespace)::f<at::native::g>.kd") == "f<g>"
    assert kernel_summary.short_name("x" * 64) == "x" * 64
    assert kernel_summary.short_name("x" * 65) == "x" * 61 + "..."
    assert kernel_summary.short_name("x" * 9, 8) == "xxxxx..."


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
    assert found["per_step"] and found["same_steps"] and found["earlier"] == "d"
    assert figures_of(found) == {
        "launches": (10.0, 5.0, -50.0), "kernel time ms": (5.0, 10.0, 100.0),
        "copy launches": (4.0, 8.0, 100.0), "copy ms": (2.0, 4.0, 100.0),
        "down ms": (0.0, 1.0, None), "up ms": (1.0, 0.0, -100.0),
        "GPU busy %": (80.0, 60.0, -25.0)}
    assert render_differences(found) == (
        "Compared with d, per step\n"
        "                                       earlier    this run    change\n"
        "launches                                10.000       5.000    -50.0%\n"
        "kernel time ms                           5.000      10.000   +100.0%\n"
        "copy launches                            4.000       8.000   +100.0%\n"
        "copy ms                                  2.000       4.000   +100.0%\n"
        "down ms                                  0.000       1.000       new\n"
        "up ms                                    1.000       0.000   -100.0%\n"
        "GPU busy %                              80.000      60.000    -25.0%\n")


@pytest.mark.parametrize("steps", [(None, 5), (10, None), (None, None)])
def test_differences_are_of_totals_where_one_run_does_not_know_its_steps(steps):
    before, now = (summary_of(number, gpu_busy_percent=None, by_range=[]) for number in steps)
    found = differences(dict(now, launches=25, selected_regions=True), before)
    assert not found["per_step"] and figures_of(found)["launches"] == (100, 25, -75.0)
    assert set(figures_of(found)) == {"launches", "kernel time ms", "copy launches", "copy ms"}
    text = render_differences(found)
    assert text.startswith("Compared with d, in total (the number of steps is not known for both)\nCaution: ")


def test_kinds_and_rates_that_only_one_run_has():
    before = summary_of(1, memory_gb_per_s=2.0)
    kinds = [dict(kind="copy", launches=0, time_ms=0.0), dict(kind="fill", launches=3, time_ms=1.0)]
    now = summary_of(1, by_kind=kinds, gpu_busy_percent=None)
    found = figures_of(differences(now, before))
    assert found["copy launches"] == (40, 0, -100.0) and found["fill launches"] == (0, 3, None)
    assert "GPU busy %" not in found and "memory traffic GB/s" not in found
    assert figures_of(differences(before, before))["memory traffic GB/s"] == (2.0, 2.0, 0.0)


def test_main_figures_of_a_run(tmp_path):
    (tmp_path / "performance_summary_v2.json").write_text(json.dumps(dict(performance_summary=dict(
        median_batch_time=0.0125, avg_training_speed=320.0, peak_memory_mb=7.0, launches_per_step=90))))
    found = main_figures(tmp_path)
    assert found["median step ms"] == 12.5 and found["launches per step, recorded"] is None
    assert found["slowest kernel"] is found["kernel time ms per step"] is found["GPU busy %"] is None
    run_of(tmp_path, ("k" * 41, 6, 3_000_000), ("l", 2, 1_000_000), measured=2, warmup=2)
    assert main_figures(tmp_path) == {
        "median step ms": 12.5, "samples/s": 320.0, "peak memory MB": 7.0,
        "launches per step, by the trainer": 90, "launches per step, recorded": 2.0,
        "kernel time ms per step": 1.0, "GPU busy %": None, "slowest kernel": f"{'k' * 37}... (75%)"}
    (tmp_path / "7_kernel_stats.csv").write_text("nonsense\n1\n")
    assert main_figures(tmp_path)["launches per step, recorded"] is None
    assert main_figures(tmp_path / "absent")["median step ms"] is None


def test_main_figures_of_a_session_of_pytorch_s_profiler(tmp_path):
    (tmp_path / "fusion_analysis.json").write_text(json.dumps(dict(
        step=dict(untraced_ms=12.5), training_params=dict(batch_size=4), memory_peak_mb=7.0,
        launches_per_step=90)))
    found = main_figures(tmp_path)
    assert (found["median step ms"], found["samples/s"], found["peak memory MB"],
            found["launches per step, by the trainer"]) == (12.5, 320.0, 7.0, 90)
    (tmp_path / "fusion_analysis.json").write_text(json.dumps(dict(step=dict(untraced_ms="x"))))
    assert set(main_figures(tmp_path).values()) == {None}


# Records


def test_launches_and_times_of_every_source(tmp_path):
    """Three launches of 100, 200 and 50 ns; every form of file tells the same."""
    csv(tmp_path / "a" / "x_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("k", 100, 200),
        ("k", 300, 500), ("l", 0, 50))
    csv(tmp_path / "b" / "results_pmc_perf_0.csv",
        "Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,Counter_Name", *(
            (number, name, start, end, counter) for counter in "XY" for number, name, start, end in (
                (1, "k", 100, 200), (2, "k", 300, 500), (3, "l", 0, 50))))
    for folder in "ab":
        assert records.read_kernels(tmp_path / folder).totals == {"k": (2, 300.0), "l": (1, 50.0)}
    assert records.read_memory_copies(tmp_path) is None
    csv(tmp_path / "7_memory_copy_trace.csv", "Direction,Start_Timestamp,End_Timestamp", ("H", 0, 2_000_000),
        ("D", 5, 1_000_005))
    assert records.read_memory_copies(tmp_path) == dict(count=2, time_ms=3.0)
    csv(tmp_path / "7_memory_copy_stats.csv", STATS, ("H", 4, 5_000_000), ("D", 1, 500_000))
    assert records.read_memory_copies(tmp_path) == dict(count=5, time_ms=5.5)


def test_of_several_passes_the_first_counts(tmp_path):
    for number, name in ((2, "pass_2"), (1, "pass_1")):
        run_of(tmp_path / name / "host", ("k", number, 10 * number))
    assert records.read_kernels(tmp_path).totals == {"k": (1, 10.0)}
    for folder in ("x.old-2026", "perfmon"):
        run_of(tmp_path / folder, ("k", 9, 9))
    assert records.read_kernels(tmp_path).totals == {"k": (1, 10.0)}
    run_of(tmp_path / "pass_1" / "of another process", ("k", 4, 5))
    assert records.read_kernels(tmp_path).totals == {"k": (5, 15.0)}


def test_calls_and_times_are_added():
    assert records.add_up([("k", 1, 2.0), ("l", 1, 1.0), ("k", 3, 4.0)]) == {"k": (4, 6.0), "l": (1, 1.0)}
    assert records.merge([{"k": (1, 2.0)}, {"k": (2, 3.0), "l": (1, 1.0)}]) == {"k": (3, 5.0), "l": (1, 1.0)}


def test_what_else_in_a_directory_is_a_run(tmp_path):
    """Sessions with kernels, below HOST too, and two or more folders with kernels; not passes of one run."""
    run_of(tmp_path / "pass_1", ("k", 1, 1))
    run_of(tmp_path / "one", ("k", 1, 1))
    assert records.other_runs(tmp_path) == []
    run_of(tmp_path / "session" / "host", ("k", 1, 1))
    for name in ("session", "without"):
        csv(tmp_path / name / "manifest.json", "{}")
        csv(tmp_path / name / "notes.txt", "x")
    assert records.other_runs(tmp_path) == ["one", "session"]
    run_of(tmp_path, ("k", 1, 1))
    assert records.other_runs(tmp_path) == []


def test_folders_without_links_and_earlier_results(tmp_path):
    for name in ("b", "a", "a.old-2026"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert records.folders_below(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_what_cannot_be_read_says_why(tmp_path):
    (tmp_path / "7_kernel_stats.csv").write_bytes(b"Name,Calls,TotalDurationNs\n\xffk,1,10\n")
    assert records.read_kernels(tmp_path).totals == {"\ufffdk": (1, 10.0)}
    for read, why in ((records.query_rocpd, "unable to open database file"),
                      (records.read_header, "No such file or directory")):
        with pytest.raises(records.Unreadable, match=f"absent: {why}"):
            read(tmp_path / "absent")


def test_wanted_and_collected_counters(tmp_path):
    lists = tmp_path / "perfmon"
    lists.mkdir()
    (lists / "a.txt").write_text("pmc: SQ_WAVES GRBM_COUNT SQ_ACCUM_PREV_HIRES\nrange: X\n")
    assert records.wanted_counters(tmp_path) == {"SQ_WAVES", "GRBM_COUNT"}
    header = ("Dispatch_ID,Kernel_Name,GPU_ID,Grid_Size,Workgroup_Size,LDS_Per_Workgroup,"
              "Scratch_Per_Workitem,Arch_VGPR,Accum_VGPR,SGPR,SQ_WAVES,Start_Timestamp,End_Timestamp,Kernel_ID")
    csv(tmp_path / "pmc_perf.csv", header, (1, "k", *range(12)))
    csv(tmp_path / "results_pmc_perf_0.csv", "Kernel_Name,Counter_Name", ("k", "GRBM_COUNT"), ("k", "X"))
    csv(tmp_path / "sysinfo.csv", "gpu_model", ("MI300",))
    csv(lists / "b.csv", "Kernel_Name,Y", ("k", 1))
    assert records.collected_counters(tmp_path) == {"SQ_WAVES", "GRBM_COUNT", "X"}
    common.write_rocpd(tmp_path / "r.db", counters=["FETCH_SIZE"])
    assert "FETCH_SIZE" in records.collected_counters(tmp_path)


# Time


def test_busy_time_within_and_between_kernels(tmp_path):
    """Sorted by start: 0-100 holds 20-30; 100-150 follows at once; 200-210 after a gap. 160 of 210 ns."""
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 200, 210),
        ("b", 20, 30), ("a", 100, 150), ("a", 0, 100))
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) == pytest.approx(100 * 160 / 210)
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 0, 100),
        ("b", 20, 30), ("a", 50, 120), ("b", 130, 160))  # on two queues: 0-120 and 130-160
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) == pytest.approx(100 * 150 / 160)
    assert timeline.busy_percent(timeline.read_traces(tmp_path / "none")) is None
    csv(tmp_path / "7_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", ("a", 5, 5))
    assert timeline.busy_percent(timeline.read_traces(tmp_path)) is None


def test_kernels_belong_to_ranges_of_their_own_process(tmp_path):
    """Two processes use the same numbers; a mark has no length; a launch that was not traced is outside."""
    for pid, name in ((7, "up"), (8, "down")):
        csv(tmp_path / f"{pid}_marker_api_trace.csv", "Function,Thread_Id,Start_Timestamp,End_Timestamp",
            (name, 1, 0, 100), ("mark", 1, 50, 50))
        csv(tmp_path / f"{pid}_hip_api_trace.csv", "Function,Thread_Id,Correlation_Id,Start_Timestamp",
            ("launch", 1, 1, 60), ("launch", 2, 2, 60), ("launch", 1, 3, 100))
        csv(tmp_path / f"{pid}_kernel_trace.csv", "Correlation_Id,Start_Timestamp,End_Timestamp",
            (1, 500, 510), (2, 600, 603), (3, 700, 704), (9, 800, 801))
    (tmp_path / "9_marker_api_trace.csv").write_text("of a process without calls")
    assert timeline.time_by_range(timeline.read_traces(tmp_path)) == {
        "up": (1, 10.0), "down": (1, 10.0), timeline.OUTSIDE: (6, 16.0)}


# Verdicts


@pytest.fixture
def sys_run(machine):
    """A wrapper of rocprof-sys whose directory is there, and that began a second ago."""
    machine("7.0")
    found = wrapper("rocprof-sys", "-o", "out")
    os.makedirs(found.directory)
    return found


def test_an_exception_that_rocprof_sys_hides_is_told_in_its_own_words(sys_run):
    result = '\n{"performance_summary": {}}\n'
    assert sys_run.judge(f"ran\nException - HIP out of memory{result}") == (
        PROGRAM_FAILED, "it raised an exception: HIP out of memory")
    assert sys_run.judge(f"Traceback (most recent call last):\n  File{result}") == (
        PROGRAM_FAILED, "it raised an exception")
    assert sys_run.judge("no Exception - here\n")[1].startswith("it left no result")
    assert sys_run.judge(f"fine{result}") == (
        NO_DATA, "rocprof-sys-python wrote no trace, no profile and no database")


def test_a_result_counts_if_it_is_of_this_run(sys_run):
    """The clock of a file system may be behind by up to a second."""
    path = os.path.join(sys_run.directory, "performance_summary_v2.json")
    for age, found in ((0.5, True), (1.5, False)):
        open(path, "w").close()
        os.utime(path, (sys_run.started - age,) * 2)
        assert sys_run.left_result() is found


def test_results_of_rocprof_sys_are_listed_with_their_size(sys_run, capsys):
    for name, size in (("perfetto-trace-7.proto", 2_500_000), ("wall_clock-7.txt", 999_949),
                       ("wall_clock-7.json", 1_000_000), ("rocpd-7.db", 500_000_001), ("trip_count-7.txt", 0),
                       ("metadata-7.json", 5)):
        with open(os.path.join(sys_run.directory, name), "wb") as file:
            file.truncate(size)
    assert sys_run.judge("{}\n") == (OK, "4 result files, but no GPU kernel in the trace")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "  perfetto-trace-7.proto  2.5 MB  timeline, open at https://ui.perfetto.dev"
    assert lines[1].startswith("  rocpd-7.db  500.0 MB  rocpd, read with: python profile_summary.py ")
    assert lines[1].endswith("; large: use fewer steps or --modules")
    assert lines[2:] == ["  wall_clock-7.json  1.0 MB  the same for programs",
                         "  wall_clock-7.txt  999.9 kB  call stack, read in any editor"]
    pathlib.Path(sys_run.directory, "perfetto-trace-7.proto").write_bytes(b"x rocm_kernel_dispatch")
    with open(os.path.join(sys_run.directory, "rocpd-7.db"), "wb") as file:
        file.truncate(500_000_000)
    assert sys_run.judge("{}\n") == (OK, "4 result files")
    assert "large" not in capsys.readouterr().out


def compute_run(*arguments):
    """A wrapper of rocprof-compute with the workload trainer_counters, of two counters asked for."""
    found = wrapper("rocprof-compute", "-o", "out", *arguments)
    place = os.path.join(found.directory, "workloads", "trainer_counters", "MI300X")
    os.makedirs(os.path.join(place, "perfmon"))
    for name, text in (("sysinfo.csv", "gpu\n"), ("perfmon/a.txt", "pmc: SQ_WAVES GRBM_COUNT\n"),
                       ("pmc_perf.csv", "Kernel_Name,SQ_WAVES,GRBM_COUNT\nk,1,2\n")):
        pathlib.Path(place, name).write_text(text)
    return found, place


def test_counters_without_a_roofline_are_not_all_that_was_asked_for(machine, capsys):
    """Of a tool that exits 0 and leaves no roofline."""
    machine("7.0")
    found, place = compute_run()
    assert found.judge("fine") == (NO_DATA, "rocprof-compute left no roof in workloads/")
    assert capsys.readouterr().out == f"counters: {place}\n"
    roof = os.path.join(found.directory, "workloads", "trainer_roof", "MI300X")
    os.makedirs(roof)
    for name in ("sysinfo.csv", "roofline.csv"):
        open(os.path.join(roof, name), "w").close()
    assert found.judge("Cannot write results for x")[1].startswith(
        "rocprof-compute left no roof in workloads/: Cannot write results for. It cannot work with pandas 3")
    pathlib.Path(roof, "roofline.csv").write_text("flops\n1\n")
    assert found.judge("fine") == (OK, "counters and roof collected")


def test_counters_that_are_missing_are_counted_and_named(machine):
    machine("7.0")
    found, place = compute_run("--no-roof")
    assert found.judge("") == (OK, "counters collected")
    os.remove(os.path.join(place, "pmc_perf.csv"))
    assert found.judge("") == (NO_DATA, "rocprof-compute left no counters in workloads/")
    pathlib.Path(place, "pmc_perf.csv").write_text("Kernel_Name,SQ_WAVES\nk,1\n")
    assert found.judge("") == (OK, "1 of 2 counters collected (not GRBM_COUNT)")
    for extra, text in ((4, " (not A0, A1, A2, A3, GRBM_COUNT)"),
                        (6, " (not A0, A1, A2, A3, A4 and 2 more)")):
        more = " ".join(f"A{i}" for i in range(extra))
        pathlib.Path(place, "perfmon", "a.txt").write_text(f"pmc: SQ_WAVES GRBM_COUNT {more}\n")
        assert found.judge("") == (OK, f"1 of {extra + 2} counters collected{text}")


@pytest.fixture
def v3_run(machine):
    """A wrapper of rocprofv3 that asked for two counters."""
    machine("7.0")
    found = wrapper("rocprofv3", "-o", "out", "--pmc", "SQ_WAVES:device=0, GRBM_COUNT")
    os.makedirs(found.directory)
    return found


def test_a_trace_without_its_counters_is_no_result(v3_run):
    directory = pathlib.Path(v3_run.directory)
    assert v3_run.judge("") == (NO_DATA, "rocprofv3 recorded no GPU kernel: the program used no GPU, or only "
                                "one that is hidden from the profiler")
    run_of(directory, ("k", 3, 1_500_000))
    code, reason = v3_run.judge("")
    assert code == NO_DATA and reason.startswith("rocprofv3 left no value of SQ_WAVES, GRBM_COUNT: miss")
    for value, words in ((0, "all counters are 0. On RDNA GPUs"), (5, None)):
        csv(directory / "7_counter_collection.csv", "Counter_Name,Counter_Value", ("SQ_WAVES", 0),
            ("GRBM_COUNT", value))
        verdict = v3_run.judge("")
        assert verdict[1].startswith(words) if words else verdict == (
            OK, "3 kernel launches, 1.500 ms of kernels")
    assert v3_run.why_no_counters(dict(SQ_WAVES=1)).startswith("rocprofv3 left no value of GRBM_COUNT:")
    v3_run.selected = True
    assert v3_run.why_no_kernel("no profiler start and stop (lib missing)").endswith("begin, lib missing")
    assert "no region was marked" in v3_run.why_no_kernel("")


@pytest.mark.parametrize("ended, log, code, words", [
    (process.Ended(interrupted=2), "", 130, "got SIGINT"),
    (process.Ended(timed_out=True, seconds=12.4), "", TIMEOUT, "stopped after 12 s by --timeout"),
    (process.Ended(130), "", 130, "the profiled program ended by SIGINT"),
    (process.Ended(-15), "", 143, "the profiled program ended by SIGTERM"),
    (process.Ended(-9), "", PROGRAM_FAILED, "it died of SIGKILL. Try"),
    (process.Ended(128), "", PROGRAM_FAILED, "it ended with exit code 128"),
    (process.Ended(1), "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", PROGRAM_FAILED, "Key"),
    (process.Ended(1), "Error: No HIP GPUs are available", NO_GPU, "No HIP GPUs are available. Torch")])
def test_why_a_command_failed(ended, log, code, words):
    found, reason = process.failure(ended, log)
    assert found == code and reason.startswith(words)


def test_exceptions_of_the_tool_and_of_the_program():
    tool = 'Traceback (most recent call last):\n  File "/opt/rocprofv3", line 1\nValueError: x\n'
    both = tool.replace("ValueError", '  File "/home/prog.py", line 2\nValueError')
    assert failures.crash_of_tool(tool, "/else/prog.py") == "ValueError: x"
    assert failures.crash_of_tool(both, "/else/prog.py") is None
    assert failures.crash_of_tool(tool.replace("rocprofv3", "torch"), "prog.py") is None
    assert failures.last_exception("nothing") == ([], None) == failures.last_exception(
        "Traceback (most recent call last):\n  cut")
    assert failures.last_exception(f"{tool}{tool.replace('x', 'y' * 300)}")[1] == f"ValueError: {'y' * 188}"
    assert failures.without_colours("\x1b[31mred\x1b[0m") == "red"


# What stands in the way


def test_disk_space_is_in_units_of_a_billion(tmp_path, monkeypatch):
    monkeypatch.setenv("MIN_FREE_GB", "2.5")
    for free, wanted in ((2.4e9, ["only 2.4 GB free"]), (2.5e9, [])):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place, usage=usage: usage)
        problems = list(preflight.disk_problems(tmp_path / "not" / "there"))
        assert [problem.what.partition(" in ")[0] for problem in problems] == wanted
    monkeypatch.setattr(os, "access", lambda *_: False)
    problem, = preflight.disk_problems(tmp_path)
    assert problem.what == f"{tmp_path} is not writable"


def test_what_is_missing_comes_before_the_gpu():
    def worst(*codes):
        return preflight.worst_code([preflight.Problem(code, "", "") for code in codes])
    assert (worst(FAILED, NO_GPU, MISSING), worst(FAILED, NO_GPU), worst(FAILED), worst()) == (
        MISSING, NO_GPU, FAILED, OK)
    with pytest.raises(UserError) as caught:
        preflight.refuse([preflight.Problem(NO_GPU, "a", "b"), preflight.Problem(MISSING, "c", "d")])
    assert caught.value.code == MISSING and str(caught.value) == "a; c"
    first, *problems, _ = caught.value.lines
    assert first == "cannot profile here, 2 problem(s); nothing was run:"
    assert problems == ["  - a. b", "  - c. d"]


def test_two_roccms_in_one_process_are_warned_of(tmp_path):
    torch = dict(hip="6.4.1", path=str(tmp_path / "torch" / "__init__.py"))
    tool = Tool("rocprofv3", "/opt/bin/rocprofv3", rocm="7.0")
    first, = preflight.mismatch_warnings(tool, torch)
    assert first.startswith("torch is built for ROCm 6.4 (") and "belongs to ROCm 7.0" in first
    assert not list(preflight.mismatch_warnings(Tool("x", "/opt/x", rocm="6.4"), torch))
    assert not list(preflight.mismatch_warnings(tool, dict(hip=None)))


def test_options_of_a_help_text():
    text = ("usage: tool [--not-this]\n  -k, --kernel-trace    see --pmc\n  --stats\twords --none\n"
            "  --a-b [FILE]   x\n")
    assert options_in(text) == {"--kernel-trace", "--stats", "--a-b"}


# All of them


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
