"""The world `natural`: its couplings, preferences, tree and gaps, and the batches of it."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.tiny import settings_of
from tiny_openfold.proteins import batches, coevolution, contacts, files, folds, natural


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


def test_couplings_are_of_two_sites_that_touch():
    """None of a site with itself, nor of two that are 8.5 Å apart or more."""
    distances = (6.0 * (torch.arange(8)[:, None] - torch.arange(8)).abs()).expand(2, 8, 8)
    draw = natural.Draw(torch.Generator().manual_seed(0))
    matrix = natural.couplings(draw, distances)
    strength = matrix.view(2, 8, 20, 8, 20).square().sum((0, 2, 4))
    assert torch.equal(matrix, matrix.mT) and strength.diagonal(1).any()
    assert not strength.triu(2).any() and not strength.diagonal().any()


def test_a_coupling_by_hand():
    """Nothing is drawn: hydrophobic letters seek their like, volumes and charges what they lack. Sites 0 and
    5 are near; 0 and 3 half so, and near along the chain."""
    def ones(*shape, **_):
        return torch.ones(shape)
    drawn = SimpleNamespace(uniform=torch.zeros, normal=ones, factor=ones)
    distances = torch.full((1, 8, 8), 100.0)
    distances[0, 0, 5], distances[0, 0, 3] = 6.0, 7.5
    matrix = natural.couplings(drawn, distances).view(8, 20, 8, 20)
    letters = np.array([natural.HYDROPHOBICITY, natural.VOLUME, natural.CHARGE]).T
    letters = (letters - letters.mean(0)) / letters.std(0)
    coupling = 0.6 * 0.45 * (letters * [1, -1, -1]) @ letters.T
    for site, share in ((5, 1), (3, 0.5 * 0.8)):
        assert matrix[0, :, site].numpy() == pytest.approx(share * coupling, abs=1e-5)
        assert torch.equal(matrix[site, :, 0], matrix[0, :, site].T)
    drawn.uniform = lambda *shape: torch.full(shape, 0.95)  # 90% of the contacts are coupled,
    assert not natural.couplings(drawn, distances).any()
    drawn.factor = lambda *shape, **_: torch.full(shape, 1.2)  # of some families all
    assert natural.couplings(drawn, distances).any()


def test_letters_are_drawn_by_their_probabilities():
    draw, shares = natural.Draw(torch.Generator().manual_seed(0)), torch.tensor([0.7, 0.2, 0.1])
    counts = draw.letters(shares.log().expand(20_000, 3)).bincount(minlength=3)
    assert (counts / 20_000).tolist() == pytest.approx(shares.tolist(), abs=0.015)


def test_rows_take_the_letters_drawn_as_often_as_they_accept_them():
    """Letter 7 is all but sure at every site; of three rows one accepts all, one half and one nothing."""
    draw = natural.Draw(torch.Generator().manual_seed(0))
    logits, before = torch.zeros(1, 1, 50, 20), torch.zeros(1, 3, 50, dtype=torch.long)
    logits[..., 7] = 50.0
    accepted = torch.tensor([1.0, 0.5, 0.0])[None, :, None]
    rows = natural.evolve(draw, before, 1, torch.zeros(1, 1000, 1000), logits, accepted)
    assert (rows == 7).sum(2)[0].tolist() == [20, pytest.approx(10, abs=6), 0]  # a sweep: 40% of the sites
    rows = natural.evolve(draw, before, 40, torch.zeros(1, 1000, 1000), logits, accepted)
    assert (rows == 7).sum(2).tolist() == [[50, 50, 0]]


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


def test_natural_batches_are_a_function_of_their_step():
    settings = settings_of(seq_len=12, extra_seqs=16, coevolution="couplings", synthetic_world="natural")
    source = batches.open_source(settings)
    first, again = source.batch(3), batches.open_source(settings).batch(3)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert first["extra_msa"].shape == (2, 16, 12) and first["extra_msa"].dtype == torch.uint8
    assert not torch.equal(first["coords"], source.batch(4)["coords"])
    depths = {int((batch["extra_msa"] != files.GAP).any(2).sum(1).max())
              for batch in map(source.batch, range(20))}
    assert depths == {4, 8, 16}  # never fewer rows than the MSA representation has
    held_out = {protein.name: batch for protein, batch in source.evaluation()["held_out"]}
    assert list(held_out) == [f"synthetic-{i}" for i in range(16)]


def test_held_out_folds_are_others_than_those_that_are_trained_on():
    source = batches.open_source(settings_of(seq_len=12, synthetic_world="natural"))
    held_out, world = list(source.evaluation()["held_out"]), source.world
    assert len(held_out) == 16 and world.unseen.made and not world.folds.made
    assert all((world.folds.chain(n)[:12] != chain[:12]).any() for n, chain in world.unseen.made.items())
