"""From a distogram to atoms: folds that are known come back, with the right hand, whole and free of
clashes."""
import threading

import pytest
import torch

from tests.proteins.folds_at_hand import (
    CENTRES,
    SEQUENCE,
    a_fold,
    certain,
    certain_orientations,
    chain,
    chirality,
)
from tiny_openfold.proteins import fold_energy, folding, geometry
from tiny_openfold.proteins.structure_metrics import compared


@pytest.fixture
def quick(monkeypatch):
    for name, value in dict(TRACES=4, CHOSEN=2, TRACE_STEPS=60, FOLD_STEPS=180).items():
        monkeypatch.setattr(folding, name, value)


def test_a_known_fold_comes_back_and_not_its_mirror_image(quick):
    true = a_fold()
    found = folding.folded(certain(true, SEQUENCE), CENTRES, SEQUENCE)
    atoms = found.atoms.double()
    scores = compared(atoms[:, 1].numpy(), true[:, 1].numpy())
    image = compared((atoms[:, 1] * torch.tensor([1, 1, -1])).numpy(), true[:, 1].numpy())
    assert scores["tm_score"] > 0.6 > image["tm_score"] and scores["lddt_ca"] > 0.85 and scores["rmsd"] < 1.5
    assert (chirality(atoms) > 2).all() and found.gap > 0.2
    phi, psi, omega = (angle.rad2deg() for angle in geometry.backbone_angles(atoms))
    assert (phi[1:9] < -30).all() and (psi[1:9] < 0).all() and (omega.abs() > 150).all()
    bonds = (atoms[:-1, 2] - atoms[1:, 0]).norm(dim=-1)
    assert bonds.tolist() == pytest.approx([geometry.C_N] * len(bonds), abs=0.05)
    assert fold_energy.overlaps(atoms[None], fold_energy.near_pairs(atoms[None]), SEQUENCE).max() < 0.4
    assert found.energy == pytest.approx(sum(found.terms.values()), abs=1e-4)


def test_orientations_make_a_fold_of_a_blurred_distogram(quick):
    true, given = a_fold(), (certain(a_fold(), SEQUENCE, deviation=4.0), CENTRES, SEQUENCE)
    without = folding.folded(*given)
    found = folding.folded(*given, orientations=certain_orientations(true))
    before, after = (compared(fold.atoms[:, 1].double().numpy(), true[:, 1].numpy())
                     for fold in (without, found))
    assert after["tm_score"] > max(0.8, before["tm_score"] + 0.2) and after["lddt_ca"] > before["lddt_ca"]
    assert found.gap > without.gap + 5 and "orientations" not in without.terms


@pytest.mark.parametrize("size, starts, folded", [(100, 16, 8), (300, 8, 8), (1000, 2, 2)])
def test_long_chains_have_fewer_starts(size, starts, folded, monkeypatch):
    """As many as 400,000 pairs of residues allow, 2 at least; four at most are folded on, by both hands."""
    asked = []
    monkeypatch.setattr(folding, "spread", lambda p, centres, starts, _: asked.append(starts) or p.new_zeros(
        starts, size, folding.DIMENSIONS))
    monkeypatch.setattr(folding, "fold_traces", lambda _, points, told: (points, points.sum((1, 2))))
    monkeypatch.setattr(folding, "fold_frames", lambda _, traces, **given: traces)
    monkeypatch.setattr(folding, "best_of", lambda _, atoms, *given: len(atoms))
    monkeypatch.setattr(folding, "DIMENSIONS", 3)
    assert folding.folded(torch.zeros(size, size, 2), CENTRES[:2], "A" * size) == folded
    assert asked == [starts]


@pytest.mark.parametrize("fails", [0, 3])
def test_an_error_in_either_half_is_raised_and_one_here_waits_for_no_other(fails):
    never, ended = threading.Event(), []

    def work(half):
        if half[0] == fails:
            raise ArithmeticError("lost")
        ended.append(fails == 0 or never.wait(timeout=20))
        return half
    with pytest.raises(ArithmeticError, match="lost"):
        folding.by_halves(work, torch.arange(6))
    assert ended == [True] * (fails == 0)
    never.set()


def test_a_seed_is_a_fold_on_any_number_of_threads(quick):
    logits, before, found = certain(a_fold(), SEQUENCE)[:9, :9], torch.get_num_threads(), []
    try:
        for threads, seed in ((1, 1), (2, 1), (2, 2)):
            torch.set_num_threads(threads)
            found.append(folding.folded(logits, CENTRES, SEQUENCE[:9], seed).atoms)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, two, other = found
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_frames_begin_on_the_trace_with_their_side_chains_outwards():
    strand = fold_energy.anchor(chain([(-120, 130)] * 9)[None], "A" * 9)
    rotation, place = folding.frames_along(strand)
    atoms = geometry.backbone(rotation, place)
    assert (atoms[..., 4, :] - strand).abs().max() < 1e-5
    wild, _ = folding.frames_along(3 * torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(wild.det(), torch.ones(4, 9))  # turned, never mirrored
    along = strand[:, 2:] - strand[:, :-2]
    assert ((atoms[:, 1:-1, 2] - atoms[:, 1:-1, 0]) * along > 0).any(-1).all()
    outwards = 2 * strand[:, 1:-1] - strand[:, :-2] - strand[:, 2:]
    assert (((atoms[:, 1:-1, 4] - atoms[:, 1:-1, 1]) * outwards).sum(-1) > 0).all()


def test_chosen_is_what_costs_least_with_its_hand():
    potential = fold_energy.Distances(certain(a_fold(), SEQUENCE).softmax(-1), CENTRES)
    left = chain([(62, 43)] * 24)
    image = torch.stack([left, left, a_fold(), left]).float()
    found = folding.best_of(potential, image, SEQUENCE)
    assert torch.equal(found.atoms, image[2])
    hands = [folding.best_of(potential, image[k:k + 2], SEQUENCE).energy for k in (0, 2)]
    assert found.gap > 1 and [found.energy + found.gap, found.energy] == pytest.approx(hands, abs=1e-5)
    assert torch.equal(folding.best_of(potential, image.flip(0), SEQUENCE).atoms, image[2])
