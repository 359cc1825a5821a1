"""What the traces of one run say about time: how busy the GPU was, and which named range launched what."""
from collections import defaultdict
from typing import NamedTuple

from fusion_lab.rocm.records import TIMES, read_header, read_rows, result_files

OUTSIDE = "outside all ranges"
REPLAYED = "in a HIP graph"  # its replays run no Python, so no range is open


class Trace(NamedTuple):
    """What one process did; times are in nanoseconds."""
    kernels: list  # (GPU, number of the HIP call, start, end)
    calls: list    # HIP: (function, thread, number, start)
    ranges: list   # (name, thread, start, end)


def read_csv(path):
    """Of a *kernel_trace.csv and its neighbours."""
    header = read_header(path)
    gpu, call = ([name] * (name in header) for name in ("agentid", "correlationid"))
    kernels = [(about[0] if gpu else "", about[-1] if call else 0, start, end)
               for *about, start, end in read_rows(path, *gpu, numbers=(*call, *TIMES))]
    markers, hip = (path.with_name(path.name.replace("kernel_trace", name))
                    for name in ("marker_api_trace", "hip_api_trace"))
    about = ("correlationid", TIMES[0])
    calls = read_rows(hip, "function", "threadid", numbers=about) if hip.exists() else ()
    ranges = read_rows(markers, "function", "threadid", numbers=TIMES) if markers.exists() else ()
    return Trace(kernels, list(calls), list(ranges))


def read_traces(directory):
    """Of every process."""
    return [read_csv(path) for path in result_files(directory, "*kernel_trace.csv")]


def busy_percent(traces):
    """Share of the time between first and last kernel in which one ran at least, over all GPUs, or None."""
    by_gpu = defaultdict(list)
    for trace in traces:
        for gpu, _, start, end in trace.kernels:
            by_gpu[gpu].append((start, end))
    busy = whole = 0.0
    for spans in by_gpu.values():
        reached = begin = min(start for start, _ in spans)
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        whole += reached - begin
    return 100 * busy / whole if whole else None


def ranges_at(spans, moments):
    """{key: name of the innermost range that is open then}, for (time, key) moments and (start, end, name)
    spans of one thread, which are nested or one after another."""
    waiting = sorted(spans, key=lambda span: (-span[0], span[1]))
    names, stack = {}, []
    for time, key in sorted(moments):
        while waiting and waiting[-1][0] <= time:
            stack.append(waiting.pop())
        while stack and stack[-1][1] <= time:
            stack.pop()
        names[key] = stack[-1][2] if stack else OUTSIDE
    return names


def call_ranges(trace):
    """{number of a HIP call: name of the range that it was made in}"""
    spans, moments, names = defaultdict(list), defaultdict(list), {}
    for name, thread, start, end in trace.ranges:
        if end > start:  # a mark has no length
            spans[thread].append((start, end, name))
    for _, thread, number, start in trace.calls:
        moments[thread].append((start, number))
    for thread, times in moments.items():
        names.update(ranges_at(spans[thread], times))
    return names | {number: REPLAYED for function, _, number, _ in trace.calls
                    if function.startswith("hipGraphLaunch")}


def time_by_range(traces):
    """{range: (launches, nanoseconds of kernels)}, by where the CPU launched them."""
    totals = defaultdict(lambda: (0, 0.0))
    for trace in traces:
        if trace.calls and trace.ranges:
            names = call_ranges(trace)
            for _, number, start, end in trace.kernels:
                launches, time = totals[name := names.get(number, OUTSIDE)]
                totals[name] = (launches + 1, time + end - start)
    return dict(totals)
