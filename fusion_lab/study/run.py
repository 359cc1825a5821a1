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
from fusion_lab.training import files
from fusion_lab.training.files import UserError, claim, read_json, write_atomically, write_json

KEYS = {"run", "ok", "reason", "seconds", "system_info", "rows"}  # of a line
RUNNING = "running-"  # begins the name of a point's own directory, below the study's, since /tmp may be small


# --- What the directory holds -------------------------------------------------------------------------------


def kept(directory):
    """The lines of results.jsonl, without a last one that a kill cut short."""
    path = os.path.join(directory, "results.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        *lines, last = file.read().split(b"\n")
    with contextlib.suppress(ValueError):  # as the nothing behind the end of a line is
        json.loads(last)
        lines.append(last)
    return lines


def read_lines(directory, study):
    """{(run, label): line} of a study. Raises UserError for a line that is not the result of a point."""
    found = {}
    for number, text in enumerate(kept(directory), 1):
        try:
            line = json.loads(text)
            timed = [row for row in line["rows"] if row["name"] and "median_batch_time" in row]
            if not KEYS <= line.keys() or not all("speedup" in row for row in timed):
                raise ValueError
            found[line["run"], study.label(line)] = line
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise UserError(f"{os.path.join(directory, 'results.jsonl')}: line {number} is not the result of "
                            "a point; mend or delete it") from None
    return found


def append(directory, line):
    """Write a line, on the disk before the next point begins."""
    lines = [*kept(directory), json.dumps(line, allow_nan=False).encode(), b""]
    write_atomically(os.path.join(directory, "results.jsonl"), lambda file: file.write(b"\n".join(lines)))


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
    except (AttributeError, KeyError, TypeError, ValueError):
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
    """For so many points that have yet to run, by those that have."""
    if not lines:
        return "how long is known after the first point"
    return files.time_left(count * statistics.fmean(line["seconds"] for line in lines.values()))
