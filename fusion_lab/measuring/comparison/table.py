"""The comparison on paper: a table that grows while it is measured, details, and four headline figures."""
import math
import sys
import time

from fusion_lab.measuring.comparison.rows import not_measured, rows_of
from fusion_lab.measuring.comparison.variants import ALL, UNMEASURED
from fusion_lab.measuring.roofline import AT_FAULT
from fusion_lab.measuring.tables import aligned, cell
from fusion_lab.training.files import counted

COLUMNS = (("peak MB (saved)", "peak_memory_mb", ".1f", "peak_memory_reduction_percent"),
           ("saved act. MB (saved)", "saved_activation_mb", ".1f", "saved_activation_reduction_percent"),
           ("launches (fewer)", "launches_per_step", "d", "launch_reduction_percent"))
HEADER = ["variant", "step ms (p20, p80)", "samples/s", "speed-up (95%)", *(title for title, *_ in COLUMNS)]


def cells(row, baseline):
    """A row of the table. One that took turns with a baseline of its own, as a compiled one does, says how
    long that took: it is not the one in the table."""
    if not row["measured"]:
        return [row["name"], f"not measured: {row['reason']}"]
    times = [1e3 * row[f"{quantile}_batch_time"] for quantile in ("median", "p20", "p80")]
    speed = f"{row['speedup']:.2f}x"
    if row["name"] != baseline["name"]:
        low, high = row["speedup_low"], row["speedup_high"]
        speed += f" ({counted(row['rounds'], 'round')})" if low is None else f" ({low:.2f}, {high:.2f})"
    if row["baseline_batch_time"] != baseline["median_batch_time"]:
        speed += f" of {1e3 * row['baseline_batch_time']:.2f} ms"
    line = [row["name"], "{:.2f} ({:.2f}, {:.2f})".format(*times), f"{row['samples_per_second']:.1f}", speed]
    return line + ["n/a" if row[key] is None else f"{row[key]:{form}} ({row[share]:+.1f}%)"
                   for _, key, form, share in COLUMNS]


def table(rows):
    """The comparison as rows of cells, the header first."""
    return [HEADER, *(cells(row, rows[0]) for row in rows)]


class LiveTable:
    """Prints rows as they become known and hands each state of the result to save(result); without save it
    is silent. What goes on is said on stderr, so that stdout is the table: times of each row while its rounds
    go on, in place on a terminal, and now and then in lines elsewhere."""

    def __init__(self, save=None):
        self.loud, self.save = save is not None, save or (lambda result: None)
        self.started, self.variants, self.printed = time.monotonic(), [], 0
        self.result, self.rows, self.ceiling = None, [], None
        self.live, self.drawn, self.at = [], 0, -math.inf
        self.in_place = sys.stderr.isatty()
        self.every = 0.5 if self.in_place else 10.0  # s

    def say(self, *lines):
        """Lines on stderr, in place of those that were drawn there."""
        if self.loud:
            print((f"\x1b[{self.drawn}A\x1b[J" if self.drawn else "") + "\n".join(lines),
                  end="\n" if lines else "", file=sys.stderr, flush=True)
        self.drawn = 0

    def note(self, text):
        self.say(f"[{time.monotonic() - self.started:4.0f} s] {text}")

    def progress(self, variants, rounds, pace):
        """So many rounds of these variants, the baseline first, are over."""
        self.live, now = variants, time.monotonic()
        if self.loud and (rounds == 1 or now - self.at > self.every):
            rows, self.at = rows_of([v for v in variants if not v.reason], self.ceiling), now
            lines = aligned([[*line[:2], line[3]] for line in table(rows)])
            self.say(*lines, f"[{now - self.started:4.0f} s] round {rounds}{pace.left_text(rounds)}")
            self.drawn = len(lines) + 1 if self.in_place else 0

    def begin(self, result, variants, ceiling):
        """A comparison of all these variants begins; its result's rows come."""
        self.result, self.rows, self.variants, self.ceiling = result, result["variants"], variants, ceiling

    def add(self):
        """More rows are known than were printed."""
        if not self.loud:
            return
        # columns as wide as the rows known by now need, the first one for all names
        lines = aligned([*table(self.rows), *([variant.name] for variant in self.variants)])
        self.say()
        print("".join(f"{line}\n" for line in lines[self.printed:len(self.rows) + 1]), end="", flush=True)
        self.printed = len(self.rows) + 1
        self.save(self.result)

    def finish(self, number):
        """What comes below the table; if a signal of this number ended it, with the rounds until then."""
        self.say()
        if number is not None:
            self.cut_short()
        if self.printed:
            print_details(self.result)
        elif number is not None:
            print("Interrupted before the first round: no figures")

    def cut_short(self):
        """Add rows of rounds that were broken off; what has none is in the file, and counted here."""
        def add(rows):
            there = {row["name"] for row in self.rows}
            self.rows += [row for row in rows if row["name"] not in there]

        if self.live and self.live[0].losses:
            add(rows_of([v for v in self.live if v.losses], self.ceiling))
            self.add()
        if self.printed:
            print("Interrupted: these are the rounds before it; "
                  f"{counted(len(self.variants) - len(self.rows), 'more row')} not measured")
            add(not_measured(v, UNMEASURED) for v in self.variants)
            self.save(self.result)


def detail_table(rows):
    """What the comparison found beside, as rows of cells: phases of a step, speed against the matrix product
    measured here, the first step, which compiles, whether it is worth it (worth.py), and, where rows
    differ in them, FLOPs. TFLOP/s and MFU are of a row's own FLOPs."""
    rows = [r for r in rows if r["measured"]]
    counted = any(r["flop_reduction_percent"] for r in rows)
    lines = [["variant", "forward ms", "backward ms", "optimizer ms", "TFLOP/s", "MFU", "first step s",
              "touches", "at most", "reached", *["GFLOP (saved)"] * counted]]
    for r in rows:
        phases = [r[f"median_{phase}_time"] for phase in ("forward", "backward", "optimizer")]
        lines.append([r["name"], *("in one graph" if t is None else f"{1e3 * t:.2f}" for t in phases),
                      f"{r['achieved_tflops']:.3f}", f"{100 * r['mfu']:.1f}%",
                      cell(r["first_step_time"]) or "not compiled", cell(r["touched_share"], ".0f", 100, "%"),
                      cell(r["amdahl_ceiling"], unit="x"), cell(r["amdahl_reached"], ".0f", 100, "%"),
                      *[f"{r['flops_per_step'] / 1e9:.3f} ({r['flop_reduction_percent']:+.1f}%)"] * counted])
    return lines


WITHIN_NOISE = "Speed-up within noise (its 95% interval includes 1, or there were too few rounds for one)"


def within_noise(row):
    return row["speedup_low"] is None or row["speedup_low"] <= 1 <= row["speedup_high"]


def headline(rows, nominal, launch_kind):
    """The four lines that users look for: all fusions that are on by default, against the baseline."""
    before = rows[0]
    rows = [r for r in rows if r["measured"]]
    after = next((r for r in rows if r["name"] == ALL), rows[-1])
    if after is before:
        return ["No headline: nothing but the baseline was measured"]
    said = ["a slowdown"] * (after["speedup"] < 1) + ["within noise"] * within_noise(after)
    slow = f" ({', '.join(said)})" if said else ""
    launches = "not measured" if after["launch_reduction_percent"] is None else (
        f"{after['launch_reduction_percent']:.1f}% measured ({before['launches_per_step']} -> "
        f"{after['launches_per_step']} {launch_kind} per step)")
    if nominal:
        launches += (f"; nominal {nominal['kernel_reduction_percent']}% ({nominal['total_kernel_reduction']} "
                     "fewer kernels)")
    memory = "not measured" if after["peak_memory_reduction_percent"] is None else (
        f"{after['peak_memory_reduction_percent']:.1f}% (peak {before['peak_memory_mb']:.1f} -> "
        f"{after['peak_memory_mb']:.1f} MB)")
    return [f"Training speed: {after['speedup']:.2f}x speed-up{slow} ({before['samples_per_second']:.1f} -> "
            f"{after['samples_per_second']:.1f} samples/sec)",
            f"Memory reduction: {memory}",
            f"Batch time improvement: {after['batch_time_reduction_percent']:.1f}%{slow} "
            f"({1e3 * after['baseline_batch_time']:.2f} -> {1e3 * after['median_batch_time']:.2f} ms)",
            f"Kernel reduction: {launches}"]


def print_details(result):
    """What comes below the table: phases, what is within noise, the switches' effects, the headline."""
    rows = result["variants"]
    if any(" of " in row[3] for row in table(rows)[1:] if len(row) > 3):
        print('Speed-up "of X ms": these rows took turns with a baseline of their own, of so many ms')
    print("\n".join(["", *aligned(detail_table(rows)), ""]))
    if any(r["measured"] and r["mfu"] > 1 for r in rows):
        print(f"MFU above 100%: {AT_FAULT}, the fastest of the matrix products timed here")
    noise = [r["name"] for r in rows[1:] if r["measured"] and within_noise(r)]
    if noise:
        print(f"{WITHIN_NOISE}: {', '.join(noise)}")
    print("\n".join(headline(rows, result["nominal"], result["launch_kind"])))
