"""One launch or more of every kernel, by its name: for compilation alone, so that nothing is computed."""
from functools import partial
from unittest import mock

import torch

from evoformer_kernels import adamw, tuner
from evoformer_kernels.attention import bias_gradient, plan
from evoformer_kernels.reductions import sums, weight_gradients
from evoformer_kernels.triangle_multiplication import products
from tests.kernels import problems
from tests.support import ROOT

if COMPANIONS := (ROOT / "companions").exists():  # they may go
    from companions.kernels import ultra_block
    from tests.companions.kernels import test_gated_rotary as gated
    from tests.companions.kernels import test_messages as messages


def run(problem, *sizes, dtype=torch.bfloat16, **options):
    """Forward and backward of a problem."""
    tuner.forget()  # Calls hold compiled kernels
    ours, _, tensors = problem(dtype, *sizes, **options)
    ours(*(t.requires_grad_() for t in tensors)).sum().backward()


def stored_scores(length):
    """Attention where backward stores gradients of scores, whatever else is shipped."""
    recomputed, *stored = plan.STORED
    with mock.patch.object(plan, "STORED", [*stored, recomputed]):
        run(problems.attention, 1, 3, length, 4, 32, 2, True, False, True)


def multiplication(channels, length):
    """Triangle multiplication added to the pair, with mask and dropout; of whole tiles or not; recomputed."""
    for recompute in (False, True):
        run(problems.multiplication, 1, length, channels, True, 2, True, 1, True, recompute=recompute)


def short_products(side, outgoing):
    """Those of triangle multiplication, and of its backward pass."""
    sides = torch.empty(96, 1, side, side, dtype=torch.bfloat16)
    products.multiply_backward(sides, products.multiply(sides, outgoing), outgoing)


def many_weights(positions, widths):
    """Gradients of weights; widths of the left operands, reversed those of the right ones."""
    lefts, rights = ([torch.empty(positions, n, dtype=torch.bfloat16) for n in side]
                     for side in (widths, widths[::-1]))
    weight_gradients.launch(lefts, rights)


def many_sums(rows, widths):
    """Sums of parts, of so many numbers each."""
    sums.gathered([torch.empty(rows + number, width) for number, width in enumerate(widths)], torch.bfloat16)


def bias_sums(n, length, dtype):
    """Sums of partial sums of a bias's gradient, with and without the transpose."""
    LP = plan.padded_length(length)
    for transpose in (False, True):
        partial_sums = torch.empty(n, 1, 4, LP, LP, dtype=dtype)
        bias_gradient.launch(partial_sums, length, torch.bfloat16, transpose)


def block(hidden, length):
    """A LLaMA block in one kernel, two heads of keys for four."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)
    c, f, width = hidden, 4 * hidden, hidden // 8
    weights = ultra_block.Weights(empty(c), empty(2 * c, c), empty(c, c), empty(c), empty(2 * f, c),
                                  empty(c, f))
    turns, counters = torch.empty(2, length, width // 2), torch.zeros(4, dtype=torch.int32)
    ultra_block.ultra_block(empty(2, length, c), weights, turns, 8, 4, 1e-6, counters)


def optimizer_step(dtype, on_device, scaled, length=1 << 20):
    """AdamW with gradients in this dtype."""
    flat, gradient, low = (torch.empty(length, dtype=kind) for kind in (torch.float32, dtype, torch.bfloat16))
    number = torch.empty(())
    adamw.update(flat, gradient, dict(step=number, exp_avg=flat, exp_avg_sq=flat), low, number, 1.0,
                 dict(lr=number if on_device else 0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
                 number if scaled else None)
    adamw.Joined([length], [0], length, flat.device)([gradient], dtype)


SUMS = [384, 128, 512, 640, 128] * 4
WEIGHTS = [64, 64, 256, 64, 128, 512, 128, 640, 128] * 2
LAUNCHES = {
    **{f"attention, {name}": (run, problems.attention, *case) for name, case in {
        "S 256": (1, 3, 256, 4, 32, 2, True, False, True), "S 77": (1, 77, 3, 4, 16, 1, True, True, True),
        "S 64": (1, 600, 64, 4, 32, 2, True, False, True),
        "columns, N 128": (1, 128, 3, 4, 32, 1, False, False, True),
        "columns, N 16": (1, 16, 600, 4, 16, 1, False, True, True)}.items()},
    **{f"attention, stored scores, S {S}": (stored_scores, S) for S in (256, 200)},
    **{f"attention from Python, heads of {D}": (run, problems.attention_from_python, 256, False, 1, 3, 2, D)
       for D in (64, 128)},
    **{f"attention from Python, S {S}": (run, problems.attention_from_python, S, masked, 1, 3, 4, 32)
       for S, masked in ((64, True), (77, False))},
    **{f"multiplication, c {c}, S {S}": (multiplication, c, S) for c in (64, 128, 256) for S in (64, 70)},
    **{f"short products, side {side}, outgoing {outgoing}": (short_products, side, outgoing)
       for side in (16, 48, 64) for outgoing in (True, False)},
    **{f"attention sub-layer, c {c}": (run, problems.sub_layer, 1, 64, 64, c, 4, 2, "own", False, True, 1)
       for c in (64, 128)},
    "attention sub-layer without dropout": (
        run, problems.sub_layer, 1, 64, 64, 128, 4, 2, "own", False, True, None),
    "odd projections": (run, problems.sub_layer, 2, 7, 7, 128, 4, 1, "own", False, True, 2),
    **{f"heads of a bias, c {c}": (run, problems.head_bias, (1, 64, 64, c), 4) for c in (64, 128, 256)},
    **{f"two layers, c {c}": (run, problems.two_layers, (1, 256, c), 4 * c) for c in (64, 128, 256)},
    "two layers, odd": (run, problems.two_layers, (1, 77, 128), 512),
    **{f"transition sub-layer, c {c}": (run, problems.transition_layer, (1, 16, 16, c), 4 * c)
       for c in (64, 128)},
    **{f"SwiGLU transition, c {c}": (run, problems.swiglu_transition, (1, 16, 16, c), 4 * c)
       for c in (64, 128)},
    **{f"outer product, N {N}, S {S}, c {c}": (run, problems.outer_first, 1, N, S, 32, c, True)
       for N, S, c in ((128, 64, 128), (16, 64, 128), (77, 77, 64), (77, 77, 72))},
    **{f"outer product added, c {c}, h {h}": (
        run, problems.outer_first, 1, 16, 64, h, c, True, 0.1, True) for c, h in ((128, 32), (64, 12))},
    **{f"sides, c {c}, h {h}": (run, problems.sides, (1, 16, 64, c), h)
       for c, h in ((64, 32), (128, 32), (16, 16))},
    "weights of a block": (many_weights, 4096, WEIGHTS),
    "weights of two layers, odd": (many_weights, 77, [23, 64]),
    "sums of a block": (many_sums, 1024, SUMS),
    "sums, odd": (many_sums, 77, [23, 64]),
    "sums of ones": (many_sums, 1, [1]),
    "sums of one and others": (many_sums, 1, [1, 64]),
    "bias's gradient, S 64": (bias_sums, 64, 64, torch.bfloat16),
    "bias's gradient, S 51": (bias_sums, 77, 51, torch.float16),
    **{f"bias's gradient, {n} parts": (bias_sums, n, 256, torch.float32) for n in (1, 2, 8, 100)},
    "AdamW": (optimizer_step, torch.bfloat16, True, False),
    "AdamW, several ranks": (optimizer_step, torch.float32, True, False),
    "AdamW, a scaler, no graph, odd": (optimizer_step, torch.float32, False, True, 1001),
}
if COMPANIONS:
    LAUNCHES.update({
        "LLaMA block, c 512": (block, 512, 256),
        **{f"messages, {function}, c {c}": (run, messages.problem, function, 100, 48, 200, c)
           for function in ("first", "gelu", "sum") for c in (16, 128, 256)},
        **{f"LLaMA's elements, {dtype}, {case}": (partial(run, dtype=dtype), gated.problem, *case)
           for dtype, cases in {
               torch.bfloat16: (("swiglu", (64,), 4096), ("rotary", 2, 32, 16, 8, 64),
                                ("swiglu", (64,), 77), ("rotary", 2, 32, 3, 1, 6)),
               torch.float32: (("swiglu", (64,), 4096), ("rotary", 2, 32, 8, 2, 128))}.items()
           for case in cases}})
WITHOUT_PRODUCTS = (
    "sum_kernel", "sums_kernel", "attention_bias_gradient_kernel", "attention_padded_bias_kernel",
    "attention_gate_backward", "attention_key_bias_kernel", "attention_one_key_kernel", "message_", "adamw_",
    "swiglu_", "rotary_kernel")
SPILLS = [  # where tiles are not whole: a GPU, a kernel, some of its constants, instructions that spill
    ("sm_90", "triangle_multiplication_front_backward_kernel",
     dict(NO_PADDING=False, LINES=0, BM=64, BC=64, num_warps=4, num_stages=2), 8),
    ("sm_80", "triangle_multiplication_front_backward_kernel",
     dict(NO_PADDING=False, LINES=0, BM=64, BC=32, num_warps=4, num_stages=2), 40),
    ("sm_90", "norm_project_backward_kernel",
     dict(WHOLE_TILES=False, C=128, BM=64, BN=64, num_warps=4, num_stages=4), 6)]


def is_one(kernel, name, **some):
    """Whether a kernel, "its_name BM=64, num_warps=4", has this name and, in any order, these constants."""
    found, constants = kernel.split(" ", 1)
    return found == name and {f"{key}={value}" for key, value in some.items()} <= set(constants.split(", "))


def has_products(kernel):
    stops_before = is_one(kernel, "triangle_multiplication_back_kernel", SAVE=True, OUT=False)
    return not kernel.startswith(WITHOUT_PRODUCTS) and not stops_before


def spills_too_often(target, kernel, used):
    allowed = [most for where, name, some, most in SPILLS if where == target and is_one(kernel, name, **some)]
    return used["spills"] > max([0, *allowed])
