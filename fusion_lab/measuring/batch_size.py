"""optimize_batch_size.py: the largest and the fastest batch size within a share of memory.

Batch sizes double, each measured like a variant of a comparison, until the next one would not fit: a step's
memory grows along a straight line. The largest that fits by this line is measured last.
"""
import sys
import time

from fusion_lab.measuring import compare
from fusion_lab.measuring.bench import alternate, prepare_all, release
from fusion_lab.measuring.tables import cell
from fusion_lab.measuring.variants import GIVEN, Variant
from fusion_lab.training import flags
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.errors import FAILED, StopRequest, UserError, exit_code
from fusion_lab.training.feeding import to_device
from fusion_lab.training.machine import GIGABYTE, MEGABYTE, choose_device, free_memory, process_settings
from fusion_lab.training.program import load_program
from fusion_lab.training.reporting import command_of, print_result

SCRIPT = "optimize_batch_size.py"
ABOUT = """The largest and the fastest batch size within a share of the free memory.

    python optimize_batch_size.py --target-memory-usage 0.8 --seq-len 128
    python optimize_batch_size.py --program companions/tiny_llama.py --use-amp --enable-all-fusion

Sizes double from --batch-size on (default: 1). Takes the flags of the program that --program names.
"""
ROUNDS, SECONDS = 6, 120.0  # steps of each size; after so long no further size is tried


def row_of(program, settings, device, batch_size, stop):
    """The Row of a batch size, as a comparison has it."""
    chosen = settings.having(batch_size=batch_size)
    variant, batch = Variant(GIVEN, chosen), to_device(program.data(chosen).batch(0), device)
    candidate = compare.candidate_of(program, variant, device)
    prepare_all([candidate], batch, device)
    alternate([candidate], [batch], ROUNDS, stop)
    row = compare.row_of(variant, candidate, candidate)
    candidate.trainer = None
    release()
    return row


def by_straight_line(peaks, limit):
    """The largest batch size whose memory is within the limit, by the line through the last two of peaks,
    {batch size: memory}; None where there are not two, or memory does not grow."""
    (less, low), (more, high) = ([(0, 0), (0, 0), *peaks.items()])[-2:]
    if len(peaks) < 2 or high <= low:
        return None
    return int(more + (limit - high) * (more - less) / (high - low))


def search(measure, first, limit, stop):
    """({batch size: Row} as measured, None). Where SECONDS ran out, a forecast instead of None: the largest
    batch size by the straight line, which was not measured. measure(batch size) gives a Row; limit: MB."""
    began, rows, size = time.monotonic(), {}, first
    while size not in rows and not stop.signal:
        row = rows[size] = measure(size)
        if not row.measured or row.peak_memory_mb is None or row.peak_memory_mb > limit:
            break
        most = by_straight_line({known: row.peak_memory_mb for known, row in rows.items()}, limit)
        if time.monotonic() - began > SECONDS and most not in rows:
            return rows, most
        size = 2 * size if most is None or 2 * size <= most else max(most, size)
    return rows, None


def make_parser(program):
    """The program's flags and the share."""
    parser = flags.make_parser(program, ABOUT, SCRIPT)
    parser.add_argument("--target-memory-usage", type=float, default=0.8, metavar="X",
                        help="share of the free memory that a step may take (default: %(default)s)")
    return parser


def run(argv=None):
    """Measure, print, write batch_size_*.json; returns the exit code. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    program = flags.named_program(argv, load_program())
    parser = make_parser(program)
    arguments, settings, _ = flags.parse(parser, program, argv)
    share = arguments.target_memory_usage
    if not 0 < share <= 1:
        parser.error("argument --target-memory-usage: must be above 0 and at most 1")
    device = choose_device(settings.training.device)
    process_settings(settings, device)
    free = free_memory(device)
    if free is None:
        raise UserError(f"--target-memory-usage: {device} does not say how much memory is free")
    RunDirectory(program, settings).claim()
    limit, stop = share * free / MEGABYTE, StopRequest()
    print(f"Device: {device} | {free / GIGABYTE:.1f} GB are free, of which a step may take {share:.0%}")

    def measure(size):
        row = row_of(program, settings, device, size, stop)
        print(f"Batch size {size}: " + (row.reason or f"{1e3 * row.median_batch_time:.1f} ms, "
              f"{row.samples_per_second:.1f} samples/s, "
              f"{cell(row.peak_memory_mb, '.1f') or 'unknown'} MB"), flush=True)
        return row

    with stop:
        rows, forecast = search(measure, getattr(arguments, "batch_size", 1), limit, stop)
    return conclude(program, settings, rows, forecast, limit) or (128 + stop.signal if stop.signal else 0)


def conclude(program, settings, rows, forecast, limit):
    """Say what fits and write it down; FAILED where nothing does."""
    fitting = {size: row for size, row in rows.items()
               if row.measured and row.peak_memory_mb is not None and row.peak_memory_mb <= limit}
    largest = max(fitting, default=None)
    fastest = max(fitting, key=lambda size: fitting[size].samples_per_second, default=None)
    if not fitting:
        for row in rows.values():
            print(f"Nothing fits: {row.reason or row.uncounted or 'it needs more memory'}")
    else:
        print(f"Largest: {largest}, {fitting[largest].peak_memory_mb:.0f} of {limit:.0f} MB"
              + (f"; about {forecast} by a straight line, which took too long to measure" * bool(forecast)))
        print(f"Fastest: {fastest}, {fitting[fastest].samples_per_second:.1f} samples/s")
        print(f"To copy: {command_of(program, settings.having(batch_size=fastest))}")
    headline = dict(mode="optimize_batch_size", largest=largest, fastest=fastest)
    path = RunDirectory(program, settings).write("batch_size", dict(
        headline, limit_mb=limit, forecast=forecast,
        rows={size: row.as_dict() for size, row in rows.items()}))
    print_result(headline, path, settings)
    return 0 if fitting else FAILED


def main():
    return exit_code(run, None, SCRIPT)
