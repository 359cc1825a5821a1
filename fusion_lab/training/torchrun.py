"""What torchrun tells a process about the others that it started. Needs no torch."""
import os
from dataclasses import dataclass

from fusion_lab.training.files import MISSING, NO_GPU, UserError

COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Of one process among `size`, of which `local_size` are on its host."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place():
    """This process's Place, of a run alone where nobody says otherwise. Raises UserError where what is said
    makes no sense."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Place()
    if absent := [name for name in COUNTS if not os.environ.get(name)]:
        raise UserError(f"{', '.join(absent)}: not set, though "
                        f"{' and '.join(n for n in COUNTS if n not in absent)} is: start it with torchrun")
    for name in COUNTS:
        if not (os.environ[name].isascii() and os.environ[name].isdigit()):
            raise UserError(f"{name}={os.environ[name]!r:.40}: must be a whole number; torchrun sets it")
    found = Place(*(int(os.environ[name]) for name in COUNTS))
    if not (found.rank < found.size and found.local_rank < found.local_size <= found.size):
        raise UserError(f"{' '.join(f'{name}={os.environ[name]}' for name in COUNTS)}: this cannot be; "
                        "each rank must be less than its size; torchrun sets them")
    if found.size > 1 and (absent := [name for name in MEETING_POINT if not os.environ.get(name)]):
        raise UserError(f"{', '.join(absent)}: not set, but {found.size} ranks need it; torchrun sets it")
    return found


def first():
    """Whether this process prints and writes: the first rank, or one alone."""
    return os.environ.get("RANK", "0") in ("0", "")


def speaks(code):
    """Whether this process says why it ends with this code while the ranks have not met: what is wrong with
    flags all find alike, what a machine lacks one on each host."""
    return first() or code in (MISSING, NO_GPU) and os.environ.get("LOCAL_RANK") == "0"


def require_alone(what):
    """Raise UserError where torchrun started several processes of what is made for one."""
    if (size := place().size) > 1:
        error = UserError(f"{what} is for one process, and torchrun started {size}: start it without")
        error.lines = error.lines if first() else ()
        raise error
