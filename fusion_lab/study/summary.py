"""From the runs of a study to results_summary.json and results.csv: what each point took, what that says."""
import csv
import io
import itertools
from dataclasses import dataclass, replace

import numpy as np

from fusion_lab.study.design import AtShape, Shape, Study
from fusion_lab.study.records import as_json, checked, spread
from fusion_lab.study.results import is_step_time
from fusion_lab.study.statistics import CONFIDENCE, Gain, factor_effects, fit_exponent, ratio_interval

INTERVAL = f"[{100 * CONFIDENCE:g}%]"
FORMAT = "tiny_openfold_v2 performance study 1"  # of every program's studies; older files have it too
MEDIANS = {  # figure of a point: (figure of a run, factor); each is the median over the runs
    "p20_ms": ("p20_batch_time", 1e3), "p80_ms": ("p80_batch_time", 1e3),
    "peak_memory_mb": ("peak_memory_mb", 1), "saved_activation_mb": ("saved_activation_mb", 1),
    "launches_per_step": ("launches_per_step", 1), "mfu": ("mfu", 1)}


@dataclass(frozen=True, kw_only=True)
class PointSummary(AtShape):
    """A setting at one shape, over its runs. Times are medians over the runs, memory is MB of 2**20 bytes;
    the speed-up and what is saved are against the baseline of that shape. In a file, those with a default may
    be missing."""
    setting: str
    n: int
    n_failed: int = 0
    reason: str | None = None
    run_medians_ms: tuple[float, ...]
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    peak_memory_mb: float | None
    saved_activation_mb: float | None = None
    launches_per_step: float | None = None
    mfu: float | None = None
    samples_per_second: float | None = None
    run_spread_percent: float | None = None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    memory_reduction_percent: float | None = None

    def __post_init__(self):
        times = self.run_medians_ms
        if len(times) != self.n or not all(is_step_time(ms / 1e3) for ms in times):
            raise ValueError("run_medians_ms: must be as many times as there are runs")
        factors = (self.speedup, self.speedup_low, self.speedup_high)
        known = tuple(factor is not None for factor in factors)
        if known not in ((False,) * 3, (True, False, False), (True,) * 3) or \
                any(factor is not None and factor <= 0 for factor in factors):
            raise ValueError("speedup, speedup_low, speedup_high: must be above 0, or None")


@dataclass(frozen=True)
class Fit:
    """cost = c * size**exponent along an axis, the other sizes being those of `at`."""
    at: Shape = spread()
    setting: str
    axis: str
    figure: str  # "median_ms" or "peak_memory_mb"
    exponent: float
    standard_error: float | None
    over: tuple


@dataclass(frozen=True)
class Contribution(AtShape):
    """What a switch buys alone, over none, and as the last one, over all but it."""
    switch: str
    alone: Gain | None
    last: Gain | None
    alone_saves_mb: float | None
    last_saves_mb: float | None


@dataclass(frozen=True)
class Effect:
    """Main effect of a switch, or interaction of two."""
    switches: tuple
    gain: Gain

    def as_json(self):
        named = dict(switch=self.switches[0]) if len(self.switches) == 1 else dict(switches=self.switches)
        return named | self.gain.as_json()


@dataclass(frozen=True)
class Effects(AtShape):
    """Effects at one shape, from `points` of the `of` settings that there could be."""
    points: int
    of: int
    main: tuple
    interaction: tuple


@dataclass(frozen=True)
class Recommended(AtShape):
    """The setting of choice for a shape, None where none qualifies, and why faster ones were passed over."""
    passed_over: tuple[str, ...]
    setting: str | None = None
    command: str | None = None
    median_ms: float | None = None
    peak_memory_mb: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None



@dataclass(frozen=True)
class Recommendation:
    """What --recommend found: for each shape a setting, within so many MB of tensor memory if limited."""
    memory_limit_mb: float | None
    shapes: tuple

    @classmethod
    def read(cls, content, axes):
        """The recommendation in a JSON object. Raises ValueError."""
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
            raise ValueError("must be an object with shapes")
        limit = checked(content.get("memory_limit_mb"), float | None)
        return cls(limit, tuple(Recommended.read(entry, axes) for entry in content["shapes"]))


@dataclass(frozen=True)
class Summary:
    """The content of results_summary.json. `machines` should be one; see out_of_order() for that."""
    study: Study
    machines: tuple
    points: tuple
    out_of_order: int | None
    scaling: tuple
    ablation: tuple
    effects: tuple
    recommendation: Recommendation | None = None
    confidence: float = CONFIDENCE

    def as_json(self):
        content = dict(format=FORMAT, confidence=self.confidence, study=self.study, machine=self.machines,
                       points=self.points, out_of_order=self.out_of_order, scaling=self.scaling,
                       ablation=self.ablation, effects=self.effects)
        if self.recommendation:
            content["recommendation"] = self.recommendation
        return as_json(content)

    @property
    def vocabulary(self):
        return self.study.vocabulary


def gain_of(record):
    """The speed-up of a PointSummary or of Recommended as a Gain; None where there is none."""
    return None if record.speedup is None else Gain(record.speedup, record.speedup_low, record.speedup_high)


def summarise(study, rows):
    """The Summary of a study from its rows."""
    by_point = {}
    for row in rows:
        by_point.setdefault((row.shape, row.setting), []).append(row)
    points = [summarise_point(shape, setting, by_point[shape, setting])
              for shape in study.shapes() for setting in study.settings if (shape, setting) in by_point]
    points = tuple(against_baseline(points))
    return Summary(study, machines_of(rows), points, out_of_order(study, rows), scaling(study, points),
                   ablation_table(study, points), effects_table(study, points))


def out_of_order(study, rows):
    """How many runs were measured after one that the plan has behind them, as those that were repeated are;
    None where rows, from before turns were counted, do not say."""
    place = {point: i for i, point in enumerate(study.points())}
    good = [row for row in rows if row.ok and row.point in place]
    if any(row.turn is None for row in good):
        return None
    places = [place[row.point] for row in sorted(good, key=lambda row: row.turn)]
    return sum(mine < last for mine, last in zip(places, itertools.accumulate(places, max), strict=True))


def machines_of(rows):
    """Every machine and version that rows come from, which should be one."""
    return tuple(dict.fromkeys(row.system for row in rows if row.ok))


def median(values):
    """The median of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def summarise_point(shape, setting, rows):
    """The PointSummary of all runs of a point, still without a baseline."""
    good = sorted((row for row in rows if row.ok), key=lambda row: row.run)
    reasons = sorted({row.why for row in rows if not row.ok})
    times = tuple(row.figures.median_batch_time * 1e3 for row in good)
    middle = median(times)
    figures = {}
    for name, (figure, factor) in MEDIANS.items():
        values = (getattr(row.figures, figure) for row in good)
        figures[name] = median([value * factor for value in values if value is not None])
    batch = shape.get("batch_size")
    return PointSummary(
        shape=shape, setting=setting, n=len(good), n_failed=len(rows) - len(good),
        reason="; ".join(reasons) or None, run_medians_ms=times, median_ms=middle, **figures,
        samples_per_second=batch / middle * 1e3 if times and batch else None,
        run_spread_percent=100 * (max(times) - min(times)) / middle if len(times) > 1 else None,
        speedup=None, speedup_low=None, speedup_high=None)


def speedup(base, point):
    """The Gain of point over base, both PointSummaries; None where one has no run."""
    if not base or not point or not base.n or not point.n:
        return None
    return ratio_interval(base.run_medians_ms, point.run_medians_ms)


def against_baseline(points):
    """The points with their speed-up and memory reduction over the baseline of their shape, if it has one."""
    baselines = {point.shape: point for point in points if point.setting == "baseline"}
    for point in points:
        base = baselines.get(point.shape)
        gain = speedup(base, point) or Gain(None)
        if point is base and point.n:
            gain = Gain(1.0, 1.0, 1.0)
        known = base and base.peak_memory_mb and point.peak_memory_mb
        less = 100 * (1 - point.peak_memory_mb / base.peak_memory_mb) if known else None
        yield replace(point, speedup=gain.factor, speedup_low=gain.low, speedup_high=gain.high,
                      memory_reduction_percent=less)


def standard_errors(fits):
    """What a caption says of the ± of fits, if they have any: one through two points has none."""
    errors = {fit.standard_error is not None for fit in fits}
    return ("; ± is the standard error of the fit" * (True in errors)
            + "; a fit through two points has none" * (errors == {True, False}))


def scaling(study, points):
    """Fitted exponents of time and memory, per axis, the main one first, setting and other sizes."""
    fits = []
    axes = sorted(study.axes, key=lambda axis: axis != study.vocabulary.main_axis)
    for axis, setting in itertools.product(axes, study.settings):
        lines = {}
        for point in points:
            if point.setting == setting and point.n:
                lines.setdefault(point.shape.without(axis.field), []).append(point)
        for others, line in sorted(lines.items()):
            for figure in ("median_ms", "peak_memory_mb"):
                known = [(p.shape[axis.field], getattr(p, figure)) for p in line if getattr(p, figure)]
                if len(known) > 1:
                    fits.append(Fit(others, setting, axis.field, figure,
                                    *fit_exponent(*zip(*known, strict=True)), sorted(x for x, _ in known)))
    return tuple(fits)


def by_switches(study, points, shape):
    """{set of switches: point} at one shape."""
    return {study.vocabulary.parse(point.setting): point for point in points if point.shape == shape}


def ablation_table(study, points):
    """A Contribution for each shape and switch. Empty unless the study has these settings."""
    whole, entries = frozenset(study.switches), []
    for shape in sorted({point.shape for point in points}) if len(whole) > 1 else ():
        known = by_switches(study, points, shape)
        for name in study.switches:
            none, alone, rest, everything = (
                known.get(on) for on in (frozenset(), frozenset({name}), whole - {name}, whole))
            entry = Contribution(shape, name, speedup(none, alone), speedup(rest, everything),
                                 saved(none, alone), saved(rest, everything))
            if entry.alone or entry.last:
                entries.append(entry)
    return tuple(entries)


def saved(base, point):
    """MB that point needs less than base; None where one is unknown."""
    known = base and point and base.peak_memory_mb is not None and point.peak_memory_mb is not None
    return base.peak_memory_mb - point.peak_memory_mb if known else None


def effects_table(study, points):
    """Effects of each shape whose settings determine them."""
    switches, entries = study.switches, []
    for shape in sorted({point.shape for point in points}) if len(switches) > 1 else ():
        used = [(on, point) for on, point in by_switches(study, points, shape).items()
                if point.n and on <= frozenset(switches)]
        effects = factor_effects(switches, [[name in on for name in switches] for on, _ in used],
                                 [point.run_medians_ms for _, point in used]) if used else None
        if effects:
            entries.append(Effects(
                shape, len(used), 2 ** len(switches),
                tuple(Effect((name,), gain) for name, gain in effects["main"].items()),
                tuple(Effect(pair, gain) for pair, gain in effects["interaction"].items())))
    return tuple(entries)


COLUMNS = ("setting", "n", "n_failed", "median_ms", "p20_ms", "p80_ms", "run_spread_percent",
           "samples_per_second", "speedup", "speedup_low", "speedup_high", "peak_memory_mb",
           "memory_reduction_percent", "saved_activation_mb", "launches_per_step", "mfu", "reason")


def as_csv(summary):
    """The text of results.csv: a line a point."""
    text = io.StringIO()
    columns = [*(axis.field for axis in summary.study.axes), *COLUMNS]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_json(summary.points))
    return text.getvalue()
