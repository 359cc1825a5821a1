"""What the traces of one run say about time: how busy the GPU was, and which named range launched what."""
import contextlib
import re
from collections import defaultdict
from typing import NamedTuple

from fusion_lab.rocm.records import TIMES, optional_rocpd, plain, read_header, read_rows, result_files
from fusion_lab.training.reading import parse_json

OUTSIDE = "outside all ranges"
REPLAYED = "in a HIP graph"  # whose capture was not traced
MAKES_NODE = re.compile(r"hip\w*(Launch\w*Kernel|Mem(cpy|set)\w*Async)")


class Trace(NamedTuple):
    """What one process did; times are in nanoseconds."""
    kernels: list  # (GPU, number of the HIP call, start, end, graph, node); graph 0: launched by themselves
    copies: list   # the same
    calls: list    # HIP: (function, thread, number, start)
    ranges: list   # (name, thread, start, end)


EVENT = "JOIN rocpd_event e ON e.id = k.event_id AND e.guid = k.guid"
REGIONS = ('SELECT c.string, s.string, e.extdata, k.tid, e.stack_id, k.start, k."end" FROM rocpd_region k '
           f"{EVENT} JOIN rocpd_string s ON s.id = k.name_id AND s.guid = k.guid JOIN rocpd_string c ON c.id "
           "= e.category_id AND c.guid = e.guid WHERE c.string LIKE 'HIP%' OR c.string LIKE 'MARKER%'")


def read_activity(path, table, agent):
    """Kernels or copies of a database; from ROCm 10.0 on it says which node of which graph they are."""
    query = f'SELECT k.{agent}, e.stack_id, k.start, k."end", %s FROM {table} k {EVENT}'
    graphs = "IFNULL(k.graph_exec_id, 0), IFNULL(k.graph_node_id, 0)"
    return optional_rocpd(path, query % graphs, query % "0, 0", names=1)


def read_rocpd(path):
    calls, ranges = [], []
    for category, function, about, thread, number, start, end in optional_rocpd(path, REGIONS, names=4):
        if category.startswith("HIP"):
            calls.append((function, thread, number, start))
        else:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the text that a program gave roctx
                function = str(parse_json(about)["message"])
            ranges.append((function, thread, start, end))
    return Trace(read_activity(path, "rocpd_kernel_dispatch", "agent_id"),
                 read_activity(path, "rocpd_memory_copy", "dst_agent_id"), calls, ranges)


def read_csv(path):
    """Of a *kernel_trace.csv and its neighbours."""
    header, kernels = set(map(plain, read_header(path))), []
    gpu, call = ([name] if name in header else [] for name in ("agentid", "correlationid"))
    for *about, start, end in read_rows(path, *gpu, numbers=(*call, *TIMES)):
        kernels.append((about[0] if gpu else "", about[-1] if call else 0, start, end, 0, 0))
    markers, hip = (path.with_name(path.name.replace("kernel_trace", name))
                    for name in ("marker_api_trace", "hip_api_trace"))
    if not (markers.exists() and hip.exists()):
        return Trace(kernels, [], [], [])
    calls = read_rows(hip, "function", "threadid", numbers=("correlationid", TIMES[0]))
    ranges = read_rows(markers, "function", "threadid", numbers=TIMES)
    return Trace(kernels, [], list(calls), list(ranges))


def read_traces(directory):
    """Of every process; from databases, or from CSV where there are none."""
    found = [read_rocpd(path) for path in result_files(directory, "*.db")]
    if not any(trace.kernels for trace in found):
        found = [read_csv(path) for path in result_files(directory, "*kernel_trace.csv")]
    return found


def busy_percent(traces):
    """Share of the time between first and last kernel in which one ran at least, over all GPUs, or None."""
    by_gpu = defaultdict(list)
    for trace in traces:
        for gpu, _, start, end, *_ in trace.kernels:
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


def node_ranges(trace, names):
    """{(graph, node): range in which it was captured}. A step that was captured on one stream is a chain: its
    nodes are the calls of the capture, in order. Left out where their numbers differ."""
    nodes, captures, current, found = defaultdict(set), [], None, {}
    for *_, graph, node in (*trace.kernels, *trace.copies):
        nodes[graph].add(node)
    for function, _, number, _ in sorted(trace.calls, key=lambda call: call[3]):
        if function.startswith("hipStreamBeginCapture"):
            captures.append(current := [])
        elif function.startswith("hipStreamEndCapture"):
            current = None
        elif current is not None and MAKES_NODE.match(function):
            current.append(names[number])
    for graph in sorted(set(nodes) - {0}):
        fitting = next((capture for capture in captures if len(capture) == len(nodes[graph])), None)
        if fitting:
            captures.remove(fitting)
            found.update(zip(((graph, node) for node in sorted(nodes[graph])), fitting, strict=True))
    return found


def time_by_range(traces):
    """{range: (launches, nanoseconds of kernels)}, by where the CPU launched or captured them."""
    totals = defaultdict(lambda: (0, 0.0))
    for trace in traces:
        if trace.calls and trace.ranges:
            names = call_ranges(trace)
            nodes = node_ranges(trace, names)
            for _, number, start, end, graph, node in trace.kernels:
                name = nodes.get((graph, node)) or names.get(number, OUTSIDE)
                launches, time = totals[name]
                totals[name] = (launches + 1, time + end - start)
    return dict(totals)
