"""A study's statistics, checks against earlier ones, recommendations and turns by hand."""
import contextlib
import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fusion_lab.study import regression, runner
from fusion_lab.study.design import Point, Shape
from fusion_lab.study.recommendation import Accuracy, recommend, too_large
from fusion_lab.study.regression import Reference, check, check_point, judged, slowdown, verdict_of
from fusion_lab.study.statistics import Gain, half_width, pareto, t_quantile
from fusion_lab.study.summary import summarise
from fusion_lab.training.files import UserError
from tests.study.study_parts import SETTINGS, SHAPE, WORDS, point, row, small_study
from tests.support import state_of, wait_for

# Statistics


def test_intervals_of_a_weighted_sum_by_hand():
    """Variances 2 and 8 of groups of two and five, weights 3 and -1: shares 9 * 2 / 2 and 8 / 5."""
    groups = [[1.0, 3.0], [0.0, 8 ** 0.5, -(8 ** 0.5), 8 ** 0.5, -(8 ** 0.5)]]
    shares = np.array([9 * 2 / 2, 8 / 5])
    df = shares.sum() ** 2 / (shares[0] ** 2 / 1 + shares[1] ** 2 / 4)
    assert half_width([3, -1], groups) == pytest.approx(t_quantile(df) * shares.sum() ** 0.5)
    assert half_width([3, 0], [groups[0], [1.0]]) == pytest.approx(12.7062 * 3, rel=1e-3)
    assert half_width([3, 1], [groups[0], [1.0]]) is None and half_width([1, 1], [[2.0, 2.0]] * 2) == 0
    inflated = half_width([3, -1], groups, lambda n: 4.0 if n == 2 else 1.0)
    shares[0] *= 4
    df = shares.sum() ** 2 / (shares[0] ** 2 / 1 + shares[1] ** 2 / 4)
    assert inflated == pytest.approx(t_quantile(df) * shares.sum() ** 0.5)


def test_gains_that_are_decided():
    assert Gain(1.2, 1.01, 1.4).decided and Gain(0.8, 0.7, 0.99).decided
    assert not (Gain(1.2, 1.0, 1.4).decided or Gain(0.9, 0.8, 1.0).decided or Gain(2.0).decided)


def test_the_front_is_ordered_by_the_first_cost():
    assert pareto([(2, 2), (2, 2), (1, 4), (4, 1), (4, 2)]) == [2, 0, 1, 3]
    assert pareto([(1, 1), (2, 2)], lambda a, b: np.array([False, False])) == [0, 1]
    assert pareto([(1, 3), (2, 2)], lambda a, b: np.array([a != b, False])) == [0, 1]
    assert pareto([(1, 3), (1, 3.5)], lambda a, b: np.array([False, a < b])) == [0]


# Against an earlier study


@pytest.mark.parametrize("low, high, limits, verdict", [
    (0.9, 1.05, dict(passes_below=1.05), "PASS"), (0.9, 1.06, dict(passes_below=1.05), "UNDECIDED"),
    (1.05, 1.2, dict(passes_below=1.05), "UNDECIDED"), (1.06, 1.2, dict(passes_below=1.05), "FAIL"),
    (1.3, 1.4, dict(passes_above=1.3), "PASS"), (1.29, 1.4, dict(passes_above=1.3), "UNDECIDED"),
    (1.2, 1.3, dict(passes_above=1.3), "UNDECIDED"), (1.2, 1.29, dict(passes_above=1.3), "FAIL"),
    (None, None, dict(passes_above=1.3), "UNDECIDED")])
def test_intervals_against_limits(low, high, limits, verdict):
    assert judged(low, high, **limits) == verdict


def test_slower_by_how_much():
    now, then = point(times=(12.0, 12.0)), point(times=(10.0, 10.0))
    assert slowdown(now, then, True) == pytest.approx((1.2, 1.2, 1.2))
    now, then = (point(speedup=factor, low=1.0, high=math.exp(width))
                 for factor, width in ((2.0, 0.6), (3.0, 0.8)))
    half = 0.5  # of 0.3 and 0.4 in quadrature
    assert slowdown(now, then, False) == pytest.approx((1.5, 1.5 * math.exp(-half), 1.5 * math.exp(half)))
    assert slowdown(point("baseline", speedup=1, low=1, high=1), then, False) is None
    assert slowdown(point(speedup=2.0), then, False) is None is slowdown(now, point(speedup=2.0), False)


def verdicts(now, then, alike=True, wanted=None, limit=0.05):
    return [(kind, verdict) for kind, verdict, _ in check_point(now, then, alike, wanted, limit)]


def test_verdicts_on_a_point():
    good, slow = point(times=(10.0, 10.0)), point(times=(10.6, 10.6))
    assert verdicts(good, good) == [("time", "PASS"), ("memory", "PASS")] and verdicts(good, None) == []
    assert verdicts(slow, good)[0] == ("time", "FAIL")
    assert verdicts(slow, good, limit=0.07)[0] == ("time", "PASS")
    assert verdicts(point(times=(10.0,) * 2, memory=84.1), good)[1] == ("memory", "FAIL")
    assert verdicts(point(times=(10.0,) * 2, memory=83.9), good)[1] == ("memory", "PASS")
    assert verdicts(point(times=(10.0,) * 2, memory=None), good) == [("time", "PASS")]
    dead = dataclasses.replace(point(times=()), reason="failed: x")
    assert check_point(dead, good, True, None, 0.05) == [("time", "FAIL", "failed: x")]
    assert verdicts(dead, None) == [("time", "FAIL")] and verdicts(dead, point(times=())) == []
    assert verdicts(good, point(times=()), wanted=1.1) == [("time", "FAIL")]
    assert check_point(good, None, True, 1.1, 0.05) == [("time", "FAIL", "no baseline to compare with")]
    fast = point(speedup=1.5, low=1.3, high=1.7)
    assert check_point(fast, None, True, 1.25, 0.05) == [
        ("time", "PASS", "speed-up 1.500x [1.300, 1.700], at least 1.25 wanted")]
    assert verdicts(fast, None, wanted=1.4) == [("time", "UNDECIDED")]
    (_, _, time), (_, _, memory) = check_point(slow, good, True, None, 0.05)
    assert time == "step time 1.060x [1.060, 1.060] of the reference, at most 1.05 allowed"
    assert memory == "peak memory 1.000x of the reference, at most 1.05 allowed"
    (_, verdict, lost), _ = check_point(fast, point(speedup=2.0, low=1.9, high=2.1), False, None, 0.05)
    assert verdict == "FAIL" and lost.startswith("lost speed-up 1.333x [")
    assert regression.spoken(Gain(1.2)) == "1.200x"


def test_whether_two_studies_are_of_one_machine():
    def machines(*names):
        return SimpleNamespace(machines=[SimpleNamespace(gpu_name=gpu, host_cpu=cpu) for gpu, cpu in names])
    assert regression.same_machine(machines(("G", "a")), machines(("G", "b")))
    assert regression.same_machine(machines((None, "a")), machines((None, "a"), (None, "a")))
    assert not regression.same_machine(machines((None, "a")), machines((None, "b")))
    assert not regression.same_machine(machines(("G", "a")), machines(("H", "a")))
    assert not regression.same_machine(machines(("G", "a")), machines(("G", "a"), (None, "a")))


@pytest.mark.parametrize("time, memory, code, word", [
    ((1, 0, 0), (0, 0, 0), 0, "PASS"), ((0, 0, 0), (3, 0, 0), 1, "UNDECIDED"),
    ((9, 1, 0), (9, 0, 0), 1, "FAIL"), ((9, 0, 0), (9, 1, 0), 1, "FAIL"), ((1, 0, 5), (0, 0, 0), 0, "PASS"),
    ((0, 0, 1), (1, 0, 0), 1, "UNDECIDED")])
def test_the_verdict_of_all(time, memory, code, word, capsys):
    counts = {kind: dict(zip(("PASS", "FAIL", "UNDECIDED"), numbers, strict=True))
              for kind, numbers in (("time", time), ("memory", memory))}
    assert verdict_of(counts) == code
    lines = capsys.readouterr().out.splitlines()
    in_words = ["{} pass, {} fail, {} undecided".format(*numbers) for numbers in (time, memory)]
    assert lines[-1] == f"{word}: time {in_words[0]}; memory {in_words[1]}"
    assert (len(lines) == 2) is bool(time[2])


def test_a_check_by_hand(capsys):
    """fused got 10% slower, the baseline did not; the third setting is new, and a fourth one is gone."""
    def study(factor, settings):
        return summarise(small_study(settings=settings, num_runs=2), [
            row(name, run, 0.020 * (factor if name == "fused" else 1), turn=run) for name in settings
            for run in (1, 2)])
    then = study(1.0, ("baseline", "fused", "compiled"))
    reference = Reference({}, then.machines, then.points)
    assert check(study(1.1, SETTINGS), reference, None, 0.05) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "Check against the reference, 2 points in common, same machine: step times compared, intervals of "
        "95%", "   FAIL      B 2 S 32 N 8 fused: step time 1.100x [1.100, 1.100] of the reference, at most "
        "1.05 allowed",
        "   of the reference, not in this study: B 2 S 32 N 8 compiled",
        "FAIL: time 1 pass, 1 fail, 0 undecided; memory 2 pass, 0 fail, 0 undecided"]
    assert check(study(1.0, SETTINGS), reference, 0.99, 0.05) == 0  # speed-up 1, wanted of fused alone
    assert "PASS: time 3 pass, 0 fail" in capsys.readouterr().out
    assert check(study(1.0, SETTINGS), reference, 1.01, 0.05) == 1
    with pytest.raises(UserError, match="no point in common"):
        check(study(1.0, SETTINGS), Reference({}, then.machines, then.points[2:]), None, 0.05)


# Recommendations


def test_memory_against_a_limit():
    assert too_large(point(memory=80.0), None) is too_large(point(memory=80.0), 80.0) is None
    assert too_large(point(memory=None), None) is None
    assert too_large(point(memory=80.26), 80.0) == "80.3 MB is over the limit of 80 MB"
    assert too_large(point(memory=None), 80.0) == "its memory was not measured"


def test_the_fastest_that_fits_and_is_accurate():
    rows = [row(setting, run, seconds, peak_memory_mb=memory) for setting, seconds, memory in (
        ("baseline", 0.040, 50.0), ("fused", 0.010, 60.0), ("compiled", 0.008, 90.0), ("all", 0.009, 61.0))
        for run in (1, 2)]
    summary = summarise(small_study(settings=("baseline", "fused", "compiled", "all"), num_runs=2), rows)
    asked = []

    def verdict(shape, setting):
        asked.append(setting)
        return "failed: x" if setting == "all" else "passed"

    chosen, = recommend(summary, SimpleNamespace(verdict=verdict), 70.0).recommendation.shapes
    assert (chosen.setting, chosen.median_ms, chosen.peak_memory_mb) == ("fused", pytest.approx(10.0), 60.0)
    assert chosen.speedup == pytest.approx(4.0) and asked == ["all", "fused"]
    assert chosen.passed_over == ("compiled: 90.0 MB is over the limit of 70 MB", "all: accuracy failed: x")
    assert chosen.command.startswith("python tiny_openfold_v2.py --batch-size 2 --seq-len 32 --num-seqs 8 ")
    none = recommend(summary, SimpleNamespace(verdict=lambda *_: "not checked"), None).recommendation
    assert none.shapes[0].setting is None and len(none.shapes[0].passed_over) == 4


class Trials:
    """A Runner whose trials of --verify-accuracy end with these codes."""

    def __init__(self, directory, *codes):
        self.directory, self.codes, self.flags = str(directory), list(codes), []
        self.study = small_study(trainer_flags=("--x",))
        self.program = WORDS.program

    def folder(self, name):
        os.makedirs(os.path.join(self.directory, name), exist_ok=True)
        return contextlib.nullcontext(os.path.join(self.directory, name))

    def run_trainer(self, flags, folder):
        self.flags.append(flags)
        return self.codes.pop(0)

    def outcome(self, folder, code):
        return "failed", f"code {code}"


def test_accuracy_is_checked_once_at_a_batch_of_two_at_most(tmp_path, capsys):
    runner_ = Trials(tmp_path, 0, 1, 1)
    accuracy = Accuracy(runner_)
    large, small = Shape((8, 32, 8), WORDS.axes), Shape((1, 32, 8), WORDS.axes)
    assert accuracy.verdict(large, "baseline") == accuracy.verdict(large, "fused") == "passed"
    assert accuracy.verdict(SHAPE, "fused") == "passed" and len(runner_.flags) == 1
    assert runner_.flags[0] == ["--batch-size", "2", "--seq-len", "32", "--num-seqs", "8", "--device", "cpu",
                                "--x", "--verify-accuracy"]
    assert accuracy.verdict(small, "fused") == "not checked: code 1" and runner_.flags[1][1] == "1"
    (tmp_path / "accuracy" / "accuracy_v2.json").write_text('{"failures": ["off by 1", "more"]}')
    assert accuracy.verdict(large, "compiled") == "failed: off by 1"
    assert Accuracy(Trials(tmp_path)).known == json.loads((tmp_path / "accuracy.json").read_text()) == {
        "B 2 S 32 N 8 fused": "passed", "B 1 S 32 N 8 fused": "not checked: code 1",
        "B 2 S 32 N 8 compiled": "failed: off by 1"}
    (tmp_path / "accuracy.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="holds no accuracy verdicts"):
        Accuracy(Trials(tmp_path))


# Turns


def test_all_other_processes_are_stopped_while_one_measures(monkeypatch):
    """By the kernel's own record of them."""
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.0)
    turns = runner.Turns()
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    guests = [turns.start(command) for _ in range(3)]
    mine, *others = (guest.process for guest in guests)

    def states():
        return [state_of(process.pid) for process in others]

    try:
        with turns.alone(mine, "point"):
            wait_for(lambda: states() == ["T", "T"])
            assert state_of(mine.pid) != "T"
            assert turns.holds_up(others[0]) and not turns.holds_up(mine) and turns.turn_of == dict(point=1)
        wait_for(lambda: states() == ["S", "S"])
        assert not turns.holds_up(others[0])
    finally:
        for guest in guests:
            turns.end(guest.process)
            guest.close()
        turns.guardian.close()


def test_points_without_memory_have_a_second_try_with_less_beside_them():
    """One process a GPU, or alone, where it was the host that had none; first runs before second ones."""
    points = [Point(SHAPE, name, run) for run in (1, 2) for name in ("fits", "gpu", "host")]
    codes, calls, recorded = {"fits": 0, "gpu": 1, "host": -9}, [], []

    def measure_some(points, jobs, record):
        calls.append(([(p.setting, p.run) for p in points], jobs))
        for one in points:
            code = codes[one.setting]
            record(SimpleNamespace(point=one, status="out of memory" if code else "ok", exit_code=code))
    for jobs, gpus, again in ((4, ("0", "1"), 2), (4, (), 1), (2, tuple("012"), 2)):
        calls.clear(), recorded.clear()
        made = SimpleNamespace(jobs=jobs, on_gpu=dict.fromkeys(gpus, 0), measure_some=measure_some)
        runner.Runner.measure_all(made, points, recorded.append)
        assert calls == [call for run in (1, 2) for call in (
            ([(name, run) for name in codes], jobs), ([("gpu", run)], again), ([("host", run)], 1))]
        assert [(row.point.setting, row.point.run) for row in recorded] == [
            (name, run) for run in (1, 2) for name in codes]
    calls.clear()
    made = SimpleNamespace(jobs=1, on_gpu={}, measure_some=measure_some)
    runner.Runner.measure_all(made, points, recorded.append)
    assert [call for call in calls if call[0]] == [([(name, run) for name in codes], 1) for run in (1, 2)]


def test_a_process_goes_where_the_fewest_are(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "1")
    with runner.Runner(small_study(), str(tmp_path), 9, jobs=3, gpus=("4", "7")) as made:
        with made.place() as first, made.place() as second, made.place() as third:
            assert [place[runner.VISIBLE_GPUS] for place in (first, second, third)] == ["4", "7", "4"]
            assert made.on_gpu == {"4": 2, "7": 1} and third["OF_THIS_TEST"] == "1"
        assert made.on_gpu == {"4": 0, "7": 0}
        assert first["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    with runner.Runner(small_study(), str(tmp_path), 9) as made, made.place() as place:
        assert place is made.environment and runner.VISIBLE_GPUS not in {*place} - {*os.environ}


def test_what_is_left_is_guessed_from_what_was_run():
    """Runs of a setting take their mean; others 6 s, or 66 s where they compile; shared by the jobs."""
    study = small_study(settings=("baseline", "fused", "only-torch-compile"))
    points = [Point(SHAPE, name, run) for name in study.settings for run in (1, 2)]
    rows = [SimpleNamespace(setting="fused", seconds=seconds) for seconds in (10, 30)]
    assert runner.seconds_left(study, points, rows, 1) == 2 * 6 + 2 * 20 + 2 * 66
    assert runner.seconds_left(study, points[:3], rows, 4) == (12 + 20) / 4
    assert [runner.duration(s) for s in (99.4, 100, 5999, 6000)] == ["99 s", "2 min", "100 min", "1.7 h"]


def test_a_point_waits_for_those_before_it_in_the_plan():
    turns = runner.Turns()
    turns.plan = dict.fromkeys("ab")
    assert turns.comes_next("a") and not turns.comes_next("b")
    assert turns.comes_next("no point") and turns.comes_next(None)
    turns.give_up("a")
    assert turns.comes_next("b") and turns.comes_next("a")
    turns.guardian.close()


@pytest.mark.parametrize("held_up, before, ended", [
    (True, None, 0), (False, "another", 0), (False, None, "timeout")])
def test_the_clock_of_a_point_stands_while_others_measure_or_come_before_it(held_up, before, ended, tmp_path):
    """It runs for 0.3 s, of which it has 0.1; it asks for its turn where another one comes before it."""
    polls = iter([None] * 6 + [0])
    reader, writer = os.pipe()
    process = SimpleNamespace(poll=lambda: next(polls, 0), returncode=0)
    with runner.Runner(small_study(), str(tmp_path), 0.1) as made:
        made.turns.holds_up = lambda other: held_up and other is process
        if before:
            made.turns.plan = dict.fromkeys([before, "point"])
            os.write(writer, b"ready")
        assert made.follow(SimpleNamespace(process=process, reader=reader), "point") == ended
    os.close(reader), os.close(writer)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_a_stopped_study_ended_is_no_result(stopped, tmp_path):
    point, kept = Point(SHAPE, "baseline", 1), []
    with runner.Runner(small_study(), str(tmp_path), 9) as made:
        def run_trainer(flags, folder, given):
            assert given == point and flags == made.study.flags(SHAPE, "baseline") and os.path.isdir(folder)
            made.stopping, made.turns.turn_of = stopped, {point: 5}
            return 3
        made.run_trainer, made.keep_log = run_trainer, lambda folder, name: kept.append(name)
        made.outcome = lambda folder, code: ("failed", f"code {code}", None, None)
        row = made.measure(point)
    if stopped:
        assert row is None and kept == []
    else:
        assert kept == [point.file_name()] and (row.status, row.reason, row.turn, row.exit_code) == (
            "failed", "code 3", 5, 3)
    assert os.listdir(tmp_path / "running") == []
