"""What ran on the GPU, how often, how long and of what kind: a summary of profiler results.

    python profile_summary.py DIR                    # of run_rocprofv3.sh; --json for programs
    python profile_summary.py DIR --compare EARLIER  # against another run

Reads *_kernel_stats.csv, *_kernel_trace.csv and what lies beside them, of every rocprofv3 release, kernels of
rocprof-compute's counter files and of rocpd databases. Standard library only, offline, writes nothing.
"""
import contextlib
import json
import math
import pathlib
import re
from collections import defaultdict

from fusion_lab.measuring.kinds import kind_of_kernel
from fusion_lab.measuring.roctx import BLIND, GRAPHS
from fusion_lab.measuring.spans import IMPOSSIBLE
from fusion_lab.rocm import records, timeline
from fusion_lab.training import files
from fusion_lab.training.errors import EXIT_CODES, OK, UserError, exit_code
from fusion_lab.training.flags import Parser
from fusion_lab.training.words import printable

PROGRAM = "profile_summary.py"
TOP_KERNELS = 20
# Counts of a hardware block add up over kernels, as kilobytes do; what else there is are shares and averages.
ADDITIVE = re.compile(r"(SQC?|T[AD]|TC[ACP]|GRBM|CP[CF]|SPI|GL[012]\w*|GCEA|GCR|UTCL\d)_[A-Z0-9_]+"
                      r"(\[\d+\])?(_sum)?|(FETCH|WRITE)_?SIZE|TOTAL_\d+_OPS|(Fetch|Write)Size")


def read_json(path):
    """A JSON object, or {}: these files describe a result, they are not the result."""
    with contextlib.suppress(UserError):
        return files.read_json(path)
    return {}


def performance_of(directory):
    """What the profiled program measured of itself, by its own summary below a session's directory; or {}."""
    # Sorted, so the first is of the last run; what the others wrote is in program.old-TIME.
    found = records.result_files(directory, "performance_summary*.json")
    return read_json(found[0]).get("performance_summary", {}) if found else {}


def graph_figures(directory, traces, launches, steps):
    """{"recorded", "expected"} kernels of graphs' replays, None where there were none. A program of the lab
    counts its graph's kernels; where HIP calls were not traced, each step ran as many at least."""
    nodes, counts = performance_of(directory).get("graph_kernels"), timeline.replays(traces)
    if counts:
        return {"recorded": sum(counts), "expected": nodes and nodes * len(counts)}
    return {"recorded": launches, "expected": nodes * steps} if nodes and steps else None


def lost_kernels(graphs):
    """Whether kernels of graphs are missing in the records, or may be, as their number is not known."""
    return bool(graphs) and graphs["recorded"] < (graphs["expected"] or math.inf)


def counter_figures(rows):
    """{"counters": sums, "counter_averages": means by time, "counted": dispatches} of (counter, value,
    nanoseconds) rows."""
    by_name, timed = defaultdict(list), all(time > 0 for _, _, time in rows)
    for name, value, time in rows:
        by_name[name].append((value, time if timed else 1))
    return {"counters": {name: sum(value for value, _ in pairs) for name, pairs in by_name.items()
                         if ADDITIVE.fullmatch(name)},
            "counter_averages": {name: sum(value * time for value, time in pairs) / sum(t for _, t in pairs)
                                 for name, pairs in by_name.items() if not ADDITIVE.fullmatch(name)},
            "counted": max(map(len, by_name.values()), default=0)}


def summarize(directory):
    """Everything known about one result directory, as in rocprofv3_summary.json. Raises UserError."""
    directory = pathlib.Path(directory)
    totals, impossible, source, names = records.read_kernels(directory)
    counters, traces = records.read_counters(directory), timeline.read_traces(directory)
    launches, total = (sum(column) for column in zip((0, 0), *totals.values(), strict=True))
    session = read_json(directory / "manifest.json")
    steps = session.get("steps")
    graphs = graph_figures(directory, traces, launches, steps)
    whole = steps and not lost_kernels(graphs)

    def longest(figures):
        return {name: {"launches": calls, "time_ms": time / 1e6} for name, (calls, time) in sorted(
            figures.items(), key=lambda item: (-item[1][1], item[0]))}
    kinds = records.add_up((kind_of_kernel(name), *figures) for name, figures in totals.items())
    return {
        "directory": str(directory), "source": source, "files": names, "distinct_kernels": len(totals),
        "launches": launches, "kernel_time_ms": total / 1e6,
        "steps": steps, "steps_counted": session.get("steps_counted"),
        "launches_per_step": launches / steps if whole else None,
        "kernel_time_ms_per_step": total / 1e6 / steps if whole else None,
        "graphs": graphs, "launches_without_kernels": timeline.blind(traces),
        "impossible_times": impossible,
        "by_kind": longest(kinds), "by_range": longest(timeline.time_by_range(traces)),
        "kernels": dict(list(longest(totals).items())[:TOP_KERNELS]),
        "gpu_busy_percent": None if counters else timeline.busy_percent(traces),  # counting keeps them apart
        "memory_copies": records.read_memory_copies(directory), **counter_figures(counters)}


def short_name(kernel, width=64):
    name = printable(re.sub(r"^void |\(anonymous namespace\)::|at::native::|\.kd$", "", kernel))
    return name if len(name) <= width else name[:width - 3] + "..."


def render(summary):
    lines = [f"Kernels of {summary['directory']}",
             f"read from {summary['source']}: {', '.join(summary['files'])}", "",
             f"GPU kernel time  {summary['kernel_time_ms']:12.3f} ms",
             f"Kernel launches  {summary['launches']:12d}    of {summary['distinct_kernels']} kernels"]
    if summary["launches_per_step"] is not None:
        lines += [f"Launches per step{summary['launches_per_step']:12.1f}    of {summary['steps_counted']}",
                  f"Time per step    {summary['kernel_time_ms_per_step']:12.3f} ms"]
    if summary["gpu_busy_percent"] is not None:
        lines += [f"GPU busy         {summary['gpu_busy_percent']:12.1f} %  from first to last kernel"]
    if copies := summary["memory_copies"]:
        lines += [f"DMA copies       {copies['count']:12d}    {copies['time_ms']:.3f} ms"]
    for title, rows in (("kind", summary["by_kind"]), ("range", summary["by_range"]),
                        ("kernel, the longest first", summary["kernels"])):
        lines += ["", f"{'launches':>8}{'ms':>12}{'average us':>12}{'share':>8}  {title}"] * bool(rows)
        for name, row in rows.items():
            calls, time = row["launches"], row["time_ms"]
            share = time / summary["kernel_time_ms"] if time else 0
            lines += [f"{calls:>8}{time:>12.3f}{1e3 * time / calls:>12.2f}{share:>8.1%}  {short_name(name)}"]
    for key, title in (("counters", f"Counters, summed over {summary['counted']} kernels"),
                       ("counter_averages", "Counters that do not add up: their mean, weighted by time")):
        lines += ["", title] * bool(summary[key])
        lines += [f"{name:<32}{value:>20.1f}" for name, value in sorted(summary[key].items())]
    if lost_kernels(summary["graphs"]):
        recorded, expected = summary["graphs"]["recorded"], summary["graphs"]["expected"]
        lines += [f"Caution: {recorded} of {expected or 'an unknown number of'} kernels of graphs were "
                  f"recorded, so a step's number is unknown. {GRAPHS}"]
    if summary["launches_without_kernels"]:
        lines += [f"Caution: {summary['launches_without_kernels']} launches of a process, no kernel. {BLIND}"]
    if summary["impossible_times"]:
        lines += ["Caution: " + IMPOSSIBLE.format(summary["impossible_times"])]
    if summary["counted"] > summary["launches"]:
        lines += ["Caution: ROCm before 7.13 counts the whole run, whatever is selected or paused."]
    return "\n".join(lines) + "\n"


def differences(current, earlier):
    """{label: [earlier, current]}, per step where both know their steps, else in total."""
    def figures(summary):
        return {"launches": summary["launches"], "kernel time ms": summary["kernel_time_ms"],
                **{f"{name} launches": row["launches"] for name, row in summary["by_kind"].items()},
                **{f"{name} ms": row["time_ms"] for part in ("by_kind", "by_range")
                   for name, row in summary[part].items()}}
    before, now = figures(earlier), figures(current)
    known = None not in (earlier["launches_per_step"], current["launches_per_step"])
    a, b = (earlier["steps"], current["steps"]) if known else (1, 1)
    return {label: [before.get(label, 0) / a, now.get(label, 0) / b] for label in {**now, **before}}


def render_differences(current, earlier):
    """Two summaries side by side."""
    known = None not in (earlier["launches_per_step"], current["launches_per_step"])
    lines = [f"Compared with {earlier['directory']}, {'per step' if known else 'in total'}"]
    if len({"nothing else" in (run["steps_counted"] or "") for run in (earlier, current)}) > 1:
        lines += ["Caution: one run recorded its measured steps only, the other also start-up and warm-up."]
    lines += [f"{'':<34}{'earlier':>12}{'this run':>12}{'change':>10}"]
    for label, (old, new) in differences(current, earlier).items():
        change = f"{new / old - 1:+.1%}" if old else "new"
        lines += [f"{label:<34}{old:>12.3f}{new:>12.3f}{change:>10}"]
    return "\n".join(lines) + "\n"


def main_figures(directory):
    """Step in ms and launches by the program, kernel time of a step in ms as recorded: what makes different
    profilers' runs comparable; None where not measured."""
    directory = pathlib.Path(directory)
    program, session = performance_of(directory), read_json(directory / "fusion_analysis.json")  # PyTorch's
    kernels, step = {}, session.get("step", {}).get("untraced_ms")
    with contextlib.suppress(UserError):
        kernels = summarize(directory)
    return [1e3 * program["median_batch_time"] if program.get("median_batch_time") else step,
            (program or session).get("launches_per_step"), kernels.get("kernel_time_ms_per_step") or None]


def load(directory):
    """Summary of a directory that must hold the kernel records of one run. Raises UserError."""
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise UserError(f"{directory}: no such directory")
    summary = summarize(path)
    if not summary["launches"]:
        raise UserError(f"{directory}: no kernel records (looked for {', '.join(records.KERNEL_FILES)} there "
                        "and where a profiler puts them below)")
    return summary


def run(argv=None):
    """Print the summary of a directory; returns the exit code. Raises UserError."""
    parser = Parser(prog=PROGRAM, description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("directory", metavar="DIR", help="results of one run")
    parser.add_argument("--compare", metavar="EARLIER", help="result directory of an earlier run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    summary, earlier = load(options.directory), options.compare and load(options.compare)
    if options.json:
        print(json.dumps({**summary, "compared": differences(summary, earlier) if earlier else None}))
    else:
        print(render(summary) + ("\n" + render_differences(summary, earlier) if earlier else ""), end="")
    return OK


def main(argv=None):
    return exit_code(run, argv, PROGRAM)
