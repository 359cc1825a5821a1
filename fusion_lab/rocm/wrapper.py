"""What run_rocprofv3.sh, run_rocprof_sys.sh and run_rocprof_compute.sh have in common."""
import argparse
import os
import re
import shlex
import time

from fusion_lab.rocm import failures, machine, preflight, profiled
from fusion_lab.rocm.process import said_if_slow, say
from fusion_lab.training import files, flags
from fusion_lab.training.files import FAILED, MISSING, PROGRAM_FAILED, UserError, printable
from fusion_lab.training.program import DEFAULT_PROGRAM

OLDEST_ROCM, NEWEST_ROCM = "6.3", "10.1"  # of the releases whose tools are known here
# Ranges, start and stop for the profiler outside, and no torch.profiler inside: two cannot share a GPU.
OUTER = ["--enable-rocm-profiling"]
EPILOG = f"""
Everything that is not an option of this script goes to the profiled program untouched; `--` forces that.

environment:
  PYTHON               interpreter that has torch for ROCm (default: python3)
  {profiled.VARIABLE}  program to profile, where --program names none
  ROCM_PATH            ROCm tree, searched after PATH (default: /opt/rocm)
  MIN_FREE_GB          disk space wanted for the results (default: 1)

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


def rocm_release(text):
    """For argparse: "7.0"."""
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a ROCm release such as 6.3, 7.0 or 10.1")
    return text


def release_key(text):
    """"10.1" -> (10, 1), which can be compared."""
    return tuple(map(int, text.split(".")))


class Wrapper:
    """A subclass adds options, command lines and the verdict on what was written."""
    script = executable = default_dir = examples = install_hint = ""
    timeout, runs_program = 3600, True
    workload = []                  # flags of the program before the user's, besides OUTER
    sizes = []                     # the same, (flag, value), for programs that have these flags
    help_arguments = ("--help",)   # what makes the tool list its options
    oldest = OLDEST_ROCM           # the first release that has all that was asked for
    since = {}                     # options that came later: the first release that has them

    def __init__(self, options, own_flags):
        self.options = options
        self.directory = os.path.abspath(options.output_dir or self.default_dir)
        if not (options.dry_run or options.preflight):
            default = not options.output_dir and self.fresh_directory()
            self.directory = files.session_directory(self.directory, default, say)
        self.records = self.directory  # where command.txt, env.txt and manifest.json go
        self.own_flags = own_flags
        self.profiled = profiled.Profiled(profiled.chosen_program(options.program))
        self.notes, self.torch, self.started = [], {}, time.time()
        if options.rocm and not options.dry_run:
            raise UserError("--rocm: chooses what --dry-run prints; a run asks the installed tool")
        self.tool = machine.Tool(self.executable) if options.rocm else machine.find_tool(
            self.executable, *self.help_arguments)
        if (self.release() or self.tool.path) and not self.is_known():
            self.notes.append(f"ROCm {self.release() or '?'} is not among those known here ({OLDEST_ROCM} to "
                              f"{NEWEST_ROCM}): what this release does differently was not looked at")

    @classmethod
    def from_arguments(cls, arguments, sizes=None):
        """A wrapper that is ready to run. Raises UserError, also where the program refuses its flags."""
        workload = [*cls.workload, *(word for pair in cls.sizes for word in pair)]
        parser = Parser(cls.script, cls.__doc__, cls.examples, cls.timeout, cls.default_dir, workload)
        parser.add_argument("--rocm", metavar="X.Y", type=rocm_release,
                            help="with --dry-run: print for this release, not for the installed tool")
        group = parser.add_argument_group(cls.executable)
        group.add_argument("--tool-option", metavar="WORD", action="append", default=[],
                           help=f"passed on to {cls.executable}: --tool-option=--name")
        cls.add_options(group)
        options, own_flags = parser.split(arguments)
        program = os.path.basename(profiled.chosen_program(options.program))
        with said_if_slow(f"{cls.script}: looking for {cls.executable}, asking {program} for its flags ..."):
            wrapper = cls(options, own_flags)
            if sizes is not None:
                wrapper.sizes = sizes
            if wrapper.runs_program:
                wrapper.profiled = profiled.ask(wrapper.profiled.path, wrapper.flags_with([]))
                if wrapper.profiled.unjudged:
                    wrapper.notes.append(f"flags were not judged: {wrapper.profiled.unjudged}")
        return wrapper

    def flags_with(self, sizes):
        words = [word for pair in sizes for word in pair]
        return ["--profile-dir", self.directory, *OUTER, *self.workload, *words, *self.own_flags]

    @property
    def program_flags(self):
        return self.flags_with(self.profiled.sizes(self.sizes))

    def has(self, option):
        """Does the tool know the option? By its --help, else by --rocm, else None: nobody knows."""
        if self.tool.options is not None:
            return option in self.tool.options
        if self.options.rocm:
            return release_key(self.options.rocm) >= release_key(self.since.get(option, "0.0"))
        return None

    def require(self, option):
        """An option the user asked for: stop where the tool lacks it."""
        if self.has(option) is False:
            came = f"; it came with ROCm {self.since[option]}" if option in self.since else ""
            raise UserError(f"{option}: not an option of {self.tool_and_release()}{came}")
        if self.has(option) is None and option in self.since:
            self.oldest = max(self.oldest, self.since[option], key=release_key)
        return option

    def with_tool_options(self, arguments):
        """Arguments of the tool, and what the user passes on to it; its own --help must know each option."""
        for word in self.options.tool_option:
            name = (word or "--").partition("=")[0]  # argparse makes [] of "--"
            if name in (*arguments, "--"):
                raise UserError(f"--tool-option={word or '--'}: this script says it to the tool itself")
            if name.startswith("-") and not name[1:2].isdigit():
                self.require(name)
        return [*arguments, *self.options.tool_option]

    def release(self):
        """ROCm release of the tool, or the one that --rocm names; None where nobody knows."""
        return self.options.rocm or self.tool.rocm

    def is_known(self):
        """Is the tool of a release whose tools are known here?"""
        return bool(self.release()) and (
            release_key(OLDEST_ROCM) <= release_key(self.release()) <= release_key(NEWEST_ROCM))

    def before(self, release):
        """Is, or may, the tool be of an earlier release than this?"""
        return self.release() is None or release_key(self.release()) < release_key(release)

    def tool_and_release(self):
        return f"{self.executable} of ROCm {self.release()}" if self.release() else self.executable

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
        self.torch = self.profiled.torch()
        yield from preflight.tool_problems(self.tool, self.install_hint)
        if not os.access(self.profiled.path, os.R_OK):
            yield preflight.Problem(MISSING, f"cannot read {self.profiled.path}",
                                    f"--program or {profiled.VARIABLE} names the program.")
        yield from preflight.torch_problems(self.torch)
        yield from preflight.kfd_problems()
        yield from preflight.render_problems()
        yield from preflight.disk_problems(self.directory)

    def warnings(self, commands):
        """What may be right, but explains many a failure."""
        handled = [name for command in commands for name in (*command.set_env, *command.unset_env)]
        yield from preflight.mismatch_warnings(self.tool, self.torch)
        yield from preflight.environment_warnings(handled)

    def facts(self):
        """What is fine here, for --preflight; after problems()."""
        if self.tool.path and not self.tool.trouble:
            yield f"{self.tool_and_release()}, version {self.tool.version}: {self.tool.path}"
        if self.torch.get("gpus"):
            gpus = ", ".join(machine.architectures()) or "of unknown architecture"
            yield (f"torch {self.torch['version']} for ROCm {self.torch['hip']}, {self.torch['gpus']} GPU(s) "
                   f"({gpus}): {self.torch['path']}")

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
        if self.tool.path:
            about = f"{self.tool_and_release()}, version {self.tool.version}: {self.tool.path}"
        elif self.options.rocm:
            about = f"for {self.tool_and_release()}"
        else:
            about = f"{self.executable} is not installed; this is for ROCm {self.oldest} to {NEWEST_ROCM}"
        lines = [f"# {printable(line)}" for line in (about, *self.notes)]
        lines += [f"mkdir -p {shlex.quote(self.directory)}"]
        for name, content in self.files().items():
            path, end = shlex.quote(os.path.join(self.directory, name)), "END_OF_FILE"
            while end in content:
                end += "_"
            lines += [f"cat > {path} <<'{end}'", content + end]
        for command in commands:
            lines += command.script()
        return "\n".join(lines) + "\n"
