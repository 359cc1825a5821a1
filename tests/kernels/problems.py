"""Every function of kernels with a derivative, as problems for rule.violations(): (ours, plain, tensors).

    violations(*made("outer product", torch.bfloat16, "added"))

FAMILIES has a function for each, which makes a problem of a dtype and sizes, and sizes by names. A GPU is
given others (test_kernels_gpu.py). Whatever is no gradient's tensor, masks and dropout, is drawn inside.
"""
from functools import partial

import torch

from evoformer_kernels import outer_product, outer_product_sides, projections, swiglu, transition
from evoformer_kernels.attention import drop_in as attention_drop_in
from evoformer_kernels.attention.function import Weights, attention_layer, gated_attention
from evoformer_kernels.triangle_multiplication import drop_in as multiplication_drop_in
from evoformer_kernels.triangle_multiplication import function as trimul
from tests.kernels import references


def drawn(dtype, *sizes, scale=None):
    """Tensors of these sizes; matrices by the root of their width, unless there is a scale."""
    return [torch.randn(size).mul(scale or (size[-1] ** -0.5 if len(size) == 2 else 1)).to(dtype)
            for size in sizes]


def dropout(size, shared):
    """Factors, shared along this dimension; None for None."""
    if shared is None:
        return None
    return (torch.rand([1 if d == shared else n for d, n in enumerate(size)]) > 0.3) / 0.7


def cast(factors, like):
    return None if factors is None else factors.to(like.dtype)


def attention(dtype, B, X, Y, H, D, axis, biased, masked, packed):
    torch.manual_seed(0)
    c, length = H * D, X if axis == 1 else Y
    keys = torch.rand(B, length) > 0.2 if masked else None

    def ours(x, gate_bias, bias):
        parts = [x] if packed else [part.contiguous() for part in x.chunk(4, dim=-1)]
        return gated_attention(parts, H, axis, bias if biased else None, keys, gate_bias)

    def plain(x, gate_bias, bias):
        return references.gated_attention(x, H, axis, bias if biased else None, keys, gate_bias)
    return ours, plain, drawn(dtype, (B, X, Y, 4 * c), (c,), (B, H, length, length), scale=1)


def attention_from_python(dtype, S, masked=True, B=1, N=3, H=2, D=16, bias_dtype=None, scale=None):
    """Every row has a mask of its own."""
    torch.manual_seed(2)
    mask = torch.rand(B, N, 1, 1, S) > 0.3 if masked else None
    if masked:
        mask[..., 0] = True

    def ours(*given):
        return attention_drop_in.triangle_attention(*given, mask, scale)

    def plain(q, k, v, bias):
        return references.attention(q, k, v, bias[:, 0], mask if mask is None else mask[:, :, 0, 0],
                                    scale=scale)
    tensors = drawn(dtype, *[(B, N, H, S, D)] * 3, (B, 1, H, S, S), scale=1)
    return ours, plain, [*tensors[:3], tensors[3].to(bias_dtype or dtype)]


def sub_layer(dtype, B, X, Y, c, heads, axis, maker, masked, adds, shared, **options):
    """maker: "own" if LayerNorm(x) makes the bias, "given", or None; adds: whether to x."""
    torch.manual_seed(0)
    length = (X, Y)[axis - 1]
    tensors = drawn(dtype, (B, X, Y, c), (c,), (c,), (4 * c, c), (c,), (c, c), (c,), (heads, c),
                    (B, heads, length, length))
    tensors[1:3] = 1 + 0.1 * tensors[1], 0.1 * tensors[2]
    key_mask, drop = torch.rand(B, length) > 0.2 if masked else None, dropout((B, X, Y, c), shared)

    def run(function, **options):
        def call(x, *rest):
            *weights, head_weight, bias = rest
            weights = Weights(*weights, head_weight if maker == "own" else None)
            return function(x, weights, heads, axis, bias if maker == "given" else None, key_mask, 1e-5,
                            x if adds else None, cast(drop, x), **options)
        return call
    turned = options.get("turned")
    return run(attention_layer, **options), run(references.attention_layer, turned=turned), tensors


def head_bias(dtype, shape, heads):
    """The bias, and the square of the x that is handed on."""
    torch.manual_seed(0)
    c = shape[-1]
    tensors = drawn(dtype, shape, (c,), (c,), (heads, c))
    tensors[1:3] = 1 + 0.1 * tensors[1], 0.1 * tensors[2]

    def ours(*given):
        bias, x = projections.head_bias(*given, 1e-5)
        return torch.cat([bias.flatten(), x.square().flatten()])

    def plain(x, norm_weight, norm_bias, head_weight):
        _, bias = references.norm_project(x, norm_weight, norm_bias, None, head_weight, 1e-5)
        return torch.cat([bias.flatten(), x.square().flatten()])
    return ours, plain, tensors


def outer_first(dtype, samples, rows, size, h, channels, packed, scale=1.0, adds=False, **options):
    torch.manual_seed(0)
    both, weight, *rest = drawn(dtype, (samples, rows, size, 2 * h), (channels, h * h), (channels,),
                                *[(samples, size, size, channels)] * adds)

    def unpacked(function, **options):
        def call(*given):
            sides, rest = (given[0].chunk(2, -1), given[1:]) if packed else (given[:2], given[2:])
            return function(*sides, *rest[:2], scale, *rest[2:], **options)
        return call
    sides = [both] if packed else [side.contiguous() for side in both.chunk(2, -1)]
    ours = unpacked(outer_product.outer_first, **options)
    return ours, unpacked(references.outer_first), [*sides, weight, *rest]


def sides(dtype, shape, h):
    """Both sides, and the square of what is handed on."""
    torch.manual_seed(0)
    c = shape[-1]
    tensors = drawn(dtype, shape, (c,), (c,), (2 * h, c), (2 * h,))
    tensors[1:3] = 1 + 0.1 * tensors[1], 0.1 * tensors[2]

    def joined(function):
        def call(*given):
            left, right, x = function(*given)
            return torch.cat([left, right, x.square().to(left.dtype)], -1)
        return call
    return joined(outer_product_sides.sides), joined(references.sides), tensors


def two_layers(dtype, shape, units):
    torch.manual_seed(0)
    c = shape[-1]
    return (transition.two_layers, references.two_layers,
            drawn(dtype, shape, (units, c), (units,), (c, units), (c,)))


def transition_layer(dtype, shape, units, **options):
    torch.manual_seed(0)
    c = shape[-1]
    tensors = drawn(dtype, shape, (c,), (c,), (units, c), (units,), (c, units), (c,))
    tensors[1:3] = 1 + 0.1 * tensors[1], 0.1 * tensors[2]
    return partial(transition.layer, **options), references.transition_layer, tensors


def swiglu_transition(dtype, shape, units):
    torch.manual_seed(0)
    c = shape[-1]
    tensors = drawn(dtype, shape, (c,), (c,), (2 * units, c), (c, units))
    tensors[1:3] = 1 + 0.1 * tensors[1], 0.1 * tensors[2]
    return swiglu.transition, references.swiglu_transition, tensors


def multiplication(dtype, B, S, c, outgoing, masked, adds, shared, biased, **options):
    """masked: dimensions of the mask; adds: whether to x; biased: whether projections are."""
    torch.manual_seed(0)
    pair = (B, S, S, c)
    tensors = drawn(dtype, pair, (c,), (c,), (4 * c, c), (4 * c,), (c,), (c,), (c, c), (c,), (c, c), (c,))
    for n in (1, 5):  # weights of both LayerNorms
        tensors[n] = 1 + 0.3 * tensors[n]
    mask = None if masked is None else torch.rand([B, S, S][:masked]) > 0.25
    drop = dropout(pair, shared)

    def run(function, **options):
        def call(x, *weights):
            weights = [w if biased or n not in (3, 7, 9) else None for n, w in enumerate(weights)]
            return function(x, weights, mask, outgoing, 1e-5, x if adds else None, cast(drop, x), **options)
        return call
    return run(trimul.triangle_multiplication, **options), run(trimul.reference), tensors


def multiplication_from_python(dtype, S, c=16, direction="outgoing", masked=True):
    """A mask of pairs, which is no product of residues."""
    torch.manual_seed(3)
    tensors = drawn(dtype, (1, S, S, c), (c,), (c,), (2 * c, c), (2 * c,), (2 * c, c), (2 * c,), (c,), (c,),
                    (c, c), (c,), (c, c), (c,))
    mask = torch.rand(1, S, S) > 0.25 if masked else None

    def ours(x, *weights):
        return multiplication_drop_in.triangle_multiplicative_update(x, direction, mask, *weights)

    def plain(x, *weights):
        norm, norm_bias, p_in, p_in_bias, g_in, g_in_bias, *behind = weights
        weights = norm, norm_bias, torch.cat([p_in, g_in]), torch.cat([p_in_bias, g_in_bias]), *behind
        return trimul.reference(x, weights, mask, direction == "outgoing")
    return ours, plain, tensors


FAMILIES = {  # the function of a problem, {name: what it is given behind the dtype}
    "attention": (attention, {  # B, X, Y, H, D, axis, bias, keys, packed
        "short": (2, 5, 13, 2, 16, 2, True, True, True),
        "ending node": (2, 70, 3, 2, 8, 1, True, True, True),
        "columns": (2, 7, 5, 4, 8, 1, False, True, False),
        "long rows, two tiles, a mask": (1, 3, 77, 2, 16, 2, True, True, True),
        "columns, no mask": (1, 33, 2, 1, 32, 1, False, False, True),
        "a whole tile": (1, 2, 64, 2, 16, 2, True, False, False),
        "two whole tiles": (1, 2, 128, 1, 16, 2, True, False, True),
        "one residue": (1, 1, 1, 2, 8, 2, True, False, True)}),
    "attention from Python": (attention_from_python, {  # S, masked, B, N, H, D, dtype of the bias, scale
        "short": (13,), "long, no mask": (70, False), "long": (70, True, 2, 3, 2, 8, None, 0.3),
        "a bias in float32": (13, True, 1, 3, 2, 16, torch.float32),
        **{f"heads of {D}": (13, True, 1, 3, 2, D) for D in (24, 48, 96)}}),
    "sub-layer": (sub_layer, {  # B, X, Y, c, H, axis, maker, keys, adds, dropout shared along this dimension
        "ending node": (2, 7, 7, 32, 2, 1, "own", True, True, 2),
        "starting node": (2, 7, 7, 32, 2, 2, "own", True, True, 1),
        "long rows": (1, 2, 67, 16, 1, 2, "given", True, True, None),
        "MSA rows": (2, 3, 11, 16, 2, 2, "given", True, True, 1),
        "columns": (1, 7, 5, 32, 2, 1, None, True, True, 3),
        "columns, no mask, update alone": (2, 5, 3, 16, 1, 1, None, False, False, None),
        "one wide head": (1, 3, 5, 64, 1, 2, None, True, True, 1),
        "whole tiles": (2, 16, 16, 16, 1, 1, "own", True, True, 2),
        "wide heads": (1, 3, 5, 128, 2, 1, None, True, True, 2),
        "a part of a tile of lines, rows dropped": (2, 3, 32, 16, 1, 1, None, False, True, 1),
        "a part of a tile of lines, columns dropped": (2, 3, 32, 16, 1, 1, None, False, True, 2),
        "tiles of lines, rows dropped": (2, 16, 8, 16, 1, 1, None, False, True, 1),
        "tiles of lines, columns dropped": (2, 8, 16, 16, 1, 2, None, False, True, 2),
        "lines of tiles, rows dropped": (2, 3, 128, 16, 1, 1, None, False, True, 1),
        "lines of tiles, columns dropped": (2, 3, 128, 32, 1, 1, None, False, True, 2)}),
    "head bias": (head_bias, {  # shape of x, heads
        "two samples, odd": ((2, 7, 5, 16), 3), "whole tiles": ((2, 8, 16, 32), 4),
        "many heads, one position": ((1, 1, 1, 128), 17)}),
    "outer product": (outer_first, {  # B, N, S, h, c, packed, scale, whether it is added
        "added": (2, 7, 9, 8, 16, True, 0.3, True),
        "two samples, odd": (2, 7, 9, 8, 12, True, 0.3),
        "many rows": (1, 77, 5, 16, 16, False),
        "odd widths": (1, 3, 13, 6, 20, False),
        "one position, one row": (1, 1, 1, 16, 128, True),
        "more channels than a tile sums": (1, 2, 3, 8, 80, True),
        "whole tiles": (2, 16, 8, 32, 16, True),
        "parts of lines": (1, 5, 2, 128, 8, False),
        "whole tiles, few rows": (1, 5, 16, 32, 24, True, 0.3),
        "added, not by the kernel": (1, 3, 5, 8, 20, False, 0.3, True)}),
    "sides": (sides, {  # shape of x, channels of a side
        "two samples, odd": ((2, 3, 7, 32), 16), "several tiles": ((1, 3, 70, 16), 32),
        "many channels": ((1, 2, 37, 128), 16)}),
    "two layers": (two_layers, {  # shape of x, hidden units
        "two tiles, odd": ((2, 5, 7, 32), 128), "several shares": ((1, 3, 130, 16), 64),
        "one position": ((1, 1, 1, 128), 512), "whole tiles": ((1, 16, 64, 16), 128),
        "wide, 192 units": ((1, 1, 5, 256), 192), "wide, 256 units": ((1, 1, 5, 256), 256),
        "no position": ((0, 5, 16), 64)}),
    "transition": (transition_layer, {  # shape of x, hidden units
        "two samples, odd": ((2, 5, 7, 32), 128), "several shares": ((1, 3, 130, 16), 64),
        "whole tiles": ((2, 8, 16, 32), 64), "units no multiple of a tile": ((1, 3, 11, 16), 192),
        "several tiles a program, odd": ((3, 9, 13, 16), 256)}),
    "SwiGLU transition": (swiglu_transition, {  # shape of x, hidden units
        "two samples, odd": ((2, 3, 5, 16), 40), "whole tiles": ((1, 8, 16, 32), 128)}),
    "multiplication": (multiplication, {  # B, S, c, outgoing, dims of mask, added, dropout along, biases
        "small": (1, 5, 16, True, 2, True, 1, True),
        "outgoing": (2, 13, 32, True, 2, True, 1, True),
        "incoming": (1, 13, 32, False, 2, True, 2, True),
        "both sides masked": (2, 5, 16, True, 3, True, None, True),
        "update alone": (1, 17, 16, False, 3, False, None, False),
        "no mask": (1, 16, 64, True, None, True, None, True),
        "one residue": (1, 1, 16, False, 2, False, 1, True),
        "a whole tile": (2, 16, 16, False, 2, True, 1, True),
        "parts of lines": (1, 64, 16, True, 2, True, 2, True),
        "whole tiles, but not of lines": (1, 48, 16, False, 3, True, 1, True)}),
    "multiplication from Python": (multiplication_from_python, {  # S, c, direction, masked
        "outgoing": (5,), "incoming": (5, 16, "incoming"), "no mask": (5, 16, "incoming", False)}),
}


def made(family, dtype, case, **options):
    """(ours, plain, tensors) of a case, by its name. options: for our function."""
    problem, cases = FAMILIES[family]
    return problem(dtype, *cases[case], **options)
