"""All profilers, one after the other, and one page about them; the command line behind all four scripts."""
import argparse
import os
import pathlib
import shlex
import sys
import time

from fusion_lab.measuring.roctx import INHERITED
from fusion_lab.measuring.tables import code, escaped, markdown
from fusion_lab.rocm import kernel_summary, session
from fusion_lab.rocm.failures import MEANING
from fusion_lab.rocm.preflight import worst_code
from fusion_lab.rocm.profiled import ask, chosen_program, known
from fusion_lab.rocm.rocprof_compute import RocprofCompute
from fusion_lab.rocm.rocprof_sys import RocprofSys
from fusion_lab.rocm.rocprofv3 import Rocprofv3
from fusion_lab.rocm.session import Command, Outcome, say
from fusion_lab.rocm.wrapper import parse
from fusion_lab.training import files, torchrun
from fusion_lab.training.files import FAILED, MISSING, NO_GPU, OK, USAGE, UserError
from fusion_lab.training.program import ROOT

SCRIPT = "run_all_profilers.sh"
WRAPPERS = {"rocprofv3": Rocprofv3, "rocprof-sys": RocprofSys, "rocprof-compute": RocprofCompute}
NAMES = ("pytorch", *WRAPPERS)
QUICK = ["--batch-size", "2", "--num-steps", "3", "--warmup-steps", "1"]
QUICK_SIZES = [("--num-blocks", "2"), ("--num-seqs", "8"), ("--seq-len", "16")]  # of programs that have them
ABOUT = f"""{', '.join(NAMES)} one after the other, each in its own directory, and
PROFILING_SUMMARY.md with the result, duration and main figures of each."""
NOTE = """Step times are the trainer's own while the profiler was watching, those of pytorch without it: they
compare the profilers' overhead, not models. Launches are the trainer's count, kernel times were recorded."""


def profiler_list(text):
    names = text.split(",")
    if set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {', '.join(NAMES)}")
    return names


def add_options(parser):
    parser.add_argument("--quick", action="store_true", help="small and short: "
                        f"{' '.join([*QUICK, *map(' '.join, QUICK_SIZES)])}, and no roofline")
    parser.add_argument("--only", metavar="LIST", type=profiler_list, help="run these; each must be possible")
    parser.add_argument("--skip", metavar="LIST", type=profiler_list, default=[], help="leave these out")


def make_wrapper(name, options, directory, own_flags):
    """The wrapper of a profiler. Raises UserError where the program refuses its flags."""
    own = ["-o", str(directory), "--timeout", str(options.timeout)]
    own += ["--program", options.program] * bool(options.program) + ["--preflight"] * options.preflight
    own += ["--dry-run"] * options.dry_run + ["--skip-preflight"] * options.skip_preflight
    own += ["--no-roof"] * (options.quick and name == "rocprof-compute")
    return WRAPPERS[name].from_arguments([*own, "--", *own_flags], QUICK_SIZES if options.quick else None)


def run_pytorch(options, directory, own_flags):
    """PyTorch's own profiler: a session of run_pytorch_profiler.sh, which ends with the same exit codes."""
    program = ["--program", options.program] if options.program else []
    sizes = known(ask(chosen_program(options.program), [])[0], QUICK_SIZES) if options.quick else []
    script = os.environ.get("PYTORCH_PROFILER_SCRIPT") or os.path.join(ROOT, "run_pytorch_profiler.sh")
    command = Command([script, "--profile-dir", str(directory), *program, *sizes, *own_flags],
                      log="pytorch.log", unset_env=(INHERITED,))
    if options.dry_run:
        say(*command.script())
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
        passed = result_word(outcome) == "PASS"
        figures = kernel_summary.main_figures(outcome.directory) if passed else [None] * 3
        cells = ["" if value is None else f"{value:.4g}" if isinstance(value, float) else escaped(value)
                 for value in figures]
        where = escaped(os.path.relpath(outcome.directory, directory)) if outcome.directory else ""
        rows.append([name, result_word(outcome), f"{outcome.seconds:.1f} s", *cells, where,
                     escaped(outcome.reason)])
    about = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {code(command_line, longest=None)}"
    return "\n".join(["# Profiling summary", "", about, "", *markdown(rows), "", NOTE]) + "\n"


def run_all(arguments):
    """Exit code of the whole. Raises UserError where nothing was run."""
    torchrun.require_alone(SCRIPT)
    options, own_flags = parse(arguments, SCRIPT, ABOUT, "complete_profiling_<time>", 14400, add_options)
    own_flags = (QUICK if options.quick else []) + own_flags
    names = [name for name in options.only or NAMES if name not in options.skip]
    if not names:
        raise UserError("--only, --skip: nothing is left to run")
    directory = pathlib.Path(options.output_dir or f"complete_profiling_{time.strftime('%Y%m%d_%H%M%S')}")
    directory = directory.absolute()
    places = {name: directory / name.replace("-", "_") for name in names}
    # First all wrappers, each of which has the program judge its flags, then the first run.
    wrappers = {name: make_wrapper(name, options, place, own_flags) for name, place in places.items()
                if name in WRAPPERS}
    if options.preflight and not wrappers:
        raise UserError("--preflight: PyTorch's profiler needs none; --only must name one of AMD's")
    if options.preflight:
        return worst_code([session.profile(wrapper).code for wrapper in wrappers.values()])
    if not options.dry_run:
        files.claim(str(directory), bool(options.output_dir), options.force)
    outcomes = {name: Outcome(None, "not started: interrupted") for name in names}
    for name, place in places.items():
        say("", f"# {name}")
        begin = time.monotonic()
        try:
            outcomes[name] = session.profile(wrappers[name]) if name in wrappers else \
                run_pytorch(options, place, own_flags)
        except (UserError, OSError) as error:  # the others run all the same
            outcomes[name] = Outcome(getattr(error, "code", FAILED), str(error), "", time.monotonic() - begin)
            say(f"# {result_word(outcomes[name])}: {error}")
        if outcomes[name].code > 128:
            break
    if options.dry_run:
        return next((outcome.code for outcome in outcomes.values() if outcome.code), OK)
    return conclude(directory, outcomes, arguments, options.only)


def conclude(directory, outcomes, arguments, only):
    """Write the page; the exit code is not zero if a profiler failed, if one asked for by name could not run,
    or if none could."""
    command_line = shlex.join([f"./{SCRIPT}", *arguments])
    page = summary_page(directory, outcomes, command_line)
    files.write_text(directory / "PROFILING_SUMMARY.md", page)
    say("", page, directory / "PROFILING_SUMMARY.md")
    highest = max(outcome.code or OK for outcome in outcomes.values())
    words = {result_word(outcome) for outcome in outcomes.values()}
    if highest > 128:
        return highest
    if "FAIL" in words or only and "SKIP" in words:
        return FAILED
    return OK if "PASS" in words else MISSING


def main(arguments):
    """profile_rocm.py NAME [options]: one profiler, or all of them."""
    if not arguments or arguments[0] not in (*WRAPPERS, "all"):
        print(f"usage: profile_rocm.py {{{','.join(WRAPPERS)},all}} [options]", file=sys.stderr)
        return USAGE
    name, *rest = arguments
    return files.exit_code(run_all, rest, SCRIPT) if name == "all" else session.main(WRAPPERS[name], rest)
