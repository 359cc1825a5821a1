"""What ProfilerConfig asks for while a run's steps are measured: four recorders, and Profiling, which calls
them. Results go to config.profile_dir.
"""
import contextlib
import math
import os
import time

import torch

from fusion_lab.measuring import roctx
from fusion_lab.measuring.ranges import ranges, sums_by_range
from fusion_lab.training.errors import FAILED, OK
from fusion_lab.training.files import write_json
from fusion_lab.training.machine import MEGABYTE
from fusion_lab.training.words import counted


class Recorder:
    """Records one thing; a subclass overrides what it needs to hear of."""
    ranges_from = math.inf  # the number of steps before it needs the ranges of sub-layers

    def begin(self):
        """The first step comes next."""

    def enter(self, name):
        """A phase of the step, or a module's forward or backward pass, begins."""

    def leave(self):
        """What began last ends."""

    def step(self):
        """A step has ended."""

    def listen(self, on):
        """on: what comes next is part of a step again; else it is none until the next call."""

    def end(self, failed):
        """The last step has ended, or the run has failed."""


class RangeTimes(Recorder):
    """On a CPU: the host's time by range, of steps that no profiler slows down. It takes up to 4% of a small
    step. `samples` has a dict for each step, {range or phase: seconds without the ranges in it}."""
    ranges_from = 0

    def __init__(self, steps):
        self.steps, self.samples, self.sums = steps, [], sums_by_range(time.perf_counter)

    def enter(self, name):
        self.sums.enter(name)

    def leave(self):
        if self.sums.stack:
            self.sums.leave()

    def step(self):
        if len(self.samples) < self.steps:
            self.samples.append(self.sums.sums)
        self.sums.sums = {}


class Trace(Recorder):
    """PyTorch's profiler, which traces the last steps of a run, at most --profile-steps. Before them comes
    the step in which it starts, which is slow, and before that `steps_before_trace` run without it. `path` is
    the trace's file, None where there is none."""

    def __init__(self, config, num_steps):
        start = int(num_steps > 1)
        self.config, self.path, self.number, self.open_ranges = config, None, 0, []
        self.missing, self.unwritten = "no trace, since the run ended before its last steps", False
        self.traced = max(1, min(config.profile_steps, (num_steps - start) // 2))
        self.steps_before_trace = self.ranges_from = num_steps - start - self.traced
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.steps_before_trace, warmup=start, active=self.traced,
                                             repeat=1),
            on_trace_ready=self.write, record_shapes=True, acc_events=True,
            profile_memory=config.enable_memory_profiling)

    def write(self, profiler):
        path = os.path.join(self.config.profile_dir, f"steps.{time.time_ns()}.pt.trace.json")
        profiler.export_chrome_trace(path)
        if os.path.exists(path):
            self.path = path
        else:  # on a full disk PyTorch logs an error, removes the file and returns
            self.missing, self.unwritten = f"cannot write {path}: is the disk full?", True

    def begin(self):
        self.profiler.__enter__()

    def enter(self, name):
        if self.number >= self.steps_before_trace:
            self.open_ranges.append(torch.profiler.record_function(name))
            self.open_ranges[-1].__enter__()

    def leave(self):
        if self.open_ranges:
            self.open_ranges.pop().__exit__(None, None, None)

    def step(self):
        self.number += 1
        self.profiler.step()

    def end(self, failed):
        self.profiler.__exit__(None, None, None)
        asked = self.config.profile_steps
        cut = f" (the run has no room for --profile-steps {asked})" if self.traced < asked else ""
        print(f"PyTorch profiler: trace of the last {counted(self.traced, 'step')}{cut}: {self.path}"
              if self.path else f"PyTorch profiler: {self.missing}")


class OuterProfiler(Recorder):
    """Ranges for a profiler that has started this process, and when it has to listen. rocprofv3
    --selected-regions listens to roctx only; on CUDA, nsys and ncu listen to cudaProfilerStart."""
    ranges_from = 0

    def begin(self):
        self.listen(on=True)

    def enter(self, name):
        torch.cuda.nvtx.range_push(name)

    def leave(self):
        torch.cuda.nvtx.range_pop()

    def listen(self, on):
        if torch.version.hip is None:
            (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
            return
        try:
            (roctx.resume if on else roctx.pause)()
        except OSError as error:
            print(f"ROCm profiling: no profiler start and stop ({error}); ranges are emitted all the same")

    def end(self, failed):
        torch.cuda.synchronize()
        self.listen(on=False)


class MemoryProfile(Recorder):
    """Saved activations by sub-layer and a timeline of memory, which the probe has found before."""

    def __init__(self, config, counts):
        self.config, self.counts = config, counts

    def end(self, failed):
        if failed:
            return
        saved = self.counts.saved
        print("Saved activations of one step, MB by sub-layer (all blocks):")
        for name, size in sorted(saved.items(), key=lambda item: -item[1]):
            print(f"   {name:24s} {size / MEGABYTE:9.1f}  {100 * size / sum(saved.values()):5.1f}%")
        write_json(os.path.join(self.config.profile_dir, "memory_profile.json"),
                   dict(saved_activation_bytes=saved, timeline_columns=["operation", "live_bytes"],
                        timeline=self.counts.timeline))


class Profiling:
    """The recorders of a run of num_steps. named_modules are its sub-layers; counts, its Counts."""

    def __init__(self, config, device, named_modules, counts, num_steps):
        on_gpu, recording = device.type == "cuda", config.enable_pytorch_profiler and num_steps > 0
        self.modules, self.hooks, self.number, self.off = named_modules, contextlib.ExitStack(), 0, False
        trace = Trace(config, num_steps) if recording else None
        times = RangeTimes(trace.steps_before_trace or num_steps) if trace and not on_gpu else None
        outer = OuterProfiler() if config.enable_rocm_profiling and on_gpu else None
        memory = MemoryProfile(config, counts) if config.enable_memory_profiling else None
        if config.enable_rocm_profiling and not on_gpu:
            print("ROCm profiling: no GPU here, so no ranges for an outer profiler are emitted")
        self.tracer, self.times = trace, times
        self.steps_before_trace = trace.steps_before_trace if trace else 0  # 0: the profiler sees all
        self.samples = times.samples if times else []
        self.recorders = [recorder for recorder in (memory, times, trace, outer) if recorder]

    @property
    def trace(self):
        """The trace's path, None where there is none."""
        return self.tracer and self.tracer.path

    @property
    def code(self):
        """The exit code of a run that went well otherwise: FAILED if its trace could not be written."""
        return FAILED if self.tracer and self.tracer.unwritten else OK

    def untraced(self, steps):
        """The entries of steps, which has one for each step that ran, that the profiler did not see; all, if
        it saw all steps."""
        return steps[:self.steps_before_trace or None]

    def __enter__(self):
        self.attach()
        for recorder in self.recorders:
            recorder.begin()
        return self

    def attach(self):
        """Put hooks on the sub-layers, not before a recorder wants them, since they cost the host's time."""
        if self.number == min((recorder.ranges_from for recorder in self.recorders), default=None):
            self.hooks.enter_context(ranges(self.modules, self.enter, self.leave, backward=True))

    def enter(self, name):
        for recorder in () if self.off else self.recorders:
            recorder.enter(name)

    def leave(self):
        for recorder in () if self.off else reversed(self.recorders):
            recorder.leave()

    def step(self):
        self.number += 1
        for recorder in self.recorders:
            recorder.step()
        self.attach()

    @contextlib.contextmanager
    def paused(self):
        """Within, nothing is recorded: what runs there is no part of a step."""
        self.off = True
        for recorder in self.recorders:
            recorder.listen(on=False)
        try:
            yield
        finally:  # a second pause in a row, after an error in here, would abort the process before ROCm 7.13
            self.off = False
            for recorder in self.recorders:
                recorder.listen(on=True)

    def __exit__(self, kind, *_):
        self.hooks.close()
        for recorder in reversed(self.recorders):
            recorder.end(failed=kind is not None)
