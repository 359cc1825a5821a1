"""What a run prints: start-up and step lines."""
import math
import sys

import torch

from fusion_lab.kernels.precision import runs_in_tf32
from fusion_lab.training.files import UserError
from fusion_lab.training.machine import cpu_name


def require_finite(losses, checked, first_step):
    """Raise UserError at the first loss that is not finite. Returns how many losses are checked now."""
    for number in range(checked, len(losses)):
        loss = losses[number].item()
        if not math.isfinite(loss):
            raise UserError(f"loss is {loss} at step {first_step + number + 1}: nothing was saved since; "
                            "lower --learning-rate, or use --amp-dtype bfloat16 if it is float16", code=1)
    return len(losses)


def step_line(done, training, loss, seconds, memory):
    memory = "   n/a" if memory is None else f"{memory:6.1f}"
    speed = training.batch_size / seconds
    return (f"Step {done:3d}/{training.num_steps} | Loss: {loss:.4f} | Speed: {speed:6.1f} samples/sec"
            f" | Memory: {memory} MB | Time: {seconds * 1e3:5.1f}ms")


TITLES = {"MSA QKV Fusion": "enable_qkv_fusion_msa", "Triangle QKV Fusion": "enable_qkv_fusion_triangle",
          "Flash Attention": "enable_flash_attention", "Triangle Gate/Proj Fusion": "enable_triangle_fusion",
          "Torch Compile": "enable_torch_compile"}


def describe_start(trainer, source):
    """The start-up lines."""
    model, device = trainer.model, trainer.device
    c, f = model.config, model.fusion
    counts = model.get_fusion_statistics()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    dtype = str(trainer.amp_dtype or torch.float32).removeprefix("torch.")
    on = {True: "Enabled", False: "Disabled"}
    kernel = f" ({model.attention_kernel(trainer.amp_dtype)})" if f.enable_flash_attention else ""
    print(f"Device: {device} ({name}) | torch {torch.__version__} | dtype: {dtype} | "
          f"seed: {trainer.training.seed}")
    print(f"Model: {c.num_blocks} blocks, c_m {c.msa_dim}, c_z {c.pair_dim}, heads {c.msa_heads} and "
          f"{c.pair_heads}, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"Data: {source.describe()} | B {trainer.training.batch_size}, N {c.num_seqs}, S {c.seq_len}")
    print("Fusion Optimizations:")
    for title, name in TITLES.items():
        print(f"   {title}: {on[getattr(f, name)]}{kernel if name == 'enable_flash_attention' else ''}")
    print(f"   Kernel Reduction: {counts['kernel_reduction_percent']}% ({counts['total_kernel_reduction']} "
          "fewer kernels) [nominal]")
    if beside := f.beside(TITLES.values()):
        print(f"Besides: {' '.join(beside)}")
    idle = f.idle(trainer.training.use_amp, device.type == "cuda", c.seq_len)
    if trainer.training.use_tf32 and not runs_in_tf32(trainer.training, device):
        idle.append("this device has no TF32")
    if idle:
        print(f"Not used here: {'; '.join(idle)}")
    sys.stdout.flush()
