"""How two residues stand to each other: the angles of trRosetta (Yang et al. 2020,
doi:10.1073/pnas.1914677117).

    found = between(n, ca, cb)                 # dict of omega, theta, phi, (L, L) each, radians
    bins = targets(n, ca, cb)                  # dict of the same names, (L, L) each, for cross entropy

With CB-CB distances, omega, theta and phi of (i, j) and of (j, i) say where the frame of j stands in that of
i. Omega is the same from both sides; theta and phi are not. Mirror images have the opposite omega and theta.
Letters in shapes: ... any batch, L residues. Lengths in Å.
"""
import math

import torch

from proteins import geometry

FAR = 20.0                    # Å between CB atoms; bin 0 is that far or farther
WIDTH = math.radians(15)      # of all other bins
FIRST = dict(omega=-math.pi, theta=-math.pi, phi=0.0)  # lower edge of bin 1
BINS = dict(omega=25, theta=25, phi=13)                # bin 0 among them
UNKNOWN = -100                # what cross entropy leaves out


def beta(n, ca, c):
    """CB (..., L, 3) where L-amino acids have it, for glycine, too; of N, CA, C (..., L, 3)."""
    rotation, place = geometry.frames_of(n, ca, c)
    return place + rotation @ geometry.ideal_residue(place.dtype)[3].to(place.device)


def between(n, ca, cb):
    """{name: angles (..., L, L) in radians} from i (row) to j (column) of atoms (..., L, 3): omega, the
    dihedral angle CA_i CB_i CB_j CA_j; theta, N_i CA_i CB_i CB_j; phi, the angle CA_i CB_i CB_j from 0 to pi.
    The diagonal means nothing."""
    n, ca_i, cb_i = (atom.unsqueeze(-2) for atom in (n, ca, cb))  # (..., L, 1, 3)
    ca_j, cb_j = ca.unsqueeze(-3), cb.unsqueeze(-3)               # (..., 1, L, 3)
    return of_pairs(n, ca_i, cb_i, ca_j, cb_j)


def of_pairs(n, ca, cb, ca_j, cb_j):
    """The same of pairs: N, CA, CB of i and CA, CB of j, (..., 3) each -> {name: (...)}."""
    back, away = ca - cb, cb_j - cb
    return dict(omega=geometry.dihedral(ca, cb, cb_j, ca_j), theta=geometry.dihedral(n, ca, cb, cb_j),
                phi=torch.atan2(torch.linalg.cross(back, away).norm(dim=-1), (back * away).sum(-1)))


def targets(n, ca, cb):
    """{name: bins (..., L, L), integers} of atoms (..., L, 3), Å. UNKNOWN on the diagonal and where an atom
    is not finite."""
    apart = (cb.unsqueeze(-2) - cb.unsqueeze(-3)).norm(dim=-1)
    itself = torch.eye(cb.shape[-2], dtype=torch.bool, device=cb.device)
    bins = {}
    for name, angle in between(n, ca, cb).items():
        unknown = itself | ~(apart + angle).isfinite()
        inside = 1 + ((angle.nan_to_num() - FIRST[name]) / WIDTH).floor().long().clamp(0, BINS[name] - 2)
        bins[name] = torch.where(apart < FAR, inside, 0).masked_fill(unknown, UNKNOWN)
    return bins
