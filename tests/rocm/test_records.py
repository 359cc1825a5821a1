"""Reading what the profilers of every release wrote."""
import gzip

import pytest

from fusion_lab.rocm import records
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
