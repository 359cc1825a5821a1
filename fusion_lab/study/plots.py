"""The pictures of a performance study, as PNG files and for report.html."""
import io
import math
import os
from dataclasses import dataclass

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.study.design import Shape
from fusion_lab.study.statistics import Gain
from fusion_lab.study.summary import gain_of
from fusion_lab.training.files import write_atomically

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ for prints in grey.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9,
         "legend.frameon": False}
MAX_COLUMNS = 3
REACH = 2  # log2 of the factor at which colours are deepest; fixed, so that noise never looks like a gain
UNDECIDED = "#e4e4e4"


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    caption: str
    png: bytes


def draw(study, summary, directory):
    """All pictures that this study has the data for, as Pictures and as PNG files in directory."""
    pyplot, made = require_matplotlib(), []
    with pyplot.rc_context(STYLE):
        for name, title, plot, caption in PLOTS:
            figure = plot(pyplot, study, summary)
            if figure is None:
                continue
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=130)
            pyplot.close(figure)
            made.append(Picture(name, title.format(study.vocabulary.main_axis.field), caption,
                                content.getvalue()))
            write_atomically(os.path.join(directory, f"{name}.png"), lambda file: file.write(made[-1].png))
    return made


def panels(pyplot, count, width, height):
    """(matplotlib's figure, axes) of so many panels of these inches, in rows."""
    columns = min(count, MAX_COLUMNS)
    rows = math.ceil(count / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                                   layout="constrained")
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, axes.flat


def shown_settings(study):
    """The baseline and the principal settings, in the study's order."""
    principal = study.vocabulary.principal(study.settings)
    return [setting for setting in study.settings if setting == "baseline" or setting in principal]


def speedup_heat_map(pyplot, study, summary):
    """Speed-up over the main axis and the first other one, a panel per setting and other sizes."""
    main = study.vocabulary.main_axis
    across = next((axis for axis in study.axes if axis != main), None)
    maps, names = {}, [axis.field for axis in (main, across) if axis]
    for p in summary["points"]:
        if p["setting"] in shown_settings(study) and p["setting"] != "baseline":
            others = Shape.of(p, study.axes).without(*names)
            maps.setdefault((p["setting"], others), []).append(p)
    if not any(p["speedup"] for points in maps.values() for p in points):
        return None
    columns, rows = study.sizes_of(main), study.sizes_of(across) if across else [""]
    width, height = 1.2 + 0.75 * max(3, len(columns)), 1.2 + 0.5 * max(3, len(rows))
    figure, axes = panels(pyplot, len(maps), width, height)
    for axis, ((setting, others), points) in zip(axes, maps.items(), strict=False):
        cells = {(rows.index(p[across.field]) if across else 0, columns.index(p[main.field])): p
                 for p in points}
        draw_map(pyplot, axis, cells, len(rows), len(columns))
        axis.set(title=f"{setting}, {others}".rstrip(", "), xlabel=str(main), ylabel=str(across or ""))
        axis.set_xticks(range(len(columns)), labels=columns)
        axis.set_yticks(range(len(rows)), labels=rows)
    return figure


def draw_map(pyplot, axis, cells, rows, columns):
    """The speed-ups of points at their (row, column), coloured where they are decided."""
    grid = np.full((rows, columns), np.nan)
    for (y, x), p in cells.items():
        text, colour, gain = "baseline\nfailed" if p["n"] else "failed", "#900000", gain_of(p)
        if gain and gain.decided:
            grid[y, x] = np.log2(gain.factor)
            text, colour = f"{gain.factor:.2f}×", "white" if abs(grid[y, x]) > 0.6 * REACH else "black"
        elif gain:
            text, colour = f"{gain.factor:.2f}×\n(±)", "black"
            axis.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, color=UNDECIDED))
        axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=8.5)
    axis.imshow(grid, cmap="RdBu", vmin=-REACH, vmax=REACH, aspect="auto", origin="lower")
    axis.spines[:].set_visible(False)


def step_time(pyplot, study, summary):
    return against_main_axis(pyplot, study, summary, "median_ms", "step time, ms")


def memory(pyplot, study, summary):
    return against_main_axis(pyplot, study, summary, "peak_memory_mb", "peak tensor memory, MB")


def against_main_axis(pyplot, study, summary, figure_key, y_label):
    """Lines over the main axis on logarithmic axes, a panel per other sizes, exponents in the legend. None
    with fewer than two sizes along it."""
    main, lines = study.vocabulary.main_axis, {}
    for p in summary["points"]:
        if p["setting"] in shown_settings(study) and p[figure_key]:
            others = Shape.of(p, study.axes).without(main.field)
            lines.setdefault(others, {}).setdefault(p["setting"], []).append(p)
    sizes = study.sizes_of(main)
    if len(sizes) < 2 or not lines:
        return None
    figure, axes = panels(pyplot, len(lines), 4.2, 3.4)
    for axis, (others, by_setting) in zip(axes, lines.items(), strict=False):
        for setting, points in by_setting.items():
            number = shown_settings(study).index(setting)
            y = np.array([p[figure_key] for p in points])
            bars = np.abs(np.array([[p["p20_ms"], p["p80_ms"]] for p in points], float).T - y) \
                if figure_key == "median_ms" else None
            axis.errorbar([p[main.field] for p in points], y, yerr=bars, capsize=2, markersize=5,
                          linewidth=1.4, color=COLOURS[number % len(COLOURS)],
                          marker=MARKERS[number % len(MARKERS)],
                          label=setting + exponent_of(study, summary, others, setting, figure_key))
        axis.set(title=str(others), xscale="log", yscale="log", xlabel=str(main), ylabel=y_label)
        axis.set_xticks(sizes, labels=sizes)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=8)
    return figure


def exponent_of(study, summary, others, setting, figure_key):
    """", S^1.50±0.02" for a legend; "" where nothing was fitted."""
    main = study.vocabulary.main_axis
    wanted = dict(others.as_dict(), setting=setting, axis=main.field, figure=figure_key)
    fit = next((fit for fit in summary["scaling"] if wanted.items() <= fit.items()), None)
    if not fit:
        return ""
    error = "" if fit["standard_error"] is None else f"±{fit['standard_error']:.2f}"
    return f", {main.letter}^{fit['exponent']:.2f}{error}"


def ablation(pyplot, study, summary):
    """Bars per switch: alone over none, and as the last one; geometric means, a dot per shape."""
    entries = summary["ablation"]
    switches = [s for s in study.switches if any(e["switch"] == s for e in entries)][::-1]
    if not entries:
        return None
    figure, (axis,) = panels(pyplot, 1, 5, 1.4 + 0.55 * len(switches))
    for kind, offset, colour in (("alone", 0.2, COLOURS[1]), ("last", -0.2, COLOURS[2])):
        for row, switch in enumerate(switches):
            gains = [Gain(**e[kind]) for e in entries if e["switch"] == switch and e[kind]]
            if gains:
                bar_of_gains(axis, row + offset, gains, colour)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.18)
    axis.set_yticks(range(len(switches)), labels=switches)
    axis.set_xlabel("speed-up")
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[1:3]]
    figure.legend(keys, ("alone, over none", "as the last one, over all others"), ncols=2, fontsize=8,
                  loc="outside lower center")
    return figure


def bar_of_gains(axis, y, gains, colour):
    """A bar from 1 to the geometric mean of Gains, a dot each, or the interval of one."""
    factors = [gain.factor for gain in gains]
    mean, edge = float(np.exp(np.mean(np.log(factors)))), max(1.0, *factors)
    axis.barh(y, mean - 1, 0.36, left=1, color=colour, alpha=0.85)
    if len(gains) > 1:
        axis.plot(factors, [y] * len(gains), "o", color="black", markersize=2.5, alpha=0.7)
    elif gains[0].low:
        axis.plot([gains[0].low, gains[0].high], [y, y], color="black", linewidth=1.2)
        edge = max(edge, gains[0].high)
    axis.annotate(f"{mean:.3f}×", (edge, y), (5, 0), textcoords="offset points", va="center", fontsize=8)


PLOTS = (
    ("speedup_heat_map", "Speed-up over the baseline", speedup_heat_map,
     "Step time of the baseline over step time of the setting, same shape. Blue is faster, red slower, "
     f"deepest at {2 ** REACH}× and beyond in every study. Grey with (±) is undecided: the interval holds 1, "
     "or there is a single run, which has none."),
    ("scaling", "Step time against {}", step_time,
     "Median step time; bars from p20 to p80 of the steps. The legend gives the exponent of a power law that "
     "was fitted to each line."),
    ("memory", "Memory against {}", memory,
     "Largest tensor memory within the measured steps (MB of 2^20 bytes), with fitted exponents."),
    ("ablation", "What each fusion contributes", ablation,
     "What each switch buys alone, and what it adds when all others are on. Bars are geometric means over "
     "shapes with a dot for each; of one shape a line is the interval."))
