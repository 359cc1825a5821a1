"""One session of the PyTorch profiler, and several: where time and memory go by sub-layer."""
import contextlib
import glob
import math
import os
import time
from dataclasses import asdict, replace
from datetime import datetime, timezone

import numpy as np
import torch

from fusion_lab.measuring.ceilings import measure_ceilings
from fusion_lab.measuring.clocks import PhaseTimer, RangeSums, quantiles
from fusion_lab.measuring.comparison import (
    COMPILE,
    Variant,
    compare,
    print_comparison,
    release,
    short,
    switches,
    table,
)
from fusion_lab.measuring.counters import OpCounter
from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.measuring.predictions import memory_scaling
from fusion_lab.measuring.probe import peak_megabytes, warm_up
from fusion_lab.measuring.ranges import Profiling, ranges
from fusion_lab.measuring.roofline import roofline_table
from fusion_lab.measuring.tables import aligned, markdown
from fusion_lab.profiler.report import (
    REPORT,
    compare_sessions,
    comparison_lines,
    findings,
    launch_arithmetic,
    roofline_rows,
    scaling_rows,
    write_report,
    write_text,
)
from fusion_lab.profiler.trace import RECOMPUTE, TraceAnalysis, read_trace, split_name
from fusion_lab.training.feeding import batches, to_device
from fusion_lab.training.files import UserError, write_json
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info
from fusion_lab.training.reporting import describe_start
from proteins.batches import SyntheticProteins
from proteins.costs import forward_flops
from tiny_openfold_v2 import SUBLAYERS, FusionConfig, ProfilerConfig, Trainer, open_source

SHORT_US = 5.0  # a kernel below this takes about as long to launch as to run


def time_and_trace(trainer, source, found, directory, steps):
    """Seconds of untraced steps (steps, 4 phases), then a trace of as many; returns (times, path)."""
    device = trainer.device
    pattern = os.path.join(glob.escape(directory), "*.pt.trace.json")
    timer, earlier = PhaseTimer(device), set(glob.glob(pattern))  # --force: sessions before this one
    supply = batches(source, range(2 * steps + 1), device)
    for _ in range(steps):
        timer.start()
        batch = next(supply)
        timer.mark()
        trainer.step(batch, timer.mark)
    untraced = timer.seconds()
    config = ProfilerConfig(enable_pytorch_profiler=True, enable_memory_profiling=True, profile_dir=directory)
    with Profiling(config, device, trainer.model.sublayers(), found, steps + 1, steps) as profiling:
        timer = PhaseTimer(device, ("data", "forward", "backward", "optimizer"), profiling.enter,
                           profiling.leave)
        for _ in range(steps + 1):
            timer.start()
            batch = next(supply)
            timer.mark()
            trainer.step(batch, timer.mark)
            profiling.step()
    own, = set(glob.glob(pattern)) - earlier
    return untraced, own


def by_sublayer(trainer, batch, clock):
    """{(sub-layer or "rest", direction or phase): what clock() advances in one step}, on CPU."""
    marks = []

    def relabel(name):  # a forward during backward is activation checkpointing at work
        return name if len(marks) == 1 or "." in name else f"{name}.{RECOMPUTE}"

    sums = RangeSums(clock, relabel)
    with trainer.preserved(), ranges(trainer.model.sublayers(), sums.enter, sums.leave, backward=True):
        marks.append(clock())
        trainer.step(batch, lambda: marks.append(clock()))
    result = {split_name(name): amount for name, amount in sums.sums.items()}
    forward, backward, optimizer = np.diff(marks).tolist()
    inside = sum(amount for (_, direction), amount in result.items() if direction == "forward")
    return {**result, ("rest", "forward"): forward - inside, ("rest", "optimizer"): optimizer,
            ("rest", "backward"): backward - (sum(result.values()) - inside)}


def seconds_by_sublayer(trainer, batch, steps):
    """by_sublayer() in seconds, without the profiler: medians over steps."""
    samples = [by_sublayer(trainer, batch, time.perf_counter) for _ in range(steps)]
    return {place: float(np.median([sample[place] for sample in samples])) for place in samples[0]}


def operations_by_sublayer(trainer, batch):
    with OpCounter() as counter:
        return by_sublayer(trainer, batch, lambda: counter.launches)


def seconds_without_work(trainer, launches, steps):
    """Forward and backward of as many operations as launches says, with next to no work in them, the median
    over steps: of samples of two residues and one row, scaled, since some loops over samples and masks are
    not needed for these. On CPU, where that is what dispatching costs."""
    config = replace(trainer.model.config, seq_len=2, num_seqs=1)
    small = Trainer(config, trainer.model.fusion, trainer.training, trainer.device)
    batch = to_device(SyntheticProteins(config, trainer.training).batch(0), trainer.device)
    timer = PhaseTimer(trainer.device)
    with OpCounter() as counter:
        small.step(batch)
    for _ in range(steps):
        timer.start()
        small.step(batch, timer.mark)
    return float(np.median(timer.seconds()[:, :2].sum(axis=1))) * launches / counter.launches


def sublayer_entries(trace, saved, operations, seconds):
    """(the per-sub-layer table of fusion_analysis.json, its total), times in µs per step. On a GPU total_us
    is kernels and copies, traced; on CPU it is the host's time, measured without the profiler, which would
    double the time of small operations. traced_host_us and self_us on CPU are the profiler's."""
    sums = trace.sublayer_table()
    whole = {place: e["device_us"] if trace.on_gpu else 1e6 * seconds.get(place, 0.0)
             for place, e in sums.items()}
    total = sum(whole.values()) or 1.0
    entries = []
    for (name, direction), e in sums.items():
        launches = e["launches"] if trace.on_gpu else operations.get((name, direction))
        entries.append(dict(
            name=name, direction=direction, calls=e["calls"], total_us=whole[name, direction],
            self_us=e["device_us"] if trace.on_gpu else e["operations_us"], traced_host_us=e["host_us"],
            share=whole[name, direction] / total, launches=launches,
            allocated_mb=None if e["allocated_bytes"] is None else e["allocated_bytes"] / MEGABYTE,
            saved_activation_mb=saved.get(name, 0) / MEGABYTE if direction == "forward" else None))
    order = {name: i for i, name in enumerate((*SUBLAYERS, "rest"))}
    return sorted(entries, key=lambda e: (order[e["name"]], e["direction"] != "forward")), total


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


def analyse(trainer, source, found, directory, steps):
    """Time, trace and count; returns (analysis, TraceAnalysis). The analysis is fusion_analysis.json."""
    untraced, path = time_and_trace(trainer, source, found, directory, steps)
    trace = TraceAnalysis(read_trace(path), SUBLAYERS)
    operations, seconds, dispatch = {}, {}, None
    if trainer.device.type == "cpu":
        seconds = seconds_by_sublayer(trainer, source.batch(0), steps)
        seconds["rest", "data"] = float(np.median(untraced[:, 0]))
        if not trainer.model.fusion.enable_torch_compile:  # compiled code dispatches no operations
            operations = operations_by_sublayer(trainer, source.batch(0))
            dispatch = seconds_without_work(trainer, found["launches"], steps)
    entries, total = sublayer_entries(trace, found["saved"], operations, seconds)
    kernels, kinds = kernel_entries(trace)
    config, training = trainer.model.config, trainer.training
    flops = {k: v * config.num_blocks for k, v in forward_flops(config, training.batch_size).items()
             if k in SUBLAYERS}
    busy, launches = trace.gpu_busy(), found["launches"]
    p20, median, p80 = quantiles(untraced.sum(axis=1))
    phases = [1e3 * float(x) for x in np.median(untraced, axis=0)]
    bound_s = median if trace.on_gpu else float(np.median(untraced[:, 1:3].sum(axis=1)))
    outside = sum(e["share"] for e in entries if e["direction"] in ("outside steps", "launch not recorded"))
    inside = sum(e["share"] for e in entries if e["name"] != "rest")
    analysis = dict(
        mode="pytorch_profiler", timestamp=datetime.now(timezone.utc).isoformat(), config=asdict(config),
        fusion_config=asdict(trainer.model.fusion), training_params=asdict(training), profile_steps=steps,
        system_info=system_info(trainer.device), trace=os.path.basename(path),
        time_kind="GPU time of kernels and copies" if trace.on_gpu else "CPU time, without the profiler",
        unit="kernel" if trace.on_gpu else "operation",
        step=dict(untraced_ms=1e3 * median, p20_ms=1e3 * p20, p80_ms=1e3 * p80,
                  traced_ms=trace.step_us() / 1e3, gpu_busy_ms=None if busy is None else busy / 1e3,
                  phases_ms=dict(zip(("data", "forward", "backward", "optimizer"), phases, strict=False))),
        total_us=total, sublayers=entries, launches_per_step=launches,
        coverage=dict(sublayers=inside, rest=1 - inside - outside, unattributed=outside),
        kernels=kernels, kinds=kinds, short_kernels=short_kernels(trace.durations()),
        saved_activation_mb={k: v / MEGABYTE for k, v in found["saved"].items()},
        flops_per_step=found["flops"], flops_share={k: v / sum(flops.values()) for k, v in flops.items()},
        memory_peak_mb=found["peak_memory_mb"],
        launch=launch_arithmetic(launches, bound_s, None if busy is None else busy / 1e6, dispatch))
    return dict(analysis, findings=findings(analysis)), trace


def run_session(configs, directory, options, compared=None):
    """A whole session into a directory; returns the analysis."""
    config, training, fusion, _ = configs
    device = choose_device(training.device)
    trainer, source = Trainer(config, fusion, training, device), open_source(config, training)
    describe_start(trainer, source)
    found = warm_up(trainer, source, ProfilerConfig())
    found["peak_memory_mb"] = peak_of_a_step(trainer, source, found)
    analysis, trace = analyse(trainer, source, found, directory, options.profile_steps)
    if options.seq_lens:
        analysis["scaling"] = dict(memory_scaling(config, fusion, training, device, options.seq_lens),
                                   fused_runs=trainer.model.attention_kernel(trainer.amp_dtype))
    if options.roofline:
        analysis["ceilings"] = measure_ceilings(device, training)
        analysis["roofline"] = roofline_table(config, training.batch_size, analysis["ceilings"],
                                              measured_times(analysis), device.type == "cuda")
    if compared:
        analysis["compared_with"] = compare_sessions(compared[1], analysis, compared[0])
    plots = write_report(directory, analysis, trace.memory_timeline(), trace.durations())
    print(f"Launch: {analysis['launch']['text']}")
    for text in analysis["findings"]:
        print(f"   {text}")
    for key, rows in (("scaling", scaling_rows), ("roofline", roofline_rows)):
        if key in analysis:
            print("\n".join(aligned(rows(analysis[key]))))
    if options.compare_with:
        print("\n".join(comparison_lines(analysis["compared_with"])))
    print(f"Results in {directory}: {', '.join([REPORT, 'fusion_analysis.json', analysis['trace'], *plots])}")
    return analysis


def peak_of_a_step(trainer, source, found):
    """MB; on a GPU the allocator's peak over two steps, on CPU what the probe counted."""
    if trainer.device.type == "cuda":
        batch = to_device(source.batch(0), trainer.device)
        trainer.step(batch)
        torch.cuda.reset_peak_memory_stats(trainer.device)
        for _ in range(2):
            trainer.step(batch)
    return peak_megabytes(trainer.device, found)


def measured_times(analysis):
    """{sub-layer: seconds and launches per step, forward and backward}"""
    measured = {}
    for e in analysis["sublayers"]:
        entry = measured.setdefault(e["name"], dict(seconds=0.0, launches=0))
        entry["seconds"] += e["total_us"] / 1e6
        entry["launches"] += e["launches"] or 0
    return measured


def ablation_variants():
    """Baseline, each fusion alone, all, and all without each one of those that are on by default."""
    off, usual = FusionConfig.preset(False), FusionConfig()
    names = switches(True)
    return [Variant("baseline", off),
            *(Variant(f"{short(name)} alone", replace(off, **{name: True})) for name in names),
            Variant("all", usual),
            *(Variant(f"all but {short(name)}", replace(usual, **{name: False})) for name in names),
            Variant("all + torch.compile", replace(usual, **{COMPILE: True}))]


def ablation(configs, directory, options):
    """Interleaved timing of all variants, then a session of each in a folder of its own."""
    config, training, fusion, profiler = configs
    variants = ablation_variants()
    result = dict(compare(config, fusion, training, variants=variants), mode="ablation", folders={})
    print_comparison(result)
    write_json(os.path.join(directory, "ablation_summary.json"), result)
    system = result["system_info"]
    write_text(os.path.join(directory, "ablation_summary.md"), [
        "# Ablation", "",
        f"{system['gpu_name'] or system['host_cpu']}, torch {system['torch_version']}, "
        f"{result['timestamp']}: {training.num_steps} interleaved steps of every variant, "
        f"B {training.batch_size}, "
        f"N {config.num_seqs}, S {config.seq_len}.", "", *markdown(table(result["variants"]))])
    plot_ablation(os.path.join(directory, "ablation_summary.png"), result["variants"])
    for variant in variants:
        variant.trainer = None
        release()
        if variant.reason is None:
            folder = variant.name.replace(" + ", "_").replace(" ", "_").replace(".", "_")
            path = os.path.join(directory, folder)
            os.makedirs(path, exist_ok=True)
            print(f"Session of {variant.name} in {path}", flush=True)
            with open(os.path.join(path, "session.log"), "w", encoding="utf-8") as log, \
                    contextlib.redirect_stdout(log):
                run_session((config, training, variant.fusion, profiler), path, options)
            result["folders"][variant.name] = folder
    write_json(os.path.join(directory, "ablation_summary.json"), result)
    return result


def plot_ablation(path, results):
    try:
        pyplot = require_matplotlib()
    except UserError as error:
        print(f"No plot: {error}")
        return
    results = [r for r in results if r["measured"]]
    names = [r["name"] for r in results]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.5 + 0.35 * len(names)), layout="constrained",
                                   sharey=True)
    times = np.array([[1e3 * r[f"{q}_batch_time"] for q in ("p20", "median", "p80")] for r in results]).T
    axes[0].barh(names, times[1], xerr=np.abs(times[[0, 2]] - times[1]), color="0.6")
    axes[0].set(xlabel="ms per step: median, p20 to p80")
    axes[1].barh(names, [r["saved_activation_mb"] for r in results], color="0.6")
    axes[1].set(xlabel="saved activations, MB")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def compare_v1(configs, directory, options):
    """The baseline (V1) and the given switches: interleaved steps, and one session each, side by side."""
    config, training, fusion, profiler = configs
    variants = [Variant("baseline", FusionConfig.preset(False)), Variant("as given", fusion)]
    timed = compare(config, fusion, training, variants=variants)["variants"]
    for variant in variants:
        variant.trainer = None
    release()
    paths = {name: os.path.join(directory, name) for name in ("v1_baseline", "v2")}
    for path in paths.values():
        os.makedirs(path, exist_ok=True)
    baseline = (config, training, FusionConfig.preset(False), profiler)
    before = run_session(baseline, paths["v1_baseline"], options)
    release()
    after = run_session(configs, paths["v2"], options, (paths["v1_baseline"], before))
    comparison = dict(after["compared_with"], interleaved=timed)
    lines = comparison_lines(comparison)
    write_text(os.path.join(directory, "v1_comparison.md"), lines)
    print("\n".join(lines))
    return dict(comparison, mode="compare_v1")


def finite(value):
    """The same with null for what is not a finite number."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
