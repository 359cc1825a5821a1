"""The command line of launch_performance_study.sh, and the Study that it asks for."""
import itertools
import os
import textwrap
from dataclasses import fields

from fusion_lab import commands
from fusion_lab.measuring.variants import BASELINE, FUSED, GIVEN, ONLY, WITHOUT, make_variants, spelled
from fusion_lab.study.design import Study, plural
from fusion_lab.training import flags
from fusion_lab.training.files import EXIT_CODES, UserError
from fusion_lab.training.flags import Parser, flag, whole_number
from fusion_lab.training.program import ROOT

# What the user typed: the installed command, or this
SCRIPT = commands.TYPED.get("launch_performance_study.py", "./launch_performance_study.sh")
ABOUT = "How speed and memory of each fusion setting change with a model's sizes."
EPILOG = """Everything after -- goes to {program} for every point, --learning-rate for instance.

settings: baseline (no fusion), fused (the defaults), compiled (with torch.compile), everything
(--enable-all-fusion), ultra (--enable-ultra), given (the switches after --), only-X, without-X (of the
defaults), X+Y, fused+X; X and Y are among
{switches}

examples:
  {script} --batch-sizes "2 4" --num-runs 3
  {script} --ablation --study-name ablation
  {script} --settings "fused ultra" --amp-dtype bfloat16 -- --num-blocks 8

{exit_codes}.
An interrupted study goes on with the same command and its --study-name; failed points run again then.
"""
# What a study sets itself, beside its axes and the switches
OWN = {"--num-steps", "--use-amp", "--amp-dtype", "--device", "--program", "--profile-dir",
       "--variants", "--check-flags"}


def make_parser(program):
    names = ", ".join(map(spelled, program.fusion_config.names()))
    switches = textwrap.fill(names, 100, break_on_hyphens=False)
    epilog = EPILOG.format(program=program.name, switches=switches, script=SCRIPT, exit_codes=EXIT_CODES)
    parser = Parser(prog=SCRIPT, description=ABOUT, epilog=epilog,
                    usage=f"{SCRIPT} [options] [-- flags of {program.name}]")
    add = parser.add_argument_group("What is measured").add_argument
    add("--program", metavar="FILE",
        help=f"a model's file, which ends in its PROGRAM (default: {program.name})")
    texts = {field.name: field.metadata["help"] for config in flags.config_classes(program)
             for field in fields(config)}
    for axis in program.axes:
        default = program.settings().get(axis)
        add(flag(plural(axis)), type=flags.whole_numbers, default=[default], metavar="LIST",
            help=f'{texts[axis]}; such as "2 4" (default: {default})'.replace("%", "%%"))
    add("--settings", default=f"{BASELINE} {FUSED}", metavar="LIST",
        help='see below; the baseline is always among them (default: "%(default)s")')
    add("--ablation", action="store_true",
        help="add each default fusion alone and each left out (default: off)")
    add("--all-combinations", action="store_true",
        help="add every combination of default fusions (default: off)")
    add("--num-runs", type=whole_number(), default=3, metavar="N",
        help="processes per shape; intervals need two, more make them narrower; may grow when a study is "
             "continued (default: %(default)s)")
    add("--num-steps", type=whole_number(), default=20, metavar="N",
        help="measured steps (default: %(default)s)")
    add("--device", default="auto", help="as for the trainer (default: %(default)s)")
    add("--amp-dtype", choices=("float16", "bfloat16"),
        help="mixed precision in this type (default: float32)")
    add = parser.add_argument_group("How").add_argument
    add("--study-name", metavar="DIR", help="directory of the study; one that exists is continued "
        "(default: performance_study_<time>)")
    add("--timeout", type=whole_number(), default=900, metavar="SECONDS",
        help="for a point: all settings at a shape, once (default: %(default)s)")
    add("--report-only", action="store_true",
        help="run nothing: summary and report of the runs that --study-name holds (default: off)")
    add("--no-plots", action="store_true",
        help="a report without plots, so without matplotlib (default: off)")
    add("--dry-run", action="store_true", help="list commands, run nothing (default: off)")
    return parser


def own_part(argv):
    """What of a command line stands before the trainer's flags."""
    return argv[:argv.index("--")] if "--" in argv else argv


def parse(argv, program):
    """(options, Study). Ends the program on wrong use."""
    own, parser = own_part(argv), make_parser(program)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        parser.refuse_unknown(unknown, f"; flags of {program.name} go behind --")
    if options.report_only and not options.study_name:
        parser.error("argument --report-only: needs --study-name")
    path = os.path.relpath(os.path.realpath(program.file), os.path.realpath(ROOT))
    study = Study(
        program=os.path.realpath(program.file) if path.startswith(os.pardir) else path, axes=program.axes,
        sizes={axis: sorted({*getattr(options, plural(axis))}) for axis in program.axes},
        settings=wanted(options, program.settings().fusion), trainer_flags=argv[len(own) + 1:],
        **{name: getattr(options, name) for name in ("num_runs", "num_steps", "device", "amp_dtype")})
    check_trainer_flags(parser, program, study)
    return options, study


def wanted(options, defaults):
    """Names of the settings that are measured, the baseline first."""
    switches = [spelled(name) for name in defaults.names() if getattr(defaults, name)]
    names = [BASELINE, *options.settings.replace(",", " ").split()]
    if options.ablation or options.all_combinations:
        names += [FUSED, *(f"{kind}{switch}" for kind in (ONLY, WITHOUT) for switch in switches)]
    if options.all_combinations:  # those of one, of all and of all but one are there
        names += ["+".join(some) for size in range(2, len(switches) - 1)
                  for some in itertools.combinations(switches, size)]
    return list(dict.fromkeys(names))


def check_trainer_flags(parser, program, study):
    """Let the trainer judge its flags at every shape, and the comparison the settings, before the first point
    runs. Ends the program on wrong use."""
    own = {*OWN, *map(flag, program.axes)}
    for word in study.trainer_flags:
        switch = word.startswith(("--enable-", "--disable-")) and GIVEN not in study.settings
        if switch or word.partition("=")[0] in own:
            parser.error(f"flag {word} after --: the study sets it itself")
    theirs = flags.make_parser(program, prog=f"{SCRIPT}: flags after --")
    for shape in study.shapes():
        _, settings, _ = flags.parse(theirs, program, study.flags(shape))
    try:
        make_variants(settings, study.settings, on_gpu=True)
    except UserError as error:
        parser.error(str(error).replace("--variants", "argument --settings"))
