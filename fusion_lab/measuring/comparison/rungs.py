"""Variants that compile, each in a process of its own: they compile side by side, behind everything else that
wants the host, and measure one by one, while the others rest."""
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

from fusion_lab.measuring.comparison.rows import add_savings, not_measured
from fusion_lab.measuring.comparison.variants import TOO_LATE, refuse_idle
from fusion_lab.measuring.guardian import Guardian
from fusion_lab.measuring.roctx import child_environment
from fusion_lab.measuring.turns import Guest
from fusion_lab.training.files import OUT_OF_MEMORY, counted
from fusion_lab.training.machine import MEGABYTE, free_memory
from fusion_lab.training.program import ROOT

SETTLE_SECONDS = 0.2  # for kernels that a process had queued before it was stopped
LAST = 19  # nice(2): what is measured or counted meanwhile comes first
COMPILE_THREADS = "2"  # of each of them; torch would take as many as there are cores
SPARE = 0.5  # of the free memory, for those that compile while others are counted
SHARES = dict(cpu=0.25, cuda=0.08)  # of the first table's budget: rounds of one of them
COMPILING = 0.6  # of the time that is left, for those that compile side by side
START = (f"import sys; sys.path[0] = {ROOT!r}; "  # not the user's directory
         "from fusion_lab.measuring.comparison import rung; rung.main(*sys.argv[1:])")
LAST_WORDS = 300  # characters of a failed process's last line


class Rung:
    """One variant and the process that measures it."""

    def __init__(self, program, variant, pace):
        self.variant, self.output, self.errors = variant, *(tempfile.TemporaryFile("w+") for _ in range(2))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS, **child_environment()}
        command = [sys.executable, "-c", START, program.file, variant.name,
                   json.dumps(variant.settings.as_dict()), json.dumps([pace.steps, pace.seconds])]
        self.guest = Guest(command, environment, stdin=subprocess.DEVNULL, stdout=self.output,
                           stderr=self.errors, start_new_session=True)  # Ctrl-C reaches the parent alone
    def signal(self, number):
        if self.guest.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a zombie
                os.killpg(self.guest.process.pid, number)

    def heard(self, seconds=None):
        """Whether it says something or ends within this time."""
        return bool(select.select([self.guest.reader], [], [], seconds)[0])

    def row(self):
        """Its result, after its end."""
        self.guest.process.wait()
        self.output.seek(0)
        self.errors.seek(0)
        with contextlib.suppress(ValueError, IndexError):
            return json.loads(self.output.read().splitlines()[-1])
        lines = self.errors.read().strip().splitlines() or [f"exit code {self.guest.process.returncode}"]
        self.variant.reason = lines[-1][:LAST_WORDS]
        return not_measured(self.variant)

    def end(self):
        self.signal(signal.SIGKILL)
        self.guest.process.wait()
        self.guest.close()
        self.output.close()
        self.errors.close()


class Rungs:
    """The compiled variants of a comparison. note(text) hears what goes on."""

    def __init__(self, program, variants, device, note, pace):
        self.program, self.variants, self.note = program, variants, note
        self.pace = pace.part(SHARES[device.type])
        self.together, self.running, self.begun = device.type == "cuda", [], False
        self.guardian, self.device, self.first = None, device, pace
        for variant in variants:
            refuse_idle(variant, device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.end_all()
        finally:
            if self.guardian:
                self.guardian.close()

    def begin(self, peak_mb=0.0):
        """On a GPU, start all that have not begun, if peak_mb for each fits into half of the free memory. A
        call without peak_mb starts them in any case."""
        if not self.together or self.begun:
            return
        wanted = [variant for variant in self.variants if not variant.reason]
        self.begun = peak_mb * MEGABYTE * len(wanted) <= SPARE * free_memory(self.device)
        for variant in wanted if self.begun else []:
            self.start(variant)

    def start(self, variant):
        self.guardian = self.guardian or Guardian()
        rung = Rung(self.program, variant, self.pace)
        self.guardian.tell("+", rung.guest.process.pid)
        self.running.append(rung)
        if self.together:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, rung.guest.process.pid, LAST)
        return rung

    def end_all(self):
        for rung in self.running:
            rung.end()
            self.guardian.tell("-", rung.guest.process.pid)
        self.running = []

    @contextlib.contextmanager
    def paused(self, but=None):
        """Within, none of them runs but one; those that wait or have ended need no stop."""
        busy = [rung for rung in self.running if rung is not but and not rung.heard(0)]
        try:
            for rung in busy:
                rung.signal(signal.SIGSTOP)
            time.sleep(SETTLE_SECONDS if busy else 0)
            yield
        finally:
            for rung in busy:
                rung.signal(signal.SIGCONT)

    def left(self):
        """Seconds in which others may still begin; None without a budget."""
        ends = self.first.whole(self.device)
        return None if ends is None else max(ends - time.monotonic(), 0.0)

    def measure(self, baseline_row, ceiling):
        """Yields a row for each variant, as soon as it is measured."""
        if self.together and self.running:
            self.note(f"waiting for {counted(len(self.running), 'variant')} to compile{self.left_text()}")
            left = self.left()
            end = left if left is None else time.monotonic() + COMPILING * left
            for rung in self.running:
                rung.heard(end and max(end - time.monotonic(), 0.0))
        again = []
        for number, variant in enumerate(self.variants, 1):
            row = self.one(variant, number, len(self.variants))
            if self.together and not row["measured"] and OUT_OF_MEMORY.search(row["reason"]):
                again.append((variant, row))  # while the others held memory as well
            else:
                yield finished(row, baseline_row, ceiling)
        self.end_all()
        for number, (variant, before) in enumerate(again, 1):
            variant.reason = None
            row = self.one(variant, number, len(again))
            yield finished(before if row.get("reason") == TOO_LATE else row, baseline_row, ceiling)

    def left_text(self):
        return "" if self.left() is None else f", at most {self.left():.0f} s left"

    def one(self, variant, number, count):
        """The row of one variant: of the process that waits for its turn, for whose compiling there was time,
        or of one that is started now."""
        if variant.reason:
            return not_measured(variant)
        place = f"{number} of {count}{self.left_text()}"
        rung, patience = next((r for r in self.running if r.variant is variant), None), self.left()
        if rung and patience is not None:
            patience = 0.0
        elif rung is None and patience != 0:
            self.note(f"compiling {variant.name}, {place}")
            rung = self.start(variant)
        if rung is None or not rung.heard(patience):
            if rung:
                rung.signal(signal.SIGKILL)
            return not_measured(variant, TOO_LATE)
        if rung.guest.wait_until_ready():
            self.note(f"measuring {variant.name}, {place}")
            with self.paused(but=rung):
                rung.guest.go()
                rung.guest.wait_until_ready()  # hears "done", or that it has ended
        return rung.row()


def finished(row, baseline_row, ceiling):
    if row["measured"]:
        add_savings(row, baseline_row, ceiling)
    return row
