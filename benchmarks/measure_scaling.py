#!/usr/bin/env python3
"""What more GPUs of one host buy: samples/s of one and of several, at four sizes, everything on, in bf16.

    python benchmarks/measure_scaling.py --out OUT [--gpus 2] [--steps 60] [--only REGEX]
    python benchmarks/measure_scaling.py --quick                # tiny sizes, Gloo on a CPU

Weak scaling: every GPU has the batch that the one had. Strong scaling: a batch of 8, on one GPU, and split
among all. On one GPU all sizes compile at the same time and are timed one by one; runs of several follow,
by torchrun, with the compiler's cache. Writes OUT/scaling.json; exit code 1 if a run failed.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.measuring.tables import aligned
from fusion_lab.measuring.turns import Guest
from fusion_lab.training.files import exit_code, require_directory, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import choose_device, system_info
from fusion_lab.training.reading import read_json
from tiny_openfold_v2 import PROGRAM

SIZES = {
    "A": "--batch-size 4 --seq-len 64 --num-seqs 16",
    "B": "--batch-size 1 --seq-len 256 --num-seqs 64",
    "C": "--batch-size 1 --seq-len 384 --num-seqs 128 --msa-dim 256 --msa-heads 8",
    "B8": "--batch-size 8 --seq-len 64 --num-seqs 16",
}
FLAGS = "--use-amp --amp-dtype bfloat16 --enable-all-fusion"
TINY = "--num-blocks 1 --seq-len 16 --num-seqs 4 --msa-dim 16 --pair-dim 16 --device cpu"
QUICK = {"A": f"--batch-size 2 {TINY}", "B8": f"--batch-size 4 {TINY}"}
TRAINER = str(ROOT / "tiny_openfold_v2.py")
PATIENCE = 400  # s for one run


class Run:
    """A training run in processes of its own; row() is what came of it."""

    def __init__(self, name, size, gpus, flags, steps, turns=False):
        self.name, self.gpus, self.directory = name, gpus, tempfile.TemporaryDirectory()
        self.log = open(os.path.join(self.directory.name, "log"), "w+", encoding="utf-8")  # noqa: SIM115
        self.result = os.path.join(self.directory.name, "results", PROGRAM.result("performance_summary"))
        starter = [] if gpus == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)]
        command = [sys.executable, *starter, TRAINER, *size.split(), *flags.split(), "--num-steps",
                   str(steps), "--warmup-steps", "3", "--log-every", str(steps), "--eval-every",
                   str(steps + 1), "--profile-dir", os.path.dirname(self.result)]
        how = dict(stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, cwd=self.directory.name,
                   env={"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ})
        self.guest = Guest(command, **how) if turns else None
        self.process = self.guest.process if turns else subprocess.Popen(command, **how)

    def row(self):
        if self.guest:
            self.guest.wait_until_ready()
            self.guest.go()
        row = dict(name=self.name, gpus=self.gpus)
        try:
            self.process.wait(PATIENCE)
            row.update(figures(read_json(self.result), self.gpus))
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
            self.end()
            self.log.seek(0)
            said = [line for line in self.log.read().splitlines() if "error" in line.lower()]
            row["failed"] = " / ".join(said[:3])[:400] or "no result"
        self.log.close()
        if self.guest:
            self.guest.close()
        self.directory.cleanup()
        print(line(row), flush=True)
        return row

    def end(self):
        """Whatever keeps the GPUs busy would slow the next run."""
        self.process.terminate()
        try:
            self.process.wait(40)  # torchrun gives its processes 30 s
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def figures(summary, gpus):
    found = summary["performance_summary"]
    return dict(
        median_ms=1e3 * found["median_batch_time"], p20_ms=1e3 * found["p20_batch_time"],
        p80_ms=1e3 * found["p80_batch_time"], mfu=found["mfu"],
        samples_per_s=gpus * summary["training_params"]["batch_size"] / found["median_batch_time"],
        batch_of_each=summary["training_params"]["batch_size"], final_loss=found["final_loss"],
        peak_mb=found["peak_memory_mb"])


def line(row):
    start = f"{row['name']:3s} {row['gpus']} GPU{'s' * (row['gpus'] > 1):1s}"
    if "failed" in row:
        return f"{start}  failed: {row['failed']}"
    peak = "n/a" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
    return (f"{start}  {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, {row['p80_ms']:.2f})  "
            f"{row['samples_per_s']:8.1f} samples/s  MFU {100 * row['mfu']:4.1f}%  peak {peak} MB")


def measured(sizes, gpus, flags, steps, together):
    """A row for each size on one GPU and on several."""
    rows, alone = [], []
    for name, size in sizes.items():
        alone.append(Run(name, size, 1, flags, steps, turns=together))
        if not together:
            rows.append(alone.pop().row())
    rows += [run.row() for run in alone]
    return rows + [Run(name, size, gpus, flags, steps).row() for name, size in sizes.items()]


def gains(rows, gpus):
    """[(kind, samples/s of one, of several, gain)] of weak and strong scaling, as far as there are such."""
    speed = {(row["name"], row["gpus"]): row.get("samples_per_s") for row in rows}
    batch = {row["name"]: row.get("batch_of_each") for row in rows if row["gpus"] == 1}
    pairs = [(f"weak, {name}", speed[name, 1], speed.get((name, gpus))) for name in batch]
    if batch.get("A") and batch.get("B8") == gpus * batch["A"]:
        pairs.append((f"strong, batch {batch['B8']}", speed["B8", 1], speed.get(("A", gpus))))
    return [(kind, one, several, several / one) for kind, one, several in pairs if one and several]


def main(argv=None):
    parser = Parser(prog="measure_scaling.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the result (default: none)")
    parser.add_argument("--gpus", type=whole_number(2), default=2, help="of this host (default: %(default)s)")
    parser.add_argument("--steps", type=whole_number(3), default=60, help="timed (default: %(default)s)")
    parser.add_argument("--flags", default=FLAGS, help="of every run (default: %(default)s)")
    parser.add_argument("--only", default="", type=regular_expression, help="sizes, by name (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script on a CPU")
    arguments = parser.parse_args(argv)
    sizes = {name: size for name, size in (QUICK if arguments.quick else SIZES).items()
             if re.search(arguments.only, name)}
    if not sizes:
        parser.error(f"argument --only: {arguments.only!r} leaves no size")
    flags = arguments.flags if not arguments.quick else "--use-amp --enable-master-weights"
    if arguments.out:
        require_directory(arguments.out)
    rows = measured(sizes, arguments.gpus, flags, arguments.steps, together=not arguments.quick)
    table = [["scaling", "1 GPU", f"{arguments.gpus} GPUs", "gain"]] + [
        [kind, f"{one:.1f}", f"{several:.1f} samples/s", f"{gain:.2f}"]
        for kind, one, several, gain in gains(rows, arguments.gpus)]
    print("\n".join(aligned(table)))
    if arguments.out:
        write_json(arguments.out / "scaling.json", dict(
            command=sys.argv, flags=flags, rows=rows, gains=gains(rows, arguments.gpus),
            system_info=system_info(choose_device("auto")), date=time.strftime("%F")))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_scaling.py"))
