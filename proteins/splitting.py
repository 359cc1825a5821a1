"""One sample over several ranks (--sequence-parallel): what of it the model does not do itself.

Dynamic axial parallelism (Cheng et al. 2022, FastFold, arXiv:2203.00854). Every rank is given the whole
batch, which is small, and makes its own columns of the alignment's representation and its own rows of the
pairs'. Samples that cannot be split evenly are padded with missing residues.
"""
from functools import partial

import torch
import torch.nn.functional as F

from fusion_lab.kernels.exchanges import Ranks
from proteins.files import GAP

# What stands in the missing residues of each entry of a batch, along its last dimension or that of residues.
MISSING = dict(msa_tokens=GAP, target_tokens=GAP, extra_msa=GAP, seq_mask=0, msa_targets=-100, coord_mask=0,
               coords=0)
WHOLE_PAIRS = ("outer_product_mean", "triangle_mult_outgoing", "triangle_mult_incoming")  # Triton's


def split_over(model, group):
    """From now on the ranks of this process group share every sample that they give their copies of model."""
    ranks = Ranks.of(group)
    for module in model.modules():
        if hasattr(module, "ranks"):
            module.ranks = ranks
    for block in model.blocks:
        for name in WHOLE_PAIRS:
            getattr(block, name).triton = False
    model.forward = partial(forward, ranks, model.forward)
    return ranks


def forward(ranks, own_forward, **batch):
    """A model's forward for samples of any length. Where no loss is asked for, distances and contacts are
    whole on every rank; all other tensors are a rank's own part, padded."""
    residues = batch["msa_tokens"].shape[2]
    output = own_forward(**padded(batch, -residues % ranks.size))
    if "loss" in output:
        return output
    return output | {key: ranks.gather(output[key], 1)[:, :residues, :residues]
                     for key in ("distances", "contact_probability")}


def padded(batch, missing):
    """The batch with so many missing residues more."""
    if not missing:
        return batch
    batch = {key: value for key, value in batch.items() if value is not None}
    batch.setdefault("seq_mask", torch.ones_like(batch["msa_tokens"][:, 0], dtype=torch.float32))
    return {key: F.pad(value, [0, 0] * (key == "coords") + [0, missing], value=MISSING[key])
            if key in MISSING else value for key, value in batch.items()}
