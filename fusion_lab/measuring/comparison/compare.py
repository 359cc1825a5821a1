"""--compare-fusion: what every fusion buys, measured here and now.

Variants without torch.compile are first measured alone (peak memory, saved activations, launches), then all
are alive at once with equal weights and their steps alternate, so that a machine that drifts hits all alike.
First come those of the table that people ask for. A compiled one is a process of its own (rung.py), where
its steps alternate with the baseline's. On a GPU these compile in the background, are stopped while others
are timed, and are measured after the first table, one by one; on a CPU there is one, which comes last. The
other eager ones are measured as far as the time goes.
"""
import contextlib
import gc
import os
import time
from datetime import datetime, timezone

import torch

from fusion_lab.kernels.precision import amp_dtype
from fusion_lab.measuring.ceilings import matmul_ceiling
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.comparison.pace import Pace
from fusion_lab.measuring.comparison.rows import rows_of
from fusion_lab.measuring.comparison.rungs import Rungs
from fusion_lab.measuring.comparison.table import LiveTable
from fusion_lab.measuring.comparison.variants import (
    ALL,
    AS_GIVEN,
    BASELINE,
    TOO_LATE,
    Variant,
    comparison_variants,
    pick,
    refuse_idle,
    usual_rows,
)
from fusion_lab.measuring.comparison.worth import STEPS, add_worth, operations_by_sublayer, shares_of_a_step
from fusion_lab.measuring.probe import counts_its_first_step, peak_of_two_steps, probe
from fusion_lab.measuring.summary import dtype_name, launch_kind
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import Interrupted, counted, finite, interruptible, write_json
from fusion_lab.training.machine import MEGABYTE, choose_device, process_settings, system_info
from fusion_lab.training.reporting import print_result

LONG = 0.5  # s, of a step that is timed twice by sub-layer, not five times
OTHERS = 0.6  # of the first table's budget: for the other rows
MOST_BATCHES = 16  # alive on the device at once; longer comparisons repeat them


@contextlib.contextmanager
def reasons(variant):
    """Within, whatever stops a variant becomes the reason in its row; the baseline must run."""
    try:
        yield
    except Exception as error:  # compilers fail in many ways, and the other rows are still wanted
        if variant.name == BASELINE:
            raise
        text = str(error).strip().splitlines()
        variant.reason = f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"
        variant.trainer = None


def release(variants=()):
    """Give back the memory of these variants, and of what else is gone."""
    for variant in variants:
        variant.trainer = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds_of_a_step(trainer, batch):
    started = time.perf_counter()
    trainer.step(batch).item()
    return time.perf_counter() - started


def measure_alone(program, variant, device, batch):
    """Fill variant.found while no other variant is on the device, so that its peak is that of a lone run:
    what others may have left behind (library workspaces, CUDA graph pools) is not counted. On CPU the
    trainer, warm now, is kept for the timing."""
    if refuse_idle(variant, device):
        return
    left_behind = 0
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        left_behind = torch.cuda.memory_allocated(device) - sum(t.nbytes for t in batch.values())
    with reasons(variant):
        process_settings(variant.settings, device)
        trainer = program.trainer(program, variant.settings, device)
        with trainer.preserved():
            first_step_time = None if counts_its_first_step(trainer) else seconds_of_a_step(trainer, batch)
            found = probe(trainer, batch)
        found.first_step_time = first_step_time
        if not variant.compiled:
            variant.operations = operations_by_sublayer(trainer, batch)
        peak = peak_of_two_steps(trainer, batch, found)
        found.peak_memory_mb = None if peak is None else peak - left_behind / MEGABYTE
        variant.found = found
        variant.trainer = trainer if device.type == "cpu" else None


def bring_to_life(program, variant, device, weights, batch):
    """Give the variant a warm trainer with these weights, and a clock."""
    with reasons(variant):
        warm = variant.trainer is not None
        trainer = variant.trainer or program.trainer(program, variant.settings, device)
        trainer.model.load_state_dict(weights)
        with trainer.preserved():
            for _ in range(0 if warm else max(2, variant.settings.training.warmup_steps)):
                trainer.step(batch).item()
        variant.trainer, variant.timer = trainer, PhaseTimer(device)


def take_turn(variant, number, batch):
    """One timed step; on a GPU an untimed one before it keeps the queue as full as in training."""
    with reasons(variant):
        torch.manual_seed(number)  # dropout draws alike for all
        if variant.trainer.device.type == "cuda":
            variant.trainer.step(batch)
        variant.timer.start()
        loss = variant.trainer.step(batch, variant.timer.mark)
        variant.losses.append(loss.item())


def alternate(variants, pace, supply, heard=lambda rounds: None):
    """Timed steps of all variants in turn, each round beginning with another one, for as long as pace says;
    heard(rounds) after each. Weights, optimizers and random numbers are afterwards what they were."""
    with contextlib.ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant.trainer.preserved())
        number = 0
        while not pace.over(variants, number):
            alive = [variant for variant in variants if not variant.reason]
            first = number % len(alive)
            for variant in alive[first:] + alive[:first]:
                take_turn(variant, number, supply[number % len(supply)])
            number += 1
            heard(number)


def refuse_equal(variant, baseline):
    """Give a variant its reason if its step turned out to be the baseline's, as on a CPU at sizes at which a
    fusion does not pay; its timing would be a third of a minute of noise."""
    if variant.found and variant.found.operations and variant.found.operations == baseline.found.operations:
        variant.reason = f"here it runs the same {variant.found.launches} operations as the baseline"
        variant.trainer = None


def supply_of(source, settings, device):
    """Batches for the rounds."""
    return [to_device(source.batch(i), device)
            for i in range(min(settings.training.num_steps, MOST_BATCHES))]


def measure(program, variants, device, source, pace=None, table=None, rungs=None, equal=True):
    """Measure variants, the baseline first, within one process: each alone, unless that is known already,
    then steps in turn. Their trainers stay alive in variant.trainer. table, a LiveTable, hears what goes on.
    rungs, which compile meanwhile, begin once the baseline's peak is known, and rest while steps are timed.
    equal: also those whose operations are the baseline's."""
    settings, table = variants[0].settings, table or LiveTable()
    pace, supply = pace or Pace(settings.training.num_steps), supply_of(source, settings, device)
    for number, variant in enumerate(variants, 1):
        if variant.found is None and pace.late():
            variant.reason = variant.reason or TOO_LATE
        elif variant.found is None:
            table.note(f"{variant.name}: memory and launches, {number} of {len(variants)}{pace.left_text()}")
            began = time.monotonic()
            measure_alone(program, variant, device, supply[0])
            pace.slowest = max(pace.slowest, time.monotonic() - began)
            if number > 1 and not equal and variant.name not in (ALL, AS_GIVEN):
                refuse_equal(variant, variants[0])
            release()
            if number == 1 and rungs:
                rungs.begin(variant.found.peak_memory_mb)
    measured = [variant for variant in variants if variant.found and not variant.reason]
    if device.type == "cuda" and any(variant.compiled for variant in measured):
        torch._dynamo.reset()  # compiled code of models that are gone would be tried first in every step
    weights = program.trainer(program, settings, device).model.state_dict()
    for variant in measured:
        process_settings(variant.settings, device)
        bring_to_life(program, variant, device, weights, supply[0])
        release()
    measured = [variant for variant in measured if not variant.reason]
    table.note(f"{counted(len(measured), 'variant')} in turn{pace.left_text()}")
    with rungs.paused() if rungs else contextlib.nullcontext():
        alternate(measured, pace, supply, lambda rounds: table.progress(measured, rounds, pace))


def apart_from(baseline):
    """The baseline once more, to take turns with others; what it is alone is known."""
    return Variant(BASELINE, baseline.settings, found=baseline.found, operations=baseline.operations,
                   trainer=baseline.trainer)


def baseline_shares(baseline, source, steps):
    """{sub-layer: its share of the baseline's step}, the median of so many steps."""
    trainer = baseline.trainer
    process_settings(baseline.settings, trainer.device)
    return shares_of_a_step(trainer, to_device(source.batch(0), trainer.device), steps)


def parts(variants, last=None):
    """(variants of the first table, which ends with one of this name and the user's own, other eager ones,
    compiled ones)"""
    eager, compiled = ([v for v in variants if v.compiled is how] for how in (False, True))
    cut = next((i for i, v in enumerate(eager, 1) if v.name == last), len(eager))
    own = [v for v in eager[cut:] if v.name == AS_GIVEN]
    return eager[:cut] + own, [v for v in eager[cut:] if v not in own], compiled


def suggested_parts(program, settings, device, picked):
    """Those of the variants that the switches suggest, of which picked chooses by name."""
    variants = comparison_variants(program, settings, device.type == "cuda")
    if picked:
        return parts(pick(variants, picked))
    return parts(usual_rows(variants, program, device.type == "cuda"), ALL)


def nominal_counts(program, settings):
    """Model.statistics() of the default switches."""
    with torch.device("meta"):
        return program.model(settings.model, program.fusion_config()).statistics()


def compare(program, settings, variants=None, picked=None, table=None, pace=None):
    """The comparison as one dict, that of fusion_comparison_*.json. variants replace those that the switches
    suggest, of which picked chooses by name; table, a LiveTable, hears of every row as soon as it is known;
    pace says how many rounds there are (--num-steps). Trainers of this process stay in variant.trainer; on a
    GPU, where more tables follow the first, only the baseline's."""
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    pace, table = pace or Pace(settings.training.num_steps), table or LiveTable()
    source = program.data(settings)
    together, later, compiled = (parts(variants) if variants else
                                 suggested_parts(program, settings, device, picked))
    equal = bool(picked)  # who asks for a row gets it
    dtype = amp_dtype(settings.training, device)
    ceiling, rows = matmul_ceiling(device, dtype or torch.float32), []
    result = dict(mode="compare_fusion", timestamp=datetime.now(timezone.utc).isoformat(),
                  **{k: v for k, v in settings.as_dict().items() if k in ("config", "training_params")},
                  system_info=system_info(device), launch_kind=launch_kind(device), variants=rows,
                  nominal=nominal_counts(program, settings),
                  matmul_ceiling_tflops=ceiling / 1e12)
    result["training_params"]["amp_dtype"] = dtype_name(dtype)
    table.begin(result, [*together, *later, *compiled], ceiling)
    shares = {}

    def part(found, pace):
        """Measure these and add their rows."""
        measure(program, found, device, source, pace, table, rungs, equal)
        more = rows_of(found, ceiling)
        rows.extend(more[1:] if rows else more)  # of the baseline there is one
        table.add()
        if not shares:
            table.note("shares of the baseline's sub-layers")
            long = rows[0]["median_batch_time"] > LONG
            with rungs.paused():
                shares.update(baseline_shares(found[0], source, 2 if long else STEPS))
        add_worth(more, found, shares)
        table.save(result)

    def add_compiled():
        for row in rungs.measure(rows[0], ceiling):
            rows.append(row)
            table.add()

    with Rungs(program, compiled, device, table.note, pace) as rungs:
        part(together, pace)
        if device.type == "cuda" and (compiled or later):
            release([v for v in together if v.name != BASELINE])  # memory for those
        rungs.begin()
        if device.type == "cuda":
            add_compiled()
        if later:
            part([apart_from(together[0]), *later], pace.part(OTHERS, pace.whole(device)))
        if device.type != "cuda":
            add_compiled()
    table.save(result)
    return result


def compare_fusion(program, settings, picked=None, limits=None):
    """--compare-fusion: measure, print, write fusion_comparison_*.json anew with each part; exit code 0, or
    that of the signal that ended it early. limits: Pace's (rounds, seconds)."""
    device = choose_device(settings.training.device)
    path = os.path.join(settings.profiler.profile_dir, program.result("fusion_comparison"))
    pace = Pace(*limits or [settings.training.num_steps])
    print(f"Device: {device} | torch {torch.__version__} | {program.sample(settings)} | "
          f"steps of every variant in turn, {pace}", flush=True)
    table = LiveTable(lambda result: write_json(path, finite(result)))

    def finish(number=None):
        """What there is, in a table and in the file; exit code."""
        table.finish(number)
        print_result(finite(dict(mode="compare_fusion", variants=[
            {key: row[key] for key in ("name", "speedup") if key in row} for row in table.rows])),
            path, settings)
        return 128 + number if number is not None else 0

    try:
        with interruptible():
            compare(program, settings, None, picked, table, pace)
        return finish()
    except Interrupted as stopped:
        return finish(stopped.args[0])
