"""What a fold costs: distances of a distogram, and what physics adds that distances do not tell.

Every term is a function of atoms, differentiable, a sum for each structure of a batch. Distances are the
same in a mirror image. Chiral are the residues, which are rigid, and the Ramachandran plot; they tell the
hand. Letters in shapes: B structures, L residues, P pairs i < j. Lengths in Å, angles in radians; energies
in units of kT, so that -log of a probability is one.
"""
import math

import torch
from torch.autograd.function import once_differentiable

from tiny_openfold.proteins import geometry, orientations
from tiny_openfold.proteins.geometry import CA, CB, C, N

FLOOR = 1e-4     # of a bin's probability, so that no pair is ever impossible
LOCAL = 12       # residues apart, below which the mean of other pairs counts half
FARTHEST = 40    # residues apart; pairs beyond have one mean distribution
PEPTIDE = ((C, N, geometry.C_N, 0.02), (CA, N, geometry.CA_TO_N, 0.04), (C, CA, geometry.C_TO_CA, 0.04),
           (CA, CA, geometry.CA_TO_CA, 0.04))  # atom, atom of the next residue, Å, their deviation
PLANAR = 30.0    # of 1 + cos omega: 10 degrees cost half of it in kT
STIFFNESS = 20.0  # kT / Å^2 of atoms that are too near
NEAR = 9.0       # Å between CA atoms beyond which no two backbones can clash
APART = 3        # residues along the chain from which on atoms clash; bonds see to nearer ones
# Nearest that two atoms come, Å, in the order of geometry.ATOMS. In 151 chains of the PDB 0.2% of the atoms
# of near residues are nearer.
TOUCH = torch.tensor([[3.9, 3.9, 3.4, 2.6, 3.5], [3.9, 4.0, 3.9, 3.0, 3.4], [3.4, 3.9, 4.1, 3.2, 3.4],
                      [2.6, 3.0, 3.2, 3.0, 2.7], [3.5, 3.4, 3.4, 2.7, 3.2]])

# Ramachandran plots as sums of von Mises distributions: share, phi and psi in degrees, how narrow each is.
# Fitted (expectation maximisation) to the chains of the PDB that geometry.py's lengths are from.
RAMACHANDRAN = {
    "G": ((0.344, 85, 7, 14.1, 9.5), (0.171, -178, 179, 3.0, 6.2), (0.151, -62, -40, 60.0, 39.9),
          (0.130, -88, 163, 9.1, 4.4), (0.123, 81, -161, 9.0, 3.1), (0.082, -90, -5, 6.5, 4.8)),
    "P": ((0.562, -66, 147, 33.1, 18.4), (0.325, -59, -31, 57.8, 29.1), (0.112, -77, 15, 13.1, 1.5)),
    "": ((0.358, -63, -42, 60.0, 60.0), (0.286, -111, 133, 7.7, 7.0), (0.117, -100, -6, 9.9, 4.6),
         (0.083, -68, 140, 33.0, 19.0), (0.065, -72, -20, 50.1, 46.1), (0.065, -145, 157, 17.8, 19.3),
         (0.026, 59, 35, 21.4, 2.6))}  # "": all others


def ramachandran(phi, psi, sequence):
    """-log of the probability density of each pair of angles (B, L), (B,); sequence: L amino acids."""
    total = 0
    for kind, parts in RAMACHANDRAN.items():
        where = [i for i, letter in enumerate(sequence) if kind == (letter if letter in RAMACHANDRAN else "")]
        if where:
            share, *centre, narrow_phi, narrow_psi = torch.tensor(parts, dtype=phi.dtype, device=phi.device).T
            phi_0, psi_0 = (angle.deg2rad() for angle in centre)
            areas = (2 * math.pi * torch.special.i0e(narrow) for narrow in (narrow_phi, narrow_psi))
            normal = share.log() - sum(area.log() for area in areas)
            heights = (normal + narrow_phi * ((phi[:, where, None] - phi_0).cos() - 1)
                       + narrow_psi * ((psi[:, where, None] - psi_0).cos() - 1))
            total = total - heights.logsumexp(-1).sum(-1)
    return total


def anchor(atoms, sequence):
    """(B, L, 3) the atom that a distogram is about: CB, CA for glycine. atoms (B, L, 5, 3)."""
    glycine = torch.tensor([letter == "G" for letter in sequence], device=atoms.device)
    return torch.where(glycine[:, None], atoms[..., CA, :], atoms[..., CB, :])


def separation(apart, size):
    """Residues apart, cut where few pairs of a chain of this size have one mean."""
    most = min(FARTHEST, size // 3)
    return apart.clamp(-most, most)


def mean_power(apart):
    """Exponent (P, 1) of the mean distribution for pairs so many residues apart (P,). For near pairs the mean
    has half weight; otherwise the signal of helices would cancel out."""
    return torch.where(apart.abs() < LOCAL, 0.5, 1.0)[:, None]


def interpolated(table, x):
    """(values, slopes) of a table (..., bins) at x (B, ...), in bins from the centre of the first: linear
    between centres, constant outside."""
    bins = table.shape[-1]
    inside = x.clamp(0, bins - 1)
    low = inside.detach().long().clamp_(max=bins - 2)
    row = torch.arange(0, table.numel(), bins, device=x.device).view(table.shape[:-1])
    index, flat = (low + row).flatten(), table.flatten()
    left, right = (flat.index_select(0, place).view(x.shape) for place in (index, index + 1))
    slope = right - left
    return left + slope * (inside - low), slope * (inside == x)


class PairwiseEnergy(torch.autograd.Function):
    """(B,) sum over pairs of a function of their distance: points (B, L, any), function: d (B, L, L) ->
    (values, slopes), both symmetric, 0 on the diagonal. The gradient is a product of matrices: autograd's
    additions pair by pair took most of the time."""

    @staticmethod
    def forward(ctx, points, function):
        d = torch.cdist(points, points)
        values, slopes = function(d)
        ctx.save_for_backward(points, slopes.to(points.dtype) / d.clamp(min=1e-3))
        return values.sum((1, 2)) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        points, slope_over_d = ctx.saved_tensors
        pull = slope_over_d * gradient[:, None, None]
        return pull.sum(-1, keepdim=True) * points - pull @ points, None


class Distances:
    """The distogram as a potential: minus the logarithm of each bin's odds against the mean distribution at
    that separation, linear between bin centres, flat outside."""

    def __init__(self, probability, centres):
        """probability (L, L, bins), centres (bins,) Å, evenly spaced."""
        size = len(probability)
        i, j = torch.triu_indices(size, size, 1, device=probability.device)
        p, along = probability[i, j], j - i
        apart = separation(along, size)
        counts = torch.bincount(apart, minlength=FARTHEST + 1).clamp(min=1)
        mean = p.new_zeros(FARTHEST + 1, p.shape[1]).index_add_(0, apart, p) / counts[:, None]
        table = mean_power(along) * (mean[apart] + FLOOR).log() - (p + FLOOR).log()  # (P, bins)
        self.table = p.new_zeros(size, size, p.shape[1])  # 0 for a residue and itself
        self.table[i, j] = self.table[j, i] = table
        self.first_centre, self.width = float(centres[0]), float(centres[1] - centres[0])

    def __call__(self, points):
        """points (B, L, 3 or more) -> (B,)"""
        return PairwiseEnergy.apply(points, self.energy_and_slope)

    def energy_and_slope(self, d):
        values, slopes = interpolated(self.table, (d - self.first_centre) / self.width)
        return values, slopes / self.width


class Orientations:
    """Omega, theta and phi as a potential: minus the logarithm of each bin's odds if the residues are near,
    times the probability that they are; linear between bin centres, round for dihedral angles."""

    def __init__(self, probabilities):
        """probabilities {name: (L, L, bins)} as in orientations.py."""
        size = len(probabilities["omega"])
        place = torch.arange(size)
        along = (place[:, None] - place).flatten()
        apart = separation(along, size) + FARTHEST
        self.tables = {}
        for name, p in probabilities.items():
            p = (p[..., 1:] * (1 - torch.eye(size)[..., None])).flatten(0, 1)  # (L * L, bins)
            near = p.sum(1, keepdim=True)
            mean = p.new_zeros(2 * FARTHEST + 1, p.shape[1]).index_add_(0, apart, p)
            mean = mean / (mean.sum(1, keepdim=True) + FLOOR)
            odds = (p / (near + FLOOR) + FLOOR).log() - mean_power(along) * (mean[apart] + FLOOR).log()
            table = -near * odds * (0.5 if name == "omega" else 1)  # omega stands twice in the plane
            before, after = (0, -1) if name == "phi" else (-1, 0)  # bins beyond the first and the last
            table = torch.cat([table[:, before, None], table, table[:, after, None]], 1)
            self.tables[name] = table.view(size, size, -1)

    def __call__(self, atoms):
        """atoms (B, L, 5, 3) -> (B,)"""
        total = atoms.new_zeros(len(atoms))
        for name, angle in orientations.between(*(atoms[..., atom, :] for atom in (N, CA, CB))).items():
            x = (angle - orientations.FIRST[name]) / orientations.WIDTH + 0.5
            total = total + interpolated(self.tables[name], x)[0].sum((-1, -2))
        return total


def peptide_bonds(atoms):
    """Lengths, angles and planes between residues and the next, (B,). All bonds are trans."""
    total = atoms.new_zeros(len(atoms))
    for a, b, length, deviation in PEPTIDE:
        d = (atoms[:, :-1, a] - atoms[:, 1:, b]).square().sum(-1).add(1e-6).sqrt()
        total = total + ((d - length) / deviation).square().sum(-1) / 2
    return total + PLANAR * (1 + geometry.backbone_angles(atoms)[2].cos()).sum(-1)


def near_pairs(atoms):
    """(b, i, j) of residues of one structure, APART or more, that may touch."""
    ca = atoms[:, :, CA].detach()
    near = (torch.cdist(ca, ca) < NEAR).triu(APART)
    return near.nonzero(as_tuple=True)


def overlaps(atoms, pairs, sequence=None):
    """How far atoms of these pairs are nearer than they may be, Å, (pairs, 5, 5). Glycine has no CB."""
    b, i, j = pairs
    d = (atoms[b, i][:, :, None] - atoms[b, j][:, None]).square().sum(-1).add(1e-6).sqrt()
    over = (TOUCH.to(d) - d).relu()
    if sequence is not None:
        has = torch.ones(len(sequence), 5, dtype=d.dtype, device=d.device)
        has[[k for k, letter in enumerate(sequence) if letter == "G"], CB] = 0
        over = over * has[i][:, :, None] * has[j][:, None]
    return over


def clashes(atoms, pairs, sequence=None):
    """(B,)"""
    cost = STIFFNESS * overlaps(atoms, pairs, sequence).square().sum((-1, -2))
    return cost.new_zeros(len(atoms)).index_add_(0, pairs[0], cost)


def crowding(points, least=3.9):
    """Repulsion of one point for each residue, two or more apart, (B,); points (B, L, any)."""
    place = torch.arange(points.shape[1], device=points.device)
    counts = ((place[:, None] - place).abs() > 1).to(points.dtype)

    def energy_and_slope(d):
        over = (least - d).relu() * counts
        return over.square(), -2 * over
    return PairwiseEnergy.apply(points, energy_and_slope)
