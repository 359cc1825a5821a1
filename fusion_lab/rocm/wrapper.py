"""What run_rocprofv3.sh, run_rocprof_sys.sh and run_rocprof_compute.sh have in common."""
import os
import shlex

from fusion_lab.measuring.roctx import GRAPHS
from fusion_lab.rocm import failures, preflight
from fusion_lab.training import errors, flags, torchrun
from fusion_lab.training.errors import FAILED, PROGRAM_FAILED
from fusion_lab.training.options import GRAPHED
from fusion_lab.training.program import DEFAULT_PROGRAM
from fusion_lab.training.words import printable

# Ranges, start and stop for the profiler outside, and no torch.profiler inside: two cannot share a GPU. Tools
# run the program up to a dozen times; each run sets aside what the one before it wrote.
OUTER = ["--enable-rocm-profiling", "--force"]
NO_GRAPHS = ("--disable-cuda-graphs",)  # ROCm 7.0 to 7.14 lose kernels of graphs that are replayed
EPILOG = f"""
Everything that is not an option of this script goes to the profiled program untouched; `--` forces that.
Without --enable-cuda-graphs it runs without graphs, whose kernels ROCm 7.0 to 7.14 do not all record.
Examples, and what each tool answers: docs/amd.md.

environment:
  PYTHON     interpreter that has torch for ROCm (default: python3)
  ROCM_PATH  ROCm tree, searched after PATH (default: /opt/rocm)

{errors.EXIT_CODES}
"""
SWITCHES = {"--force": "use a directory that is not empty: what is in it is set aside",
            "--dry-run": "print the exact commands, run nothing",
            "--preflight": "say whether it can work here, and what to do where it cannot; run nothing",
            "--skip-preflight": "start without checking the machine"}


def parse(arguments, script, about, default_dir, timeout, add_options):
    """(options of a script, flags of the program): what the script does not know is the program's."""
    default = os.path.basename(DEFAULT_PROGRAM)
    torchrun.require_alone(script)
    parser = flags.Parser(prog=script, description=about, epilog=EPILOG,
                          usage=f"./{script} [options] [--] [flags of {default}]")
    parser.add_argument("--program", metavar="FILE", default=DEFAULT_PROGRAM,
                        help=f"the program to profile (default: {default} next to this script)")
    parser.add_argument("-o", "--output-dir", metavar="DIR", help="fresh directory for the results "
                        f"(default: ./{default_dir}, where earlier results are set aside)")
    parser.add_argument("--timeout", metavar="SECONDS", type=flags.whole_number(0), default=timeout,
                        help="limit for each command, 0 for none (default: %(default)s)")
    for name, meaning in SWITCHES.items():
        parser.add_argument(name, action="store_true", help=meaning)
    add_options(parser)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = parser.parse_known_args(arguments[:cut])
    return options, unknown + arguments[cut + 1:]


class Wrapper:
    """A subclass adds options, command lines and the verdict on what was written."""
    script = executable = package = default_dir = ""
    timeout = 3600
    workload = []                  # flags of the program before the user's, besides OUTER
    sizes = []                     # the same, (flag, value), for programs that have these flags
    help_arguments = ("--help",)   # what makes the tool list its options
    continues = False              # does it read what an earlier session left, and run no program?
    selected = False               # are the measured steps alone recorded?
    counted = "start-up and evaluation in the count"  # else, with those of the warm-up

    def __init__(self, options, own_flags):
        self.options, self.own_flags, self.notes = options, own_flags, []
        self.directory = self.records = os.path.abspath(options.output_dir or self.default_dir)
        self.program = os.path.abspath(options.program)
        self.tool = preflight.find_tool(self.executable, *self.help_arguments)
        self.answer, self.trouble = {}, ""
        if not self.continues:
            self.answer, self.trouble = preflight.ask(self.program, self.flags_with(self.own_flags))
            self.notes += [f"flags were not judged: {self.trouble}"] * bool(self.trouble)

    @classmethod
    def add_options(cls, parser):
        parser.add_argument("--tool-option", metavar="WORD", action="extend", nargs=1, default=[],
                            help=f"passed on to {cls.executable}: --tool-option=--name")

    @classmethod
    def from_arguments(cls, arguments):
        """A wrapper that is ready to run. Raises UserError, also where the program refuses its flags."""
        workload = [*OUTER, *cls.workload, *(word for pair in cls.sizes for word in pair)]
        about = f"{cls.__doc__}\nFlags of the program before yours:\n{' '.join(workload)}"
        return cls(*parse(arguments, cls.script, about, cls.default_dir, cls.timeout, cls.add_options))

    def flags_with(self, words):
        return ["--profile-dir", os.path.join(self.directory, "program"), *OUTER, *self.workload, *words]

    @property
    def program_flags(self):
        return self.flags_with([*preflight.known(self.answer, [NO_GRAPHS, *self.sizes]), *self.own_flags])

    @property
    def graphs_asked_for(self):
        """Whether the user's flags ask for CUDA graphs, or for a mode of torch.compile that makes some."""
        return any(word == "--enable-cuda-graphs" or word.endswith(GRAPHED)
                   for word in self.own_flags)

    def has(self, option):
        """Does the tool's --help list it? A tool that is not here, or fails, has the newest form."""
        return self.tool.options is None or option in self.tool.options

    def files(self):
        """Files that the commands need, name: content; written into the directory before the run."""
        return {}

    def problems(self):
        """Everything that stands in the way."""
        yield from preflight.tool_problems(self.tool, self.package)
        if not self.continues:
            yield from preflight.program_problems(self.answer, self.trouble)

    def warnings(self):
        """What may be right, but explains many a failure."""
        yield from preflight.mismatch_warnings(self.tool, self.answer)
        if self.graphs_asked_for:
            yield GRAPHS
        for word in self.options.tool_option:
            if word.startswith("--") and not self.has(word.partition("=")[0]):
                yield f"--tool-option={word}: the --help of {self.tool} does not list it"

    def about(self):
        """The tool and the torch, for whom it may concern."""
        lines = [f"{self.tool}: {self.tool.path or 'not installed, options of its newest release'}"]
        if torch := self.answer:
            lines += [f"torch {torch['torch']}, ROCm {torch['hip'] or 'none'}, {torch['gpus']} GPU(s): "
                      f"{torch['torch_path']}"]
        return lines

    def explain(self, code, reason, log_text):
        """Exit code and reason of a failed command, where the tool's output tells more than its code."""
        crash = failures.crash_of_tool(log_text, self.program) if code == PROGRAM_FAILED else None
        return (FAILED, f"{self.executable} itself failed: {crash}") if crash else (code, reason)

    def script_text(self, commands):
        """The session as a shell script; --dry-run prints it, command.txt keeps it."""
        lines = [f"# {printable(line)}" for line in (*self.about(), *self.notes)]
        lines += [f"mkdir -p {shlex.quote(self.directory)}"]
        lines += [f"printf %s {shlex.quote(content)} > {shlex.quote(os.path.join(self.directory, name))}"
                  for name, content in self.files().items()]
        return "\n".join([*lines, *(line for command in commands for line in command.script())]) + "\n"
