"""What the lines of a study add up to: results_summary.json, results.csv, a table, sentences, and a page with
all of these and a picture, report.html.

Here a point is a variant at one shape, over its runs; in arguments.py and command.py it is a shape in one
run, with all variants. Times and memory are medians over the runs, MB are 2**20 bytes. Variants take turns
within a run, so a run gives one speed-up for each, and what disturbs a whole run cancels out of it.
"""
import base64
import csv
import html
import io
from dataclasses import asdict

import numpy as np

from fusion_lab.measuring.gains import Gain, gain_of_runs
from fusion_lab.measuring.tables import cell
from fusion_lab.measuring.variants import BASELINE, ONLY, WITHOUT
from fusion_lab.training.words import counted

MUCH = 20.0  # percent between two runs of a point, from which on the study says so
FIGURES = "peak_memory_mb", "saved_activation_mb", "launches_per_step"  # of rows; a point has their medians


def summarise(study, lines):
    """The content of results_summary.json, of lines as read_lines() has them."""
    by_shape, machines, points = {}, [], []
    for (_, label), line in sorted(lines.items()):
        by_shape.setdefault(label, []).append(line)
        if line["system_info"] and line["system_info"] not in machines:  # there should be one
            machines.append(line["system_info"])
    for shape in study.shapes():
        baseline = None
        for variant in study.variants if study.label(shape) in by_shape else ():
            points.append(summarise_point(shape, variant, by_shape[study.label(shape)], baseline))
            baseline = baseline or points[-1]
    return dict(format="performance study 3", study=asdict(study), machine=machines, points=points)


def summarise_point(shape, variant, lines, baseline):
    """All runs of a variant at a shape together. baseline: the baseline's point, None if this is the
    baseline."""
    rows, reasons = {}, []
    for line in lines:
        row = next((row for row in line["rows"] if row["name"] == variant), {})
        if row.get("median_batch_time"):
            rows[str(line["run"])] = row  # as a key of JSON
        else:
            reasons.append(row.get("reason") or line["reason"] or "its comparison has no such row")
    times = {run: 1e3 * row["median_batch_time"] for run, row in rows.items()}
    figures = {name: median([row.get(name) for row in rows.values()]) for name in FIGURES}
    middle, memory = median(times.values()), figures["peak_memory_mb"]
    speedups = {run: row["speedup"] for run, row in rows.items()}
    before = baseline["peak_memory_mb"] if baseline else memory
    return dict(
        shape, variant=variant, n=len(rows), n_failed=len(reasons),
        reason="; ".join(sorted({*reasons})) or None, median_ms=middle, run_medians_ms=times,
        run_spread_percent=100 * (max(times.values()) / min(times.values()) - 1) if len(times) > 1 else None,
        samples_per_second=1e3 * shape["batch_size"] / middle if middle and "batch_size" in shape else None,
        **(gain_of_runs(list(speedups.values())) or Gain(None)).as_dict(), speedups=speedups, **figures,
        memory_reduction_percent=100 * (1 - memory / before) if memory and before else None)


def median(values):
    """The median of the values that are not None; None if there is none."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def as_csv(summary):
    """The text of results.csv: a line a point, without figures of single runs."""
    text, points = io.StringIO(), summary["points"]
    columns = [key for key, value in points[0].items() if not isinstance(value, dict)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


def table(study, summary):
    """Rows of cells, the header first, for terminal and page; a point that was not measured says why."""
    rows = [["shape", "variant", "runs", "step ms (runs)", "speed-up (95%)", "peak MB", "saved", "launches"]]
    for p in summary["points"]:
        row = [study.label(p), p["variant"], str(p["n"])]
        if not p["n"]:
            rows.append([*row, p["reason"]])
            continue
        times = p["run_medians_ms"].values()
        spread = f" ({min(times):.2f} to {max(times):.2f})" if len(times) > 1 else ""
        rows.append([*row, f"{p['median_ms']:.2f}{spread}",
                     "1" if p["variant"] == BASELINE else str(Gain.read(p)),
                     cell(p["peak_memory_mb"], ".1f") or "n/a",
                     cell(p["memory_reduction_percent"], ".1f", unit="%"),
                     cell(p["launches_per_step"], ".0f") or "n/a"])
    return rows


def principal(variants):
    """The variants but for the baseline and single switches, or all but the baseline if there are no
    others."""
    others = [name for name in variants if name != BASELINE]
    return [name for name in others if not name.startswith((ONLY, WITHOUT))] or others


def findings(study, summary):
    """Sentences: how much faster each variant is and how sure that is, and what is wrong with the study."""
    points = summary["points"]
    sentences = [headline(study, points, name) for name in principal(study.variants)]
    if missing := [p for p in points if p["n_failed"]]:
        sentences.append(f"{len(missing)} of {len(points)} points lack runs; the table has the reasons.")
    most = max(points, key=lambda p: p["run_spread_percent"] or 0)
    if (most["run_spread_percent"] or 0) > MUCH:
        times = most["run_medians_ms"].values()
        sentences.append(f"Runs differ by up to {most['run_spread_percent']:.0f}%, at {study.label(most)} "
                         f"{most['variant']}: {min(times):.1f} to {max(times):.1f} ms. The machine was busy; "
                         "speed-ups, which are taken within a run, suffer less.")
    return [sentence for sentence in sentences if sentence]


def headline(study, points, variant):
    """A sentence on a variant's mean speed-up over the shapes with its interval, and where it is slower."""
    mine = [p for p in points if p["variant"] == variant and p["speedup"]]
    runs = set.intersection(*(set(p["speedups"]) for p in mine)) if mine else ()
    if not runs:
        return ""
    mean = gain_of_runs([np.exp(np.mean([np.log(p["speedups"][run]) for p in mine])) for run in sorted(runs)])
    slower = [study.label(p) for p in mine if Gain.read(p).decided and p["speedup"] < 1]
    where = f"at {len(mine)} of {counted(len(study.shapes()), 'shape')}"
    return (f"{variant}: {mean} the baseline's speed, the mean {where}"
            + ("" if mean.decided else ", which noise can explain")
            + (f"; slower at {', '.join(slower)}" if slower else "") + ".")


STYLE = """body { font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; margin: auto; max-width: 70rem }
pre { background: #f4f4f4; white-space: pre-wrap } img { max-width: 100% } td { padding: 0.2rem 0.5rem }"""
METHOD = """Variants take steps in turn. A point is the median of its runs. Its speed-up is their geometric
mean; the 95% interval, Student's t on logarithms, needs two runs, and decides nothing where it holds 1.
Peak memory is the largest sum of tensors alive within a step, in MB of 2^20 bytes."""


def page(study, summary, how, png=None):
    """The page as text, which needs no network; how: the command, and when it was created; png: bytes."""
    machines = [f"{m['gpu_name'] or m['host_cpu']}, torch {m['torch_version']}, commit "
                f"{(m['git_commit'] or 'unknown')[:9]}" for m in summary["machine"]]
    about = "; ".join([how["created"][:10], study.amp_dtype or "float32", *machines])
    source = f"data:image/png;base64,{base64.b64encode(png or b'').decode()}"
    picture = [f'<img alt="Speed-up" src="{source}">'] if png else []
    rows = [f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>"
            for row in table(study, summary)]
    sentences = [f"<li>{html.escape(sentence)}</li>" for sentence in findings(study, summary)]
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Performance study</title>',
        f"<style>{STYLE}</style></head><body><h1>Performance study</h1><p>{html.escape(about)}</p>",
        f"<pre>{html.escape(how['command'])}</pre><ul>", *sentences, "</ul>", *picture, "<table>", *rows,
        f"</table><p>{METHOD}</p></body></html>\n"])


def draw(axis, study, summary):
    """Speed-up with its interval against the first axis that is not the batch, a line for each variant and
    other sizes."""
    main = next((axis for axis in study.axes if axis != "batch_size"), next(iter(study.axes)))
    lines = {}
    for p in summary["points"]:
        if p["variant"] in principal(study.variants) and p["speedup"]:
            name = f"{p['variant']} {study.label(p, without=main)}"
            lines.setdefault(name, {})[p[main]] = Gain.read(p)
    for name, gains in lines.items():
        factors = np.array([gain.factor for gain in gains.values()])
        low, high = np.array([(g.low or g.factor, g.high or g.factor) for g in gains.values()]).T
        axis.errorbar(list(gains), factors, [factors - low, high - factors], fmt="o-", capsize=3, label=name)
    axis.axhline(1, color="0.2", linewidth=0.8)
    axis.set(xscale="log", xlabel=main, ylabel="speed-up over the baseline (95% interval)")
    axis.set_xticks(study.sizes[main], labels=study.sizes[main])
    axis.minorticks_off()
    if lines:
        axis.legend(fontsize=8)
