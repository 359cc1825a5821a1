"""Triton without a GPU: compile for GPUs that are not here; read registers, spills, machine code.

    with compiling("gfx942") as launches:
        some_kernel[grid](torch.empty(64, 64), BN=64, num_warps=4)
    resources(launches[0].compiled)  # dict(shared, registers, spills, mma)

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


class Launch(NamedTuple):
    """A launch, and what Triton compiled for it."""
    kernel: object
    options: dict  # what was given by name
    compiled: object


@contextlib.contextmanager
def compiling(name):
    """Within, launches run nothing, but are compiled for the GPU of this name in TARGETS. Yields a list that
    gets a Launch for each of them."""
    launches, run, driver_before = [], triton.JITFunction.run, driver._active

    def compile_only(kernel, *arguments, grid, warmup, **options):
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        launches.append(Launch(kernel, options, compiled))
    driver.set_active(Absent(name))
    triton.JITFunction.run = compile_only
    try:
        yield launches
    finally:
        driver._active, triton.JITFunction.run = driver_before, run


def of_cubin(kernel, tool, option):
    """What a tool of NVIDIA's says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([os.path.join(TOOLS, tool), option, file.name], capture_output=True, text=True,
                              check=True).stdout


def resources(kernel):
    """dict(shared, registers, spills, mma): bytes of shared memory; registers a thread; instructions that
    spill (NVIDIA) or registers spilled (AMD); matrix instructions."""
    if "cubin" in kernel.asm:
        code = of_cubin(kernel, "nvdisasm", "-c")  # what the GPU runs, as text
        used = dict(registers=int(re.search(r"REG:(\d+)", of_cubin(kernel, "cuobjdump", "-res-usage"))[1]),
                     spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
                     mma=len(re.findall(r"\sHG?MMA\.", code)))  # HFMA2.MMA moves a constant
    else:
        code = kernel.asm["amdgcn"]
        used = dict(registers=int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
                     spills=int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
                     mma=len(re.findall(r"v_mfma", code)))
    return dict(shared=kernel.metadata.shared, **used)
