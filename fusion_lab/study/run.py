"""Runs the points of a study, one after the other, each in a process of its own."""
import collections
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone

from fusion_lab.measuring.roctx import child_environment
from fusion_lab.study.results import FIGURES, MALFORMED, in_words, measured
from fusion_lab.training.files import OUT_OF_MEMORY, UserError, read_json

ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b")  # CUDA's errors end with lines of advice
START_SECONDS, COMPILE_SECONDS = 6, 60  # guesses, until a run of the setting is done
LONGEST_REASON = 300  # letters
LONGEST_NAME = 200  # letters of a log's name; most file systems allow 255


def run_points(study, results, directory, timeout):
    """Run the points that are not finished: a line each, and a row in results."""
    points, done = study.points(), results.finished()
    todo = [number for number, point in enumerate(points) if point not in done]
    for position, number in enumerate(todo):
        point, name = points[number], log_name(number, points[number])
        row = run_point(study, point, os.path.join(directory, "running", name), timeout,
                        os.path.join(directory, "logs", f"{name}.txt"))
        results.append(row)
        left = seconds_left(study, [points[i] for i in todo[position + 1:]], results.rows.values())
        place = f"{len(points) - len(todo) + position + 1:{len(str(len(points)))}}/{len(points)}"
        print(f"[{place}] {point}: {in_words(row)} | left {duration(left)}", flush=True)


def log_name(number, point):
    """A name for a point's files, which its number makes its own."""
    return re.sub(r"[ +]", "_", f"{number + 1}_{point}")[:LONGEST_NAME]


def run_point(study, point, folder, timeout, log):
    """The row of one run of the trainer, which works in a folder below the study's own, since /tmp may be
    small. Of one that fails the output goes into a log."""
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # a kill left it
    try:
        os.makedirs(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    code = run_trainer(study.vocabulary.program, study.flags(point.shape, point.setting), folder, timeout)
    status, reason, figures = outcome(study.vocabulary.program, folder, code, timeout)
    if status != "ok":
        keep_log(folder, log)
    shutil.rmtree(folder, ignore_errors=True)
    return dict(point.shape.as_dict(), setting=point.setting, run=point.run, status=status, reason=reason,
                **figures, exit_code=code, seconds=round(time.monotonic() - started, 3),
                timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def run_trainer(program, flags, folder, timeout):
    """Exit code of the trainer, or "timeout"; its output is in stdout.txt and stderr.txt in folder. For tests
    STUDY_TEST_TRAINER may name another trainer with the same command line."""
    script = os.environ.get("STUDY_TEST_TRAINER") or program.file
    command = [sys.executable, script, *flags, "--profile-dir", os.path.join(folder, "results")]
    with open(os.path.join(folder, "stdout.txt"), "wb") as output, \
            open(os.path.join(folder, "stderr.txt"), "wb") as errors, \
            concurrent.futures.ThreadPoolExecutor(1) as thread:
        # Ctrl-C raises in the main thread alone; there it could lose a process that is just being made
        started = thread.submit(subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=output,
                                stderr=errors, env=child_environment(), start_new_session=True)
        try:
            return started.result().wait(timeout)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            process = started.result()
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a zombie
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def outcome(program, folder, code, timeout):
    """(status, reason, figures and machine) of a run that has ended."""
    nothing = dict.fromkeys((*FIGURES, "system"))
    if code == 0:
        try:
            path = os.path.join(folder, "results", program.result("performance_summary"))
            return "ok", None, measured(read_json(path))
        except (UserError, *MALFORMED):
            return "failed", "ended well but left no readable summary", nothing
    if code == "timeout":
        return "timeout", f"not done after {timeout:g} s", nothing
    if code == -signal.SIGKILL:
        return ("out of memory", "killed (SIGKILL), as the kernel does when the host is out of memory",
                nothing)
    last = last_words(os.path.join(folder, "stderr.txt"), program.name)
    status = "out of memory" if OUT_OF_MEMORY.search(last) else "failed"
    return status, last or f"exit code {code}, nothing on stderr", nothing


def last_words(log, trainer):
    """The last line of a log if it is the trainer's own, without its name; else the last one that names an
    error, or that is not blank."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-20000:].splitlines() if line.strip()]
    if lines and not lines[-1].startswith(trainer):
        lines = [line for line in lines if ERROR_LINE.match(line)] or lines
    return lines[-1].removeprefix(f"{trainer}: error: ")[:LONGEST_REASON] if lines else ""


def keep_log(folder, log):
    with contextlib.suppress(OSError):  # the row, which must be written, has the reason too
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "wb") as target:
            for part in ("stdout.txt", "stderr.txt"):
                with open(os.path.join(folder, part), "rb") as source:
                    shutil.copyfileobj(source, target)


def seconds_left(study, points, rows):
    """Estimate for the points yet to run: the mean of the finished runs of their setting, else a guess."""
    known = {}
    for row in rows:
        known.setdefault(row["setting"], []).append(row["seconds"])
    total = 0.0
    for setting, count in collections.Counter(point.setting for point in points).items():
        guess = START_SECONDS + COMPILE_SECONDS * ("torch-compile" in study.vocabulary.parse(setting))
        seconds = known.get(setting, [guess])
        total += count * sum(seconds) / len(seconds)
    return total


def duration(seconds):
    """Seconds in words: "90 s", "3 min", "2.5 h"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 \
        else f"{seconds / 3600:.1f} h"
