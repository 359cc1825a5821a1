"""What a step must cost at least: FLOPs and bytes, against ceilings measured on the spot.

FLOPs are counted (flops.py). Bytes are formulas of the program's; where it has none a table says so.
"""
import torch

from fusion_lab.measuring.ceilings import highest, measure_ceilings
from fusion_lab.measuring.flops import flops_by_sublayer
from fusion_lab.measuring.tables import cell
from fusion_lab.training.machine import MEGABYTE

FASTER = "faster than the ceilings: it stays in a cache, or the machine was busy when they were measured"
TRIES = 2  # at ceilings that no sub-layer beats


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
    the measured time; note, where there is one, says what is not known, or why a row has no bound."""
    flops, costs, rows = flops_by_sublayer(program, settings), costs_of(program, settings), []
    for name in program.model.SUBLAYERS:
        entry = measured.get(name, dict(seconds=None, launches=None))
        work, moved = flops[name], total_bytes(costs.get(name))
        compute_s, memory_s = floor_seconds(work, moved, ceilings)
        launch_s = (entry["launches"] or 0) * ceilings["dispatch_s"]
        floor, seconds = max(compute_s, memory_s or 0), entry["seconds"]
        row = dict(name=name, flops=work, minimal_bytes=moved, flops_per_byte=work / moved if moved else None,
                   compute_s=compute_s, memory_s=memory_s, launch_s=launch_s, launches=entry["launches"],
                   measured_s=seconds, share=floor / seconds if floor and seconds else None,
                   bound=bound(dict(compute=compute_s, memory=memory_s, launch=launch_s), seconds, on_gpu))
        if moved is None:
            row["note"] = "bytes not worked out"
        if (row["share"] or 0) > 1:
            row.update(bound=None, share=None, note=FASTER)
        rows.append(row)
    return rows


def measured_roofline(program, settings, device, measured):
    """dict(ceilings, roofline): a table as roofline_table() makes it, and what it was held against. Where a
    sub-layer was faster than its bound, other work may have slowed the ceilings: they are measured again."""
    ceilings = None
    for _ in range(TRIES):
        ceilings = highest(measure_ceilings(device, settings.training), ceilings)
        table = roofline_table(program, settings, ceilings, measured, device.type == "cuda")
        if all(row["bound"] for row in table):
            break
    return dict(ceilings=ceilings, roofline=table)


def roofline_rows(table):
    """roofline_table() as cells, the header first."""
    rows = [["sub-layer", "GFLOP", "minimal MB, no weights", "FLOP/byte", "compute ms", "memory ms",
             "launch ms", "measured ms", "bound", "share of ceiling"]]
    for e in table:
        note = f" ({e['note']})" if e.get("note") else ""
        rows.append([e["name"], cell(e["flops"], ".2f", 1e-9), cell(e["minimal_bytes"], ".1f", 1 / MEGABYTE),
                     cell(e["flops_per_byte"], ".1f"), cell(e["compute_s"], ".3f", 1e3),
                     cell(e["memory_s"], ".3f", 1e3), cell(e["launch_s"], ".3f", 1e3),
                     cell(e["measured_s"], ".3f", 1e3), (e["bound"] or "none") + note,
                     cell(e["share"], ".1f", 100, "%") or "above 100%" * (e.get("note") == FASTER)])
    return rows
