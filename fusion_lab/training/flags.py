"""The command line of a program, made of its configs' fields. Needs no torch."""
import argparse
import difflib
import importlib
import os
import re
import shlex
import sys
from dataclasses import asdict, fields
from functools import partial

from fusion_lab import __version__
from fusion_lab.training import errors, torchrun
from fusion_lab.training.errors import EXIT_CODES
from fusion_lab.training.options import ProfilerConfig, as_flag, flag
from fusion_lab.training.program import Program, Settings, load_program


def judge(name, **known):
    """A program's file calls this with its __name__, names and configs before it imports torch, which takes
    seconds. If the file is run, --help, --version and wrong flags end here."""
    if name != "__main__":
        return
    errors.begin(name)
    # OpenMP's threads spin while they wait for each other. On a busy machine a spinning thread keeps the one
    # it waits for from running. A tenth of GNU's usual number of turns costs nothing on an idle machine and
    # saves a third of the time on a busy one.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    program = Program(**known)
    argv = with_demo(sys.argv[1:], program)
    if code := errors.exit_code(partial(check_early, program), argv, program.name):
        sys.exit(code)


understood = []  # what judge() made of this process's command line


def asked(argv, program):
    """(Program, arguments, Settings, the mode's flag or None) that a command line asks for; None: that of
    this process, which judge() has parsed, unless its flags are another program's."""
    if argv is None and understood:
        return program, *understood
    argv = with_demo(sys.argv[1:] if argv is None else argv, program)
    program = named_program(argv, program)
    return program, *parse(make_parser(program), program, argv)


def check_early(program, argv):
    """Parse, and refuse what is wrong, torchrun's variables too."""
    if program_file(argv, program.name):
        return  # the flags are another program's, which needs torch to be known
    parser = make_parser(program)
    arguments, settings, mode = parse(parser, program, argv)
    understood[:] = arguments, settings, mode
    require_paths(parser, program, settings)
    if arguments.compare_with_v1 and not os.path.exists(arguments.compare_with_v1):
        parser.error(f"argument --compare-with-v1: {arguments.compare_with_v1}: no such file or directory")
    if arguments.variants is not None:
        from fusion_lab.measuring.variants import make_variants
        make_variants(settings, arguments.variants, on_gpu=False)  # for its errors
    torchrun.place()
    errors.require_packages(program.name, "torch", "numpy", "tqdm")
    if not arguments.check_flags and torchrun.first():
        print(f"{program.name}: loading PyTorch ...", flush=True,
              file=sys.stderr if sys.stderr.isatty() else sys.stdout)


def require_paths(parser, program, settings):
    """End the program if a flag names files to read of which none exists; later others are refused, too."""
    for f in fields(program.training_config):
        value = getattr(settings.training, f.name)
        paths = value if isinstance(value, list) else [value]
        if f.metadata["read"] and value is not None and not any(
                path == "-" or os.path.exists(path) or os.path.exists(path.rpartition(":")[0])  # FILE:CHAIN
                for path in paths):
            parser.error(f"argument {flag(f.name)}: {paths[0]}: no such file or directory")


class Parser(argparse.ArgumentParser):
    """Wrong use is one line and exit code 2; options in full only."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        if self.add_help:
            self.add_argument("--version", action="version", help="its version, and end",
                              version=f"{os.path.basename(self.prog)} of TinyOpenFold {__version__}")

    def parse_args(self, args=None, namespace=None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return arguments

    def refuse_unknown(self, words, hint=""):
        """End the program, with the flags that were meant, by their spelling."""
        from fusion_lab.training import hints
        known, near = [name for name in self._option_string_actions if name.startswith("--")], []
        for word in words:
            if word.startswith("-"):
                word = word.partition("=")[0].replace("_", "-")
                close = difflib.get_close_matches(word, known, len(known), 0.6)
                near += [name for name in close if name.startswith(word)] or \
                    difflib.get_close_matches(word, known, 1, 0.7)
        meant = f" (did you mean {', '.join(near)}?)" if near else ""
        self.error(f"unrecognized arguments: {shlex.join(words)}{meant}{hint}{hints.of(words)}")

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n" if torchrun.first() else None)


def whole_number(low=1):
    """For argparse: whole numbers from low on."""
    def convert(text):
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {low}")
        return int(text)
    return convert


def whole_numbers(text):
    """For argparse: "32 64" or "32,64" -> [32, 64]"""
    try:
        numbers = [whole_number()(word) for word in text.replace(",", " ").split()]
    except argparse.ArgumentTypeError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f'{text!r}: must be whole numbers of at least 1, such as "32 64"')
    return numbers


def regular_expression(text):
    """For argparse: text, if re can compile it."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no regular expression ({error})") from None
    return text


class OnOff(argparse.Action):
    """--enable-X and --disable-X of one field; the later one on the command line wins."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--disable"))


def add_config_flags(parser, config_class, paired=False):
    """One flag for every field, in a group for each class that adds some, switches that are on by default
    apart. A bool is a switch; with paired, an --enable-X/--disable-X pair, of which the later one wins. What
    is not given leaves no trace in the parsed arguments."""
    groups, classes = {}, [c for c in reversed(config_class.__mro__) if hasattr(c, "__dataclass_fields__")]
    for f in fields(config_class):
        if not f.metadata["takes"]:
            owner = next(c for c in classes if f.name in c.__dataclass_fields__)
            kind = "" if not paired else ", on by default" if f.default is True else ", off by default"
            title = re.split(r"\.(?:\s|$)", owner.__doc__)[0] + kind
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_flag(groups[title], f, paired)


def add_flag(group, f, paired=False):
    meta, words = f.metadata, {True: "on", False: "off", None: "none"}
    default = words[f.default] if f.default is None or meta["type"] is bool else f.default
    named = all(choice in meta["help"] for choice in meta["choices"] or ())
    text = meta["help"] + ("" if named else f": {', '.join(meta['choices'])}")
    text += "" if "default:" in text else f" (default: {default})"
    shared = dict(help=text.replace("%", "%%"), default=argparse.SUPPRESS)
    if meta["type"] is bool:
        both = [as_flag(f.name, on) for on in (True, False)]
        group.add_argument(*both[:1 + paired], action=OnOff, **shared)
        return
    metavar = meta["metavar"] or {int: "N", float: "X"}.get(meta["type"]) or f.name.split("_")[-1].upper()
    group.add_argument(*[meta["short"]] * bool(meta["short"]), flag(f.name), type=meta["type"],
                       choices=meta["choices"], metavar=metavar, nargs="+" if meta["several"] else None,
                       **shared)


LAB_MODES = {  # which every program has: flag: (what --help says, where the function is, see mode_function())
    "--validate-setup": ("quick check of the chosen fusions on this machine: numerics, five steps",
                         "fusion_lab.measuring.accuracy:validate_setup"),
    "--verify-accuracy": ("fused against baseline against float64: outputs and all gradients",
                          "fusion_lab.measuring.accuracy:verify_accuracy"),
    "--compare-fusion": ("measure the baseline, each fusion alone, all of them, and compiled ones",
                         "fusion_lab.measuring.comparison_table:compare_fusion"),
    "--retune": ("measure tile sizes of this project's Triton kernels, keep the fastest for this GPU",
                 "fusion_lab.measuring.retune:retune")}
QUESTION = "--check-flags"


def imported(place):
    """What stands at "module:function", where it is used."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def mode_function(program, arguments, mode):
    """The function (program, settings) -> exit code that does what the arguments ask for; None: training."""
    if arguments.check_flags:
        return partial(imported("fusion_lab.training.reporting:print_settings"), asked=mode)
    if mode is None:
        return None
    torchrun.require_alone(mode)
    function = LAB_MODES[mode][1] if mode in LAB_MODES else program.modes[mode]
    function = imported(function) if isinstance(function, str) else function
    # A comparison has rounds where training has steps; without --num-steps it has its own number of them
    given = dict(names=arguments.variants, rounds=getattr(arguments, "num_steps", None))
    return partial(function, **given) if mode == "--compare-fusion" else function


def make_parser(program, about=None, prog=None):
    """A program's command line, or that of a tool that takes the program's flags but not its modes: a tool
    passes about, its own text for --help."""
    summary, _, rest = (about or program.about or "").partition("\n")
    prog = prog or program.name
    parser = Parser(prog=prog, usage=f"{prog} [flags]", description=summary, epilog=f"{rest}\n{EXIT_CODES}")
    for config_class in config_classes(program):
        add_config_flags(parser, config_class, paired=config_class is program.fusion_config)
    kind = program.fusion_config
    group = parser.add_argument_group("Presets; single flags override them, in any order")
    presets = group.add_mutually_exclusive_group()
    for name, switches, text in (
            ("--enable-all-fusion", kind.preset(),
             "everything that makes steps faster, torch.compile included"),
            ("--disable-all-fusion", kind.baseline(), "the baseline, V1: no fusion at all"),
            ("--enable-ultra", kind.ultra(), "all fusion and this project's Triton kernels, for a GPU")):
        presets.add_argument(name, dest="fusion_preset", action="store_const", const=switches,
                             help=f"{text} (default: off)")
    if program.demo:
        sizes = " ".join(f"{flag(name)} {value}" for name, value in program.demo.items())
        group.add_argument(DEMO, action="store_true", help="a first run, which learns within two minutes "
                             f"on a CPU: {sizes}; this is what runs without any flag (default: off)")
    group.add_argument("--enable-all-profiling", action="store_true",
                         help="records all that the profiler's flags do (default: off)")
    if about is None:
        add_modes(parser, program)
    parser.add_argument("--program", metavar="FILE", default=None,
                        help=f"another model's file, which ends in its PROGRAM (default: {program.name})")
    return parser


def add_modes(parser, program):
    modes = parser.add_argument_group("Modes, instead of training")
    one_of = modes.add_mutually_exclusive_group()
    for name, (text, _) in LAB_MODES.items():
        one_of.add_argument(name, action="store_true", help=f"{text} (default: off)")
    for f in own_modes(program):
        add_flag(one_of, f)
    modes.add_argument(QUESTION, action="store_true", help="check the other flags, print what they come to "
                       "as one line of JSON, and end (default: off)")
    compared = parser.add_argument_group("With --compare-fusion, and after training")
    compared.add_argument("--variants", metavar='"NAME ..."', help="rows of the table: baseline, fused, "
                          "compiled, everything, ultra, given, only-X, without-X, X+Y, fused+X (default: "
                          "baseline, fused, only-X of each default fusion, compiled; on a GPU presets)")
    compared.add_argument("--compare-with-v1", metavar="FILE", help="after training, speed-up and memory "
                          "against an earlier summary; sessions have --compare-with (default: none)")
    compared.add_argument("--min-speedup", type=float, metavar="X", help="with --compare-with-v1: exit code "
                          "1 unless the speed-up's 95%% interval lies above X (default: none)")


def own_modes(program):
    """Fields that are modes of this program alone."""
    return [f for f in fields(program.training_config) if f.metadata["takes"]]


DEMO = "--demo"


def with_demo(argv, program):
    """The command line as it is meant: none at all is the demonstration of a program that has one."""
    return list(argv) or [DEMO] * bool(program.demo)


def program_file(argv, name):
    """The FILE of --program FILE in argv, or None; name is that of the program with this command line."""
    finder = Parser(prog=name, add_help=False)
    finder.add_argument("--program")
    return finder.parse_known_args(argv)[0].program


def named_program(argv, default):
    """The Program that --program FILE in argv names, or default. Raises UserError."""
    path = program_file(argv, default.name)
    return load_program(path) if path else default


def config_classes(program):
    return program.model_config, program.training_config, program.fusion_config, ProfilerConfig


def read_settings(program, arguments):
    """Parsed arguments -> Settings; ValueError on impossible values."""
    given = vars(arguments)
    if given.get("demo"):
        given = {**program.demo, **given}
    if given["enable_all_profiling"]:
        given = {**{f.name: True for f in fields(ProfilerConfig) if f.name.startswith("enable_")}, **given}
    given = {**asdict(given["fusion_preset"] or program.fusion_config()), **given}
    return Settings(*(cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
                      for cls in config_classes(program)))


def command_line(program, settings):
    """The reverse: flags that make these settings, but for --num-steps and where results go."""
    plain, words = program.settings(), []
    for part in ("model", "training", "fusion"):
        config, usual = getattr(settings, part), getattr(plain, part)
        for f in fields(config):
            value = getattr(config, f.name)
            if value == getattr(usual, f.name) or f.name == "num_steps":
                continue
            words.append(as_flag(f.name, value))
    return words


def refuse(parser, arguments, names, why):
    """End the program if one of these flags is given."""
    plain = vars(parser.parse_args([]))
    for name in names:
        value = getattr(arguments, name, None)
        if value != plain.get(name):
            action = next(a for a in parser._actions if a.dest == name and a.const in (None, value))
            parser.error(f"argument {action.option_strings[-1 if value is False else 0]}: {why}")


def training_only(*classes):
    """Fields that only training has, such as a file."""
    return [f.name for config_class in classes for f in fields(config_class) if f.metadata["training_only"]]


def parse(parser, program, argv):
    """(arguments, Settings, the mode's flag or None); wrong use is one line and exit code 2."""
    arguments, unknown = parser.parse_known_args(argv)
    own = {flag(f.name): f.metadata["takes"] for f in own_modes(program)}
    if unknown:
        theirs = make_parser(program)._option_string_actions
        if modes := [word for word in unknown if word.partition("=")[0] in theirs]:  # which a tool lacks
            parser.error(f"argument {modes[0]}: belongs to {program.name}, not to {parser.prog}")
        hint = f"; a file belongs to {' or '.join(own)}" if own and not unknown[0].startswith("-") else ""
        parser.refuse_unknown(unknown, hint)
    given = vars(arguments)
    mode = next((name for name in (*LAB_MODES, *own) if given.get(name[2:].replace("-", "_"))), None)
    if mode in own:
        takes = (mode[2:].replace("-", "_"), *own[mode], "program", "check_flags")
        refuse(parser, arguments, [name for name in given if name not in takes],
               f"not with {mode}, which takes {', '.join(map(flag, own[mode]))}")
    elif mode:
        files_and_records = training_only(program.training_config, ProfilerConfig)
        refuse(parser, arguments, [*files_and_records, "compare_with_v1", "min_speedup"],
               f"belongs to training, not to {mode}")
    if given.get("min_speedup") is not None and not given["compare_with_v1"]:
        parser.error("argument --min-speedup: needs --compare-with-v1")
    if given.get("variants") is not None and mode != "--compare-fusion":
        parser.error("argument --variants: needs --compare-fusion")
    try:
        return arguments, read_settings(program, arguments), mode
    except ValueError as error:
        name, _, rest = str(error).partition(" = ")  # as Checked.refuse() writes it
        parser.error(f"argument {flag(name)}: {rest}")
