"""What a study keeps in its directory: config.json, and results.jsonl, a row for every run that has ended."""
import json
import os
import shlex
import time

from fusion_lab.study.arguments import SCRIPT
from fusion_lab.study.design import Point, Shape, Study, program_of
from fusion_lab.training.files import UserError, claim, read_json, write_json

# Seconds, samples/s, MB of 2**20 bytes; None where a run could not measure it, which the first one always can
FIGURES = ("median_batch_time", "p20_batch_time", "p80_batch_time", "avg_training_speed", "peak_memory_mb",
           "saved_activation_mb", "launches_per_step", "flops_per_step", "mfu", "first_step_time")
MACHINE = ("gpu_name", "host_cpu", "torch_version", "cuda_version", "hip_version", "git_commit")
LARGEST = 1e30  # no figure of a study comes near it, and products of a few stay finite
SHORTEST, LONGEST = 1e-9, 1e9  # s; a step outside is a broken file
LONGEST_TEXT = 500  # in a message


# What reading content of another form raises
MALFORMED = AttributeError, KeyError, RecursionError, TypeError, ValueError


def is_number(value):
    return type(value) in (int, float) and 0 <= value < LARGEST


def measured(summary):
    """What a row takes from the summary of a training run. Raises one of MALFORMED."""
    figures = {name: summary["performance_summary"].get(name) for name in FIGURES}
    machine = {name: summary["system_info"].get(name) for name in MACHINE}
    times = figures["median_batch_time"], figures["p20_batch_time"], figures["p80_batch_time"]
    if not (all(value is None or is_number(value) for value in figures.values()) and times[0] is not None
            and all(time is None or SHORTEST < time < LONGEST for time in times)
            and all(isinstance(value, str | None) for value in machine.values())):
        raise ValueError("no figures of a training run")
    return dict(figures, system=machine)


def checked(row, axes):
    """A row of results.jsonl, if it is one. Raises one of MALFORMED."""
    whole = [row["run"], *Shape.of(row, axes).sizes]
    if not (all(type(n) is int and n > 0 for n in whole) and isinstance(row["setting"], str)
            and isinstance(row["status"], str) and is_number(row["seconds"])):
        raise ValueError("no result of a run")
    if row["status"] == "ok":
        return row | measured(dict(performance_summary=row, system_info=row["system"]))
    if not isinstance(row["reason"], str):
        raise ValueError("a failed run must have a reason")
    return row


def in_words(row):
    """"12.50 ms, 7.3 MB", or why a run failed, beginning with its status."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason'].removeprefix(row['status'] + ': ')}"
    memory = "n/a" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.1f} MB"
    return f"{row['median_batch_time'] * 1e3:.2f} ms, {memory}"


class Results:
    """results.jsonl: `rows` by point, each on disk before the next run starts. Of several rows of a point the
    last one counts: runs that failed are repeated when a study goes on."""

    def __init__(self, directory, axes):
        self.path = os.path.join(directory, "results.jsonl")
        self.axes, self.rows = axes, {}

    def load(self, mend=True):
        """Read what is there. A last line that a kill cut short is taken off, with mend from the file too."""
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            content = file.read()
        whole = content[:content.rfind(b"\n") + 1]
        if mend and whole != content:
            os.truncate(self.path, len(whole))
        for place, line in enumerate(whole.splitlines(), 1):
            try:
                self.note(checked(json.loads(line), self.axes))
            except MALFORMED:
                raise UserError(f"{self.path}: line {place} is not the result of a run; mend or delete it"
                                ) from None

    def note(self, row):
        self.rows[Point(Shape.of(row, self.axes), row["setting"], row["run"])] = row

    def append(self, row):
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.note(row)

    def finished(self):
        """The points that need not run again."""
        return {point for point, row in self.rows.items() if row["status"] == "ok"}


def open_directory(options, study, argv):
    """Make or find the study's directory, hold it for this process alone; returns its path. Raises
    UserError."""
    path = os.path.abspath(options.study_name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    claim(path, resumed=options.study_name is not None)
    if not os.path.exists(os.path.join(path, "config.json")):
        if os.listdir(path):
            raise UserError(f"--study-name {options.study_name}: is not empty and holds no study")
        write_config(path, study, argv, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return path


def write_config(directory, study, argv, created):
    """Write config.json; returns dict(command, created)."""
    how = dict(command=shlex.join([f"./{SCRIPT}", *argv]), created=created)
    write_json(os.path.join(directory, "config.json"), dict(study=study.as_dict(), **how))
    return how


def read_config(directory, vocabulary):
    """(Study, dict(command, created)) of a study of this program. Raises UserError."""
    path = os.path.join(directory, "config.json")
    try:
        content = read_json(path, "study's config")
        theirs = program_of(content["study"])
        if isinstance(theirs, str) and theirs != vocabulary.program_key:
            name = shlex.quote(theirs) if theirs.isprintable() and len(theirs) < LONGEST_TEXT else "FILE"
            raise UserError(f"{path}: a study of another program; add --program {name}")
        return Study.read(content["study"], vocabulary), {
            key: str(content[key]) for key in ("command", "created")}
    except MALFORMED as error:
        raise UserError(f"{path}: not the config of a study: {str(error)[:LONGEST_TEXT]}") from None


def require_same_study(directory, study):
    """read_config() of a study that this one continues: all is as it was, but there may be more runs."""
    known, how = read_config(directory, study.vocabulary)
    before = known.as_dict()
    different = [f"{key} {before[key]} there, {value} now" for key, value in study.as_dict().items()
                 if before[key] != value and not (key == "num_runs" and value > before[key])]
    if different:
        raise UserError(f"{directory}: a study with other settings ({'; '.join(different)}); only --num-runs "
                        "may differ, and only grow; choose another --study-name")
    return known, how
