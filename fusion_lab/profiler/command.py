"""run_pytorch_profiler.py: a session of PyTorch's profiler, or an ablation; its command line."""
from fusion_lab.training import errors

errors.begin(__name__, "torch", "numpy", "tqdm")

import os
import sys
import time

from fusion_lab import commands
from fusion_lab.measuring.analysis import ANALYSIS
from fusion_lab.measuring.variants import GIVEN, with_fusion
from fusion_lab.profiler.report import read_analysis
from fusion_lab.profiler.session import SUMMARY, ablation, ablation_names, run_session
from fusion_lab.training import flags, reporting, torchrun
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.files import finite
from fusion_lab.training.machine import choose_device, require_memory
from fusion_lab.training.options import flag
from fusion_lab.training.program import load_program

SCRIPT = commands.name("run_pytorch_profiler.py")
ABOUT = """One PyTorch profiler session: where time and memory go, by sub-layer, forward and backward.

    ./run_pytorch_profiler.sh                     # trace, report, plots
    ./run_pytorch_profiler.sh --roofline          # bounds of each sub-layer too
    ./run_pytorch_profiler.sh --compare-with DIR  # an earlier session beside it
    ./run_pytorch_profiler.sh --ablation          # each fusion alone, left out

It is a training run of 21 steps, or of --num-steps: the last --profile-steps of them are traced, those
before are timed, on a CPU by sub-layer. Takes the flags of tiny_openfold_v2.py, or of the
program that --program names, but its modes and the files that only training reads or writes. Results go to
--profile-dir: a trace, fusion_analysis.json, comprehensive_profiling_report.md and plots. Where the output is
no terminal, its last line is the result as JSON.
"""
EXTRA_TIMED_STEPS = 10  # timed beside as many as are traced


def make_parser(program):
    """The program's flags and those of a session."""
    parser = flags.make_parser(program, ABOUT, SCRIPT)
    own = parser.add_argument_group("Profiler session")
    own.add_argument("--roofline", action="store_true", help="FLOPs, bytes and bounds by sub-layer, against "
                     "ceilings measured here (default: off)")
    own.add_argument("--compare-with", metavar="DIR", default=None,
                     help="an earlier session's directory, put beside this one; training has "
                          "--compare-with-v1 (default: none)")
    sorts = parser.add_argument_group("Instead of one session").add_mutually_exclusive_group()
    sorts.add_argument("--baseline", action="store_true",
                       help="one session with nothing fused (default: off)")
    sorts.add_argument("--ablation", action="store_true", help="baseline, each fusion that is on by default "
                       "alone, each left out, all, all compiled: compared as by --compare-fusion, then a "
                       "session of each (default: off)")
    sorts.add_argument("--compare-v1", action="store_true",
                       help="the same for the baseline, V1, and what is given; both are run (default: off)")
    return parser


def parse(argv, program):
    """(arguments, Settings) for a program. Wrong use ends it here. Without --num-steps there are as
    many steps as a session needs."""
    parser = make_parser(program)
    arguments, settings, _ = flags.parse(parser, program, argv)
    if not hasattr(arguments, "num_steps"):
        # One more starts the profiler, and recorders.Trace traces at most half of the others: hence twice
        steps = EXTRA_TIMED_STEPS + 1 + 2 * settings.profiler.profile_steps
        settings = flags.parse(parser, program, [*argv, "--num-steps", str(steps)])[1]
    flags.refuse(parser, arguments, flags.training_only(program.training_config),
                 "belongs to training, not to a profiler session")
    for several in ("ablation", "compare_v1"):
        if getattr(arguments, several) and arguments.compare_with:
            parser.error(f"argument --compare-with: not with {flag(several)}")
    return arguments, settings


HEADLINES = ("mode", "findings", "step", "folders")
STEP = ("untraced_ms", "p20_ms", "p80_ms", "gpu_busy_ms")  # of a session's step


def earlier_session(arguments, profiler):
    """(name, analysis) of the session that --compare-with names, or None."""
    if not arguments.compare_with:
        return None
    name, analysis = arguments.compare_with, read_analysis(arguments.compare_with)
    if os.path.realpath(name) == os.path.realpath(profiler.profile_dir):
        name = f"the earlier session in {name}"  # which is about to be moved aside
    return name, analysis


def sessions(program, settings, arguments, train):
    """The session or sessions that are asked for; returns the content and the path of their main file. train:
    as of run_session()."""
    earlier = earlier_session(arguments, settings.profiler)
    require_memory(program, choose_device(settings.training.device), settings)  # before anything is moved
    directory = RunDirectory(program, settings)
    directory.named = "profile_dir" in vars(arguments)  # also if it is the default's name
    if arguments.ablation and not directory.named:
        directory.path += f"_ablation_{time.strftime('%Y%m%d_%H%M%S')}"
    directory = directory.claim().path
    options = dict(train=train, roofline=arguments.roofline)
    if arguments.ablation or arguments.compare_v1:
        names = ablation_names(program) if arguments.ablation else [GIVEN]  # beside the baseline
        rounds = getattr(arguments, "num_steps", None)
        result = ablation(program, settings, directory, names, rounds, **options)
        return result, os.path.join(directory, f"{SUMMARY}.json")
    result = run_session(program, settings, directory, **options, earlier=earlier)
    return result, os.path.join(directory, ANALYSIS)


def run(argv=None):
    """Parse the command line and do what it asks; returns the exit code. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    default = load_program()
    train = sys.modules[default.trainer.__module__].train  # the only run, beside the only Trainer
    program = flags.named_program(argv, default)
    arguments, settings = parse(argv, program)
    torchrun.require_alone(SCRIPT)
    if arguments.baseline:
        settings = with_fusion(settings, program.fusion_config.baseline())
    result, path = sessions(program, settings, arguments, train)
    headline = finite({key: result[key] for key in HEADLINES if key in result})
    if "step" in headline:
        headline["step"] = {key: headline["step"][key] for key in STEP}
    if "variants" in result:
        headline["variants"] = [dict(name=row["name"], speedup=row["speedup"])
                                for row in result["variants"] if row["measured"]]
    if not (reporting.for_people(settings) and result["mode"] == "pytorch_profiler"):  # ends in its findings
        reporting.print_result(headline, path, settings)
    return 0


if __name__ == "__main__":
    sys.exit(errors.exit_code(run, None, SCRIPT))
