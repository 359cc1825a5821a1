"""How speed and memory of each fusion setting change with a model's sizes.

The work behind launch_performance_study.sh: the order of things. Reading order: design (what is measured),
arguments (how it is asked for), run (how it is measured) and results (what is kept of it), statistics and
summary (what it says), plots and page (how it looks).
"""
import os
import shlex
import shutil
import sys
from dataclasses import replace

import torch

from fusion_lab.measuring.plotting import require_matplotlib, spared
from fusion_lab.measuring.tables import aligned, cell
from fusion_lab.study.arguments import SCRIPT, own_part, parse
from fusion_lab.study.design import Shape
from fusion_lab.study.page import page
from fusion_lab.study.plots import draw
from fusion_lab.study.results import Results, open_directory, read_config, require_same_study, write_config
from fusion_lab.study.run import duration, run_points, seconds_left
from fusion_lab.study.summary import as_csv, gain_of, summarise
from fusion_lab.training import torchrun
from fusion_lab.training.files import (
    FAILED,
    OK,
    Interrupted,
    UserError,
    counted,
    exit_code,
    interruptible,
    write_json,
    write_text,
)
from fusion_lab.training.flags import named_program
from fusion_lab.training.machine import choose_device, cpu_name
from fusion_lab.training.program import load_program


def dry_run(options, study):
    results = Results(options.study_name or "", study.axes)
    if options.study_name and os.path.exists(os.path.join(options.study_name, "config.json")):
        require_same_study(options.study_name, study)
        results.load(mend=False)
    points, done = study.points(), results.finished()
    todo = [point for point in points if point not in done]
    for point in todo:
        print(f"{point}: {shlex.join(study.flags(point.shape, point.setting))}")
    basis = "from the finished ones" if results.rows else \
        "a guess: start-up and compilation, steps not counted"
    print(f"{counted(len(todo), 'point')} to run, {len(points) - len(todo)} finished; about "
          f"{duration(seconds_left(study, todo, results.rows.values()))} ({basis})")


def print_table(study, summary):
    rows = [("shape", "setting", "runs", "step ms", "p20", "p80", "speed-up", "MB", "saved")]
    for p in summary["points"]:
        head = (str(Shape.of(p, study.axes)), p["setting"], str(p["n"]))
        if not p["n"]:
            rows.append((*head, p["reason"]))
            continue
        gain = gain_of(p) if p["setting"] != "baseline" else None
        rows.append((*head, *(cell(p[key]) for key in ("median_ms", "p20_ms", "p80_ms")),
                     gain.in_words(".3f", "x") if gain else "", cell(p["peak_memory_mb"], ".1f") or "n/a",
                     cell(p["memory_reduction_percent"], ".1f", unit="%")))
    print("", *aligned(rows), sep="\n")


def run_study(options, study, argv):
    directory = open_directory(options, study, argv)
    known, how = require_same_study(directory, study)
    results = Results(directory, study.axes)
    results.load()
    if study.num_runs > known.num_runs:
        how = write_config(directory, study, argv, how["created"])
    print(f"Study in {directory}; to continue it if interrupted: --study-name {shlex.quote(directory)}")
    try:
        run_points(study, results, directory, options.timeout)
    finally:
        shutil.rmtree(os.path.join(directory, "running"), ignore_errors=True)
    summary = conclude(options, study, how, directory, results)
    if not any(point["n"] for point in summary["points"]):
        raise UserError(f"no point could be measured: {summary['points'][0]['reason']}", FAILED)


def conclude(options, study, how, directory, results):
    """Write and print what the rows say; returns the summary. Whatever fails, the figures are there."""
    summary = summarise(study, results.rows.values())
    place = os.path.join(directory, "report.html")
    write_json(os.path.join(directory, "results_summary.json"), summary)
    write_text(os.path.join(directory, "results.csv"), as_csv(study, summary))
    write_text(place, page(study, summary, how, []))
    if not options.no_plots:
        with spared("pictures in report.html"):
            write_text(place, page(study, summary, how, draw(study, summary, directory)))
    print_table(study, summary)
    print(f"\nReport: {place}")
    return summary


def report_only(options, study, _argv):
    """Summary and report of whatever runs a study has, on any machine."""
    directory = os.path.abspath(options.study_name)
    results = Results(directory, study.axes)
    if not os.path.exists(results.path):
        raise UserError(f"--study-name {options.study_name}: holds no results")
    study, how = read_config(directory, study.vocabulary)
    results.load(mend=False)
    conclude(options, study, how, directory, results)


def run_command(argv):
    options, study = parse(argv, named_program(own_part(argv), load_program()))
    if options.device not in ("auto", "cpu"):
        choose_device(options.device)
    study = replace(study, torch_version=torch.__version__, host_cpu=cpu_name())
    if options.dry_run:
        return dry_run(options, study)
    if not options.no_plots:
        try:
            require_matplotlib()
        except UserError as error:
            raise UserError(f"{error}, or add --no-plots", error.code) from None
    return (report_only if options.report_only else run_study)(options, study, argv)


def run(argv):
    """Do what a command line asks; returns the exit code. Raises UserError."""
    torchrun.require_alone(SCRIPT)
    try:
        with interruptible():
            run_command(argv)
    except Interrupted as stopped:
        raise UserError("interrupted; results so far are kept, the same --study-name continues",
                        128 + stopped.args[0]) from None
    return OK


def main(argv=None):
    return exit_code(run, sys.argv[1:] if argv is None else argv, SCRIPT)


if __name__ == "__main__":
    sys.exit(main())
