"""What the lab asks of the Evoformer beside its numbers: PROGRAM in tiny_openfold_v2.py names these."""
import torch

from fusion_lab.kernels import dispatch
from fusion_lab.kernels.library import attention_choice
from fusion_lab.training.files import counted
from proteins.fast_evoformer import Plan


def defined(output, batch):
    """What a masked batch leaves defined of the model's output; the rest is 0."""
    seq_mask, row_mask = batch["seq_mask"], batch["row_mask"]
    pair = seq_mask[:, :, None] * seq_mask[:, None]  # (B, S, S)
    return dict(msa_repr=output["msa_repr"] * (row_mask[:, :, None] * seq_mask[:, None])[..., None],
                pair_repr=output["pair_repr"] * pair[..., None], distances=output["distances"] * pair,
                loss=output["loss"])


def move_kinks_away(model):
    """Inputs of ReLUs away from zero, half of the channels to either side: one that changes sign by rounding
    alone would change gradients by far more than rounding."""
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith("transition.linear1"):
                layer.bias[::2] += 8  # five standard deviations of the input
                layer.bias[1::2] -= 8


def attention_in_words(model, dtype=None):
    """Which kernels fused attention runs in training in this dtype (default: the weights')."""
    c, weight = model.config, model.distogram_head.weight
    msa_width, ours = c.msa_dim // c.msa_heads, Plan.of(model.fusion).attention
    kernels = attention_choice.in_words(
        model.fusion.attention_backend, ours, weight.is_cuda, dtype or weight.dtype,
        pair=(c.seq_len, c.pair_dim // c.pair_heads, True), rows=(c.seq_len, msa_width, True),
        columns=(c.num_seqs, msa_width, False))
    if "triton" in kernels:
        kernels += dispatch.projections_by_library(MSA=(c.msa_dim, c.msa_heads),
                                                   pair=(c.pair_dim, c.pair_heads))
    return kernels


def start_lines(trainer):
    """The model's part of the start-up lines."""
    c, model = trainer.settings.model, trainer.model
    counts = model.get_fusion_statistics()
    kernel = model.attention_kernel(trainer.amp_dtype)
    return dict(sizes=f"{counted(c.num_blocks, 'block')}, c_m {c.msa_dim}, c_z {c.pair_dim}, "
                f"heads {c.msa_heads} and {c.pair_heads}", remarks=dict(enable_flash_attention=kernel),
                last=f"Kernel Reduction: {counts['kernel_reduction_percent']}% "
                f"({counts['total_kernel_reduction']} fewer kernels) [nominal]")
