"""What torchrun tells a process about the others that it started. Needs no torch."""
import os
from dataclasses import dataclass

from fusion_lab.training.errors import UserError

COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Of one process among `size`, of which `local_size` are on its host."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place():
    """This process's Place; without torchrun, that of a process alone. Raises UserError."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Place()
    try:
        return Place(*(int(os.environ[name]) for name in COUNTS))
    except (KeyError, ValueError):
        raise UserError(f"{', '.join(COUNTS)}: torchrun sets all of these to whole numbers; start it with "
                        "that, or unset them") from None


def first():
    """Whether this process prints and writes: the first rank, or one alone."""
    return os.environ.get("RANK", "0") in ("0", "") or os.environ.get("WORLD_SIZE", "1") in ("1", "")


def require_alone(what):
    """Raise UserError if torchrun started several processes of something that is made for one."""
    if (size := place().size) > 1:
        raise UserError(f"{what} is for one process, and torchrun started {size}: start it without")
