"""A head for how residues are turned to each other: logits of omega, theta, phi from the pair representation,
and their loss (trRosetta: Yang et al. 2020, doi:10.1073/pnas.1914677117). The angles and their bins are those
of orientations.py.

The true bins of a batch are made beside the training, on the CPU and in float32 (bins_of). So no angle is
computed in low precision, and a step stays one CUDA graph.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from fusion_lab.kernels.precision import at_least_float32
from tiny_openfold.proteins import orientations
from tiny_openfold.proteins.orientations import BINS, UNKNOWN

ORIENTATION_WEIGHT = 0.3  # of the sum of three cross entropies, beside the distogram's
SPARE = -sum(BINS.values()) % 8  # outputs that nothing reads: fast GEMMs want a multiple of 8


class OrientationHead(nn.Module):
    """One linear layer for all three angles. Omega is the same from both sides, so its logits are those of
    (i, j) and (j, i) added. It begins at zero: every bin is equally probable."""

    def __init__(self, channels):
        super().__init__()
        self.projection = nn.Linear(channels, sum(BINS.values()) + SPARE)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, pair, bins=None, only_loss=False):
        """pair (B, S, S, c_z); bins (B, S, S, 3), UNKNOWN where nothing is known. Returns a dict: unless
        only_loss, logits omega, theta, phi (B, S, S, bins); with bins, orientation_loss, 0 where none is
        known."""
        logits = self.projection(pair)
        logits = logits.to(at_least_float32(logits.dtype))
        omega, theta, phi, _ = logits.split([*BINS.values(), SPARE], dim=-1)
        found = dict(omega=omega + omega.transpose(1, 2), theta=theta, phi=phi)
        losses = {}
        if bins is not None:
            bins = bins.long()
            nll = sum(F.cross_entropy(angle.flatten(0, 2), bins[..., i].flatten(), ignore_index=UNKNOWN,
                                      reduction="none").view(bins.shape[:3])
                      for i, angle in enumerate(found.values()))
            known = (bins[..., 0] >= 0).to(nll.dtype)  # the same pairs for all three
            losses["orientation_loss"] = mean(nll.sum(-1), known.sum(-1))
        return losses if only_loss else found | losses


def mean(nll, asked):
    """A loss over what is asked for; 0 where nothing is."""
    return nll.sum() / asked.sum().clamp(min=1)


def bins_of(backbone):
    """int8 bins (..., S, S, 3) of omega, theta, phi, for atoms N, CA, C (..., S, 3, 3) in Å, NaN where there
    is none. CB stands where L-amino acids have it, for glycine, too."""
    n, ca, c = torch.as_tensor(backbone).unbind(-2)
    found = orientations.targets(n, ca, orientations.beta(n, ca, c))
    return torch.stack(list(found.values()), dim=-1).to(torch.int8)
