"""report.html: one page with the tables and pictures of a performance study, no network and no scripts."""
import html

import numpy as np

from fusion_lab.study.statistics import mean_ratio_interval, ratio_interval
from fusion_lab.study.summary import INTERVAL, gain_of, standard_errors
from fusion_lab.training.files import counted

TEXT_COLUMNS = {"shape", "setting", "switch", "switch, or pair", "of", "in", "at", "over"}
REASON_COLUMNS = {"reason", "passed over"}
LIST_COLUMNS = {"switch, or pair"}

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff;
       margin: 0 auto; max-width: 100rem; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; border-bottom: 1px solid #ccc; padding-bottom: 0.2rem; }
p, li { max-width: 50rem; }
p.meta, figcaption { color: #555; font-size: 0.9rem; }
code, pre { font: 0.85rem/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
pre { background: #f4f4f4; padding: 0.6rem 0.8rem; border-radius: 4px; white-space: pre-wrap;
      overflow-wrap: anywhere; margin: 0.4rem 0; }
figure { margin: 1rem 0 1.8rem; }
figure svg { display: block; flex: none; max-width: 100%; height: auto; }
figcaption { max-width: 50rem; margin-top: 0.4rem; }
.wide { overflow-x: auto; }
.panels { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; }
nav a { margin-right: 1rem; }
summary { cursor: pointer; color: #555; }
table { border-collapse: collapse; font-size: 0.8rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; white-space: normal; vertical-align: bottom; background: #fff; }
th.text, td.text { text-align: left; }
td.setting, td.listed { white-space: normal; min-width: 9rem; }
th.reason, td.reason { white-space: normal; min-width: 18rem; text-align: left; overflow-wrap: anywhere; }
#settings th + th { writing-mode: vertical-rl; white-space: nowrap; vertical-align: bottom; }
tr.new td { border-top: 1.5px solid #999; }
.better { color: #00539c; font-weight: 600; }
.worse { color: #a81c00; font-weight: 600; }
@media print {
  @page { size: A4; margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  figure svg { min-width: 0 !important; width: 47% !important; break-inside: avoid; }
  table { font-size: 7pt; }
  th, td { padding: 0.1rem 0.2rem; }
  td, td.setting, td.listed, td.reason, th.reason { white-space: normal; min-width: 0; }
  thead { display: table-header-group; }
  tr, pre { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""


def page(summary, config, figures):
    """The page as text; `figures` are those that draw() returned."""
    study, machines = summary.study, summary.machines
    where = " and ".join(sorted({m.gpu_name or m.host_cpu or "" for m in machines})) or "no machine"
    versions = ", ".join(sorted({f"torch {m.torch_version}" for m in machines}))
    sections = [
        f"<h1>Performance study on {escape(where)}</h1>",
        f'<p class="meta">{escape(config.created[:10])}, {escape(versions)}, '
        f"{escape(study.amp_dtype or 'float32')}{escape(commit(machines))}</p>",
        f"<pre>{escape(config.command)}</pre>", findings(summary), links(figures),
        *(f'<h2>{escape(f.title)}</h2><figure id="{f.name}"><div class="wide panels" role="img" '
          f'aria-label="{escape(f.title)}">{"".join(f.svgs)}</div>'
          f"<figcaption>{escape(f.caption)}</figcaption></figure>" for f in figures),
        recommendation_section(summary), points_section(summary), failures_section(summary),
        ablation_section(summary), effects_section(summary), scaling_section(summary),
        settings_section(study), method_section(summary)]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>Performance study on {escape(where)}</title>'
            f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, sections))
            + "\n</body></html>\n")


def escape(text):
    return html.escape(str(text))


def links(figures):
    """Where the page's parts are, and the files beside it."""
    parts = [(f"#{figure.name}", figure.title) for figure in figures]
    parts += [("#points", "All points"), ("#settings", "Settings"), ("#method", "How this was measured")]
    parts += [(name, name) for name in ("results.csv", "results_summary.json", "results.jsonl")]
    return "<nav>" + " ".join(f'<a href="{at}">{escape(text)}</a>' for at, text in parts) + "</nav>"


def commit(machines):
    commits = {m.git_commit[:9] for m in machines if m.git_commit}
    return f", commit {' and '.join(sorted(commits))}" if commits else ""


def html_table(name, head, rows, caption="", text_columns=()):
    """A table. Rows are (whether a new group begins, cells); a cell is text, or (text, class)."""
    left = TEXT_COLUMNS | set(text_columns)

    def row(tag, cells):
        parts = []
        for column, cell in zip(head, cells, strict=True):
            text, kind = cell if isinstance(cell, tuple) else (cell, "")
            kind += " setting" * (column == "setting") + " text" * (column in left)
            kind += " reason" * (column in REASON_COLUMNS) + " listed" * (column in LIST_COLUMNS)
            parts.append(f'<{tag} class="{kind.strip()}">{escape(text)}</{tag}>')
        return "".join(parts).replace(' class=""', "")

    body = "".join(f"<tr{' class=new' if is_new else ''}>{row('td', cells)}</tr>\n" for is_new, cells in rows)
    above = f"<p class=meta>{escape(caption)}</p>" if caption else ""
    return (f'{above}<div class="wide"><table id="{name}"><thead><tr>{row("th", head)}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>")


def grouped(entries, cells):
    """Rows for html_table(): a new group wherever the shape changes."""
    rows, before = [], None
    for entry in entries:
        rows.append((before not in (None, entry.shape), cells(entry)))
        before = entry.shape
    return rows


def rounded(value, form=".2f", unit=""):
    return "n/a" if value is None else f"{value:{form}}{unit}"


def gain_cell(gain, form=".2f"):
    """Cell for a Gain: coloured only where the interval does not hold 1."""
    if not gain:
        return ""
    kind = "" if not gain.decided else "better" if gain.factor > 1 else "worse"
    return in_words(gain, form, ",\u00a0"), kind


def findings(summary):
    """What a reader wants to know first: which setting to use, and how sure that is."""
    items = [fastest(summary), *(headline(summary, setting) for setting in
                                 summary.vocabulary.principal(summary.study.settings))]
    failed = sum(p.n_failed for p in summary.points)
    if failed:
        items.append(f"{counted(failed, 'run')} failed; the reasons are in a table below.")
    if len(summary.machines) > 1:
        items.append("<b>The runs come from more than one machine or version.</b>")
    if any(p.n == 2 for p in summary.points):
        items.append("Two runs of a point make a very wide interval; the same command with a larger "
                     "--num-runs and this --study-name adds some.")
    items = "".join(f"<li>{item}</li>" for item in items if item)
    return f'<ul id="findings">{items}</ul>' if items else ""


def fastest(summary):
    """"Fastest: all at 14 of 16 shapes, beyond noise at 9; compiled at 2 of 16 shapes, ..." """
    shapes, places, sure = 0, {}, {}
    for shape in dict.fromkeys(p.shape for p in summary.points):
        ranked = sorted((p for p in summary.points if p.shape == shape and p.n), key=lambda p: p.median_ms)
        if len(ranked) > 1:
            first, shapes = ranked[0], shapes + 1
            gains = (ratio_interval(other.run_medians_ms, first.run_medians_ms) for other in ranked[1:])
            decided = all(gain.low is not None and gain.low > 1 for gain in gains)
            places[first.setting] = places.get(first.setting, 0) + 1
            sure[first.setting] = sure.get(first.setting, 0) + decided
    of_all = f"of {shapes} shape{'s' if shapes > 1 else ''}"
    parts = [f"{escape(setting)} at {count} {of_all}, beyond noise at {sure[setting] or 'none'}"
             for setting, count in sorted(places.items(), key=lambda place: -place[1])]
    return f"<b>Fastest:</b> {'; '.join(parts)}." if parts else ""


def headline(summary, setting):
    """A sentence on a setting's speed-up with its interval, and on how many shapes are undecided."""
    mine = [p for p in summary.points if p.setting == setting and p.speedup]
    if not mine:
        return ""
    base = {p.shape: p for p in summary.points if p.setting == "baseline"}
    mean = mean_ratio_interval([(base[p.shape].run_medians_ms, p.run_medians_ms) for p in mine])
    decided = [p for p in mine if gain_of(p).decided]
    line = f"<b>{escape(setting)}</b>: {in_words(mean)} the baseline's speed"
    if mean.low is None:
        line += ", of single runs, which prove nothing"
    elif not mean.decided:
        line = f"<b>{escape(setting)}</b>: no difference from the baseline shown, {in_words(mean)}"
    if len(mine) > 1:
        line += f" (geometric mean of {len(mine)} shapes, {len(mine) - len(decided)} of {len(mine)} undecided"
        if faster := [p for p in decided if p.speedup > 1]:
            best = max(faster, key=lambda p: p.speedup)
            line += f"; most at {best.shape}: {in_words(gain_of(best))}"
        line += ")"
    slower = [str(p.shape) for p in decided if p.speedup < 1]
    if slower:
        line += f"; <b>slower</b> than the baseline at {', '.join(slower)}"
    return f"{line}{memory_words(mine)}."


def in_words(gain, form=".2f", comma=", "):
    """"1.20× [1.10, 1.30]" """
    interval = "" if gain.low is None else f" [{gain.low:{form}}{comma}{gain.high:{form}}]"
    return f"{gain.factor:{form}}×{interval}"


def memory_words(points):
    """"; 8% less memory (median of 16 shapes; from 2% more to 12% less)" """
    less = [p.memory_reduction_percent for p in points if p.memory_reduction_percent is not None]
    if not less:
        return ""

    def words(percent):
        return f"{abs(percent):.0f}% {'less' if percent > 0 else 'more'}" if round(percent) else "the same"
    if len(less) == 1 or words(min(less)) == words(max(less)):
        return f"; {words(np.median(less))} memory"
    return (f"; {words(np.median(less))} memory (median of {len(less)} shapes; from {words(min(less))} to "
            f"{words(max(less))})")


def points_section(summary):
    head = (*(axis.letter for axis in summary.study.axes), "setting", "runs", "step ms", "p20", "p80",
            "spread of runs", "samples/s", f"speed-up {INTERVAL}", "peak MB", "saved", "activations MB",
            "launches")
    rows = grouped(summary.points, lambda p: [
        *p.shape.sizes, p.setting, p.n, rounded(p.median_ms), rounded(p.p20_ms), rounded(p.p80_ms),
        rounded(p.run_spread_percent, ".1f", "%"), rounded(p.samples_per_second, ".1f"),
        "1" if p.setting == "baseline" and p.n else gain_cell(gain_of(p)), rounded(p.peak_memory_mb, ".1f"),
        rounded(p.memory_reduction_percent, ".1f", "%"), rounded(p.saved_activation_mb, ".1f"),
        rounded(p.launches_per_step, ".0f")])
    return "<h2>All points</h2>" + html_table("points", head, rows)


def failures_section(summary):
    rows = [(False, [p.shape, p.setting, p.n_failed, p.reason]) for p in summary.points if p.n_failed]
    head = ("shape", "setting", "runs", "reason")
    return "<h2>Failed runs</h2>" + html_table("failures", head, rows) if rows else ""


def ablation_section(summary):
    rows = grouped(summary.ablation, lambda e: [
        e.shape, e.switch, gain_cell(e.alone, ".3f"), gain_cell(e.last, ".3f"),
        rounded(e.alone_saves_mb, ".1f"), rounded(e.last_saves_mb, ".1f")])
    head = ("shape", "switch", "alone, over none", "last, over all others", "alone saves MB", "last saves MB")
    return "<h2>Ablation</h2>" + html_table("ablation-table", head, rows) if rows else ""


def effects_section(summary):
    rows = []
    for e in summary.effects:
        rows += [(i == 0 and bool(rows),
                  [e.shape, " with ".join(effect.switches), gain_cell(effect.gain, ".3f")])
                 for i, effect in enumerate(e.main + e.interaction)]
    head = ("shape", "switch, or pair", f"factor {INTERVAL}")
    caption = ("One switch: speed-up, mean over all settings of the others. A pair: the speed-up of one with "
               "the other on, over the same with the other off. Intervals are Welch's, from the spread "
               "between the runs of each point.")
    return "<h2>Effects and interactions</h2>" + html_table("effects", head, rows, caption) if rows else ""


def scaling_section(summary):
    rows, letters = [], {axis.field: axis.letter for axis in summary.study.axes}
    for e in summary.scaling:
        error = "" if e.standard_error is None else f" ± {e.standard_error:.2f}"
        kind = "time" if e.figure == "median_ms" else "memory"
        rows.append((False, [e.setting, kind, letters[e.axis], f"{e.exponent:.2f}{error}",
                             e.at.listed(), ", ".join(map(str, e.over))]))
    head = ("setting", "of", "in", "exponent", "at", "over")
    caption = f"p in cost = c · size^p, least squares on logarithms{standard_errors(summary.scaling)}."
    table = html_table("exponents", head, rows, caption)
    folded = f"<details><summary>{len(rows)} fits</summary>{table}</details>"
    return f"<h2>Fitted exponents</h2>{folded}" if rows else ""


def recommendation_section(summary):
    recommendation = summary.recommendation
    if not recommendation:
        return ""
    rows = [(False, [e.shape, e.setting or "none", rounded(e.median_ms), rounded(e.peak_memory_mb, ".1f"),
                     gain_cell(gain_of(e)) if e.setting else "", "; ".join(e.passed_over)])
            for e in recommendation.shapes]
    head = ("shape", "setting", "step ms", "peak MB", f"speed-up {INTERVAL}", "passed over")
    limit = recommendation.memory_limit_mb
    caption = f"The fastest that passes the accuracy check{f' within {limit:g} MB' if limit else ''}."
    commands = "\n".join(e.command for e in recommendation.shapes if e.command)
    return (f"<h2>Recommended settings</h2>{html_table('recommended', head, rows, caption)}"
            f"<pre>{escape(commands)}</pre>")


def settings_section(study):
    on = {setting: study.vocabulary.parse(setting) for setting in study.settings}
    used = frozenset().union(*on.values())
    switches = [name for name in study.vocabulary.known if name in study.vocabulary.switches or name in used]
    rows = [(False, [setting, *("on" if name in on[setting] else "·" for name in switches)])
            for setting in on]
    return "<h2>Settings</h2>" + html_table("settings", ("setting", *switches), rows, text_columns=switches)


def order(summary):
    seed, late = summary.study.seed, summary.out_of_order
    plan = f"in random order (seed {seed}), then the second ones, and so on"
    if late is None:
        return f"The first runs of all points were started {plan}; they measured as they became ready."
    return f"The first runs of all points were measured {plan}" + (
        f", but for {late} that came later, as repeated runs do." if late else ".")


def method_section(summary):
    study = summary.study
    return f"""<h2 id="method">How this was measured</h2>
<p>Every run is a process of its own: {study.warmup_steps} warm-up steps, then
{study.num_steps} measured ones, of which the median counts. {counted(study.num_runs, "run")} per point;
a point's figure is the median over its runs, p20 and p80 are those of the steps (median over runs),
the spread of runs is (largest - smallest) / median. {order(summary)}
While one process measured, any other one of the study was stopped.</p>
<p>Speed-up is the baseline's median over the setting's, same shape. Its {100 *
summary.confidence:g}% interval is Welch's t on the logarithms of the runs' medians: each
point counts with the spread of its own runs, so one of a single run has no interval, one of two a
very wide one. Peak memory is the largest sum of tensors alive within a step, in MB of
2<sup>20</sup> bytes; n/a where it was not measured. Saved is against the baseline.</p>"""
