"""What a study keeps in its directory: config.json, and results.jsonl, a line for every point that has ended.

A line is the point's run and sizes, `ok`, `reason` (why it failed), `seconds`, `system_info`, and `rows`:
those of its comparison, as --compare-fusion wrote them. Of several lines of a point the last one counts.
"""
import json
import os
import shlex
import time
from dataclasses import asdict

from fusion_lab.study.design import Study
from fusion_lab.training.files import UserError, claim, read_json, write_json

KEYS = "run", "ok", "reason", "seconds", "system_info", "rows"


def read_lines(directory, study, mend=False):
    """{(run, label): line} of a study. A last line that a kill cut short is left out, and with mend taken off
    the file, so that the next one begins where it did. Raises UserError."""
    path, found = os.path.join(directory, "results.jsonl"), {}
    if not os.path.exists(path):
        return found
    with open(path, "rb") as file:
        content = file.read()
    whole = content[:content.rfind(b"\n") + 1]
    if mend and whole != content:
        os.truncate(path, len(whole))
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            if not {*KEYS, *study.axes} <= line.keys():
                raise ValueError
            found[line["run"], study.label(line)] = line
        except (AttributeError, RecursionError, ValueError):
            raise UserError(f"{path}: line {number} is not the result of a point; mend or delete it"
                            ) from None
    return found


def append(directory, line):
    """Write a line, on the disk before the next point begins."""
    with open(os.path.join(directory, "results.jsonl"), "ab") as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def open_directory(name, study, command):
    """Make the study's directory, or find the one to go on in, and hold it; returns (path, dict(command,
    created)). Raises UserError."""
    path = os.path.abspath(name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    claim(path, resumed=name is not None)
    how = dict(command=shlex.join(command),
               created=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    if os.path.exists(os.path.join(path, "config.json")):
        require_same_study(path, study)
        how["created"] = read_config(path)[1]["created"]
    elif os.listdir(path):
        raise UserError(f"--study-name {name}: is not empty and holds no study")
    write_json(os.path.join(path, "config.json"), dict(study=asdict(study), **how))
    return path, how


def read_config(directory):
    """(Study, dict(command, created)) of a directory. Raises UserError."""
    path = os.path.join(directory, "config.json")
    content = read_json(path, "study's config")
    try:
        return Study(**content["study"]), {key: str(content[key]) for key in ("command", "created")}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not the config of a study, or an earlier version's") from None


def require_same_study(directory, study):
    """Raise UserError unless this study is the one there; but it may have more runs."""
    before = asdict(read_config(directory)[0])
    different = [f"{key} {before[key]} there, {value} now" for key, value in asdict(study).items()
                 if before[key] != value and not (key == "num_runs" and value > before[key])]
    if different:
        raise UserError(f"{directory}: a study with other settings ({'; '.join(different)}); only --num-runs "
                        "may differ, and only grow; choose another --study-name")
