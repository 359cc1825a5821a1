"""Clocks: times between marks, sums within ranges, quantiles."""
import time

import numpy as np
import torch


class PhaseTimer:
    """Times between marks: CUDA events on a GPU (no synchronisation until read), perf_counter elsewhere.

    With names, enter(name) and leave() run round each phase as well: start() begins the first one, every
    mark() ends one and begins the next.
    """

    def __init__(self, device, names=(), enter=None, leave=None):
        self.on_gpu, self.steps = device.type == "cuda", []
        self.names, self.enter, self.leave = names, enter, leave

    def start(self):
        self.steps.append([])
        self.mark()

    def mark(self):
        number = len(self.steps[-1])
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.steps[-1].append(event if self.on_gpu else time.perf_counter())
        if 0 < number <= len(self.names):
            self.leave()
        if number < len(self.names):
            self.enter(self.names[number])

    def seconds(self, last=0):
        """(steps, phases) seconds between the marks of each step, or of so many of the last ones; without a
        last one that was broken off."""
        if not self.steps:
            return np.empty((0, len(self.names)))
        steps = [step for step in self.steps[-last:] if len(step) == len(self.steps[0])]
        if self.on_gpu:
            torch.cuda.synchronize()
            return np.array([[a.elapsed_time(b) / 1e3 for a, b in zip(s, s[1:], strict=False)]
                             for s in steps])
        return np.diff(np.array(steps), axis=1)


class RangeSums:
    """enter and leave for ranges(): sums what clock() advances within each range, without the ranges nested
    in it. relabel(name), if given, is asked for the name under which to file a range that begins."""

    def __init__(self, clock, relabel=lambda name: name):
        self.clock, self.relabel, self.sums, self.stack = clock, relabel, {}, []

    def enter(self, name):
        self.stack.append([self.relabel(name), self.clock(), 0])

    def leave(self):
        name, began, nested = self.stack.pop()
        whole = self.clock() - began
        self.sums[name] = self.sums.get(name, 0) + whole - nested
        if self.stack:
            self.stack[-1][2] += whole


def quantiles(times):
    """(p20, median, p80) as floats."""
    return tuple(float(np.quantile(times, q)) for q in (0.2, 0.5, 0.8))
