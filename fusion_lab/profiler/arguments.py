"""The command line of run_pytorch_profiler.py. Needs no torch."""
from fusion_lab.measuring.bounds.sizes import other_axes
from fusion_lab.training import flags
from fusion_lab.training.options import flag

SCRIPT = "run_pytorch_profiler.py"
ABOUT = """One PyTorch profiler session: where time and memory go, by sub-layer, forward and backward.

    ./run_pytorch_profiler.sh                     # trace, report, plots
    ./run_pytorch_profiler.sh --roofline --seq-lens "32 64 128"
    ./run_pytorch_profiler.sh --compare-with DIR  # an earlier session beside it
    ./run_pytorch_profiler.sh --predict 1 256 64  # least time of another size
    ./run_pytorch_profiler.sh --ablation          # each fusion alone, left out

Takes the flags of tiny_openfold_v2.py, or of the program that --program names, but its modes and the files
that only training reads or writes. Results go to --profile-dir: a trace, fusion_analysis.json,
comprehensive_profiling_report.md and plots. Where the output is no terminal, its last line is the result as
JSON.
"""


def name_of_lengths(program):
    """"seq_lens" for a program whose first axis beside the batch is seq_len; None if it has but the batch."""
    axes = other_axes(program)
    return f"{axes[0]}s" if axes else None


def make_parser(program):
    """The program's flags and those of a session."""
    parser = flags.make_parser(program, ABOUT, SCRIPT)
    own = parser.add_argument_group("Profiler session")
    own.add_argument("--profile-steps", type=flags.whole_number(), default=5, metavar="N",
                     help="steps timed, and then traced (default: 5)")
    if lengths := name_of_lengths(program):
        own.add_argument(flag(lengths), type=flags.whole_numbers, metavar='"N N ..."', default=None,
                         help="peak and saved memory for these lengths, fused and plain (default: none)")
    own.add_argument("--roofline", action="store_true", help="FLOPs, bytes and bounds by sub-layer, against "
                     "ceilings measured here (default: off)")
    own.add_argument("--compare-with", metavar="DIR", default=None,
                     help="an earlier session's directory, put beside this one (default: none)")
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
                             help="least step time and peak memory of another size (default: none)")
    predictions.add_argument("--check-prediction", action="store_true", help="predictions beside "
                             "measurements, for the given size and some near it (default: off)")
    predictions.add_argument("--gpus", type=flags.whole_number(2), metavar="N", default=None, help="with "
                             "--predict: a step on so many GPUs, each with such a batch (default: one)")
    predictions.add_argument("--link", metavar="FILE", default=None, help="result "
                             "of benchmarks/measure_scaling.py on two GPUs, for --gpus (default: none)")
    return parser


def refuse_unused(parser, program, arguments):
    """End the program if a flag would have no effect beside another."""
    of_sessions = ("ablation", "compare_v1", "compare_with", "roofline", name_of_lengths(program), "force")
    useless = dict(predict=of_sessions, check_prediction=of_sessions, ablation=("compare_with",),
                   compare_v1=("compare_with",))
    for one, others in useless.items():
        for other in others:
            if getattr(arguments, one) and other and getattr(arguments, other, None):
                parser.error(f"argument {flag(other)}: not with {flag(one)}")


def judge_sizes(parser, program, settings, sizes):
    """End the program if --predict asks for sizes that the program refuses."""
    try:
        settings.having(**dict(zip(program.axes, sizes, strict=True)))
    except ValueError as error:
        parser.error(f"argument --predict: {error}")


def parse(argv, program):
    """(arguments, Settings) for a program, of which its CommandLine is enough. Wrong use ends it here."""
    parser = make_parser(program)
    arguments, settings, mode = flags.parse(parser, program, argv)
    if mode or arguments.check_flags:
        parser.error(f"argument {mode or flags.QUESTION}: belongs to {program.name}")
    flags.needs_training(program, parser, arguments, "a profiler session")
    refuse_unused(parser, program, arguments)
    for one, other in (("gpus", "predict"), ("gpus", "link"), ("link", "gpus")):
        if getattr(arguments, one) and not getattr(arguments, other):
            parser.error(f"argument {flag(one)}: needs {flag(other)}")
    if arguments.predict:
        judge_sizes(parser, program, settings, arguments.predict)
    return arguments, settings
