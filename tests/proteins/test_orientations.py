"""Orientations between residues: against a chain of known angles, their symmetry, bins, mirror images."""
import math

import numpy as np
import pytest
import torch

from tiny_openfold.proteins import geometry, orientations
from tiny_openfold.proteins.geometry import CA, CB, C, N


@pytest.fixture
def atoms():
    angles = torch.deg2rad(torch.empty(2, 30, dtype=torch.float64).uniform_(
        -180, 180, generator=torch.Generator().manual_seed(1)))
    return geometry.extended(*angles)


def of(atoms):
    return orientations.between(*(atoms[..., atom, :] for atom in (N, CA, CB)))


def test_orientations_put_the_other_residue_back_where_it_is(atoms):
    """CB_j follows from CB_i by distance, theta and phi; CA_j from omega, and phi of (j, i)."""
    found = of(atoms)
    i, j = 3, 17
    n, ca, cb = (atoms[i, atom] for atom in (N, CA, CB))
    away = (atoms[j, CB] - cb).norm()
    cb_j = geometry.placed(n, ca, cb, away, found["phi"][i, j], found["theta"][i, j])
    ca_j = geometry.placed(ca, cb, cb_j, geometry.CA_CB, found["phi"][j, i], found["omega"][i, j])
    torch.testing.assert_close(cb_j, atoms[j, CB])
    torch.testing.assert_close(ca_j, atoms[j, CA])
    torch.testing.assert_close(found["omega"], found["omega"].T)
    assert (found["theta"] - found["theta"].T).abs().max() > 1


def test_orientations_change_sign_in_a_mirror(atoms):
    found, image = of(atoms), of(atoms * torch.tensor([1, 1, -1]))
    off = ~torch.eye(len(atoms), dtype=torch.bool)
    for name, sign in (("omega", -1), ("theta", -1), ("phi", 1)):
        torch.testing.assert_close(image[name][off], sign * found[name][off])


def test_orientations_have_the_gradients_of_float64(atoms):
    part = atoms[:5].clone().requires_grad_()
    off = ~torch.eye(5, dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda x: [angle[off].sin() for angle in of(x).values()], part)
    single = atoms.float().requires_grad_()  # the diagonal, too, has a finite gradient
    sum(angle.sum() for angle in of(single).values()).backward()
    assert single.grad.isfinite().all()


def test_a_residue_straight_ahead_has_a_finite_gradient():
    """There theta means nothing, and the root in phi has no slope."""
    cb = torch.tensor([[1.5, 0, 0], [6.5, 0, 0]], dtype=torch.float64, requires_grad=True)
    ca, n = (cb.detach() + torch.tensor(by) for by in ([-1.5, 0, 0], [-2.0, 1.3, 0]))
    angles = orientations.between(n, ca, cb)
    assert angles["phi"][0, 1].item() == pytest.approx(math.pi, abs=1e-4)
    angles["phi"][0, 1].backward()
    assert cb.grad.isfinite().all()


def test_bins_hold_their_angles(atoms):
    angles, atoms = of(atoms), atoms.clone()
    atoms[5] = math.nan
    bins = orientations.targets(*(atoms[:, atom] for atom in (N, CA, CB)))
    apart = torch.cdist(atoms[:, CB], atoms[:, CB])
    unknown = torch.eye(len(atoms), dtype=torch.bool) | ~apart.isfinite()
    for name, angle in angles.items():
        assert torch.equal(bins[name] == orientations.UNKNOWN, unknown)
        assert torch.equal(bins[name][~unknown] == 0, apart[~unknown] >= 20)
        near = ~unknown & (apart < 20)
        first = 0 if name == "phi" else -180
        expected = np.floor((angle[near].rad2deg().numpy() - first) / 15) + 1
        assert np.array_equal(bins[name][near].numpy(), expected)
        assert bins[name].max() < orientations.BINS[name]


def test_beta_is_where_the_ideal_residue_has_it(atoms):
    torch.testing.assert_close(orientations.beta(*(atoms[:, atom] for atom in (N, CA, C))), atoms[:, CB])
