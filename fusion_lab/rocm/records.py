"""Reading what AMD's profilers write: CSV of every rocprofv3 and rocprof-compute generation, and rocpd.

Columns are found by name, because their order and number changed with ROCm 6.3, 7.0 and rocpd. Times are in
nanoseconds. Standard library only.
"""
import contextlib
import csv
import gzip
import math
import os
import re
import sqlite3
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

from fusion_lab.training.files import UserError
from fusion_lab.training.reading import read_regular, require_regular

OF_ROCPROFV3 = ("kernel statistics CSV", "kernel trace CSV", "rocpd database")
KERNEL_FILES = ("*kernel_stats.csv", "*kernel_trace.csv", "*.db", "pmc_perf*.csv", "results_pmc_perf_*.csv",
                "results_pmc_perf_*.csv.gz")
WORKLOADS = "workloads"  # of rocprof-compute: workloads/NAME/GPU, with folders of their own in newer releases
PASS = re.compile(r"pass_\d+")  # of rocprofv3, which runs a program again for each group of counters
OWN_INPUT = "perfmon"  # folder of rocprof-compute with the lists of counters that it is to collect
NO_COUNTER = {"gpuid", "dispatchid", "gridsize", "workgroupsize", "kernelname", "starttimestamp",
              "endtimestamp", "kernelid", "ldsperworkgroup", "scratchperworkitem", "archvgpr", "accumvgpr",
              "sgpr"}


class Unreadable(UserError):
    """A file that is there but is not what its name says."""


@dataclass
class Kernels:
    """What ran: {kernel name: (calls, nanoseconds)}, in whose words, from which files."""
    totals: dict = field(default_factory=dict)
    source: str | None = None
    files: list = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------
# Which files

def pass_of(path):
    """What run of the program a file comes from, where the profiler ran it again and again, or None."""
    folder = re.search(r"/(pass_\d+)/|/workloads/.+/out/([^/]+)/", path.absolute().as_posix())
    return folder and (folder[1] or folder[2])


def folders_below(directory):
    """Folders in a directory, without links and without what was set aside."""
    return sorted(path for path in directory.glob("*")
                  if path.is_dir() and not path.is_symlink() and ".old-" not in path.name)


def is_session(directory):
    """Whether one of the wrappers wrote into it."""
    return os.path.exists(directory / "manifest.json")


def result_folders(directory):
    """Where the files of one run can lie: the directory, HOST, pass_1 and pass_1/HOST in it, and whatever is
    below rocprof-compute's `workloads`. What else is below, other sessions among it, is none of its business,
    and may be a whole disk."""
    if WORKLOADS in directory.absolute().parts:
        return [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    found = [directory]
    for folder in folders_below(directory):
        if folder.name == WORKLOADS:
            found += result_folders(folder)
        elif not is_session(folder):
            found += [folder, *(folders_below(folder) if PASS.fullmatch(folder.name) else ())]
    return found


def result_files(directory, pattern):
    """Regular files of the run in a directory, without those that were set aside and without lists that a
    profiler was given. Of several passes over the same program the first counts."""
    files = []
    for path in sorted(path for folder in result_folders(directory) for path in folder.glob(pattern)):
        folders = path.relative_to(directory).parts
        if not any(".old-" in folder for folder in folders) and OWN_INPUT not in folders and path.is_file():
            files.append(path)
    passes = sorted({pass_of(path) or "" for path in files} - {""})
    return [path for path in files if pass_of(path) in (None, *passes[:1])]


def has_kernels(directory):
    return any(any(directory.glob(pattern)) for pattern in KERNEL_FILES)


def other_runs(directory):
    """Names of folders with kernel records in a directory that has none itself, if they are not one run of
    which it is the directory: sessions of their own, or several."""
    if has_kernels(directory):
        return []
    folders = [path for path in folders_below(directory) if path.name != WORKLOADS]
    sessions = [path for path in folders if is_session(path)
                and any(result_files(path, pattern) for pattern in KERNEL_FILES)]
    runs = [path for path in folders if has_kernels(path) and not PASS.fullmatch(path.name)]
    return sorted({path.name for path in runs + sessions}) if sessions or len(runs) > 1 else []


def preferably_counters(files):
    """Of rocprof-compute's workloads, the one with counters rather than the roofline."""
    return sorted(files, key=lambda path: "_roof" in str(path))


# ---------------------------------------------------------------------------------------------------------
# CSV

LONGEST_LINE = 2 ** 20  # letters; a gzip bomb can be one line
MOST_ROWS = 10 ** 7  # of a query; a view may have no end
SECONDS = 60  # for the files of a directory
LARGEST = 1e30  # no figure comes near it, and products of two stay finite


def plain(cell):
    """`Kernel_Name`, `KERNEL_NAME` and `KernelName` are one column."""
    return re.sub(r"[^a-z]", "", cell.lower())


class TooMuch(UserError):
    """Files that take too long to read, or have no end, as what is damaged or made to harm may not."""


ends = math.inf  # when reading has taken too long


@contextlib.contextmanager
def limited():
    """Within, reading may take SECONDS. Raises TooMuch."""
    global ends
    ends = time.monotonic() + SECONDS
    try:
        yield
    finally:
        ends = math.inf


def too_late():
    return time.monotonic() > ends


def too_slow(path):
    return TooMuch(f"{path}: takes more than {SECONDS} s to read, with what came before it")


def lines_of(file, path):
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise csv.Error(f"a line of more than {LONGEST_LINE} letters")
        if too_late():
            raise too_slow(path)
        yield line


def csv_rows(path):
    """The rows of a CSV file, gzipped or not. Raises Unreadable."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        require_regular(path)
        with opener(path, "rt", newline="", encoding="utf-8-sig", errors="replace") as file:
            yield from csv.reader(lines_of(file, path))
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_header(path):
    return next(csv_rows(path), [])


def number(cell):
    """A cell as a number that can be reckoned with. Raises ValueError."""
    value = float(cell)
    if not abs(value) < LARGEST:
        raise ValueError
    return value


def read_rows(path, *names, numbers=()):
    """The columns `names`, as text, and `numbers` of every row. A damaged last row is left out, as what an
    interrupted run leaves; so is the header where it comes again. Raises Unreadable where a column is missing
    or any other row is damaged."""
    rows = csv_rows(path)
    first = next(rows, [])
    header, wanted, damaged = [plain(cell) for cell in first], (*names, *numbers), None
    missing = [name for name in wanted if name not in header]
    if missing:
        raise Unreadable(f"{path}: no column {', '.join(missing)} in its header: {', '.join(header)[:500]}")
    columns = [header.index(name) for name in wanted]
    for place, row in enumerate(rows, 2):
        if not row or row == first:
            continue
        if damaged:
            raise Unreadable(f"{path}: row {damaged} is damaged")
        try:
            cells = [row[column] for column in columns]
            cells[len(names):] = map(number, cells[len(names):])
        except (IndexError, ValueError):
            damaged = place
        else:
            yield cells


def add_up(entries):
    totals = defaultdict(lambda: (0, 0.0))
    for name, calls, nanoseconds in entries:
        count, time = totals[name]
        totals[name] = (count + calls, time + nanoseconds)
    return dict(totals)


def merge(readings):
    return add_up((name, calls, time) for reading in readings for name, (calls, time) in reading.items())


def of_calls(path, rows):
    """add_up() of (name, calls, nanoseconds) where all have calls. Raises Unreadable."""
    rows = [(name, int(calls), time) for name, calls, time in rows]
    if any(calls < 1 for _, calls, _ in rows):
        raise Unreadable(f"{path}: it has a kernel without calls")
    return add_up(rows)


TIMES = ("starttimestamp", "endtimestamp")


def read_stats(path):
    return of_calls(path, read_rows(path, "name", numbers=("calls", "totaldurationns")))


def read_trace(path, name="kernelname"):
    return add_up((kernel, 1, end - start) for kernel, start, end in read_rows(path, name, numbers=TIMES))


def read_long_form(path):
    """rocprof-compute from 3.5 on: a row for each dispatch and counter, so a launch stands there often."""
    launches = {tuple(row) for row in read_rows(path, "dispatchid", "kernelname", numbers=TIMES)}
    return add_up((kernel, 1, end - start) for _, kernel, start, end in launches)


# ---------------------------------------------------------------------------------------------------------
# rocpd: plain SQLite; ROCm's own reader is tied to one Python version, so not used

def query_rocpd(path, *queries, names=1):
    """Rows of the first query that this generation's tables answer, as lists: the first `names` columns are
    text, the others numbers. Raises Unreadable."""
    try:
        require_regular(path)
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except (OSError, sqlite3.Error) as error:
        raise Unreadable(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    connection.text_factory = lambda text: text.decode(errors="replace")
    connection.set_progress_handler(too_late, 10_000)  # operations of SQLite's machine
    with contextlib.closing(connection):
        for query in queries:
            try:
                rows = connection.execute(query).fetchmany(MOST_ROWS)
                if len(rows) == MOST_ROWS:
                    raise TooMuch(f"{path}: a table of {MOST_ROWS} rows or more")
                return [[*map(str, row[:names]), *map(number, row[names:])] for row in rows]
            except sqlite3.OperationalError as error:  # no such table or view: not this generation
                if too_late():
                    raise too_slow(path) from None
                problem = error
            except (sqlite3.Error, TypeError, ValueError) as error:
                problem = error
                break
    raise Unreadable(f"{path}: not a rocpd database: {problem}")


# SQLite reckons with whatever is no number as 0; here it becomes NULL, which is no number either.
NANOSECONDS = """CASE SUM(typeof(k."end") != 'integer' OR typeof(k.start) != 'integer') WHEN 0
                 THEN SUM(k."end" - k.start) END"""


def read_rocpd(path):
    rows = query_rocpd(
        path, f"SELECT s.display_name, COUNT(*), {NANOSECONDS}, 1 FROM rocpd_kernel_dispatch k JOIN "
        "rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid GROUP BY 1",
        "SELECT name, total_calls, total_duration, 1000 FROM top_kernels")  # this view is in microseconds
    return of_calls(path, ((name, calls, time * factor) for name, calls, time, factor in rows))


def optional_rocpd(directory, query, names=0):
    """Rows of all databases below directory; none where they lack the tables, as other generations do."""
    for path in result_files(directory, "*.db"):
        with contextlib.suppress(Unreadable):
            yield from query_rocpd(path, query, names=names)


# ---------------------------------------------------------------------------------------------------------
# Kernels, copies, counters of a result directory

def read_kernels(directory):
    """Kernels, from the best source there is."""
    sources = zip((*OF_ROCPROFV3, *["rocprof-compute counters"] * 3), KERNEL_FILES,
                  (read_stats, read_trace, read_rocpd, read_trace, *[read_long_form] * 2), strict=True)
    for source, pattern, reader in sources:
        files = result_files(directory, pattern)
        if source == "rocprof-compute counters":
            files = preferably_counters(files)[:1]  # each file is one more run of the program
        elif any(WORKLOADS in path.relative_to(directory).parts for path in files):
            first = preferably_counters(files)[0]
            files = [path for path in files if path.parents[1] == first.parents[1]]  # processes of one run
        totals = merge(map(reader, files))
        if totals:
            return Kernels(totals, source, [str(path.relative_to(directory)) for path in files])
    return Kernels()


def read_memory_copies(directory):
    """Copies by the DMA engines; copies done by a kernel are in the kernel table. None if not traced."""
    copies = merge(map(read_stats, result_files(directory, "*memory_copy_stats.csv")))
    if not copies:
        copies = merge(read_trace(path, "direction")
                       for path in result_files(directory, "*memory_copy_trace.csv"))
    if not copies:
        copies = add_up(("copy", 1, time) for (time,) in
                        optional_rocpd(directory, 'SELECT "end" - start FROM rocpd_memory_copy'))
    if not copies:
        return None
    return {"count": sum(calls for calls, _ in copies.values()),
            "time_ms": sum(time for _, time in copies.values()) / 1e6}


def read_counters(directory):
    """(counter, value, nanoseconds of the dispatch) for each dispatch that rocprofv3 counted."""
    for path in result_files(directory, "*counter_collection.csv"):
        timed = set(TIMES) <= set(map(plain, read_header(path)))
        for name, value, *times in read_rows(path, "countername", numbers=("countervalue", *TIMES * timed)):
            yield name, value, times[1] - times[0] if timed else 0.0
    yield from optional_rocpd(
        directory, 'SELECT i.name, p.value, k."end" - k.start FROM rocpd_pmc_event p '
        "JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid "
        "JOIN rocpd_kernel_dispatch k ON k.event_id = p.event_id AND k.guid = p.guid", names=1)


def wanted_counters(workload):
    """Counters that rocprof-compute set out to collect, by the lists that it wrote for itself."""
    words = set()
    for path in (workload / OWN_INPUT).glob("*.txt"):
        with contextlib.suppress(OSError):
            for line in read_regular(path).decode(errors="replace").splitlines():
                if line.startswith("pmc:"):
                    words.update(line[4:].split())
    return {word for word in words if "ACCUM_PREV" not in word}  # those get another name in the results


def collected_counters(workload):
    """Counters that its result files hold, in whatever form."""
    names = set()
    for path in (path for ending in ("csv", "csv.gz") for path in result_files(workload, f"*.{ending}")):
        header = read_header(path)
        if "countername" in map(plain, header):
            names.update(name for (name,) in read_rows(path, "countername"))
        elif "kernelname" in map(plain, header):
            names.update(cell for cell in header if plain(cell) not in NO_COUNTER)
    for path in workload.rglob("*.db"):
        with contextlib.suppress(Unreadable):
            names.update(name for (name,) in query_rocpd(
                path, "SELECT DISTINCT i.name FROM rocpd_pmc_event p "
                "JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid"))
    return names
