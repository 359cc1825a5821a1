"""Reading files that anybody may have written, cut short or damaged. Raises OSError for the file and
ValueError for what it holds, nothing else. Standard library only."""
import errno
import json
import os
import stat


def require_regular(path):
    """Raise OSError if what is at path is no regular file: a FIFO would hang, a device may have no end, and
    writing to one may harm the machine. Nothing there is fine."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        number, words = (errno.EISDIR, "is a directory") if stat.S_ISDIR(mode) else \
            (errno.EINVAL, "not a regular file")
        raise OSError(number, words, os.fspath(path))


def open_regular(path):
    """An open binary file."""
    require_regular(path)
    return open(path, "rb")


def read_regular(path):
    """The bytes of a file."""
    with open_regular(path) as file:
        return file.read()


DEEPEST = 50  # lists and objects within each other; no file of this project has ten


def parse_json(text, nan=False):
    """What JSON text (or bytes) holds. Raises ValueError, also where it is nested too deeply, or has a string
    that cannot be written again, or NaN; with nan, that becomes None."""
    try:
        content = json.loads(text, parse_constant=(lambda _: None) if nan else refuse_constant)
        json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape")  # which bytes of names pass
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [content]
    for _ in range(DEEPEST):
        level = [part for whole in level if isinstance(whole, (dict, list))
                 for part in (whole.values() if isinstance(whole, dict) else whole)]
    if any(isinstance(part, (dict, list)) for part in level):
        raise ValueError("nested too deeply")
    return content


def refuse_constant(name):
    raise ValueError(f"{name} is no number")


def read_json(path, nan=False):
    """The object in a JSON file; see parse_json."""
    content = parse_json(read_regular(path), nan)
    if not isinstance(content, dict):
        raise ValueError("must be an object")
    return content
