"""How speed and memory of each fusion setting change with a model's sizes, and which one to use.

The work behind launch_performance_study.sh: the order of things. Reading order: design (what is measured),
arguments (how it is asked for), runner (how it is measured) and results (what is kept of it), statistics and
summary (what it says), recommendation, regression and batch_size (what to do), plots and report (how it
looks), directory (where all that lies).
"""
import contextlib
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace

from fusion_lab.study.arguments import SCRIPT, own_part, parse
from fusion_lab.training import locks, start, torchrun

if __name__ == "__main__":  # before torch is imported, which takes seconds
    start.begin_tool(SCRIPT, own_part(sys.argv[1:]), lambda program: parse(sys.argv[1:], program))

import torch

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.measuring.tables import aligned
from fusion_lab.study.batch_size import device_memory_mb, find_batch_sizes
from fusion_lab.study.directory import (
    open_directory,
    read_config,
    require_same_study,
    write_grown_config,
    write_results,
)
from fusion_lab.study.recommendation import Accuracy, print_recommendation, recommend
from fusion_lab.study.regression import check, read_reference, spoken
from fusion_lab.study.results import Results
from fusion_lab.study.runner import VISIBLE_GPUS, Runner, duration, run_points, seconds_left
from fusion_lab.study.summary import gain_of, summarise
from fusion_lab.training.files import FAILED, NO_GPU, OK, UserError, counted, exit_code
from fusion_lab.training.flags import named_program
from fusion_lab.training.machine import choose_device, cpu_name
from fusion_lab.training.program import load_program


class Stopped(BaseException):
    """SIGINT or SIGTERM, which end a study at once: every finished run is on disk."""


def raise_stopped(number, _frame):
    raise Stopped(number)


@contextlib.contextmanager
def stopping_at_once():
    """Within, SIGINT and SIGTERM raise Stopped."""
    previous = {number: signal.signal(number, raise_stopped) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def dry_run(options, study):
    points, rows = study.points(), []
    if options.study_name and os.path.exists(os.path.join(options.study_name, "config.json")):
        require_same_study(options.study_name, study)
        results = Results(options.study_name, study.axes)
        results.load(mend=False)
        rows = results.rows
    done = {row.point for row in rows}
    todo = [point for point in points if point not in done]
    for point in todo:
        print(f"{point}: {shlex.join(study.flags(point.shape, point.setting))}")
    basis = "from the finished ones" if rows else "a guess: start-up and compilation, steps not counted"
    print(f"{counted(len(todo), 'point')} to run, {len(points) - len(todo)} finished; about "
          f"{duration(seconds_left(study, todo, rows, options.jobs))} ({basis})")
    return OK


def print_table(summary):
    rows = [("shape", "setting", "runs", "step ms", "p20", "p80", "speed-up", "MB", "saved")]
    for p in summary.points:
        head = (str(p.shape), p.setting, str(p.n))
        if not p.n:
            rows.append((*head, p.reason))
            continue
        gain = "" if p.speedup is None or p.setting == "baseline" else spoken(gain_of(p))
        memory = "n/a" if p.peak_memory_mb is None else f"{p.peak_memory_mb:.1f}"
        less = "" if p.memory_reduction_percent is None else f"{p.memory_reduction_percent:.1f}%"
        times = ("" if time is None else f"{time:.2f}" for time in (p.median_ms, p.p20_ms, p.p80_ms))
        rows.append((*head, *times, gain, memory, less))
    print("", *aligned(rows), sep="\n")


def first_gpus(count):
    """Names of the first GPUs that this process sees; none if one is enough. UserError if there are fewer."""
    if count == 1:
        return []
    there = torch.cuda.device_count()
    if count > there:
        raise UserError(f"--gpus {count}: there are {there}", NO_GPU)
    visible = os.environ.get(VISIBLE_GPUS) or os.environ.get("CUDA_VISIBLE_DEVICES")  # ROCm obeys both
    return (visible.split(",") if visible else [str(i) for i in range(there)])[:count]


def run_study(options, study, directory, gpus, argv):
    config = require_same_study(directory, study)
    reference = read_reference(options.check_against, study) if options.check_against else None
    results = Results(directory, study.axes)
    results.load()
    if options.retry_failed and (dropped := results.forget_failures()):
        print(f"{dropped} failed runs are run again")
    turns_taken = max((row.turn or 0 for row in results.rows), default=0)
    with Runner(study, directory, options.timeout, options.jobs, gpus, turns_taken) as runner:
        accuracy = Accuracy(runner) if options.recommend else None
        if study.num_runs > config.study.num_runs:
            write_grown_config(directory, study, argv)
        print(f"Study in {directory}; to continue it if interrupted: --study-name {shlex.quote(directory)}")
        if study.mode == "find-batch-size":
            return find_batch_sizes(runner, results, options.memory_limit_mb, options.target_memory_usage,
                                    options.optimize)
        run_points(runner, results, study.points())
        summary = conclude(options, study, directory, results, accuracy)
    if not any(point.n for point in summary.points):
        raise UserError(f"no point could be measured: {summary.points[0].reason}", FAILED)
    if reference:
        return check(summary, reference, options.min_speedup, options.max_regression)
    return OK


def conclude(options, study, directory, results, accuracy=None):
    """Write and print what the rows say; returns the Summary. What can fail or take long comes after a first
    version is on disk."""
    config = read_config(directory, study.vocabulary)
    summary = summarise(config.study, results.rows)
    write_results(directory, summary, config, plots=not (options.no_plots or accuracy))
    print_table(summary)
    if accuracy:
        summary = recommend(summary, accuracy, options.memory_limit_mb)
        print_recommendation(summary.recommendation)
        write_results(directory, summary, config, plots=not options.no_plots)
    print(f"\nReport: {os.path.join(directory, 'report.html')}")
    return summary


def report_only(options, study):
    """Summary and report of whatever runs a study has, on any machine."""
    directory = os.path.abspath(options.study_name)
    results = Results(directory, study.axes)
    if not os.path.exists(results.path):
        raise UserError(f"--study-name {options.study_name}: holds no results")
    if read_config(directory, study.vocabulary).study.mode != "study":
        raise UserError(f"--study-name {options.study_name}: is a --find-batch-size, not a study")
    results.load(mend=False)
    conclude(options, study, directory, results)
    return OK


def on_this_machine(options, study):
    """The study with what it depends on beside its options. Raises UserError where it cannot run here."""
    if options.device not in ("auto", "cpu"):
        choose_device(options.device)
    if options.find_batch_size and not (options.memory_limit_mb or device_memory_mb(options.device)):
        raise UserError("argument --find-batch-size: without a GPU needs --memory-limit-mb")
    return replace(study, torch_version=torch.__version__, host_cpu=cpu_name())


def run_command(argv):
    options, study = parse(argv, named_program(own_part(argv), load_program()))
    study = on_this_machine(options, study)
    if options.dry_run:
        return dry_run(options, study)
    if not options.no_plots and study.mode == "study":
        try:
            require_matplotlib()
        except UserError as error:
            raise UserError(f"{error}, or add --no-plots", error.code) from None
    if options.report_only:
        return report_only(options, study)
    if options.check_against:
        read_reference(options.check_against, study)
    gpus = first_gpus(options.gpus)
    directory = open_directory(options, study, argv)
    try:
        return run_study(options, study, directory, gpus, argv)
    finally:
        shutil.rmtree(locks.present(os.path.join(directory, "running")), ignore_errors=True)


def run(argv):
    """Do what a command line asks; returns the exit code. Raises UserError."""
    torchrun.require_alone(SCRIPT)
    try:
        with stopping_at_once():
            return run_command(argv)
    except Stopped as stopped:
        raise UserError("interrupted; results so far are kept, the same --study-name continues",
                        128 + stopped.args[0]) from None


def main(argv=None):
    return exit_code(run, sys.argv[1:] if argv is None else argv, SCRIPT)


if __name__ == "__main__":
    sys.exit(main())
