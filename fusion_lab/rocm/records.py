"""Reading what AMD's profilers write: rocpd, and CSV of every rocprofv3 and rocprof-compute generation.

A run is read from its databases, or from its CSV where it has none: ROCm 10.0 may write both. Columns are
found by name, because their order and number changed. Times are in nanoseconds. Standard library only.
"""
import contextlib
import csv
import gzip
import os
import re
import sqlite3
import zlib
from collections import defaultdict
from typing import NamedTuple

from fusion_lab.training.files import UserError
from fusion_lab.training.patience import TooMuch, too_late, too_slow
from fusion_lab.training.reading import read_regular, require_regular

KERNEL_FILES = ("*.db", "*kernel_stats.csv", "*kernel_trace.csv", "pmc_perf*.csv", "results_pmc_perf_*.csv",
                "results_pmc_perf_*.csv.gz")
OF_COMPUTE = "rocprof-compute counters"  # the source of the last three
WORKLOADS = "workloads"  # of rocprof-compute: workloads/NAME/GPU, with folders of their own in newer releases
PASS = re.compile(r"pass_\d+")  # of rocprofv3, which runs a program again for each group of counters
OWN_INPUT = "perfmon"  # folder of rocprof-compute with the lists of counters that it is to collect
NO_COUNTER = set("gpuid dispatchid gridsize workgroupsize kernelname starttimestamp endtimestamp kernelid "
                 "ldsperworkgroup scratchperworkitem archvgpr accumvgpr sgpr queueid pid tid wavesize "
                 "correlationid guid".split())


class Unreadable(UserError):
    """A file that is there but is not what its name says."""


class Kernels(NamedTuple):
    """What ran: {kernel name: (calls, nanoseconds)}, in whose words, from which files; untimed ones."""
    totals: dict
    source: str | None
    files: list
    untimed: list


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
    """The directory, HOST, pass_1, pass_1/HOST, all of `workloads`; what else is below may be a disk."""
    if WORKLOADS in directory.absolute().parts:
        return [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    found = [directory]
    for folder in folders_below(directory):
        if folder.name == WORKLOADS:
            found += result_folders(folder)
        elif not is_session(folder):
            found += [folder, *(folders_below(folder) if PASS.fullmatch(folder.name) else ())]
    return found


def result_files(directory, pattern, every_pass=False):
    """Files of the run in a directory: of its first pass or of all, none that was set aside or given."""
    files = [path for path in sorted({path for folder in result_folders(directory)
                                      for path in folder.glob(pattern)})
             if ".old-" not in str(path.relative_to(directory)) and path.is_file()
             and OWN_INPUT not in path.relative_to(directory).parts]
    passes = sorted({pass_of(path) or "" for path in files} - {""})
    return files if every_pass else [path for path in files if pass_of(path) in (None, *passes[:1])]


def has_kernels(directory):
    return any(any(directory.glob(pattern)) for pattern in KERNEL_FILES)


def other_runs(directory):
    """Names of folders with kernel records in a directory that has none, if they are no run of its own."""
    if has_kernels(directory):
        return []
    folders = [path for path in folders_below(directory) if path.name != WORKLOADS]
    sessions = [path for path in folders if is_session(path)
                and any(result_files(path, pattern) for pattern in KERNEL_FILES)]
    runs = [path for path in folders if has_kernels(path) and not PASS.fullmatch(path.name)]
    return sorted({path.name for path in runs + sessions}) if sessions or len(runs) > 1 else []


LONGEST_LINE = 2 ** 20  # letters; a gzip bomb can be one line
MOST_ROWS = 10 ** 7  # of a query; a view may have no end
LARGEST = 1e30  # no figure comes near it, and products of two stay finite


def plain(cell):
    """`Kernel_Name`, `KERNEL_NAME` and `KernelName` are one column."""
    return re.sub(r"[^a-z]", "", cell.lower())


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
    """The columns `names`, as text, and `numbers` of every row; without a damaged last one, which an
    interrupted run leaves, and without repeated headers. Raises Unreadable."""
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
    return add_up((name, *figures) for reading in readings for name, figures in reading.items())


TIMES = ("starttimestamp", "endtimestamp")


def read_stats(path):
    rows = [(name, int(calls), time) for name, calls, time in read_rows(
        path, "name", numbers=("calls", "totaldurationns"))]
    if any(calls < 1 for _, calls, _ in rows):
        raise Unreadable(f"{path}: it has a kernel without calls")
    return add_up(rows)


def read_trace(path, name="kernelname"):
    return add_up((kernel, 1, end - start) for kernel, start, end in read_rows(path, name, numbers=TIMES))


def read_long_form(path):
    """rocprof-compute from 3.5 on: a row for each dispatch and counter, so a launch stands there often."""
    launches = {tuple(row) for row in read_rows(path, "dispatchid", "kernelname", numbers=TIMES)}
    return add_up((kernel, 1, end - start) for _, kernel, start, end in launches)


def query_rocpd(path, *queries, names=1):
    """Rows of the first query that this generation's tables answer: the first `names` columns are text, the
    others numbers. Plain SQLite: ROCm's own reader is tied to one Python version. Raises Unreadable."""
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
            except (sqlite3.Error, TypeError, ValueError) as error:  # no such table: not this generation
                if too_late():
                    raise too_slow(path) from None
                problem = error
    raise Unreadable(f"{path}: not a rocpd database: {problem}")


def read_rocpd(path):
    return add_up((name, 1, end - start) for name, start, end in query_rocpd(
        path, 'SELECT s.display_name, k.start, k."end" FROM rocpd_kernel_dispatch k '
        "JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid"))


def optional_rocpd(path, *queries, names=0):
    """The same as query_rocpd; none where the database lacks the tables, as other generations do."""
    with contextlib.suppress(Unreadable):
        return query_rocpd(path, *queries, names=names)
    return []


def read_kernels(directory):
    """Kernels, from the best source there is."""
    names = "rocpd database", "kernel statistics CSV", "kernel trace CSV", *[OF_COMPUTE] * 3
    readers = read_rocpd, read_stats, read_trace, read_trace, read_long_form, read_long_form
    untimed = []
    for source, pattern, reader in zip(names, KERNEL_FILES, readers, strict=True):
        # of rocprof-compute's workloads the one with counters first
        files = sorted(result_files(directory, pattern), key=lambda path: "_roof" in str(path))
        if source == OF_COMPUTE:  # each file is one more run
            lists = {path: set(TIMES) <= set(map(plain, read_header(path))) for path in files}
            untimed += [str(path.relative_to(directory)) for path, timed in lists.items() if not timed]
            files = [path for path, timed in lists.items() if timed][:1]
        elif any(WORKLOADS in path.relative_to(directory).parts for path in files):
            files = [path for path in files if path.parents[1] == files[0].parents[1]]  # processes of one run
        if totals := merge(map(reader, files)):
            return Kernels(totals, source, [str(path.relative_to(directory)) for path in files], untimed)
    return Kernels({}, None, [], untimed)


def read_memory_copies(directory):
    """Copies by the DMA engines; copies done by a kernel are in the kernel table. None if not traced."""
    copies = add_up(("copy", 1, time) for path in result_files(directory, "*.db")
                    for (time,) in optional_rocpd(path, 'SELECT "end" - start FROM rocpd_memory_copy'))
    copies = copies or merge(map(read_stats, result_files(directory, "*memory_copy_stats.csv")))
    copies = copies or merge(read_trace(path, "direction")
                             for path in result_files(directory, "*memory_copy_trace.csv"))
    return {"count": sum(calls for calls, _ in copies.values()),
            "time_ms": sum(time for _, time in copies.values()) / 1e6} if copies else None


def read_counter_csv(path):
    times = TIMES if set(TIMES) <= set(map(plain, read_header(path))) else ()
    return ((name, value, end - start) for name, value, start, end in (
        (*row, 0, 0)[:4] for row in read_rows(path, "countername", numbers=("countervalue", *times))))


def read_counter_rocpd(path):
    return optional_rocpd(
        path, 'SELECT i.name, p.value, k."end" - k.start FROM rocpd_pmc_event p '
        "JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid "
        "JOIN rocpd_kernel_dispatch k ON k.event_id = p.event_id AND k.guid = p.guid", names=1)


def read_counters(directory):
    """[(counter, value, nanoseconds of the dispatch)] of rocprofv3, each of the first pass that has it."""
    for pattern, reader in (("*.db", read_counter_rocpd), ("*counter_collection.csv", read_counter_csv)):
        passes = {}
        rows = [row for path in result_files(directory, pattern, every_pass=True) for row in reader(path)
                if passes.setdefault(row[0], pass_of(path)) == pass_of(path)]
        if rows:
            return rows
    return []


def wanted_counters(workload):
    """Counters that rocprof-compute set out to collect, by its own lists: text, from 7.13 on YAML."""
    words = set()
    for path in [*(workload / OWN_INPUT).glob("*.txt"), *(workload / OWN_INPUT).glob("pmc_*.yaml")]:
        with contextlib.suppress(OSError):
            text = read_regular(path).decode(errors="replace")
            words.update(*map(str.split, re.findall(r"^pmc:(.*)$", text, re.MULTILINE)),
                         re.findall(r"^\s*- ['\"]?(?!gfx\d)(\w+(?:\[\d+\])?)['\"]?$", text, re.MULTILINE))
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
        names.update(name for (name,) in optional_rocpd(
            path, "SELECT DISTINCT i.name FROM rocpd_pmc_event p "
            "JOIN rocpd_info_pmc i ON i.id = p.pmc_id AND i.guid = p.guid", names=1))
    return names


def missing_counters(workload):
    """Counters that are wanted and not there. 7.0 to 7.12 call all *_ACCUM by one name in their results."""
    found = collected_counters(workload)
    renamed = "SQ_ACCUM_PREV_HIRES" in found
    return sorted(name for name in wanted_counters(workload) - found
                  if not (renamed and name.endswith("_ACCUM")))
