"""--compare-fusion: what every fusion buys, measured here and now.

Variants without torch.compile are first measured alone (peak memory, saved activations, launches), then all
are alive at once with equal weights and their steps alternate, so that a machine that drifts hits all alike.
A compiled one is a process of its own (rung.py), where its steps alternate with the baseline's: on a GPU all
of them compile at the same time and then measure one by one, on a CPU one follows the other.
"""
import contextlib
import gc
import os
import time
from datetime import datetime, timezone

import torch
from tqdm import tqdm

from fusion_lab.measuring.bounds.ceilings import matmul_ceiling
from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.comparison.rows import rows_of, switch_effects
from fusion_lab.measuring.comparison.rungs import Rungs
from fusion_lab.measuring.comparison.table import LiveTable, print_details
from fusion_lab.measuring.comparison.variants import (
    ALL,
    AS_GIVEN,
    BASELINE,
    UNMEASURED,
    Variant,
    combination_variants,
    comparison_variants,
    pick,
    refuse_idle,
    with_fusion,
)
from fusion_lab.measuring.comparison.worth import STEPS, add_worth, operations_by_sublayer, shares_of_a_step
from fusion_lab.measuring.probe import counts_its_first_step, peak_of_two_steps, probe
from fusion_lab.measuring.summary import dtype_name, launch_kind
from fusion_lab.training.feeding import to_device
from fusion_lab.training.files import StopRequest, require_writable, set_aside, write_json
from fusion_lab.training.machine import MEGABYTE, choose_device, process_settings, system_info
from fusion_lab.training.reporting import print_result

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


def alternate(variants, steps, supply, stop):
    """Timed steps of all variants in turn, each round beginning with another one; a signal in stop ends them
    after a whole round. Weights, optimizers and random numbers are afterwards what they were."""
    with contextlib.ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant.trainer.preserved())
        for number in tqdm(range(steps), disable=None, desc="rounds", leave=False):
            alive = [variant for variant in variants if not variant.reason]
            first = number % len(alive)
            for variant in alive[first:] + alive[:first]:
                take_turn(variant, number, supply[number % len(supply)])
            if stop and stop.signal is not None:
                break


def refuse_equal(variant, baseline):
    """Give a variant its reason if its step turned out to be the baseline's, as on a CPU at sizes at which a
    fusion does not pay; its timing would be a third of a minute of noise."""
    if variant.found and variant.found.operations and variant.found.operations == baseline.found.operations:
        variant.reason = f"here it runs the same {variant.found.launches} operations as the baseline"
        variant.trainer = None


def measure(program, variants, device, source, stop=None, gate=None, note=lambda text: None, equal=True):
    """Measure variants, the baseline first, within one process: each alone, unless that is known already,
    then steps in turn within the context manager gate. Their trainers stay alive in variant.trainer.
    note(text) hears what goes on. equal: also those whose operations are the baseline's."""
    settings = variants[0].settings
    steps = settings.training.num_steps
    supply = [to_device(source.batch(i), device) for i in range(min(steps, MOST_BATCHES))]
    for number, variant in enumerate(variants, 1):
        if number > 1 and stop and stop.signal is not None:  # every row needs the baseline
            break
        if variant.found is None:
            note(f"{variant.name}: memory and launches, {number} of {len(variants)}")
            measure_alone(program, variant, device, supply[0])
            if number > 1 and not equal and variant.name not in (ALL, AS_GIVEN):
                refuse_equal(variant, variants[0])
            release()
    measured = [variant for variant in variants if variant.found and not variant.reason]
    if device.type == "cuda" and any(variant.compiled for variant in measured):
        torch._dynamo.reset()  # compiled code of models that are gone would be tried first in every step
    weights = program.trainer(program, settings, device).model.state_dict()
    for variant in measured:
        process_settings(variant.settings, device)
        bring_to_life(program, variant, device, weights, supply[0])
        release()
    measured = [variant for variant in measured if not variant.reason]
    note(f"{len(measured)} variants in turn, {steps} steps of each")
    with gate or contextlib.nullcontext():
        alternate(measured, steps, supply, stop)
    for variant in variants:
        variant.reason = variant.reason or (None if variant.losses else UNMEASURED)


def apart_from(baseline):
    """The baseline once more, to take turns with others; what it is alone is known."""
    return Variant(BASELINE, baseline.settings, found=baseline.found, operations=baseline.operations,
                   trainer=baseline.trainer)


def baseline_shares(baseline, source, stop=None):
    """{sub-layer: its share of the baseline's step}, in a hurry of one step."""
    trainer = baseline.trainer
    process_settings(baseline.settings, trainer.device)
    hurry = stop and stop.signal is not None
    return shares_of_a_step(trainer, to_device(source.batch(0), trainer.device), 1 if hurry else STEPS)


def compare(program, settings, variants=None, combinations=False, picked=None, stop=None, table=None):
    """The comparison as one dict, that of fusion_comparison_*.json. variants replace those that the switches
    suggest, of which picked chooses by name; table, a LiveTable, hears of every row as soon as it is known.
    Trainers that ran in this process stay in variant.trainer."""
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    source, table, suggested = program.open_source(settings), table or LiveTable(), variants is None
    if suggested:
        variants = (combination_variants(program, settings) if combinations
                    else comparison_variants(program, settings, device.type == "cuda"))
    variants = pick(variants, picked) if picked else variants
    equal = bool(picked or combinations)  # who asks for a row gets it
    together, compiled = ([v for v in variants if v.compiled is how] for how in (False, True))
    later = []
    if suggested and not combinations:  # first the table that people ask for
        cut = next((i for i, v in enumerate(together, 1) if v.name == ALL), len(together))
        together, later = together[:cut], together[cut:]
    result = dict(mode="compare_fusion", timestamp=datetime.now(timezone.utc).isoformat(),
                  **{k: v for k, v in settings.as_dict().items() if k in ("config", "training_params")},
                  system_info=system_info(device), launch_kind=launch_kind(device),
                  nominal=program.statistics(with_fusion(settings, program.fusion_config())))
    with Rungs(program, compiled, device, table.note) as rungs:
        measure(program, together, device, source, stop, rungs.paused(), table.note, equal)
        amp_dtype = together[0].trainer.amp_dtype
        ceiling = matmul_ceiling(device, amp_dtype or torch.float32)
        result["training_params"]["amp_dtype"] = dtype_name(amp_dtype)
        rows = rows_of(together, ceiling)
        with rungs.paused():
            shares = baseline_shares(together[0], source, stop)
        add_worth(rows, together, shares)
        result.update(matmul_ceiling_tflops=ceiling / 1e12, variants=rows)
        table.begin(result, [variant.name for variant in variants])
        if later:
            later = [apart_from(together[0]), *later]
            measure(program, later, device, source, stop, rungs.paused(), table.note, equal)
            more = rows_of(later, ceiling)
            add_worth(more, later, shares)
            rows += more[1:]
            table.add(result)
        if device.type == "cuda" and compiled:
            release([v for v in (*together, *later) if v.name != BASELINE])  # memory for those
        for row in rungs.measure(rows[0], ceiling, stop):
            rows.append(row)
            table.add(result)
    result["switch_effects"] = switch_effects(program, rows) if combinations else None
    return result


def compare_fusion(program, settings, picked=None, combinations=False):
    """--compare-fusion: measure, print, write fusion_comparison_*.json anew with each row; exit code 0, or
    that of the signal that ended it early."""
    device = choose_device(settings.training.device)
    path = os.path.join(settings.profiler.profile_dir, program.result("fusion_comparison"))
    require_writable(path)
    print(f"Device: {device} | torch {torch.__version__} | {program.sample(settings)} | "
          f"{settings.training.num_steps} steps of every variant, in turn", flush=True)
    earlier = [path]

    def save(result):
        while earlier:  # only now that there is something to put in its place
            set_aside(earlier.pop())
        write_json(path, result)

    table = LiveTable(save)
    with StopRequest() as stop:
        result = compare(program, settings, None, combinations, picked, stop=stop, table=table)
    save(result)
    print_details(result)
    if stop.signal is not None:
        print("Interrupted: these figures are of the rounds before it")
    print_result(dict(mode=result["mode"], variants=[
        {key: row[key] for key in ("name", "speedup") if key in row} for row in result["variants"]]),
        path, settings)
    return 128 + stop.signal if stop.signal is not None else 0
