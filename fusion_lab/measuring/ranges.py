"""Named ranges round modules and phases, attached from outside, for profilers of either kind."""
import contextlib
import glob
import os
import warnings

import torch

from fusion_lab.measuring import roctx
from fusion_lab.training.files import counted, write_json
from fusion_lab.training.machine import MEGABYTE


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


class Profiling:
    """What ProfilerConfig asks for, while the measured steps run: a PyTorch trace, NVTX/roctx ranges with
    profiler start and stop, a memory profile from a run's Findings. Results go to config.profile_dir."""
    TRACED_STEPS = 5  # a trace of 50 steps has some hundred MB

    def __init__(self, config, device, named_modules, found, num_steps, traced_steps=TRACED_STEPS):
        self.config, self.device, self.found, self.traced_steps = config, device, found, traced_steps
        self.open_ranges, self.profiler, self.trace = [], None, None  # trace: the file's path, afterwards
        self.earlier = self.traces()
        self.outer = config.enable_rocm_profiling and device.type == "cuda"
        if config.enable_rocm_profiling and not self.outer:
            print("ROCm profiling: no GPU here, so no ranges for an outer profiler are emitted")
        self.hooks = contextlib.nullcontext()
        if self.outer or config.enable_pytorch_profiler and num_steps:
            self.hooks = ranges(named_modules, self.enter, self.leave, backward=True)
        if config.enable_pytorch_profiler and num_steps:
            warmup = min(1, num_steps - 1)
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=warmup, repeat=1,
                                                 active=min(traced_steps, num_steps - warmup)),
                on_trace_ready=self.write_trace,
                record_shapes=True, profile_memory=config.enable_memory_profiling, acc_events=True)

    def write_trace(self, profiler):
        torch.profiler.tensorboard_trace_handler(self.config.profile_dir)(profiler)

    def traces(self):
        return set(glob.glob(os.path.join(glob.escape(self.config.profile_dir),
                                          "*.pt.trace.json")))

    def __enter__(self):
        self.hooks.__enter__()
        if self.profiler:
            self.profiler.__enter__()
        if self.outer:
            switch_outer_profiler(on=True)
        return self

    def enter(self, name):
        if self.profiler:
            self.open_ranges.append(torch.profiler.record_function(name))
            self.open_ranges[-1].__enter__()
        if self.outer:
            torch.cuda.nvtx.range_push(name)

    def leave(self):
        if self.outer:
            torch.cuda.nvtx.range_pop()
        if self.profiler:
            self.open_ranges.pop().__exit__(None, None, None)

    def step(self):
        if self.profiler:
            self.profiler.step()

    @contextlib.contextmanager
    def paused(self):
        """Within, an outer profiler does not record: what runs there is no part of a step."""
        if self.outer:
            switch_outer_profiler(on=False)
        try:
            yield
        finally:  # a second pause in a row, after an error in here, would abort the process before ROCm 7.13
            if self.outer:
                switch_outer_profiler(on=True)

    def __exit__(self, *error):
        if self.outer:
            torch.cuda.synchronize()
            switch_outer_profiler(on=False)
        if self.profiler:
            self.profiler.__exit__(*error)
            self.trace = next(iter(self.traces() - self.earlier), None)
            print(f"PyTorch profiler: trace of up to {counted(self.traced_steps, 'step')} in "
                  f"{self.config.profile_dir}")
        self.hooks.__exit__(*error)
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
