#!/usr/bin/env python3
"""What the inner loop of a Triton kernel consists of, counted in machine code; needs no GPU.

    python benchmarks/instructions.py backward_kv [--targets sm_90 gfx942]         # part of a kernel's name

A row for each shipped configuration of what the tests compile: instructions a thread in the longest innermost
loop, of these products of matrices; special ones, which run at a quarter of the speed or less (exponentials,
reciprocals, conversions one by one); float32 arithmetic; memory. The rest moves, converts and computes
addresses. A kernel that does not wait for memory issues at best one instruction a cycle, so a shorter loop is
a faster one, other things equal: count first, then time. Loops that the compiler unrolled are not seen.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.training.files import UserError, exit_code, require_packages
from fusion_lab.training.flags import Parser

require_packages("instructions.py", "torch", "triton", "pytest")

from fusion_lab.kernels.ahead_of_time import innermost_loops, machine_code
from tests.kernels.launches import LAUNCHES
from tests.kernels.triton_targets import SHARED, compiled_for

CLASSES = dict(
    matrix=r"H?G?MMA|v_mfma", special=r"MUFU|F2F$|F2F\.|v_(exp|log|rcp|rsq|sqrt)_",
    float32=r"F(ADD|MUL|FMA|MNMX|SEL|SETP)|v_(pk_)?(add|sub|subrev|mul|fma|fmac|max|min|cmp\w*|div\w*)_f32",
    memory=r"LD|ST(S|G|SM)?\b|LDSM|RED|ATOM|buffer_|global_|ds_")


def counted(kernel):
    """{class: instructions} of the longest innermost loop, {} without a loop."""
    loops = innermost_loops(machine_code(kernel))
    if not loops:
        return {}
    longest = max(loops, key=len)
    return dict(all=len(longest), **{name: sum(bool(re.match(pattern, each)) for each in longest)
                                     for name, pattern in CLASSES.items()})


def rows(word, targets):
    """(kernel and configuration, target, counted()) of kernels whose names contain the word."""
    found = {}
    for target in targets:
        for function, *arguments in LAUNCHES.values():
            with compiled_for(target, describe=lambda kernel: kernel) as compiled:
                function(*arguments)
            for name, kernel in compiled.items():
                if word in name.split()[0] and (name, target) not in found:
                    found[name, target] = counted(kernel)
    return [(name, target, counts) for (name, target), counts in sorted(found.items()) if counts]


def run(argv=None):
    parser = Parser(prog="instructions.py", description=__doc__)
    parser.add_argument("kernel", help="part of the names of kernels")
    parser.add_argument("--targets", nargs="+", choices=list(SHARED), default=["sm_90", "gfx942"])
    given = parser.parse_args(argv)
    found = rows(given.kernel, given.targets)
    if not found:
        raise UserError(f"no kernel with a loop has {given.kernel!r} in its name (registers.md lists them)")
    print("\n".join(["| kernel | GPU | instructions | " + " | ".join(CLASSES) + " |",
                     "|---|---|" + "--:|" * (1 + len(CLASSES))]))
    for name, target, counts in found:
        print(f"| {name} | {target} | " + " | ".join(map(str, counts.values())) + " |")


if __name__ == "__main__":
    sys.exit(exit_code(run, None, "instructions.py"))
