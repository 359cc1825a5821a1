"""Runs never mix: directories and files that one process at a time writes, and holds for as long as it runs.

The locks are the system's, so that a kill ends them. Where a file system has none, nothing is held. Raises
BlockingIOError where another process holds what is asked for. Standard library only.
"""
import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass

F_GETPATH = 50  # fcntl.h of macOS, which has no /proc


@dataclass
class Held:
    path: str            # absolute, as it was
    handle: int          # open, and locked where that is possible
    goes: object = None  # what removes it at the end: os.rmdir of an empty directory, os.unlink of a mark

    def now(self):
        """Where the directory is now: somebody may have moved it. One that was deleted is made anew."""
        if same(self.path, self.handle):
            return self.path
        if not same(found := whereabouts(self.handle), self.handle):
            os.close(self.handle)
            found, self.handle = made_anew(self.path)
        return found


held = []  # by this process, in this order


def same(path, handle):
    """Whether this is the path of an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


def whereabouts(handle):
    """The path of an open directory."""
    if os.path.exists("/proc/self/fd"):
        return os.readlink(f"/proc/self/fd/{handle}")
    with contextlib.suppress(OSError):
        return os.fsdecode(fcntl.fcntl(handle, F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return ""


def lock(handle):
    """Lock an open file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass


def opened(path, how):
    """The handle of a path that is open and locked; anew where it was moved or removed meanwhile."""
    while True:
        handle = os.open(path, how, 0o666)  # to read; no child inherits it
        try:
            lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise
        if same(path, handle):
            return handle
        os.close(handle)


def hold_directory(path):
    """Make a directory, if there is none, and hold it; what this process holds already it keeps."""
    path = os.path.abspath(path)
    if any(same(path, place.handle) for place in held):
        return
    missing = not os.path.isdir(path)
    os.makedirs(path, exist_ok=True)
    handle = opened(path, os.O_DIRECTORY)
    held.append(Held(path, handle, os.rmdir if missing else None))


def hold_file(path):
    """Hold the right to write a file, by a hidden one beside it that goes at the end. Where that cannot be
    made, nothing is held."""
    directory, name = os.path.split(os.path.realpath(path))
    mark = os.path.join(directory, os.fsdecode(b".%s.lock" % os.fsencode(name)[:200]))
    if any(same(mark, place.handle) for place in held):
        return
    try:
        handle = opened(mark, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    except BlockingIOError:
        raise
    except OSError:
        return
    regular = stat.S_ISREG(os.fstat(handle).st_mode)
    held.append(Held(mark, handle, os.unlink if regular else None))


def made_anew(path):
    """(path, handle) of a new directory, held, with a number behind its name where the name is taken."""
    name, number = path, 1
    while True:
        try:
            os.makedirs(name)
            return name, opened(name, os.O_DIRECTORY)
        except (FileExistsError, BlockingIOError):
            number += 1
            name = f"{path}_{number}"


def present(path):
    """Where a path is now, if it lies in a directory that this process holds and that was moved since."""
    whole = os.path.abspath(path)
    for place in reversed(held):
        if whole == place.path or whole.startswith(place.path + os.sep):
            now = place.now()
            return path if now == place.path else os.path.normpath(now + whole[len(place.path):])
    return path


def let_go(path):
    """Hold a directory no longer."""
    for place in [place for place in held if place.path == os.path.abspath(path)]:
        held.remove(place)
        os.close(place.handle)


def release():
    """Hold nothing any more; directories that were made for nothing go."""
    while held:
        place = held.pop()
        with contextlib.suppress(OSError):
            if place.goes and same(place.path, place.handle):
                place.goes(place.path)
        os.close(place.handle)
