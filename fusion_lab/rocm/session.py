"""One session of a wrapper: dry run, checks, fresh directory, the run, records, verdict."""
import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from fusion_lab.measuring.roctx import INHERITED, child_environment
from fusion_lab.rocm.failures import MEANING, known_failure, last_exception
from fusion_lab.rocm.preflight import worst_code
from fusion_lab.training import errors, files
from fusion_lab.training.directory import Directory
from fusion_lab.training.errors import NO_DATA, OK, PROGRAM_FAILED, TIMEOUT, UserError
from fusion_lab.training.words import printable

FLUSH_SECONDS = 60  # how long a profiler may write after SIGINT before it gets SIGTERM, then SIGKILL
RECORDED = ("ROC", "HIP", "HSA", "GPU_", "AMD_", "DEBUG_", "MIOPEN", "TORCH", "PYTORCH", "TRITON", "OMP_",
            "LD_", "PYTHON", "PATH", "VIRTUAL_ENV", "CUDA_VISIBLE")  # variables whose names begin so


def say(*lines, end="\n"):
    """Print, also where nobody reads any more (`| head`): a session ends in order, its files are complete."""
    try:
        print(*lines, sep="\n", end=end, flush=True)
    except BrokenPipeError:
        errors.drop_output()


@dataclass
class Command:
    """One command line as it will be run and as it is shown."""
    argv: list
    set_env: dict = field(default_factory=dict)
    unset_env: tuple = ()
    cwd: str | None = None
    log: str = "run.log"  # in the result directory

    def environment(self):
        kept = {name: value for name, value in child_environment().items() if name not in self.unset_env}
        return {**kept, **self.set_env}

    def script(self):
        """Lines of shell that do the same."""
        lines = [f"unset {' '.join([INHERITED, *self.unset_env])}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.set_env.items()]
        lines += [f"cd {shlex.quote(self.cwd)}"] if self.cwd else []
        return [*lines, shlex.join(self.argv)]


@dataclass
class Outcome:
    """How a command or a session ended."""
    code: int | None
    reason: str = ""
    directory: str = ""
    seconds: float = 0.0


def run(command, directory, timeout):
    """Run a command in its own process group, its output logged and shown. Ctrl-C, a kill and the time limit
    all reach the group as SIGINT, so that the trainer ends its step and the profiler writes its files. What
    has not ended FLUSH_SECONDS later, or at a second Ctrl-C, gets SIGTERM, then SIGKILL. Returns an Outcome:
    the code is the process's, and a reason is there if it was made to end."""
    start, asked, heard, late = time.monotonic(), [], 0, False
    deadline, ladder = start + (timeout or float("inf")), iter((signal.SIGINT, signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(os.path.join(directory, command.log), "ab+"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                stack.callback(signal.signal, number,
                               signal.signal(number, lambda number, _: asked.append(number)))
        process = subprocess.Popen(command.argv, cwd=command.cwd, env=command.environment(),
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            over, shown = False, log.tell()
            while not over:
                time.sleep(0.05)
                over = process.poll() is not None
                written = os.pread(log.fileno(), os.fstat(log.fileno()).st_size - shown, shown)
                shown += len(written)
                say(written.decode(errors="replace"), end="")
                if len(asked) > heard or time.monotonic() > deadline:
                    late = late or not asked
                    heard, deadline = len(asked), time.monotonic() + FLUSH_SECONDS
                    signal_group(process, next(ladder, signal.SIGKILL))
        finally:
            signal_group(process, signal.SIGKILL)
    ended = Outcome(process.returncode, "", directory, time.monotonic() - start)
    if asked:
        ended.code, ended.reason = 128 + asked[0], f"got {signal.Signals(asked[0]).name}"
    elif late:
        ended.code, ended.reason = TIMEOUT, f"stopped after {ended.seconds:.0f} s by --timeout"
    return ended


def signal_group(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def failure(ended, log_text):
    """(exit code, reason) of a command that did not end well."""
    if ended.reason:
        return ended.code, ended.reason
    if known := known_failure(log_text):
        return known[1], f"{known[0]}. {known[2]}"
    number = -ended.code if ended.code < 0 else ended.code - 128
    name = signal.Signals(number).name if number in list(signal.Signals) else None  # 160 is just a code
    if name in ("SIGINT", "SIGTERM"):
        return 128 + number, f"the profiled program ended by {name}"
    if name:
        return PROGRAM_FAILED, f"it died of {name}. Try the lightest trace, and the program by itself."
    return PROGRAM_FAILED, last_exception(log_text)[1] or f"it ended with exit code {ended.code}"


def profile(wrapper):
    """Check, make room, run, judge, report. Raises UserError where nothing was run."""
    commands, options, log, code, reason = wrapper.commands(), wrapper.options, "", OK, ""
    if options.dry_run:
        say(wrapper.script_text(commands).rstrip())
        return Outcome(OK)
    skipped = options.skip_preflight and wrapper.tool.path and not options.preflight
    problems = [] if skipped else list(wrapper.problems())
    wrapper.notes += [] if skipped else [f"warning: {text}" for text in wrapper.warnings()]
    listed = [f"problem: {what}. {advice}" for _, what, advice in problems]
    verdict = worst_code(code for code, *_ in problems)
    if options.preflight:
        say(*wrapper.about(), *wrapper.notes, *listed)
        say("can profile here" if verdict == OK else f"cannot profile here: {MEANING[verdict]}")
        return Outcome(verdict)
    if problems:
        print(*map(printable, listed), sep="\n", file=sys.stderr)
        raise UserError(f"nothing was run: {'; '.join(what for _, what, _ in problems)} (--dry-run shows the "
                        "commands, --skip-preflight skips these checks)", verdict)
    Directory(wrapper.directory, bool(options.output_dir), options.force, "-o").claim(wrapper.continues)
    if wrapper.continues:  # only what this writes again
        for name in (os.path.basename(wrapper.records), *(command.log for command in commands)):
            files.set_aside(os.path.join(wrapper.directory, name))
    write_records(wrapper, commands)
    say(*wrapper.notes, *(shlex.join(command.argv) for command in commands))
    start = time.monotonic()
    for command in commands:  # up to the first that fails; what is there is judged: half a trace is a trace
        ended = run(command, wrapper.directory, options.timeout)
        log = pathlib.Path(wrapper.directory, command.log).read_text(errors="replace")
        log = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", log)  # colours
        if ended.code or ended.reason:
            code, reason = wrapper.explain(*failure(ended, log), log)
            break
    write_manifest(wrapper, commands, Outcome(code, reason))  # tells the judge how many steps there were
    try:
        verdict, words = wrapper.judge(log)
    except (UserError, OSError) as error:  # damaged results; or a full disk
        verdict, words = NO_DATA, str(error)
    if code == OK:
        code, reason = verdict, words
    elif verdict == OK:
        reason += f" (what is there: {words})"
    outcome = Outcome(code, reason, wrapper.directory, time.monotonic() - start)
    write_manifest(wrapper, commands, outcome)
    if code == OK:
        say(f"{wrapper.script}: done in {outcome.seconds:.0f} s, {reason}; in {wrapper.directory}")
    else:
        print(f"{wrapper.script}: {MEANING.get(code, 'failed')}: {reason.rstrip('.')}. Its output: "
              f"{os.path.join(wrapper.directory, command.log)}", file=sys.stderr)
    return outcome


def write_records(wrapper, commands):
    """What is run (command.txt), in which environment (env.txt), and the files that the commands need."""
    os.makedirs(wrapper.records, exist_ok=True)
    variables = [f"{name}={os.environ[name]}\n" for name in sorted(os.environ) if name.startswith(RECORDED)]
    files.write_text(os.path.join(wrapper.records, "env.txt"), "".join(variables))
    files.write_text(os.path.join(wrapper.records, "command.txt"), wrapper.script_text(commands))
    for name, content in wrapper.files().items():
        files.write_text(os.path.join(wrapper.directory, name), content)


def write_manifest(wrapper, commands, outcome):
    """How it ended, and the steps that kernels are counted for: nobody knows those of a failed program, and a
    mode has none."""
    training, steps = wrapper.answer.get("training_params", {}), (None, None)
    if outcome.code == OK and "num_steps" in training and not wrapper.answer["asked"]:
        measured, warmup = training["num_steps"], training.get("warmup_steps", 0)
        steps = (measured, f"{measured} measured steps, nothing else") if wrapper.selected else (
            measured + warmup, f"{measured} measured + {warmup} warm-up steps, {wrapper.counted}")
    files.write_json(os.path.join(wrapper.records, "manifest.json"), {
        "script": wrapper.script, "exit_code": outcome.code, "reason": outcome.reason,
        "seconds": round(outcome.seconds, 3), "steps": steps[0], "steps_counted": steps[1],
        "about": wrapper.about(), "notes": wrapper.notes, "commands": [command.argv for command in commands]})
