"""How long reading may take: what is damaged or made to harm may have no end. Standard library only."""
import contextlib
import math
import time

from fusion_lab.training.files import UserError

SECONDS = 60  # for the files of a directory
ends = math.inf  # when reading has taken too long


class TooMuch(UserError):
    """Files that take too long to read, or have no end."""


@contextlib.contextmanager
def limited():
    """Within, reading may take SECONDS: who reads asks too_late(), and raises too_slow()."""
    global ends
    ends = time.monotonic() + SECONDS
    try:
        yield
    finally:
        ends = math.inf


def too_late():
    return time.monotonic() > ends


def too_slow(path):
    return TooMuch(f"{path}: takes more than {SECONDS} s to read, with what came before it")
