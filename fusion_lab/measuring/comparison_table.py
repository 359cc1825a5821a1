"""--compare-fusion: a comparison on paper. One table, which can be pasted as Markdown, then what it says in
words, then four headline figures."""
import sys
import time

import torch

from fusion_lab.measuring.compare import compare
from fusion_lab.measuring.tables import cell, markdown
from fusion_lab.measuring.variants import BASELINE, FUSED, with_fusion
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.errors import StopRequest
from fusion_lab.training.reporting import busy_line, command_of, print_result
from fusion_lab.training.words import counted

COLUMNS = {"variant": 8, "step ms (p20, p80)": 26, "samples/s": 9, "speed-up (95%)": 18,  # least widths
           "peak MB": 14, "saved act. MB": 14, "launches": 12}


def cells(row):
    """A row of the table."""
    if not row.measured:
        return [row.name, f"not measured: {row.reason}"]
    times = [1e3 * seconds for seconds in (row.median_batch_time, row.p20_batch_time, row.p80_batch_time)]
    few = f" ({counted(len(row.step_times), 'round')})" if row.speedup_low is None else ""
    if (row.median_batch_time < row.baseline_batch_time) != (row.speedup > 1):
        few += ", in pairs: the pace changed"  # so that the medians say the opposite
    return [row.name, "{:.2f} ({:.2f}, {:.2f})".format(*times), f"{row.samples_per_second:.1f}",
            "1" if row.name == BASELINE else f"{row.gain}{few}",
            figure(row.peak_memory_mb, ".1f", row.peak_memory_reduction_percent),
            figure(row.saved_activation_mb, ".1f", row.saved_activation_reduction_percent),
            figure(row.launches_per_step, "d", row.launch_reduction_percent)]


def figure(value, form, saved):
    """A number, and by how much it differs from the baseline's where that shows."""
    if value is None:
        return "n/a"
    return f"{value:{form}}" + (f" ({-saved:+.0f}%)" if saved and abs(saved) >= 0.5 else "")


def table(rows, names=()):
    """Lines of a Markdown table; names: of rows that are still to come, so that the columns stay."""
    first, *others = COLUMNS.values()
    return markdown([[*COLUMNS], *map(cells, rows)], [max(first, 0, *map(len, names)), *others])


def in_words(rows):
    """What the table says of speed, in sentences."""
    others = [row for row in rows[1:] if row.measured]
    if not others:
        return ["Nothing but the baseline was measured."]
    if all(row.speedup_low is None for row in others):
        return ["There were too few rounds to say what is faster than the baseline."]
    sure = sorted((row for row in others if row.gain.decided), key=lambda row: -row.speedup)
    lines = ["No setting here is faster than the baseline beyond noise."]
    if sure and sure[0].speedup > 1:
        lines = [f"The fastest setting here is {sure[0].name}: {sure[0].gain.in_words()}."]
    if slower := ", ".join(f"{row.name} ({row.speedup:.2f}x)" for row in sure if row.speedup < 1):
        lines.append(f"Slower than the baseline: {slower}.")
    return lines


def headline(rows, launch_kind):
    """The four lines that users look for, about the defaults or, where they are not there, the last row."""
    before, measured = rows[0], [row for row in rows if row.measured]
    after = next((row for row in measured if row.name == FUSED), measured[-1])
    if after is before:
        return []
    speed, shorter = f"{after.speedup:.2f}x", cell(after.batch_time_reduction_percent, ".1f", unit="%")
    slows = round(after.speedup, 2) < 1
    if after.gain.decided:
        remark, rate = " (a slowdown)" * slows, after.samples_per_second
        old, new = after.baseline_batch_time, after.median_batch_time
        rates = f"{remark} ({rate * new / old:.1f} -> {rate:.1f} samples/sec)"
        times = f"{remark} ({1e3 * old:.2f} -> {1e3 * new:.2f} ms)"
    else:  # no medians, which may differ in the other direction than the ratios do
        first, low = "a slowdown, " * slows, after.speedup_low
        doubt = "too few rounds to say" if low is None else "within noise"
        interval = "" if low is None else f"95% interval {low:.2f} to {after.speedup_high:.2f}, "
        rates, times = f" ({first}{interval}{doubt})", f" ({first}{doubt})"
    launches = memory = f"not measured for {after.name}"
    if after.launch_reduction_percent is not None:
        launches = (f"{cell(after.launch_reduction_percent, '.1f', unit='%')} measured by {after.name} "
                    f"({before.launches_per_step} -> {after.launches_per_step} {launch_kind} per step)")
    if after.peak_memory_reduction_percent is not None:
        memory = (f"{cell(after.peak_memory_reduction_percent, '.1f', unit='%')} by {after.name} "
                  f"(peak {before.peak_memory_mb:.1f} -> {after.peak_memory_mb:.1f} MB)")
    return [f"Training speed: {speed} speed-up by {after.name}{rates}",
            f"Memory reduction: {memory}",
            f"Batch time improvement: {shorter} by {after.name}{times}",
            f"Kernel reduction: {launches}"]


def below(comparison):
    """Lines below the table."""
    rows = comparison.rows
    lines = [f"Steps in turn: {comparison.ended}"]
    apart = [row for row in rows
             if row.measured and row.baseline_step_times != rows[0].step_times[:len(row.step_times)]]
    lines += [f"{row.name} ran in a process of its own, in which the baseline took "
              f"{1e3 * row.baseline_batch_time:.2f} ms a step" for row in apart]
    lines += [f"Launches of {row.name}: {row.uncounted}" for row in rows if row.uncounted]
    not_used = dict.fromkeys(text for row in rows if row.measured for text in row.not_used)
    if not_used:
        lines.append(f"Not used here: {'; '.join(not_used)}")
    lines.append("A speed-up is the median ratio of steps taken in turn, not the ratio of median times")
    return [*lines, "", *in_words(rows), "", *headline(rows, comparison.about["launch_kind"])]


def to_copy(program, settings, rows):
    """The last lines: which rows do not have the baseline's first loss, and the command of the fastest one
    that beats the baseline beyond noise, or of the baseline."""
    before, allowed, lines = rows[0], 2e-2 if settings.training.use_amp else 1e-3, []
    best = before
    for row in rows[1:]:
        if not row.measured:
            continue
        if not abs(row.first_loss - before.first_loss) <= allowed * abs(before.first_loss):
            lines.append(f"{row.name} did not pass: its first loss is {row.first_loss:.4f}, the baseline's "
                         f"{before.first_loss:.4f}")
        elif row.gain.decided and row.speedup > best.speedup:
            best = row
    chosen = with_fusion(settings, type(settings.fusion)(**best.fusion_config))
    return [*lines, f"To copy ({best.name}): {command_of(program, chosen)}"]


class Notes:
    """Prints what goes on, and since when, to stderr; stdout is for the table."""

    def __init__(self):
        self.started = time.monotonic()

    def __call__(self, text):
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", file=sys.stderr, flush=True)


def compare_fusion(program, settings, names=None, rounds=None):
    """--compare-fusion: print rows and write fusion_comparison_*.json as they become known; exit code 0, or
    that of the signal that ended it early."""
    directory, path, printed = RunDirectory(program, settings), None, 0

    def begin(device):
        directory.claim()  # now, because what is refused moves no earlier results
        print(f"Device: {device} | torch {torch.__version__} | {program.sample(settings)}", flush=True)
        if busy := busy_line(device):
            print(busy, flush=True)

    def show(comparison):
        nonlocal path, printed
        if comparison.rows[0].measured:
            lines = table(comparison.rows, comparison.names)
            print("\n".join(lines[printed:]), flush=True)
            printed = len(lines)
            path = directory.write("fusion_comparison", comparison.as_dict())

    comparison = compare(program, settings, names, rounds, show, Notes(), stop := StopRequest(), begin)
    rows = [dict(name=row.name, speedup=row.speedup) for row in comparison.rows if row.measured]
    if not rows:
        print("Interrupted before the first round: no figures")
        return 128 + stop.signal
    print("", *below(comparison), "", *to_copy(program, settings, comparison.rows), sep="\n")
    print_result(dict(mode="compare_fusion", variants=rows), path, settings)
    return 128 + stop.signal if stop.signal else 0
