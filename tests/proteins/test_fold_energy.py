"""What a fold costs: each term by hand, gradients against finite differences, what turning and mirroring
change."""
import itertools
import math

import numpy as np
import pytest
import torch

from tests.proteins.folds_at_hand import (
    CENTRES,
    SEQUENCE,
    a_fold,
    certain,
    certain_orientations,
    chain,
    turned,
)
from tiny_openfold.proteins import fold_energy as e
from tiny_openfold.proteins import folding, orientations
from tiny_openfold.proteins.geometry import CA, CB, C, N


def terms(atoms, sequence=SEQUENCE, true=None, angles=None):
    potential = e.Distances(certain(a_fold() if true is None else true, sequence).softmax(-1), CENTRES)
    return folding.terms(potential, atoms, sequence, e.near_pairs(atoms), angles)


def oriented(atoms):
    return e.Orientations({name: x.double().softmax(-1) for name, x in certain_orientations(atoms).items()})


def test_turning_and_moving_change_nothing_and_mirroring_does():
    atoms = a_fold()[None]
    found, moved, mirrored = (terms(x, angles=oriented(a_fold())) for x in (
        atoms, turned(atoms), atoms * torch.tensor([1, 1, -1])))
    for name, value in found.items():
        assert moved[name].item() == pytest.approx(value.item(), abs=1e-6), name
        if name not in ("plot", "orientations"):
            assert mirrored[name].item() == pytest.approx(value.item(), abs=1e-6), name
    assert mirrored["plot"].item() > found["plot"].item() + len(SEQUENCE)
    assert mirrored["orientations"].item() > found["orientations"].item() + 5 * len(SEQUENCE)


def test_a_batch_is_its_structures():
    both = torch.stack([a_fold(), chain([(-120, 130)] * len(SEQUENCE))])
    angles = oriented(a_fold())
    found, alone = terms(both, angles=angles), [terms(atoms[None], angles=angles) for atoms in both]
    for name, value in found.items():
        assert value.tolist() == pytest.approx([one[name].item() for one in alone], abs=1e-6), name


def test_distances_and_orientations_weigh_20_kt_for_each_residue():
    atoms, angles = a_fold()[None], oriented(a_fold())
    potential = e.Distances(certain(a_fold(), SEQUENCE).softmax(-1), CENTRES)
    found = terms(atoms, angles=angles)
    assert found["distances"].item() == pytest.approx(20 / 24 * potential(e.anchor(atoms, SEQUENCE)).item())
    assert found["orientations"].item() == pytest.approx(20 / 24 * angles(atoms).item())


@pytest.mark.parametrize("name", ["distances", "orientations", "peptide", "plot", "clashes"])
def test_gradients_are_those_of_finite_differences(name):
    generator = torch.Generator().manual_seed(0)
    sequence, true = "AGPVLK", chain([(-60, -45), (-120, 130)] * 3)
    atoms = (true + 0.3 * torch.randn(true.shape, generator=generator, dtype=torch.float64))[None]
    if name == "clashes":
        atoms = atoms * 0.7  # too near
    potential = e.Distances(certain(true, sequence).softmax(-1), CENTRES)
    pairs = e.near_pairs(atoms)

    def energy(x):
        return folding.terms(potential, x, sequence, pairs, oriented(true))[name].sum()

    atoms.requires_grad_()
    gradient, = torch.autograd.grad(energy(atoms), atoms)
    assert gradient.abs().max() > 0.1
    step = 1e-6
    with torch.no_grad():
        for place in ((0, 0, 2, 0), (0, 1, 1, 1), (0, 2, 0, 2), (0, 4, 4, 1), (0, 5, 1, 0)):
            by = torch.zeros_like(atoms)
            by[place] = step
            measured = (energy(atoms + by) - energy(atoms - by)).item() / (2 * step)
            assert gradient[place].item() == pytest.approx(measured, rel=1e-4, abs=1e-4), place


def like(i, j, size):
    """Ordered pairs whose mean (i, j) is compared with: as far apart, or, as it is, a third of the chain."""
    def cut(apart):
        return max(-(size // 3), min(apart, size // 3))
    return [(k, m) for k, m in itertools.permutations(range(size), 2) if cut(m - k) == cut(j - i)]


def test_distances_are_odds_against_the_mean_at_that_separation(monkeypatch):
    monkeypatch.setattr(e, "LOCAL", 2)
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(7, 7, len(CENTRES), generator=generator, dtype=torch.float64).softmax(-1)
    p = (p + p.transpose(0, 1)) / 2
    points = torch.zeros(1, 7, 3, dtype=torch.float64)
    points[0, :, 0] = torch.tensor([0, 2.4, 5.0, 7.31, 9.9, 40.0, 80.0])
    total, grid = 0.0, CENTRES.numpy()
    for i in range(7):
        for j in range(i + 1, 7):
            mean = np.mean([p[k, m].numpy() for k, m in like(i, j, 7) if k < m], axis=0)
            odds = (0.5 if j - i < 2 else 1) * np.log(mean + 1e-4) - np.log(p[i, j].numpy() + 1e-4)
            total += np.interp((points[0, j, 0] - points[0, i, 0]).item(), grid, odds)
    assert e.Distances(p, CENTRES)(points).item() == pytest.approx(total, abs=1e-4)


def test_orientations_are_odds_against_the_mean_at_that_separation(monkeypatch):
    """Times the chance that the two are near; half of it for omega, which both sides have alike."""
    monkeypatch.setattr(e, "LOCAL", 2)
    generator = torch.Generator().manual_seed(4)
    p = {name: torch.randn(7, 7, count, generator=generator, dtype=torch.float64).softmax(-1)
         for name, count in orientations.BINS.items()}
    atoms = chain([(-60, -45), (-120, 130), (-100, 0), (60, 40), (-120, 130), (-60, -45), (-70, 140)])
    total = 0.0
    for name, angle in orientations.between(*(atoms[:, atom] for atom in (N, CA, CB))).items():
        centres = orientations.FIRST[name] + math.radians(15) * (np.arange(p[name].shape[-1] - 1) + 0.5)
        for i, j in itertools.permutations(range(7), 2):
            own = p[name][i, j, 1:].numpy()  # bin 0 is far
            mean = sum(p[name][k, m, 1:].numpy() for k, m in like(i, j, 7))
            odds = np.log(own / (own.sum() + 1e-4) + 1e-4) - (0.5 if abs(j - i) < 2 else 1) * np.log(
                mean / (mean.sum() + 1e-4) + 1e-4)
            around = {} if name == "phi" else dict(period=2 * math.pi)
            share = own.sum() * (0.5 if name == "omega" else 1)
            total -= share * np.interp(angle[i, j].item(), centres, odds, **around)
    assert e.Orientations(p)(atoms[None]).item() == pytest.approx(total, abs=1e-4)


def test_the_plot_is_a_density_and_knows_glycine_and_proline():
    grid = torch.deg2rad(torch.arange(-180.0, 180.0, 2.0, dtype=torch.float64))
    phi, psi = (x.reshape(-1, 1) for x in torch.meshgrid(grid, grid, indexing="ij"))
    area = math.radians(2) ** 2
    costs = {letter: e.ramachandran(phi, psi, letter) for letter in "AGPX"}
    for letter, cost in costs.items():
        assert (-cost).exp().sum().item() * area == pytest.approx(1, abs=2e-3), letter
    assert torch.equal(costs["A"], costs["X"])
    angles = torch.deg2rad(torch.tensor([[-63.0], [60.0], [85.0], [-120.0]], dtype=torch.float64))
    others = torch.deg2rad(torch.tensor([[-42.0], [42.0], [7.0], [130.0]], dtype=torch.float64))
    a, g, p = (e.ramachandran(angles, others, letter).tolist() for letter in "AGP")
    assert a[1] > a[0] + 4 and a[0] < a[3] < a[1]      # the left-handed helix is rare
    assert g[2] < a[2] - 2 and p[3] > a[3] + 2         # but for glycine; proline's phi is near -65
    both = e.ramachandran(angles[:2].T, others[:2].T, "AG")
    assert both.item() == pytest.approx(a[0] + g[1])


def test_the_plot_is_that_of_the_residue_whose_angles_these_are():
    atoms = chain([(-60, -45)] * 3 + [(85, 7)] + [(-60, -45)] * 3)  # rare in the middle, but for glycine
    plots = [terms(atoms[None], "A" * k + "G" + "A" * (6 - k), atoms)["plot"].item() for k in range(7)]
    assert min(plots) == plots[3] < plots[2] - 2


def test_whole_chains_have_whole_bonds():
    atoms = chain([(-60, -45)] * 8)[None]
    assert e.peptide_bonds(atoms).item() < 0.1
    broken = atoms.clone()
    broken[:, 4:] += torch.tensor([0.1, 0, 0])
    stretched = [((broken[0, 3, a] - broken[0, 4, b]).norm() - (atoms[0, 3, a] - atoms[0, 4, b]).norm()) / by
                 for a, b, by in ((C, N, 0.02), (CA, N, 0.04), (C, CA, 0.04), (CA, CA, 0.04))]
    expected = sum(x.item() ** 2 for x in stretched) / 2
    assert e.peptide_bonds(broken).item() == pytest.approx(expected, rel=0.05) and expected > 1
    cis = chain([(-60, -45)] * 8, omega=0.0)[None]
    assert e.peptide_bonds(cis).item() > 7 * e.PLANAR


def test_clashes_are_of_atoms_that_are_too_near():
    strand = chain([(-120, 130)] * 8)
    pair = torch.stack([torch.cat([strand, strand + torch.tensor([0, 0, far])]) for far in (30.0, 1.0)])
    pairs = e.near_pairs(pair)
    assert ((pairs[2] - pairs[1]) >= 3).all() and set(pairs[0].tolist()) == {1}
    ca = pair[pairs[0], pairs[1], CA] - pair[pairs[0], pairs[2], CA]
    assert (ca.norm(dim=-1) < e.NEAR).all()
    free, clashing = e.clashes(pair, pairs).tolist()
    assert free == 0 < 100 < clashing
    ones = torch.zeros(1, 3, 5, 3)
    ones[0, 0], ones[0, 1], ones[0, 2] = 0, 50, 100
    ones += torch.arange(5)[:, None] * 20.0
    ones[0, 2, CB] = ones[0, 0, N] + torch.tensor([2.0, 0, 0])
    one = (torch.tensor([0]), torch.tensor([0]), torch.tensor([2]))
    over = e.overlaps(ones, one)
    assert over[0, N, CB].item() == pytest.approx(e.TOUCH[N, CB].item() - 2, abs=1e-4)
    assert over.sum().item() == over[0, N, CB].item() and e.overlaps(ones, one, "AAG").sum() == 0
    cost = e.STIFFNESS * (e.TOUCH[N, CB].item() - 2) ** 2
    assert e.clashes(ones, one).item() == pytest.approx(cost, rel=1e-3)
    assert torch.equal(e.TOUCH, e.TOUCH.T)


def test_a_table_is_linear_between_its_centres_and_flat_outside():
    values, slopes = e.interpolated(torch.tensor([1.0, 3.0, 7.0]), torch.tensor(-1.0))
    assert (values.item(), slopes.item()) == (1, 0)
    three = torch.tensor([1.0, 3.0, 7.0]).expand(3, 3)
    values, slopes = e.interpolated(three, torch.tensor([[0.5, 1.5, 2.5]]))
    assert values.tolist() == [[2, 5, 7]] and slopes.tolist() == [[2, 4, 0]]
