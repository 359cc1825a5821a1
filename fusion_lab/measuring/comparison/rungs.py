"""Variants that compile, each in a process of its own: they compile side by side and measure one by one."""
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from fusion_lab.measuring.comparison.rows import add_savings, not_measured
from fusion_lab.measuring.comparison.variants import UNMEASURED, refuse_idle
from fusion_lab.measuring.guardian import Guardian
from fusion_lab.measuring.turns import Guest
from fusion_lab.training.files import OUT_OF_MEMORY
from fusion_lab.training.program import ROOT
from fusion_lab.training.reading import parse_json

SETTLE_SECONDS = 0.2  # for kernels that a process had queued before it was stopped
COMPILE_THREADS = "2"  # of each of them; torch would take as many as there are cores
LAST_WORDS = 300  # characters of a failed process's last line


class Rung:
    """One variant and the process that measures it."""

    def __init__(self, program, variant):
        self.variant, self.output, self.errors = variant, *(tempfile.TemporaryFile("w+") for _ in range(2))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS, **os.environ}
        command = [sys.executable, os.path.join(ROOT, "fusion_lab", "start.py"),
                   "fusion_lab.measuring.comparison.rung", program.file, variant.name,
                   json.dumps(variant.settings.as_dict())]
        self.guest = Guest(command, environment, stdin=subprocess.DEVNULL, stdout=self.output,
                           stderr=self.errors, start_new_session=True)  # Ctrl-C reaches the parent alone

    def signal(self, number):
        if self.guest.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guest.process.pid, number)

    def heard(self, stop):
        """Whether it has said something or ended; False where a signal in stop came first."""
        while not (stop and stop.signal is not None):
            if select.select([self.guest.reader], [], [], 0.2)[0]:
                return True
        return False

    def row(self):
        """Its result, after its end."""
        self.guest.process.wait()
        self.output.seek(0)
        self.errors.seek(0)
        with contextlib.suppress(ValueError, IndexError):
            return parse_json(self.output.read().splitlines()[-1])
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

    def __init__(self, program, variants, device, note):
        self.program, self.variants, self.note = program, variants, note
        self.together, self.running, self.seconds = device.type == "cuda", [], []
        self.guardian = None
        for variant in variants:
            refuse_idle(variant, device)

    def __enter__(self):
        if self.together:
            for variant in self.variants:
                if not variant.reason:
                    self.start(variant)
        return self

    def __exit__(self, *_):
        self.end_all()
        if self.guardian:
            self.guardian.close()

    def start(self, variant):
        self.guardian = self.guardian or Guardian()
        rung = Rung(self.program, variant)
        self.guardian.tell("+", rung.guest.process.pid)
        self.running.append(rung)
        return rung

    def end_all(self):
        for rung in self.running:
            rung.end()
            self.guardian.tell("-", rung.guest.process.pid)
        self.running = []

    @contextlib.contextmanager
    def paused(self):
        """Within, none of them runs."""
        for rung in self.running:
            rung.signal(signal.SIGSTOP)
        time.sleep(SETTLE_SECONDS if self.running else 0)
        try:
            yield
        finally:
            for rung in self.running:
                rung.signal(signal.SIGCONT)

    def measure(self, baseline_row, ceiling, stop=None):
        """Yields a row for each variant, as soon as it is measured."""
        if self.together:
            self.note(f"waiting for {len(self.running)} variants to compile")
            for rung in self.running:
                rung.heard(stop)
        again = []
        for number, variant in enumerate(self.variants, 1):
            row = self.one(variant, number, stop)
            if self.together and not row["measured"] and OUT_OF_MEMORY.search(row["reason"]):
                again.append(variant)  # while the others held memory as well
            else:
                yield finished(row, baseline_row, ceiling)
        self.end_all()
        for number, variant in enumerate(again, 1):
            variant.reason = None
            yield finished(self.one(variant, number, stop), baseline_row, ceiling)

    def one(self, variant, number, stop):
        """The row of one variant: of the process that waits for its turn, or of one that is started now."""
        if stop and stop.signal is not None:
            variant.reason = UNMEASURED
        if variant.reason:
            return not_measured(variant)
        started, place = time.monotonic(), f"{number} of {len(self.variants)}"
        rung = next((r for r in self.running if r.variant is variant), None)
        if rung is None:
            left = np.mean(self.seconds) * (len(self.variants) - number + 1) if self.seconds else 0
            self.note(f"compiling {variant.name}, {place}" + (f", about {left:.0f} s left" if left else ""))
            rung = self.start(variant)
        if rung.heard(stop) and rung.guest.wait_until_ready():
            self.note(f"measuring {variant.name}, {place}")
            rung.guest.go()
            if rung.heard(stop):
                rung.guest.wait_until_ready()  # hears "done", or that it has ended
        if stop and stop.signal is not None:
            rung.signal(signal.SIGKILL)
            variant.reason = UNMEASURED
            return not_measured(variant)
        self.seconds.append(time.monotonic() - started)
        return rung.row()


def finished(row, baseline_row, ceiling):
    if row["measured"]:
        add_savings(row, baseline_row, ceiling)
    return row
