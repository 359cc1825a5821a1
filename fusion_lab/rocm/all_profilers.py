"""All profilers, one after the other, and one page about them: the work behind run_all_profilers.sh.

A profiler that cannot run here is a SKIP with its reason, a failure does not stop the rest.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import sys
import time

from fusion_lab.rocm import kernel_summary, session
from fusion_lab.rocm.machine import FAILED, MEANING, MISSING, NO_GPU, OK, USAGE, Stop
from fusion_lab.rocm.session import ROOT, Command, Outcome, Parser
from fusion_lab.rocm.wrappers import WRAPPERS

SCRIPT = "run_all_profilers.sh"
NAMES = ("pytorch", *WRAPPERS)
QUICK = ["--num-blocks", "2", "--num-seqs", "8", "--seq-len", "16", "--batch-size", "2", "--num-steps", "3",
         "--warmup-steps", "1"]
ABOUT = f"""{', '.join(NAMES)} one after the other, each in its own directory, and
PROFILING_SUMMARY.md with the result, duration and main figures of each."""
EXAMPLES = """examples:
  ./run_all_profilers.sh --quick                    a small model, 3 steps, no roofline: minutes
  ./run_all_profilers.sh --only pytorch,rocprofv3 --batch-size 8
  ./run_all_profilers.sh --skip rocprof-compute -o before
"""


def profiler_list(text):
    short = {"sys": "rocprof-sys", "compute": "rocprof-compute"}
    names = [short.get(name.strip(), name.strip()) for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {', '.join(NAMES)}")
    return names


def parse(arguments):
    parser = Parser(SCRIPT, ABOUT, EXAMPLES, 14400, "complete_profiling_<time>", [])
    parser.add_argument("--quick", action="store_true",
                        help=f"small and short: {' '.join(QUICK)}, and no roofline")
    parser.add_argument("--only", metavar="LIST", type=profiler_list, help="run these; each must be possible")
    parser.add_argument("--skip", metavar="LIST", type=profiler_list, default=[], help="leave these out")
    options, trainer_flags = parser.split(arguments)
    options.names = [name for name in options.only or NAMES if name not in options.skip]
    if not options.names:
        raise Stop(USAGE, "--only, --skip: nothing is left to run")
    trainer_flags = (QUICK if options.quick else []) + trainer_flags
    if options.names != ["pytorch"]:  # which has more flags than the trainer, and judges them itself
        session.judge_flags(SCRIPT, trainer_flags)
    return options, trainer_flags


def run_pytorch(options, directory, trainer_flags):
    script = os.environ.get("PYTORCH_PROFILER_SCRIPT") or str(ROOT / "run_pytorch_profiler.sh")
    if not os.path.exists(script):
        raise Stop(MISSING, f"{os.path.basename(script)} not found")
    command = Command([script, "--profile-dir", str(directory), *trainer_flags], log="pytorch.log")
    if options.dry_run:
        session.say(*command.script())
        return Outcome(OK, "dry run")
    ended = session.run(command, directory.parent, options.timeout)
    if not (ended.code or ended.interrupted or ended.timed_out):
        return Outcome(OK, "", str(directory), ended.seconds)
    log = pathlib.Path(directory.parent, command.log).read_text(errors="replace")
    code, reason = session.failure(ended, log)
    if ended.code in MEANING and not (ended.interrupted or ended.timed_out):
        code, reason = ended.code, f"{MEANING[ended.code]}; see {command.log}"
    return Outcome(code, reason, str(directory), ended.seconds)


def run_one(name, options, directory, trainer_flags):
    """Outcome of one profiler, whatever happens in it."""
    start = time.monotonic()
    try:
        if name == "pytorch":
            return run_pytorch(options, directory, trainer_flags)
        own = ["-o", str(directory), "--timeout", str(options.timeout)]
        own += ["--dry-run"] * options.dry_run + ["--skip-preflight"] * options.skip_preflight
        own += ["--no-roof"] * (options.quick and name == "rocprof-compute")
        return session.profile(WRAPPERS[name].from_arguments([*own, "--", *trainer_flags]))
    except Stop as stop:
        return Outcome(stop.code, stop.reason, "", time.monotonic() - start)
    except OSError as error:
        return Outcome(FAILED, str(error), str(directory), time.monotonic() - start)


def verdict(outcome):
    if outcome is None or outcome.code in (MISSING, NO_GPU):
        return "SKIP"
    return "PASS" if outcome.code == OK else "FAIL"


def table(header, rows):
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def show(value):
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_page(directory, outcomes, command_line):
    """PROFILING_SUMMARY.md: what became of each profiler, and their main figures side by side."""
    lines = ["# Profiling summary", "", f"{time.strftime('%Y-%m-%d %H:%M:%S')}, `{command_line}`", ""]
    rows = []
    for name, outcome in outcomes.items():
        seen = outcome or Outcome(OK, "not started: interrupted")
        where = os.path.relpath(seen.directory, directory) if seen.directory else ""
        rows.append([name, verdict(outcome), f"{seen.seconds:.1f} s", where, seen.reason])
    lines += table(["profiler", "result", "duration", "directory", "reason"], rows)
    figures = {name: kernel_summary.main_figures(outcome.directory) for name, outcome in outcomes.items()
               if verdict(outcome) == "PASS"}
    if figures:
        lines += ["", "Main figures. Step times are the trainer's own while the profiler was watching: they "
                  "compare the profilers' overhead, not models.", ""]
        lines += table(["figure", *figures], [[figure, *(show(values[figure]) for values in figures.values())]
                                              for figure in next(iter(figures.values()))])
    return "\n".join(lines) + "\n"


def run_all(options, trainer_flags, arguments):
    directory = pathlib.Path(os.path.abspath(
        options.output_dir or f"complete_profiling_{time.strftime('%Y%m%d_%H%M%S')}"))
    if not options.dry_run:
        if session.check_directory(directory, options):
            session.set_aside(directory)
        directory.mkdir(parents=True, exist_ok=True)
    outcomes = dict.fromkeys(options.names)
    for name in options.names:
        session.say("", f"# {name}")
        outcomes[name] = run_one(name, options, directory / name.replace("-", "_"), trainer_flags)
        if outcomes[name].code > 128:
            break
        if verdict(outcomes[name]) == "SKIP":
            session.say(f"# skipped: {outcomes[name].reason}")
    if options.dry_run:
        return OK
    command_line = shlex.join([f"./{SCRIPT}", *arguments])
    page = summary_page(directory, outcomes, command_line)
    session.write_atomically(directory / "PROFILING_SUMMARY.md", page)
    session.write_atomically(directory / "manifest.json", json.dumps(
        {"script": SCRIPT, "command": command_line,
         "profilers": {name: {"result": verdict(outcome), **(dataclasses.asdict(outcome) if outcome else {})}
                       for name, outcome in outcomes.items()}}, indent=1) + "\n")
    session.say("", page, directory / "PROFILING_SUMMARY.md")
    return exit_code(options, outcomes)


def exit_code(options, outcomes):
    """Not zero if a profiler failed, if one asked for by name could not run, or if none could."""
    for outcome in outcomes.values():
        if outcome and outcome.code > 128:
            return outcome.code
    results = {verdict(outcome) for outcome in outcomes.values()}
    if "FAIL" in results or options.only and "SKIP" in results:
        return FAILED
    return OK if "PASS" in results else MISSING


def main(arguments):
    try:
        return run_all(*parse(arguments), arguments)
    except Stop as stop:
        print(f"{SCRIPT}: " + "\n".join(stop.lines), file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
