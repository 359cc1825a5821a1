"""Summaries of profiler results: every header generation, rocpd, kinds of kernels, comparison, errors."""
import gzip
import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest

from fusion_lab.measuring.trace.kinds import KINDS
from fusion_lab.rocm import kernel_summary, records, timeline
from fusion_lab.rocm.kernel_summary import differences, main_figures, render, render_differences, summarize
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import csv, run_of, start
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


def check_totals(summary):
    assert summary["launches"] == sum(calls for calls, _ in TOTALS.values())
    got = {row["kind"]: (row["launches"], round(row["time_ms"], 6)) for row in summary["by_kind"]}
    assert got == {**dict.fromkeys(KINDS, (0, 0.0)), **TOTALS}
    assert sum(row["percent"] for row in summary["by_kind"]) == pytest.approx(100)


@pytest.mark.parametrize("write", [
    lambda d: common.write_stats(d / "7_kernel_stats.csv"),
    lambda d: common.write_trace(d / "7_kernel_trace.csv", "6.3"),
    lambda d: common.write_trace(d / "7_kernel_trace.csv", "7.0"),
    lambda d: common.write_trace(d / "out_kernel_trace.csv", "rocpd convert"),
    lambda d: common.write_trace(d / "pmc_perf.csv", "rocprof-compute"),
    lambda d: common.write_rocpd(d / "7_results.db"),
    lambda d: common.write_rocpd(d / "7_results.db", graphs=True),
], ids=["stats", "trace 6.3", "trace 7.0", "rocpd convert", "rocprof-compute", "rocpd", "rocpd 10.0"])
def test_every_source_gives_the_same_summary(write, run):
    write(run)
    summary = summarize(run)
    check_totals(summary)
    assert summary["launches_per_step"] == pytest.approx(1663 / 13)
    top = summary["top_kernels"][0]
    assert (top["calls"], top["kind"]) == (120, "matrix product")
    assert top["average_us"] == pytest.approx(41.25)


def test_golden_text(run):
    common.write_stats(run / "tinyopenfold_7_kernel_stats.csv")
    text = kernel_summary.render({**summarize(run), "directory": "DIR"})
    assert text == GOLDEN


def test_a_run_with_csv_and_a_database_is_counted_once(run):
    """rocprofv3 of 10.0 adds the database by itself for --runtime-trace and --sys-trace."""
    common.write_stats(run / "7_kernel_stats.csv")
    common.write_trace(run / "7_kernel_trace.csv", "7.0")
    common.write_counters(run / "7_counter_collection.csv", ["SQ_WAVES"])
    common.write_rocpd(run / "7_results.db", counters=["SQ_WAVES"])
    check_totals(summarize(run))
    trace, = timeline.read_traces(run)
    assert summarize(run)["source"] == "rocpd database" and len(trace.kernels) == 1663
    assert summarize(run)["counters"] == {"SQ_WAVES": 53_216}
    (run / "7_results.db").unlink()
    assert summarize(run)["counters"] == {"SQ_WAVES": 53_216}


def test_a_directory_of_something_else_is_not_searched_to_its_bottom(tmp_path, monkeypatch):
    """Two levels, the second of which is looked into below pass_1 alone; further down is another's run."""
    common.write_stats(place(tmp_path / "far" / "away" / "host") / "7_kernel_stats.csv")
    (place(tmp_path / "far" / "pass_1") / "x.txt").touch()
    seen = []
    glob = pathlib.Path.glob
    monkeypatch.setattr(pathlib.Path, "glob", lambda path, pattern: seen.append(path) or glob(path, pattern))
    with pytest.raises(UserError, match="no kernel records") as caught:
        kernel_summary.load(tmp_path)
    assert caught.value.code == 2 and set(seen) == {tmp_path, tmp_path / "far"}
    common.write_stats(place(tmp_path / "host") / "7_kernel_stats.csv")
    assert kernel_summary.load(tmp_path)["launches"] == 1663


@pytest.mark.parametrize("names, told", [
    (["one/7_kernel_stats.csv", "two/7_kernel_stats.csv"], "one, two"),
    (["mine/7_kernel_stats.csv", "mine/manifest.json"], "mine"),
    (["mine/manifest.json", "mine/workloads/x/MI300X_A1/pmc_perf.csv", "b/c/7_kernel_stats.csv"], "mine")])
def test_runs_of_others_are_named_and_not_mixed(names, told, tmp_path):
    for name in names:
        path = place((tmp_path / name).parent) / pathlib.Path(name).name
        path.write_text("{}") if name.endswith("json") else common.write_stats(path)
    done = start("profile_summary.py", tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.endswith(f"that do: {told}\n")


def place(directory):
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_case_and_spelling_of_columns_and_a_broken_last_line(tmp_path):
    (tmp_path / "a_kernel_trace.csv").write_text(
        '\ufeffKERNEL_NAME,start_timestamp,End Timestamp\n"f<a, 2>(x)",100,1100\n"f<a, 2>(x)",2000,2500\n"g',
        "utf-8")
    summary = summarize(tmp_path)
    assert (summary["launches"], summary["kernel_time_ms"]) == (2, 0.0015)
    assert summary["launches_per_step"] is None and "unknown" in kernel_summary.render(summary)


def test_rocprof_compute_counts_one_pass_and_prefers_counters_to_roofline(tmp_path):
    for place in ("workloads/x_counters/MI300X_A1", "workloads/x_roof/MI300X_A1"):
        (tmp_path / place).mkdir(parents=True)
        for number in (0, 1):
            common.write_trace(tmp_path / place / f"pmc_perf_{number}.csv", "rocprof-compute")
    summary = summarize(tmp_path)
    check_totals(summary)
    assert summary["files"] == ["workloads/x_counters/MI300X_A1/pmc_perf_0.csv"]


def test_copies_and_counters_of_a_database(run):
    common.write_rocpd(run / "7_results.db", counters=["SQ_WAVES", "OccupancyPercent"], copies=3)
    summary = summarize(run)
    assert summary["memory_copies"] == {"count": 3, "time_ms": 0.003}
    assert "DMA copies" in kernel_summary.render(summary)
    assert summary["counters"] == {"SQ_WAVES": 32 * 1663}
    assert summary["counter_averages"] == {"OccupancyPercent": pytest.approx(40)}


@pytest.mark.parametrize("name", ["results_pmc_perf_0.csv", "results_pmc_perf_0.csv.gz"])
def test_long_form_of_rocprof_compute(name, tmp_path):
    header = "GPU_ID,Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,Counter_Name,Counter_Value\n"
    rows = [f"0,{place},k,{start},{start + 10},{counter},1\n" for place, start in ((1, 0), (2, 20), (3, 20))
            for counter in ("SQ_WAVES", "GRBM_COUNT")]
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt") as file:
        file.write(header + "".join(rows))
    assert (summarize(tmp_path)["launches"], summarize(tmp_path)["kernel_time_ms"]) == (3, 30e-6)


def test_the_program_prints_and_writes_nothing(run):
    common.write_stats(run / "7_kernel_stats.csv")
    before = sorted(run.iterdir())
    program = [sys.executable, "-S", ROOT / "profile_summary.py", run]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout == render(summarize(run)) and sorted(run.iterdir()) == before


STATS = "Name,Calls,TotalDurationNs\nx,3,5\n"


@pytest.mark.parametrize("rest", [
    "y,5,", "y,5", "y", '"y', "Name,Calls,TotalDurationNs\n", "\n", "y,five,5\n"])
def test_an_interrupted_or_joined_csv_counts_as_far_as_it_goes(rest, tmp_path):
    (tmp_path / "1_kernel_stats.csv").write_text(STATS + rest)
    assert summarize(tmp_path)["launches"] == 3
    (tmp_path / "1_kernel_stats.csv").write_text(STATS + STATS + "y,4,7\n" + rest)  # the header again, inside
    assert summarize(tmp_path)["launches"] == 10


def test_what_lies_beside_the_records_may_be_damaged(tmp_path):
    (tmp_path / "1_kernel_stats.csv").write_text(STATS)
    os.mkfifo(tmp_path / "2_kernel_stats.csv")
    for manifest, training in (
            ("null", "null"), ('{"steps": [1]}', "[1]"), ('{"steps": {"measured": "x"}}', "{}"),
            *((f'{{"steps": {{"measured": {measured}, "warmup": {warmup}}}}}', "{}") for measured, warmup in (
                ("true", 3), (2.5, 3), (-2, 3), (1e300, 3), (2, "null"), (2, "true"), (2, '"x"'), (2, -1))),
            ('{"summary": "/etc/*"}', '{"num_steps": true}'), ("[" * 100_000, '{"num_steps"')):
        (tmp_path / "manifest.json").write_text(manifest)
        (tmp_path / "performance_summary_v2.json").write_text(f'{{"training_params": {training}}}')
        assert summarize(tmp_path)["launches"] == 3 and summarize(tmp_path)["steps"] is None
        assert kernel_summary.main_figures(tmp_path)["median step ms"] is None


def test_a_kernels_name_stays_on_its_line(tmp_path):
    (tmp_path / "1_kernel_stats.csv").write_text('Name,Calls,TotalDurationNs\n"a\n\x1b[2Jb",3,5\n')
    assert kernel_summary.render(summarize(tmp_path)).endswith(r"a\n\x1b[2Jb" + "\n")


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    with gzip.open(tmp_path / "results_pmc_perf_0.csv.gz", "wb") as file:
        file.write(b"Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp\n")
        file.write(b"A" * 3 * records.LONGEST_LINE)
    with pytest.raises(records.Unreadable, match="a line of more than 1048576 letters"):
        summarize(tmp_path)


@pytest.mark.parametrize("value", ["x", None, b"\xff", 1e300, float("inf")])
def test_a_database_with_a_wrong_value_is_one_line(value, tmp_path):
    """SQLite itself would reckon with a text as 0."""
    path = tmp_path / "1_results.db"
    common.write_rocpd(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE rocpd_kernel_dispatch_abc SET start = ? WHERE rowid = 2", (value,))
    connection.commit()
    connection.close()
    with pytest.raises(records.Unreadable, match="not a rocpd database"):
        summarize(tmp_path)


@pytest.mark.parametrize("name,content,code,words", [
    ("a_kernel_stats.csv", STATS + "y,5,\nz,1,1\n", 2, "row 3 is damaged"),
    ("a_kernel_stats.csv", STATS + "y,5,1e999\nz,1,1\n", 2, "row 3 is damaged"),
    ("a_kernel_stats.csv", STATS + "y,0,4\n", 2, "a kernel without calls"),
    ("a_kernel_stats.csv", STATS + "y" * 200_000 + ",1,1\n", 2, "field larger than field limit"),
    ("a_kernel_trace.csv", "Kernel_Name,Start_Timestamp,End_Timestamp\nx,1,\ny,1,2\n", 2, "row 2 is damaged"),
    (None, None, 2, "no kernel records"),
    ("manifest.json", "{}", 6, "no kernel records"),
    ("a_kernel_stats.csv", "Kernel,Count\nx,1\n", 2, "no column name, calls, totaldurationns"),
    ("a_kernel_stats.csv", "", 2, "no column"),
    ("a_results.db", "not a database", 2, "not a rocpd database"),
], ids=["damaged", "infinite", "no calls", "long name", "damaged trace", "empty", "session without data",
        "wrong header", "empty file", "no database"])
def test_unusable_directories(name, content, code, words, tmp_path):
    if name:
        (tmp_path / name).write_text(content)
    done = start("profile_summary.py", tmp_path)
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert start("profile_summary.py", tmp_path / "absent").returncode == 2


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
