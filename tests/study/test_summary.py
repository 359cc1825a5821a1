"""What a study's rows add up to: figures of points, gains, exponents, the table."""
import json

import pytest

from fusion_lab.study import summary as summaries
from fusion_lab.study.design import Shape, Study
from fusion_lab.study.summary import as_csv, summarise
from tests.study.study_parts import SHAPE, WORDS, failed, row, small_study, study_of
from tests.support import ROOT


def summarised(study, *rows):
    """The points of these rows, by setting."""
    return {point["setting"]: point for point in summarise(study, rows)["points"]}


def test_a_point_is_the_median_over_its_runs():
    """Of 40, 20 and 30 ms; a figure that one run lacks is the median of the others."""
    rows = [row("baseline", 1, 0.040, peak_memory_mb=90.0, mfu=None, saved_activation_mb=3.0),
            row("baseline", 2, 0.020, peak_memory_mb=70.0, mfu=0.25, saved_activation_mb=9.0),
            row("baseline", 3, 0.030, peak_memory_mb=60.0, mfu=0.75, saved_activation_mb=4.0),
            failed("baseline", 4, "failed", "z"), failed("baseline", 5, "failed", "a"),
            failed("baseline", 6, "failed", "a")]
    point = summaries.summarise_point(SHAPE, "baseline", rows[::-1])
    assert point["run_medians_ms"] == pytest.approx([40.0, 20.0, 30.0])
    assert (point["n"], point["n_failed"], point["reason"]) == (3, 3, "failed: a; failed: z")
    assert (point["median_ms"], point["p20_ms"], point["p80_ms"]) == pytest.approx((30.0, 28.5, 33.0))
    assert [point[key] for key in ("peak_memory_mb", "mfu", "saved_activation_mb", "launches_per_step")] == [
        70.0, 0.5, 4.0, 9]
    assert point["samples_per_second"] == pytest.approx(2 / 0.030)
    assert point["run_spread_percent"] == pytest.approx(100 * 20 / 30)
    once = summaries.summarise_point(SHAPE, "baseline", rows[:1])
    assert once["run_spread_percent"] is None and once["reason"] is None
    never = summaries.summarise_point(SHAPE, "baseline", rows[3:])
    assert never["n"] == 0
    assert never["median_ms"] is never["samples_per_second"] is never["peak_memory_mb"] is None


def test_points_against_their_baseline():
    found = summarised(small_study(),
                       *(row("baseline", run, 0.020, peak_memory_mb=100.0) for run in (1, 2)),
                       *(row("fused", run, 0.010, peak_memory_mb=75.0) for run in (1, 2)),
                       failed("only-flash-attention", 1, "failed", "x"))
    gains = ("speedup", "speedup_low", "speedup_high", "memory_reduction_percent")
    assert [found["baseline"][key] for key in gains] == [1, 1, 1, 0]
    assert [found["fused"][key] for key in gains] == pytest.approx([2, 2, 2, 25])
    assert {found["only-flash-attention"][key] for key in gains} == {None}
    alone = summarised(small_study(), row("fused", 1, 0.010), failed("baseline", 1, "failed", "x"))
    assert {point[key] for point in alone.values() for key in gains} == {None}
    unknown = summarised(small_study(), row("baseline", 1, 0.02), row("fused", 1, 0.01, peak_memory_mb=None))
    assert unknown["fused"]["memory_reduction_percent"] is None and unknown["fused"]["speedup_low"] is None


def test_exponents_are_per_setting_axis_and_other_sizes():
    """Time goes with S squared, memory with its square root; fused has failed at all lengths but one."""
    study = study_of((2,), (32, 64), (8, 16), settings=("baseline", "fused"), num_runs=1)
    rows = [row(setting, 1, (size / 32) ** 2, Shape((2, size, depth), WORDS.axes),
                peak_memory_mb=(size / 32) ** 0.5)
            for setting in ("baseline", "fused") for size in (64, 32) for depth in (8, 16)
            if setting == "baseline" or size == 32]
    fits = summarise(study, rows)["scaling"]
    lengths = [fit for fit in fits if fit["axis"] == "seq_len"]
    assert [(fit["setting"], fit["num_seqs"], fit["figure"], fit["over"]) for fit in lengths] == [
        ("baseline", depth, figure, [32, 64]) for depth in (8, 16)
        for figure in ("median_ms", "peak_memory_mb")]
    assert [fit["exponent"] for fit in lengths] == pytest.approx([2.0, 0.5] * 2)
    assert fits[0]["axis"] == "seq_len" and {fit["axis"] for fit in fits} == {"seq_len", "num_seqs"}
    assert {fit["setting"] for fit in fits if fit["axis"] == "num_seqs"} == {"baseline", "fused"}


def test_what_a_switch_buys_alone_and_as_the_last_one():
    switches = ("qkv-fusion-msa", "flash-attention")
    names = ["baseline", "only-qkv-fusion-msa", "only-flash-attention", WORDS.name(frozenset(switches))]
    study = small_study(switches=switches, settings=tuple(names))
    rows = [row(name, 1, seconds, peak_memory_mb=memory) for name, seconds, memory in zip(
        names, (0.080, 0.040, 0.020, 0.005), (100.0, 90.0, 70.0, 64.0), strict=True)]
    first, second = summarise(study, rows)["ablation"]
    assert [first["switch"], second["switch"]] == [*switches]
    factors = [entry[kind]["factor"] for entry in (first, second) for kind in ("alone", "last")]
    assert factors == pytest.approx([2.0, 4.0, 4.0, 8.0])
    assert [entry[kind] for entry in (first, second) for kind in ("alone_saves_mb", "last_saves_mb")] == [
        10.0, 6.0, 30.0, 26.0]
    only, = summarise(study, [rows[0], rows[2]])["ablation"]
    assert (only["switch"], only["last"], only["last_saves_mb"]) == (switches[1], None, None)
    assert summarise(small_study(switches=switches[:1]), rows)["ablation"] == []
    assert summaries.saved(dict(peak_memory_mb=1), dict(peak_memory_mb=None)) is None


def test_a_table_has_a_line_a_point():
    rows = [*(row("baseline", run, 0.020) for run in (1, 2, 3)), failed("fused", 1, "timeout", "slow, very")]
    lines = as_csv(small_study(), summarise(small_study(), rows)).removesuffix("\n").split("\n")
    assert lines[0] == "batch_size,seq_len,num_seqs," + ",".join(summaries.COLUMNS)
    assert lines[1].startswith("2,32,8,baseline,3,0,20.0,19.0,22")
    assert lines[1].endswith(",0.0,100.0,1.0,1.0,1.0,40.0,0.0,5.0,9.0,0.5,")
    assert lines[2].endswith(',"timeout: slow, very"') and len(lines) == 3


def test_an_older_study_adds_up_to_the_same():
    """From what each run took to gains and exponents, in the version that measured it."""
    path = ROOT / "benchmarks" / "results" / "study_h200_2026-11-21" / "results_summary.json"
    then = json.loads(path.read_text())
    study = Study.read(then["study"], WORDS)
    rows = [row(point["setting"], run, ms / 1e3, Shape.of(point, WORDS.axes),
                peak_memory_mb=point["peak_memory_mb"])
            for point in then["points"] for run, ms in enumerate(point["run_medians_ms"], 1)]
    now = summarise(study, rows)
    for point, before in zip(now["points"], then["points"], strict=True):
        for key in ("batch_size", "seq_len", "setting", "n", "median_ms", "speedup", "speedup_low",
                    "speedup_high", "memory_reduction_percent", "samples_per_second"):
            assert point[key] == pytest.approx(before[key]), key
    for fit, before in zip(now["scaling"], then["scaling"], strict=True):
        assert fit == {key: pytest.approx(value) for key, value in before.items()}


def test_a_summary_is_json_and_names_every_machine():
    rows = [row("baseline", 1, 0.020), row("baseline", 2, 0.020), row("fused", 1, 0.020)]
    assert summarise(small_study(), rows)["machine"] == [rows[0]["system"]]
    rows[2]["system"] = dict(rows[2]["system"], gpu_name="G")
    summary = summarise(small_study(), rows)
    assert len(summary["machine"]) == 2 and json.loads(json.dumps(summary, allow_nan=False)) == summary
