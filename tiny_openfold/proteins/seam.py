"""What the lab asks of the Evoformer beside its numbers."""
import torch

from fusion_lab.training.program import Model
from fusion_lab.training.words import counted
from tiny_openfold.layers import attention_choice, kernel_switches
from tiny_openfold.proteins import costs
from tiny_openfold.proteins.fast_evoformer import Plan
from tiny_openfold.proteins.options import arithmetic_of


class EvoformerForLab(Model):
    """The methods of a Model beside those that compute, for TinyOpenFoldV2."""

    def sublayers(self):
        blocks = [] if self.fusion.enable_torch_compile else self.blocks
        return [(name, getattr(block, name)) for block in blocks for name in self.SUBLAYERS]

    def for_loss(self, **batch):
        return self(**batch, only_loss=True)

    def defined(self, output, batch):
        seq_mask, row_mask = batch["seq_mask"], batch["row_mask"]
        pair = seq_mask[:, :, None] * seq_mask[:, None]  # (B, S, S)
        return dict(msa_repr=output["msa_repr"] * (row_mask[:, :, None] * seq_mask[:, None])[..., None],
                    pair_repr=output["pair_repr"] * pair[..., None], distances=output["distances"] * pair,
                    loss=output["loss"])

    def shake(self):
        """Half of the inputs of ReLUs to either side of zero: one that changes sign by rounding alone would
        change gradients by far more than rounding."""
        with torch.no_grad():
            for name, layer in self.named_modules():
                if name.endswith("transition.linear1"):
                    layer.bias[::2] += 8  # five standard deviations of the input
                    layer.bias[1::2] -= 8

    def count_as(self, training, on_gpu):
        for block in self.blocks:
            block.outer_product_mean.counted_as = (arithmetic_of(training, on_gpu),)

    def costs(self, training):
        return costs.costs(self.config, self.fusion, training)

    @staticmethod
    def least_bytes(settings):
        return costs.least_bytes(settings)

    def statistics(self):
        return costs.statistics(self.fusion, self.config.num_blocks)

    get_fusion_statistics = statistics  # by the name that users know

    def in_words(self, dtype):
        c, counts = self.config, self.statistics()
        return dict(sizes=f"{counted(c.num_blocks, 'block')}, c_m {c.msa_dim}, c_z {c.pair_dim}, "
                    f"heads {c.msa_heads} and {c.pair_heads}",
                    remarks=dict(enable_flash_attention=self.attention_kernel(dtype)),
                    last=f"Kernel Reduction: {counts['kernel_reduction_percent']}% "
                    f"({counts['total_kernel_reduction']} fewer kernels) [nominal]")

    def attention_kernel(self, dtype=None):
        """Which kernels fused attention runs in training in this dtype (default: the weights')."""
        c, weight = self.config, self.distogram_head.weight
        msa_width, ours = c.msa_dim // c.msa_heads, Plan.of(self.fusion).attention
        kernels = attention_choice.in_words(
            self.fusion.attention_backend, ours, weight.is_cuda, dtype or weight.dtype,
            pair=(c.seq_len, c.pair_dim // c.pair_heads, True), rows=(c.seq_len, msa_width, True),
            columns=(c.num_seqs, msa_width, False))
        if kernels.startswith("math on CPU"):
            kernels += "; less memory: --attention-backend sdpa"
        if "triton" in kernels:
            kernels += kernel_switches.projections_by_library(MSA=(c.msa_dim, c.msa_heads),
                                                     pair=(c.pair_dim, c.pair_heads))
        return kernels
