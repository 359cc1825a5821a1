"""Rows of a study's runs, in words and on disk, and its config."""
import json
import os
import pathlib

import pytest

from fusion_lab.study.results import Results, in_words, read_config
from fusion_lab.training.files import UserError
from tests.study.study_parts import WORDS, failed, row, write_study


def loaded(directory, **options):
    results = Results(str(directory), WORDS.axes)
    results.load(**options)
    return list(results.rows.values())


def test_rows_in_words_and_on_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle)))
    results = Results(str(tmp_path), WORDS.axes)
    rows = [row("fused", 1, 0.0125, peak_memory_mb=7.26), failed("fused", 2, "timeout", "timeout: slow"),
            row("fused", 3, 0.0125, peak_memory_mb=None)]
    for one in rows:
        results.append(one)
        assert synced[-1] == os.path.getsize(results.path)  # on the disk, whole
    assert [in_words(one) for one in rows] == ["12.50 ms, 7.3 MB", "timeout: slow", "12.50 ms, n/a"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.append(row("fused", 4, 0.01, mfu=float("nan")))
    assert loaded(tmp_path) == rows


def test_failed_runs_are_not_finished_and_give_way_to_their_repetition(tmp_path):
    results = Results(str(tmp_path), WORDS.axes)
    for one in (failed("fused", 1, "failed", "x"), row("fused", 2, 0.01)):
        results.append(one)
    assert [point.run for point in results.finished()] == [2]
    results.append(row("fused", 1, 0.02))
    assert [one["status"] for one in loaded(tmp_path)] == ["ok", "ok"] and len(results.finished()) == 2


def test_half_a_line_is_mended_only_where_that_is_asked_for(tmp_path):
    results = Results(str(tmp_path), WORDS.axes)
    assert loaded(tmp_path) == []
    results.append(row("fused", 1, 0.0125))
    whole = pathlib.Path(results.path).read_bytes()
    for options, size in ((dict(mend=False), len(whole) + 4), ({}, len(whole))):
        pathlib.Path(results.path).write_bytes(whole + b'{"ba')
        assert len(loaded(tmp_path, **options)) == 1 and os.path.getsize(results.path) == size


GOOD, BAD = row("fused", 1, 0.0125), failed("fused", 1, "failed", "x")


@pytest.mark.parametrize("broken", [
    [], [GOOD], dict(BAD, reason=None), dict(GOOD, system=None), dict(GOOD, median_batch_time=None),
    dict(GOOD, median_batch_time=0.0), dict(GOOD, p80_batch_time=1e9), dict(GOOD, peak_memory_mb="1"),
    dict(GOOD, seconds=None), dict(GOOD, run=0), dict(GOOD, seq_len=True), dict(GOOD, setting=1),
    {key: value for key, value in GOOD.items() if key != "seq_len"}])
def test_a_row_that_is_none_is_named_by_its_line(broken, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(broken)}\n")
    with pytest.raises(UserError, match="line 2 is not the result of a run"):
        loaded(tmp_path)


def test_a_row_without_end_is_none(tmp_path):
    (tmp_path / "results.jsonl").write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(UserError, match="line 1 is not"):
        loaded(tmp_path)


@pytest.mark.parametrize("changes", [
    dict(num_runs=10 ** 12), dict(num_runs="3"), dict(seq_lens=[0]), dict(seq_lens=3), dict(settings=["x"]),
    dict(settings=[]), dict(device=1), dict(trainer_flags=None)])
def test_only_the_config_of_a_study_is_one(changes, tmp_path):
    study = write_study(tmp_path)
    assert read_config(str(tmp_path), WORDS) == (study, dict(command="x", created="2026-01-01"))
    content = json.loads((tmp_path / "config.json").read_text())
    content["study"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="not the config of a study"):
        read_config(str(tmp_path), WORDS)
    for text in ("", "[]", "{}", '{"study": []}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="config of a study|study's config"):
            read_config(str(tmp_path), WORDS)
