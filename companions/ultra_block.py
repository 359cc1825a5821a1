"""TinyLlama V4: a whole block of tiny_llama.py as one kernel. Is that worth it?

    python companions/tiny_llama.py --compare-ultra                       # on a GPU with Triton
    python companions/tiny_llama.py --use-amp --enable-ultra-block        # train with it

The forward pass is companions/kernels/ultra_block.py, one persistent kernel. The backward pass runs the block
again by its ordinary fused path and differentiates that: exact for every parameter, at the price of one more
forward pass and with the memory of activation checkpointing. The comparison times forward passes and training
steps at four shapes, beside a CUDA graph and torch.compile, which save kernel launches as well.
"""
from dataclasses import replace
from functools import partial

import torch

from evoformer_kernels.limits import HAS_TRITON
from evoformer_kernels.precision import product_dtype
from fusion_lab.measuring.bench import contest, contest_table, failed, only_a_graph
from fusion_lab.measuring.counters import OpCounter, gpu_kernels
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.directory import RunDirectory
from fusion_lab.training.errors import FAILED, MISSING, NO_GPU, UserError
from fusion_lab.training.machine import choose_device, process_settings, system_info
from fusion_lab.training.reporting import print_result

if HAS_TRITON:
    from companions.kernels import ultra_block as kernels

# --- The block ------------------------------------------------------------------------------------------


def prepare(block, angles, enabled):
    """Give a block what its kernel needs beside weights, and whether it is to run."""
    block.ultra = enabled
    counters = torch.zeros(4, dtype=torch.int32, device=angles.device)
    block.register_buffer("turns", angles.float(), persistent=False)
    block.register_buffer("counters", counters, persistent=False)


def launch(block, x):
    """block.plain(x, angles) in one kernel."""
    attention, mlp, dtype = block.self_attn, block.mlp, product_dtype(x)
    weights = kernels.Weights(
        block.input_layernorm.weight, attention.packed("q_proj", "k_proj", "v_proj")[0],
        attention.o_proj.weight, block.post_attention_layernorm.weight, mlp.packed(*mlp.SIDES)[0],
        mlp.down_proj.weight)
    weights = kernels.Weights(*(w.detach().to(dtype) if w.dim() > 1 else w.detach() for w in weights))
    turns = block.turns[:, :x.shape[1]].contiguous()
    return kernels.ultra_block(x, weights, turns, *attention.heads, block.input_layernorm.eps, block.counters)


class UltraBlock(torch.autograd.Function):
    """parameters are the block's own, named so that autograd asks for their gradients."""

    @staticmethod
    def forward(ctx, block, x, angles, *parameters):
        kind = x.device.type
        ctx.autocast = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind),
                            enabled=torch.is_autocast_enabled(kind))
        ctx.block = block
        ctx.save_for_backward(x, angles, *parameters)
        return launch(block, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, angles, *parameters = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            again = x.detach().requires_grad_()
            y = ctx.block.plain(again, angles)
        of_x, *of_parameters = torch.autograd.grad(y, (again, *parameters), gradient)
        return None, of_x, None, *of_parameters


def run(block, x, angles):
    return UltraBlock.apply(block, x, angles, *block.parameters())


# --- --compare-ultra ------------------------------------------------------------------------------------

SHAPES = ((1, 128), (2, 256), (4, 512), (2, 1024))  # B, S
ULTRA, EAGER = "ultra-fused blocks", "eager"
WAYS = {ULTRA: dict(enable_ultra_block=True), EAGER: {}, "torch.compile": dict(enable_torch_compile=True),
        "CUDA graph": dict(enable_cuda_graphs=True),
        "CUDA graph of ultra-fused blocks": dict(enable_ultra_block=True, enable_cuda_graphs=True)}
ROUNDS = 30


class Forward:
    """A trainer whose step is the forward pass."""

    def __init__(self, program, settings, device):
        self.trainer, self.graph = program.trainer(program, settings, device), None

    def loss(self, batch):
        with torch.no_grad():
            return self.trainer.forward(batch)["loss"]

    def step(self, batch, mark=lambda: None):
        if self.trainer.use_graph and not self.graph:
            self.graph = GraphedStep(self.loss, batch, self.trainer.device)
        loss = (self.graph or self.loss)(batch)
        mark()
        return loss


def launches(trainer, batch):
    """Counts: kernels of a step on a GPU, replayed graphs' among them; operations on a CPU."""
    found, step = only_a_graph(trainer, batch), partial(trainer.step, batch)
    if batch["ids"].is_cuda:
        return replace(found, launches=len(gpu_kernels(step)))
    with OpCounter() as counter:
        step()
    return replace(found, launches=counter.launches)


def rows_of(make, program, settings, device):
    """Rows of make(program, settings, device) under the switches of each way, with tokens/s and launches."""
    batch = program.data(settings).check_batch()
    made = {name: partial(make, program, settings.having(**switches), device)
            for name, switches in WAYS.items()}
    rows = contest(made, "", batch, device, ROUNDS, launches)
    for row in (row for row in rows if "median" in row):
        row["tokens_per_second"] = batch["ids"].numel() / row["median"]
    return rows


def over_all(shapes, part):
    """The speed-ups of ultra-fused blocks over eager code at all shapes: (best, mean, tokens/s at most), None
    where not all ran."""
    found = [{row["name"]: row for row in shape[part]["rows"] if "median" in row} for shape in shapes]
    if not all({ULTRA, EAGER} <= rows.keys() for rows in found):
        return None
    gains = [rows[EAGER]["median"] / rows[ULTRA]["median"] for rows in found]
    return max(gains), sum(gains) / len(gains), max(rows[ULTRA]["tokens_per_second"] for rows in found)


def verdict(rows):
    """How the ultra-fused blocks stand to eager code and to what is fastest; noise is from p20 to p80."""
    found = {row["name"]: row for row in rows if "median" in row}
    if not {ULTRA, EAGER} <= found.keys():
        return f"{ULTRA} or {EAGER} code did not run"
    ultra, best = found[ULTRA], min(found.values(), key=lambda row: row["median"])
    said = f"{ULTRA} {found[EAGER]['median'] / ultra['median']:.2f}x as fast as {EAGER} code"
    if ultra["p20"] <= best["p80"]:
        return f"{said}; nothing is faster beyond noise"
    return f"{said}; {best['name']} is {ultra['median'] / best['median']:.2f}x as fast as they are"


def compare_ultra(program, settings):
    """The mode: four shapes, forward and training step; returns the exit code."""
    device = choose_device(settings.training.device)
    if device.type != "cuda":
        raise UserError("--compare-ultra needs a GPU", code=NO_GPU)
    if not HAS_TRITON:
        raise UserError("--compare-ultra needs Triton: pip install triton", code=MISSING)
    directory = RunDirectory(program, settings).claim()
    process_settings(settings, device)
    shapes = []
    for batch_size, length in SHAPES:
        chosen = settings.having(batch_size=batch_size, seq_len=length, use_amp=True, amp_dtype="bfloat16",
                                 enable_master_weights=True)
        shapes.append(dict(batch_size=batch_size, seq_len=length))
        for part, make in (("forward", Forward), ("training step", program.trainer)):
            rows = rows_of(make, program, chosen, device)
            shapes[-1][part] = dict(rows=rows, verdict=verdict(rows))
            speeds = [f"  {row['name']}: {row['tokens_per_second']:,.0f} tokens/s" for row in rows
                      if "median" in row]
            print(contest_table(f"B {batch_size}, S {length}, {part}", rows), *speeds,
                  f"Verdict: {verdict(rows)}\n", sep="\n", flush=True)
            torch.cuda.empty_cache()
    overall = {part: over_all(shapes, part) for part in ("forward", "training step")}
    for part, found in overall.items():
        if found:
            print("{}: maximum speed-up {:.2f}x, average {:.2f}x, peak throughput {:,.0f} tokens/s".format(
                part.capitalize(), *found))
    broken = [name for shape in shapes for part in ("forward", "training step")
              for name in failed(shape[part]["rows"], ULTRA)]
    path = directory.write("ultra_comparison", dict(mode="compare_ultra", shapes=shapes, overall=overall,
                                                    system_info=system_info(device)))
    print_result(dict(mode="compare_ultra"), path, settings)
    return FAILED if broken else 0
