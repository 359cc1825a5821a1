#!/usr/bin/env python3
"""What the tables of our kernels consist of, measured at one commit: one program after another on one GPU.

    python benchmarks/measure_everything.py --out OUT [--only REGEX] [--skip REGEX] [--peer model_utils.py]

First the tests on a GPU, then the ladder, each kernel, and the companions beside their peers (ProteinMPNN's
is a file of its authors, see compare_mpnn.py). What a program prints goes to OUT/NAME.txt, its results to
OUT/NAME. One that fails or takes longer than its limit is a row of the table, and the rest goes on. Exit code
1 if any failed, 4 without a GPU.
"""
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import re

import torch

from fusion_lab.measuring.tables import aligned
from fusion_lab.training.files import NO_GPU, UserError, exit_code, require_directory
from fusion_lab.training.flags import Parser, regular_expression

RUNGS = r"\|.(best|ultra|ultra,.(selective.)?checkpointing)$"
LARGE = "--hidden-size 1024 --num-layers 12 --batch-size 16 --seq-len 512"
PROGRAMS = {  # name: (most seconds, what Python runs); {out} is the program's own directory
    "tests": (900, "-m pytest -q -p no:cacheprovider -m gpu tests/kernels/test_kernels_gpu.py"),
    "ladder": (900, f"benchmarks/measure_ladder.py --out {{out}} --only {RUNGS}"),
    "kernels": (900, "benchmarks/measure_kernels.py --out {out}"),
    "mpnn": (600, "benchmarks/compare_mpnn.py --out {out} --precisions bfloat16 --peer {peer}"),
    "llama": (600, "benchmarks/compare_llama.py --out {out}"),
    "llama-large": (600, f"benchmarks/compare_llama.py --out {{out}} {LARGE}"),
}


def measure(name, limit, words, out, peer):
    """Run one program; (exit code or what ended it, seconds, its last line)."""
    command = [sys.executable, *(word.format(out=out / name, peer=peer) for word in words.split())]
    started = time.monotonic()
    with open(out / f"{name}.txt", "w+", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                  timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"over {limit} s"
        file.seek(0)
        last = (file.read().strip().splitlines() or [""])[-1]
    return code, time.monotonic() - started, last


def run(argv=None):
    parser = Parser(prog="measure_everything.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for the results")
    parser.add_argument("--only", default="", type=regular_expression, help="of these names (default: all)")
    parser.add_argument("--skip", default="^$", type=regular_expression, help="not these (default: none)")
    parser.add_argument("--peer", type=pathlib.Path, help="for mpnn, which is left out without it")
    arguments = parser.parse_args(argv)
    out, peer = arguments.out.resolve(), arguments.peer and arguments.peer.resolve()
    chosen = [name for name, (_, words) in PROGRAMS.items()
              if re.search(arguments.only, name) and not re.search(arguments.skip, name)
              and (peer or "{peer}" not in words)]
    if not chosen:
        parser.error(f"of {', '.join(PROGRAMS)} nothing is left")
    if not torch.cuda.is_available():
        raise UserError("measure_everything.py needs a GPU", code=NO_GPU)
    require_directory(out)
    rows = []
    for name in chosen:
        code, seconds, last = measure(name, *PROGRAMS[name], out, peer)
        rows.append([name, str(code), f"{seconds:.0f}", last[:100]])
        print(f"{name}: {code}, {seconds:.0f} s", flush=True)
    print("\n".join(aligned([["program", "exit code", "s", "last line"], *rows])))
    return int(any(code != "0" for _, code, *_ in rows))


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "measure_everything.py"))
