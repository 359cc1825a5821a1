"""The pictures of a performance study, as PNG files and as SVG for report.html."""
import io
import os
import re
from dataclasses import dataclass

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.study.statistics import pareto
from fusion_lab.study.summary import gain_of
from fusion_lab.training.files import write_atomically

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ for prints in grey.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*"
STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
         "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"], "axes.spines.top": False,
         "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False,
         "svg.hashsalt": "study"}  # or ids are random, and the same results make another page each time
MAX_PANELS, MAX_MAPS = 4, 6  # more would be too small to read; the table has them all
MAX_LINES = len(COLOURS)


@dataclass
class Figure:
    """A drawn picture: its file, what it shows, and the SVG text."""
    name: str
    title: str
    caption: str
    svg: str


def draw(summary, directory):
    """All pictures that this study has the data for; PNGs are written into directory."""
    pyplot = require_matplotlib()
    figures = []
    with pyplot.rc_context(STYLE):
        for name, title, plot in PLOTS:
            drawn = plot(pyplot, summary)
            if drawn is None:
                continue
            picture, caption = drawn
            write_atomically(os.path.join(directory, f"{name}.png"),
                             lambda file, picture=picture: picture.savefig(file, format="png", dpi=130))
            svg = io.StringIO()
            picture.savefig(svg, format="svg", metadata={"Date": None})
            pyplot.close(picture)
            title = title.format(main=summary.vocabulary.main_axis.field,
                                 others=" and ".join(axis.field for axis in more_axes(summary.study)))
            figures.append(Figure(name, title, caption, inline(svg.getvalue(), name)))
    return figures


def inline(svg, name):
    """SVG text to put into a page: without the XML head, every id made the picture's own, as wide as the page
    but not much wider than it was drawn."""
    head, body = svg[svg.index("<svg"):].split(">", 1)
    body = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    width = float(re.search(r' width="([\d.]+)pt"', head)[1])
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} style="max-width: {1.8 * width:.0f}px">{body}'


def panels(pyplot, count, width=4.2, height=3.4, most=2):
    columns = min(count, most)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                                   layout="constrained")
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def spread_out(values, most):
    """At most `most` of the values, first and last among them."""
    values = sorted(values)
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def by_interest(summary):
    """Principal settings: the one with all switches on, then the others, the fastest first."""
    vocabulary, best, ratios = summary.vocabulary, {}, {}
    for p in measured(summary):
        best[p.shape] = min(p.median_ms, best.get(p.shape, p.median_ms))
    for p in measured(summary):
        ratios.setdefault(p.setting, []).append(np.log(p.median_ms / best[p.shape]))
    everything = (vocabulary.everything, frozenset(summary.study.switches))
    return sorted(vocabulary.principal(summary.study.settings), key=lambda s: (
        vocabulary.parse(s) not in everything, np.mean(ratios.get(s, np.inf))))


def shown_settings(summary):
    """Baseline and principal settings, as many as a plot can tell apart, in the study's order."""
    settings = summary.study.settings
    chosen = ([s for s in settings if s == "baseline"] + by_interest(summary))[:MAX_LINES]
    return [s for s in settings if s in chosen]


def across_axis(study):
    """The axis that spans a heat map together with the main one; None where there is no other."""
    return next((axis for axis in study.axes if axis != study.vocabulary.main_axis), None)


def more_axes(study):
    """The axes that a heat map has no room for."""
    return [axis for axis in study.axes if axis not in (study.vocabulary.main_axis, across_axis(study))]


def left_out(count, what):
    """The sentence of a caption that names what a picture had no room for."""
    return f" {count} {what}{'s are' if count > 1 else ' is'} not shown; the table has all." if count else ""


def settings_left_out(summary):
    return left_out(len(summary.study.settings) - len(shown_settings(summary)), "setting")


def style(summary, setting):
    index = shown_settings(summary).index(setting)
    return dict(color=COLOURS[index], marker=MARKERS[index])


def measured(summary, setting=None):
    """Points with runs, of one setting or of all."""
    return [p for p in summary.points if p.n and setting in (None, p.setting)]


def speedup_heat_map(pyplot, summary):
    """Speed-up over the two first axes, a panel per setting and other sizes."""
    study, main, across = summary.study, summary.vocabulary.main_axis, across_axis(summary.study)
    names = [axis.field for axis in (main, across) if axis]
    known = {(p.setting, p.shape.without(*names)) for p in measured(summary)
             if p.speedup and p.setting != "baseline"}
    others = list(dict.fromkeys(shape.without(*names) for shape in study.shapes()))
    chosen = [(s, o) for s in by_interest(summary) for o in others if (s, o) in known][:MAX_MAPS]
    wanted = [(s, o) for o in others for s in study.settings if (s, o) in chosen]
    if not wanted:
        return None
    columns, rows = study.sizes_of(main), study.sizes_of(across) if across else [""]
    figure, axes = panels(pyplot, len(wanted), 1.6 + 0.72 * max(3, len(columns)),
                          1.4 + 0.5 * max(3, len(rows)), 3)
    reach = max(0.1, *(abs(np.log2(p.speedup)) for p in summary.points if p.speedup))
    for axis, (setting, other) in zip(axes, wanted, strict=True):
        grid = np.full((len(rows), len(columns)), np.nan)
        for p in summary.points:
            if (p.setting, p.shape.without(*names)) == (setting, other):
                at = rows.index(p.shape[across.field]) if across else 0, columns.index(p.shape[main.field])
                grid[at] = np.log2(p.speedup) if p.speedup else np.nan
                write_speedup(axis, p, at, reach)
        picture = axis.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
        axis.set(title=", ".join(filter(None, (setting, other.listed()))), xlabel=str(main),
                 ylabel=str(across or ""))
        axis.set_xticks(range(len(columns)), labels=columns)
        axis.set_yticks(range(len(rows)), labels=rows)
        axis.spines[:].set_visible(False)
    bar = figure.colorbar(picture, ax=axes, shrink=0.85)
    marks = [f for f in (1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if np.log2(f) <= reach][-4:]
    factors = [*(1 / f for f in marks), 1, *marks]
    bar.set_ticks(np.log2(factors), labels=[f"{factor:.3g}×" for factor in factors])
    return figure, ("Step time of the baseline over step time of the setting, same shape. Blue is faster, "
                    "red slower; (±) marks an interval that holds 1, or a single run, which has none."
                    + left_out(len(known) - len(wanted), "map"))


def write_speedup(axis, point, at, reach):
    """The text of a heat map's cell."""
    text, colour = "baseline\nfailed" if point.n else "failed", "#900000"
    if point.speedup:
        text = f"{point.speedup:.2f}×" + ("" if gain_of(point).decided else "\n(±)")
        colour = "white" if abs(np.log2(point.speedup)) > 0.72 * reach else "black"
    axis.text(at[1], at[0], text, ha="center", va="center", color=colour, fontsize=8.5)


def against_main_axis(pyplot, summary, figure_key, y_label, error_bars):
    """(figure, the caption's sentences on what is missing): lines over the main axis on log axes, a panel per
    other sizes, exponents in the legend. None with fewer than two sizes along it."""
    study, main = summary.study, summary.vocabulary.main_axis
    if len(study.sizes_of(main)) < 2 or not any(getattr(p, figure_key) for p in summary.points):
        return None
    every = list(dict.fromkeys(shape.without(main.field) for shape in study.shapes()))
    cases = spread_out(every, MAX_PANELS)
    figure, axes = panels(pyplot, len(cases))
    for axis, case in zip(axes, cases, strict=True):
        for setting in shown_settings(summary):
            line = [p for p in measured(summary, setting)
                    if p.shape.without(main.field) == case and getattr(p, figure_key)]
            line.sort(key=lambda p: p.shape)
            if not line:
                continue
            y = np.array([getattr(p, figure_key) for p in line])
            bars = np.abs(np.array([[p.p20_ms, p.p80_ms] for p in line], float).T - y) if error_bars else None
            axis.errorbar([p.shape[main.field] for p in line], y, yerr=bars, capsize=2, markersize=5,
                          linewidth=1.4, label=setting + exponent_of(summary, case, setting, figure_key),
                          **style(summary, setting))
        axis.set_title(case.listed())
        size_axis(pyplot, axis, study, main, y_label)
        axis.legend(fontsize=8)
    return figure, settings_left_out(summary) + left_out(len(every) - len(cases), "panel")


def exponent_of(summary, at, setting, figure_key):
    """", S^1.50±0.02" for a legend; "" where nothing was fitted."""
    main = summary.vocabulary.main_axis
    fit = next((e for e in summary.scaling if (e.axis, e.figure, e.setting, e.at)
                == (main.field, figure_key, setting, at)), None)
    if not fit:
        return ""
    error = "" if fit.standard_error is None else f"±{fit.standard_error:.2f}"
    return f", {main.letter}^{fit.exponent:.2f}{error}"


def size_axis(pyplot, axis, study, size, y_label):
    """Logarithmic axes of a figure over the sizes along one axis of the study."""
    axis.set(xscale="log", yscale="log", xlabel=str(size), ylabel=y_label)
    axis.set_xticks(study.sizes_of(size), labels=study.sizes_of(size))
    axis.minorticks_off()
    plain_numbers(pyplot, axis)
    axis.grid(color="#dddddd", linewidth=0.6)


def plain_numbers(pyplot, axis):
    """1, 2, 5, 10 on the logarithmic y axis, as plain numbers."""
    axis.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(pyplot.matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def scaling(pyplot, summary):
    drawn = against_main_axis(pyplot, summary, "median_ms", "step time, ms", error_bars=True)
    return drawn and (drawn[0], "Median step time; bars from p20 to p80 of the steps. The legend gives the "
                                "exponent of a power law fitted to each line and its standard error."
                      + drawn[1])


def memory(pyplot, summary):
    drawn = against_main_axis(pyplot, summary, "peak_memory_mb", "peak tensor memory, MB", error_bars=False)
    return drawn and (drawn[0], "Largest tensor memory within the measured steps (MB of 2^20 bytes), with "
                                "fitted exponents and their standard errors." + drawn[1])


def depth(pyplot, summary):
    """Step time over each axis that the other pictures do not show, the largest sizes along the others."""
    study = summary.study
    wanted = [axis for axis in more_axes(study) if len(study.sizes_of(axis)) > 1]
    if not wanted:
        return None
    figure, axes = panels(pyplot, len(wanted), 5.5, 3.6)
    for axis, size in zip(axes, wanted, strict=True):
        at = max(study.shapes()).without(size.field)
        for setting in shown_settings(summary):
            line = sorted((p for p in measured(summary, setting) if p.shape.without(size.field) == at),
                          key=lambda p: p.shape)
            if line:
                axis.plot([p.shape[size.field] for p in line], [p.median_ms for p in line], label=setting,
                          **style(summary, setting))
        axis.set_title(at.listed())
        size_axis(pyplot, axis, study, size, "step time, ms")
        axis.legend()
    return figure, "Median step time, the largest sizes along the other axes." + settings_left_out(summary)


def ablation(pyplot, summary):
    """Bars per switch: alone over none, and as the last one; geometric means, a dot per shape."""
    entries = summary.ablation
    if not entries:
        return None
    switches = [s for s in summary.study.switches if any(e.switch == s for e in entries)]
    figure, (axis,) = panels(pyplot, 1, 7.2, 1.2 + 0.55 * len(switches))
    for row, switch in enumerate(reversed(switches)):
        for kind, offset, colour in (("alone", 0.2, COLOURS[1]), ("last", -0.2, COLOURS[2])):
            gains = [getattr(e, kind) for e in entries if e.switch == switch and getattr(e, kind)]
            if gains:
                bar_of_gains(axis, row + offset, gains, colour)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.14)
    axis.set_yticks(range(len(switches)), labels=list(reversed(switches)))
    axis.set_xlabel("speed-up")
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[1:3]]
    figure.legend(keys, ("alone, over none", "as the last one, over all others"), ncols=2,
                  loc="outside lower center")
    caption = "What each switch buys alone, and what it adds when all others are on"
    shapes = len({e.shape for e in entries})
    return figure, caption + (f"; bars are geometric means over {shapes} shapes, dots single shapes."
                              if shapes > 1 else "; black lines are the intervals.")


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


def interactions(pyplot, summary):
    """Matrix of main effects (diagonal) and pairwise interactions; geometric means over shapes, whose
    independent errors are added in quadrature."""
    if not summary.effects:
        return None
    switches, count = summary.study.switches, len(summary.study.switches)
    logs, errors = np.zeros((2, count, count))
    for effects in summary.effects:
        for effect in effects.main + effects.interaction:
            at = max(map(switches.index, effect.switches)), min(map(switches.index, effect.switches))
            factor, low, high = effect.gain
            logs[at] += np.log2(factor)
            errors[at] = np.hypot(errors[at], np.nan if low is None else np.log2(high / low) / 2)
    sure = np.abs(logs) > errors  # not so where there is no error
    logs /= len(summary.effects)
    logs[np.triu_indices(count, 1)] = np.nan
    figure, (axis,) = panels(pyplot, 1, 2.6 + 0.8 * count, 1.7 + 0.55 * count)
    reach = max(0.02, np.nanmax(np.abs(logs)))
    axis.imshow(logs, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
    for row, column in zip(*np.tril_indices(count), strict=True):
        mark = "" if sure[row, column] else " (±)"
        axis.text(column, row, f"{2 ** logs[row, column]:.3f}×{mark}", ha="center", va="center", fontsize=8.5,
                  weight="bold" if row == column else "normal",
                  color="white" if abs(logs[row, column]) > 0.72 * reach else "black")
    axis.set_yticks(range(count), labels=switches)
    axis.set_xticks(range(count), labels=switches, rotation=25, ha="right")
    axis.spines[:].set_visible(False)
    return figure, ("Diagonal: speed-up of switching it on, averaged over all settings of the others. Below "
                    "it: how much larger the speed-up of one is when the other is on; above 1 (blue) the two "
                    "help each other, below 1 (red) they overlap. (±) marks an interval that holds 1, or "
                    "a single run, which has none.")


def time_against_memory(pyplot, summary):
    """Step time against memory of all settings, for the shapes that took longest; the Pareto front joined."""
    by_shape = {}
    for p in measured(summary):
        if p.peak_memory_mb:
            by_shape.setdefault(p.shape, []).append(p)
    chosen = [shape for shape, mine in by_shape.items() if len(mine) > 1]
    if not chosen:
        return None
    chosen.sort(key=lambda shape: (-len(by_shape[shape]), -max(p.median_ms for p in by_shape[shape])))
    figure, axes = panels(pyplot, len(chosen[:MAX_PANELS]))
    shown, joined, grey = shown_settings(summary), False, False
    for axis, shape in zip(axes, sorted(chosen[:MAX_PANELS]), strict=True):
        mine = by_shape[shape]
        front = [mine[i] for i in pareto([(p.median_ms, p.peak_memory_mb) for p in mine])]
        joined, grey = joined or len(front) > 1, grey or any(p.setting not in shown for p in mine)
        axis.plot([p.median_ms for p in front], [p.peak_memory_mb for p in front], color="#999999",
                  linestyle="--", linewidth=1, zorder=1)
        for p in sorted(mine, key=lambda p: p.setting in shown):
            known = p.setting in shown
            look = style(summary, p.setting) if known else dict(color="#bbbbbb", marker="o")
            axis.plot(p.median_ms, p.peak_memory_mb, markersize=7 if known else 4, linestyle="",
                      label=p.setting if known else None, **look)
            if p in front and not known:
                name = p.setting if len(p.setting) < 30 else \
                    f"{len(summary.vocabulary.parse(p.setting))} on"
                axis.annotate(name, (p.median_ms, p.peak_memory_mb), (5, 4), textcoords="offset points",
                              fontsize=7.5)
        axis.set(title=str(shape), xlabel="step time, ms", ylabel="peak tensor memory, MB")
        axis.margins(0.15)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=8)
    which = f"the {MAX_PANELS} slowest of {len(chosen)} shapes" if len(chosen) > MAX_PANELS else "every shape"
    line = "The dashed line joins the settings that no other one beats in both. " if joined else ""
    dots = "Grey dots are the other settings. " if grey else ""
    return figure, f"Left and low is better. {line}{dots}Shown: {which} with at least two settings."


PLOTS = (("speedup_heat_map", "Speed-up over the baseline", speedup_heat_map),
         ("scaling", "Step time against {main}", scaling),
         ("memory", "Memory against {main}", memory),
         ("depth", "Step time against {others}", depth),
         ("ablation", "What each fusion contributes", ablation),
         ("interactions", "Which fusions help each other", interactions),
         ("pareto", "Time against memory", time_against_memory))
