"""The world `natural`: its couplings, preferences, tree and gaps, and the batches of it."""
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
