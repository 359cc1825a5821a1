"""The summary of a training run, and its comparison with an earlier one."""
import math
import os
import statistics
import sys
from datetime import datetime, timezone

import torch

from fusion_lab.measuring.ceilings import matmul_ceiling
from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.probe import peak_megabytes
from fusion_lab.measuring.tables import aligned
from fusion_lab.training.evaluations import own_random_numbers
from fusion_lab.training.files import UserError, finite, printable, read_json, write_json
from fusion_lab.training.machine import system_info
from fusion_lab.training.reporting import print_result


def summarise(trainer, found, losses, times):
    """The content of performance_summary_*.json: found, a run's Findings; losses; times (steps, 4) in s for
    data, forward, backward, optimizer."""
    settings, device, program, ranks = trainer.settings, trainer.device, trainer.program, trainer.world.size
    batch_size = settings.training.batch_size * ranks
    peak = peak_megabytes(device, found)  # before the ceiling's matrices are allocated
    with own_random_numbers(device):
        ceiling = matmul_ceiling(device, trainer.amp_dtype or torch.float32)
    performance = dict(
        total_samples=len(losses) * batch_size, **(of_steps(trainer, losses, times, batch_size) if losses
                                                   else dict.fromkeys(OF_STEPS)),
        warmup_time=found.warmup_time, first_step_time=found.first_step_time, peak_memory_mb=peak,
        saved_activation_mb=found.saved_mb, launches_per_step=found.launches,
        launch_kind=launch_kind(device), graph_kernels=found.graph_kernels,
        flops_per_step=found.flops, matmul_ceiling_tflops=ceiling / 1e12)
    median = performance["median_batch_time"]
    performance.update(achieved_tflops=median and found.flops / median / 1e12,
                       mfu=median and found.flops / median / ceiling)
    configs = settings.as_dict()
    configs["training_params"].update(amp_dtype=dtype_name(trainer.amp_dtype), ranks=ranks)
    return dict(version=program.version, timestamp=datetime.now(timezone.utc).isoformat(), **configs,
                performance_summary=performance, fusion_statistics=trainer.model.statistics(),
                evaluation={}, system_info=system_info(device))


OF_STEPS = ("avg_training_speed", "avg_batch_time", "avg_data_time", "avg_forward_time", "avg_backward_time",
            "avg_optimizer_time", "median_batch_time", "p20_batch_time", "p80_batch_time", "first_loss",
            "final_loss", "avg_loss")


def of_steps(trainer, losses, times, batch_size):
    """What a summary says of the steps. A run that a resume brought to its end may have had none."""
    steps = times.sum(axis=1)
    phases = [None] * 3 if trainer.graph else map(float, times[:, 1:].mean(axis=0))
    p20, median, p80 = quantiles(steps)
    mean = float(steps.mean())
    return dict(zip(OF_STEPS, (batch_size / mean, mean, float(times[:, 0].mean()), *phases, median, p20, p80,
                               losses[0], losses[-1], statistics.fmean(losses)), strict=True))


HEADLINES = ("first_loss", "final_loss", "avg_loss", "median_batch_time", "p20_batch_time", "p80_batch_time",
             "avg_training_speed", "peak_memory_mb", "launches_per_step", "saved_activation_mb", "mfu",
             "achieved_tflops", "first_step_time", "avg_batch_time", "total_samples")


def print_summary(result, path, settings):
    """The end of a training run: a few figures for people, a line of JSON for programs."""
    figures = result["performance_summary"]
    if sys.stdout.isatty():
        memory = figures["peak_memory_mb"]
        rows = [("peak memory", "not measured" if memory is None else f"{memory:.1f} MB")]
        if figures["median_batch_time"] is not None:
            rows = [("loss", f"{figures['first_loss']:.4f} -> {figures['final_loss']:.4f}"),
                    ("step", "{:.2f} ms (p20 {:.2f}, p80 {:.2f})".format(
                        *(1e3 * figures[f"{q}_batch_time"] for q in ("median", "p20", "p80")))),
                    ("speed", f"{figures['avg_training_speed']:.1f} samples/s"), *rows]
        print("\n".join(f"   {line}" for line in aligned(rows)))
    headline = dict(version=result["version"], performance_summary={key: figures[key] for key in HEADLINES})
    print_result(headline, path, settings)


def launch_kind(device):
    """What launches are a count of."""
    return dict(cuda="gpu_kernels", cpu="cpu_ops")[device.type]


def dtype_name(dtype):
    """torch.bfloat16 -> "bfloat16"; None stays."""
    return dtype and str(dtype).removeprefix("torch.")


LARGEST = 1e15  # samples/s and MB; sums and quotients of such figures stay finite


def read_summary(path):
    """A performance summary, of this version or an earlier one: what print_against() needs of it, checked.
    Raises UserError naming what is wrong."""
    summary = read_json(path, "summary")
    try:
        figures = section(summary, "performance_summary")
        found = dict(
            speed=figure(figures, "avg_training_speed"),
            memory=figure(figures, "peak_memory_mb") if figures.get("peak_memory_mb") else None,
            version=str(summary.get("version") or "a run"),
            timestamp=str(summary.get("timestamp") or "unknown date"),
            **{key: section(summary, key, {})
               for key in ("config", "training_params", "fusion_config", "system_info")})
    except ValueError as error:
        raise UserError(f"summary {path}: not a performance summary: {error}") from None
    return found


def section(summary, key, default=None):
    found = summary.get(key) or default
    if not isinstance(found, dict):
        raise ValueError(f"it lacks {key}" if found is None else f"{key} must be an object")
    return found


def figure(figures, name):
    """A positive number that can be reckoned with."""
    try:
        number = float(figures.get(name))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 1 / LARGEST < number < LARGEST:
        raise ValueError(f"performance_summary.{name} = {figures.get(name)!r:.40}: must be positive, and a "
                         f"number below {LARGEST:g}")
    return number


def write(trainer, result):
    """Write a summary into the run's directory, of several ranks the first; returns its path."""
    path = os.path.join(trainer.settings.profiler.profile_dir, trainer.program.result("performance_summary"))
    if trainer.world.first:
        write_json(path, finite(result))
    return path


def completed(result, evaluations, earlier):
    """A summary with its evaluations, {step or "final": Evaluation}, and how it stands against an earlier
    one, as read_summary() has it, or None."""
    result["evaluation"] = {str(step): found.details for step, found in evaluations.items()}
    if earlier and result["performance_summary"]["total_samples"]:
        result["compared_with_v1"] = print_against(earlier, result)
    return result


# What, beside the model's sizes, makes a ratio of speeds meaningless; and what else runs may differ in
MACHINE = [("system_info", key) for key in ("host_cpu", "cpu_threads", "gpu_name")]
SETTINGS = [*(("training_params", key) for key in ("batch_size", "use_amp", "amp_dtype")),
            ("system_info", "torch_version")]


def differing(earlier, now, keys):
    """"KEY OLD -> NEW" for each (section, key) that both summaries have and that is not the same."""
    both = [(key, earlier[part][key], now[part][key]) for part, key in keys
            if key in earlier.get(part, {}) and key in now.get(part, {})]
    return [f"{key} {printable(old):.60} -> {new}" for key, old, new in both if old != new]


def print_against(earlier, now):
    """Speed-up and memory against an earlier summary; says so where the two runs are not alike. Returns the
    figures."""
    after = now["performance_summary"]
    speedup = after["avg_training_speed"] / earlier["speed"]
    reasons = differing(earlier, now, [*(("config", key) for key in now["config"]), *MACHINE])
    print(f"\nAgainst {printable(earlier['version'])} of {printable(earlier['timestamp'])}:")
    print(f"   Training speed: {earlier['speed']:.1f} -> {after['avg_training_speed']:.1f} "
          f"samples/sec, {'not comparable: ' + '; '.join(reasons) if reasons else f'{speedup:.2f}x'}")
    memory, reduction = after["peak_memory_mb"], None
    if earlier["memory"] and memory:
        reduction = 100 * (1 - memory / earlier["memory"])
        print(f"   Peak memory: {earlier['memory']:.1f} -> {memory:.1f} MB, {reduction:+.1f}% saved")
    else:
        print("   Peak memory: not measured in both runs")
    different = differing(earlier, now, SETTINGS)
    if "gpu_name" not in earlier["system_info"]:
        different.append(f"gpu_name unknown -> {now['system_info']['gpu_name']}")
    if different:
        print(f"   These runs differ in more than fusion: {'; '.join(different)}")
    fusions = differing(earlier, now, [("fusion_config", key) for key in now.get("fusion_config", {})])
    if fusions:
        print(f"   Fusions: {'; '.join(fusions)}")
    different += reasons + fusions
    return dict(speedup=None if reasons else speedup, memory_reduction_percent=reduction,
                differences=different)
