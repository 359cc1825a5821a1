"""Every figure of a result against an independent count: of a run, a comparison and a session on a CPU.

The counts here share no code with the project's: PyTorch's FlopCounterMode, a dispatch mode that sees by
storages what is a view, weak references to storages, saved_tensors_hooks of its own.
Times cannot be counted twice; what is made of them can. Of (figure, in the file, expected) the last two must
be equal.
"""
import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tiny_openfold_v2 as tof
from fusion_lab.profiler import command
from tests.support import last_json

CPU, MB, PHASES = torch.device("cpu"), 2 ** 20, ("forward", "backward", "optimizer")
SMALL = "--device cpu --msa-dim 16 --pair-dim 16 --msa-heads 2 --pair-heads 4 --outer-product-dim 4".split()
RE_ASSOCIATED = "--batch-size 1 --num-seqs 3 --seq-len 13 --num-blocks 2".split()
NOTHING_FUSED = ("--batch-size 3 --num-seqs 6 --seq-len 8 --num-blocks 1 --disable-all-fusion "
                 "--use-amp --dropout 0.1").split()
RECOMPUTING = ("--batch-size 2 --num-seqs 5 --seq-len 10 --num-blocks 2 --ema-decay 0.9 "
               "--enable-selective-checkpointing --enable-projection-fusion").split()


def storages(*values):
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(values)
            if isinstance(t, torch.Tensor)}


class Count(TorchDispatchMode):
    """Operations that run, all and by the name that stands in `place`; and the most bytes of storages that
    were made within and are alive at once."""

    def __init__(self, place=lambda: None):
        super().__init__()
        self.launches, self.by_place, self.place, self.alive, self.peak = 0, Counter(), place, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = storages(args, kwargs)
        result = func(*args, **(kwargs or {}))
        made = {key: storage for key, storage in storages(result).items() if key not in given}
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.alive |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in made.items()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        name = func._schema.name.removeprefix("aten::")
        looks = storages(result) and not made and not func._schema.is_mutable
        if not looks and not name.startswith(("empty", "new_empty")):
            self.launches += 1
            self.by_place[self.place()] += 1
        return result


def count(settings):
    """What a step of these settings costs, counted here: the second one, as the first makes the optimizer's
    state."""
    trainer = tof.PROGRAM.trainer(tof.PROGRAM, settings, CPU)
    batch, model = tof.PROGRAM.data(settings).batch(0), trainer.model
    found = SimpleNamespace(first_loss=trainer.step(batch).item(), saved=Counter())
    own, seen, inside = storages(list(model.parameters()), list(model.buffers())), set(), ["rest"]

    def pack(tensor):
        (key, storage), = storages(tensor).items()
        if key not in own and key not in seen:
            seen.add(key)
            found.saved[inside[-1]] += storage.nbytes()
        return tensor.detach()
    hooks = [hook for block in model.blocks for name in tof.SUBLAYERS for hook in (
        getattr(block, name).register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
        getattr(block, name).register_forward_hook(lambda *_: inside.pop() and None, always_call=True))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with Count(lambda: inside[-1]) as forward:
            loss = trainer.forward(batch, only_loss=True)["loss"]
    for hook in hooks:
        hook.remove()
    del loss
    found.forward, found.saved_mb = forward.by_place, sum(found.saved.values()) / MB
    given = storages(list(model.parameters()), list(model.buffers()), list(batch.values()),
                     [list(state.values()) for state in trainer.optimizer.state.values()],
                     trainer.average.tensors if trainer.average else [])
    with Count() as whole:
        trainer.step(batch)
    found.launches = whole.launches
    found.peak_mb = (whole.peak + sum(storage.nbytes() for storage in given.values())) / MB
    product = {torch.ops.aten._addmm_activation: lambda bias, a, b, **_: 2 * a[0] * a[1] * b[1]}
    trainer = tof.PROGRAM.trainer(tof.PROGRAM, settings.having(
        enable_selective_checkpointing=False, enable_activation_checkpointing=False), CPU)
    with FlopCounterMode(display=False, custom_mapping=product) as flops, sdpa_kernel(SDPBackend.MATH):
        trainer.forward(batch, only_loss=True)["loss"].backward()
    found.flops = flops.get_total_flops()
    return found


def run(flags, directory, program=tof.main):
    """Seconds that a run in this process takes, which must succeed."""
    started = time.monotonic()
    assert program([*SMALL, *flags, "--warmup-steps", "1", "--profile-dir", str(directory)]) == 0
    return time.monotonic() - started


def settings_of(result):
    """The settings that a result was measured with."""
    parts = (result["config"], result["training_params"], result.get("fusion_config", {}))
    return tof.PROGRAM.settings(**{key: value for part in parts for key, value in part.items()
                                   if key != "ranks"})


def differing(rows):
    return [(figure, printed, expected) for figure, printed, expected in rows if printed != expected]


def of_a_run(figures, own, settings, seconds):
    """(figure, in the file, expected) of a training run."""
    steps, mean = settings.training.num_steps, figures["avg_batch_time"]
    yield "first loss", figures["first_loss"], own.first_loss
    yield "samples", figures["total_samples"], settings.training.batch_size * steps
    yield "phases", sum(figures[f"avg_{p}_time"] for p in ("data", *PHASES)), pytest.approx(mean)
    yield "within the run", 0 < mean * steps < seconds, True
    yield "peak", figures["peak_memory_mb"], own.peak_mb
    yield "saved", figures["saved_activation_mb"], own.saved_mb
    yield "launches", figures["launches_per_step"], own.launches
    yield "FLOPs", figures["flops_per_step"], own.flops


def test_a_training_run_says_what_was_counted(tmp_path, capsys):
    seconds = run([*RECOMPUTING, "--num-steps", "4", "--log-every", "2"], tmp_path)
    summary = last_json(capsys.readouterr().out)
    settings, figures = settings_of(summary), summary["performance_summary"]
    losses = [line["loss"] for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "loss" in line]
    rows = [*of_a_run(figures, count(settings), settings, seconds),
            ("losses", [figures[f"{which}_loss"] for which in ("first", "final", "avg")],
             [losses[0], losses[-1], pytest.approx(np.mean(losses))])]
    assert len(losses) == 4 and differing(rows) == []


def of_a_variant(row, baseline, own, first):
    """(figure, in the file, expected) of one row of the comparison."""
    steps, before = np.array(row["step_times"]), np.array(row["baseline_step_times"])
    ratios, median = sorted(before / steps), float(np.median(steps))
    for key, there, here in (("peak_memory", own.peak_mb, first.peak_mb),
                             ("launch", own.launches, first.launches),
                             ("saved_activation", own.saved_mb, first.saved_mb)):
        yield f"{key} saved", row[f"{key}_reduction_percent"], pytest.approx(100 * (1 - there / here))
    yield "rounds", (len(steps), len(before)), (7, 7)
    yield "peak", row["peak_memory_mb"], own.peak_mb
    yield "saved", row["saved_activation_mb"], own.saved_mb
    yield "launches", row["launches_per_step"], own.launches
    yield "FLOPs", row["flops_per_step"], own.flops
    yield "first loss", row["first_loss"], pytest.approx(baseline["first_loss"], rel=1e-2)
    yield "median", row["median_batch_time"], pytest.approx(median)
    yield "TFLOP/s", row["achieved_tflops"], pytest.approx(own.flops / median / 1e12)
    yield "speed-up", row["speedup"], pytest.approx(ratios[3])
    yield "interval", (row["speedup_low"], row["speedup_high"]), (None, None) if row is baseline else (
        pytest.approx(ratios[0]), pytest.approx(ratios[6]))  # of seven, all: 98%


@pytest.mark.slow
def test_a_comparison_says_what_was_counted(tmp_path, capsys):
    run([*NOTHING_FUSED, "--compare-fusion", "--num-steps", "7", "--variants",
         "fused only-selective-checkpointing given+transition-fusion"], tmp_path)
    result = last_json(capsys.readouterr().out)
    rows, settings = result["variants"], settings_of(result)
    owns = [count(replace(settings, fusion=tof.FusionConfig(**row["fusion_config"]))) for row in rows]
    assert len(rows) == 4 and differing(
        (f"{row['name']}: {figure}", found, expected) for row, own in zip(rows, owns, strict=True)
        for figure, found, expected in of_a_variant(row, rows[0], own, owns[0])) == []


def of_a_session(analysis, own, settings):
    """(figure, in the file, expected) of a profiler session."""
    entries, blocks = analysis["sublayers"], settings.model.num_blocks
    yield "FLOPs", analysis["flops_per_step"], own.flops
    yield "launches", analysis["launches_per_step"], own.launches
    yield "launches by sub-layer", sum(e["launches"] or 0 for e in entries), own.launches
    yield "launches forward", {e["name"]: e["launches"] for e in entries if e["direction"] == "forward"}, \
        dict(own.forward)
    yield "peak", analysis["memory_peak_mb"], own.peak_mb
    yield "saved", analysis["saved_activation_mb"], {name: size / MB for name, size in own.saved.items()}
    yield "saved by sub-layer", {e["name"]: e["saved_activation_mb"] for e in entries
                                 if e["direction"] == "forward"}, {
        name: own.saved[name] / MB for name in (*tof.SUBLAYERS, "rest")}
    yield "calls", {e["calls"] for e in entries if e["name"] != "rest"}, {blocks}
    yield "shares", sum(e["share"] for e in entries), pytest.approx(1)


@pytest.mark.slow
def test_a_session_says_what_was_counted(tmp_path, capsys):
    run([*RE_ASSOCIATED, "--profile-steps", "3"], tmp_path, command.run)
    analysis = last_json(capsys.readouterr().out)
    settings = settings_of(analysis)
    assert differing(of_a_session(analysis, count(settings), settings)) == []
