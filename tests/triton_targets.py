"""Triton without a GPU: compile kernels for GPUs that are not here, and run them in the interpreter.

    with compiled_for("gfx942") as found:
        launch_something(torch.empty(64, 64))
    found  # {"some_kernel num_warps=4 ...": dict(shared, registers, spills, mma)}

Compiling asks the active driver for nothing but a device number and a target, so the project's own launchers
compile what they would run, on tensors that lie on the CPU.
"""
import contextlib
import os
import re
import subprocess
import tempfile
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fusion_lab.kernels import tuner

TARGETS = dict(sm_80=GPUTarget("cuda", 80, 32), sm_90=GPUTarget("cuda", 90, 32),
               gfx90a=GPUTarget("hip", "gfx90a", 64), gfx942=GPUTarget("hip", "gfx942", 64),
               gfx950=GPUTarget("hip", "gfx950", 64))
EXTENTS = ("P", "S", "L")  # of a tuner's class of shape; any of them may meet a kernel of these widths
SHARED = dict(sm_80=166912, sm_90=232448, gfx90a=65536, gfx942=65536, gfx950=65536)  # bytes a program may use
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


def widths(key):
    """Kernel, dtype and widths of a key of tiles.json, without numbers of positions and rows: what it may be
    compiled for. N is a projection's width, but the rows of an outer product."""
    kernel, *words = key.split()
    extents = (*EXTENTS, *["N"] * kernel.startswith("outer"))
    return kernel, *(word for word in words if not re.fullmatch(r"[A-Z]\d+", word) or word[0] not in extents)


@contextlib.contextmanager
def compiled_for(name, met=None):
    """Within, launches compile for this GPU, with the first candidate and all that is shipped for it at the
    same widths, and run nothing. Yields {kernel and configuration: resources()}, filled at the end. met, if
    given, is a set that gets the keys of tiles.json that were compiled."""
    compiled, run, shipped = {}, triton.runtime.jit.JITFunction.run, tuner.read(tuner.SHIPPED).get(name, {})

    def warm_up(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        chosen = ", ".join(f"{key}={value}" for key, value in options.items()
                           if isinstance(value, (int, bool)))
        compiled[f"{self.__name__} {chosen}"] = kernel

    def every_configuration(kernel, shape, candidates, run):
        chosen = {key: tiles for key, tiles in shipped.items() if widths(key) == widths(f"{kernel} {shape}")}
        for tiles in (candidates[0], *chosen.values()):
            assert tiles in candidates, f"{kernel} {shape}: {tiles} is shipped, but no candidate"
            run(tiles)
        if met is not None:
            met.update(chosen)

    before, found = driver._active, {}
    driver.set_active(Absent(name))
    try:
        with mock.patch.object(triton.runtime.jit.JITFunction, "run", warm_up), \
                mock.patch.object(tuner, "launch", every_configuration):
            yield found
        found.update({key: resources(kernel) for key, kernel in compiled.items()})
    finally:
        driver._active = before


def resources(kernel):
    """dict(shared, registers, spills, mma): bytes of shared memory; registers a thread; instructions that
    spill (NVIDIA) or registers spilled (AMD); matrix instructions."""
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage, code = (subprocess.run([os.path.join(TOOLS, tool), option, file.name], capture_output=True,
                                          text=True, check=True).stdout
                           for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c")))
        found = dict(registers=int(re.search(r"REG:(\d+)", usage)[1]),
                     spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
                     mma=len(re.findall(r"\bH?G?MMA", code)))
    else:
        code = kernel.asm["amdgcn"]
        found = dict(registers=int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
                     spills=int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
                     mma=len(re.findall(r"v_mfma", code)))
    return dict(shared=kernel.metadata.shared, **found)


def mend_interpreter():
    """In Triton 3.6 to 3.9 the interpreter's products multiply the bit patterns of bfloat16
    (triton-lang/triton#11584)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def wide(tensor):
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        bits = tensor.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *r: product(self, wide(a), wide(b), *r)
