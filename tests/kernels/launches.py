"""One launch or more of every kernel, by its name: on memory that holds nothing, for compilation alone."""
from unittest import mock

import torch

from fusion_lab.kernels import adamw, projections
from fusion_lab.kernels.attention import bias_gradient
from fusion_lab.kernels.attention import drop_in as attention_drop_in
from fusion_lab.kernels.attention import layer as attention_layer
from fusion_lab.kernels.attention import operator as attention_operator
from fusion_lab.kernels.outer_product_mean import layout as outer_layout
from fusion_lab.kernels.outer_product_mean import sides as outer_sides
from fusion_lab.kernels.reductions import sums, weight_gradients
from fusion_lab.kernels.transition import hidden_gradient
from fusion_lab.kernels.transition import layer as transition_layer
from fusion_lab.kernels.triangle_multiplication import operator as triangle_operator
from fusion_lab.kernels.triangle_multiplication import products as triangle_products
from tests.support import ROOT

if COMPANIONS := (ROOT / "companions").exists():  # they may go
    from companions.kernels import gated_rotary, messages, ultra_block


def attention(length, width, axis, biased, masked):
    """Launch every kernel of attention on memory that holds nothing."""
    heads, rows = 4, 600 if length <= 64 else 3  # so many that a program of whole rows has several
    size = (1, length, rows) if axis == 1 else (1, rows, length)
    packed, gate_bias, bias = (torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in (
        (*size, 4 * heads * width), (heads * width,), (1, heads, length, length)))
    bias = bias if biased else None
    keys = torch.ones(1, length) if masked else None
    attention_operator.gated_attention([packed], heads, axis, bias, keys, gate_bias).sum().backward()


def stored_scores(length):
    """The same where backward stores gradients of scores, whatever else is shipped."""
    recomputed, *stored = attention_operator.STORED
    with mock.patch.object(attention_operator, "STORED", [*stored, recomputed]):
        attention(length, 32, 2, True, False)


def multiplication(channels, length):
    """The same for triangle multiplication with a mask, dropout and a residual; of whole tiles, or not."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, pair = channels, empty(1, length, length, channels)
    weights = [empty(c), empty(c), empty(4 * c, c), empty(4 * c), empty(c), empty(c), empty(c, c), empty(c),
               empty(c, c), empty(c)]
    for recompute in (False, True):
        triangle_operator.triangle_multiplication(
            pair, *weights, torch.ones(1, length), residual=pair, drop=torch.ones(1, 1, length, c),
            recompute=recompute).sum().backward()


def short_products(side):
    """The same for its products, of either kind, where sides are short."""
    each = torch.empty(48, side, side, dtype=torch.bfloat16)
    for outgoing in (True, False):
        triangle_products.multiply(each, each, outgoing)
        triangle_products.multiply_backward(*[each] * 5, outgoing)


def two_layers(channels, positions=4096):
    """The same for two layers with a ReLU between them."""
    x, units = torch.empty(positions, channels, dtype=torch.bfloat16), 4 * channels
    hidden_gradient.launch(x, x.new_empty(channels, units), x.new_empty(positions, units), 1)


def wrapped_layers(channels):
    """The same for a whole transition, whose hidden layer lies in memory."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, units, x = channels, 4 * channels, empty(1, 64, 64, channels)
    weights = empty(c), empty(c), empty(units, c), empty(units), empty(c, units), empty(c)
    transition_layer.transition_layer(x, *weights, residual=x).sum().backward()


def many_weights(positions, widths):
    """The same for gradients of weights; widths of the left operands, reversed those of the right ones."""
    lefts, rights = ([torch.empty(positions, n, dtype=torch.bfloat16) for n in side]
                     for side in (widths, widths[::-1]))
    weight_gradients.launch(lefts, rights)


def many_sums(rows, widths):
    """The same for sums of parts, of so many numbers each."""
    sums.gathered([torch.empty(rows + number, width) for number, width in enumerate(widths)], torch.bfloat16)


def bias_sums(n, length, dtype):
    """The same for sums of partial sums of a bias's gradient, with and without the transpose."""
    LP = attention_operator.padded_length(length)
    for transpose in (False, True):
        bias_gradient.launch(torch.empty(n, 1, 4, LP, LP, dtype=dtype), length, torch.bfloat16, transpose)


def heads_of(width):
    """The same for heads that are alone in their tensors."""
    q, bias = (torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in (
        (1, 3, 2, 256, width), (1, 2, 256, 256)))
    attention_operator.row_attention(q, q, q, bias).sum().backward()


def from_python(length, masked):
    """The same for attention as other projects call it."""
    q, bias = (torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in (
        (1, 3, 4, length, 32), (1, 1, 4, length, length)))
    attention_drop_in.Plan.kept.clear()
    mask = torch.ones(1, 3, 1, 1, length, dtype=torch.bool) if masked else None
    attention_drop_in.triangle_attention(q, q, q, bias, mask).sum().backward()


def layer(channels, dropped=True):
    """The same for an attention sub-layer; and for a bias from another tensor."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, x = channels, empty(1, 64, 64, channels)
    weights = empty(c), empty(c), empty(4 * c, c), empty(c), empty(c, c), empty(c)
    attention_layer.attention_layer(x, *weights, 4, 2, head_weight=empty(4, c), residual=x,
                                    drop=torch.ones(1, 1, 64, c) if dropped else None).sum().backward()
    projections.norm_project(x, *weights[:2], None, empty(4, c), 1e-5)[1].sum().backward()


def odd_projections(channels):
    """The same for an attention sub-layer, of tiles that are not whole."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, x = channels, empty(2, 7, 7, channels)
    weights = empty(c), empty(c), empty(4 * c, c), empty(c), empty(c, c), empty(c)
    attention_layer.attention_layer(x, *weights, 4, 1, head_weight=empty(4, c), residual=x,
                                    drop=torch.ones(1, 7, 1, c)).sum().backward()


def laid_out(rows, length=64):
    """The same for the outer product's layout, of sides that are one tensor."""
    outer_layout.forward(*torch.empty(1, rows, length, 64, dtype=torch.bfloat16).chunk(2, -1))


def laid_out_backward(channels, length=64):
    """The same for that of its gradient, whose rows it adds up."""
    outer_layout.backward(torch.empty(1, length, length, channels, dtype=torch.bfloat16),
                          torch.empty(channels, 1024, dtype=torch.bfloat16), 0.5, 1)


def laid_out_and_added(channels, h):
    """The same for all of its forward, with a residual."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)
    c = channels
    outer_layout.outer_layout(empty(1, 16, 64, h), empty(1, 16, 64, h), empty(c, h * h), empty(c), 0.1,
                              empty(1, 64, 64, c))


def sides(channels, h):
    """The same for its sides."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c = channels
    left, right, x = outer_sides.side_projection(empty(1, 16, 64, c), empty(c), empty(c), empty(2 * h, c),
                                                 empty(2 * h))
    (left.sum() + right.sum() + x.sum()).backward()


def neighbours(channels, count, nodes=100):
    """The same for messages from so many neighbours."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    c, index = channels, torch.zeros(nodes, count, dtype=torch.int64)
    edges = messages.first_layer(empty(nodes, c), empty(nodes, count, c), empty(2 * nodes, c), index,
                                 messages.incoming(index, 2 * nodes))
    edges = messages.biased_gelu(edges, empty(c))
    messages.sum_over_neighbours(edges, empty(c), torch.ones(index.shape)).sum().backward()


def gated_and_turned(channels, heads, kv_heads, width, dtype=torch.bfloat16):
    """The same for what stands between a LLaMA block's projections."""
    packed = torch.empty(64, 2 * channels, dtype=dtype, requires_grad=True)
    gated_rotary.swiglu(packed).sum().backward()
    packed = torch.empty(2, 32, (heads + 2 * kv_heads) * width, dtype=dtype, requires_grad=True)
    q, k, v = gated_rotary.rotary(packed, torch.empty(2, 32, width // 2), heads, kv_heads)
    (q.sum() + k.sum() + v.sum()).backward()


def block(hidden, length):
    """The same for a LLaMA block in one kernel, two heads of keys for four."""
    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)
    c, f, width = hidden, 4 * hidden, hidden // 8
    weights = ultra_block.Weights(empty(c), empty(2 * c, c), empty(c, c), empty(c), empty(2 * f, c),
                                  empty(c, f))
    turns, counters = torch.empty(2, length, width // 2), torch.zeros(4, dtype=torch.int32)
    ultra_block.ultra_block(empty(2, length, c), weights, turns, 8, 4, 1e-6, counters)


def optimizer_step(dtype, on_device, scaled, length=1 << 20):
    """The same for AdamW with gradients in this dtype."""
    flat, gradient, low = (torch.empty(length, dtype=kind) for kind in (torch.float32, dtype, torch.bfloat16))
    number = torch.empty(())
    adamw.update(flat, gradient, dict(step=number, exp_avg=flat, exp_avg_sq=flat), low, number, 1.0,
                 dict(lr=number if on_device else 0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
                 number if scaled else None)
    adamw.Joined([length], [0], length, flat.device)([gradient], dtype)


SUMS = [384, 128, 512, 640, 128] * 4
WEIGHTS = [64, 64, 256, 64, 128, 512, 128, 640, 128] * 2
LAUNCHES = {
    "attention, S 256": (attention, 256, 32, 2, True, False),
    "attention, S 77": (attention, 77, 16, 1, True, True),
    "attention, S 64": (attention, 64, 32, 2, True, False),
    "attention, stored scores, S 256": (stored_scores, 256),
    "attention, stored scores, S 200": (stored_scores, 200),
    "columns, N 128": (attention, 128, 32, 1, False, False),
    "columns, N 16": (attention, 16, 16, 1, False, True),
    **{f"multiplication, c {c}, S {S}": (multiplication, c, S) for c in (64, 128, 256) for S in (64, 70)},
    **{f"short products, side {side}": (short_products, side) for side in (16, 48, 64)},
    **{f"attention, heads of {width}": (heads_of, width) for width in (64, 128)},
    **{f"attention from Python, S {S}": (from_python, S, masked) for S, masked in ((64, True), (77, False))},
    **{f"attention sub-layer, c {c}": (layer, c) for c in (64, 128, 256)},
    "attention sub-layer without dropout": (layer, 128, False),
    "odd projections, c 128": (odd_projections, 128),
    **{f"two layers, c {c}": (two_layers, c) for c in (64, 128, 256)},
    **{f"transition sub-layer, c {c}": (wrapped_layers, c) for c in (64, 128)},
    "two layers, odd": (two_layers, 128, 77),
    **{f"outer layout, N {rows}, S {S}": (laid_out, rows, S) for rows, S in ((128, 64), (16, 64), (77, 77))},
    **{f"its gradient, c {c}, S {S}": (laid_out_backward, c, S) for c, S in ((128, 64), (64, 77), (72, 77))},
    **{f"outer product added, c {c}, h {h}": (laid_out_and_added, c, h) for c, h in ((128, 32), (64, 12))},
    **{f"sides, c {c}, h {h}": (sides, c, h) for c, h in ((64, 32), (128, 32), (16, 16))},
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
        **{f"messages, c {c}": (neighbours, c, 48) for c in (16, 128, 256)},
        "LLaMA's elements, c 1024": (gated_and_turned, 4096, 16, 8, 64),
        "LLaMA's elements, odd": (gated_and_turned, 77, 3, 1, 6),
        "LLaMA's elements, float32": (gated_and_turned, 4096, 8, 2, 128, torch.float32)})
WITHOUT_PRODUCTS = (
    "sum_kernel", "sums_kernel", "attention_bias_gradient_kernel", "attention_padded_bias_kernel",
    "attention_gate_backward", "attention_key_mask_kernel", "message_", "adamw_", "swiglu_", "rotary_kernel",
    "triangle_multiplication_back_kernel RESIDUAL=False, SAVE=True, OUT=False")  # which stops before them
SPILLS = {  # where tiles are not whole
    ("sm_90", "triangle_multiplication_front_backward_kernel",
     "NO_PADDING=False, LINES=0, BC=64, BM=64, num_stages=2, num_warps=4"): 8,
    ("sm_80", "triangle_multiplication_front_backward_kernel",
     "NO_PADDING=False, LINES=0, BM=64, BC=32, num_warps=4, num_stages=2"): 40,
    ("sm_90", "norm_project_backward_kernel",
     "WHOLE_TILES=False, C=128, BM=64, BN=64, num_stages=4, num_warps=4"): 6}


def spills_too_often(target, kernel, used):
    return used["spills"] > max([0, *(most for (where, name, tile), most in SPILLS.items() if where == target
                                      and kernel.startswith(name) and kernel.endswith(tile))])
