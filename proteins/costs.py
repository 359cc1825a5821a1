"""What a step must cost at least: FLOPs, bytes and memory, against ceilings measured on the spot.

Bytes are those of one ideal kernel for each of: layer norm with projections, the core (attention, triangle
product), and output projection with gate and residual; transitions and the outer product keep their wide
hidden tensors on the chip and compute them again in backward. U is one pass over the pair tensor, V over the
MSA tensor. Real kernels move 4 to 6 times as much, which is what fusion is about. A tensor that stays in a
cache can be faster than this bound: at small sizes, look at the launches instead.
"""
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny_openfold_v2 import SUBLAYERS, TOKENS, FusionConfig, TinyOpenFoldV2

DISTANCE_BINS = 64


def forward_flops(config, batch_size):
    """{sub-layer or "heads": FLOPs of one forward pass of one of them}; backward takes twice as many."""
    b, n, s = batch_size, config.num_seqs, config.seq_len
    m, p = b * n * s, b * s * s
    cm, cz, h = config.msa_dim, config.pair_dim, config.outer_product_dim
    triangle = 12 * p * cz * cz + 2 * p * s * cz
    attention = 10 * p * cz * cz + 2 * p * cz * config.pair_heads + 4 * p * s * cz
    return dict(msa_row_attention=10 * m * cm * cm + 4 * m * s * cm + 2 * p * cz * config.msa_heads,
                msa_column_attention=10 * m * cm * cm + 4 * m * n * cm,
                msa_transition=16 * m * cm * cm,
                outer_product_mean=4 * m * cm * h + 2 * p * n * h * h + 2 * p * h * h * cz,
                triangle_mult_outgoing=triangle, triangle_mult_incoming=triangle,
                triangle_attn_starting=attention, triangle_attn_ending=attention,
                pair_transition=16 * p * cz * cz,
                heads=2 * p * cz * DISTANCE_BINS + 2 * m * cm * TOKENS)


def minimal_bytes(config, batch_size, element_bytes):
    """{sub-layer: (forward, backward) bytes of one of them}, see the top of this file."""
    b, n, s = batch_size, config.num_seqs, config.seq_len
    u, v = b * s * s * config.pair_dim * element_bytes, b * n * s * config.msa_dim * element_bytes
    row_bias, pair_bias = (b * s * s * h * element_bytes for h in (config.msa_heads, config.pair_heads))
    hidden = b * n * s * config.outer_product_dim * element_bytes
    triangle, attention = (9 * u, 15 * u), (11 * u + 2 * pair_bias, 18 * u + 3 * pair_bias)
    return dict(msa_row_attention=(11 * v + u + 2 * row_bias, 18 * v + 2 * u + 3 * row_bias),
                msa_column_attention=(11 * v, 18 * v), msa_transition=(2 * v, 3 * v),
                outer_product_mean=(u + v + 4 * hidden, u + 3 * v + 6 * hidden),
                triangle_mult_outgoing=triangle, triangle_mult_incoming=triangle,
                triangle_attn_starting=attention, triangle_attn_ending=attention,
                pair_transition=(2 * u, 3 * u))


def counted_flops(config, batch_size):
    """What forward_flops() predicts, counted by PyTorch's FLOP counter on the unfused model; backward too:
    {name: (forward, backward)} for one block's sub-layers."""
    b, n, s = batch_size, config.num_seqs, config.seq_len
    with torch.device("meta"):
        block = TinyOpenFoldV2(replace(config, num_blocks=1), FusionConfig.preset(False)).blocks[0]
        msa = torch.empty(b, n, s, config.msa_dim, requires_grad=True)
        pair = torch.empty(b, s, s, config.pair_dim, requires_grad=True)
    found = {}
    for name in SUBLAYERS:
        inputs = (msa,) if name.startswith("msa") or name == "outer_product_mean" else (pair,)
        inputs += (pair,) if name == "msa_row_attention" else ()
        with FlopCounterMode(display=False) as forward:
            out = getattr(block, name)(*inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        found[name] = (forward.get_total_flops(), backward.get_total_flops())
    return found
