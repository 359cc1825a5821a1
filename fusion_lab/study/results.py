"""results.jsonl: a row for every finished run of the trainer."""
import json
import os
from dataclasses import dataclass, fields

from fusion_lab.study.design import AtShape, Point
from fusion_lab.study.records import Record, as_json
from fusion_lab.training import locks
from fusion_lab.training.files import UserError, write_text
from fusion_lab.training.reading import parse_json, read_regular

SHORTEST, LONGEST = 1e-9, 1e9  # s; a step outside is a broken file


def is_step_time(seconds):
    return SHORTEST < seconds < LONGEST


@dataclass(frozen=True)
class Machine(Record):
    """Where a run was measured."""
    gpu_name: str | None
    host_cpu: str | None
    torch_version: str | None
    cuda_version: str | None
    hip_version: str | None
    git_commit: str | None


@dataclass(frozen=True)
class Figures(Record):
    """What a run measured: seconds, samples/s, MB of 2**20 bytes; None where it could not."""
    median_batch_time: float
    p20_batch_time: float | None
    p80_batch_time: float | None
    avg_training_speed: float | None
    peak_memory_mb: float | None
    saved_activation_mb: float | None
    launches_per_step: float | None
    flops_per_step: float | None
    mfu: float | None
    first_step_time: float | None

    def __post_init__(self):
        times = (self.median_batch_time, self.p20_batch_time, self.p80_batch_time)
        if not all(time is None or is_step_time(time) for time in times):
            raise ValueError("no time that a step can take")


@dataclass(frozen=True)
class Row(AtShape):
    """One finished run; `figures` and `system` are None if it failed, and `reason` says why it did."""
    setting: str
    run: int
    status: str
    reason: str | None
    figures: Figures | None
    system: Machine | None
    seconds: float
    turn: int | None = None  # unknown in rows from before turns were counted
    exit_code: int | str | None = None
    timestamp: str | None = None

    def __post_init__(self):
        if self.reason is None and not self.ok:
            raise ValueError("a failed run must have a reason")

    @classmethod
    def read(cls, content, axes):
        """The row in a JSON object. Raises ValueError."""
        ok = isinstance(content, dict) and content.get("status") == "ok"
        return super().read(content, axes, figures=Figures.read(content) if ok else None,
                            system=Machine.read(content.get("system")) if ok else None)

    def as_json(self):
        figures = as_json(self.figures) if self.figures else dict.fromkeys(f.name for f in fields(Figures))
        return dict(self.shape, setting=self.setting, run=self.run, turn=self.turn, status=self.status,
                    reason=self.reason, **figures, system=as_json(self.system), exit_code=self.exit_code,
                    seconds=self.seconds, timestamp=self.timestamp)

    @property
    def ok(self):
        return self.status == "ok"

    @property
    def point(self):
        return Point(self.shape, self.setting, self.run)

    @property
    def why(self):
        """Why the run failed, beginning with its status."""
        return f"{self.status}: {self.reason.removeprefix(self.status + ': ')}"

    def __str__(self):
        if not self.ok:
            return self.why
        figures = self.figures
        memory = "n/a" if figures.peak_memory_mb is None else f"{figures.peak_memory_mb:.1f} MB"
        return f"{figures.median_batch_time * 1e3:.2f} ms, {memory}"


class Results:
    """results.jsonl: one row per finished run, on disk before the next one counts as started. Keys of a row
    that this version does not know are not read, but stay in the file."""

    def __init__(self, directory, axes):
        self.path = os.path.join(directory, "results.jsonl")
        self.axes, self.rows = axes, []

    def load(self, mend=True):
        """Read what is there. A last line that a kill cut short is taken off, with mend from the file too."""
        if not os.path.exists(self.path):
            return
        content = read_regular(self.path)
        whole = content[:content.rfind(b"\n") + 1]
        if mend and whole != content:
            os.truncate(self.path, len(whole))
        for place, line in enumerate(whole.splitlines(), 1):
            try:
                self.rows.append(Row.read(parse_json(line), self.axes))
            except ValueError:
                raise UserError(f"{self.path}: line {place} is not the result of a run; mend or delete it"
                                ) from None

    def append(self, row):
        line = json.dumps(as_json(row), allow_nan=False).encode() + b"\n"
        try:
            with open(locks.present(self.path), "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.append(row)

    def forget_failures(self):
        """Drop failed rows, so that these points run again; returns how many there were."""
        kept = [row for row in self.rows if row.ok]
        dropped = len(self.rows) - len(kept)
        if dropped:
            with open(self.path, encoding="utf-8") as file:
                lines = [line for line, row in zip(file, self.rows, strict=True) if row.ok]
            write_text(self.path, "".join(lines))
            self.rows = kept
        return dropped

    def find(self, point):
        return next((row for row in self.rows if row.point == point), None)
