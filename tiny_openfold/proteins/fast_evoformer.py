"""Fast twins of the Evoformer's sub-layers: Triton kernels and recomputation.

The model (tiny_openfold_v2.py) is plain: a sub-layer returns its update, and the block adds it. A twin stands
before the plain class, `class Fast(Twin, Plain)`, so super() is the plain one. It has the same parameters,
hooks, random numbers and checkpoints, and another forward.
Called with `onto`, a twin returns that tensor with its update added, because a kernel can add on its way out.
Kernels run then, where they take what they are given (device, dtype, width); elsewhere the plain code runs.

A block makes its sub-layers by `make`, which chooses plain classes or twins, and runs twins by `run_block`.
Plain classes are those of the model, also where they are named Fused. Letters in shape comments are the
model's.
"""
from dataclasses import dataclass, replace
from functools import cache, partial

from evoformer_kernels import limits
from evoformer_kernels.precision import product_dtype, strict_float32
from tiny_openfold.layers.custom_gradients import recomputed


@dataclass(frozen=True)
class Plan:
    """What fusion asks of a twin; the defaults ask for nothing."""
    attention: bool = False  # kernels, by sub-layer
    triangle_multiplication: bool = False
    outer_product_mean: bool = False
    transition: bool = False
    recompute: bool = False  # in backward, what backward needs of a sub-layer, instead of keeping it

    @classmethod
    def of(cls, fusion):
        """From a FusionConfig. --attention-backend NAME turns the kernels of attention off."""
        auto = fusion.enable_flash_attention and fusion.attention_backend == "auto"
        return cls(attention=fusion.enable_triton_attention and auto,
                   triangle_multiplication=fusion.enable_triton_triangle,
                   outer_product_mean=fusion.enable_triton_outer_layout,
                   transition=fusion.enable_triton_relu, recompute=fusion.enable_selective_checkpointing)


def gpu_arithmetic(x):
    """How x is multiplied: "half", in 16 bits on a GPU, where our kernels run; "float32", on a GPU
    without TF32; None, in any other way."""
    if limits.runs(x):
        return "half"
    return "float32" if x.is_cuda and strict_float32(product_dtype(x)) else None


# --- Sub-layers -----------------------------------------------------------------------------------------


def no_dropout(x):
    """In place of the block's dropout_factors, for a sub-layer that has none."""
    return None


class SubLayerTwin:
    """What twins share."""

    def __init__(self, config, fusion, **kind):
        super().__init__(config, fusion, **kind)
        self.plan = Plan.of(fusion)

    def takes(self, x):
        """Whether kernels run this sub-layer for such an x."""
        return False

    def forward(self, x, *inputs, onto=None, dropout_factors=no_dropout, **masks):
        """The update. inputs and masks: what the plain forward takes besides, masks by place or by name. With
        `onto`: onto + update * dropout_factors(such a tensor), by kernels if that is x and they take it."""
        if onto is x and self.takes(x):
            return self.by_kernel(x, *inputs, drop=dropout_factors(x), **masks)
        update = recomputed(self.plan.recompute, partial(self.by_library, **masks), x, *inputs)
        return update if onto is None else add(onto, update, dropout_factors(update))

    def by_library(self, *inputs, **masks):
        return super().forward(*inputs, **masks)


def add(onto, update, drop):
    return onto + (update if drop is None else update * drop)


class AttentionTwin(SubLayerTwin):
    """Of rows, columns and triangles: the sub-layer from LayerNorm to residual in kernels."""

    def takes(self, x):
        return self.plan.attention and limits.fits("attention sub-layer", x, self.heads)

    def layer(self, x, axis, key_mask, drop, bias=None, bias_proj=None):
        """x + the whole sub-layer in kernels. The bias (B, H, L, L) is given, or projected by bias_proj."""
        from evoformer_kernels.attention import function as layer
        norm, output = self.layer_norm, self.o_proj
        weights = layer.Weights(
            norm.weight, norm.bias, *self.packed(*self.QKV, "gate_proj"), output.weight, output.bias,
            None if bias_proj is None else bias_proj.weight)
        return layer.attention_layer(x, weights, self.heads, axis, bias, key_mask, norm.eps, x, drop,
                                     self.plan.recompute)

    def attention(self, x, axis, key_mask=None, bias=None):
        """The plain one; where only its heads fit, our kernel between the library's projections."""
        if not (self.plan.attention and limits.fits("attention", x, self.heads)):
            return super().attention(x, axis, key_mask, bias)
        from evoformer_kernels.attention.function import gated_attention
        wide = getattr(self, "qkv_gate_proj", None)  # its result lacks the gate's bias: the kernel adds that
        projected, gate_bias = ([wide(x)], wide.bias) if wide else (self.project(x), None)
        return self.o_proj(gated_attention(projected, self.heads, axis, bias, key_mask, gate_bias))


class RowAttentionTwin(AttentionTwin):
    """With `onto` also returns pair, the same numbers. The block reads this one from then on, so gradients of
    all later readers arrive in the bias's backward kernel, which adds its own. Autograd would add them in one
    more launch."""

    def forward(self, msa, pair, seq_mask=None, onto=None, dropout_factors=no_dropout):
        """The update of msa; with `onto`, (msa, pair)."""
        bias, pair = self.bias_and_pair(pair)
        new = super().forward(msa, bias, seq_mask, onto=onto, dropout_factors=dropout_factors)
        return new if onto is None else (new, pair)

    def bias_and_pair(self, pair):
        if self.plan.attention and limits.fits("head bias", pair, self.heads):
            from evoformer_kernels.projections import head_bias
            norm = self.pair_norm
            return head_bias(pair, norm.weight, norm.bias, self.pair_bias_proj.weight, norm.eps)
        return self.bias(pair), pair

    def by_kernel(self, msa, bias, seq_mask=None, drop=None):
        return self.layer(msa, 2, seq_mask, drop, bias)

    def by_library(self, msa, bias, seq_mask=None):
        return self.attention(self.layer_norm(msa), 2, seq_mask, bias)


class ColumnAttentionTwin(AttentionTwin):
    def by_kernel(self, msa, row_mask=None, drop=None):
        return self.layer(msa, 1, row_mask, drop)


class TriangleAttentionTwin(AttentionTwin):
    def by_kernel(self, pair, seq_mask=None, drop=None):
        # given bias_proj, the kernels project the bias and, for axis 1, read it transposed
        return self.layer(pair, 2 if self.starting else 1, seq_mask, drop, bias_proj=self.triangle_bias_proj)


class TransitionTwin(SubLayerTwin):
    def takes(self, x):
        return self.plan.transition and limits.fits("transition", x)

    def by_kernel(self, x, drop=None):  # transitions have no dropout
        from evoformer_kernels import transition
        norm, first, second = self.layer_norm, self.linear1, self.linear2
        return transition.layer(x, norm.weight, norm.bias, first.weight, first.bias, second.weight,
                                second.bias, norm.eps, self.plan.recompute)

    def two_layers(self, x):
        """The plain ones; 256 channels, too wide for a whole layer, have the ReLU's gradient in a kernel."""
        if self.plan.transition and limits.fits("two layers", x):
            from evoformer_kernels.transition import two_layers
            return two_layers(x, self.linear1.weight, self.linear1.bias, self.linear2.weight,
                              self.linear2.bias)
        return super().two_layers(x)


class OuterProductMeanTwin(SubLayerTwin):
    """Also hands on the MSA, as RowAttentionTwin does pair."""

    def takes(self, msa):
        return self.plan.outer_product_mean and limits.runs(msa) and not self.weight_first(msa)

    def forward(self, msa, row_mask=None, onto=None):
        """The update of pair; with `onto`, (pair, msa)."""
        if onto is not None and self.takes(msa):
            return self.by_kernel(msa, row_mask, onto)
        update = self.by_library(msa, row_mask)
        return update if onto is None else (onto + update, msa)

    def by_kernel(self, msa, row_mask, onto):
        """(onto + update, msa)"""
        from evoformer_kernels import outer_product, outer_product_sides
        norm, output = self.layer_norm, self.output_proj
        if limits.fits("sides", msa, side=self.widths["left_proj"]):
            left, right, msa = outer_product_sides.sides(msa, norm.weight, norm.bias,
                                                         *self.packed(*self.SIDES), norm.eps)
        else:
            left, right = self.project(self.layer_norm(msa))
        left, rows = self.present(left, row_mask)
        product = partial(outer_product.outer_first, left, right, output.weight, output.bias,
                          recompute=self.plan.recompute)
        if row_mask is None:  # one divisor for all: the kernel divides, and adds
            return product(1 / (rows + 1e-3), onto), msa
        update = product()
        return onto + (update / (rows + 1e-3)).to(update.dtype), msa

    def products(self, left, right):
        """The plain ones; the outer product is recomputed if asked."""
        recompute = self.plan.recompute and not self.weight_first(right)
        return recomputed(recompute, super().products, left, right)


class TriangleMultiplicationTwin(SubLayerTwin):
    def takes(self, pair):
        return self.plan.triangle_multiplication and limits.fits("triangle multiplication", pair)

    def by_kernel(self, pair, seq_mask=None, drop=None):
        from evoformer_kernels.triangle_multiplication import function as kernels
        norm, center, output, gate = self.layer_norm, self.center_norm, self.output_proj, self.output_gate
        weights = kernels.Weights(
            norm.weight, norm.bias, *self.packed(*self.SIDES, *self.GATES), center.weight, center.bias,
            output.weight, output.bias, gate.weight, gate.bias)
        return kernels.triangle_multiplication(pair, weights, seq_mask, self.outgoing, norm.eps, pair, drop,
                                               self.plan.recompute)


# --- The block ------------------------------------------------------------------------------------------

TWINS = dict(  # by the plain class's name, because the model imports this module
    FusedMSARowAttention=RowAttentionTwin, FusedMSAColumnAttention=ColumnAttentionTwin,
    MSATransition=TransitionTwin, OuterProductMean=OuterProductMeanTwin,
    FusedTriangleMultiplication=TriangleMultiplicationTwin, FusedTriangleAttention=TriangleAttentionTwin,
    PairTransition=TransitionTwin)


@cache
def joined(twin, plain):
    """The plain class with its twin in front. One for all blocks: torch.compile compiles each class anew."""
    return type(f"Fast{plain.__name__.removeprefix('Fused')}", (twin, plain), {})


def wanted(fusion):
    """Whether a FusionConfig asks for twins."""
    return Plan.of(fusion) != Plan()


def make(plain, config, fusion, **kind):
    """A sub-layer of this class of the model, or of its twin."""
    chosen = joined(TWINS[plain.__name__], plain) if wanted(fusion) else plain
    return chosen(config, fusion, **kind)


def run_block(block, msa, pair, seq_mask, row_mask):
    """Alg. 6 with twins: sub-layers add to the residual, and two hand on what they read."""
    def with_dropout(layer, *inputs, onto):
        factors = partial(block.dropout_factors, dim=layer.dropout_dim)
        return layer(*inputs, onto=onto, dropout_factors=factors)

    msa, pair = with_dropout(block.msa_row_attention, msa, pair, seq_mask, onto=msa)
    msa = block.msa_column_attention(msa, row_mask, onto=msa)
    msa = block.msa_transition(msa, onto=msa)
    pair, msa = block.outer_product_mean(msa, row_mask, onto=pair)
    pair = with_dropout(block.triangle_mult_outgoing, pair, seq_mask, onto=pair)
    pair = with_dropout(block.triangle_mult_incoming, pair, seq_mask, onto=pair)
    pair = with_dropout(block.triangle_attn_starting, pair, seq_mask, onto=pair)
    pair = with_dropout(block.triangle_attn_ending, pair, seq_mask, onto=pair)
    pair = block.pair_transition(pair, onto=pair)
    return msa, pair


def keep_the_last(block):
    """With selective checkpointing the last block's last two sub-layers keep what backward needs. Backward
    begins with them: recomputing them lowers no peak, which comes while everything else is still kept."""
    for layer in (block.triangle_attn_ending, block.pair_transition):
        layer.plan = replace(layer.plan, recompute=False)


def compiler_options(fusion):
    """For torch.compile: it then knows our operators and, if fusion asks for that, makes small gradients and
    sums in few launches (reductions/compile_pass.py). {} without Triton."""
    if not limits.HAS_TRITON:
        return {}
    from evoformer_kernels.reductions.compile_pass import GatheredGradients
    return dict(post_grad_custom_post_pass=GatheredGradients(fusion.enable_triton_weight_gradients))
