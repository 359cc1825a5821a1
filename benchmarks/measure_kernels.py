#!/usr/bin/env python3
"""Time the Triton kernels against every other way to compute the same, forward and backward, on one GPU.

    python benchmarks/measure_kernels.py --out OUT [--only REGEX] [--sizes 64 256]

A row is one operation, size S (c 128, 4 heads, bf16; outer product: h 32, N 64 if not named) and
implementation: ours, plain PyTorch, the same under torch.compile; for the outer product the re-associated
sums ("reordered") and, as ours, the library's products but for the projection and those two whose results it
would copy ("layout"). A sub-layer is attention with its projections, gate and key mask. LayerNorms and
residuals are inside, whatever the implementation. peers.py has attention alone, and other people's kernels.
Forward and backward are one CUDA graph; all implementations of a size take turns. Errors are judged against
float64: at most three times plain PyTorch's in the same precision, and two roundings of the largest element.
Writes OUT/kernels.json. Exit code 1 if ours or layout fails or is not accurate.
"""
import re
import sys
from functools import partial

from script import begin, gpu_or_trial, parser_of, write_result

begin(__name__, "torch", "triton")

import torch

from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.bench import by_turns
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.errors import exit_code
from fusion_lab.training.machine import MEGABYTE
from tests.kernels import problems

OURS, CHANNELS, HEADS = ("ours", "layout"), 128, 4


def usual(problem, dtype, *sizes):
    """({implementation: function}, tensors) of a problem of the tests, of which they hold the numbers."""
    ours, plain, tensors = problem(dtype, *sizes)
    return dict(plain=plain, compiled=plain, ours=ours), tensors


def sub_layer(axis, dtype, S):
    return usual(problems.sub_layer, dtype, 1, S, S, CHANNELS, HEADS, axis, "own", True, True, None)


def outer_product(B, N, dtype, S):
    """Both sides (B, N, S, h), weight (c, h*h), bias (c,), pair (B, S, S, c)."""
    functions, tensors = usual(problems.outer_first, dtype, B, N, S, 32, CHANNELS, False, 1 / N, True)

    def reordered(left, right, weight, bias, pair):
        h, found = left.shape[-1], []
        weight = weight.unflatten(1, (h, h)).permute(1, 2, 0)
        for a, b in zip(left, right, strict=True):
            wide = torch.bmm(b.flatten(0, 1).expand(h, -1, -1), weight).view(h * len(b), -1)
            found.append((a.permute(1, 2, 0).flatten(1) @ wide).unflatten(1, (b.shape[1], -1)))
        return pair + (torch.stack(found) + bias) / N
    functions |= dict(reordered=reordered, layout=functions["ours"])
    del functions["ours"]
    return functions, tensors


def multiplication(dtype, S):
    return usual(problems.multiplication, dtype, 1, S, CHANNELS, True, 2, True, None, True)


def pair_transition(dtype, S):
    return usual(problems.transition_layer, dtype, (1, S, S, CHANNELS), 4 * CHANNELS)


OPERATIONS = {  # what gives ({implementation: function}, tensors) of a dtype and S residues
    "sub-layer, starting node": partial(sub_layer, 2),
    "sub-layer, ending node": partial(sub_layer, 1),
    "outer product": partial(outer_product, 1, 64),
    "outer product, B 4, N 16": partial(outer_product, 4, 16),
    "triangle multiplication": multiplication,
    "pair transition": pair_transition,
}
COMPILED = ("compiled", "reordered", "layout")  # by torch.compile


def step(function, tensors):
    """[output, gradients of what it depends on] of function(*tensors but the last, the output's gradient)"""
    *inputs, gradient = tensors
    given = [t.detach().requires_grad_() for t in inputs]
    out = function(*given)
    found = torch.autograd.grad(out, given, gradient, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


def errors(results, exact):
    return [(x.double() - y).abs().max().item() for x, y in zip(results, exact, strict=True)]


def prepared(function, tensors, device):
    """(a CUDA graph of a step, its results, MB that it needs beside its input)"""
    torch.cuda.reset_peak_memory_stats(device)
    before, results = torch.cuda.memory_allocated(device), step(function, tensors)
    extra = (torch.cuda.max_memory_allocated(device) - before) / MEGABYTE
    names = [str(number) for number in range(len(tensors))]
    graph = GraphedStep(lambda batch: step(function, [batch[name] for name in names]),
                        dict(zip(names, tensors, strict=True)), device)
    return graph, results, extra  # the graph owns the memory that it replays on


def measure(operation, size, arguments, device):
    """Rows of all implementations of an operation at one size."""
    with torch.device(device):
        functions, tensors = OPERATIONS[operation](torch.bfloat16, size)
    tensors.append(torch.randn_like(functions["plain"](*tensors)))
    exact = step(functions["plain"], [t.double() for t in tensors])
    own = errors(step(functions["plain"], tensors), exact)
    allowed = [ERROR_FACTOR * e + 2 * torch.finfo(torch.bfloat16).eps * truth.abs().max().item()
               for e, truth in zip(own, exact, strict=True)]
    rows, graphs = [], {}
    for name, function in functions.items():
        row = dict(operation=operation, size=size, implementation=name)
        try:
            torch._dynamo.reset()
            run = torch.compile(function, fullgraph=True, dynamic=False) if name in COMPILED else function
            graphs[name], results, row["extra_mb"] = prepared(run, tensors, device)
            row["errors"] = errors(results, exact)
            row["accurate"] = all(e <= limit for e, limit in zip(row["errors"], allowed, strict=True))
        except Exception as error:  # a row with its reason
            row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        rows.append(row)
    replays = {name: graph.graph.replay for name, graph in graphs.items()}
    times = by_turns(replays, device, arguments.steps, repeats=1)
    for row in rows:
        for key, seconds in zip(("p20_ms", "median_ms", "p80_ms"), times.get(row["implementation"], ()),
                                strict=False):
            row[key] = 1e3 * seconds
        print(line(row), flush=True)
    return rows


def line(row):
    label = f"{row['operation']}, S {row['size']}, {row['implementation']}"
    if "failed" in row:
        return f"{label:48s} failed: {row['failed']}"
    return (f"{label:48s} {row['median_ms']:8.3f} ms ({row['p20_ms']:.3f}, {row['p80_ms']:.3f})  "
            f"{row['extra_mb']:8.1f} MB  {'ok' if row['accurate'] else 'INACCURATE'}")


def main(argv=None):
    parser = parser_of(__file__, __doc__, sizes=[64, 128, 256, 384, 512], steps=30, only="operations")
    arguments = parser.parse_args(argv)
    device, rows = gpu_or_trial(), []
    names = [name for name in OPERATIONS if re.search(arguments.only, name)]
    if not names:
        parser.error(f"no operation is left by --only {arguments.only!r}")
    for name in names:
        for size in arguments.sizes:
            rows += measure(name, size, arguments, device)
            if arguments.out:
                write_result(arguments.out / "kernels.json", device, rows=rows)
    return int(not all(row.get("accurate") for row in rows if row["implementation"] in OURS))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_kernels.py"))
