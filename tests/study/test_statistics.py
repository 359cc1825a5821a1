"""A performance study's figures, checks against earlier ones and recommendations by hand."""
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fusion_lab.study import regression, runner
from fusion_lab.study import summary as summaries
from fusion_lab.study.design import Point, Shape
from fusion_lab.study.recommendation import Accuracy, recommend, too_large
from fusion_lab.study.regression import Reference, check, check_point, judged, slowdown, verdict_of
from fusion_lab.study.results import Figures, Results, Row
from fusion_lab.study.statistics import Gain, half_width, pareto, t_quantile
from fusion_lab.study.summary import PointSummary, against_baseline, as_csv, summarise
from fusion_lab.training.files import UserError
from tests.study.study_parts import WORDS, row_of, study_of
from tests.support import state_of, wait_for

SHAPE = Shape((2, 32, 8), WORDS.axes)
SETTINGS = ("baseline", "fused", "only-flash-attention")


def row(setting, run, seconds, shape=SHAPE, turn=None, **figures):
    made = row_of(Point(shape, setting, run), seconds)
    return dataclasses.replace(made, turn=turn, figures=dataclasses.replace(made.figures, **figures))


def failed(setting, run, status, reason):
    return Row(SHAPE, setting, run, status, reason, None, None, seconds=1.0, turn=None)


def small_study(**values):
    return study_of((2,), (32,), (8,), **{**dict(settings=SETTINGS, num_runs=3), **values})


# Figures of points


def test_a_point_is_the_median_over_its_runs():
    """Of 40, 20 and 30 ms; a figure that one run lacks is the median of the others."""
    rows = [row("baseline", 1, 0.040, peak_memory_mb=90.0, mfu=None, saved_activation_mb=3.0),
            row("baseline", 2, 0.020, peak_memory_mb=70.0, mfu=0.25, saved_activation_mb=9.0),
            row("baseline", 3, 0.030, peak_memory_mb=60.0, mfu=0.75, saved_activation_mb=4.0),
            failed("baseline", 4, "failed", "z"), failed("baseline", 5, "failed", "a"),
            failed("baseline", 6, "failed", "a")]
    point = summaries.summarise_point(SHAPE, "baseline", rows[::-1])
    assert point.run_medians_ms == pytest.approx((40.0, 20.0, 30.0)) and (point.n, point.n_failed) == (3, 3)
    assert point.median_ms == pytest.approx(30.0) and point.reason == "failed: a; failed: z"
    assert (point.p20_ms, point.p80_ms) == (pytest.approx(28.5), pytest.approx(33.0))
    assert (point.peak_memory_mb, point.mfu, point.saved_activation_mb, point.launches_per_step) == (
        70.0, 0.5, 4.0, 9)
    assert point.samples_per_second == pytest.approx(2 / 0.030)
    assert point.run_spread_percent == pytest.approx(100 * 20 / 30)
    once = summaries.summarise_point(SHAPE, "baseline", rows[:1])
    assert once.run_spread_percent is None and once.reason is None
    never = summaries.summarise_point(SHAPE, "baseline", rows[3:])
    assert never.n == 0 and never.median_ms is never.samples_per_second is never.peak_memory_mb is None


def point(setting="fused", times=(10.0,), memory=80.0, shape=SHAPE, speedup=None, low=None, high=None):
    return PointSummary(shape=shape, setting=setting, n=len(times), run_medians_ms=tuple(times),
                        median_ms=float(np.median(times)) if times else None, peak_memory_mb=memory,
                        speedup=speedup, speedup_low=low, speedup_high=high)


def test_points_against_their_baseline():
    other = Shape((4, 32, 8), WORDS.axes)
    given = [point("baseline", (20.0, 20.0), 100.0), point("fused", (10.0, 10.0), 75.0),
             point("only-flash-attention", (), None), point("fused", (5.0,), 60.0, other)]
    base, fused, never, alone = against_baseline(given)
    assert (base.speedup, base.speedup_low, base.speedup_high, base.memory_reduction_percent) == (1, 1, 1, 0)
    assert (fused.speedup, fused.memory_reduction_percent) == (pytest.approx(2.0), pytest.approx(25.0))
    assert fused.speedup_low == pytest.approx(2.0) == fused.speedup_high
    for one in (never, alone):
        assert one.speedup is one.speedup_low is one.memory_reduction_percent is None
    dead, = against_baseline([point("baseline", ())])
    assert dead.speedup is None


def test_runs_out_of_their_planned_order_are_counted():
    study = small_study(num_runs=1)
    plan = study.points()

    def turns(*order, **values):
        return summaries.out_of_order(study, [
            row(p.setting, p.run, 0.01, turn=turn, **values) for p, turn in zip(plan, order, strict=True)])
    assert turns(1, 2, 3) == 0 and turns(5, 7, 9) == 0 and turns(3, 1, 2) == 1 and turns(3, 2, 1) == 2
    assert turns(2, 1, 3) == 1 and turns(1, None, 3) is None
    stranger = row("fused", 9, 0.01, turn=0)
    assert summaries.out_of_order(study, [stranger]) == 0


def test_scaling_is_per_setting_axis_and_other_sizes():
    """Time goes with S squared, memory with its square root; fused has failed at all lengths but one."""
    study = study_of((2,), (32, 64), (8, 16), settings=("baseline", "fused"), num_runs=1)
    points = [point(setting, ((size / 32) ** 2,), (size / 32) ** 0.5, Shape((2, size, depth), WORDS.axes))
              for setting in ("baseline", "fused") for size in (64, 32) for depth in (8, 16)
              if setting == "baseline" or size == 32]
    fits = summaries.scaling(study, [*points, point("fused", (), None, Shape((2, 64, 8), WORDS.axes))])
    lengths = [fit for fit in fits if fit.axis == "seq_len"]
    assert [(fit.setting, str(fit.at), fit.figure, list(fit.over)) for fit in lengths] == [
        ("baseline", f"B 2 N {depth}", figure, [32, 64]) for depth in (8, 16)
        for figure in ("median_ms", "peak_memory_mb")]
    assert [fit.exponent for fit in lengths] == pytest.approx([2.0, 0.5] * 2)
    assert fits[0].axis == "seq_len" and {fit.axis for fit in fits} == {"seq_len", "num_seqs"}
    assert {fit.setting for fit in fits if fit.axis == "num_seqs"} == {"baseline", "fused"}


def test_what_a_switch_buys_alone_and_as_the_last_one():
    switches = ("qkv-fusion-msa", "flash-attention")
    names = {0: "baseline", 1: "only-qkv-fusion-msa", 2: "only-flash-attention",
             3: WORDS.name(frozenset(switches))}
    study = small_study(switches=switches, settings=tuple(names.values()))
    points = [point(names[0], (80.0,), 100.0), point(names[1], (40.0,), 90.0),
              point(names[2], (20.0,), 70.0), point(names[3], (5.0,), 64.0)]
    first, second = summaries.ablation_table(study, points)
    assert (first.switch, first.alone.factor, first.last.factor) == (
        switches[0], pytest.approx(2.0), pytest.approx(4.0))
    assert (first.alone_saves_mb, first.last_saves_mb) == (10.0, 6.0)
    assert (second.alone.factor, second.last.factor, second.alone_saves_mb, second.last_saves_mb) == (
        pytest.approx(4.0), pytest.approx(8.0), 30.0, 26.0)
    only, = summaries.ablation_table(study, [points[0], points[2]])
    assert (only.switch, only.last, only.last_saves_mb) == (switches[1], None, None)
    assert summaries.ablation_table(small_study(switches=switches[:1]), points) == ()
    effects, = summaries.effects_table(study, points)
    assert (effects.points, effects.of) == (4, 4)
    assert [(e.switches, e.gain.factor) for e in (*effects.main, *effects.interaction)] == [
        (switches[:1], pytest.approx(8 ** 0.5)), (switches[1:], pytest.approx(32 ** 0.5)),
        (switches, pytest.approx(2.0))]
    assert summaries.effects_table(study, points[:3]) == ()
    assert summaries.effects_table(small_study(switches=switches[:1]), points) == ()
    assert summaries.saved(points[0], point(memory=None)) is None is summaries.saved(point(memory=None), None)


def test_a_table_has_a_line_a_point():
    rows = [*(row("baseline", run, 0.020) for run in (1, 2, 3)), failed("fused", 1, "timeout", "slow, very")]
    lines = as_csv(summarise(small_study(), rows)).splitlines()
    assert lines[0].startswith("batch_size,seq_len,num_seqs,setting,n,n_failed,median_ms,p20_ms,p80_ms,run_")
    assert lines[1].startswith("2,32,8,baseline,3,0,20.0,19.0,22")
    assert lines[1].endswith(",0.0,100.0,1.0,1.0,1.0,40.0,0.0,5.0,9.0,0.5,")
    assert lines[2].endswith(',"timeout: slow, very"') and len(lines) == 3
    assert summaries.machines_of(rows) == (rows[0].system,)


@pytest.mark.parametrize("values", [
    dict(times=(1.0,), n=2), dict(times=(0.0,)), dict(low=1.0), dict(speedup=1.0, low=1.0),
    dict(speedup=-1.0), dict(speedup=1.0, low=0.0, high=2.0), dict(times=(2e12,))])
def test_points_that_cannot_be(values):
    n = values.pop("n", None)
    with pytest.raises(ValueError):
        made = point(**values)
        dataclasses.replace(made, n=n if n is not None else made.n)


@pytest.mark.parametrize("seconds", [1e-9, 1e9, 0.0, -1.0])
def test_times_that_no_step_takes(seconds):
    with pytest.raises(ValueError, match="no time that a step can take"):
        row("fused", 1, 0.01, p80_batch_time=seconds)
    assert row("fused", 1, 1.1e-9).ok and row("fused", 1, 9e8).ok


# Results on disk


def test_rows_in_words_and_on_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), fsync(handle)))
    results = Results(str(tmp_path), WORDS.axes)
    first = row("fused", 1, 0.0125, peak_memory_mb=7.26)
    second = failed("fused", 2, "timeout", "timeout: slow")
    third = row("fused", 3, 0.0125, peak_memory_mb=None)
    for one in (first, second, third):
        results.append(one)
        assert synced[-1] == os.path.getsize(results.path)  # on the disk, whole
    assert [str(one) for one in results.rows] == ["12.50 ms, 7.3 MB", "timeout: slow", "12.50 ms, n/a"]
    assert results.find(second.point) is second and results.find(Point(SHAPE, "fused", 4)) is None
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
    for mend, size in ((False, len(whole) + 4), (True, len(whole))):
        pathlib.Path(results.path).write_bytes(whole + b'{"ba')
        again = Results(str(tmp_path), WORDS.axes)
        again.load(mend)
        assert len(again.rows) == 1 and os.path.getsize(results.path) == size


def test_a_failed_row_has_a_reason():
    with pytest.raises(ValueError, match="must have a reason"):
        failed("fused", 1, "failed", None)
    assert Figures.__dataclass_fields__.keys() <= failed("fused", 1, "failed", "x").as_json().keys()


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
        for point in points:
            code = codes[point.setting]
            record(SimpleNamespace(point=point, status="out of memory" if code else "ok", exit_code=code))
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
