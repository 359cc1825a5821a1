"""A performance study, which launch_performance_study.sh starts: a loop of comparisons over sizes and runs.

arguments.py says what is measured, and report.py what comes of it. A study's directory keeps config.json, and
results.jsonl with a line for every point that has ended: its run and sizes, `ok`, `reason` (why it failed),
`seconds`, `system_info`, and `rows`, those of its comparison as --compare-fusion wrote them.
"""
from fusion_lab.training import errors, words

errors.begin(__name__, "torch", "numpy", "tqdm")

import json
import os
import pathlib
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import asdict

from fusion_lab.measuring.compare import compare_apart
from fusion_lab.measuring.plotting import drawn, require_matplotlib
from fusion_lab.measuring.tables import markdown
from fusion_lab.study import report
from fusion_lab.study.arguments import SCRIPT, own_part, parse
from fusion_lab.training import torchrun
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import FAILED, OK, StopRequest, UserError, exit_code
from fusion_lab.training.files import read_json, write_json, write_text
from fusion_lab.training.flags import named_program
from fusion_lab.training.machine import choose_device
from fusion_lab.training.program import load_program
from fusion_lab.training.words import counted

KEYS = {"run", "ok", "reason", "seconds", "system_info", "rows"}  # of a line


def read_lines(directory, study):
    """{(run, label): line} of the points that have ended, without a last one that a kill cut short. Raises
    UserError for a line that is not the result of a point."""
    path, lines = pathlib.Path(directory, "results.jsonl"), {}
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            timed = [row for row in line["rows"] if row["name"] and "median_batch_time" in row]
            if not KEYS <= line.keys() or not all("speedup" in row for row in timed):
                raise ValueError
            lines[line["run"], study.label(line)] = line
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            if number < len(texts):
                raise UserError(f"{path}: line {number} is not the result of a point; mend or delete it"
                                ) from None
    return lines


def open_directory(name, study, command):
    """Make the study's directory, or find the one to go on in, and hold it; returns (path, dict(command,
    created)). Raises UserError."""
    path = os.path.abspath(name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    Directory(path, flag="--study-name").claim(resumed=name is not None)
    how = dict(command=shlex.join(command), created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    if os.path.exists(os.path.join(path, "config.json")):
        how["created"] = require_same_study(path, study)
    elif os.listdir(path):
        raise UserError(f"--study-name {name}: is not empty and holds no study")
    write_json(os.path.join(path, "config.json"), dict(study=asdict(study), **how))
    return path, how


def require_same_study(directory, study):
    """When the study in a directory was created. Raises UserError unless it is this one; but it may have
    fewer runs."""
    path = os.path.join(directory, "config.json")
    content, now = read_json(path, "study's config"), asdict(study)
    before = content.get("study")
    if not isinstance(before, dict) or before.keys() != now.keys() or not isinstance(
            content.get("created"), str) or not isinstance(before["num_runs"], int):
        raise UserError(f"{path}: not the config of a study, or an earlier version's")
    different = [f"{key} {before[key]} there, {value} now" for key, value in now.items()
                 if before[key] != value and not (key == "num_runs" and value > before[key])]
    if different:
        raise UserError(f"{directory}: another study ({'; '.join(different)}); only --num-runs may differ, "
                        "and only grow; choose another --study-name")
    return content["created"]


def unfinished(study, lines):
    """The points that have yet to run, or to run again since they failed."""
    return [(run, shape) for run, shape in study.points()
            if not lines.get((run, study.label(shape)), {}).get("ok")]


def dry_run(program, name, study):
    """Print the commands that have yet to run."""
    lines = {}
    if name and os.path.exists(os.path.join(name, "config.json")):
        require_same_study(name, study)
        lines = read_lines(name, study)
    todo = unfinished(study, lines)
    for run, shape in todo:
        print(f"run {run}: {shlex.join([sys.executable, program.file, *study.flags(shape)])}")
    print(f"{counted(len(todo), 'point')} to run, {len(study.points()) - len(todo)} finished; "
          f"{time_left(len(todo), lines)}")


def run_points(program, study, directory, lines, timeout, stop):
    """Run the unfinished points until stop.signal: a line in lines, on the disk and on the screen for each.
    What was measured before a point failed counts."""
    todo, count = unfinished(study, lines), len(study.points())
    for done, (run, shape) in enumerate(todo, 1):
        started = time.monotonic()
        # Not in /tmp, which may be small; a new one, because a comparison may outlive a killed study.
        place = os.path.join(directory, f"running-{time.time_ns()}")
        result, reason = compare_apart(program, study.flags(shape), place, stop, timeout, patience=10)
        for left_behind in pathlib.Path(directory).glob("running-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        if stop.signal:
            return
        line = dict(shape, run=run, ok=reason is None, reason=reason, seconds=time.monotonic() - started,
                    system_info=result.get("system_info"), rows=result.get("variants", []))
        lines[run, study.label(shape)] = line
        write_text(os.path.join(directory, "results.jsonl"),
                   "".join(json.dumps(each, allow_nan=False) + "\n" for each in lines.values()))
        left = len(todo) - done
        print(f"[{count - left}/{count}] run {run} {study.label(shape)}: {reason or 'measured'} in "
              f"{line['seconds']:.0f} s; {time_left(left, lines)}", flush=True)


def time_left(count, lines):
    """How long `count` points will take, in words, by those that have run."""
    if not lines:
        return "how long is known after the first point"
    return words.time_left(count * statistics.fmean(line["seconds"] for line in lines.values()))


def run_study(program, options, study, argv):
    """Run what has yet to run, and report it. Raises UserError after a signal, and if every point failed."""
    directory, how = open_directory(options.study_name, study, [SCRIPT, *argv])
    lines = read_lines(directory, study)
    print(f"Study in {directory}; to continue it if interrupted: --study-name {shlex.quote(directory)}",
          flush=True)
    with StopRequest() as stop:
        run_points(program, study, directory, lines, options.timeout, stop)
        if lines:  # no picture after Ctrl-C, since it takes seconds
            summary = conclude(study, how, directory, lines, plots=not (options.no_plots or stop.signal))
    if stop.signal:
        raise UserError("interrupted; results so far are kept, the same --study-name continues",
                        128 + stop.signal)
    if not any(point["n"] for point in summary["points"]):
        raise UserError(f"no point could be measured: {summary['points'][0]['reason']}", FAILED)


def conclude(study, how, directory, lines, plots):
    """Write and print what the lines say; returns the summary. The figures are there if the picture fails."""
    summary, directory = report.summarise(study, lines), pathlib.Path(directory)
    page, picture = directory / "report.html", directory / "speedups.png"
    write_json(directory / "results_summary.json", summary)
    write_text(directory / "results.csv", report.as_csv(summary))
    write_text(page, report.page(study, summary, how))
    if plots and drawn(str(picture), report.draw, study, summary, figsize=(8, 4.5)):
        write_text(page, report.page(study, summary, how, picture.read_bytes()))
    print("", *markdown(report.table(study, summary)), "", *report.findings(study, summary), "",
          f"Report: {page}", sep="\n", flush=True)
    return summary


def run(argv):
    """Do what a command line asks; returns the exit code. Raises UserError."""
    torchrun.require_alone(SCRIPT)
    program = named_program(own_part(argv), load_program())
    options, study = parse(argv, program)
    if options.device not in ("auto", "cpu"):
        choose_device(options.device)
    if not (options.dry_run or options.no_plots):
        require_matplotlib()  # now, and not after hours
    if options.dry_run:
        dry_run(program, options.study_name, study)
    else:
        run_study(program, options, study, argv)
    return OK


def main(argv=None):
    return exit_code(run, sys.argv[1:] if argv is None else argv, SCRIPT)


if __name__ == "__main__":
    sys.exit(main())
