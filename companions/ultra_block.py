"""The switch ultra-block of tiny_llama.py, and --compare-ultra: one kernel a block, is that worth it?

    python companions/tiny_llama.py --compare-ultra                       # on a GPU with Triton
    python companions/tiny_llama.py --use-amp --enable-ultra-block        # train with it

Forward is companions/kernels/ultra_block.py, one persistent kernel. Backward runs the block again by its
ordinary fused path and differentiates that: exact for every parameter, one more forward pass, and the memory
of activation checkpointing. The comparison prints the lines of this family's "V4" text, for its four shapes,
forward and whole training step, and always beside the CUDA graph of the fused model and torch.compile: an
ultra-fused block saves launches, and so do they.
"""
import os
import sys
from dataclasses import asdict, dataclass, field, replace

if __name__ == "__main__":
    print("ultra_block.py: error: no program; run companions/tiny_llama.py --compare-ultra", file=sys.stderr)
    sys.exit(2)

import torch

from fusion_lab.kernels import dispatch
from fusion_lab.kernels.limits import HAS_TRITON
from fusion_lab.kernels.precision import product_dtype
from fusion_lab.measuring.accuracy import compare_numerics
from fusion_lab.measuring.clocks import PhaseTimer, quantiles
from fusion_lab.measuring.counters import gpu_kernels
from fusion_lab.training.cuda_graphs import GraphedStep
from fusion_lab.training.files import (
    FAILED,
    MISSING,
    NO_GPU,
    UserError,
    in_own_directory,
    set_aside,
    write_json,
)
from fusion_lab.training.machine import MEGABYTE, choose_device, process_settings, system_info
from fusion_lab.training.reporting import print_result

# --------------------------------------------------------------------------------------------------------
# The block
# --------------------------------------------------------------------------------------------------------


def prepare(block, angles, enabled):
    """Give a block what its kernel needs beside weights, and whether it is to run."""
    block.ultra = enabled
    counters = torch.zeros(4, dtype=torch.int32, device=angles.device)
    block.register_buffer("turns", angles.float(), persistent=False)
    block.register_buffer("counters", counters, persistent=False)


def runs(x):
    return dispatch.runs(x)


def launch(block, x):
    """block.plain(x, angles) in one kernel."""
    from companions.kernels import ultra_block as kernels
    attention, mlp, dtype = block.self_attn, block.mlp, product_dtype(x)
    weights = kernels.Weights(
        block.input_layernorm.weight, attention.packed("q_proj", "k_proj", "v_proj")[0],
        attention.o_proj.weight, block.post_attention_layernorm.weight, mlp.packed(*mlp.SIDES)[0],
        mlp.down_proj.weight)
    weights = kernels.Weights(*(w.detach().to(dtype) if w.dim() > 1 else w.detach() for w in weights))
    heads, kv_heads = (attention.widths[name] // attention.width for name in ("q_proj", "k_proj"))
    turns = block.turns[:, :x.shape[1]].contiguous()
    return kernels.ultra_block(x, weights, turns, heads, kv_heads, block.input_layernorm.eps, block.counters)


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
        found = torch.autograd.grad(y, (again, *parameters), gradient)
        return None, found[0], None, *found[1:]


def run(block, x, angles):
    return UltraBlock.apply(block, x, angles, *block.parameters())


# --------------------------------------------------------------------------------------------------------
# --compare-ultra
# --------------------------------------------------------------------------------------------------------

SHAPES = ((1, 128), (2, 256), (4, 512), (2, 1024))  # B, S of the V4 text
ULTRA, GRAPH, COMPILED = "Ultra-fused", "CUDA graph of the fused block", "torch.compile"
STANDARD = "Standard"
WAYS = {ULTRA: dict(enable_ultra_block=True), STANDARD: {}, COMPILED: dict(enable_torch_compile=True),
        GRAPH: dict(enable_cuda_graphs=True),
        "CUDA graph of ultra-fused blocks": dict(enable_ultra_block=True, enable_cuda_graphs=True)}
ROUNDS, REPEATS = 9, 10


@dataclass
class Way:
    """One way to run the model. forward and step: (p20, median, p80) in s; kernels: launched in each."""
    name: str
    run: dict = field(repr=False)  # {"forward": function of a batch, "step": ...}
    peak_mb: float | None = None
    kernels: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)


def prepared(name, program, settings, batch, device):
    """A Way, warm, and the memory that it needs by itself."""
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    trainer = program.trainer(program, settings, device)

    def forward(batch):
        with torch.no_grad():
            return trainer.forward(batch)["loss"]
    if trainer.use_graph:
        forward = GraphedStep(forward, batch, device)
    way = Way(name, dict(forward=forward, step=trainer.step))
    for function in way.run.values():
        for _ in range(2):
            function(batch)
    if on_gpu:
        torch.cuda.synchronize()
        way.peak_mb = (max(torch.cuda.max_memory_allocated(), trainer.graph.peak if trainer.graph else 0)
                       - before) / MEGABYTE
        way.kernels = {key: len(gpu_kernels(lambda f=f: f(batch))) for key, f in way.run.items()}
    return way


def by_turns(ways, batch, device, rounds, repeats):
    """Fill way.seconds; each round begins with another way."""
    for key in ("forward", "step"):
        timers = [PhaseTimer(device) for _ in ways]
        for number in range(rounds):
            for place in range(len(ways)):
                index = (number + place) % len(ways)
                timers[index].start()
                for _ in range(repeats):
                    ways[index].run[key](batch)
                timers[index].mark()
        for way, timer in zip(ways, timers, strict=True):
            way.seconds[key] = quantiles(timer.seconds()[:, 0] / repeats)


def compare_shape(program, settings, device, names=tuple(WAYS), rounds=ROUNDS, repeats=REPEATS):
    """Ways of one shape, measured."""
    batch = program.check_batch(settings, device)
    ways = []
    for name in names:
        fusion = replace(settings.fusion, **WAYS[name])
        process_settings(replace(settings, fusion=fusion), device)
        ways.append(prepared(name, program, replace(settings, fusion=fusion), batch, device))
    by_turns(ways, batch, device, rounds, repeats)
    return ways


def verdict(ways, key):
    """What is fastest beyond noise, and how the ultra-fused block stands to the rest."""
    found = {way.name: way.seconds[key] for way in ways}
    ultra, best = found[ULTRA], min(found, key=lambda name: found[name][1])
    others = [f"{found[name][1] / ultra[1]:.2f}x {name}" for name in found if name != ULTRA]
    rivals = [name for name in found if name != best and found[name][0] <= found[best][2]]
    return (f"{best} is fastest" + (f", within noise of {', '.join(rivals)}" if rivals else "")
            + f"; ultra-fused is {', '.join(others)}")


def print_shape(batch, length, ways):
    """The V4 text's lines, forward, then the same of a training step."""
    print(f"\nTesting: batch_size={batch}, seq_len={length}")
    for key, title in (("forward", "Forward"), ("step", "Training step")):
        print(f" {title}")
        for way in ways:
            p20, median, p80 = (1e3 * t for t in way.seconds[key])
            print(f"  {way.name}: {median:.3f} ms ({p20:.3f}, {p80:.3f})"
                  + (f", {way.kernels[key]} kernels" if way.kernels else ""))
        ultra, standard = (next(w for w in ways if w.name == name).seconds[key][1]
                           for name in (ULTRA, STANDARD))
        print(f"  Speedup: {standard / ultra:.2f}x\n  Throughput: {batch * length / ultra:.0f} tokens/s")
        print(f"  Verdict: {verdict(ways, key)}")
    print("  Memory: " + ", ".join(f"{way.name} {way.peak_mb:.0f} MB" for way in ways if way.peak_mb),
          flush=True)


def compare_ultra(program, settings):
    """--compare-ultra: accuracy first, then four shapes; returns the exit code."""
    device = choose_device(settings.training.device)
    if device.type != "cuda":
        raise UserError("--compare-ultra needs a GPU", code=NO_GPU)
    if not HAS_TRITON:
        raise UserError("--compare-ultra needs Triton: pip install triton", code=MISSING)
    settings = in_own_directory(settings)
    settings = settings.having(use_amp=True, amp_dtype="bfloat16", enable_master_weights=True)
    first = settings.having(batch_size=SHAPES[0][0] + 1, seq_len=SHAPES[0][1], enable_ultra_block=True)
    accuracy, failures = compare_numerics(program, first, device)
    print(f"=== Ultra-Fused Model Benchmark ===\nAccuracy: {accuracy['tensors']} tensors, outputs and all "
          f"gradients; error at most {accuracy['worst_error_ratio']:.2f}x the baseline's, 3x allowed: "
          f"{'FAIL' if failures else 'PASS'}")
    for line in failures[:5]:
        print(f"   {line}")
    shapes = []
    for batch, length in SHAPES:
        ways = compare_shape(program, settings.having(batch_size=batch, seq_len=length), device)
        print_shape(batch, length, ways)
        shapes.append(dict(batch_size=batch, seq_len=length, verdict={
            key: verdict(ways, key) for key in ("forward", "step")}, ways=[
                {k: v for k, v in asdict(replace(way, run={})).items() if k != "run"} for way in ways]))
        del ways
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    gains = [{way["name"]: way["seconds"]["forward"][1] for way in shape["ways"]} for shape in shapes]
    speedups = [gain[STANDARD] / gain[ULTRA] for gain in gains]
    print(f"\nAverage speedup: {sum(speedups) / len(speedups):.2f}x\nMaximum speedup: {max(speedups):.2f}x\n"
          "Both forward and beside eager code; the verdicts above are beside what else saves launches.")
    path = os.path.join(settings.profiler.profile_dir, program.result("ultra_comparison"))
    set_aside(path)
    result = dict(mode="compare_ultra", passed=not failures, failures=failures, shapes=shapes,
                  system_info=system_info(device), config=asdict(settings.model))
    write_json(path, result)
    print_result(dict(mode="compare_ultra", passed=not failures), path, settings)
    return FAILED if failures else 0
