"""What a step must cost at least: FLOPs, bytes and memory, against ceilings measured on the spot.

Bytes are those of one ideal kernel for each of: layer norm with projections, the core (attention, triangle
product), and output projection with gate and residual; transitions and the outer product keep their wide
hidden tensors on the chip and compute them again in backward. U is one pass over the pair tensor, V over the
MSA tensor. Real kernels move 4 to 6 times as much, which is what fusion is about. A tensor that stays in a
cache can be faster than this bound: at small sizes, look at the launches instead.
"""
from dataclasses import replace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny_openfold_v2
from fusion_lab.measuring.counters import OpCounter, saved_activations
from fusion_lab.training.machine import MEGABYTE
from proteins.costs import forward_flops, minimal_bytes
from tiny_openfold_v2 import SUBLAYERS, FusionConfig, TinyOpenFoldV2, Trainer

ADAMW_BYTES = 28  # per float32 parameter: weight, gradient and two moments read, weight and moments written


def bound(times, measured_s, on_gpu):
    """Which of {"compute", "memory", "launch"} bounds a sub-layer, by their times. On a GPU the host launches
    while kernels run, and measured is the kernels' time: launching counts where it takes longer than that."""
    if on_gpu and measured_s:
        return "launch" if times["launch"] > measured_s else max(("compute", "memory"), key=times.get)
    return max(times, key=times.get)


def roofline_table(config, batch_size, ceilings, measured, on_gpu=False):
    """Rows by sub-layer, forward and backward of all blocks in one step. measured: {sub-layer: dict(seconds,
    launches or None)}, on a GPU seconds of kernels. share is the time at the compute and memory ceilings over
    the measured time."""
    flops = forward_flops(config, batch_size)
    sizes = minimal_bytes(config, batch_size, ceilings["element_bytes"])
    rows = []
    for name in SUBLAYERS:
        work, moved = 3 * flops[name] * config.num_blocks, sum(sizes[name]) * config.num_blocks
        entry = measured.get(name, dict(seconds=None, launches=None))
        times = dict(compute=work / ceilings["matmul_flops_per_s"][ceilings["dtype"]],
                     memory=moved / ceilings["copy_bytes_per_s"],
                     launch=(entry["launches"] or 0) * ceilings["dispatch_s"])
        floor = max(times["compute"], times["memory"])
        rows.append(dict(name=name, flops=work, minimal_bytes=moved, flops_per_byte=work / moved,
                         compute_s=times["compute"], memory_s=times["memory"], launch_s=times["launch"],
                         launches=entry["launches"], measured_s=entry["seconds"],
                         bound=bound(times, entry["seconds"], on_gpu),
                         share=floor / entry["seconds"] if entry["seconds"] else None))
    return rows


def step_floor(config, batch_size, ceilings, parameters, launches=None):
    """Lower bound of a step's time in seconds: (at the device's ceilings, for the host to launch it all)."""
    speed = ceilings["matmul_flops_per_s"][ceilings["dtype"]]
    rows = roofline_table(config, batch_size, ceilings, {})
    device = sum(max(row["compute_s"], row["memory_s"]) for row in rows)
    device += 3 * forward_flops(config, batch_size)["heads"] / speed
    device += ADAMW_BYTES * parameters / ceilings["copy_bytes_per_s"]
    return device, (launches or 0) * ceilings["dispatch_s"]


class FlexAttentionSizes(torch.autograd.Function):
    """Stands in for FlexAttention, which compiles and so cannot run on fake tensors, where only sizes matter:
    the kernel keeps q, k, v, a float32 bias, its output and one float32 per row of scores."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:4])


def flex_sizes(q, k, v, bias):
    return FlexAttentionSizes.apply(q, k, v, None if bias is None else bias.float())


def simulate_memory(config, fusion, training, device):
    """(peak, saved) bytes of an eager step at these sizes, without running it or allocating activations:
    weights, optimizer state and all tensors alive at once in forward and backward, on fake tensors."""
    fusion = replace(fusion, enable_torch_compile=False, enable_cuda_graphs=False,
                     activation_memory_budget=1.0)
    b, n, s = training.batch_size, config.num_seqs, config.seq_len
    with torch.random.fork_rng():
        trainer = Trainer(config, fusion, training, device)
    model, fake = trainer.model, FakeTensorMode()
    for module in model.modules():
        module._parameters.update({k: torch.nn.Parameter(fake.from_tensor(p.detach()))
                                   for k, p in module._parameters.items() if p is not None})
        module._buffers.update({k: fake.from_tensor(b) for k, b in module._buffers.items()})
    with fake, mock.patch.object(tiny_openfold_v2, "flex_attend", flex_sizes):
        batch = dict(msa_tokens=torch.zeros(b, n, s, dtype=torch.long, device=device),
                     target_tokens=torch.zeros(b, s, dtype=torch.long, device=device),
                     msa_targets=torch.zeros(b, n, s, dtype=torch.long, device=device),
                     coords=torch.zeros(b, s, 3, device=device), coord_mask=torch.zeros(b, s, device=device))
        saved = saved_activations(model, model.sublayers(), lambda: trainer.forward(batch)["loss"])
        with OpCounter() as counter:
            trainer.forward(batch)["loss"].backward()
        held = [*trainer.weights.values()] * 3 + [*model.buffers(), *batch.values()]
        held += [*model.parameters()] if trainer.masters else []
        return counter.peak + sum(t.numel() * t.element_size() for t in held), sum(saved.values())


def predict(config, fusion, training, device, ceilings, launches=None):
    """Lower bounds for these sizes: step time (s) and peak memory (MB). launches: kernels or operations per
    step, which hardly depend on the sizes, or None to leave the host's part out."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in TinyOpenFoldV2(config, FusionConfig.preset(False)).parameters())
    at_ceilings, host = step_floor(config, training.batch_size, ceilings, parameters, launches)
    peak, saved = simulate_memory(config, fusion, training, device)
    return dict(batch_size=training.batch_size, seq_len=config.seq_len, num_seqs=config.num_seqs,
                device_s=at_ceilings, launch_s=host, step_s=max(at_ceilings, host),
                peak_memory_mb=peak / MEGABYTE, saved_activation_mb=saved / MEGABYTE)
