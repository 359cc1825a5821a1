"""What the traces of one run say about time: how busy the GPU was, and which named range launched what."""
from collections import defaultdict

from fusion_lab.rocm.records import TIMES, optional_rocpd, plain, read_header, read_rows, result_files

OUTSIDE = "outside all ranges"


def read_spans(directory):
    """(GPU, start, end) of every kernel."""
    for path in result_files(directory, "*kernel_trace.csv"):
        agent = ["agentid"] if "agentid" in map(plain, read_header(path)) else []
        for *gpu, start, end in read_rows(path, *agent, numbers=TIMES):
            yield (gpu or [""])[0], start, end
    yield from optional_rocpd(directory, 'SELECT agent_id, start, "end" FROM rocpd_kernel_dispatch', names=1)


def busy_percent(directory):
    """Share of the time between first and last kernel in which one ran at least, over all GPUs; None without
    a trace."""
    by_gpu = defaultdict(list)
    for gpu, start, end in read_spans(directory):
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


def read_launches(path):
    """{thread: [(time, correlation number)]} of the HIP calls that a process made."""
    by_thread = defaultdict(list)
    for thread, call, start in read_rows(path, "threadid", "correlationid", numbers=TIMES[:1]):
        by_thread[thread].append((start, call))
    return by_thread


def time_by_range(directory):
    """{range: (launches, nanoseconds of kernels)}: a kernel belongs to the range that was open where the CPU
    launched it. Empty unless ranges and HIP calls were traced both."""
    totals = defaultdict(lambda: (0, 0.0))
    for markers in result_files(directory, "*marker_api_trace.csv"):
        calls, kernels = (markers.with_name(markers.name.replace("marker_api_trace", name))
                          for name in ("hip_api_trace", "kernel_trace"))
        if not calls.exists() or not kernels.exists():
            continue
        spans = defaultdict(list)
        for name, thread, start, end in read_rows(markers, "function", "threadid", numbers=TIMES):
            if end > start:  # a mark has no length
                spans[thread].append((start, end, name))
        names = {}
        for thread, moments in read_launches(calls).items():
            names.update(ranges_at(spans[thread], moments))
        for call, start, end in read_rows(kernels, "correlationid", numbers=TIMES):
            launches, time = totals[names.get(call, OUTSIDE)]
            totals[names.get(call, OUTSIDE)] = (launches + 1, time + end - start)
    return dict(totals)
