"""report.html: one page with the tables and pictures of a performance study, no network and no scripts."""
import base64
import html

from fusion_lab.study.design import Shape
from fusion_lab.study.statistics import CONFIDENCE, Gain, mean_ratio_interval, ratio_interval
from fusion_lab.study.summary import gain_of
from fusion_lab.training.files import counted

INTERVAL = f"[{100 * CONFIDENCE:g}%]"
TEXT_COLUMNS = {"shape", "setting", "switch", "of", "in", "at", "over", "reason", "flags"}

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff;
       margin: 0 auto; max-width: 100rem; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; border-bottom: 1px solid #ccc; padding-bottom: 0.2rem; }
p, li { max-width: 50rem; }
p.meta, figcaption { color: #555; font-size: 0.9rem; }
pre { font: 0.85rem/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; background: #f4f4f4;
      padding: 0.6rem 0.8rem; border-radius: 4px; white-space: pre-wrap; overflow-wrap: anywhere;
      margin: 0.4rem 0; }
figure { margin: 1rem 0 1.8rem; }
figure img { max-width: 100%; height: auto; }
figcaption { max-width: 50rem; margin-top: 0.4rem; }
.wide { overflow-x: auto; }
nav a { margin-right: 1rem; }
table { border-collapse: collapse; font-size: 0.8rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; white-space: normal; vertical-align: bottom; background: #fff; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
td.text { min-width: 6rem; }
tr.new td { border-top: 1.5px solid #999; }
.better { color: #00539c; font-weight: 600; }
.worse { color: #a81c00; font-weight: 600; }
@media print {
  @page { size: A4; margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; }
  table { font-size: 7pt; }
  th, td { padding: 0.1rem 0.2rem; }
  td, td.text { white-space: normal; min-width: 0; }
  tr, pre, figure { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""


def page(study, summary, how, pictures):
    """The page as text; how: the command and when the study was created; pictures: what draw() returned."""
    machines = summary["machine"]
    where = " and ".join(sorted({m["gpu_name"] or m["host_cpu"] or "" for m in machines})) or "no machine"
    versions = ", ".join(sorted({f"torch {m['torch_version']}" for m in machines}))
    sections = [
        f"<h1>Performance study on {escape(where)}</h1>",
        f'<p class="meta">{escape(how["created"][:10])}, {escape(versions)}, '
        f"{escape(study.amp_dtype or 'float32')}{escape(commit(machines))}</p>",
        f"<pre>{escape(how['command'])}</pre>", findings(study, summary), LINKS,
        *map(figure, pictures), points_section(study, summary), failures_section(study, summary),
        ablation_section(study, summary), scaling_section(study, summary), settings_section(study),
        method_section(study)]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>Performance study on {escape(where)}</title>'
            f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, sections))
            + "\n</body></html>\n")


LINKS = "<nav>" + " ".join(f'<a href="{name}">{name}</a>' for name in (
    "results.csv", "results_summary.json", "results.jsonl")) + "</nav>"


def escape(text):
    return html.escape(str(text))


def commit(machines):
    commits = {m["git_commit"][:9] for m in machines if m["git_commit"]}
    return f", commit {' and '.join(sorted(commits))}" if commits else ""


def figure(picture):
    return (f'<h2>{escape(picture.title)}</h2><figure id="{picture.name}"><img alt="{escape(picture.title)}" '
            f'src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>")


def html_table(name, title, head, rows, caption=""):
    """A section with a table; nothing without rows. Rows are (whether a new group begins, cells); a cell is
    text, or (text, class)."""
    def row(tag, cells):
        parts = []
        for column, cell in zip(head, cells, strict=True):
            text, kind = cell if isinstance(cell, tuple) else (cell, "text" * (column in TEXT_COLUMNS))
            parts.append(f'<{tag} class="{kind}">{escape(text)}</{tag}>')
        return "".join(parts).replace(' class=""', "")

    body = "".join(f"<tr{' class=new' if is_new else ''}>{row('td', cells)}</tr>\n" for is_new, cells in rows)
    above = f"<p class=meta>{escape(caption)}</p>" if caption else ""
    return (f'<h2>{title}</h2>{above}<div class="wide"><table id="{name}"><thead><tr>{row("th", head)}</tr>'
            f"</thead>\n<tbody>{body}</tbody></table></div>") if rows else ""


def grouped(study, entries, cells):
    """Rows for html_table(): a new group wherever the shape changes."""
    rows, before = [], None
    for entry in entries:
        shape = Shape.of(entry, study.axes)
        rows.append((before not in (None, shape), cells(entry)))
        before = shape
    return rows


def rounded(value, form=".2f", unit=""):
    return "n/a" if value is None else f"{value:{form}}{unit}"


def gain_cell(gain, form=".2f"):
    """Cell for a Gain: coloured only where the interval does not hold 1."""
    if not gain:
        return ""
    kind = "" if not gain.decided else "better" if gain.factor > 1 else "worse"
    return gain.in_words(form), kind


def findings(study, summary):
    """What a reader wants to know first: which setting is fastest, and how sure that is."""
    points = summary["points"]
    items = [fastest(study, points), *(headline(study, points, setting) for setting in
                                       study.vocabulary.principal(study.settings))]
    failed = sum(p["n_failed"] for p in points)
    if failed:
        items.append(f"{counted(failed, 'run')} failed; the reasons are in a table below.")
    if len(summary["machine"]) > 1:
        items.append("<b>The runs come from more than one machine or version.</b>")
    if any(p["n"] == 2 for p in points):
        items.append("Two runs of a point make a very wide interval; the same command with a larger "
                     "--num-runs and this --study-name adds some.")
    items = "".join(f"<li>{item}</li>" for item in items if item)
    return f'<ul id="findings">{items}</ul>' if items else ""


def fastest(study, points):
    """"Fastest: all at 14 of 16 shapes, beyond noise at 9; compiled at 2 of 16 shapes, ..." """
    shapes, places, sure = 0, {}, {}
    for shape in study.shapes():
        ranked = sorted((p for p in points if Shape.of(p, study.axes) == shape and p["n"]),
                        key=lambda p: p["median_ms"])
        if len(ranked) > 1:
            first, shapes = ranked[0], shapes + 1
            gains = [ratio_interval(other["run_medians_ms"], first["run_medians_ms"]) for other in ranked[1:]]
            decided = all(gain.low is not None and gain.low > 1 for gain in gains)
            places[first["setting"]] = places.get(first["setting"], 0) + 1
            sure[first["setting"]] = sure.get(first["setting"], 0) + decided
    of_all = f"of {counted(shapes, 'shape')}"
    parts = [f"{escape(setting)} at {count} {of_all}, beyond noise at {sure[setting] or 'none'}"
             for setting, count in sorted(places.items(), key=lambda place: -place[1])]
    return f"<b>Fastest:</b> {'; '.join(parts)}." if parts else ""


def headline(study, points, setting):
    """A sentence on a setting's speed-up with its interval, on memory, and on where it is slower."""
    base = {Shape.of(p, study.axes): p for p in points if p["setting"] == "baseline"}
    mine = {Shape.of(p, study.axes): p for p in points if p["setting"] == setting and p["speedup"]}
    if not mine:
        return ""
    mean = mean_ratio_interval([(base[shape]["run_medians_ms"], p["run_medians_ms"])
                                for shape, p in mine.items()])
    line = f"<b>{escape(setting)}</b>: {mean.in_words()} the baseline's speed"
    if mean.low is None:
        line += ", of single runs, which prove nothing"
    elif not mean.decided:
        line = f"<b>{escape(setting)}</b>: no difference from the baseline shown, {mean.in_words()}"
    decided = {shape: gain_of(p) for shape, p in mine.items() if gain_of(p).decided}
    if len(mine) > 1:
        line += f" (geometric mean of {len(mine)} shapes, {len(mine) - len(decided)} of {len(mine)} undecided"
        if faster := {shape: gain for shape, gain in decided.items() if gain.factor > 1}:
            best = max(faster, key=faster.get)
            line += f"; most at {best}: {faster[best].in_words()}"
        line += ")"
    if slower := [str(shape) for shape, gain in decided.items() if gain.factor < 1]:
        line += f"; <b>slower</b> than the baseline at {', '.join(slower)}"
    less = [p["memory_reduction_percent"] for p in mine.values()]
    if less := sorted(percent for percent in less if percent is not None):
        line += f"; memory saved: {less[0]:.0f}%" + (f" to {less[-1]:.0f}%" if len(less) > 1 else "")
    return f"{line}."


def points_section(study, summary):
    head = (*(axis.letter for axis in study.axes), "setting", "runs", "step ms", "p20", "p80",
            "spread of runs", "samples/s", f"speed-up {INTERVAL}", "peak MB", "saved", "activations MB",
            "launches")
    rows = grouped(study, summary["points"], lambda p: [
        *(p[axis.field] for axis in study.axes), p["setting"], p["n"], rounded(p["median_ms"]),
        rounded(p["p20_ms"]), rounded(p["p80_ms"]), rounded(p["run_spread_percent"], ".1f", "%"),
        rounded(p["samples_per_second"], ".1f"),
        "1" if p["setting"] == "baseline" and p["n"] else gain_cell(gain_of(p)),
        rounded(p["peak_memory_mb"], ".1f"), rounded(p["memory_reduction_percent"], ".1f", "%"),
        rounded(p["saved_activation_mb"], ".1f"), rounded(p["launches_per_step"], ".0f")])
    return html_table("points", "All points", head, rows)


def failures_section(study, summary):
    rows = [(False, [Shape.of(p, study.axes), p["setting"], p["n_failed"], p["reason"]])
            for p in summary["points"] if p["n_failed"]]
    return html_table("failures", "Failed runs", ("shape", "setting", "runs", "reason"), rows)


def ablation_section(study, summary):
    rows = grouped(study, summary["ablation"], lambda e: [
        Shape.of(e, study.axes), e["switch"],
        *(gain_cell(e[kind] and Gain(**e[kind]), ".3f") for kind in ("alone", "last")),
        rounded(e["alone_saves_mb"], ".1f"), rounded(e["last_saves_mb"], ".1f")])
    head = ("shape", "switch", "alone, over none", "last, over all others", "alone saves MB", "last saves MB")
    return html_table("ablation-table", "Ablation", head, rows)


def scaling_section(study, summary):
    rows, letters = [], {axis.field: axis.letter for axis in study.axes}
    for e in summary["scaling"]:
        error = "" if e["standard_error"] is None else f" ± {e['standard_error']:.2f}"
        others = Shape.of(e, tuple(axis for axis in study.axes if axis.field != e["axis"]))
        rows.append((False, [e["setting"], "time" if e["figure"] == "median_ms" else "memory",
                             letters[e["axis"]], f"{e['exponent']:.2f}{error}", others,
                             ", ".join(map(str, e["over"]))]))
    head = ("setting", "of", "in", "exponent", "at", "over")
    return html_table("exponents", "Fitted exponents", head, rows,
                      "p in cost = c · size^p, least squares on logarithms; ± is the standard error, which a "
                      "fit through two points does not have.")


def settings_section(study):
    rows = [(False, [setting, " ".join(study.setting_flags(setting)) or "none"])
            for setting in study.settings]
    return html_table("settings", "Settings", ("setting", "flags"), rows)


def method_section(study):
    return f"""<h2 id="method">How this was measured</h2>
<p>Every run is a process of its own: {study.warmup_steps} warm-up steps, then
{study.num_steps} measured ones, of which the median counts. {counted(study.num_runs, "run")} per point;
a point's figure is the median over its runs, p20 and p80 are those of the steps (median over runs),
the spread of runs is (largest - smallest) / median. The first runs of all points come in random order
(seed {study.seed}), then the second ones, and so on; one process at a time.</p>
<p>Speed-up is the baseline's median over the setting's, same shape. Its {100 * CONFIDENCE:g}%
interval is Welch's t on the logarithms of the runs' medians: each point counts with the spread of its
own runs, so one of a single run has no interval, one of two a very wide one. Peak memory is the
largest sum of tensors alive within a step, in MB of 2<sup>20</sup> bytes; n/a where it was not
measured. Saved is against the baseline.</p>"""
