"""What a profiled run found, by sub-layer: fusion_analysis.json, and three sentences on what matters."""
import os
from collections import Counter

import numpy as np

from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.flops import counts_by_sublayer
from fusion_lab.measuring.ranges import PHASES, REST, place_of
from fusion_lab.measuring.roofline import flops_share
from fusion_lab.measuring.summary import launch_kind, provenance
from fusion_lab.measuring.trace import NOT_RECORDED, OUTSIDE, TraceAnalysis, read_trace
from fusion_lab.training.files import finite, write_json
from fusion_lab.training.machine import MEGABYTE

ANALYSIS = "fusion_analysis.json"
LAUNCH_BOUND, BUSY = 0.5, 0.85  # shares of the step: below, the GPU mostly waits; above, it mostly works
MOST_BUSY = 1.1  # a share that is possible: the profiler makes kernels a little longer


def write_analysis(trainer, counts, times, peak, profiling):
    """fusion_analysis.json beside the trace that a Profiling left; counts: the run's Counts; times: (steps,
    4) seconds by phase; peak: MB or None. Returns the file's path; None without a trace."""
    if profiling.trace is None:
        return None
    path = os.path.join(os.path.dirname(profiling.trace), ANALYSIS)
    write_json(path, finite(analysis_of(trainer, counts, times, peak, profiling)))
    return path


def analysis_of(trainer, counts, times, peak, profiling):
    """The content of fusion_analysis.json; arguments as of write_analysis()."""
    program, settings = trainer.program, trainer.settings
    trace = TraceAnalysis(read_trace(profiling.trace), program.model.SUBLAYERS)
    step = of_a_step(profiling.untraced(times), trace)
    unrecorded = trace.unrecorded(counts.graph_kernels)
    flops = counts_by_sublayer(program, settings, trainer.device.type == "cuda")
    entries = sublayer_entries(trace, counts, profiling.samples)
    inside = sum(e["share"] for e in entries if e["name"] != REST)
    outside = sum(e["share"] for e in entries if e["direction"] in (OUTSIDE, NOT_RECORDED))
    clock = f"CPU time, {'without' if profiling.steps_before_trace else 'under'} the profiler"
    result = dict(
        mode="pytorch_profiler", **provenance(settings, trainer.device), profile_steps=trace.steps,
        trace=os.path.basename(profiling.trace),
        time_kind="GPU time of kernels and copies" if trace.on_gpu else clock,
        unit="kernel" if trace.on_gpu else "operation", step=step,
        sublayers=entries, launches_per_step=counts.launches,
        kernel_counts=kernel_counts(trainer, counts, entries),
        coverage=dict(sublayers=inside, rest=1 - inside - outside, unattributed=outside),
        kernels=trace.kernel_table(),
        saved_activation_mb={name: size / MEGABYTE for name, size in counts.saved.items()},
        flops_per_step=counts.flops, flops_share=flops_share(program, flops),
        memory_peak_mb=peak, unrecorded=unrecorded,
        launch=launch_arithmetic(counts.launches, step, bool(unrecorded)) if trace.on_gpu else None)
    return dict(result, findings=findings(result))


def kernel_counts(trainer, counts, entries):
    """Counts under the names that people look for: what a step launches, also by sub-layer, and the model's
    nominal counts. entries: of sublayer_entries()."""
    nominal = {name: count for name, count in (trainer.model.statistics() or {}).items() if "kernel" in name}
    by_sublayer = Counter()
    for e in entries:
        by_sublayer[e["name"]] += e["launches"] or 0
    return dict(kernels_per_step=counts.launches, kernels_are=launch_kind(trainer.device),
                kernels_per_step_by_sublayer=dict(+by_sublayer) or None, nominal=nominal or None)


def of_a_step(times, trace):
    """The part of an analysis about a step as a whole, in ms; times: (steps, 4) seconds by phase."""
    seconds, busy = times.sum(axis=1), trace.gpu_busy()
    p20, median, p80 = (1e3 * each for each in quantiles(seconds))
    return dict(untraced_ms=median, p20_ms=p20, p80_ms=p80, traced_ms=trace.step_us() / 1e3,
                gpu_busy_ms=None if busy is None else busy / 1e3, step_times=seconds.round(7).tolist(),
                phases_ms=dict(zip(PHASES, (1e3 * np.median(times, axis=0)).tolist(), strict=True)))


def sublayer_entries(trace, counts, samples):
    """A dict for each (sub-layer or REST, direction or phase), per step, the longest first. On a GPU times
    are those of traced kernels and copies; on a CPU the host's, the medians of samples, which are one dict a
    step, {range or phase: seconds}: the profiler would double the time of small operations."""
    table, names = trace.sublayer_table(), dict.fromkeys(name for sample in samples for name in sample)
    seconds = {place_of(name): float(np.median([sample.get(name, 0.0) for sample in samples]))
               for name in names}
    times = {place: e["device_us"] if trace.on_gpu else 1e6 * seconds.get(place, 0.0)
             for place, e in table.items()}
    total, launches = sum(times.values()) or 1.0, counts.launches_by_range
    return [dict(
        name=place[0], direction=place[1], calls=table[place]["calls"], total_us=us, share=us / total,
        launches=table[place]["launches"] if trace.on_gpu else launches and launches.get(place),
        allocated_mb=table[place]["allocated_mb"],
        saved_activation_mb=counts.saved.get(place[0], 0) / MEGABYTE if place[1] == "forward" else None
    ) for place, us in sorted(times.items(), key=lambda item: -item[1])]


def launch_arithmetic(launches, step, lost=False):
    """Is a GPU's step bound by launching? The figures, the verdict, and the arithmetic in words. step: as
    of_a_step() has it; lost: whether the profiler missed kernels or their times, which leaves it undecided.
    So does a GPU that was busy for longer than the step took."""
    busy, whole = step["gpu_busy_ms"], step["untraced_ms"]
    share = busy / whole
    verdict = ("undecided, since the profiler lost kernels or their times" if lost or share > MOST_BUSY else
               "launch-bound" if share < LAUNCH_BOUND else
               "partly launch-bound" if share < BUSY else "not launch-bound")
    text = f"{verdict}: kernels run during {100 * min(share, 1):.0f}% of it, and the GPU waits for the rest"
    if share > MOST_BUSY:
        return dict(launches=launches, step_ms=whole, busy_ms=busy, verdict=verdict, text=verdict)
    if launches:  # which an outer profiler counts instead, where there is one
        text += (f"; one of {launches} kernels comes every {1e3 * whole / launches:.1f} µs and runs "
                 f"{1e3 * busy / launches:.1f} µs on average")
    return dict(launches=launches, step_ms=whole, busy_ms=busy, verdict=verdict, text=text)


def shares_of_sublayers(analysis):
    """{sub-layer: share of the time, all directions}, the heaviest first."""
    shares = {}
    for e in analysis["sublayers"]:
        if e["name"] != REST:
            shares[e["name"]] = shares.get(e["name"], 0.0) + e["share"]
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def at_most(share):
    """How many times as fast all would be if what takes this share took no time: Amdahl's ceiling."""
    return 1 / max(1 - share, 1e-6)


def findings(analysis):
    """Three sentences: the heaviest sub-layer, the largest saved activations, and on a GPU whether it waits
    for launches."""
    shares, saved = shares_of_sublayers(analysis), analysis["saved_activation_mb"]
    sentences = [] if analysis["unrecorded"] else [
        "The blocks are compiled or captured whole, so no sub-layer can be told from another; "
        "--disable-torch-compile --disable-cuda-graphs shows them."]
    if sum(shares.values()) > 0:
        name, share = next(iter(shares.items()))
        of = "GPU time" if analysis["unit"] == "kernel" else "measured time"
        sentences = [f"`{name}` is the heaviest sub-layer: {100 * share:.0f}% of the {of}, with "
                     f"{100 * analysis['flops_share'][name]:.0f}% of the sub-layers' FLOPs. Whatever makes "
                     f"it faster, the {of} gains at most a factor of {at_most(share):.2f}."]
    if total := sum(saved.values()):
        name = max(saved, key=saved.get)
        sentences.append(f"`{name}` keeps most for the backward pass: {saved[name]:.1f} of {total:.1f} MB, "
                         f"{100 * saved[name] / total:.0f}%.")
    if analysis["launch"]:
        sentences.append(f"The step is {analysis['launch']['text']}.")
    return sentences
