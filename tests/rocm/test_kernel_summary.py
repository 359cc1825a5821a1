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
from fusion_lab.rocm.kernel_summary import summarize
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm import common
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
    done = cli(tmp_path)
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


def test_share_of_time_in_which_the_gpu_was_busy(run):
    """Overlapping kernels of one GPU count once, gaps count against it, each GPU has its own clock."""
    (run / "7_kernel_trace.csv").write_text(
        "Agent_Id,Kernel_Name,Start_Timestamp,End_Timestamp\n"
        "4,a,100,200\n4,b,150,180\n4,c,300,400\n5,a,1000,1050\n5,a,1075,1100\n")
    summary = summarize(run)
    assert summary["gpu_busy_percent"] == pytest.approx(100 * (200 + 75) / (300 + 100))
    assert "GPU busy                 68.8 %" in kernel_summary.render(summary)
    common.write_counters(run / "7_counter_collection.csv", ["SQ_WAVES"])  # kernels are kept apart for that
    assert summarize(run)["gpu_busy_percent"] is None


@pytest.mark.parametrize("spans, moments, names", [
    ([(0, 100, "a"), (10, 20, "b")], [5, 15, 25, 100], ["a", "b", "a", "outside all ranges"]),
    ([(0, 10, "a"), (10, 20, "b")], [0, 9, 10, 19], ["a", "a", "b", "b"]),
    ([(0, 10, "a"), (0, 5, "b")], [0, 7], ["b", "a"]),
    ([], [3], ["outside all ranges"]),
])
def test_innermost_range(spans, moments, names):
    assert list(timeline.ranges_at(spans, [(time, time) for time in moments]).values()) == names


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


def cli(*arguments):
    command = [sys.executable, "-S", ROOT / "profile_summary.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_command_line_prints_and_writes_nothing(run):
    common.write_stats(run / "7_kernel_stats.csv")
    before = sorted(run.iterdir())
    assert cli(run).stdout == kernel_summary.render(summarize(run))
    assert json.loads(cli(run, "--json").stdout)["launches"] == 1663
    assert sorted(run.iterdir()) == before


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
    done = cli(tmp_path)
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert cli(tmp_path / "absent").returncode == 2
