#!/usr/bin/env python3
"""One PyTorch profiler session: where time and memory go, by sub-layer of the model, forward and backward.

    python run_pytorch_profiler.py                              # trace, report, plots
    python run_pytorch_profiler.py --roofline --seq-lens "32 64 128"
    python run_pytorch_profiler.py --compare-with DIR           # this session beside an earlier one
    python run_pytorch_profiler.py --predict 1 256 64           # least time and memory of another size
    ./run_pytorch_profiler.sh --ablation                        # every fusion alone and left out

Takes the flags of tiny_openfold_v2.py, or of the program that --program names, but its modes and the files
that only training reads or writes. Results go to --profile-dir: a trace, fusion_analysis.json,
comprehensive_profiling_report.md and plots. Where the output is no terminal, its last line is the result as
JSON.
"""
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import json
import os
import sys
import time

from fusion_lab.training.files import exit_code, require_packages

if __name__ == "__main__":  # one line, not a traceback, where one is missing
    require_packages("run_pytorch_profiler.py", "torch", "numpy", "tqdm")

from fusion_lab.measuring.attribution import ANALYSIS
from fusion_lab.measuring.predictions import predict_mode
from fusion_lab.measuring.sizes import other_axes
from fusion_lab.measuring.variants import with_fusion
from fusion_lab.profiler.report import read_analysis
from fusion_lab.profiler.session import run_session
from fusion_lab.profiler.several import SUMMARY, V1_COMPARISON, ablation, compare_v1
from fusion_lab.training import flags, reporting
from fusion_lab.training.files import finite, fresh_directory
from fusion_lab.training.machine import choose_device
from fusion_lab.training.options import flag
from tiny_openfold_v2 import PROGRAM


def name_of_lengths(program):
    """"seq_lens" for a program whose first axis beside the batch is seq_len; None if it has but the batch."""
    axes = other_axes(program)
    return f"{axes[0]}s" if axes else None


def make_parser(program):
    """The program's flags and those of a session."""
    parser = flags.make_parser(program, __doc__, "run_pytorch_profiler.py")
    own = parser.add_argument_group("Profiler session")
    own.add_argument("--profile-steps", type=flags.whole_number(), default=5, metavar="N",
                     help="steps timed, and then traced (default: 5)")
    if lengths := name_of_lengths(program):
        own.add_argument(flag(lengths), type=flags.whole_numbers, metavar='"N N ..."', default=None,
                         help="peak and saved memory for these lengths, fused and plain (default: None)")
    own.add_argument("--roofline", action="store_true", help="FLOPs, bytes and bounds by sub-layer, against "
                     "ceilings measured here (default: off)")
    own.add_argument("--compare-with", metavar="DIR", default=None,
                     help="an earlier session's directory, put beside this one (default: None)")
    own.add_argument("--force", action="store_true",
                     help="write into a --profile-dir that is not empty (default: off)")
    sorts = parser.add_argument_group("Instead of one session").add_mutually_exclusive_group()
    sorts.add_argument("--baseline", action="store_true",
                       help="one session with nothing fused (default: off)")
    sorts.add_argument("--ablation", action="store_true", help="baseline, each fusion that is on by default "
                       "alone, each left out, all: --num-steps interleaved steps, then a session of each "
                       "(default: off)")
    sorts.add_argument("--compare-v1", action="store_true",
                       help="a session of the baseline and one as given, compared (default: off)")
    predictions = parser.add_argument_group("Predictions, instead of a session")
    predictions.add_argument("--predict", type=flags.whole_number(), nargs=len(program.axes), default=None,
                             metavar=tuple(program.axes.values()),
                             help="least step time and peak memory of another size (default: None)")
    predictions.add_argument("--check-prediction", action="store_true", help="predictions against "
                             "measurement for the given size and some round it (default: off)")
    return parser


def results_directory(arguments, profiler):
    """Where this run writes; made, and emptied of earlier results by moving them aside."""
    named = "profile_dir" in vars(arguments)
    path = profiler.profile_dir
    if arguments.ablation and not named:
        path = f"{path.rstrip('/')}_ablation_{time.strftime('%Y%m%d_%H%M%S')}"
    fresh_directory(path, named, arguments.force)
    return path


RESULT_FILES = dict(pytorch_profiler=ANALYSIS, ablation=f"{SUMMARY}.json", compare_v1=V1_COMPARISON)
HEADLINES = ("mode", "findings", "step", "step_ms", "folders")


def refuse_unused(parser, program, arguments):
    """End the program if a flag would have no effect beside another."""
    of_sessions = ("ablation", "compare_v1", "compare_with", "roofline", name_of_lengths(program), "force",
                   "profile_dir")
    useless = dict(predict=of_sessions, check_prediction=of_sessions, ablation=("compare_with",),
                   compare_v1=("compare_with",))
    for one, others in useless.items():
        for other in others:
            if getattr(arguments, one) and other and getattr(arguments, other, None):
                parser.error(f"argument {flag(other)}: not with {flag(one)}")


def earlier_session(arguments, profiler):
    """(name, analysis) of the session that --compare-with names, or None."""
    if not arguments.compare_with:
        return None
    name, analysis = arguments.compare_with, read_analysis(arguments.compare_with)
    if os.path.realpath(name) == os.path.realpath(profiler.profile_dir):
        name = f"the earlier session in {name}"  # which is about to be moved aside
    return name, analysis


def run(argv=None):
    """Parse the command line and do what it asks; returns the exit code. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    program = flags.named_program(argv, PROGRAM)
    parser = make_parser(program)
    arguments, settings, mode = flags.parse(parser, program, argv)
    if mode:
        parser.error(f"argument {mode}: belongs to {program.name}")
    flags.needs_training(program, parser, arguments, "a profiler session")
    refuse_unused(parser, program, arguments)
    if arguments.predict:
        judge_sizes(parser, program, settings, arguments.predict)
    if arguments.baseline:
        settings = with_fusion(settings, program.fusion_config.preset(False))
    earlier = earlier_session(arguments, settings.profiler)
    choose_device(settings.training.device)
    if arguments.predict or arguments.check_prediction:
        result = predict_mode(program, settings, arguments.predict, arguments.check_prediction)
    else:
        directory = results_directory(arguments, settings.profiler)
        lengths = vars(arguments).get(name_of_lengths(program)) or ()
        options = dict(steps=arguments.profile_steps, lengths=lengths, roofline=arguments.roofline)
        if arguments.ablation:
            result = ablation(program, settings, directory, **options)
        elif arguments.compare_v1:
            result = compare_v1(program, settings, directory, **options)
        else:
            result = run_session(program, settings, directory, **options, earlier=earlier).as_dict()
    if arguments.predict or arguments.check_prediction:
        print(json.dumps(finite(result), allow_nan=False))  # it has no file
    else:
        path = os.path.join(directory, RESULT_FILES[result["mode"]])
        headline = finite({key: result[key] for key in HEADLINES if key in result})
        reporting.print_result(headline, path, settings)
    return 0


def judge_sizes(parser, program, settings, sizes):
    """End the program if --predict asks for sizes that the program refuses."""
    try:
        settings.having(**dict(zip(program.axes, sizes, strict=True)))
    except ValueError as error:
        parser.error(f"argument --predict: {error}")


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "run_pytorch_profiler.py"))
