"""What the device can do at most, measured here and now."""
import contextlib
import time
from functools import partial

import torch

from fusion_lab.kernels.precision import amp_dtype, runs_in_tf32
from fusion_lab.measuring.clocks import PhaseTimer

# Sides of the square products that are tried: on a CPU small ones stay in a cache, and are faster
SIDES = dict(cuda=(4096, 8192), cpu=(128, 256, 1024))
SLOW = 0.3  # s; a product that takes longer is timed once


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
    """Seconds of run(): the best of five after a first one, or the first where that is slow."""
    timer = PhaseTimer(device)
    for _ in range(6):
        timer.start()
        run()
        timer.mark()
        if device.type == "cpu" and timer.seconds()[0].sum() > SLOW:
            break
    return timer.seconds()[-5:].min()


def copy_ceiling(device):
    """Bytes/s (read plus written) of copying a tensor far larger than any cache."""
    source = torch.empty((2 ** 30 if device.type == "cuda" else 2 ** 26) // 4, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / fastest(lambda: target.copy_(source), device)


def dispatch_cost(device):
    """Seconds of host time that one small operation takes, autograd apart: the best of six times 200
    operations. On a GPU they are only launched; elsewhere they also run, which takes next to nothing."""
    x, best = torch.zeros(8, device=device), float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            x.add_(1.0)
        best = min(best, (time.perf_counter() - started) / 200)
    return best


def measure_ceilings(device, training):
    """Copy bandwidth (bytes/s), matrix products per dtype (FLOP/s), host time of one operation (s); and
    which of them this run's dtype is bound by."""
    own = amp_dtype(training, device) or torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if device.type == "cuda":
        dtypes |= {"tf32": torch.float32, "float16": torch.float16}
    name = "tf32" if own == torch.float32 and runs_in_tf32(training, device) else \
        str(own).removeprefix("torch.")
    matmul = {}
    for each, dtype in {**dtypes, name: own}.items():
        with tf32(each == "tf32"):
            matmul[each] = float(matmul_ceiling(device, dtype))
    return dict(copy_bytes_per_s=float(copy_ceiling(device)), matmul_flops_per_s=matmul, dtype=name,
                element_bytes=element_bytes(training), dispatch_s=dispatch_cost(device))


def highest(ceilings, before):
    """The better of two measurements of the same ceilings, each by itself; before may be None."""
    if before is None:
        return ceilings
    matmul = {name: max(speed, before["matmul_flops_per_s"][name])
              for name, speed in ceilings["matmul_flops_per_s"].items()}
    return dict(ceilings, matmul_flops_per_s=matmul,
                copy_bytes_per_s=max(ceilings["copy_bytes_per_s"], before["copy_bytes_per_s"]),
                dispatch_s=min(ceilings["dispatch_s"], before["dispatch_s"]))


def element_bytes(training):
    """Size of an activation's element in this run's precision."""
    return 2 if training.use_amp else 4


def ceiling_line(ceilings):
    """measure_ceilings() in one line."""
    speeds = ", ".join(f"{name} {speed / 1e12:.3g}" for name, speed in ceilings["matmul_flops_per_s"].items())
    return (f"Ceilings, measured here: copy {ceilings['copy_bytes_per_s'] / 1e9:.1f} GB/s; matrix product "
            f"{speeds} TFLOP/s; launch {1e6 * ceilings['dispatch_s']:.2f} µs. This run: {ceilings['dtype']}.")


@contextlib.contextmanager
def tf32(enabled):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
