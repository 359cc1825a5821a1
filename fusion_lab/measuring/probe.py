"""What one step costs beside time: memory, launches, FLOPs."""
import contextlib
import time
from dataclasses import dataclass, replace

import torch

from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.counters import OpCounter, counting_saved, gpu_kernels, saved_activations
from fusion_lab.measuring.flops import counts_by_sublayer
from fusion_lab.measuring.ranges import PHASES, place_of, ranges, sums_by_range
from fusion_lab.measuring.roctx import BLIND, GRAPHS
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import MEGABYTE
from fusion_lab.training.words import counted


@dataclass
class Counts:
    """What probe() and warm_up() count of a step; None where they could not."""
    saved: dict                     # bytes kept for backward, by sub-layer
    flops: int                      # of one step
    launches: int | None = None     # kernels on a GPU, operations on a CPU
    peak: int | None = None         # bytes: live tensors on a CPU; on a GPU before and beside
                                    # the steps that the allocator's own peak covers, such as a capture
    timeline: list | None = None    # (operation number, live bytes), on a CPU
    warmup_time: float | None = None  # s
    first_step_time: float | None = None  # s, compilation included
    graph_kernels: int | None = None  # that a replay of the step's graph runs
    uncounted: str | None = None  # why launches could not be counted
    launches_by_range: dict | None = None  # of launches_by_range(), on a CPU with --enable-pytorch-profiler

    @property
    def saved_mb(self):
        return sum(self.saved.values()) / MEGABYTE


def probe(trainer, batch, count_launches=True):
    """Counts of one step, after one that allocates what stays, compiles and captures. On a CPU, where no
    compiled code hides them, every operation of a step is counted."""
    model, on_gpu = trainer.model, trainer.device.type == "cuda"
    counts = Counts({}, sum(counts_by_sublayer(trainer.program, trainer.settings, on_gpu, batch).values()))
    trainer.step(batch)
    if not on_gpu and not trainer.settings.fusion.enable_torch_compile:
        count_a_step(trainer, batch, counts)
        return counts
    counts.saved = saved_activations(model, model.sublayers(),
                                     lambda: trainer.forward(batch, only_loss=True)["loss"])
    if not on_gpu:
        counts.uncounted = ("compiled code hides its operations on a CPU; --disable-torch-compile counts "
                            "them and their memory")
    if on_gpu and trainer.graph:
        counts.peak, counts.graph_kernels = trainer.graph.peak, trainer.graph.kernels
    if on_gpu and not count_launches:
        counts.uncounted = "left to the outer profiler of --enable-rocm-profiling"
    elif on_gpu:
        recorded = len(gpu_kernels(lambda: trainer.step(batch)))
        counts.launches = recorded if recorded >= (counts.graph_kernels or 1) else None
        if counts.launches is None:
            counts.uncounted = (f"the profiler recorded {recorded} of {counts.graph_kernels or 'its'} "
                                f"kernels. {GRAPHS if recorded else BLIND}")
    return counts


def count_a_step(trainer, batch, counts):
    """Add to Counts what a step's operations on a CPU say, while it runs."""
    model = trainer.model
    held = [*{*model.parameters(), *trainer.weights.tensors}, *model.buffers(), *batch.values(),
            *(trainer.average.tensors if trainer.average else ()),
            *(t for state in trainer.optimizer.state.values() for t in state.values())]
    with OpCounter() as counter, contextlib.ExitStack() as forward:
        counts.saved = forward.enter_context(counting_saved(model, model.sublayers()))
        trainer.step(batch, forward.close)  # as mark(): its first call, after forward, ends counting_saved()
    counts.launches, counts.timeline = counter.launches, counter.timeline
    counts.peak = counter.peak + sum(t.nbytes for t in held)
    if trainer.settings.profiler.enable_pytorch_profiler:
        counts.launches_by_range = launches_by_range(trainer, batch)


def launches_by_range(trainer, batch):
    """{(sub-layer or "rest", direction or phase): operations} of a step on a CPU. A step of its own, because
    hooks on the backward pass hold memory."""
    with OpCounter() as counter:
        sums = sums_by_range(lambda: counter.launches)
        timer = PhaseTimer(trainer.device, PHASES[1:], sums.enter, sums.leave)
        with ranges(trainer.model.sublayers(), sums.enter, sums.leave, backward=True):
            timer.start()
            trainer.step(batch, timer.mark)
    return {place_of(name): count for name, count in sums.sums.items()}


def warm_up(trainer, source, stop=None):
    """--warmup-steps steps, fewer after a signal, then the probe; everything is restored afterwards, and peak
    memory begins anew. Returns Counts."""
    world, times = trainer.world, []
    batch = to_device(source.part(trainer.step_number, world.rank, world.size), trainer.device)
    compiling = trainer.settings.fusion.enable_torch_compile
    steps = trainer.settings.training.warmup_steps
    begins = f"Warming up: {counted(steps, 'step')}, then counting" if steps else "Counting"
    print(f"{begins} memory and launches"
          f"{'; the first step compiles, which takes a minute or two' if compiling else ''}", flush=True)
    with trainer.preserved():
        for _ in range(steps):
            if stop and world.agreed_signal(stop):
                break
            started = time.perf_counter()
            trainer.step(batch).item()
            times.append(time.perf_counter() - started)
        # An outer profiler cannot share the GPU with torch's, which counts launches, and which may run anyway
        config = trainer.settings.profiler
        outer = config.enable_rocm_profiling and not config.enable_pytorch_profiler
        counts = probe(trainer, batch, count_launches=not outer)
    if counts.uncounted:
        print(f"Launches of a step: {counts.uncounted}")
    begin_peak(trainer.device)
    return replace(counts, warmup_time=sum(times), first_step_time=times[0] if times else None)


def peak_megabytes(device, counts):
    """Peak of tensor memory in MB (2**20 bytes): the allocator's on a GPU, on CPU the probe's or None."""
    peak = counts.peak  # on a GPU: before an evaluation or a graph, whose replays allocate nothing
    if device.type == "cuda":
        peak = max(peak or 0, torch.cuda.max_memory_allocated(device))
    return peak / MEGABYTE if peak is not None else None


def begin_peak(device):
    """Let a GPU's allocator measure its peak from here on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def unmeasured_memory(device, counts):
    """Within, memory does not count towards the peak of the measured steps."""
    if device.type == "cuda":
        counts.peak = max(counts.peak or 0, torch.cuda.max_memory_allocated(device))
    try:
        yield
    finally:
        begin_peak(device)
