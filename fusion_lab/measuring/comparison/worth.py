"""Is a fusion worth it? The share of the baseline's step in what it touches, what Amdahl's law then allows,
and how much of that was reached.

A switch touches a sub-layer if other operations run in it than in the baseline's, or on tensors of other
sizes: that is observed in one forward pass each, so no program has to say it.
"""
import time
from functools import cache, partial

import torch

from fusion_lab.measuring.attribution import amounts_in_a_step, medians, share_samples
from fusion_lab.measuring.counters import OpCounter, is_view
from fusion_lab.measuring.flops import REST
from fusion_lab.measuring.ranges import ranges

STEPS = 5  # of the baseline, timed by sub-layer
ROUNDING = 1e-9  # of a sum of shares that is the whole step
UNKNOWN = dict(touched_sublayers=None, touched_share=None, amdahl_ceiling=None, amdahl_reached=None)


RANGE = "sub-layer: "  # before its name in the profiler's record


def operations_by_sublayer(trainer, batch):
    """{sub-layer or REST: [(operation, sizes of its tensors)]} of a forward pass: those that do work
    themselves. A matrix product may have views for children, what only calls others has those.

    The profiler watches from outside: FlexAttention compiles itself in eager code, and inside of a dispatch
    mode PyTorch neither compiles nor runs it.
    """
    open_ranges = []

    def enter(name):
        open_ranges.append(torch.profiler.record_function(RANGE + name))
        open_ranges[-1].__enter__()

    def leave():
        open_ranges.pop().__exit__(None, None, None)

    activities, found = [torch.profiler.ProfilerActivity.CPU], {}
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        with ranges(trainer.model.sublayers(), enter, leave):
            trainer.forward(batch)
    for event in profiler.events():
        if not (event.name.startswith(RANGE) or looks(event.name)
                or any(not looks(child.name) for child in event.cpu_children)):
            found.setdefault(sublayer_of(event), []).append((event.name, event.input_shapes))
    return found


def sublayer_of(event):
    """Name of the innermost sub-layer within which the profiler saw this event."""
    while event is not None and not event.name.startswith(RANGE):
        event = event.cpu_parent
    return event.name.removeprefix(RANGE) if event else REST


@cache
def looks(name):
    """Whether the operation of this name, "aten::view" for instance, is a view or a bare allocation."""
    name = name.removeprefix("aten::")
    overloads = getattr(torch.ops.aten, name, None)
    return name in OpCounter.ALLOCATIONS or overloads is not None and any(
        is_view(getattr(overloads, overload)) for overload in overloads.overloads())


def touched(operations, baseline):
    """Names of the sub-layers, REST among them, in which other operations run than in the baseline's."""
    return [name for name in {**baseline, **operations} if operations.get(name) != baseline.get(name)]


def clock(device):
    """Seconds; on a GPU those after all work so far is done, so that each sub-layer has its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def shares_of_a_step(trainer, batch, steps):
    """{sub-layer or REST: its share of a step, forward and backward}, the median of so many steps; medians
    need not add up to 1, so they are made to."""
    amounts = []
    for _ in range(steps):
        amounts.append({})
        for (name, _), seconds in amounts_in_a_step(trainer, batch, partial(clock, trainer.device)).items():
            amounts[-1][name] = amounts[-1].get(name, 0.0) + seconds
    names = {name for sample in amounts for name in sample}
    shares = medians(share_samples(amounts, names))
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items()}


def worth(names, shares, speedup):
    """What a row says of a setting that touches these sub-layers and is this much faster than the baseline.
    reached: the time saved, as a share of the time there was to save; below 0 for a loss."""
    if not names:
        return UNKNOWN
    share = sum(shares.get(name, 0.0) for name in names)
    share = 1.0 if share > 1 - ROUNDING else share
    return dict(touched_sublayers=names, touched_share=share,
                amdahl_ceiling=1 / (1 - share) if share < 1 else None,
                amdahl_reached=(1 - 1 / speedup) / share if share else None)


def add_worth(rows, variants, shares):
    """Add it to the rows of variants whose operations are known, the baseline first."""
    for row, variant in zip(rows, variants, strict=True):
        if row["measured"]:
            row.update(worth(touched(variant.operations, variants[0].operations), shares, row["speedup"]))
