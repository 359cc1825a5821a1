"""Sums by sub-layer within a step: what --compare-fusion asks for."""
import numpy as np

from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.ranges import RECOMPUTE, REST, place_of, ranges


def amounts_in_a_step(trainer, batch, clock):
    """{(sub-layer or REST, direction or phase): what clock() advances in one step}, on CPU."""
    marks = []

    def relabel(name):  # a forward during backward is activation checkpointing at work
        return name if len(marks) == 1 or name.endswith(".backward") else f"{name}.{RECOMPUTE}"

    sums = RangeSums(clock, relabel)
    with trainer.preserved(), ranges(trainer.model.sublayers(), sums.enter, sums.leave, backward=True):
        marks.append(clock())
        trainer.step(batch, lambda: marks.append(clock()))
    result = {place_of(name): amount for name, amount in sums.sums.items()}
    forward, backward, optimizer = np.diff(marks).tolist()
    inside = sum(amount for (_, direction), amount in result.items() if direction == "forward")
    return {**result, (REST, "forward"): forward - inside, (REST, "optimizer"): optimizer,
            (REST, "backward"): backward - (sum(result.values()) - inside)}


def medians(samples):
    """Dicts of one step each -> {key: median over the steps}"""
    return {key: float(np.median([sample.get(key, 0.0) for sample in samples]))
            for key in dict.fromkeys(key for sample in samples for key in sample)}


def share_samples(samples, places):
    """Dicts of one step each -> the same as shares of the step, each with all places."""
    return [{place: sample.get(place, 0.0) / (sum(sample.values()) or 1.0) for place in places}
            for sample in samples]
