"""The pictures of a performance study, as PNG files and as SVG for report.html."""
import itertools
import os
from functools import partial

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.study.canvas import STYLE, Figure, Panel, compose, svg_of
from fusion_lab.study.statistics import pareto, ratio_interval
from fusion_lab.study.summary import gain_of, standard_errors
from fusion_lab.training.files import write_atomically

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ for prints in grey.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*"
MAX_PANELS, MAX_MAPS = 4, 6  # the table has what is left out
REACH = 2  # log2 of the factor at which colours are deepest; fixed, so that noise never looks like a gain
EFFECT_REACH = 1
UNDECIDED = "#e4e4e4"
SAME_MEMORY = 0.01  # share; allocators round more than that
MAX_LINES = len(COLOURS)


def draw(summary, directory):
    """All pictures that this study has the data for. PNGs are written into directory; for a page each panel
    is an SVG of its own, so that on a narrow screen they stand under each other in a size to be read."""
    pyplot = require_matplotlib()
    figures = []
    with pyplot.rc_context(STYLE):
        for name, title, plot in PLOTS:
            drawn = plot(pyplot, summary)
            if drawn is None:
                continue
            panels, caption = drawn
            picture = compose(pyplot, panels)
            write_atomically(os.path.join(directory, f"{name}.png"),
                             lambda file, picture=picture: picture.savefig(file, format="png", dpi=130))
            pyplot.close(picture)
            svgs = tuple(svg_of(pyplot, panel, f"{name}-{i}") for i, panel in enumerate(panels))
            title = title.format(main=summary.vocabulary.main_axis.field,
                                 others=" and ".join(axis.field for axis in more_axes(summary.study)))
            figures.append(Figure(name, title, caption, svgs))
    return figures


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
    sizes = study.sizes_of(main), study.sizes_of(across) if across else [""]
    width, height = 1.2 + 0.75 * max(3, len(sizes[0])), 1.2 + 0.5 * max(3, len(sizes[1]))
    panels = []
    for setting, other in wanted:
        points = [p for p in summary.points if (p.setting, p.shape.without(*names)) == (setting, other)]
        title = ", ".join(filter(None, (setting, other.listed())))
        panels.append(Panel(width, height, partial(draw_map, pyplot, points, (main, across), sizes, title)))
    return panels, ("Step time of the baseline over step time of the setting, same shape. Blue is faster, "
                    f"red slower, deepest at {2 ** REACH}× and beyond in every study; grey with (±) is "
                    "undecided: the interval holds 1, or there is a single run, which has none."
                    + left_out(len(known) - len(wanted), "map"))


def draw_map(pyplot, points, map_axes, sizes, title, axis):
    """A heat map of speed-ups over two axes of the study, of which the second may be None."""
    main, across = map_axes
    columns, rows = sizes
    grid = np.full((len(rows), len(columns)), np.nan)
    for p in points:
        y, x = rows.index(p.shape[across.field]) if across else 0, columns.index(p.shape[main.field])
        text, colour = "baseline\nfailed" if p.n else "failed", "#900000"
        if p.speedup:
            decided = gain_of(p).decided
            text, colour = f"{p.speedup:.2f}×" + ("" if decided else "\n(±)"), "black"
            if decided:
                grid[y, x] = np.log2(p.speedup)
                colour = letters_on(grid[y, x], REACH)
            else:
                axis.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, color=UNDECIDED))
        axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=8.5)
    axis.imshow(grid, cmap="RdBu", vmin=-REACH, vmax=REACH, aspect="auto", origin="lower")
    axis.set(title=title, xlabel=str(main), ylabel=str(across or ""))
    axis.set_xticks(range(len(columns)), labels=columns)
    axis.set_yticks(range(len(rows)), labels=rows)
    axis.spines[:].set_visible(False)


def letters_on(value, reach):
    """The colour of letters on that of a value between -reach and reach."""
    return "white" if abs(value) > 0.6 * reach else "black"


def against_main_axis(pyplot, summary, figure_key, y_label, error_bars):
    """(figure, what its caption says of errors and of what is missing): lines over the main axis on log axes,
    a panel per other sizes, exponents in the legend. None with fewer than two sizes along it."""
    study, main = summary.study, summary.vocabulary.main_axis
    if len(study.sizes_of(main)) < 2 or not any(getattr(p, figure_key) for p in summary.points):
        return None
    every = list(dict.fromkeys(shape.without(main.field) for shape in study.shapes()))
    cases = spread_out(every, MAX_PANELS)
    panels = [Panel(4.2, 3.4, partial(draw_lines, pyplot, summary, case, figure_key, y_label, error_bars))
              for case in cases]
    fits = [fit for fit in summary.scaling if (fit.axis, fit.figure) == (main.field, figure_key)]
    return panels, (f"{standard_errors(fits)}." + settings_left_out(summary)
                    + left_out(len(every) - len(cases), "panel"))


def draw_lines(pyplot, summary, case, figure_key, y_label, error_bars, axis):
    main = summary.vocabulary.main_axis
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
    size_axis(pyplot, axis, summary.study, main, y_label)
    axis.legend(fontsize=8)


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
                                "exponent of a power law fitted to each line" + drawn[1])


def memory(pyplot, summary):
    drawn = against_main_axis(pyplot, summary, "peak_memory_mb", "peak tensor memory, MB", error_bars=False)
    return drawn and (drawn[0], "Largest tensor memory within the measured steps (MB of 2^20 bytes), with "
                                "fitted exponents" + drawn[1])


def depth(pyplot, summary):
    """Step time over each axis that the other pictures do not show, the largest sizes along the others."""
    study = summary.study
    wanted = [axis for axis in more_axes(study) if len(study.sizes_of(axis)) > 1]
    if not wanted:
        return None
    panels = [Panel(4.8, 3.4, partial(draw_depth, pyplot, summary, size)) for size in wanted]
    return panels, "Median step time, the largest sizes along the other axes." + settings_left_out(summary)


def draw_depth(pyplot, summary, size, axis):
    at = max(summary.study.shapes()).without(size.field)
    for setting in shown_settings(summary):
        line = sorted((p for p in measured(summary, setting) if p.shape.without(size.field) == at),
                      key=lambda p: p.shape)
        if line:
            axis.plot([p.shape[size.field] for p in line], [p.median_ms for p in line], label=setting,
                      **style(summary, setting))
    axis.set_title(at.listed())
    size_axis(pyplot, axis, summary.study, size, "step time, ms")
    axis.legend()


def ablation(pyplot, summary):
    """Bars per switch: alone over none, and as the last one; geometric means, a dot per shape."""
    entries = summary.ablation
    if not entries:
        return None
    switches = [s for s in summary.study.switches if any(e.switch == s for e in entries)]
    shapes = len({e.shape for e in entries})
    caption = "What each switch buys alone, and what it adds when all others are on"
    panel = Panel(5, 1.4 + 0.55 * len(switches), partial(draw_ablation, pyplot, entries, switches))
    return [panel], caption + (f"; bars are geometric means over {shapes} shapes, dots single shapes."
                               if shapes > 1 else "; black lines are the intervals.")


def draw_ablation(pyplot, entries, switches, axis):
    for row, switch in enumerate(reversed(switches)):
        for kind, offset, colour in (("alone", 0.2, COLOURS[1]), ("last", -0.2, COLOURS[2])):
            gains = [getattr(e, kind) for e in entries if e.switch == switch and getattr(e, kind)]
            if gains:
                bar_of_gains(axis, row + offset, gains, colour)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.18)
    axis.set_yticks(range(len(switches)), labels=list(reversed(switches)))
    axis.set_xlabel("speed-up")
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[1:3]]
    axis.figure.legend(keys, ("alone, over none", "as the last one, over all others"), ncols=2, fontsize=8,
                       loc="outside lower center")


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
    panel = Panel(1.9 + 0.6 * count, 1.4 + 0.5 * count, partial(draw_matrix, pyplot, switches, logs, sure))
    return [panel], (
        "Diagonal: speed-up of switching it on, averaged over all settings of the others. Below it: how much "
        "larger the speed-up of one is when the other is on; above 1 (blue) the two help each other, below 1 "
        f"(red) they overlap, deepest at {2 ** EFFECT_REACH}× and beyond. Grey with (±) is undecided: the "
        "interval holds 1, or there is a single run, which has none.")


def draw_matrix(pyplot, switches, logs, sure, axis):
    axis.imshow(np.where(sure, logs, np.nan), cmap="RdBu", vmin=-EFFECT_REACH, vmax=EFFECT_REACH,
                aspect="auto")
    for row, column in zip(*np.tril_indices(len(switches)), strict=True):
        decided = sure[row, column]
        if not decided:
            axis.add_patch(pyplot.Rectangle((column - 0.5, row - 0.5), 1, 1, color=UNDECIDED))
        text = f"{2 ** logs[row, column]:.3f}×" + ("" if decided else "\n(±)")
        axis.text(column, row, text, ha="center", va="center", fontsize=8.5,
                  weight="bold" if row == column else "normal",
                  color=letters_on(logs[row, column], EFFECT_REACH) if decided else "black")
    axis.set_yticks(range(len(switches)), labels=switches)
    axis.set_xticks(range(len(switches)), labels=switches, rotation=25, ha="right")
    axis.spines[:].set_visible(False)


def time_against_memory(pyplot, summary):
    """Step time against memory of all settings, for the shapes that took longest."""
    by_shape = {}
    for p in measured(summary):
        if p.peak_memory_mb:
            by_shape.setdefault(p.shape, []).append(p)
    chosen = [shape for shape, mine in by_shape.items() if len(mine) > 1]
    if not chosen:
        return None
    chosen.sort(key=lambda shape: (-len(by_shape[shape]), -max(p.median_ms for p in by_shape[shape])))
    shown, used = shown_settings(summary), sorted(chosen[:MAX_PANELS])
    panels = [Panel(4.2, 3.4, partial(draw_trade_off, summary, by_shape[shape])) for shape in used]
    which = f"the {MAX_PANELS} slowest of {len(chosen)} shapes" if len(chosen) > MAX_PANELS else "every shape"
    joined = any(front_lines(by_shape[shape]) for shape in used)
    line = "Dashed lines join settings that no other one surely beats, one of them surely faster, the " \
           "other surely smaller. " if joined else ""
    grey = any(p.setting not in shown for shape in used for p in by_shape[shape])
    dots = "Grey dots are the other settings. " if grey else ""
    return panels, f"Left and low is better. {line}{dots}Shown: {which} with at least two settings."


def front(points):
    """Points that no other one beats: none is surely better in time or memory and no worse in the other."""
    return [points[i] for i in pareto([(p.median_ms, p.peak_memory_mb) for p in points], lambda a, b: (
        surely_faster(points[a], points[b]), surely_smaller(points[a], points[b])))]


def front_lines(points):
    """Pairs of neighbours on the front that surely trade time for memory."""
    return [(a, b) for a, b in itertools.pairwise(front(points))
            if surely_faster(a, b) and surely_smaller(b, a)]


def surely_faster(a, b):
    """Whether a takes less time than b beyond noise; no single run does."""
    low = ratio_interval(b.run_medians_ms, a.run_medians_ms).low
    return low is not None and low > 1


def surely_smaller(a, b):
    return a.peak_memory_mb < (1 - SAME_MEMORY) * b.peak_memory_mb


def draw_trade_off(summary, points, axis):
    shown, best = shown_settings(summary), front(points)
    for pair in front_lines(points):
        axis.plot([p.median_ms for p in pair], [p.peak_memory_mb for p in pair], color="#999999",
                  linestyle="--", linewidth=1, zorder=1)
    for p in sorted(points, key=lambda p: p.setting in shown):
        known = p.setting in shown
        look = style(summary, p.setting) if known else dict(color="#bbbbbb", marker="o")
        axis.plot(p.median_ms, p.peak_memory_mb, markersize=7 if known else 4, linestyle="",
                  label=p.setting if known else None, **look)
        if p in best and not known:
            name = p.setting if len(p.setting) < 30 else f"{len(summary.vocabulary.parse(p.setting))} on"
            axis.annotate(name, (p.median_ms, p.peak_memory_mb), (5, 4), textcoords="offset points",
                          fontsize=7.5)
    axis.set(title=str(points[0].shape), xlabel="step time, ms", ylabel="peak tensor memory, MB")
    axis.margins(0.15)
    axis.grid(color="#dddddd", linewidth=0.6)
    widen(axis.set_xlim, axis.get_xlim())
    widen(axis.set_ylim, axis.get_ylim())
    axis.legend(fontsize=8)


def widen(set_limits, limits):
    """Let an axis span at least a tenth of its middle, so that next to nothing looks like it."""
    middle = sum(limits) / 2
    half = max((limits[1] - limits[0]) / 2, 0.05 * middle)
    set_limits(middle - half, middle + half)


PLOTS = (("speedup_heat_map", "Speed-up over the baseline", speedup_heat_map),
         ("scaling", "Step time against {main}", scaling),
         ("memory", "Memory against {main}", memory),
         ("depth", "Step time against {others}", depth),
         ("ablation", "What each fusion contributes", ablation),
         ("interactions", "Which fusions help each other", interactions),
         ("pareto", "Time against memory", time_against_memory))
