"""Geometry of a protein's backbone: rigid frames, ideal residues, dihedral angles. Plain torch.

A residue is a frame, as in AlphaFold 2 (supplement 1.8.1): a rotation and the place of its CA. Bond lengths
and angles within it are ideal, so its CB stands where L-amino acids have it, whatever an optimiser does.
Letters in shapes: ... any batch, L residues. Lengths in Å, angles in radians.
"""
import math

import torch

N, CA, C, O, CB = range(5)  # noqa: E741  the name of the atom
ATOMS = ("N", "CA", "C", "O", "CB")

# Medians over 335,006 residues of 2,514 chains of the PDB, beside the values of Engh and Huber (1991,
# doi:10.1107/S0108767391001071), which lie within 0.01 Å and 1 degree of them.
N_CA, CA_C, C_N, C_O, CA_CB = 1.459, 1.525, 1.330, 1.232, 1.531
ANGLE_N_CA_C, ANGLE_CA_C_N, ANGLE_C_N_CA, ANGLE_CA_C_O = map(math.radians, (111.1, 116.6, 121.6, 120.5))
ANGLE_N_CA_CB, TURN_OF_CB = math.radians(110.4), math.radians(-122.4)  # the dihedral angle C, N, CA, CB


def opposite(a, b, angle):
    """The third side of a triangle."""
    return math.sqrt(a * a + b * b - 2 * a * b * math.cos(angle))


CA_TO_N, C_TO_CA = opposite(CA_C, C_N, ANGLE_CA_C_N), opposite(C_N, N_CA, ANGLE_C_N_CA)  # of the next residue
CA_TO_CA = 3.806  # of a trans peptide


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def placed(a, b, c, length, angle, dihedral):
    """The atom d behind c: |cd| = length, angle bcd, dihedral angle abcd (natural extension of a chain:
    Parsons et al. 2005, doi:10.1002/jcc.20237). a, b, c (..., 3); angle and dihedral are numbers or (...)."""
    angle, dihedral = (torch.as_tensor(x, dtype=c.dtype, device=c.device) for x in (angle, dihedral))
    along = unit(c - b)
    normal = unit(torch.linalg.cross(b - a, along))
    within = torch.linalg.cross(normal, along)
    return c + length * (-along * angle.cos()[..., None]
                         + (within * dihedral.cos()[..., None] + normal * dihedral.sin()[..., None])
                         * angle.sin()[..., None])


def dihedral(a, b, c, d):
    """The angle between the planes abc and bcd, (-pi, pi], of points (..., 3). Positive where d is turned
    to the right of a, seen from b to c (IUPAC)."""
    axis = unit(c - b)
    before, after = a - b, d - c
    before = before - (before * axis).sum(-1, keepdim=True) * axis
    after = after - (after * axis).sum(-1, keepdim=True) * axis
    return torch.atan2((torch.linalg.cross(axis, before) * after).sum(-1), (before * after).sum(-1))


def ideal_residue(dtype=torch.float32):
    """(4, 3) N, CA, C, CB of an L-amino acid in its own frame: CA at 0, C on x, N in the plane of x and y."""
    ca = torch.zeros(3, dtype=torch.float64)
    c = torch.tensor([CA_C, 0.0, 0.0], dtype=torch.float64)
    n = N_CA * torch.tensor([math.cos(ANGLE_N_CA_C), math.sin(ANGLE_N_CA_C), 0.0], dtype=torch.float64)
    cb = placed(c, n, ca, CA_CB, ANGLE_N_CA_CB, TURN_OF_CB)
    return torch.stack([n, ca, c, cb]).to(dtype)


def rotations(first, second):
    """Rotation matrices (..., 3, 3) whose columns are first, made a unit, second, made normal to it, and
    their cross product (Gram and Schmidt; AlphaFold 2's Alg. 21). first, second (..., 3), not parallel."""
    x = unit(first)
    y = unit(second - (second * x).sum(-1, keepdim=True) * x)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def backbone(rotation, place):
    """Frames, rotation (..., L, 3, 3) and place (..., L, 3), -> atoms (..., L, 5, 3) in the order of ATOMS. O
    lies in the plane of the bond to the next N; in the last residue as in a strand."""
    local = ideal_residue(place.dtype).to(place.device)
    n, ca, c, cb = (place + rotation @ atom for atom in local)
    end = placed(n, ca, c, C_N, ANGLE_CA_C_N, math.radians(140))[..., -1:, :]
    following = torch.cat([n[..., 1:, :], end], dim=-2)
    return torch.stack([n, ca, c, oxygen(ca, c, following), cb], dim=-2)


def oxygen(ca, c, following):
    """O (..., 3) of a carbonyl: in the plane of CA, C and the next N, on the far side of both."""
    along = unit(c - ca)
    aside = following - c
    aside = unit(aside - (aside * along).sum(-1, keepdim=True) * along)
    return c + C_O * (-math.cos(ANGLE_CA_C_O) * along - math.sin(ANGLE_CA_C_O) * aside)


def frames_of(n, ca, c):
    """(rotation (..., 3, 3), place (..., 3)) of residues with these atoms (..., 3)."""
    return rotations(c - ca, n - ca), ca


def extended(phi, psi, omega=math.pi):
    """Atoms (..., L, 5, 3) of an ideal chain from its angles, (..., L): each atom is placed behind the three
    before it. For chains that are made up; an optimiser moves frames, which do not wait for each other."""
    n = torch.zeros(*phi.shape[:-1], 3, dtype=phi.dtype, device=phi.device)
    ca = n + torch.tensor([N_CA, 0, 0], dtype=phi.dtype, device=phi.device)
    before = n + torch.tensor([0.0, 1.0, 0.0], dtype=phi.dtype, device=phi.device)
    atoms = []
    for residue in range(phi.shape[-1]):
        c = placed(before, n, ca, CA_C, ANGLE_N_CA_C, phi[..., residue])
        atoms.append((n, ca, c))
        following = placed(n, ca, c, C_N, ANGLE_CA_C_N, psi[..., residue])
        before, n, ca = c, following, placed(ca, c, following, N_CA, ANGLE_C_N_CA, omega)
    n, ca, c = (torch.stack(kind, dim=-2) for kind in zip(*atoms, strict=True))
    return backbone(*frames_of(n, ca, c))


def backbone_angles(atoms):
    """phi, psi, omega of atoms (..., L, >=3, 3), each (..., L - 1): phi of residues 2 to L, psi of 1 to L -
    1, omega of the bond behind residues 1 to L - 1."""
    n, ca, c = (atoms[..., atom, :] for atom in (N, CA, C))
    phi = dihedral(c[..., :-1, :], n[..., 1:, :], ca[..., 1:, :], c[..., 1:, :])
    psi = dihedral(n[..., :-1, :], ca[..., :-1, :], c[..., :-1, :], n[..., 1:, :])
    omega = dihedral(ca[..., :-1, :], c[..., :-1, :], n[..., 1:, :], ca[..., 1:, :])
    return phi, psi, omega


def scaled(distances, dimensions):
    """Points (L, dimensions) with about these distances (L, L), of either hand: multidimensional scaling
    (Torgerson 1952, doi:10.1007/BF02288916). The diagonal is 0."""
    size = len(distances)
    centring = torch.eye(size, dtype=distances.dtype) - 1 / size
    values, vectors = torch.linalg.eigh(-0.5 * centring @ distances.square() @ centring)
    most = min(dimensions, size)
    points = vectors[:, -most:].flip(1) * values[-most:].flip(0).clamp(min=0).sqrt()
    return torch.nn.functional.pad(points, (0, dimensions - most))
