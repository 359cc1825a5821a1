"""What a study's lines add up to: figures of points, gains with intervals, exponents, sentences."""
import csv
import io
import itertools

import numpy as np
import pytest

from fusion_lab.study import design, summary
from fusion_lab.study.summary import as_csv, findings, gain_over, summarise

AXES = dict(batch_size="B", seq_len="S", num_seqs="N")


def study_of(**values):
    plain = dict(program="p.py", axes=AXES, sizes=dict(batch_size=[2], seq_len=[32], num_seqs=[8]),
                 settings=["baseline", "fused"], num_runs=3, num_steps=5, device="cpu",
                 amp_dtype=None, trainer_flags=[])
    return design.Study(**(plain | values))


def row(name, seconds, speedup=1.0, **figures):
    return dict(name=name, reason=None, median_batch_time=seconds, p20_batch_time=0.9 * seconds,
                p80_batch_time=1.2 * seconds, speedup=speedup,
                **(dict(peak_memory_mb=100.0, saved_activation_mb=5.0, launches_per_step=9) | figures))


def lines_of(study, rows_of):
    """Lines of every point of a study; rows_of(run, shape) are its rows, or why it failed."""
    found = {}
    for run, shape in study.points():
        rows = rows_of(run, shape)
        reason = rows if isinstance(rows, str) else None
        machine = dict(gpu_name=None, host_cpu="<CPU>", torch_version="2", git_commit=None)
        found[run, study.label(shape)] = dict(shape, run=run, reason=reason, system_info=machine,
                                              rows=[] if reason else rows)
    return found


def points_of(study, rows_of):
    """{(seq_len, setting): point}"""
    points = summarise(study, lines_of(study, rows_of))["points"]
    return {(point["seq_len"], point["setting"]): point for point in points}


def test_a_point_is_the_median_over_its_runs():
    """Of 40, 20 and 30 ms; a figure that one run lacks is the median of the others."""
    rows = {1: [row("baseline", 0.040, peak_memory_mb=90.0, saved_activation_mb=None)],
            2: [row("baseline", 0.020, peak_memory_mb=70.0, saved_activation_mb=9.0)],
            3: [row("baseline", 0.030, peak_memory_mb=60.0, saved_activation_mb=4.0)], 4: "b", 5: "a", 6: "a"}
    point = points_of(study_of(num_runs=6, settings=["baseline"]), lambda run, _: rows[run])[32, "baseline"]
    assert point["run_medians_ms"] == {"1": 40.0, "2": 20.0, "3": 30.0}
    assert (point["n"], point["n_failed"], point["reason"]) == (3, 3, "a; b")
    assert point["median_ms"] == pytest.approx(30.0)
    assert (point["peak_memory_mb"], point["saved_activation_mb"], point["launches_per_step"]) == (70, 6.5, 9)
    assert point["samples_per_second"] == pytest.approx(2 / 0.030)
    assert point["run_spread_percent"] == pytest.approx(100)


def test_points_against_their_baseline():
    """Speed-ups are those of the runs, whatever their times; a setting without figures has none."""
    found = points_of(study_of(settings=["baseline", "fused", "compiled"], num_runs=2), lambda run, _: [
        row("baseline", 0.02 * run), row("fused", 0.01 * run, 2.0, peak_memory_mb=75.0),
        dict(name="compiled", reason="no compiler", median_batch_time=None)])
    keys = "speedup", "speedup_low", "speedup_high", "memory_reduction_percent"
    assert [found[32, "baseline"][key] for key in keys] == [1, 1, 1, 0]
    assert [found[32, "fused"][key] for key in keys] == pytest.approx([2, 2, 2, 25])
    assert [found[32, "compiled"][key] for key in keys] == [None] * 4
    assert found[32, "compiled"]["reason"] == "no compiler" and found[32, "compiled"]["n"] == 0


def test_settings_are_compared_run_by_run():
    """Runs differ in how much both gain, not in the ratio of the two."""
    points = points_of(study_of(settings=["baseline", "fused", "ultra"]), lambda run, _: [
        row("baseline", 1.0), row("fused", 1.0, 1.0 * run), row("ultra", 1.0, 1.5 * run)])
    fused, ultra = points[32, "fused"], points[32, "ultra"]
    assert gain_over(ultra, fused) == pytest.approx((1.5, 1.5, 1.5))
    assert not summary.gain_of(fused).decided
    assert gain_over(ultra, None) is None


def test_exponents_are_per_setting_axis_and_other_sizes():
    """Time goes with S squared, memory with its square root; fused has figures at one length alone."""
    study = study_of(sizes=dict(batch_size=[2], seq_len=[32, 64, 128], num_seqs=[8, 16]), num_runs=1)
    fits = summarise(study, lines_of(study, lambda _, shape: [
        row(name, (shape["seq_len"] / 32) ** 2, peak_memory_mb=shape["seq_len"] ** 0.5)
        for name in ("baseline", "fused") if name == "baseline" or shape["seq_len"] == 32]))["scaling"]
    lengths = [fit for fit in fits if fit["axis"] == "seq_len"]
    assert [(fit["setting"], fit["at"], fit["figure"], fit["over"]) for fit in lengths] == [
        ("baseline", f"B 2 N {depth}", figure, [32, 64, 128]) for depth in (8, 16)
        for figure in ("median_ms", "peak_memory_mb")]
    assert [fit["exponent"] for fit in lengths] == pytest.approx([2.0, 0.5] * 2)
    assert len(fits) == len(lengths)  # two depths, and a single length, make no law


def test_the_csv_has_a_line_for_each_point():
    study = study_of(sizes=dict(batch_size=[2], seq_len=[32, 64], num_seqs=[8]))
    rows = [row("baseline", 0.5), row("fused", 0.25, 2.0)]
    text = as_csv(summarise(study, lines_of(study, lambda *_: rows)))
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [(line["seq_len"], line["setting"]) for line in lines] == list(itertools.product(
        ("32", "64"), ("baseline", "fused")))
    assert float(lines[1]["median_ms"]) == 250 and float(lines[1]["speedup"]) == pytest.approx(2)


def said(factors, noise, **values):
    """Sentences on a setting that gains these factors at S 32 and 64, by runs that differ by this noise."""
    study = study_of(sizes=dict(batch_size=[1], seq_len=[32, 64], num_seqs=[8]), **values)
    return "\n".join(findings(study, summarise(study, lines_of(study, lambda run, shape: [
        row("baseline", 1.0), row("fused", 1.0, factors[shape["seq_len"]] * np.exp(noise * (run - 2)))]))))


def test_sentences_say_how_sure_they_are():
    text = said({32: 2.0, 64: 1.0}, 0.01)
    assert "fused: 1.41x (1.3" in text and "fastest at 1 of 2 shapes, beyond noise at 1" in text
    assert "1.00x (" in (text := said({32: 1.0, 64: 1.0}, 0.2)) and "which noise can explain" in text
    assert "which noise can explain" in said({32: 2.0, 64: 2.0}, 0, num_runs=1)
    assert "slower than the baseline at B 1 S 32 N 8, B 1 S 64 N 8" in said({32: 0.5, 64: 0.5}, 0.01)
    assert "wide intervals" in said({32: 2.0, 64: 2.0}, 0.01, num_runs=2)


def test_a_mean_over_some_of_the_shapes_says_so():
    study = study_of(sizes=dict(batch_size=[1], seq_len=[32, 64], num_seqs=[8]),
                     settings=["baseline", "fused", "ultra"])
    rows = [row("baseline", 1.0), row("fused", 1.0, 1.28), row("ultra", 1.0, 1.4)]
    lines = lines_of(study, lambda _, shape: rows if shape["seq_len"] == 32 else rows[:2])
    text = "\n".join(findings(study, summarise(study, lines)))
    assert "ultra: 1.40x (1.40, 1.40) the baseline's speed at 1 of 2 shapes;" in text
    assert "fused: 1.28x (1.28, 1.28) the baseline's speed; " in text
