"""What the traces of one run say: how busy the GPU was, which range launched what, what graphs ran."""
import pathlib
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from fusion_lab.measuring.spans import possible
from fusion_lab.rocm.records import JITTER, TIMES, add_up, read_rows, read_spans, result_files

OUTSIDE = "outside all ranges"
REPLAY = "hipGraphLaunch"


class Trace(NamedTuple):
    """What one process did; times are in nanoseconds."""
    kernels: list  # (GPU, number of the HIP call, start, end)
    calls: list    # HIP: (function, thread, number, start)
    ranges: list   # (name, thread, start, end)


def read_traces(directory):
    """A Trace of every process of which kernels or HIP calls were traced."""
    def rows(prefix, what, *names, numbers):
        path = pathlib.Path(f"{prefix}{what}_trace.csv")
        return list(read_rows(path, *names, numbers=numbers)) if path.exists() else []

    def kernels(prefix):
        found = rows(prefix, "kernel", "agentid", numbers=("correlationid", *TIMES))
        spans, _ = possible(read_spans(pathlib.Path(f"{prefix}kernel_trace.csv")) if found else [], JITTER)
        return [(*of[:2], span.start, span.end) for of, span in zip(found, spans, strict=True) if span]
    prefixes = {re.sub(r"(kernel|hip_api)_trace\.csv$", "", str(path)) for what in ("kernel", "hip_api")
                for path in result_files(directory, f"*{what}_trace.csv")}
    return [Trace(kernels(prefix),
                  rows(prefix, "hip_api", "function", "threadid", numbers=("correlationid", TIMES[0])),
                  rows(prefix, "marker_api", "function", "threadid", numbers=TIMES))
            for prefix in sorted(prefixes)]


def blind(traces):
    """Launches of the processes that recorded none of their kernels."""
    return sum("Launch" in function for trace in traces if not trace.kernels for function, *_ in trace.calls)


def replays(traces):
    """[number of kernels that each launch of a graph was recorded to run]"""
    counts = []
    for trace in traces:
        launched = Counter(number for _, number, _, _ in trace.kernels)
        counts += [launched[number] for function, _, number, _ in trace.calls if function.startswith(REPLAY)]
    return counts


def busy_percent(traces):
    """Share of the time between first and last kernel in which one ran at least, over all GPUs, or None."""
    by_gpu = defaultdict(list)
    for trace in traces:
        for gpu, _, start, end in trace.kernels:
            if end:  # else its times are impossible
                by_gpu[gpu].append((start, end))
    busy = whole = 0.0
    for spans in by_gpu.values():
        reached = begin = min(start for start, _ in spans)
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        whole += reached - begin
    return 100 * busy / whole if whole else None


def range_of_calls(trace):
    """{number of a HIP call: name of the innermost range that was open on its thread}"""
    opened, names = defaultdict(list), {}
    moments = [(start, False, -end, name, thread) for name, thread, start, end in trace.ranges]
    moments += [(start, True, number, function, thread) for function, thread, number, start in trace.calls]
    for time, is_call, number, name, thread in sorted(moments):
        around = opened[thread]
        while around and around[-1][1] <= time:
            around.pop()
        if is_call:
            names[number] = around[-1][0] if around else OUTSIDE
        else:
            around.append((name, -number))
    return names


def time_by_range(traces):
    """{range: (launches, nanoseconds of kernels)}, by where the CPU launched them."""
    entries = []
    for trace in traces:
        if trace.calls and trace.ranges:
            names = range_of_calls(trace)
            entries += [(names.get(number, OUTSIDE), 1, end - start)
                        for _, number, start, end in trace.kernels]
    return add_up(entries)
