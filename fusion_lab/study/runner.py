"""Runs the points of a study, each in its own process, and keeps results.jsonl."""
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone

import torch
from tqdm import tqdm

from fusion_lab.study.design import ROOT, TRAINER, Point, parse_setting, point_flags
from fusion_lab.training.files import OUT_OF_MEMORY, UserError

FIGURES = ("median_batch_time", "p20_batch_time", "p80_batch_time", "avg_training_speed", "peak_memory_mb",
           "saved_activation_mb", "launches_per_step", "flops_per_step", "mfu", "first_step_time")
SYSTEM = ("gpu_name", "host_cpu", "torch_version", "cuda_version", "hip_version", "git_commit")
ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b")  # CUDA's errors end with lines of advice
NOT_A_ROW = (ValueError, KeyError, TypeError, AttributeError)
VISIBLE_GPUS = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
SETTLE_SECONDS = 0.2  # for kernels that a process had queued before it was stopped
START_SECONDS, COMPILE_SECONDS = 6, 60  # guesses, until a run of the setting is done


class Stopped(BaseException):
    """SIGINT or SIGTERM."""


def raise_stopped(number, _frame):
    raise Stopped(number)


class Results:
    """results.jsonl: one row per finished run, on disk before the next one counts as started."""

    def __init__(self, directory):
        self.path = os.path.join(directory, "results.jsonl")
        self.rows = []

    def load(self, mend=True):
        """Read what is there. A last line that a kill cut short is taken off, with mend from the file too."""
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            content = file.read()
        whole = content[:content.rfind(b"\n") + 1]
        if mend and whole != content:
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                require_whole(row)
            except NOT_A_ROW:
                raise UserError(f"{self.path}: line {number} is not the result of a run; mend or delete it"
                                ) from None
            self.rows.append(row)

    def append(self, row):
        try:
            with open(self.path, "ab") as file:
                file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self.rows.append(row)

    def forget_failures(self):
        """Drop failed rows, so that these points run again; returns how many there were."""
        kept = [row for row in self.rows if row["status"] == "ok"]
        dropped = len(self.rows) - len(kept)
        if dropped:
            temporary = self.path + ".part"
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in kept)
            os.replace(temporary, self.path)
            self.rows = kept
        return dropped

    def find(self, point):
        return next((row for row in self.rows if Point.of(row) == point), None)


def require_whole(row):
    """Raise one of NOT_A_ROW if a row lacks what is read from it elsewhere."""
    Point.of(row)
    if row["status"] == "ok":
        missing = set(FIGURES) - row.keys() or set(SYSTEM) - row["system"].keys()
        if missing or not row["median_batch_time"] > 0:
            raise ValueError
    elif not isinstance(row["reason"], str):
        raise ValueError
    float(row["seconds"])


class Turns:
    """At most one process measures at a time, in the order of the plan, and all other ones are stopped while
    it does. `taken` counts the turns of a study, `number` has those of points under way."""

    def __init__(self, taken=0):
        self.lock, self.processes, self.holder = threading.Lock(), [], None
        self.plan = {}  # points that have neither measured nor ended, in order; a dict, whose pop is atomic
        self.taken, self.number = taken, {}

    def start(self, *args, **kwargs):
        with self.lock:  # not while another one measures: importing torch keeps a core busy
            process = subprocess.Popen(*args, start_new_session=True, **kwargs)
            self.processes.append(process)
        return process

    def comes_next(self, point):
        """Whether nothing earlier is outstanding; a process that is no point of a plan need not wait."""
        return point not in self.plan or next(iter(list(self.plan))) == point

    def give_up(self, point):
        self.plan.pop(point, None)

    @contextlib.contextmanager
    def alone(self, process, point):
        with self.lock:
            self.taken += 1
            self.number[point] = self.taken
            others = [p for p in self.processes if p is not process]
            self.holder = process
            try:
                for other in others:
                    self.signal(other, signal.SIGSTOP)
                if others:
                    time.sleep(SETTLE_SECONDS)
                yield
            finally:
                self.holder = None
                for other in others:
                    self.signal(other, signal.SIGCONT)
                self.give_up(point)

    def holds_up(self, process):
        """Whether another process is measuring, so that this one's clock must stand."""
        return self.holder not in (None, process)

    @staticmethod
    def signal(process, number):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def end(self, process):
        self.signal(process, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(ValueError):
            self.processes.remove(process)


class Runner:
    """Runs points. `script` may be another trainer with the same command line, for tests. gpus names those
    that processes are spread over, as VISIBLE_GPUS does; with none they see what this one sees."""

    def __init__(self, study, directory, timeout, jobs=1, gpus=(), turns_taken=0):
        self.study, self.directory, self.timeout, self.jobs = study, directory, timeout, jobs
        self.script = os.environ.get("TINYOPENFOLD_SCRIPT") or os.path.join(ROOT, TRAINER)
        self.turns, self.stopping = Turns(turns_taken), False
        self.on_gpu, self.gpu_lock = dict.fromkeys(gpus, 0), threading.Lock()
        self.environment = dict(os.environ)
        if jobs > 1:  # or every process starts as many compilers as there are cores
            self.environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def measure(self, point):
        """The row of one run of the trainer; None if the study is being stopped."""
        if self.stopping:
            return None
        started = time.monotonic()
        with self.folder(point.file_name()) as folder:
            code = self.run_trainer(point_flags(self.study, point.shape, point.setting), folder, point)
            row = dict(dataclasses.asdict(point.shape), setting=point.setting, run=point.run,
                       turn=self.turns.number.pop(point, None), **self.outcome(folder, code), exit_code=code,
                       seconds=round(time.monotonic() - started, 3),
                       timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"))
            if row["status"] != "ok" and not self.stopping:
                self.keep_log(folder, point.file_name())
        return None if self.stopping else row

    @contextlib.contextmanager
    def place(self):
        """The environment of a process, on the GPU that has the fewest of them."""
        if not self.on_gpu:
            yield self.environment
            return
        with self.gpu_lock:
            gpu = min(self.on_gpu, key=self.on_gpu.get)
            self.on_gpu[gpu] += 1
        try:
            yield self.environment | {VISIBLE_GPUS: gpu}
        finally:
            with self.gpu_lock:
                self.on_gpu[gpu] -= 1

    @contextlib.contextmanager
    def folder(self, name):
        """A directory for one process, below the study's own, since /tmp may be small."""
        path = os.path.join(self.directory, "running", name)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        yield path
        shutil.rmtree(path, ignore_errors=True)

    def keep_log(self, folder, name):
        logs = os.path.join(self.directory, "logs")
        with contextlib.suppress(OSError):  # the row, which must be written, has the reason too
            os.makedirs(logs, exist_ok=True)
            with open(os.path.join(logs, f"{name}.txt"), "wb") as target:
                for part in ("stdout.txt", "stderr.txt"):
                    with open(os.path.join(folder, part), "rb") as source:
                        shutil.copyfileobj(source, target)

    def run_trainer(self, flags, folder, point=None):
        """Exit code of the trainer, or "timeout"; its output is in stdout.txt and stderr.txt in folder."""
        reader, writer = os.pipe()
        turn = os.path.join(ROOT, "fusion_lab", "study", "turn.py")
        command = [sys.executable, turn, str(writer), self.script, *flags, "--profile-dir", folder]
        with self.place() as environment:
            try:
                with open(os.path.join(folder, "stdout.txt"), "wb") as output, \
                        open(os.path.join(folder, "stderr.txt"), "wb") as errors:
                    process = self.turns.start(command, stdin=subprocess.PIPE, stdout=output, stderr=errors,
                                               pass_fds=[writer], env=environment)
            finally:
                os.close(writer)
            try:
                return self.follow(process, reader, point)
            finally:
                self.turns.end(process)
                self.turns.give_up(point)
                os.close(reader)
                with contextlib.suppress(BrokenPipeError):  # "go" was still to be flushed when it was killed
                    process.stdin.close()

    def follow(self, process, reader, point):
        """Give the process its turn when it has asked for it and no point before it is outstanding, until it
        ends: its exit code, or "timeout". Its clock stands while it waits for others."""
        left, turn, waits = self.timeout, contextlib.ExitStack(), False
        with turn:
            while process.poll() is None and not self.stopping:
                before = time.monotonic()
                readable, _, _ = select.select([reader], [], [], 0.05)
                message = os.read(reader, 100) if readable else b""
                if not waits and not self.turns.holds_up(process):
                    left -= time.monotonic() - before
                if left < 0:
                    return "timeout"
                waits = waits or b"ready" in message
                if waits and self.turns.comes_next(point):
                    waits = False
                    turn.enter_context(self.turns.alone(process, point))
                    with contextlib.suppress(BrokenPipeError):  # it ended while it waited
                        process.stdin.write(b"go\n")
                        process.stdin.flush()
                if b"done" in message:
                    turn.close()
                if readable and not message:  # it closed the pipe: all that is left is its end
                    time.sleep(0.05)
        return process.returncode

    def stop(self):
        self.stopping = True
        for process in list(self.turns.processes):
            self.turns.signal(process, signal.SIGKILL)

    def measure_all(self, points, record):
        """Measure points, `jobs` at a time, and hand each row to record(); the first runs of all points come
        before the second ones, in their order. A point that ran out of memory while others were running has
        its say only after a second try: one process on a GPU, or if it was the host's memory, one alone."""
        for _, run in itertools.groupby(points, key=lambda point: point.run):
            again = {True: [], False: []}

            def record_or_repeat(row, again=again):
                if self.jobs > 1 and row["status"] == "out of memory":
                    again[row["exit_code"] == -signal.SIGKILL].append(Point.of(row))
                else:
                    record(row)
            self.measure_some(list(run), self.jobs, record_or_repeat)
            self.measure_some(again[False], min(self.jobs, max(1, len(self.on_gpu))), record)
            self.measure_some(again[True], 1, record)

    def measure_some(self, points, jobs, record):
        self.turns.plan = dict.fromkeys(points)  # the pool starts them in this order: the first always runs
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                futures = [pool.submit(self.measure, point) for point in points]
                for future in concurrent.futures.as_completed(futures):
                    if (row := future.result()) is not None:
                        record(row)
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def outcome(self, folder, code):
        """Status, reason and figures of a run that has ended."""
        empty = dict(dict.fromkeys(FIGURES), system=None)
        if code == 0:
            try:
                with open(os.path.join(folder, "performance_summary_v2.json"), encoding="utf-8") as file:
                    summary = json.load(file)
                figures = {name: summary["performance_summary"][name] for name in FIGURES}
                if not figures["median_batch_time"] > 0:
                    raise ValueError
                system = {name: summary["system_info"].get(name) for name in SYSTEM}
                return dict(status="ok", reason=None, **figures, system=system)
            except (OSError, ValueError, KeyError, TypeError):
                return dict(status="failed", reason="ended well but left no readable summary", **empty)
        if code == "timeout":
            return dict(status="timeout", reason=f"not done after {self.timeout:g} s", **empty)
        if code == -signal.SIGKILL:
            return dict(status="out of memory", **empty,
                        reason="killed (SIGKILL), as the kernel does when the host is out of memory")
        reason = last_words(os.path.join(folder, "stderr.txt")) or f"exit code {code}, nothing on stderr"
        status = "out of memory" if OUT_OF_MEMORY.search(reason) else "failed"
        return dict(status=status, reason=reason, **empty)


def last_words(log):
    """The last line of a log if it is the trainer's own, without its name; else the last one that names an
    error, or that is not blank."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-20000:].splitlines() if line.strip()]
    if lines and not lines[-1].startswith(TRAINER):
        lines = [line for line in lines if ERROR_LINE.match(line)] or lines
    return lines[-1].removeprefix(f"{TRAINER}: error: ")[:300] if lines else ""


def seconds_left(points, rows, jobs):
    """Estimate for the points yet to run: the mean of the finished runs of their setting, else a guess."""
    known = {}
    for row in rows:
        known.setdefault(row["setting"], []).append(row["seconds"])
    total = 0.0
    for setting, count in collections.Counter(point.setting for point in points).items():
        guess = START_SECONDS + COMPILE_SECONDS * ("torch-compile" in parse_setting(setting))
        seconds = known.get(setting, [guess])
        total += count * sum(seconds) / len(seconds)
    return total / jobs


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 \
        else f"{seconds / 3600:.1f} h"


def run_points(runner, results, points):
    """Measure the points that have no row yet: a line each, and on a terminal a progress bar."""
    done = {Point.of(row) for row in results.rows}
    todo = [point for point in points if point not in done]
    pending = set(todo)
    with tqdm(total=len(points), initial=len(points) - len(todo), disable=None, leave=False,
              bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}") as bar:
        def record(row):
            results.append(row)
            pending.discard(Point.of(row))
            left = f"left {duration(seconds_left(pending, results.rows, runner.jobs))}"
            place = f"{len(points) - len(pending):{len(str(len(points)))}}/{len(points)}"
            bar.update()
            bar.set_postfix_str(left)
            bar.write(f"[{place}] {Point.of(row)}: {figures_line(row)} | {left}", file=sys.stdout)
            sys.stdout.flush()
        runner.measure_all(todo, record)


def reason_of(row):
    """Why a run failed, beginning with its status."""
    return f"{row['status']}: {row['reason'].removeprefix(row['status'] + ': ')}"


def figures_line(row):
    if row["status"] != "ok":
        return reason_of(row)
    memory = "n/a" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.1f} MB"
    return f"{row['median_batch_time'] * 1e3:.2f} ms, {memory}"
