"""Patterns of fusion, each written several ways: held against float64, timed by turns, and the verdict.

A Pattern says what is computed; ways are plain PyTorch, torch.compile of it, a kernel of this project, the
library's own operation, and Liger's. Sizes of traffic are counted, not written down: bytes that plain code's
operations read and write, and those that have to move, each input and each result once.
"""
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_lab.kernels.limits import HAS_TRITON
from fusion_lab.measuring.accuracy import ERROR_FACTOR
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.counters import is_view

if HAS_TRITON:
    from fusion_lab.kernels import ahead_of_time, tuner


def as_they_are(tensors):
    return tensors


@dataclass(frozen=True)
class Pattern:
    """Operations that could be one. shapes(*sizes): those of its tensors, the last `constants` of which get
    no gradient. Ways are functions of the tensors."""
    title: str
    on_cpu: tuple
    on_gpu: tuple
    shapes: Callable
    plain: Callable
    ours: Callable | None = None
    from_library: Callable | None = None
    liger: tuple | None = None  # module, its function, call(function, *tensors)
    beside: tuple | None = None  # a name, and what would do in its place: timed, not judged
    constants: int = 0
    prepare: Callable = as_they_are     # of the library's way, not timed
    shape_data: Callable = as_they_are  # of random numbers, what the pattern is about


def tensors_of(pattern, sizes, dtype, device):
    """Its tensors, random; products of as many as in a row are of size one."""
    torch.manual_seed(0)
    shapes = pattern.shapes(*sizes)
    made = pattern.shape_data([
        torch.randn(shape) * (shape[1:].numel() ** -0.5 if number and len(shape) in (2, 4) else 1.0)
        for number, shape in enumerate(map(torch.Size, shapes))])
    wanted = len(made) - pattern.constants
    return [t.to(device, dtype).requires_grad_(i < wanted) for i, t in enumerate(made)]


@dataclass
class Way:
    """One way to write a pattern, and what was found of it; seconds by round; reason: why there are none."""
    name: str
    run: Callable
    tensors: list
    judged: bool = True
    reason: str | None = None
    forward: list = field(default_factory=list)
    both: list = field(default_factory=list)

    def outputs(self):
        found = self.run(*self.tensors)
        return [t for t in (found if isinstance(found, tuple) else [found]) if t.is_floating_point()]

    def step(self):
        """[outputs and gradients]"""
        outputs = self.outputs()
        wanted = [t for t in self.tensors if t.requires_grad]
        if not wanted:
            return outputs
        return [*outputs, *torch.autograd.grad(outputs, wanted, [t.detach().cos() for t in outputs])]


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, each of them for itself; views are free."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_view(func):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.bytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return result


def necessary(way):
    """(forward, forward and backward): bytes of what goes in and out, each once."""
    inputs, outputs = (sum(t.nbytes for t in ts) for ts in (way.tensors, way.outputs()))
    wanted = sum(t.nbytes for t in way.tensors if t.requires_grad)
    return inputs + outputs, inputs + outputs + (inputs + outputs + wanted if wanted else 0)


def ways_of(pattern, tensors, compiled, on_gpu):
    """All ways of a pattern, those that cannot run here with their reason."""
    found = [Way("plain", pattern.plain, tensors)]
    if compiled:
        found.append(Way("compiled", torch.compile(pattern.plain, dynamic=False), tensors))
    if pattern.ours:
        missing = None if HAS_TRITON and on_gpu else "needs a GPU" if HAS_TRITON else "needs Triton"
        found.append(Way("ours", pattern.ours, tensors, reason=missing))
    if pattern.from_library:
        found.append(Way("library", pattern.from_library, pattern.prepare(tensors)))
    if pattern.liger:
        module, function, call = pattern.liger
        try:
            kernel = getattr(importlib.import_module(module), function)
            found.append(Way("liger", lambda *t: call(kernel, *t), tensors,
                             reason=None if on_gpu else "needs a GPU"))
        except (ImportError, AttributeError):
            found.append(Way("liger", None, tensors, reason="not installed"))
    if pattern.beside:
        found.append(Way(pattern.beside[0], pattern.beside[1], tensors, judged=False))
    return found


def faults(ways, dtype):
    """Give every judged way a reason whose results are further from float64 than three times plain code's."""
    plain = ways[0]
    exact = Way("exact", plain.run, [t.detach().double().requires_grad_(t.requires_grad)
                                     for t in plain.tensors]).step()
    own = plain.step()
    for way in ways:
        if way.reason or not way.judged:
            continue
        try:
            mine = way.step()
        except Exception as error:  # kernels of others fail in many ways, and the rest is still wanted
            way.reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            continue
        for number, (truth, before, now) in enumerate(zip(exact, own, mine, strict=True)):
            floor = (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * truth.abs().max()
            allowed = ERROR_FACTOR * (before - truth).abs().max() + floor
            if not (now - truth).abs().max() <= allowed:
                way.reason = f"wrong: result {number} is off by {(now - truth).abs().max():.1e}"


def by_turns(ways, attribute, run, device, rounds):
    """Fill an attribute of each way with seconds, one a round; each round begins with another way."""
    repeats = 5 if device.type == "cuda" else 1
    timers = {way.name: PhaseTimer(device) for way in ways}
    for number in range(rounds + 2):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            timers[way.name].start()
            for _ in range(repeats):
                run(way)
            timers[way.name].mark()
    for way in ways:
        setattr(way, attribute, (timers[way.name].seconds()[2:, 0] / repeats).tolist())


def without_gradients(way):
    with torch.no_grad():
        return way.outputs()


def measure(name, pattern, device, rounds, compiled, targets):
    """Everything about one pattern, as JSON."""
    on_gpu = device.type == "cuda"
    sizes = pattern.on_gpu if on_gpu else pattern.on_cpu
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tensors = tensors_of(pattern, sizes, dtype, device)
    ways = ways_of(pattern, tensors, compiled, on_gpu)
    plain = ways[0]
    least, least_both = necessary(plain)
    with Traffic() as traffic, torch.no_grad():
        plain.outputs()
    with Traffic() as traffic_both, FlopCounterMode(display=False) as flops:
        plain.step()
    faults(ways, dtype)
    run = [way for way in ways if not way.reason]
    by_turns(run, "forward", without_gradients, device, rounds)
    if any(t.requires_grad for t in tensors):
        by_turns(run, "both", Way.step, device, rounds)
    return dict(
        name=name, title=pattern.title, sizes=list(sizes), dtype=str(dtype)[6:],
        flops=flops.get_total_flops(), least_bytes=least, plain_bytes=traffic.bytes,
        least_bytes_both=least_both, plain_bytes_both=traffic_both.bytes,
        kernels=kernels_of(pattern, ways, targets), ways=[row_of(way, least, least_both) for way in ways])


def row_of(way, least, least_both):
    row = dict(name=way.name, judged=way.judged, reason=way.reason)
    for key, seconds, count in (("forward", way.forward, least), ("both", way.both, least_both)):
        p20, median, p80 = quantiles(seconds) if seconds else (None,) * 3
        row[key] = seconds and dict(p20=p20, median=median, p80=p80, gb_per_s=count / median / 1e9) or None
    return row


def kernels_of(pattern, ways, targets):
    """[dict(target, kernel, registers, spills, shared)] of our kernels, as they ran, or compiled for these
    GPUs."""
    if not (HAS_TRITON and pattern.ours):
        return []
    found, ours = [], next(way for way in ways if way.name == "ours")
    if not ours.reason:
        with ahead_of_time.watching() as seen:
            ours.step()
        return [resources(tuner.gpu(), each) for each in seen]
    small = tensors_of(pattern, pattern.on_cpu, torch.bfloat16, torch.device("cpu"))
    for target in targets:
        with ahead_of_time.compiling(target) as seen:
            Way("ours", pattern.ours, small).step()
        found += [resources(target, each) for each in seen]
    return found


def resources(target, each):
    return dict(target=target, kernel=each.name, warps=each.options.get("num_warps", 4),
                **ahead_of_time.resources(each.compiled))


def times(result):
    """{way: its quantiles of a whole step, or of forward where that is all}, judged and right ones."""
    return {row["name"]: row["both"] or row["forward"] for row in result["ways"]
            if row["judged"] and not row["reason"]}


def verdict(result):
    """(FUSE, LIBRARY, DON'T or NONE, why), from what was measured: a way wins where its slow steps are faster
    than the other's fast ones."""
    found = times(result)
    if set(found) == {"plain"}:
        return "NONE", "only plain code ran, so there is nothing to compare"
    plain, library = found["plain"], found.get("library")
    fused = {name: t for name, t in found.items() if name in ("compiled", "ours", "liger")}
    best = min(fused, key=lambda name: fused[name]["median"], default=None)

    def gain(other):
        return f"{plain['median'] / other['median']:.2f}x plain"
    spilt = [k for k in result["kernels"] if k["spills"]]
    said = ""
    if "ours" in found and spilt and not found["ours"]["p80"] < plain["p20"]:
        said = f"; {spilt[0]['kernel']} has {spilt[0]['spills']} spills"
    helps = library and library["p80"] < plain["p20"]
    if best and fused[best]["p80"] < plain["p20"] and not (helps and not fused[best]["p80"] < library["p20"]):
        beside = f", library {gain(library)}" if library else ""
        return "FUSE", f"{best}, {gain(fused[best])}{beside}{said}"
    if helps:
        return "LIBRARY", gain(library) + (f", {best} {gain(fused[best])}" if best else "") + said
    return "DON'T", (f"nothing is faster beyond noise: {best} {gain(fused[best])}" if best else
                     "nothing to compare") + said
