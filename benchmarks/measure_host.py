#!/usr/bin/env python3
"""Time what the host does for our kernels where they are called from Python, by part, on one GPU.

    python benchmarks/measure_host.py --out OUT [--sizes 64 128 256] [--steps 100]

Both functions of fusion_lab.kernels, bf16, one sample, a mask; attention of 4 heads of 32, multiplication of
128 channels. "wall": from call to idle GPU. "host": until the call returns. Medians, in microseconds. "one
thread": backward in the thread that calls, by torch.autograd.set_multithreading_enabled(False). The host's
time is told apart by a second run with clocks in it, which itself takes some microseconds a call:

    launches  starting compiled kernels
    plan      all else in forward and backward: memory, the library's products, sums
    checks    finding the plan: shapes, strides, dtypes, addresses
    autograd  the rest: autograd, and what the clocks take

Writes OUT/host.json.
"""
import contextlib
import pathlib
import statistics
import sys
import time
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

from fusion_lab.training.files import MISSING, UserError, exit_code, require_packages, write_json

require_packages("measure_host.py", "torch", "triton")

import torch

from fusion_lab.kernels import common, eager, tuner
from fusion_lab.kernels.attention import drop_in as attention
from fusion_lab.kernels.triangle_multiplication import drop_in as multiplication
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import choose_device, system_info

PARTS = dict(  # name: what belongs to it; parts within parts count for the inner one
    launches=[(common.Bound, "__call__")],
    plan=[(module.Plan, name) for module in (attention, multiplication) for name in ("forward", "backward")],
    checks=[(tuner, "plan"), (eager, "looks"), (eager, "alike"), (attention, "watched"),
            (multiplication, "watched")])


def attention_call(S, device):
    """(function, tensors with a gradient)"""
    q, k, v = torch.randn(3, 1, S, 4, S, 32, device=device, dtype=torch.bfloat16)
    tensors = [t.requires_grad_() for t in (q, k, v, torch.randn(1, 1, 4, S, S, device=device).bfloat16())]
    mask = torch.ones(1, S, 1, 1, S, device=device, dtype=torch.bool)
    return lambda: attention.triangle_attention(*tensors, mask), tensors


def multiplication_call(S, device):
    """(function, tensors with a gradient)"""
    c, mask = 128, torch.ones(1, S, S, device=device)

    def normal(*size):
        return torch.randn(size, device=device).bfloat16().requires_grad_()
    weights = dict(norm_in_weight=normal(c), norm_in_bias=normal(c), p_in_weight=normal(2 * c, c),
                   g_in_weight=normal(2 * c, c), norm_out_weight=normal(c), norm_out_bias=normal(c),
                   p_out_weight=normal(c, c), g_out_weight=normal(c, c))
    x = normal(1, S, S, c)
    return (lambda: multiplication.triangle_multiplicative_update(x, "outgoing", mask, **weights),
            [x, *weights.values()])


@contextlib.contextmanager
def clocks():
    """Within, {part: seconds spent in it} grows; yields it."""
    spent, inner = dict.fromkeys(PARTS, 0.0), [0.0]

    def timed(part, function):
        def run(*given, **named):
            outer, inner[0], start = inner[0], 0.0, time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                all_of_it = time.perf_counter() - start
                spent[part] += all_of_it - inner[0]
                inner[0] = outer + all_of_it
        return run
    with contextlib.ExitStack() as stack:
        for part, places in PARTS.items():
            for place, name in places:
                stack.enter_context(mock.patch.object(place, name, timed(part, getattr(place, name))))
        yield spent


def times(step, steps, spent=()):
    """Medians {"host": until step() returns, "wall": until the GPU is idle, and each of spent} in
    microseconds; before each step the GPU is idle."""
    found = []
    for _ in range(steps + 5):
        torch.cuda.synchronize()
        for part in spent:
            spent[part] = 0.0
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        found.append(dict(spent, host=host, wall=time.perf_counter() - start))
    return {name: 1e6 * statistics.median(each[name] for each in found[5:]) for name in found[0]}


def measure(name, make, size, steps, device):
    """A row for forward, and two for forward and backward."""
    call, tensors = make(size, device)
    gradient = torch.randn_like(call())

    def both():
        torch.autograd.grad(call(), tensors, gradient)

    def alone():
        with torch.autograd.set_multithreading_enabled(False):
            both()
    for direction, step in (("forward", call), ("forward and backward", both), ("both, one thread", alone)):
        row = dict(function=name, size=size, direction=direction)
        row.update({f"{name}_us": value for name, value in times(step, steps).items()})
        with clocks() as spent:
            found = times(step, steps, spent)
        parts = {part: found[part] for part in PARTS}
        row["parts_us"] = {**parts, "autograd": found["host"] - sum(parts.values())}
        print(f"{name:32s} S {size:4d} {direction:20s} wall {row['wall_us']:7.0f} us  host",
              f"{row['host_us']:7.0f} ", *(f"{part} {value:.0f} " for part, value in row["parts_us"].items()),
              flush=True)
        yield row


def main(argv=None):
    parser = Parser(prog="measure_host.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for host.json (default: none)")
    parser.add_argument("--sizes", nargs="+", type=whole_number(), default=[64, 128, 256],
                        help="residues (default: %(default)s)")
    parser.add_argument("--steps", type=whole_number(), default=100, help="timed (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("needs a GPU", code=MISSING)
    device, rows = choose_device("cuda"), []
    for name, make in ((attention.NAME, attention_call), (multiplication.NAME, multiplication_call)):
        for size in arguments.sizes:
            rows += measure(name, make, size, arguments.steps, device)
    if arguments.out:
        write_json(arguments.out / "host.json", dict(
            command=" ".join(["python benchmarks/measure_host.py", *sys.argv[1:]]),
            date=time.strftime("%F"), rows=rows, system_info=system_info(device)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_host.py"))
