"""How a program ends and what it leaves on disk: exit codes, user errors, atomic files, stop requests.

Standard library only, since the AMD wrappers use it where there is no torch.
"""
import codecs
import contextlib
import fcntl
import importlib.util
import io
import json
import math
import os
import re
import signal
import sys
import tempfile
import time

from fusion_lab.training.interrupts import Raised, gives_no_more, open_streams
from fusion_lab.training.locks import hold_directory, hold_file, let_go, present, release
from fusion_lab.training.reading import open_regular, require_regular

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


class Noting(io.BufferedWriter):
    """A file that keeps the first OSError of its write(), because torch.save tells of a full disk as
    something else, and so do pictures, which are written by file number where there is one."""
    error = None

    def fileno(self):
        raise io.UnsupportedOperation

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def write_atomically(path, write):
    """write(file) into a temporary file beside path, then rename: a kill leaves the old file or the new. What
    killed runs left behind is removed. Only regular files are replaced, never a device or FIFO."""
    refuse_link_into_nowhere(path := present(path))
    path = os.path.realpath(path)  # through a symbolic link, not over it
    directory, file = os.path.split(path)
    try:
        os.makedirs(directory, exist_ok=True)
        require_regular(path)
        remove_leftovers(directory, file)
        temporary, handle = temporary_file(directory, file)
        try:
            with Noting(io.FileIO(handle, "wb")) as file:
                try:
                    write(file)
                    file.flush()
                except Exception as error:
                    raise file.error or error from None
                os.fsync(handle)
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(handle, 0o666 & ~umask)
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


LONGEST_STEM = 60  # letters of a name that its temporary file repeats; a letter is up to 4 of the 255 bytes


def temporary_file(directory, name):
    """(path, handle) of an empty <name>????????.part, locked for as long as it is open: as long as somebody
    writes it. A file system without locks has it unlocked."""
    while True:
        handle, path = tempfile.mkstemp(dir=directory, prefix=name[:LONGEST_STEM], suffix=".part")
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(path):  # or remove_leftovers() of another process came between
            return path, handle
        os.close(handle)


def remove_leftovers(directory, name):
    """Delete this user's temporary files of killed runs: those that nobody has locked."""
    pattern = re.compile(re.escape(name[:LONGEST_STEM]) + r"[a-z0-9_]{8}\.part")
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # locked, gone meanwhile, or on a file system without locks
            if pattern.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with open_regular(entry.path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


def write_text(path, text):
    """write_atomically() for text; names of files in it are the bytes that they are on disk."""
    write_atomically(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def write_json(path, result):
    """write_atomically() for what json can hold; NaN and infinity are errors."""
    write_text(path, json.dumps(result, indent=2, allow_nan=False))


def finite(value):
    """The same, lists and dicts within it too, with None for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StopRequest:
    """Within, the first SIGINT or SIGTERM only asks the loop to stop; the second one acts at once, unless
    this is patient: what starts several processes may pass on one signal twice."""

    def __init__(self, patient=False):
        self.patient = patient

    def __enter__(self):
        self.signal = None
        self.previous = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number, _frame):
        self.signal = number
        if not self.patient:
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


def run_directory(settings, main_file):
    """The directory that a run writes its results into; see results_directory. Nothing is overwritten: the
    default directory is set aside whole, unless a run in it is resumed; in one that the user named, what its
    main file will be called is. Its checkpoints are this run's, too. Raises UserError."""
    directory, training = settings.profiler.profile_dir, settings.training
    default = is_default(settings.profiler)
    if default and not training.resume:
        place, start = (os.path.realpath(name) for name in (directory, training.init_from or os.sep))
        if os.path.commonpath([place, start]) == place:
            raise UserError(f"--init-from {training.init_from}: it lies in the directory for this run's "
                            "results, which set aside what is there; name another --profile-dir")
    directory = results_directory(directory, default, fresh=default and not training.resume)
    for flag in ("save_checkpoint", "save_best"):
        require_own_checkpoint(getattr(training, flag), f"--{flag.replace('_', '-')}", directory, main_file)
    set_aside(os.path.join(directory, main_file))
    return directory


def is_default(profiler):
    return profiler.profile_dir == type(profiler)().profile_dir


def in_own_directory(settings):
    """Settings by which a mode writes where no other program does. Raises UserError."""
    return settings.having(profile_dir=results_directory(
        settings.profiler.profile_dir, is_default(settings.profiler)))


def results_directory(path, default, fresh=False):
    """Make and hold the directory that a program writes its results into; returns its path. A fresh one has
    nothing in it: that is set aside. Raises UserError."""
    def hold(name):
        try:
            hold_directory(name)
            if fresh and os.listdir(name):
                let_go(name)
                set_aside(name)
                hold_directory(name)
            require_directory(name)
        except BlockingIOError:
            raise
        except OSError as error:
            raise UserError(f"cannot write into {name}: {error.strerror}") from None
    return first_free(path, hold, default)


def first_free(path, hold, default):
    """The path that hold(path) takes. Where another run holds the default one, it is one with a number behind
    its name, which is said; one that the user named is refused. Raises UserError."""
    name, number = path, 1
    while True:
        try:
            hold(name)
            break
        except BlockingIOError:
            if not default:
                raise UserError(f"{path}: another run is writing into it; name another directory") from None
            number += 1
            name = f"{path.rstrip(os.sep)}_{number}"
    if name != path:
        print(f"Another run is writing into {path}: the results of this one go into {name}")
    return name


def require_own_checkpoint(path, flag, directory, main_file):
    """Raise UserError now rather than after hours of training if a checkpoint cannot be written, or is
    another run's, or a result file of this one. None is fine."""
    if path is None:
        return
    require_writable(path)
    results = (os.path.join(directory, name) for name in (main_file, *RESULTS_OF_A_RUN))
    if os.path.realpath(path) in map(os.path.realpath, results):
        raise UserError(f"{flag} {path}: this run writes other results into it; name another file")
    try:
        hold_file(path)
    except BlockingIOError:
        raise UserError(f"{flag} {path}: another run is writing it; name another file") from None


RESULTS_OF_A_RUN = ("metrics.jsonl", "learning_curve.png", "contacts.png", "contacts.tsv",
                    "memory_profile.json", "fusion_analysis.json")


def require_writable(path):
    """Raise UserError now rather than after hours of training if path cannot be written; what killed runs
    left beside it goes. Directories of a relative path are made, but a missing one of an absolute path is
    more likely misspelled, or not mounted. None is fine."""
    if path is None:
        return
    try:
        require_regular(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    refuse_link_into_nowhere(path)
    directory, name = os.path.split(os.path.abspath(path))
    if os.path.isabs(path) and not os.path.lexists(directory):
        raise UserError(f"cannot write {path}: there is no directory {directory}")
    require_directory(directory, path)
    remove_leftovers(directory, name)


def refuse_link_into_nowhere(path):
    """Raise UserError rather than make directories that somebody else named."""
    if os.path.islink(path) and not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise UserError(f"cannot write {path}: a link into a directory that does not exist")


def set_aside(path):
    """Rename what is at path, file or directory, to <path>.old-<time>; returns the new name, None where
    nothing is there."""
    path = present(path)
    if not os.path.lexists(path):
        return None
    os.rename(path, target := name_aside(path))
    return target


def name_aside(path):
    """<path>.old-<time>, a name that is free."""
    target = base = f"{os.path.normpath(path)}.old-{time.strftime('%Y%m%d_%H%M%S')}"
    again = 1
    while os.path.lexists(target):
        again += 1
        target = f"{base}-{again}"
    return target


def fresh_directory(path, named, force):
    """results_directory() for a program that begins in an empty one, or in what the user named and forced.
    One that the user named and that is not empty is refused otherwise."""
    if named and not force and os.path.isdir(path) and os.listdir(path):
        raise UserError(f"{path} is not empty: name a fresh directory, or add --force")
    return results_directory(path, default=not named, fresh=not named)


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
    if gives_no_more(error):
        return f"{error}: the system gives no more memory or threads; see ulimit -v and ulimit -u", FAILED
    if "No working C++ compiler" in str(error) or "working triton installation" in str(error):
        return ("torch.compile needs a C++ compiler on CPU (g++) or Triton on a GPU (pip install triton)",
                MISSING)
    return None, None


def drop_output():
    """Send what is still to be printed nowhere: stdout's reader has gone, or its disk is full, and Python
    would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(error):
    """For codecs, where stdout's encoding lacks a letter: bytes of a file's name stay what they are, others
    are spelled out."""
    letter = error.object[error.start]
    is_byte = "\udc80" <= letter <= "\udcff"
    return letter.encode("ascii", "surrogateescape") if is_byte else ascii(letter)[1:-1], error.start + 1


codecs.register_error("shown", shown)


def printable(text):
    """Text on one line: control characters, such as a name may hold, are spelled out."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in str(text))


def counted(number, noun):
    """As in "1 step" and "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def exit_code(run, argv, program):
    """What run(argv) returns, with every expected failure as one line on stderr and its exit code."""
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        with contextlib.suppress(OSError):  # it flushes first; if that fails, what is printed next says so
            sys.stdout.reconfigure(errors="shown")
    with Raised():
        try:
            code, lines = ended(run, argv)
            say_why(program, lines)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
            say_why(program, ["interrupted"])
        finally:
            release()
    return code


def say_why(program, lines):
    if lines:
        print(f"{program}: error: " + "\n".join(map(printable, lines)), file=sys.stderr)


def ended(run, argv):
    """(exit code, lines that say why) of run(argv)."""
    try:
        code = run(argv)
        sys.stdout.flush()
        return code, ()
    except UserError as error:
        return error.code, error.lines
    except (MemoryError, RuntimeError) as error:
        message, code = explain(error)
        if message is None:
            raise
        return code, [message]
    except OSError as error:
        if error.filename is not None:
            return USAGE, [f"{error.filename}: {error.strerror}"]
        where = "standard output" if output_fails() else "writing a file"
        return (CLOSED_PIPE, ()) if isinstance(error, BrokenPipeError) else \
            (FAILED, [f"{where}: {error.strerror or error}"])


def output_fails():
    """Whether stdout takes nothing any more; what is still to be printed goes nowhere then. A flush that has
    failed throws away what it had, so the next one tells nothing without another letter."""
    try:
        sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return False
    except OSError:
        drop_output()
        return True
