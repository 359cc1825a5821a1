"""The world `natural`: its couplings, preferences, tree and gaps."""

import numpy as np
import pytest
import torch

from tiny_openfold.proteins import coevolution, contacts, files, folds, natural


def test_natural_alignments_covary_where_residues_touch():
    source, rng = folds.Folds(0, 64), np.random.default_rng(1)
    coords = torch.from_numpy(np.stack([source.piece(rng) for _ in range(4)]))

    def alignments(seed, rows, samples=4):
        return natural.natural_alignments(torch.Generator().manual_seed(seed), coords[:samples], rows)
    msa = alignments(0, 300)
    assert msa.shape == (4, 300, 64) and not (msa[:, 0] == files.GAP).any()
    assert set(msa.unique().tolist()) == {*range(20), files.GAP}
    assert 0.005 < (msa == files.GAP).float().mean() < 0.25
    above = []
    for one, xyz in zip(msa.numpy().astype(np.uint8), coords, strict=True):
        found = contacts.contact_precision(coevolution.mean_field_dca(one), xyz, torch.ones(64))
        above.append(found["p_l2"] / found["chance"])
    assert np.mean(above) > 3  # times as often in contact as pairs at random
    few = alignments(0, 5, 1)
    assert torch.equal(few, alignments(0, 5, 1)) and not torch.equal(few, alignments(1, 5, 1))


def test_couplings_lie_on_contacts_and_are_symmetric():
    coords = torch.from_numpy(folds.Folds(0, 24).piece(np.random.default_rng(0)))[None]
    distances = torch.cdist(coords, coords)
    matrix = natural.couplings(natural.Draw(torch.Generator().manual_seed(0)), distances)[0]
    assert torch.equal(matrix, matrix.T)
    tables = matrix.unflatten(0, (24, 20)).unflatten(2, (24, 20)).transpose(1, 2)  # (S, S, A, A)
    strong = tables.abs().amax((2, 3)) > 0
    assert not (strong & (distances[0] >= natural.FAR)).any() and not strong.diagonal().any()
    assert strong.sum() > 0.3 * (distances[0] < natural.NEAR).fill_diagonal_(False).sum()
    assert tables.sum(2).abs().max() < 1e-4 and tables.sum(3).abs().max() < 1e-4


@pytest.fixture
def draw():
    return natural.Draw(torch.Generator().manual_seed(0))


def test_sweeps_draw_a_share_of_the_sites_and_follow_preferences_and_couplings(draw):
    rows, coupling = torch.zeros(1, 6, 10, dtype=torch.long), torch.zeros(1, 200, 200)
    logits = torch.zeros(1, 1, 10, 20)
    logits[..., 7] = 100.0

    def evolved(sweeps, accepted):
        return natural.evolve(draw, rows, sweeps, coupling, logits, accepted)
    assert torch.equal(evolved(0, 1.0), rows) and torch.equal(evolved(9, 0.0), rows)
    once = evolved(1, 1.0) == 7
    assert (once.sum(2) == 4).all() and (once == once[:, :1]).all()  # the same sites of all rows
    assert (evolved(30, 1.0) == 7).all()
    assert 1000 < sum((evolved(1, 0.5) == 7).sum() for _ in range(100)) < 1400  # of 2400
    coupling[0, 3 * 20 + 7, 5 * 20 + 2] = 300.0  # a 7 at site 3 asks for a 2 at site 5
    found = evolved(60, 1.0)
    assert (found[..., 5] == 2).all() and (found[..., :5] == 7).all() and (found[..., 6:] == 7).all()


@pytest.mark.gpu
def test_the_world_in_a_cuda_graph_follows_its_seed():
    coords = torch.randn(2, 32, 3).cumsum(1) * 3
    world = natural.GraphedWorld(torch.device("cuda"), coords, 16)
    first = world(1, coords).clone()
    assert first.shape == (2, 16, 32) and first.max() <= files.GAP and (first[:, 0] < files.GAP).all()
    assert not torch.equal(world(2, coords), first)
    assert torch.equal(world(1, coords), first)
    alone = natural.natural_alignments(torch.Generator("cuda").manual_seed(1), coords.cuda(), 16)
    assert alone.shape == first.shape and not torch.equal(world(1, coords.flip(0)), first)
