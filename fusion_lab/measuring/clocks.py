"""Clocks: times between marks, sums within ranges, quantiles."""
import time
from array import array

import numpy as np
import torch

MOST_PENDING = 1000  # steps of which events and losses stay on the device


class PhaseTimer:
    """Times between marks: CUDA events on a GPU (no synchronisation until read), perf_counter elsewhere.

    With names, enter(name) and leave() run round each phase as well: start() begins the first one, every
    mark() ends one and begins the next.
    """

    def __init__(self, device, names=(), enter=None, leave=None):
        self.on_gpu, self.names, self.enter, self.leave = device.type == "cuda", names, enter, leave
        self.steps = []  # marks of the steps that were not read yet
        self.read, self.phases = array("d"), len(names) or 1  # seconds of those that were, in a row

    def start(self):
        if len(self.steps) == MOST_PENDING:
            self.seconds()
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
        """(steps, phases) seconds between the marks of each step, or of the last ones only; a step that was
        broken off does not count. Events that were read are dropped, so that a long run does not keep
        them."""
        if self.steps and not self.read:
            self.phases = max(1, len(self.steps[0]) - 1)
        whole = [step for step in self.steps if len(step) == self.phases + 1]
        if self.on_gpu and whole:
            torch.cuda.synchronize()
        for marks in whole:
            self.read.extend(a.elapsed_time(b) / 1e3 if self.on_gpu else b - a
                             for a, b in zip(marks, marks[1:], strict=False))
        self.steps = self.steps[len(whole):]  # a step that was broken off can only be the last one
        return np.array(self.read).reshape(-1, self.phases)[-last:]


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
