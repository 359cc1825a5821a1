"""Directories that one process at a time writes into, and what a run writes there. Needs no torch."""
import contextlib
import fcntl
import os

from fusion_lab.training.errors import UserError, at_end, unwritten
from fusion_lab.training.files import finite, require_file, set_aside, write_json
from fusion_lab.training.options import ProfilerConfig

LOCK = ".lock"  # behind a file's name
held = {}  # {handle: path} that this process has locked; when it ends, even by a kill, the locks are gone


class Directory:
    """A directory that one process at a time writes its results into; nothing is in it, or is moved, before
    claim(). named: the user chose it, by this flag; force: what is in it may be set aside even so."""

    def __init__(self, path, named=False, force=False, flag="--profile-dir"):
        self.path, self.named, self.force, self.flag = path, named, force, flag

    def claim(self, resumed=False):
        """Make it and hold it for as long as this process lives; returns self. Earlier results in it are set
        aside or, in a directory that the user named, refused. A resumed run goes on beside them. Raises
        UserError."""
        try:
            os.makedirs(self.path, exist_ok=True)
            hold(self.path, os.O_DIRECTORY)
            earlier = os.listdir(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise UserError(f"{self.path}: cannot be written into")
        except OSError as error:
            raise UserError(f"{self.flag} {self.path}: results go into a directory, which cannot be made or "
                            f"opened: {error.strerror}") from None
        if not earlier or resumed:
            return self
        if self.named and not self.force:
            raise UserError(f"{self.path} is not empty: name a fresh directory, or add --force")
        if f"{os.getcwd()}{os.sep}".startswith(f"{os.path.realpath(self.path)}{os.sep}"):
            raise UserError(f"{self.path} cannot be set aside: the current directory is in it")
        print(f"{self.path} held earlier results, which are in {set_aside(self.path)} now")
        return self.claim()

    def file(self, name):
        return os.path.join(self.path, name)


class RunDirectory(Directory):
    """--profile-dir of a program. writes: whether this process writes into it, of several ranks the first."""

    def __init__(self, program, settings, writes=True):
        path, self.program, self.writes = settings.profiler.profile_dir, program, writes
        super().__init__(path, path != ProfilerConfig().profile_dir, settings.profiler.force)

    def claim_for_check(self):
        """claim() for what checks: it writes only where the user says, and beside what is there."""
        return self.claim(resumed=True) if self.named else self

    def claim_outputs(self, resumed, files):
        """claim() for training, with the files that it saves into, as checkpoints.outputs() has them:
        {path: whether the run goes on with what is in it}."""
        self.claim(resumed)
        for path in files:
            claim_file(path)
        for path, goes_on in files.items():
            if os.path.exists(path) and not goes_on:
                print(f"{path} held a checkpoint of an earlier run, which is in {set_aside(path)} now")

    def write(self, kind, result):
        """Write a result of this kind as JSON; returns its path, None where this process does not write."""
        path = self.file(self.program.result(kind))
        if self.writes:
            write_json(path, finite(result))
        return path if self.writes else None


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
    """Open and lock what is at path, until the program ends; what this process holds already it keeps."""
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
    at_end.callback(let_go, handle)


def let_go(handle):
    """The reverse of hold()."""
    path = str(held.pop(handle))
    if path.endswith(LOCK):
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(handle)
