"""The command line of run_pytorch_profiler.py. Needs no torch."""
from fusion_lab import commands
from fusion_lab.training import flags
from fusion_lab.training.options import flag

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
TIMED_STEPS = 10


def make_parser(program):
    """The program's flags and those of a session."""
    parser = flags.make_parser(program, ABOUT, SCRIPT)
    own = parser.add_argument_group("Profiler session")
    own.add_argument("--roofline", action="store_true", help="FLOPs, bytes and bounds by sub-layer, against "
                     "ceilings measured here (default: off)")
    own.add_argument("--compare-with", metavar="DIR", default=None,
                     help="an earlier session's directory, put beside this one (default: none)")
    sorts = parser.add_argument_group("Instead of one session").add_mutually_exclusive_group()
    sorts.add_argument("--baseline", action="store_true",
                       help="one session with nothing fused (default: off)")
    sorts.add_argument("--ablation", action="store_true", help="baseline, each fusion that is on by default "
                       "alone, each left out, all: compared as by --compare-fusion, then a session of each "
                       "(default: off)")
    sorts.add_argument("--compare-v1", action="store_true",
                       help="the same for the baseline and what is given (default: off)")
    return parser


def parse(argv, program):
    """(arguments, Settings) for a program. Wrong use ends it here. Where nobody says how many steps there
    are, they are as many as a session needs."""
    parser = make_parser(program)
    arguments, settings, _ = flags.parse(parser, program, argv)
    if not hasattr(arguments, "num_steps"):
        steps = TIMED_STEPS + 1 + 2 * settings.profiler.profile_steps
        settings = flags.parse(parser, program, [*argv, "--num-steps", str(steps)])[1]
    flags.refuse(parser, arguments, flags.training_only(program.training_config),
                 "belongs to training, not to a profiler session")
    for several in ("ablation", "compare_v1"):
        if getattr(arguments, several) and arguments.compare_with:
            parser.error(f"argument --compare-with: not with {flag(several)}")
    return arguments, settings
