"""Whole files: text, JSON, anything; and what is set aside. Standard library only."""
import contextlib
import io
import json
import math
import os
import time

from fusion_lab.training.errors import UserError, unwritten


def write_atomically(path, write):
    """write(file) fills memory; this goes into <path>.part, which is renamed then. So a kill leaves the old
    file or the new one, whole, and write() never meets a full disk. Raises UserError."""
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
    """A copy of a value, lists and dicts included, with None for each number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_file(path):
    """Raise OSError if something other than a regular file is at path; a rename would replace even a
    device."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(0, "is a directory" if os.path.isdir(path) else "not a regular file", path)


def read_json(path, what="file"):
    """The object in a JSON file, NaN and infinity as None. Raises UserError, which calls the file `what`."""
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
