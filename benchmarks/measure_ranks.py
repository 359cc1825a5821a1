#!/usr/bin/env python3
"""What several GPUs of one host buy, everything on, in bf16.

    python benchmarks/measure_ranks.py --out OUT [--gpus 2] [--only REGEX]
    python benchmarks/measure_ranks.py --out OUT --quick                # tiny sizes, Gloo on a CPU

Training runs on one GPU and, by torchrun, on several. At A, B and C every GPU has the batch that one had;
"split" divides the batch of one, 8 samples or as many as can be divided, among all. Writes OUT/ranks.json and
prints the gains in samples/s. Exit code 1 if a run failed, 4 without a GPU.
"""
import re
import sys

from script import begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch")

from measure_ladder import ULTRA, summary_of

from fusion_lab.measuring.tables import markdown
from fusion_lab.training.errors import UserError, exit_code
from fusion_lab.training.flags import whole_number

SIZES = {  # name: (samples, flags)
    "A": (4, "--seq-len 64 --num-seqs 16"),
    "B": (1, "--seq-len 256 --num-seqs 64"),
    "C": (1, "--seq-len 384 --num-seqs 128 --msa-dim 256 --msa-heads 8"),
}
SPLIT = 8  # samples of A's size, at most; one for each GPU at least
TINY = "--num-blocks 1 --seq-len 16 --num-seqs 4 --msa-dim 16 --pair-dim 16 --use-amp --device cpu"


def runs_of(gpus, quick):
    """[(name, GPUs, samples of each, flags)], the run on one GPU before that on several."""
    sizes = {"A": (2, TINY)} if quick else {name: (batch, f"{flags} {ULTRA}")
                                            for name, (batch, flags) in SIZES.items()}
    pairs = {name: (batch, batch, flags) for name, (batch, flags) in sizes.items()}
    each = max(1, SPLIT // gpus)
    pairs["split"] = gpus * each, each, sizes["A"][1]
    return [(name, number, batch, flags) for name, (alone, each, flags) in pairs.items()
            for number, batch in ((1, alone), (gpus, each))]


def trained(name, gpus, batch, flags, steps):
    """The row of a training run, by its summary."""
    row = dict(name=name, gpus=gpus, batch_of_each=batch)
    try:
        flags = f"{flags} --batch-size {batch} --num-steps {steps} --eval-every {steps + 1}"
        found = summary_of(flags.split(), gpus)["performance_summary"]
    except UserError as error:
        return row | dict(failed=str(error))
    times = {f"{key}_ms": 1e3 * found[f"{key}_batch_time"] for key in ("median", "p20", "p80")}
    return row | times | dict(samples_per_s=gpus * batch / found["median_batch_time"],
                              peak_mb=found["peak_memory_mb"])


def gains(rows):
    """Cells of a table: samples/s on one GPU and on several, for every name that has both."""
    by_name = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    cells = [["", "1 GPU", "several, samples/s", "gain"]]
    for name, found in by_name.items():
        if len(found) == 2 and not any("failed" in row for row in found):
            one, several = (row["samples_per_s"] for row in found)
            cells.append([name, f"{one:.1f}", f"{several:.1f}", f"{several / one:.2f}"])
    return cells


def line(row):
    label = f"{row['name']:6s} {row['gpus']} GPU{'s' * (row['gpus'] > 1):1s}"
    if "failed" in row:
        return f"{label}  failed: {row['failed']}"
    peak = f"  {row['peak_mb']:8.0f} MB" if row["peak_mb"] else ""
    return f"{label}  {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, {row['p80_ms']:.2f}){peak}"


def main(argv=None):
    parser = parser_of(__file__, __doc__, required=True, only="A, B, C and split",
                       quick="tiny sizes, to try the script on a CPU")
    parser.add_argument("--gpus", type=whole_number(2), default=2, help="of this host (default: %(default)s)")
    parser.add_argument("--steps", type=whole_number(3), default=30, help="timed (default: %(default)s)")
    asked = parser.parse_args(argv)
    device, rows = gpu_or_trial(asked.quick), []
    runs = [run for run in runs_of(asked.gpus, asked.quick) if re.search(asked.only, run[0])]
    if not runs:
        parser.error(f"nothing is left by --only {asked.only!r}")
    for run in runs:
        rows.append(trained(*run, asked.steps))
        print(line(rows[-1]), flush=True)
        write_result(asked.out / "ranks.json", device, rows=rows)
    print("\n".join(markdown(gains(rows))))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_ranks.py"))
