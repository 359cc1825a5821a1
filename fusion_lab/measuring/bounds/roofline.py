"""What a step must cost at least: FLOPs, bytes and memory, against ceilings measured on the spot.

FLOPs are counted (flops.py). Bytes are formulas of the program's; where it has none a table says so. A tensor
that stays in a cache can be faster than the bound by bytes.
"""
import itertools
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_lab.measuring.bounds.flops import flops_by_sublayer, made_in_place
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.measuring.tables import cell
from fusion_lab.training.machine import MEGABYTE

ADAMW_BYTES = 28  # per float32 parameter: weight, gradient and two moments read, weight and moments written
AT_FAULT = "a fault of the bound"  # whatever is said to be faster than its bound


def unfused_on_meta(program, settings):
    """The baseline's model without memory for its weights."""
    with torch.device("meta"):
        return program.model(settings.model, type(settings.fusion).preset(False))


def total_bytes(cost, times):
    """Bytes moved forward and backward, this many times; None where nobody has worked them out."""
    known = cost is not None and cost.forward_bytes is not None and cost.backward_bytes is not None
    return (cost.forward_bytes + cost.backward_bytes) * times if known else None


def floor_seconds(flops, moved, ceilings):
    """(computing, moving or None) seconds at the ceilings, of so many FLOPs and bytes (None: unknown)."""
    return (flops / ceilings["matmul_flops_per_s"][ceilings["dtype"]],
            None if moved is None else moved / ceilings["copy_bytes_per_s"])


def flops_share(program, flops):
    """{sub-layer: its share of the sub-layers' FLOPs}, of flops_by_sublayer()."""
    total = sum(flops[name] for name in program.sublayers) or 1
    return {name: flops[name] / total for name in program.sublayers}


def equal_work(program, settings):
    """[(sub-layer, sub-layer), ...]: pairs that by formulas for both FLOPs and bytes do the same work."""
    costs = program.costs(settings) or {}
    names = [name for name in program.sublayers if total_bytes(costs.get(name), 1) is not None]
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
    the measured time; note, where there is one, says what is not known."""
    flops, costs, rows = flops_by_sublayer(program, settings), program.costs(settings) or {}, []
    for name in program.sublayers:
        entry = measured.get(name, dict(seconds=None, launches=None))
        work, moved = flops[name], total_bytes(costs.get(name), program.blocks(settings))
        compute_s, memory_s = floor_seconds(work, moved, ceilings)
        times = dict(compute=compute_s, memory=memory_s,
                     launch=(entry["launches"] or 0) * ceilings["dispatch_s"])
        floor = max(compute_s, memory_s or 0)
        rows.append(dict(name=name, flops=work, minimal_bytes=moved,
                         flops_per_byte=work / moved if moved else None, compute_s=compute_s,
                         memory_s=memory_s, launch_s=times["launch"], launches=entry["launches"],
                         measured_s=entry["seconds"], bound=bound(times, entry["seconds"], on_gpu),
                         share=floor / entry["seconds"] if floor and entry["seconds"] else None))
        rows[-1].update({"note": "bytes not worked out"} if moved is None else {})
    return rows


def share_cell(share):
    """Nothing is faster than what it does at least: above 100% that is wrong, and the reader should know."""
    return cell(share, ".1f", 100, "%") + (f", {AT_FAULT}" if (share or 0) > 1 else "")


def roofline_rows(table):
    """roofline_table() as cells, the header first."""
    rows = [["sub-layer", "GFLOP", "minimal MB, no weights", "FLOP/byte", "compute ms", "memory ms",
             "launch ms", "measured ms", "bound", "share of ceiling"]]
    for e in table:
        limit = f"{e['bound']} ({e['note']})" if e.get("note") else e["bound"]
        rows.append([e["name"], cell(e["flops"], ".2f", 1e-9), cell(e["minimal_bytes"], ".1f", 1 / MEGABYTE),
                     cell(e["flops_per_byte"], ".1f"), cell(e["compute_s"], ".3f", 1e3),
                     cell(e["memory_s"], ".3f", 1e3), cell(e["launch_s"], ".3f", 1e3),
                     cell(e["measured_s"], ".3f", 1e3), limit, share_cell(e["share"])])
    return rows


def step_floor(program, settings, ceilings, parameters, launches=None):
    """Lower bound of a step's time in seconds: (at the device's ceilings, for the host to launch it all).
    parameters: how many there are; launches: kernels or operations of a step, None leaves the host out."""
    costs, blocks, device = program.costs(settings) or {}, program.blocks(settings), 0.0
    for name, flops in flops_by_sublayer(program, settings).items():
        moved = total_bytes(costs.get(name), blocks)
        device += max(seconds or 0 for seconds in floor_seconds(flops, moved, ceilings))
    device += ADAMW_BYTES * parameters / ceilings["copy_bytes_per_s"]
    return device, (launches or 0) * ceilings["dispatch_s"]


def simulate_memory(program, settings, device):
    """(peak, saved) bytes of an eager step at these sizes, without running it or allocating anything:
    weights, optimizer state and all tensors alive at once in forward and backward, on fake tensors."""
    eager = settings.having(enable_torch_compile=False, enable_cuda_graphs=False)
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
