"""What a study's lines add up to: figures of points, gains with intervals, sentences, a page."""
import csv
import io
import itertools

import numpy as np
import pytest

from fusion_lab.measuring.plotting import drawn
from fusion_lab.study import arguments, report
from fusion_lab.study.report import findings, page, summarise

AXES = dict(batch_size="B", seq_len="S", num_seqs="N")
HOW = dict(command="./launch_performance_study.sh", created="2026-01-01T00:00:00")


def study_of(**values):
    plain = dict(program="p", axes=AXES, sizes=dict(batch_size=[2], seq_len=[32], num_seqs=[8]),
                 variants=["baseline", "fused"], num_runs=3, num_steps=5, device="cpu",
                 amp_dtype=None, trainer_flags=[])
    return arguments.Study(**(plain | values))


def row(name, seconds, speedup=1.0, **figures):
    return dict(name=name, reason=None, median_batch_time=seconds, speedup=speedup,
                **(dict(peak_memory_mb=100.0, saved_activation_mb=5.0, launches_per_step=9) | figures))


def lines_of(study, rows_of):
    """Lines of every point of a study; rows_of(run, shape) are its rows, or why it failed."""
    lines = {}
    for run, shape in study.points():
        rows = rows_of(run, shape)
        reason = rows if isinstance(rows, str) else None
        machine = dict(gpu_name=None, host_cpu="<CPU>", torch_version="2", git_commit=None)
        lines[run, study.label(shape)] = dict(shape, run=run, reason=reason, system_info=machine,
                                              rows=[] if reason else rows)
    return lines


def points_of(study, rows_of):
    """{(seq_len, variant): point}"""
    points = summarise(study, lines_of(study, rows_of))["points"]
    return {(point["seq_len"], point["variant"]): point for point in points}


def test_a_point_is_the_median_over_its_runs():
    """Of 40, 20 and 30 ms; a figure that one run lacks is the median of the others."""
    rows = {1: [row("baseline", 0.040, peak_memory_mb=90.0, saved_activation_mb=None)],
            2: [row("baseline", 0.020, peak_memory_mb=70.0, saved_activation_mb=9.0)],
            3: [row("baseline", 0.030, peak_memory_mb=60.0, saved_activation_mb=4.0)], 4: "b", 5: "a", 6: "a"}
    point = points_of(study_of(num_runs=6, variants=["baseline"]), lambda run, _: rows[run])[32, "baseline"]
    assert point["run_medians_ms"] == {"1": 40.0, "2": 20.0, "3": 30.0}
    assert (point["n"], point["n_failed"], point["reason"]) == (3, 3, "a; b")
    assert point["median_ms"] == pytest.approx(30.0)
    assert (point["peak_memory_mb"], point["saved_activation_mb"], point["launches_per_step"]) == (70, 6.5, 9)
    assert point["samples_per_second"] == pytest.approx(2 / 0.030)
    assert point["run_spread_percent"] == pytest.approx(100)


def test_points_against_their_baseline():
    """Speed-ups are those of the runs, whatever their times; a variant without figures has none."""
    points = points_of(study_of(variants=["baseline", "fused", "compiled"], num_runs=2), lambda run, _: [
        row("baseline", 0.02 * run), row("fused", 0.01 * run, 2.0, peak_memory_mb=75.0),
        dict(name="compiled", reason="no compiler", median_batch_time=None)])
    keys = "speedup", "speedup_low", "speedup_high", "memory_reduction_percent"
    assert [points[32, "baseline"][key] for key in keys] == [1, 1, 1, 0]
    assert [points[32, "fused"][key] for key in keys] == pytest.approx([2, 2, 2, 25])
    assert [points[32, "compiled"][key] for key in keys] == [None] * 4
    assert points[32, "compiled"]["reason"] == "no compiler" and points[32, "compiled"]["n"] == 0


def test_the_csv_has_a_line_for_each_point():
    study = study_of(sizes=dict(batch_size=[2], seq_len=[32, 64], num_seqs=[8]))
    rows = [row("baseline", 0.5), row("fused", 0.25, 2.0)]
    text = report.as_csv(summarise(study, lines_of(study, lambda *_: rows)))
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [(line["seq_len"], line["variant"]) for line in lines] == list(itertools.product(
        ("32", "64"), ("baseline", "fused")))
    assert float(lines[1]["median_ms"]) == 250 and float(lines[1]["speedup"]) == pytest.approx(2)


def said(factors, noise, **values):
    """Sentences on a variant that gains these factors at S 32 and 64, by runs that differ by this noise."""
    study = study_of(sizes=dict(batch_size=[1], seq_len=[32, 64], num_seqs=[8]), **values)
    return "\n".join(findings(study, summarise(study, lines_of(study, lambda run, shape: [
        row("baseline", 1.0), *[row("fused", 1.0, factors[shape["seq_len"]] * np.exp(noise * (run - 2)))]
        * bool(factors[shape["seq_len"]])]))))


def test_sentences_say_how_sure_they_are_and_of_how_many_shapes():
    assert said({32: 2.0, 64: 1.0}, 0.01).startswith("fused: 1.41x (1.3")
    assert "1.00x (" in (text := said({32: 1.0, 64: 1.0}, 0.2)) and "which noise can explain" in text
    assert "which noise can explain" in said({32: 2.0, 64: 2.0}, 0, num_runs=1)
    assert "slower at B 1 S 32 N 8, B 1 S 64 N 8" in said({32: 0.5, 64: 0.5}, 0.01)
    assert "1.28x (1.28, 1.28) the baseline's speed, the mean at 1 of 2 shapes" in said({32: 1.28, 64: 0}, 0)


def test_runs_that_differ_are_told_and_shown():
    study = study_of(num_runs=2)
    summary = summarise(study, lines_of(study, lambda run, _: [
        row("baseline", 0.002 * (2 * run - 1)), row("fused", 0.001, 2.0)]))
    assert "Runs differ by up to 200%, at B 2 S 32 N 8 baseline: 2.0 to 6.0 ms" in findings(study, summary)[1]
    assert report.table(study, summary)[1][3] == "4.00 (2.00 to 6.00)"


@pytest.mark.parametrize("axes", [AXES, dict(width="W"), dict(batch_size="B")])
@pytest.mark.parametrize("broken", [False, True])
def test_the_page_stands_alone_and_has_every_point(axes, broken, tmp_path):
    """Of several sizes, of one, and of failures alone."""
    sizes = {axis: [2, 4] if axes is AXES else [2] for axis in axes}
    study = study_of(axes=axes, sizes=sizes, variants=["baseline", "fused", "only-x"])
    rows = "<script>" if broken else [row("baseline", 0.5), row("fused", 0.25, 2.0), row("only-x", 0.5, 1.0)]
    summary = summarise(study, lines_of(study, lambda run, _: rows))
    picture = drawn(str(tmp_path / "p.png"), report.draw, study, summary)
    text = page(study, summary, HOW, (tmp_path / "p.png").read_bytes())
    assert picture and "&lt;CPU&gt;" in text and text.count("<tr>") == 1 + len(summary["points"])
    assert "<script" not in text and ("&lt;script&gt;" in text) == broken
    assert text.count('src="data:image/png;base64,iVBOR') == text.count("src=") == 1 and "href" not in text
