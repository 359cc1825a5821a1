"""Records that never end: time and size have limits, said in one line."""
import gzip
import itertools
import sqlite3
import time

import pytest

from fusion_lab.rocm import kernel_summary, records
from fusion_lab.training import patience

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
