"""What a comparison says of each variant: figures of its own, and against the baseline. Keys are those of
fusion_comparison_*.json; seconds, MB (2**20 bytes), percent; None where something was not measured."""
from dataclasses import asdict

import numpy as np

from fusion_lab.measuring.clocks import median_interval, quantiles
from fusion_lab.measuring.comparison.worth import UNKNOWN
from fusion_lab.training.machine import MEGABYTE

FEWEST = 6  # rounds from which on an interval of 95% can be had
SAVINGS = dict(peak_memory="peak_memory_mb", saved_activation="saved_activation_mb",
               launch="launches_per_step", flop="flops_per_step")


def not_measured(variant, reason=None):
    return dict(name=variant.name, measured=False, reason=variant.reason or reason,
                fusion_config=asdict(variant.settings.fusion))


def own_figures(variant):
    """A row without what needs others."""
    if variant.reason:
        return not_measured(variant)
    fusion, phases, found = variant.settings.fusion, variant.timer.seconds(), variant.found
    p20, median, p80 = quantiles(phases.sum(axis=1))
    split = [None] * 3 if fusion.enable_cuda_graphs else np.median(phases, axis=0).tolist()
    return dict(
        name=variant.name, measured=True, reason=None, fusion_config=asdict(fusion),
        median_batch_time=median, p20_batch_time=p20, p80_batch_time=p80, median_forward_time=split[0],
        median_backward_time=split[1], median_optimizer_time=split[2],
        first_step_time=found.first_step_time,
        samples_per_second=variant.settings.training.batch_size / median,
        peak_memory_mb=found.peak_memory_mb, saved_activation_mb=found.saved_mb,
        saved_activation_mb_by_sublayer={k: v / MEGABYTE for k, v in found.saved.items()},
        launches_per_step=found.launches, flops_per_step=found.flops,
        achieved_tflops=found.flops / median / 1e12, first_loss=variant.losses[0],
        final_loss=variant.losses[-1], **UNKNOWN)


def paired_speedups(variant, baseline):
    """Of each round in which both had their turn."""
    steps, before = (v.timer.seconds().sum(axis=1) for v in (variant, baseline))
    rounds = min(len(steps), len(before))
    return before[:rounds] / steps[:rounds]


def speedup_interval(variant, baseline):
    """(low, high) of the median speed-up, 95%."""
    return median_interval(paired_speedups(variant, baseline))


def add_speed(row, variant, baseline):
    """Add to a row how its steps compare with the baseline's, which took turns with them. The speed-up is of
    medians, which with few rounds may lie beside the paired ones; the intervals hold it all the same."""
    baseline_time = quantiles(baseline.timer.seconds().sum(axis=1))[1]
    speedup, pairs = baseline_time / row["median_batch_time"], paired_speedups(variant, baseline)
    p20, _, p80 = quantiles(pairs)
    low, high = median_interval(pairs) if len(pairs) >= FEWEST else (None, None)
    last = min(len(variant.losses), len(baseline.losses)) - 1
    row.update(rounds=len(pairs), baseline_batch_time=baseline_time, speedup=speedup,
               speedup_p20=min(p20, speedup), speedup_p80=max(p80, speedup),
               speedup_low=low and min(low, speedup), speedup_high=high and max(high, speedup),
               batch_time_reduction_percent=reduction(baseline_time, row["median_batch_time"]),
               final_loss_difference=abs(variant.losses[last] - baseline.losses[last]))


def add_savings(row, baseline_row, ceiling):
    """Add what it saves against the baseline's row, and its speed against a matrix product (FLOP/s)."""
    row["mfu"] = row["flops_per_step"] / row["median_batch_time"] / ceiling
    for name, key in SAVINGS.items():
        row[f"{name}_reduction_percent"] = reduction(baseline_row[key], row[key])


def rows_of(variants, ceiling):
    """Rows of variants whose steps alternated; the first is the baseline."""
    rows = [own_figures(variant) for variant in variants]
    for variant, row in zip(variants, rows, strict=True):
        if row["measured"]:
            add_speed(row, variant, variants[0])
            add_savings(row, rows[0], ceiling)
    return rows


def reduction(before, after):
    """Percent saved of before; None where either was not measured."""
    return 100 * (1 - after / before) if before and after is not None else None
