"""What one step costs beside time: memory, launches, FLOPs."""
import contextlib
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from fusion_lab.measuring.counters import OpCounter, gpu_kernels, saved_activations
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import MEGABYTE


def probe(trainer, batch, count_launches=True):
    """What one step costs beside time: bytes saved for backward by sub-layer, launches, FLOPs, and on CPU the
    peak of live tensor bytes (a GPU's allocator knows its own). What cannot be counted is None."""
    model = trainer.model
    if not trainer.optimizer.state:  # the very first step makes the optimizer's state, compiles, captures
        trainer.step(batch)
    saved = saved_activations(model, model.sublayers(), lambda: trainer.forward(batch)["loss"])
    with torch.device("meta"):
        plain = type(model)(model.config, type(model.fusion).preset(False))
    with FlopCounterMode(display=False) as flops:
        plain(**{key: value.to("meta") for key, value in batch.items()})["loss"].backward()
    found = dict(saved=saved, flops=flops.get_total_flops(), launches=None, peak=None, timeline=None)
    if trainer.device.type == "cuda":
        found.update(peak=trainer.graph.peak if trainer.graph else None,
                     launches=len(gpu_kernels(lambda: trainer.step(batch))) if count_launches else None)
    elif not trainer.model.fusion.enable_torch_compile:  # compiled code dispatches no operations
        held = [*{*trainer.model.parameters(), *trainer.updated}, *trainer.model.buffers(),
                *batch.values(), *(t for state in trainer.optimizer.state.values() for t in state.values())]
        with OpCounter() as counter:
            trainer.step(batch)
        found.update(launches=counter.launches, timeline=counter.timeline,
                     peak=counter.peak + sum(t.numel() * t.element_size() for t in held))
    return found


def warm_up(trainer, source, profiler, stop=None):
    """Untimed steps until a signal, then the probe; everything is restored afterwards. Returns the probe's
    findings with warmup_time and first_step_time (s), which holds compilation."""
    times, batch = [], to_device(source.batch(trainer.step_number), trainer.device)
    print(f"Warming up: {trainer.training.warmup_steps} steps, then counting memory and launches", flush=True)
    with trainer.preserved():
        for _ in range(trainer.training.warmup_steps):
            if stop and stop.signal is not None:
                break
            started = time.perf_counter()
            trainer.step(batch).item()
            times.append(time.perf_counter() - started)
        found = probe(trainer, batch, count_launches=not profiler.enable_rocm_profiling)
    return dict(found, warmup_time=sum(times), first_step_time=times[0] if times else None)


def peak_megabytes(device, found):
    """Peak of tensor memory in MB (2**20 bytes): the allocator's on a GPU, on CPU the probe's or None."""
    peak = found["peak"]  # on a GPU: of the capture of a CUDA graph, whose replays allocate nothing
    if device.type == "cuda":
        peak = max(peak or 0, torch.cuda.max_memory_allocated(device))
    return peak / MEGABYTE if peak is not None else None


@contextlib.contextmanager
def unmeasured_memory(device, found):
    """What runs within does not count in the peak memory of the measured steps."""
    if device.type == "cuda":
        found["peak"] = max(found["peak"] or 0, torch.cuda.max_memory_allocated(device))
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
