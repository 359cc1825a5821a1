"""The command line of launch_performance_study.sh, and the Study that it asks for. Needs no torch."""
import argparse
import shlex
from dataclasses import fields

from fusion_lab.study import design
from fusion_lab.study.design import Study, Vocabulary
from fusion_lab.training.files import EXIT_CODES
from fusion_lab.training.flags import (
    MODES,
    Parser,
    config_classes,
    flag,
    read_settings,
    seconds,
    whole_number,
    whole_numbers,
)
from fusion_lab.training.flags import make_parser as trainer_parser
from fusion_lab.training.options import ProfilerConfig

SCRIPT = "launch_performance_study.sh"
ABOUT = "How speed and memory of each fusion setting change with a model's sizes."
EPILOG = """Everything after -- goes to {program} for every point, --learning-rate for instance.

settings: {named}, only-X, without-X, X+Y; baseline is no fusion, fused the defaults,
compiled the defaults with torch.compile, all whatever makes steps faster. X and Y are among {switches}

examples:
  ./{script} --batch-sizes "2 4" --num-runs 3
  ./{script} --ablation --study-name ablation
  ./{script} --settings "baseline fused all" -- --use-tf32

{exit_codes}.
An interrupted study goes on with the same command and its --study-name; failed points run again then.
"""
SET_BY_THE_STUDY = {"num_steps", "warmup_steps", "log_every", "use_amp", "amp_dtype", "device", "program",
                    "compare_with_v1", "fusion_preset", "enable_all_profiling",
                    *(field.name for field in fields(ProfilerConfig)),
                    *(name[2:].replace("-", "_") for name in MODES)}


def sizes(text):
    return sorted(set(whole_numbers(text)))


def setting_list(vocabulary):
    """For argparse: "baseline fused" -> names of settings."""
    def convert(text):
        try:
            names = [vocabulary.name(vocabulary.parse(word)) for word in text.replace(",", " ").split()]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not names:
            raise argparse.ArgumentTypeError(f'{text!r}: must be settings, such as "baseline fused"')
        return names
    return convert


def switch_list(vocabulary):
    """For argparse: "flash-attention torch-compile" -> names of switches."""
    def convert(text):
        words = list(dict.fromkeys(text.replace(",", " ").split()))
        unknown = [word for word in words if word not in vocabulary.switches]
        if unknown or not words:
            wrong = unknown[0] if unknown else text
            raise argparse.ArgumentTypeError(f"{wrong!r}: must be among {', '.join(vocabulary.switches)}")
        return words
    return convert


def quoted(numbers):
    return f'"{" ".join(map(str, numbers))}"'


def make_parser(vocabulary):
    program = vocabulary.program
    epilog = EPILOG.format(program=program.name, named=", ".join(vocabulary.named),
                           switches=", ".join(vocabulary.switches), script=SCRIPT, exit_codes=EXIT_CODES)
    parser = Parser(prog=SCRIPT, description=ABOUT, epilog=epilog,
                    usage=f"./{SCRIPT} [options] [-- flags of {program.name}]")
    add_what(parser.add_argument_group("What is measured").add_argument, vocabulary)
    add_how(parser.add_argument_group("How").add_argument)
    return parser


def add_what(add, vocabulary):
    add("--program", metavar="FILE", help="a model's file, which ends in its PROGRAM (default: "
        f"{vocabulary.program.name})")
    texts = {field.name: field.metadata["help"] for config in config_classes(vocabulary.program)
             for field in fields(config)}
    for axis in vocabulary.axes:
        text = f"{texts[axis.field]} (default: {quoted(axis.default)})".replace("%", "%%")
        add(flag(axis.plural), type=sizes, default=list(axis.default), metavar="LIST", help=text)
    add("--num-runs", type=whole_number(), default=3, metavar="N",
        help="processes per point; intervals need two, more make them narrower; may grow when a study is "
             "continued (default: %(default)s)")
    add("--settings", type=setting_list(vocabulary), default=["baseline", "fused"], metavar="LIST",
        help='see below (default: "baseline fused")')
    add("--no-baseline", action="store_true", help="leave the baseline out (default: off)")
    add("--ablation", action="store_true",
        help="add each fusion alone, each left out, all and none (default: off)")
    add("--all-combinations", action="store_true", help="add every combination of switches (default: off)")
    add("--switches", type=switch_list(vocabulary), metavar="LIST",
        help="what --ablation and --all-combinations combine (default: those of all that change something "
             "here)")
    add("--num-steps", type=whole_number(), default=20, metavar="N",
        help="measured steps (default: %(default)s)")
    add("--warmup-steps", type=whole_number(0), default=5, metavar="N",
        help="steps before them (default: %(default)s)")
    add("--device", default="auto", help="as for the trainer (default: %(default)s)")
    add("--amp-dtype", choices=("float16", "bfloat16"),
        help="mixed precision in this type (default: float32)")


def add_how(add):
    add("--study-name", metavar="DIR", help="directory of the study; one that exists is continued "
        "(default: performance_study_<time>)")
    add("--seed", type=whole_number(0), default=42, help="of the order of points (default: %(default)s)")
    add("--timeout", type=seconds, default=900.0, metavar="SECONDS",
        help="per point (default: %(default)g)")
    add("--report-only", action="store_true",
        help="run nothing: summary and report of the runs that --study-name holds (default: off)")
    add("--no-plots", action="store_true",
        help="a report without plots, so without matplotlib (default: off)")
    add("--dry-run", action="store_true", help="list points and an estimate, run nothing (default: off)")


def combined_switches(options, vocabulary, use_amp):
    """Of --switches, or those of all; where no GPU is there, without those that change nothing on a CPU, even
    under torch.compile."""
    if options.switches:
        return options.switches
    switches = [name for name in vocabulary.switches if name in vocabulary.everything]
    if not (options.ablation or options.all_combinations) or has_gpu(options.device):
        return switches
    program, off = vocabulary.program, vocabulary.program.fusion_config.preset(False)
    compiled = dict.fromkeys(off.names(), False) | dict(enable_torch_compile=True, use_amp=use_amp)
    return [name for name in switches
            if not program.settings(**{**compiled, vocabulary.switches[name]: True}).idle(on_gpu=False)]


def has_gpu(device):
    if device == "auto":
        import torch
        return torch.cuda.is_available()
    return device != "cpu"


def choose_settings(options, vocabulary):
    wanted = [vocabulary.parse(name) for name in options.settings]
    if options.ablation:
        wanted += design.ablation(options.switches)
    if options.all_combinations:
        wanted += design.combinations(options.switches)
    names = list(dict.fromkeys(vocabulary.name(on) for on in wanted))
    return [name for name in names if not (options.no_baseline and name == "baseline")]


def own_part(argv):
    """What of a command line stands before the trainer's flags."""
    return argv[:argv.index("--")] if "--" in argv else argv


def parse(argv, program):
    """(options, Study) for a program, of which its CommandLine is enough. Ends the program on wrong use."""
    own, vocabulary = own_part(argv), Vocabulary(program)
    parser = make_parser(vocabulary)
    options, unknown = parser.parse_known_args(own)
    options.switches = combined_switches(options, vocabulary, bool(options.amp_dtype) or "--use-amp" in argv)
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}; flags of {vocabulary.program.name} go "
                     "behind --")
    settings = choose_settings(options, vocabulary)
    if not settings:
        parser.error("argument --no-baseline: no setting is left, so there are zero points")
    try:
        study = study_of(options, vocabulary, settings, argv[len(own) + 1:])
    except ValueError as error:
        refuse_value(parser, error)
    if options.report_only and not options.study_name:
        parser.error("argument --report-only: needs --study-name")
    check_trainer_flags(parser, study)
    return options, study


def study_of(options, vocabulary, settings, trainer_flags):
    """The Study that options ask for. Raises ValueError."""
    return Study(
        vocabulary=vocabulary, sizes=tuple(tuple(getattr(options, axis.plural)) for axis in vocabulary.axes),
        settings=tuple(settings), switches=tuple(options.switches), num_runs=options.num_runs,
        num_steps=options.num_steps, warmup_steps=options.warmup_steps, device=options.device,
        amp_dtype=options.amp_dtype, trainer_flags=tuple(trainer_flags), seed=options.seed)


def refuse_value(parser, error):
    """End the program with a ValueError of the form "name = value: what is wrong"."""
    name, _, rest = str(error).partition(" = ")
    parser.error(f"argument {flag(name)}: {rest}")


def check_trainer_flags(parser, study):
    """Let the trainer's own parser and configs judge every point before the first one runs."""
    program = study.vocabulary.program
    own = {*SET_BY_THE_STUDY, *program.axes, *study.vocabulary.switches.values(),
           *(f.name for f in fields(program.training_config)
             if f.metadata["training_only"] or f.metadata["mode"])}
    theirs = trainer_parser(program, prog=f"{SCRIPT}: flags after --")
    plain, given = vars(theirs.parse_args([])), vars(theirs.parse_args(study.trainer_flags))
    for name, value in given.items():
        if name in own and (name not in plain or plain[name] != value):
            parser.error(f"flag {flag(name)} after --: the study sets it itself")
    shapes = study.shapes()
    for shape, setting in [*((shape, study.settings[0]) for shape in shapes),
                           *((shapes[0], setting) for setting in study.settings)]:
        try:
            read_settings(program, theirs.parse_args(study.flags(shape, setting)))
        except ValueError as error:
            refuse_value(parser, error)
