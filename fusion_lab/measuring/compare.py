"""compare(): the only measurement of variants. --compare-fusion and the session's --ablation call it, and
a study starts --compare-fusion once for each of its shapes and runs.

Eager variants share this process and its bench. Among more than two rows, one that compiles or is captured is
measured by the same command line in a process of its own, beside a baseline; these run one after the other.
"""
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from fusion_lab.measuring.bench import NEVER, ROUNDS, SECONDS, Candidate, alternate, prepare_all, release
from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.gains import Gain, gain_of_rounds
from fusion_lab.measuring.probe import probe
from fusion_lab.measuring.roctx import child_environment
from fusion_lab.measuring.summary import launch_kind, provenance
from fusion_lab.measuring.variants import make_variants
from fusion_lab.training.errors import StopRequest, UserError
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import finite, read_json
from fusion_lab.training.flags import command_line
from fusion_lab.training.machine import choose_device, process_settings, require_memory
from fusion_lab.training.program import Program, Settings

MOST_BATCHES = 16  # alive on the device at once; more rounds repeat them
INTERRUPTED, CUT_SHORT = "interrupted before it was measured", "interrupted while it was measured"


@dataclass
class Row:
    """What is known of one variant: seconds, MB (2**20 bytes), percent; None where it was not measured. A
    reduction is what it saves of the baseline's. Its speed-up is the median over all rounds of the baseline's
    step divided by its own; its 95% interval is from speedup_low to speedup_high."""
    name: str
    fusion_config: dict[str, Any]
    reason: str | None = None  # why it was not measured
    not_used: list[str] = field(default_factory=list)  # why switches that are on change nothing here
    uncounted: str | None = None  # why its launches were not counted
    step_times: list[float] = field(default_factory=list)  # one a round
    baseline_step_times: list[float] = field(default_factory=list)  # of the baseline that took turns with it
    median_batch_time: float | None = None
    p20_batch_time: float | None = None
    p80_batch_time: float | None = None
    baseline_batch_time: float | None = None
    median_forward_time: float | None = None  # these three are None where a step is one CUDA graph
    median_backward_time: float | None = None
    median_optimizer_time: float | None = None
    first_step_time: float | None = None  # compilation included
    samples_per_second: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    batch_time_reduction_percent: float | None = None
    peak_memory_mb: float | None = None
    peak_memory_reduction_percent: float | None = None
    saved_activation_mb: float | None = None
    saved_activation_reduction_percent: float | None = None
    launches_per_step: int | None = None
    launch_reduction_percent: float | None = None
    flops_per_step: int | None = None
    achieved_tflops: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None

    @property
    def measured(self) -> bool:
        return bool(self.step_times)

    @property
    def gain(self) -> Gain:
        return Gain(self.speedup, self.speedup_low, self.speedup_high)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON; without measurements it has only name, reason and switches."""
        known = ("name", "reason", "not_used", "fusion_config")
        return dict(measured=self.measured, **{key: value for key, value in asdict(self).items()
                                               if self.measured or key in known})

    def add_savings(self, baseline):
        """Add how its memory and its work compare with the baseline's row."""
        for name, key in (("peak_memory", "peak_memory_mb"), ("saved_activation", "saved_activation_mb"),
                          ("launch", "launches_per_step")):
            before, after = getattr(baseline, key), getattr(self, key)
            if before and after is not None:
                setattr(self, f"{name}_reduction_percent", 100 * (1 - after / before))


@dataclass
class Comparison:
    """What compare() found: rows, the baseline's first. about: settings and machine, as the JSON has them."""
    about: dict[str, Any]
    names: list[str]  # of all rows, also those that are still to come
    rows: list[Row] = field(default_factory=list)
    ended: str = ""  # how the rounds in this process ended

    def as_dict(self) -> dict[str, Any]:
        """The content of fusion_comparison_*.json."""
        return finite(dict(mode="compare_fusion", **self.about, ended=self.ended,
                           variants=[row.as_dict() for row in self.rows]))


def not_measured(variant, reason):
    return Row(variant.name, asdict(variant.settings.fusion), reason=reason, not_used=list(variant.not_used))


def candidate_of(program, variant, device):
    make = partial(program.trainer, program, variant.settings, device)
    return Candidate(variant.name, make, variant.reason, probe)


def row_of(variant, candidate, baseline):
    """The Row of a variant, from the rounds in which both its candidate and the baseline's had their turn."""
    counts, rounds = candidate.counts, min(len(candidate.losses), len(baseline.losses))
    if candidate.reason or not rounds:
        return not_measured(variant, candidate.reason or INTERRUPTED)
    fusion, phases = variant.settings.fusion, candidate.timer.seconds()[:rounds]
    steps, before = phases.sum(axis=1), baseline.timer.seconds()[:rounds].sum(axis=1)
    p20, median, p80 = quantiles(steps)
    forward, backward, optimizer = ([None] * 3 if fusion.enable_cuda_graphs
                                    else np.median(phases, axis=0).tolist())
    gain = Gain(1.0) if candidate is baseline else gain_of_rounds(before / steps)
    return Row(
        variant.name, asdict(fusion), not_used=list(variant.not_used), uncounted=counts.uncounted,
        step_times=steps.tolist(), baseline_step_times=before.tolist(), median_batch_time=median,
        p20_batch_time=p20, p80_batch_time=p80, baseline_batch_time=float(np.median(before)),
        median_forward_time=forward, median_backward_time=backward, median_optimizer_time=optimizer,
        first_step_time=candidate.first_step_time,
        samples_per_second=variant.settings.training.batch_size / median, **gain.as_dict(),
        batch_time_reduction_percent=100 * (1 - 1 / gain.factor), peak_memory_mb=candidate.peak,
        saved_activation_mb=counts.saved_mb, launches_per_step=counts.launches,
        flops_per_step=counts.flops, achieved_tflops=counts.flops / median / 1e12,
        first_loss=candidate.losses[0], final_loss=candidate.losses[rounds - 1])


def compare_apart(program, words, directory, stop, seconds=math.inf, patience=0):
    """--compare-fusion by a command line of these words, in a process of its own that writes into a
    directory. Returns (the content of its JSON, or {}; why it failed, or None). A signal or the time limit
    ends it, and patience is the seconds that it has to end what it has started."""
    command = [sys.executable, program.file, *words, "--profile-dir", directory]
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the parent
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            env=child_environment(), start_new_session=True)
        try:
            while process.poll() is None and not stop.signal and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            ended_here = process.poll() is None
            if ended_here:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(patience, 0.5) if stop.signal else patience)  # who pressed Ctrl-C waits
            with contextlib.suppress(ProcessLookupError):  # if it has left no process of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        reason = why(process.returncode, errors.read(), program.name)
    if ended_here:
        reason = CUT_SHORT if stop.signal else f"not done after {seconds} s"
    try:
        return read_json(os.path.join(directory, program.result("fusion_comparison"))), reason
    except UserError as error:
        return {}, reason or str(error)


def measure_apart(program, settings, variant, rounds, stop):
    """The row of a variant, measured for `rounds` rounds by the same command line in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        words = [*command_line(program, settings), "--compare-fusion", "--variants", variant.name,
                 "--num-steps", str(rounds)]
        content, reason = compare_apart(program, words, os.path.join(place, "comparison"), stop)
    if reason:
        return not_measured(variant, reason)
    entry = content["variants"][-1]
    return Row(**{key: value for key, value in entry.items() if key != "measured"})


NOTE = re.compile(r"\[ *\d+ s\] ")  # what goes on, comparison_table.Notes
ERROR = re.compile(r"[\w.]+(Error|Exception)\b")  # CUDA's errors end with lines of advice
LONGEST_REASON = 300  # letters


def why(code, text, name):
    """Why a process of the program called `name` ended with this exit code, None for 0. The reason is the
    last line of `text`, its stderr, that the program itself wrote or that names an error, else the last line
    of all."""
    if code == 0:
        return None
    if code < 0:
        memory = ", as the kernel does when the host is out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{memory}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not NOTE.match(line)]
    errors = [line for line in lines if line.startswith(name) or ERROR.match(line)]
    said = (errors or lines or [f"exit code {code}"])[-1]
    return said.removeprefix(f"{name}: error: ")[:LONGEST_REASON]


def compare(program: Program, settings: Settings, names: str | Sequence[str] | None = None,
            rounds: int | None = None, show: Callable[[Comparison], object] = lambda comparison: None,
            note: Callable[[str], object] = lambda text: None, stop: StopRequest | None = None,
            begin: Callable[[torch.device], object] = lambda device: None) -> Comparison:
    """Measure variants by name (variants.py; None: the usual ones) and return a Comparison. show(comparison)
    is called whenever more of its rows are known, note(text) is told what goes on. rounds: so many; None:
    what ends first of ROUNDS and SECONDS. stop: a StopRequest, entered for the rounds: once it is asked, what
    is known is all there will be. begin(device) comes when nothing can be refused any more. Raises
    UserError."""
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    variants = make_variants(settings, names, device.type == "cuda")
    wanted = [variant for variant in variants if not variant.reason]
    require_memory(program, device, *(variant.settings for variant in variants))
    begin(device)
    # Two stay together: so the other process, which measure_apart() starts with two, measures both itself
    apart = [variant for variant in wanted if variant.wants_own_process and len(wanted) > 2]
    together = [variant for variant in variants if variant not in apart]
    names = [variant.name for variant in (*together, *apart)]
    comparison = Comparison(about(program, settings, device), names)
    source = program.data(settings)
    supply = [to_device(source.batch(i), device) for i in range(min(rounds or ROUNDS, MOST_BATCHES))]
    candidates = [candidate_of(program, variant, device) for variant in together]
    prepare_all(candidates, supply[0], device, note)

    def tell():
        for row in comparison.rows:
            row.add_savings(comparison.rows[0])
        show(comparison)

    with stop or contextlib.nullcontext(NEVER) as stop:
        limit = "" if rounds else f", or {SECONDS:g} s of them"
        note(f"{rounds or ROUNDS} rounds{limit}, in which each takes a step")
        comparison.ended = alternate(candidates, supply, rounds, stop, note)
        comparison.rows = [row_of(variant, candidate, candidates[0])
                           for variant, candidate in zip(together, candidates, strict=True)]
        ran = len(comparison.rows[0].step_times)
        comparison.about["training_params"]["num_steps"] = ran
        candidates.clear()  # the memory is for other processes
        release()
        tell()
        for number, variant in enumerate(apart, 1):
            if stop.signal:
                comparison.rows.append(not_measured(variant, INTERRUPTED))
            else:
                note(f"{variant.name} in a process of its own, which compiles: {number} of {len(apart)}")
                comparison.rows.append(measure_apart(program, settings, variant, ran, stop))
            tell()
    return comparison


def about(program, settings, device):
    """What the JSON says beside the rows."""
    with torch.device("meta"):
        nominal = program.model(settings.model, program.fusion_config()).statistics()
    return dict(provenance(settings, device), launch_kind=launch_kind(device), nominal=nominal)
