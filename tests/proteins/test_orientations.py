"""Orientations between residues: against a chain of known angles, mirror images, bins; the head that predicts
them: its loss against a hand count, gradients, files, training."""
import math

import numpy as np
import pytest
import torch

import tiny_openfold_v2 as tof
from fusion_lab.training.models import read_model
from tests.proteins.folds_at_hand import a_fold
from tests.proteins.test_batches import family, real
from tests.tiny import model_of, save_model, settings_of
from tiny_openfold.proteins import geometry, orientations
from tiny_openfold.proteins.geometry import CA, CB, N
from tiny_openfold.proteins.orientations import BINS, IGNORED, OrientationHead, bins_of, orientation_loss


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


def test_bins_hold_their_angles(atoms):
    angles, atoms = of(atoms), atoms.clone()
    atoms[5] = math.nan
    bins = orientations.targets(*(atoms[:, atom] for atom in (N, CA, CB)))
    apart = torch.cdist(atoms[:, CB], atoms[:, CB])
    unknown = torch.eye(len(atoms), dtype=torch.bool) | ~apart.isfinite()
    for name, angle in angles.items():
        assert torch.equal(bins[name] == orientations.IGNORED, unknown)
        assert torch.equal(bins[name][~unknown] == 0, apart[~unknown] >= 20)
        near = ~unknown & (apart < 20)
        first = 0 if name == "phi" else -180
        expected = np.floor((angle[near].rad2deg().numpy() - first) / 15) + 1
        assert np.array_equal(bins[name][near].numpy(), expected)
        assert bins[name].max() < orientations.BINS[name]
    assert torch.equal(bins_of(atoms[:, :3]).long(), torch.stack([*bins.values()], dim=-1))  # by its own CB


def test_half_a_turn_lies_in_the_last_bin():
    """CA, CB, CB, CA in one plane, on opposite sides."""
    n, ca = torch.tensor([[-1.0, 1, 1], [5, -1, 1]]), torch.tensor([[0, 1.5, 0], [4, -1.5, 0]])
    bins = orientations.targets(n, ca, torch.tensor([[0.0, 0, 0], [4, 0, 0]]))
    assert bins["omega"][0, 1] == bins["omega"][1, 0] == orientations.BINS["omega"] - 1


# --- The head -------------------------------------------------------------------------------------------

def test_loss_against_a_hand_count():
    """One channel a bin; of three residues one has no backbone, so two pairs count."""
    head, pair = OrientationHead(63), torch.zeros(1, 3, 3, 63)
    with torch.no_grad():
        head.projection.weight[:63] = torch.eye(63)
    bins = torch.full((1, 3, 3, 3), IGNORED)
    bins[0, 0, 1], bins[0, 1, 0] = torch.tensor([2, 5, 0]), torch.tensor([2, 24, 12])
    pair[0, 0, 1, 2] = math.log(4)        # omega, from one side: it counts for both
    pair[0, 0, 1, 25 + 5] = math.log(2)   # theta of (0, 1), not of (1, 0)
    pair[0, 1, 0, 50 + 12] = math.log(3)  # phi of (1, 0)
    pair[0, 2] = torch.arange(63.0)       # of pairs that nobody knows
    found, loss = head(pair), orientation_loss(head(pair), bins)
    omega, theta, phi = 2 * math.log(28 / 4), math.log(26 / 2) + math.log(25), math.log(13) + math.log(15 / 3)
    assert loss.value.item() == pytest.approx((omega + theta + phi) / 2, rel=1e-5) and loss.count == 2
    assert {name: found[name].shape[-1] for name in BINS} == BINS
    assert torch.equal(found["omega"], found["omega"].transpose(1, 2))
    assert found["theta"][0, 0, 1].argmax() == 5 and found["theta"][0, 1, 0].abs().max() == 0
    nobody = orientation_loss(head(pair.requires_grad_()), torch.full_like(bins, IGNORED)).value
    nobody.backward()
    assert nobody.item() == 0 and pair.grad.abs().max() == 0  # a batch without a known pair costs nothing


def test_the_model_adds_a_weighted_term_that_ranks_can_weigh():
    model = model_of(orientations=True)
    batch = tof.PROGRAM.data(settings_of(orientations=True)).check_batch()
    found = model(**batch)
    parts = [found["distogram_loss"], 0.3 * found["orientation_loss"],
             0.1 * found["masked_msa_loss"]]
    assert found["orientation_loss"].item() == pytest.approx(2 * math.log(25) + math.log(13))
    torch.testing.assert_close([loss.weighted() for loss in found["losses"].values()], parts)
    torch.testing.assert_close(found["loss"], sum(parts))
    counts = [loss.count for loss in found["losses"].values()]
    assert counts == [8 ** 2 + 6 ** 2, 8 ** 2 + 6 ** 2, (batch["msa_targets"] >= 0).sum()]
    del batch["orientations"]
    without = model(**batch)  # which works, too
    torch.testing.assert_close(without["loss"], found["distogram_loss"] + parts[2])


def test_without_the_flag_nothing_is_added_and_files_of_both_kinds_load(tmp_path):
    plain, wide = model_of(), model_of(orientations=True)
    extra = {"orientation_head.projection.weight", "orientation_head.projection.bias"}
    assert set(wide.state_dict()) - set(plain.state_dict()) == extra
    for name, model in (("plain", plain), ("wide", wide)):
        save_model(tmp_path / name, model, {})
        assert read_model(tmp_path / name, tof.PROGRAM).config.orientations is (name == "wide")


# --- Real proteins -----------------------------------------------------------------------

def test_real_proteins_give_bins_of_their_crop():
    protein = family(length=20, unseen=[4])
    protein.backbone = a_fold()[:20, :4].float().numpy()
    protein.backbone[4] = np.nan
    source = real([protein], orientations=True, batch_size=1)
    batch = source.batch(0)
    seen = int(batch["coord_mask"][0].argmax())  # residue s of the chain stands at x = s
    start = int(batch["coords"][0, seen, 0]) - seen
    expected = bins_of(protein.backbone[start:start + 8, :3])
    assert torch.equal(batch["orientations"][0], expected) and (expected >= 0).any()
    assert all("orientations" not in batch for group in source.evaluation().values() for _, batch in group)
