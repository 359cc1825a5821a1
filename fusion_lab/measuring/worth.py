"""Is a fusion worth it? The share of the baseline's step in what it touches, what Amdahl's law then allows,
and how much of that was reached.

A switch touches a sub-layer if other operations run in it than in the baseline's, or on tensors of other
sizes: that is observed in one forward pass each, so no program has to say it.
"""
import time
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_lab.measuring.attribution import amounts_in_a_step, medians, share_samples
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.roofline import REST

STEPS = 5  # of the baseline, timed by sub-layer
UNKNOWN = dict(touched_sublayers=None, touched_share=None, amdahl_ceiling=None, amdahl_reached=None)


class Operations(TorchDispatchMode):
    """`found`: {sub-layer or REST: list of (operation, sizes)}; views are left out."""

    def __init__(self):
        super().__init__()
        self.stack, self.found = [REST], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            sizes = [(t.dtype, t.shape) for t in torch.utils._pytree.tree_leaves((args, kwargs))
                     if isinstance(t, torch.Tensor)]
            self.found.setdefault(self.stack[-1], []).append((func, sizes))
        return func(*args, **(kwargs or {}))


def operations_by_sublayer(trainer, batch):
    """{sub-layer or REST: its operations in a forward pass}, all its calls one after the other."""
    with Operations() as seen, ranges(trainer.model.sublayers(), seen.stack.append, seen.stack.pop):
        trainer.forward(batch)
    return seen.found


def touched(operations, baseline):
    """Names of the sub-layers, REST among them, in which other operations run than in the baseline's."""
    return [name for name in {**baseline, **operations} if operations.get(name) != baseline.get(name)]


def clock(device):
    """Seconds; on a GPU those after all work so far is done, so that each sub-layer has its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def shares_of_a_step(trainer, batch, steps):
    """{sub-layer or REST: its share of a step, forward and backward}, the median of so many steps."""
    amounts = []
    for _ in range(steps):
        amounts.append({})
        for (name, _), seconds in amounts_in_a_step(trainer, batch, partial(clock, trainer.device)).items():
            amounts[-1][name] = amounts[-1].get(name, 0.0) + seconds
    names = {name for sample in amounts for name in sample}
    return medians(share_samples(amounts, names))


def worth(names, shares, speedup):
    """What a row says of a setting that touches these sub-layers and is this much faster than the baseline.
    reached: the time saved, as a share of the time there was to save; below 0 for a loss."""
    if not names:
        return UNKNOWN
    share = min(sum(shares.get(name, 0.0) for name in names), 1.0)
    return dict(touched_sublayers=names, touched_share=share,
                amdahl_ceiling=1 / (1 - share) if share < 1 else None,
                amdahl_reached=(1 - 1 / speedup) / share if share else None)


def add_worth(rows, variants, shares):
    """Add it to the rows of variants whose operations are known, the baseline first."""
    for row, variant in zip(rows, variants, strict=True):
        if row["measured"]:
            row.update(worth(touched(variant.operations, variants[0].operations), shares, row["speedup"]))
