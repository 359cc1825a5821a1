"""How a run ends and what it leaves on disk: user errors, atomic files, stop requests."""
import json
import os
import re
import signal
import sys
import tempfile
import time

import torch


class UserError(Exception):
    """Ends the program with one line on stderr and this exit code (see the table in README.md)."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


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


def write_json(path, result):
    write_atomically(path, lambda file: file.write(json.dumps(result, indent=2, allow_nan=False).encode()))


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


def require_writable(path):
    """Raise UserError now rather than after hours of training if path cannot be written. None is fine."""
    if path is None:
        return
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a directory")
    require_directory(os.path.dirname(os.path.abspath(path)), path)


def set_aside(path):
    """Rename what is at path, file or directory, to <path>.old-<time>; nothing there is fine."""
    if not os.path.lexists(path):
        return
    target = base = f"{os.path.normpath(path)}.old-{time.strftime('%Y%m%d_%H%M%S')}"
    again = 1
    while os.path.lexists(target):
        again += 1
        target = f"{base}-{again}"
    os.rename(path, target)


def fresh_directory(path, named, force):
    """Make the directory for a program's results. One that the user named and that is not empty is refused
    unless forced; results in the default one are set aside."""
    if os.path.isdir(path) and os.listdir(path) and not (named and force):
        if named:
            raise UserError(f"{path} is not empty: name a fresh directory, or add --force")
        set_aside(path)
    require_directory(path)


OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|allocate memory", re.IGNORECASE)


def explain(error):
    """(message, exit code) for errors of the machine rather than of this program; (None, None) for others."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or OUT_OF_MEMORY.search(str(error)):
        return "out of memory: lower --batch-size, --seq-len or --num-seqs, or add --use-amp", 1
    if "No working C++ compiler" in str(error) or "working triton installation" in str(error):
        return "torch.compile needs a C++ compiler on CPU (g++) or Triton on a GPU (pip install triton)", 3
    return None, None


def exit_code(run, argv, program):
    """What run(argv) returns, with every expected failure as one line on stderr and its exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever started the program
    try:
        code = run(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        message, code = str(error), error.code
    except (MemoryError, RuntimeError) as error:
        message, code = explain(error)
        if message is None:
            raise
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except OSError as error:  # without a file name it is stdout: its reader has gone, or its disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails on it again at exit
        if isinstance(error, BrokenPipeError):
            return 141
        message, code = f"{error.filename or 'standard output'}: {error.strerror}", 2 if error.filename else 1
    print(f"{program}: error: {message}", file=sys.stderr)
    return code
