"""What a step must cost at least: FLOPs and bytes, against ceilings measured on the spot.

FLOPs are counted (flops.py). Bytes are formulas of the program's; where it has none a table says so.
"""
import torch

from fusion_lab.measuring.ceilings import measure_ceilings
from fusion_lab.measuring.flops import flops_by_sublayer
from fusion_lab.measuring.tables import cell
from fusion_lab.training.machine import MEGABYTE

FASTER = "faster than the ceilings: it stays in a cache, or the machine was busy when they were measured"


def total_bytes(cost):
    """Bytes moved forward and backward; None where nobody has worked them out."""
    known = cost is not None and cost.forward_bytes is not None and cost.backward_bytes is not None
    return cost.forward_bytes + cost.backward_bytes if known else None


def flops_share(program, flops):
    """{sub-layer: its share of the sub-layers' FLOPs}, of flops_by_sublayer()."""
    total = sum(flops[name] for name in program.model.SUBLAYERS) or 1
    return {name: flops[name] / total for name in program.model.SUBLAYERS}


def roofline_table(program, settings, ceilings, seconds):
    """Rows by sub-layer, forward and backward of all blocks in one step; seconds: {sub-layer: measured}.
    share is the longer of the times at both ceilings over the measured one; note, where there is one, says
    what is not known, or why a row has no bound."""
    with torch.device("meta"):
        costs = program.model(settings.model, settings.fusion).costs(settings.training)
    flops, rows = flops_by_sublayer(program, settings), []
    for name in program.model.SUBLAYERS:
        moved, measured = total_bytes(costs.get(name)), seconds.get(name)
        compute_s = flops[name] / ceilings["matmul_flops_per_s"]
        memory_s = None if moved is None else moved / ceilings["copy_bytes_per_s"]
        floor = max(compute_s, memory_s or 0)
        share = floor / measured if floor and measured else None
        row = dict(name=name, flops=flops[name], minimal_bytes=moved,
                   flops_per_byte=flops[name] / moved if moved else None, compute_s=compute_s,
                   memory_s=memory_s, measured_s=measured, share=share,
                   bound="compute" if floor == compute_s else "memory")
        if moved is None:
            row["note"] = "bytes not worked out"
        if (share or 0) > 1:
            row.update(bound=None, share=None, note=FASTER)
        rows.append(row)
    return rows


def measured_roofline(program, settings, device, seconds):
    """dict(ceilings, roofline): a table as roofline_table() makes it, and what it was held against."""
    ceilings = measure_ceilings(device, settings.training)
    return dict(ceilings=ceilings, roofline=roofline_table(program, settings, ceilings, seconds))


def roofline_rows(table):
    """roofline_table() as cells, the header first."""
    rows = [["sub-layer", "GFLOP", "minimal MB, no weights", "FLOP/byte", "compute ms", "memory ms",
             "measured ms", "bound", "share of ceiling"]]
    for e in table:
        note = f" ({e['note']})" if e.get("note") else ""
        rows.append([e["name"], cell(e["flops"], ".2f", 1e-9), cell(e["minimal_bytes"], ".1f", 1 / MEGABYTE),
                     cell(e["flops_per_byte"], ".1f"), cell(e["compute_s"], ".3f", 1e3),
                     cell(e["memory_s"], ".3f", 1e3), cell(e["measured_s"], ".3f", 1e3),
                     (e["bound"] or "none") + note,
                     cell(e["share"], ".1f", 100, "%") or "above 100%" * (e.get("note") == FASTER)])
    return rows
