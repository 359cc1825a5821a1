"""What ran on the GPU, how often, how long and of what kind: a summary of profiler results.

    python profile_summary.py DIR                    # of run_rocprofv3.sh; --json for programs
    python profile_summary.py DIR --compare EARLIER  # against another run

Reads *_kernel_stats.csv, *_kernel_trace.csv and what lies beside them, of every rocprofv3 release, kernels of
rocprof-compute's counter files and of rocpd databases. Standard library only, offline, writes nothing.
"""
import contextlib
import json
import pathlib
import re
from collections import defaultdict

from fusion_lab.measuring.trace.kinds import KINDS, kind_of_kernel
from fusion_lab.rocm import records, timeline
from fusion_lab.training.files import EXIT_CODES, NO_DATA, OK, USAGE, UserError, exit_code, printable
from fusion_lab.training.flags import Parser

PROGRAM = "profile_summary.py"
TOP_KERNELS = 20
SUMMARIES = "performance_summary*.json"  # of any program


def read_json(path):
    """A JSON object, or {}: these files describe a result, they are not the result."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(errors="replace"))
        return content if isinstance(content, dict) else {}
    return {}


def section(content, key):
    """A JSON object within another one; {} where there is none."""
    return content[key] if isinstance(content.get(key), dict) else {}


def number(content, key):
    """A figure of a JSON object, or None."""
    return content[key] if type(content.get(key)) in (int, float) else None


def program_summary(directory):
    """The profiled program's own summary below directory, under the name that the session's record has."""
    name = read_json(directory / "manifest.json").get("summary")
    plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+\.json", name)  # no pattern
    files = records.result_files(directory, name if plain else SUMMARIES)
    return read_json(files[0]) if files else {}


def steps_profiled(directory):
    """(number of steps, measured steps only?, in words); the number is None where nothing tells."""
    training = section(program_summary(directory), "training_params")
    steps = {"measured": training.get("num_steps"), "warmup": training.get("warmup_steps")}
    manifest = read_json(directory / "manifest.json")
    steps = section(manifest, "steps") if "steps" in manifest else steps  # null there: nobody knows
    measured, warmup = (steps.get(key) if type(steps.get(key)) is int else None
                        for key in ("measured", "warmup"))
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


def counter_figures(rows):
    """{"counters": sums, "counter_averages": means by time, "memory_gb_per_s": of kilobytes, or None,
    "counted_dispatches"} of (counter, value, nanoseconds) rows."""
    sums, weighted, weights, counts = (defaultdict(float) for _ in range(4))
    timed = all(time > 0 for _, _, time in rows)
    for name, value, time in rows:
        sums[name] += value
        weighted[name] += value * (time if timed else 1)
        weights[name] += time if timed else 1
        counts[name] += 1
    plain = {records.plain(name): name for name in sums}
    traffic = [plain[name] for name in ("fetchsize", "writesize") if name in plain]
    return {"counters": {name: total for name, total in sums.items() if ADDITIVE.fullmatch(name)},
            "counter_averages": {name: total / weights[name] for name, total in weighted.items()
                                 if not ADDITIVE.fullmatch(name)},
            "memory_gb_per_s": 1024 * sum(sums[name] for name in traffic) / weights[traffic[0]]
            if timed and len(traffic) == 2 else None,
            "counted_dispatches": int(max(counts.values(), default=0))}


def summarize(directory):
    """Everything known about one result directory, as in rocprofv3_summary.json. Raises UserError."""
    directory = pathlib.Path(directory)
    kernels, counters = records.read_kernels(directory), records.read_counters(directory)
    launches, total = (sum(column) for column in zip((0, 0), *kernels.totals.values(), strict=True))
    steps, selected, counted = steps_profiled(directory)
    traces = timeline.read_traces(directory)

    def row(launches, time, calls="launches"):
        return {calls: launches, "time_ms": time / 1e6, "percent": 100 * time / total if total else 0.0}

    by_kind = dict.fromkeys(KINDS, (0, 0.0)) | records.add_up(
        (kind_of_kernel(name), *figures) for name, figures in kernels.totals.items())
    ordered = sorted(kernels.totals.items(), key=lambda item: (-item[1][1], item[0]))
    by_range = sorted(timeline.time_by_range(traces).items(), key=lambda item: -item[1][1])
    return {
        "directory": str(directory), "source": kernels.source, "files": kernels.files,
        "distinct_kernels": len(kernels.totals), "launches": launches, "kernel_time_ms": total / 1e6,
        "steps": steps, "selected_regions": selected, "steps_counted": counted,
        "launches_per_step": launches / steps if steps else None,
        "kernel_time_ms_per_step": total / 1e6 / steps if steps else None,
        "by_kind": [{"kind": kind, **row(*figures)} for kind, figures in by_kind.items()],
        "top_kernels": [{"name": name, "kind": kind_of_kernel(name), **row(calls, time, "calls"),
                         "average_us": time / calls / 1e3} for name, (calls, time) in ordered[:TOP_KERNELS]],
        "gpu_busy_percent": None if counters else timeline.busy_percent(traces),  # counting keeps them apart
        "by_range": [{"range": name, **row(*figures)} for name, figures in by_range],
        "memory_copies": records.read_memory_copies(directory), **counter_figures(counters),
    }


def short_name(kernel, width=64):
    name = printable(re.sub(r"^void |\(anonymous namespace\)::|at::native::|\.kd$", "", kernel))
    return name if len(name) <= width else name[:width - 3] + "..."


def render(summary):
    lines = [f"Kernels of {summary['directory']}",
             f"read from {summary['source']}: {', '.join(summary['files'])}", "",
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
    counted = summary["counted_dispatches"]
    for key, title, form in (
            ("counters", f"Counters, summed over {counted} kernels", "{:<32}{:>20.0f}"),
            ("counter_averages", "Counters that do not add up: their mean over kernels, weighted by time",
             "{:<32}{:>20.1f} mean")):
        lines += ["", title] * bool(summary[key]) + [form.format(*x) for x in sorted(summary[key].items())]
    if counted > summary["launches"]:
        lines += ["Caution: ROCm before 7.13 counts the whole run, whatever is selected or paused."]
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


def main_figures(directory):
    """The few figures that make different profilers' runs comparable; None where not measured."""
    directory = pathlib.Path(directory)
    program = section(program_summary(directory), "performance_summary")
    session = read_json(directory / "fusion_analysis.json")  # of PyTorch's profiler
    seconds = number(program, "median_batch_time")
    kernels = {}
    with contextlib.suppress(UserError):
        kernels = summarize(directory)
    top = kernels["top_kernels"][0] if kernels.get("launches") else None
    return {"median step ms": 1e3 * seconds if seconds else number(section(session, "step"), "untraced_ms"),
            "launches per step, by the trainer": number(program or session, "launches_per_step"),
            "launches per step, recorded": kernels["launches_per_step"] if top else None,
            "kernel time ms per step": kernels["kernel_time_ms_per_step"] if top else None,
            "slowest kernel": f"{short_name(top['name'], 40)} ({top['percent']:.0f}%)" if top else None}


def load(directory):
    """Summary of a directory that must hold the kernel records of one run. Raises UserError."""
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise UserError(f"{directory}: no such directory")
    summary = summarize(path)
    if not summary["launches"]:
        raise UserError(f"{directory}: no kernel records (looked for {', '.join(records.KERNEL_FILES)} there "
                        "and where a profiler puts them below)",
                        NO_DATA if records.is_session(path) else USAGE)
    return summary


def run(argv=None):
    """Print the summary of a directory; returns the exit code. Raises UserError."""
    parser = Parser(prog=PROGRAM, description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("directory", metavar="DIR", help="results of one run")
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
