"""Reading what AMD's profilers write: CSV of every rocprofv3 and rocprof-compute, else kernels of rocpd.

rocprofv3 may write both for one run, so a run is read from one of them. Columns are found by name, because
their order and number changed. Times are in nanoseconds. Standard library only.
"""
import contextlib
import csv
import gzip
import math
import re
import sqlite3
from collections import defaultdict

from fusion_lab.measuring.spans import Span, possible
from fusion_lab.training.errors import UserError

OF_COMPUTE = "rocprof-compute counters"
WORKLOADS = "workloads"  # of rocprof-compute: workloads/NAME/GPU, with folders of their own in newer releases
PASS = r"/(pass_\d+)/|/workloads/.+/out/([^/]+)/"  # the program runs again for each group of counters
OWN_INPUT = "perfmon"  # folder of rocprof-compute with the lists of counters that it is to collect
TIMES = ("starttimestamp", "endtimestamp")
QUEUE = ("agentid", "gpuid", "queueid", "streamid")
JITTER = 1000  # ns by which one clock may be off against itself
UNKNOWN = "(unknown)"  # a kernel of which the profiler wrote no name
COUNTER = re.compile("(sqc?|t[ad]|tc[acp]|grbm|cp[cf]|spi|gl[012]|gcea|gcr|utcl)[a-z]")  # as plain() has it


def pass_of(path):
    """What run of the program a file comes from, where the profiler ran it again and again, or ""."""
    folder = re.search(PASS, path.absolute().as_posix())
    return folder[1] or folder[2] if folder else ""


def result_files(directory, pattern, every_pass=False):
    """Files of the run in a directory, of its first pass or of all: there, in HOST, pass_1 and pass_1/HOST,
    or anywhere in `workloads`. None that is another session's or the profiler's own input."""
    def foreign(parts):
        return OWN_INPUT in parts or len(parts) > 1 and (directory / parts[0] / "manifest.json").exists()
    places = ["**/"] if WORKLOADS in directory.absolute().parts else ["", "*/", "pass_*/*/", "workloads/**/"]
    files = sorted({path for place in places for path in directory.glob(place + pattern) if path.is_file()
                    and not foreign(path.relative_to(directory).parts)})
    first = min((pass_of(path) for path in files if pass_of(path)), default="")
    return [path for path in files if every_pass or pass_of(path) in ("", first)]


def plain(cell):
    """`Kernel_Name`, `KERNEL_NAME` and `KernelName` are one column."""
    return re.sub(r"[^a-z]", "", cell.lower())


def table(path):
    """The header of a CSV file, as plain() has it, then its rows."""
    opener = gzip.open if path.suffix == ".gz" else open  # the newest rocprof-compute compresses
    try:
        with opener(path, "rt", newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = csv.reader(file)
            yield list(map(plain, next(rows, [])))
            yield from filter(None, rows)
    except (OSError, EOFError, csv.Error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_rows(path, *names, numbers=()):
    """The columns `names`, as text, and `numbers` of every row, without a damaged last one, which an
    interrupted run leaves. Raises UserError."""
    rows, damaged = table(path), None
    header = next(rows)
    if missing := [name for name in (*names, *numbers) if name not in header]:
        raise UserError(f"{path}: no column {', '.join(missing)} in its header: {', '.join(header)[:500]}")
    texts, values = ([header.index(name) for name in part] for part in (names, numbers))
    for place, row in enumerate(rows, 2):
        if damaged:
            raise UserError(f"{path}: row {damaged} is damaged")
        try:
            yield [*(row[column] for column in texts), *(float(row[column]) for column in values)]
        except (IndexError, ValueError):
            damaged = place


def add_up(entries):
    """(name, calls, nanoseconds) -> {name: (calls, nanoseconds)}"""
    totals = defaultdict(lambda: (0, 0.0))
    for name, calls, nanoseconds in entries:
        count, time = totals[name]
        totals[name] = (count + int(calls), time + nanoseconds)
    return dict(totals)


# Readers of kernels return [(name, calls, nanoseconds)] and how many calls have impossible times.


def read_stats(path):
    entries, impossible = [], 0
    for name, calls, time in read_rows(path, "name", numbers=("calls", "totaldurationns")):
        if not (math.isfinite(calls) and math.isfinite(time)):
            raise UserError(f"{path}: {name[:60]!r} has {calls} calls of {time} ns, which is impossible")
        entries += [(name, calls, max(time, 0.0))] * (calls >= 1)
        impossible += int(calls) * (time < 0)
    return entries, impossible


def read_spans(path, name="kernelname"):
    """[Span] of the rows of a CSV file."""
    header, spans = next(table(path)), []
    columns = [column for column in (*QUEUE, "correlationid", "dispatchid") if column in header]
    for kernel, *texts, start, end in read_rows(path, name, *columns, numbers=TIMES):
        of = dict(zip(columns, texts, strict=True))
        queue = tuple(map(of.get, QUEUE)) if "queueid" in of else None
        launch, number = of.get("correlationid"), of.get("dispatchid")
        spans.append(Span(kernel or UNKNOWN, start, end, queue, launch, number))
    return spans


def counted(spans):
    """What readers of kernels return, of Spans."""
    kept, impossible = possible(spans, JITTER)
    return [(span.name, 1, span.time) for span in kept if span], impossible


def read_trace(path, name="kernelname"):
    """Also rocprof-compute's from 3.5 on, which has a row for each dispatch and counter."""
    return counted(read_spans(path, name))


def query_rocpd(path, query):
    """Rows. Plain SQLite: ROCm's own reader is tied to one Python version."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = lambda text: text.decode(errors="replace")
            return database.execute(query).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{path}: not a rocpd database: {error}") from None


def read_rocpd(path):
    """Every dispatch counts once, whether or not its kernel's symbol was written, under whatever name that
    has. Schema 4 has times in a table of their own."""
    kernels, symbols, stamps = ({row[1] for row in query_rocpd(path, f"PRAGMA table_info(rocpd_{table})")}
                                for table in ("kernel_dispatch", "info_kernel_symbol", "timestamp"))

    def of(table, columns, what, key):
        """SQL: a value of one row of another table, or NULL."""
        both = " AND o.guid = k.guid" * ("guid" in columns & kernels)
        return f"(SELECT {what} FROM rocpd_{table} o WHERE o.id = k.{key}{both} LIMIT 1)"

    if {"start", "end"} <= kernels:
        times = ["k.start", 'k."end"']
    elif {"start_id", "end_id"} <= kernels and "value" in stamps:
        times = [of("timestamp", stamps, "o.value", key) for key in ("start_id", "end_id")]
    elif kernels:
        version = query_rocpd(path, "SELECT value FROM rocpd_metadata WHERE tag = 'schema_version'")
        raise UserError(f"{path}: rocpd's schema {''.join(*version)} is not known here")
    else:
        raise UserError(f"{path}: not a rocpd database: it has no table rocpd_kernel_dispatch")
    names = [of("info_kernel_symbol", symbols, f"nullif(o.{name}, '')", "kernel_id")
             for name in ("display_name", "kernel_name") if name in symbols]
    queue = ("guid", "track_id", "agent_id", "queue_id", "stream_id")
    fields = ", ".join([f"coalesce({', '.join([*names, repr(UNKNOWN)])}, '')", *times,
                        *(f"k.{name}" for name in queue if name in kernels)])
    rows = query_rocpd(path, f"SELECT {fields} FROM rocpd_kernel_dispatch k")
    return counted([Span(name, math.nan if None in (start, end) else start, end or 0.0,
                         tuple(queue) if len(queue) > 1 else None) for name, start, end, *queue in rows])


SOURCES = (("kernel statistics CSV", "*kernel_stats.csv", read_stats),
           ("kernel trace CSV", "*kernel_trace.csv", read_trace),
           (OF_COMPUTE, "pmc_perf*.csv", read_trace), (OF_COMPUTE, "results_pmc_perf_*.csv*", read_trace),
           ("rocpd database", "*.db", read_rocpd))
KERNEL_FILES = [pattern for _, pattern, _ in SOURCES]


def read_kernels(directory):
    """({kernel name: (calls, nanoseconds)}, how many calls have impossible times, their source in words, its
    files), of the first that has any."""
    for source, pattern, reader in SOURCES:
        # of rocprof-compute's workloads the one with counters first
        files = sorted(result_files(directory, pattern), key=lambda path: "_roof" in str(path))
        if source == OF_COMPUTE:  # each file is one more run, or lists dispatches without times
            files = [path for path in files if set(TIMES) <= set(next(table(path)))][:1]
        elif any(WORKLOADS in path.relative_to(directory).parts for path in files):
            files = [path for path in files if path.parents[1] == files[0].parents[1]]  # processes of one run
        found = [reader(path) for path in files]
        if totals := add_up(entry for entries, _ in found for entry in entries):
            names = [str(path.relative_to(directory)) for path in files]
            return totals, sum(impossible for _, impossible in found), source, names
    return {}, 0, None, []


def read_memory_copies(directory):
    """Copies by the DMA engines; copies done by a kernel are in the kernel table. None if not traced."""
    rows = [row for path in result_files(directory, "*memory_copy_trace.csv")
            for row in read_trace(path, "direction")[0]]
    return {"count": len(rows), "time_ms": sum(time for *_, time in rows) / 1e6} if rows else None


def read_counters(directory):
    """[(counter, value, nanoseconds of the dispatch)] of rocprofv3, each of the first pass that has it."""
    passes, rows = {}, []
    for path in result_files(directory, "*counter_collection.csv", every_pass=True):
        times = TIMES if TIMES[0] in next(table(path)) else ()
        for name, value, *span in read_rows(path, "countername", numbers=("countervalue", *times)):
            if passes.setdefault(name, pass_of(path)) == pass_of(path) and math.isfinite(value):  # not 0/0
                rows.append((name, value, span[1] - span[0] if span else 0))
    return rows


def has_counters(workload):
    """Whether rocprof-compute left one counter or more: in CSV, or in databases, as 3.9 (ROCm 10.1) does."""
    for path in result_files(workload, "*.csv*"):
        header, *rows = table(path)
        if rows and ("countername" in header or any(map(COUNTER.match, header))):
            return True
    return any(query_rocpd(path, "SELECT id FROM rocpd_pmc_event LIMIT 1")
               for path in result_files(workload, "*.db", every_pass=True))
