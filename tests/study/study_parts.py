"""What the tests of the performance study share: studies and rows made by hand."""
import dataclasses
import json
import pathlib

import numpy as np

from fusion_lab.study import directory
from fusion_lab.study.design import Point, Shape, Study, Vocabulary
from fusion_lab.study.recommendation import Accuracy
from fusion_lab.study.records import as_json
from fusion_lab.study.regression import check, read_reference
from fusion_lab.study.report import page
from fusion_lab.study.results import Figures, Machine, Results, Row
from fusion_lab.study.summary import PointSummary, Recommendation, Recommended, summarise
from fusion_lab.training.program import load_program
from fusion_lab.training.reading import read_json

WORDS = Vocabulary(load_program())
SHAPE = Shape((2, 32, 8), WORDS.axes)
SETTINGS = ("baseline", "fused", "only-flash-attention")


def study_of(*sizes, words=WORDS, **values):
    """A Study of these sizes: a tuple for each axis."""
    plain = dict(switches=(), num_runs=2, num_steps=5, warmup_steps=1, device="cpu", amp_dtype=None,
                 trainer_flags=(), seed=1, mode="study")
    return Study(vocabulary=words, sizes=sizes, **(plain | values))


def row_of(point, seconds):
    figures = Figures(
        median_batch_time=seconds, p20_batch_time=0.95 * seconds, p80_batch_time=1.1 * seconds,
        avg_training_speed=1.0, peak_memory_mb=1e3 * seconds + 20, saved_activation_mb=5, launches_per_step=9,
        flops_per_step=1, mfu=0.5, first_step_time=1)
    return Row(point.shape, point.setting, point.run, "ok", None, figures,
               Machine(None, "<CPU>", "2", None, None, None), seconds=1)


def row(setting, run, seconds, shape=SHAPE, turn=None, **figures):
    made = row_of(Point(shape, setting, run), seconds)
    return dataclasses.replace(made, turn=turn, figures=dataclasses.replace(made.figures, **figures))


def failed(setting, run, status, reason):
    return Row(SHAPE, setting, run, status, reason, None, None, seconds=1.0, turn=None)


def small_study(**values):
    return study_of((2,), (32,), (8,), **{**dict(settings=SETTINGS, num_runs=3), **values})


def point(setting="fused", times=(10.0,), memory=80.0, shape=SHAPE, speedup=None, low=None, high=None):
    return PointSummary(shape=shape, setting=setting, n=len(times), run_medians_ms=tuple(times),
                        median_ms=float(np.median(times)) if times else None, peak_memory_mb=memory,
                        speedup=speedup, speedup_low=low, speedup_high=high)


def summary_of(directory="s"):
    return json.loads(pathlib.Path(directory, "results_summary.json").read_text())


def write_study(place):
    """The files of a study of two shapes and three settings into a directory; returns the Study."""
    asked = study_of((2,), (32, 64), (8,), settings=("baseline", "fused", "only-flash-attention"))
    rows = [row_of(point, 0.01 * point.run) for point in asked.points()]
    recommendation = Recommendation(None, (Recommended(rows[0].shape, ("all: broken",), "fused", "x"),))
    summary = summarise(asked, rows)
    results = Results(str(place), asked.axes)
    for row in rows:
        results.append(row)
    for name, content in (
            ("config", dict(study=asked.as_json(), command="x", created="2026-01-01")),
            ("results_summary", as_json(summary) | dict(recommendation=as_json(recommendation))),
            ("accuracy", {"B 2 S 32 N 8 fused": "passed"})):
        (place / f"{name}.json").write_text(json.dumps(content))
    return asked


class Bystander:
    """What Accuracy needs of a Runner to read its file."""

    def __init__(self, path):
        self.directory = str(path)


def read_back(kind, path, asked):
    """Read one of a study's files as the study does, and use all that was read."""
    folder = str(path)
    if kind == "accuracy.json":
        return "".join(Accuracy(Bystander(path)).known.values())
    config = directory.read_config(folder, WORDS)
    results = Results(folder, WORDS.axes)
    results.load()
    summary = summarise(config.study, results.rows)
    if kind == "results_summary.json":
        directory.earlier_recommendation(folder, summary)
        return check(summary, read_reference(str(path / kind), asked), 1.1, 0.05)
    directory.write_results(folder, summary, config, plots=False)
    read_json(path / "results_summary.json")
    return page(summary, config, [])
