"""Records that never end: time and size have limits, said in one line."""
import gzip
import itertools
import sqlite3
import time

import pytest

from fusion_lab.rocm import kernel_summary, records
from fusion_lab.training import patience
from fusion_lab.training.files import UserError
from tests.rocm.fake_rocm import common
from tests.rocm.fake_rocm.machine import STATS, csv, run_of

ENDLESS = ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
           'SELECT 1 AS kernel_id, 1 AS guid, i AS start, i + 1 AS "end" FROM n')


@pytest.fixture
def soon(monkeypatch):
    """A clock by which every look at it is a second later."""
    monkeypatch.setattr(patience.time, "monotonic", itertools.count().__next__)


def database(path, view):
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE VIEW rocpd_kernel_dispatch AS {view}")
        connection.execute("CREATE TABLE rocpd_info_kernel_symbol (id, guid, display_name)")
        connection.execute("INSERT INTO rocpd_info_kernel_symbol VALUES (1, 1, 'k')")
    connection.close()


def one_line(code, capsys):
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("view", [ENDLESS, f'SELECT 1 AS kernel_id, 1 AS guid, COUNT(*) AS start, 1 AS "end" '
                                  f"FROM ({ENDLESS}) GROUP BY 1"])
def test_a_view_without_an_end(view, tmp_path, soon, capsys):
    database(tmp_path / "x.db", view)
    assert "x.db: takes more than 60 s to read" in one_line(kernel_summary.main([str(tmp_path)]), capsys)


def test_a_table_of_too_many_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "MOST_ROWS", 1000)
    database(tmp_path / "x.db", ENDLESS + " LIMIT 1000")
    assert "x.db: a table of 1000 rows or more" in one_line(kernel_summary.main([str(tmp_path)]), capsys)


@pytest.mark.parametrize("name, opener", [("results_pmc_perf_0.csv.gz", gzip.open),
                                          ("a_kernel_trace.csv", open)])
def test_a_table_that_takes_minutes(name, opener, tmp_path, soon, capsys):
    with opener(tmp_path / name, "wt") as file:
        file.write("Dispatch_ID,Kernel_Name,Start_Timestamp,End_Timestamp\n")
        file.writelines(f"{n},k,{n},{n + 1}\n" for n in range(100))
    assert f"{name}: takes more than 60 s" in one_line(kernel_summary.main([str(tmp_path)]), capsys)
    assert kernel_summary.main_figures(tmp_path)["slowest kernel"] is None


def test_the_limit_is_that_of_one_summary(tmp_path, soon):
    with patience.limited():
        for _ in range(patience.SECONDS):
            assert not patience.too_late()
        assert patience.too_late()
    assert not patience.too_late() and time.monotonic() > patience.SECONDS


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


def test_counters_under_the_names_of_their_release(tmp_path):
    """7.0 to 7.12 call all *_ACCUM by one name in their results, and wrote text; 7.13 writes YAML."""
    lists = tmp_path / "perfmon"
    lists.mkdir()
    (lists / "SQ_IFETCH_LEVEL.txt").write_text("pmc: SQ_WAVES SQ_IFETCH_LEVEL_ACCUM TCC_HIT[0]\n")
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n1,k,5\n")
    assert records.missing_counters(tmp_path) == ["SQ_IFETCH_LEVEL_ACCUM", "TCC_HIT[0]"]
    (tmp_path / "pmc_perf.csv").write_text("Kernel_Name,SQ_WAVES,SQ_ACCUM_PREV_HIRES,TCC_HIT[0]\nk,5,6,7\n")
    assert records.missing_counters(tmp_path) == []
    (lists / "pmc_perf_0.yaml").write_text("jobs:\n- pmc:\n  - SQ_WAVES\n  - 'TCC_HIT[1]'\n  - SQ_BUSY\n")
    (lists / "counter_def_0.yaml").write_text("counters:\n- name: X\n  architectures:\n  - gfx942\n  - Y\n")
    assert records.missing_counters(tmp_path) == ["SQ_BUSY", "TCC_HIT[1]"]


def test_lists_of_dispatches_without_times_are_passed_over(tmp_path):
    (tmp_path / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name\n0,k\n")
    assert records.read_kernels(tmp_path).totals == {}
    with pytest.raises(UserError, match="no kernel .*left out, as they list dispatches without times: pmc_p"):
        kernel_summary.load(tmp_path)
    (tmp_path / "pmc_perf_1.csv").write_text("Kernel_Name,Start_Timestamp,End_Timestamp\nk,1,4\n")
    assert records.read_kernels(tmp_path) == (
        {"k": (1, 3.0)}, "rocprof-compute counters", ["pmc_perf_1.csv"], ["pmc_perf.csv"])
    said = "left out, as they list dispatches without times: pmc_perf.csv\n"
    assert said in kernel_summary.render(kernel_summary.load(tmp_path))
