"""--compare-fusion: what every fusion buys, measured here and now. README.md explains how to read the table.

Each variant is first measured alone (peak memory, saved activations, launches, compile time), then all are
alive at once with equal weights, and their steps alternate, so that a machine that drifts hits all alike.
"""
import contextlib
import gc
import itertools
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone

import numpy as np
import torch
from tqdm import tqdm

from fusion_lab.measuring.ceilings import matmul_ceiling
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.probe import peak_megabytes, probe
from fusion_lab.measuring.tables import aligned
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import require_writable, set_aside, write_json
from fusion_lab.training.flags import MODES_WITH_GRAPHS
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info
from tiny_openfold_v2 import FusionConfig, TinyOpenFoldV2, Trainer, open_source

COMPILE, COMBO = "enable_torch_compile", "enable_combo_kernels"
FOUR = ("enable_qkv_fusion_msa", "enable_qkv_fusion_triangle", "enable_flash_attention",
        "enable_triangle_fusion")
MOST_BATCHES = 16  # alive on the device at once; longer comparisons repeat them


@dataclass
class Variant:
    """One column of switches, and what was measured of it."""
    name: str
    fusion: FusionConfig
    reason: str = None  # why it was not measured
    found: dict = None  # alone: probe()'s findings, peak_memory_mb, first_step_time
    trainer: Trainer = None
    timer: PhaseTimer = None
    losses: list = field(default_factory=list)


def short(name):
    return name.removeprefix("enable_").replace("_fusion", "")


def switches(default):
    """Fields of FusionConfig that are on (or off) by default, torch.compile apart."""
    return [f.name for f in fields(FusionConfig) if f.default is default and f.name != COMPILE]


def comparison_variants(config, fusion, training, device):
    """Baseline; every fusion alone; all that are on by default; then a ladder that adds one switch a rung and
    leaves out what cannot run here; and the user's own switches if they are none of these."""
    off, rung = FusionConfig.preset(False), FusionConfig()
    mode = fusion.torch_compile_mode
    settings = {"baseline": off}
    for name in switches(True) + switches(False):
        if name != COMBO:
            settings[f"{short(name)} alone"] = replace(off, **{name: True})
    settings["all"] = rung
    for name in (COMPILE, *switches(False)):
        if name == "enable_cuda_graphs" and mode in MODES_WITH_GRAPHS:
            continue
        compiled = name == COMPILE or rung.enable_torch_compile
        higher = replace(rung, **{name: True, "torch_compile_mode": mode if compiled else "default"})
        settings["all + torch.compile" if name == COMPILE else f"+ {short(name)}"] = higher
        rung = rung if higher.idle(training.use_amp, device.type == "cuda", config.seq_len) else higher
    idle = fusion.idle(training.use_amp, device.type == "cuda", config.seq_len)
    if idle or fusion not in settings.values():  # a rung with idle switches is only named, not measured
        settings = {**{name: f for name, f in settings.items() if f != fusion}, "as given": fusion}
    distinct = {str(asdict(f)): (name, f) for name, f in reversed(settings.items())}
    return [Variant(name, f) for name, f in reversed(distinct.values())]


def combination_variants():
    """All 16 combinations of the four classic switches, everything else off."""
    off = FusionConfig.preset(False)
    return [Variant("+".join(short(n) for n, on in zip(FOUR, chosen, strict=True) if on) or "baseline",
                    replace(off, **dict(zip(FOUR, chosen, strict=True))))
            for chosen in itertools.product((False, True), repeat=len(FOUR))]


@contextlib.contextmanager
def reasons(variant):
    """Within, whatever stops a variant becomes the reason in its row; the baseline must run."""
    try:
        yield
    except Exception as error:  # compilers fail in many ways, and the other rows are still wanted
        if variant.name == "baseline":
            raise
        text = str(error).strip().splitlines()
        variant.reason = f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"
        variant.trainer = None


def release():
    """Give back the memory of variants that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_alone(variant, config, training, device, batch):
    """Fill variant.found while no other variant is on the device, so that its peak is that of a lone run:
    what others may have left behind (library workspaces, CUDA graph pools) is not counted. On CPU the
    trainer is kept for the timing."""
    idle = variant.fusion.idle(training.use_amp, device.type == "cuda", config.seq_len)
    if idle and variant.name != "as given":
        variant.reason = "; ".join(idle)
        return
    left_behind = 0
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        left_behind = torch.cuda.memory_allocated(device) - sum(t.nbytes for t in batch.values())
    with reasons(variant):
        trainer = Trainer(config, variant.fusion, training, device)
        with trainer.preserved():
            times = []
            for _ in range(max(2, training.warmup_steps)):
                started = time.perf_counter()
                trainer.step(batch).item()
                times.append(time.perf_counter() - started)
            found = probe(trainer, batch)
        if device.type == "cuda":
            trainer.step(batch)  # optimizer state exists again
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(2):
                trainer.step(batch)
            torch.cuda.synchronize()
        peak = peak_megabytes(device, found)
        variant.found = dict(found, first_step_time=times[0],
                             peak_memory_mb=None if peak is None else peak - left_behind / MEGABYTE)
        variant.trainer = trainer if device.type == "cpu" else None


def bring_to_life(variant, config, training, device, weights, batch):
    """A warm trainer with these weights."""
    with reasons(variant):
        trainer = variant.trainer or Trainer(config, variant.fusion, training, device)
        trainer.model.load_state_dict(weights)
        with trainer.preserved():
            for _ in range(max(2, training.warmup_steps) if device.type == "cuda" else 1):
                trainer.step(batch).item()
        variant.trainer, variant.timer = trainer, PhaseTimer(device)


def take_turn(variant, number, batch, dropout):
    """One timed step; on a GPU an untimed one before it keeps the queue as full as in training."""
    with reasons(variant):
        if dropout:
            torch.manual_seed(number)
        if variant.trainer.device.type == "cuda":
            variant.trainer.step(batch)
        variant.timer.start()
        loss = variant.trainer.step(batch, variant.timer.mark)
        variant.losses.append(loss.item())


def measure(variants, config, training, device, source, gate):
    """Measure all variants; training.num_steps timed steps each, within gate. Weights, optimizers and random
    numbers are afterwards what they were; the trainers stay in variant.trainer."""
    supply = [to_device(source.batch(i), device) for i in range(min(training.num_steps, MOST_BATCHES))]
    for variant in tqdm(variants, disable=None, desc="alone", leave=False):
        measure_alone(variant, config, training, device, supply[0])
        release()
    if device.type == "cuda" and any(variant.fusion.enable_torch_compile for variant in variants):
        torch._dynamo.reset()  # compiled code of models that are gone would be tried first in every step
    weights = Trainer(config, variants[0].fusion, training, device).model.state_dict()
    for variant in tqdm(variants, disable=None, desc="warm-up", leave=False):
        if not variant.reason:
            bring_to_life(variant, config, training, device, weights, supply[0])
            release()
    with gate, contextlib.ExitStack() as stack:
        for variant in variants:
            if not variant.reason:
                stack.enter_context(variant.trainer.preserved())
        for number in tqdm(range(training.num_steps), disable=None, desc="rounds", leave=False):
            alive = [variant for variant in variants if not variant.reason]
            first = number % len(alive)
            for variant in alive[first:] + alive[:first]:
                take_turn(variant, number, supply[number % len(supply)], config.dropout > 0)


def reduction(before, after):
    """Percent saved of before; None where either was not measured."""
    return 100 * (1 - after / before) if before and after is not None else None


def row(variant, baseline, training, ceiling):
    """What is known of a variant as a dict: seconds, MB, percent; None where it was not measured."""
    result = dict(name=variant.name, measured=variant.reason is None, reason=variant.reason,
                  fusion_config=asdict(variant.fusion))
    if variant.reason:
        return result
    phases = variant.timer.seconds()
    steps, found = phases.sum(axis=1), variant.found
    p20, median, p80 = quantiles(steps)
    split = [None] * 3 if variant.fusion.enable_cuda_graphs else np.median(phases, axis=0).tolist()
    saved = sum(found["saved"].values()) / MEGABYTE
    result.update(
        median_batch_time=median, p20_batch_time=p20, p80_batch_time=p80, median_forward_time=split[0],
        median_backward_time=split[1], median_optimizer_time=split[2],
        first_step_time=found["first_step_time"], samples_per_second=training.batch_size / median,
        peak_memory_mb=found["peak_memory_mb"], saved_activation_mb=saved,
        saved_activation_mb_by_sublayer={k: v / MEGABYTE for k, v in found["saved"].items()},
        launches_per_step=found["launches"], flops_per_step=found["flops"],
        achieved_tflops=found["flops"] / median / 1e12, mfu=found["flops"] / median / ceiling,
        first_loss=variant.losses[0], final_loss=variant.losses[-1])
    if baseline is not None:
        before, own = baseline
        lowest, _, highest = quantiles(own / steps)
        result.update(
            speedup=before["median_batch_time"] / median, speedup_p20=lowest, speedup_p80=highest,
            batch_time_reduction_percent=reduction(before["median_batch_time"], median),
            peak_memory_reduction_percent=reduction(before["peak_memory_mb"], found["peak_memory_mb"]),
            saved_activation_reduction_percent=reduction(before["saved_activation_mb"], saved),
            launch_reduction_percent=reduction(before["launches_per_step"], found["launches"]),
            final_loss_difference=abs(variant.losses[-1] - before["final_loss"]))
    return result


def rows(variants, training, ceiling):
    """row() of every variant, each against the first, which is the baseline."""
    before = row(variants[0], None, training, ceiling)
    steps = variants[0].timer.seconds().sum(axis=1)
    return [row(variant, (before, steps), training, ceiling) for variant in variants]


COLUMNS = (("peak MB (saved)", "peak_memory_mb", ".1f", "peak_memory_reduction_percent"),
           ("saved act. MB (saved)", "saved_activation_mb", ".1f", "saved_activation_reduction_percent"),
           ("launches (fewer)", "launches_per_step", "d", "launch_reduction_percent"))


def table(results):
    """The comparison as rows of cells, the header first."""
    lines = [["variant", "step ms (p20, p80)", "samples/s", "speed-up", *(title for title, *_ in COLUMNS)]]
    for r in results:
        if not r["measured"]:
            lines.append([r["name"], f"not measured: {r['reason']}"])
            continue
        times = [1e3 * r[f"{quantile}_batch_time"] for quantile in ("median", "p20", "p80")]
        lines.append([r["name"], "{:.2f} ({:.2f}, {:.2f})".format(*times), f"{r['samples_per_second']:.1f}",
                      f"{r['speedup']:.2f}x"])
        for _, key, form, share in COLUMNS:
            lines[-1].append("n/a" if r[key] is None else f"{r[key]:{form}} ({r[share]:+.1f}%)")
    return lines


def detail_table(results):
    """What the comparison found beside, as rows of cells: phases of a step, speed against the matrix product
    measured here, and the first step, which compiles."""
    lines = [["variant", "forward ms", "backward ms", "optimizer ms", "TFLOP/s", "MFU", "first step s"]]
    for r in (r for r in results if r["measured"]):
        phases = [r[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer")]
        lines.append([r["name"], *("in one graph" if t is None else f"{1e3 * t:.2f}" for t in phases),
                      f"{r['achieved_tflops']:.3f}", f"{100 * r['mfu']:.1f}%", f"{r['first_step_time']:.2f}"])
    return lines


def headline(results, statistics, launch_kind):
    """The four lines that users look for: all fusions that are on by default, against the baseline."""
    before = results[0]
    after = next((r for r in results if r["name"] == "all" and r["measured"]), results[-1])
    if not after["measured"]:
        return [f"No headline: {after['name']} was not measured ({after['reason']})"]
    slow = " (a slowdown)" if after["speedup"] < 1 else ""
    launches = "not measured" if after["launch_reduction_percent"] is None else (
        f"{after['launch_reduction_percent']:.1f}% measured ({before['launches_per_step']} -> "
        f"{after['launches_per_step']} {launch_kind} per step)")
    memory = "not measured" if after["peak_memory_reduction_percent"] is None else (
        f"{after['peak_memory_reduction_percent']:.1f}% (peak {before['peak_memory_mb']:.1f} -> "
        f"{after['peak_memory_mb']:.1f} MB)")
    return [f"Training speed: {after['speedup']:.2f}x speed-up{slow} ({before['samples_per_second']:.1f} -> "
            f"{after['samples_per_second']:.1f} samples/sec)",
            f"Memory reduction: {memory}",
            f"Batch time improvement: {after['batch_time_reduction_percent']:.1f}%{slow} "
            f"({1e3 * before['median_batch_time']:.2f} -> {1e3 * after['median_batch_time']:.2f} ms)",
            f"Kernel reduction: {launches}; nominal {statistics['kernel_reduction_percent']}% "
            f"({statistics['total_kernel_reduction']} fewer kernels)"]


def switch_effects(results):
    """For each of the four switches: how many times faster it makes a step, as the geometric mean over the
    eight settings of the others, with the smallest and largest; and the MB of saved activations it spares."""
    measured = {tuple(r["fusion_config"][n] for n in FOUR): r for r in results if r["measured"]}
    effects = {}
    for place, name in enumerate(FOUR):
        pairs = [(r, measured.get(key[:place] + (True,) + key[place + 1:]))
                 for key, r in measured.items() if not key[place]]
        gains = [off["median_batch_time"] / on["median_batch_time"] for off, on in pairs if on]
        spared = [off["saved_activation_mb"] - on["saved_activation_mb"] for off, on in pairs if on]
        if gains:
            effects[name] = dict(speedup=math.exp(np.mean(np.log(gains))), smallest=min(gains),
                                 largest=max(gains), saved_activation_mb=float(np.mean(spared)))
    return effects


def compare(config, fusion, training, combinations=False, variants=None, gate=None):
    """The comparison as one dict, see README.md; variants replace those that the switches suggest, gate is a
    context manager round the timed steps."""
    device = choose_device(training.device)
    if variants is None:
        variants = (combination_variants() if combinations
                    else comparison_variants(config, fusion, training, device))
    measure(variants, config, training, device, open_source(config, training),
            gate or contextlib.nullcontext())
    amp_dtype = variants[0].trainer.amp_dtype
    ceiling = matmul_ceiling(device, amp_dtype or torch.float32)
    results = rows(variants, training, ceiling)
    nominal = TinyOpenFoldV2(config, FusionConfig()).get_fusion_statistics()
    return dict(mode="compare_fusion", timestamp=datetime.now(timezone.utc).isoformat(),
                config=asdict(config), system_info=system_info(device),
                training_params=dict(asdict(training), amp_dtype=amp_dtype and str(amp_dtype)[6:]),
                launch_kind="gpu_kernels" if device.type == "cuda" else "cpu_ops",
                matmul_ceiling_tflops=ceiling / 1e12, variants=results, nominal=nominal,
                switch_effects=switch_effects(results) if combinations else None)


def print_comparison(result):
    """The table, what is within noise, the switches' effects, and the four lines that users look for."""
    print("\n".join(aligned(table(result["variants"]))))
    print("\n".join(["", *aligned(detail_table(result["variants"])), ""]))
    noise = [r["name"] for r in result["variants"][1:]
             if r["measured"] and r["speedup_p20"] <= 1 <= r["speedup_p80"]]
    if noise:
        print(f"Speed-up within noise (p20 to p80 of the paired steps includes 1): {', '.join(noise)}")
    for name, effect in (result["switch_effects"] or {}).items():
        print(f"{short(name):16s} {effect['speedup']:.3f}x over all settings of the others (from "
              f"{effect['smallest']:.3f} to {effect['largest']:.3f}), saved activations "
              f"{0.0 - effect['saved_activation_mb']:+.1f} MB")
    print("\n".join(headline(result["variants"], result["nominal"], result["launch_kind"])))


def compare_fusion(config, fusion, training, profiler, combinations=False):
    """--compare-fusion: measure, print, write fusion_comparison_v2.json; exit code 0."""
    device = choose_device(training.device)
    path = os.path.join(profiler.profile_dir, "fusion_comparison_v2.json")
    require_writable(path)
    print(f"Device: {device} | torch {torch.__version__} | B {training.batch_size}, N {config.num_seqs}, "
          f"S {config.seq_len}, {config.num_blocks} blocks | {training.num_steps} interleaved steps of every "
          "variant", flush=True)
    result = compare(config, fusion, training, combinations)
    print_comparison(result)
    set_aside(path)
    write_json(path, result)
    print(json.dumps(result, allow_nan=False))
    return 0
