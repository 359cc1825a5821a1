#!/usr/bin/env python3
"""A laboratory of kernel fusion: ten patterns, each written several ways, and which of them to use.

    python companions/fusion_patterns.py                                      # every pattern
    python companions/fusion_patterns.py --patterns topk scores --rounds 20
    python companions/fusion_patterns.py --retune                             # first the best tiles
    python companions/fusion_patterns.py --patterns add_norm --ladder sm_90 gfx942

It answers for each pattern whether a kernel of your own is worth writing. Plain PyTorch, torch.compile, our
Triton kernel (companions/kernels/patterns.py) and the library's fused operation are held against float64,
then timed by turns, beside the bytes that have to be moved. Each pattern gets a verdict, FUSE, LIBRARY or
DON'T, for a forward pass and for one with backward, in which residual + norm alone has a kernel of ours. The
register ladder compiles that kernel for GPUs that need not be here, and shows which rows are too wide for it,
and how many warps a multiprocessor can hold at once.

Reading order: PATTERNS, measure, verdict, rung.
"""
import contextlib
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent.parent))
from fusion_lab.training import errors, files

errors.begin(__name__, "torch")

import torch
import torch.nn.functional as F

from companions.kernels import EPS
from evoformer_kernels.limits import HAS_TRITON
from evoformer_kernels.precision import at_least_float32
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.bench import by_turns
from fusion_lab.measuring.flops import Traffic
from fusion_lab.measuring.roofline import copy_ceiling
from fusion_lab.measuring.tables import cell, markdown
from fusion_lab.training.directory import Directory
from fusion_lab.training.flags import Parser, whole_number
from fusion_lab.training.machine import choose_device, keep_freed_memory, system_info
from fusion_lab.training.reporting import busy_line, print_result

if HAS_TRITON:
    from companions.kernels import patterns as kernels
    from evoformer_kernels import ahead_of_time, tuner

# --- The patterns: what they compute, and every way to write it -----------------------------------------

DIRECTORY = "./pytorch_profiles_v2"  # for the result, without --profile-dir
KEPT = 8  # of top-k
WITHOUT = "needs a GPU and Triton"
TARGETS = ("here", *ahead_of_time.TARGETS) if HAS_TRITON else ()  # GPUs that a ladder can be made for


def plain_norm(x, weight, bias=None):
    """LayerNorm; RMSNorm where there is no bias."""
    wide = x.to(at_least_float32(x.dtype))
    wide = wide if bias is None else wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    if bias is None:
        return weight * scaled.to(x.dtype)
    return (scaled * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


def plain_add_norm(x, residual, weight, bias=None):
    total = x + residual
    return total, plain_norm(total, weight, bias)


def library_add_norm(x, residual, weight, bias=None):
    total, shape = x + residual, weight.shape
    return total, F.rms_norm(total, shape, weight, EPS) if bias is None else F.layer_norm(
        total, shape, weight, bias, EPS)


def plain_masked_softmax(q, k, mask):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(mask[:, None] == 0, float("-inf")).softmax(-1)


def plain_causal_softmax(q, k):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def folded(x, w, weight, bias, mean, var):
    """The batch norm within the convolution's weights, as for inference."""
    scale = weight * torch.rsqrt(var + EPS)
    return F.conv2d(x, w * scale[:, None, None, None], bias - mean * scale, padding=1).relu()


def far_apart(x):
    """x, in whose rows the largest entries differ by more than a rounding: all ways choose the same ones."""
    x[:, 7 * torch.arange(1, KEPT + 2)] = 6 + 0.5 * torch.arange(KEPT + 1.0)
    return x


def present(heads, L):
    """A mask of keys (heads, L), of which the last quarter is not there."""
    return (torch.arange(L) < L - L // 4).expand(heads, L)


@dataclass(frozen=True)
class Pattern:
    """Operations that could be one. make(*sizes): its tensors, of which masks and the last `fixed` get no
    gradient. Ways are functions of the tensors."""
    title: str
    on_cpu: tuple
    on_gpu: tuple
    make: Callable
    plain: Callable
    ours: Callable | None
    library: Callable | None = None
    fixed: int = 0


normal = torch.randn


def of_linear(name, activation):
    """A product, its bias and an activation."""
    return Pattern(
        f"linear + bias + {name}", (256, 512, 512), (8192, 4096, 4096),
        lambda m, n, k: [normal(m, k), k ** -0.5 * normal(n, k), normal(n)],
        lambda x, w, b: activation(x @ w.t() + b), lambda *t: kernels.linear(*t, name.lower()),
        lambda x, w, b: activation(F.linear(x, w, b)))


PATTERNS = dict(
    conv=Pattern(
        "convolution + batch norm + ReLU", (4, 32, 32), (32, 256, 56),
        lambda n, c, side: [normal(n, c, side, side), (9 * c) ** -0.5 * normal(c, c, 3, 3), normal(c),
                            normal(c), 0.1 * normal(c), 0.5 + torch.rand(c)],
        lambda x, w, weight, bias, mean, var: F.batch_norm(F.conv2d(x, w, padding=1), mean, var, weight, bias,
                                                           eps=EPS).relu(),
        None, folded, fixed=6),  # which is for inference
    gelu=of_linear("GELU", partial(F.gelu, approximate="tanh")), relu=of_linear("ReLU", F.relu),
    silu=of_linear("SiLU", F.silu),
    add_norm=Pattern(
        "residual + LayerNorm", (1024, 1024), (16384, 4096),
        lambda r, w: [normal(r, w), normal(r, w), normal(w), normal(w)],
        plain_add_norm, lambda *t: kernels.add_norm(*t), library_add_norm),
    add_rms=Pattern(
        "residual + RMSNorm", (1024, 1024), (16384, 4096),
        lambda r, w: [normal(r, w), normal(r, w), normal(w)],
        plain_add_norm, lambda *t: kernels.add_norm(*t), library_add_norm),
    wide=Pattern(
        "LayerNorm of any width", (64, 16384), (4096, 16384),
        lambda r, w: [normal(r, w), normal(w), normal(w)], plain_norm, lambda *t: kernels.wide_layer_norm(*t),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS)),
    topk=Pattern(
        f"softmax + top-{KEPT}", (32, 32000), (512, 131072), lambda r, w: [far_apart(normal(r, w))],
        lambda x: tuple(x.softmax(-1).topk(KEPT)), lambda x: kernels.softmax_topk(x, KEPT)),
    scores=Pattern(
        "scores + mask + softmax", (8, 256, 32), (64, 2048, 64),
        lambda h, L, d: [normal(h, L, d), normal(h, L, d), present(h, L)],
        plain_masked_softmax, lambda *t: kernels.masked_softmax(*t)),
    causal=Pattern(
        "scores + causal mask + softmax", (8, 256, 32), (64, 2048, 64),
        lambda h, L, d: [normal(h, L, d), normal(h, L, d)],
        plain_causal_softmax, lambda *t: kernels.masked_softmax(*t)))


# --- Right, and how fast --------------------------------------------------------------------------------


def tensors_of(pattern, sizes, dtype, device):
    """Its tensors, random."""
    torch.manual_seed(0)
    made = pattern.make(*sizes)
    return [t.to(device, dtype).requires_grad_(number < len(made) - pattern.fixed) if t.is_floating_point()
            else t.to(device) for number, t in enumerate(made)]


def ways_of(pattern, compiled, on_gpu):
    """{name: function of the tensors, or None where it cannot run here}"""
    found = dict(plain=pattern.plain)
    if compiled:
        found["compiled"] = torch.compile(pattern.plain, dynamic=False)
    if pattern.ours:
        found["ours"] = pattern.ours if HAS_TRITON and on_gpu else None
    if pattern.library:
        found["library"] = pattern.library
    return found


def outputs(run, tensors):
    found = run(*tensors)
    return [t for t in (found if isinstance(found, tuple) else [found]) if t.is_floating_point()]


def step(run, tensors):
    """Outputs, and gradients where there is a derivative."""
    found = outputs(run, tensors)
    if not found[0].requires_grad:
        return found
    wanted = [t for t in tensors if t.requires_grad]
    return [*found, *torch.autograd.grad(found, wanted, [t.detach().cos() for t in found])]


def faults(ways, tensors, dtype):
    """{name: why its times say nothing}: it fails, or its results are further from float64 than three times
    plain code's."""
    found = {name: WITHOUT for name, run in ways.items() if run is None}
    exact = step(ways["plain"], [t.detach().double().requires_grad_(t.requires_grad) for t in tensors])
    own = step(ways["plain"], tensors)
    for name in ways.keys() - found.keys():
        try:
            mine = step(ways[name], tensors)
        except Exception as error:  # a compiler fails in many ways, and the rest is still wanted
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            continue
        for number, (truth, before, now) in enumerate(zip(exact, own, mine, strict=False)):
            floor = (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * truth.abs().max()
            allowed = ERROR_FACTOR * (before - truth).abs().max() + floor
            if not (now - truth).abs().max() <= allowed:
                found[name] = f"wrong: result {number} is off by {(now - truth).abs().max():.1e}"
    return found


def measure(name, device, rounds, compiled):
    """Everything about one pattern, as JSON."""
    pattern, on_gpu = PATTERNS[name], device.type == "cuda"
    sizes, dtype = (pattern.on_gpu, torch.bfloat16) if on_gpu else (pattern.on_cpu, torch.float32)
    tensors = tensors_of(pattern, sizes, dtype, device)
    ways = ways_of(pattern, compiled, on_gpu)
    with torch.no_grad(), Traffic() as traffic:
        results = outputs(pattern.plain, tensors)
    least = sum(t.nbytes for t in (*tensors, *results))
    reasons = faults(ways, tensors, dtype)
    right = {name: run for name, run in ways.items() if name not in reasons}
    calls = {name: partial(outputs, run, tensors) for name, run in right.items()}
    with torch.no_grad():
        forward = by_turns(calls, device, rounds)
    trained = [name for name, call in calls.items() if call()[0].requires_grad]
    both = by_turns({name: partial(step, right[name], tensors) for name in trained}, device, rounds) if (
        trained) else {}
    return dict(
        name=name, title=pattern.title, sizes=list(sizes), dtype=str(dtype)[6:], plain_bytes=traffic.total,
        least_bytes=least, verdict=dict(forward=verdict(forward), both=verdict(both)),
        ways=[dict(name=name, reason=reasons.get(name), forward=forward.get(name), both=both.get(name))
              for name in ways])


def verdict(times):
    """(FUSE, LIBRARY, DON'T or NONE, why) from {way: (p20, median, p80)}: a way wins where its slow runs are
    faster than the other's fast ones."""
    if not times:
        return "NONE", "it has no backward pass"
    gains = {name: f"{name} {times['plain'][1] / found[1]:.2f}x plain" for name, found in times.items()}
    if set(times) == {"plain"}:
        return "NONE", "only plain code ran, so there is nothing to compare"

    def beats(name, other):
        return name in times and times[name][2] < times[other][0]
    fused = [name for name in times if name in ("compiled", "ours")]
    best = min(fused, key=lambda name: times[name][1], default=None)
    helps = beats("library", "plain")
    said = ", ".join(gains[name] for name in (*fused, "library") if name in times)
    if beats(best, "plain") and not (helps and not beats(best, "library")):
        return "FUSE", said
    return ("LIBRARY" if helps else "DON'T"), said


# --- The register ladder --------------------------------------------------------------------------------

WIDTHS, WARPS = (1024, 4096, 16384, 65536), (4, 8, 16)


# Of a multiprocessor or compute unit: warps, threads in one, registers, bytes of shared memory, and of these
# how many a program loses. By NVIDIA's CUDA programming guide and AMD's instruction set guides; all have four
# parts, in which registers come by eights.
UNITS = dict(sm_80=(64, 32, 65536, 164 * 1024, 1024), sm_90=(64, 32, 65536, 228 * 1024, 1024),
             gfx90a=(32, 64, 131072, 64 * 1024, 0), gfx942=(32, 64, 131072, 64 * 1024, 0),
             gfx950=(32, 64, 131072, 160 * 1024, 0))


def occupancy(target, registers, shared, warps):
    """The share of the warps that could be resident which are, for programs of so many warps that take so
    many registers a thread and bytes of shared memory; None for a GPU that is not in the table."""
    if target not in UNITS:
        return None
    most, threads, file, memory, lost = UNITS[target]
    resident = 4 * min(most // 4, file // 4 // (threads * -(-max(registers, 1) // 8) * 8))
    programs = min(resident // warps, 32, memory // (shared + lost) if shared + lost else most)
    return programs * warps / most


def architecture(device):
    """Of a GPU that is here, as UNITS has it."""
    found = torch.cuda.get_device_properties(device)
    return found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def rung(width, warps, target, device):
    """Residual + LayerNorm, forward and backward, with a row of this width in so many warps: what the
    compiler makes of it for a target, and for "here", this GPU, the time."""
    here = target == "here"
    rows = max(2 ** 26 // width, 1) if here else 2
    x, y, total, out, dx = (torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(5))
    weight, bias = torch.ones(2, width, dtype=torch.bfloat16, device=device)
    partial_sums = torch.empty(min(rows, kernels.PROGRAMS), 2, width, device=device)
    found = dict(width=width, warps=warps, target=tuner.gpu() if here else target)
    for name, kernel, programs, tensors in (
            ("forward", kernels.add_norm_kernel, rows, (x, y, weight, bias, total, out)),
            ("backward", kernels.add_norm_backward_kernel, len(partial_sums),
             (x, y, total, weight, dx, partial_sums, rows))):
        run = partial(kernel[programs,], *tensors, width, EPS, CENTRED=True, BN=width, num_warps=warps,
                      num_stages=1)
        if here:
            compiled = run()
        else:
            with ahead_of_time.compiling(target) as launches:
                run()
            compiled = launches[0].compiled
        used = ahead_of_time.resources(compiled)
        held = occupancy(architecture(device) if here else target, used["registers"], used["shared"], warps)
        found[name] = dict(used, occupancy=held, milliseconds=(
            min(tuner.milliseconds(run) for _ in range(5)) if here else None))
    return found


def ladder_line(found):
    """A rung; of each kernel registers (spills), occupancy, and the time if there is one."""
    cells = [f"{s['registers']} ({s['spills']})" + cell(s["occupancy"], " .0f", 100, "%")
             + cell(s["milliseconds"], " .3f", 1, " ms") for s in (found["forward"], found["backward"])]
    return f"  {found['width']:6d} {found['warps']:6d}  {found['target']:12s}  {cells[0]:24s}  {cells[1]}"


# --- The report -----------------------------------------------------------------------------------------


def milliseconds(times):
    return "" if times is None else "{1:.3f} ({0:.3f}, {2:.3f})".format(*(1e3 * t for t in times))


def print_pattern(result, copy):
    """A table of its ways, and the verdicts. copy: bytes/s of this GPU, None on a CPU, whose caches hold all
    of a pattern."""
    least = result["least_bytes"]
    print(f"{result['title']}, {'x'.join(map(str, result['sizes']))} {result['dtype']}: plain code moves "
          f"{result['plain_bytes'] / 1e6:.1f} MB forward, {least / 1e6:.1f} MB have to")
    rows = [["way", "forward ms (p20, p80)", "of a copy", "with backward ms (p20, p80)"]]
    for way in result["ways"]:
        rows.append([way["name"], way["reason"]] if way["reason"] else [
            way["name"], milliseconds(way["forward"]),
            f"{least / way['forward'][1] / copy:.0%}" if copy else "n/a", milliseconds(way["both"])])
    print("\n".join(f"  {line}" for line in markdown(rows)))
    for title, key in (("Forward", "forward"), ("With backward", "both")):
        print(f"  {title}: {': '.join(result['verdict'][key])}", flush=True)


def arguments_of(argv):
    summary, _, rest = __doc__.partition("\n")
    parser = Parser(prog="fusion_patterns.py", description=summary, epilog=f"{rest}\n{errors.EXIT_CODES}")
    parser.add_argument("--patterns", nargs="+", metavar="NAME", choices=[*PATTERNS], default=[*PATTERNS],
                        help=f"only these of {', '.join(PATTERNS)} (default: all)")
    parser.add_argument("--rounds", type=whole_number(2), default=9, metavar="N",
                        help="times each way is timed (default: 9)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--ladder", nargs="*", metavar="GPU", choices=TARGETS or None, default=[],
                        help=f"a register ladder for these of {', '.join(TARGETS)} (default: none)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (default: off)")
    parser.add_argument("--retune", action="store_true", help="measure our kernels' tiles (default: off)")
    parser.add_argument("--json", action="store_true",
                        help="end with one line of JSON on a terminal, too (default: off)")
    parser.add_argument("--profile-dir", default=DIRECTORY, metavar="DIR",
                        help="where results go (default: %(default)s)")
    return parser.parse_args(argv)


def run(argv):
    options = arguments_of(argv)
    if options.ladder:
        errors.require_packages("fusion_patterns.py --ladder", "triton")
    device = choose_device(options.device)
    on_gpu = device.type == "cuda"
    if (options.retune or "here" in options.ladder) and not (on_gpu and HAS_TRITON):
        raise errors.UserError("--retune and --ladder here need a GPU and Triton", code=errors.NO_GPU)
    Directory(options.profile_dir, options.profile_dir != DIRECTORY).claim()
    path = os.path.join(options.profile_dir, "fusion_patterns.json")
    if not on_gpu:
        keep_freed_memory()
    copy, results, steps = copy_ceiling(device) if on_gpu else None, [], []
    print(f"Device: {device} | torch {torch.__version__} | {options.rounds} rounds by turns", flush=True)
    if busy := busy_line(device):
        print(busy, flush=True)
    with tuner.retuning() if options.retune else contextlib.nullcontext():
        for name in options.patterns:
            results.append(measure(name, device, options.rounds, not options.no_compile))
            print_pattern(results[-1], copy)
    if options.ladder:
        print("Register ladder of residual + LayerNorm, a row a program: registers (spills), occupancy\n"
              "   width  warps  GPU           forward                   backward")
    for target, width, warps in itertools.product(options.ladder, WIDTHS, WARPS):
        steps.append(rung(width, warps, target, device))
        print(ladder_line(steps[-1]), flush=True)
    files.write_json(path, files.finite(dict(mode="fusion_patterns", system_info=system_info(device),
                                             copy_bytes_per_s=copy, patterns=results, ladder=steps)))
    wrong = [f"{result['name']} {way['name']}" for result in results for way in result["ways"]
             if (way["reason"] or "").startswith("wrong")
             or way["name"] == "ours" and way["reason"] not in (None, WITHOUT)]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    verdicts = {result["name"]: [word for word, _ in result["verdict"].values()] for result in results}
    print_result(dict(mode="fusion_patterns", verdicts=verdicts, wrong=wrong), path,
                 SimpleNamespace(profiler=options))
    return errors.FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(errors.exit_code(run, sys.argv[1:], "fusion_patterns.py"))
