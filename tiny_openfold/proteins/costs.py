"""What the Evoformer's sub-layers must compute and move at least, as formulas of the sizes.

Bytes are those of one ideal kernel for each of: layer norm with projections, the core (attention, triangle
product), and output projection with gate and residual; transitions and the outer product keep their wide
hidden tensors on the chip and compute them again in backward. `pair` is one pass over the pair tensor, `msa`
one over the MSA tensor. Real kernels move 4 to 6 times as much, which is what fusion is about. A tensor that
stays in a cache can be faster than this bound: at small sizes, look at the launches instead.
"""
from fusion_lab.training.program import Cost
from tiny_openfold.proteins import TOKENS

DISTANCE_BINS = 64
ELEMENT = {False: 4, True: 2}  # bytes of an activation's, by whether precision is mixed


def costs(config, fusion, training):
    """{sub-layer: Cost} of all blocks for a whole batch, and under "heads" what a step runs once beside the
    blocks. Bytes are for the precision of the training; those of the heads are small and left out."""
    element, b, n, s = ELEMENT[training.use_amp], training.batch_size, config.num_seqs, config.seq_len
    cm, cz, h = config.msa_dim, config.pair_dim, config.outer_product_dim
    m, p = b * n * s, b * s * s  # positions of the MSA tensor and of the pair tensor
    msa, pair, hidden = m * cm * element, p * cz * element, m * h * element
    row_bias, pair_bias = (p * heads * element for heads in (config.msa_heads, config.pair_heads))
    outer = 2 * p * n * h * h + 2 * p * h * h * cz  # the product of all rows, then the projection
    if fusion.weight_first(b, n, s, h, None):
        outer = 2 * m * h * h * cz + 2 * p * n * h * cz
    triangle = Cost(12 * p * cz * cz + 2 * p * s * cz, 9 * pair, 15 * pair)
    attention = Cost(10 * p * cz * cz + 2 * p * cz * config.pair_heads + 4 * p * s * cz,
                     11 * pair + 2 * pair_bias, 18 * pair + 3 * pair_bias)
    of_a_block = dict(
        msa_row_attention=Cost(10 * m * cm * cm + 4 * m * s * cm + 2 * p * cz * config.msa_heads,
                               11 * msa + pair + 2 * row_bias, 18 * msa + 2 * pair + 3 * row_bias),
        msa_column_attention=Cost(10 * m * cm * cm + 4 * m * n * cm, 11 * msa, 18 * msa),
        msa_transition=Cost(16 * m * cm * cm, 2 * msa, 3 * msa),
        outer_product_mean=Cost(4 * m * cm * h + outer,
                                pair + msa + 4 * hidden, pair + 3 * msa + 6 * hidden),
        triangle_mult_outgoing=triangle, triangle_mult_incoming=triangle,
        triangle_attn_starting=attention, triangle_attn_ending=attention,
        pair_transition=Cost(16 * p * cz * cz, 2 * pair, 3 * pair))
    return {**{name: cost.times(config.num_blocks) for name, cost in of_a_block.items()},
            "heads": Cost(2 * p * cz * DISTANCE_BINS + 2 * m * cm * TOKENS)}


def least_bytes(settings):
    """Memory that a training step in these settings takes at least: weights with their gradients, and what
    each block keeps for its backward pass, or one block where blocks are recomputed. Measured peaks of
    tensors are 1.3 to 2.5 times as large, a CPU process up to 4 times: 30 pair tensors and 10 MSA tensors are
    less than the leanest kernels keep of some 60 and 25."""
    c, fusion, training = settings.model, settings.fusion, settings.training
    element, samples = ELEMENT[training.use_amp], training.batch_size * c.seq_len
    pair, msa = samples * c.seq_len * c.pair_dim * element, samples * c.num_seqs * c.msa_dim * element
    weights = 18 * c.msa_dim ** 2 + 30 * c.pair_dim ** 2 + c.outer_product_dim ** 2 * c.pair_dim
    lean = fusion.enable_activation_checkpointing or fusion.enable_selective_checkpointing
    kept = 30 * pair + 10 * msa
    return 8 * weights * c.num_blocks + (kept + c.num_blocks * (pair + msa) if lean else c.num_blocks * kept)


def statistics(fusion, blocks):
    """The switches, the nominal kernel counts of this example family (by definition, not measured), and the
    exact number of GEMMs for the 20 projections of a block: Q, K, V; left, right and their gates."""
    packings = (fusion.enable_qkv_fusion_msa + fusion.enable_qkv_fusion_triangle
                + fusion.enable_triangle_fusion)
    gates_too = fusion.enable_triangle_fusion and fusion.enable_projection_fusion  # with left and right
    return dict(qkv_fusion_msa_enabled=fusion.enable_qkv_fusion_msa,
                qkv_fusion_triangle_enabled=fusion.enable_qkv_fusion_triangle,
                flash_attention_enabled=fusion.enable_flash_attention,
                triangle_fusion_enabled=fusion.enable_triangle_fusion,
                torch_compile_enabled=fusion.enable_torch_compile,
                baseline_kernels_per_block=15, fused_kernels_per_block=15 - 4 * packings,
                kernel_reduction_percent=round(100 * 4 * packings / 15, 1),
                total_kernel_reduction=4 * packings * blocks,
                projection_gemms_per_block_unfused=20,
                projection_gemms_per_block=20 - 4 * packings - 2 * gates_too)
