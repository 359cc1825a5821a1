"""Named ranges round modules and phases, attached from outside, for profilers of either kind."""
import contextlib
import os
import time
import warnings

import torch

from fusion_lab.measuring import roctx
from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.training.files import write_json
from fusion_lab.training.machine import MEGABYTE
from fusion_lab.training.words import counted

PHASES = ("data", "forward", "backward", "optimizer")  # of a step
RECOMPUTE = "recompute"  # a forward pass once more, during backward: activation checkpointing
REST = "rest"  # what a step runs outside all sub-layers


@contextlib.contextmanager
def ranges(named_modules, enter, leave, backward=False):
    """Within: enter(name) and leave() run round the forward of every (name, module) and, as
    name + ".backward", round its backward by backward() (not by autograd.grad). Hooks from outside keep
    profiling code out of the model."""
    def begin(name):
        return lambda *_: enter(name)

    def end(*_):
        leave()  # and return None: a hook's return value would replace the module's

    def end_backward(module, gradients, _):
        parameters = [p for p in module.parameters() if p.requires_grad]
        if any(gradient is not None for gradient in gradients) or not parameters:
            leave()
            return
        # Its input is data: nobody asks for that gradient, and this hook comes before those of parameters
        last = torch.autograd.graph.register_multi_grad_hook(parameters, lambda _: (last.remove(), leave()))
        handles.append(last)

    handles = []
    for name, module in named_modules:
        handles += [module.register_forward_pre_hook(begin(name)),  # recomputation may stop by an exception
                    module.register_forward_hook(end, always_call=True)]
        if backward:
            handles += [module.register_full_backward_pre_hook(begin(name + ".backward")),
                        module.register_full_backward_hook(end_backward)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # end_backward() knows
            yield
    finally:
        for handle in handles:
            handle.remove()


def sums_by_range(clock):
    """RangeSums of a step's phases and of the sub-layers' ranges within them. A forward pass that begins
    within the backward phase is filed as recomputation."""
    def relabel(name):
        phase = sums.stack[0][0] if sums.stack else None
        return f"{name}.{RECOMPUTE}" if phase == "backward" and not name.endswith(".backward") else name

    sums = RangeSums(clock, relabel)
    return sums


def place_of(name):
    """(sub-layer or REST, direction or phase) of a range or a phase: "mlp.up.backward" is ("mlp.up",
    "backward"), "mlp.up" is ("mlp.up", "forward")."""
    if name in PHASES:
        return REST, name
    sublayer, _, direction = name.rpartition(".")
    return (sublayer, direction) if direction in ("backward", RECOMPUTE) else (name, "forward")


class Profiling:
    """What ProfilerConfig asks for, while a run's steps are measured: a PyTorch trace of the last ones,
    NVTX/roctx ranges with profiler start and stop, a memory profile from the run's Findings. Results go to
    config.profile_dir.

    With a trace there come first steps without the profiler, on a CPU timed by range, which takes up to 4% of
    a small one; one in which the profiler starts; then the traced ones. Afterwards `trace` is the trace's
    path, None where there is none, and `samples` has a dict for each step that was timed by range, {range or
    phase: seconds without the ranges in it}.
    """

    def __init__(self, config, device, named_modules, found, num_steps):
        self.config, self.device, self.found, self.modules = config, device, found, named_modules
        self.open_ranges, self.number, self.off, self.trace = [], 0, False, None
        self.hooks = contextlib.ExitStack()
        self.outer = config.enable_rocm_profiling and device.type == "cuda"
        if config.enable_rocm_profiling and not self.outer:
            print("ROCm profiling: no GPU here, so no ranges for an outer profiler are emitted")
        recording = config.enable_pytorch_profiler and num_steps > 0
        self.timing = recording and device.type == "cpu"
        start = int(num_steps > 1)  # the step in which the profiler starts is slow
        self.traced = max(1, min(config.profile_steps, (num_steps - start) // 2))
        self.without = num_steps - start - self.traced if recording else num_steps  # the profiler
        self.sums, self.samples = sums_by_range(time.perf_counter), []
        self.profiler = None
        if recording:
            plan = torch.profiler.schedule(wait=self.without, warmup=start, active=self.traced, repeat=1)
            self.profiler = torch.profiler.profile(
                schedule=plan, on_trace_ready=self.write_trace, record_shapes=True, acc_events=True,
                profile_memory=config.enable_memory_profiling)

    def write_trace(self, profiler):
        self.trace = os.path.join(self.config.profile_dir, f"steps.{time.time_ns()}.pt.trace.json")
        profiler.export_chrome_trace(self.trace)

    def __enter__(self):
        if self.outer or self.timing or self.profiler and not self.without:
            self.attach()
        if self.profiler:
            self.profiler.__enter__()
        if self.outer:
            switch_outer_profiler(on=True)
        return self

    def attach(self):
        self.hooks.enter_context(ranges(self.modules, self.enter, self.leave, backward=True))

    def enter(self, name):
        """A phase of the step, or a module's forward or backward pass, begins."""
        if self.off:
            return
        if self.timing:
            self.sums.enter(name)
        if self.profiler and self.number >= self.without:
            self.open_ranges.append(torch.profiler.record_function(name))
            self.open_ranges[-1].__enter__()
        if self.outer:
            torch.cuda.nvtx.range_push(name)

    def leave(self):
        if self.off:
            return
        if self.outer:
            torch.cuda.nvtx.range_pop()
        if self.open_ranges:
            self.open_ranges.pop().__exit__(None, None, None)
        if self.sums.stack:
            self.sums.leave()

    def step(self):
        """A step has ended."""
        self.number += 1
        if self.sums.sums and (self.number <= self.without or not self.without):
            self.samples.append(self.sums.sums)
        self.sums.sums = {}
        if self.profiler and self.number == self.without and not (self.outer or self.timing):
            self.attach()  # not earlier, since hooks cost the host's time
        if self.profiler:
            self.profiler.step()

    @contextlib.contextmanager
    def paused(self):
        """Within, nothing is recorded: what runs there is no part of a step."""
        self.off = True
        if self.outer:
            switch_outer_profiler(on=False)
        try:
            yield
        finally:  # a second pause in a row, after an error in here, would abort the process before ROCm 7.13
            self.off = False
            if self.outer:
                switch_outer_profiler(on=True)

    def untraced(self, steps):
        """Of something for each step that ran, that of the steps without the profiler; all, where it saw
        all."""
        return steps[:self.without or None]

    def __exit__(self, *error):
        if self.outer:
            torch.cuda.synchronize()
            switch_outer_profiler(on=False)
        if self.profiler:
            self.profiler.__exit__(*error)
            asked = self.config.profile_steps
            cut = f" (the run has no room for --profile-steps {asked})" if self.traced < asked else ""
            print(f"PyTorch profiler: trace of the last {counted(self.traced, 'step')}{cut}: {self.trace}"
                  if self.trace else "PyTorch profiler: no trace, since the run ended before its last steps")
        self.hooks.close()
        if self.config.enable_memory_profiling and error[0] is None:
            self.write_memory_profile()

    def write_memory_profile(self):
        saved = self.found.saved
        print("Saved activations of one step, MB by sub-layer (all blocks):")
        for name, size in sorted(saved.items(), key=lambda item: -item[1]):
            print(f"   {name:24s} {size / MEGABYTE:9.1f}  {100 * size / sum(saved.values()):5.1f}%")
        write_json(os.path.join(self.config.profile_dir, "memory_profile.json"),
                   dict(saved_activation_bytes=saved, timeline_columns=["operation", "live_bytes"],
                        timeline=self.found.timeline))


def switch_outer_profiler(on):
    """Tell an outer profiler that the interesting part begins or ends. rocprofv3 --selected-regions listens
    to roctx only; on CUDA, nsys and ncu listen to cudaProfilerStart."""
    if torch.version.hip is None:
        (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
        return
    try:
        (roctx.resume if on else roctx.pause)()
    except OSError as error:
        print(f"ROCm profiling: no profiler start and stop ({error}); ranges are emitted all the same")
