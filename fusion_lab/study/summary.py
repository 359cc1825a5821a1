"""From the runs of a study to results_summary.json and results.csv: what each point took, what that says.

A point is a setting at one shape, over its runs, as a dict. Times are medians over the runs, memory is MB of
2**20 bytes; the speed-up and what is saved are against the baseline of that shape.
"""
import csv
import io
import itertools

import numpy as np

from fusion_lab.study.design import Shape
from fusion_lab.study.results import in_words
from fusion_lab.study.statistics import CONFIDENCE, Gain, fit_exponent, ratio_interval

FORMAT = "tiny_openfold_v2 performance study 1"  # of every program's studies; older files have it too
MEDIANS = {  # figure of a point: (figure of a run, factor); each is the median over the runs
    "p20_ms": ("p20_batch_time", 1e3), "p80_ms": ("p80_batch_time", 1e3),
    "peak_memory_mb": ("peak_memory_mb", 1), "saved_activation_mb": ("saved_activation_mb", 1),
    "launches_per_step": ("launches_per_step", 1), "mfu": ("mfu", 1)}
COLUMNS = ("setting", "n", "n_failed", "median_ms", "p20_ms", "p80_ms", "run_spread_percent",
           "samples_per_second", "speedup", "speedup_low", "speedup_high", "peak_memory_mb",
           "memory_reduction_percent", "saved_activation_mb", "launches_per_step", "mfu", "reason")


def summarise(study, rows):
    """The content of results_summary.json, of a study's rows."""
    by_point, machines = {}, []
    for row in rows:
        by_point.setdefault((Shape.of(row, study.axes), row["setting"]), []).append(row)
        if row["status"] == "ok" and row["system"] not in machines:  # there should be one
            machines.append(row["system"])
    points = [summarise_point(shape, setting, by_point[shape, setting])
              for shape in study.shapes() for setting in study.settings if (shape, setting) in by_point]
    against_baseline(study, points)
    return dict(format=FORMAT, confidence=CONFIDENCE, study=study.as_dict(), machine=machines, points=points,
                scaling=scaling(study, points), ablation=ablation_table(study, points))


def median(values):
    """The median of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def summarise_point(shape, setting, rows):
    """All runs of a point together, still without a baseline."""
    good = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["run"])
    reasons = sorted({in_words(row) for row in rows if row["status"] != "ok"})
    times = [row["median_batch_time"] * 1e3 for row in good]
    middle, sizes = median(times), shape.as_dict()
    figures = {}
    for name, (figure, factor) in MEDIANS.items():
        figures[name] = median([row[figure] * factor for row in good if row[figure] is not None])
    known = times and "batch_size" in sizes
    return dict(
        sizes, setting=setting, n=len(good), n_failed=len(rows) - len(good),
        reason="; ".join(reasons) or None, run_medians_ms=times, median_ms=middle, **figures,
        samples_per_second=sizes["batch_size"] / middle * 1e3 if known else None,
        run_spread_percent=100 * (max(times) - min(times)) / middle if len(times) > 1 else None)


def speedup(base, point):
    """The Gain of point over base; None where one has no run."""
    if not base or not point or not base["n"] or not point["n"]:
        return None
    return ratio_interval(base["run_medians_ms"], point["run_medians_ms"])


def gain_of(point):
    """The speed-up of a point as a Gain; None where there is none."""
    return point["speedup"] and Gain(point["speedup"], point["speedup_low"], point["speedup_high"])


def against_baseline(study, points):
    """Give the points their speed-up and memory reduction over the baseline of their shape, None without."""
    baselines = {Shape.of(point, study.axes): point for point in points if point["setting"] == "baseline"}
    for point in points:
        base = baselines.get(Shape.of(point, study.axes))
        gain = speedup(base, point) or Gain(None)
        if point is base and point["n"]:
            gain = Gain(1.0, 1.0, 1.0)
        known = base and base["peak_memory_mb"] and point["peak_memory_mb"]
        less = 100 * (1 - point["peak_memory_mb"] / base["peak_memory_mb"]) if known else None
        point.update(speedup=gain.factor, speedup_low=gain.low, speedup_high=gain.high,
                     memory_reduction_percent=less)


def scaling(study, points):
    """Exponents p of cost = c * size**p, of time and memory: per axis, the main one first, setting and other
    sizes."""
    fits = []
    axes = sorted(study.axes, key=lambda axis: axis != study.vocabulary.main_axis)
    for axis, setting in itertools.product(axes, study.settings):
        lines = {}
        for point in points:
            if point["setting"] == setting and point["n"]:
                lines.setdefault(Shape.of(point, study.axes).without(axis.field), []).append(point)
        figures = "median_ms", "peak_memory_mb"
        for (others, line), figure in itertools.product(sorted(lines.items()), figures):
            known = [(p[axis.field], p[figure]) for p in line if p[figure]]
            if len(known) > 1:
                exponent, error = fit_exponent(*zip(*known, strict=True))
                fits.append(dict(others.as_dict(), setting=setting, axis=axis.field, figure=figure,
                                 exponent=exponent, standard_error=error, over=sorted(x for x, _ in known)))
    return fits


def ablation_table(study, points):
    """What each switch buys alone, over none, and as the last one, over all but it, at each shape. Empty
    unless the study has these settings."""
    whole, entries = frozenset(study.switches), []
    for shape in study.shapes() if len(whole) > 1 else ():
        known = {study.vocabulary.parse(point["setting"]): point for point in points
                 if Shape.of(point, study.axes) == shape}
        for name in study.switches:
            none, alone, rest, everything = (
                known.get(on) for on in (frozenset(), frozenset({name}), whole - {name}, whole))
            first, last = speedup(none, alone), speedup(rest, everything)
            if first or last:
                entries.append(dict(
                    shape.as_dict(), switch=name, alone=first and first._asdict(),
                    last=last and last._asdict(), alone_saves_mb=saved(none, alone),
                    last_saves_mb=saved(rest, everything)))
    return entries


def saved(base, point):
    """MB that point needs less than base; None where one is unknown."""
    if not base or not point or None in (base["peak_memory_mb"], point["peak_memory_mb"]):
        return None
    return base["peak_memory_mb"] - point["peak_memory_mb"]


def as_csv(study, summary):
    """The text of results.csv: a line a point."""
    text = io.StringIO()
    columns = [*(axis.field for axis in study.axes), *COLUMNS]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(summary["points"])
    return text.getvalue()
