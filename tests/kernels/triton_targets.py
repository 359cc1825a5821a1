"""Triton without a GPU: compile kernels for GPUs that are not here, and run them in the interpreter.

    with compiled_for("gfx942") as found:
        launch_something(torch.empty(64, 64))
    found  # {"some_kernel num_warps=4 ...": dict(shared, registers, spills, mma)}

Compiling asks the active driver for nothing but a device number and a target, so the project's own launchers
compile what they would run, on tensors that lie on the CPU.
"""
import contextlib
import re
from unittest import mock

from fusion_lab.kernels import tuner
from fusion_lab.kernels.ahead_of_time import compiling, resources

SHARED = dict(sm_80=166912, sm_90=232448, gfx90a=65536, gfx942=65536, gfx950=65536)  # bytes a program may use


def widths(key):
    """Kernel, dtype and widths of a key of tiles.json, without numbers of positions and rows: what it may be
    compiled for."""
    kernel, *words = key.split()
    return kernel, *(word for word in words if not tuner.EXTENT.fullmatch(word))


@contextlib.contextmanager
def compiled_for(name, met=None, describe=resources):
    """Within, launches compile for this GPU, with the first candidate and all that is shipped for it at the
    same widths, and run nothing. Yields {kernel and configuration: describe(compiled kernel)}, filled at the
    end. met, if given, is a set that gets the keys of tiles.json that were compiled."""
    shipped, described = tuner.read(tuner.SHIPPED).get(name, {}), {}

    def every_configuration(kernel, shape, candidates, run):
        chosen = {key: tiles for key, tiles in shipped.items() if widths(key) == widths(f"{kernel} {shape}")}
        for tiles in (candidates[0], *chosen.values()):
            assert tiles in candidates, f"{kernel} {shape}: {tiles} is shipped, but no candidate"
            run(tiles)
        if met is not None:
            met.update(chosen)

    with compiling(name) as launches, mock.patch.object(tuner, "launch", every_configuration):
        yield described
    for kernel, options, compiled in launches:
        sizes = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}  # given by name
        constants = ", ".join(f"{key}={value}" for key, value in options.items()
                              if isinstance(value, (int, bool)) and key not in sizes)
        described[f"{kernel.__name__} {constants}"] = compiled
    described.update({key: describe(compiled) for key, compiled in described.items()})


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
