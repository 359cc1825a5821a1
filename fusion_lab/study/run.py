"""Runs the points of a study one after the other, each as a --compare-fusion in a process of its own."""
import glob
import os
import shutil
import statistics
import tempfile
import time
from datetime import datetime, timezone

from fusion_lab.measuring.compare import compare_apart
from fusion_lab.measuring.variants import BASELINE
from fusion_lab.study.results import append
from fusion_lab.study.summary import principal

RUNNING = "running-"  # begins the name of a point's own directory, below the study's, since /tmp may be small


def unfinished(study, lines):
    """The points that have yet to run, or to run again since they failed."""
    return [(run, shape) for run, shape in study.points()
            if not lines.get((run, study.label(shape)), {}).get("ok")]


def run_points(program, study, directory, lines, timeout, stop):
    """Run the unfinished points until stop.signal: a line in lines and on the screen for each."""
    todo, count = unfinished(study, lines), len(study.points())
    for left, (run, shape) in zip(range(len(todo) - 1, -1, -1), todo, strict=True):
        folder = tempfile.mkdtemp(prefix=RUNNING, dir=directory)
        line = run_point(program, study, run, shape, folder, timeout, stop)
        for old in glob.glob(os.path.join(glob.escape(directory), f"{RUNNING}*")):
            shutil.rmtree(old, ignore_errors=True)  # this one, and what a killed study left
        if stop.signal:
            return
        append(directory, line)
        lines[run, study.label(shape)] = line
        print(f"[{count - left}/{count}] run {run} {study.label(shape)}: {in_words(study, line)}; "
              f"{time_left(todo[len(todo) - left:], study, lines)}", flush=True)


def run_point(program, study, run, shape, folder, timeout, stop):
    """The line of one point. What was measured before it failed counts."""
    started = time.monotonic()
    result, reason = compare_apart(program, study.flags(shape), os.path.join(folder, "results"), stop,
                                   timeout, patience=10)
    return dict(shape, run=run, ok=reason is None, reason=reason, seconds=time.monotonic() - started,
                timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                system_info=result.get("system_info"), rows=result.get("variants", []))


def in_words(study, line):
    """"baseline 12.5 ms, fused 1.20x, ultra not measured", and why a point failed."""
    parts, names = [line["reason"]] if line["reason"] else [], [BASELINE, *principal(study.settings)]
    for row in (row for row in line["rows"] if row["name"] in names):
        seconds, faster = row.get("median_batch_time"), row.get("speedup")
        parts.append(f"{row['name']} " + ("not measured" if not seconds else f"{1e3 * seconds:.1f} ms"
                                          if row["name"] == BASELINE or not faster else f"{faster:.2f}x"))
    return ", ".join(parts)


def time_left(todo, study, lines):
    """"about 3 min left" for points that have yet to run: as long as their shape took, or all on average."""
    known = {}
    for (_, label), line in lines.items():
        known.setdefault(label, []).append(line["seconds"])
    every = sum(known.values(), [])
    if not every:
        return "how long is known after the first point"
    left = sum(map(statistics.fmean, (known.get(study.label(shape), every) for _, shape in todo)))
    return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"
