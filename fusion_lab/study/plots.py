"""The pictures of a performance study, as PNG files and as SVG for report.html."""
import io
import os
import re
from dataclasses import dataclass

import numpy as np

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.study.design import ALL, parse_setting, shape_of
from fusion_lab.study.statistics import pareto
from fusion_lab.study.summary import principal_settings
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
    best, ratios = {}, {}
    for p in measured(summary):
        best[shape_of(p)] = min(p["median_ms"], best.get(shape_of(p), p["median_ms"]))
    for p in measured(summary):
        ratios.setdefault(p["setting"], []).append(np.log(p["median_ms"] / best[shape_of(p)]))
    everything = (ALL, frozenset(summary["study"]["switches"]))
    return sorted(principal_settings(summary["study"]["settings"]), key=lambda s: (
        parse_setting(s) not in everything, np.mean(ratios.get(s, np.inf))))


def compared(summary):
    """Baseline and principal settings, as many as a plot can tell apart, in the study's order."""
    settings = summary["study"]["settings"]
    chosen = ([s for s in settings if s == "baseline"] + by_interest(summary))[:MAX_LINES]
    return [s for s in settings if s in chosen]


def left_out(count, what):
    """The sentence of a caption that names what a picture had no room for."""
    return f" {count} {what}{'s are' if count > 1 else ' is'} not shown; the table has all." if count else ""


def settings_left_out(summary):
    return left_out(len(summary["study"]["settings"]) - len(compared(summary)), "setting")


def style(summary, setting):
    index = compared(summary).index(setting)
    return dict(color=COLOURS[index], marker=MARKERS[index])


def measured(summary, **wanted):
    return [p for p in summary["points"] if p["n"] and all(p[key] == value for key, value in wanted.items())]


def speedup_heat_map(pyplot, summary):
    """Speed-up over B x S, a panel per setting and depth."""
    study = summary["study"]
    known = {(p["setting"], p["num_seqs"]) for p in measured(summary)
             if p["speedup"] and p["setting"] != "baseline"}
    chosen = [(s, n) for s in by_interest(summary) for n in study["num_seqs"] if (s, n) in known][:MAX_MAPS]
    wanted = [(s, n) for n in study["num_seqs"] for s in study["settings"] if (s, n) in chosen]
    if not wanted:
        return None
    batches, lengths = sorted(study["batch_sizes"]), sorted(study["seq_lens"])
    figure, axes = panels(pyplot, len(wanted), 1.6 + 0.72 * max(3, len(lengths)),
                          1.4 + 0.5 * max(3, len(batches)), 3)
    reach = max(0.1, *(abs(np.log2(p["speedup"])) for p in summary["points"] if p["speedup"]))
    for axis, (setting, depth) in zip(axes, wanted, strict=True):
        grid = np.full((len(batches), len(lengths)), np.nan)
        for p in (p for p in summary["points"] if p["setting"] == setting and p["num_seqs"] == depth):
            at = batches.index(p["batch_size"]), lengths.index(p["seq_len"])
            grid[at] = np.log2(p["speedup"]) if p["speedup"] else np.nan
            text, colour = "baseline\nfailed" if p["n"] else "failed", "#900000"
            if p["speedup"]:
                sure = p["speedup_low"] is not None and not p["speedup_low"] <= 1 <= p["speedup_high"]
                text = f"{p['speedup']:.2f}×" + ("" if sure else "\n(±)")
                colour = "white" if abs(grid[at]) > 0.72 * reach else "black"
            axis.text(at[1], at[0], text, ha="center", va="center", color=colour, fontsize=8.5)
        picture = axis.imshow(grid, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
        axis.set(title=f"{setting}, N {depth}", xlabel="residues S", ylabel="batch B")
        axis.set_xticks(range(len(lengths)), labels=lengths)
        axis.set_yticks(range(len(batches)), labels=batches)
        axis.spines[:].set_visible(False)
    bar = figure.colorbar(picture, ax=axes, shrink=0.85)
    marks = [f for f in (1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50) if np.log2(f) <= reach][-4:]
    factors = [*(1 / f for f in marks), 1, *marks]
    bar.set_ticks(np.log2(factors), labels=[f"{factor:.3g}×" for factor in factors])
    return figure, ("Step time of the baseline over step time of the setting, same shape. Blue is faster, "
                    "red slower; (±) marks an interval that holds 1, or a single run, which has none."
                    + left_out(len(known) - len(wanted), "map"))


def against_length(pyplot, summary, figure_key, y_label, error_bars):
    """(figure, the caption's sentences on what is missing): lines over S on log axes, a panel per B and N,
    exponents in the legend. None with fewer than two S."""
    study = summary["study"]
    if len(study["seq_lens"]) < 2 or not any(p[figure_key] for p in summary["points"]):
        return None
    every = [(b, n) for b in study["batch_sizes"] for n in study["num_seqs"]]
    cases = spread_out(every, MAX_PANELS)
    figure, axes = panels(pyplot, len(cases))
    for axis, (batch, depth) in zip(axes, cases, strict=True):
        for setting in compared(summary):
            line = measured(summary, setting=setting, batch_size=batch, num_seqs=depth)
            line = sorted((p for p in line if p[figure_key]), key=lambda p: p["seq_len"])
            if not line:
                continue
            y = np.array([p[figure_key] for p in line])
            bars = None
            if error_bars:
                bars = np.abs(np.array([[p["p20_ms"], p["p80_ms"]] for p in line]).T - y)
            fit = next((e for e in summary["scaling"] if e["axis"] == "seq_len" and e["figure"] == figure_key
                        and (e["setting"], e["batch_size"], e["num_seqs"]) == (setting, batch, depth)), None)
            label = setting + (f", S^{fit['exponent']:.2f}" if fit else "")
            label += f"±{fit['standard_error']:.2f}" if fit and fit["standard_error"] is not None else ""
            axis.errorbar([p["seq_len"] for p in line], y, yerr=bars, capsize=2, markersize=5, linewidth=1.4,
                          label=label, **style(summary, setting))
        lengths = sorted(study["seq_lens"])
        axis.set(xscale="log", yscale="log", title=f"B {batch}, N {depth}")
        axis.set(xlabel="residues S", ylabel=y_label)
        axis.set_xticks(lengths, labels=lengths)
        axis.minorticks_off()
        plain_numbers(pyplot, axis)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=8)
    return figure, settings_left_out(summary) + left_out(len(every) - len(cases), "panel")


def plain_numbers(pyplot, axis):
    """1, 2, 5, 10 on the logarithmic y axis, as plain numbers."""
    axis.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(pyplot.matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def scaling(pyplot, summary):
    drawn = against_length(pyplot, summary, "median_ms", "step time, ms", error_bars=True)
    return drawn and (drawn[0], "Median step time; bars from p20 to p80 of the steps. The legend gives the "
                                "exponent of a power law fitted to each line and its standard error."
                      + drawn[1])


def memory(pyplot, summary):
    drawn = against_length(pyplot, summary, "peak_memory_mb", "peak tensor memory, MB", error_bars=False)
    return drawn and (drawn[0], "Largest tensor memory within the measured steps (MB of 2^20 bytes), with "
                                "fitted exponents and their standard errors." + drawn[1])


def depth(pyplot, summary):
    """Step time over N, lines per setting, for the largest batch and length."""
    study = summary["study"]
    if len(study["num_seqs"]) < 2:
        return None
    figure, (axis,) = panels(pyplot, 1, 5.5, 3.6)
    sizes = dict(batch_size=max(study["batch_sizes"]), seq_len=max(study["seq_lens"]))
    for setting in compared(summary):
        line = sorted(measured(summary, setting=setting, **sizes), key=lambda p: p["num_seqs"])
        if line:
            axis.plot([p["num_seqs"] for p in line], [p["median_ms"] for p in line], label=setting,
                      **style(summary, setting))
    rows = sorted(study["num_seqs"])
    axis.set(xscale="log", yscale="log", xlabel="alignment rows N", ylabel="step time, ms",
             title=f"B {sizes['batch_size']}, S {sizes['seq_len']}")
    axis.set_xticks(rows, labels=rows)
    axis.minorticks_off()
    plain_numbers(pyplot, axis)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.legend()
    return figure, ("Median step time against the depth of the alignment, largest batch and length."
                    + settings_left_out(summary))


def ablation(pyplot, summary):
    """Bars per switch: alone over none, and as the last one; geometric means, a dot per shape."""
    entries = summary["ablation"]
    if not entries:
        return None
    switches = [s for s in summary["study"]["switches"] if any(e["switch"] == s for e in entries)]
    figure, (axis,) = panels(pyplot, 1, 7.2, 1.2 + 0.55 * len(switches))
    for row, switch in enumerate(reversed(switches)):
        for kind, offset, colour in (("alone", 0.2, COLOURS[1]), ("last", -0.2, COLOURS[2])):
            found = [e[kind] for e in entries if e["switch"] == switch and e[kind]]
            if found:
                bar_of_factors(axis, row + offset, found, colour)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.14)
    axis.set_yticks(range(len(switches)), labels=list(reversed(switches)))
    axis.set_xlabel("speed-up")
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[1:3]]
    figure.legend(keys, ("alone, over none", "as the last one, over all others"), ncols=2,
                  loc="outside lower center")
    caption = "What each switch buys alone, and what it adds when all others are on"
    shapes = len({shape_of(e) for e in entries})
    return figure, caption + (f"; bars are geometric means over {shapes} shapes, dots single shapes."
                              if shapes > 1 else "; black lines are the intervals.")


def bar_of_factors(axis, y, found, colour):
    """A bar from 1 to the geometric mean of {factor, low, high} dicts, a dot each, or the interval of one."""
    factors = [f["factor"] for f in found]
    mean, edge = float(np.exp(np.mean(np.log(factors)))), max(1.0, *factors)
    axis.barh(y, mean - 1, 0.36, left=1, color=colour, alpha=0.85)
    if len(found) > 1:
        axis.plot(factors, [y] * len(found), "o", color="black", markersize=2.5, alpha=0.7)
    elif found[0]["low"]:
        axis.plot([found[0]["low"], found[0]["high"]], [y, y], color="black", linewidth=1.2)
        edge = max(edge, found[0]["high"])
    axis.annotate(f"{mean:.3f}×", (edge, y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def interactions(pyplot, summary):
    """Matrix of main effects (diagonal) and pairwise interactions; geometric means over shapes, whose
    independent errors are added in quadrature."""
    if not summary["effects"]:
        return None
    switches, count = summary["study"]["switches"], len(summary["study"]["switches"])
    logs, errors = np.zeros((2, count, count))
    for effects in summary["effects"]:
        for effect in effects["main"] + effects["interaction"]:
            names = effect.get("switches") or [effect["switch"]]
            at = max(map(switches.index, names)), min(map(switches.index, names))
            logs[at] += np.log2(effect["factor"])
            half = np.nan if effect["low"] is None else np.log2(effect["high"] / effect["low"]) / 2
            errors[at] = np.hypot(errors[at], half)
    sure = np.abs(logs) > errors  # not so where there is no error
    logs /= len(summary["effects"])
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
        if p["peak_memory_mb"]:
            by_shape.setdefault(shape_of(p), []).append(p)
    chosen = [shape for shape, mine in by_shape.items() if len(mine) > 1]
    if not chosen:
        return None
    chosen.sort(key=lambda shape: (-len(by_shape[shape]), -max(p["median_ms"] for p in by_shape[shape])))
    figure, axes = panels(pyplot, len(chosen[:MAX_PANELS]))
    shown, joined, grey = compared(summary), False, False
    for axis, shape in zip(axes, sorted(chosen[:MAX_PANELS]), strict=True):
        mine = by_shape[shape]
        front = [mine[i] for i in pareto([(p["median_ms"], p["peak_memory_mb"]) for p in mine])]
        joined, grey = joined or len(front) > 1, grey or any(p["setting"] not in shown for p in mine)
        axis.plot([p["median_ms"] for p in front], [p["peak_memory_mb"] for p in front], color="#999999",
                  linestyle="--", linewidth=1, zorder=1)
        for p in sorted(mine, key=lambda p: p["setting"] in shown):
            known = p["setting"] in shown
            look = style(summary, p["setting"]) if known else dict(color="#bbbbbb", marker="o")
            axis.plot(p["median_ms"], p["peak_memory_mb"], markersize=7 if known else 4, linestyle="",
                      label=p["setting"] if known else None, **look)
            if p in front and not known:
                name = p["setting"] if len(p["setting"]) < 30 else f"{len(parse_setting(p['setting']))} on"
                axis.annotate(name, (p["median_ms"], p["peak_memory_mb"]), (5, 4), textcoords="offset points",
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
         ("scaling", "Step time against sequence length", scaling),
         ("memory", "Memory against sequence length", memory),
         ("depth", "Step time against alignment depth", depth),
         ("ablation", "What each fusion contributes", ablation),
         ("interactions", "Which fusions help each other", interactions),
         ("pareto", "Time against memory", time_against_memory))
