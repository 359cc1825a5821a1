"""Triton without a GPU: compile for GPUs that are not here; read registers, spills, occupancy, machine code.

    with compiling("gfx942") as found:
        start(some_kernel, grid, torch.empty(64, 64), BN=64, num_warps=4)
    resources(found[0].compiled)  # dict(shared, registers, spills, mma)

Compiling asks the active driver for nothing but a device number and a target, so tensors may lie on the CPU.
"""
import contextlib
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = dict(sm_80=GPUTarget("cuda", 80, 32), sm_90=GPUTarget("cuda", 90, 32),
               gfx90a=GPUTarget("hip", "gfx90a", 64), gfx942=GPUTarget("hip", "gfx942", 64),
               gfx950=GPUTarget("hip", "gfx950", 64))
SHARED = dict(sm_80=166912, sm_90=232448, gfx90a=65536, gfx942=65536, gfx950=65536)  # bytes a program may use
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton has it until 3.10, warning if it is unset
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


class Absent:
    """A driver that only names a target; with a device number of its own, since kernels are kept by it."""

    def __init__(self, name):
        self.target, self.number = TARGETS[name], 1000 + list(TARGETS).index(name)

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")


class Compiled(NamedTuple):
    """A kernel as one launch compiled it."""
    name: str
    options: dict
    compiled: object


seen, dry = None, False  # what start() keeps within compiling() and watching(); whether it only compiles


def start(kernel, grid, *arguments, **options):
    """kernel[grid](*arguments, **options), or whatever compiling() and watching() make of it."""
    if dry:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
    else:
        compiled = kernel[grid](*arguments, **options)
    if seen is not None:
        seen.append(Compiled(kernel.__name__, options, compiled))


@contextlib.contextmanager
def watching():
    """Within, the list that it yields gets a Compiled for every start()."""
    global seen
    before, seen = seen, []
    try:
        yield seen
    finally:
        seen = before


@contextlib.contextmanager
def compiling(name):
    """As watching(); and nothing runs, but is compiled for the GPU of this name in TARGETS."""
    global dry
    before, dry = driver._active, True
    driver.set_active(Absent(name))
    try:
        with watching() as found:
            yield found
    finally:
        driver._active, dry = before, False


def of_cubin(kernel, tool, option):
    """What a tool of NVIDIA's says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([os.path.join(TOOLS, tool), option, file.name], capture_output=True, text=True,
                              check=True).stdout


def machine_code(kernel):
    """What the GPU runs, as text."""
    return of_cubin(kernel, "nvdisasm", "-c") if "cubin" in kernel.asm else kernel.asm["amdgcn"]


def resources(kernel):
    """dict(shared, registers, spills, mma): bytes of shared memory; registers a thread; instructions that
    spill (NVIDIA) or registers spilled (AMD); matrix instructions."""
    code = machine_code(kernel)
    if "cubin" in kernel.asm:
        found = dict(registers=int(re.search(r"REG:(\d+)", of_cubin(kernel, "cuobjdump", "-res-usage"))[1]),
                     spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
                     mma=len(re.findall(r"\sHG?MMA\.", code)))  # HFMA2.MMA moves a constant
    else:
        found = dict(registers=int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
                     spills=int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
                     mma=len(re.findall(r"v_mfma", code)))
    return dict(shared=kernel.metadata.shared, **found)


ALLOCATED = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
VIEWED = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
FILLED = re.compile(r"async_copy_global_to_local \S+ (%\w+)")
IN_FLIGHT = re.compile(r"warp_group_dot_wait (.*) {pendings = [1-9]")


def overwritten(kernel):
    """How many buffers of shared memory a loop of the kernel fills while a product may still read them: then
    some numbers are wrong. Only for sm_90, the one target here whose products run on while others begin.

    Triton 3.6 and 3.9 make such code where a second product, of fewer rows, takes the same tile from
    registers. They then plan one stage too few in the buffer: enough for that product, not for the first,
    which runs on while the next tile arrives.
    """
    # names: of a buffer, or a view of one, to its number; stages: tiles that each buffer holds; fills: copies
    # into each; read: buffers that a product may still read
    names, stages, fills, read = {}, [], [], set()
    for line in kernel.asm["ttgir"].splitlines():  # in order, since each branch and loop may use a name again
        if found := ALLOCATED.search(line):
            names[found[1]] = len(stages)
            stages.append(int(found[2]))
            fills.append(0)
        elif found := VIEWED.search(line):
            names[found[1]] = names.get(found[2])
        elif (found := FILLED.search(line)) and names.get(found[1]) is not None:
            fills[names[found[1]]] += 1
        elif found := IN_FLIGHT.search(line):
            read |= {names.get(name) for name in re.findall(r"%\w+", found[1])}
    # Copies before the loop fill stages 0 to p - 1. The copy in it is for iteration i + p. It runs while
    # iteration i is read, if it stands behind the wait for iteration i - 1, as Triton has it. So p + 1 stages
    # are needed: as many as there are copies.
    return sum(fills[buffer] > stages[buffer] for buffer in read - {None})


# A line of machine code: NVIDIA's begins with an address and perhaps a predicate; instruction and operands.
INSTRUCTION = re.compile(r"^\s+(?:/\*\w+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Za-z][\w.]*)\s*(.*)$")


def innermost_loops(code):
    """[[instruction, ...], ...] of the loops in machine_code() that hold no other."""
    instructions, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append(found[1])
            target = re.search(r"\.L\w+", found[2]) if re.match("BRA|s_c?branch", found[1]) else None
            if target and labels.get(target[0], len(instructions)) < len(instructions) - 1:
                loops.append((labels[target[0]], len(instructions)))
    return [instructions[first:end] for first, end in loops
            if not any(first <= a and b <= end and (a, b) != (first, end) for a, b in loops)]


class Room(NamedTuple):
    """What a multiprocessor (NVIDIA) or a SIMD unit of a compute unit (AMD) holds: registers of 32 bits a
    thread in all its warps, the most warps, how many units share the memory, and in which portions registers
    are given out."""
    registers: int
    warps: int
    units: int
    portion: int


ROOM = {"cuda": Room(2048, 64, 1, 8), "hip": Room(512, 8, 4, 8)}
MEMORY = {**SHARED, "gfx950": 163840}  # bytes, of all programs that share it


def occupancy(name, used, warps):
    """Share of the warps that the GPU of this name could hold which it does hold, for a kernel with such
    resources() and so many warps a program; other limits than registers and shared memory apart."""
    room = ROOM[TARGETS[name].backend]
    each = -(-max(used["registers"], 1) // room.portion) * room.portion
    by_registers = min(room.registers // each, room.warps) * room.units // warps
    by_memory = MEMORY[name] // used["shared"] if used["shared"] else by_registers
    return min(by_registers, by_memory) * warps / (room.warps * room.units)
