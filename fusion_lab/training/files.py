"""How a program ends and what it leaves on disk: exit codes, errors of the user, whole files, directories
that one run at a time writes into, Ctrl-C. Standard library only: the AMD wrappers use it without torch.
"""
import contextlib
import errno
import fcntl
import importlib.util
import io
import json
import math
import os
import re
import signal
import sys
import time

# Exit codes of every program of this project; a signal adds its number to 128.
OK, FAILED, USAGE, MISSING, NO_GPU, PROGRAM_FAILED, NO_DATA, TIMEOUT = 0, 1, 2, 3, 4, 5, 6, 124
CLOSED_PIPE = 141  # the reader of the output has gone

EXIT_CODES = """exit codes: 0 done, 1 the thing checked failed, 2 wrong use or unreadable input, 3 a tool or
package is missing, 4 no usable GPU, 5 the profiled program failed, 6 a profiler left no data, 124 time
limit, 129/130/143 interrupted, 141 the reader of the output has gone"""


class UserError(Exception):
    """Ends the program with its message on stderr and this exit code."""

    def __init__(self, message, code=USAGE):
        super().__init__(message)
        self.code = code


# --- Files --------------------------------------------------------------------------------------------------

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file is larger than `ulimit -f` allows"}


def unwritten(path, error):
    """The UserError for an OSError in writing to a path. A full disk is no wrong use."""
    return UserError(f"cannot write {path}: {FULL.get(error.errno, error.strerror)}",
                     FAILED if error.errno in FULL else USAGE)


def write_atomically(path, write):
    """write(file) into <path>.part, then rename that: a kill leaves the old file or the new one, whole. Since
    write() fills memory, it is not the one that meets a full disk. Raises UserError."""
    content = io.BytesIO()
    write(content)
    path = os.path.realpath(path)  # through a symbolic link, not over it
    part = f"{path}.part"
    try:
        require_file(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(part, "wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise unwritten(path, error) from None


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


def require_file(path):
    """Raise OSError where what has this name is no regular file: a rename would replace a device, too."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(0, "is a directory" if os.path.isdir(path) else "not a regular file", path)


def read_json(path, what="file"):
    """The object in a JSON file, NaN and infinity as None. Raises UserError that names it: what says what it
    should be."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(), parse_constant=lambda _: None)
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path}: no JSON ({str(error)[:100]})") from None
    if not isinstance(content, dict):
        raise UserError(f"{what} {path}: must hold a JSON object")
    return content


# --- Directories, and files that one run keeps writing ------------------------------------------------------

LOCK = ".lock"  # behind a file's name
held = {}  # {handle: path} of what this process has locked; its end, a kill too, lets go of it


def claim(path, named=False, force=False, resumed=False, flag="--profile-dir"):
    """Make the directory of a run's results and hold it for as long as this process lives. What is in it
    already is set aside in a default one, and an error in one that the user named; with force it is set aside
    there, too. A resumed run goes on in it. flag: by which users name it. Raises UserError."""
    try:
        os.makedirs(path, exist_ok=True)
        hold(path, os.O_DIRECTORY)
        earlier = os.listdir(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{path}: cannot be written into")
    except OSError as error:
        raise UserError(f"{flag} {path}: results go into a directory, which cannot be made or opened: "
                        f"{error.strerror}") from None
    if earlier and not resumed:
        if named and not force:
            raise UserError(f"{path} is not empty: name a fresh directory, or add --force")
        if f"{os.getcwd()}{os.sep}".startswith(f"{os.path.realpath(path)}{os.sep}"):
            raise UserError(f"{path} cannot be set aside: the current directory is in it")
        print(f"{path} held earlier results, which are in {set_aside(path)} now")
        return claim(path, flag=flag)
    return path


def claim_file(path):
    """Hold the right to write a file for as long as this process lives, by a lock beside it. Raises UserError
    where another run has it, or it cannot be written."""
    place = os.path.realpath(path)
    try:
        require_file(place)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        hold(f"{place}{LOCK}", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise unwritten(path, error) from None


def hold(path, flags):
    """Open and lock what is at path; what this process holds already it keeps."""
    handle = os.open(path, flags, 0o666)
    if any(os.path.samestat(os.fstat(handle), os.fstat(other)) for other in held):
        os.close(handle)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{str(path).removesuffix(LOCK)}: another run is writing into it; name another one"
                        ) from None
    except OSError:
        pass  # a file system without locks
    held[handle] = path


def release():
    """Hold nothing any more."""
    while held:
        handle, path = held.popitem()
        if str(path).endswith(LOCK):
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(handle)


def set_aside(path):
    """Rename what is at path, file or directory, to <path>.old-<time>; returns the new name, None where
    nothing is there."""
    if not os.path.lexists(path):
        return None
    target = base = f"{os.path.normpath(path)}.old-{time.strftime('%Y%m%d_%H%M%S')}"
    number = 1
    while os.path.lexists(target):
        number += 1
        target = f"{base}-{number}"
    os.rename(path, target)
    return target


# --- Signals ------------------------------------------------------------------------------------------------


def quiet(name, *packages):
    """The first call of a program, with its __name__ and the packages that it imports next: an older Python
    or a missing package is refused, and Ctrl-C ends the program with one line, wherever it is; loops that
    have something to save take a StopRequest. An ignored Ctrl-C stays ignored, as shells have it for what
    runs in the background."""
    if sys.version_info < (3, 10):  # noqa: UP036  whoever has an older one is told
        print(f"error: Python 3.10 or newer is needed; {sys.executable} is older", file=sys.stderr)
        sys.exit(MISSING)
    if name != "__main__":
        return
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, stream) is None:  # closed, as by `2>&-`: the next file to open would take its place
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, stream, open(number, "r+", closefd=False))
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the current directory is not there any more; change to another one", file=sys.stderr)
        sys.exit(USAGE)
    require_packages(os.path.basename(sys.argv[0]), *packages)
    # torch 2.13 prints two lines each time its profiler starts; 5, the default, shows them, and hides errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)


def end_interrupted(number, _frame):
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


class StopRequest:
    """Within, the first SIGINT, SIGTERM or SIGHUP only asks the loop to stop; the second one acts at once,
    unless this is patient: what starts several processes may pass on one signal twice. What is ignored, as
    SIGHUP under nohup, stays ignored."""

    def __init__(self, patient=False):
        self.patient = patient

    def __enter__(self):
        self.signal = None
        self.previous = {number: signal.signal(number, self.ask)
                         for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                         if signal.getsignal(number) != signal.SIG_IGN}
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


# --- The end of a program -----------------------------------------------------------------------------------


def require_packages(program, *names):
    """End the program with one line where a package is missing. Triton is in no list of ours, because a torch
    for GPUs brings the one that it needs."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        install = "triton" if missing == ["triton"] else "-r requirements.txt"
        say_why(program, f"{sys.executable} lacks {', '.join(missing)}: pip install {install}, or activate "
                "the environment that has it; scripts take PYTHON=... as well")
        raise SystemExit(MISSING)


def interpreter_fault():
    """Why Triton's interpreter cannot run kernels here, one line; None where it can."""
    import numpy
    import triton
    if triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return "Triton 3.6's interpreter fails with NumPy 2.4: pip install 'numpy<2.4', or a newer Triton"
    return None


OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|allocate memory|start new thread", re.IGNORECASE)


def explain(error):
    """(exit code, message) for errors of the machine rather than of this program; None for others."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" \
            or OUT_OF_MEMORY.search(str(error)):
        return FAILED, "out of memory: lower --batch-size or another size, or add --use-amp"
    if re.search("gloo|nccl", str(error), re.IGNORECASE):
        return FAILED, f"a rank lost the others: {str(error).splitlines()[0][:200]}"
    if "No working C++ compiler" in str(error) or "working triton installation" in str(error):
        return MISSING, ("torch.compile needs a C++ compiler on CPU (g++) or Triton on a GPU (pip install "
                         "triton)")
    return None


def exit_code(run, argv, program):
    """What run(argv) returns, or the exit code of an expected failure, which is one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that the terminal lacks
    try:
        code, reason = ending(run, argv)
        if reason:
            say_why(program, reason)
        return code
    finally:
        release()


def ending(run, argv):
    """(exit code, why it failed or None) of run(argv)."""
    try:
        try:
            code = run(argv)
        except SystemExit as ended:  # after --help, say, where argparse passes over what cannot be written
            if not ended.code:
                print(end="", flush=True)
            raise
        print(end="", flush=True)
        return code, None
    except UserError as error:
        return error.code, str(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "interrupted"
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE, None
    except OSError as error:
        if error.filename is not None:
            return (FAILED if error.errno in FULL else USAGE), f"{error.filename}: {error.strerror}"
        drop_output()  # a full disk behind it, on which Python's end would fail, too
        return FAILED, f"the output cannot be written: {FULL.get(error.errno, error.strerror or error)}"
    except (MemoryError, RuntimeError) as error:
        if expected := explain(error):
            return expected
        raise


def say_why(program, reason):
    print(f"{program}: error: {printable(reason)}", file=sys.stderr)


def drop_output():
    """Send what is still to be printed nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def printable(text):
    """Text on one line: control characters, such as a name may hold, are spelled out."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in str(text))


def time_left(seconds):
    """In words."""
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"


def counted(number, noun):
    """As in "1 step" and "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
