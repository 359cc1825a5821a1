"""The pictures of a performance study, as PNG for report.html."""
import io
import math

import numpy as np

from fusion_lab.measuring.gains import Gain
from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.study.summary import gain_of, principal

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ for prints in grey.
COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9,
         "legend.frameon": False}
REACH = 2  # log2 of the factor at which colours are deepest; fixed, so that noise never looks like a gain


def draw(study, summary):
    """[(title, caption, PNG)] of all pictures that this study has the data for."""
    pyplot, made = require_matplotlib(), []
    with pyplot.rc_context(STYLE):
        for title, plot, caption in PLOTS:
            picture = plot(pyplot, study, summary)
            if picture is not None:
                content = io.BytesIO()
                picture.savefig(content, format="png", dpi=110)
                pyplot.close(picture)
                made.append((title, caption, content.getvalue()))
    return made


def panels(pyplot, count, width, height):
    """(matplotlib's figure, axes) of so many panels of these inches, up to three in a row."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    picture, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                                    layout="constrained")
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return picture, axes.flat


def heat_map(pyplot, study, summary):
    """Speed-up over the main axis and the first other one, a panel per setting and other sizes. None without
    a speed-up."""
    main, maps = study.main_axis, {}
    across = next((axis for axis in study.axes if axis != main), main)
    for p in summary["points"]:
        if p["setting"] in principal(study.settings):
            title = f"{p['setting']} {study.label(p, without=[main, across])}"
            maps.setdefault(title, {})[p[across], p[main]] = p
    columns, rows = study.sizes[main], study.sizes[across]
    if not any(p["speedup"] for cells in maps.values() for p in cells.values()):
        return None
    width, height = 1.2 + 0.75 * max(3, len(columns)), 1.2 + 0.5 * max(3, len(rows))
    picture, axes = panels(pyplot, len(maps), width, height)
    for axis, (title, cells) in zip(axes, maps.items(), strict=False):
        shades = np.full((len(rows), len(columns)), np.nan)
        for (row, column), p in cells.items():
            y, x, gain = rows.index(row), columns.index(column), gain_of(p)
            shades[y, x] = np.log2(gain.factor) if gain and gain.decided else np.nan
            text = "not\nmeasured" if not gain else f"{gain.factor:.2f}x" + "\n(±)" * (not gain.decided)
            axis.text(x, y, text, ha="center", va="center", fontsize=8.5,
                      color="white" if abs(shades[y, x]) > 0.6 * REACH else "black")
        axis.set_facecolor("#e4e4e4")  # of what is not decided, and so has no shade
        axis.imshow(shades, cmap="RdBu", vmin=-REACH, vmax=REACH, aspect="auto", origin="lower")
        axis.set(title=title, xlabel=main, ylabel=across)
        axis.set_xticks(range(len(columns)), labels=columns)
        axis.set_yticks(range(len(rows)), labels=rows)
    return picture


def against_size(figure, y_label):
    """A plot of this figure of all points: lines over the main axis on logarithmic axes, a panel per other
    sizes, exponents in the legend. None with fewer than two sizes along it."""
    def plot(pyplot, study, summary):
        main, settings = study.main_axis, ["baseline", *principal(study.settings)]
        fits = {(e["setting"], e["at"]): e for e in summary["scaling"] if e["figure"] == figure}
        lines = {}
        for p in summary["points"]:
            if p["setting"] in settings and p[figure]:
                line = lines.setdefault(study.label(p, without=[main]), {}).setdefault(p["setting"], {})
                line[p[main]] = p[figure]
        if len(study.sizes[main]) < 2 or not lines:
            return None
        picture, axes = panels(pyplot, len(lines), 4.2, 3.4)
        for axis, (others, by_setting) in zip(axes, lines.items(), strict=False):
            for setting, line in by_setting.items():
                number, fit = settings.index(setting) % len(COLOURS), fits.get((setting, others))
                label = f"{setting}, {study.axes[main]}^{fit['exponent']:.2f}" if fit else setting
                axis.plot(list(line), list(line.values()), color=COLOURS[number], marker=MARKERS[number],
                          markersize=5, linewidth=1.4, label=label)
            axis.set(title=others, xscale="log", yscale="log", xlabel=main, ylabel=y_label)
            axis.set_xticks(study.sizes[main], labels=study.sizes[main])
            axis.minorticks_off()
            axis.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.grid(color="#dddddd", linewidth=0.6)
            axis.legend(fontsize=8)
        return picture
    return plot


def ablation(pyplot, study, summary):
    """Bars per switch: alone over none, and as the last one; geometric means over shapes, a dot for each.
    None without an ablation."""
    entries = summary["ablation"]
    switches = list(dict.fromkeys(e["switch"] for e in entries))[::-1]
    if not entries:
        return None
    picture, (axis,) = panels(pyplot, 1, 5, 1.4 + 0.55 * len(switches))
    for kind, offset, colour in (("alone", 0.2, COLOURS[1]), ("last", -0.2, COLOURS[2])):
        for row, switch in enumerate(switches):
            factors = [Gain(**e[kind]).factor for e in entries if e["switch"] == switch and e[kind]]
            if factors:
                mean = float(np.exp(np.mean(np.log(factors))))
                axis.barh(row + offset, mean - 1, 0.36, left=1, color=colour, alpha=0.85)
                axis.plot(factors, [row + offset] * len(factors), "o", color="black", markersize=2.5)
                axis.annotate(f"{mean:.2f}x", (max(1.0, *factors), row + offset), (5, 0),
                              textcoords="offset points", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.18)
    axis.set_yticks(range(len(switches)), labels=switches)
    axis.set_xlabel("speed-up: alone over none (blue), last over all others (orange)")
    return picture


PLOTS = (
    ("Speed-up over the baseline", heat_map,
     "The baseline's step over the step of the setting that was taken in turn with it: the median within a "
     "run, the mean over runs. It may differ a little from the ratio of the median times. "
     "Blue is faster, red slower, "
     f"deepest at {2 ** REACH} times and beyond in every study. Grey with (±) is undecided: the interval "
     "holds 1, or there is a single run, which has none."),
    ("Step time against size", against_size("median_ms", "step time, ms"),
     "Median step time. The legend gives the exponent of a power law that was fitted to each line."),
    ("Memory against size", against_size("peak_memory_mb", "peak tensor memory, MB"),
     "Largest tensor memory within the measured steps (MB of 2^20 bytes), with fitted exponents."),
    ("What each fusion contributes", ablation,
     "What each switch buys alone, and what it adds when all other default fusions are on. Bars are "
     "geometric means over shapes, with a dot for each."))
