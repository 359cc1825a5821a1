"""The one place that starts a profiler: in its own process group, shown, logged, and ended in order."""
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from fusion_lab.rocm.failures import known_failure, last_exception
from fusion_lab.training.files import PROGRAM_FAILED, TIMEOUT, drop_output

FLUSH_SECONDS = 60  # how long a profiler may write after SIGINT before it gets SIGTERM, then SIGKILL
PIPE_SECONDS = 10   # how long what a command has left behind may keep its output


def say(*lines):
    """Print, also where nobody reads any more (`| head`): a session ends in order, its files are complete."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        drop_output()


@contextlib.contextmanager
def said_if_slow(text):
    """Say on stderr what takes longer than a moment; what is refused at once leaves its one line alone."""
    timer = threading.Timer(1.2, print, [text], dict(file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    """Run a command in its own process group, its output shown and logged. Ctrl-C, a kill and the time limit
    all reach the group as SIGINT, so that the trainer ends its step and the profiler writes its files. What
    has not ended FLUSH_SECONDS later, or at a second Ctrl-C, gets SIGTERM, then SIGKILL."""
    start = time.monotonic()
    deadline, ladder = start + (timeout or float("inf")), iter((signal.SIGINT, signal.SIGTERM))
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
        reader.join(PIPE_SECONDS)
        if reader.is_alive():  # a grandchild still holds the pipe
            signal_group(process, signal.SIGKILL)
            reader.join(PIPE_SECONDS)
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
    if known := known_failure(log_text):
        return known[1], f"{known[0]}. {known[2]}"
    number = -ended.code if ended.code < 0 else ended.code - 128
    if number in (signal.SIGINT, signal.SIGTERM):
        return 128 + number, f"the profiled program ended by {signal.Signals(number).name}"
    if number in list(signal.Signals):  # not all numbers up to 64 are, so 160 is a code like any other
        return PROGRAM_FAILED, (f"it died of {signal.Signals(number).name}. Try the lightest trace, and the "
                                "same program without the profiler.")
    return PROGRAM_FAILED, last_exception(log_text)[1] or f"it ended with exit code {ended.code}"
