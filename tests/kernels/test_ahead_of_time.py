"""Triton kernels compiled for GPUs that are not here: registers, shared memory, instructions.

Compiling asks the active driver for nothing but a device number and a target, so the project's own launchers
compile what they would run, on tensors that lie on the CPU.
"""
import contextlib
import re
import warnings
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
import triton
import triton.language as tl

with warnings.catch_warnings():  # Triton 3.9 announces 3.10's default for contracting multiplications
    warnings.simplefilter("ignore")
    from evoformer_kernels import ahead_of_time, projections, tuner
    from tests.kernels.launches import LAUNCHES, has_products, spills_too_often
    from tests.support import ROOT

SHARED = dict(sm_80=166912, sm_90=232448, gfx90a=65536, gfx942=65536, gfx950=65536)  # bytes a program may use


def widths(key):
    """Kernel, dtype and widths of a key of tiles.json, without numbers of positions and rows, and what a key
    may lack: what it may be compiled for."""
    kernel, *words = key.split()
    counted = tuner.EXTENT, tuner.FINER
    return kernel, *(word for word in words if not any(pattern.fullmatch(word) for pattern in counted))


@contextlib.contextmanager
def compiled_for(name, met):
    """Within, launches compile for this GPU, with the first candidate and all that is shipped for it at the
    same widths, and run nothing. Yields {"some_kernel num_warps=4 ...": dict(shared, registers, spills, mma,
    overwritten)}, filled at the end; met, a set, gets the keys of tiles.json that were compiled."""
    shipped, described = tuner.read(tuner.SHIPPED).get(name, {}), {}

    def every_configuration(kernel, shape, candidates, run):
        chosen = {key: tiles for key, tiles in shipped.items() if widths(key) == widths(f"{kernel} {shape}")}
        for tiles in (candidates[0], *chosen.values()):
            assert tiles in candidates, f"{kernel} {shape}: {tiles} is shipped, but no candidate"
            run(tiles)
        met.update(chosen)

    with ahead_of_time.compiling(name) as launches, mock.patch.object(tuner, "launch", every_configuration):
        yield described
    for kernel, options, compiled in launches:
        sizes = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}  # given by name
        constants = ", ".join(f"{key}={value}" for key, value in options.items()
                              if isinstance(value, (int, bool)) and key not in sizes)
        described[f"{kernel.__name__} {constants}"] = compiled
    described.update({key: dict(ahead_of_time.resources(compiled), overwritten=overwritten(compiled))
                      for key, compiled in described.items()})


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


def test_kernels_on_a_cpu_say_what_they_need():
    x, vector = torch.zeros(1, 3, 5, 16), torch.zeros(16)
    with pytest.raises(RuntimeError, match="norm_project is .* needs a GPU, or TRITON_INTERPRET=1"):
        projections.head_bias(x, vector, vector, torch.zeros(2, 16), 1e-5)


def check_resources(target, launches):
    """Every configuration that is shipped for the widths of these launches compiles without spills and fits
    shared memory, and no loop overwrites what is still read. Returns the keys of tiles.json that this was
    said of."""
    faults, met = [], set()
    for name in launches:
        function, *arguments = LAUNCHES[name]
        with compiled_for(target, met) as found:
            function(*arguments)
        assert found
        faults += [f"{name}: {kernel}: {used}" for kernel, used in found.items()
                   if spills_too_often(target, kernel, used) or used["shared"] > SHARED[target]
                   or used["overwritten"]
                   or (used["mma"] > 0) != has_products(kernel)]
    assert not faults, "\n".join(faults)
    return met


@pytest.mark.full
@pytest.mark.sample
def test_compiles_for_a_gpu_of_amd():
    check_resources("gfx942", ["attention, columns, N 16"])


@triton.jit
def product_kernel(a, b, out, sums, K, SUM: tl.constexpr, BM: tl.constexpr):
    """out (BM, BM) = a b, and parts of sums (16, K) of a's columns, as no kernel must make them."""
    acc, i, r = tl.zeros((BM, BM), tl.float32), tl.arange(0, BM), tl.arange(0, 16)
    for k0 in range(0, K, BM):
        left, right = tl.load(a + i[:, None] * K + k0 + i), tl.load(b + (k0 + i[:, None]) * BM + i)
        if SUM:
            tl.store(sums + k0 + r[:, None] * K + i, tl.dot(tl.full((16, BM), 1, left.dtype), left))
        acc = tl.dot(left, right, acc)
    tl.store(out + i[:, None] * BM + i, acc)


@pytest.mark.full
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.sample), 3])
def test_what_a_loop_overwrites_too_early_is_seen(stages):
    a, out, sums = (torch.empty(64, 256, dtype=dtype) for dtype in (torch.bfloat16, *[torch.float32] * 2))
    with ahead_of_time.compiling("sm_90") as launches:
        for wrong in (False, True):
            product_kernel[1,](a, a, out, sums, 256, SUM=wrong, BM=64, num_stages=stages)
    assert [overwritten(each.compiled) for each in launches] == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize("target", SHARED)
def test_compiles_for(target):
    assert check_resources(target, LAUNCHES) == set(tuner.read(tuner.SHIPPED).get(target, {}))


def test_the_list_of_gpus_names_those_that_are_compiled_for():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\b(?:sm_|gfx)\w+", page)) == set(SHARED)
