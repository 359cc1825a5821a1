"""One sample over several ranks (--sequence-parallel): what of it the model does not do itself.

Dynamic axial parallelism (Cheng et al. 2022, FastFold, arXiv:2203.00854). Every rank is given the whole
batch, which is small, and makes its own columns of the alignment's representation and its own rows of the
pairs'. Samples that cannot be split evenly are padded with missing residues.
"""
import torch
import torch.nn.functional as F

from fusion_lab.kernels.library.exchanges import Ranks
from proteins import fast_evoformer
from proteins.files import GAP
from proteins.orientations import BINS, UNKNOWN

# What pads each entry of a batch, along its dimension of residues
PADDING = dict(msa_tokens=GAP, target_tokens=GAP, extra_msa=GAP, seq_mask=0, msa_targets=-100, coord_mask=0,
               coords=0, orientations=UNKNOWN)


def split_over(model, group):
    """From now on the ranks of this process group share every sample that they give their copies of model."""
    ranks = Ranks.of(group)
    for block in model.blocks:
        fast_evoformer.swap_in_twins(block, model.fusion, ranks)
    fast_evoformer.exempt_the_last(model)  # anew, as all plans are
    fast_evoformer.swap_in(model, SplitModel)
    model.ranks = ranks
    return ranks


class SplitModel:
    """A twin of the model (fast_evoformer.py) of which each rank has its columns of msa and rows of pair."""

    def forward(self, msa_tokens, **batch):
        """For samples of any length. Where no loss is asked for, distances, contacts and orientations are
        whole on every rank; all other tensors are a rank's own part, padded."""
        residues = msa_tokens.shape[2]
        output = super().forward(**padded(dict(batch, msa_tokens=msa_tokens), -residues % self.ranks.size))
        if "loss" in output:
            return output
        return output | {key: self.ranks.gather(output[key], 1)[:, :residues, :residues]
                         for key in ("distances", "contact_probability", *BINS) if key in output}

    def embed(self, msa_tokens, target, features=None):
        msa, pair = super().embed(msa_tokens, target, features)
        return self.ranks.own(msa, 2), self.ranks.own(pair, 1)  # (B, N, S / K, c_m), (B, S / K, S, c_z)

    def heads(self, msa, pair, msa_targets, coords, coord_mask, only_loss=False, orientations=None):
        own = None if msa_targets is None else self.ranks.own(msa_targets, 2)
        turned = None if orientations is None else self.ranks.own(orientations, 1)
        return super().heads(msa, pair, own, coords, coord_mask, only_loss, turned)

    def symmetric(self, logits):
        return logits + self.ranks.reshard(logits, 1, 2).transpose(1, 2)

    def distogram_targets(self, coords, coord_mask):
        return [self.ranks.own(whole, 1) for whole in super().distogram_targets(coords, coord_mask)]

    def mean(self, nll, asked):
        return self.ranks.sum(nll.sum()) / self.ranks.sum(asked.sum()).clamp(min=1)


def padded(batch, missing):
    """The batch with so many missing residues more."""
    if not missing:
        return batch
    batch = {key: value for key, value in batch.items() if value is not None}
    batch.setdefault("seq_mask", torch.ones_like(batch["msa_tokens"][:, 0], dtype=torch.float32))
    places = dict(coords=(0, 0, 0, missing), orientations=(0, 0, 0, missing, 0, missing))
    return {key: F.pad(value, places.get(key, (0, missing)), value=PADDING[key]) if key in PADDING else value
            for key, value in batch.items()}
