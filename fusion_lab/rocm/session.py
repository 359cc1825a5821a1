"""One session of a profiler wrapper: options, dry run, fresh directory, the run itself, records, verdict.

`Wrapper` is what run_rocprofv3.sh, run_rocprof_sys.sh and run_rocprof_compute.sh have in common (the three
are in rocm_profilers.py), `profile` the story of one session, `run` the one place that starts a process.
"""
import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from fusion_lab.rocm import machine
from fusion_lab.rocm.machine import (
    FAILED,
    MEANING,
    MISSING,
    OK,
    PROGRAM_FAILED,
    TIMEOUT,
    USAGE,
    Problem,
    Stop,
)
from fusion_lab.training import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLUSH_SECONDS = 60  # how long a profiler may write after SIGINT before it gets SIGTERM, then SIGKILL
NEWEST_ROCM = "10.1"
MODE_FLAGS = {"--validate-setup", "--compare-fusion", "--verify-accuracy"}  # no counted steps
# Ranges, start and stop for the profiler outside, and no torch.profiler inside: two cannot share a GPU.
OUTER = ["--enable-rocm-profiling"]
EPILOG = """
Everything that is not an option of this script goes to tiny_openfold_v2.py untouched; `--` forces that.

environment:
  PYTHON               the interpreter that has torch for ROCm (default: python3)
  TINYOPENFOLD_SCRIPT  program to profile (default: tiny_openfold_v2.py next to this script)
  ROCM_PATH            ROCm tree, searched after PATH (default: /opt/rocm)
  MIN_FREE_GB          disk space wanted for the results (default: 1)

exit codes: 0 done, 1 profiler failed, 2 wrong use, 3 tool or package missing, 4 no usable GPU, 5 the profiled
program failed, 6 no data, 124 time limit, 130 interrupted
"""


# ---------------------------------------------------------------------------------------------------------
# Command line

class Parser(argparse.ArgumentParser):
    """Wrong use is one line and exit code 2; long options in full only, so none is taken from the trainer."""

    def __init__(self, script, about, examples, timeout, default_dir, workload):
        if workload:
            about += f"\nTrainer flags before yours: {' '.join(OUTER)}\n{' '.join(workload)}"
        super().__init__(prog=script, description=about, epilog=examples + EPILOG, allow_abbrev=False,
                         usage=f"./{script} [options] [--] [flags of tiny_openfold_v2.py]",
                         formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110))
        self.add_argument("-o", "--output-dir", metavar="DIR",
                          help=f"fresh directory for the results (default: ./{default_dir}, where earlier "
                               "results are set aside)")
        self.add_argument("--force", action="store_true",
                          help="use a directory that is not empty; earlier results in it are set aside")
        self.add_argument("--dry-run", action="store_true", help="print the exact commands, run nothing")
        self.add_argument("--skip-preflight", action="store_true", help="start without checking the machine")
        self.add_argument("--timeout", metavar="SECONDS", type=at_least(0), default=timeout,
                          help="limit for each command, 0 for none (default: %(default)s)")

    def error(self, message):
        raise Stop(USAGE, message)

    def split(self, arguments):
        """(options, flags of the trainer)"""
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        options, unknown = self.parse_known_args(arguments[:cut])
        return options, unknown + arguments[cut + 1:]


def judge_flags(script, trainer_flags):
    """Stop where the trainer would: one line, exit code 2. A program of the user's own knows its own."""
    if not os.environ.get("TINYOPENFOLD_SCRIPT"):
        flags.parse(flags.make_parser(prog=script), trainer_flags)


def at_least(smallest):
    def parse(text):
        if not text.isascii() or not text.isdigit() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {smallest}")
        return int(text)
    return parse


def rocm_release(text):
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a ROCm release such as 6.3, 7.0 or 10.1")
    return text


def last_value(flags, name):
    """Value of the last `name VALUE` or `name=VALUE`, as the trainer's own parser would see it."""
    for index in reversed(range(len(flags))):
        if flags[index] == name and index + 1 < len(flags):
            return flags[index + 1]
        if flags[index].startswith(name + "="):
            return flags[index][len(name) + 1:]
    return None


def number(text):
    return tuple(map(int, text.split(".")))


# ---------------------------------------------------------------------------------------------------------
# Wrapper: a subclass adds options, command lines and the verdict on what was written

class Wrapper:
    script = program = default_dir = examples = install_hint = ""
    timeout = 3600
    workload = []                  # trainer flags before the user's, besides OUTER
    help_arguments = ("--help",)   # what makes the tool list its options
    oldest = "6.3"                 # ROCm release that first had the tool under this name
    since = {}                     # options that came later: the first release that has them

    def __init__(self, options, trainer_flags):
        self.options = options
        self.directory = os.path.abspath(options.output_dir or self.default_dir)
        self.records = self.directory  # where command.txt, env.txt and manifest.json go
        self.trainer_flags = ["--profile-dir", self.directory, *OUTER, *self.workload, *self.extra_flags(),
                              *trainer_flags]
        self.notes, self.torch, self.started = [], {}, time.time()
        self.tool = machine.Tool(self.program)
        if options.rocm is None:
            self.tool = machine.find_tool(self.program, *self.help_arguments)
        elif not options.dry_run:
            raise Stop(USAGE, "--rocm: chooses what --dry-run prints; a run asks the installed tool")

    @classmethod
    def from_arguments(cls, arguments):
        parser = Parser(cls.script, cls.__doc__, cls.examples, cls.timeout, cls.default_dir, cls.workload)
        parser.add_argument("--rocm", metavar="X.Y", type=rocm_release,
                            help="with --dry-run: print for this release, not for the installed tool")
        cls.add_options(parser)
        options, trainer_flags = parser.split(arguments)
        judge_flags(cls.script, trainer_flags)
        return cls(options, trainer_flags)

    def extra_flags(self):
        return []

    def target(self):
        return os.path.abspath(os.environ.get("TINYOPENFOLD_SCRIPT") or ROOT / "tiny_openfold_v2.py")

    def has(self, option):
        """Does the tool know the option? By its --help, else by --rocm, else None: nobody knows."""
        if self.tool.options is not None:
            return option in self.tool.options
        if self.options.rocm:
            return number(self.options.rocm) >= number(self.since.get(option, self.oldest))
        return None

    def require(self, option):
        """An option the user asked for: stop where the tool lacks it."""
        if self.has(option) is False:
            raise Stop(USAGE, f"{option}: not an option of {self.tool_name()}; it came with ROCm "
                              f"{self.since.get(option, self.oldest)}")
        if self.has(option) is None and option in self.since:
            self.oldest = max(self.oldest, self.since[option], key=number)
        return option

    def tool_name(self):
        release = self.options.rocm or self.tool.rocm
        return f"{self.program} of ROCm {release}" if release else self.program

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
        self.torch = machine.probe_torch()
        yield from machine.tool_problems(self.tool, self.install_hint)
        if not os.access(self.target(), os.R_OK):
            yield Problem(MISSING, f"cannot read {self.target()}", "TINYOPENFOLD_SCRIPT names the program.")
        yield from machine.torch_problems(self.torch)
        yield from machine.kfd_problems()
        yield from machine.disk_problems(self.directory)

    def explain(self, code, reason, log_text):
        """Exit code and reason of a failed command, where the tool's output tells more than its code."""
        return code, reason

    def steps(self):
        """For 'launches per step': what the trainer was told; None where a run has no counted steps."""
        with contextlib.suppress(TypeError, ValueError):
            if not MODE_FLAGS.intersection(self.trainer_flags):
                return {"measured": int(last_value(self.trainer_flags, "--num-steps")),
                        "warmup": int(last_value(self.trainer_flags, "--warmup-steps")),
                        "selected_regions": False}
        return None

    def script_text(self, commands):
        """The session as a shell script; --dry-run prints it, command.txt keeps it."""
        if self.tool.path:
            about = f"{self.tool_name()}, version {self.tool.version}: {self.tool.path}"
        elif self.options.rocm:
            about = f"for {self.tool_name()}"
        else:
            about = f"{self.program} is not installed; this is for ROCm {self.oldest} to {NEWEST_ROCM}"
        lines = [f"# {line}" for line in (about, *self.notes)]
        lines += [f"mkdir -p {shlex.quote(self.directory)}"]
        for name, content in self.files().items():
            path = shlex.quote(os.path.join(self.directory, name))
            lines += [f"cat > {path} <<'END_OF_FILE'", content + "END_OF_FILE"]
        for command in commands:
            lines += command.script()
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------
# The session

@dataclass
class Outcome:
    code: int
    reason: str
    directory: str = ""
    seconds: float = 0.0


def profile(wrapper):
    """Check, make room, run, judge, report. Raises Stop where nothing was run."""
    commands = wrapper.commands()
    if wrapper.options.dry_run:
        say(wrapper.script_text(commands).rstrip())
        return Outcome(OK, "dry run")
    aside = wrapper.fresh_directory() and check_directory(wrapper.directory, wrapper.options)
    if not (wrapper.options.skip_preflight and wrapper.tool.path):
        machine.refuse(list(wrapper.problems()))
        handled = [name for command in commands for name in (*command.set_env, *command.unset_env)]
        wrapper.notes += machine.warnings_for(wrapper.tool, wrapper.torch, handled)
    if aside:
        wrapper.notes.append(f"earlier results are now in {set_aside(wrapper.directory)}")
    for path in {os.path.join(wrapper.directory, command.log) for command in commands} | wrapper.replaced():
        if os.path.exists(path):
            wrapper.notes.append(f"{path} is now {set_aside(path)}")
    write_records(wrapper, commands)
    say(*wrapper.notes, *(shlex.join(command.argv) for command in commands))
    outcome = execute(wrapper, commands)
    write_manifest(wrapper, commands, outcome)
    if outcome.code == OK:
        say(f"{wrapper.script}: done in {outcome.seconds:.0f} s, {outcome.reason}; in {wrapper.directory}")
    else:
        print(f"{wrapper.script}: {MEANING.get(outcome.code, 'failed')}: {outcome.reason}\n"
              f"Look at {os.path.join(wrapper.directory, commands[0].log)}", file=sys.stderr)
    return outcome


def execute(wrapper, commands):
    """Run the commands up to the first that fails, then judge what is there: half a trace is a trace."""
    code, reason = OK, ""
    start, wrapper.started = time.monotonic(), time.time()
    write_manifest(wrapper, commands, Outcome(None, "running"))
    for command in commands:
        ended = run(command, wrapper.directory, wrapper.options.timeout)
        log = pathlib.Path(wrapper.directory, command.log).read_text(errors="replace")
        if ended.code or ended.interrupted or ended.timed_out:
            code, reason = wrapper.explain(*failure(ended, log), log)
            write_manifest(wrapper, commands, Outcome(code, reason))
            break
    verdict, words = wrapper.judge(log)
    if code == OK:
        code, reason = verdict, words
    elif verdict == OK:
        reason += f" (what is there: {words})"
    return Outcome(code, reason, wrapper.directory, time.monotonic() - start)


def say(*lines):
    """Print, also where nobody reads any more (`| head`): a session ends in order, its files are complete."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def set_aside(path):
    """Rename what is there to <path>.old-<time>; returns the new name."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    target, again = pathlib.Path(f"{path}.old-{stamp}"), 1
    while target.exists():
        again += 1
        target = pathlib.Path(f"{path}.old-{stamp}-{again}")
    pathlib.Path(path).rename(target)
    return target


def check_directory(directory, options):
    """True: results of an earlier run, to be set aside. Refuses what the user named, without --force."""
    path = pathlib.Path(directory)
    if path.exists() and not path.is_dir():
        raise Stop(USAGE, f"-o {directory}: is not a directory")
    if not path.exists() or not any(path.iterdir()):
        return False
    if options.output_dir and not options.force:
        raise Stop(USAGE, f"-o {directory}: is not empty. Name a fresh one, or add --force: results of an "
                          "earlier run are then set aside, other files stay.")
    return not options.output_dir or (path / "manifest.json").exists()


# ---------------------------------------------------------------------------------------------------------
# Records

def write_atomically(path, text):
    part = pathlib.Path(f"{path}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_records(wrapper, commands):
    """What was run (command.txt) and in which environment (env.txt), and the files that the commands need."""
    os.makedirs(wrapper.records, exist_ok=True)
    for name, content in wrapper.files().items():
        write_atomically(os.path.join(wrapper.directory, name), content)
    code, commit = machine.output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    facts = {"host": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
             "interpreter": sys.executable, "tool": wrapper.tool.path, "tool version": wrapper.tool.version,
             "ROCm of the tool": wrapper.tool.rocm, "git commit": commit.strip() if code == 0 else None,
             **{f"torch {key}": value for key, value in wrapper.torch.items()}}
    wanted = ("ROC", "HIP", "HSA", "GPU_", "AMD_", "MIOPEN", "TORCH", "PYTORCH", "TRITON", "OMP_", "LD_",
              "PYTHON", "PATH", "VIRTUAL_ENV", "CUDA_VISIBLE", "TINYOPENFOLD")
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(wanted)]
    write_atomically(os.path.join(wrapper.records, "env.txt"), "\n".join(lines) + "\n")
    write_atomically(os.path.join(wrapper.records, "command.txt"), wrapper.script_text(commands))


def write_manifest(wrapper, commands, outcome):
    """What was run, how it ended, what lies there. How many steps a failed run did, nobody knows."""
    directory = pathlib.Path(wrapper.directory)
    started = time.localtime(wrapper.started)
    manifest = {
        "script": wrapper.script, "status": MEANING.get(outcome.code, "running"), "reason": outcome.reason,
        "exit_code": outcome.code, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", started),
        "seconds": round(outcome.seconds, 3), "tool": wrapper.tool.path, "tool_version": wrapper.tool.version,
        "rocm": wrapper.tool.rocm, "torch": wrapper.torch, "notes": wrapper.notes,
        "steps": wrapper.steps() if outcome.code in (None, OK) else None,
        "commands": [{"argv": command.argv, "cwd": command.cwd, "environment": command.set_env,
                      "unset": list(command.unset_env)} for command in commands],
        "files": [{"path": str(path.relative_to(directory)), "bytes": path.stat().st_size}
                  for path in sorted(directory.rglob("*")) if path.is_file()],
    }
    write_atomically(os.path.join(wrapper.records, "manifest.json"), json.dumps(manifest, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------
# Running

@dataclass
class Command:
    """One command line as it will be run and as it is shown."""
    argv: list
    set_env: dict = field(default_factory=dict)
    unset_env: tuple = ()
    cwd: str | None = None
    log: str = "run.log"  # in the result directory
    echo: bool = True

    def environment(self):
        kept = {name: value for name, value in os.environ.items() if name not in self.unset_env}
        return {**kept, **self.set_env}

    def script(self):
        """Lines of shell that do the same."""
        lines = [f"unset {' '.join(self.unset_env)}"] if self.unset_env else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.set_env.items()]
        lines += [f"cd {shlex.quote(self.cwd)}"] if self.cwd else []
        return [*lines, shlex.join(self.argv)]


@dataclass
class Ended:
    code: int = 0         # of the process; negative: a signal
    interrupted: int = 0  # the signal that the wrapper got
    timed_out: bool = False
    seconds: float = 0.0


def copy_output(stream, log, echo):
    while chunk := os.read(stream.fileno(), 65536):
        log.write(chunk)
        log.flush()
        if echo:
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # the log goes on
                echo = False


@contextlib.contextmanager
def caught_signals():
    """A list that fills with the signals that ask this process to end."""
    caught = []
    wanted = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in wanted}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command, directory, timeout):
    """Run a command in its own process group, its output shown and logged.

    Ctrl-C, a kill and the time limit all reach the group as SIGINT, so that the trainer ends its step and the
    profiler writes its files. What has not ended FLUSH_SECONDS later, or at a second Ctrl-C, gets SIGTERM,
    then SIGKILL.
    """
    start = time.monotonic()
    deadline = start + (timeout or float("inf"))
    ladder = iter((signal.SIGINT, signal.SIGTERM))
    ended, heard = Ended(), 0
    with open(os.path.join(directory, command.log), "ab") as log, caught_signals() as caught:
        process = subprocess.Popen(command.argv, cwd=command.cwd, env=command.environment(),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        reader = threading.Thread(target=copy_output, args=(process.stdout, log, command.echo), daemon=True)
        reader.start()
        while process.poll() is None:
            if len(caught) > heard or time.monotonic() > deadline:
                ended.timed_out = ended.timed_out or not caught
                heard, deadline = len(caught), time.monotonic() + FLUSH_SECONDS
                signal_group(process, next(ladder, signal.SIGKILL))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        reader.join(10)
        if reader.is_alive():  # a grandchild still holds the pipe
            signal_group(process, signal.SIGKILL)
            reader.join(10)
    ended.code, ended.seconds = process.returncode, time.monotonic() - start
    ended.interrupted = caught[0] if caught else 0
    return ended


def signal_group(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def failure(ended, log_text):
    """(exit code, reason) of a command that did not end well."""
    if ended.interrupted:
        return 128 + ended.interrupted, f"got {signal.Signals(ended.interrupted).name}"
    if ended.timed_out:
        return TIMEOUT, f"stopped after {ended.seconds:.0f} s by --timeout"
    known = machine.known_failure(log_text)
    if known:
        return known[1], f"{known[0]}. {known[2]}"
    number = -ended.code if ended.code < 0 else ended.code - 128
    if number in (signal.SIGINT, signal.SIGTERM):
        return 128 + number, f"the profiled program ended by {signal.Signals(number).name}"
    if 0 < number < 65:
        return PROGRAM_FAILED, (f"it died of {signal.Signals(number).name}. Try the lightest trace, and the "
                                "same program without the profiler.")
    return PROGRAM_FAILED, f"it ended with exit code {ended.code}"


def main(wrapper_class, arguments):
    """Exit code of one wrapper; errors of use are one line, problems of the machine a list."""
    try:
        return profile(wrapper_class.from_arguments(arguments)).code
    except Stop as stop:
        print(f"{wrapper_class.script}: " + "\n".join(stop.lines), file=sys.stderr)
        return stop.code
    except OSError as error:
        print(f"{wrapper_class.script}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
