"""How speed and memory of each fusion setting change with a model's sizes.

The work behind launch_performance_study.sh: the order of things. Reading order: design (what is measured),
arguments (how it is asked for), run (how it is measured and what is kept of it), summary (what that says),
plots and page (how it looks).
"""
from fusion_lab.training import files

files.quiet(__name__, "torch", "numpy", "tqdm")

import os
import shlex
import sys

from fusion_lab.measuring.plotting import require_matplotlib, spared
from fusion_lab.measuring.tables import aligned, cell
from fusion_lab.measuring.variants import BASELINE
from fusion_lab.study.arguments import SCRIPT, own_part, parse
from fusion_lab.study.page import page
from fusion_lab.study.plots import draw
from fusion_lab.study.run import (
    open_directory,
    read_config,
    read_lines,
    require_same_study,
    run_points,
    time_left,
    unfinished,
)
from fusion_lab.study.summary import as_csv, findings, gain_of, summarise
from fusion_lab.training import torchrun
from fusion_lab.training.files import (
    FAILED,
    OK,
    StopRequest,
    UserError,
    counted,
    exit_code,
    write_json,
    write_text,
)
from fusion_lab.training.flags import named_program
from fusion_lab.training.machine import choose_device
from fusion_lab.training.program import load_program


def dry_run(program, options, study):
    lines, name = {}, options.study_name
    if name and os.path.exists(os.path.join(name, "config.json")):
        require_same_study(name, study)
        lines = read_lines(name, study)
    todo = unfinished(study, lines)
    for run, shape in todo:
        print(f"run {run}: {shlex.join([sys.executable, program.file, *study.flags(shape)])}")
    print(f"{counted(len(todo), 'point')} to run, {len(study.points()) - len(todo)} finished; "
          f"{time_left(len(todo), lines)}")


def run_study(program, options, study, argv):
    """Run what has yet to run, and report it. Raises UserError after a signal, and if every point failed."""
    directory, how = open_directory(options.study_name, study, [SCRIPT, *argv])
    lines = read_lines(directory, study)
    print(f"Study in {directory}; to continue it if interrupted: --study-name {shlex.quote(directory)}",
          flush=True)
    with StopRequest() as stop:
        run_points(program, study, directory, lines, options.timeout, stop)
        if lines:  # pictures take seconds, for which nobody waits who has pressed Ctrl-C
            summary = conclude(study, how, directory, lines, plots=not (options.no_plots or stop.signal))
    if stop.signal:
        raise UserError("interrupted; results so far are kept, the same --study-name continues",
                        128 + stop.signal)
    if not any(point["n"] for point in summary["points"]):
        raise UserError(f"no point could be measured: {summary['points'][0]['reason']}", FAILED)


def conclude(study, how, directory, lines, plots):
    """Write and print what the lines say; returns the summary. Whatever fails, the figures are there."""
    summary = summarise(study, lines)
    place = os.path.join(directory, "report.html")
    write_json(os.path.join(directory, "results_summary.json"), summary)
    write_text(os.path.join(directory, "results.csv"), as_csv(summary))
    write_text(place, page(study, summary, how, []))
    if plots:
        with spared("pictures in report.html"):
            write_text(place, page(study, summary, how, draw(study, summary)))
    print_table(study, summary)
    print("", *findings(study, summary), f"\nReport: {place}", sep="\n", flush=True)
    return summary


def print_table(study, summary):
    rows = [("shape", "setting", "runs", "step ms (runs)", "speed-up (95%)", "peak MB", "saved")]
    for p in summary["points"]:
        head = (study.label(p), p["setting"], str(p["n"]))
        if not p["n"]:
            rows.append((*head, p["reason"]))
            continue
        times, gain = p["run_medians_ms"].values(), gain_of(p) if p["setting"] != BASELINE else None
        spread = f" ({min(times):.2f} to {max(times):.2f})" if len(times) > 1 else ""
        rows.append((*head, f"{p['median_ms']:.2f}{spread}", str(gain or ""),
                     cell(p["peak_memory_mb"], ".1f") or "n/a",
                     cell(p["memory_reduction_percent"], ".1f", unit="%")))
    print("", *aligned(rows), sep="\n")


def run(argv):
    """Do what a command line asks; returns the exit code. Raises UserError."""
    torchrun.require_alone(SCRIPT)
    program = named_program(own_part(argv), load_program())
    options, study = parse(argv, program)
    if options.device not in ("auto", "cpu"):
        choose_device(options.device)
    if not (options.dry_run or options.no_plots):
        try:
            require_matplotlib()
        except UserError as error:
            raise UserError(f"{error}, or add --no-plots", error.code) from None
    if options.dry_run:
        dry_run(program, options, study)
    elif options.report_only:
        study, how = read_config(options.study_name)
        lines = read_lines(options.study_name, study)
        if not lines:
            raise UserError(f"--report-only: {options.study_name} has no finished point yet")
        conclude(study, how, options.study_name, lines, not options.no_plots)
    else:
        run_study(program, options, study, argv)
    return OK


def main(argv=None):
    return exit_code(run, sys.argv[1:] if argv is None else argv, SCRIPT)


if __name__ == "__main__":
    sys.exit(main())
