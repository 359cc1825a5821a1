"""What a verb is (commands that a user types, and what must come of them), how it runs, and the judge."""
import glob
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import time
from dataclasses import dataclass, field

from tests.support import last_json, run_program

# A warning of Python, of torch's logging ("W1124 17:31:39.123000 81 torch/...") or of C++ ("[W1124 ...]").
WARNING = re.compile(r"Warning:|warnings\.warn|^(\[rank\d+\]:)?\[?[WE]\d{4} \d\d:")
# Where output says that something else ran than was asked for, or nothing.
REMARK = re.compile(r"fall\w*[ -]?back|fell back|not measured|not used here|gives? way|could not|unavailable|"
                    r"not available|skipp(ed|ing)|no gpu", re.I)
SETTINGS = {"config", "training_params", "fusion_config", "profiler_config", "system_info", "settings",
            "study", "machine"}  # what was asked for, and where: null means that it was not
NULL = {  # figures that may be null, and why
    "reason": "nothing stands in the way", "uncounted": "launches were counted",
    "nominal": "of programs without a count that users know", "fusion_statistics": "the same",
    "mfu": "of a step that beats its ceiling: the machine was busy", "matmul_ceiling_tflops": "the same",
    "speedup_low": "of the baseline, and of fewer than six rounds", "speedup_high": "the same",
    "graph_kernels": "of a step without a CUDA graph"}
PHASES = {f"{kind}_{phase}_time" for kind in ("avg", "median")  # null where a step is one CUDA graph
          for phase in ("forward", "backward", "optimizer")}
POSITIVE = {"median_batch_time", "p20_batch_time", "p80_batch_time", "avg_batch_time", "avg_training_speed",
            "samples_per_second", "peak_memory_mb", "launches_per_step", "flops_per_step", "achieved_tflops",
            "speedup", "baseline_batch_time", "first_step_time", "warmup_time",
            "saved_activation_mb", "median_ms", "p20_ms", "p80_ms", "time_ratio", "step_s", "measured_s",
            "untraced_ms"}


SUMMARY = ("median_batch_time", "peak_memory_mb", "launches_per_step", "saved_activation_mb",
           "flops_per_step", "first_loss", "final_loss")  # which performance_summary_*.json must have
ROW = ("median_batch_time", "p20_batch_time", "p80_batch_time", "samples_per_second", "speedup",
       "peak_memory_mb", "launches_per_step", "saved_activation_mb", "flops_per_step", "final_loss")


@dataclass(frozen=True)
class Verb:
    """Commands for one directory, one after the other. Results are the JSON files that their last lines name,
    or those lines themselves; or one file, result, which may be a pattern."""
    name: str
    commands: tuple  # of command lines; the first word is a file of this project
    files: tuple = ()  # patterns of files that must exist then, beside those that the output names
    result: str | None = None
    measured: tuple = ()  # rows of a comparison, each of which was measured
    named: tuple = ()  # rows of which a comparison says why it did not measure them
    expected: tuple = ()  # regular expressions of what may be said of that, or otherwise not run
    null: tuple = ()  # further figures that may be null here
    prepare: object = None  # prepare(directory) before the first command
    environment: tuple = ()  # pairs
    holds: object = None  # holds(last result, directory): complaints of this verb's own
    seconds: int = 240  # for all commands


@dataclass
class Run:
    """What came of a verb. results: parsed JSON."""
    codes: list = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    results: list = field(default_factory=list)
    trouble: str | None = None  # why one is not there


def perform(verb, directory):
    """Run a verb; returns Run. Whatever outlives its time is killed, with all that it started."""
    environment = {name: value.replace("{here}", str(directory)) for name, value in verb.environment}
    run, outputs, end = Run(), [], time.monotonic() + verb.seconds
    if verb.prepare:
        verb.prepare(directory)
    for text in verb.commands:
        try:
            done = run_program(*shlex.split(text), cwd=directory, env=environment,
                               patience=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.trouble = f"not done after {verb.seconds} s: {text}"
            return run
        run.codes.append(done.returncode)
        run.stdout += done.stdout
        run.stderr += done.stderr
        outputs.append(done.stdout)
        if done.returncode != 0:
            break
    try:
        if verb.result:
            run.results = [read(the_file(directory, verb.result))]
        else:  # below its JSON --validate-setup says in words how it ended
            run.results = [last_json(output[:output.rindex("}") + 1]) for output in outputs]
    except (OSError, ValueError, KeyError, AssertionError) as error:
        run.trouble = f"no result: {type(error).__name__}: {error}"
    return run


def read(path):
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def the_file(directory, pattern):
    found = glob.glob(str(directory / pattern), recursive=True)
    if len(found) != 1:
        raise ValueError(f"{len(found)} files match {pattern}")
    return found[0]


def named_files(stdout):
    """Paths in lines such as "Written: a, b" and "Results in DIR: a, b", and in lists of JSON."""
    for line in stdout.splitlines():
        if match := re.match(r"(?:Written|Results(?: in (?P<place>\S+))?): (?P<names>.*)", line):
            yield from (os.path.join(match["place"] or "", name) for name in match["names"].split(", "))
        elif match := re.search(r'"summary_file": ("[^"]*")', line):
            yield json.loads(match[1])


def walk(value, path=()):
    """(path, value) of all that is no container, and of all dicts."""
    if isinstance(value, dict):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, (*path, key))
    if not isinstance(value, (dict, list)):
        yield path, value


def in_output(verb, run):
    """Complaints about exit codes and about what was printed."""
    if run.codes != [0] * len(verb.commands):
        yield f"exit codes {run.codes} of {len(verb.commands)} commands: {run.stderr.strip()[-600:]}"
    for line in (run.stdout + "\n" + run.stderr).splitlines():
        if "Traceback (most recent call last)" in line:
            yield "a traceback"
        if WARNING.search(line):
            yield f"a warning: {line.strip()[:300]}"
        elif REMARK.search(line) and not line.startswith("{") and not any(
                re.search(pattern, line) for pattern in verb.expected):
            yield f"not expected: {line.strip()[:300]}"


def in_files(verb, run, directory):
    """Complaints about files that are missing or empty."""
    for pattern in verb.files:
        found = [path for path in glob.glob(str(directory / pattern), recursive=True)]
        if not found or not all(os.path.getsize(path) for path in found):
            yield f"missing or empty: {pattern}"
    for name in named_files(run.stdout):
        path = directory / name
        if not path.exists() or not (path.is_dir() or path.stat().st_size):
            yield f"named, but missing or empty: {name}"


def in_numbers(verb, result):
    """Complaints about figures: not finite, null without a reason, or nothing where there must be something;
    about what did not pass, and what was not measured without one of the expected reasons."""
    graphs = [path for path, value in walk(result) if path[-1:] == ("enable_cuda_graphs",) and value is True]
    for path, value in walk(result):
        where, key = "/".join(map(str, path)), path[-1] if path else None
        if isinstance(value, dict):
            if value.get("measured") is False or value.get("reason"):
                if not all(any(re.fullmatch(pattern, part) for pattern in verb.expected)
                           for part in str(value.get("reason")).split("; ")):
                    yield f"{where} {value.get('name', '')}: not measured: {value.get('reason')}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{where} is {value}"
        elif value is None and not SETTINGS.intersection(path):
            graphed = key in PHASES and any(flag[:-2] in (path[:-1], path[:-2]) for flag in graphs)
            if not graphed and not {*NULL, *verb.null}.intersection(map(str, path)):
                yield f"{where} is null"
        elif key in POSITIVE and isinstance(value, (int, float)) and value <= 0:
            yield f"{where} is {value}"
        elif key in ("passed", "accurate") and value is not True:
            yield f"{where} is {value}"
        elif {"failures", "broken", "reasons"}.intersection(path):
            yield f"{where}: {value}"


def in_rows(verb, result):
    """Complaints about the rows of a comparison, and about what a training run's summary lacks."""
    rows = {row["name"]: row for row in result.get("variants", ())}
    if {*rows} != {*verb.measured, *verb.named}:
        yield f"rows {sorted(rows)}, expected {sorted({*verb.measured, *verb.named})}"
    for name, row in rows.items():
        if name in verb.named and row["measured"]:
            yield f"{name} was measured, though it is nothing of its own here"
        elif name in verb.measured and not row["measured"]:
            yield f"{name} was not measured: {row['reason']}"
        elif row["measured"]:
            yield from (f"{name}: no {key}" for key in ROW if row.get(key) is None and key not in verb.null)
    if (summary := result.get("performance_summary")) is not None:
        yield from (f"no {key}" for key in SUMMARY if summary.get(key) is None and key not in verb.null)


def judge(verb, run, directory):
    """Everything that is wrong with a run, a sentence each."""
    found = [*in_output(verb, run), *in_files(verb, run, directory)]
    if run.trouble:
        return [*found, run.trouble]
    for result in run.results:
        found += [*in_numbers(verb, result), *in_rows(verb, result)]
    if verb.holds:
        found += verb.holds(run.results[-1], directory)
    alike = {}  # of a complaint about many entries of a list only the first is told
    for complaint in found:
        alike.setdefault(re.sub(r"/\d+/", "/*/", complaint), complaint)
    return list(alike.values())
