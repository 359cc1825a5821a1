"""optimize_batch_size.py: which sizes are tried, and what is said of them."""
from types import SimpleNamespace

import pytest

from fusion_lab.measuring import batch_size
from fusion_lab.measuring.bench import NEVER
from fusion_lab.measuring.compare import Row
from tests.second_program import PROGRAM as SECOND
from tests.support import last_json


def made(size, fixed=100.0, each=10.0):
    return Row("given", {}, step_times=[1.0], median_batch_time=1.0, samples_per_second=min(size, 8),
               peak_memory_mb=fixed + each * size)


@pytest.mark.parametrize("memory, sizes, largest", [
    ({}, [1, 2, 4, 8, 16, 32, 64, 90], 90), (dict(each=300.0), [1, 2, 3], 3), (dict(each=2e3), [1], None),
    (dict(fixed=980.0, each=20.0), [1, 2], 1)])
def test_sizes_double_up_to_the_straight_line(memory, sizes, largest, tmp_path, capsys):
    rows, forecast = batch_size.search(lambda size: made(size, **memory), 1, 1000.0, NEVER)
    assert list(rows) == sizes and forecast is None
    settings = SECOND.settings(profile_dir=str(tmp_path))
    assert batch_size.conclude(SECOND, settings, rows, None, 1000.0) == (1 if largest is None else 0)
    out = capsys.readouterr().out
    found, fastest = last_json(out), largest and min(largest, 8)
    assert (found["largest"], found["fastest"], [*found["rows"]]) == (largest, fastest, list(map(str, sizes)))
    if largest:
        assert f"--batch-size={fastest}" in next(x for x in out.splitlines() if x.startswith("To copy:"))
    else:
        assert "Nothing fits" in out


def test_after_two_minutes_the_line_is_a_forecast_and_a_failure_ends_it(monkeypatch, tmp_path, capsys):
    clock = iter(range(0, 1000, 50))
    monkeypatch.setattr(batch_size, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rows, forecast = batch_size.search(made, 1, 1000.0, NEVER)
    assert list(rows) == [1, 2, 4] and forecast == 90
    settings = SECOND.settings(profile_dir=str(tmp_path))
    assert batch_size.conclude(SECOND, settings, rows, forecast, 1000.0) == 0
    assert "about 90 by a straight line" in capsys.readouterr().out
    failed = lambda size: made(size) if size < 4 else Row("given", {}, reason="out of memory")  # noqa: E731
    clock = iter([0] * 9)
    rows, forecast = batch_size.search(failed, 1, 1000.0, NEVER)
    assert list(rows) == [1, 2, 4] and forecast is None


def test_a_size_is_measured_as_a_comparison_does(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 100 * 2 ** 30)
    argv = ["--program", "tests/second_program.py", "--width", "8", "--device", "cpu", "--batch-size", "2",
            "--target-memory-usage", "1e-6", "--profile-dir", str(tmp_path / "b")]
    assert batch_size.run(argv) == 0
    found = last_json(capsys.readouterr().out)
    row = found["rows"][str(found["largest"])]
    assert found["largest"] >= 2 and row["launches_per_step"] > 5
    assert 0 < row["peak_memory_mb"] <= found["limit_mb"]
