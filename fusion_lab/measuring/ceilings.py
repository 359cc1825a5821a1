"""What the device can do at most, measured here and now."""
from functools import partial

import torch

from fusion_lab.kernels.precision import amp_dtype, runs_in_tf32
from fusion_lab.measuring.clocks import PhaseTimer

# Sides of the square products that are tried: on a CPU small ones stay in a cache, and are faster
SIDES = dict(cuda=(4096, 8192), cpu=(128, 256, 1024))
SLOW = 1.0  # s, after which no further run of the same is timed on a CPU


def matmul_ceiling(device, dtype):
    """FLOP/s of the fastest square matrix product of random data, measured here and now, in the layouts that
    a linear layer uses: forward, and backward to its input and to its weight. They differ: in float16 on a
    CPU by a factor of 20."""
    best = 0.0
    for n in SIDES["cuda" if device.type == "cuda" else "cpu"]:
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
