#!/usr/bin/env python3
"""Time every rung from the unfused float32 baseline to the fastest setting, on one GPU or on the CPU.

    python benchmarks/measure_ladder.py --out OUT [--only REGEX] [--steps 30] [--quick]
    python benchmarks/measure_ladder.py --out OUT --root . ../before     # two checkouts, rung by rung

Every rung is a process of its own (ladder_rung.py). On a GPU all of them compile and warm up at the same time
and are then timed one by one, alone on the GPU; those for which memory was short begin again when the others
have ended (with --root the same rung of another checkout may not). Where there is no GPU, one follows the
other on the CPU.
Writes OUT/ladder.json: times in ms, memory in MB (2**20 bytes), the most expensive kernels, and whether
outputs and all gradients pass the 3x rule (fusion_lab/measuring/accuracy.py). A rung that fails is a row with
its reason; exit code 1 if one fails or is not accurate. With --root the rows' names end in the checkout's.

    python benchmarks/measure_ladder.py --plot memory.png OUT/ladder.json ...

draws time against peak memory, a panel for each shape of these results, which must be a GPU's.
"""
import json
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

import torch

from fusion_lab.measuring.plotting import require_matplotlib
from fusion_lab.measuring.turns import Guest
from fusion_lab.training.files import (
    OUT_OF_MEMORY,
    UserError,
    exit_code,
    require_directory,
    require_writable,
    write_json,
)
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import choose_device, system_info
from fusion_lab.training.reading import read_json

RUNG = str(pathlib.Path(__file__).resolve().with_name("ladder_rung.py"))
SHAPES = {
    "B4 S64 N16": "--batch-size 4 --seq-len 64 --num-seqs 16",
    "B1 S256 N64": "--batch-size 1 --seq-len 256 --num-seqs 64",
    "B1 S384 N128 c_m 256": "--batch-size 1 --seq-len 384 --num-seqs 128 --msa-dim 256 --msa-heads 8",
}
BF16 = "--use-amp --amp-dtype bfloat16"
MASTERS = f"{BF16} --enable-master-weights --enable-torch-compile --enable-cuda-graphs"
BEST = f"{BF16} --enable-all-fusion"
RUNGS = {
    "baseline fp32": "--disable-all-fusion",
    "fused fp32": "",
    "fused TF32": "--use-tf32",
    "fused bf16 autocast": BF16,
    "+ graph": f"{BF16} --enable-cuda-graphs",
    "+ compile": f"{BF16} --enable-cuda-graphs --enable-torch-compile",
    "+ master weights": MASTERS,
    "+ projection fusion": f"{MASTERS} --enable-projection-fusion",
    "best": BEST,
    "best, triton attention": f"{BEST} --enable-triton-attention",
    "ultra": f"{BF16} --enable-ultra",  # + all other kernels
    "ultra, no triton attention": f"{BF16} --enable-ultra --disable-triton-attention",
    "ultra, no triton outer layout": f"{BF16} --enable-ultra --disable-triton-outer-layout",
    "ultra, no triton relu": f"{BF16} --enable-ultra --disable-triton-relu",
    "ultra, no triton weight gradients": f"{BF16} --enable-ultra --disable-triton-weight-gradients",
    "ultra, no triton adamw": f"{BF16} --enable-ultra --disable-triton-adamw",
    "ultra, checkpointing": f"{BF16} --enable-ultra --enable-activation-checkpointing",
    "ultra, selective checkpointing": f"{BF16} --enable-ultra --enable-selective-checkpointing",
    "best, no projection fusion": f"{BEST} --disable-projection-fusion",
    "best, no transition fusion": f"{BEST} --disable-transition-fusion",
    "attention math": f"{BEST} --attention-backend math",
    "attention sdpa": f"{BEST} --attention-backend sdpa",
    "attention flex": f"{BEST} --attention-backend flex",
    "no OPM fusion": f"{BEST} --disable-opm-fusion",
    "checkpointing": f"{BEST} --enable-activation-checkpointing",
}
CPU_SHAPES = {"CPU B4 S64 N16": SHAPES["B4 S64 N16"]}
CPU_RUNGS = {
    "baseline fp32": "--disable-all-fusion",
    "fused fp32": "",
    "fused fp32, sdpa": "--attention-backend sdpa",
    "+ compile": "--enable-torch-compile",
    "best fp32": "--enable-all-fusion",
    "baseline bf16 autocast": "--disable-all-fusion --use-amp",
    "fused bf16 autocast": "--use-amp",
    "+ master weights": "--use-amp --enable-master-weights",
    "+ projection fusion": "--use-amp --enable-master-weights --enable-projection-fusion",
    "+ transition fusion": "--use-amp --enable-master-weights --enable-transition-fusion",
    "bf16 + compile": "--use-amp --enable-master-weights --enable-torch-compile",
    "best": "--use-amp --enable-all-fusion",
}


def checkout(text):
    """For --root: the directory of a checkout with the layout of this one."""
    root = pathlib.Path(text).resolve()
    needed = (root / "tiny_openfold_v2.py", root / "fusion_lab" / "measuring" / "turns.py")
    if not all(file.is_file() for file in needed):
        raise UserError(f"--root {text}: no checkout of this project with its present layout")
    return root


def rungs_of(shapes, rungs, arguments):
    """[(name, root, flags)] of every rung that --only and --skip leave; roots of one rung are neighbours."""
    tiny = "--num-blocks 1 --batch-size 1 --seq-len 16 --num-seqs 4 --msa-dim 16 --pair-dim 16"
    if arguments.quick:
        shapes = {f"quick, not {shape}": tiny for shape in shapes}
    found = {f"{shape} | {rung}": f"{shape_flags} {rung_flags}".split()
             for shape, shape_flags in shapes.items() for rung, rung_flags in rungs.items()}
    roots = {f" ({text})": checkout(text) for text in arguments.root} or {"": ROOT}
    return [(name + label, root, flags) for name, flags in found.items() for label, root in roots.items()
            if re.search(arguments.only, name) and not re.search(arguments.skip, name)]


class Rung:
    """A rung and the process that measures it."""

    def __init__(self, name, root, flags, steps):
        self.row = dict(name=name, flags=flags)
        self.log = tempfile.TemporaryFile("w+")  # a pipe nobody reads would fill and block the child
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
        command = [sys.executable, RUNG, str(root), str(steps), *flags]
        self.guest = Guest(command, environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=self.log, text=True)

    def finish(self):
        """Let it run, now that it waits for that; its row, which is printed too."""
        self.guest.go()
        out, _ = self.guest.process.communicate()
        self.guest.close()
        try:
            self.row.update(json.loads(out.splitlines()[-1]))
            print(line(self.row), flush=True)
        except (IndexError, ValueError):
            self.log.seek(0)
            said = self.log.read()
            last = " / ".join(said.strip().splitlines()[-3:])
            self.row.update(failed=last[-400:], out_of_memory=bool(OUT_OF_MEMORY.search(said)))
            print(f"{self.row['name']:42s} failed: {self.row['failed']}", flush=True)
        self.log.close()
        return self.row


def line(row):
    """A row for the terminal."""
    gpu = (f"{row['peak_mb']:8.0f} MB  {row['launches']:5d} launches  busy {row['gpu_busy_ms']:7.2f} ms  "
           if "launches" in row else "")
    return (f"{row['name']:42s} {row['median_ms']:8.2f} ms ({row['p20_ms']:.2f}, {row['p80_ms']:.2f})  {gpu}"
            f"first {row['first_step_s']:5.1f} s  "
            f"{'ok' if row['accurate'] else 'INACCURATE ' + row['failures'][0]}")


def measured(rungs, steps, together):
    """Yields a row for each rung: all get ready at once and measure one by one, or one follows the other.
    Those that ran out of memory together do so again without the others, in the end each alone."""
    full = []
    for rung, row in zip(rungs, one_round(rungs, steps, together), strict=True):
        if together and row.get("out_of_memory"):
            full.append(rung)
        else:
            yield row
    if full:
        print(f"again, without the others: {len(full)} for which memory was short", flush=True)
        yield from measured(full, steps, together=len(full) < len(rungs))


def one_round(rungs, steps, together):
    """Yields a row for each rung, in order."""
    started = (Rung(*rung, steps) for rung in rungs)
    if together:
        started = list(started)
        for rung in started:
            rung.guest.wait_until_ready()
    for rung in started:
        if not together:
            rung.guest.wait_until_ready()
        yield rung.finish()


def plot(paths, picture):
    """Time against peak memory of every rung but the baseline, and the curve of those that no other beats in
    both. Of rungs that lie on each other, one has its name written beside it."""
    pyplot, rows, panels = require_matplotlib(), [], {}
    require_writable(picture)
    for path in paths:
        try:
            rows += read_json(path)["rows"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: no result of this program") from None
    for row in rows:
        shape, rung = row["name"].split(" | ")
        if row.get("peak_mb") and not rung.startswith("baseline"):
            panels.setdefault(shape, []).append((row["median_ms"], row["peak_mb"], rung))
    if not panels:
        raise UserError(f"--plot {picture}: no result with a memory figure was named")
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.6), layout="constrained",
                                   squeeze=False)
    for axis, (shape, points) in zip(axes[0], panels.items(), strict=True):
        best = [p for p in sorted(points) if not any(q[0] < p[0] and q[1] <= p[1] for q in points)]
        times, memory, _ = zip(*points, strict=True)
        axis.plot(times, memory, "o", color="0.6", ms=4)
        axis.plot(*list(zip(*best, strict=True))[:2], "o-", color="C0", ms=5)
        width, height, named = max(times) - min(times), max(memory), []
        for ms, mb, rung in [*best, *points]:
            if all(abs(ms - x) > 0.3 * width or abs(mb - y) > 0.09 * height for x, y in named):
                named.append((ms, mb))
                right = ms > (min(times) + max(times)) / 2  # there names end at their point
                axis.annotate(rung, (ms, mb), xytext=(-6, -9) if right else (4, 5),
                              textcoords="offset points", ha="right" if right else "left", fontsize=7)
        axis.set(title=shape, xlabel="ms per step", ylabel="peak memory, MB", ylim=(0, 1.1 * height))
        axis.margins(x=0.3)
    try:
        figure.savefig(picture, dpi=110)
    except ValueError as error:  # no picture format that matplotlib knows
        raise UserError(f"--plot {picture}: {str(error).splitlines()[0]}") from None


def save(rows, path):
    """Write what is known so far."""
    write_json(path, dict(command=sys.argv, rows=rows, system_info=system_info(choose_device("auto")),
                          date=time.strftime("%F")))


def main(argv=None):
    parser = Parser(prog="measure_ladder.py", description=__doc__)
    parser.add_argument("results", nargs="*", help="ladder.json files for --plot")
    parser.add_argument("--plot", metavar="PNG", help="draw results instead of measuring")
    parser.add_argument("--out", type=pathlib.Path, help="directory for the results (default: none)")
    parser.add_argument("--only", default="", type=regular_expression,
                        help="regular expression over 'shape | rung' (default: all)")
    parser.add_argument("--skip", default="^$", type=regular_expression,
                        help="the same, for rungs left out (default: none)")
    parser.add_argument("--steps", type=whole_number(), default=30, help="timed (default: %(default)s)")
    parser.add_argument("--root", metavar="DIR", nargs="+", default=[],
                        help="checkouts of this project to measure (default: this one)")
    parser.add_argument("--alone", action="store_true", help="on a GPU, too, one rung after the other: what "
                        "compiles meanwhile disturbs what the compiler tunes by timing")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script on a CPU")
    arguments = parser.parse_args(argv)
    if arguments.results and not arguments.plot:
        parser.error("results are for --plot")
    if arguments.plot:
        return plot(arguments.results, arguments.plot)
    on_gpu, rows, path = torch.cuda.is_available(), [], None
    rungs = rungs_of(*((SHAPES, RUNGS) if on_gpu else (CPU_SHAPES, CPU_RUNGS)), arguments)
    if not rungs:
        parser.error(f"no rung is left by --only {arguments.only!r} and --skip {arguments.skip!r}")
    if arguments.out:
        require_directory(arguments.out)
        number = len(list(arguments.out.glob("ladder*.json")))
        path = arguments.out / f"ladder{number or ''}.json"
    for row in measured(rungs, arguments.steps, together=on_gpu and not arguments.alone):
        rows.append(row)
        if path:
            save(rows, path)
    return int(not all(row.get("accurate") for row in rows))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_ladder.py"))
