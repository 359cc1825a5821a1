"""From a Chrome trace of torch.profiler to "which sub-layer, forward or backward, took how long".

An operation belongs to the named range that is open on its thread when it starts; a GPU kernel to the range
open where the CPU launched it (both events carry the same correlation number). Backward ranges are opened on
autograd's own thread, so the same rule holds there. What no sub-layer's range holds belongs to the phase of
the step, by time alone: "rest". All times in microseconds, all sums per step.
"""
import bisect
import json
from collections import Counter, defaultdict

from fusion_lab.measuring.kinds import kind_of_kernel
from fusion_lab.measuring.ranges import PHASES, RECOMPUTE, REST, place_of
from fusion_lab.measuring.roctx import BLIND, GRAPHS
from fusion_lab.measuring.spans import IMPOSSIBLE, Span, possible
from fusion_lab.training.machine import MEGABYTE

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
JITTER = 1.0  # µs by which one clock may be off against itself
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
OUTSIDE, NOT_RECORDED = "outside steps", "launch not recorded"  # what has no phase


def read_trace(path):
    """The events of a trace file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def sweep(events):
    """For events of one thread, by (start, -duration): yields (time, index of the innermost event that is
    open from then on, or None)."""
    stack = []
    for index in sorted(range(len(events)), key=lambda i: (events[i]["ts"], -events[i]["dur"])):
        start = events[index]["ts"]
        while stack and stack[-1][0] <= start:
            yield stack.pop()[0], stack[-1][1] if stack else None
        stack.append((start + events[index]["dur"], index))
        yield start, index
    while stack:
        yield stack.pop()[0], stack[-1][1] if stack else None


def possible_events(events):
    """(the events that count, with possible durations; the number of impossible durations)"""
    def span(event):
        arguments = event.get("args", {})
        queue = (event.get("pid"), event["tid"]) if event.get("cat") in GPU_WORK else None
        launch = arguments.get("correlation") if queue else None
        return Span(event["name"], event["ts"], event["ts"] + event["dur"], queue, launch, launch)

    spans = [*map(span, events)]
    kept, impossible = possible(spans, JITTER)
    return [event if now == span else dict(event, dur=now.time)
            for event, span, now in zip(events, spans, kept, strict=True) if now], impossible


def by_thread(events):
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    return threads


class Ranges:
    """Named ranges, nested or one after another; find(thread, time) names the innermost one that is open."""

    def __init__(self, events):
        self.changes = {}
        for thread, own in by_thread(events).items():
            changes = [(time, None if index is None else own[index]["name"]) for time, index in sweep(own)]
            self.changes[thread] = [time for time, _ in changes], [name for _, name in changes]

    def find(self, thread, time):
        times, names = self.changes.get(thread, ([], []))
        position = bisect.bisect_right(times, time) - 1
        return names[position] if position >= 0 else None


def with_own_times(events):
    """[(event, its duration without the events nested in it), ...]"""
    result = []
    for own in by_thread(events).values():
        times, inner, since = [0.0] * len(own), None, None
        for time, index in sweep(own):
            if inner is not None:
                times[inner] += time - since
            inner, since = index, time
        result += zip(own, times, strict=True)
    return result


class TraceAnalysis:
    """A trace, reduced to sums per sub-layer and per kernel (per CPU operation where there is no GPU)."""

    def __init__(self, events, sublayers):
        spans, self.impossible = possible_events([e for e in events if e.get("ph") == "X" and "dur" in e])
        names = {*sublayers, *(f"{name}.backward" for name in sublayers)}
        marks = [e for e in spans if e.get("cat") == "user_annotation"]
        self.named = [e for e in marks if e["name"] in names]
        self.phases = [e for e in marks if e["name"] in PHASES]
        self.begins = sorted(e["ts"] for e in self.phases if e["name"] == "forward")
        self.steps = len(self.begins) or 1
        self.ranges = Ranges(self.named)
        self.phase_at = Ranges([dict(e, tid=0) for e in self.phases])
        self.work = [e for e in spans if e.get("cat") in GPU_WORK]
        self.on_gpu = bool(self.work)
        self.launch = {e["args"]["correlation"]: e for e in spans
                       if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}
        # (event, µs): pieces of GPU work, or operations without those that they call
        self.pieces = ([(e, e["dur"]) for e in self.work] if self.on_gpu else
                       with_own_times([e for e in spans if e.get("cat") == "cpu_op"]))
        self.memory = [e for e in events if e.get("name") == "[memory]" and "Bytes" in e["args"]
                       and (e["args"]["Device Type"] == 0) != self.on_gpu]  # of the device where the work is

    def place(self, thread, time):
        """(sub-layer or REST, direction or phase) of something that happens on a thread at a time."""
        name, phase = self.ranges.find(thread, time), self.phase_at.find(0, time)
        if name is None:
            return REST, phase or OUTSIDE
        sublayer, direction = place_of(name)
        return sublayer, RECOMPUTE if direction == "forward" and phase == "backward" else direction

    def launch_of(self, kernel):
        """The event on the CPU that launched a piece of GPU work, or None."""
        return self.launch.get(kernel.get("args", {}).get("correlation"))

    def sublayer_table(self):
        """{(sub-layer, direction): sums}: calls, device_us and launches (of GPU work; None without a GPU),
        allocated_mb (None if the trace has no memory events)."""
        sums = defaultdict(lambda: dict(calls=0, device_us=0.0 if self.on_gpu else None,
                                        launches=0 if self.on_gpu else None,
                                        allocated_mb=0 if self.memory else None))
        for event in self.phases:
            sums[REST, event["name"]]["calls"] += 1
        for event in self.named:
            sums[self.place(event["tid"], event["ts"])]["calls"] += 1
        for event in self.work:
            launch = self.launch_of(event)
            entry = sums[self.place(launch["tid"], launch["ts"]) if launch else (REST, NOT_RECORDED)]
            entry["device_us"] += event["dur"]
            entry["launches"] += event["cat"] == "kernel"
        for event in self.memory:
            sums[self.place(event["tid"], event["ts"])]["allocated_mb"] += (
                max(0, event["args"]["Bytes"]) / MEGABYTE)
        return {key: {k: v if v is None else v / self.steps for k, v in entry.items()}
                for key, entry in sorted(sums.items())}

    def kernel_table(self):
        """Dicts of name, kind, calls, self_us, launches and share, the longest first: GPU work by name, or on
        a CPU operations, which have no kind and no launches; shares are of all own times."""
        sums, total = defaultdict(Counter), sum(own for _, own in self.pieces) or 1.0
        for event, own in self.pieces:
            sums[event["name"]].update(calls=1, self_us=own, launches=event["cat"] == "kernel")
        rows = [dict(name=name, kind=kind_of_kernel(name) if self.on_gpu else None,
                     calls=entry["calls"] / self.steps, self_us=entry["self_us"] / self.steps,
                     launches=entry["launches"] / self.steps if self.on_gpu else None,
                     share=entry["self_us"] / total) for name, entry in sums.items()]
        return sorted(rows, key=lambda entry: -entry["self_us"])

    def unrecorded(self, graph_kernels=None):
        """Sentences on what the profiler did not record, or recorded wrongly. graph_kernels: how many kernels
        a replay of the graph runs."""
        wrong = [IMPOSSIBLE.format(self.impossible)] * bool(self.impossible)
        launches = {number: event for number, event in self.launch.items() if "Launch" in event["name"]}
        if launches and not self.on_gpu:
            return [f"{len(launches)} launches and no kernel were recorded. {BLIND}", *wrong]
        replays = {number for number, event in launches.items() if "GraphLaunch" in event["name"]}
        kernels = [e for e in self.work if e["cat"] == "kernel" and self.launch_of(e)]
        recorded = sum(e["args"]["correlation"] in replays for e in kernels)
        expected = len(replays) * (graph_kernels or 0)
        by_step = Counter(bisect.bisect_right(self.begins, self.launch_of(e)["ts"]) for e in kernels)
        counts = [by_step[number + 1] for number in range(len(self.begins))] or [0]
        lost = [f"{recorded} of {expected} kernels of the graph's replays were recorded. {GRAPHS}"]
        differ = [f"The steps have {min(counts)} to {max(counts)} kernels: they differ, or the profiler lost "
                  "some."]
        return lost * (recorded < expected) + differ * (min(counts) < max(counts)) + wrong

    def memory_timeline(self):
        """[(microseconds since the first event, live bytes counted from there), ...]"""
        events, live, line = sorted(self.memory, key=lambda e: e["ts"]), 0, []
        for event in events:
            live += event["args"]["Bytes"]
            line.append((event["ts"] - events[0]["ts"], live))
        return line

    def phase_begins(self):
        """[(microseconds since the first event of the timeline, phase), ...]"""
        first = min((e["ts"] for e in self.memory), default=0.0)
        return [(e["ts"] - first, e["name"]) for e in self.phases]

    def gpu_busy(self):
        """Microseconds per step in which at least one kernel ran; None without a GPU."""
        if not self.on_gpu:
            return None
        busy, end = 0.0, float("-inf")
        for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in self.work):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return busy / self.steps

    def step_us(self):
        """Microseconds per step by the host's clock, as traced (the profiler's own cost included)."""
        return sum(e["dur"] for e in self.phases) / self.steps
