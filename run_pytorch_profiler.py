#!/usr/bin/env python3
"""One PyTorch profiler session: where time and memory go, by Evoformer sub-layer, forward and backward.

    python run_pytorch_profiler.py                              # trace, report, plots
    python run_pytorch_profiler.py --roofline --seq-lens "32 64 128"
    python run_pytorch_profiler.py --compare-with DIR           # this session beside an earlier one
    python run_pytorch_profiler.py --predict 1 256 64           # least time and memory of another size
    ./run_pytorch_profiler.sh --ablation                        # every fusion alone and left out

Takes the flags of tiny_openfold_v2.py but its modes and the files that only training reads or writes. Results
go to --profile-dir: a trace, fusion_analysis.json, comprehensive_profiling_report.md and plots.
"""
import argparse
import json
import os
import sys
import time

from fusion_lab.measuring.predictions import predict_mode
from fusion_lab.profiler.report import read_analysis
from fusion_lab.profiler.session import ablation, compare_v1, finite, run_session
from fusion_lab.training import flags
from fusion_lab.training.files import exit_code, fresh_directory
from fusion_lab.training.machine import choose_device
from tiny_openfold_v2 import FusionConfig


def lengths(text):
    try:
        values = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers such as \"32 64 128\"")
    return values


def positive(text):
    value = flags.converter(int)(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 1")
    return value


def make_parser():
    parser = flags.make_parser(__doc__, "run_pytorch_profiler.py")
    own = parser.add_argument_group("Profiler session")
    own.add_argument("--profile-steps", type=positive, default=5, metavar="N",
                     help="steps timed, and then traced (default: 5)")
    own.add_argument("--seq-lens", type=lengths, metavar='"S S ..."', default=None,
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
    sorts.add_argument("--ablation", action="store_true", help="baseline, each fusion alone, each left out, "
                       "all: --num-steps interleaved steps, then a session of each (default: off)")
    sorts.add_argument("--compare-v1", action="store_true",
                       help="a session of the baseline and one as given, compared (default: off)")
    predictions = parser.add_argument_group("Predictions, instead of a session")
    predictions.add_argument("--predict", type=positive, nargs=3, metavar=("B", "S", "N"), default=None,
                             help="least step time and peak memory of another size (default: None)")
    predictions.add_argument("--check-prediction", action="store_true",
                             help="predictions against measurement for eight shapes (default: off)")
    return parser


def results_directory(options, profiler):
    """Where this run writes; made, and emptied of earlier results by moving them aside."""
    named = "profile_dir" in vars(options)
    path = profiler.profile_dir
    if options.ablation and not named:
        path = f"{path.rstrip('/')}_ablation_{time.strftime('%Y%m%d_%H%M%S')}"
    fresh_directory(path, named, options.force)
    return path


def refuse_unused(parser, options):
    """End the program if a flag would have no effect beside another."""
    of_sessions = ("ablation", "compare_v1", "compare_with", "roofline", "seq_lens", "force", "profile_dir")
    useless = dict(predict=of_sessions, check_prediction=of_sessions, ablation=("compare_with",),
                   compare_v1=("compare_with",))
    for one, others in useless.items():
        for other in others:
            if getattr(options, one) and getattr(options, other, None):
                parser.error(f"argument {flags.flag(other)}: not with {flags.flag(one)}")


def run(argv=None):
    parser = make_parser()
    options, configs, mode = flags.parse(parser, argv)
    config, training, fusion, profiler = configs
    if mode:
        parser.error(f"argument {mode}: belongs to tiny_openfold_v2.py")
    flags.needs_training(parser, options, "a profiler session")
    refuse_unused(parser, options)
    if options.baseline:
        configs = (config, training, FusionConfig.preset(False), profiler)
    compared = (options.compare_with, read_analysis(options.compare_with)) if options.compare_with else None
    if compared and os.path.realpath(compared[0]) == os.path.realpath(profiler.profile_dir):
        compared = (f"the earlier session in {compared[0]}", compared[1])  # which is about to be moved aside
    choose_device(training.device)
    if options.predict or options.check_prediction:
        result = predict_mode(configs, options)
    else:
        directory = results_directory(options, profiler)
        if options.ablation:
            result = ablation(configs, directory, options)
        elif options.compare_v1:
            result = compare_v1(configs, directory, options)
        else:
            result = run_session(configs, directory, options, compared)
    print(json.dumps(finite(result), allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "run_pytorch_profiler.py"))
