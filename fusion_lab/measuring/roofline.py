"""What a step must cost at least: FLOPs and bytes, against ceilings measured on the spot.

FLOPs are counted (flops.py). Bytes are formulas of the program's; where it has none a table says so. A tensor
that stays in a cache can be faster than the bound by bytes.
"""
import itertools

import torch

from fusion_lab.measuring.flops import flops_by_sublayer
from fusion_lab.measuring.tables import cell
from fusion_lab.training.machine import MEGABYTE

AT_FAULT = "a fault of the bound"  # whatever is said to be faster than its bound


def costs_of(program, settings):
    """Model.costs() of these settings."""
    with torch.device("meta"):
        return program.model(settings.model, settings.fusion).costs(settings.training)


def total_bytes(cost):
    """Bytes moved forward and backward; None where nobody has worked them out."""
    known = cost is not None and cost.forward_bytes is not None and cost.backward_bytes is not None
    return cost.forward_bytes + cost.backward_bytes if known else None


def floor_seconds(flops, moved, ceilings):
    """(computing, moving or None) seconds at the ceilings, of so many FLOPs and bytes (None: unknown)."""
    return (flops / ceilings["matmul_flops_per_s"][ceilings["dtype"]],
            None if moved is None else moved / ceilings["copy_bytes_per_s"])


def flops_share(program, flops):
    """{sub-layer: its share of the sub-layers' FLOPs}, of flops_by_sublayer()."""
    total = sum(flops[name] for name in program.model.SUBLAYERS) or 1
    return {name: flops[name] / total for name in program.model.SUBLAYERS}


def equal_work(program, settings):
    """[(sub-layer, sub-layer), ...]: pairs that by formulas for both FLOPs and bytes do the same work."""
    costs = costs_of(program, settings)
    names = [name for name in program.model.SUBLAYERS if total_bytes(costs.get(name)) is not None]
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
    flops, costs, rows = flops_by_sublayer(program, settings), costs_of(program, settings), []
    for name in program.model.SUBLAYERS:
        entry = measured.get(name, dict(seconds=None, launches=None))
        work, moved = flops[name], total_bytes(costs.get(name))
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
