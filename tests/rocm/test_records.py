"""Reading what the profilers of every release wrote."""
import gzip
import sqlite3

import pytest

from fusion_lab.rocm import records
from fusion_lab.rocm.kernel_summary import render, summarize
from fusion_lab.training.errors import UserError
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import csv, run_of, start

LONG = "GPU_ID,Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp,Counter_Name,Counter_Value"


def test_launches_and_times_of_csv_by_hand(tmp_path):
    """rocprof-compute has lists without times; from 3.5 on a row for each counter, a file for each run."""
    rows = ("k", 100, 200), ("k", 300, 500), ("l", 0, 50)
    csv(tmp_path / "a" / "x_kernel_trace.csv", "KERNEL_NAME,start_timestamp,End Timestamp", *rows)
    csv(tmp_path / "d" / "pmc_perf.csv", "Dispatch_ID,Kernel_Name", (0, "k"))
    csv(tmp_path / "d" / "pmc_perf_1.csv", "Kernel_Name,Start_Timestamp,End_Timestamp", *rows)
    for number in (0, 1):
        csv(tmp_path / "b" / f"results_pmc_perf_{number}.csv", LONG, *(
            (0, place, *row, counter, 1) for counter in "XY" for place, row in enumerate(rows)))
    (tmp_path / "c").mkdir()
    with gzip.open(tmp_path / "c" / "results_pmc_perf_0.csv.gz", "wt") as file:
        file.write((tmp_path / "b" / "results_pmc_perf_0.csv").read_text())
    for folder in "abcd":
        assert records.read_kernels(tmp_path / folder)[0] == {"k": (2, 300.0), "l": (1, 50.0)}


def test_of_several_passes_the_first_counts(tmp_path):
    """Of rocprofv3's and of rocprof-compute's databases; nothing that is another session's."""
    for number, name in ((2, "pass_2"), (1, "pass_1")):
        run_of(tmp_path / name / "host", ("k", number, 10 * number))
    run_of(tmp_path / "pass_1" / "another process", ("k", 4, 5))
    run_of(tmp_path / "other", ("k", 9, 9), steps=2)
    assert records.read_kernels(tmp_path)[0] == {"k": (5, 15.0)}
    for part in ("counters", "roof"):
        for name in ("pmc_perf_0", "pmc_perf_1"):
            place = tmp_path / "c" / "workloads" / f"x_{part}" / "MI300X" / "out" / name / "47"
            place.mkdir(parents=True)
            common.write_rocpd(place / "47.db")
    for directory in (tmp_path / "c", tmp_path / "c" / "workloads" / "x_counters" / "MI300X"):
        assert sum(calls for calls, _ in records.read_kernels(directory)[0].values()) == common.LAUNCHES


@pytest.mark.parametrize("name, header, row, counted", [
    ("pmc_perf.csv", "Dispatch_ID,Kernel_Name,Accum_VGPR,SGPR,SQ_WAVES", (1, "k", 8, 16, 5), True),
    ("pmc_perf.csv", "Dispatch_ID,Kernel_Name,SQ_WAVES", None, False),
    ("results_pmc_perf_0.csv", "Kernel_Name,Counter_Name", ("k", "GRBM_COUNT"), True),
    ("pmc_dispatch_info.csv", "Dispatch_ID,Kernel_Name", (0, "k"), False),
    ("perfmon/pmc_perf.csv", "Kernel_Name,SQ_WAVES", ("k", 5), False)])  # the tool's own input
def test_counters_of_rocprof_compute_are_looked_for_in_its_results(name, header, row, counted, tmp_path):
    csv(tmp_path / name, header, *([row] if row else []))
    assert records.has_counters(tmp_path) is counted
    common.write_rocpd(tmp_path / "r.db")
    assert records.has_counters(tmp_path) is counted
    common.write_rocpd(tmp_path / "s.db", counters=["SQ_WAVES"])  # as 3.9 does
    assert counted or records.has_counters(tmp_path)


STATS = "Name,Calls,TotalDurationNs\nx,3,5\n"


@pytest.mark.parametrize("rest", ["y,5,", "y,5", "y", '"y', "\n", "y,five,5\n"])
def test_an_interrupted_csv_counts_as_far_as_it_goes(rest, tmp_path):
    (tmp_path / "1_kernel_stats.csv").write_text(STATS + rest)
    assert records.read_kernels(tmp_path)[0] == {"x": (3, 5.0)}


@pytest.mark.parametrize("name, content, words", [
    ("a_kernel_stats.csv", STATS + "y,5,\nz,1,1\n", "row 3 is damaged"),
    ("a_kernel_stats.csv", "Kernel,Count\nx,1\n", "no column name, calls, totaldurationns"),
    ("a_kernel_stats.csv", "", "no column"), ("manifest.json", "{}", "no kernel records"),
    ("a_results.db", "not a database", "not a rocpd database")])
def test_unusable_directories_are_one_line(name, content, words, tmp_path):
    (tmp_path / name).write_text(content)
    done = start("summary", tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert start("summary", tmp_path / "absent").returncode == 2


SYMBOLS = ("CREATE TABLE rocpd_info_kernel_symbol (id INTEGER, guid, kernel_name TEXT, display_name TEXT);"
           "INSERT INTO rocpd_info_kernel_symbol VALUES (1, 'g', '_Zk', 'k'), (1, 'g', '_Zk', 'k'), "
           "(2, 'g', '_Zl', NULL), (3, 'h', '_Zm', 'm');")
DISPATCHES = "CREATE TABLE rocpd_kernel_dispatch (id INTEGER PRIMARY KEY, guid TEXT, kernel_id INTEGER, {});"
VERSION = ("CREATE TABLE rocpd_metadata (tag, value);"
           "INSERT INTO rocpd_metadata VALUES ('schema_version', '5.1.0');")


def rocpd(path, script):
    with sqlite3.connect(path) as database:
        database.executescript(script)
    database.close()
    return records.read_kernels(path.parent)[:2]


def test_dispatches_of_a_database_are_neither_lost_nor_doubled(tmp_path):
    """Kernel 1 has its symbol twice, 2 no demangled name, 3's is of another process, 0's was not written."""
    inline = SYMBOLS + DISPATCHES.format('start BIGINT, "end" BIGINT') + "".join(
        f"INSERT INTO rocpd_kernel_dispatch VALUES (NULL, 'g', {kernel}, {start}, {start + 10});"
        for start, kernel in enumerate((0, 0, 1, 1, 1, 2, 3)))
    expected = {"(unknown)": (3, 30.0), "k": (3, 30.0), "_Zl": (1, 10.0)}, 0
    assert rocpd(tmp_path / "a.db", inline) == expected
    (tmp_path / "a.db").unlink()
    apart = SYMBOLS + DISPATCHES.format("start_id INTEGER, end_id INTEGER") + (
        "CREATE TABLE rocpd_timestamp (id INTEGER, guid TEXT, value BIGINT);") + "".join(
        f"INSERT INTO rocpd_kernel_dispatch VALUES (NULL, 'g', {kernel}, {2 * start}, {2 * start + 1});"
        f"INSERT INTO rocpd_timestamp VALUES ({2 * start}, 'g', {start});"
        f"INSERT INTO rocpd_timestamp VALUES ({2 * start + 1}, 'g', {start + 10});"
        for start, kernel in enumerate((0, 0, 1, 1, 1, 2, 3)))
    assert rocpd(tmp_path / "b.db", apart) == expected
    (tmp_path / "b.db").unlink()
    with pytest.raises(UserError, match=r"schema 5\.1\.0 is not known"):
        rocpd(tmp_path / "c.db", VERSION + DISPATCHES.format("begin INTEGER"))


@pytest.mark.parametrize("change, time, impossible", [
    ({}, 120, 0), ({3: (30_000, 30_030)}, 120, 0),  # one of them twice in the file
    ({2: (20_000, 19_000)}, 90, 1), ({2: (0, 0)}, 90, 1), ({2: (20_000, 9e9)}, 10_090, 1)])
def test_impossible_times_reach_no_sum(change, time, impossible, tmp_path):
    """Four launches of 30 ns in a queue, 10 µs apart; the last stands there twice."""
    times = {place: (10_000 * place, 10_000 * place + 30) for place in range(1, 5)} | change
    rows = [(1, 1, place, "k", place, *times[place]) for place in (1, 2, 3, 4, 4)]
    csv(tmp_path / "7_kernel_trace.csv", "Agent_Id,Queue_Id,Dispatch_Id,Kernel_Name,Correlation_Id,"
        "Start_Timestamp,End_Timestamp", *rows)
    assert records.read_kernels(tmp_path)[:2] == ({"k": (4, time)}, impossible)
    assert ("are impossible" in render(summary := summarize(tmp_path))) is bool(impossible)
    assert summary["gpu_busy_percent"] < 40


@pytest.mark.parametrize("total, found", [("-5", ({"x": (3, 0.0)}, 3)), ("inf", None), ("nan", None)])
def test_impossible_sums_of_statistics(total, found, tmp_path):
    (tmp_path / "1_kernel_stats.csv").write_text(f"Name,Calls,TotalDurationNs\nx,3,{total}\n")
    if found:
        assert records.read_kernels(tmp_path)[:2] == found
    else:
        with pytest.raises(UserError, match="impossible"):
            records.read_kernels(tmp_path)
