"""Runs the points of a study one after the other, each as a --compare-fusion in a process of its own, and
keeps them in the study's directory: config.json, and results.jsonl, a line for every point that has ended.

A line is the point's run and sizes, `ok`, `reason` (why it failed), `seconds`, `system_info`, and `rows`:
those of its comparison, as --compare-fusion wrote them. Of several lines of a point the last one counts.
"""
import contextlib
import glob
import json
import os
import shlex
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import datetime, timezone

from fusion_lab.measuring.compare import compare_apart
from fusion_lab.measuring.variants import BASELINE
from fusion_lab.study.design import Study
from fusion_lab.study.summary import principal
from fusion_lab.training.files import UserError, claim, read_json, write_json

RUNNING = "running-"  # begins the name of a point's own directory, below the study's, since /tmp may be small


# --- What the directory holds -------------------------------------------------------------------------------


def read_lines(directory, study):
    """{(run, label): line} of a study. What is no line of a point, such as one that a kill cut short, is left
    out, and its point runs again."""
    path, found = os.path.join(directory, "results.jsonl"), {}
    points = {(run, study.label(shape)) for run, shape in study.points()}
    if os.path.exists(path):
        with open(path, "rb") as file:
            for text in file:
                with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                    line = json.loads(text)
                    point = line["run"], study.label(line)
                    whole = {"ok", "reason", "seconds", "system_info"} <= line.keys()
                    if point in points and whole and all(row["name"] for row in line["rows"]):
                        found[point] = line
    return found


def append(directory, line):
    """Write a line, on the disk before the next point begins."""
    with open(os.path.join(directory, "results.jsonl"), "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # a line that a kill cut short
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def open_directory(name, study, command):
    """Make the study's directory, or find the one to go on in, and hold it; returns (path, dict(command,
    created)). Raises UserError."""
    path = os.path.abspath(name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    claim(path, resumed=name is not None, flag="--study-name")
    how = dict(command=shlex.join(command),
               created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    if os.path.exists(os.path.join(path, "config.json")):
        require_same_study(path, study)
        how["created"] = read_config(path)[1]["created"]
    elif os.listdir(path):
        raise UserError(f"--study-name {name}: is not empty and holds no study")
    write_json(os.path.join(path, "config.json"), dict(study=asdict(study), **how))
    return path, how


def read_config(directory):
    """(Study, dict(command, created)) of a directory. Raises UserError."""
    path = os.path.join(directory, "config.json")
    content = read_json(path, "study's config")
    try:
        return Study(**content["study"]), {key: content[key] for key in ("command", "created")}
    except (KeyError, TypeError):
        raise UserError(f"{path}: not the config of a study, or an earlier version's") from None


def require_same_study(directory, study):
    """Raise UserError unless this study is the one there; but it may have more runs."""
    before = asdict(read_config(directory)[0])
    different = [f"{key} {before[key]} there, {value} now" for key, value in asdict(study).items()
                 if before[key] != value and not (key == "num_runs" and value > before[key])]
    if different:
        raise UserError(f"{directory}: a study with other settings ({'; '.join(different)}); only --num-runs "
                        "may differ, and only grow; choose another --study-name")


# --- How points run -----------------------------------------------------------------------------------------


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
              f"{time_left(left, lines)}", flush=True)


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
                                          if row["name"] == BASELINE else f"{faster:.2f}x"))
    return ", ".join(parts)


def time_left(count, lines):
    """"about 3 min left" for so many points that have yet to run, by those that have."""
    if not lines:
        return "how long is known after the first point"
    left = count * statistics.fmean(line["seconds"] for line in lines.values())
    return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"
