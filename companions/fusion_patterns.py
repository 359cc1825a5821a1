#!/usr/bin/env python3
"""A laboratory of kernel fusion: five patterns, and the conv layer, each written several ways.

    python companions/fusion_patterns.py              # everything
    python companions/fusion_patterns.py --patterns "topk scores" --rounds 20
    python companions/fusion_patterns.py --retune     # first the best tiles
    python companions/fusion_patterns.py --targets "sm_90 gfx90a gfx942 gfx950"

Plain PyTorch, torch.compile, our Triton kernels (companions/kernels/pattern_*.py, forward and backward), the
library's own fused operation, Liger's kernels if they are installed: held against float64, then timed by
turns, with the bytes that have to be moved and registers beside time. From this a verdict for each pattern,
FUSE, LIBRARY or DON'T, and six claims that articles on fusion make, beside what was measured. Without a GPU
our kernels are compiled for GPUs that are not here: the register ladder shows where a row no longer fits.

Reading order: PATTERNS, measure and verdict in companions/patterns.py, claims, ladder.
"""
import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fusion_lab.training import interrupts

interrupts.quiet(__name__)

import torch
import torch.nn.functional as F

from companions.kernels import pattern_references as references
from companions.patterns import Pattern, measure, resources, times, verdict
from fusion_lab.kernels.library.custom_gradients import LinearReLU
from fusion_lab.kernels.limits import HAS_TRITON
from fusion_lab.measuring.bounds.ceilings import copy_ceiling, matmul_ceiling
from fusion_lab.measuring.tables import aligned, cell
from fusion_lab.training import files
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import choose_device, keep_freed_memory, system_info
from fusion_lab.training.reporting import print_result

if HAS_TRITON:
    from companions.kernels import pattern_linear, pattern_norms, pattern_softmax
    from fusion_lab.kernels import ahead_of_time, tuner

# --------------------------------------------------------------------------------------------------------
# The patterns: what they compute, and every way to write it
# --------------------------------------------------------------------------------------------------------

DIRECTORY = "./pytorch_profiles_v2"  # for the result, without --profile-dir
KEPT = 8  # of top-k


def folded(tensors):
    """Convolution and batch norm of a trained network as one convolution: x, weight, bias."""
    x, weight, gamma, beta, mean, variance = tensors
    scale = gamma * torch.rsqrt(variance + references.EPS)
    return x, weight * scale[:, None, None, None], beta - mean * scale


def convolution_relu(x, weight, bias):
    if x.is_cuda and not torch.version.hip:
        return torch.cudnn_convolution_relu(x, weight, bias, (1, 1), (1, 1), (1, 1), 1)
    return F.conv2d(x, weight, bias, padding=1).relu()


def plain_convolution(x, weight, gamma, beta, mean, variance):
    return F.batch_norm(F.conv2d(x, weight, padding=1), mean, variance, gamma, beta).relu()


def far_apart(tensors):
    """The largest entries of each row differ by more than a rounding: all ways choose the same ones."""
    with torch.no_grad():
        tensors[0][:, 7 * torch.arange(1, KEPT + 2)] = 6 + 0.5 * torch.arange(KEPT + 1.0)
    return tensors


def keys_missing(tensors):
    """The last quarter of the keys is not there; variances are positive."""
    mask = torch.ones_like(tensors[-1])
    mask[:, -(mask.shape[1] // 4):] = 0
    return [*tensors[:-1], mask]


def plain_add_layer_norm(x, residual, weight, bias):
    total = x + residual
    return total, references.plain_layer_norm(total, weight, bias)


def linear(kind):
    def shapes(m, n, k):
        return [(m, k), (n, k), (n,)]
    library = (LinearReLU.apply if kind == "relu" else
               lambda x, w, b: references.ACTIVATIONS[kind](F.linear(x, w, b)))
    return Pattern(f"linear + bias + {kind}", (256, 512, 512), (8192, 4096, 4096), shapes,
                   lambda *t: references.plain_linear_activation(*t, kind),
                   lambda *t: pattern_linear.linear_activation(*t, kind), library)


PATTERNS = dict(
    relu=linear("relu"), gelu=linear("gelu"), silu=linear("silu"),
    add_norm=Pattern(
        "residual + LayerNorm", (1024, 1024), (16384, 4096), lambda r, w: [(r, w), (r, w), (w,), (w,)],
        plain_add_layer_norm, lambda *t: pattern_norms.add_norm(*t), references.plain_add_norm),
    add_rms=Pattern(
        "residual + RMSNorm", (1024, 1024), (16384, 4096), lambda r, w: [(r, w), (r, w), (w,)],
        references.plain_add_norm, lambda *t: pattern_norms.add_norm(*t),
        lambda x, y, w: (x + y, F.rms_norm(x + y, w.shape, w, references.EPS)),
        ("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction",
         lambda f, x, y, w: f.apply(x, y, w, references.EPS, 0.0, "llama", False)[::-1])),
    wide=Pattern(
        "LayerNorm of any width", (64, 16384), (4096, 16384), lambda r, w: [(r, w), (w,), (w,)],
        references.plain_layer_norm, lambda *t: pattern_norms.wide_layer_norm(*t),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, references.EPS),
        ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction",
         lambda f, x, w, b: f.apply(x, w, b, references.EPS))),
    topk=Pattern(
        f"softmax + top-{KEPT}", (32, 32000), (512, 131072), lambda r, w: [(r, w)],
        lambda x: references.plain_softmax_topk(x, KEPT),
        lambda x: pattern_softmax.softmax_topk(x, KEPT), shape_data=far_apart),
    scores=Pattern(
        "scores + mask + softmax", (8, 256, 32), (64, 2048, 64),
        lambda h, n, d: [(h, n, d), (h, n, d), (h, n)], references.plain_masked_softmax,
        lambda *t: pattern_softmax.masked_softmax(*t), constants=1,
        beside=("SDPA, which returns no probabilities", lambda q, k, mask: F.scaled_dot_product_attention(
            q[None], k[None], k[None], attn_mask=mask.bool()[None, :, None])),
        shape_data=keys_missing),
    conv=Pattern(
        "conv + batch norm + ReLU, inference", (4, 32, 28, 28), (64, 64, 56, 56),
        lambda b, c, h, w: [(b, c, h, w), (c, c, 3, 3), (c,), (c,), (c,), (c,)], plain_convolution,
        from_library=convolution_relu, constants=6, prepare=folded,
        shape_data=lambda tensors: [*tensors[:-1], tensors[-1].abs() + 0.5]))


USUAL = [name for name in PATTERNS if name != "silu"]

# --------------------------------------------------------------------------------------------------------
# What follows from it
# --------------------------------------------------------------------------------------------------------


def beside_line(result):
    """What stands in the table, but would return something else."""
    return next((row for row in result["ways"] if not row["judged"] and row["both"]), None)


def claims(results, steps, copy):
    """The six claims that articles on fusion make, each with what was measured: [(claim, found)]."""
    by = {result["name"]: result for result in results}

    def saved(name, both=False):
        if name not in by:
            return "not measured"
        end, found = "_both" * both, times(by[name])
        before, after = by[name]["plain_bytes" + end], by[name]["least_bytes" + end]
        traffic = f"bytes {before / 1e6:.1f} -> {after / 1e6:.1f} MB (weights included)"
        plain = found.pop("plain")
        if not found:
            return f"{traffic}; step not compared, only plain code ran"
        best = min(found, key=lambda way: found[way]["median"])
        return f"{traffic}; step {plain['median'] / found[best]['median']:.2f}x ({best})"

    def near(name):
        if name not in by:
            return "not measured"
        forward = {r["name"]: r["forward"] for r in by[name]["ways"] if r["forward"] and r["judged"]}
        best = min(forward, key=lambda way: forward[way]["median"])
        return (f"{best}: {forward[best]['gb_per_s']:.1f} GB/s of the bytes that must move, "
                f"{forward[best]['gb_per_s'] * 1e9 / copy:.0%} of a copy")
    beside = beside_line(by["scores"]) if "scores" in by else None
    attention = "not measured" if not beside else (
        f"step {times(by['scores'])['plain']['median'] / beside['both']['median']:.1f}x with SDPA; its "
        "traffic still grows with L * L over the memory on chip, its footprint alone is O(L)")
    first = min((s for s in steps if s["spills"]), key=lambda s: (s["width"], -s["warps"]), default=None)
    spill = (f"{first['target']}: a row of {first['width']} with {first['warps']} warps has "
             f"{first['spills']} spills ({first['kernel']})" if first else
             "no spill seen" if steps else "no ladder" if HAS_TRITON else "needs Triton")
    return [("bias and activation belong into the product's kernel", saved("gelu")),
            ("residual and norm in one kernel save half of the traffic", saved("add_rms", both=True)),
            ("a fused norm runs at the speed of memory", near("wide")),
            ("top-k needs no probabilities in memory", saved("topk")),
            ("fused attention makes traffic O(N)", attention),
            ("too much in one kernel turns against you: registers spill", spill)]


LADDER = (1024, 4096, 16384, 65536)
WARPS = (4, 8, 16)


def ladder(targets, device):
    """Residual + LayerNorm with rows of every width and so many warps to hold them: what each GPU's compiler
    makes of it, and on a GPU the time."""
    found = []
    for width in LADDER:
        for warps in WARPS:
            for target in targets:
                found += rung(width, warps, target, device)
    return found


def rung(width, warps, target, device):
    here = device.type == "cuda" and target == tuner.gpu()
    rows = max(2 ** 26 // width, 1) if here else 2
    x, y, total, out, dx = (torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(5))
    weight, bias = torch.ones(2, width, dtype=torch.bfloat16, device=device)
    parts = torch.empty(min(rows, pattern_norms.PROGRAMS), 2, width, device=device)
    options = dict(CENTRED=True, BN=width, num_warps=warps, num_stages=1)

    def forward():
        ahead_of_time.start(pattern_norms.add_norm_kernel, (rows,), x, y, weight, bias, total, out, width,
                            references.EPS, **options)

    def backward():
        ahead_of_time.start(pattern_norms.add_norm_backward_kernel, (len(parts),), x, y, total, weight, dx,
                            parts, rows, width, references.EPS, **options)
    steps = []
    for run in (forward, backward):
        with ahead_of_time.watching() if here else ahead_of_time.compiling(target) as seen:
            run()
        milliseconds = min(tuner.milliseconds(run) for _ in range(5)) if here else None
        steps.append(dict(width=width, milliseconds=milliseconds, **resources(target, seen[0])))
    return steps


# --------------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------------


def quantile_cell(quantile):
    return "" if quantile is None else "{median:.3f} ({p20:.3f}, {p80:.3f})".format(
        **{key: 1e3 * quantile[key] for key in ("p20", "median", "p80")})


def table_of(result, copy):
    """One pattern as rows of cells."""
    rows = [["way", "forward ms (p20, p80)", "GB/s", "of copy", "with backward ms (p20, p80)", "GB/s"]]
    for row in result["ways"]:
        if row["reason"]:
            rows.append([row["name"], row["reason"]])
            continue
        forward, both = row["forward"], row["both"]
        rows.append([row["name"], quantile_cell(forward), f"{forward['gb_per_s']:.1f}",
                     f"{forward['gb_per_s'] * 1e9 / copy:.0%}", quantile_cell(both),
                     cell(both and both["gb_per_s"], ".1f")])
    return rows


def kernel_lines(result):
    """Registers beside time: each kernel once a GPU."""
    return [f"  {k['kernel']}, {k['target']}, {k['warps']} warps: {k['registers']} registers, "
            f"{k['spills']} spills, {k['shared']} B shared"
            for k in result["kernels"] if not k["kernel"].startswith("sum_")]


def ladder_table(steps):
    """Widths and warps down, GPUs across; in a cell registers (spills), forward | backward."""
    targets = list(dict.fromkeys(step["target"] for step in steps))
    rows = [["width", "warps", *targets]]
    for width in LADDER:
        for warps in WARPS:
            cells = []
            for target in targets:
                both = [s for s in steps if (s["width"], s["warps"], s["target"]) == (width, warps, target)]
                cells.append(" | ".join(f"{s['registers']} ({s['spills']})"
                                        + cell(s["milliseconds"], " .3f", 1, " ms") for s in both))
            rows.append([str(width), str(warps), *cells])
    return rows


def arguments_of(argv):
    summary, _, rest = __doc__.partition("\n")
    parser = Parser(prog="fusion_patterns.py", description=summary, epilog=f"{rest}\n{files.EXIT_CODES}")
    parser.add_argument("--patterns", metavar='"NAME ..."', default=" ".join(USUAL),
                        help="only these; silu is one more (default: %(default)s)")
    parser.add_argument("--rounds", type=whole_number(2), default=9, metavar="N",
                        help="times each way is timed (default: 9)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--targets", metavar='"NAME ..."', default="sm_90 gfx942",
                        help="GPUs to compile for that are not here (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (default: off)")
    parser.add_argument("--no-ladder", action="store_true", help="no register ladder (default: off)")
    parser.add_argument("--retune", action="store_true", help="measure our kernels' tiles (default: off)")
    parser.add_argument("--json", action="store_true",
                        help="end with one line of JSON on a terminal, too (default: off)")
    parser.add_argument("--profile-dir", default=DIRECTORY, metavar="DIR",
                        help="where results go (default: %(default)s)")
    options = parser.parse_args(argv)
    options.targets = options.targets.split()
    options.patterns = options.patterns.replace(",", " ").split()
    known = ahead_of_time.TARGETS if HAS_TRITON else options.targets
    for given, names, allowed in (("--patterns", options.patterns, PATTERNS),
                                  ("--targets", options.targets, known)):
        if wrong := [name for name in names if name not in allowed]:
            parser.error(f"argument {given}: {wrong[0]!r} is none of {' '.join(allowed)}")
    if not options.patterns:
        parser.error(f"argument --patterns: names none of {' '.join(PATTERNS)}")
    return options


def print_pattern(result, copy):
    print(f"{result['title']}, {'x'.join(map(str, result['sizes']))} {result['dtype']}: "
          f"{result['flops'] / 1e9:.2f} GFLOP a step; plain code moves {result['plain_bytes'] / 1e6:.1f} MB "
          f"forward, {result['least_bytes'] / 1e6:.1f} MB have to")
    print("\n".join(f"  {line}" for line in aligned(table_of(result, copy))))
    print("\n".join([*kernel_lines(result), "  Verdict: {}: {}".format(*result["verdict"])]), flush=True)


def run(argv):
    options = arguments_of(argv)
    device = choose_device(options.device)
    if options.retune and not (device.type == "cuda" and HAS_TRITON):
        raise files.UserError("--retune needs a GPU and Triton", code=files.NO_GPU)
    options.profile_dir = files.results_directory(options.profile_dir, options.profile_dir == DIRECTORY)
    path = os.path.join(options.profile_dir, "fusion_patterns.json")
    if device.type == "cpu":
        keep_freed_memory()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy, products = copy_ceiling(device), matmul_ceiling(device, dtype)
    print(f"Device: {device} | torch {torch.__version__} | copy {copy / 1e9:.1f} GB/s | matrix product "
          f"{products / 1e12:.2f} TFLOP/s | {options.rounds} rounds by turns", flush=True)
    results = []
    with tuner.retuning() if options.retune else contextlib.nullcontext():
        for name in options.patterns:
            result = measure(name, PATTERNS[name], device, options.rounds, not options.no_compile,
                             options.targets)
            results.append(result | dict(verdict=verdict(result), bound=bound(result, copy, products)))
            print_pattern(results[-1], copy)
    steps = []
    if HAS_TRITON and not options.no_ladder:
        steps = ladder([tuner.gpu()] if device.type == "cuda" else options.targets, device)
        print("Register ladder, residual + LayerNorm of one row a program, forward | backward: registers "
              "(spills)")
        print("\n".join(f"  {line}" for line in aligned(ladder_table(steps))))
    found = claims(results, steps, copy)
    print("Claimed, and measured here:")
    print("\n".join(f"  {claim}: {seen}" for claim, seen in found))
    files.set_aside(path)
    files.write_json(path, files.finite(dict(
        mode="fusion_patterns", system_info=system_info(device), copy_bytes_per_s=copy,
        matmul_flops_per_s=products, patterns=results, ladder=steps,
        claims=[dict(claim=claim, measured=seen) for claim, seen in found])))
    wrong = [f"{result['name']} {way['name']}" for result in results for way in result["ways"]
             if (way["reason"] or "").startswith("wrong")]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    verdicts = {result["name"]: result["verdict"][0] for result in results}
    print_result(dict(mode="fusion_patterns", verdicts=verdicts, wrong=wrong), path,
                 SimpleNamespace(profiler=options))
    return files.FAILED if wrong else 0


def bound(result, copy, products):
    """What a step would wait for at best: memory or products."""
    return "memory" if result["least_bytes_both"] / copy > result["flops"] / products else "products"


if __name__ == "__main__":
    sys.exit(files.exit_code(run, sys.argv[1:], "fusion_patterns.py"))
