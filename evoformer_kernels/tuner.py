"""Which tile sizes a Triton kernel runs with: a table by GPU, kernel and class of shape, and how it is made.

Nothing is timed during training. launch() looks the configuration up:
    1. in what was measured on this GPU with this torch and Triton (`--retune`, kept in the user's cache)
    2. in tiles.json beside this file, shipped for the architectures named there
    3. where exactly this class of shape is in neither, that of the nearest one of the same widths in either:
       tiles measured for one sample of 256 residues serve two
    4. else it takes the first candidate, a conservative one

Within retuning() every launch first times its candidates on its own arguments, one after the other in each
round. It keeps the winner if that beats the first candidate by more than the spread of both.
"""
import contextlib
import json
import os
import pathlib
import re
import tempfile
from functools import cache

import torch
import triton

from evoformer_kernels.precision import architecture

SHIPPED = pathlib.Path(__file__).with_name("tiles.json")
EXTENTS = "PSLR"  # counts in a class: P positions, S residues, L keys or numbers of a sum, R rows
FINER = re.compile(r"bias|gate|R\d+")  # words that a table may lack: what it says holds with and without
EXTENT = re.compile(rf"([{EXTENTS}])(\d+)")
LARGEST = 128  # no tile is longer, so larger counts may differ
ROUNDS, REPEATS = 9, 5  # rounds of every candidate; launches in each
MOST_PLANS = 1024  # of one function: each is a few KB
CYCLES = 6_000_000  # the GPU waits so long, about 3 ms; meanwhile the host queues REPEATS launches
found = None  # {kernel and class: configuration} while retuning() measures
ranked = {}  # {kernel and class: configurations of the tables, the nearest class first}
plans = []  # dicts of what was made for the tiles known so far


def gpu():
    """"gfx942", or "sm_90": what the shipped table goes by."""
    major, minor = torch.cuda.get_device_capability()
    return architecture(on_gpu=True) or f"sm_{major}{minor}"


def cache_file():
    """Where this user's measurements for this GPU, torch and Triton are kept: under /tmp for a user of a
    container who has no name and no HOME."""
    home = os.path.expanduser("~")
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(tempfile.gettempdir() if home == "~" else home,
                                                            ".cache")
    name = f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}.json"
    return pathlib.Path(root) / "evoformer_kernels" / name.replace(" ", "_").replace("/", "_")


def read(path):
    """{kernel and class: configuration} of a table, {} where there is none that can be used."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


@cache
def tables():
    """What is known for this GPU: as the user has measured it, and as it is shipped."""
    return [read(cache_file()), read(SHIPPED).get(gpu(), {})] if torch.cuda.is_available() else []


class NoneFits(RuntimeError):
    """No candidate for a kernel fits this GPU."""


def plan(kept, key, make):
    """make(), kept in the dict `kept` by this key until tiles are measured anew; never kept meanwhile."""
    if found is not None:
        return make()
    if (made := kept.get(key)) is None:
        if not any(each is kept for each in plans):
            plans.append(kept)
        if len(kept) >= MOST_PLANS:
            kept.clear()
        made = kept[key] = make()
    return made


def forget():
    """Drop all that was made for the tiles known so far."""
    for each in plans:
        each.clear()


def class_of(dtype, **sizes):
    """The class of a kernel's arguments, "bfloat16 P4096 C128": EXTENTS are rounded up to powers of two, and
    widths are exact."""
    words = [f"{letter}{triton.next_power_of_2(size) if letter in EXTENTS else size}"
             for letter, size in sizes.items()]
    return " ".join([str(dtype).removeprefix("torch."), *words])


def launch(kernel, shape, candidates, run):
    """run(configuration) with the best one known.

    kernel: its name; shape: the class of its arguments, such as "bfloat16 L256 D32"; candidates: dicts of
    tile sizes, `num_warps` and `num_stages`, the first of which must fit every GPU.
    """
    key = f"{kernel} {shape}"
    if found is not None and key not in found:
        found[key] = fastest(key, candidates, run)
    run(chosen(kernel, shape, candidates))


def chosen(kernel, shape, candidates):
    """The configuration with which launch() runs; while retuning, this key's winner if it has one. One in a
    table that is no candidate any more counts as unknown."""
    key = f"{kernel} {shape}"
    if (fresh := (found or {}).get(key)) in candidates:  # a search would last into what is timed
        return fresh
    known = plan(ranked, key, lambda: nearest_first(key, tables()))
    return next((each for each in known if each in candidates), candidates[0])


def nearest_first(key, known):
    """The configurations that the tables `known` have for classes with key's widths: the class of this very
    key first, then the others by distance, in powers of two and summed over the extents. Ties: the larger
    class, then key's own dtype, then the earlier table."""
    (widths, extents), alike = parts(key), []
    needed = {word for word in widths if not FINER.fullmatch(word)}
    for table in known:
        for name, configuration in table.items():
            theirs = parts(name)
            of_extents = theirs[1].keys() <= extents.keys() <= theirs[1].keys() | {"R"}
            if needed <= set(theirs[0]) <= set(widths) and of_extents:
                beyond = [theirs[1].get(letter, extent) - extent for letter, extent in extents.items()]
                other_dtype = ("bfloat16" in name) != ("bfloat16" in key)
                order = name != key, sum(map(abs, beyond)), -sum(beyond), other_dtype
                alike.append((order, configuration))
    return [configuration for _, configuration in sorted(alike, key=lambda each: each[0])]


def parts(key):
    """What decides which tiles fit, [words], and extents, {letter: bits of its number}, of a table's key. A
    count of LARGEST or less caps a tile, so it is no extent. Both dtypes of 16 bits take the same memory and
    the same time."""
    widths, extents = [], {}
    for word in key.split():
        counted = EXTENT.fullmatch(word)
        if counted and int(counted[2]) > LARGEST:
            extents[counted[1]] = int(counted[2]).bit_length()
        else:
            widths.append(word.replace("bfloat16", "float16"))
    return widths, extents


def fastest(key, candidates, run):
    """The candidate that wins beyond noise, else the first; those that do not fit this GPU, nor have kernels
    that do, are left out. NoneFits if all are."""
    times = {}
    for number, candidate in enumerate(candidates):
        with contextlib.suppress(triton.runtime.errors.OutOfResources, triton.CompilationError,
                                 torch.OutOfMemoryError, NoneFits):
            run(candidate)
            times[number] = []
    if not times:
        raise NoneFits(f"{key}: none of {len(candidates)} tile sizes fits {torch.cuda.get_device_name()}")
    for _ in range(ROUNDS):
        for number, measured in times.items():
            measured.append(milliseconds(lambda number=number: run(candidates[number])))
    return candidates[winner(times)]


def winner(times):
    """The candidate whose median time is shortest, if its upper quartile is below the lower quartile of the
    first candidate; else the first. times: {candidate's number: [milliseconds]}."""
    def quartile(number, share):
        return sorted(times[number])[int(share * (len(times[number]) - 1))]
    best = min(times, key=lambda number: quartile(number, 0.5))
    first = min(times)
    return best if quartile(best, 0.75) < quartile(first, 0.25) else first


def milliseconds(run):
    """A launch's time on the GPU, mean of REPEATS. The GPU waits first, while the host queues them all: a
    launch of a small kernel takes longer than the kernel."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    start.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS


@contextlib.contextmanager
def retuning():
    """Within, every launch measures its candidates first; afterwards the winners are in the cache."""
    global found
    found = {}
    try:
        yield found
        write(cache_file(), {**read(cache_file()), **found})
        tables.cache_clear()
        forget()
    finally:
        found = None


def write(path, content):
    """Replace the table in one piece: other processes may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
    os.replace(file.name, path)
