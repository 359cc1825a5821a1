"""Folds made up for tests of --fold: chains from angles, and distograms that are sure of them."""
import math

import torch
from torch.nn.functional import one_hot

from tiny_openfold.proteins import geometry, orientations
from tiny_openfold.proteins.fold_energy import anchor
from tiny_openfold.proteins.geometry import CA, CB, C, N
from tiny_openfold_v2 import DISTANCE_CENTRES

CENTRES = torch.tensor(DISTANCE_CENTRES, dtype=torch.float32)
SEQUENCE = "MKALEELLKKAGVDPEKLLKALEK"  # two helices and a turn


def chain(angles, omega=math.pi):
    """Atoms (L, 5, 3), float64, from [(phi, psi)] in degrees."""
    phi, psi = torch.tensor(angles, dtype=torch.float64).T.deg2rad()
    return geometry.extended(phi, psi, omega)


def a_fold():
    """Two right-handed helices packed by a turn, as long as SEQUENCE."""
    return chain([(-62, -43)] * 11 + [(60, 30), (-90, 120), (-100, 100)] + [(-62, -43)] * 10)


def certain(atoms, sequence, deviation=0.6):
    """Logits (L, L, bins) of a distogram that knows this fold."""
    points = anchor(atoms[None], sequence)[0]
    away = torch.cdist(points, points)[..., None] - CENTRES.to(points)
    return -(away.clamp(min=-30) / deviation).square() / 2


def certain_orientations(atoms):
    """Logits of orientations of whoever knows this fold: all but certain of the right bins."""
    bins = orientations.targets(*(atoms[:, atom] for atom in (N, CA, CB)))
    return {name: 8.0 * one_hot(bins[name].clamp(min=0), count) for name, count in orientations.BINS.items()}


def turned(atoms):
    """The same fold elsewhere."""
    generator = torch.Generator().manual_seed(5)
    turn = geometry.rotations(*torch.randn(2, 3, generator=generator, dtype=atoms.dtype))
    return atoms @ turn.T + torch.tensor([5.0, -7.0, 11.0], dtype=atoms.dtype)


def chirality(atoms):
    """Signed volume (N-CA, C-CA, CB-CA), (..., L), Å^3: positive, about 2.5, in L-amino acids."""
    n, ca, c, cb = (atoms[..., atom, :] for atom in (N, CA, C, CB))
    return (torch.linalg.cross(n - ca, c - ca) * (cb - ca)).sum(-1)
