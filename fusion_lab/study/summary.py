"""From the runs of a study to results_summary.json and results.csv: what each point took, what that says."""
import csv
import io
import itertools

import numpy as np

from fusion_lab.study.design import HEADLINES, NAMED, Point, combinations, parse_setting, shape_of, shapes
from fusion_lab.study.design import points as planned
from fusion_lab.study.runner import reason_of
from fusion_lab.study.statistics import CONFIDENCE, factor_effects, fit_exponent, ratio_interval

INTERVAL = f"[{100 * CONFIDENCE:g}%]"
FORMAT = "tiny_openfold_v2 performance study 1"
MEDIANS = {  # figure of a point: (figure of a run, factor); each is the median over the runs
    "p20_ms": ("p20_batch_time", 1e3), "p80_ms": ("p80_batch_time", 1e3),
    "peak_memory_mb": ("peak_memory_mb", 1), "saved_activation_mb": ("saved_activation_mb", 1),
    "launches_per_step": ("launches_per_step", 1), "mfu": ("mfu", 1)}
AXES = {"seq_len": "S", "batch_size": "B", "num_seqs": "N"}


def summarise(config, rows):
    """The content of results_summary.json."""
    study = config["study"]
    points = [summarise_point(shape, setting, rows)
              for shape in shapes(study) for setting in study["settings"]]
    points = [point for point in points if point["n"] or point["n_failed"]]
    add_comparisons(points)
    switches = study["switches"]
    return dict(format=FORMAT, confidence=CONFIDENCE, study=study, machine=machines(rows), points=points,
                out_of_order=out_of_order(study, rows), scaling=scaling(points, study["settings"]),
                ablation=ablation_table(points, switches), effects=effects_table(points, switches))


def out_of_order(study, rows):
    """How many runs were measured after one that the plan has behind them, as those that were repeated are;
    None where rows, from before turns were counted, do not say."""
    place = {point: i for i, point in enumerate(planned(study))}
    good = [row for row in rows if row["status"] == "ok" and Point.of(row) in place]
    if any(row.get("turn") is None for row in good):
        return None
    places = [place[Point.of(row)] for row in sorted(good, key=lambda row: row["turn"])]
    return sum(mine < last for mine, last in zip(places, itertools.accumulate(places, max), strict=True))


def machines(rows):
    """Every machine and version that rows come from, which should be one."""
    found = []
    for row in rows:
        if row["status"] == "ok" and row["system"] not in found:
            found.append(row["system"])
    return found


def summarise_point(shape, setting, rows):
    mine = [row for row in rows if shape_of(row) == shape and row["setting"] == setting]
    good = sorted((row for row in mine if row["status"] == "ok"), key=lambda row: row["run"])
    reasons = sorted({reason_of(row) for row in mine if row["status"] != "ok"})
    runs = [row["median_batch_time"] * 1e3 for row in good]
    point = dict(vars(shape), setting=setting, n=len(good), n_failed=len(mine) - len(good),
                 reason="; ".join(reasons) or None, run_medians_ms=runs,
                 median_ms=float(np.median(runs)) if runs else None)
    for name, (figure, factor) in MEDIANS.items():
        values = [row[figure] * factor for row in good if row[figure] is not None]
        point[name] = float(np.median(values)) if values else None
    point["samples_per_second"] = shape.batch_size / point["median_ms"] * 1e3 if runs else None
    point["run_spread_percent"] = \
        100 * (max(runs) - min(runs)) / point["median_ms"] if len(runs) > 1 else None
    return point


def speedup(base, point):
    """{factor, low, high} of point over base, both summaries of points; None where one has no run."""
    if not base or not point or not base["n"] or not point["n"]:
        return None
    return interval(ratio_interval(base["run_medians_ms"], point["run_medians_ms"]))


def interval(numbers):
    return dict(zip(("factor", "low", "high"), numbers, strict=True))


def add_comparisons(points):
    """Speed-up and memory reduction of each point against the baseline of its shape; None without one."""
    baselines = {shape_of(point): point for point in points if point["setting"] == "baseline"}
    for point in points:
        base = baselines.get(shape_of(point))
        gain = speedup(base, point)
        if point is base and gain:
            gain = dict(factor=1.0, low=1.0, high=1.0)
        for key in ("factor", "low", "high"):
            point["speedup" if key == "factor" else f"speedup_{key}"] = gain and gain[key]
        known = base and base["peak_memory_mb"] and point["peak_memory_mb"]
        point["memory_reduction_percent"] = \
            100 * (1 - point["peak_memory_mb"] / base["peak_memory_mb"]) if known else None


def scaling(points, settings):
    """Fitted exponents of time and memory in S, B and N, per setting, axis and pair of other sizes."""
    entries = []
    for axis, setting in itertools.product(AXES, settings):
        lines = {}
        for point in points:
            if point["setting"] == setting and point["n"]:
                lines.setdefault(tuple((a, point[a]) for a in AXES if a != axis), []).append(point)
        for others, line in sorted(lines.items()):
            for figure in ("median_ms", "peak_memory_mb"):
                known = [(point[axis], point[figure]) for point in line if point[figure]]
                if len(known) > 1:
                    exponent, error = fit_exponent(*zip(*known, strict=True))
                    entries.append(dict(others, setting=setting, axis=axis, figure=figure, exponent=exponent,
                                        standard_error=error, over=sorted(x for x, _ in known)))
    return entries


def by_switches(points, shape):
    return {parse_setting(point["setting"]): point for point in points if shape_of(point) == shape}


def ablation_table(points, switches):
    """For each shape and switch: speed-up of it alone over none, and what it adds as the last one (all over
    all but it); with the same for memory, MB saved. Empty unless the study has these settings."""
    whole, entries = frozenset(switches), []
    for shape, name in itertools.product({shape_of(p) for p in points}, switches):
        found = by_switches(points, shape)
        none, alone, rest, everything = (
            found.get(s) for s in (frozenset(), frozenset({name}), whole - {name}, whole))
        entry = dict(vars(shape), switch=name, alone=speedup(none, alone), last=speedup(rest, everything),
                     alone_saves_mb=saved(none, alone), last_saves_mb=saved(rest, everything))
        if len(switches) > 1 and (entry["alone"] or entry["last"]):
            entries.append(entry)
    ordered = {name: i for i, name in enumerate(switches)}
    return sorted(entries, key=lambda e: (shape_of(e), ordered[e["switch"]]))


def saved(base, point):
    known = base and point and base["peak_memory_mb"] is not None and point["peak_memory_mb"] is not None
    return base["peak_memory_mb"] - point["peak_memory_mb"] if known else None


def effects_table(points, switches):
    """For each shape whose settings determine them, main effects and pairwise interactions of switches."""
    entries = []
    for shape in sorted({shape_of(point) for point in points}) if len(switches) > 1 else ():
        found = [(on, point) for on, point in by_switches(points, shape).items()
                 if point["n"] and on <= frozenset(switches)]
        effects = factor_effects(switches, [[name in on for name in switches] for on, _ in found],
                                 [point["run_medians_ms"] for _, point in found]) if found else None
        if effects:
            entries.append(dict(
                vars(shape), points=len(found), of=len(combinations(switches)),
                main=[dict(switch=name, **interval(effect)) for name, effect in effects["main"].items()],
                interaction=[dict(switches=list(pair), **interval(effect))
                             for pair, effect in effects["interaction"].items()]))
    return entries


COLUMNS = ("batch_size", "seq_len", "num_seqs", "setting", "n", "n_failed", "median_ms", "p20_ms", "p80_ms",
           "run_spread_percent", "samples_per_second", "speedup", "speedup_low", "speedup_high",
           "peak_memory_mb", "memory_reduction_percent", "saved_activation_mb", "launches_per_step", "mfu",
           "reason")


def as_csv(summary):
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(summary["points"])
    return text.getvalue()


def principal_settings(settings):
    """The settings that headlines are about: fused, compiled, all; without these, all but the baseline."""
    return [s for s in settings if s in HEADLINES] or [s for s in settings if s not in NAMED]
