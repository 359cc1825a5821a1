"""Rows of a study's runs, in words and on disk."""
import dataclasses
import os
import pathlib

import pytest

from fusion_lab.study.design import Point
from fusion_lab.study.results import Figures, Results, Row
from tests.study.study_parts import SHAPE, WORDS, failed, row


@pytest.mark.parametrize("seconds", [1e-9, 1e9, 0.0, -1.0])
def test_times_that_no_step_takes(seconds):
    with pytest.raises(ValueError, match="no time that a step can take"):
        row("fused", 1, 0.01, p80_batch_time=seconds)
    assert row("fused", 1, 1.1e-9).ok and row("fused", 1, 9e8).ok


def test_rows_in_words_and_on_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle)))
    results = Results(str(tmp_path), WORDS.axes)
    first = dataclasses.replace(row("fused", 1, 0.0125, turn=5, peak_memory_mb=7.26), seconds=3.5,
                                exit_code=0, timestamp="2026-01-01")
    second = failed("fused", 2, "timeout", "timeout: slow")
    third = row("fused", 3, 0.0125, peak_memory_mb=None)
    for one in (first, second, third):
        results.append(one)
        assert synced[-1] == os.path.getsize(results.path)  # on the disk, whole
    assert [str(one) for one in results.rows] == ["12.50 ms, 7.3 MB", "timeout: slow", "12.50 ms, n/a"]
    assert results.find(second.point) is second and results.find(Point(SHAPE, "fused", 4)) is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.append(row("fused", 4, 0.01, mfu=float("nan")))
    again = Results(str(tmp_path), WORDS.axes)
    again.load()
    assert again.rows == results.rows and again.rows[0].figures == first.figures
    assert again.forget_failures() == 1 and again.rows == [first, third] and again.forget_failures() == 0
    final = Results(str(tmp_path), WORDS.axes)
    final.load()
    assert final.rows == [first, third]


def test_half_a_line_is_mended_only_where_that_is_asked_for(tmp_path):
    results = Results(str(tmp_path), WORDS.axes)
    results.load()
    results.append(row("fused", 1, 0.0125))
    whole = pathlib.Path(results.path).read_bytes()
    for mend, size in (((False,), len(whole) + 4), ((), len(whole))):
        pathlib.Path(results.path).write_bytes(whole + b'{"ba')
        again = Results(str(tmp_path), WORDS.axes)
        again.load(*mend)
        assert len(again.rows) == 1 and os.path.getsize(results.path) == size


def test_a_failed_row_has_a_reason_and_a_finished_one_a_machine():
    with pytest.raises(ValueError, match="must have a reason"):
        failed("fused", 1, "failed", None)
    for broken in ([], row("fused", 1, 0.01).as_json() | dict(system=None)):  # no machine
        with pytest.raises(ValueError, match="must be an object"):
            Row.read(broken, WORDS.axes)
    assert Figures.__dataclass_fields__.keys() <= failed("fused", 1, "failed", "x").as_json().keys()
