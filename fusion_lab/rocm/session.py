"""One session of a wrapper: dry run, checks, fresh directory, the run, records, verdict.

What is run has its own process group, is shown and logged, and ended in order."""
import contextlib
import json
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from fusion_lab.rocm import preflight, profiled
from fusion_lab.rocm.failures import MEANING, known_failure, last_exception, without_colours
from fusion_lab.training import torchrun
from fusion_lab.training.files import (
    NO_DATA,
    OK,
    PROGRAM_FAILED,
    TIMEOUT,
    UserError,
    drop_output,
    exit_code,
    set_aside,
    write_text,
)
from fusion_lab.training.program import ROOT

FLUSH_SECONDS = 60  # how long a profiler may write after SIGINT before it gets SIGTERM, then SIGKILL
PIPE_SECONDS = 10   # how long what a command has left behind may keep its output


def say(*lines):
    """Print, also where nobody reads any more (`| head`): a session ends in order, its files are complete."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        drop_output()


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


@dataclass
class Outcome:
    code: int | None
    reason: str
    directory: str = ""
    seconds: float = 0.0


def copy_output(stream, log, echo):
    while chunk := os.read(stream.fileno(), 65536):
        log.write(chunk)
        log.flush()
        with contextlib.suppress(BrokenPipeError):  # the log goes on
            if echo:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()


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
    """Run a command in its own process group, its output shown and logged. Ctrl-C, a kill and the time limit
    all reach the group as SIGINT, so that the trainer ends its step and the profiler writes its files. What
    has not ended FLUSH_SECONDS later, or at a second Ctrl-C, gets SIGTERM, then SIGKILL."""
    start = time.monotonic()
    deadline, ladder = start + (timeout or float("inf")), iter((signal.SIGINT, signal.SIGTERM))
    heard, timed_out = 0, False
    with open(os.path.join(directory, command.log), "ab") as log, caught_signals() as caught:
        process = subprocess.Popen(command.argv, cwd=command.cwd, env=command.environment(),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        reader = threading.Thread(target=copy_output, args=(process.stdout, log, command.echo), daemon=True)
        reader.start()
        while process.poll() is None:
            if len(caught) > heard or time.monotonic() > deadline:
                timed_out = timed_out or not caught
                heard, deadline = len(caught), time.monotonic() + FLUSH_SECONDS
                signal_group(process, next(ladder, signal.SIGKILL))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        reader.join(PIPE_SECONDS)
        if reader.is_alive():  # a grandchild still holds the pipe
            signal_group(process, signal.SIGKILL)
            reader.join(PIPE_SECONDS)
    return Ended(process.returncode, caught[0] if caught else 0, timed_out, time.monotonic() - start)


def signal_group(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def failure(ended, log_text):
    """(exit code, reason) of a command that did not end well."""
    if ended.interrupted:
        return 128 + ended.interrupted, f"got {signal.Signals(ended.interrupted).name}"
    if ended.timed_out:
        return TIMEOUT, f"stopped after {ended.seconds:.0f} s by --timeout"
    if known := known_failure(log_text):
        return known[1], f"{known[0]}. {known[2]}"
    number = -ended.code if ended.code < 0 else ended.code - 128
    if number in (signal.SIGINT, signal.SIGTERM):
        return 128 + number, f"the profiled program ended by {signal.Signals(number).name}"
    if number in list(signal.Signals):  # not all numbers up to 64 are, so 160 is a code like any other
        return PROGRAM_FAILED, (f"it died of {signal.Signals(number).name}. Try the lightest trace, and the "
                                "same program without the profiler.")
    return PROGRAM_FAILED, last_exception(log_text)[1] or f"it ended with exit code {ended.code}"


def profile(wrapper):
    """Check, make room, run, judge, report. Raises UserError where nothing was run."""
    commands = wrapper.commands()
    if wrapper.options.dry_run:
        say(wrapper.script_text(commands).rstrip())
        return Outcome(OK, "dry run")
    if wrapper.options.preflight:
        return preflight_only(wrapper, commands)
    aside = wrapper.fresh_directory() and check_directory(wrapper.directory, wrapper.options)
    if not (wrapper.options.skip_preflight and wrapper.tool.path):
        preflight.refuse(list(wrapper.problems()))
        wrapper.notes += [f"warning: {text}" for text in wrapper.warnings(commands)]
    if aside:
        wrapper.notes.append(f"earlier results are now in {set_aside(wrapper.directory)}")
    for path in {os.path.join(wrapper.directory, command.log) for command in commands} | wrapper.replaced():
        if moved := set_aside(path):
            wrapper.notes.append(f"{path} is now {moved}")
    write_records(wrapper, commands)
    say(*wrapper.notes, *(shlex.join(command.argv) for command in commands))
    outcome = execute(wrapper, commands)
    write_manifest(wrapper, commands, outcome)
    if outcome.code == OK:
        say(f"{wrapper.script}: done in {outcome.seconds:.0f} s, {outcome.reason}; in {wrapper.directory}")
    else:
        print(f"{wrapper.script}: {MEANING.get(outcome.code, 'failed')}: {outcome.reason.rstrip('.')}. "
              f"Its output: {os.path.join(wrapper.directory, commands[0].log)}", file=sys.stderr)
    return outcome


def preflight_only(wrapper, commands):
    """Everything that was looked at, in order of what helps or hinders."""
    problems, warnings = list(wrapper.problems()), list(wrapper.warnings(commands))
    say(wrapper.executable, *(f"  ok       {text}" for text in wrapper.facts()),
        *(f"  note     {text}" for text in wrapper.notes), *(f"  warning  {text}" for text in warnings),
        *(f"  problem  {problem.what}. {problem.advice}" for problem in problems))
    code = preflight.worst_code(problems)
    say(f"  {'can profile here' if code == OK else f'cannot profile here: {MEANING[code]}'}")
    return Outcome(code, "; ".join(problem.what for problem in problems) or "fine")


def execute(wrapper, commands):
    """Run the commands up to the first that fails, then judge what is there: half a trace is a trace."""
    code, reason, start, wrapper.started = OK, "", time.monotonic(), time.time()
    write_manifest(wrapper, commands, Outcome(None, "running"))
    for command in commands:
        ended = run(command, wrapper.directory, wrapper.options.timeout)
        log = without_colours(pathlib.Path(wrapper.directory, command.log).read_text(errors="replace"))
        if ended.code or ended.interrupted or ended.timed_out:
            code, reason = wrapper.explain(*failure(ended, log), log)
            write_manifest(wrapper, commands, Outcome(code, reason))  # a failed run's steps are not counted
            break
    try:
        verdict, words = wrapper.judge(log)
    except (UserError, OSError) as error:  # damaged results; or a full disk
        verdict, words = NO_DATA, str(error)
    if code == OK:
        code, reason = verdict, words
    elif verdict == OK:
        reason += f" (what is there: {words})"
    return Outcome(code, reason, wrapper.directory, time.monotonic() - start)


def check_directory(directory, options):
    """True: results of an earlier run, to be set aside. Refuses what the user named, without --force."""
    path = pathlib.Path(directory)
    if path.exists() and not path.is_dir():
        raise UserError(f"-o {directory}: is not a directory")
    if not path.exists() or not any(path.iterdir()):
        return False
    if options.output_dir and not options.force:
        raise UserError(f"-o {directory}: is not empty. Name a fresh one, or add --force: results of an "
                        "earlier run are then set aside, other files stay.")
    return not options.output_dir or (path / "manifest.json").exists()


def write_records(wrapper, commands):
    """What was run (command.txt) and in which environment (env.txt), and the files that the commands need."""
    os.makedirs(wrapper.records, exist_ok=True)
    for name, content in wrapper.files().items():
        write_text(os.path.join(wrapper.directory, name), content)
    code, commit = preflight.output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    facts = {"host": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
             "interpreter": sys.executable, "git commit": commit.strip() if code == 0 else None,
             **{f"tool {key}": value for key, value in asdict(wrapper.tool).items() if key != "options"},
             **{f"torch {key}": value for key, value in wrapper.profiled.torch().items()}}
    wanted = ("ROC", "HIP", "HSA", "GPU_", "AMD_", "DEBUG_", "MIOPEN", "TORCH", "PYTORCH", "TRITON", "OMP_",
              "LD_", "PYTHON", "PATH", "VIRTUAL_ENV", "CUDA_VISIBLE", profiled.VARIABLE)
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(wanted)]
    write_text(os.path.join(wrapper.records, "env.txt"), "\n".join(lines) + "\n")
    write_text(os.path.join(wrapper.records, "command.txt"), wrapper.script_text(commands))


def write_manifest(wrapper, commands, outcome):
    """What was run, how it ended, what lies there. How many steps a failed run did, nobody knows."""
    directory = pathlib.Path(wrapper.directory)
    manifest = {
        "script": wrapper.script, "status": MEANING.get(outcome.code, "running"), "reason": outcome.reason,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(wrapper.started)),
        "exit_code": outcome.code, "seconds": round(outcome.seconds, 3), "tool": wrapper.tool.path,
        "tool_version": wrapper.tool.version, "rocm": wrapper.tool.rocm, "torch": wrapper.profiled.torch(),
        "steps": wrapper.steps() if outcome.code in (None, OK) else None,
        "notes": wrapper.notes, "summary": wrapper.profiled.answer.get("summary"),
        "commands": [{"argv": command.argv, "cwd": command.cwd, "environment": command.set_env,
                      "unset": list(command.unset_env)} for command in commands],
        "files": [{"path": str(path.relative_to(directory)), "bytes": path.stat().st_size}
                  for path in sorted(directory.rglob("*")) if path.is_file()],
    }
    write_text(os.path.join(wrapper.records, "manifest.json"), json.dumps(manifest, indent=1) + "\n")


def main(wrapper_class, arguments):
    """Exit code of one wrapper; wrong use is one line, problems of the machine are a list."""
    def run(argv):
        torchrun.require_alone(wrapper_class.script)
        return profile(wrapper_class.from_arguments(argv)).code

    return exit_code(run, arguments, wrapper_class.script)
