"""What a step must cost at least: FLOPs and bytes, against what the device can do at most, measured on the
spot.

FLOPs are counted (flops.py). Bytes that a step must move at least are formulas of the program's; beside them
are those that the baseline's operations move if each runs alone, which is the most that fusion can save.
"""
from functools import partial

import torch

from fusion_lab.measuring.clocks import PhaseTimer
from fusion_lab.measuring.flops import Traffic, counts_by_sublayer
from fusion_lab.measuring.tables import cell
from fusion_lab.measuring.variants import with_fusion
from fusion_lab.training.machine import MEGABYTE, amp_dtype, runs_in_tf32

# --- Ceilings of the device ---------------------------------------------------------------------------------

# Sides of the square products that are tried: on a CPU small ones stay in a cache, and are faster
SIDES = dict(cuda=(4096, 8192), cpu=(128, 256, 1024))
SLOW = 1.0  # s, after which no further run of the same is timed on a CPU


def matmul_ceiling(device, dtype):
    """FLOP/s of the fastest square matrix product of random data, measured here and now, in the layouts that
    a linear layer uses: forward, and backward to its input and to its weight. They differ: in float16 on a
    CPU by a factor of 20."""
    best = 0.0
    for n in SIDES[device.type]:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        for left, right in ((a, b.T), (a, b), (a.T, b)):
            best = max(best, 2 * n ** 3 / fastest(partial(torch.mm, left, right), device))
    return best


def fastest(run, device):
    """Seconds of run(): the best of five after a first one, or of fewer where they are slow."""
    timer = PhaseTimer(device)
    for _ in range(6):
        timer.start()
        run()
        timer.mark()
        if device.type == "cpu" and timer.seconds().sum() > SLOW:
            break
    return timer.seconds()[-5:].min()


def copy_ceiling(device):
    """Bytes/s (read plus written) of copying a tensor far larger than any cache."""
    source = torch.empty((2 ** 30 if device.type == "cuda" else 2 ** 26) // 4, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / fastest(lambda: target.copy_(source), device)


def measure_ceilings(device, training):
    """What bounds a run of this training here, at the precision that its process is set to: copy bandwidth
    (bytes/s) and matrix products (FLOP/s) of its dtype."""
    own = amp_dtype(training, device) or torch.float32
    tf32 = own == torch.float32 and runs_in_tf32(training, device)
    return dict(copy_bytes_per_s=float(copy_ceiling(device)), dtype="tf32" if tf32 else dtype_name(own),
                matmul_flops_per_s=float(matmul_ceiling(device, own)))


def dtype_name(dtype):
    """torch.bfloat16 -> "bfloat16"; None stays."""
    return dtype and str(dtype).removeprefix("torch.")


def ceiling_line(ceilings):
    """measure_ceilings() in one line."""
    return (f"Ceilings, measured here: copy {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s; matrix product in "
            f"{ceilings['dtype']} {ceilings['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s.")


# --- Sub-layers against them --------------------------------------------------------------------------------

FASTER = "faster than the ceilings: it stays in a cache, or the machine was busy when they were measured"


def total_bytes(cost):
    """Bytes moved forward and backward; None if a formula is missing."""
    known = cost is not None and cost.forward_bytes is not None and cost.backward_bytes is not None
    return cost.forward_bytes + cost.backward_bytes if known else None


def flops_share(program, flops):
    """{sub-layer: its share of the sub-layers' FLOPs}, of counts_by_sublayer()."""
    total = sum(flops[name] for name in program.model.SUBLAYERS) or 1
    return {name: flops[name] / total for name in program.model.SUBLAYERS}


def roofline_table(program, settings, on_gpu, ceilings, seconds):
    """Rows by sub-layer, forward and backward of all blocks in one step; seconds: {sub-layer: measured}.
    share is the longer of the times at both ceilings over the measured one; note, where there is one, says
    why a row has no bound. baseline_bytes: what the baseline's operations move."""
    with torch.device("meta"):
        costs = program.model(settings.model, settings.fusion).costs(settings.training)
    batch, rows = program.data(settings).batch(0), []
    flops, baseline = counts_by_sublayer(program, settings, on_gpu, batch), settings.fusion.baseline()
    unfused = counts_by_sublayer(program, with_fusion(settings, baseline), on_gpu, batch, Traffic)
    scale = 0.5 if settings.training.use_amp else 1  # it was counted in float32
    for name in program.model.SUBLAYERS:
        moved, measured = total_bytes(costs.get(name)), seconds.get(name)
        row = dict(name=name, flops=flops[name], minimal_bytes=moved, baseline_bytes=scale * unfused[name],
                   flops_per_byte=flops[name] / moved if moved else None,
                   compute_s=flops[name] / ceilings["matmul_flops_per_s"],
                   memory_s=None if moved is None else moved / ceilings["copy_bytes_per_s"],
                   measured_s=measured, bound=None, share=None)
        rows.append(row)
        if not moved:
            row["note"] = "bytes not worked out" if moved is None else "nothing to do"
            continue
        floor = max(row["compute_s"], row["memory_s"])
        if measured and floor > measured:
            row["note"] = FASTER
        else:
            row.update(bound="compute" if floor == row["compute_s"] else "memory",
                       share=floor / measured if measured else None)
    return rows


def roofline_rows(table):
    """roofline_table() as cells, the header first, the sums over all sub-layers last."""
    rows = [["sub-layer", "GFLOP", "minimal MB", "baseline MB", "FLOP/byte (of baseline MB)", "compute ms",
             "memory ms", "measured ms", "bound", "share of ceiling"]]
    for e in [*table, sums(table)]:
        moved, unfused = e["minimal_bytes"], e["baseline_bytes"]
        note = f" ({e['note']})" if e.get("note") else ""
        times = f" ({unfused / moved:.1f}x)" if moved and unfused else ""
        of_baseline = f" ({e['flops'] / unfused:.1f})" if unfused else ""
        rows.append([e["name"], cell(e["flops"], ".2f", 1e-9), cell(moved, ".1f", 1 / MEGABYTE),
                     cell(unfused, ".1f", 1 / MEGABYTE) + times,
                     cell(e["flops_per_byte"], ".1f") + of_baseline,
                     cell(e["compute_s"], ".3f", 1e3), cell(e["memory_s"], ".3f", 1e3),
                     cell(e["measured_s"], ".3f", 1e3), (e["bound"] or "none") + note,
                     cell(e["share"], ".1f", 100, "%") or "above 100%" * (e.get("note") == FASTER)])
    rows[-1][-2:] = ["", ""]
    return rows


def sums(table):
    """A row with the sums of the others, None where one of them is not known."""
    keys = ("flops", "minimal_bytes", "baseline_bytes", "compute_s", "memory_s", "measured_s")
    columns = {key: [row[key] for row in table] for key in keys}
    whole = {key: None if None in column else sum(column) for key, column in columns.items()}
    moved = whole["minimal_bytes"]
    return dict(whole, name="all", bound=None, share=None,
                flops_per_byte=whole["flops"] / moved if moved else None)
