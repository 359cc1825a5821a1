"""What run_rocprofv3.sh, run_rocprof_sys.sh and run_rocprof_compute.sh have in common."""
import os
import shlex
import time

from fusion_lab.rocm import failures, preflight, profiled
from fusion_lab.training import files, flags
from fusion_lab.training.files import FAILED, PROGRAM_FAILED, UserError, printable
from fusion_lab.training.program import DEFAULT_PROGRAM

# Ranges, start and stop for the profiler outside, and no torch.profiler inside: two cannot share a GPU.
OUTER = ["--enable-rocm-profiling"]
NO_GRAPHS = ("--disable-cuda-graphs",)  # ROCm 7.0 to 7.14 lose kernels of graphs that are replayed
# HIP sets it in a process that uses the GPU; one that starts with it records no kernel.
INHERITED = "ROCPROFILER_REGISTER_LIBRARY"
EPILOG = f"""
Everything that is not an option of this script goes to the profiled program untouched; `--` forces that.
Without --enable-cuda-graphs it runs without graphs, whose kernels ROCm 7.0 to 7.14 do not all record.

environment:
  PYTHON               interpreter that has torch for ROCm (default: python3)
  {profiled.VARIABLE}  program to profile, where --program names none
  ROCM_PATH            ROCm tree, searched after PATH (default: /opt/rocm)

{files.EXIT_CODES}
"""


class Parser(flags.Parser):
    """Wrong use is a UserError; long options in full only, so none is taken from the program."""

    def __init__(self, script, about, examples, timeout, default_dir, workload):
        if workload:
            about += f"\nFlags of the program before yours: {' '.join(OUTER)}\n{' '.join(workload)}"
        default = os.path.basename(DEFAULT_PROGRAM)
        super().__init__(prog=script, description=about,
                         epilog=examples + EPILOG, usage=f"./{script} [options] [--] [flags of {default}]")
        self.add_argument("--program", metavar="FILE",
                          help=f"the program to profile (default: {default} next to this script)")
        self.add_argument("-o", "--output-dir", metavar="DIR", help="fresh directory for the results "
                          f"(default: ./{default_dir}, where earlier results are set aside)")
        self.add_argument("--force", action="store_true",
                          help="use a directory that is not empty; earlier results in it are set aside")
        self.add_argument("--dry-run", action="store_true", help="print the exact commands, run nothing")
        self.add_argument("--preflight", action="store_true",
                          help="say whether it can work here, and what to do where it cannot; run nothing")
        self.add_argument("--skip-preflight", action="store_true", help="start without checking the machine")
        self.add_argument("--timeout", metavar="SECONDS", type=flags.whole_number(0), default=timeout,
                          help="limit for each command, 0 for none (default: %(default)s)")

    def error(self, message):
        raise UserError(message)

    def split(self, arguments):
        """(options, flags of the program)"""
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        options, unknown = self.parse_known_args(arguments[:cut])
        return options, unknown + arguments[cut + 1:]


class Wrapper:
    """A subclass adds options, command lines and the verdict on what was written."""
    script = executable = default_dir = examples = install_hint = ""
    timeout, runs_program = 3600, True
    workload = []                  # flags of the program before the user's, besides OUTER
    sizes = []                     # the same, (flag, value), for programs that have these flags
    help_arguments = ("--help",)   # what makes the tool list its options

    def __init__(self, options, own_flags):
        self.options, self.own_flags, self.notes, self.started = options, own_flags, [], time.time()
        self.directory = os.path.abspath(options.output_dir or self.default_dir)
        if not (options.dry_run or options.preflight):
            default = not options.output_dir and self.fresh_directory()
            self.directory = files.session_directory(self.directory, default)
        self.records = self.directory  # where command.txt, env.txt and manifest.json go
        self.profiled = profiled.Profiled(profiled.chosen_program(options.program))
        self.tool = preflight.find_tool(self.executable, *self.help_arguments)

    @classmethod
    def from_arguments(cls, arguments, sizes=None):
        """A wrapper that is ready to run. Raises UserError, also where the program refuses its flags."""
        workload = [*cls.workload, *(word for pair in cls.sizes for word in pair)]
        parser = Parser(cls.script, cls.__doc__, cls.examples, cls.timeout, cls.default_dir, workload)
        group = parser.add_argument_group(cls.executable)
        group.add_argument("--tool-option", metavar="WORD", action="append", default=[],
                           help=f"passed on to {cls.executable}: --tool-option=--name")
        cls.add_options(group)
        wrapper = cls(*parser.split(arguments))
        wrapper.sizes = wrapper.sizes if sizes is None else sizes
        if wrapper.runs_program:
            wrapper.profiled = profiled.ask(wrapper.profiled.path, wrapper.flags_with([]))
            if wrapper.profiled.trouble:
                wrapper.notes.append(f"flags were not judged: {wrapper.profiled.trouble}")
        return wrapper

    def flags_with(self, words):
        return ["--profile-dir", self.directory, *OUTER, *self.workload, *words, *self.own_flags]

    @property
    def program_flags(self):
        return self.flags_with(self.profiled.known([NO_GRAPHS, *self.sizes]))

    def replays_graphs(self):
        """Whether the user asked for a graph of the whole step, as far as the program tells."""
        return "--enable-cuda-graphs" in self.own_flags and self.profiled.answer.get(
            "fusion_config", {}).get("enable_cuda_graphs", True)

    def has(self, option):
        """Does the tool's --help list it? A tool that is not here, or fails, has the newest form."""
        return self.tool.options is None or option in self.tool.options

    def require(self, option):
        """An option the user asked for: stop where the tool lacks it."""
        if not self.has(option):
            raise UserError(f"{option}: not an option of {self.tool}, see {self.executable} --help")
        return option

    def with_tool_options(self, arguments):
        """Arguments of the tool, and what the user passes on to it; its own --help must know each option, but
        for what rocprof-compute hides there until --experimental is given."""
        for word in self.options.tool_option:
            name = (word or "--").partition("=")[0]  # argparse makes [] of "--"
            if name in (*arguments, "--"):
                raise UserError(f"--tool-option={word or '--'}: this script says it to the tool itself")
            if name.startswith("-") and "--experimental" not in self.options.tool_option:
                self.require(name)
        return [*arguments, *self.options.tool_option]

    def files(self):
        """Files that the commands need, name: content; written into the directory before the run."""
        return {}

    def replaced(self):
        """Paths that this session writes anew, besides logs; what is there is set aside, not overwritten."""
        return set()

    def fresh_directory(self):
        return True

    def problems(self):
        """Everything that stands in the way."""
        yield from preflight.tool_problems(self.tool, self.install_hint)
        yield from preflight.program_problems(self.profiled)
        yield from preflight.kfd_problems()

    def warnings(self, commands):
        """What may be right, but explains many a failure."""
        handled = [name for command in commands for name in (*command.set_env, *command.unset_env)]
        yield from preflight.mismatch_warnings(self.tool, self.profiled.torch())
        yield from preflight.environment_warnings(handled)

    def facts(self):
        """What is fine here, for --preflight."""
        torch = self.profiled.torch()
        if self.tool.path and not self.tool.trouble:
            yield f"{self.tool}, version {self.tool.version}: {self.tool.path}"
        if torch.get("gpus"):
            yield f"torch {torch['version']} for ROCm {torch['hip']}, {torch['gpus']} GPU(s): {torch['path']}"

    def explain(self, code, reason, log_text):
        """Exit code and reason of a failed command, where the tool's output tells more than its code."""
        crash = failures.crash_of_tool(log_text, self.profiled.path) if code == PROGRAM_FAILED else None
        return (FAILED, f"{self.executable} itself failed: {crash}") if crash else (code, reason)

    def steps(self):
        """For 'launches per step': what the program was told; None where nobody knows."""
        counted = self.profiled.steps()
        return counted and {**counted, "selected_regions": False}

    def script_text(self, commands):
        """The session as a shell script; --dry-run prints it, command.txt keeps it."""
        about = (f"{self.tool}, version {self.tool.version}: {self.tool.path}" if self.tool.path else
                 f"{self.executable} is not installed; these are the options of its newest release")
        lines = [f"# {printable(line)}" for line in (about, *self.notes)]
        lines += [f"mkdir -p {shlex.quote(self.directory)}"]
        for name, content in self.files().items():
            lines += [f"printf %s {shlex.quote(content)} > {shlex.quote(os.path.join(self.directory, name))}"]
        for command in commands:
            lines += command.script()
        return "\n".join(lines) + "\n"
