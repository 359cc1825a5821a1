"""Runs the points of a study, each in its own process, one measuring at a time."""
import collections
import concurrent.futures
import contextlib
import itertools
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

from fusion_lab.measuring.guardian import Guardian
from fusion_lab.measuring.turns import Guest
from fusion_lab.study.results import Figures, Machine, Row
from fusion_lab.training import locks
from fusion_lab.training.files import OUT_OF_MEMORY, UserError
from fusion_lab.training.reading import read_json

ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b")  # CUDA's errors end with lines of advice
VISIBLE_GPUS = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
SETTLE_SECONDS = 0.2  # for kernels that a process had queued before it was stopped
START_SECONDS, COMPILE_SECONDS = 6, 60  # guesses, until a run of the setting is done
LONGEST_REASON = 300  # letters


class Turns:
    """At most one process measures at a time, in the order of the plan, and all other ones are stopped while
    it does. `taken` counts the turns of a study, `turn_of` has those of points under way."""

    def __init__(self, taken=0):
        self.lock, self.processes, self.holder = threading.Lock(), [], None
        self.plan = {}  # points that have neither measured nor ended, in order; a dict, whose pop is atomic
        self.taken, self.turn_of = taken, {}
        self.guardian = Guardian()

    def start(self, command, **options):
        """A Guest in a process group of its own."""
        with self.lock:  # not while another one measures: importing torch keeps a core busy
            guest = Guest(command, start_new_session=True, **options)
            self.guardian.tell("+", guest.process.pid)
            self.processes.append(guest.process)
        return guest

    def comes_next(self, point):
        """Whether nothing earlier is outstanding; a process that is no point of a plan need not wait."""
        return point not in self.plan or next(iter(list(self.plan))) == point

    def give_up(self, point):
        self.plan.pop(point, None)

    @contextlib.contextmanager
    def alone(self, process, point):
        with self.lock:
            self.taken += 1
            self.turn_of[point] = self.taken
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
    def signal(process, kind):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a zombie
                os.killpg(process.pid, kind)

    def end(self, process):
        self.signal(process, signal.SIGKILL)
        process.wait()
        self.guardian.tell("-", process.pid)
        with contextlib.suppress(ValueError):
            self.processes.remove(process)


class Runner:
    """Runs points; to be closed. TINYOPENFOLD_SCRIPT may name another trainer with the same command line, for
    tests. gpus names those that processes are spread over, as VISIBLE_GPUS does; with none they see what this
    one sees."""

    def __init__(self, study, directory, timeout, jobs=1, gpus=(), turns_taken=0):
        self.study, self.directory, self.timeout, self.jobs = study, directory, timeout, jobs
        self.program = study.vocabulary.program
        self.script = os.environ.get("TINYOPENFOLD_SCRIPT") or self.program.file
        self.turns, self.stopping = Turns(turns_taken), False
        self.on_gpu, self.gpu_lock = dict.fromkeys(gpus, 0), threading.Lock()
        self.environment = dict(os.environ)
        if jobs > 1:  # or every process starts as many compilers as there are cores
            self.environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.turns.guardian.close()

    def measure(self, point):
        """The row of one run of the trainer; None if the study is being stopped."""
        if self.stopping:
            return None
        started = time.monotonic()
        with self.folder(point.file_name()) as folder:
            code = self.run_trainer(self.study.flags(point.shape, point.setting), folder, point)
            status, reason, figures, system = self.outcome(folder, code)
            row = Row(point.shape, point.setting, point.run, status, reason, figures, system,
                      round(time.monotonic() - started, 3), self.turns.turn_of.pop(point, None), code,
                      datetime.now(timezone.utc).isoformat(timespec="seconds"))
            if not row.ok and not self.stopping:
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
        path = locks.present(os.path.join(self.directory, "running", name))
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        yield path
        shutil.rmtree(path, ignore_errors=True)

    def keep_log(self, folder, name):
        logs, folder = (locks.present(path) for path in (os.path.join(self.directory, "logs"), folder))
        with contextlib.suppress(OSError):  # the row, which must be written, has the reason too
            os.makedirs(logs, exist_ok=True)
            with open(os.path.join(logs, f"{name}.txt"), "wb") as target:
                for part in ("stdout.txt", "stderr.txt"):
                    with open(os.path.join(folder, part), "rb") as source:
                        shutil.copyfileobj(source, target)

    def run_trainer(self, flags, folder, point=None):
        """Exit code of the trainer, or "timeout"; its output is in stdout.txt and stderr.txt in folder."""
        command = [sys.executable, self.script, *flags, "--profile-dir", folder]
        with (self.place() as environment, open(os.path.join(folder, "stdout.txt"), "wb") as output,
              open(os.path.join(folder, "stderr.txt"), "wb") as errors):
            guest = self.turns.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                     env=environment)
            try:
                return self.follow(guest, point)
            finally:
                self.turns.end(guest.process)
                self.turns.give_up(point)
                guest.close()

    def follow(self, guest, point):
        """Give the guest its turn when it has asked for it and no point before it is outstanding, until it
        ends: its exit code, or "timeout". Its clock stands while it waits for others."""
        process, left, waits = guest.process, self.timeout, False
        with contextlib.ExitStack() as turn:
            while process.poll() is None and not self.stopping:
                before = time.monotonic()
                readable, _, _ = select.select([guest.reader], [], [], 0.05)
                message = os.read(guest.reader, 100) if readable else b""
                if not waits and not self.turns.holds_up(process):
                    left -= time.monotonic() - before
                if left < 0:
                    return "timeout"
                waits = waits or b"ready" in message
                if waits and self.turns.comes_next(point):
                    waits = False
                    turn.enter_context(self.turns.alone(process, point))
                    guest.go()
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
                if self.jobs > 1 and row.status == "out of memory":
                    again[row.exit_code == -signal.SIGKILL].append(row.point)
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
        """(status, reason, figures, machine) of a run that has ended."""
        folder = locks.present(folder)
        if code == 0:
            try:
                summary = os.path.join(folder, self.program.result("performance_summary"))
                figures, machine = read_result(summary)
            except (OSError, ValueError):
                return "failed", "ended well but left no readable summary", None, None
            return "ok", None, figures, machine
        if code == "timeout":
            return "timeout", f"not done after {self.timeout:g} s", None, None
        if code == -signal.SIGKILL:
            reason = "killed (SIGKILL), as the kernel does when the host is out of memory"
            return "out of memory", reason, None, None
        last = last_words(os.path.join(folder, "stderr.txt"), self.program.name)
        status = "out of memory" if OUT_OF_MEMORY.search(last) else "failed"
        return status, last or f"exit code {code}, nothing on stderr", None, None


def read_result(path):
    """(Figures, Machine) of the trainer's summary. Raises OSError or ValueError."""
    summary = read_json(path)
    if not isinstance(summary.get("system_info"), dict):
        raise ValueError(f"{path}: no summary of a training run")
    unknown = dict.fromkeys(Machine.__dataclass_fields__)
    return Figures.read(summary.get("performance_summary")), Machine.read(unknown | summary["system_info"])


def last_words(log, trainer):
    """The last line of a log if it is the trainer's own, without its name; else the last one that names an
    error, or that is not blank."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-20000:].splitlines() if line.strip()]
    if lines and not lines[-1].startswith(trainer):
        lines = [line for line in lines if ERROR_LINE.match(line)] or lines
    return lines[-1].removeprefix(f"{trainer}: error: ")[:LONGEST_REASON] if lines else ""


def seconds_left(study, points, rows, jobs):
    """Estimate for the points yet to run: the mean of the finished runs of their setting, else a guess."""
    known = {}
    for row in rows:
        known.setdefault(row.setting, []).append(row.seconds)
    total = 0.0
    for setting, count in collections.Counter(point.setting for point in points).items():
        guess = START_SECONDS + COMPILE_SECONDS * ("torch-compile" in study.vocabulary.parse(setting))
        seconds = known.get(setting, [guess])
        total += count * sum(seconds) / len(seconds)
    return total / jobs


def duration(seconds):
    """Seconds in words: "90 s", "3 min", "2.5 h"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 \
        else f"{seconds / 3600:.1f} h"


def run_points(runner, results, points):
    """Measure the points that have no row yet: a line each, and on a terminal a progress bar."""
    done = {row.point for row in results.rows}
    todo = [point for point in points if point not in done]
    pending = set(todo)
    with tqdm(total=len(points), initial=len(points) - len(todo), disable=None, leave=False,
              bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}") as bar:
        def record(row):
            results.append(row)
            pending.discard(row.point)
            left = f"left {duration(seconds_left(runner.study, pending, results.rows, runner.jobs))}"
            place = f"{len(points) - len(pending):{len(str(len(points)))}}/{len(points)}"
            bar.update()
            bar.set_postfix_str(left)
            bar.write(f"[{place}] {row.point}: {row} | {left}", file=sys.stdout)
            sys.stdout.flush()
        runner.measure_all(todo, record)
