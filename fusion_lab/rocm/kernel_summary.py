"""What ran on the GPU, how often, how long and of what kind: a summary of profiler results.

    python profile_summary.py DIR                    # of run_rocprofv3.sh; --json for programs
    python profile_summary.py DIR --compare EARLIER  # against another run

Reads rocpd databases (*.db), else *_kernel_stats.csv and *_kernel_trace.csv of every rocprofv3 release, and
rocprof-compute's pmc_perf*.csv and results_pmc_perf_*.csv. Standard library only, offline, writes nothing.
"""
import contextlib
import json
import pathlib
import re
from collections import defaultdict

from fusion_lab.measuring.trace.kinds import KINDS, kind_of_kernel
from fusion_lab.rocm import records, timeline
from fusion_lab.rocm.records import Unreadable
from fusion_lab.training import reading
from fusion_lab.training.files import EXIT_CODES, NO_DATA, OK, USAGE, UserError, exit_code, printable
from fusion_lab.training.flags import Parser
from fusion_lab.training.patience import limited

PROGRAM = "profile_summary.py"
TOP_KERNELS, MOST_NAMES = 20, 10  # in a summary; in a message
SUMMARIES = "performance_summary*.json"  # of any program


def read_json(path):
    """A JSON object, or {}: these files describe a result, they are not the result."""
    try:
        return reading.read_json(path, nan=True)
    except (OSError, ValueError):
        return {}


def program_summary(directory):
    """The profiled program's own summary below directory, under the name that the session's record has."""
    name = read_json(directory / "manifest.json").get("summary")
    plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+\.json", name)  # no pattern
    files = records.result_files(directory, name if plain else SUMMARIES)
    return read_json(files[0]) if files else {}


def section(content, key):
    """A JSON object within another one; {} where there is none."""
    return content[key] if isinstance(content.get(key), dict) else {}


def whole(value):
    """A count of a JSON file, or None."""
    return value if type(value) is int and 0 <= value < records.LARGEST else None


def steps_profiled(directory):
    """(number of steps, measured steps only?, in words); the number is None where nothing tells."""
    training = section(program_summary(directory), "training_params")
    steps = {"measured": training.get("num_steps"), "warmup": training.get("warmup_steps")}
    manifest = read_json(directory / "manifest.json")
    steps = section(manifest, "steps") if "steps" in manifest else steps  # null there: nobody knows
    measured, warmup = whole(steps.get("measured")), whole(steps.get("warmup"))
    selected = bool(steps.get("selected_regions"))
    if measured and selected:
        return measured, selected, f"{measured} measured steps, nothing else"
    if measured and warmup is not None:
        ends = " is in the count, evaluation is not" if steps.get("ends_with_steps") else \
            " and evaluation are in the count"
        return measured + warmup, selected, f"{measured} measured + {warmup} warm-up steps; start-up{ends}"
    return None, selected, "the number of steps is unknown"


# Counts of a hardware block add up over kernels, as kilobytes do; what else there is are shares and averages.
ADDITIVE = re.compile(r"(SQC?|T[AD]|TC[ACP]|GRBM|CP[CF]|SPI|GL[012]\w*|GCEA|GCR|UTCL\d)_[A-Z0-9_]+"
                      r"(\[\d+\])?(_sum)?|(FETCH|WRITE)_?SIZE|TOTAL_\d+_OPS|(Fetch|Write)Size")
TRAFFIC = ("fetchsize", "writesize")


def counter_figures(directory):
    """{"counters": sums, "counter_averages": means by time, "memory_gb_per_s": of kilobytes, or None}"""
    sums, weighted = defaultdict(float), defaultdict(lambda: [0.0, 0.0])
    traffic, traffic_time = defaultdict(float), 0.0
    for name, value, time in records.read_counters(directory):
        kind = records.plain(name)
        if kind in TRAFFIC:
            traffic[kind] += 1024 * value
            traffic_time += time * (kind == TRAFFIC[0])
        if ADDITIVE.fullmatch(name):
            sums[name] += value
        else:
            weight = time if time > 0 else 1
            weighted[name][0] += value * weight
            weighted[name][1] += weight
    return {"counters": dict(sums),
            "counter_averages": {name: total / time for name, (total, time) in weighted.items()},
            "memory_gb_per_s": sum(traffic.values()) / traffic_time
            if len(traffic) == len(TRAFFIC) and traffic_time > 0 else None}


@limited()
def summarize(directory):
    """Everything known about one result directory, as in rocprofv3_summary.json. Raises UserError."""
    directory = pathlib.Path(directory)
    kernels, counters = records.read_kernels(directory), counter_figures(directory)
    launches, total = (sum(column) for column in zip((0, 0), *kernels.totals.values(), strict=True))
    steps, selected, counted = steps_profiled(directory)
    counting = counters["counters"] or counters["counter_averages"]  # which keeps kernels apart
    traces = timeline.read_traces(directory) if kernels.source != records.OF_COMPUTE else []

    def row(launches, time, calls="launches"):
        return {calls: launches, "time_ms": time / 1e6, "percent": 100 * time / total if total else 0.0}

    by_kind = dict.fromkeys(KINDS, (0, 0.0)) | records.add_up(
        (kind_of_kernel(name), *figures) for name, figures in kernels.totals.items())
    ordered = sorted(kernels.totals.items(), key=lambda item: (-item[1][1], item[0]))
    by_range = sorted(timeline.time_by_range(traces).items(), key=lambda item: -item[1][1])
    return {
        "directory": str(directory), "source": kernels.source, "files": kernels.files,
        "untimed_files": kernels.untimed,
        "distinct_kernels": len(kernels.totals), "launches": launches, "kernel_time_ms": total / 1e6,
        "steps": steps, "selected_regions": selected, "steps_counted": counted,
        "launches_per_step": launches / steps if steps else None,
        "kernel_time_ms_per_step": total / 1e6 / steps if steps else None,
        "by_kind": [{"kind": kind, **row(*figures)} for kind, figures in by_kind.items()],
        "top_kernels": [{"name": name, "kind": kind_of_kernel(name), **row(calls, time, "calls"),
                         "average_us": time / calls / 1e3} for name, (calls, time) in ordered[:TOP_KERNELS]],
        "gpu_busy_percent": None if counting else timeline.busy_percent(traces),
        "by_range": [{"range": name, **row(*figures)} for name, figures in by_range],
        "memory_copies": records.read_memory_copies(directory), **counters,
    }


def short_name(kernel, width=64):
    name = printable(re.sub(r"^void |\(anonymous namespace\)::|at::native::|\.kd$", "", kernel))
    return name if len(name) <= width else name[:width - 3] + "..."


def without_times(summary):
    return [f"left out, as they list dispatches without times: {', '.join(names)}"
            for names in [summary["untimed_files"]] if names]


def render(summary):
    lines = [f"Kernels of {summary['directory']}",
             f"read from {summary['source']}: {', '.join(summary['files'])}", *without_times(summary), "",
             f"GPU kernel time  {summary['kernel_time_ms']:12.3f} ms",
             f"Kernel launches  {summary['launches']:12d}    of {summary['distinct_kernels']} kernels"]
    if summary["steps"]:
        lines += [f"Launches per step{summary['launches_per_step']:12.1f}    ({summary['steps_counted']})",
                  f"Time per step    {summary['kernel_time_ms_per_step']:12.3f} ms"]
    else:
        lines += [f"Launches per step     unknown    ({summary['steps_counted']})"]
    if summary["gpu_busy_percent"] is not None:
        lines += ["GPU busy         {gpu_busy_percent:12.1f} %  of the time from first to last kernel".format(
            **summary)]
    if summary["memory_gb_per_s"] is not None:
        lines += [f"Memory traffic   {summary['memory_gb_per_s']:12.1f} GB/s while kernels ran"]
    if summary["memory_copies"]:
        lines += ["DMA copies       {count:12d}    {time_ms:.3f} ms".format(**summary["memory_copies"])]
    for name, width in (("kind", 14), ("range", 34)):
        rows = [row for row in summary[f"by_{name}"] if row["launches"]]
        if rows or name == "kind":
            lines += ["", f"{name:<{width}}{'launches':>10}{'ms':>12}{'share':>8}"]
        lines += [f"{row[name]:<{width}}" + "{launches:>10}{time_ms:>12.3f}{percent:>7.1f}%".format(**row)
                  for row in rows]
    lines += ["", f"Top {len(summary['top_kernels'])} kernels by total time",
              f"{'calls':>8}{'ms':>12}{'average us':>12}{'share':>8}  kind           name"]
    lines += ["{calls:>8}{time_ms:>12.3f}{average_us:>12.2f}{percent:>7.1f}%  {kind:<14} ".format(**row)
              + short_name(row["name"]) for row in summary["top_kernels"]]
    for key, title, form in (
            ("counters", "Counters, summed over all recorded kernels", "{:<32}{:>20.0f}"),
            ("counter_averages", "Counters that do not add up: their mean over kernels, weighted by time",
             "{:<32}{:>20.1f} mean")):
        lines += ["", title] * bool(summary[key]) + [form.format(*x) for x in sorted(summary[key].items())]
    return "\n".join(lines) + "\n"


def differences(current, earlier):
    """Current against earlier, per step where both know their steps, else in total."""
    rows = [(label, earlier[key], current[key])
            for label, key in (("launches", "launches"), ("kernel time ms", "kernel_time_ms"))]
    rows += [(f"{now['kind']} {unit}", before[key], now[key])
             for before, now in zip(earlier["by_kind"], current["by_kind"], strict=True)
             if now["launches"] or before["launches"]
             for unit, key in (("launches", "launches"), ("ms", "time_ms"))]
    ranges = [{row["range"]: row["time_ms"] for row in summary["by_range"]} for summary in (earlier, current)]
    if all(ranges):
        rows += [(f"{name} ms", ranges[0].get(name, 0.0), ranges[1].get(name, 0.0))
                 for name in dict.fromkeys([*ranges[1], *ranges[0]])]
    if per_step := bool(current["steps"] and earlier["steps"]):
        rows = [(label, a / earlier["steps"], b / current["steps"]) for label, a, b in rows]
    for label, key in (("GPU busy %", "gpu_busy_percent"), ("memory traffic GB/s", "memory_gb_per_s")):
        if current[key] is not None and earlier[key] is not None:
            rows.append((label, earlier[key], current[key]))
    return {"earlier": earlier["directory"], "per_step": per_step,
            "same_steps": earlier["selected_regions"] == current["selected_regions"],
            "rows": [{"figure": label, "earlier": a, "current": b,
                      "change_percent": 100 * (b / a - 1) if a else None} for label, a, b in rows]}


def render_differences(comparison):
    unit = "per step" if comparison["per_step"] else "in total (the number of steps is not known for both)"
    lines = [f"Compared with {comparison['earlier']}, {unit}"]
    if not comparison["same_steps"]:
        lines += ["Caution: one run recorded its measured steps only, the other also start-up and warm-up."]
    lines += [f"{'':<34}{'earlier':>12}{'this run':>12}{'change':>10}"]
    for row in comparison["rows"]:
        change = "new" if row["change_percent"] is None else f"{row['change_percent']:+.1f}%"
        lines += [f"{row['figure']:<34}{row['earlier']:>12.3f}{row['current']:>12.3f}{change:>10}"]
    return "\n".join(lines) + "\n"


def report(summary, comparison=None):
    return render(summary) + ("\n" + render_differences(comparison) if comparison else "")


def session_figures(directory):
    """What a session of PyTorch's profiler left, under the names of a summary."""
    found = read_json(directory / "fusion_analysis.json")
    milliseconds = section(found, "step").get("untraced_ms")
    known = type(milliseconds) is float and 0 < milliseconds < records.LARGEST
    batch = whole(section(found, "training_params").get("batch_size"))
    return {"median_batch_time": milliseconds / 1e3 if known else None,
            "avg_training_speed": batch * 1e3 / milliseconds if known and batch else None,
            "peak_memory_mb": found.get("memory_peak_mb"),
            "launches_per_step": found.get("launches_per_step")}


def main_figures(directory):
    """The few figures that make different profilers' runs comparable; None where not measured."""
    directory = pathlib.Path(directory)
    figures = section(program_summary(directory), "performance_summary") or session_figures(directory)
    measured = {key: value for key, value in figures.items()
                if type(value) in (int, float) and abs(value) < records.LARGEST}
    median, kernels = measured.get("median_batch_time"), {}
    with contextlib.suppress(UserError):
        kernels = summarize(directory)
    kernels = kernels if kernels.get("launches") else {}
    top = kernels["top_kernels"][0] if kernels else {}
    return {
        "median step ms": median * 1e3 if median is not None else None,
        "samples/s": measured.get("avg_training_speed"), "peak memory MB": measured.get("peak_memory_mb"),
        "launches per step, by the trainer": measured.get("launches_per_step"),
        "launches per step, recorded": kernels.get("launches_per_step"),
        "kernel time ms per step": kernels.get("kernel_time_ms_per_step"),
        "GPU busy %": kernels.get("gpu_busy_percent"),
        "slowest kernel": f"{short_name(top['name'], 40)} ({top['percent']:.0f}%)" if top else None,
    }


def load(directory):
    """Summary of a directory that must hold the kernel records of one run. Raises UserError."""
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise Unreadable(f"{directory}: no such directory")
    if others := records.other_runs(path):
        raise UserError(f"{directory}: holds no kernel records itself; name one of its folders that do: "
                        f"{', '.join(others[:MOST_NAMES])}{', ...' * (len(others) > MOST_NAMES)}")
    summary = summarize(path)
    if not summary["launches"]:
        raise UserError(f"{directory}: no kernel records (looked for {', '.join(records.KERNEL_FILES)} there "
                        "and where a profiler puts them below"
                        f"{''.join('; ' + line for line in without_times(summary))})",
                        NO_DATA if records.is_session(path) else USAGE)
    return summary


def run(argv=None):
    """Print the summary of a directory; returns the exit code. Raises UserError."""
    parser = Parser(prog=PROGRAM, description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--compare", metavar="EARLIER", help="result directory of an earlier run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    summary = load(options.directory)
    comparison = differences(summary, load(options.compare)) if options.compare else None
    print(json.dumps({**summary, "comparison": comparison}) + "\n" if options.json
          else report(summary, comparison), end="")
    return OK


def main(argv=None):
    return exit_code(run, argv, PROGRAM)
