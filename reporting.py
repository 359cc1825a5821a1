"""What a run finds out about itself, prints and writes: probe, start-up, step and contact lines, summary."""
import contextlib
import json
import math
import statistics
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from measurement import (
    MEGABYTE,
    OpCounter,
    cpu_name,
    gpu_kernels,
    matmul_ceiling,
    saved_activations,
    system_info,
)
from precision import runs_in_tf32
from protein_batches import to_device
from run_files import UserError


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


def require_finite(losses, checked, first_step):
    """Raise UserError at the first loss that is not finite. Returns how many losses are checked now."""
    for number in range(checked, len(losses)):
        loss = losses[number].item()
        if not math.isfinite(loss):
            raise UserError(f"loss is {loss} at step {first_step + number + 1}: nothing was saved since; "
                            "lower --learning-rate, or use --amp-dtype bfloat16 if it is float16", code=1)
    return len(losses)


def peak_megabytes(device, found):
    """Peak of tensor memory in MB (2**20 bytes): the allocator's on a GPU, on CPU the probe's or None."""
    peak = found["peak"]  # on a GPU: of the capture of a CUDA graph, whose replays allocate nothing
    if device.type == "cuda":
        peak = max(peak or 0, torch.cuda.max_memory_allocated(device))
    return peak / MEGABYTE if peak is not None else None


def aligned(rows):
    """Rows of cells, the header first, as text in columns of equal width; a short row may overhang."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows]


def markdown(rows):
    """The same rows as lines of a markdown table."""
    width = len(rows[0])
    lines = ["| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in rows]
    return [lines[0], "|" + "---|" * width, *lines[1:]]


def step_line(done, training, loss, seconds, memory):
    memory = "   n/a" if memory is None else f"{memory:6.1f}"
    speed = training.batch_size / seconds
    return (f"Step {done:3d}/{training.num_steps} | Loss: {loss:.4f} | Speed: {speed:6.1f} samples/sec"
            f" | Memory: {memory} MB | Time: {seconds * 1e3:5.1f}ms")


def contact_line(evaluation):
    """One line for what evaluate() returned."""
    parts = []
    for group, proteins in evaluation.items():
        if proteins:
            mean = {key: statistics.fmean(p[key] for p in proteins.values())
                    for key in ("p_l2", "p_l", "chance")}
            parts.append(f"{group.replace('_', '-')} P(L/2) {mean['p_l2']:.3f} P(L) {mean['p_l']:.3f} "
                         f"chance {mean['chance']:.3f} ({len(proteins)} proteins)")
    return "Contacts: " + (" | ".join(parts) or "no protein has enough coordinates")


@contextlib.contextmanager
def unmeasured_memory(device, found):
    """What runs within does not count in the peak memory of the measured steps."""
    if device.type == "cuda":
        found["peak"] = max(found["peak"] or 0, torch.cuda.max_memory_allocated(device))
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def summarise(trainer, configs, found, losses, times, evaluation):
    """The content of performance_summary_v2.json."""
    training, device = trainer.training, trainer.device
    steps = times.sum(axis=1)
    p20, median, p80 = (float(np.quantile(steps, q)) for q in (0.2, 0.5, 0.8))
    forward, backward, optimizer = [None] * 3 if trainer.graph else map(float, times[:, 1:].mean(axis=0))
    peak = peak_megabytes(device, found)  # before the ceiling's matrices are allocated
    ceiling = matmul_ceiling(device, trainer.amp_dtype or torch.float32)
    performance = dict(
        total_samples=len(losses) * training.batch_size,
        avg_training_speed=training.batch_size / float(steps.mean()),
        avg_batch_time=float(steps.mean()), avg_data_time=float(times[:, 0].mean()),
        avg_forward_time=forward, avg_backward_time=backward, avg_optimizer_time=optimizer,
        median_batch_time=median, p20_batch_time=p20, p80_batch_time=p80,
        warmup_time=found["warmup_time"], first_step_time=found["first_step_time"], first_loss=losses[0],
        final_loss=losses[-1], avg_loss=statistics.fmean(losses),
        peak_memory_mb=peak,
        saved_activation_mb=sum(found["saved"].values()) / MEGABYTE, launches_per_step=found["launches"],
        launch_kind="gpu_kernels" if device.type == "cuda" else "cpu_ops", flops_per_step=found["flops"],
        achieved_tflops=found["flops"] / median / 1e12, matmul_ceiling_tflops=ceiling / 1e12,
        mfu=found["flops"] / median / ceiling)
    model_config, fusion, profiler = configs
    amp_dtype = trainer.amp_dtype and str(trainer.amp_dtype).removeprefix("torch.")
    return dict(version="v2_fused", timestamp=datetime.now(timezone.utc).isoformat(),
                config=asdict(model_config), fusion_config=asdict(fusion), profiler_config=asdict(profiler),
                training_params=dict(asdict(training), amp_dtype=amp_dtype),
                performance_summary=performance, fusion_statistics=trainer.model.get_fusion_statistics(),
                contact_precision=evaluation, system_info=system_info(device))


TITLES = {"MSA QKV Fusion": "enable_qkv_fusion_msa", "Triangle QKV Fusion": "enable_qkv_fusion_triangle",
          "Flash Attention": "enable_flash_attention", "Triangle Gate/Proj Fusion": "enable_triangle_fusion",
          "Torch Compile": "enable_torch_compile"}


def describe_start(trainer, source):
    """The start-up lines."""
    model, device = trainer.model, trainer.device
    c, f = model.config, model.fusion
    counts = model.get_fusion_statistics()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    dtype = str(trainer.amp_dtype or torch.float32).removeprefix("torch.")
    on = {True: "Enabled", False: "Disabled"}
    kernel = f" ({model.attention_kernel(trainer.amp_dtype)})" if f.enable_flash_attention else ""
    print(f"Device: {device} ({name}) | torch {torch.__version__} | dtype: {dtype} | "
          f"seed: {trainer.training.seed}")
    print(f"Model: {c.num_blocks} blocks, c_m {c.msa_dim}, c_z {c.pair_dim}, heads {c.msa_heads} and "
          f"{c.pair_heads}, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"Data: {source.describe()} | B {trainer.training.batch_size}, N {c.num_seqs}, S {c.seq_len}")
    print("Fusion Optimizations:")
    for title, name in TITLES.items():
        print(f"   {title}: {on[getattr(f, name)]}{kernel if name == 'enable_flash_attention' else ''}")
    print(f"   Kernel Reduction: {counts['kernel_reduction_percent']}% ({counts['total_kernel_reduction']} "
          "fewer kernels) [nominal]")
    if beside := f.beside(TITLES.values()):
        print(f"Besides: {' '.join(beside)}")
    idle = f.idle(trainer.training.use_amp, device.type == "cuda", c.seq_len)
    if trainer.training.use_tf32 and not runs_in_tf32(trainer.training, device):
        idle.append("this device has no TF32")
    if idle:
        print(f"Not used here: {'; '.join(idle)}")
    sys.stdout.flush()


def read_summary(path):
    """A performance summary, of this version or an earlier one. Raises UserError naming what is wrong."""
    try:
        with open(path, encoding="utf-8") as file:
            summary = json.load(file, parse_constant=lambda name: None)  # NaN and Infinity become null
        figures = summary["performance_summary"]
        speed = figures["avg_training_speed"] = float(figures["avg_training_speed"])
        figures["peak_memory_mb"] = figures.get("peak_memory_mb") and float(figures["peak_memory_mb"])
    except OSError as error:
        raise UserError(f"summary {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"summary {path}: not a performance summary (it lacks "
                        "performance_summary.avg_training_speed)") from None
    if not speed > 0:
        raise UserError(f"summary {path}: avg_training_speed = {speed}: must be positive")
    return summary


def print_comparison(earlier, now):
    """Speed-up and memory against an earlier summary; says so where the two runs are not alike. Returns the
    figures."""
    before, after = earlier["performance_summary"], now["performance_summary"]
    speedup = after["avg_training_speed"] / before["avg_training_speed"]
    print(f"\nAgainst {earlier.get('version', 'a run')} of {earlier.get('timestamp', 'unknown date')}:")
    print(f"   Training speed: {before['avg_training_speed']:.1f} -> {after['avg_training_speed']:.1f} "
          f"samples/sec, {speedup:.2f}x")
    memory = {key: run.get("peak_memory_mb") for key, run in (("before", before), ("after", after))}
    reduction = None
    if memory["before"] and memory["after"]:
        reduction = 100 * (1 - memory["after"] / memory["before"])
        print(f"   Peak memory: {memory['before']:.1f} -> {memory['after']:.1f} MB, {reduction:+.1f}% saved")
    else:
        print("   Peak memory: not measured in both runs")
    different = [f"{key} {old} -> {new}" for section in ("config", "training_params") for key in SHAPE_KEYS
                 if (old := (earlier.get(section) or {}).get(key)) is not None
                 and old != (new := now[section].get(key))]
    old_device = (earlier.get("system_info") or {}).get("gpu_name", "unknown")
    if old_device != now["system_info"]["gpu_name"]:
        different.append(f"GPU {old_device} -> {now['system_info']['gpu_name']}")
    if different:
        print(f"   These runs differ in more than fusion: {'; '.join(different)}")
    return dict(speedup=speedup, memory_reduction_percent=reduction, differences=different)


SHAPE_KEYS = ("msa_dim", "pair_dim", "num_blocks", "num_seqs", "seq_len", "msa_heads", "pair_heads",
              "outer_product_dim", "batch_size", "use_amp")
