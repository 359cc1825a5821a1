#!/usr/bin/env python3
"""Time every implementation of attention inside the model's shapes, forward and backward, on one GPU.

    python benchmarks/measure_attention.py --out OUT [--shapes REGEX] [--variants REGEX] [--steps 30]

A row is one shape, precision and backend: plain attention under torch.compile, SDPA, FlexAttention, and
FlexAttention with other kernel options or with its bias gradient spread over several copies (sums of many
rows into one address are what its backward may wait for); in float32 also with three TF32 products for one.
Forward and backward are one CUDA graph, so the host counts for nothing. Errors of outputs and gradients are
judged against float64: at most three times those of plain attention in the same precision, and two roundings
of the largest element. Writes OUT/attention.json. With --quick, eager code on a CPU.
Exit code 1 if math, SDPA or FlexAttention as the model uses it fails or is not accurate.
"""
import pathlib
import re
import sys
import time
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch
from torch.nn.attention.flex_attention import flex_attention

from fusion_lab.kernels.library.attention_choice import NO_BLOCK_MASK, prepare_flex_attention
from fusion_lab.measuring.accuracy import ERROR_FACTOR, TF32_EPSILON
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.files import MISSING, UserError, exit_code, write_json
from fusion_lab.training.flags import Parser, regular_expression, whole_number
from fusion_lab.training.machine import MEGABYTE, choose_device, system_info
from tiny_openfold_v2 import attend

SHAPES = {  # B, rows, H, L, D, biased
    "pair S64 B4": (4, 64, 4, 64, 32, True),
    "rows S64 N16 B4": (4, 16, 4, 64, 16, True),
    "columns S64 N16 B4": (4, 64, 4, 16, 16, False),
    "pair S256": (1, 256, 4, 256, 32, True),
    "rows S256 N64": (1, 64, 4, 256, 16, True),
    "columns S256 N64": (1, 256, 4, 64, 16, False),
    "pair S384": (1, 384, 4, 384, 32, True),
    "rows S384 N128": (1, 128, 8, 384, 32, True),
    "columns S384 N128": (1, 384, 8, 128, 32, False),
}
QUICK = {"pair": (2, 4, 2, 8, 16, True), "columns": (2, 4, 2, 8, 16, False)}
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
BLOCKS = {f"fwd {m}x{n} w{w}": dict(fwd_BLOCK_M=m, fwd_BLOCK_N=n, fwd_num_warps=w)
          for m, n, w in ((128, 64, 4), (64, 64, 4), (128, 128, 8), (64, 32, 4))}
BLOCKS |= {f"bwd {m}x{n} w{w} s{s}": dict(bwd_BLOCK_M1=m, bwd_BLOCK_N1=n, bwd_BLOCK_M2=n, bwd_BLOCK_N2=m,
                                          bwd_num_warps=w, bwd_num_stages=s)
           for m, n, w, s in ((32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 4, 3), (64, 128, 8, 2),
                              (32, 32, 2, 3), (32, 32, 4, 2))}
JUDGED = ("math", "sdpa", "flex")  # as the model uses them
THREE_PRODUCTS = dict(FLOAT32_PRECISION="'tf32x3'")  # each float32 product as three in TF32


def flex_variant(copies=1, gradient=True, **options):
    """flex_attend() with other kernel options, the bias gradient in several copies, or none at all (not a way
    to train: it shows what the gradient costs)."""
    def run(q, k, v, bias):
        rows = q.shape[1]
        bias = bias if gradient or bias is None else bias.detach()
        spread = None if bias is None else bias.float()[:, None].expand(-1, copies, -1, -1, -1)

        def add_bias(score, b, h, i, j):
            return score + spread[b // rows, b % copies, h, i, j]
        return flex_attention(*(x.flatten(0, 1) for x in (q, k, v)),
                              score_mod=None if bias is None else add_bias,
                              block_mask=NO_BLOCK_MASK.get(q.device),
                              kernel_options=dict(FORCE_USE_FLEX_ATTENTION=True, **options)
                              ).unflatten(0, (-1, rows))
    return run


def variants(biased, precision, on_gpu):
    """{name: function of q, k, v (B, R, H, L, D) and bias (B, H, L, L) or None}"""
    found = {name: partial(attend, backend=name) for name in JUDGED}
    if not on_gpu:
        return found
    if biased:
        found |= {f"flex, {n} bias gradients": flex_variant(copies=n) for n in (4, 16)}
        found["flex, no bias gradient"] = flex_variant(gradient=False)
    found |= {f"flex, {name}": flex_variant(**options) for name, options in BLOCKS.items()}
    if precision == "fp32":
        found["flex, tf32x3"] = flex_variant(**THREE_PRODUCTS)
        found |= {f"flex, tf32x3, {name}": flex_variant(**THREE_PRODUCTS, **options)
                  for name, options in BLOCKS.items()}
    return found


def inputs(shape, dtype, device):
    b, rows, h, length, width, biased = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator).to(dtype)
    # As in the model: q, k, v are slices of one wide tensor, its heads permuted and not copied.
    qkv = normal(b, rows, length, 3 * h * width)
    found = dict(qkv=qkv, weight=normal(b, rows, h, length, width))
    return found | (dict(bias=normal(b, h, length, length)) if biased else {})


def step_function(attention, heads, compiled=False):
    """run(inputs) -> [output, gradients of qkv and bias]"""
    def forward(qkv, bias):
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(2, 3) for part in qkv.chunk(3, dim=-1))
        return attention(q, k, v, bias)
    function = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward

    def run(tensors):
        wanted = {k: tensors[k].detach().requires_grad_() for k in ("qkv", "bias") if k in tensors}
        out = function(wanted["qkv"], wanted.get("bias"))
        loss = (out * tensors["weight"]).sum()
        return [out.detach(), *torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)]
    return run


def measure(shape, dtype, attention, steps, device):
    """(row, results) of one variant."""
    on_gpu, tensors, row = device.type == "cuda", inputs(shape, dtype, device), {}
    torch._dynamo.reset()  # no compiled code left over from another variant
    run = step_function(attention, shape[2], compiled=on_gpu)
    results = run(tensors)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(tensors)
        row["extra_mb"] = (torch.cuda.max_memory_allocated(device) - before) / MEGABYTE
        graphed = GraphedStep(run, tensors, device)
    timer = PhaseTimer(device)
    for _ in range(steps):
        timer.start()
        graphed.graph.replay() if on_gpu else run(tensors)
        timer.mark()
    row["p20_ms"], row["median_ms"], row["p80_ms"] = (1e3 * t for t in quantiles(timer.seconds()[:, 0]))
    return row, results


def errors(results, exact):
    """Largest error of each result; None for one that was not computed."""
    return [None if x is None else (x.double() - y).abs().max().item()
            for x, y in zip(results, exact, strict=True)]


def measure_shape(name, shape, precision, arguments, device):
    """Rows of all variants of one shape in one precision, printed as they come."""
    dtype, rows = DTYPES[precision], []
    epsilon = TF32_EPSILON if precision == "tf32" else torch.finfo(dtype).eps
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    tensors, plain = inputs(shape, dtype, device), step_function(partial(attend, backend="math"), shape[2])
    exact = plain({key: value.double() for key, value in tensors.items()})
    allowed = [ERROR_FACTOR * own + 2 * epsilon * truth.abs().max().item()
               for own, truth in zip(errors(plain(tensors), exact), exact, strict=True)]
    for variant, attention in variants(shape[5], precision, device.type == "cuda").items():
        label = f"{name} | {precision} | {variant}"
        if not re.search(arguments.variants, variant):
            continue
        row = dict(name=label)
        try:
            found, results = measure(shape, dtype, attention, arguments.steps, device)
            wrong = errors(results, exact)
            row |= found | dict(errors=wrong, accurate=all(
                error is not None and error <= limit for error, limit in zip(wrong, allowed, strict=True)))
            print(f"{label:58s} {row['median_ms']:8.3f} ms ({row['p20_ms']:.3f}, {row['p80_ms']:.3f})  "
                  f"{row.get('extra_mb', 0):7.1f} MB  {'ok' if row['accurate'] else 'INACCURATE'}",
                  flush=True)
        except Exception as error:  # a kernel that does not compile or fit is a row with its reason
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            row["failed"] = f"{type(error).__name__}: {reason[:160]}"
            print(f"{label:58s} failed: {row['failed']}", flush=True)
        rows.append(row)
    return rows


def save(rows, out, device):
    """Write what is known so far to OUT/attention.json."""
    if out:
        result = dict(command=" ".join(["python benchmarks/measure_attention.py", *sys.argv[1:]]),
                      date=time.strftime("%F"), rows=rows, system_info=system_info(device))
        write_json(out / "attention.json", result)


def main(argv=None):
    parser = Parser(prog="measure_attention.py", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="directory for attention.json (default: none)")
    parser.add_argument("--shapes", default="", type=regular_expression,
                        help="regular expression over their names (default: all)")
    parser.add_argument("--variants", default="", type=regular_expression, help="the same")
    parser.add_argument("--precisions", nargs="+", choices=tuple(DTYPES), default=["bf16"],
                        help="(default: bf16)")
    parser.add_argument("--steps", type=whole_number(), default=30, help="timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, eager, CPU: to try the script")
    arguments = parser.parse_args(argv)
    if not (arguments.quick or torch.cuda.is_available()):
        raise UserError("needs a GPU; --quick tries the script on a CPU", code=MISSING)
    device = choose_device("cpu" if arguments.quick else "cuda")
    prepare_flex_attention(device)
    rows = []
    for name, shape in (QUICK if arguments.quick else SHAPES).items():
        for precision in arguments.precisions:
            if re.search(arguments.shapes, name):
                rows += measure_shape(name, shape, precision, arguments, device)
                save(rows, arguments.out, device)
    if not rows:
        parser.error("no shape and variant is left")
    judged = [row for row in rows if row["name"].split(" | ")[2] in JUDGED]
    return int(not all(row.get("accurate") for row in judged))


if __name__ == "__main__":
    sys.exit(exit_code(main, None, "measure_attention.py"))
