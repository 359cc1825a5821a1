"""How a program ends and what it leaves on disk: exit codes, user errors, atomic files, stop requests.

Standard library only, since the AMD wrappers use it where there is no torch.
"""
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import time

# Exit codes of every program of this project; a signal adds its number to 128.
OK, FAILED, USAGE, MISSING, NO_GPU, PROGRAM_FAILED, NO_DATA, TIMEOUT = 0, 1, 2, 3, 4, 5, 6, 124
CLOSED_PIPE = 141  # the reader of the output has gone


EXIT_CODES = """exit codes: 0 done, 1 the thing checked failed, 2 wrong use or unreadable input, 3 a tool or
package is missing, 4 no usable GPU, 5 the profiled program failed, 6 a profiler left no data, 124 time
limit, 130 and 143 interrupted, 141 the reader of the output has gone"""


class UserError(Exception):
    """Ends the program with its message on stderr and this exit code; details, if any, are the lines to print
    instead of it."""

    def __init__(self, message, code=USAGE, details=()):
        super().__init__(message)
        self.code, self.lines = code, tuple(details) or (str(message),)


def write_atomically(path, write):
    """write(file) into a temporary file beside path, then rename: a kill leaves the old file or the new."""
    path = os.path.realpath(path)  # through a symbolic link, not over it
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=os.path.basename(path), suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def write_text(path, text):
    """write_atomically() for text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path, result):
    """write_atomically() for what json can hold; NaN and infinity are errors."""
    write_text(path, json.dumps(result, indent=2, allow_nan=False))


def leave(number, _frame):
    """Ctrl-C while modules are imported: nothing is there yet that would have to be saved."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def quiet_interrupts():
    """Until exit_code() begins, Ctrl-C ends the program with one line; unless it is ignored, as shells have
    it for what runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def finite(value):
    """The same, lists and dicts within it too, with None for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StopRequest:
    """Within, the first SIGINT or SIGTERM only asks the loop to stop; the second one acts at once."""

    def __enter__(self):
        self.signal = None
        self.previous = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number, _frame):
        self.signal = number
        self.restore()

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self.restore()


def require_directory(path, file=None):
    """Raise UserError if a directory cannot be made or written into; it names the file if one is given."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file or f'into {path}'}: {error.strerror}") from None


def results_directory(settings, path):
    """Make the directory that a run writes its results into, path the main one. Nothing is overwritten: the
    default directory is set aside whole, unless a run in it is resumed; in one that the user named, what is
    at path is. Raises UserError."""
    directory = settings.profiler.profile_dir
    if directory == type(settings.profiler)().profile_dir and not settings.training.resume:
        fresh_directory(directory, named=False, force=False)
    require_directory(directory)
    set_aside(path)


def require_writable(path):
    """Raise UserError now rather than after hours of training if path cannot be written. None is fine."""
    if path is None:
        return
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a directory")
    require_directory(os.path.dirname(os.path.abspath(path)), path)


def set_aside(path):
    """Rename what is at path, file or directory, to <path>.old-<time>; returns the new name, None where
    nothing is there."""
    if not os.path.lexists(path):
        return None
    target = base = f"{os.path.normpath(path)}.old-{time.strftime('%Y%m%d_%H%M%S')}"
    again = 1
    while os.path.lexists(target):
        again += 1
        target = f"{base}-{again}"
    os.rename(path, target)
    return target


def fresh_directory(path, named, force):
    """Make the directory for a program's results. One that the user named and that is not empty is refused
    unless forced; results in the default one are set aside."""
    if os.path.isdir(path) and os.listdir(path) and not (named and force):
        if named:
            raise UserError(f"{path} is not empty: name a fresh directory, or add --force")
        set_aside(path)
    require_directory(path)


def require_packages(program, *names):
    """End the program with one line where a package is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program}: error: {sys.executable} lacks {', '.join(missing)}: pip install -r "
              "requirements.txt, or activate the environment that has it; scripts take PYTHON=... as well",
              file=sys.stderr)
        raise SystemExit(MISSING)


def announce(text):
    """Say what takes a while now: on stderr where that is a terminal, else on stdout, so that a failure still
    leaves one line on stderr."""
    with contextlib.suppress(OSError):  # whatever is wrong with it, the next line tells
        print(text, file=sys.stderr if sys.stderr and sys.stderr.isatty() else sys.stdout, flush=True)


OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|allocate memory", re.IGNORECASE)


def explain(error):
    """(message, exit code) for errors of the machine rather than of this program; (None, None) for others."""
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or OUT_OF_MEMORY.search(str(error)):
        return "out of memory: lower --batch-size, --seq-len or --num-seqs, or add --use-amp", FAILED
    if "No working C++ compiler" in str(error) or "working triton installation" in str(error):
        return ("torch.compile needs a C++ compiler on CPU (g++) or Triton on a GPU (pip install triton)",
                MISSING)
    return None, None


def drop_output():
    """Send what is still to be printed nowhere: stdout's reader has gone, or its disk is full, and Python
    would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(run, argv, program):
    """What run(argv) returns, with every expected failure as one line on stderr and its exit code."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever started the program
    try:
        code = run(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        message, code = "\n".join(error.lines), error.code
    except (MemoryError, RuntimeError) as error:
        message, code = explain(error)
        if message is None:
            raise
    except KeyboardInterrupt:
        message, code = "interrupted", 128 + signal.SIGINT
    except OSError as error:
        if error.filename is None:  # it was stdout
            drop_output()
        if isinstance(error, BrokenPipeError):
            return CLOSED_PIPE
        message = f"{error.filename or 'standard output'}: {error.strerror}"
        code = USAGE if error.filename else FAILED
    print(f"{program}: error: {message}", file=sys.stderr)
    return code
