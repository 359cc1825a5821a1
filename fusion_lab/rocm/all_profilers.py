"""All profilers, one after the other, and one page about them; the command line behind all four scripts."""
import argparse
import os
import pathlib
import shlex
import sys
import time

from fusion_lab.measuring.tables import cell, code, escaped, markdown
from fusion_lab.rocm import kernel_summary, session
from fusion_lab.rocm.failures import MEANING
from fusion_lab.rocm.preflight import ask, known, worst_code
from fusion_lab.rocm.rocprof_compute import RocprofCompute
from fusion_lab.rocm.rocprof_sys import RocprofSys
from fusion_lab.rocm.rocprofv3 import Rocprofv3
from fusion_lab.rocm.session import Command, Outcome, say
from fusion_lab.rocm.wrapper import parse
from fusion_lab.training import errors, files
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import FAILED, MISSING, NO_GPU, OK, USAGE, UserError
from fusion_lab.training.program import ROOT

SCRIPT = "run_all_profilers.sh"
WRAPPERS = {"rocprofv3": Rocprofv3, "rocprof-sys": RocprofSys, "rocprof-compute": RocprofCompute}
PYTORCH = os.path.join(ROOT, "run_pytorch_profiler.sh")
NAMES = ("pytorch", *WRAPPERS)
SLOW = "rocprof-sys"  # which --quick leaves out
QUICK = ["--batch-size", "2", "--num-steps", "3", "--warmup-steps", "1"]
QUICK_SIZES = [("--num-blocks", "2"), ("--num-seqs", "8"), ("--seq-len", "16")]  # of programs that have them
ABOUT = f"""{', '.join(NAMES)} one after the other, each in its own directory, and
PROFILING_SUMMARY.md with the result, duration and main figures of each."""
NOTE = """Step times are the trainer's own while the profiler was watching, those of pytorch without it: they
compare the profilers' overhead, not models. Launches are the trainer's count, of operations on a CPU; kernel
times were recorded."""


def profiler_list(text):
    names = text.split(",")
    if set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {', '.join(NAMES)}")
    return names


def add_options(parser):
    parser.add_argument("--quick", action="store_true", help="small and short: "
                        f"{' '.join([*QUICK, *map(' '.join, QUICK_SIZES)])}, no rocprof-sys and no roofline")
    parser.add_argument("--only", metavar="LIST", type=profiler_list, help="run these; each must be possible")
    parser.add_argument("--skip", metavar="LIST", type=profiler_list, default=[], help="leave these out")


def run_one(name, options, directory, own_flags):
    """Outcome of one profiler. Raises UserError where it refuses to run."""
    if name not in WRAPPERS:
        return run_pytorch(options, directory, own_flags)
    own = ["-o", str(directory), "--timeout", str(options.timeout), "--program", options.program]
    own += ["--dry-run"] * options.dry_run + ["--preflight"] * options.preflight
    own += ["--skip-preflight"] * options.skip_preflight
    own += ["--no-roof"] * (options.quick and name == "rocprof-compute")
    return session.profile(WRAPPERS[name].from_arguments([*own, "--", *own_flags]))


def run_pytorch(options, directory, own_flags):
    """PyTorch's own profiler: a session of run_pytorch_profiler.sh, which ends with the same exit codes."""
    command = Command([PYTORCH, "--profile-dir", str(directory), "--program", options.program, *own_flags],
                      log="pytorch.log")
    if options.dry_run or options.preflight:
        say(*command.script() if options.dry_run else ["it needs no tool but torch"])
        return Outcome(OK)
    ended = session.run(command, directory.parent, options.timeout)
    reason = ended.reason or f"{MEANING.get(ended.code, 'it failed')}; see {command.log}" * (ended.code != OK)
    code = ended.code if ended.code in MEANING or ended.code > 128 else FAILED
    return Outcome(code, reason, str(directory), ended.seconds)


def result_word(outcome):
    return "SKIP" if outcome.code in (None, MISSING, NO_GPU) else "PASS" if outcome.code == OK else "FAIL"


def summary_page(directory, outcomes, command_line):
    """PROFILING_SUMMARY.md: what became of each profiler, and their main figures side by side."""
    rows = [["profiler", "result", "duration", "step ms", "launches per step", "kernel ms per step",
             "directory", "reason"]]
    for name, outcome in outcomes.items():
        figures = kernel_summary.main_figures(outcome.directory) if outcome.directory else []
        cells = map(cell, figures or [None] * 3, (".2f", ".1f", ".2f"))
        where = escaped(os.path.relpath(outcome.directory, directory)) if outcome.directory else ""
        rows.append([name, result_word(outcome), f"{outcome.seconds:.1f} s", *cells, where,
                     escaped(outcome.reason)])
    about = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {code(command_line, longest=None)}"
    return "\n".join(["# Profiling summary", "", about, "", *markdown(rows), "", NOTE]) + "\n"


def run_all(arguments):
    """Exit code of the whole. Raises UserError where nothing was run."""
    options, own_flags = parse(arguments, SCRIPT, ABOUT, "complete_profiling_<time>", 14400, add_options)
    usual = [name for name in NAMES if not (options.quick and name == SLOW)]
    names = [name for name in options.only or usual if name not in options.skip]
    if not names:
        raise UserError("--only, --skip: nothing is left to run")
    answer, _ = ask(options.program, own_flags)  # flags that it refuses end all of it here
    if options.quick:
        own_flags = [*QUICK, *known(answer, QUICK_SIZES), *own_flags]
    directory = pathlib.Path(options.output_dir or f"complete_profiling_{time.strftime('%Y%m%d_%H%M%S')}")
    directory, only_shown = directory.absolute(), options.dry_run or options.preflight
    if not only_shown:
        Directory(str(directory), bool(options.output_dir), options.force, "-o").claim()
    outcomes = {name: Outcome(None, "not started: interrupted") for name in names}
    for name in names:
        say("", f"# {name}")
        begin = time.monotonic()
        try:
            outcomes[name] = run_one(name, options, directory / name.replace("-", "_"), own_flags)
        except (UserError, OSError) as error:  # the others run all the same
            outcomes[name] = Outcome(getattr(error, "code", FAILED), str(error), "", time.monotonic() - begin)
            say(f"# {result_word(outcomes[name])}: {error}")
        if outcomes[name].code > 128:
            break
    if only_shown:
        return worst_code(outcome.code for outcome in outcomes.values())
    return conclude(directory, outcomes, arguments, options.only)


def conclude(directory, outcomes, arguments, only):
    """Write the page; the exit code is not zero if a profiler failed, if one asked for by name could not run,
    or if none could."""
    command_line = shlex.join([f"./{SCRIPT}", *arguments])
    page = summary_page(directory, outcomes, command_line)
    files.write_text(directory / "PROFILING_SUMMARY.md", page)
    say("", page, directory / "PROFILING_SUMMARY.md")
    codes = [outcome.code or OK for outcome in outcomes.values()]
    words = {result_word(outcome) for outcome in outcomes.values()}
    if max(codes) > 128:
        return max(codes)
    if "FAIL" in words:
        return FAILED
    return worst_code(codes) if only or "PASS" not in words else OK


def main(arguments):
    """profile_rocm.py NAME [options]: one profiler, or all of them."""
    if not arguments or arguments[0] not in (*WRAPPERS, "all"):
        print(f"usage: profile_rocm.py {{{','.join(WRAPPERS)},all}} [options]", file=sys.stderr)
        return USAGE
    name, *rest = arguments
    if name == "all":
        return errors.exit_code(run_all, rest, SCRIPT)
    wrapper = WRAPPERS[name]
    return errors.exit_code(lambda argv: session.profile(wrapper.from_arguments(argv)).code, rest,
                           wrapper.script)
