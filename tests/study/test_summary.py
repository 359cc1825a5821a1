"""What a study's rows add up to: figures of points, gains, exponents, effects, the table."""
import dataclasses

import pytest

from fusion_lab.study import summary as summaries
from fusion_lab.study.design import Shape, combinations
from fusion_lab.study.records import as_json
from fusion_lab.study.summary import Recommendation, against_baseline, as_csv, summarise
from tests.study.study_parts import SHAPE, WORDS, failed, point, row, small_study, study_of


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
    for few in (points[:3], [point(times=())]):
        assert summaries.effects_table(study, few) == ()
    assert summaries.effects_table(small_study(switches=switches[:1]), points) == ()
    assert summaries.saved(points[0], point(memory=None)) is None is summaries.saved(point(memory=None), None)


def test_a_table_has_a_line_a_point():
    rows = [*(row("baseline", run, 0.020) for run in (1, 2, 3)), failed("fused", 1, "timeout", "slow, very")]
    lines = as_csv(summarise(small_study(), rows)).removesuffix("\n").split("\n")
    assert lines[0] == "batch_size,seq_len,num_seqs," + ",".join(summaries.COLUMNS)
    assert summaries.COLUMNS[:3] + summaries.COLUMNS[-3:] == (
        "setting", "n", "n_failed", "launches_per_step", "mfu", "reason")
    assert lines[1].startswith("2,32,8,baseline,3,0,20.0,19.0,22")
    assert lines[1].endswith(",0.0,100.0,1.0,1.0,1.0,40.0,0.0,5.0,9.0,0.5,")
    assert lines[2].endswith(',"timeout: slow, very"') and len(lines) == 3
    assert summaries.machines_of(rows) == (rows[0].system,)


def test_the_whole_of_a_study_as_json():
    switches = ("qkv-fusion-msa", "flash-attention")
    study = study_of((2,), (32, 64), (8,), switches=switches,
                     settings=tuple(WORDS.name(on) for on in combinations(switches)))
    rows = [row(p.setting, p.run, 0.01 * p.run, p.shape, turn) for turn, p in enumerate(study.points())]
    summary = summarise(study, rows)
    points, content = summary.points, as_json(summary)
    assert content == as_json(dict(
        format=summaries.FORMAT, confidence=0.95, study=study, machine=(rows[0].system,), points=points,
        out_of_order=0, scaling=summaries.scaling(study, points),
        ablation=summaries.ablation_table(study, points), effects=summaries.effects_table(study, points)))
    assert len(content["points"]) == 8 and content["scaling"] and len(content["ablation"]) == 4
    for effects in content["effects"]:
        assert [effect["switch"] for effect in effects["main"]] == [*switches]
        assert [effect["switches"] for effect in effects["interaction"]] == [switches]
    advised = dataclasses.replace(summary, recommendation=Recommendation(None, ()))
    assert as_json(advised) == content | dict(recommendation=dict(memory_limit_mb=None, shapes=[]))
    assert summaries.INTERVAL == "[95%]" and point(speedup=2.0).n_failed == 0


@pytest.mark.parametrize("values", [
    dict(times=(1.0,), n=2), dict(times=(0.0,)), dict(low=1.0), dict(speedup=1.0, low=1.0),
    *(dict(speedup=1.0, **half) for half in (dict(high=1.0), dict(low=0.0, high=2.0))), dict(speedup=-1.0),
    dict(times=(2e12,))])
def test_points_that_cannot_be(values):
    n = values.pop("n", None)
    with pytest.raises(ValueError):
        made = point(**values)
        dataclasses.replace(made, n=n if n is not None else made.n)
