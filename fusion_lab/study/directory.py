"""The directory of a study: config.json, who may write into it, and the results that are made of its rows."""
import os
import shlex
import shutil
import time
from dataclasses import dataclass, replace

from fusion_lab.measuring.plotting import spared
from fusion_lab.study.arguments import SCRIPT
from fusion_lab.study.design import Study, program_of
from fusion_lab.study.plots import draw
from fusion_lab.study.records import as_json, checked
from fusion_lab.study.report import page
from fusion_lab.study.summary import Recommendation, as_csv
from fusion_lab.training import locks
from fusion_lab.training.files import UserError, results_directory, write_json, write_text
from fusion_lab.training.reading import read_json

SPARE_BYTES = 20 * 2 ** 20  # results, report and logs of a large study
LOCK_PATIENCE_SECONDS = 5
LONGEST_PATH = 500  # in a message


@dataclass(frozen=True)
class Config:
    """config.json."""
    study: Study
    command: str
    created: str  # "2026-01-01T00:00:00+0000"


def open_directory(options, study, argv):
    """Make or find the study's directory, hold it for this process alone, and return its path. A killed
    study's lock outlives it for as long as a point that it was starting just then takes from fork to exec,
    hence the patience. Raises UserError."""
    path = os.path.abspath(options.study_name or time.strftime("performance_study_%Y%m%d_%H%M%S"))
    if options.study_name is None:
        path = results_directory(path, default=True, fresh=True)
    try:
        locks.hold_directory(path, LOCK_PATIENCE_SECONDS)
    except BlockingIOError:
        raise UserError(f"{path}: this study is running already") from None
    except OSError as error:
        raise UserError(f"cannot write into {path}: {error.strerror}") from None
    config = os.path.join(path, "config.json")
    if not os.path.exists(config):
        if os.path.isdir(path) and os.listdir(path):
            raise UserError(f"--study-name {options.study_name}: is not empty and holds no study")
        write_json(config, dict(study=study.as_json(), command=command_of(argv),
                                created=time.strftime("%Y-%m-%dT%H:%M:%S%z")))
    free = shutil.disk_usage(path).free
    if free < SPARE_BYTES:
        raise UserError(f"cannot write {path}: {free / 2 ** 20:.0f} MB free, "
                        f"{SPARE_BYTES / 2 ** 20:.0f} MB needed: disk full")
    return path


def command_of(argv):
    return shlex.join([f"./{SCRIPT}", *argv])


def read_config(directory, vocabulary):
    """The Config of a study of this program. Raises UserError."""
    path = os.path.join(directory, "config.json")
    try:
        content = read_json(path)
        theirs = checked(program_of(checked(content.get("study"), dict)), str)
        if theirs != vocabulary.program_key:
            name = shlex.quote(theirs) if theirs.isprintable() and len(theirs) < LONGEST_PATH else "FILE"
            raise UserError(f"{path}: a study of another program; add --program {name}")
        study = Study.read(content["study"], vocabulary)
        command, created = (checked(content.get(key), str) for key in ("command", "created"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not the config of a study: {error}") from None
    return Config(study, command, created)


def require_same_study(directory, study):
    """The Config of a study that this one continues: all is as it was, but there may be more runs."""
    config = read_config(directory, study.vocabulary)
    before = config.study.as_json()
    different = [f"{key} {before[key]} there, {value} now" for key, value in study.as_json().items()
                 if before[key] != value and not (key == "num_runs" and value > before[key])]
    if different:
        raise UserError(f"{directory}: a study with other settings ({'; '.join(different)}); only --num-runs "
                        "may differ, and only grow; choose another --study-name")
    return config


def write_grown_config(directory, study, argv):
    """Put the study's larger number of runs into config.json; keys that nobody knows here stay."""
    path = os.path.join(directory, "config.json")
    content = read_json(path)
    write_json(path, content | dict(study=content["study"] | study.as_json(), command=command_of(argv)))


def earlier_recommendation(directory, summary):
    """The recommendation of the summary in directory, if it is from the same runs; else None."""
    axes = summary.study.axes
    ours = [(dict(p.shape), p.setting, list(p.run_medians_ms)) for p in summary.points]
    try:
        earlier = read_json(os.path.join(directory, "results_summary.json"))
        theirs = [({axis.field: p[axis.field] for axis in axes}, p["setting"], p["run_medians_ms"])
                  for p in earlier["points"]]
        return Recommendation.read(earlier["recommendation"], axes) if ours == theirs else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_results(directory, summary, config, plots):
    """results_summary.json, results.csv, report.html and its PNGs, in this order, so that whatever fails the
    figures are there."""
    if summary.recommendation is None:
        summary = replace(summary, recommendation=earlier_recommendation(directory, summary))
    write_json(os.path.join(directory, "results_summary.json"), as_json(summary))
    write_text(os.path.join(directory, "results.csv"), as_csv(summary))
    write_text(os.path.join(directory, "report.html"), page(summary, config, []))
    if plots:
        with spared("pictures in report.html"):
            write_text(os.path.join(directory, "report.html"),
                       page(summary, config, draw(summary, directory)))
