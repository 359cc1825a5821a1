"""What ran on the GPU, how often, how long and of what kind: a summary of profiler results.

    python profile_summary.py DIR                    results of run_rocprofv3.sh, or of rocprofv3 itself
    python profile_summary.py DIR --compare EARLIER  DIR against an earlier run, fused against baseline
    python profile_summary.py DIR --json             the same as JSON

Reads *_kernel_stats.csv and *_kernel_trace.csv of every rocprofv3 generation and of `rocpd convert`, rocpd
databases (*.db) and rocprof-compute's pmc_perf*.csv. Columns are found by name, because their order and
number changed with ROCm 6.3, 7.0 and rocpd. Standard library only; works offline; writes nothing.
"""
import csv
import json
import pathlib
import re
import sqlite3
import sys
from collections import Counter, defaultdict

from fusion_lab.measuring.kinds import KINDS, kind_of_kernel
from fusion_lab.training.files import NO_DATA, OK, UserError, exit_code
from fusion_lab.training.flags import Parser

PROGRAM = "profile_summary.py"
TOP_KERNELS = 20
SUMMARIES = "performance_summary*.json"  # of any program


class Unreadable(UserError):
    """A file that is there but is not what its name says."""


# ---------------------------------------------------------------------------------------------------------
# Reading: every reader returns {kernel name: (calls, nanoseconds)}

def read_rows(path, *wanted):
    """The wanted columns of every row; `Kernel_Name`, `KERNEL_NAME` and `KernelName` are one column."""
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        header = [re.sub(r"[^a-z]", "", cell.lower()) for cell in next(reader, [])]
        missing = [name for name in wanted if name not in header]
        if missing:
            raise Unreadable(f"{path}: no column {', '.join(missing)} in its header: {', '.join(header)}")
        columns = [header.index(name) for name in wanted]
        for row in reader:
            if len(row) > max(columns):  # an interrupted run can end in half a line
                yield [row[column] for column in columns]


def add_up(entries):
    totals = defaultdict(lambda: (0, 0.0))
    for name, calls, nanoseconds in entries:
        count, time = totals[name]
        totals[name] = (count + calls, time + nanoseconds)
    return dict(totals)


def read_stats(path):
    rows = read_rows(path, "name", "calls", "totaldurationns")
    return add_up((name, int(calls), float(time)) for name, calls, time in rows)


def read_trace(path, name="kernelname"):
    rows = read_rows(path, name, "starttimestamp", "endtimestamp")
    return add_up((kernel, 1, float(end) - float(start)) for kernel, start, end in rows)


def read_rocpd(path):
    """A rocpd database is plain SQLite; ROCm's own reader is tied to one Python version, so not used."""
    queries = (
        ('SELECT s.display_name, COUNT(*), SUM(k."end" - k.start) FROM rocpd_kernel_dispatch k JOIN '
         "rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid GROUP BY 1", 1),
        ("SELECT name, total_calls, total_duration FROM top_kernels", 1000),  # this view is in microseconds
    )
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        for query, scale in queries:
            try:
                return add_up((name, calls, time * scale) for name, calls, time in connection.execute(query))
            except sqlite3.OperationalError as error:  # no such table or view: not this generation
                problem = error
    except sqlite3.DatabaseError as error:
        problem = error
    finally:
        connection.close()
    raise Unreadable(f"{path}: not a rocpd database: {problem}")


def result_files(directory, pattern):
    """Files below directory. Several `pass_N` folders are the same program run again: the first counts."""
    files = [path for path in sorted(directory.rglob(pattern))
             if not any(".old-" in part for part in path.relative_to(directory).parts)]
    passes = sorted({part for path in files for part in path.parts if re.fullmatch(r"pass_\d+", part)})
    return [path for path in files if not passes or passes[0] in path.parts]


def merge(readings):
    return add_up((name, calls, time) for reading in readings for name, (calls, time) in reading.items())


def read_kernels(directory):
    """({kernel: (calls, ns)}, what was read, files), from the best source there is."""
    sources = (("kernel statistics CSV", "*kernel_stats.csv", read_stats),
               ("kernel trace CSV", "*kernel_trace.csv", read_trace),
               ("rocpd database", "*.db", read_rocpd),
               ("rocprof-compute counters", "pmc_perf*.csv", read_trace))
    for label, pattern, reader in sources:
        files = result_files(directory, pattern)
        if reader is read_trace and pattern.startswith("pmc"):
            files = sorted(files, key=lambda path: "_roof" in str(path))[:1]  # each pass is one more run
        kernels = merge(map(reader, files))
        if kernels:
            return kernels, label, [str(path.relative_to(directory)) for path in files]
    return {}, None, []


def read_memory_copies(directory):
    """Copies by the DMA engines; copies done by a kernel are in the kernel table. None if not traced."""
    copies = merge(map(read_stats, result_files(directory, "*memory_copy_stats.csv")))
    if not copies:
        copies = merge(read_trace(path, "direction")
                       for path in result_files(directory, "*memory_copy_trace.csv"))
    if not copies:
        return None
    return {"count": sum(calls for calls, _ in copies.values()),
            "time_ms": sum(time for _, time in copies.values()) / 1e6}


def read_counters(directory):
    totals = Counter()
    for path in result_files(directory, "*counter_collection.csv"):
        for name, value in read_rows(path, "countername", "countervalue"):
            totals[name] += float(value)
    return dict(totals)


def read_json(path):
    """A JSON object, or {}: these files describe a result, they are not the result."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def program_summary(directory):
    """The profiled program's own summary below directory, under the name that the session's record has."""
    files = result_files(directory, read_json(directory / "manifest.json").get("summary") or SUMMARIES)
    return read_json(files[0]) if files else {}


def steps_profiled(directory):
    """(number of steps, measured steps only?, in words); the number is None where nothing tells."""
    training = program_summary(directory).get("training_params", {})
    steps = {"measured": training.get("num_steps"), "warmup": training.get("warmup_steps")}
    steps = read_json(directory / "manifest.json").get("steps", steps) or {}  # null there: nobody knows
    measured, warmup = steps.get("measured"), steps.get("warmup")
    selected = bool(steps.get("selected_regions"))
    if measured and selected:
        return measured, selected, f"{measured} measured steps, nothing else"
    if measured and warmup is not None:
        return measured + warmup, selected, (f"{measured} measured + {warmup} warm-up steps; start-up and "
                                             "evaluation are in the count")
    return None, selected, "the number of steps is unknown"


# ---------------------------------------------------------------------------------------------------------
# Summary, comparison, text

def summarize(directory):
    """Everything known about one result directory, as the dict that becomes rocprofv3_summary.json."""
    directory = pathlib.Path(directory)
    kernels, label, files = read_kernels(directory)
    launches = sum(calls for calls, _ in kernels.values())
    total = sum(time for _, time in kernels.values())
    steps, selected, counted = steps_profiled(directory)

    def share(time):
        return 100 * time / total if total else 0.0

    by_kind = {kind: [0, 0.0] for kind in KINDS}
    for name, (calls, time) in kernels.items():
        by_kind[kind_of_kernel(name)][0] += calls
        by_kind[kind_of_kernel(name)][1] += time
    ordered = sorted(kernels.items(), key=lambda item: (-item[1][1], item[0]))
    return {
        "directory": str(directory), "source": label, "files": files,
        "distinct_kernels": len(kernels), "launches": launches, "kernel_time_ms": total / 1e6,
        "steps": steps, "selected_regions": selected, "steps_counted": counted,
        "launches_per_step": launches / steps if steps else None,
        "kernel_time_ms_per_step": total / 1e6 / steps if steps else None,
        "by_kind": [{"kind": kind, "launches": calls, "time_ms": time / 1e6, "percent": share(time)}
                    for kind, (calls, time) in by_kind.items()],
        "top_kernels": [{"name": name, "kind": kind_of_kernel(name), "calls": calls, "time_ms": time / 1e6,
                         "average_us": time / calls / 1e3, "percent": share(time)}
                        for name, (calls, time) in ordered[:TOP_KERNELS]],
        "memory_copies": read_memory_copies(directory), "counters": read_counters(directory),
    }


def short_name(kernel, width=64):
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|\.kd$", "", kernel)
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
    if summary["memory_copies"]:
        lines += ["DMA copies       {count:12d}    {time_ms:.3f} ms".format(**summary["memory_copies"])]
    lines += ["", f"{'kind':<14}{'launches':>10}{'ms':>12}{'share':>8}"]
    lines += ["{kind:<14}{launches:>10}{time_ms:>12.3f}{percent:>7.1f}%".format(**row)
              for row in summary["by_kind"] if row["launches"]]
    lines += ["", f"Top {len(summary['top_kernels'])} kernels by total time",
              f"{'calls':>8}{'ms':>12}{'average us':>12}{'share':>8}  kind           name"]
    lines += ["{calls:>8}{time_ms:>12.3f}{average_us:>12.2f}{percent:>7.1f}%  {kind:<14} ".format(**row)
              + short_name(row["name"]) for row in summary["top_kernels"]]
    if summary["counters"]:
        lines += ["", "Counters, summed over all recorded kernels"]
        lines += [f"{name:<32}{value:>20.0f}" for name, value in sorted(summary["counters"].items())]
    return "\n".join(lines) + "\n"


def differences(current, earlier):
    """Current against earlier, per step where both know their steps, else in total."""
    rows = [(label, earlier[key], current[key])
            for label, key in (("launches", "launches"), ("kernel time ms", "kernel_time_ms"))]
    for before, now in zip(earlier["by_kind"], current["by_kind"], strict=True):
        if now["launches"] or before["launches"]:
            rows += [(f"{now['kind']} launches", before["launches"], now["launches"]),
                     (f"{now['kind']} ms", before["time_ms"], now["time_ms"])]
    per_step = bool(current["steps"] and earlier["steps"])
    if per_step:
        rows = [(label, a / earlier["steps"], b / current["steps"]) for label, a, b in rows]
    same_steps = earlier["selected_regions"] == current["selected_regions"]
    return {"earlier": earlier["directory"], "per_step": per_step, "same_steps": same_steps,
            "rows": [{"figure": label, "earlier": a, "current": b,
                      "change_percent": 100 * (b / a - 1) if a else None} for label, a, b in rows]}


def render_differences(comparison):
    unit = "per step" if comparison["per_step"] else "in total (the number of steps is not known for both)"
    lines = [f"Compared with {comparison['earlier']}, {unit}"]
    if not comparison["same_steps"]:
        lines += ["Caution: one run recorded its measured steps only, the other also start-up and warm-up."]
    lines += [f"{'':<26}{'earlier':>12}{'this run':>12}{'change':>10}"]
    for row in comparison["rows"]:
        change = "new" if row["change_percent"] is None else f"{row['change_percent']:+.1f}%"
        lines += [f"{row['figure']:<26}{row['earlier']:>12.3f}{row['current']:>12.3f}{change:>10}"]
    return "\n".join(lines) + "\n"


def report(summary, comparison=None):
    return render(summary) + ("\n" + render_differences(comparison) if comparison else "")


def main_figures(directory):
    """The few figures that make different profilers' runs comparable; None where not measured."""
    directory = pathlib.Path(directory)
    measured = program_summary(directory).get("performance_summary", {})
    median = measured.get("median_batch_time")
    try:
        kernels = summarize(directory)
    except Unreadable:
        kernels = {"launches": 0}
    seen = kernels["launches"] > 0
    top = kernels["top_kernels"][0] if seen else {}
    return {
        "median step ms": median * 1e3 if median is not None else None,
        "samples/s": measured.get("avg_training_speed"),
        "peak memory MB": measured.get("peak_memory_mb"),
        "launches per step, by the trainer": measured.get("launches_per_step"),
        "launches per step, recorded": kernels["launches_per_step"] if seen else None,
        "kernel time ms per step": kernels["kernel_time_ms_per_step"] if seen else None,
        "slowest kernel": f"{short_name(top['name'], 40)} ({top['percent']:.0f}%)" if top else None,
    }


def load(directory):
    """Summary of a directory that must hold kernel records. Raises UserError."""
    if not pathlib.Path(directory).is_dir():
        raise Unreadable(f"{directory}: no such directory")
    summary = summarize(directory)
    if not summary["launches"]:
        raise UserError(f"{directory}: no kernel records (looked for *kernel_stats.csv, *kernel_trace.csv, "
                        "*.db and pmc_perf*.csv)", NO_DATA)
    return summary


def run(argv=None):
    """Print the summary of a directory; returns the exit code. Raises UserError."""
    parser = Parser(prog=PROGRAM, description=__doc__)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--compare", metavar="EARLIER", help="result directory of an earlier run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    summary = load(options.directory)
    comparison = differences(summary, load(options.compare)) if options.compare else None
    if options.json:
        print(json.dumps({**summary, "comparison": comparison}))
    else:
        print(report(summary, comparison), end="")
    return OK


def main(argv=None):
    return exit_code(run, argv, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
