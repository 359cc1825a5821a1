"""What a performance study measures, and the command line of launch_performance_study.sh that asks for it."""
import itertools
import random
import textwrap
from dataclasses import dataclass, fields

from fusion_lab import commands
from fusion_lab.measuring.variants import BASELINE, FUSED, GIVEN, ONLY, WITHOUT, make_variants, spelled
from fusion_lab.training import flags
from fusion_lab.training.errors import EXIT_CODES, UserError
from fusion_lab.training.flags import Parser, flag, whole_number

# What the user typed: the installed command, or this
SCRIPT = commands.TYPED.get("launch_performance_study.py", "./launch_performance_study.sh")
ABOUT = "How speed and memory of each variant change with a model's sizes."
EPILOG = """Everything after -- goes to {program} for every point, --learning-rate for instance.

variants: those of --compare-fusion; given: the switches after --; X in only-X, without-X and X+Y is one of
{switches}

examples:
  {script} --batch-sizes "2 4" --ablation --study-name ablation
  {script} --variants "fused ultra" --amp-dtype bfloat16 -- --num-blocks 8

{exit_codes}.
The same command with its --study-name continues a study, repeats failed points, or reports again.
"""
# What a study sets itself, beside its axes and the switches
OWN = {"--num-steps", "--use-amp", "--amp-dtype", "--device", "--program", "--profile-dir", "--variants",
       "--check-flags"}


@dataclass(frozen=True)
class Study:
    """All that a study's results depend on.

    A shape is a size for each axis, {"batch_size": 2, "seq_len": 32, ...}. A point is a shape in a run: one
    --compare-fusion, in a process of its own.
    """
    program: str    # its name in files
    axes: dict      # {"seq_len": "S", ...}
    sizes: dict     # {"seq_len": [32, 64], ...}
    variants: list  # by name, the baseline first
    num_runs: int
    num_steps: int
    device: str
    amp_dtype: str | None
    trainer_flags: list

    def shapes(self):
        return [dict(zip(self.axes, sizes, strict=True)) for sizes in itertools.product(*self.sizes.values())]

    def points(self):
        """(run, shape) in the order in which they run: every shape once, in random order, then all again, so
        that a machine that drifts hits all alike."""
        shapes = self.shapes()
        return [(run, shape) for run in range(1, self.num_runs + 1)
                for shape in random.Random(run).sample(shapes, len(shapes))]

    def label(self, sizes, without=None):
        """"B 2 S 32 N 8" for a shape, or for another dict that has the axes as keys."""
        return " ".join(f"{letter} {sizes[axis]}" for axis, letter in self.axes.items() if axis != without)

    def flags(self, shape):
        """The trainer's flags for a point of this shape, but for its directory."""
        sizes = [word for axis, size in shape.items() for word in (flag(axis), str(size))]
        precision = ["--use-amp", "--amp-dtype", self.amp_dtype] if self.amp_dtype else []
        return [*sizes, "--num-steps", str(self.num_steps), "--device", self.device, *precision,
                *self.trainer_flags, "--compare-fusion", "--variants", " ".join(self.variants)]


def plural(axis):
    """"seq_len" -> "seq_lens", its flag; "num_seqs" is one already."""
    return axis if axis.endswith("s") else f"{axis}s"


def make_parser(program):
    names = textwrap.fill(", ".join(map(spelled, program.fusion_config.names())), 100, break_on_hyphens=False)
    epilog = EPILOG.format(program=program.name, switches=names, script=SCRIPT, exit_codes=EXIT_CODES)
    parser = Parser(prog=SCRIPT, description=ABOUT, usage=f"{SCRIPT} [options] [-- flags of {program.name}]",
                    epilog=epilog)
    add = parser.add_argument
    add("--program", metavar="FILE",
        help=f"a model's file, which ends in its PROGRAM (default: {program.name})")
    texts = {field.name: field.metadata["help"] for config in flags.config_classes(program)
             for field in fields(config)}
    for axis in program.axes:
        default = program.settings().get(axis)
        add(flag(plural(axis)), type=flags.whole_numbers, default=[default], metavar="LIST",
            help=f'{texts[axis]}; such as "2 4" (default: {default})'.replace("%", "%%"))
    add("--variants", default=f"{BASELINE} {FUSED}", metavar="LIST",
        help='see below; the baseline is always among them (default: "%(default)s")')
    add("--ablation", action="store_true",
        help="add each default fusion alone and each left out (default: off)")
    add("--all-combinations", action="store_true",
        help="add every combination of default fusions, too (default: off)")
    add("--num-runs", type=whole_number(), default=3, metavar="N",
        help="processes per shape; intervals need two, more make them narrower; may grow when a study is "
             "continued (default: %(default)s)")
    add("--num-steps", type=whole_number(), default=20, metavar="N",
        help="measured steps (default: %(default)s)")
    add("--device", default="auto", help="as for the trainer (default: %(default)s)")
    add("--amp-dtype", choices=("float16", "bfloat16"), help="mixed precision (default: float32)")
    add("--study-name", metavar="DIR", help="directory of the study; one that exists is continued "
        "(default: performance_study_<time>)")
    add("--timeout", type=whole_number(), default=900, metavar="SECONDS",
        help="for a point: all variants at a shape, once (default: %(default)s)")
    add("--no-plots", action="store_true", help="no picture, so without matplotlib (default: off)")
    add("--dry-run", action="store_true", help="list commands, run nothing (default: off)")
    return parser


def own_part(argv):
    """The part of a command line before the trainer's flags."""
    return argv[:argv.index("--")] if "--" in argv else argv


def parse(argv, program):
    """(options, Study). Ends the program on wrong use."""
    own, parser = own_part(argv), make_parser(program)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        parser.refuse_unknown(unknown, f"; flags of {program.name} go behind --")
    names, usual = [BASELINE, *options.variants.replace(",", " ").split()], program.fusion_config()
    switches = [spelled(name) for name in usual.names() if getattr(usual, name)]
    if options.ablation or options.all_combinations:
        names += [FUSED, *(f"{kind}{switch}" for kind in (ONLY, WITHOUT) for switch in switches)]
    if options.all_combinations:  # those of one, of all and of all but one are there
        names += ["+".join(some) for size in range(2, len(switches) - 1)
                  for some in itertools.combinations(switches, size)]
    study = Study(
        program=program.stem, axes=program.axes,
        sizes={axis: sorted({*getattr(options, plural(axis))}) for axis in program.axes},
        variants=list(dict.fromkeys(names)), trainer_flags=argv[len(own) + 1:],
        **{name: getattr(options, name) for name in ("num_runs", "num_steps", "device", "amp_dtype")})
    check_trainer_flags(parser, program, study)
    return options, study


def check_trainer_flags(parser, program, study):
    """Let the trainer judge its flags at every shape, and the comparison the variants, before the first point
    runs. Ends the program on wrong use."""
    own = {*OWN, *map(flag, program.axes)}
    for word in study.trainer_flags:
        switch = word.startswith(("--enable-", "--disable-")) and GIVEN not in study.variants
        if switch or word.partition("=")[0] in own:
            parser.error(f"flag {word} after --: the study sets it itself")
    theirs = flags.make_parser(program, prog=f"{SCRIPT}: flags after --")
    for shape in study.shapes():
        _, settings, _ = flags.parse(theirs, program, study.flags(shape))
    try:
        make_variants(settings, study.variants, on_gpu=True)
    except UserError as error:
        parser.error(f"argument {error}")
