"""How two residues stand to each other: the angles of trRosetta (Yang et al. 2020,
doi:10.1073/pnas.1914677117), and the head that predicts them from the pair representation.

    angles = between(n, ca, cb)                 # dict of omega, theta, phi, (L, L) each, radians
    bins = targets(n, ca, cb)                  # dict of the same names, (L, L) each, for cross entropy

With CB-CB distances, omega, theta and phi of (i, j) and of (j, i) say where the frame of j stands in that of
i. Omega is the same from both sides; theta and phi are not. Mirror images have the opposite omega and theta.
The true bins of a batch are made beside the training, on the CPU and in float32 (bins_of). So no angle is
computed in low precision, and a step stays one CUDA graph. Letters in shapes: ... any batch, L residues.
Lengths in Å.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from evoformer_kernels.precision import at_least_float32
from fusion_lab.training.program import Loss

FAR = 20.0                    # Å between CB atoms; bin 0 is that far or farther
WIDTH = math.radians(15)      # of all other bins
FIRST = dict(omega=-math.pi, theta=-math.pi, phi=0.0)  # lower edge of bin 1
BINS = dict(omega=25, theta=25, phi=13)                # bin 0 among them
IGNORED = -100                # what cross entropy leaves out
ORIENTATION_WEIGHT = 0.3  # of the sum of three cross entropies, beside the distogram's
SPARE = -sum(BINS.values()) % 8  # outputs that nothing reads: fast GEMMs want a multiple of 8


def beta(n, ca, c):
    """CB (..., L, 3) where L-amino acids have it, for glycine, too; of N, CA, C (..., L, 3)."""
    from tiny_openfold.proteins import geometry  # which the head does not need
    rotation, place = geometry.frames_of(n, ca, c)
    return place + rotation @ geometry.ideal_residue(place.dtype)[3].to(place.device)


def between(n, ca, cb):
    """{name: angles (..., L, L) in radians} from i (row) to j (column) of atoms (..., L, 3): omega, the
    dihedral angle CA_i CB_i CB_j CA_j; theta, N_i CA_i CB_i CB_j; phi, the angle CA_i CB_i CB_j from 0 to pi.
    Atoms are finite; the diagonal means nothing. Products of matrices, because optimisers ask often."""
    from tiny_openfold.proteins import geometry
    axes = geometry.rotations(ca - cb, n - ca).movedim(-1, -3)  # (..., 3, L, 3): to CA, towards N, normal
    cb = cb - cb.mean(-2, keepdim=True)  # far from 0 the differences of products lose digits
    v = axes @ cb.unsqueeze(-3).mT - (axes * cb.unsqueeze(-3)).sum(-1, keepdim=True)
    v = v + torch.eye(v.shape[-1]).to(v)  # (..., 3, L, L): CB_j in the axes of i; anything for i itself
    u = axes @ axes[..., 0, :, :].unsqueeze(-3).mT  # (..., 3, L, L): the first axis of j in those of i
    (vx, vy, vz), (ux, uy, uz) = v.unbind(-3), u.unbind(-3)
    aside = vy * vy + vz * vz + 1e-9  # the root's gradient is finite at 0
    square = vx * vx + aside
    return dict(omega=torch.atan2(square.sqrt() * (vz * uy - vy * uz), square * ux + vx * vx.mT),
                theta=torch.atan2(-vz, vy), phi=torch.atan2(aside.sqrt(), vx))


def targets(n, ca, cb):
    """{name: bins (..., L, L), integers} of atoms (..., L, 3), Å; cb from beta(), as folds have it. IGNORED
    on the diagonal and where an atom is not finite."""
    known = torch.stack([n, ca, cb]).isfinite().all(-1).all(0)
    n, ca, cb = (atom.nan_to_num(0.0, 0.0, 0.0) for atom in (n, ca, cb))
    itself = torch.eye(cb.shape[-2], dtype=torch.bool, device=cb.device)
    unknown = itself | ~(known.unsqueeze(-1) & known.unsqueeze(-2))
    near = (cb.unsqueeze(-2) - cb.unsqueeze(-3)).norm(dim=-1) < FAR
    bins = {}
    for name, angle in between(n, ca, cb).items():
        inside = 1 + ((angle - FIRST[name]) / WIDTH).floor().long().clamp(0, BINS[name] - 2)
        bins[name] = torch.where(near, inside, 0).masked_fill(unknown, IGNORED)
    return bins


class OrientationHead(nn.Module):
    """One linear layer for all three angles. Omega is the same from both sides, so its logits are those of
    (i, j) and (j, i) added. It begins at zero: every bin is equally probable."""

    def __init__(self, channels):
        super().__init__()
        self.projection = nn.Linear(channels, sum(BINS.values()) + SPARE)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, pair):
        """pair (B, S, S, c_z) -> {omega, theta, phi: logits (B, S, S, bins)}."""
        logits = self.projection(pair)
        logits = logits.to(at_least_float32(logits.dtype))
        omega, theta, phi, _ = logits.split([*BINS.values(), SPARE], dim=-1)
        return dict(omega=omega + omega.transpose(1, 2), theta=theta, phi=phi)


def orientation_loss(angles, bins):
    """The sum of three cross entropies, a mean over the pairs that are known, as a Loss. angles: the head's
    logits; bins (B, S, S, 3), IGNORED where nothing is known."""
    bins = bins.long()
    nll = sum(F.cross_entropy(logits.flatten(0, 2), bins[..., i].flatten(), ignore_index=IGNORED,
                              reduction="none").view(bins.shape[:3])
              for i, logits in enumerate(angles.values()))
    known = (bins[..., 0] >= 0).to(nll.dtype)  # the same pairs for all three
    return mean(nll.sum(-1), known.sum(-1), ORIENTATION_WEIGHT)


def mean(nll, asked, weight=1):
    """The Loss over what is asked for; 0 where nothing is."""
    count = asked.sum()
    return Loss(nll.sum() / count.clamp(min=1), count, weight)


def bins_of(backbone):
    """int8 bins (..., S, S, 3) of omega, theta, phi, for atoms N, CA, C (..., S, 3, 3) in Å, NaN where there
    is none. CB stands where L-amino acids have it, for glycine, too."""
    n, ca, c = torch.as_tensor(backbone).unbind(-2)
    bins = targets(n, ca, beta(n, ca, c))
    return torch.stack(list(bins.values()), dim=-1).to(torch.int8)
