"""From the lines of a study to results_summary.json and results.csv: what each setting took at each shape,
and what that says.

Here a point is a setting at one shape, over its runs, as a dict. Times and memory are medians over the runs,
MB are 2**20 bytes. Steps of all settings alternate within a run, so a run gives one ratio for each pair of
settings, and what disturbs a whole run cancels out of it.
"""
import csv
import io
from dataclasses import asdict

import numpy as np

from fusion_lab.measuring.gains import Gain, gain_of_runs
from fusion_lab.measuring.variants import (
    BASELINE,
    COMPILED,
    EVERYTHING,
    FUSED,
    GIVEN,
    ONLY,
    ULTRA,
    WITHOUT,
)
from fusion_lab.training.files import counted

MUCH = 20.0  # percent between two runs of a point, from which on the study says so
FIGURES = "peak_memory_mb", "saved_activation_mb", "launches_per_step"  # of rows; a point has their medians


def gain_over(point, over):
    """The Gain of one point over another of the same shape, of the runs that both have; None where either is
    missing."""
    before, after = (p["speedups"] if p else {} for p in (over, point))
    return gain_of_runs([after[run] / before[run] for run in after if run in before])


def gain_of(point):
    """The speed-up of a point as a Gain; None where there is none."""
    return Gain.read(point) if point["speedup"] else None


def summarise(study, lines):
    """The content of results_summary.json, of lines as read_lines() has them."""
    by_shape, machines, points = {}, [], []
    for (_, label), line in sorted(lines.items()):
        by_shape.setdefault(label, []).append(line)
        if line["system_info"] and line["system_info"] not in machines:  # there should be one
            machines.append(line["system_info"])
    for shape in study.shapes():
        base = None
        for setting in study.settings if study.label(shape) in by_shape else ():
            points.append(summarise_point(shape, setting, by_shape[study.label(shape)], base))
            base = base or points[-1]  # the first setting is the baseline
    return dict(format="performance study 2", study=asdict(study), machine=machines, points=points,
                scaling=scaling(study, points), ablation=ablation_table(study, points))


def summarise_point(shape, setting, lines, base):
    """All runs of a setting at a shape together; base: the baseline's point, None for itself."""
    rows, reasons = {}, []
    for line in lines:
        row = next((row for row in line["rows"] if row["name"] == setting), {})
        if row.get("median_batch_time"):
            rows[str(line["run"])] = row  # as a key of JSON
        else:
            reasons.append(row.get("reason") or line["reason"] or "its comparison has no such row")
    times = {run: 1e3 * row["median_batch_time"] for run, row in rows.items()}
    figures = {name: median([row.get(name) for row in rows.values()]) for name in FIGURES}
    middle, memory = median(times.values()), figures["peak_memory_mb"]
    speedups = {run: row["speedup"] for run, row in rows.items()}
    before = base["peak_memory_mb"] if base else memory
    return dict(
        shape, setting=setting, n=len(rows), n_failed=len(reasons),
        reason="; ".join(sorted({*reasons})) or None,
        median_ms=middle, run_medians_ms=times,
        run_spread_percent=100 * (max(times.values()) / min(times.values()) - 1) if len(times) > 1 else None,
        samples_per_second=1e3 * shape["batch_size"] / middle if middle and "batch_size" in shape else None,
        **(gain_of_runs(list(speedups.values())) or Gain(None)).as_dict(), speedups=speedups, **figures,
        memory_reduction_percent=100 * (1 - memory / before) if memory and before else None)


def median(values):
    """The median of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def at_shape(study, points, shape):
    """{setting: point} of those at a shape."""
    return {p["setting"]: p for p in points if study.label(p) == study.label(shape)}


def scaling(study, points):
    """Exponents p of cost = c * size**p along the main axis, of time and memory, by least squares on
    logarithms: per setting and other sizes. Two sizes make no law."""
    lines, fits, axis = {}, [], study.main_axis
    for point in points:
        for figure in ("median_ms", "peak_memory_mb"):
            if point[figure]:
                line = point["setting"], study.label(point, without=[axis]), figure
                lines.setdefault(line, {})[point[axis]] = point[figure]
    for (setting, at, figure), known in lines.items():
        if len(known) > 2:
            exponent = np.polyfit(np.log(list(known)), np.log(list(known.values())), 1)[0]
            fits.append(dict(setting=setting, axis=axis, at=at, figure=figure, exponent=float(exponent),
                             over=list(known)))
    return fits


def ablation_table(study, points):
    """What each fusion buys alone, over none, and as the last one, over all but it, at each shape; of the
    settings only-X and without-X."""
    entries = []
    switches = dict.fromkeys(name.partition("-")[2] for name in study.settings
                             if name.startswith((ONLY, WITHOUT)))
    for shape in study.shapes():
        known = at_shape(study, points, shape)
        for switch in switches:
            alone = gain_over(known.get(f"{ONLY}{switch}"), known.get(BASELINE))
            last = gain_over(known.get(FUSED), known.get(f"{WITHOUT}{switch}"))
            if alone or last:
                entries.append(dict(shape, switch=switch, alone=alone and alone._asdict(),
                                    last=last and last._asdict()))
    return entries


def as_csv(summary):
    """The text of results.csv: a line a point, without figures of single runs."""
    text, points = io.StringIO(), summary["points"]
    columns = [key for key, value in points[0].items() if not isinstance(value, dict)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


# --- What a reader wants to know first ----------------------------------------------------------------------


def principal(settings):
    """The settings that are meant to be fast, which headlines are about; without these, all but the
    baseline."""
    return [name for name in settings if name in (FUSED, COMPILED, EVERYTHING, ULTRA, GIVEN)] or [
        name for name in settings if name != BASELINE]


def findings(study, summary):
    """Sentences: what each setting buys and how sure that is, and what is wrong with the study."""
    points = summary["points"]
    places, named = fastest(study, points), principal(study.settings)
    found = [headline(study, points, name, places) for name in study.settings
             if name in named or name != BASELINE and (name, True) in places]
    if missing := [p for p in points if p["n_failed"]]:
        found.append(f"{len(missing)} of {len(points)} points lack runs; the reasons are in the table.")
    if len(summary["machine"]) > 1:
        found.append("The runs come from more than one machine or version.")
    differing = [p for p in points if (p["run_spread_percent"] or 0) > MUCH]
    if differing:
        most = max(differing, key=lambda p: p["run_spread_percent"])
        times = most["run_medians_ms"].values()
        found.append(f"Runs differ by more than {MUCH:.0f}% at {len(differing)} of {len(points)} points, "
                     f"most at {study.label(most)} {most['setting']}: {min(times):.1f} to {max(times):.1f} "
                     "ms. The machine was busy; speed-ups, which are taken within a run, suffer less.")
    if any(p["n"] == 2 for p in points):
        found.append("Two runs make wide intervals; the same command with a larger --num-runs adds some.")
    return [sentence for sentence in found if sentence]


def fastest(study, points):
    """[(a shape's fastest setting, whether it beats all others beyond noise)]"""
    places = []
    for shape in study.shapes():
        known = [p for p in at_shape(study, points, shape).values() if p["speedup"]]
        if len(known) > 1:
            first = max(known, key=lambda p: p["speedup"])
            gains = [gain_over(first, other) for other in known if other is not first]
            places.append((first["setting"], all(gain and gain.decided for gain in gains)))
    return places


def headline(study, points, setting, places):
    """A sentence on a setting's speed-up with its interval, where it is fastest or slower, and on memory."""
    mine = [p for p in points if p["setting"] == setting and p["speedup"]]
    runs = set.intersection(*(set(p["speedups"]) for p in mine)) if mine else ()
    if not runs:
        return ""
    # a run gives one mean over the shapes
    mean = gain_of_runs([np.exp(np.mean([np.log(p["speedups"][run]) for p in mine])) for run in sorted(runs)])
    first = [sure for name, sure in places if name == setting]
    slower = [study.label(p) for p in mine if gain_of(p).decided and p["speedup"] < 1]
    saved = sorted({round(p["memory_reduction_percent"]) for p in mine
                    if p["memory_reduction_percent"] is not None})
    shapes, doubt = study.shapes(), "" if mean.decided else ", which noise can explain"
    where = f" at {len(mine)} of {counted(len(shapes), 'shape')}" * (len(mine) < len(shapes))
    return "; ".join(filter(None, [
        f"{setting}: {mean} the baseline's speed{where}{doubt}",
        f"fastest at {len(first)} of {counted(len(places), 'shape')}, beyond noise at {sum(first)}"
        if first else "",
        f"slower than the baseline at {', '.join(slower)}" if slower else "",
        f"memory saved: {f'{saved[0]} to ' * (len(saved) > 1)}{saved[-1]}%" if saved else ""])) + "."
