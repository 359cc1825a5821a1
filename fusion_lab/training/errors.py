"""How a program begins and ends: exit codes, errors of the user, signals. Standard library only, because the
wrappers of AMD's profilers use it without torch."""
import contextlib
import errno
import importlib.util
import io
import os
import re
import signal
import sys

from fusion_lab.training.words import printable

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


FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file is larger than `ulimit -f` allows"}


def unwritten(path, error):
    """The UserError for an OSError in writing to a path. A full disk is no wrong use."""
    return UserError(f"cannot write {path}: {FULL.get(error.errno, error.strerror)}",
                     FAILED if error.errno in FULL else USAGE)


at_end = contextlib.ExitStack()  # what exit_code() does last, such as letting go of locks

# --- Signals ------------------------------------------------------------------------------------------------


def begin(name, *packages):
    """The first call of a program, with its __name__ and the packages that it imports next. An older Python
    and a missing package are refused here. From here on, Ctrl-C ends the program with one line, also during
    the imports; a loop that has something to save uses a StopRequest instead. Where Ctrl-C is ignored
    already, as in a shell's background jobs, it stays ignored."""
    if sys.version_info < (3, 10):  # noqa: UP036  an older Python says so here
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
    """Within, the first SIGINT, SIGTERM or SIGHUP only asks the loop to stop, and the second one acts at
    once. patient: the second one asks, too, because what starts several processes may pass on one signal
    twice. A signal that is ignored, as SIGHUP under nohup, stays ignored."""

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
        at_end.close()


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
