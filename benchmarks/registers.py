#!/usr/bin/env python3
"""Registers and shared memory of every Triton kernel, compiled for GPUs that need not be here.

    python benchmarks/registers.py [--targets sm_90 gfx942] > benchmarks/registers.md      # minutes, no GPU

What is shipped is compiled as the tests do it: each launch of theirs with the first candidate and every tile
of tiles.json of its widths. A cell has the most registers a thread and the most KB of shared memory that a
configuration of this kernel takes. Exit code 1 if one spills that the tests do not know of.
"""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.training.files import exit_code, require_packages
from fusion_lab.training.flags import Parser

require_packages("registers.py", "torch", "triton", "pytest")

import triton

from tests.kernels.launches import LAUNCHES, spills_too_often
from tests.kernels.triton_targets import SHARED, compiled_for


def resources(target):
    """{kernel: (registers, bytes of shared memory, spilling instructions, whether too many)}, the most."""
    found = {}
    for function, *arguments in LAUNCHES.values():
        with compiled_for(target) as compiled:
            function(*arguments)
        for name, used in compiled.items():
            most = found.get(name.split()[0], (0, 0, 0, False))
            now = (*(used[word] for word in ("registers", "shared", "spills")),
                   spills_too_often(target, name, used))
            found[name.split()[0]] = tuple(map(max, most, now))
    return found


def run(argv=None):
    parser = Parser(prog="registers.py", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(SHARED), default=list(SHARED))
    targets = parser.parse_args(argv).targets
    found = {target: resources(target) for target in targets}
    kernels = sorted({kernel for rows in found.values() for kernel in rows})
    print(f"# Registers\n\nWritten by `python benchmarks/registers.py` (Triton {triton.__version__}): "
          "registers a thread, KB of shared memory.\n")
    print("\n".join(["| kernel | " + " | ".join(targets) + " |", "|---|" + "--:|" * len(targets)]))
    for kernel in kernels:
        cells = [found[target].get(kernel) for target in targets]
        print(f"| {kernel} | " + " | ".join(f"{c[0]}, {c[1] / 1024:.0f}" if c else "" for c in cells) + " |")
    spilled = sorted(f"{kernel} ({target}, {used[2]} instructions)" for target, rows in found.items()
                     for kernel, used in rows.items() if used[2])
    print(f"\nSpills: {', '.join(spilled) or 'none'}.")
    return int(any(used[3] for rows in found.values() for used in rows.values()))


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "registers.py"))
