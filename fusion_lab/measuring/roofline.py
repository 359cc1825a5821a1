"""What a step must cost at least: FLOPs, bytes and memory, against ceilings measured on the spot.

A program gives formulas of its sub-layers' costs; FLOPs of those it leaves out are counted here, their bytes
stay unknown, and a table says so. A tensor that stays in a cache can be faster than the bound by bytes.
"""
import itertools
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_lab.measuring.clocks import RangeSums
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.ranges import ranges
from fusion_lab.measuring.tables import cell
from fusion_lab.training.machine import MEGABYTE
from fusion_lab.training.program import Cost

ADAMW_BYTES = 28  # per float32 parameter: weight, gradient and two moments read, weight and moments written
REST = "rest"  # what a step runs outside all sub-layers


class Counted(Cost):
    """A cost for which the program has no formula: FLOPs as PyTorch counts them, bytes unknown."""


def unfused_on_meta(program, settings):
    """The baseline's model without memory for its weights."""
    with torch.device("meta"):
        return program.model(settings.model, type(settings.fusion).preset(False))


def counted_on_meta(program, settings):
    """The model whose FLOPs count: the baseline; where switches change how much is computed, that of the
    settings, or a fast one would beat what it has to do at least."""
    if not program.flops_vary:
        return unfused_on_meta(program, settings)
    with torch.device("meta"):
        return program.model(settings.model, replace(settings.fusion, enable_torch_compile=False,
                                                     activation_memory_budget=1.0))


def counted_costs(program, settings):
    """{sub-layer: Counted} of one block, and REST: FLOPs of a forward pass, counted while it runs on tensors
    without data."""
    model, batch = counted_on_meta(program, settings), program.open_source(settings).batch(0)
    with FlopCounterMode(display=False) as counter:
        sums = RangeSums(counter.get_total_flops)
        with ranges(model.sublayers(), sums.enter, sums.leave):
            model(**{key: value.to("meta") for key, value in batch.items()} | program.in_a_step)
    blocks, inside = program.blocks(settings), sum(sums.sums.values())
    result = {name: Counted(sums.sums.get(name, 0) / blocks) for name in program.sublayers}
    return {**result, REST: Counted(counter.get_total_flops() - inside)}


def sublayer_costs(program, settings):
    """{name: Cost}: the program's formulas, with what they leave out as Counted. Sub-layers are of one block;
    other names (the program's own, or REST where it has none) are what a step runs once beside them."""
    known = dict(program.costs(settings) or {})
    beside = known.keys() - set(program.sublayers)
    if beside and known.keys() >= set(program.sublayers):
        return known
    counted = counted_costs(program, settings)
    return {**{name: cost for name, cost in counted.items() if name != REST or not beside}, **known}


def total_bytes(cost, times):
    """Bytes moved forward and backward, this many times; None where nobody has worked them out."""
    known = cost.forward_bytes is not None and cost.backward_bytes is not None
    return (cost.forward_bytes + cost.backward_bytes) * times if known else None


def floor_seconds(cost, times, ceilings):
    """(computing, moving or None) seconds at the ceilings, forward and backward, this many times."""
    moved = total_bytes(cost, times)
    return (3 * cost.flops * times / ceilings["matmul_flops_per_s"][ceilings["dtype"]],
            None if moved is None else moved / ceilings["copy_bytes_per_s"])


def flops_share(program, costs):
    """{sub-layer: its share of the sub-layers' FLOPs}, of sublayer_costs()."""
    total = sum(costs[name].flops for name in program.sublayers) or 1
    return {name: costs[name].flops / total for name in program.sublayers}


def equal_work(program, costs):
    """[(sub-layer, sub-layer), ...]: pairs that by formulas for both FLOPs and bytes do the same work."""
    names = [name for name in program.sublayers if total_bytes(costs[name], 1) is not None]
    return [pair for pair in itertools.combinations(names, 2) if costs[pair[0]] == costs[pair[1]]]


def bound(times, measured_s, on_gpu):
    """Which of {"compute", "memory", "launch"} bounds a sub-layer, by their times (None: unknown). On a GPU
    the host launches while kernels run, and measured is the kernels' time: launching counts where it takes
    longer than that."""
    known = {name: seconds for name, seconds in times.items() if seconds is not None}
    if on_gpu and measured_s:
        launch = known.pop("launch")
        return "launch" if launch > measured_s else max(known, key=known.get)
    return max(known, key=known.get)


def roofline_table(program, settings, ceilings, measured, on_gpu=False):
    """Rows by sub-layer, forward and backward of all blocks in one step. measured: {sub-layer: dict(seconds,
    launches or None)}, on a GPU seconds of kernels. share is the time at the compute and memory ceilings over
    the measured time; note, where there is one, says what is not from a formula."""
    costs, blocks, rows = sublayer_costs(program, settings), program.blocks(settings), []
    for name in program.sublayers:
        cost, entry = costs[name], measured.get(name, dict(seconds=None, launches=None))
        work, moved = 3 * cost.flops * blocks, total_bytes(cost, blocks)
        compute_s, memory_s = floor_seconds(cost, blocks, ceilings)
        times = dict(compute=compute_s, memory=memory_s,
                     launch=(entry["launches"] or 0) * ceilings["dispatch_s"])
        floor = max(compute_s, memory_s or 0)
        rows.append(dict(name=name, flops=work, minimal_bytes=moved,
                         flops_per_byte=work / moved if moved else None, compute_s=compute_s,
                         memory_s=memory_s, launch_s=times["launch"], launches=entry["launches"],
                         measured_s=entry["seconds"], bound=bound(times, entry["seconds"], on_gpu),
                         share=floor / entry["seconds"] if floor and entry["seconds"] else None))
        notes = ["FLOPs counted"] * isinstance(cost, Counted) + ["bytes not worked out"] * (moved is None)
        rows[-1].update({"note": ", ".join(notes)} if notes else {})
    return rows


def roofline_rows(table):
    """roofline_table() as cells, the header first."""
    rows = [["sub-layer", "GFLOP", "minimal MB", "FLOP/byte", "compute ms", "memory ms", "launch ms",
             "measured ms", "bound", "share of ceiling"]]
    for e in table:
        limit = f"{e['bound']} ({e['note']})" if e.get("note") else e["bound"]
        rows.append([e["name"], cell(e["flops"], ".2f", 1e-9), cell(e["minimal_bytes"], ".1f", 1 / MEGABYTE),
                     cell(e["flops_per_byte"], ".1f"), cell(e["compute_s"], ".3f", 1e3),
                     cell(e["memory_s"], ".3f", 1e3), cell(e["launch_s"], ".3f", 1e3),
                     cell(e["measured_s"], ".3f", 1e3), limit, cell(e["share"], ".1f", 100, "%")])
    return rows


def step_floor(program, settings, ceilings, parameters, launches=None):
    """Lower bound of a step's time in seconds: (at the device's ceilings, for the host to launch it all).
    parameters: how many there are; launches: kernels or operations of a step, None leaves the host out."""
    device = 0.0
    for name, cost in sublayer_costs(program, settings).items():
        times = program.blocks(settings) if name in program.sublayers else 1
        device += max(seconds or 0 for seconds in floor_seconds(cost, times, ceilings))
    device += ADAMW_BYTES * parameters / ceilings["copy_bytes_per_s"]
    return device, (launches or 0) * ceilings["dispatch_s"]


class NoDraws(TorchDispatchMode):
    """For making a model of fake tensors, which have no values: nothing is drawn, and an initialiser that
    draws again while a number lies out of bounds (trunc_normal_) hears that none does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return False
        if func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags:
            return args[0]
        return func(*args, **(kwargs or {}))


def made_in_place(program, device):
    """program.model for fake tensors: the model is on its device from the start, because torch (2.13) moves
    no fake parameters."""
    def make(config, fusion):
        with device, NoDraws():
            model = program.model(config, fusion)
        model.to = lambda _: model
        return model
    return make


def simulate_memory(program, settings, device):
    """(peak, saved) bytes of an eager step at these sizes, without running it or allocating anything:
    weights, optimizer state and all tensors alive at once in forward and backward, on fake tensors."""
    eager = settings.having(enable_torch_compile=False, enable_cuda_graphs=False,
                            activation_memory_budget=1.0)
    batch = program.open_source(eager).batch(0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), FakeTensorMode() as fake:
        trainer = program.trainer(replace(program, model=made_in_place(program, device)), eager, device)
        batch = {key: fake.from_tensor(value).to(device) for key, value in batch.items()}
        model = trainer.model
        given = batch | program.in_a_step
        saved = saved_activations(model, model.sublayers(), lambda: trainer.forward(given)["loss"])
        with OpCounter() as counter:
            trainer.forward(given)["loss"].backward()
        held = [*trainer.weights.values()] * 3 + [*model.buffers(), *batch.values()]
        held += [*model.parameters()] if trainer.masters else []
        return counter.peak + sum(t.numel() * t.element_size() for t in held), sum(saved.values())


def predict(program, settings, device, ceilings, launches=None):
    """Lower bounds for these sizes: step time (s) and peak memory (MB). launches: kernels or operations per
    step, which hardly depend on the sizes, or None to leave the host's part out."""
    parameters = sum(p.numel() for p in unfused_on_meta(program, settings).parameters())
    at_ceilings, host = step_floor(program, settings, ceilings, parameters, launches)
    peak, saved = simulate_memory(program, settings, device)
    return dict({axis: settings.get(axis) for axis in program.axes}, device_s=at_ceilings, launch_s=host,
                step_s=max(at_ceilings, host), peak_memory_mb=peak / MEGABYTE,
                saved_activation_mb=saved / MEGABYTE)
