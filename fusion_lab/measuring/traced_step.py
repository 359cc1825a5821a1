"""A traced step as a picture shows it: what it launched and when, and what it wrote to new tensors."""
import bisect
import functools
from dataclasses import dataclass

import torch

from fusion_lab.measuring.counters import OpCounter, is_view
from fusion_lab.measuring.trace import TraceAnalysis, by_thread, read_trace
from fusion_lab.training.errors import UserError


@dataclass
class Step:
    """Times in µs; on_gpu: whether the marks are kernels and copies, else operations of the CPU."""
    on_gpu: bool
    marks: list      # [(start since the first mark, length, phase)]
    new_bytes: int   # of the tensors that the step allocated

    @property
    def length(self):
        """µs from the first mark to the end of the last one."""
        return max((start + length for start, length, _ in self.marks), default=0.0)


@functools.cache
def works(name):
    """Whether an operation of a trace does work itself, as OpCounter sees it; False of views and allocations,
    None where what it calls does the work (linear: addmm) and where it is no operation of PyTorch."""
    if "cpp_fused" in name:  # torch.compile's, recorded with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1
        return True
    space, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), plain, None) if plain else None
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    found = [op for op in overloads if torch._C._dispatch_has_kernel(op.name())]  # not those of TorchScript
    composite = "CompositeImplicitAutograd"
    if not found or any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite) for op in found):
        return None
    return plain not in OpCounter.ALLOCATIONS and not any(map(is_view, found))


def operations(events):
    """Those operations of a CPU that do work, without the ones that they call."""
    for own in by_thread(events).values():
        end = 0.0
        for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            if event["ts"] >= end and works(event["name"]) is not None:
                end = event["ts"] + event["dur"]
                if works(event["name"]):
                    yield event


def fastest_step(path):
    """The Step of a Chrome trace, which --enable-pytorch-profiler wrote, that took the least time.
    Raises UserError."""
    trace = TraceAnalysis(read_trace(path), ())
    steps = [([], []) for _ in range(len(trace.begins) + 1)]  # the first one is what comes before them

    def step_at(time):
        return steps[bisect.bisect_right(trace.begins, time)]

    made = trace.work if trace.on_gpu else operations(event for event, _ in trace.pieces)
    for event in sorted(made, key=lambda event: event["ts"]):
        source = trace.launch_of(event) or event  # on the CPU, where phases are
        step_at(source["ts"])[0].append((event["ts"], event["dur"], trace.phase_at.find(0, source["ts"])))
    for event in trace.memory:
        step_at(event["ts"])[1].append(max(0, event["args"]["Bytes"]))
    found = [Step(trace.on_gpu, [(start - marks[0][0], *rest) for start, *rest in marks], sum(sizes))
             for marks, sizes in steps[1:] if marks]
    if not found:
        raise UserError(f"{path}: a trace without a training step")
    return min(found, key=lambda step: step.length)
