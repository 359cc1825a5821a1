"""The world `natural`: its couplings, preferences, tree and gaps."""
import math

import numpy as np
import pytest
import torch

from tiny_openfold.proteins import coevolution, contacts, files, folds, natural


def test_tables_of_amino_acids_have_their_published_order_and_sum():
    for name, order, total in (("HYDROPHOBICITY", "IVLFCMAGTSWYPHDENQKR", -9.8),
                               ("VOLUME", "WYFRKILMHQVETNPDCSAG", 2825.2),
                               ("COMMON", "LAGVESIKRDTPNQFYMHCW", 99.91)):
        table = dict(zip(files.AMINO_ACIDS, getattr(natural, name), strict=True))
        assert "".join(sorted(table, key=lambda letter: -table[letter])) == order
        assert sum(table.values()) == pytest.approx(total)
    charged = {letter: x for letter, x in zip(files.AMINO_ACIDS, natural.CHARGE, strict=True) if x}
    assert charged == dict(D=-1, E=-1, H=0.3, K=1, R=1)


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


def test_properties_are_scaled_each_by_itself():
    properties, like, common = natural.tables(torch.device("cpu"))
    assert properties.shape == (20, 3) and torch.allclose(properties.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(properties.square().mean(0), torch.ones(3))
    assert like.tolist() == [1, -1, -1] and common.exp().tolist() == pytest.approx(natural.COMMON)


def test_buried_columns_like_hydrophobic_residues_and_some_are_conserved(draw):
    """Residues in a heap, and as many far from each other."""
    coords = torch.cat([torch.rand(400, 3), 100 + 30 * torch.arange(400.0)[:, None].expand(-1, 3)])[None]
    logits = natural.preferences(draw, torch.cdist(coords, coords))[0]
    properties, _, common = natural.tables(torch.device("cpu"))
    assert logits.shape == (800, 20)
    liked = (logits - common) @ properties[:, 0]
    assert liked[:400].mean() > 4 and liked[400:].mean() < -4
    second, most = (logits - common).sort(1).values[:, -2:].T
    assert 0.06 < (most - second > 2.5).float().mean() < 0.14


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


def test_children_have_what_their_parents_have():
    x = torch.arange(12).view(2, 3, 2)
    assert natural.inherit(x, torch.tensor([[2, 0, 2, 1], [1, 1, 1, 1]])).tolist() == [
        [[4, 5], [0, 1], [4, 5], [2, 3]], [[8, 9]] * 4]
    flat = torch.arange(6).view(2, 3)
    assert natural.inherit(flat, torch.tensor([[2], [0]])).tolist() == [[2], [3]]


def test_gaps_begin_by_their_rate_and_are_two_long(draw):
    rate = torch.zeros(2, 1, 400)
    rate[1, :, 100:] = 0.01
    gaps = natural.begin_gaps(draw, rate, 200)
    assert gaps.shape == (2, 200, 400) and not gaps[0].any() and not gaps[1, :, :100].any()
    begins = (gaps[1] & ~gaps[1].roll(1, 1)).sum().item()
    assert begins / (200 * 300) == pytest.approx(0.01, rel=0.15)
    assert gaps.sum().item() / begins == pytest.approx(natural.GAP_LENGTH, rel=0.1)
    assert natural.begin_gaps(draw, torch.ones(1, 1, 7), 3).all()


def test_fragments_lack_one_end_and_families_lack_ends(draw, monkeypatch):
    monkeypatch.setattr(natural, "FLANKS", 0.0)
    missing = natural.missing_ends(draw, 2, 4000, 30, "cpu").view(-1, 30)
    cut = missing[missing.any(1)]
    assert len(cut) / 8000 == pytest.approx(natural.FRAGMENTS, rel=0.2) and cut.sum(1).max() <= 15
    assert (cut[:, 0] ^ cut[:, -1]).all() and (cut.diff(dim=1).sum(1) == 1).all()  # one stretch at one end
    assert 0.35 < cut[:, 0].float().mean() < 0.65 and cut.sum(1).float().mean() > 6
    monkeypatch.setattr(natural, "FLANKS", 0.3)
    monkeypatch.setattr(natural, "FRAGMENTS", 0.0)
    flanks = natural.missing_ends(draw, 3000, 2, 60, "cpu")
    assert torch.equal(flanks[:, 0], flanks[:, 1])
    for share, run in ((0.3, flanks[:, 0]), (0.3 * math.exp(-1 / 6), flanks[:, 0].flip(1))):
        assert run[:, 0].float().mean().item() == pytest.approx(share, abs=0.025)
        assert run.cummin(1).values.sum(1)[run[:, 0]].float().mean().item() == pytest.approx(6.5, abs=1)


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
