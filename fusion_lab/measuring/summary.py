"""The summary of a training run, and its comparison with an earlier one."""
import math
import statistics
import sys
from datetime import datetime, timezone

import torch

from fusion_lab.measuring.clocks import quantiles
from fusion_lab.measuring.gains import KEYS, gain_over_earlier
from fusion_lab.measuring.probe import peak_megabytes
from fusion_lab.measuring.roofline import dtype_name, matmul_ceiling
from fusion_lab.training.checkpoints import own_random_numbers
from fusion_lab.training.errors import FAILED, UserError
from fusion_lab.training.files import read_json
from fusion_lab.training.machine import amp_dtype, system_info
from fusion_lab.training.reporting import print_result
from fusion_lab.training.words import printable


def summarise(trainer, counts, losses, times, interrupted=None):
    """The content of performance_summary_*.json: counts, a run's Counts; losses; times (steps, 4) in s for
    data, forward, backward, optimizer. An interrupted run ends without measuring the device's ceiling."""
    settings, device, program, ranks = trainer.settings, trainer.device, trainer.program, trainer.world.size
    batch_size = settings.training.batch_size * ranks
    peak = peak_megabytes(device, counts)  # before the ceiling's matrices are allocated
    performance = dict(
        total_samples=len(losses) * batch_size, **(of_steps(trainer, losses, times, batch_size) if losses
                                                   else dict.fromkeys(OF_STEPS)),
        warmup_time=counts.warmup_time, first_step_time=counts.first_step_time, peak_memory_mb=peak,
        saved_activation_mb=counts.saved_mb, launches_per_step=counts.launches,
        launch_kind=launch_kind(device), graph_kernels=counts.graph_kernels, flops_per_step=counts.flops)
    performance["not_measured"] = {key: counts.uncounted for key in ("peak_memory_mb", "launches_per_step")
                                   if counts.uncounted and performance[key] is None}
    median = performance["median_batch_time"]
    achieved = median and counts.flops / median
    ceiling = None
    if not interrupted:
        with own_random_numbers(device):
            ceiling = ceiling_above(achieved, device, trainer.amp_dtype or torch.float32)
    performance.update(achieved_tflops=achieved and achieved / 1e12,
                       mfu=achieved and ceiling and achieved / ceiling,
                       matmul_ceiling_tflops=ceiling and ceiling / 1e12)
    result = dict(version=program.version, **provenance(settings, device), performance_summary=performance,
                  fusion_statistics=trainer.model.statistics(), evaluation={})
    result["training_params"]["ranks"] = ranks
    return result


def provenance(settings, device):
    """What every result says of itself: when, in which settings and on what it was measured."""
    configs = settings.as_dict()
    configs["training_params"]["amp_dtype"] = dtype_name(amp_dtype(settings.training, device))
    return dict(timestamp=datetime.now(timezone.utc).isoformat(), **configs, system_info=system_info(device))


def ceiling_above(achieved, device, dtype):
    """matmul_ceiling(), measured again if a whole step is faster, since other work may have slowed it; None
    if the step is faster again. achieved: FLOP/s of a step, or None."""
    for _ in range(2):
        ceiling = matmul_ceiling(device, dtype)
        if ceiling > (achieved or 0):
            return ceiling
    return None


OF_STEPS = ("avg_training_speed", "avg_batch_time", "avg_data_time", "avg_forward_time", "avg_backward_time",
            "avg_optimizer_time", "median_batch_time", "p20_batch_time", "p80_batch_time", "first_loss",
            "final_loss", "avg_loss", "step_times")
MOST_TIMES = 1000  # of single steps in a summary, the last ones


def of_steps(trainer, losses, times, batch_size):
    """The part of a summary about the steps, of which there was at least one."""
    steps = times.sum(axis=1)
    forward, backward, optimizer = [None] * 3 if trainer.graph else times[:, 1:].mean(axis=0).tolist()
    p20, median, p80 = quantiles(steps)
    mean = float(steps.mean())
    return dict(
        avg_training_speed=batch_size / mean, avg_batch_time=mean, avg_data_time=float(times[:, 0].mean()),
        avg_forward_time=forward, avg_backward_time=backward, avg_optimizer_time=optimizer,
        median_batch_time=median, p20_batch_time=p20, p80_batch_time=p80, first_loss=losses[0],
        final_loss=losses[-1], avg_loss=statistics.fmean(losses),
        step_times=steps[-MOST_TIMES:].round(7).tolist())


HEADLINES = ("first_loss", "final_loss", "avg_loss", "median_batch_time", "p20_batch_time", "p80_batch_time",
             "avg_training_speed", "peak_memory_mb", "launches_per_step", "saved_activation_mb", "mfu",
             "achieved_tflops", "first_step_time", "avg_batch_time", "total_samples")


def print_summary(trainer, result, path):
    """The end of a training run: a few figures for people, a line of JSON for programs."""
    figures = result["performance_summary"]
    if sys.stdout.isatty():
        memory = figures["peak_memory_mb"]
        if figures["median_batch_time"] is not None:
            times = (1e3 * figures[f"{q}_batch_time"] for q in ("median", "p20", "p80"))
            print(f"   loss         {figures['first_loss']:.4f} -> {figures['final_loss']:.4f}",
                  "   step         {:.2f} ms (p20 {:.2f}, p80 {:.2f})".format(*times),
                  f"   speed        {figures['avg_training_speed']:.1f} samples/s", sep="\n")
        print(f"   peak memory  {'not measured' if memory is None else f'{memory:.1f} MB'}")
    headline = dict(version=result["version"], performance_summary={key: figures[key] for key in HEADLINES})
    print_result(headline, path, trainer.settings)


def launch_kind(device):
    """The unit of launch counts."""
    return dict(cuda="gpu_kernels", cpu="cpu_ops")[device.type]


def read_summary(path):
    """What print_against() needs of the performance summary at path, which may be an earlier version's.
    Raises UserError."""
    summary = read_json(path, "summary")
    try:
        parts = {key: dict(summary.get(key) or {}) for key in
                 ("performance_summary", "config", "training_params", "fusion_config", "system_info")}
        figures = parts.pop("performance_summary")
        speed, memory = float(figures["avg_training_speed"]), float(figures.get("peak_memory_mb") or 0)
        if not (0 < speed < math.inf and 0 <= memory < math.inf):
            raise ValueError(f"{speed} samples/s, {memory} MB")
        return dict(speed=speed, memory=memory or None, rates=rates(figures),
                    version=str(summary.get("version") or "a run"),
                    timestamp=str(summary.get("timestamp") or "unknown date"), **parts)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"summary {path}: not a performance summary ({printable(error):.60})") from None


def rates(figures):
    """Samples/s of the last MOST_TIMES steps of a performance_summary; empty if it has no times of steps."""
    times = figures.get("step_times") or []
    return [figures["avg_training_speed"] * figures["avg_batch_time"] / time for time in times]


def complete_and_print(result, evaluations, earlier):
    """A summary with its evaluations, {step or "final": Evaluation}, and how it stands against an earlier
    one, as read_summary() has it, or None."""
    result["evaluation"] = {str(step): evaluation.details for step, evaluation in evaluations.items()}
    if earlier and result["performance_summary"]["total_samples"]:
        result["compared_with_v1"] = print_against(earlier, result)
    return result


def too_slow(result, least):
    """The exit code of --min-speedup least: FAILED unless the interval of the speed-up over the earlier run
    lies above least. None asks for nothing."""
    if least is None:
        return 0
    low = (result.get("compared_with_v1") or {}).get("speedup_low")
    passed = low is not None and low > least
    why = "there is no interval" if low is None else f"the interval of the speed-up begins at {low:.2f}"
    print(f"--min-speedup {least:g}: {'passed' if passed else 'FAILED'}, {why}")
    return 0 if passed else FAILED


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
    before, speed, own = earlier["speed"], after["avg_training_speed"], rates(after)
    speedup = dict.fromkeys(KEYS)
    if reasons := differing(earlier, now, [*(("config", key) for key in now["config"]), *MACHINE]):
        words = f"not comparable: {'; '.join(reasons)}"
    elif earlier["rates"] and own:
        before, speed = statistics.median(earlier["rates"]), statistics.median(own)
        gain = gain_over_earlier(earlier["rates"], own)
        speedup, words = gain.as_dict(), f"{gain.in_words()}, of medians"
    else:
        speedup["speedup"] = speed / before
        words = f"{speed / before:.2f}x (spread unknown: the earlier summary has no times of single steps)"
    print(f"\nAgainst {printable(earlier['version'])} of {printable(earlier['timestamp'])}:")
    print(f"   Training speed: {before:.1f} -> {speed:.1f} samples/sec, {words}")
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
    return dict(speedup, memory_reduction_percent=reduction, differences=different + reasons + fusions)
