"""From a Chrome trace of torch.profiler to "which sub-layer, forward or backward, took how long".

An operation belongs to the named range that is open on its thread when it starts; a GPU kernel to the range
open where the CPU launched it (both events carry the same correlation number). Backward ranges are opened on
autograd's own thread, so the same rule holds there. What no sub-layer's range holds belongs to the phase of
the step, by time alone: "rest". All times in microseconds, all sums per step.
"""
import bisect
import gzip
import json
from collections import defaultdict

from fusion_lab.measuring.flops import REST
from fusion_lab.measuring.kinds import kind_of_kernel, kind_of_operation
from fusion_lab.measuring.roctx import BLIND, GRAPHS

PHASES = ("data", "forward", "backward", "optimizer")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
OUTSIDE, NOT_RECORDED = "outside steps", "launch not recorded"  # phases of what has none
RECOMPUTE = "recompute"  # forward once more, during backward: activation checkpointing


def read_trace(path):
    """The events of a trace file, plain or gzipped."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


class Ranges:
    """Named ranges, nested or one after another; find(thread, time) names the innermost one that is open."""

    def __init__(self, events):
        by_thread = defaultdict(list)
        for event in events:
            by_thread[event["tid"]].append((event["ts"], -event["dur"], event["name"]))
        self.changes = {thread: self.flatten(sorted(spans)) for thread, spans in by_thread.items()}

    @staticmethod
    def flatten(spans):
        """([times], [name from that time on, None outside]) of one thread's (start, -duration, name)."""
        times, names, stack = [], [], []

        def close(until):
            while stack and stack[-1][0] <= until:
                end, _ = stack.pop()
                times.append(end)
                names.append(stack[-1][1] if stack else None)

        for start, duration, name in spans:
            close(start)
            stack.append((start - duration, name))
            times.append(start)
            names.append(name)
        close(float("inf"))
        return times, names

    def find(self, thread, time):
        times, names = self.changes.get(thread, ([], []))
        position = bisect.bisect_right(times, time) - 1
        return names[position] if position >= 0 else None


def own_times(events):
    """{index of an event: its duration without the events nested in it}, for events of one thread."""
    order = sorted(range(len(events)), key=lambda i: (events[i]["ts"], -events[i]["dur"]))
    own, stack = {}, []
    for i in order:
        start = events[i]["ts"]
        while stack and events[stack[-1]]["ts"] + events[stack[-1]]["dur"] <= start:
            stack.pop()
        own[i] = events[i]["dur"]
        if stack:
            own[stack[-1]] -= events[i]["dur"]
        stack.append(i)
    return own


def split_name(name):
    """"mlp.backward" -> ("mlp", "backward"), "mlp" -> ("mlp", "forward")"""
    sublayer, _, direction = name.rpartition(".")
    return (sublayer, direction) if direction in ("backward", RECOMPUTE) else (name, "forward")


class TraceAnalysis:
    """A trace, reduced to sums per sub-layer and per kernel (per CPU operation where there is no GPU)."""

    def __init__(self, events, sublayers):
        spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
        names = {*sublayers, *(f"{name}.backward" for name in sublayers)}
        self.marks = [e for e in spans if e.get("cat") == "user_annotation"]
        self.named = [e for e in self.marks if e["name"] in names]
        self.phases = [e for e in self.marks if e["name"] in PHASES]
        self.steps = sum(e["name"] == "forward" for e in self.phases) or 1
        self.ranges = Ranges(self.named)
        self.phase_at = Ranges([dict(e, tid=0) for e in self.phases])
        self.operations = [e for e in spans if e.get("cat") == "cpu_op"]
        self.work = [e for e in spans if e.get("cat") in GPU_WORK]
        self.on_gpu = bool(self.work)
        self.own = self.times_within(self.operations)
        self.named_own = self.times_within(self.named)
        self.launch = {e["args"]["correlation"]: e for e in spans
                       if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}
        self.memory = [e for e in events if e.get("name") == "[memory]"]

    @staticmethod
    def times_within(events):
        """{position: own time} of events on any number of threads. Operations and ranges are never mixed: a
        backward range begins within one of autograd's operations and ends within another."""
        by_thread, own = defaultdict(list), {}
        for position, event in enumerate(events):
            by_thread[event["tid"]].append(position)
        for positions in by_thread.values():
            times = own_times([events[position] for position in positions])
            own.update({positions[i]: time for i, time in times.items()})
        return own

    def place(self, thread, time):
        """(sub-layer or REST, direction or phase) of something that happens on a thread at a time."""
        name, phase = self.ranges.find(thread, time), self.phase_at.find(0, time)
        if name is None:
            return REST, phase or OUTSIDE
        sublayer, direction = split_name(name)
        return sublayer, RECOMPUTE if direction == "forward" and phase == "backward" else direction

    def place_of_kernel(self, kernel):
        """place() of a kernel's launch on the CPU; (REST, NOT_RECORDED) where the trace lacks that."""
        launch = self.launch_of(kernel)
        return self.place(launch["tid"], launch["ts"]) if launch else (REST, NOT_RECORDED)

    def launch_of(self, kernel):
        """The event on the CPU that launched a piece of GPU work, or None."""
        return self.launch.get(kernel.get("args", {}).get("correlation"))

    def sublayer_table(self):
        """{(sub-layer, direction): sums}: calls, host_us (the range's time on the CPU, operations and
        Python), device_us and launches (of GPU work; None without a GPU), operations_us (own time of CPU
        operations), allocated_bytes (None if the trace has no memory events)."""
        sums = defaultdict(lambda: dict(calls=0, host_us=0.0, device_us=0.0 if self.on_gpu else None,
                                        launches=0 if self.on_gpu else None, operations_us=0.0,
                                        allocated_bytes=0 if self.memory else None))
        for phase in self.phases:
            entry = sums[REST, phase["name"]]
            entry["calls"] += 1
            entry["host_us"] += phase["dur"]
        for position, event in enumerate(self.named):
            entry = sums[self.place(event["tid"], event["ts"])]
            entry["calls"] += 1
            entry["host_us"] += self.named_own[position]
            phase = self.phase_at.find(0, event["ts"]) or OUTSIDE
            sums[REST, phase]["host_us"] -= self.named_own[position]
        for position, event in enumerate(self.operations):
            sums[self.place(event["tid"], event["ts"])]["operations_us"] += self.own[position]
        for event in self.work:
            entry = sums[self.place_of_kernel(event)]
            entry["device_us"] += event["dur"]
            entry["launches"] += event["cat"] == "kernel"
        for event in self.memory:
            if self.counts(event) and event["args"]["Bytes"] > 0:
                sums[self.place(event["tid"], event["ts"])]["allocated_bytes"] += event["args"]["Bytes"]
        return {key: {k: v if v is None else v / self.steps for k, v in entry.items()}
                for key, entry in sorted(sums.items())}

    def device_us_by_step(self):
        """[{(sub-layer, direction): µs of GPU work}, ...], a dict for each step, by the time of the launch,
        or of the work itself where its launch was not recorded."""
        begins = sorted(e["ts"] for e in self.phases if e["name"] == "forward")
        steps = [defaultdict(float) for _ in begins]
        for event in self.work:
            step = bisect.bisect_right(begins, (self.launch_of(event) or event)["ts"]) - 1
            if step >= 0:
                steps[step][self.place_of_kernel(event)] += event["dur"]
        return steps

    def unrecorded(self, graph_kernels=None):
        """What the profiler did not record, in sentences; graph_kernels: how many a graph's replay runs."""
        launches = {number: event for number, event in self.launch.items() if "Launch" in event["name"]}
        if launches and not self.on_gpu:
            return [f"{len(launches)} launches and no kernel were recorded. {BLIND}"]
        replays = {number: 0 for number, event in launches.items() if "GraphLaunch" in event["name"]}
        begins = sorted(e["ts"] for e in self.phases if e["name"] == "forward")
        steps = [0] * (len(begins) + 1)  # the first for what was launched before them
        for kernel in (event for event in self.work if event["cat"] == "kernel" and self.launch_of(event)):
            launch = self.launch_of(kernel)
            steps[bisect.bisect_right(begins, launch["ts"])] += 1
            if kernel["args"]["correlation"] in replays:
                replays[kernel["args"]["correlation"]] += 1
        recorded, expected = sum(replays.values()), len(replays) * (graph_kernels or 0)
        lost = [f"{recorded} of {expected} kernels of the graph's replays were recorded. {GRAPHS}"]
        fewest, most = min(steps[1:], default=0), max(steps[1:], default=0)
        differ = [f"The steps have {fewest} to {most} kernels: they differ, or the profiler lost some."]
        return lost * (recorded < expected) + differ * (fewest < most)

    def innermost(self, points):
        """Position in self.operations of the innermost one open at each (thread, time), or None."""
        by_thread, innermost = defaultdict(list), [None] * len(points)
        for position, event in enumerate(self.operations):
            by_thread[event["tid"]].append((event["ts"], -event["dur"], position, None))
        for question, (thread, time) in enumerate(points):
            by_thread[thread].append((time, 0.0, None, question))
        for entries in by_thread.values():
            stack = []
            for time, duration, position, question in sorted(entries, key=lambda entry: entry[:2]):
                while stack and stack[-1][0] < time:
                    stack.pop()
                if question is None:
                    stack.append((time - duration, position))
                elif stack:
                    innermost[question] = stack[-1][1]
        return innermost

    def allocations(self):
        """{position in self.operations: bytes it allocated itself on the device where the work is}."""
        events = [e for e in self.memory if self.counts(e) and e["args"]["Bytes"] > 0]
        sizes = defaultdict(int)
        places = self.innermost([(e["tid"], e["ts"]) for e in events])
        for event, position in zip(events, places, strict=True):
            sizes[position] += event["args"]["Bytes"]
        return sizes

    def counts(self, memory_event):
        """Is this about memory of the device where the work is?"""
        return "Bytes" in memory_event["args"] and (memory_event["args"]["Device Type"] == 0) != self.on_gpu

    def operator_of_work(self):
        """For every piece of GPU work, the position of the CPU operation that launched it, or None."""
        launches = [self.launch_of(event) for event in self.work]
        known = [launch for launch in launches if launch]
        positions = iter(self.innermost([(launch["tid"], launch["ts"]) for launch in known]))
        return [next(positions) if launch else None for launch in launches]

    def kernel_table(self):
        """[{name, kind, calls, self_us, total_us, launches, allocated_bytes}, ...], the longest first: GPU
        work by kernel name with what the launching operation allocated (counted once), or on CPU the
        operations, whose total includes what they call."""
        sums = defaultdict(lambda: dict(calls=0, self_us=0.0, total_us=0.0, launches=0,
                                        allocated_bytes=0))
        sizes = self.allocations()
        places = self.operator_of_work() if self.on_gpu else range(len(self.operations))
        for position, event in zip(places, self.work or self.operations, strict=True):
            entry = sums[event["name"]]
            entry["calls"] += 1
            entry["self_us"] += event["dur"] if self.on_gpu else self.own[position]
            entry["total_us"] += event["dur"]
            entry["launches"] += event["cat"] == "kernel"
            entry["allocated_bytes"] += sizes.pop(position, 0)
        kind_of = kind_of_kernel if self.on_gpu else kind_of_operation
        rows = [dict(name=name, kind=kind_of(name), **{k: v / self.steps for k, v in entry.items()})
                for name, entry in sums.items()]
        for entry in rows:
            if not self.on_gpu:
                entry["launches"] = None  # an operation is called here, not launched
            if not self.memory:
                entry["allocated_bytes"] = None
        return sorted(rows, key=lambda entry: -entry["self_us"])

    def memory_timeline(self):
        """[(microseconds since the first event, live bytes counted from there), ...]"""
        events = sorted((e for e in self.memory if self.counts(e)), key=lambda e: e["ts"])
        live, line = 0, []
        for event in events:
            live += event["args"]["Bytes"]
            line.append((event["ts"] - events[0]["ts"], live))
        return line

    def phase_begins(self):
        """[(microseconds since the first event of the timeline, phase), ...]"""
        first = min((e["ts"] for e in self.memory if self.counts(e)), default=0.0)
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

    def durations(self):
        """Durations (µs) of all GPU kernels, or own times of all CPU operations."""
        kernels = [e["dur"] for e in self.work if e["cat"] == "kernel"]
        return kernels if self.on_gpu else list(self.own.values())
