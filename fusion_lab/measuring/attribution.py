"""Which sub-layer, forward or backward, took how long: from a trace to an Analysis, fusion_analysis.json."""
import os
import time
from datetime import datetime, timezone

import numpy as np

from fusion_lab.measuring.analysis import Analysis, SublayerTime, launch_arithmetic
from fusion_lab.measuring.clocks import RangeSums, quantiles
from fusion_lab.measuring.counters import OpCounter
from fusion_lab.measuring.flops import REST, flops_by_sublayer
from fusion_lab.measuring.probe import peak_megabytes
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.roofline import equal_work, flops_share
from fusion_lab.measuring.trace import (
    NOT_RECORDED,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    TraceAnalysis,
    read_trace,
    split_name,
)
from fusion_lab.training.feeding import batch_of
from fusion_lab.training.files import finite, write_json
from fusion_lab.training.machine import MEGABYTE, system_info

ANALYSIS = "fusion_analysis.json"
SHORT_US = 5.0  # a kernel below this takes about as long to launch as to run


def amounts_in_a_step(trainer, batch, clock):
    """{(sub-layer or REST, direction or phase): what clock() advances in one step}, on CPU."""
    marks = []

    def relabel(name):  # a forward during backward is activation checkpointing at work
        return name if len(marks) == 1 or name.endswith(".backward") else f"{name}.{RECOMPUTE}"

    sums = RangeSums(clock, relabel)
    with trainer.preserved(), ranges(trainer.model.sublayers(), sums.enter, sums.leave, backward=True):
        marks.append(clock())
        trainer.step(batch, lambda: marks.append(clock()))
    result = {split_name(name): amount for name, amount in sums.sums.items()}
    forward, backward, optimizer = np.diff(marks).tolist()
    inside = sum(amount for (_, direction), amount in result.items() if direction == "forward")
    return {**result, (REST, "forward"): forward - inside, (REST, "optimizer"): optimizer,
            (REST, "backward"): backward - (sum(result.values()) - inside)}


def operations_in_a_step(trainer, batch):
    """{(sub-layer or REST, direction or phase): operations that run}, on CPU."""
    with OpCounter() as counter:
        return amounts_in_a_step(trainer, batch, lambda: counter.launches)


def seconds_by_sublayer(trainer, batch, data_s, steps):
    """A dict a step, {(sub-layer or REST, direction or phase): seconds}, on CPU, without the profiler."""
    return [{**amounts_in_a_step(trainer, batch, time.perf_counter), (REST, "data"): data_s}
            for _ in range(steps)]


def medians(samples):
    """Dicts of one step each -> {key: median over the steps}"""
    return {key: float(np.median([sample.get(key, 0.0) for sample in samples]))
            for key in dict.fromkeys(key for sample in samples for key in sample)}


def share_samples(samples, places):
    """Dicts of one step each -> the same as shares of the step, each with all places."""
    return [{place: sample.get(place, 0.0) / (sum(sample.values()) or 1.0) for place in places}
            for sample in samples]


def sublayer_entries(program, trace, saved, operations, seconds):
    """(a SublayerTime for each sub-layer and direction, their total), times in µs per step. On a GPU total_us
    is kernels and copies, traced; on CPU it is the host's time, measured without the profiler, which would
    double the time of small operations. traced_host_us and self_us on CPU are the profiler's."""
    sums = trace.sublayer_table()
    whole = {place: e["device_us"] if trace.on_gpu else 1e6 * seconds.get(place, 0.0)
             for place, e in sums.items()}
    total = sum(whole.values()) or 1.0
    entries = []
    for (name, direction), e in sums.items():
        launches = e["launches"] if trace.on_gpu else operations.get((name, direction))
        entries.append(SublayerTime(
            name=name, direction=direction, calls=e["calls"], total_us=whole[name, direction],
            self_us=e["device_us"] if trace.on_gpu else e["operations_us"], traced_host_us=e["host_us"],
            share=whole[name, direction] / total, launches=launches,
            allocated_mb=None if e["allocated_bytes"] is None else e["allocated_bytes"] / MEGABYTE,
            saved_activation_mb=saved.get(name, 0) / MEGABYTE if direction == "forward" else None))
    order = {name: i for i, name in enumerate((*program.model.SUBLAYERS, REST))}
    return sorted(entries, key=lambda e: (order[e.name], e.direction != "forward")), total


def kernel_entries(trace):
    """(per-kernel table, the same by kind), with shares of the sum of own times."""
    kernels = trace.kernel_table()
    total = sum(e["self_us"] for e in kernels) or 1.0
    kinds = {}
    for e in kernels:
        e["share"] = e["self_us"] / total
        entry = kinds.setdefault(e["kind"], dict(calls=0, self_us=0.0, share=0.0))
        for key in entry:
            entry[key] += e[key]
    return kernels, kinds


def short_kernels(durations):
    """How many kernels are very short, and the share of all time that they take."""
    durations = np.array(durations) if durations else np.ones(1)
    small = durations < SHORT_US
    return dict(limit_us=SHORT_US, count_share=float(small.mean()),
                time_share=float(durations[small].sum() / durations.sum()))


def step_times(untraced, trace):
    """The part of an analysis about a step as a whole, in ms; untraced: (steps, 4) seconds."""
    p20, median, p80 = quantiles(untraced.sum(axis=1))
    busy = trace.gpu_busy()
    phases = [1e3 * float(x) for x in np.median(untraced, axis=0)]
    return dict(untraced_ms=1e3 * median, p20_ms=1e3 * p20, p80_ms=1e3 * p80, traced_ms=trace.step_us() / 1e3,
                gpu_busy_ms=None if busy is None else busy / 1e3,
                phases_ms=dict(zip(PHASES, phases, strict=True)))


def coverage(entries):
    """Shares of the time within sub-layers, outside them, and in no phase of a step."""
    outside = sum(e.share for e in entries if e.direction in (OUTSIDE, NOT_RECORDED))
    inside = sum(e.share for e in entries if e.name != REST)
    return dict(sublayers=inside, rest=1 - inside - outside, unattributed=outside)


def analysis_of(trainer, source, found, untraced, path, steps):
    """Attribute what a trace holds; returns (Analysis, TraceAnalysis). found: the probe's Findings; untraced:
    (steps, 4) seconds by phase without the profiler; path of the trace; steps that are in it, and on a CPU
    run once more to be timed by sub-layer."""
    program, settings, launch = trainer.program, trainer.settings, None
    trace = TraceAnalysis(read_trace(path), program.model.SUBLAYERS)
    operations = {}
    if trainer.device.type == "cpu":
        batch = batch_of(source, 0, trainer.world)
        samples = seconds_by_sublayer(trainer, batch, float(np.median(untraced[:, 0])), steps)
        if not settings.fusion.enable_torch_compile:  # compiled code dispatches no operations
            operations = operations_in_a_step(trainer, batch)
    else:
        samples = trace.device_us_by_step()
        launch = launch_arithmetic(found.launches, untraced.sum(axis=1), (trace.gpu_busy() or 0.0) / 1e6)
    entries, total = sublayer_entries(program, trace, found.saved, operations, medians(samples))
    kernels, kinds = kernel_entries(trace)
    return Analysis(
        program=program, settings=settings, timestamp=datetime.now(timezone.utc).isoformat(),
        profile_steps=steps, system_info=system_info(trainer.device), trace=os.path.basename(path),
        time_kind="GPU time of kernels and copies" if trace.on_gpu else "CPU time, without the profiler",
        unit="kernel" if trace.on_gpu else "operation", step=step_times(untraced, trace), total_us=total,
        sublayers=entries, launches_per_step=found.launches, coverage=coverage(entries), kernels=kernels,
        kinds=kinds, short_kernels=short_kernels(trace.durations()),
        saved_activation_mb={name: size / MEGABYTE for name, size in found.saved.items()},
        flops_per_step=found.flops, flops_share=flops_share(program, flops_by_sublayer(program, settings)),
        memory_peak_mb=found.peak_memory_mb, launch=launch, unrecorded=trace.unrecorded(found.graph_kernels),
        samples=share_samples(samples, [(e.name, e.direction) for e in entries]),
        twins=equal_work(program, settings)), trace


def keep_company(trainer, source, steps):
    """The steps that analysis_of() takes on a CPU, of a rank after the first."""
    if trainer.device.type == "cpu":
        batch = batch_of(source, 0, trainer.world)
        for _ in range(steps + (not trainer.settings.fusion.enable_torch_compile)):
            with trainer.preserved():
                trainer.step(batch)


def write_analysis(trainer, source, found, times, profiling):
    """fusion_analysis.json of a training run, beside the trace that profiling left; times (steps, 4) in s of
    its steps, of which the first were under the profiler. Returns the file's path, or None: without a step,
    and of ranks after the first, all of which must call this."""
    steps = min(profiling.traced_steps, len(times))
    if steps and not trainer.world.first:
        keep_company(trainer, source, steps)
    if profiling.trace is None:
        return None
    found.peak_memory_mb = peak_megabytes(trainer.device, found)
    watched = profiling.traced_steps + 1
    untraced = times[watched:] if len(times) > watched else times
    analysis, _ = analysis_of(trainer, source, found, untraced, profiling.trace, steps)
    target = os.path.join(os.path.dirname(profiling.trace), ANALYSIS)
    write_json(target, finite(analysis.as_dict()))
    return target
