"""AdamW of one flat tensor and its copy in 16 bits, by a Triton kernel that touches every number once.

torch's fused AdamW has a block of threads for every 65,536 numbers, so a small model leaves most of a GPU
idle. Beside it stand passes of their own: the gradient's cast to float32, its clipping, the weights' copy in
16 bits. Here are four kernels instead:

    adamw_join_kernel     gradients of all weights become one tensor; sums of squares
    adamw_norm_kernel     their norm
    adamw_scalars_kernel  what all numbers share, in float64 where float32 would cancel
    adamw_kernel          reads gradient, weight and both moments; writes the last three and the copy

The first finds gradients by a table of addresses: in every replay of a CUDA graph they lie where they lay
when it was captured. A list of some hundred tensors would have to be cut into several launches, and most of
their programs would have little to do.

Source: Loshchilov and Hutter 2019, Alg. 2 (decoupled weight decay); the state is that of torch.optim.AdamW.
"""
import math

import torch
import triton
import triton.language as tl

from evoformer_kernels.common import current_target, start

SCALARS = 5  # factor of the gradient, weight decay, step size, 1 / sqrt(second bias correction), skipped
NUMBERS = 1024  # of a program of adamw_kernel
JOINED = 512  # of a program of adamw_join_kernel: with more, too few programs hide the latency of loads
CHUNK = 5  # numbers that describe a chunk of a gradient: weight, first, count, first in out, count in out


@triton.jit
def adamw_join_kernel(addresses, chunks, out, squares, BN: tl.constexpr, CHUNK: tl.constexpr):
    """One program: copies one chunk of one gradient, at most BN numbers, into out; after the gradient's last
    numbers, zeros. Stores the sum of the chunk's squares. Axis 0: chunks.

        addresses (weights,) int64, where each gradient begins, 0 if there is none
        chunks (programs, CHUNK) int64: weight, first number, count, first number in out, count in out
        out (numbers,) in the gradients' dtype; squares (programs,) float32
    """
    chunk = chunks + tl.program_id(0) * CHUNK
    address, n = tl.load(addresses + tl.load(chunk)), tl.arange(0, BN)
    count = tl.where(address == 0, 0, tl.load(chunk + 2))
    source = address.to(tl.pointer_type(out.dtype.element_ty)) + tl.load(chunk + 1)
    g = tl.load(source + n, mask=n < count, other=0.0)  # (BN,)
    tl.store(out + tl.load(chunk + 3) + n, g, mask=n < tl.load(chunk + 4))
    g = g.to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(g * g))


@triton.jit
def adamw_norm_kernel(squares, norm, N, BN: tl.constexpr):
    """One program alone: norm () = sqrt(sum of squares (N,)), BN at a time; all float32."""
    n, total = tl.arange(0, BN), tl.zeros((BN,), tl.float32)
    for first in range(0, N, BN):
        total += tl.load(squares + first + n, mask=first + n < N, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total)))


@triton.jit
def adamw_scalars_kernel(step, norm, rate, found_inf, scalars, limit, decay, LOG1: tl.constexpr,
                         LOG2: tl.constexpr, ON_DEVICE: tl.constexpr, SCALED: tl.constexpr):
    """One program alone: counts the step t, and makes what all numbers share.

        scalars (SCALARS,): min(1, limit / norm), lr decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), and
        whether the step is skipped (not 0)

        step, norm () float32; rate () if ON_DEVICE, else a number; found_inf () if SCALED, else None

    LOG1 and LOG2 are logarithms of the betas. A norm that is not a number makes all weights so, as torch's
    clipping does. The powers are in float64: 1 - beta2^t is about 0.001 at first, and would cancel.
    """
    skipped = tl.load(found_inf) if SCALED else 0.0
    lr = tl.load(rate) if ON_DEVICE else rate
    count = tl.load(step) + 1
    tl.store(step, count, mask=skipped == 0)
    factor = limit / (tl.load(norm) + 1e-6)
    tl.store(scalars, tl.where(factor > 1, 1.0, factor))
    tl.store(scalars + 1, lr * decay)
    count = count.to(tl.float64)
    tl.store(scalars + 2, (lr / (1 - tl.exp(count * LOG1))).to(tl.float32))
    tl.store(scalars + 3, (1 / tl.sqrt(1 - tl.exp(count * LOG2))).to(tl.float32))
    tl.store(scalars + 4, skipped)


@triton.jit
def adamw_kernel(flat, gradient, first, second, low, scalars, N, BETA1: tl.constexpr, BETA2: tl.constexpr,
                 EPS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr):
    """One program: a step of AdamW for BN numbers. Axis 0: tiles of BN numbers.

        m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v)                 g = gradient, clipped
        weight -= lr decay weight;  weight -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

        flat (N,) weights, first (N,) m, second (N,) v, all float32; gradient, low (N,), the copy of flat, in
        any precision; scalars (SCALARS,) of adamw_scalars_kernel

    Decay is subtracted, and moments move by a difference: factors next to 1 would be rounded to the same side
    in every step.
    """
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    there = n < (tl.where(tl.load(scalars + 4) == 0, N, 0) if SCALED else N)  # none in a skipped step
    weight, m = tl.load(flat + n, mask=there), tl.load(first + n, mask=there)  # (BN,) each
    v = tl.load(second + n, mask=there)
    g = tl.load(gradient + n, mask=there).to(tl.float32) * tl.load(scalars)
    m += (1 - BETA1) * (g - m)
    v += (1 - BETA2) * (g * g - v)
    weight -= tl.load(scalars + 1) * weight
    weight -= tl.load(scalars + 2) * m / (tl.sqrt(v) * tl.load(scalars + 3) + EPS)
    tl.store(flat + n, weight, mask=there)
    tl.store(first + n, m, mask=there)
    tl.store(second + n, v, mask=there)
    tl.store(low + n, weight.to(low.dtype.element_ty), mask=there)


def warps():
    """Warps of a program of adamw_kernel with four numbers a thread: 16 bytes of float32. With more, Triton
    would lay out 16-bit tensors differently, and exchange them between threads through shared memory."""
    target = current_target()
    return NUMBERS // 4 // (target.warp_size if target else 32)


def update(flat, gradient, state, low, norm, limit, group, found_inf=None):
    """A step of AdamW, in place, of flat (n,), state's exp_avg and exp_avg_sq, all float32, and state's step.

    gradient (n,) in any precision, whose norm is norm, is scaled down to the norm limit; low (n,) becomes a
    copy of flat in its own dtype. norm and state's step are 0-dim float32 tensors; group has torch's lr (a
    number, or a 0-dim tensor), betas, eps and weight_decay. Where found_inf, 0-dim, is there and not 0,
    nothing changes. Nothing waits for the GPU.
    """
    moments = state["exp_avg"], state["exp_avg_sq"]
    on_device, (beta1, beta2) = isinstance(group["lr"], torch.Tensor), group["betas"]
    rate = group["lr"] if on_device else float(group["lr"])
    scalars, scaled = flat.new_empty(SCALARS), found_inf is not None
    with torch.cuda.device_of(flat):
        start(adamw_scalars_kernel, (1,), state["step"], norm, rate, found_inf, scalars, float(limit),
              float(group["weight_decay"]), LOG1=math.log(beta1), LOG2=math.log(beta2),
              ON_DEVICE=on_device, SCALED=scaled, num_warps=1)
        start(adamw_kernel, (triton.cdiv(len(flat), NUMBERS),), flat, gradient, *moments, low, scalars,
              len(flat), BETA1=beta1, BETA2=beta2, EPS=group["eps"], SCALED=scaled, BN=NUMBERS,
              num_warps=warps())


class Joined:
    """Gradients of weights with so many numbers, side by side from `starts` of a tensor of so many in all."""

    def __init__(self, sizes, starts, length, device):
        rooms = [end - begin for begin, end in zip(starts, [*starts[1:], length], strict=True)]
        chunks = [(weight, first, max(0, min(JOINED, size - first)), begin + first, min(JOINED, room - first))
                  for weight, (size, begin, room) in enumerate(zip(sizes, starts, rooms, strict=True))
                  for first in range(0, room, JOINED)]  # each as CHUNK says
        self.length, self.chunks, self.used = length, torch.tensor(chunks, device=device), False
        self.addresses = torch.empty(len(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")

    def __call__(self, gradients, dtype):
        """(gradients (length,), their norm), from one contiguous tensor of this dtype, or None, for each
        weight. A graph that captures this reads the addresses in every replay: of each Joined, one graph."""
        self.used = True
        self.addresses.copy_(torch.tensor([0 if g is None else g.data_ptr() for g in gradients]))
        device, programs = self.chunks.device, len(self.chunks)
        out = torch.empty(self.length, dtype=dtype, device=device)
        squares, norm = (torch.empty(size, device=device) for size in ((programs,), ()))
        with torch.cuda.device_of(out):
            start(adamw_join_kernel, (programs,), self.addresses.to(device, non_blocking=True), self.chunks,
                  out, squares, BN=JOINED, CHUNK=CHUNK, num_warps=4)
            start(adamw_norm_kernel, (1,), squares, norm, programs, BN=NUMBERS, num_warps=8)
        return out, norm


class AdamW(torch.optim.AdamW):
    """Of master weights (training/master_weights.py, KernelMasters), which hold the gradient and what to clip
    it to; writes their copy in 16 bits, too. Its state is that of torch's AdamW; training/recipe.py makes it
    before the first step. A scaler must have unscaled the gradient; a step that it finds infinite changes
    nothing."""

    def __init__(self, masters, **options):
        super().__init__([masters.flat], **options)
        self.masters = masters

    @torch.no_grad()
    def step(self):
        masters, (group,) = self.masters, self.param_groups
        update(masters.flat, masters.gradient, self.state[masters.flat], masters.low, masters.norm,
               masters.limit, group, getattr(self, "found_inf", None))
        masters.gradient = None
